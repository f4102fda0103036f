"""The rows of the real database, read in one statement, as values of the model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final, LiteralString
from uuid import UUID

import psycopg

from tests.simulation.model import Database, Execution, Node, Partition, Start
from tests.support.builders import EVERYBODY_IS_GONE
from tests.support.postgres import Database as TestDatabase

LOOK: Final[LiteralString] = """
SELECT json_build_array(
    (SELECT json_agg(json_build_array(node_id, status, draining, beat, recovered_at IS NOT NULL))
     FROM rowlock.batch_nodes),
    (SELECT json_agg(json_build_array(
        e.execution_id, e.instance_key, e.delivery, e.policy, l.parallelism, e.status, e.stopping,
        e.suspended, e.cancel_requested, e.master_node, e.master_epoch,
        (extract(epoch FROM e.adopt_after) * 1000000)::bigint, e.total, e.carried, e.restart_of, e.summary,
        (SELECT json_agg(json_build_array(s.epoch, s.chunk, s.keys) ORDER BY s.epoch, s.chunk)
         FROM rowlock.batch_staging s WHERE s.execution_id = e.execution_id)) ORDER BY e.exec_no)
     FROM rowlock.batch_job_coordination e LEFT JOIN rowlock.batch_limits l USING (execution_id)),
    (SELECT json_agg(json_build_array(
        id, execution_id, partition_key, delivery, status, assigned_node, claim_token, claims, failures,
        lost, alone, ready, CASE WHEN NOT ready THEN (extract(epoch FROM available_at) * 1000000)::bigint END,
        started_at IS NOT NULL,
        checkpoint, result) ORDER BY id)
     FROM rowlock.batch_partitions),
    (SELECT json_agg(json_build_array(instance_key, partition_key, claim_token)) FROM rowlock.batch_starts),
    (SELECT json_agg(json_build_array(instance_key, state, execution_id) ORDER BY instance_key)
     FROM rowlock.batch_instances),
    (SELECT json_agg(json_build_array(partition, token)) FROM public.business),
    (SELECT json_agg(json_build_array(e.execution_id, c.completed, c.failed, c.cancelled))
     FROM (SELECT execution_id, sum(completed) AS completed, sum(failed) AS failed,
                  sum(cancelled) AS cancelled FROM rowlock.batch_counts GROUP BY execution_id) c
     JOIN rowlock.batch_job_coordination e USING (execution_id)))::text
"""

_PREPARE: Final[LiteralString] = """
CREATE TABLE public.business (partition bigint, token uuid);
GRANT INSERT ON public.business TO PUBLIC;
CREATE OR REPLACE FUNCTION rowlock.now() RETURNS timestamptz LANGUAGE sql STABLE
AS $$ SELECT pg_catalog.current_setting('simulation.now')::timestamptz $$;
"""

_EMPTY: Final[LiteralString] = """
TRUNCATE rowlock.batch_nodes, rowlock.batch_job_coordination, rowlock.batch_partitions,
    rowlock.batch_starts, rowlock.batch_instances, rowlock.batch_staging, rowlock.batch_limits,
    rowlock.batch_counts, rowlock.batch_events, rowlock.batch_fences, public.business RESTART IDENTITY
"""


def prepare(database: TestDatabase) -> None:
    """Replace the one clock, believe every evidence, and make an author's table, which has no rule of its own."""
    with database.connect() as db:
        db.execute(_PREPARE)
        db.execute(EVERYBODY_IS_GONE)


def empty(connection: psycopg.Connection[Any]) -> None:
    """Begin anew: the same numbers again, so that one seed is one schedule."""
    connection.execute(_EMPTY)


@dataclass(slots=True)
class Names:
    """What the model calls the things of the database."""

    nodes: list[UUID] = field(default_factory=list[UUID])
    executions: list[UUID] = field(default_factory=list[UUID])
    rows: list[int] = field(default_factory=list[int])
    tokens: dict[UUID, tuple[int, int]] = field(default_factory=dict[UUID, tuple[int, int]])
    """Of each token: the index of the partition and the number of the claim."""

    def row(self, partition: int) -> int:
        """The index of a partition, which may be new."""
        if partition not in self.rows:
            self.rows.append(partition)
        return self.rows.index(partition)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The database at one moment."""

    db: Database
    business: tuple[tuple[int, int], ...]
    """Rows that authors have committed: partition and number of the claim."""
    counts: dict[int, tuple[int, int, int]]
    """Of each execution, by its counters: completed, failed, cancelled."""


def take(connection: psycopg.Connection[Any], names: Names) -> Snapshot:
    """Read everything.

    Raises:
        AssertionError: A row has a token that no claim has returned.
    """
    cursor = connection.execute(LOOK)
    row = cursor.fetchone()
    assert row is not None
    parts: list[list[list[Any]] | None] = json.loads(row[0])
    nodes, executions, partitions, starts, instances, business, counts = (
        part or [] for part in parts
    )
    node_of = {str(id_): number for number, id_ in enumerate(names.nodes)}
    node_of["None"] = -1
    execution_of = {str(id_): number for number, id_ in enumerate(names.executions)}
    by_id = {node_of[one[0]]: Node(*one[1:]) for one in nodes}
    rows = [_partition(one, node_of, execution_of, names) for one in partitions]
    return Snapshot(
        db=Database(
            nodes=tuple(by_id[number] for number in range(len(by_id))),
            executions=tuple(_execution(one, node_of, execution_of) for one in executions),
            partitions=tuple(rows),
            starts=frozenset(
                Start(_instance(instance), key, *names.tokens[UUID(token)])
                for instance, key, token in starts
            ),
            instances=tuple((state, execution_of[id_]) for _, state, id_ in instances),
        ),
        business=tuple(sorted(names.tokens[UUID(token)] for _, token in business)),
        counts={execution_of[id_]: (done, failed, gone) for id_, done, failed, gone in counts},
    )


def instance_key(number: int) -> str:
    """The key of an instance, by its number."""
    return f"instance-{number}"


def _instance(key: str) -> int:
    return int(key.rpartition("-")[2])


def _execution(one: list[Any], node_of: dict[str, int], execution_of: dict[str, int]) -> Execution:
    (_, instance, delivery, policy, limit, status, stopping, suspended, cancelled, master, epoch,
     adopt_after, total, carried, restart_of, summary, staged) = one  # fmt: skip
    return Execution(
        instance=_instance(instance),
        delivery=delivery,
        max_attempts=policy["max_attempts"],
        max_failed=policy["max_failed"],
        has_finish=policy["has_finish"],
        limit=limit,
        status=status,
        stopping=stopping,
        suspended=suspended,
        cancelled=cancelled,
        master=None if master is None else node_of[master],
        epoch=epoch,
        adopt_after=adopt_after,
        staged=tuple((chunk[0], chunk[1], tuple(chunk[2])) for chunk in staged or ()),
        total=total,
        carried=carried,
        restart_of=None if restart_of is None else execution_of[restart_of],
        summary=summary,
    )


def _partition(
    one: list[Any], node_of: dict[str, int], execution_of: dict[str, int], names: Names
) -> Partition:
    id_, execution, key, delivery, status, owner, token, claims, *rest = one
    row = names.row(id_)
    if token is not None:
        assert names.tokens.get(UUID(token)) == (row, claims), f"a foreign token on partition {id_}"
    return Partition(
        execution_of[execution],
        key,
        delivery,
        status,
        None if owner is None else node_of[owner],
        claims,
        *rest,
    )
