"""Masters: one at a time, each write under its epoch; plan, seal, the two-step end, cancel."""

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from uuid import UUID, uuid4

import pytest

from rowlock.db.store import Store
from rowlock.protocol.model import Claim, Mastership
from tests.support.builders import (
    AT_MOST_ONCE,
    NIL,
    Run,
    Scene,
    a_policy,
    at_once,
)
from tests.support.waiting import wait_until


def ended(scene: Scene, run: Run | UUID) -> int:
    """How many times an execution has ended."""
    return scene.events(run).count("execution_ended")


def superseded(scene: Scene, run: Run) -> Run:
    """The same execution under a new master; the one given is history."""
    scene.store.deregister(run.master, "test")
    heir = scene.a_node(slots=0, pool="masters")
    taken = scene.store.adopt(heir, run.id)
    assert taken is not None
    return Run(id=run.id, master=heir, epoch=taken.epoch, instance=run.instance)


# -- adopting ------------------------------------------------------------------------------------


def test_the_first_master_of_a_request_plans_it(scene: Scene) -> None:
    id_ = scene.a_request(priority=3)
    node = scene.a_node()

    taken = scene.store.adopt(node, id_)

    assert taken is not None
    assert (taken.execution_id, taken.epoch, taken.status) == (id_, 1, "PLANNING")
    assert (taken.job, taken.pool, taken.parameters) == (scene.job, scene.pool, '{"month": 7}')
    assert scene.store.masterships_of(node) == {id_: 1}


def test_of_eight_racing_nodes_one_becomes_master(scene: Scene) -> None:
    stores = [scene.a_store() for _ in range(8)]
    nodes = [scene.a_node() for _ in stores]
    for round_ in range(25):
        id_ = scene.a_request()
        target = id_ if round_ % 2 else None  # by name, and by looking for what waits

        def adopt(n: int, target: UUID | None = target) -> Mastership | None:
            return stores[n].adopt(nodes[n], target)

        taken = at_once(*(lambda n=n: adopt(n) for n in range(8)))

        winners = [node for node, one in zip(nodes, taken, strict=True) if one is not None]
        assert len(winners) == 1
        row = scene.execution(id_)
        assert (row.master_node, row.master_epoch) == (winners[0], 1)


def test_of_eight_racing_heirs_one_takes_over(scene: Scene) -> None:
    stores = [scene.a_store() for _ in range(8)]
    nodes = [scene.a_node() for _ in stores]
    for _ in range(15):
        run = scene.an_execution(1)
        scene.remove(run.master)

        def adopt(n: int, run: Run = run) -> Mastership | None:
            return stores[n].adopt(nodes[n], run.id)

        taken = at_once(*(lambda n=n: adopt(n) for n in range(8)))

        assert [one.epoch for one in taken if one is not None] == [2]
        assert scene.events(run).count("master_took_over") == 1
        scene.store.cancel(run.id, "test", None)


def test_a_living_master_is_never_replaced(scene: Scene) -> None:
    run = scene.an_execution(1)
    scene.suspect(run.master)  # phase one is a suspicion, no more
    other = scene.a_node()

    assert scene.store.adopt(other, run.id) is None
    assert scene.store.adopt(other) is None
    assert not scene.store.beat(other, load=0, draining=False).adoptable


def test_a_master_whose_answer_was_lost_takes_its_execution_again(scene: Scene) -> None:
    run = scene.an_execution(1)

    again = scene.store.adopt(run.master, run.id)

    assert again is not None
    assert (again.epoch, again.status) == (2, "RUNNING")
    assert scene.advance(run) == "SUPERSEDED", "the older answer is void"


def test_a_request_waits_for_its_own_master_until_adopt_after(scene: Scene) -> None:
    id_ = scene.a_request(adopt_after_seconds=3600)
    node = scene.a_node()

    assert not scene.store.beat(node, load=0, draining=False).adoptable
    assert scene.store.adopt(node) is None
    assert scene.store.adopt(node, id_) is not None


