"""Whatever is observed, the operator's decision holds: it never raises, it settles, it launches once."""

import json
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rowlock_operator.conditions import Type
from rowlock_operator.model import (
    BatchJob,
    CreateJob,
    DeleteJob,
    Execution,
    FailedPartition,
    MasterJob,
    Observed,
    PatchStatus,
)
from rowlock_operator.reconcile import reconcile
from rowlock_operator.resources import parse
from rowlock_operator.status import STATUS_BYTES
from tests.support.batchjobs import (
    CONTRACT,
    NAME,
    NOW,
    RUN,
    UID,
    World,
    a_batchjob,
    a_job,
    an_execution,
    an_observation,
)

# Large observations take a while to make, and on a busy machine a long one.
patient = partial(settings, deadline=None, suppress_health_check=[HealthCheck.too_slow])

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


def objects(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    """Objects that have some of these fields, with anything in them."""
    return st.fixed_dictionaries({}, optional=dict.fromkeys(names, ANYTHING))


def often(*values: Any) -> st.SearchStrategy[Any]:
    """Mostly what it should be, sometimes anything."""
    return st.sampled_from(values) | ANYTHING


CONTAINERS = st.lists(objects("name", "image", "env", "command"), max_size=2) | ANYTHING
POD_TEMPLATES = st.fixed_dictionaries(
    {},
    optional={
        "metadata": objects("labels", "annotations") | ANYTHING,
        "spec": st.fixed_dictionaries(
            {}, optional={"containers": CONTAINERS, "volumes": ANYTHING, "restartPolicy": ANYTHING}
        )
        | ANYTHING,
    },
)
MASTERS = st.fixed_dictionaries(
    {},
    optional={
        "mode": often("Job", "Pool"),
        "slots": often(0, 3),
        "image": often("mine:1"),
        "serviceAccountName": often("mine"),
        "backoffLimit": often(0, 3),
        "resources": ANYTHING,
        "podTemplate": POD_TEMPLATES | ANYTHING,
    },
)
SPECS = st.fixed_dictionaries(
    {},
    optional={
        "job": often("invoices.monthly", "other"),
        "parameters": often({"month": "2026-11"}, {}, None),
        "instanceKey": often("a", None),
        "pool": often("default", "other"),
        "priority": often(0, 5),
        "parallelism": often(None, 3),
        "suspend": often(True, False),
        "cancel": often(True, False),
        "restartNonce": often(0, 1, 2**62),
        "activeDeadlineSeconds": often(None, 60),
        "ttlSecondsAfterFinished": often(None, 0, 60),
        "deletionPolicy": often("Cancel", "Orphan"),
        "partitions": objects("delivery", "maxAttempts", "timeoutSeconds", "maxFailed", "backoff")
        | ANYTHING,
        "master": MASTERS | ANYTHING,
    },
)
CONDITIONS: st.SearchStrategy[list[Any]] = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(list(map(str, Type))) | ANYTHING,
            "status": often("True", "False", "Unknown"),
            "reason": often("Accepted", "DuplicateInstance", "RunNotFound"),
            "message": ANYTHING,
            "lastTransitionTime": often("2026-11-30T11:00:00Z"),
        },
    ),
    max_size=6,
)
STATUSES = st.fixed_dictionaries(
    {},
    optional={
        "observedGeneration": ANYTHING,
        "observedRestartNonce": often(0, 1),
        "phase": often("Pending", "Running", "Failed"),
        "message": ANYTHING,
        "executionID": often(str(RUN), None),
        "attempt": ANYTHING,
        "completionTime": often("2026-11-30T11:00:00Z"),
        "lastSyncTime": often("2026-11-30T11:59:58Z"),
        "partitions": objects("total", "failed") | ANYTHING,
        "masterJobName": often(f"{NAME}-1"),
        "failedPartitions": ANYTHING,
        "conditions": CONDITIONS | ANYTHING,
    },
)
EXECUTIONS = st.none() | st.builds(
    an_execution,
    st.sampled_from(
        [
            *("REQUESTED", "PLANNING", "RUNNING", "CLOSING", "FINISHING"),
            *("COMPLETED", "FAILED", "CANCELLED", "ABANDONED"),
        ]
    ),
    attempt=st.sampled_from([1, 1, 1, 2, None]),
    suspended=st.booleans(),
    cancel_requested=st.booleans(),
    running=st.integers(0, 3),
    pending=st.integers(0, 10**12),
    failed=st.integers(0, 10**12),
    priority=st.sampled_from([0, 5]),
    parallelism=st.sampled_from([None, 3]),
    failure_message=st.none() | st.text(),
    failure_reason=st.sampled_from([None, "PartitionsFailed", "MaxFailedExceeded"]),
    failed_partitions=st.lists(
        st.builds(
            FailedPartition,
            key=st.text(),
            attempts=st.integers(),
            reason=st.text(),
            message=st.text(),
        ),
        max_size=12,
    ).map(tuple),
)
NO_JOBS: st.SearchStrategy[dict[str, MasterJob]] = st.just({})
JOBS = NO_JOBS | st.builds(
    a_job,
    owner_uid=st.sampled_from([UID, UID, "somebody", None]),
    deleting=st.booleans(),
    suspended=st.booleans(),
    active=st.integers(0, 1),
    succeeded=st.booleans(),
    failed=st.booleans(),
    pod_trouble=st.sampled_from(["", f"pod {NAME}-1-abc: no cluster node takes it"]),
)


