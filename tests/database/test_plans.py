"""What the functions of the schema read: how much, by which index, and whatever was planned when."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from uuid import UUID, uuid4

from psycopg.types.json import Jsonb

from rowlock.db.store import Store
from tests.support.builders import Run, Scene, a_policy


@contextmanager
def plans(scene: Scene) -> Generator[list[str]]:
    """The plans of the statements inside the functions that run in the block."""
    connection = scene.admin
    connection.execute("LOAD 'auto_explain'")
    for setting, value in {
        "auto_explain.log_min_duration": "0",
        "auto_explain.log_nested_statements": "on",
        "auto_explain.log_analyze": "on",
        "auto_explain.log_timing": "off",
        "auto_explain.log_buffers": "on",
        "client_min_messages": "log",
    }.items():
        connection.execute("SELECT set_config(%s, %s, false)", [setting, value])
    seen: list[str] = []

    def keep(notice: Any) -> None:  # Any: psycopg's Diagnostic
        seen.append(notice.message_primary or "")

    connection.add_notice_handler(keep)
    yield seen
    connection.remove_notice_handler(keep)
    connection.execute("SET auto_explain.log_min_duration = -1")


def many_rows(scene: Scene, *, finished: int, delayed: int) -> Run:
    """A table with history: finished rows, and delayed ones of several running executions."""
    busy = [scene.an_execution(20) for _ in range(5)]
    fill = (
        "INSERT INTO rowlock.batch_partitions (execution_id, step, partition_key, status, delivery,"
        " slice, ready, available_at, ended_at)"
        " SELECT %s, 'main', %s || g, %s, 'AT_LEAST_ONCE', '{}', %s, now() + interval '1 h', %s"
        " FROM generate_series(1, %s) g"
    )
    for run in busy:
        each = (delayed // 5, finished // 5)
        scene.admin.execute(fill, [run.id, "delayed-", "PENDING", False, None, each[0]])
        scene.admin.execute(fill, [run.id, "done-", "COMPLETED", True, "2026-01-01", each[1]])
    scene.admin.execute("VACUUM ANALYZE rowlock.batch_partitions")
    return busy[0]


CLAIM = "SELECT count(*) FROM rowlock.claim(%s, %s, %s, false, %s)"
CLAIM_AFTER = "SELECT count(*) FROM rowlock.claim(%s, %s, %s, false, %s, %s)"


def buffers(plan: str) -> int:
    found = re.search(r"Buffers: shared(?: hit=(\d+))?(?: read=(\d+))?", plan)
    return sum(int(number or 0) for number in found.groups()) if found else 0


def test_what_a_claim_costs_does_not_know_the_history(alone: Scene) -> None:
    """Rule 3 and 8: the generic plan reads partial indexes and rows by id, never the table, of which
    100,000 rows are over. Reported as argo#14904, argo#14526, que#90."""
    many_rows(alone, finished=100_000, delayed=20_000)
    node = alone.a_node()
    alone.admin.execute("SET plan_cache_mode = force_generic_plan")
    alone.admin.execute(CLAIM, [node, 4, 4, 1])  # the first call reads the catalogue

    with plans(alone) as seen:
        alone.admin.execute(CLAIM, [node, 4, 4, 2])

    touching = [plan for plan in seen if "batch_partitions" in plan]
    assert touching, "auto_explain has shown nothing"
    for plan in touching:
        assert "Seq Scan on batch_partitions" not in plan, plan
        assert "batch_partitions_delayed" not in plan, plan
    taking = next(plan for plan in touching if "CROSS JOIN LATERAL" in plan)
    assert "batch_partitions_ready" in taking
    # The order of the executions is that of this loop, which SQL does not promise.
    assert re.search(r"Nested Loop.*\n(?: +Buffers.*\n)? +->  Function Scan on e ", taking), taking
    update = next(plan for plan in touching if "Update on batch_partitions" in plan)
    assert "batch_partitions_pkey" in update, update
    assert max(buffers(plan) for plan in touching) < 300, touching


