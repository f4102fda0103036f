"""Restart: a new execution of the same instance with what is unfinished; abandon and resolve beside it."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from rowlock.db import views
from rowlock.db.store import Store, refusal
from tests.support import oracles
from tests.support.builders import (
    AT_LEAST_ONCE,
    AT_MOST_ONCE,
    HASH,
    Run,
    Scene,
    a_policy,
    at_once,
)

ROUNDS = 1_000


def launch(
    scene: Scene,
    instance: str,
    *,
    store: Store | None = None,
    launch_key: str | None = None,
    parameters: str = '{"month": 7}',
    delivery: str = AT_LEAST_ONCE,
    **other: Any,
) -> tuple[UUID, str]:
    return (store or scene.store).request(
        uuid4(),
        job=scene.job,
        contract_hash=other.pop("contract_hash", HASH),
        policy=other.pop("policy", None) or a_policy(),
        delivery=delivery,
        instance_key=instance,
        launch_key=launch_key,
        parameters=parameters,
        pool=scene.pool,
        **other,
    )


def restart(
    scene: Scene, of: Run | UUID, *, store: Store | None = None, **other: Any
) -> tuple[UUID, str]:
    id_ = of.id if isinstance(of, Run) else of
    return (store or scene.store).restart(uuid4(), id_, actor="alice", reason="again", **other)


def cancelled(scene: Scene, partitions: Any = 3, **request: Any) -> Run:
    run = scene.an_execution(partitions, **request)
    assert scene.store.cancel(run.id, "test", None) == "cancelled"
    return run


def rows(scene: Scene, run: Run | UUID) -> dict[str, Any]:
    id_ = run.id if isinstance(run, Run) else run
    found = scene.all(
        "SELECT * FROM rowlock.batch_partitions WHERE execution_id = %s ORDER BY id", id_
    )
    return {row.partition_key: row for row in found}


def finish_all(scene: Scene, run: Run, node: UUID | None = None) -> None:
    node = node or scene.a_node(only=run.id)
    while claims := scene.claim(node, slots=100, idle=True):
        scene.complete(node, *claims, result=f'"{run.id}"')


def results(scene: Scene, run: Run, *, page: int = 3) -> dict[str, str | None]:
    found: list[tuple[int, str, str | None]] = []
    while more := scene.store.results(run.id, found[-1][0] if found else 0, page):
        found += more
    assert [id_ for id_, _, _ in found] == sorted({id_ for id_, _, _ in found})
    return {key: result for _, key, result in found}


# -- what is done again ------------------------------------------------------------------------------


def test_a_restart_has_the_same_plan_and_only_what_is_unfinished(scene: Scene) -> None:
    run = scene.an_execution(
        ["done", "broken", "waited", "halfway"],
        weights=[4, 3, 1, 2],
        policy=a_policy(max_attempts=2),
    )
    node = scene.a_node()
    done, broken, halfway = scene.claim(node, slots=3)
    scene.complete(node, done)
    scene.fail(node, broken, "never")
    scene.store.checkpoint(node, halfway.id, halfway.token, '{"after": 17}')
    scene.store.cancel(run.id, "test", None)
    scene.release(node, halfway)
    assert scene.advance(run) == "CANCELLED"

    id_, outcome = restart(scene, run)

    assert outcome == "restarted"
    new, old = scene.execution(id_), scene.execution(run)
    assert (new.status, new.step, new.total, new.carried) == ("RUNNING", "main", 4, 1)
    assert (new.restart_of, new.started_at is not None, new.master_node) == (run.id, True, None)
    assert new.parameters == old.parameters
    made = rows(scene, id_)
    assert list(made) == ["broken", "waited", "halfway"]
    assert {row.status for row in made.values()} == {"PENDING"}
    assert {(row.claims, row.failures, row.lost) for row in made.values()} == {(0, 0, 0)}
    assert {key: row.weight for key, row in made.items()} == {
        "broken": 3,
        "waited": 1,
        "halfway": 2,
    }
    assert made["halfway"].checkpoint == {"after": 17}
    assert made["waited"].slice == {"key": "waited"}
    assert rows(scene, run)["broken"].status == "FAILED"
    event = scene.one("SELECT * FROM rowlock.batch_events WHERE execution_id = %s", id_)
    assert (event.event, event.actor) == ("execution_restarted", "alice")
    assert (event.detail["of"], event.detail["reason"]) == (str(run.id), "again")


def test_finish_sees_every_partition_of_a_chain_of_three(scene: Scene) -> None:
    """Scenarios 21 and 22: other nodes each time; the union is the plan, with no overlap."""
    keys = [f"p{n}" for n in range(10)]
    first = scene.an_execution(keys, policy=a_policy(max_attempts=1, has_finish=True))
    node = scene.a_node()
    scene.complete(node, *scene.claim(node, slots=4), result=f'"{first.id}"')
    scene.fail(node, scene.claim(node)[0], "never")
    scene.remove(node)
    scene.store.cancel(first.id, "test", None)

    second = scene.a_restart(first)
    nodes = [scene.a_node() for _ in range(3)]
    for one in nodes:
        scene.complete(one, *scene.claim(one), result=f'"{second.id}"')
    assert views.execution(scene.admin, second.id).completed == 7
    scene.fail(nodes[0], scene.claim(nodes[0])[0], "never")
    scene.store.cancel(second.id, "test", None)
    assert scene.execution(second).counts == {
        "total": 10,
        "completed": 7,
        "failed": 1,
        "cancelled": 2,
    }

    third = scene.a_restart(second)
    assert (scene.execution(third).carried, len(rows(scene, third))) == (7, 3)
    finish_all(scene, third)
    progress = scene.store.advance(third.master, third.id, third.epoch)
    assert (progress.status, progress.completed, progress.total) == ("FINISHING", 10, 10)
    for page in (1, 3, 100):
        found = results(scene, third, page=page)
        assert Counter(found.values()) == {
            f'"{first.id}"': 4,
            f'"{second.id}"': 3,
            f'"{third.id}"': 3,
        }
        assert set(found) == set(keys)
    assert scene.store.finish(third.id, third.epoch, summary="1") == "COMPLETED"
    assert restart(scene, third) == (third.id, "completed")
    assert launch(scene, first.instance) == (third.id, "completed")


def test_a_plan_that_was_never_sealed_is_made_again(scene: Scene) -> None:
    plan = scene.a_plan_being_made()
    scene.stage(plan, ["a", "b"])
    scene.store.fail_plan(plan.master, plan.id, plan.epoch, "PlanFailed", "no")

    id_, outcome = restart(scene, plan)

    row = scene.execution(id_)
    assert (outcome, row.status, row.total, row.restart_of) == (
        "restarted",
        "REQUESTED",
        None,
        plan.id,
    )
    taken = scene.store.adopt(plan.master, id_)
    assert taken is not None
    assert taken.status == "PLANNING"
    new = Run(id=id_, master=plan.master, epoch=taken.epoch, instance=plan.instance)
    scene.stage(new, ["a", "b", "c"])
    assert scene.store.seal(id_, new.epoch, "main", 3)[0] == "sealed"
    finish_all(scene, new)
    assert scene.advance(new) == "COMPLETED"
    assert set(results(scene, new)) == {"a", "b", "c"}


def test_when_finish_failed_only_finish_is_done_again(scene: Scene) -> None:
    run = scene.an_execution(3, policy=a_policy(has_finish=True))
    finish_all(scene, run)
    assert scene.advance(run) == "FINISHING"
    scene.store.finish(run.id, run.epoch, reason="FinishFailed", message="no")

    again = scene.a_restart(run)

    assert rows(scene, again) == {}
    assert scene.advance(again) == "FINISHING"
    assert len(results(scene, again)) == 3
    assert scene.store.finish(again.id, again.epoch, summary="1") == "COMPLETED"


def test_tolerated_failures_count_against_the_whole_plan(scene: Scene) -> None:
    """max_failed of a restart: what was carried as FAILED, over all that was planned."""
    policy = a_policy(max_failed="20%")
    run = scene.an_execution([f"p{n}" for n in range(10)], delivery=AT_MOST_ONCE, policy=policy)
    node = scene.a_node()
    for _ in range(3):
        scene.a_failure(node)
    while scene.advance(run) != "FAILED":
        pass

    again = scene.a_restart(run)
    assert views.execution(scene.admin, again.id).failed == 3
    while scene.advance(again) != "FAILED":
        pass
    for key in ("p0", "p1"):
        scene.people.resolve(again.id, key, "completed", actor="alice", reason=None)
    third = scene.a_restart(again)
    finish_all(scene, third)
    assert scene.advance(third) == "COMPLETED"
    assert scene.execution(third).counts == {
        "total": 10,
        "completed": 9,
        "failed": 1,
        "cancelled": 0,
    }


# -- at most once --------------------------------------------------------------------------------------


def test_what_was_started_at_most_once_is_carried_and_the_rest_runs(scene: Scene) -> None:
    """Scenario 6, and 22: what was never started runs on the new nodes, what was started does not."""
    run = scene.an_execution(["a", "b", "c"], delivery=AT_MOST_ONCE)
    node = scene.a_node()
    (lost,) = scene.claim(node)
    scene.remove(node)
    scene.store.cancel(run.id, "test", None)

    again = scene.a_restart(run)

    made = rows(scene, again)
    assert made[lost.key].status == "FAILED"
    assert made[lost.key].last_error["type"] == "NodeLost"
    assert made[lost.key].last_error["outcome"] == "unknown"
    assert made[lost.key].last_error["carried"] is True
    node = scene.a_node()
    ran = [scene.claim(node)[0] for _ in range(2)]
    assert {claim.key for claim in ran} == {"a", "b", "c"} - {lost.key}
    scene.complete(node, *ran)
    assert scene.advance(again) == "FAILED"
    assert scene.counted(again) == (2, 1, 0)
    # A second restart carries it once more, and starts nothing.
    third = scene.a_restart(again)
    assert [row.status for row in rows(scene, third).values()] == ["FAILED"]
    assert scene.execution(third).carried == 2


def test_a_slice_that_never_started_runs_again(scene: Scene) -> None:
    run = scene.an_execution(["a"], delivery=AT_MOST_ONCE)
    node = scene.a_node()
    (claim,) = scene.claim(node)
    scene.fail(node, claim, "unstarted")
    assert scene.advance(run) == "FAILED"

    again = scene.a_restart(run)

    assert rows(scene, again)["a"].status == "PENDING"


def test_a_launch_with_looser_delivery_repeats_no_start(scene: Scene) -> None:
    run = scene.an_execution(["a", "b"], delivery=AT_MOST_ONCE)
    scene.a_failure(scene.a_node())
    scene.store.cancel(run.id, "test", None)

    id_, outcome = launch(scene, run.instance, delivery=AT_LEAST_ONCE)

    assert outcome == "restarted"
    assert {(row.status, row.delivery) for row in rows(scene, id_).values()} == {
        ("FAILED", AT_MOST_ONCE),
        ("PENDING", AT_LEAST_ONCE),
    }


def test_resolved_as_completed_it_is_carried_with_its_result(scene: Scene) -> None:
    run = scene.an_execution(["a"], delivery=AT_MOST_ONCE, policy=a_policy(has_finish=True))
    scene.a_failure(scene.a_node())
    assert scene.advance(run) == "FAILED"

    def resolve(result: str) -> str:
        return scene.people.resolve(
            run.id, "a", "completed", result=result, actor="alice", reason="paid, I looked"
        )

    assert [resolve('{"paid": 1}'), resolve('{"paid": 1}'), resolve('{"paid": 2}')] == [
        "resolved",
        "same",
        "resolved",
    ]
    old = rows(scene, run)["a"]
    assert (old.status, old.result) == ("FAILED", None)
    assert (old.resolution["by"], old.resolution["why"]) == ("alice", "paid, I looked")
    listed = views.partitions(scene.admin, run.id, limit=5)[0].resolution
    assert listed is not None
    assert set(listed) == {"how", "by", "why", "at"}

    again = scene.a_restart(run)
    new = rows(scene, again)["a"]
    assert (new.status, new.result, new.resolution) == ("COMPLETED", {"paid": 2}, old.resolution)
    assert scene.counted(again) == (1, 0, 0)
    assert scene.advance(again) == "FINISHING"
    assert results(scene, again) == {"a": '{"paid": 2}'}
    assert scene.events(run).count("partition_resolved") == 2


def test_resolved_as_retry_it_runs_again(scene: Scene) -> None:
    run = scene.an_execution(["a"], delivery=AT_MOST_ONCE)
    claim = scene.a_failure(scene.a_node())
    assert scene.advance(run) == "FAILED"

    assert (
        scene.people.resolve(run.id, "a", "retry", actor="alice", reason="no payment") == "resolved"
    )
    assert scene.start_of(claim) is None

    again = scene.a_restart(run)
    node = scene.a_node()
    (claim,) = scene.claim(node)
    assert scene.start_of(claim).execution_id == again.id
    scene.complete(node, claim)
    assert scene.advance(again) == "COMPLETED"


def test_a_start_that_still_runs_somewhere_is_not_repeated(scene: Scene) -> None:
    """Also where the doubt was carried into another execution: its start is what is reported."""
    run = scene.an_execution(["a"], delivery=AT_MOST_ONCE)
    node = scene.a_node()
    (claim,) = scene.claim(node)
    scene.remove(node)
    assert scene.advance(run) == "FAILED"
    again = scene.a_restart(run)
    assert scene.advance(again) == "FAILED"
    reborn = scene.a_node()
    orphans = [{"partition_id": claim.id, "token": str(claim.token)}]
    scene.store.beat(reborn, load=1, draining=False, orphans=orphans)

    def retry(*, force: bool = False) -> str:
        return scene.people.resolve(again.id, "a", "retry", actor="alice", reason=None, force=force)

    assert retry() == "orphan"
    assert "partition_resolved" not in scene.events(again)
    assert scene.start_of(claim) is not None
    assert retry(force=True) == "resolved"
    assert scene.start_of(claim) is None


def test_what_cannot_be_resolved_is_said(scene: Scene) -> None:
    run = scene.an_execution(["a", "b"], delivery=AT_MOST_ONCE)
    failed = scene.a_failure(scene.a_node())
    other = "b" if failed.key == "a" else "a"

    def resolve(execution: UUID, key: str) -> str:
        return scene.people.resolve(execution, key, "retry", actor="alice", reason=None)

    assert resolve(run.id, other) == "not_failed"
    assert resolve(run.id, "c") == resolve(uuid4(), "a") == "unknown"
    scene.store.cancel(run.id, "test", None)
    again = scene.a_restart(run)
    assert resolve(run.id, failed.key) == "superseded"
    assert resolve(again.id, failed.key) == "resolved"
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="completed or retry, not maybe"):
        scene.people.resolve(again.id, failed.key, "maybe", actor="alice", reason=None)


@pytest.mark.parametrize("end", ["completed", "abandoned"])
def test_nothing_is_resolved_in_an_instance_that_never_runs_again(scene: Scene, end: str) -> None:
    run = scene.an_execution(1, delivery=AT_MOST_ONCE, policy=a_policy(max_failed=1))
    failed = scene.a_failure(scene.a_node())
    if end == "completed":
        assert scene.advance(run) == "COMPLETED"
    else:
        scene.people.abandon(run.id, "alice", None)

    answer = scene.people.resolve(run.id, failed.key, "retry", actor="alice", reason=None)

    assert answer == end
    assert scene.start_of(failed) is not None
    assert "partition_resolved" not in scene.events(run)


def test_a_start_that_was_forgotten_too_early_is_heard_of_at_its_end(scene: Scene) -> None:
    """Resolved while its node was silent and could report nothing: the work is done twice, and an event
    says so, once."""
    run = scene.an_execution(["a"], delivery=AT_MOST_ONCE)
    node = scene.a_node()
    (claim,) = scene.claim(node)
    scene.remove(node)
    assert scene.advance(run) == "FAILED"
    scene.people.resolve(run.id, "a", "retry", actor="alice", reason=None)
    again = scene.a_restart(run)
    (second,) = scene.claim(scene.a_node())

    for _ in range(2):
        assert scene.store.record_evidence(claim.id, claim.token, {"outcome": "completed"})

    assert scene.events(run).count("late_evidence") == 1
    assert "late_evidence" not in scene.events(again)
    assert scene.start_of(second).evidence is None


# -- who may restart what --------------------------------------------------------------------------------


def test_a_restart_keeps_what_was_asked_for(scene: Scene) -> None:
    run = cancelled(
        scene,
        priority=4,
        options={"parallelism": 3, "deadline_seconds": 7200, "deletion_policy": "ORPHAN"},
    )
    scene.admin.execute(
        "UPDATE rowlock.batch_job_coordination SET requested_at = requested_at - interval '1 h',"
        " deadline_at = deadline_at - interval '1 h' WHERE execution_id = %s",
        [run.id],
    )

    id_, _ = restart(scene, run, launch_key=f"{scene.job}/again")

    old, new = views.execution(scene.admin, run.id), views.execution(scene.admin, id_)
    for name in (
        "job_name",
        "instance_key",
        "contract_hash",
        "pool",
        "priority",
        "delivery",
        "parallelism",
        "deletion_policy",
    ):
        assert getattr(new, name) == getattr(old, name), name
    assert new.deadline_at is not None
    assert (new.deadline_at - new.requested_at).total_seconds() == 7200
    assert new.launch_key == f"{scene.job}/again"
    assert scene.execution(id_).policy == scene.execution(run).policy
    assert scene.execution(id_).requester == scene.execution(run).requester
    scene.store.cancel(id_, "test", None)
    third, _ = restart(scene, id_, requester={"actor": "bob"})
    assert scene.execution(third).requester == {"actor": "bob"}


def test_launching_what_failed_with_the_same_parameters_is_a_restart(scene: Scene) -> None:
    run = cancelled(scene, ["a", "b"])

    id_, outcome = launch(
        scene,
        run.instance,
        priority=9,
        policy=a_policy(max_attempts=7),
        contract_hash="contract-2",
        requester={"actor": "bob"},
        options={"parallelism": 2},
    )

    one = views.execution(scene.admin, id_)
    assert (outcome, one.status, one.restart_of) == ("restarted", "RUNNING", run.id)
    assert (one.priority, one.contract_hash, one.parallelism) == (9, "contract-2", 2)
    assert scene.execution(id_).policy["max_attempts"] == 7
    event = scene.one("SELECT * FROM rowlock.batch_events WHERE execution_id = %s", id_)
    assert (event.event, event.actor) == ("execution_restarted", "bob")


def test_an_instance_stands_for_its_parameters(scene: Scene) -> None:
    run = cancelled(scene)

    answer = launch(scene, run.instance, parameters='{"month": 8}')

    assert answer == (run.id, "parameters")
    assert "stands for other parameters" in str(refusal(scene.job, run.instance, *answer))
    assert launch(scene, run.instance, parameters='{ "month":7 }')[1] == "restarted"


def test_only_the_last_execution_is_restarted_and_only_when_it_has_ended(scene: Scene) -> None:
    assert restart(scene, uuid4())[1] == "unknown"
    run = scene.an_execution(1)
    assert restart(scene, run) == (run.id, "running")
    scene.store.cancel(run.id, "test", None)
    again = scene.a_restart(run)

    assert restart(scene, run) == (again.id, "superseded")
    assert restart(scene, again) == (again.id, "running")
    assert "execution_restarted" not in scene.events(run)


def test_the_same_restart_twice_is_one(scene: Scene) -> None:
    run = cancelled(scene)
    key = f"{scene.job}/2"
    first = restart(scene, run, launch_key=key)

    assert restart(scene, run, launch_key=key) == (first[0], "exists")
    assert launch(scene, run.instance, launch_key=key) == (first[0], "exists")
    assert scene.store.restart(first[0], run.id, actor="alice", reason=None) == (first[0], "exists")
    assert scene.events(first[0]) == ["execution_restarted"]


def test_a_restart_is_offered_to_any_node_at_once(scene: Scene) -> None:
    run = cancelled(scene)
    node = scene.a_node()
    with scene.database.connect() as db:
        db.execute("LISTEN rowlock")
        id_, _ = restart(scene, run)
        said = {one.payload for one in db.notifies(timeout=10, stop_after=2)}

    assert said == {"work", "adopt"}
    answer = scene.store.beat(node, load=0, draining=False)
    assert (answer.claimable, answer.adoptable) == (True, True)
    assert {claim.execution_id for claim in scene.claim(node, slots=3)} == {id_}
    taken = scene.store.adopt(node, id_)
    assert taken is not None
    assert taken.status == "RUNNING"


# -- races -----------------------------------------------------------------------------------------------


def test_of_two_launchers_one_wins_in_every_round(alone: Scene) -> None:
    """Two nodes submit the same instance at once: one execution, and the other answer names it."""
    stores = [alone.a_store(), alone.a_store()]
    outcomes: Counter[tuple[str, ...]] = Counter()
    for n in range(ROUNDS):
        answers = at_once(*(partial(launch, alone, f"i{n}", store=store) for store in stores))
        assert answers[0][0] == answers[1][0]
        outcomes[tuple(sorted(outcome for _, outcome in answers))] += 1

    assert outcomes == {("requested", "running"): ROUNDS}
    made = alone.one("SELECT count(*) AS n FROM rowlock.batch_job_coordination")
    assert made.n == ROUNDS
    assert oracles.deadlocks(alone) == 0


def test_of_a_restart_and_a_launch_one_wins_in_every_round(alone: Scene) -> None:
    rounds = 200
    runs = [cancelled(alone, ["a", "b"]) for _ in range(rounds)]
    stores = [alone.a_store(), alone.a_store()]
    outcomes: Counter[str] = Counter()
    for n, run in enumerate(runs):
        again = partial(restart, alone, run, store=stores[0])
        relaunched = partial(launch, alone, run.instance, store=stores[1])
        restarted = partial(restart, alone, run, store=stores[1])
        answers = at_once(again, relaunched if n % 2 else restarted)
        assert answers[0][0] == answers[1][0]
        outcomes.update(outcome for _, outcome in answers)

    assert outcomes["restarted"] == rounds
    assert set(outcomes) <= {"restarted", "running", "superseded"}
    twice = alone.all(
        "SELECT restart_of FROM rowlock.batch_job_coordination WHERE restart_of IS NOT NULL"
        " GROUP BY 1 HAVING count(*) > 1"
    )
    assert twice == []
    assert oracles.deadlocks(alone) == 0
    assert oracles.miscounted(alone) == []


def test_after_a_stop_nothing_is_started_and_a_restart_does_the_rest(alone: Scene) -> None:
    """A cancel while nodes claim. (Reported as spring-batch#5308, #5484.)"""
    run = alone.an_execution(2_000)
    nodes = [(alone.a_store(), alone.a_node()) for _ in range(4)]

    def work(store: Store, node: UUID) -> int:
        done = 0
        while claims := alone.claim(node, slots=3, store=store):
            done += len(claims)
            alone.complete(node, *claims, store=store)
        return done

    calls = [lambda store=store, node=node: work(store, node) for store, node in nodes]
    *done, _ = at_once(*calls, lambda: len(alone.people.cancel(run.id, "test", None)))
    assert alone.advance(run) == "CANCELLED"
    completed, _, rest = alone.counted(run)
    assert (sum(done), completed + rest) == (completed, 2_000)

    again = alone.a_restart(run)
    assert len(rows(alone, again)) == rest
    finish_all(alone, again)
    assert alone.advance(again) == "COMPLETED"
    assert alone.execution(again).counts["completed"] == 2_000
    assert len(results(alone, again, page=500)) == 2_000


# -- abandon -----------------------------------------------------------------------------------------------


def test_abandoning_ends_claims_at_once_and_the_instance_for_ever(scene: Scene) -> None:
    run = scene.an_execution(4)
    node = scene.a_node()
    done, held = scene.claim(node, slots=2)
    scene.complete(node, done)

    assert scene.people.abandon(run.id, "alice", "wrong month") == "abandoned"

    assert sorted(scene.statuses(run)) == ["CANCELLED"] * 3 + ["COMPLETED"]
    row = scene.execution(run)
    assert (row.status, row.failure_message) == ("ABANDONED", "wrong month")
    assert row.counts == {"total": 4, "completed": 1, "failed": 0, "cancelled": 3}
    assert scene.complete(node, held) == ["lost"]
    assert scene.advance(run) == "ABANDONED"
    assert restart(scene, run) == launch(scene, run.instance) == (run.id, "abandoned")
    assert scene.counted(run) == (1, 0, 3)
    beat = scene.store.beat(node, load=0, draining=False, executions=[run.id])
    assert beat.ended == (run.id,)


def test_abandoning_forgets_no_start(scene: Scene) -> None:
    run = scene.an_execution(["a", "b"], delivery=AT_MOST_ONCE)
    node = scene.a_node()
    (claim,) = scene.claim(node)

    scene.people.abandon(run.id, "alice", None)

    row = scene.partition(claim)
    assert (row.status, row.last_error["outcome"]) == ("FAILED", "unknown")
    assert scene.start_of(claim) is not None
    assert scene.counted(run) == (0, 1, 1)
    assert scene.store.record_evidence(claim.id, claim.token, {"result": 1})


def test_abandon_may_be_said_twice_and_of_what_has_ended(scene: Scene) -> None:
    run = cancelled(scene)
    before = scene.execution(run)

    assert [scene.people.abandon(run.id, "t", None) for _ in range(2)] == ["abandoned"] * 2
    assert scene.execution(run) == before
    assert scene.events(run).count("execution_abandoned") == 1
    assert launch(scene, run.instance) == (run.id, "abandoned")
    assert scene.people.abandon(uuid4(), "t", None) == "unknown"
    done = scene.an_execution(0)
    scene.advance(done)
    assert scene.people.abandon(done.id, "t", None) == "completed"
    old = cancelled(scene)
    scene.a_restart(old)
    assert scene.people.abandon(old.id, "t", None) == "superseded"
