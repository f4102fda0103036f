"""What a BatchJob's owner does with kubectl arrives in the database, and what happens there is shown.

The pods of master Jobs do not have to run for this: the tests play the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from timeit import timeit

from tests.support.cluster import Kubectl, Object, Operators, condition, shows
from tests.support.operator_scene import OperatorScene
from tests.support.waiting import wait_until


def the_status(kubectl: Kubectl, name: str) -> Object:
    status: Object = kubectl.get("batchjob", name).get("status", {})
    return status


def conditions_of(kubectl: Kubectl, name: str) -> dict[str, str]:
    batchjob = kubectl.get("batchjob", name)
    return {one["type"]: one["status"] for one in batchjob.get("status", {}).get("conditions", [])}


def quickest(calls: Iterable[Callable[[], object]]) -> float:
    """Seconds of the quickest: the machine of the tests may have stood still during the others."""
    return min(timeit(call, number=1) for call in calls)


def test_a_batchjob_is_accepted_within_two_seconds(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    operators.start()

    def applied() -> Iterator[Callable[[], object]]:
        for number in range(5):
            namespace.apply(scene.batchjob(f"run-{number}"))
            yield partial(namespace.wait, f"batchjob/run-{number}", "condition=Accepted")

    assert quickest(applied()) < 2.0


def test_a_batchjob_has_one_execution_and_one_job(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    operators.start()

    namespace.apply(scene.batchjob("nightly"))
    namespace.wait("batchjob/nightly", "condition=Accepted")
    (execution,) = scene.executions()
    assert execution.launch_key.startswith(f"{operators.cluster}/")
    assert execution.parameters == {"month": 7}
    assert the_status(namespace, "nightly")["executionID"] == str(execution.execution_id)
    (job,) = namespace.items("jobs")
    assert job["metadata"]["name"] == "nightly-1"
    assert job["spec"]["template"]["spec"]["containers"][0]["args"][:2] == [
        "master",
        str(execution.execution_id),
    ]
    assert set(conditions_of(namespace, "nightly")) == {
        "Accepted",
        "Suspended",
        "Complete",
        "Failed",
        "Finished",
        "StatusStale",
    }


def test_progress_and_the_end_are_mirrored(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    operators.start()
    namespace.apply(scene.batchjob("nightly"))
    execution = scene.execution_of("nightly").execution_id

    run = scene.plan(execution, partitions=4)
    scene.work(run, 3)
    shows(namespace, "nightly", phase="Running", progress="3/4")
    scene.work(run, 1)
    assert scene.advance(run) == "COMPLETED"

    namespace.wait("batchjob/nightly", "condition=Finished")
    assert the_status(namespace, "nightly")["phase"] == "Succeeded"
    assert conditions_of(namespace, "nightly")["Complete"] == "True"
    reasons = {event["reason"] for event in namespace.items("events")}
    assert {"RunCreated", "MasterLaunched", "PartitionsPlanned", "Completed"} <= reasons


def test_parameters_that_break_the_contract_launch_nothing_and_the_path_is_named(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    operators.start()
    namespace.apply(scene.batchjob("nightly", parameters={"month": "July"}))

    namespace.wait("batchjob/nightly", "condition=Accepted=False")

    accepted = condition(namespace.get("batchjob", "nightly"), "Accepted")
    assert accepted["reason"] == "InvalidParameters"
    assert "month" in accepted["message"]
    assert scene.executions() == []
    assert namespace.items("jobs") == []


def test_a_job_that_is_published_later_is_launched_then(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    operators.start(ROWLOCK_RESYNC_SECONDS="2")
    namespace.apply(scene.batchjob("nightly", job=f"{scene.job}-new"))
    namespace.wait("batchjob/nightly", "condition=Accepted=False")
    assert condition(namespace.get("batchjob", "nightly"), "Accepted")["reason"] == "UnknownJob"

    scene.publish(f"{scene.job}-new")

    namespace.wait("batchjob/nightly", "condition=Accepted=True")


def test_what_may_change_while_it_runs_is_pushed_to_the_database(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    operators.start()
    namespace.apply(scene.batchjob("nightly"))
    execution = scene.execution_of("nightly").execution_id
    scene.plan(execution)

    change = {"priority": 7, "parallelism": 2, "suspend": True, "activeDeadlineSeconds": 600}
    namespace.patch("batchjob", "nightly", {"spec": change})

    def pushed() -> bool:
        (row,) = scene.executions("nightly")
        return (row.priority, row.parallelism, row.suspended) == (7, 2, True) and bool(
            row.deadline_at
        )

    wait_until(pushed, seconds=60, what="the changes", every_seconds=0.05)
    namespace.wait("batchjob/nightly", "condition=Suspended=True")

    namespace.patch("batchjob", "nightly", {"spec": {"suspend": False, "parallelism": None}})

    def resumed() -> bool:
        (row,) = scene.executions("nightly")
        return (row.parallelism, row.suspended) == (None, False)

    wait_until(resumed, seconds=60, what="the changes back", every_seconds=0.05)
    assert len(namespace.items("jobs")) == 1


def test_a_cancelled_batchjob_keeps_its_record(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    operators.start()
    namespace.apply(scene.batchjob("nightly"))
    execution = scene.execution_of("nightly").execution_id
    run = scene.plan(execution)
    scene.work(run, 1)

    namespace.patch("batchjob", "nightly", {"spec": {"cancel": True}})

    scene.status_becomes(execution, "CLOSING", "CANCELLED")
    scene.advance(run)
    namespace.wait("batchjob/nightly", "condition=Finished")
    assert the_status(namespace, "nightly")["phase"] == "Cancelled"
    assert "cancel_requested" in scene.events(execution)


def test_a_larger_restart_nonce_restarts_a_failed_instance_once(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    operators.start()
    namespace.apply(scene.batchjob("nightly", partitions={"maxAttempts": 1}))
    first = scene.execution_of("nightly").execution_id
    run = scene.plan(first, partitions=2)
    scene.work(run, 1)
    scene.a_failure(run.master)
    assert scene.advance(run) == "FAILED"
    namespace.wait("batchjob/nightly", "condition=Failed")

    namespace.patch("batchjob", "nightly", {"spec": {"restartNonce": 1}})

    second = scene.execution_of("nightly", number=2)
    assert second.restart_of == first
    wait_until(
        lambda: (
            {job["metadata"]["name"] for job in namespace.items("jobs")}
            == {"nightly-1", "nightly-2"}
        ),
        seconds=60,
        what="a Job for each attempt",
        every_seconds=0.1,
    )
    shows(namespace, "nightly", attempt=2, executionID=str(second.execution_id))
    assert len(scene.executions("nightly")) == 2


def test_the_execution_of_a_batchjob_with_policy_orphan_lives_on(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    operators.start(ROWLOCK_SWEEP_SECONDS="1")
    for name, policy in (("kept", "Orphan"), ("not-kept", "Cancel")):
        namespace.apply(scene.batchjob(name, deletionPolicy=policy))
    kept = scene.execution_of("kept").execution_id
    other = scene.execution_of("not-kept").execution_id

    namespace.run("delete", "batchjob", "kept", "not-kept", seconds=20)

    scene.status_becomes(other, "CLOSING", "CANCELLED")
    assert scene.execution(kept).status == "REQUESTED"


def test_with_the_operator_dead_delete_returns_at_once_and_the_sweeper_cancels_afterwards(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    first = operators.start()
    names = [f"gone-{number}" for number in range(5)]
    namespace.apply(*(scene.batchjob(name) for name in [*names, "there"]))
    gone = [scene.execution_of(name).execution_id for name in names]
    there = scene.execution_of("there").execution_id
    first.kill()

    deletes = [partial(namespace.run, "delete", "batchjob", name) for name in names]
    assert quickest(deletes) < 1.0
    assert {scene.execution(execution).status for execution in gone} == {"REQUESTED"}

    operators.start(ROWLOCK_SWEEP_SECONDS="1")

    for execution in gone:
        scene.status_becomes(execution, "CLOSING", "CANCELLED")
    assert scene.execution(there).status == "REQUESTED"


def test_a_batchjob_whose_time_to_live_is_over_is_deleted_and_does_not_run_again(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    operators.start()
    wanted = scene.batchjob("nightly", instanceKey="july", ttlSecondsAfterFinished=1)
    namespace.apply(wanted)
    scene.run_to_the_end(scene.execution_of("nightly").execution_id)

    wait_until(
        lambda: namespace.find("batchjob", "nightly") is None,
        seconds=60,
        what="deleted",
        every_seconds=0.1,
    )
    namespace.apply({**wanted, "spec": {**wanted["spec"], "ttlSecondsAfterFinished": 600}})
    namespace.wait("batchjob/nightly", "condition=Accepted=False")

    accepted = condition(namespace.get("batchjob", "nightly"), "Accepted")
    assert accepted["reason"] == "DuplicateInstance"
    assert len(scene.executions("nightly")) == 1