def test_the_highest_priority_is_adopted_first_then_the_oldest(scene: Scene) -> None:
    ids = [scene.a_request(priority=priority) for priority in (0, 5, 5)]
    node = scene.a_node()

    taken = [scene.store.adopt(node) for _ in range(4)]

    order = [one.execution_id if one else None for one in taken]
    assert order == [ids[1], ids[2], ids[0], None]


def test_only_an_active_node_that_knows_the_job_adopts(scene: Scene) -> None:
    id_ = scene.a_request()
    draining, unreachable, removed = scene.a_node(), scene.a_node(), scene.a_node()
    scene.store.beat(draining, load=0, draining=True)
    scene.suspect(unreachable)
    scene.remove(removed)
    foreign, confined = scene.a_node(jobs={"other": ["x"]}), scene.a_node(only=uuid4())

    for node in (draining, unreachable, removed, foreign, uuid4()):
        assert scene.store.adopt(node, id_) is None
        assert scene.store.adopt(node) is None
    assert scene.store.adopt(confined) is None
    assert scene.store.adopt(scene.a_node(only=id_)) is not None


def test_a_busy_execution_is_adopted_beside_the_claims_that_hold_it(scene: Scene) -> None:
    """Under load some claim always holds it; the heir must not wait for a gap."""
    run = scene.an_execution(5)
    scene.remove(run.master)
    claiming, worker, heir = scene.a_store(), scene.a_node(), scene.a_node()
    scene.store.connection.execute("SET lock_timeout = '1s'")

    with claiming.connection.transaction():
        assert scene.claim(worker, store=claiming)
        by_looking = scene.store.adopt(heir)
        by_name = scene.store.adopt(heir, run.id)

    assert by_looking is not None
    assert by_name is not None
    assert (by_looking.epoch, by_name.epoch) == (2, 3)


def test_a_master_that_resigns_is_replaced_at_once(scene: Scene) -> None:
    run = scene.an_execution(1)
    heir = scene.a_node()

    assert scene.store.resign(run.master, run.id, run.epoch)
    assert not scene.store.resign(run.master, run.id, run.epoch)
    assert scene.store.beat(heir, load=0, draining=False).adoptable
    taken = scene.store.adopt(heir)

    assert taken is not None
    assert (taken.epoch, taken.status) == (2, "RUNNING")
    assert not scene.store.resign(run.master, run.id, run.epoch)


def test_masters_that_were_lost_in_author_code_are_counted(scene: Scene) -> None:
    """Those that went while they planned or finished; not those that resigned, or left while partitions ran."""

    def adopted_by_a_new_node() -> Mastership:
        taken = scene.store.adopt(scene.a_node(), run.id)
        assert taken is not None
        return taken

    run = scene.a_plan_being_made()
    scene.remove(run.master)
    first = adopted_by_a_new_node()
    assert (first.status, first.masters_lost) == ("PLANNING", 1)

    assert scene.store.resign(scene.execution(run).master_node, run.id, first.epoch)
    second = adopted_by_a_new_node()
    assert second.masters_lost == 1, "it has told before it went"

    node = scene.execution(run).master_node
    again = scene.store.adopt(node, run.id)
    assert again is not None
    assert again.masters_lost == 1, "it is the same"

    scene.remove(node)
    assert adopted_by_a_new_node().masters_lost == 2

    running = scene.an_execution(1)
    scene.remove(running.master)
    heir = scene.store.adopt(scene.a_node(), running.id)
    assert heir is not None
    assert (heir.status, heir.masters_lost) == ("RUNNING", 0)


def test_masters_lost_while_they_planned_do_not_count_against_finish(scene: Scene) -> None:
    run = scene.a_plan_being_made()
    scene.remove(run.master)
    heir = scene.a_node()
    taken = scene.store.adopt(heir, run.id)
    assert taken is not None
    assert taken.masters_lost == 1

    assert scene.store.seal(run.id, taken.epoch, "main", 0) == ("sealed", None)

    assert scene.execution(run).masters_lost == 0


# -- under its epoch -----------------------------------------------------------------------------


