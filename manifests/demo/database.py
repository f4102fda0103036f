"""The database of the quick start: a PostgreSQL with a year of flights, thrown away with its pod.

For production take a PostgreSQL that somebody backs up; this one shows only which logins rowlock
wants, and what the author's tables have to grant to the login of the nodes.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from urllib.parse import unquote, urlsplit

import psycopg
from psycopg import sql

from rowlock.db.migrate import migrate
from rowlock.demo import data
from rowlock.embedded import Server

READY = Path("/tmp/ready")  # noqa: S108 - the pod's own, and looked for by its readiness probe
LOGINS = {
    "OWNER_DSN": sql.SQL("SUPERUSER"),
    "NODE_DSN": sql.SQL("IN ROLE rowlock_node"),
    "OPERATOR_DSN": sql.SQL("IN ROLE rowlock_operator"),
    "READER_DSN": sql.SQL("IN ROLE rowlock_reader"),
}


def main() -> None:
    """Run it until SIGTERM."""
    stop = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)
    # The pod's own address; 127.0.0.1 is always there.
    with Server.start(port=5432, addresses=[os.environ["POD_IP"]]) as server:
        # Whoever comes later finds the schema: a new pod starts with nothing.
        migrate(server.dsn)
        make_logins(server.dsn)
        data.load(server.dsn)
        grant(server.dsn)
        READY.touch()
        signal.sigwait(stop)


def make_logins(dsn: str) -> None:
    """The logins of the connection strings in the Secret, and the roles that they are members of."""
    with psycopg.connect(dsn, autocommit=True) as db:
        for variable, rights in LOGINS.items():
            user, password = login(os.environ[variable])
            statement = sql.SQL("CREATE ROLE {} LOGIN PASSWORD {} {}")
            db.execute(statement.format(sql.Identifier(user), password, rights))


def grant(dsn: str) -> None:
    """What the jobs need of the tables that they work on."""
    with psycopg.connect(dsn, autocommit=True) as db:
        db.execute(
            """
            GRANT USAGE ON SCHEMA demo TO rowlock_node;
            GRANT SELECT ON ALL TABLES IN SCHEMA demo TO rowlock_node;
            GRANT INSERT ON demo.ledger, demo.bank TO rowlock_node;
            """
        )


def login(dsn: str) -> tuple[str, str]:
    """User and password of a connection string in the form of a URI."""
    parts = urlsplit(dsn)
    if parts.username is None or parts.password is None:
        raise SystemExit("the connection strings of the quick start must name user and password")
    return unquote(parts.username), unquote(parts.password)


if __name__ == "__main__":
    main()
