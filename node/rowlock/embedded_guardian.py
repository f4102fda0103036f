"""The process that owns an embedded PostgreSQL: it makes, starts, stops and removes it.

It runs beside the program that wants the database (see `embedded.py`) and outlives it by a moment:
when that program ends, in whatever way, the pipe between them closes, and this process takes the
server down and a throw-away folder away. It is run by its path and imports only the standard
library, so that it starts in milliseconds and needs no package. It has a session of its own: a
Ctrl-C in the terminal must not take the database from under nodes that are still draining.

Requests arrive as JSON lines on standard input, replies leave on standard output:
    {"do": "open", …Plan}        → {"folder", "password"}
    {"do": "up"}                 → {"pid", "port"}
    {"do": "down", "mode": "…"}  → {}
    {"do": "status"}             → {"pid" or null}
    {"do": "close", "mode": "…"} → {} and the end of this process
Every reply may be {"error": text, "kind": "usage" | "failed" | "port"} instead.
"""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import json
import os
import pwd
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

# How often conditions that nobody signals are looked at.
POLL_SECONDS = 0.01
# A look at whether our parent still lives, beside the pipe: a child that it forked without exec
# may hold the pipe open.
PARENT_POLL_SECONDS = 0.5
START_SECONDS = 60.0
STOP_SECONDS = 60.0
# PostgreSQL itself kills children that ignore an immediate shutdown after 5 s.
IMMEDIATE_SECONDS = 8.0
# How long a folder whose last user has just died is waited for.
RELEASE_SECONDS = 15.0
LOG_LINES = 12

SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
# mkdtemp makes a folder of an unguessable name, for us alone.
PUBLIC_FOLDERS = ("/tmp", "/var/tmp")  # noqa: S108
# Ports that no outgoing connection takes (Linux gives those out from 32768): a client that connects
# in a loop to such a port while the server is down ends up connected to itself.
PORTS = range(20_000, 32_000)
PORT_ATTEMPTS = 20
# A unix socket's path is limited to 107 bytes, of which ".s.PGSQL.65535.lock" takes 20.
SOCKET_DIR_BYTES = 86

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class GuardianError(Exception):
    """What the other side must be told; `kind` says which error it becomes there."""

    def __init__(self, text: str, *, kind: str = "failed") -> None:
        super().__init__(text)
        self.kind = kind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which server is wanted."""

    binaries: str
    """Folder with `postgres` and `initdb`."""
    package: str | None
    """Folder to copy, with its sibling *.libs, where another user cannot read `binaries`."""
    folder: str | None
    """Folder to keep the data in; None is a throw-away one."""
    port: int | None
    """TCP port; None takes the one of the last run, or a free one."""
    addresses: list[str]
    """Where to listen beside 127.0.0.1. If any, whoever knows a password is let in from anywhere."""
    options: dict[str, str]
    """Server settings, as in postgresql.conf."""
    fsync: bool
    """False gives up the data's safety against a crash of the machine for speed."""
    superuser: str
    """Role that initdb makes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The user that PostgreSQL runs as. It refuses root, so root becomes nobody.

    All three are None, as `subprocess` wants it, where nothing changes.
    """

    user: int | None = None
    group: int | None = None
    groups: list[int] | None = None

    @classmethod
    def choose(cls) -> Identity:
        """Ourselves, or nobody for root."""
        if os.geteuid() != 0:
            return cls()
        try:
            nobody = pwd.getpwnam("nobody")
        except KeyError:
            raise GuardianError(
                "PostgreSQL refuses to run as root, and this machine has no user nobody to run it "
                "as: run this command as a normal user",
                kind="usage",
            ) from None
        return cls(user=nobody.pw_uid, group=nobody.pw_gid, groups=[])

    def own(self, path: Path) -> None:
        """Give a file or folder to this user."""
        if self.user is not None and self.group is not None:
            os.chown(path, self.user, self.group)

    def may(self, check: Callable[[], bool]) -> bool:
        """Whether a check, made by a child that is this user, holds."""
        if self.user is None or self.group is None:
            return check()
        child = os.fork()
        if child == 0:
            held = False
            try:
                os.setgroups([])
                os.setgid(self.group)
                os.setuid(self.user)
                held = check()
            finally:
                os._exit(0 if held else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- the folder --------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Home:
    """The folder of one server. Root's files lie beside, never inside, what nobody can write."""

    path: Path
    throw_away: bool
    lock: int = -1

    @property
    def marker(self) -> Path:
        """Says that the folder is ours, and is locked while it is in use."""
        return self.path / "rowlock.lock"

    @property
    def data(self) -> Path:
        """The database cluster, of PostgreSQL's user."""
        return self.path / "data"

    @property
    def sockets(self) -> Path:
        """Of PostgreSQL's user."""
        return self.path / "socket"

    @property
    def log(self) -> Path:
        """The server's log of the present start."""
        return self.path / "server.log"

    @property
    def note(self) -> Path:
        """What a later run must know."""
        return self.path / "server.json"

    def remove(self) -> None:
        """Take a throw-away folder away."""
        if self.throw_away:
            shutil.rmtree(self.path, ignore_errors=True)


def make_home(plan: Plan, identity: Identity) -> Home:
    """Make or open the folder, and hold its lock."""
    home = _kept(plan.folder, identity) if plan.folder else _throw_away(identity)
    try:
        home.lock = _lock(home)
        for part in (home.data, home.sockets):
            part.mkdir(mode=0o700, exist_ok=True)
            identity.own(part)
    except BaseException:
        home.remove()
        raise
    return home


def _throw_away(identity: Identity) -> Home:
    # A TMPDIR inside a private folder is no use to another user.
    for parent in dict.fromkeys([tempfile.gettempdir(), *PUBLIC_FOLDERS]):
        try:
            path = Path(tempfile.mkdtemp(prefix="rowlock-", dir=parent))
        except OSError:
            continue
        if identity.user is not None:
            path.chmod(0o711)
        if identity.may(lambda path=path: os.access(path, os.X_OK)):  # type: ignore[misc]
            return Home(path, throw_away=True)
        path.rmdir()
    raise GuardianError(
        f"no folder for temporary files can be used by uid {identity.user}: set TMPDIR to one",
        kind="usage",
    )


def _kept(folder: str, identity: Identity) -> Home:
    path = Path(folder)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = {entry.name for entry in path.iterdir()}
    except OSError as problem:
        raise GuardianError(f"the folder {path} cannot be used: {problem}", kind="usage") from None
    home = Home(path, throw_away=False)
    if found and home.marker.name not in found:
        raise GuardianError(
            f"the folder {path} holds other things than a rowlock database "
            f"(such as {min(found)}): choose an empty or a new one",
            kind="usage",
        )
    owner = path.stat().st_uid
    if owner != os.geteuid():
        raise GuardianError(
            f"the folder {path} belongs to uid {owner}, but this process is uid {os.geteuid()}: "
            "run as that user or choose another folder",
            kind="usage",
        )
    path.chmod(0o711 if identity.user is not None else 0o700)
    if not identity.may(lambda: os.access(path, os.X_OK)):
        raise GuardianError(
            f"PostgreSQL refuses to run as root, and the user nobody cannot reach {path}, since a "
            "folder above it is private: choose a folder such as /var/lib/rowlock",
            kind="usage",
        )
    return home


def _lock(home: Home) -> int:
    """Hold the folder for us and for the server's processes, which inherit this descriptor.

    So whoever gets the lock knows that no process of an earlier server is left, and that a
    postmaster.pid found there is stale.
    """
    lock = os.open(home.marker, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + RELEASE_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            user = os.pread(lock, 32, 0).decode() or "?"
            if (user.isdigit() and _alive(int(user))) or time.monotonic() > until:
                os.close(lock)
                raise GuardianError(
                    f"the folder {home.path} is in use by process {user}: stop that one or choose "
                    "another folder",
                    kind="usage",
                ) from None
            # Its user is dead and its server on the way out.
            time.sleep(POLL_SECONDS)
            continue
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getppid()).encode(), 0)
        return lock


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What a later run must know about a kept server; only its owner can read it."""

    password: str
    port: int
    complete: bool
    """False while initdb is at work."""

    @classmethod
    def read(cls, path: Path) -> Note:
        """The note of an earlier run."""
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        """Replace the note as a whole, so that a kill cannot leave half of one."""
        new = path.with_suffix(".new")
        _write_private(new, json.dumps(dataclasses.asdict(self)))
        new.replace(path)


# -- the server --------------------------------------------------------------------------------


class Guardian:
    """One server, from its first file to its last process."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._identity: Identity | None = None
        self._home: Home | None = None
        self._binaries = Path()
        self._port = 0
        self._port_is_fixed = False
        self._server: subprocess.Popen[bytes] | None = None

    def open(self, plan: Plan) -> dict[str, Any]:
        """Make the folder and the database cluster in it, as far as they are missing."""
        self._plan = plan
        self._identity = Identity.choose()
        self._home = home = make_home(plan, self._identity)
        self._binaries = self._usable_binaries()
        note = self._initialise()
        self._admit_others()
        self._port_is_fixed = plan.port is not None
        self._port = plan.port or note.port
        return {"folder": str(home.path), "password": note.password}

    def up(self) -> dict[str, Any]:
        """Start the server and wait until it accepts connections.

        The port of the first start is kept for all later ones.
        """
        if self._alive():
            raise GuardianError("the server runs already", kind="usage")
        _, _, home = self._known()
        for _ in range(PORT_ATTEMPTS):
            if not self._port_is_fixed and not (self._port and _is_free(self._port)):
                self._port = _free_port()
            try:
                pid = self._start()
            except GuardianError as problem:
                # Somebody was quicker to take the port that was free a moment ago.
                if problem.kind == "port" and not self._port_is_fixed:
                    self._port = 0
                    continue
                raise
            self._port_is_fixed = True
            dataclasses.replace(Note.read(home.note), port=self._port).write(home.note)
            return {"pid": pid, "port": self._port}
        raise GuardianError(f"found no free port in {PORT_ATTEMPTS} attempts")

    def _start(self) -> int:
        home, server = self._spawn()
        until = time.monotonic() + START_SECONDS
        while not _ready(home.data / "postmaster.pid", server.pid):
            if server.poll() is not None:
                self._explain_start(f"ended with status {server.returncode}")
            if time.monotonic() > until:
                self._end("immediate")
                self._explain_start(f"was not ready after {START_SECONDS:g} s")
            time.sleep(POLL_SECONDS)
        return server.pid

    def down(self, mode: str) -> dict[str, Any]:
        """Stop the server; "smart", "fast" and "immediate" mean what they mean to pg_ctl."""
        self._end(mode)
        return {}

    def status(self) -> dict[str, Any]:
        """The process id of the running server."""
        return {"pid": self._server.pid if self._server and self._alive() else None}

    def close(self, mode: str) -> dict[str, Any]:
        """Stop the server and remove what is not to be kept."""
        try:
            self._end(mode)
            _end_adopted_children()
        finally:
            if self._home is not None:
                self._home.remove()
        return {}

    def _usable_binaries(self) -> Path:
        """The given binaries, or a copy where PostgreSQL's user cannot read them."""
        plan, identity, home = self._known()
        binaries = Path(plan.binaries)
        if self._runs(binaries / "initdb") and self._runs(binaries / "postgres"):
            return binaries
        if identity.user is None:
            raise GuardianError(f"the programs in {binaries} do not run on this machine")
        package = Path(plan.package) if plan.package else binaries.parent
        libraries = package.with_name(package.name + ".libs")
        copy = home.path / "binaries"
        # Always anew: the package may have been upgraded since a kept folder was made.
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir(mode=0o755)
        for source in (package, libraries):
            if source.is_dir():
                shutil.copytree(source, copy / source.name, symlinks=True)
        _open_for_reading(copy)
        copied = copy / package.name / binaries.relative_to(package)
        if not self._runs(copied / "initdb"):
            raise GuardianError(
                f"the programs in {binaries} cannot be run by uid {identity.user}, nor can a copy "
                f"of them in {copy} (is that file system mounted noexec?)"
            )
        return copied

    def _runs(self, program: Path) -> bool:
        _, identity, _ = self._known()
        try:
            return (
                subprocess.run(
                    [program, "--version"],
                    env=_environment(),
                    cwd="/",
                    check=False,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    user=identity.user,
                    group=identity.group,
                    extra_groups=identity.groups,
                ).returncode
                == 0
            )
        except OSError:
            return False

    def _initialise(self) -> Note:
        """Make the cluster unless it is there."""
        _, identity, home = self._known()
        note = Note.read(home.note) if home.note.exists() else None
        if note and note.complete:
            # The lock is ours, so no process of an earlier server is left to own this file.
            (home.data / "postmaster.pid").unlink(missing_ok=True)
            return note
        leftovers = list(home.data.iterdir())
        if leftovers and note is None:
            raise GuardianError(
                f"{home.data} holds a database, but {home.note}, which knows its password, is "
                "missing: put it back or choose another folder",
                kind="usage",
            )
        for entry in leftovers:  # of an initdb that was killed
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        note = Note(password=secrets.token_hex(16), port=0, complete=False)
        note.write(home.note)
        with _password_file(home, note.password, identity) as file:
            self._initdb(file)
        note = dataclasses.replace(note, complete=True)
        note.write(home.note)
        return note

    def _initdb(self, password_file: Path) -> None:
        plan, identity, home = self._known()
        ended = subprocess.run(
            [
                self._binaries / "initdb",
                f"--pgdata={home.data}",
                f"--username={plan.superuser}",
                f"--pwfile={password_file}",
                # Others on this machine can reach the port too, so nobody is trusted.
                "--auth=scram-sha-256",
                # The same order and the same messages on every machine.
                "--encoding=UTF8",
                "--locale=C",
                *([] if plan.fsync else ["--no-sync"]),
            ],
            env=_environment(),
            cwd="/",
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            user=identity.user,
            group=identity.group,
            extra_groups=identity.groups,
        )
        if ended.returncode != 0:
            lines = ended.stdout.decode(errors="replace").strip().splitlines()
            raise GuardianError("initdb failed: " + " / ".join(lines[-LOG_LINES:]))

    def _admit_others(self) -> None:
        """Let other machines log in, where the server listens to them; initdb admits only this one."""
        plan, _, home = self._known()
        rules = home.data / "pg_hba.conf"
        rule = "host all all all scram-sha-256\n"
        if plan.addresses and not rules.read_text().endswith(rule):
            with rules.open("a") as file:
                file.write(rule)

    def _spawn(self) -> tuple[Home, subprocess.Popen[bytes]]:
        plan, identity, home = self._known()
        settings = {
            "listen_addresses": ",".join(["127.0.0.1", *plan.addresses]),
            "port": str(self._port),
            "unix_socket_directories": self._socket_dir(),
            **({} if plan.fsync else {"fsync": "off", "full_page_writes": "off"}),
            **plan.options,
        }
        if home.log.exists():
            home.log.replace(home.log.with_name("server.log.old"))
        log = os.open(home.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            server = subprocess.Popen(
                [
                    self._binaries / "postgres",
                    "-D",
                    home.data,
                    *(
                        word
                        for name, value in settings.items()
                        for word in ("-c", f"{name}={value}")
                    ),
                ],
                env=_environment(),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[home.lock],
                # We have one thread, so running Python between fork and exec is safe.
                preexec_fn=_die_with_parent(os.getpid()),  # noqa: PLW1509
                user=identity.user,
                group=identity.group,
                extra_groups=identity.groups,
            )
        finally:
            os.close(log)
        self._server = server
        return home, server

    def _explain_start(self, what: str) -> NoReturn:
        _, _, home = self._known()
        text = home.log.read_text(errors="replace")
        raise GuardianError(
            f"PostgreSQL {what}: " + " / ".join(text.strip().splitlines()[-LOG_LINES:]),
            kind="port" if "could not bind" in text else "failed",
        )

    def _alive(self) -> bool:
        return self._server is not None and self._server.poll() is None

    def _end(self, mode: str) -> None:
        """End the postmaster, then whatever of its children is left."""
        if self._server is None:
            return
        if self._alive():
            self._ask(SIGNALS[mode], STOP_SECONDS if mode != "immediate" else IMMEDIATE_SECONDS)
        if self._alive():
            self._ask(signal.SIGQUIT, IMMEDIATE_SECONDS)
        if self._alive():
            self._server.kill()
        self._server.wait()
        self._server = None
        _end_adopted_children()

    def _ask(self, number: signal.Signals, seconds: float) -> None:
        assert self._server is not None
        self._server.send_signal(number)
        # A server that somebody has stopped cannot act on it otherwise.
        self._server.send_signal(signal.SIGCONT)
        try:
            self._server.wait(seconds)
        except subprocess.TimeoutExpired:
            pass

    def _socket_dir(self) -> str:
        _, _, home = self._known()
        path = str(home.sockets)
        if len(os.fsencode(path)) > SOCKET_DIR_BYTES:
            return ""
        # The setting is a list: quotes keep a comma in the path from splitting it.
        return '"' + path.replace('"', '""') + '"'

    def _known(self) -> tuple[Plan, Identity, Home]:
        assert self._plan is not None
        assert self._identity is not None
        assert self._home is not None
        return self._plan, self._identity, self._home


def _environment() -> dict[str, str]:
    """For the server's programs: nothing of ours, and UTC, which spares initdb a long search."""
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}