def test_a_superseded_master_stages_and_seals_nothing(scene: Scene) -> None:
    old = scene.a_plan_being_made()
    assert scene.stage(old, ["a", "b"])
    new = superseded(scene, old)

    assert not scene.stage(old, ["c"], chunk=1)
    assert scene.store.seal(old.id, old.epoch, "main", 2) == ("superseded", None)
    assert not scene.store.fail_plan(old.master, old.id, old.epoch, "Late", "too late")
    assert scene.execution(old).status == "PLANNING"

    scene.stage(new, ["x"])
    assert scene.store.seal(new.id, new.epoch, "main", 1) == ("sealed", None)
    keys = scene.all(
        "SELECT partition_key FROM rowlock.batch_partitions WHERE execution_id = %s", new.id
    )
    assert [row.partition_key for row in keys] == ["x"]


def test_a_superseded_master_ends_nothing(scene: Scene) -> None:
    old = scene.an_execution(0)
    new = superseded(scene, old)

    assert scene.advance(old) == "SUPERSEDED"
    assert scene.execution(old).status == "RUNNING"
    assert scene.advance(new) == "COMPLETED"
    # Also when it is over: a superseded launch says so, and follows to the true outcome.
    assert scene.advance(old) == "SUPERSEDED"


def test_a_superseded_master_finishes_nothing(scene: Scene) -> None:
    old = scene.an_execution(0, policy=a_policy(has_finish=True))
    assert scene.advance(old) == "FINISHING"
    new = superseded(scene, old)

    assert scene.store.finish(old.id, old.epoch, summary='"old"') == "SUPERSEDED"
    assert scene.store.finish(new.id, new.epoch, summary='"new"') == "COMPLETED"
    assert scene.store.finish(new.id, new.epoch, summary='"again"') == "COMPLETED"

    row = scene.execution(new)
    assert (row.status, row.summary) == ("COMPLETED", "new")
    assert ended(scene, new) == 1


def test_a_master_superseded_while_it_waits_changes_nothing(scene: Scene) -> None:
    """It has looked, and waits for a lock when another takes over: the epoch is compared again."""
    old = scene.an_execution(0)
    waiting = scene.a_store()
    instance = "SELECT FROM rowlock.batch_instances WHERE instance_key = %s FOR UPDATE"

    with scene.held(instance, old.instance) as holder:

        def look(store: Store) -> str:
            return store.advance(old.master, old.id, old.epoch).status

        with scene.started(waiting, look) as seen:
            new = superseded(scene, old)
            holder.rollback()
            assert seen.result(timeout=10) == "SUPERSEDED"

    assert scene.execution(old).status == "RUNNING"
    assert scene.advance(new) == "COMPLETED"


# -- planning ------------------------------------------------------------------------------------


def test_a_plan_is_invisible_before_its_seal_and_whole_after_it(scene: Scene) -> None:
    run = scene.a_plan_being_made()
    scene.stage(run, ["a", "b"], weights=[1, 2])
    scene.stage(run, ["c"], chunk=1)
    assert scene.statuses(run) == []

    assert scene.store.seal(run.id, run.epoch, "main", 3) == ("sealed", None)

    rows = scene.all(
        "SELECT partition_key, weight, slice, delivery FROM rowlock.batch_partitions"
        " WHERE execution_id = %s ORDER BY id",
        run.id,
    )
    assert [(r.partition_key, r.weight, r.slice["key"]) for r in rows] == [
        *(("a", 1, "a"), ("b", 2, "b"), ("c", 0, "c")),
    ]
    row = scene.execution(run)
    assert (row.status, row.total, row.step) == ("RUNNING", 3, "main")
    staged = scene.all("SELECT FROM rowlock.batch_staging WHERE execution_id = %s", run.id)
    assert staged == []