def test_a_snapshot_that_somebody_holds_makes_no_beat_longer_nor_a_claim_that_knows_where_to_begin(
    alone: Scene,
) -> None:
    """A report in one long transaction keeps every version of every row, and queues of others get slower
    and slower by it (brandur.org/postgres-queues, planetscale.com/blog/keeping-a-postgres-queue-healthy).

    From the head of the line a claim passes over what has been claimed since, half a microsecond for each. Looks
    for work, which are far more, begin at the other end of the line, and claims behind what nothing waits before.
    """
    run = alone.an_execution(1)
    alone.add(run, 25000)
    alone.admin.execute("VACUUM ANALYZE rowlock.batch_partitions")
    node = alone.a_node()
    beat = "SELECT * FROM rowlock.beat(%s, 0, false, '[]', '{}')"
    beat_without_a_look = "SELECT * FROM rowlock.beat(%s, 0, false, '[]', '{}', false)"
    complete = "SELECT * FROM rowlock.complete(%s, %s::bigint[], %s::uuid[], %s::jsonb[])"
    with alone.database.connect(autocommit=False) as report:
        report.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        report.execute("SELECT count(*) FROM rowlock.executions")
        for seed in range(40):
            ids, tokens = zip(
                *alone.admin.execute(
                    "SELECT id, claim_token FROM rowlock.claim(%s, 500, 0, false, %s)", [node, seed]
                ),
                strict=True,
            )
            alone.admin.execute(complete, [node, [*ids], [*tokens], ["1"] * len(ids)])
        alone.admin.execute(beat, [node])
        with plans(alone) as seen:
            alone.admin.execute(beat, [node])
            alone.admin.execute("SELECT rowlock._is_live(%s)", [run.id])
        assert max(buffers(plan) for plan in seen) < 100, seen

        alone.admin.execute(
            "UPDATE rowlock.batch_job_coordination SET total = 25001 WHERE execution_id = %s",
            [run.id],
        )
        ((weight, number),) = alone.store.passed(node, 0).values()
        alone.admin.execute("SET plan_cache_mode = force_generic_plan")
        with plans(alone) as seen:
            alone.admin.execute(CLAIM, [node, 4, 4, 98])
        assert max(buffers(plan) for plan in seen) > 300, "nothing was passed over"
        with plans(alone) as seen:
            after = Jsonb({str(run.id): [weight, number]})
            alone.admin.execute(CLAIM_AFTER, [node, 4, 4, 98, after])
        assert max(buffers(plan) for plan in seen) < 200, seen

        # Nothing waits any more, so there is no end of the line to begin at.
        alone.admin.execute("SELECT count(*) FROM rowlock.claim(%s, 9999, 0, false, 99)", [node])
        with plans(alone) as seen:
            alone.admin.execute(beat, [node])
        assert max(buffers(plan) for plan in seen) > 300, "nothing was passed over"
        with plans(alone) as seen:
            alone.admin.execute(beat_without_a_look, [node])
        assert max(buffers(plan) for plan in seen) < 100, seen

    alone.admin.execute("VACUUM rowlock.batch_partitions")
    with plans(alone) as seen:
        alone.admin.execute(CLAIM, [node, 4, 4, 99])
    assert max(buffers(plan) for plan in seen) < 300, seen


def test_looking_for_work_reads_nobody_elses_work(alone: Scene) -> None:
    """Most of the table is PENDING: the planner then expects to meet such a row at once in a plain
    scan, although those of one execution lie behind all those of another."""
    runs = [alone.an_execution(20) for _ in range(4)]
    for run in runs:
        alone.add(run, 15000)
    alone.admin.execute("VACUUM ANALYZE rowlock.batch_partitions")
    node = alone.a_node()
    beat = "SELECT * FROM rowlock.beat(%s, 0, false, '[]', '{}')"
    advance = "SELECT * FROM rowlock.advance(%s, %s, %s)"
    master = [runs[-1].master, runs[-1].id, runs[-1].epoch]

    def look(seed: int) -> None:
        alone.admin.execute(CLAIM, [node, 4, 4, seed])
        alone.admin.execute(beat, [node])
        alone.admin.execute(advance, master)

    look(1)  # reads the catalogue
    with plans(alone) as seen:
        look(2)

    assert len([plan for plan in seen if "batch_partitions" in plan]) >= 5
    for plan in seen:
        assert "Seq Scan on batch_partitions" not in plan, plan
        assert "JIT" not in plan, plan
    assert max(buffers(plan) for plan in seen) < 400, seen


