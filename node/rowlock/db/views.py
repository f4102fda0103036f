"""What people and programs may read: typed, paged queries over the views of the schema.

Nothing here writes, and no list carries payloads (parameters, slices, results, schemas): who wants
one asks for it by name. Ages are to be computed against `read_at`, the database's clock.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, LiteralString, TypeAlias, TypeVar
from uuid import UUID

import psycopg
from psycopg.rows import class_row

from rowlock.errors import NotFound, UsageError, near_names
from rowlock.protocol.model import Evidence
from rowlock.protocol.statuses import ENDED

Connection: TypeAlias = psycopg.Connection[Any]
Row = TypeVar("Row")

PREFIX_DIGITS_MIN: Final = 4
"""An execution id may be cut to this many hex digits; fewer would be guessing."""

_NEAR_AMONG: Final = 200
"""How many of the latest executions are searched for one that somebody may have meant."""
_BIGINT_MAX: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """One line of the list of executions."""

    execution_id: UUID
    exec_no: int
    job_name: str
    instance_key: str
    status: str
    pool: str
    priority: int
    delivery: str
    step: str | None
    total: int | None
    """None before the plan is sealed."""
    completed: int
    failed: int
    cancelled: int
    master_node: UUID | None
    master_name: str | None
    master_epoch: int
    cancel_requested: bool
    failure_reason: str | None
    failure_message: str | None
    contract_hash: str
    launch_key: str | None
    requested_at: datetime
    adopt_after: datetime
    """From then on any node may become its first master."""
    started_at: datetime | None
    """When the plan was sealed."""
    ended_at: datetime | None
    revision: int
    suspended: bool
    parallelism: int | None
    """Claims at a time; None: no limit."""
    deadline_at: datetime | None
    deletion_policy: str
    restart_of: UUID | None
    """The execution of the same instance before this one."""
    carried: int
    """Partitions that executions before have completed; `completed` includes them."""
    running: int
    """Partitions that are claimed."""
    pending: int | None
    """Partitions that wait; None before the plan is sealed."""
    retried: int
    """Attempts that failed, or were lost with their node, and were made again."""
    skipped: int
    """Items that author code has left out, in partitions of this execution."""
    nodes: int
    """Nodes that hold claims of it."""
    read_at: datetime

    @property
    def ended(self) -> bool:
        """Whether its status is its last one."""
        return self.status in ENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class Payloads:
    """What an execution was given and what it gave; may be large."""

    parameters: Any  # Any, here and below: JSON values of the author's
    summary: Any
    policy: dict[str, Any]
    requester: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The few values of an execution that change while one follows it."""

    status: str
    total: int | None
    completed: int
    failed: int
    cancelled: int
    failure_message: str | None
    master_name: str | None
    running: int
    """Attempts that have begun."""
    nodes: int
    """Nodes that hold claims of it."""

    @property
    def ended(self) -> bool:
        """Whether the status is the last one."""
        return self.status in ENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """What one node holds of an execution."""

    node_id: UUID
    node_name: str | None
    running: int
    waiting: int
    """Claimed ahead, not begun."""
    oldest_at: datetime | None
    """Start of the attempt that has been running longest."""
    keys: list[str]
    """A few of the partitions, longest running first."""
    done: int | None = None
    """Items that its attempts say they have done (`ctx.progress`); None: none of them says so."""
    total: int | None = None
    """Of how many; None where one that tells its progress does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """One line of the list of partitions."""

    id: int
    execution_id: UUID
    step: str
    partition_key: str
    status: str
    node_id: UUID | None
    """The node that holds it, or held it last."""
    node_name: str | None
    claims: int
    failures: int
    lost: int
    alone: bool
    delivery: str
    ready: bool
    available_at: datetime | None
    weight: int
    last_error: dict[str, Any] | None
    """Type and message of what went wrong last."""
    resolution: dict[str, Any] | None
    """What a person decided about a FAILED one: how, by whom, why and when."""
    counters: dict[str, Any] | None
    """What its attempt told of itself: done and total, skipped and the first skips."""
    claimed_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None
    read_at: datetime

    @property
    def error_text(self) -> str | None:
        """Type and message of what went wrong last, in one text."""
        if self.last_error is None:
            return None
        parts = (self.last_error.get("type"), self.last_error.get("message"))
        return ": ".join(str(part) for part in parts if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPayloads:
    """What a partition was given, how far it got, what it gave, and where it failed."""

    id: int
    slice: Any
    checkpoint: Any
    result: Any
    traceback: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One incarnation of a node."""

    node_id: UUID
    name: str
    pool: str
    status: str
    draining: bool
    slots: int
    load: int
    claims: int
    beat: int
    heartbeat_at: datetime
    heartbeat_age_seconds: float
    started_at: datetime
    jobs: dict[str, list[str]]
    """The contract hashes that it accepts, by job."""
    only_execution: UUID | None
    labels: dict[str, str]
    orphans: list[dict[str, Any]]
    version: str
    evidence: Evidence
    """Whether its connections can prove that it is gone, or why not."""
    removed_at: datetime | None
    removed_reason: str | None
    read_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of the audit."""

    id: int
    at: datetime
    event: str
    execution_id: UUID | None
    partition_id: int | None
    partition_key: str | None
    node_id: UUID | None
    node_name: str | None
    actor: str
    detail: dict[str, Any]
    read_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """A contract that some node published, and how many living nodes accept it."""

    job_name: str
    contract_hash: str
    delivery: str
    policy: dict[str, Any]
    published_at: datetime
    nodes: int
    read_at: datetime


def read_at(db: Connection) -> datetime:
    """The database's clock: what the ages of all rows are counted from."""
    row = db.execute("SELECT rowlock.now()").fetchone()
    assert row is not None
    moment: datetime = row[0]
    return moment


