"""What the operator does: one row for each thing that may happen to a BatchJob."""

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest

from rowlock_operator.model import (
    Action,
    Answer,
    Cancel,
    CreateJob,
    DeleteBatchJob,
    DeleteJob,
    Emit,
    MasterJob,
    Observed,
    PatchStatus,
    RequestExecution,
    Requeue,
    Resume,
    SetLimits,
    Suspend,
)
from rowlock_operator.reconcile import reconcile
from tests.support.batchjobs import (
    CONTRACT,
    JOB,
    NAME,
    NOW,
    OPTIONS,
    RUN,
    UID,
    World,
    a_batchjob,
    a_job,
    an_execution,
    an_observation,
    only,
    told,
)

RUNNING: dict[str, Any] = {"pending": 40, "running": 10, "completed": 148, "failed": 2, "nodes": 5}
TELLING = (PatchStatus, Emit, Requeue)


def followed(observed: Observed) -> World:
    """A world whose status is up to date already."""
    world = World(observed)
    world.settle()
    return world


def known(spec: dict[str, Any] | None = None, status: str = "RUNNING", **fields: Any) -> World:
    """A BatchJob that runs, was told so, and has its Job."""
    execution = an_execution(status, **fields)
    return followed(an_observation(a_batchjob(spec), execution=execution, jobs=a_job()))