def test_looking_for_what_is_live_reads_no_history(alone: Scene) -> None:
    """Every look of a master at its execution asks this."""
    run = many_rows(alone, finished=100_000, delayed=20_000)
    over = alone.an_execution(1)
    node = alone.a_node(only=over.id)
    (claim,) = alone.claim(node)
    alone.complete(node, claim)
    alone.admin.execute("ANALYZE rowlock.batch_partitions")
    alone.admin.execute("SET plan_cache_mode = force_generic_plan")
    alone.admin.execute("SELECT rowlock._is_live(%s)", [run.id])  # reads the catalogue

    with plans(alone) as seen:
        for one, live in ((run, True), (over, False)):
            (found,) = alone.all("SELECT rowlock._is_live(%s) AS live", one.id)
            assert found.live is live

    inner = [plan for plan in seen if "Index" in plan]
    assert inner
    assert all("Seq Scan on batch_partitions" not in plan for plan in seen), seen
    assert max(buffers(plan) for plan in seen) < 100, seen


def test_what_a_holder_writes_finds_its_rows_by_id(alone: Scene) -> None:
    """Not by the index of all claims, which looks cheaper when the statistics knew none."""
    many_rows(alone, finished=50_000, delayed=0)
    node = alone.a_node()
    claims = alone.claim(node, slots=8)
    alone.admin.execute("SET plan_cache_mode = force_generic_plan")
    ids, tokens = [claim.id for claim in claims], [claim.token for claim in claims]

    with plans(alone) as seen:
        alone.admin.execute(
            "SELECT * FROM rowlock.complete(%s, %s::bigint[], %s::uuid[], %s::jsonb[])",
            [node, ids[:3], tokens[:3], ["1"] * 3],
        )
        alone.admin.execute(
            "SELECT rowlock.fail(%s, %s, %s, '{}', 'retry', 0)", [node, ids[3], tokens[3]]
        )
        alone.admin.execute("SELECT rowlock.checkpoint(%s, %s, %s, '1')", [node, ids[4], tokens[4]])
        with alone.admin.transaction():
            opened = "SELECT rowlock.fence_open(%s, %s) AS id"
            fence = alone.one(opened, ids[5], tokens[5]).id
            alone.admin.execute("SELECT rowlock.fence_arm(%s, 'completion', '1')", [fence])
        alone.admin.execute(
            "SELECT * FROM rowlock.release(%s, %s::bigint[], %s::uuid[], true)",
            [node, ids[6:], tokens[6:]],
        )

    touching = [plan for plan in seen if "batch_partitions" in plan]
    assert len(touching) >= 9
    for plan in touching:
        assert "Seq Scan on batch_partitions" not in plan, plan
        assert "batch_partitions_claimed" not in plan, plan


def test_recovering_a_node_reads_only_its_claims(alone: Scene) -> None:
    many_rows(alone, finished=50_000, delayed=0)
    node = alone.a_node()
    alone.claim(node, slots=8)
    alone.suspect(node)
    alone.admin.execute("SET plan_cache_mode = force_generic_plan")

    with plans(alone) as seen:
        alone.admin.execute(
            "SELECT * FROM rowlock.remove_node(%s, %s, %s)", [uuid4(), node, alone.beat_of(node)]
        )

    assert all("Seq Scan on batch_partitions" not in plan for plan in seen), seen


def test_reading_results_passes_over_nobody_elses_history(alone: Scene) -> None:
    many_rows(alone, finished=30_000, delayed=0)
    run = alone.an_execution(20)
    node = alone.a_node(only=run.id)
    alone.complete(node, *alone.claim(node, slots=20))
    many_rows(alone, finished=30_000, delayed=0)
    alone.admin.execute("SELECT rowlock.results(%s, 0, 5)", [run.id])  # reads the catalogue

    with plans(alone) as seen:
        first = alone.all("SELECT id FROM rowlock.results(%s, 0, 15)", run.id)
        last = alone.all("SELECT id FROM rowlock.results(%s, %s, 15)", run.id, first[-1].id)

    assert (len(first), len(last)) == (15, 5)
    assert max(buffers(plan) for plan in seen) < 40, seen