# -- executions --------------------------------------------------------------------------------

_EXECUTION: Final[LiteralString] = (
    "SELECT execution_id, exec_no, job_name, instance_key, status, pool, priority, delivery, step,"
    " total, completed, failed, cancelled, master_node, master_name, master_epoch,"
    " cancel_requested, failure_reason, failure_message, contract_hash, launch_key, requested_at,"
    " adopt_after, started_at, ended_at, revision, suspended, parallelism, deadline_at, deletion_policy,"
    " restart_of, carried, running, pending, retried, skipped, nodes, read_at"
    " FROM rowlock.executions"
)


def executions(
    db: Connection,
    *,
    job: str | None = None,
    statuses: Sequence[str] = (),
    before: int | None = None,
    limit: int,
) -> list[Execution]:
    """The latest executions, newest first.

    Args:
        db: A connection that may read the views.
        job: Only of this job.
        statuses: Only in one of these states; empty means any.
        before: Only those with a smaller exec_no: the last one of the page before.
        limit: Rows at most.
    """
    return _rows(
        db,
        Execution,
        _EXECUTION + " WHERE (%(job)s::text IS NULL OR job_name = %(job)s)"
        " AND (%(statuses)s::text[] = '{}' OR status = ANY (%(statuses)s))"
        " AND (%(before)s::bigint IS NULL OR exec_no < %(before)s)"
        " ORDER BY exec_no DESC LIMIT %(limit)s",
        {"job": job, "statuses": list(statuses), "before": before, "limit": limit},
    )


def execution(db: Connection, execution_id: UUID) -> Execution:
    """One execution.

    Raises:
        NotFound: It does not exist.
    """
    found = _rows(db, Execution, _EXECUTION + " WHERE execution_id = %(id)s", {"id": execution_id})
    if not found:
        raise NotFound("execution", str(execution_id))
    return found[0]


def launched_as(db: Connection, launch_key: str) -> Execution | None:
    """The execution that a launch key stands for."""
    found = _rows(
        db, Execution, _EXECUTION + " WHERE launch_key = %(launch_key)s", {"launch_key": launch_key}
    )
    return found[0] if found else None


