"""Connecting: errors that name the place and not the password, and an end to every wait."""

import contextlib
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Generator, Iterator
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from rowlock.db.connect import connect, describe, shut
from rowlock.errors import RowlockError, Unavailable, UsageError
from tests.support.pgproxy import PgProxy
from tests.support.postgres import Database
from tests.support.waiting import SLACK_SECONDS, wait_until

PASSWORD = "s3cr3t%/word"  # what must not be shown


@pytest.fixture
def closed_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: refused, and nobody else gets it
        yield taken.getsockname()[1]


def shown(dsn: str, kind: type[RowlockError] = Unavailable) -> str:
    with pytest.raises(kind) as caught:
        connect(dsn, application_name="test")
    text = str(caught.value)
    assert "\n" not in text
    return text


# -- errors ----------------------------------------------------------------------------------------


def test_an_error_names_host_port_and_database(closed_port: int) -> None:
    text = shown(f"postgresql://me:pw@127.0.0.1:{closed_port}/settlement?connect_timeout=2")

    assert f"database settlement at 127.0.0.1:{closed_port}" in text
    assert "refused" in text


def test_who_named_no_database_is_told_how(
    closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PGHOST", "PGHOSTADDR", "PGSERVICE", "PGDATABASE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PGPORT", str(closed_port))

    assert shown("").endswith("; name another in ROWLOCK_DSN or --dsn")
    assert "ROWLOCK_DSN" not in shown("host=127.0.0.1")


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://me:s3cr3t%25%2Fword@127.0.0.1:{port}/d",
        "host=127.0.0.1 port={port} user=me password='s3cr3t%/word' dbname=d",
        # Mistakes: these cannot be read, and libpq would quote them.
        "postgresql://me:s3cr3t%/word@127.0.0.1:{port}/d",
        "postgresql//me:s3cr3t%/word@127.0.0.1:{port}/d",
        "host=127.0.0.1 password s3cr3t%/word",
        "host=127.0.0.1 password='s3cr3t%/word",
        "postgres:me:s3cr3t%/word@127.0.0.1",
        # An unescaped @: libpq takes the rest of the password for the host.
        "postgresql://me:x@s3cr3t@127.0.0.1:{port}/d",
    ],
)
def test_no_error_shows_a_password(dsn: str, closed_port: int) -> None:
    with pytest.raises(RowlockError) as caught:
        connect(dsn.format(port=closed_port), application_name="test")

    # With its causes, which a traceback would show.
    text = "".join(traceback.format_exception(caught.value, limit=0))
    assert "s3cr3t" not in text
    assert "%/word" not in text


def test_what_cannot_be_read_is_told_with_a_remedy() -> None:
    form = "postgresql://user:password@host:port/database"
    assert form in shown("postgresql//me@host/d", UsageError)
    assert "%40" in shown("postgresql://me:a@b@host/d", UsageError)


def test_a_wrong_password_is_an_error_in_one_line(database: Database) -> None:
    given = conninfo_to_dict(database.dsn_as("rowlock_node"))
    dsn = f"host={given['host']} port={given['port']} user={given['user']} password=wr0ng dbname=x"

    text = shown(dsn)

    assert f"at {given['host']}:{given['port']}" in text
    assert "wr0ng" not in text


def test_a_host_that_does_not_exist(closed_port: int) -> None:
    assert "nowhere.invalid:5432" in shown("postgresql://nowhere.invalid/d?connect_timeout=3")


def test_a_server_that_says_nothing_is_given_up_in_bounded_time() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        began = time.monotonic()

        text = shown(f"postgresql://me@127.0.0.1:{port}/d?connect_timeout=2")

    assert f"127.0.0.1:{port}" in text
    assert time.monotonic() - began < 2 + SLACK_SECONDS


def test_a_server_that_falls_silent_after_the_log_in_is_given_up_in_bounded_time(
    database: Database,
) -> None:
    """libpq's connect_timeout is over by then: whoever waits for an answer without a bound of its own
    hangs for ever, and looks as if it were connecting."""
    with PgProxy(database.dsn) as proxy:
        proxy.blackhole(at=b"set_config")
        rescue = threading.Timer(20, proxy.pass_on)  # so that the test fails instead of hanging
        rescue.start()
        began = time.monotonic()

        text = shown(make_conninfo(proxy.dsn, connect_timeout=2))

        assert time.monotonic() - began < 2 + SLACK_SECONDS
        rescue.cancel()
        assert f"127.0.0.1:{proxy.port}" in text


