"""Connections to PostgreSQL that fail in bounded time and say in one line why."""

from __future__ import annotations

import os
import socket
from typing import Any, Final, LiteralString

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

READ_ONLY_SQL_TRANSACTION: Final = "25006"

SESSION: Final[LiteralString] = (
    # The server's keepalives as well: of a client that vanished it otherwise keeps the
    # transaction, with all its locks, for two hours. A Unix socket ignores them.
    "SELECT set_config('idle_in_transaction_session_timeout', %s, false),"
    " set_config('lock_timeout', %s, false),"
    # A statement that nobody waits for any more ends; where the server's system can tell.
    " CASE WHEN version() ~ 'linux'"
    "  THEN set_config('client_connection_check_interval', '2000', false) END,"
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
)
"""Settings of a new session. Parameters: idle_in_transaction_session_timeout and lock_timeout, as text
in milliseconds."""


def connect(
    dsn: str,
    *,
    application_name: str,
    idle_in_transaction_seconds: float = 0,
    lock_seconds: float = 0,
) -> psycopg.Connection[tuple[Any, ...]]:
    """Open a connection in autocommit mode.

    :param dsn: a libpq connection string or URI; what it leaves out comes from libpq's variables.
    :param application_name: shown in `pg_stat_activity`.
    :param idle_in_transaction_seconds: the server ends a session that is idle in a transaction for
        longer; 0 is no limit. The protocol never leaves a transaction open, so this is a second belt.
    :param lock_seconds: a statement that waits longer for a lock fails (55P03); 0 is no limit.
    :raises Unavailable: the database cannot be reached, or refuses the login.
    :raises UsageError: the connection string cannot be read.
    """
    options: dict[str, Any] = {
        **DEFAULTS,
        **parameters_of(dsn),
        "application_name": application_name,
    }
    connection = None
    try:
        connection = psycopg.connect(make_conninfo(**options), autocommit=True)
        connection.execute(
            SESSION,
            (str(int(idle_in_transaction_seconds * 1000)), str(int(lock_seconds * 1000))),
        )
    except psycopg.Error as error:
        if connection is not None:
            connection.close()
        named = dsn or any(os.environ.get(name) for name in ("PGHOST", "PGHOSTADDR", "PGSERVICE"))
        remedy = "" if named else "; name another in ROWLOCK_DSN or --dsn"
        raise Unavailable(f"{describe(dsn)}: {first_line(error)}{remedy}") from error
    return connection


def parameters_of(dsn: str) -> dict[str, Any]:
    """What a connection string says, under libpq's names.

    :raises UsageError: it cannot be read. The error quotes neither the string nor libpq's complaint
        about it: both show the password.
    """
    try:
        given = conninfo_to_dict(dsn)
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


def describe(dsn: str) -> str:
    """The database's address for people: host, port and name, never the password."""
    try:
        given = parameters_of(dsn)
    except UsageError:
        return "database (the connection string cannot be read)"
    host = given.get("host") or os.environ.get("PGHOST") or "local socket"
    port = given.get("port") or os.environ.get("PGPORT") or "5432"
    name = given.get("dbname") or os.environ.get("PGDATABASE") or given.get("user") or "default"
    return f"database {name} at {host}:{port}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def shut(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
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
