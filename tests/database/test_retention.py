"""Retention: what is old goes in bounded batches, an instance's executions together or not at all."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import pytest

from rowlock.protocol.model import Purged
from tests.support import oracles
from tests.support.builders import AT_MOST_ONCE, HASH, Run, Scene, a_policy

DAY = 86_400.0
NOTHING = Purged(executions=0, partitions=0, events=0, nodes=0, more=False)


def retain(
    scene: Scene,
    *,
    completed: float | None = 30,
    failed: float | None = 90,
    events: float | None = None,
    limit: int = 1000,
) -> Purged:
    """One call; ages in days."""

    def seconds(days: float | None) -> float | None:
        return None if days is None else days * DAY

    return scene.store.retain(
        completed_seconds=seconds(completed),
        failed_seconds=seconds(failed),
        events_seconds=seconds(events),
        limit=limit,
    )


def age(scene: Scene, run: Run | UUID, days: float) -> None:
    id_ = run.id if isinstance(run, Run) else run
    scene.admin.execute(
        "UPDATE rowlock.batch_job_coordination SET ended_at = ended_at - make_interval(days => %s)"
        " WHERE execution_id = %s",
        [days, id_],
    )


def completed(scene: Scene, partitions: int = 3, **request: Any) -> Run:
    run = scene.an_execution(partitions, **request)
    node = scene.a_node(only=run.id)
    while claims := scene.claim(node, slots=500):
        scene.complete(node, *claims)
    assert scene.advance(run) == "COMPLETED"
    return run


def cancelled(scene: Scene, partitions: int = 3, **request: Any) -> Run:
    run = scene.an_execution(partitions, **request)
    scene.store.cancel(run.id, "test", None)
    return run


def left(scene: Scene, run: Run) -> tuple[int, int, int]:
    """Rows of an execution that are there: itself, its partitions, what else belongs to it."""
    row = scene.one(
        "SELECT (SELECT count(*) FROM rowlock.batch_job_coordination WHERE execution_id = x)::int AS a,"
        " (SELECT count(*) FROM rowlock.batch_partitions WHERE execution_id = x)::int AS b,"
        " ((SELECT count(*) FROM rowlock.batch_counts WHERE execution_id = x)"
        "  + (SELECT count(*) FROM rowlock.batch_limits WHERE execution_id = x)"
        "  + (SELECT count(*) FROM rowlock.batch_staging WHERE execution_id = x))::int AS c"
        " FROM (SELECT %s::uuid AS x) y",
        run.id,
    )
    return row.a, row.b, row.c


def test_each_kind_of_end_has_its_own_age(alone: Scene) -> None:
    old_done, new_done = completed(alone), completed(alone)
    old_cancelled, older = cancelled(alone), cancelled(alone)
    running = alone.an_execution(2)
    age(alone, old_done, 31)
    age(alone, new_done, 29)
    age(alone, old_cancelled, 89)
    age(alone, older, 91)

    purged = retain(alone)

    assert purged == Purged(executions=2, partitions=6, events=0, nodes=0, more=False)
    assert left(alone, old_done) == left(alone, older) == (0, 0, 0)
    for run in (new_done, old_cancelled, running):
        assert left(alone, run)[0] == 1
    event = alone.one("SELECT * FROM rowlock.batch_events WHERE event = 'purged'")
    assert event.detail == {"executions": 2, "partitions": 6, "events": 0, "nodes": 0}
    assert retain(alone) == NOTHING
    assert alone.one("SELECT count(*) AS n FROM rowlock.batch_events WHERE event = 'purged'").n == 1


def test_never_is_never(alone: Scene) -> None:
    done, gone = completed(alone), cancelled(alone)
    age(alone, done, 5000)
    age(alone, gone, 5000)

    assert retain(alone, completed=None, failed=None) == NOTHING
    assert retain(alone, completed=None).executions == 1
    assert left(alone, done)[0] == 1


def test_a_chain_goes_as_a_whole_when_its_last_is_old_enough(alone: Scene) -> None:
    first = cancelled(alone, options={"parallelism": 2})
    second = alone.a_restart(first)
    alone.store.cancel(second.id, "test", None)
    third = alone.a_restart(second)
    age(alone, first, 500)
    age(alone, second, 400)
    assert retain(alone) == NOTHING  # the third still runs
    node = alone.a_node()
    alone.complete(node, *alone.claim(node, slots=2))
    alone.complete(node, *alone.claim(node, slots=2))
    assert alone.advance(third) == "COMPLETED"
    assert retain(alone) == NOTHING  # and now it is young
    assert len(alone.store.results(third.id, 0, 10)) == 3
    age(alone, third, 31)
    alone.admin.execute(  # as a master does whose lock is overlooked while its execution ends
        "INSERT INTO rowlock.batch_staging VALUES (%s, 9, 0, '{a}', '{1}', '{0}')", [first.id]
    )

    purged = retain(alone)

    assert (purged.executions, purged.partitions) == (3, 9)
    for run in (first, second, third):
        assert left(alone, run) == (0, 0, 0)


def test_a_master_that_looks_too_late_is_told_to_let_go(alone: Scene) -> None:
    run = cancelled(alone)
    age(alone, run, 91)
    retain(alone)

    assert alone.advance(run) == "SUPERSEDED"
    assert alone.store.finish(run.id, run.epoch, summary="1") == "SUPERSEDED"


def test_what_is_deleted_at_once_is_bounded_and_nobody_sees_half_of_a_plan(alone: Scene) -> None:
    runs = [completed(alone, 250) for _ in range(3)]
    for run in runs:
        age(alone, run, 31)

    batches = [retain(alone, limit=100)]
    assert all(left(alone, run)[0] == 0 for run in runs), "a plan with holes can be seen"
    while batches[-1].more:
        batches.append(retain(alone, limit=100))

    assert max(one.partitions for one in batches) == 100
    assert sum(one.partitions for one in batches) == 750
    assert sum(one.executions for one in batches) == 3
    assert all(left(alone, run) == (0, 0, 0) for run in runs)
    assert alone.all("SELECT FROM rowlock.batch_purges") == []


def test_instances_and_starts_stay(alone: Scene) -> None:
    """G5 over the purge: what was started at most once is not started again."""
    run = alone.an_execution(["a", "b"], delivery=AT_MOST_ONCE, instance="2024-07")
    node = alone.a_node()
    failed = alone.a_failure(node)
    alone.store.cancel(run.id, "test", None)
    age(alone, run, 91)
    assert retain(alone).executions == 1

    def launch(key: str | None, parameters: str = '{"month": 7}') -> tuple[UUID, str]:
        return alone.store.request(
            uuid4(),
            job=alone.job,
            contract_hash=HASH,
            policy=a_policy(),
            delivery=AT_MOST_ONCE,
            instance_key="2024-07",
            launch_key=key,
            parameters=parameters,
            pool=alone.pool,
        )

    assert launch(None, '{"month": 8}') == (run.id, "parameters")
    id_, outcome = launch(None)
    row = alone.execution(id_)
    assert (outcome, row.status, row.restart_of, row.carried) == ("requested", "REQUESTED", None, 0)
    taken = alone.store.adopt(run.master, id_)
    assert taken is not None
    again = Run(id=id_, master=run.master, epoch=taken.epoch, instance="2024-07")
    alone.stage(again, ["a", "b"])
    alone.store.seal(id_, again.epoch, "main", 2)
    claims = alone.claim(node) + alone.claim(node)
    assert [claim.key for claim in claims] == [{"a": "b", "b": "a"}[failed.key]]


@pytest.mark.parametrize("end", ["completed", "cancelled"])
def test_a_launch_key_has_one_execution_also_when_that_is_gone(alone: Scene, end: str) -> None:
    """A controller that asks again for what it once asked for must not run it again."""

    def launch() -> tuple[UUID, str]:
        return alone.store.request(
            uuid4(),
            job=alone.job,
            contract_hash=HASH,
            policy=a_policy(),
            delivery=AT_MOST_ONCE,
            instance_key="i",
            launch_key=f"{alone.job}/1",
            parameters="{}",
            pool=alone.pool,
        )

    id_, _ = launch()
    if end == "cancelled":
        alone.store.cancel(id_, "test", None)
    else:
        taken = alone.store.adopt(alone.a_node(), id_)
        assert taken is not None
        alone.store.seal(id_, taken.epoch, "main", 0)
        alone.store.advance(alone.a_node(), id_, taken.epoch)
    age(alone, id_, 91)
    assert retain(alone).executions == 1

    assert launch() == (id_, "exists")
    assert alone.all("SELECT FROM rowlock.batch_job_coordination") == []


def test_old_events_and_nodes_go_and_nodes_with_claims_stay(alone: Scene) -> None:
    run = alone.an_execution(1)
    holder, left_, living = alone.a_node(), alone.a_node(), alone.a_node()
    alone.claim(holder)
    with alone.held(
        "SELECT FROM rowlock.batch_job_coordination WHERE execution_id = %s FOR UPDATE", run.id
    ):
        alone.remove(holder)  # its claim could not be recovered yet
    alone.store.deregister(left_, "test")
    alone.store.deregister(run.master, "test")
    alone.admin.execute(
        "UPDATE rowlock.batch_nodes SET removed_at = removed_at - interval '100 d'"
        " WHERE removed_at IS NOT NULL AND node_id <> %s",
        [run.master],
    )
    alone.admin.execute("UPDATE rowlock.batch_events SET at = at - interval '100 d' WHERE id <= 2")

    purged = retain(alone, events=90)

    assert (purged.events, purged.nodes) == (2, 1)
    nodes = {row.node_id for row in alone.all("SELECT node_id FROM rowlock.batch_nodes")}
    assert nodes == {holder, living, run.master}


def test_one_purges_at_a_time(alone: Scene) -> None:
    run = completed(alone)
    age(alone, run, 31)
    other = alone.a_store()
    with other.connection.transaction():
        first = other.retain(
            completed_seconds=DAY, failed_seconds=None, events_seconds=None, limit=100
        )
        assert first.executions == 1
        assert retain(alone) == NOTHING


def test_a_restart_under_way_keeps_what_it_restarts(alone: Scene) -> None:
    run = cancelled(alone)
    age(alone, run, 91)
    other = alone.a_store()
    with other.connection.transaction():
        id_, outcome = other.restart(uuid4(), run.id, actor="t", reason=None)
        assert outcome == "restarted"
        assert retain(alone) == NOTHING

    assert retain(alone) == NOTHING
    assert left(alone, run)[:2] == (1, 3)
    assert alone.execution(id_).restart_of == run.id


def test_the_oldest_of_much_history_is_found_without_reading_all_of_it(alone: Scene) -> None:
    run = completed(alone)
    age(alone, run, 31)
    alone.admin.execute(
        "INSERT INTO rowlock.batch_partitions (execution_id, step, partition_key, status, delivery,"
        " slice, ended_at) SELECT gen_random_uuid(), 'main', 'p', 'COMPLETED', 'AT_LEAST_ONCE', '{}',"
        " now() FROM generate_series(1, 30000)"
    )
    alone.admin.execute("VACUUM ANALYZE rowlock.batch_partitions")
    read = "SELECT seq_tup_read AS n FROM pg_stat_user_tables WHERE relname = 'batch_partitions'"
    alone.admin.execute("SELECT pg_stat_force_next_flush()")
    before = alone.one(read).n  # a few rows, while the table was small

    assert retain(alone, events=90).partitions == 3

    alone.store.connection.execute("SELECT pg_stat_force_next_flush()")
    alone.store.connection.execute("SELECT 1")
    assert alone.one(read).n < before + 1000
    assert oracles.deadlocks(alone) == 0