# -- plans that were made when there was little ----------------------------------------------------------


def moves(scene: Scene, run: Run, node: UUID, seed: int) -> None:
    """What a node does again and again, in one session."""
    claims = scene.claim(node, slots=6, seed=seed)
    assert len(claims) == 6
    first, second, third, *rest = claims
    store, pairs = scene.store, [(claim.id, claim.token) for claim in claims]
    store.beat(node, load=0, draining=False, orphans=(), executions=())
    assert store.report(node, [(*pairs[0], '{"done": 1}')]) == {first.id}
    assert store.checkpoint(node, *pairs[0], '{"saves": 1}')
    assert scene.fail(node, first, delay_seconds=3600) == "retry"
    assert scene.release(node, second, unstarted=True) == ["released"]
    assert scene.complete(node, third, *rest) == ["completed"] * 4
    assert store.claims_of(node) == {}
    assert store.advance(run.master, run.id, run.epoch).status == "RUNNING"
    store.promote(10)
    store.recover(node)
    store.passed(node, 0)


def test_a_session_whose_plans_were_made_over_ten_rows_reads_no_more_over_a_hundred_thousand(
    alone: Scene,
) -> None:
    """A small execution, then a large one, and nobody has analyzed the table yet."""
    alone.admin.execute("ALTER TABLE rowlock.batch_partitions SET (autovacuum_enabled = off)")
    alone.store = Store(alone.admin)  # whose plans are seen
    run = alone.an_execution(60, policy=a_policy(max_attempts=100))
    node = alone.a_node()
    for seed in range(8):  # from the sixth on a session keeps its plans
        moves(alone, run, node, seed)
    with alone.database.connect() as another:
        another.execute(
            "INSERT INTO rowlock.batch_partitions (execution_id, step, partition_key, delivery, slice)"
            " SELECT %s, 'main', 'more-' || g, 'AT_LEAST_ONCE', '{}' FROM generate_series(1, 100000) g",
            [run.id],
        )

    with plans(alone) as seen:
        moves(alone, run, node, 99)

    touching = [plan for plan in seen if "batch_partitions" in plan]
    assert len(touching) >= 12
    for plan in touching:
        assert "Seq Scan on batch_partitions" not in plan, plan
        assert "JIT" not in plan, plan
        assert buffers(plan) < 300, plan


def test_every_function_that_reads_partitions_goes_by_an_index(scene: Scene) -> None:
    """Also one that a later migration replaces, which begins without settings."""
    rows = scene.all(
        "SELECT p.oid::regprocedure::text AS name, p.proconfig AS settings FROM pg_proc p"
        " WHERE p.pronamespace = 'rowlock'::regnamespace AND p.prosecdef AND p.prosrc ~ 'batch_partitions|rowlock\\.executions'"
    )
    assert len(rows) > 20
    for row in rows:
        assert {"enable_seqscan=off", "jit=off"} <= set(row.settings), row.name


def test_a_batch_of_completions_costs_by_its_rows_not_by_their_square(alone: Scene) -> None:
    """No plan knows how many rows an array has."""
    alone.an_execution(1200)
    node = alone.a_node()
    alone.admin.execute("SET plan_cache_mode = force_generic_plan")
    claims = alone.claim(node, slots=600)
    ids, tokens = [claim.id for claim in claims], [claim.token for claim in claims]

    with plans(alone) as seen:
        (accepted,) = alone.all(
            "SELECT count(*) FROM rowlock.complete(%s, %s::bigint[], %s::uuid[],"
            " array_fill('1'::jsonb, ARRAY[600])) WHERE outcome = 'completed'",
            *(node, ids, tokens),
        )

    assert accepted.count == 600
    rows_looked_at = [
        int(rows) * int(loops)
        for plan in seen
        for rows, loops in re.findall(r"actual rows=(\d+) loops=(\d+)", plan)
    ]
    assert max(rows_looked_at) <= 600, seen
    assert not [plan for plan in seen if "Rows Removed by Join Filter" in plan], seen
