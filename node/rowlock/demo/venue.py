"""Where the demonstration takes place: a PostgreSQL of its own, or an existing one.

In an existing database it makes the schemas `rowlock` and `demo`, and takes `demo` away again. It
refuses a database where nodes live, because its heartbeats are quicker than theirs, and a node
that beats every second looks dead to one that expects five beats in that time.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psycopg

from rowlock.db import views
from rowlock.db.connect import describe, first_line
from rowlock.db.migrate import current_version
from rowlock.demo import data
from rowlock.demo.database import Connection, connect
from rowlock.embedded import Server
from rowlock.errors import Refused, RowlockError

RECENT_SECONDS: Final = 30.0
"""A node that has beaten within this time is taken to be alive."""

_LOCK: Final = int.from_bytes(b"rl demo\0")
"""Key of the advisory lock that keeps two demonstrations out of one database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Venue:
    """A database to play in."""

    dsn: str
    version: str
    """The server's, for example "18.1"."""
    description: str
    """For people; never with the password."""
    embedded: bool
    folder: Path
    """For logs; it is gone after the play."""

    @property
    def server_log(self) -> Path | None:
        """What the server has said, where we can see it."""
        return self.folder / "server.log" if self.embedded else None

    @property
    def left(self) -> str | None:
        """What stays in the database for good, in words."""
        if self.embedded:
            return None
        return "schema rowlock with the two executions, and the five roles rowlock_*"


@contextmanager
def embedded() -> Generator[Venue]:
    """A PostgreSQL that is gone afterwards, however this process ends.

    Raises:
        UsageError: There are no programs of PostgreSQL; says what would help.
        Unavailable: It did not start.
    """
    with Server.start() as server:
        yield Venue(
            dsn=server.dsn,
            version=server.binaries.version,
            description=f"thrown away at the end, port {server.port}",
            embedded=True,
            folder=server.folder,
        )


@contextmanager
def existing(dsn: str) -> Generator[Venue]:
    """A database that is there; its schema `demo` is taken away at the end.

    Raises:
        Unavailable: It cannot be reached.
        UsageError: It has a schema `demo` that is not ours.
        Refused: The login may not make a schema, nodes live in it, or another demonstration runs.
    """
    with (
        connect(dsn) as db,  # holds the lock all the time
        tempfile.TemporaryDirectory(prefix="rowlock-demo-") as folder,
    ):
        _require_rights(db)
        _refuse_second_play(db)
        data.refuse_foreign_schema(db)
        _refuse_living_nodes(db)
        version = db.info.server_version
        try:
            yield Venue(
                dsn=dsn,
                version=f"{version // 10000}.{version % 10000}",
                description=describe(dsn),
                embedded=False,
                folder=Path(folder),
            )
        finally:
            _tidy(db.info.dbname, dsn)


def _require_rights(db: Connection) -> None:
    row = db.execute(
        "SELECT has_database_privilege(current_database(), 'CREATE'), current_user"
    ).fetchone()
    if row is None or not row[0]:
        raise Refused(
            f"{row[1] if row else 'this login'} may not create a schema in database "
            f"{db.info.dbname!r}: log in as the database's owner, or leave out --dsn and ROWLOCK_DSN"
        )


def _refuse_second_play(db: Connection) -> None:
    row = db.execute("SELECT pg_try_advisory_lock(%s)", (_LOCK,)).fetchone()
    if row is None or not row[0]:
        raise Refused(
            f"another demonstration runs in database {db.info.dbname!r}: wait until it has ended, or "
            "name another database"
        )


def _refuse_living_nodes(db: Connection) -> None:
    if current_version(db) == 0:
        return
    living = [
        node for node in views.nodes(db, limit=1000) if node.heartbeat_age_seconds < RECENT_SECONDS
    ]
    if living:
        names = ", ".join(sorted({node.name for node in living})[:3])
        raise Refused(
            f"database {db.info.dbname!r} has {len(living)} nodes that beat within the last "
            f"{RECENT_SECONDS:g} s ({names}): the demonstration kills nodes and would mistake slower "
            "ones for dead; name a database of its own, or leave out --dsn and ROWLOCK_DSN"
        )


def _tidy(database: str, dsn: str) -> None:
    try:
        data.drop(dsn)
    except (RowlockError, psycopg.Error) as error:
        # No reason to fail: the next demonstration there takes it away.
        print(
            f"rowlock: schema demo is left in database {database!r} ({first_line(error)}): "
            "DROP SCHEMA demo CASCADE takes it away",
            file=sys.stderr,
        )
