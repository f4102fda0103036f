"""What the demonstration sees of the database while others work: it reads, and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, LiteralString, TypeVar
from uuid import UUID

from psycopg.rows import class_row

from rowlock.db import views
from rowlock.demo.database import Connection

NODES_MAX: Final = 100
PARTITIONS_MAX: Final = 1000

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A partition that a node has claimed, with what tells how far it is."""

    partition_id: int
    key: str
    attempt: int
    started: bool
    """It had its slot when it was claimed."""
    slice: Any  # Any: the JSON of the demonstration's own jobs
    checkpoint: Any
    node_id: UUID
    node: str
    is_active: bool
    """False: the node has been silent for some time."""
    is_master: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What one incarnation of a node has done of an execution, and what it is doing."""

    node_id: UUID
    completed: int
    running: list[str]
    """Keys, the one that was started first in front."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """A line of the audit."""

    id: int
    at: datetime
    event: str
    node_id: UUID | None
    node: str | None
    key: str | None
    """The partition's."""
    detail: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """Where a partition is now."""

    id: int
    key: str
    status: str
    attempt: int
    node_id: UUID | None
    node: str | None
    started_at: datetime | None


class Lookout:
    """Questions about one pool, on a connection of its own."""

    def __init__(self, db: Connection, pool: str) -> None:
        self._db = db
        self._pool = pool

    def now(self) -> datetime:
        """The database's clock, by which all its times are."""
        row = self._db.execute("SELECT rowlock.now()").fetchone()
        assert row is not None
        moment: datetime = row[0]
        return moment

    def execution(self, execution_id: UUID) -> views.Execution:
        """An execution as it is now."""
        return views.execution(self._db, execution_id)

    def nodes(self) -> list[views.Node]:
        """All incarnations of the pool's nodes, also those that are gone."""
        return views.nodes(self._db, pool=self._pool, removed=True, limit=NODES_MAX)

    def partitions(self, execution_id: UUID) -> list[views.Partition]:
        """All partitions of an execution."""
        return views.partitions(self._db, execution_id, limit=PARTITIONS_MAX)

    def last_event(self) -> int:
        """The id of the latest event, 0 if there is none."""
        row = self._db.execute("SELECT coalesce(max(id), 0) FROM rowlock.events").fetchone()
        assert row is not None
        return int(row[0])

    def events(self, after: int) -> list[Happening]:
        """What happened off the happy path behind this event, in order."""
        return self._rows(
            Happening,
            "SELECT id, at, event, node_id, node_name AS node, partition_key AS key, detail"
            " FROM rowlock.events WHERE id > %s ORDER BY id",
            (after,),
        )

    def fates(self, ids: Sequence[int]) -> dict[int, Fate]:
        """What has become of these partitions, by id."""
        found = self._rows(
            Fate,
            "SELECT id, partition_key AS key, status, claims AS attempt, assigned_node AS node_id,"
            " node_name AS node, started_at FROM rowlock.partitions WHERE id = ANY (%s)",
            (list(ids),),
        )
        return {fate.id: fate for fate in found}

    def has_sessions(self, node: str, *, since: datetime) -> bool:
        """Whether the server still works for a node that is dead.

        Its executors' sessions do not bear its name. Those of all nodes count as long as they are
        in the middle of something that began before the node died.
        """
        row = self._db.execute(
            """
            SELECT EXISTS (
                SELECT FROM pg_stat_activity
                WHERE datname = current_database() AND (
                    application_name IN (%(node)s, %(beat)s)
                    OR starts_with(application_name, 'rowlock work')
                        AND state <> 'idle' AND xact_start < %(since)s))
            """,
            {"node": f"rowlock node {node}", "beat": f"rowlock beat {node}", "since": since},
        ).fetchone()
        return row is not None and bool(row[0])

    def claimed(self, execution_id: UUID) -> list[Claimed]:
        """What nodes hold of an execution."""
        return self._rows(
            Claimed,
            """
            SELECT p.id AS partition_id, p.partition_key AS key, p.claims AS attempt,
                p.started_at IS NOT NULL AS started, p.slice, p.checkpoint,
                n.node_id, n.name AS node, n.status = 'ACTIVE' AS is_active,
                coalesce(e.master_node = n.node_id, false) AS is_master
            FROM rowlock.partitions p
            JOIN rowlock.executions e USING (execution_id)
            JOIN rowlock.nodes n ON n.node_id = p.assigned_node
            WHERE p.execution_id = %s AND p.status = 'CLAIMED'
            ORDER BY p.started_at, p.id
            """,
            (execution_id,),
        )

    def tallies(self, execution_id: UUID) -> dict[UUID, Tally]:
        """What each incarnation has done of an execution and is doing."""
        found = self._rows(
            Tally,
            """
            SELECT assigned_node AS node_id,
                count(*) FILTER (WHERE status = 'COMPLETED') AS completed,
                coalesce(array_agg(partition_key ORDER BY started_at, id)
                    FILTER (WHERE status = 'CLAIMED'
                        AND (started_at IS NOT NULL OR checkpoint IS NOT NULL)), '{}') AS running
            FROM rowlock.partitions
            WHERE execution_id = %s AND assigned_node IS NOT NULL
            GROUP BY assigned_node
            """,
            (execution_id,),
        )
        return {tally.node_id: tally for tally in found}

    def flights_by_attempt(self, day: str) -> dict[int, int]:
        """How many entries of a day each attempt at it has in the ledger."""
        rows = self._db.execute(
            "SELECT attempt, count(*) FROM demo.ledger WHERE flight_date = %s::date"
            " GROUP BY attempt",
            (day,),
        )
        return dict(rows.fetchall())

    def paid(self) -> dict[str, int]:
        """The numbers of the bank's payments, by their reference."""
        return dict(self._db.execute("SELECT reference, payment_id FROM demo.bank").fetchall())

    def slices(self, ids: Sequence[int]) -> dict[int, Any]:
        """The slices of partitions, by id."""
        found = views.partition_payloads(self._db, ids)
        return {one.id: one.slice for one in found.values()}

    def _rows(
        self, kind: type[Row], statement: LiteralString, arguments: tuple[object, ...]
    ) -> list[Row]:
        with self._db.cursor(row_factory=class_row(kind)) as cursor:
            return cursor.execute(statement, arguments).fetchall()
