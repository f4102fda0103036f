"""What only `rowlock explain` asks of the views: why an execution is where it is.

Some of it reads every waiting partition of an execution, which nothing that runs often may do.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from rowlock.db import views
from rowlock.db.views import Connection, Event, Execution

_LATELY_SECONDS: Final = 600.0
_EVENTS_MAX: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The partitions of an execution that wait to be claimed."""

    total: int
    delayed: int
    """Those that may not run yet."""
    alone: int
    """Those that may run now, and only on a node that runs nothing else."""
    next_at: datetime | None
    """When the first of the delayed ones may run."""


def waiting(db: Connection, execution_id: UUID) -> Waiting:
    """What waits of an execution."""
    row = db.execute(
        "SELECT count(*), count(*) FILTER (WHERE NOT ready),"
        " count(*) FILTER (WHERE ready AND alone), min(available_at) FILTER (WHERE NOT ready)"
        " FROM rowlock.partitions WHERE execution_id = %s AND status = 'PENDING'",
        (execution_id,),
    ).fetchone()
    assert row is not None  # an aggregate has one row
    return Waiting(total=row[0], delayed=row[1], alone=row[2], next_at=row[3])


def waiting_before(db: Connection, *, pool: str, priority: int) -> int:
    """How many partitions wait in executions of a pool that are served before this priority."""
    row = db.execute(
        "SELECT coalesce(sum(pending), 0) FROM rowlock.executions"
        " WHERE pool = %s AND priority > %s AND status = 'RUNNING' AND NOT suspended",
        (pool, priority),
    ).fetchone()
    assert row is not None
    return int(row[0])


def closing_since(db: Connection, execution_id: UUID) -> datetime | None:
    """When an execution began to end early; None if nothing says so."""
    row = db.execute(
        "SELECT max(at) FROM rowlock.events WHERE execution_id = %s"
        " AND event IN ('cancel_requested', 'deadline_exceeded')",
        (execution_id,),
    ).fetchone()
    assert row is not None
    found: datetime | None = row[0]
    return found


def interrupted(db: Connection, execution_id: UUID) -> list[Event]:
    """Attempts that ended within the last minutes because the database of the author's code did."""
    retried = views.events(
        db, execution_id=execution_id, event="partition_retried", limit=_EVENTS_MAX
    )
    return [
        event
        for event in retried
        # The author's own wish for another time is no failure.
        if event.detail.get("kind") == "later" and event.detail.get("type") != "RetryLater"
        if (event.read_at - event.at).total_seconds() < _LATELY_SECONDS
    ]


def unresolved(db: Connection, execution_id: UUID, *, limit: int) -> list[str]:
    """Keys of AT_MOST_ONCE partitions that were lost after their start, and that nobody has resolved."""
    rows = db.execute(
        "SELECT partition_key FROM rowlock.partitions WHERE execution_id = %s AND status = 'FAILED'"
        " AND delivery = 'AT_MOST_ONCE' AND last_error ->> 'outcome' = 'unknown'"
        " AND resolution IS NULL ORDER BY id LIMIT %s",
        (execution_id, limit),
    ).fetchall()
    return [row[0] for row in rows]


def restart_of(db: Connection, execution_id: UUID) -> Execution | None:
    """The execution that restarted this one, if there is one."""
    row = db.execute(
        "SELECT execution_id FROM rowlock.executions WHERE restart_of = %s", (execution_id,)
    ).fetchone()
    return None if row is None else views.execution(db, row[0])