def payloads(db: Connection, execution_id: UUID) -> Payloads:
    """Parameters, summary, policy and requester of an execution.

    Raises:
        NotFound: It does not exist.
    """
    found = _rows(
        db,
        Payloads,
        "SELECT parameters, summary, policy, requester FROM rowlock.executions"
        " WHERE execution_id = %(id)s",
        {"id": execution_id},
    )
    if not found:
        raise NotFound("execution", str(execution_id))
    return found[0]


def look(db: Connection, execution_id: UUID) -> Look:
    """How far an execution is, in one cheap statement.

    Raises:
        NotFound: It does not exist.
    """
    found = _rows(
        db,
        Look,
        "SELECT e.status, e.total, e.completed, e.failed, e.cancelled, e.failure_message,"
        " e.master_name, held.running, held.nodes"
        " FROM rowlock.executions e"
        " CROSS JOIN LATERAL ("
        "  SELECT count(*) FILTER (WHERE p.started_at IS NOT NULL) AS running,"
        "   count(DISTINCT p.assigned_node) AS nodes"
        "  FROM rowlock.partitions p"
        "  WHERE p.execution_id = e.execution_id AND p.status = 'CLAIMED') held"
        " WHERE e.execution_id = %(id)s",
        {"id": execution_id},
    )
    if not found:
        raise NotFound("execution", str(execution_id))
    return found[0]


def holders(db: Connection, execution_id: UUID, *, keys: int = 5) -> list[Holder]:
    """Which nodes hold partitions of an execution, and a few of the keys."""
    return _rows(
        db,
        Holder,
        "SELECT assigned_node AS node_id, node_name,"
        " count(*) FILTER (WHERE started_at IS NOT NULL) AS running,"
        " count(*) FILTER (WHERE started_at IS NULL) AS waiting,"
        " min(started_at) AS oldest_at,"
        " (array_agg(partition_key ORDER BY started_at NULLS LAST, id))[1:%(keys)s] AS keys,"
        " sum((counters ->> 'done')::bigint)::bigint AS done,"
        " CASE WHEN count(counters ->> 'done') = count(counters ->> 'total')"
        "  THEN sum((counters ->> 'total')::bigint)::bigint END AS total"
        " FROM rowlock.partitions"
        " WHERE execution_id = %(id)s AND status = 'CLAIMED'"
        " GROUP BY assigned_node, node_name ORDER BY node_name, assigned_node",
        {"id": execution_id, "keys": keys},
    )


# -- finding one by what a person types --------------------------------------------------------


def find_execution(db: Connection, given: str) -> UUID:
    """The execution that somebody means by a whole id, the beginning of one, or its exec_no.

    A number is an exec_no if there is such an execution, and else the beginning of an id.

    Raises:
        NotFound: There is none; suggests some that come near.
        UsageError: Several ids begin like this.
    """
    text = given.strip().lower()
    if text.isascii() and text.isdigit() and int(text) <= _BIGINT_MAX:
        found = _ids(db, "exec_no = %(no)s", {"no": int(text)})
        if found:
            return found[0]
    bounds = _bounds(text)
    found = _ids(db, "execution_id BETWEEN %(low)s AND %(high)s", bounds) if bounds else []
    if len(found) > 1:
        raise UsageError(
            f"execution {given!r} may be {' or '.join(map(str, found))}: give more of its id"
        )
    if not found:
        raise NotFound("execution", given, _near(db, text))
    return found[0]


def _bounds(text: str) -> dict[str, UUID] | None:
    """The lowest and the highest id that begin like this; None if no id could."""
    digits = text.replace("-", "")
    if not re.fullmatch(r"[0-9a-f]+", digits) or not PREFIX_DIGITS_MIN <= len(digits) <= 32:
        return None
    return {"low": UUID(digits.ljust(32, "0")), "high": UUID(digits.ljust(32, "f"))}


