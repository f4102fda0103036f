"""Connections to PostgreSQL that fail in bounded time and say in one line why."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, LiteralString, TypeAlias

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from rowlock.errors import Unavailable, UsageError

DEFAULTS: Final[dict[str, Any]] = {
    "connect_timeout": 5,
    # A peer that vanished without a word is noticed within seconds, not hours.
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
    "target_session_attrs": "read-write",
}

NOBODY_WAITS: Final[LiteralString] = (
    "CASE WHEN version() ~ 'linux'"
    " THEN set_config('client_connection_check_interval', '2000', false) END"
)
"""A statement that nobody waits for any more ends, with its locks; where the server's system can tell."""

EitherConnection: TypeAlias = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]

READ_ONLY_SQL_TRANSACTION: Final = "25006"

SESSION: Final[LiteralString] = (
    # Behind a pooler each statement may run in another session: what is set in one is lost for us, and
    # found by a stranger.
    "SELECT CASE WHEN pg_backend_pid() = %(pid)s THEN ARRAY["
    # The server's keepalives as well: of a client that vanished it otherwise keeps the
    # transaction, with all its locks, for two hours. A Unix socket ignores them.
    " set_config('idle_in_transaction_session_timeout', %(idle)s, false),"
    " set_config('lock_timeout', %(lock)s, false),"
    " CASE WHEN %(statement)s::text <> '0'"
    "  THEN set_config('statement_timeout', %(statement)s, false) END,"
    f" {NOBODY_WAITS},"
    # Keepalives say nothing while an answer is on its way that nobody acknowledges: that takes Linux a
    # quarter of an hour to give up.
    " CASE WHEN version() ~ 'linux' THEN set_config('tcp_user_timeout', '10000', false) END,"
    " set_config('tcp_keepalives_idle', '5', false),"
    " set_config('tcp_keepalives_interval', '2', false),"
    " set_config('tcp_keepalives_count', '3', false),"
    # What the protocol rests on, whatever the database's own defaults are: each statement of a
    # function sees what was committed before it, and a claim or a start that was answered
    # outlives a crash of the server.
    " set_config('default_transaction_isolation', 'read committed', false),"
    " set_config('synchronous_commit', CASE current_setting('synchronous_commit')"
    "  WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END, false),"
    " set_config('jit', 'off', false),"
    " set_config('TimeZone', 'UTC', false)"
    "] END IS NULL AS pooled,"
    " current_setting('default_transaction_isolation') AS isolation,"
    " current_setting('synchronous_commit') AS synchronous_commit"
)
"""Sets up a new session, or tells that there is none of our own. Its row is for `check_session`.
Parameters: `session_parameters`."""


def session_parameters(
    backend_pid: int,
    *,
    idle_in_transaction_seconds: float = 0,
    lock_seconds: float = 0,
    statement_seconds: float = 0,
) -> dict[str, Any]:
    """The parameters of `SESSION`: times in seconds, 0 is no limit, for statements the login's own.

    :param backend_pid: what libpq was told. A pooler gives each client a number of its own.
    """
    return {
        "pid": backend_pid,
        "idle": str(int(idle_in_transaction_seconds * 1000)),
        "lock": str(int(lock_seconds * 1000)),
        "statement": str(int(statement_seconds * 1000)),
    }


def check_session(
    connection: EitherConnection, *, pooled: bool, isolation: str, synchronous_commit: str
) -> None:
    """Make sure that the protocol may rest on a session that it could not set up itself.

    The connection is known by it from then on (`is_pooled`).

    :raises UsageError: behind a pooler the login's defaults are such that a claim could be lost.
    """
    if not pooled:
        return
    if isolation != "read committed" or synchronous_commit == "off":
        raise UsageError(
            "the database is reached through a pooler, where rowlock cannot set up its sessions, and "
            f"this login's defaults are not safe (default_transaction_isolation = {isolation}, "
            f"synchronous_commit = {synchronous_commit}): ALTER ROLE … SET them to read committed and "
            "on, or connect to the server directly"
        )
    prepare_nothing(connection)