def test_nobody_sees_half_a_plan(scene: Scene) -> None:
    """The seal is still open: nothing to see, nothing to claim. Then all of it at once."""
    run = scene.a_plan_being_made()
    scene.stage(run, [f"k{n}" for n in range(50)])
    sealing, node = scene.a_store(), scene.a_node()
    scene.store.connection.execute("SET lock_timeout = '1s'")

    with sealing.connection.transaction():
        sealing.seal(run.id, run.epoch, "main", 50)
        assert scene.statuses(run) == []
        assert scene.claim(node, slots=99) == []

    assert len(scene.claim(node, slots=99)) == 50


def test_a_seal_is_repeated_without_effect(scene: Scene) -> None:
    run = scene.a_plan_being_made()
    scene.stage(run, ["a"])
    for _ in range(2):
        assert scene.store.seal(run.id, run.epoch, "main", 1) == ("sealed", None)
    assert not scene.stage(run, ["b"], chunk=1)

    assert scene.statuses(run) == ["PENDING"]


def test_duplicate_keys_are_named_and_nothing_is_visible(scene: Scene) -> None:
    run = scene.a_plan_being_made()
    scene.stage(run, ["a", "it's", "b"])
    scene.stage(run, ["b", "it's", "c"], chunk=1)

    outcome, detail = scene.store.seal(run.id, run.epoch, "main", 6)

    assert (outcome, detail) == ("duplicate", "'b', 'it''s'")
    assert scene.statuses(run) == []
    assert scene.store.fail_plan(run.master, run.id, run.epoch, "DuplicateKey", "b twice")
    row = scene.execution(run)
    assert (row.status, row.failure_reason, row.failure_message) == (
        *("FAILED", "DuplicateKey", "b twice"),
    )


def test_keys_that_only_look_alike_are_different_partitions(scene: Scene) -> None:
    """Keys are compared byte by byte: composed and decomposed accents, case and white space differ."""
    keys = ["\u00e9", "e\u0301", "A", "a", "a ", "1", "01"]
    run = scene.a_plan_being_made()
    scene.stage(run, keys)

    assert scene.store.seal(run.id, run.epoch, "main", len(keys)) == ("sealed", None)
    found = scene.all(
        "SELECT partition_key FROM rowlock.batch_partitions WHERE execution_id = %s", run.id
    )
    assert {row.partition_key for row in found} == set(keys)


@pytest.mark.parametrize("total", [1, 3])
def test_a_plan_of_another_size_than_announced_is_not_sealed(scene: Scene, total: int) -> None:
    run = scene.a_plan_being_made()
    scene.stage(run, ["a", "b"])

    assert scene.store.seal(run.id, run.epoch, "main", total) == ("incomplete", "2")

    assert scene.statuses(run) == []
    assert scene.execution(run).status == "PLANNING"


def test_a_chunk_sent_twice_is_there_once(scene: Scene) -> None:
    run = scene.a_plan_being_made()
    for _ in range(2):
        assert scene.stage(run, ["a", "b"])

    assert scene.store.seal(run.id, run.epoch, "main", 2) == ("sealed", None)


def test_a_plan_made_again_holds_nothing_of_the_run_that_died(scene: Scene) -> None:
    """partition() died after a chunk and yields in another order the second time."""
    run = scene.a_plan_being_made()
    scene.stage(run, ["a", "b"])
    scene.stage(run, ["c", "a"])
    scene.stage(run, ["b", "d"], chunk=1)

    assert scene.store.seal(run.id, run.epoch, "main", 4) == ("sealed", None)

    rows = scene.all(
        "SELECT partition_key FROM rowlock.batch_partitions WHERE execution_id = %s", run.id
    )
    assert sorted(row.partition_key for row in rows) == ["a", "b", "c", "d"]


def test_an_execution_without_partitions_completes(scene: Scene) -> None:
    run = scene.an_execution(0)

    progress = scene.store.advance(run.master, run.id, run.epoch)

    assert (progress.status, progress.total, progress.completed) == ("COMPLETED", 0, 0)
    row = scene.execution(run)
    assert row.counts == {"total": 0, "completed": 0, "failed": 0, "cancelled": 0}


# -- the end -------------------------------------------------------------------------------------


