"""The view of pools: what an exporter and an autoscaler see, and what it costs."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from rowlock.db import readings
from rowlock.db.readings import Pool
from tests.support.builders import Scene, a_policy


def seen(scene: Scene) -> Pool:
    """The scene's pool, as the reader's role sees it."""
    with scene.database.connect(role="rowlock_reader") as db:
        (pool,) = [one for one in readings.pools(db) if one.pool == scene.pool]
    return pool


def states(pool: Pool) -> tuple[int, int, int, int]:
    """How many partitions are pending, delayed, suspended and claimed."""
    return pool.pending, pool.delayed, pool.suspended, pool.claimed


def test_partitions_are_counted_by_what_may_happen_to_them(scene: Scene) -> None:
    run = scene.an_execution(5, policy=a_policy(max_attempts=3))
    node = scene.a_node(slots=4)
    assert states(seen(scene)) == (5, 0, 0, 0)

    one, two, three = scene.claim(node, slots=3)
    assert states(seen(scene)) == (2, 0, 0, 3)

    scene.complete(node, one)
    scene.fail(node, two, delay_seconds=60)
    assert states(seen(scene)) == (2, 1, 0, 1)

    scene.store.suspend(run.id, "test", None)
    assert states(seen(scene)) == (0, 1, 2, 1)
    assert seen(scene).paused

    scene.store.resume(run.id, "test", None)
    scene.release(node, three)
    assert states(seen(scene)) == (3, 1, 0, 0)
    assert not seen(scene).paused


def test_what_waits_for_the_limit_of_its_execution_waits_for_no_node(scene: Scene) -> None:
    run = scene.an_execution(5)
    node = scene.a_node(slots=4)
    assert scene.store.set_limits(run.id, {"parallelism": 2}, "test", None) == "changed"
    assert states(seen(scene)) == (5, 0, 0, 0)

    claims = scene.claim(node, slots=4)

    pool = seen(scene)
    assert (states(pool), pool.limited) == ((0, 0, 0, 2), 3)
    assert pool.oldest_pending_seconds == 0
    scene.complete(node, claims[0])
    pool = seen(scene)
    assert (states(pool), pool.limited) == ((3, 0, 0, 1), 0)


def test_executions_that_nobody_can_serve_are_counted(scene: Scene) -> None:
    """Work of a job or a contract that no living node registers waits for ever without a word elsewhere
    (dbos-transact-golang#174, dbos-transact-py#453)."""
    run = scene.an_execution(2)
    assert seen(scene).unserved == 1

    scene.a_node(jobs={scene.job: ["another"]})
    scene.a_node(slots=0)
    scene.a_node(only=uuid4())
    assert seen(scene).unserved == 1

    node = scene.a_node(slots=2)
    assert seen(scene).unserved == 0

    scene.claim(node, slots=2)
    scene.admin.execute(
        "UPDATE rowlock.batch_nodes SET heartbeat_at = now() - interval '1 h' WHERE node_id = %s",
        [node],
    )
    assert seen(scene).unserved == 0, "nothing of it waits"

    other = scene.an_execution(1)
    assert seen(scene).unserved == 1
    scene.store.suspend(other.id, "test", None)
    assert seen(scene).unserved == 0
    scene.store.resume(other.id, "test", None)
    scene.store.suspend(run.id, "test", None)
    assert seen(scene).unserved == 1


def test_what_is_cancelled_waits_for_nobody(scene: Scene) -> None:
    run = scene.an_execution(3)
    node = scene.a_node()
    scene.claim(node, slots=1)

    scene.store.cancel(run.id, "test", None)

    pool = seen(scene)
    assert states(pool) == (0, 0, 0, 1)
    assert (pool.running, pool.closing) == (0, 1)


def test_a_restart_counts_what_is_left(scene: Scene) -> None:
    run = scene.an_execution(4, policy=a_policy(max_attempts=1))
    node = scene.a_node()
    claims = scene.claim(node, slots=4)
    scene.complete(node, *claims[:3])
    scene.fail(node, claims[3], kind="never")
    scene.advance(run)
    assert scene.execution(run).status == "FAILED"

    new = UUID(int=run.id.int ^ 1)
    assert scene.store.restart(new, run.id, actor="test", reason=None) == (new, "restarted")

    assert states(seen(scene)) == (1, 0, 0, 0)


def test_the_oldest_counts_from_when_it_could_be_claimed(scene: Scene) -> None:
    run = scene.an_execution(3)
    node = scene.a_node()
    age(scene, run.id, "100 s")
    assert 99 < seen(scene).oldest_pending_seconds < 160

    claims = scene.claim(node, slots=3)
    assert all(99 < (claim.waited or 0) < 160 for claim in claims)
    assert seen(scene).oldest_pending_seconds == 0

    scene.release(node, claims[0])
    assert seen(scene).oldest_pending_seconds < 60, "it waits anew"
    scene.fail(node, claims[1], delay_seconds=3600)
    assert seen(scene).oldest_pending_seconds < 60, "a delayed one does not wait yet"


def test_of_those_that_came_back_the_first_in_line_counts(scene: Scene) -> None:
    scene.an_execution(3)
    node = scene.a_node()
    first = scene.claim(node, slots=1)[0]
    scene.release(node, first)
    scene.admin.execute(
        "UPDATE rowlock.batch_partitions SET available_at = now() - interval '1 h' WHERE id = %s",
        [first.id],
    )

    assert 3599 < seen(scene).oldest_pending_seconds < 3660


def age(scene: Scene, execution: UUID, interval: str) -> None:
    scene.admin.execute(
        "UPDATE rowlock.batch_partitions SET available_at = now() - %s::interval"
        " WHERE execution_id = %s",
        [interval, execution],
    )


def test_nodes_are_counted_by_status_and_those_without_slots_are_not(scene: Scene) -> None:
    scene.a_node(slots=3)
    leaving, lost, master = scene.a_node(), scene.a_node(), scene.a_node(slots=0)
    scene.store.beat(leaving, load=0, draining=True)
    scene.suspect(lost)
    scene.suspect(master)
    scene.admin.execute(
        "UPDATE rowlock.batch_nodes SET heartbeat_at = now() - interval '50 s' WHERE node_id = %s",
        [lost],
    )

    pool = seen(scene)

    assert (pool.nodes_active, pool.nodes_unreachable, pool.nodes_draining) == (2, 1, 1)
    assert pool.slots == 3
    assert 49 < pool.silent_seconds < 110
    scene.store.remove_node(master, lost, scene.beat_of(lost))
    assert seen(scene).silent_seconds < 49


def test_a_node_that_nobody_was_there_to_mark_is_not_taken_for_active(scene: Scene) -> None:
    node = scene.a_node()
    scene.admin.execute(
        "UPDATE rowlock.batch_nodes SET heartbeat_at = now() - interval '50 s' WHERE node_id = %s",
        [node],
    )

    pool = seen(scene)

    assert scene.node(node).status == "ACTIVE"
    assert (pool.nodes_active, pool.nodes_unreachable, pool.slots) == (0, 1, 0)


def test_executions_that_ended_lately_are_counted_by_job_and_status(scene: Scene) -> None:
    scene.store.cancel(scene.an_execution(1).id, "test", None)
    old = scene.an_execution(1).id
    scene.store.cancel(old, "test", None)
    scene.admin.execute("ALTER TABLE rowlock.batch_job_coordination DISABLE TRIGGER USER")
    scene.admin.execute(
        "UPDATE rowlock.batch_job_coordination SET ended_at = now() - interval '16 min'"
        " WHERE execution_id = %s",
        [old],
    )

    with scene.database.connect(role="rowlock_reader") as db:
        found = [one for one in readings.endings(db) if one.job_name == scene.job]

    assert [(one.pool, one.status, one.number) for one in found] == [(scene.pool, "CANCELLED", 1)]


def test_who_holds_on_to_old_rows_is_seen_without_special_rights(scene: Scene) -> None:
    scene.admin.execute("CREATE TABLE public.ticks (n integer)")
    with (
        scene.database.connect(role="rowlock_reader") as db,
        psycopg.connect(scene.database.dsn) as sleeper,
    ):
        sleeper.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        sleeper.execute("SELECT 1")
        for n in range(5):
            scene.admin.execute("INSERT INTO public.ticks VALUES (%s)", [n])

        first, second = readings.server(db), readings.server(db)

        assert first.xmin is not None
        assert first.xmin_age >= 5
        assert second.xmin == first.xmin
        sleeper.rollback()
        after = readings.server(db)
        assert after.xmin != first.xmin


def test_the_server_and_its_tables_are_seen_by_the_reader(scene: Scene) -> None:
    with scene.database.connect(role="rowlock_reader") as db:
        server = readings.server(db)

    assert server.schema_version >= 8
    assert {"batch_nodes", "batch_partitions", "batch_job_coordination"} <= set(server.tables)
    assert 1 <= server.connections < server.connections_max
    assert 0 <= server.notify_queue < 1


@pytest.mark.timeout(240)
def test_its_cost_knows_neither_the_rows_that_wait_nor_those_that_are_over(alone: Scene) -> None:
    """Measured with 1,000,000 partitions: 25 pages, 2 ms."""
    small = pages(alone)
    run = alone.an_execution(1)
    alone.admin.execute(
        "INSERT INTO rowlock.batch_partitions (execution_id, step, partition_key, delivery, slice,"
        "  available_at, status, ended_at)"
        " SELECT %s, 'main', 'key ' || g, 'AT_LEAST_ONCE', '1', now(),"
        "  CASE WHEN mod(g, 2) = 0 THEN 'COMPLETED' ELSE 'PENDING' END, CASE WHEN mod(g, 2) = 0 THEN now() END"
        " FROM generate_series(1, 100000) g",
        [run.id],
    )
    alone.admin.execute(
        "INSERT INTO rowlock.batch_job_coordination (execution_id, job_name, contract_hash, policy,"
        "  delivery, instance_key, parameters, pool, status, adopt_after, requested_at, ended_at)"
        " SELECT gen_random_uuid(), 'j', 'h', e.policy, 'AT_LEAST_ONCE', 'i' || g, '{}', e.pool,"
        "  'CANCELLED', now(), now(), now() - make_interval(secs => g)"
        " FROM generate_series(1, 20000) g, rowlock.batch_job_coordination e"
        " WHERE e.execution_id = %s",
        [run.id],
    )
    alone.admin.execute("ANALYZE")

    assert pages(alone) < small + 40


def pages(scene: Scene) -> int:
    """How many pages a reading of the pools touches, the second time."""
    statement = "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT * FROM rowlock.pools"
    scene.all(statement)
    ((plan,),) = [tuple(row) for row in scene.all(statement)]
    root: dict[str, Any] = plan[0]["Plan"]
    return int(root["Shared Hit Blocks"]) + int(root["Shared Read Blocks"])