def test_a_failed_login_leaves_no_connection_behind(database: Database) -> None:
    """Refused after the login: the connection must be closed, not left to the collector."""
    with database.connect() as admin:
        login = database.cluster.login("rowlock_reader")
        admin.execute(
            sql.SQL("ALTER ROLE {} IN DATABASE {} SET default_transaction_read_only = on").format(
                sql.Identifier(login), sql.Identifier(database.name)
            )
        )
        assert "read-only" in shown(database.dsn_as("rowlock_reader"))
        wait_until(
            lambda: (
                admin.execute(
                    "SELECT count(*) FROM pg_stat_activity WHERE usename = %s", [login]
                ).fetchone()
                == (0,)
            ),
            what="the refused connection to be gone",
        )
        admin.execute(
            sql.SQL("ALTER ROLE {} IN DATABASE {} RESET ALL").format(
                sql.Identifier(login), sql.Identifier(database.name)
            )
        )


def test_an_address_for_people_never_holds_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    monkeypatch.setenv("PGHOST", "db.example")
    monkeypatch.setenv("PGPORT", "6432")
    monkeypatch.setenv("PGDATABASE", "settlement")

    assert describe("") == "database settlement at db.example:6432"
    assert describe(f"password='{PASSWORD}' host=other") == "database settlement at other:6432"


# -- the session ---------------------------------------------------------------------------------


def setting(connection: psycopg.Connection[tuple[object, ...]], name: str) -> object:
    row = connection.execute("SELECT current_setting(%s)", [name]).fetchone()
    assert row is not None
    return row[0]


def test_a_session_is_named_in_utc_and_never_idle_in_a_transaction(database: Database) -> None:
    with connect(
        database.dsn, application_name="rowlock test", idle_in_transaction_seconds=1.5
    ) as db:
        assert db.autocommit
        assert setting(db, "application_name") == "rowlock test"
        assert setting(db, "TimeZone") == "UTC"
        assert setting(db, "idle_in_transaction_session_timeout") == "1500ms"


def test_a_session_does_not_take_over_defaults_that_would_break_the_protocol(
    database: Database,
) -> None:
    """A business database may have them, for reasons of its own."""
    with database.connect() as admin:
        for default in (
            "default_transaction_isolation = 'serializable'",
            "synchronous_commit = off",
            "jit = on",
            "TimeZone = 'Asia/Tokyo'",
        ):
            alter = sql.SQL("ALTER DATABASE {} SET {}").format(
                sql.Identifier(database.name), sql.SQL(default)
            )
            admin.execute(alter)

    with connect(database.dsn, application_name="test") as db:
        assert setting(db, "default_transaction_isolation") == "read committed"
        assert setting(db, "synchronous_commit") == "on"
        assert setting(db, "jit") == "off"
        assert setting(db, "TimeZone") == "UTC"


