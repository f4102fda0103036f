"""What `rowlock exporter` reads: three statements of the reader's, none of which looks at each partition.

They are apart, so that one that takes too long costs its own series and no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, LiteralString, TypeAlias

import psycopg
from psycopg.rows import class_row

from rowlock.protocol.model import ServerIdentity

Connection: TypeAlias = psycopg.Connection[Any]

ENDINGS_SECONDS: Final = 900
"""How far back `endings` looks."""

_GROUPS_MAX: Final = 10_000
"""Rows of one answer, far more than become series; a bound all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """What waits and runs in a pool, and who is there to do it."""

    pool: str
    pending: int
    delayed: int
    suspended: int
    limited: int
    claimed: int
    oldest_pending_seconds: float
    paused: bool
    requested: int
    planning: int
    running: int
    closing: int
    finishing: int
    unserved: int
    nodes_active: int
    nodes_unreachable: int
    nodes_draining: int
    slots: int
    silent_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Executions that have ended lately."""

    pool: str
    job_name: str
    status: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """How the server and our tables are."""

    schema_version: int
    tables: Mapping[str, tuple[int, int, int]]
    """By name: dead rows, living rows, bytes with indexes."""
    xmin: int | None
    """The oldest transaction whose sight of old rows somebody holds on to; None: nobody does."""
    xmin_age: int
    """How many transactions have begun since."""
    connections: int
    connections_max: int
    notify_queue: float
    """How full the queue of notifications is, from 0 to 1."""
    identity: ServerIdentity


_POOLS: Final[LiteralString] = """
SELECT pool, pending, delayed, suspended, limited, claimed, oldest_pending_seconds, paused, requested, planning,
       running, closing, finishing, unserved, nodes_active, nodes_unreachable, nodes_draining, slots, silent_seconds
FROM rowlock.pools ORDER BY pool LIMIT %s
"""

_ENDINGS: Final[LiteralString] = """
SELECT pool, job_name, status, count(*) AS number FROM rowlock.endings
WHERE ended_at > rowlock.now() - make_interval(secs => %s)
GROUP BY 1, 2, 3 ORDER BY 1, 2, 3 LIMIT %s
"""

# Of pg_stat_activity everybody sees backend_xmin, of all sessions; not what they do. A slot or a prepared
# transaction keeps old rows as a session does. Sessions of other databases do not.
_SERVER: Final[LiteralString] = """
SELECT (SELECT max(version) FROM rowlock.schema_migrations),
       (SELECT coalesce(jsonb_object_agg(relname, jsonb_build_array(
                   n_dead_tup, n_live_tup, pg_total_relation_size(relid))), '{}')
        FROM pg_stat_user_tables WHERE schemaname = 'rowlock'),
       o.xmin::text::bigint, coalesce(age(o.xmin), 0),
       (SELECT sum(numbackends) FROM pg_stat_database)::integer,
       current_setting('max_connections')::integer,
       pg_notification_queue_usage(), s.system_identifier, s.database, s.timeline
FROM rowlock.server() s, (SELECT h.xmin FROM (
        SELECT backend_xmin FROM pg_stat_activity
        WHERE pid <> pg_backend_pid() AND (datname = current_database() OR datid IS NULL)
        UNION ALL SELECT xmin FROM pg_replication_slots
        UNION ALL SELECT transaction FROM pg_prepared_xacts WHERE database = current_database()
        UNION ALL SELECT NULL) h (xmin)
      ORDER BY age(h.xmin) DESC NULLS LAST LIMIT 1) o
"""


def pools(db: Connection) -> list[Pool]:
    """Every pool that has work or nodes."""
    with db.cursor(row_factory=class_row(Pool)) as cursor:
        return cursor.execute(_POOLS, (_GROUPS_MAX,)).fetchall()


def endings(db: Connection) -> list[Ending]:
    """The executions that ended in the last `ENDINGS_SECONDS`."""
    with db.cursor(row_factory=class_row(Ending)) as cursor:
        return cursor.execute(_ENDINGS, (ENDINGS_SECONDS, _GROUPS_MAX)).fetchall()


def server(db: Connection) -> Server:
    """The server's and the tables' own figures."""
    row = db.execute(_SERVER).fetchone()
    assert row is not None
    return Server(
        schema_version=row[0],
        tables={name: (dead, alive, size) for name, (dead, alive, size) in row[1].items()},
        xmin=row[2],
        xmin_age=row[3],
        connections=row[4],
        connections_max=row[5],
        notify_queue=row[6],
        identity=ServerIdentity(system_identifier=row[7], database=row[8], timeline=row[9]),
    )