def _near(db: Connection, text: str) -> Sequence[str]:
    if text.isascii() and text.isdigit() and int(text) <= _BIGINT_MAX:
        numbers = db.execute(
            "(SELECT exec_no FROM rowlock.executions WHERE exec_no < %(no)s"
            "  ORDER BY exec_no DESC LIMIT 2)"
            " UNION ALL"
            " (SELECT exec_no FROM rowlock.executions WHERE exec_no > %(no)s"
            "  ORDER BY exec_no LIMIT 1) ORDER BY 1",
            {"no": int(text)},
        ).fetchall()
        if numbers:
            return [str(number) for (number,) in numbers]
    instances = _ids(db, "lower(instance_key) = %(key)s", {"key": text})
    if instances:
        return [str(one) for one in instances]
    latest = [
        str(one)
        for (one,) in db.execute(
            "SELECT execution_id FROM rowlock.executions ORDER BY exec_no DESC LIMIT %s",
            (_NEAR_AMONG,),
        )
    ]
    # Beginnings are compared with beginnings, or nothing would look alike.
    by_beginning = {one[: max(len(text), PREFIX_DIGITS_MIN)]: one for one in reversed(latest)}
    return [by_beginning[one] for one in near_names(text, by_beginning)]


def _ids(db: Connection, condition: LiteralString, arguments: dict[str, Any]) -> list[UUID]:
    rows = db.execute(
        "SELECT execution_id FROM rowlock.executions WHERE "  # noqa: S608  literals only
        + condition
        + " ORDER BY exec_no DESC LIMIT 3",
        arguments,
    ).fetchall()
    return [row[0] for row in rows]


# -- partitions --------------------------------------------------------------------------------

_PARTITION: Final[LiteralString] = (
    "SELECT id, execution_id, step, partition_key, status, assigned_node AS node_id, node_name,"
    " claims, failures, lost, alone, delivery, ready, available_at, weight,"
    # The traceback is the large part, and is a payload like the others.
    " last_error - 'traceback' AS last_error, resolution - 'result' AS resolution, counters,"
    " claimed_at, started_at, ended_at,"
    " rowlock.now() AS read_at"
    " FROM rowlock.partitions"
)


def partitions(
    db: Connection,
    execution_id: UUID,
    *,
    statuses: Sequence[str] = (),
    after: int | None = None,
    limit: int,
) -> list[Partition]:
    """Partitions of an execution in the order of step and key, the one that an index has.

    Args:
        db: A connection that may read the views.
        execution_id: The execution.
        statuses: Only in one of these states; empty means any.
        after: Only those behind this partition: the id of the last one of the page before.
        limit: Rows at most.
    """
    return _rows(
        db,
        Partition,
        _PARTITION + " WHERE execution_id = %(id)s"  # noqa: S608  literals only
        " AND (%(statuses)s::text[] = '{}' OR status = ANY (%(statuses)s))"
        " AND (%(after)s::bigint IS NULL OR (step, partition_key) > ("
        "  (SELECT a.step FROM rowlock.partitions a WHERE a.id = %(after)s),"
        "  (SELECT a.partition_key FROM rowlock.partitions a WHERE a.id = %(after)s)))"
        " ORDER BY execution_id, step, partition_key LIMIT %(limit)s",
        {"id": execution_id, "statuses": list(statuses), "after": after, "limit": limit},
    )


def partition_payloads(db: Connection, ids: Sequence[int]) -> dict[int, PartitionPayloads]:
    """Slices, checkpoints, results and tracebacks of partitions, by id."""
    found = _rows(
        db,
        PartitionPayloads,
        "SELECT id, slice, checkpoint, result, last_error ->> 'traceback' AS traceback"
        " FROM rowlock.partitions WHERE id = ANY (%(ids)s)",
        {"ids": list(ids)},
    )
    return {one.id: one for one in found}


# -- nodes, events, contracts ------------------------------------------------------------------