def connect(
    dsn: str,
    *,
    application_name: str,
    idle_in_transaction_seconds: float = 0,
    lock_seconds: float = 0,
) -> psycopg.Connection[tuple[Any, ...]]:
    """Open a connection in autocommit mode.

    :param dsn: a libpq connection string or URI, or "@" and the path of a file that holds one and is
        read now; what it leaves out comes from libpq's variables.
    :param application_name: shown in `pg_stat_activity`.
    :param idle_in_transaction_seconds: the server ends a session that is idle in a transaction for
        longer; 0 is no limit. The protocol never leaves a transaction open, so this is a second belt.
    :param lock_seconds: a statement that waits longer for a lock fails (55P03); 0 is no limit.
    :raises Unavailable: the database cannot be reached, or refuses the login.
    :raises UsageError: the connection string cannot be read, or it leads through a pooler to a login
        whose defaults are not safe.
    """
    options: dict[str, Any] = {
        **DEFAULTS,
        **parameters_of(dsn),
        "application_name": application_name,
        "client_encoding": "UTF8",  # or a name that PGCLIENTENCODING lacks would end the node
    }
    connection = None
    try:
        connection = psycopg.connect(make_conninfo(**options), autocommit=True)
        parameters = session_parameters(
            connection.info.backend_pid,
            idle_in_transaction_seconds=idle_in_transaction_seconds,
            lock_seconds=lock_seconds,
        )
        with ended_after(connection, float(options["connect_timeout"])):
            row = connection.execute(SESSION, parameters, prepare=False).fetchone()
    except psycopg.Error as error:
        if connection is not None:
            connection.close()
        named = dsn or any(os.environ.get(name) for name in ("PGHOST", "PGHOSTADDR", "PGSERVICE"))
        remedy = "" if named else "; name another in ROWLOCK_DSN or --dsn"
        raise Unavailable(f"{describe(dsn)}: {first_line(error)}{remedy}") from error
    assert row is not None, "a SELECT without FROM has one row"
    pooled, isolation, synchronous_commit = row
    try:
        check_session(
            connection, pooled=pooled, isolation=isolation, synchronous_commit=synchronous_commit
        )
    except UsageError:
        connection.close()
        raise
    return connection


def prepare_nothing(connection: EitherConnection) -> None:
    """Remember that there is a pooler in between, where a prepared statement is in another session."""
    connection.prepare_threshold = None


def is_pooled(connection: EitherConnection) -> bool:
    """Whether `connect` found a pooler in between: no statement may rely on the one before it."""
    return connection.prepare_threshold is None


@contextmanager
def ended_after(
    connection: psycopg.Connection[Any], seconds: float = DEFAULTS["connect_timeout"]
) -> Generator[None]:
    """Shut a connection that is being prepared for longer: a server may log us in and say no more.

    libpq's connect_timeout ends with the log-in, and nobody else breaks a connection that no one has
    been given yet. 0 or less is no limit, as in libpq.
    """
    timer = threading.Timer(seconds, shut, [connection])
    timer.daemon = True
    if seconds > 0:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def parameters_of(dsn: str) -> dict[str, Any]:
    """What a connection string says, under libpq's names.

    :param dsn: as for `connect`.
    :raises UsageError: it cannot be read. The error quotes neither the string nor libpq's complaint
        about it: both show the password.
    :raises Unavailable: its file cannot be read now.
    """
    try:
        given = conninfo_to_dict(_text_of(dsn))
    except psycopg.Error:
        raise UsageError(
            "the connection string of the database cannot be read: write"
            " postgresql://user:password@host:port/database, with % and / of the password as"
            " %25 and %2F, or \"host=… port=… dbname=… user=… password='…'\""
        ) from None
    if "@" in str(given.get("host", "")):
        raise UsageError(
            "the connection string of the database has an @ in its host, which is the rest of the"
            " password: write an @ of the password as %40"
        )
    return {key: value for key, value in given.items() if value is not None}


def _text_of(dsn: str) -> str:
    """The connection string itself; of a file what it says now, since a password may rotate."""
    if not dsn.startswith("@"):
        return dsn
    try:
        return Path(dsn[1:]).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Unavailable(f"the connection string in {dsn[1:]} cannot be read: {reason}") from None


def describe(dsn: str) -> str:
    """The database's address for people: host, port and name, never the password."""
    try:
        given = parameters_of(dsn)
    except (UsageError, Unavailable):
        return "database (the connection string cannot be read)"
    host = given.get("host") or os.environ.get("PGHOST") or "local socket"
    port = given.get("port") or os.environ.get("PGPORT") or "5432"
    name = given.get("dbname") or os.environ.get("PGDATABASE") or given.get("user") or "default"
    return f"database {name} at {host}:{port}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def shut(connection: EitherConnection) -> None:
    """End a connection from another thread, even while a statement waits on it for ever.

    A frozen server answers nothing, and neither statement_timeout nor keepalives end the wait of
    the client: shutting the socket down does.
    """
    try:
        duplicate = socket.socket(fileno=os.dup(connection.pgconn.socket))
    except (OSError, psycopg.Error):
        return  # closed already
    try:
        duplicate.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    finally:
        duplicate.close()