def _ready(pid_file: Path, pid: int) -> bool:
    """Whether the postmaster says so: line 1 is its pid, line 8 its state."""
    try:
        lines = pid_file.read_text().splitlines()
    except OSError:
        return False
    return len(lines) >= 8 and lines[0].strip() == str(pid) and lines[7].strip() == "ready"


def _free_port() -> int:
    for _ in range(PORT_ATTEMPTS):
        port = secrets.choice(PORTS)
        if _is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _write_private(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)


@contextmanager
def _password_file(home: Home, password: str, identity: Identity) -> Generator[Path]:
    path = home.path / "password"
    _write_private(path, password)
    try:
        identity.own(path)
        yield path
    finally:
        path.unlink()


def _open_for_reading(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))


def _prctl(option: int, value: int) -> None:
    """Linux only. Elsewhere the pipe to the parent is the only, and in practice sufficient, belt."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with_parent(parent: int) -> Callable[[], None]:
    def arrange() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)
        if os.getppid() != parent:
            os._exit(1)

    return arrange


def _end_adopted_children() -> None:
    """Kill backends that outlived their postmaster: as a subreaper we are their parent now."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            for child in children:
                try:
                    os.kill(int(child), signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(POLL_SECONDS)


# -- the conversation --------------------------------------------------------------------------


class _Ended(BaseException):
    """Our parent is gone, or somebody wants us to end."""


def _requests(parent: int) -> Iterator[Mapping[str, Any]]:
    buffer = b""
    while True:
        readable, _, _ = select.select([0], [], [], PARENT_POLL_SECONDS)
        if os.getppid() != parent:
            return
        if not readable:
            continue
        data = os.read(0, 65536)
        if not data:
            return
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            yield json.loads(line)


def _answer(guardian: Guardian, request: Mapping[str, Any]) -> dict[str, Any]:
    arguments = dict(request)
    verb = arguments.pop("do")
    try:
        if verb == "open":
            return guardian.open(Plan(**arguments))
        method: Callable[..., dict[str, Any]] = getattr(guardian, verb)
        return method(**arguments)
    except GuardianError as problem:
        return {"error": str(problem), "kind": problem.kind}
    except OSError as problem:
        return {"error": f"{type(problem).__name__}: {problem}", "kind": "failed"}


def _end(_signal: int, _frame: object) -> None:
    # From here on nothing may interrupt the cleaning, a second signal least of all.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Ended


def main() -> None:
    """Serve the process that started this one until it ends."""
    parent = int(sys.argv[1])
    os.chdir("/")  # hold no file system that somebody may want to unmount
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    guardian = Guardian()
    try:
        for request in _requests(parent):
            reply = _answer(guardian, request)
            os.write(1, json.dumps(reply).encode() + b"\n")
            if request["do"] == "close":
                return
    except (_Ended, BrokenPipeError):
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        guardian.close("immediate")


if __name__ == "__main__":
    main()