def test_an_execution_ends_when_everything_is_accounted_for(scene: Scene) -> None:
    run = scene.an_execution(2)
    node = scene.a_node()
    one, two = scene.claim(node, slots=2)
    assert scene.advance(run) == "RUNNING"
    scene.complete(node, one)
    assert scene.advance(run) == "RUNNING"
    scene.complete(node, two)

    assert scene.advance(run) == "COMPLETED"

    instance = scene.one(
        "SELECT state FROM rowlock.batch_instances WHERE instance_key = %s", run.instance
    )
    assert instance.state == "COMPLETED"
    assert scene.counted(run) == (2, 0, 0)


@pytest.mark.parametrize("left", ["claimed", "prefetched", "delayed", "suspect"])
def test_nothing_ends_over_work_that_may_still_run(scene: Scene, left: str) -> None:
    run = scene.an_execution(1, policy=a_policy(max_attempts=1 if left == "suspect" else 3))
    node = scene.a_node()
    (claim,) = scene.claim(node, slots=0, prefetch=1) if left == "prefetched" else scene.claim(node)
    if left == "delayed":
        scene.fail(node, claim, delay_seconds=3600)
    elif left == "suspect":
        scene.remove(node)
        assert scene.partition(claim).alone

    assert scene.advance(run) == "RUNNING"


def test_the_last_two_completions_at_once_end_it_exactly_once(scene: Scene) -> None:
    stores = [scene.a_store(), scene.a_store()]
    node = scene.a_node()
    for _ in range(40):
        run = scene.an_execution(2)
        claims = scene.claim(node, slots=2)

        def last(n: int, run: Run = run, claims: list[Claim] = claims) -> str:
            assert scene.complete(node, claims[n], store=stores[n]) == ["completed"]
            return stores[n].advance(run.master, run.id, run.epoch).status

        seen = at_once(lambda: last(0), lambda: last(1))

        assert "COMPLETED" in seen, "whoever looks last sees everything"
        assert (ended(scene, run), scene.execution(run).status) == (1, "COMPLETED")
        assert scene.execution(run).counts["completed"] == 2


@pytest.mark.parametrize(
    "max_failed, failures, outcome",
    [
        (None, 0, "COMPLETED"),
        (None, 1, "FAILED"),
        (1, 1, "COMPLETED"),
        (1, 2, "FAILED"),
        ("20%", 2, "COMPLETED"),
        ("20%", 3, "FAILED"),
        ("19.9%", 2, "FAILED"),
        ("0%", 1, "FAILED"),
        ("100%", 10, "COMPLETED"),
    ],
)
def test_how_many_failures_an_execution_tolerates(
    scene: Scene, max_failed: int | str | None, failures: int, outcome: str
) -> None:
    run = scene.an_execution(10, policy=a_policy(max_failed=max_failed))
    node = scene.a_node(slots=10)
    claims = scene.claim(node, slots=10)
    scene.complete(node, *claims[failures:])
    for claim in claims[:failures]:
        scene.fail(node, claim, "never")

    assert scene.advance(run) == outcome
    assert scene.counted(run) == (10 - failures, failures, 0)
    if outcome == "FAILED":
        assert scene.execution(run).failure_reason == "PartitionsFailed"


def test_without_max_failed_every_partition_runs_before_the_end(scene: Scene) -> None:
    run = scene.an_execution(2)
    node = scene.a_node()
    (claim,) = scene.claim(node)
    scene.fail(node, claim, "never")

    assert scene.advance(run) == "RUNNING"
    assert len(scene.claim(node)) == 1


def test_an_exceeded_max_failed_closes_and_waits_for_what_runs(scene: Scene) -> None:
    run = scene.an_execution(10, policy=a_policy(max_failed=1))
    node = scene.a_node()
    bad, worse, running = scene.claim(node, slots=3)
    scene.fail(node, bad, "never")
    assert scene.advance(run) == "RUNNING"
    scene.fail(node, worse, "never")

    scene.advance(run)
    assert scene.claim(node) == [], "no new work from the first look on"
    assert scene.advance(run) == "CLOSING"
    assert scene.statuses(run).count("CANCELLED") == 7
    assert scene.complete(node, running) == ["completed"]
    assert scene.advance(run) == "FAILED"

    row = scene.execution(run)
    assert row.failure_reason == "MaxFailedExceeded"
    assert row.failure_message == "2 partitions failed, max_failed is 1"
    assert scene.counted(run) == (1, 2, 7)