def nodes(
    db: Connection, *, pool: str | None = None, removed: bool = False, limit: int
) -> list[Node]:
    """Nodes by name; those that were removed, newest first, only on request.

    Args:
        db: A connection that may read the views.
        pool: Only of this pool.
        removed: Also those that are gone.
        limit: Rows at most.
    """
    return _rows(
        db,
        Node,
        "SELECT node_id, name, pool, status, draining, slots, load, claims, beat, heartbeat_at,"
        " heartbeat_age_seconds, started_at, jobs, only_execution, labels, orphans, version,"
        " evidence, removed_at, removed_reason, rowlock.now() AS read_at"
        " FROM rowlock.nodes"
        " WHERE (%(pool)s::text IS NULL OR pool = %(pool)s)"
        " AND (%(removed)s::boolean OR status <> 'REMOVED')"
        " ORDER BY removed_at DESC NULLS FIRST, name, started_at LIMIT %(limit)s",
        {"pool": pool, "removed": removed, "limit": limit},
    )


def events(
    db: Connection,
    *,
    execution_id: UUID | None = None,
    node: str | None = None,
    event: str | None = None,
    before: int | None = None,
    limit: int,
) -> list[Event]:
    """The latest events, newest last.

    Args:
        db: A connection that may read the views.
        execution_id: Only of this execution.
        node: Only of nodes with this name, or whose id begins with these 8 characters or more.
        event: Only of this kind, for example `node_removed`.
        before: Only those with a smaller id: the first one of the page after.
        limit: Rows at most.
    """
    found = _rows(
        db,
        Event,
        "SELECT id, at, event, execution_id, partition_id, partition_key, node_id, node_name, actor,"
        " detail, rowlock.now() AS read_at"
        " FROM rowlock.events"
        " WHERE (%(execution)s::uuid IS NULL OR execution_id = %(execution)s)"
        " AND (%(node)s::text IS NULL OR node_name = %(node)s"
        "      OR length(%(node)s) >= 8 AND starts_with(node_id::text, lower(%(node)s)))"
        " AND (%(event)s::text IS NULL OR event = %(event)s)"
        " AND (%(before)s::bigint IS NULL OR id < %(before)s)"
        " ORDER BY id DESC LIMIT %(limit)s",
        {
            "execution": execution_id,
            "node": node,
            "event": event,
            "before": before,
            "limit": limit,
        },
    )
    return found[::-1]


def contracts(db: Connection, *, job: str | None = None, limit: int) -> list[Contract]:
    """Published contracts by job. Of one job, those that living nodes accept come first, then new ones.

    Args:
        db: A connection that may read the views.
        job: Only of this job.
        limit: Rows at most.
    """
    return _rows(
        db,
        Contract,
        "SELECT job_name, contract_hash, delivery, policy, published_at, nodes,"
        " rowlock.now() AS read_at"
        " FROM rowlock.jobs"
        " WHERE (%(job)s::text IS NULL OR job_name = %(job)s)"
        " ORDER BY job_name, nodes > 0 DESC, published_at DESC, contract_hash LIMIT %(limit)s",
        {"job": job, "limit": limit},
    )


def schemas(db: Connection, job: str, contract_hash: str) -> dict[str, Any]:
    """The JSON Schemas of a published contract: parameters, slice, result and summary.

    Raises:
        NotFound: Nobody has published it.
    """
    row = db.execute(
        "SELECT schemas FROM rowlock.jobs WHERE job_name = %s AND contract_hash = %s",
        (job, contract_hash),
    ).fetchone()
    if row is None:
        raise NotFound("contract", f"{job} {contract_hash}")
    found: dict[str, Any] = row[0]
    return found


def job_names(db: Connection) -> list[str]:
    """The names of all jobs that any node has published."""
    rows = db.execute("SELECT DISTINCT job_name FROM rowlock.jobs ORDER BY job_name").fetchall()
    return [row[0] for row in rows]


def _rows(
    db: Connection, kind: type[Row], statement: LiteralString, arguments: dict[str, Any]
) -> list[Row]:
    """The rows of one statement as values of `kind`, whose fields are its columns."""
    with db.cursor(row_factory=class_row(kind)) as cursor:
        return cursor.execute(statement, arguments).fetchall()
