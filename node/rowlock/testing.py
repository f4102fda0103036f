"""For tests of jobs: run them in this process, without a rowlock database.

    result = rowlock.testing.run(Settle, Month(year=2013, month=1), nodes=3)
    assert result.summary.days == 31

Every payload takes the way it takes in production (strict JSON and back), and `ctx` is the one that
executors use. What is left out is what only a database can do: claims, fences, other nodes. There
is no waiting between retries and no time-out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rowlock.inline import (
    Interruption,
    Line,
    Partition,
    PartitionRun,
    Runner,
    RunResult,
    plan,
    session_for,
)
from rowlock.job import AnyJob, Cluster, Job, NodeInfo
from rowlock.registry import Definition, define

if TYPE_CHECKING:
    import psycopg

# What run() returns is made in rowlock.inline; authors find it here.
__all__ = [
    "Partition",
    "PartitionRun",
    "RunResult",
    "assert_covers",
    "assert_resumable",
    "partitions",
    "run",
]

ParamsT = TypeVar("ParamsT")
SliceT = TypeVar("SliceT")
ResultT = TypeVar("ResultT")
ItemT = TypeVar("ItemT")


def partitions(
    job: Job[ParamsT, SliceT, ResultT] | type[Job[ParamsT, SliceT, ResultT]],
    params: ParamsT,
    nodes: int | Cluster = 1,
) -> list[Partition[SliceT]]:
    """Plan an execution.

    Args:
        job: The job, or its class.
        params: Its parameters.
        nodes: The cluster that `partition()` sees, or a number of nodes of two slots each.

    Raises:
        ContractError: The parameters, a slice, a key or a weight breaks its contract, or two
            partitions have the same key.
    """
    definition = _definition(job)
    planned = plan(definition, _decoded(definition, params), _cluster(nodes))
    return [item.partition for item in planned]


def run(
    job: Job[ParamsT, SliceT, ResultT] | type[Job[ParamsT, SliceT, ResultT]],
    params: ParamsT,
    *,
    nodes: int | Cluster = 1,
    database: str | psycopg.Connection[Any] | None = None,
    stop_after: int | None = None,
    crash_after: int | None = None,
    raise_errors: bool = True,
    instance: str = "test",
) -> RunResult[ResultT]:
    """Run an execution to its end: plan, process each partition, finish.

    Args:
        job: The job, or its class.
        params: Its parameters.
        nodes: The cluster that `partition()` sees, or a number of nodes of two slots each.
        database: Where `ctx.transaction()` writes: a connection string, or an open connection,
            inside whose transaction everything then happens. It needs no rowlock schema.
        stop_after: Ask each attempt to stop after so many checkpoints, and start the next where it
            stopped.
        crash_after: End each attempt before it can write the checkpoint after so many; the next
            one repeats what was done since.
        raise_errors: Raise what author code raises. Otherwise partitions are retried as the job
            says, and the errors are in the result.
        instance: The instance key, part of `ctx.idempotency_key`.

    Raises:
        ContractError: A payload breaks its contract.
        UsageError: The job uses something wrongly, or `ctx.transaction()` without a `database`.
    """
    definition = _definition(job)
    decoded = _decoded(definition, params)
    line = Line(session_for(database))
    runner = Runner(
        definition,
        line,
        params=decoded,
        instance=instance,
        interruption=Interruption(stop_after=stop_after, crash_after=crash_after),
        raise_errors=raise_errors,
    )
    try:
        return runner.run(plan(definition, decoded, _cluster(nodes)))
    finally:
        line.close()


def assert_covers(
    job: Job[ParamsT, SliceT, ResultT] | type[Job[ParamsT, SliceT, ResultT]],
    params: ParamsT,
    items: Iterable[ItemT],
    *,
    of: Callable[[SliceT], Iterable[ItemT]],
    nodes: Sequence[int | Cluster] = (1, 2, 5),
) -> None:
    """Assert that the partitions cover the input exactly once, for several sizes of the cluster.

    Args:
        job: The job, or its class.
        params: Its parameters.
        items: The input; items must be hashable.
        of: The items of a slice.
        nodes: The clusters to plan for.

    Raises:
        AssertionError: Items are missing, are in two partitions, or belong to no input.
    """
    expected = Counter(items)
    for cluster in nodes:
        found = Counter(
            item for part in partitions(job, params, cluster) for item in of(part.slice)
        )
        problems = [
            f"{len(wrong)} items {what}, for example {sorted(map(repr, wrong))[:5]}"
            for what, wrong in (
                ("are in no partition", expected - found),
                ("are in a partition too many", found - expected),
            )
            if wrong
        ]
        if problems:
            raise AssertionError(f"with nodes={cluster!r}: {'; '.join(problems)}")


def assert_resumable(
    job: Job[ParamsT, SliceT, ResultT] | type[Job[ParamsT, SliceT, ResultT]],
    params: ParamsT,
    *,
    nodes: int | Cluster = 1,
) -> None:
    """Assert that interrupted attempts end with the results of undisturbed ones.

    Once, every attempt is stopped after its first checkpoint; once, it is ended just before its
    second. For jobs without a database: with one, use `run(…, stop_after=1)` and look at the rows.

    Raises:
        AssertionError: A result or the summary differs.
    """
    undisturbed = run(job, params, nodes=nodes)
    stopped = run(job, params, nodes=nodes, stop_after=1)
    ended = run(job, params, nodes=nodes, crash_after=1)
    for how, other in (("stopped", stopped), ("ended before a checkpoint", ended)):
        for key, result in undisturbed.results.items():
            if other.results[key] != result:
                raise AssertionError(
                    f"partition {key!r} returned {other.results[key]!r} after it was {how}, "
                    f"and {result!r} undisturbed"
                )
        if other.summary != undisturbed.summary:
            raise AssertionError(
                f"finish() returned {other.summary!r} after partitions were {how}, "
                f"and {undisturbed.summary!r} undisturbed"
            )


def _definition(job: AnyJob | type[AnyJob]) -> Definition:
    return define(job) if isinstance(job, type) else define(type(job), job)


def _decoded(definition: Definition, params: Any) -> Any:
    return definition.parameters.decode(definition.parameters.encode(params))


def _cluster(nodes: int | Cluster) -> Cluster:
    if isinstance(nodes, Cluster):
        return nodes
    return Cluster(
        nodes=tuple(
            NodeInfo(name=f"node-{number}", pool="default", slots=2, load=0)
            for number in range(1, nodes + 1)
        )
    )