def test_an_heir_closes_what_its_predecessor_had_stopped(scene: Scene) -> None:
    run = scene.an_execution(5, policy=a_policy(max_failed=0))
    node = scene.a_node()
    (claim,) = scene.claim(node)
    scene.fail(node, claim, "never")
    scene.advance(run)
    assert scene.execution(run).stopping

    heir = superseded(scene, run)

    assert scene.advance(heir) == "FAILED"
    assert scene.execution(run).failure_reason == "MaxFailedExceeded"


@pytest.mark.parametrize("asked", ["at once", "by one who died"])
def test_any_node_ends_what_is_stopped_when_nobody_can_drive_it(alone: Scene, asked: str) -> None:
    """The last node that knew the job dies while its execution is cancelled; those left know other jobs."""
    run, node = alone.an_execution(2), alone.a_node()
    other = alone.a_node(jobs={"another": ["contract-9"]})
    alone.claim(node)
    alone.remove(run.master)
    if asked == "at once":
        assert alone.store.cancel(run.id, "test", None) == "closing"
    else:
        alone.one("SELECT rowlock.request_cancel(%s, 'test', NULL)", run.id)
    alone.remove(node)
    beat = alone.store.beat(other, load=0, draining=False)
    assert (beat.adoptable, beat.due) == (False, True)

    alone.store.expire("test")

    assert alone.execution(run).status == "CANCELLED"
    assert not alone.store.beat(other, load=0, draining=False).due
    assert alone.counted(run) == (0, 0, 2)


def test_a_living_master_is_left_to_end_its_execution(alone: Scene) -> None:
    run, node = alone.an_execution(1), alone.a_node()
    alone.one("SELECT rowlock.request_cancel(%s, 'test', NULL)", run.id)

    assert not alone.store.beat(node, load=0, draining=False).due
    alone.store.expire("test")

    assert alone.execution(run).status == "RUNNING"


def test_a_large_plan_is_closed_a_part_at_each_look(alone: Scene) -> None:
    """Whatever its size, no look of the master takes longer than nodes allow a statement."""
    run = alone.a_plan_being_made()
    keys = [f"p{n}" for n in range(60_000)]
    alone.stage(run, keys)
    alone.store.seal(run.id, run.epoch, "main", len(keys))
    alone.one("SELECT rowlock.request_cancel(%s, 'test', NULL)", run.id)

    assert alone.advance(run) == "CLOSING"
    assert alone.statuses(run).count("CANCELLED") == 50_000
    assert alone.advance(run) == "CANCELLED"

    assert alone.counted(run) == (0, 0, 60_000)


def test_finish_runs_only_where_the_execution_would_complete(scene: Scene) -> None:
    run = scene.an_execution(1, policy=a_policy(has_finish=True))
    node = scene.a_node()
    (claim,) = scene.claim(node)
    scene.fail(node, claim, "never")

    assert scene.advance(run) == "FAILED"
    assert scene.store.finish(run.id, run.epoch, summary="1") == "FAILED"
    assert scene.execution(run).summary is None


def test_a_finish_that_raises_fails_the_execution(scene: Scene) -> None:
    run = scene.an_execution(1, policy=a_policy(has_finish=True))
    node = scene.a_node()
    scene.complete(node, *scene.claim(node))
    assert scene.advance(run) == "FINISHING"

    answer = scene.store.finish(run.id, run.epoch, reason="FinishFailed", message="Boom: it broke")

    assert answer == "FAILED"
    row = scene.execution(run)
    assert (row.status, row.failure_reason) == ("FAILED", "FinishFailed")
    assert row.counts["completed"] == 1


