"""The kind BatchJob is removed from the cluster and comes back; it takes all BatchJobs along."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.cluster import MANIFESTS, Kubectl, Operators, becomes
from tests.support.operator_scene import OperatorScene
from tests.support.waiting import wait_until

CRD = "batchjobs.batch.rowlock.dev"
LAST_EVENT = "rowlock_operator_watch_last_event_timestamp_seconds"


@pytest.mark.alone
def test_executions_outlive_the_removal_of_their_kind_and_the_operator_works_again_when_it_is_back(
    kubectl: Kubectl, namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    """Whoever uninstalls a kind deletes its objects; that must not be read as a wish to cancel all work."""
    operator = operators.start(ROWLOCK_SWEEP_SECONDS="1", ROWLOCK_RESYNC_SECONDS="1")
    namespace.apply(scene.batchjob("deleted"), *(scene.batchjob(f"run-{n}") for n in range(5)))
    for name in ("deleted", *(f"run-{n}" for n in range(5))):
        becomes(namespace, name, "Accepted", "True")
    deleted = scene.execution_of("deleted").execution_id
    namespace.run("delete", "batchjob", "deleted", seconds=20)
    scene.status_becomes(deleted, "CANCELLED", "CLOSING")

    try:
        kubectl.run("delete", "crd", CRD, seconds=60)

        wait_until(lambda: not operator.answers("/readyz"), seconds=60, what="noticed")
        wait_until(
            lambda: {row.deletion_policy for row in live(scene)} == {"ORPHAN"},
            seconds=60,
            what="executions that outlive their BatchJobs",
            every_seconds=0.1,
        )
        assert len(live(scene)) == 5
        early = operators.start(ready=False, ROWLOCK_RESYNC_SECONDS="1")
        wait_until(lambda: early.answers("/livez"), seconds=60, what="alive", every_seconds=0.1)
        wait_until(lambda: operator.answers("/livez"), seconds=60, what="alive", every_seconds=0.1)
    finally:
        kubectl.run("apply", "--server-side", "-k", str(MANIFESTS / "crd"))
        kubectl.wait(f"crd/{CRD}", "condition=Established")

    for one in (operator, early):
        one.ready()
    applied = time.time()
    namespace.apply(scene.batchjob("again"))
    becomes(namespace, "again", "Accepted", "True")
    # By a watch, not only by looking at everything now and then; also whoever came before the kind.
    for one in (operator, early):
        wait_until(
            lambda one=one: one.answers("/metrics") and one.metric(LAST_EVENT) > applied,  # type: ignore[misc]
            seconds=60,
            what="a watch",
            every_seconds=0.1,
        )
        assert one.process.poll() is None
    assert len(live(scene)) == 6


def live(scene: OperatorScene) -> list[Any]:
    return [row for row in scene.executions() if row.status not in {"CANCELLED", "CLOSING"}]
