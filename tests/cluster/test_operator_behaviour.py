"""What the table "What happens when …" of docs/operator.md promises, row by row, on a real API server.

Where a public report tells of another system that did it otherwise, the test names it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psycopg
from psycopg import sql

from tests.support.cluster import (
    MANIFESTS,
    Kubectl,
    Object,
    Operators,
    account_kubeconfig,
    becomes,
    kustomization,
    shows,
    temporary_namespace,
)
from tests.support.operator_scene import OperatorScene
from tests.support.postgres import Database
from tests.support.waiting import wait_until

NOWHERE: Final = {"podTemplate": {"spec": {"nodeSelector": {"rowlock-test/nowhere": "true"}}}}
"""A master whose pod stays Pending wherever these tests run."""


def of(kubectl: Kubectl, kind: str, name: str) -> list[Object]:
    """The Jobs or pods of a BatchJob."""
    selector = f"batch.rowlock.dev/batchjob={name}"
    found: list[Object] = json.loads(kubectl.text("get", kind, "-l", selector, "-o", "json"))[
        "items"
    ]
    return found


def the_pod(kubectl: Kubectl, name: str) -> str:
    """Wait for a pod of a BatchJob; its name."""
    wait_until(lambda: of(kubectl, "pods", name), seconds=60, what="a pod", every_seconds=0.1)
    return str(of(kubectl, "pods", name)[0]["metadata"]["name"])


def test_a_batchjob_deleted_while_it_runs_stops_its_work_and_keeps_its_record(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    """Deleting the object must neither let its work go on for hours nor take rows from under it.

    Known from kubeflow/pipelines' kfp-operator#254 and timescale/timescaledb#5713.
    """
    operators.start()
    namespace.apply(scene.batchjob("nightly"))
    run = scene.plan(scene.execution_of("nightly").execution_id, 100, slots=8)
    scene.work(run, 30)
    running = scene.claim(run.master, slots=2, idle=True)
    the_pod(namespace, "nightly")

    namespace.run("delete", "batchjob", "nightly", seconds=20)

    scene.status_becomes(run.id, "CLOSING")
    assert scene.claim(run.master, slots=8, idle=True) == []
    assert set(scene.complete(run.master, *running)) <= {"completed", "cancelled"}
    assert scene.advance(run) == "CANCELLED"
    assert len(scene.statuses(run)) == 100
    assert "cancel_requested" in scene.events(run)
    for kind in ("jobs", "pods"):
        wait_until(
            lambda kind=kind: not of(namespace, kind, "nightly"),  # type: ignore[misc]
            seconds=60,
            what=f"no {kind} left",
            every_seconds=0.2,
        )


def test_an_edit_is_applied_or_refused_or_means_nothing_but_never_runs_anything_again(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    """Whatever is patched, running or finished: applied, or refused by the API server, never halfway.

    Known from kubeflow/spark-operator#87, #400, #453 and #2618, where an edit killed running work,
    was silently ignored, or got stuck in between.
    """
    operators.start()
    namespace.apply(scene.batchjob("running"), scene.batchjob("finished"))
    scene.run_to_the_end(scene.execution_of("finished").execution_id)
    run = scene.plan(scene.execution_of("running").execution_id)
    (claim,) = scene.claim(run.master, slots=1, idle=True)
    shows(namespace, "finished", phase="Succeeded")
    shows(namespace, "running", phase="Running")
    accepted: Mapping[str, Object] = {
        "priority": {"spec": {"priority": 7}},
        "parallelism": {"spec": {"parallelism": 3}},
        "retries": {"spec": {"partitions": {"maxAttempts": 2}}},
        "a label": {"metadata": {"labels": {"team": "billing"}}},
        "an annotation": {"metadata": {"annotations": {"note": "x"}}},
    }
    refused: Mapping[str, Object] = {
        "immutable": {"spec": {"parameters": {"month": 8}}},
        "spec.job is": {"spec": {"job": "another"}},
        "spec.pool is": {"spec": {"pool": "another"}},
        "spec.master is": {"spec": {"master": {"image": "another:1"}}},
        "spec.instanceKey is": {"spec": {"instanceKey": "another"}},
    }
    before = {name: namespace.find("job", f"{name}-1") for name in ("running", "finished")}

    for name in ("running", "finished"):
        for change in accepted.values():
            namespace.patch("batchjob", name, change)
        for words, change in refused.items():
            done = namespace.run(
                *("patch", "batchjob", name, "--type=merge", "-p", json.dumps(change)), check=False
            )
            assert words in done.stderr, change

    for name in ("running", "finished"):
        generation = namespace.get("batchjob", name)["metadata"]["generation"]
        shows(namespace, name, observedGeneration=generation, attempt=1)
        assert len(scene.executions(name)) == 1
    (row,) = scene.executions("running")
    assert (row.priority, row.parallelism) == (7, 3)
    (row,) = scene.executions("finished")
    assert (row.priority, row.parallelism) == (0, None)
    for name, job in before.items():
        assert job is not None
        assert namespace.get("job", f"{name}-1")["metadata"]["uid"] == job["metadata"]["uid"]
    assert scene.complete(run.master, claim) == ["completed"]  # nobody has disturbed it
    shows(namespace, "finished", phase="Succeeded")


def test_long_and_dotted_names_work_or_are_refused_at_once_and_never_meet(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    """A name that is too long for what is derived from it must not leave an object that cannot end.

    Known from dask/dask-kubernetes#826 and #870, kubeflow/spark-operator#459 and
    kubeflow/trainer#1101: endless retries, objects that cannot be deleted, names that meet when cut.
    """
    operators.start()
    longest = "n" * 51
    good = ["n" * 52, f"{longest}m", "daily.billing.eu-1", f"{'d' * 25}.{'e' * 26}", "7"]
    too_long = ["n" * 53, "n" * 63, f"{'n' * 63}a", f"{'n' * 63}b", "n" * 200, "n" * 253]

    namespace.apply(*(scene.batchjob(name) for name in good))
    for name in too_long:
        assert "at most 52 characters" in namespace.refusal(scene.batchjob(name))
    assert "lowercase RFC 1123" in namespace.refusal(scene.batchjob("Nightly"))

    for name in good:
        becomes(namespace, name, "Accepted", "True")
        the_pod(namespace, name)
    executions = {name: scene.execution_of(name).execution_id for name in good}
    assert len(set(executions.values())) == len(good)
    (event,) = [
        one
        for one in namespace.items("events")
        if one["involvedObject"]["name"] == good[0] and one["reason"] == "RunCreated"
    ]
    assert str(executions[good[0]]) in event["message"]
    namespace.run("delete", "batchjobs", *good, seconds=30)
    for execution in executions.values():
        scene.status_becomes(execution, "CANCELLED", "CLOSING")


def test_a_batchjob_that_cannot_be_handled_can_be_deleted_at_once(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    """An object whose handling always fails must not be undeletable because of it.

    Known from dask/dask-kubernetes#870, zalando-incubator/kopf#75 and operator-framework/operator-sdk#1513.
    """
    operators.start()
    namespace.apply(
        scene.batchjob("pool", pool="unknown"),
        scene.batchjob("job", job="unknown"),
        scene.batchjob("parameters", parameters={"month": "July"}),
        scene.batchjob("policy", partitions={"maxAttempts": 1, "delivery": "AtMostOnce"}),
        scene.batchjob(
            "template", master={"podTemplate": {"spec": {"containers": [{"image": "x:1"}]}}}
        ),
    )
    reasons = {
        "pool": "PoolUnknown",
        "job": "UnknownJob",
        "parameters": "InvalidParameters",
        "template": "InvalidPodTemplate",
    }
    for name, reason in reasons.items():
        becomes(namespace, name, "Accepted", "False", reason)
    becomes(namespace, "policy", "Accepted", "True")  # stricter than its author: that is allowed

    namespace.run("delete", "batchjobs", "--all", seconds=20)

    (row,) = scene.executions()
    scene.status_becomes(row.execution_id, "CANCELLED", "CLOSING")


def test_what_has_finished_is_not_run_again_when_its_pod_or_its_job_is_removed(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    """ "It is not there" must not be read as "it has not run" once its end is known.

    Known from awx-resource-operator#64, syntasso/kratix#938 and openstack-k8s-operators/lib-common#78.
    """
    first = operators.start()
    namespace.apply(scene.batchjob("nightly", master=NOWHERE))
    pod = the_pod(namespace, "nightly")
    scene.run_to_the_end(scene.execution_of("nightly").execution_id)
    shows(namespace, "nightly", phase="Succeeded")

    namespace.run("delete", "pod", pod, "--force", "--grace-period=0", seconds=30)
    namespace.run("delete", "job", "nightly-1", seconds=30)
    assert first.stop() == 0
    second = operators.start(ROWLOCK_RESYNC_SECONDS="1")
    namespace.apply(scene.batchjob("marker", master={"mode": "Pool"}))
    becomes(namespace, "marker", "Accepted", "True")
    looked = time.time()
    wait_until(
        lambda: second.metric("rowlock_operator_last_list_timestamp_seconds") > looked + 1,
        seconds=60,
        what="another look at everything",
        every_seconds=0.1,
    )

    assert namespace.items("jobs") == []
    assert len(scene.executions("nightly")) == 1
    shows(namespace, "nightly", phase="Succeeded", attempt=1)


def test_an_execution_outlives_its_masters_job_and_the_message_says_why_that_failed(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    operators.start()
    namespace.apply(scene.batchjob("nightly", master={"backoffLimit": 0, **NOWHERE}))
    execution = scene.execution_of("nightly").execution_id
    run = scene.plan(execution)
    scene.work(run, 1)
    pod = the_pod(namespace, "nightly")
    # Nobody runs it here, so the test says what a kubelet would say.
    namespace.set_status("pod", pod, {"phase": "Failed", "message": "the node was low on memory"})

    def told() -> bool:
        message = namespace.get("batchjob", "nightly")["status"].get("message", "")
        return "nightly-1 has failed" in message and "the node was low on memory" in message

    wait_until(told, seconds=60, what="why in the message", every_seconds=0.2)
    becomes(namespace, "nightly", "Finished", "False")
    assert scene.execution(execution).status == "RUNNING"

    scene.remove(run.master)
    heir = scene.a_node(slots=2)
    taken = scene.store.adopt(heir, execution)
    assert taken is not None
    for _ in range(3):
        (claim,) = scene.claim(heir, slots=1, idle=True)
        assert scene.complete(heir, claim) == ["completed"]
    assert scene.store.advance(heir, execution, taken.epoch).status == "COMPLETED"
    shows(namespace, "nightly", phase="Succeeded", progress="4/4")
    becomes(namespace, "nightly", "Failed", "False")
    assert "MasterTrouble" in {one["reason"] for one in namespace.items("events")}


def test_executions_of_a_namespace_that_went_while_no_operator_ran_are_cancelled_afterwards(
    kubectl: Kubectl, namespace: Kubectl, operators: Operators, scene: OperatorScene, tmp_path: Path
) -> None:
    """Deleting a namespace must not hang because an operator is away, nor leave its work running.

    Known from zalando-incubator/kopf#75, remove-empty-ns-operator#5 and operator-sdk#3967.
    """
    assert namespace.namespace is not None
    # Rights that do not go with a namespace, as those of a cluster-wide installation.
    suffix = namespace.namespace[-7:]
    rights = kustomization(
        tmp_path / "wide",
        MANIFESTS / "rbac" / "cluster",
        namespace=namespace.namespace,
        nameSuffix=suffix,
    )
    namespace.run("apply", "-k", str(rights))
    operators.kubeconfig = account_kubeconfig(
        namespace, f"rowlock-operator{suffix}", tmp_path / "wide.kubeconfig"
    )
    try:
        with temporary_namespace(kubectl, f"{namespace.namespace}-b") as other:
            both = f"{namespace.namespace},{other.namespace}"
            first = operators.start(ROWLOCK_NAMESPACES=both)
            other.apply(scene.batchjob("gone"), scene.batchjob("kept", deletionPolicy="Orphan"))
            namespace.apply(scene.batchjob("here"))
            becomes(other, "gone", "Accepted", "True")
            becomes(other, "kept", "Accepted", "True")
            gone, kept, here = (
                scene.execution_of(name).execution_id for name in ("gone", "kept", "here")
            )
            first.kill()

            other.run("delete", "namespace", str(other.namespace), seconds=60)
            assert scene.execution(gone).status == "REQUESTED"

            operators.start(ROWLOCK_NAMESPACES=both, ROWLOCK_SWEEP_SECONDS="1")
            scene.status_becomes(gone, "CANCELLED", "CLOSING")
            assert scene.execution(kept).status == "REQUESTED"
            assert scene.execution(here).status == "REQUESTED"
    finally:
        namespace.run("delete", "-k", str(rights), "--wait=false")


def test_two_clusters_share_a_database_and_leave_each_others_executions_alone(
    kubectl: Kubectl, namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    with temporary_namespace(kubectl, f"{namespace.namespace}-b") as other:
        second = Operators.inside(other, scene.database, operators.folder / "second")
        try:
            first = operators.start(ROWLOCK_SWEEP_SECONDS="1")
            second.start(ROWLOCK_SWEEP_SECONDS="1")
            for place in (namespace, other):
                place.apply(scene.batchjob("nightly"))
                becomes(place, "nightly", "Accepted", "True")

            rows = scene.executions("nightly")
            clusters = {row.requester["cluster"]: row.execution_id for row in rows}
            assert len(rows) == 2
            assert set(clusters) == {operators.cluster, second.cluster}
            namespace.run("delete", "batchjob", "nightly", seconds=20)
            scene.status_becomes(clusters[operators.cluster], "CANCELLED", "CLOSING")
            first.kill()
            other.run("delete", "batchjob", "nightly", seconds=20)
            scene.status_becomes(clusters[second.cluster], "CANCELLED", "CLOSING")
        finally:
            second.close()


def test_after_a_restore_from_an_older_backup_nothing_is_run_again_by_itself(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    operators.start(ROWLOCK_RESYNC_SECONDS="1")
    database, job = scene.database, scene.job
    backup = f"{database.name}_backup"
    scene.close()
    copy(database, database.name, to=backup)
    namespace.apply(scene.batchjob("nightly"))
    lost = shows(namespace, "nightly", masterJobName="nightly-1")["executionID"]

    copy(database, backup, to=database.name)

    becomes(namespace, "nightly", "Accepted", "False", "RunNotFound")
    with OperatorScene(database) as restored:
        # Not even when all traces but the status are gone.
        namespace.run("delete", "job", "nightly-1", seconds=30)
        namespace.run("annotate", "batchjob", "nightly", "note=look-again")
        namespace.apply(restored.batchjob("marker", job=job))
        becomes(namespace, "marker", "Accepted", "True")
        assert lost in shows(namespace, "nightly", phase="Pending")["message"]
        assert restored.executions("nightly") == []
        assert of(namespace, "jobs", "nightly") == []

        namespace.patch("batchjob", "nightly", {"spec": {"restartNonce": 1}})

        becomes(namespace, "nightly", "Accepted", "True")
        (row,) = restored.executions("nightly")
        assert row.launch_key.endswith("/2")


def copy(database: Database, source: str, *, to: str) -> None:
    """Make a database anew as a copy of another; sessions in either of them end."""
    with psycopg.connect(database.cluster.admin_dsn, autocommit=True) as db:

        def copied() -> bool:
            db.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s",
                (source,),
            )
            db.execute(
                sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(to))
            )
            names = sql.Identifier(to), sql.Identifier(source)
            try:
                db.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(*names))
            except psycopg.errors.ObjectInUse:
                return False  # the operator was back already
            return True

        wait_until(copied, what="the copy", every_seconds=0.01)