# -- cancel --------------------------------------------------------------------------------------


def a_run_in(scene: Scene, state: str) -> Run:
    """An execution in one of the states that can be cancelled."""
    if state == "REQUESTED":
        return Run(id=scene.a_request(), master=uuid4(), epoch=0, instance="")
    if state == "PLANNING":
        run = scene.a_plan_being_made()
        scene.stage(run, ["a"])
        return run
    if state == "FINISHING":
        run = scene.an_execution(0, policy=a_policy(has_finish=True))
        assert scene.advance(run) == "FINISHING"
        return run
    return scene.an_execution(2)


@pytest.mark.parametrize("state", ["REQUESTED", "PLANNING", "RUNNING", "FINISHING"])
def test_cancel_ends_an_execution_in_which_nothing_runs(scene: Scene, state: str) -> None:
    run = a_run_in(scene, state)
    assert scene.execution(run).status == state

    answers = [scene.store.cancel(run.id, "alice", "wrong month") for _ in range(2)]

    assert answers == ["cancelled", "cancelled"]
    row = scene.execution(run)
    assert (row.status, row.failure_reason, row.failure_message) == (
        *("CANCELLED", "Cancelled", "wrong month"),
    )
    assert (ended(scene, run), scene.events(run).count("cancel_requested")) == (1, 1)
    instance = scene.one(
        "SELECT state FROM rowlock.batch_instances WHERE execution_id = %s", run.id
    )
    assert instance.state == "CANCELLED"
    assert scene.all("SELECT FROM rowlock.batch_staging WHERE execution_id = %s", run.id) == []


def test_cancel_waits_for_attempts_that_run(scene: Scene) -> None:
    run = scene.an_execution(3)
    node = scene.a_node()
    (claim,) = scene.claim(node)

    assert scene.store.cancel(run.id, "alice", None) == "closing"
    assert scene.store.cancel(run.id, "bob", "me too") == "closing"
    assert scene.store.beat(node, load=1, draining=False, executions=[run.id]).ended == (run.id,)
    assert scene.advance(run) == "CLOSING"
    scene.complete(node, claim)
    assert scene.advance(run) == "CANCELLED"

    assert scene.counted(run) == (1, 0, 2)
    assert scene.execution(run).failure_message == "cancelled by alice"
    nobody = scene.one(
        "SELECT cancelled FROM rowlock.batch_counts WHERE execution_id = %s AND node_id = %s",
        *(run.id, NIL),
    )
    assert nobody.cancelled == 2


@pytest.mark.parametrize("outcome", ["completed", "failed"])
def test_cancel_of_what_is_over_changes_nothing(scene: Scene, outcome: str) -> None:
    run = scene.an_execution(0 if outcome == "completed" else 1)
    if outcome == "failed":
        node = scene.a_node()
        scene.a_failure(node)
    scene.advance(run)
    before = scene.execution(run)

    assert scene.store.cancel(run.id, "alice", None) == outcome

    assert scene.execution(run) == before


def test_cancel_of_an_unknown_execution_says_so(scene: Scene) -> None:
    assert scene.store.cancel(uuid4(), "alice", None) == "unknown"


def test_cancel_of_a_closing_execution_makes_it_end_cancelled(scene: Scene) -> None:
    run = scene.an_execution(3, policy=a_policy(max_failed=0))
    node = scene.a_node()
    bad, running = scene.claim(node, slots=2)
    scene.fail(node, bad, "never")
    for _ in range(2):
        scene.advance(run)
    assert scene.execution(run).status == "CLOSING"

    assert scene.store.cancel(run.id, "alice", None) == "closing"
    scene.complete(node, running)

    assert scene.advance(run) == "CANCELLED"