def a_found(spec: Any, status: Any, deleting: bool = False) -> BatchJob:
    metadata: dict[str, Any] = {
        "name": NAME,
        "namespace": "billing",
        "uid": UID,
        "resourceVersion": "1",
        **({"deletionTimestamp": "2026-11-30T12:00:00Z"} if deleting else {}),
    }
    return parse({"metadata": metadata, "spec": spec, "status": status})


OBSERVATIONS = st.builds(
    an_observation,
    st.builds(
        a_found, SPECS | ANYTHING, STATUSES | ANYTHING, st.sampled_from([False] * 9 + [True])
    ),
    execution=EXECUTIONS,
    jobs=JOBS,
    contract=st.sampled_from([CONTRACT, CONTRACT, None]),
    database_up=st.sampled_from([True] * 5 + [False]),
    database_seen_at=st.sampled_from([NOW, None, NOW - timedelta(hours=1)]),
    create_problem=st.sampled_from(["", "", "exceeded quota"]),
    pool_nodes=st.sampled_from([None, 0, 2]),
)


@patient()
@given(ANYTHING)
def test_any_object_whatever_is_read(found: Any) -> None:
    parse(found)


@given(OBSERVATIONS)
@patient(max_examples=400)
def test_whatever_is_observed_it_decides_settles_and_writes_json(observed: Observed) -> None:
    world = World(observed)

    done = world.settle()

    assert len(world.launched) <= 1
    made = [one for one in done if isinstance(one, CreateJob)]
    assert len(made) <= 1
    assert not (made and any(isinstance(one, DeleteJob) for one in done))
    for one in done:
        if isinstance(one, (PatchStatus, CreateJob)):
            json.dumps(one.manifest if isinstance(one, CreateJob) else one.status)


@patient()
@given(OBSERVATIONS, st.integers(0, 100_000))
def test_a_status_that_the_database_confirms_is_complete_and_small(
    observed: Observed, failed: int
) -> None:
    noisy = FailedPartition(key="ü" * 500, attempts=3, reason="E" * 300, message="é" * 500)
    execution = an_execution(
        "FAILED",
        total=100_000,
        failed=failed,
        failure_reason="PartitionsFailed",
        failure_message="…" * 1000,
        failed_partitions=(noisy,) * 10,
    )
    world = World(replace(observed, database_up=True, execution=execution, batchjob=a_batchjob()))
    world.settle()

    assert [one["type"] for one in world.status["conditions"]] == list(map(str, Type))
    assert len(json.dumps(world.status, ensure_ascii=False).encode()) <= STATUS_BYTES
    assert len(world.status["failedPartitions"]) >= 1


class Story:
    """What may go on around an operator that is restarted at any time."""

    def __init__(self) -> None:
        self.world = World(an_observation())
        self.row: Execution | None = None
        """The row of the database while it is away."""

    def restart(self) -> None:
        self.world.sees(answer=None)

    def interrupted(self) -> None:
        """The operator dies after its first action."""
        actions = reconcile(self.world.observed)
        self.world.apply(actions[:1])
        self.restart()

    def database_away(self) -> None:
        if self.world.observed.database_up:
            self.row = self.world.observed.execution
            self.world.sees(database_up=False, execution=None, contract=None)

    def database_back(self) -> None:
        if not self.world.observed.database_up:
            self.world.sees(database_up=True, execution=self.row, contract=CONTRACT)

    def restored_from_backup(self) -> None:
        if self.world.observed.database_up:
            self.world.keys.clear()
            self.world.sees(execution=None)

    def job_deleted(self) -> None:
        self.world.sees(jobs={})

    def _move(self, status: str, **changes: Any) -> None:
        execution = self.world.observed.execution
        if execution is not None and not execution.ended:
            revision = execution.revision + 1
            self.world.sees(
                execution=replace(execution, status=status, revision=revision, **changes)
            )

    def runs(self) -> None:
        self._move("RUNNING", total=10, running=2, pending=8)

    def fails(self) -> None:
        self._move("FAILED", ended_at=self.world.observed.now, failure_reason="PartitionsFailed")

    def completes(self) -> None:
        self._move("COMPLETED", ended_at=self.world.observed.now, completed=10)

    def nonce(self) -> None:
        self.world.edits(restart_nonce=self.world.batchjob.spec.restart_nonce + 1)

    def suspend(self) -> None:
        self.world.edits(suspend=not self.world.batchjob.spec.suspend)

    def cancel(self) -> None:
        self.world.edits(cancel=True)

    def time(self) -> None:
        self.world.passes(7)


STEPS = [name for name in vars(Story) if not name.startswith("_")]


@given(st.lists(st.sampled_from(STEPS), max_size=25))
@patient(max_examples=300)
def test_no_attempt_is_launched_twice_whatever_happens(steps: list[str]) -> None:
    story = Story()
    world = story.world
    for step in steps:
        # A restore takes what has left no trace yet along, and so may somebody who deletes the Job.
        if step in ("restored_from_backup", "job_deleted") and not world.observed.jobs:
            world.settle()
        getattr(story, step)()
        execution, launched = world.observed.execution, len(world.launched)
        if step != "interrupted":
            world.settle()
        over = execution is None or execution.status == "FAILED"
        if not over or not world.observed.database_up:
            assert len(world.launched) == launched
    assert len(world.launched) == len(set(world.launched))
    assert len(world.launched) <= 1 + world.batchjob.spec.restart_nonce