def test_every_text_can_be_sent_whatever_the_environment_says(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")

    with connect(database.dsn, application_name="test") as db:
        assert db.execute("SELECT %s", ["Łódź …"]).fetchone() == ("Łódź …",)


def test_a_stronger_promise_of_the_server_is_kept(database: Database) -> None:
    with database.connect() as admin:
        admin.execute(
            sql.SQL("ALTER DATABASE {} SET synchronous_commit = remote_apply").format(
                sql.Identifier(database.name)
            )
        )

    with connect(database.dsn, application_name="test") as db:
        assert setting(db, "synchronous_commit") == "remote_apply"


def test_the_server_notices_a_client_that_vanished(database: Database) -> None:
    """By default after two hours, with all the locks it held."""
    with connect(database.dsn, application_name="test") as db:
        if setting(db, "tcp_keepalives_idle") == "0":  # a Unix socket: it needs none
            given = conninfo_to_dict(database.dsn)
            assert str(given.get("host", "")).startswith("/")
            return
        assert (setting(db, "tcp_keepalives_idle"), setting(db, "tcp_keepalives_interval")) == (
            *("5", "2"),
        )
        assert setting(db, "tcp_keepalives_count") == "3"
        # In a statement, and with an answer on its way, keepalives do not help.
        assert setting(db, "client_connection_check_interval") == "2s"
        assert setting(db, "tcp_user_timeout") == "10000"


def test_an_idle_transaction_is_ended_by_the_server(database: Database) -> None:
    with connect(database.dsn, application_name="test", idle_in_transaction_seconds=0.1) as db:
        db.execute("BEGIN")
        with database.connect() as admin:
            wait_until(
                lambda: (
                    not admin.execute(
                        "SELECT FROM pg_stat_activity WHERE pid = %s", [db.info.backend_pid]
                    ).fetchall()
                ),
                what="the server to end the session",
            )
        with pytest.raises(psycopg.errors.IdleInTransactionSessionTimeout):
            db.execute("SELECT 1")


def test_dropped_packets_are_noticed_by_every_connection(database: Database) -> None:
    """Without a word from a peer that vanished, keepalives notice it for an idle connection, and
    tcp_user_timeout for a request that is on its way. (Reported as psycopg2#561 and citus#1135:
    clients that wait for a quarter of an hour.)"""
    with (
        connect(database.dsn, application_name="test") as db,
        socket.socket(fileno=os.dup(db.pgconn.socket)) as tcp,
    ):
        given = {
            name: tcp.getsockopt(level, option)
            for name, level, option in (
                ("keepalive", socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                ("idle", socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
                ("interval", socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
                ("count", socket.IPPROTO_TCP, socket.TCP_KEEPCNT),
                ("user_timeout", socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
            )
        }
    assert given == {
        "keepalive": 1,
        "idle": 5,
        "interval": 2,
        "count": 3,
        "user_timeout": 10_000,
    }


def test_dropped_packets_end_every_wait_in_the_time_that_is_set(database: Database) -> None:
    """The server's machine is gone, or a firewall has forgotten the connection: for an answer, for the
    acknowledgement of a request on an idle connection, and for a new connection nobody waits longer than
    keepalives, tcp_user_timeout and connect_timeout say. Shorter times here than by default."""
    seconds: dict[str, float] = {}

    def ask(db: psycopg.Connection[Any], text: LiteralString) -> None:
        with pytest.raises(psycopg.OperationalError):
            db.execute(text)
        seconds[text] = time.monotonic() - dropped

    asleep = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'sleeps' AND wait_event = 'PgSleep'"
    with PgProxy(database.dsn) as proxy:
        times = {"keepalives_idle": 1, "keepalives_interval": 1, "keepalives_count": 2}
        dsn = make_conninfo(proxy.dsn, **times, tcp_user_timeout=2500, connect_timeout=3)
        waiting, idle = (connect(dsn, application_name=name) for name in ("sleeps", "idle"))
        threads = [
            threading.Thread(target=ask, args=(waiting, "SELECT pg_sleep(100)"), daemon=True),
            threading.Thread(target=ask, args=(idle, "SELECT"), daemon=True),
        ]
        threads[0].start()
        wait_until(lambda: database.value(asleep) == 1, what="the server has the statement")
        dropped = time.monotonic()
        proxy.drop()
        threads[1].start()
        assert f"127.0.0.1:{proxy.port}" in shown(dsn)
        seconds["connect"] = time.monotonic() - dropped
        for thread in threads:
            thread.join(3 + SLACK_SECONDS)
    assert sorted(seconds) == ["SELECT", "SELECT pg_sleep(100)", "connect"]
    assert max(seconds.values()) < 3 + SLACK_SECONDS, seconds


# -- an end to every wait --------------------------------------------------------------------------


@contextlib.contextmanager
def frozen(pid: int) -> Generator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_shut_frees_a_thread_that_waits_for_a_frozen_server(database: Database) -> None:
    """statement_timeout is the server's, keepalives are answered by its kernel: neither helps."""
    connection = connect(database.dsn, application_name="test")
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            connection.execute("SELECT 1")
        except psycopg.Error as error:
            ended.append(error)

    with frozen(connection.info.backend_pid):
        waiting = threading.Thread(target=wait)
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive(), "the server was not frozen"

        shut(connection)
        waiting.join(5)

        assert not waiting.is_alive()
    assert isinstance(ended[0], psycopg.OperationalError)
    connection.close()


def test_shut_of_a_closed_connection_does_nothing(database: Database) -> None:
    connection = connect(database.dsn, application_name="test")
    connection.close()

    shut(connection)


def test_shut_twice_is_once(database: Database) -> None:
    connection = connect(database.dsn, application_name="test")

    shut(connection)
    shut(connection)

    with pytest.raises(psycopg.OperationalError):
        connection.execute("SELECT 1")
    connection.close()