@pytest.mark.parametrize("state", ["PLANNING", "RUNNING", "FINISHING"])
def test_a_cancel_whose_caller_died_halfway_is_finished_by_the_master(
    scene: Scene, state: str
) -> None:
    run = a_run_in(scene, state)
    node = scene.a_node()
    request = "SELECT rowlock.request_cancel(%s, 'alice', 'stop')"
    scene.store.connection.execute(request, [run.id])
    assert scene.claim(node) == []
    assert not scene.store.beat(node, load=0, draining=False).claimable

    assert scene.advance(run) == "CANCELLED"

    assert scene.execution(run).failure_message == "stop"


def test_a_cancel_that_comes_too_late_leaves_no_trace_in_what_completed(scene: Scene) -> None:
    run = scene.an_execution(0, policy=a_policy(has_finish=True))
    scene.advance(run)
    scene.store.connection.execute("SELECT rowlock.request_cancel(%s, 'alice', 'x')", [run.id])

    assert scene.store.finish(run.id, run.epoch, summary="1") == "COMPLETED"

    row = scene.execution(run)
    assert (row.failure_reason, row.failure_message) == (None, None)
    assert scene.store.cancel(run.id, "alice", "x") == "completed"


def test_cancel_alone_is_right_too(scene: Scene) -> None:
    """Another client may call the second half only."""
    run = scene.an_execution(2)

    answer = scene.one("SELECT rowlock.cancel(%s, 'alice', NULL) AS answer", run.id).answer

    assert answer == "cancelled"
    assert scene.events(run).count("cancel_requested") == 1


def test_a_cancel_does_not_wait_for_a_gap_between_claims(scene: Scene) -> None:
    """Claims that overlap all the time (commits of 5 ms, eight nodes) never leave the row free."""
    run = scene.an_execution(4_000)
    stop = Event()
    stores = [scene.a_store() for _ in range(8)]
    nodes = [scene.a_node() for _ in stores]

    def keep_claiming(n: int) -> int:
        taken = 0
        for seed in range(10**6):
            if stop.is_set():
                break
            with stores[n].connection.transaction():
                taken += len(scene.claim(nodes[n], store=stores[n], seed=seed))
                stores[n].connection.execute("SELECT pg_sleep(0.005)")
        return taken

    with ThreadPoolExecutor(8) as threads:
        work = [threads.submit(keep_claiming, n) for n in range(8)]
        try:
            wait_until(lambda: scene.statuses(run).count("CLAIMED") > 50, what="claims under way")
            began = time.monotonic()
            answer = scene.store.cancel(run.id, "alice", None)
            seconds = time.monotonic() - began
        finally:
            stop.set()
        claimed = sum(one.result() for one in work)

    assert answer == "closing"
    assert claimed < 4_000, "the work has run out: nothing was shown"
    assert Counter(scene.statuses(run)) == {"CLAIMED": claimed, "CANCELLED": 4_000 - claimed}
    assert seconds < 5


def test_no_claim_commits_after_a_cancel(scene: Scene, seed: int) -> None:
    """Each claim returned either commits before the cancel does, or there is none."""
    rng = random.Random(seed)
    stores = [scene.a_store() for _ in range(4)]
    nodes = [scene.a_node() for _ in stores]
    for _ in range(20):
        run = scene.an_execution(60, delivery=rng.choice([AT_MOST_ONCE, "AT_LEAST_ONCE"]))
        taken: list[int] = []
        at_the_cancel: list[int] = []
        until = rng.randrange(40)

        def work(n: int, taken: list[int] = taken) -> None:
            while claims := scene.claim(nodes[n], slots=2, store=stores[n], seed=n):
                taken.extend(claim.id for claim in claims)

        def cancel(
            run: Run = run,
            taken: list[int] = taken,
            until: int = until,
            at_the_cancel: list[int] = at_the_cancel,
        ) -> None:
            wait_until(lambda: len(taken) >= until, what="some claims")
            scene.store.cancel(run.id, "alice", None)
            at_the_cancel.append(scene.statuses(run).count("CLAIMED"))

        at_once(cancel, *(lambda n=n: work(n) for n in range(4)))

        assert [len(taken)] == at_the_cancel
        assert scene.statuses(run).count("CLAIMED") == len(taken)
        assert scene.statuses(run).count("PENDING") == 0