def deeds(actions: list[Action]) -> list[type[Action]]:
    """What is done besides telling."""
    return [type(action) for action in actions if not isinstance(action, TELLING)]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table: given this, the operator does that and says so."""

    name: str
    given: Observed
    does: list[type[Action]]
    phase: str
    conditions: tuple[str, ...] = ()
    says: str = ""


def refused(name: str, given: Observed, reason: str, says: str, phase: str = "Pending") -> Row:
    finished = "True" if phase in ("Failed", "Cancelled") else "False"
    conditions = (f"Accepted=False {reason}", f"Finished={finished}")
    return Row(name=name, given=given, does=[], phase=phase, conditions=conditions, says=says)


def with_spec(spec: dict[str, Any], **fields: Any) -> Observed:
    return an_observation(a_batchjob(spec), **fields)


def answered(outcome: str) -> Observed:
    answer = Answer(attempt=1, outcome=outcome, execution_id=RUN)
    return with_spec({"instanceKey": "2026-11"}, answer=answer)


def a_foreign_job(**fields: Any) -> dict[str, MasterJob]:
    return a_job(owner_uid="somebody", **fields)


TABLE = [
    # -- launching
    Row(
        name="a new BatchJob is requested, and its Job made",
        given=an_observation(),
        does=[RequestExecution, CreateJob],
        phase="Pending",
        conditions=(
            "Accepted=True Accepted",
            "Suspended=False NotSuspended",
            "Complete=False NotFinished",
            "Failed=False NotFinished",
            "Finished=False NotFinished",
            "StatusStale=False DatabaseReachable",
        ),
        says="waits for its master pod",
    ),
    Row(
        name="a BatchJob of mode Pool gets no Job",
        given=with_spec({"master": {"mode": "Pool"}}, pool_nodes=0),
        does=[RequestExecution],
        phase="Pending",
        says=f"no living node of pool default runs job {JOB}",
    ),
    Row(
        name="a BatchJob created suspended is requested suspended and gets no Job",
        given=with_spec({"suspend": True}),
        does=[RequestExecution],
        phase="Suspended",
        conditions=("Accepted=True", "Suspended=True Suspended"),
    ),
    Row(
        name="an operator that died after the request finds the row and makes the Job",
        given=an_observation(execution=an_execution("REQUESTED")),
        does=[CreateJob],
        phase="Pending",
        conditions=("Accepted=True",),
    ),
    Row(
        name="an operator that died after making the Job only tells",
        given=an_observation(execution=an_execution("REQUESTED"), jobs=a_job()),
        does=[],
        phase="Pending",
    ),
    Row(
        name="a BatchJob cancelled before anything else is never requested",
        given=with_spec({"cancel": True}),
        does=[],
        phase="Cancelled",
        conditions=("Accepted=False Cancelled", "Failed=True Cancelled", "Finished=True"),
    ),
    refused(
        "an unknown job is refused with the near names",
        with_spec({"job": "invoices.montly"}, contract=None),
        "UnknownJob",
        f"did you mean {JOB}?",
    ),
    refused(
        "an unknown job that is cancelled is cancelled",
        with_spec({"job": "nothing", "cancel": True}, contract=None),
        "Cancelled",
        "cancelled before it was launched",
        phase="Cancelled",
    ),
    Row(
        name="an unknown job that is suspended says both",
        given=with_spec({"job": "nothing", "suspend": True}, contract=None),
        does=[],
        phase="Suspended",
        conditions=("Accepted=False UnknownJob", "Suspended=True"),
    ),
    refused(
        "wrong parameters are refused with their path",
        with_spec({"parameters": {"month": "2026-11", "batch": "many"}}),
        "InvalidParameters",
        "spec.parameters $.batch: expected integer, got str 'many'",
    ),
    refused(
        "missing parameters are refused with their path",
        with_spec({"parameters": None}),
        "InvalidParameters",
        "spec.parameters $.month: is required and missing",
    ),
    refused(
        "a policy that contradicts the job is refused",
        with_spec(
            {"partitions": {"delivery": "AtLeastOnce"}},
            contract=replace(CONTRACT, delivery="AT_MOST_ONCE"),
        ),
        "InvalidPolicy",
        "cannot be AtLeastOnce",
    ),
    refused(
        "a pool without a template is refused",
        with_spec({"pool": "gpu"}),
        "PoolUnknown",
        "there is no pod template for pool gpu (pools: default)",
    ),
    refused(
        "an unreadable pools file refuses every Job",
        an_observation(options=replace(OPTIONS, pools_problem="the pools file is not YAML")),
        "PoolUnknown",
        "the pools file is not YAML",
    ),
    refused(
        "a pod template is refused where the switch forbids it",
        with_spec(
            {"master": {"image": "mine:1", "podTemplate": {}}},
            options=replace(OPTIONS, allow_pod_template=False),
        ),
        "PodTemplateForbidden",
        "spec.master.podTemplate and spec.master.image may not be set",
    ),
    refused(
        "a pod template that cannot be laid over is refused",
        with_spec({"master": {"podTemplate": {"spec": {"containers": [{"image": "x"}]}}}}),
        "InvalidPodTemplate",
        "spec.master.podTemplate.spec.containers[0].name is missing",
    ),
    refused(
        "a spec that this version cannot read is refused with every problem",
        with_spec({"parallelism": "many", "suspend": 1}),
        "InvalidSpec",
        "spec.parallelism is 'many'",
    ),
    refused(
        "a Job of somebody else in the place of the master is a conflict",
        an_observation(jobs=a_foreign_job()),
        "NameConflict",
        f"Job {NAME}-1 exists and belongs to somebody else",
    ),
    Row(
        name="the Job of an earlier BatchJob of this name holds up its own Job, not the request",
        given=an_observation(jobs=a_foreign_job(owner_name=NAME)),
        does=[RequestExecution],
        phase="Pending",
        conditions=("Accepted=True",),
        says=f"Job {NAME}-1 of an earlier BatchJob is being removed",
    ),
    Row(
        name="a foreign Job that is being deleted holds up the Job, not the request",
        given=an_observation(jobs=a_foreign_job(deleting=True)),
        does=[RequestExecution],
        phase="Pending",
        conditions=("Accepted=True",),
    ),
    refused(
        "an instance that runs elsewhere is a duplicate, for now",
        answered("running"),
        "DuplicateInstance",
        f"is being run by execution {RUN}",
    ),
    refused(
        "an instance that has completed is a duplicate for good",
        answered("completed"),
        "DuplicateInstance",
        "is never run twice",
        phase="Failed",
    ),
    refused(
        "an instance that was abandoned is a duplicate for good",
        answered("abandoned"),
        "DuplicateInstance",
        "is never launched again",
        phase="Failed",
    ),
    refused(
        "an instance with other parameters is a duplicate for good",
        answered("parameters"),
        "DuplicateInstance",
        "was launched with other parameters",
        phase="Failed",
    ),
    # -- running
    Row(
        name="a running execution is mirrored",
        given=an_observation(execution=an_execution(**RUNNING), jobs=a_job()),
        does=[],
        phase="Running",
        says="running",
    ),
    Row(
        name="work that no node can take is explained",
        given=an_observation(
            execution=an_execution(pending=3, completed=197), jobs=a_job(), pool_nodes=0
        ),
        does=[],
        phase="Running",
        says=f"3 partitions waiting: no living node of pool default runs job {JOB}",
    ),
    Row(
        name="a limit that is reached is explained",
        given=with_spec(
            {"parallelism": 10}, execution=an_execution(parallelism=10, **RUNNING), jobs=a_job()
        ),
        does=[],
        phase="Running",
        says="spec.parallelism allows (10)",
    ),
    Row(
        name="a Job deleted by hand is made again",
        given=an_observation(execution=an_execution(**RUNNING)),
        does=[CreateJob],
        phase="Running",
    ),
    Row(
        name="a Job that has failed for good does not end the execution",
        given=an_observation(
            execution=an_execution(master_node="worker-3", **RUNNING),
            jobs=a_job(
                failed=True, active=0, pod_trouble="pod x: ended (exit code 137, OOMKilled)"
            ),
        ),
        does=[],
        phase="Running",
        conditions=("Failed=False", "Finished=False"),
        says="(pod x: ended (exit code 137, OOMKilled)); node worker-3 leads the execution",
    ),
    Row(
        name="a pod that does not start is explained",
        given=an_observation(
            execution=an_execution("REQUESTED"),
            jobs=a_job(pod_trouble=f'pod {NAME}-1-abc: secret "db" not found'),
        ),
        does=[],
        phase="Pending",
        says='secret "db" not found',
    ),
    Row(
        name="a Job that Kueue holds back is explained",
        given=an_observation(
            execution=an_execution("REQUESTED"), jobs=a_job(suspended=True, active=0)
        ),
        does=[],
        phase="Pending",
        says="is held back",
    ),
    Row(
        name="a Job that the API server refuses is explained and not tried in a circle",
        given=an_observation(
            execution=an_execution("REQUESTED"), create_problem="exceeded quota: pods"
        ),
        does=[],
        phase="Pending",
        says="the master Job cannot be created: exceeded quota: pods",
    ),
    Row(
        name="a foreign Job does not stop an execution that was accepted",
        given=an_observation(execution=an_execution(**RUNNING), jobs=a_foreign_job()),
        does=[],
        phase="Running",
        conditions=("Accepted=True",),
        says="belongs to somebody else",
    ),
    # -- control
    Row(
        name="suspend reaches the execution",
        given=with_spec({"suspend": True}, execution=an_execution(**RUNNING), jobs=a_job()),
        does=[Suspend],
        phase="Suspended",
        conditions=("Suspended=True",),
        says="10 partitions still running",
    ),
    Row(
        name="resume reaches the execution, which then gets its Job",
        given=an_observation(execution=an_execution("REQUESTED", suspended=True)),
        does=[Resume, CreateJob],
        phase="Pending",
        conditions=("Suspended=False",),
    ),
    Row(
        name="no Job is made while an execution is suspended",
        given=with_spec({"suspend": True}, execution=an_execution(suspended=True)),
        does=[],
        phase="Suspended",
    ),
    Row(
        name="cancel reaches the execution",
        given=with_spec({"cancel": True}, execution=an_execution(**RUNNING), jobs=a_job()),
        does=[Cancel],
        phase="Cancelling",
        says="it is being cancelled; 10 partitions still running",
    ),
    Row(
        name="cancel ends what nobody runs, and makes no Job for it",
        given=with_spec({"cancel": True}, execution=an_execution("REQUESTED")),
        does=[Cancel],
        phase="Cancelled",
        conditions=("Failed=True Cancelled", "Finished=True Cancelled"),
    ),
    Row(
        name="cancel acts while the pod of the master crashes",
        given=with_spec(
            {"cancel": True},
            execution=an_execution("PLANNING"),
            jobs=a_job(pod_trouble="pod x: container rowlock keeps crashing"),
        ),
        does=[Cancel],
        phase="Cancelled",
    ),
    Row(
        name="cancel goes before suspend",
        given=with_spec({"cancel": True, "suspend": True}, execution=an_execution(running=1)),
        does=[Cancel, CreateJob],
        phase="Cancelling",
    ),
    Row(
        name="a Job lost while claims of a cancelled execution are open is made again",
        given=an_observation(
            execution=an_execution("CLOSING", cancel_requested=True, running=2, completed=1)
        ),
        does=[CreateJob],
        phase="Cancelling",
    ),
    Row(
        name="every limit that differs is pushed",
        given=with_spec(
            {
                "priority": 5,
                "parallelism": 3,
                "activeDeadlineSeconds": 600,
                "deletionPolicy": "Orphan",
            },
            execution=an_execution(**RUNNING),
            jobs=a_job(),
        ),
        does=[SetLimits],
        phase="Running",
    ),
    Row(
        name="a problem in the spec hides no suspend, and pushes no limit",
        given=with_spec(
            {"suspend": True, "parallelism": "all", "priority": 5},
            execution=an_execution(**RUNNING),
            jobs=a_job(),
        ),
        does=[Suspend],
        phase="Suspended",
        conditions=("Accepted=True",),
        says="spec.parallelism is 'all'",
    ),
    # -- ends
    Row(
        name="a completed execution succeeds",
        given=an_observation(execution=an_execution("COMPLETED", completed=200), jobs=a_job()),
        does=[],
        phase="Succeeded",
        conditions=("Complete=True Completed", "Failed=False", "Finished=True Completed"),
        says="all 200 partitions are accounted for",
    ),
    Row(
        name="a failed execution says why",
        given=an_observation(
            execution=an_execution(
                "FAILED",
                completed=198,
                failed=2,
                failure_reason="PartitionsFailed",
                failure_message="2 of 200 partitions failed, 0 allowed",
            ),
        ),
        does=[],
        phase="Failed",
        conditions=("Complete=False", "Failed=True PartitionsFailed", "Finished=True"),
        says="2 of 200 partitions failed, 0 allowed; 198 of 200 partitions are completed",
    ),
    Row(
        name="too many failures have the reason of Kubernetes",
        given=an_observation(execution=an_execution("FAILED", failure_reason="MaxFailedExceeded")),
        does=[],
        phase="Failed",
        conditions=("Failed=True MaxFailedPartitionsExceeded",),
    ),
    Row(
        name="an execution past its deadline fails",
        given=an_observation(execution=an_execution("FAILED", failure_reason="DeadlineExceeded")),
        does=[],
        phase="Failed",
        conditions=("Failed=True DeadlineExceeded",),
    ),
    Row(
        name="an execution that somebody cancelled by a command is cancelled",
        given=an_observation(execution=an_execution("CANCELLED", cancel_requested=True)),
        does=[],
        phase="Cancelled",
        conditions=("Failed=True Cancelled", "Finished=True"),
    ),
    Row(
        name="an abandoned execution ends too",
        given=an_observation(execution=an_execution("ABANDONED")),
        does=[],
        phase="Cancelled",
        conditions=("Failed=True Abandoned", "Finished=True"),
        says="never launched again",
    ),
    Row(
        name="no Job is made for an execution that has ended",
        given=an_observation(execution=an_execution("FAILED", failure_reason="PlanFailed")),
        does=[],
        phase="Failed",
    ),
    Row(
        name="a Job whose pod never started is removed after its execution",
        given=an_observation(
            execution=an_execution("CANCELLED", ended_at=NOW - timedelta(minutes=2)),
            jobs=a_job(pod_trouble="pod x: image y cannot be pulled"),
        ),
        does=[DeleteJob],
        phase="Cancelled",
    ),
    Row(
        name="a Job that is held back is removed after its execution",
        given=an_observation(
            execution=an_execution("CANCELLED", ended_at=NOW - timedelta(minutes=2)),
            jobs=a_job(suspended=True, active=0),
        ),
        does=[DeleteJob],
        phase="Cancelled",
    ),
    Row(
        name="a Job whose pod still runs is left to end by itself",
        given=an_observation(
            execution=an_execution("COMPLETED", ended_at=NOW - timedelta(hours=2)), jobs=a_job()
        ),
        does=[],
        phase="Succeeded",
    ),
    # -- restarts
    Row(
        name="a greater nonce launches another attempt of a failed one",
        given=with_spec(
            {"restartNonce": 1}, execution=an_execution("FAILED", failure_reason="PlanFailed")
        ),
        does=[RequestExecution, CreateJob],
        phase="Pending",
        conditions=("Accepted=True", "Failed=False", "Finished=False"),
    ),
    Row(
        name="a greater nonce launches another attempt of one cancelled by a command",
        given=with_spec({"restartNonce": 4}, execution=an_execution("CANCELLED")),
        does=[RequestExecution, CreateJob],
        phase="Pending",
    ),
    Row(
        name="a greater nonce waits for the end of the attempt before",
        given=with_spec({"restartNonce": 1}, execution=an_execution(**RUNNING), jobs=a_job()),
        does=[],
        phase="Running",
        says="attempt 2 waits for the end of this one",
    ),
    Row(
        name="the attempt before keeps its Job while a restart waits",
        given=with_spec({"restartNonce": 1}, execution=an_execution("REQUESTED", suspended=True)),
        does=[Resume, CreateJob],
        phase="Pending",
    ),
    Row(
        name="a greater nonce does not run a completed instance again",
        given=with_spec({"restartNonce": 1}, execution=an_execution("COMPLETED")),
        does=[],
        phase="Succeeded",
        conditions=("Accepted=True", "Complete=True"),
        says="restartNonce 1 changes nothing",
    ),
    Row(
        name="a cancelled BatchJob is not restarted",
        given=with_spec({"restartNonce": 1, "cancel": True}, execution=an_execution("CANCELLED")),
        does=[],
        phase="Cancelled",
    ),
    Row(
        name="a restart by a command is followed, without a Job",
        given=an_observation(execution=an_execution(attempt=None, **RUNNING)),
        does=[],
        phase="Running",
    ),
    # -- the database forgets
    refused(
        "an execution that is in the database no more is not launched again",
        an_observation(a_batchjob(status={"executionID": str(RUN), "observedRestartNonce": 0})),
        "RunNotFound",
        f"execution {RUN} of attempt 1 is not in the database",
    ),
    refused(
        "a Job of ours proves that there was an execution",
        an_observation(jobs=a_job()),
        "RunNotFound",
        "is not run again by itself",
    ),
    refused(
        "a restart that the database has forgotten is not launched again",
        an_observation(
            a_batchjob(
                {"restartNonce": 1},
                status={"executionID": str(UID), "observedRestartNonce": 1},
            ),
            execution=an_execution("FAILED", failure_reason="PlanFailed"),
        ),
        "RunNotFound",
        "of attempt 2",
    ),
    refused(
        "a lost execution can be closed by cancel",
        an_observation(a_batchjob({"cancel": True}, status={"executionID": str(RUN)})),
        "Cancelled",
        "its execution is not in the database",
        phase="Cancelled",
    ),
    Row(
        name="a lost execution is launched again when somebody raises the nonce",
        given=an_observation(
            a_batchjob(
                {"restartNonce": 1}, status={"executionID": str(RUN), "observedRestartNonce": 0}
            ),
            jobs=a_job(),
        ),
        does=[RequestExecution, CreateJob],
        phase="Pending",
        conditions=("Accepted=True",),
    ),
    # -- the database is away
    Row(
        name="a new BatchJob waits while the database is away",
        given=an_observation(database_up=False, contract=None),
        does=[],
        phase="Pending",
        conditions=(
            "Accepted=Unknown DatabaseUnavailable",
            "Suspended=Unknown NotYetKnown",
            "Complete=Unknown",
            "Failed=Unknown",
            "Finished=Unknown",
            "StatusStale=False",
        ),
        says="the database cannot be reached",
    ),
]


@pytest.mark.parametrize("row", TABLE, ids=[row.name for row in TABLE])
def test_the_operator(row: Row) -> None:
    world = World(row.given)

    done = world.settle()

    assert deeds(done) == row.does
    assert world.status["phase"] == row.phase
    for expected in row.conditions:
        assert any(one.startswith(expected) for one in told(world.batchjob)), told(world.batchjob)
    assert row.says in world.status["message"]
    assert len(told(world.batchjob)) == 6


def test_no_two_rows_have_one_name() -> None:
    assert len({row.name for row in TABLE}) == len(TABLE)


# -- what is asked for -------------------------------------------------------------------------


def test_a_request_says_who_asks_and_what_is_not_said_is_as_the_author_has_it() -> None:
    request = only(reconcile(an_observation()), RequestExecution)

    assert request.launch_key == f"eu-1/{UID}/1"
    assert request.instance_key == UID
    assert request.policy == CONTRACT.policy
    assert request.requester == {
        "kind": "BatchJob",
        "cluster": "eu-1",
        "namespace": "billing",
        "name": NAME,
        "uid": UID,
        "actor": "operator",
    }
    assert request.options == {
        "parallelism": None,
        "deadline_seconds": None,
        "suspended": False,
        "deletion_policy": "CANCEL",
    }


def test_two_clusters_on_one_database_ask_for_executions_of_their_own() -> None:
    here = only(reconcile(an_observation()), RequestExecution)
    there = an_observation(options=replace(OPTIONS, cluster="us-1"))

    assert only(reconcile(there), RequestExecution).launch_key != here.launch_key


@pytest.mark.parametrize(
    "spec, labels, seconds",
    [
        ({}, {}, 60.0),
        ({"master": {"mode": "Pool"}}, {}, 0.0),
        ({}, {"kueue.x-k8s.io/queue-name": "nightly"}, 10 * 365 * 86_400.0),
    ],
    ids=["Job", "Pool", "Kueue"],
)
def test_nodes_of_the_pool_leave_the_execution_to_its_pod_for_a_while(
    spec: dict[str, Any], labels: dict[str, str], seconds: float
) -> None:
    request = only(reconcile(an_observation(a_batchjob(spec, labels=labels))), RequestExecution)

    assert request.adopt_after_seconds == seconds


def test_only_the_limits_that_differ_are_pushed() -> None:
    spec = {"priority": 5, "activeDeadlineSeconds": 600, "parallelism": 7}
    deadline = NOW - timedelta(minutes=5) + timedelta(seconds=600)
    execution = an_execution(priority=5, deadline_at=deadline, parallelism=8)

    actions = reconcile(with_spec(spec, execution=execution, jobs=a_job()))

    assert only(actions, SetLimits).changes == {"parallelism": 7}


def test_a_limit_that_is_taken_away_is_pushed_as_null() -> None:
    execution = an_execution(parallelism=8, deadline_at=NOW)

    actions = reconcile(an_observation(execution=execution, jobs=a_job()))

    assert only(actions, SetLimits).changes == {"parallelism": None, "deadline_seconds": None}


def test_an_answer_is_asked_for_anew_on_the_next_visit() -> None:
    world = followed(answered("running"))

    assert deeds(reconcile(world.observed)) == [RequestExecution]


def test_a_refusal_for_good_is_not_asked_again_until_the_nonce_grows() -> None:
    world = followed(answered("completed"))

    assert deeds(reconcile(world.observed)) == []

    world.edits(restart_nonce=1)

    assert only(reconcile(world.observed), RequestExecution).attempt == 2


def test_a_refusal_heals_when_its_cause_is_gone() -> None:
    world = followed(an_observation(contract=None, job_names=()))
    assert any(isinstance(one, Requeue) for one in reconcile(world.observed))

    world.sees(contract=CONTRACT)

    assert deeds(world.settle()) == [RequestExecution, CreateJob]
    assert "Accepted=True Accepted" in told(world.batchjob)


# -- the status --------------------------------------------------------------------------------


def test_a_new_batchjob_costs_one_patch() -> None:
    world = followed(an_observation())

    assert world.patches == 1
    assert world.said() == ["MasterLaunched", "RunCreated"]


def test_progress_is_written_every_five_seconds_at_most() -> None:
    world = known(**RUNNING)
    patches = world.patches
    for second in range(1, 21):
        world.passes(1)
        world.sees(execution=an_execution(completed=148 + second, pending=40 - second, running=10))
        world.settle()

    assert world.patches - patches == 4


def test_an_end_is_written_at_once() -> None:
    world = known(**RUNNING)
    world.sees(execution=an_execution("COMPLETED", completed=200))

    assert world.status["phase"] == "Running"
    world.settle()

    assert world.status["phase"] == "Succeeded"


def test_a_clock_that_was_set_back_holds_nobody_up() -> None:
    world = known(**RUNNING)
    world.sees(now=NOW - timedelta(hours=1), execution=an_execution(completed=160, running=1))

    assert deeds(world.settle()) == []
    assert world.status["partitions"]["succeeded"] == 160


def test_nothing_is_written_while_nothing_happens() -> None:
    world = known(**RUNNING)
    patches = world.patches
    for _ in range(10):
        world.passes(60)
        assert world.settle() == []

    assert world.patches == patches


def test_a_row_older_than_the_status_is_not_shown() -> None:
    world = known(revision=9, **RUNNING)
    world.passes(10)
    world.sees(execution=an_execution(revision=8, running=1), revision_written=9)

    assert reconcile(world.observed) == [Requeue(seconds=1.0)]


def test_the_transition_time_stays_while_the_status_of_a_condition_does() -> None:
    world = known(**RUNNING)
    world.passes(600)
    world.sees(execution=an_execution("COMPLETED", completed=200))
    world.settle()

    times = {one["type"]: one["lastTransitionTime"] for one in world.status["conditions"]}
    assert times["Accepted"] == times["Suspended"] == "2026-11-30T12:00:00Z"
    assert times["Finished"] == times["Complete"] == "2026-11-30T12:10:00Z"


def test_events_are_told_once_by_however_many_operators() -> None:
    first, second = World(an_observation()), World(an_observation())
    for world in (first, second):
        for execution in (
            an_execution("REQUESTED"),
            an_execution(running=1, pending=199),
            an_execution(running=1, pending=197, failed=2),
            an_execution(running=1, pending=196, failed=3),
            an_execution("FAILED", failed=200, failure_reason="PartitionsFailed"),
        ):
            world.passes(10)
            world.sees(execution=execution)
            world.settle()

    assert first.events == second.events
    assert first.said() == [
        "MasterLaunched",
        "RunCreated",
        "PartitionsPlanned",
        "PartitionsFailed",
        "Failed",
    ]


def test_suspend_and_resume_are_told_each_time() -> None:
    world = known(**RUNNING)
    for suspend in (True, False, True, False):
        world.edits(suspend=suspend)
        world.settle()

    assert world.said()[-4:] == ["Suspended", "Resumed", "Suspended", "Resumed"]


def test_trouble_of_the_master_is_told_once() -> None:
    world = known(**RUNNING)
    world.passes(10)
    world.sees(jobs=a_job(failed=True, failure_message="BackoffLimitExceeded"))
    world.settle()
    world.passes(10)
    world.settle()

    assert world.said().count("MasterTrouble") == 1


# -- deletion and time to live -----------------------------------------------------------------


def test_a_batchjob_that_is_being_deleted_takes_its_execution_along() -> None:
    observed = an_observation(a_batchjob(deleting=True), execution=an_execution(**RUNNING))

    assert only(reconcile(observed), Cancel).execution_id == RUN
    assert deeds(reconcile(observed)) == [Cancel]


@pytest.mark.parametrize(
    "observed",
    [
        an_observation(
            a_batchjob({"deletionPolicy": "Orphan"}, deleting=True), execution=an_execution()
        ),
        an_observation(a_batchjob(deleting=True)),
        an_observation(a_batchjob(deleting=True), execution=an_execution("COMPLETED")),
        an_observation(
            a_batchjob(deleting=True), execution=an_execution("CLOSING", cancel_requested=True)
        ),
    ],
    ids=["Orphan", "never launched", "ended", "cancelled already"],
)
def test_a_batchjob_that_is_being_deleted_needs_nothing_more(observed: Observed) -> None:
    assert reconcile(observed) == []


def test_a_finished_batchjob_is_deleted_when_its_time_is_over() -> None:
    world = known({"ttlSecondsAfterFinished": 100}, "COMPLETED", completed=200)
    assert not world.gone

    world.passes(39)  # it ended a minute ago
    assert [type(one) for one in reconcile(world.observed)] == [Requeue]
    world.passes(1)

    assert reconcile(world.observed) == [DeleteBatchJob(uid=UID, resource_version="17")]


def test_the_end_is_told_before_a_batchjob_without_time_to_live_goes() -> None:
    world = World(
        an_observation(
            a_batchjob({"ttlSecondsAfterFinished": 0}), execution=an_execution("COMPLETED")
        )
    )

    done = [type(one) for one in world.settle()]

    assert done.index(PatchStatus) < done.index(DeleteBatchJob)
    assert world.status["phase"] == "Succeeded"


def test_a_running_batchjob_has_no_time_to_live() -> None:
    world = known({"ttlSecondsAfterFinished": 0}, **RUNNING)
    world.passes(10_000)

    world.settle()

    assert not world.gone


def test_a_restart_that_is_due_goes_before_the_time_to_live() -> None:
    world = known(
        {"ttlSecondsAfterFinished": 1}, "FAILED", failure_reason="PlanFailed", ended_at=NOW
    )
    world.edits(restart_nonce=1)
    world.passes(100)

    assert deeds(world.settle()) == [RequestExecution, CreateJob]
    assert not world.gone


def test_time_to_live_counts_from_the_end_of_the_last_attempt() -> None:
    world = known(
        {"ttlSecondsAfterFinished": 100, "restartNonce": 1},
        "FAILED",
        failure_reason="PlanFailed",
        attempt=2,
        ended_at=NOW + timedelta(seconds=500),
    )
    world.passes(599)
    world.settle()
    assert not world.gone

    world.passes(1)
    world.settle()

    assert world.gone


def test_a_batchjob_applied_again_after_its_time_to_live_does_not_run_twice() -> None:
    """The new object has a new uid and no status; the instance is known to the database."""
    world = followed(answered("completed"))

    assert world.launched == []
    assert world.status["phase"] == "Failed"


def test_an_end_stays_when_the_execution_is_purged() -> None:
    world = known({"ttlSecondsAfterFinished": 86_400}, "COMPLETED", completed=200)
    status = world.status
    world.sees(execution=None, jobs={})
    world.passes(3600)

    assert world.settle() == []
    assert world.status == status


# -- without the database ----------------------------------------------------------------------


def test_the_old_status_stays_and_says_after_a_while_that_it_is_stale() -> None:
    world = known(**RUNNING)
    before = world.status
    world.sees(database_up=False, execution=None, contract=None, jobs={})
    world.passes(29)
    assert world.settle() == []
    assert world.status == before

    world.passes(1)
    done = world.settle()

    assert deeds(done) == []  # no Job is made, although there is none
    assert "StatusStale=True DatabaseUnavailable" in told(world.batchjob)
    fields = ("phase", "message", "partitions", "executionID", "lastSyncTime", "progress")
    assert {field: world.status[field] for field in fields} == {
        field: before[field] for field in fields
    }

    world.sees(database_up=True, execution=an_execution(**RUNNING), jobs=a_job())
    world.settle()
    assert "StatusStale=False DatabaseReachable" in told(world.batchjob)


def test_an_edit_that_the_database_has_not_seen_is_not_said_to_be_observed() -> None:
    world = known(**RUNNING)
    world.sees(database_up=False, execution=None)
    world.passes(60)
    world.edits(suspend=True)
    world.settle()

    generations = {one["type"]: one["observedGeneration"] for one in world.status["conditions"]}
    assert generations == {
        **dict.fromkeys(("Accepted", "Suspended", "Complete", "Failed", "Finished"), 1),
        "StatusStale": 2,
    }
    assert world.status["observedGeneration"] == 1


def test_what_has_finished_cannot_become_stale() -> None:
    world = known(status="COMPLETED", completed=200)
    world.sees(database_up=False, execution=None)
    world.passes(3600)

    assert reconcile(world.observed) == []


def test_an_operator_that_never_saw_the_database_counts_from_its_start() -> None:
    world = known(**RUNNING)
    world.sees(
        database_up=False,
        execution=None,
        database_seen_at=None,
        started_at=NOW - timedelta(hours=1),
    )
    world.settle()

    assert "StatusStale=True DatabaseUnavailable" in told(world.batchjob)


def test_it_looks_again_when_the_status_becomes_stale() -> None:
    world = known(**RUNNING)
    world.sees(database_up=False, execution=None)
    world.passes(10)

    assert reconcile(world.observed) == [Requeue(seconds=20.0)]
