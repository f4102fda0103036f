"""The chart on a real cluster: installed as the notes say, tested, upgraded under load, and taken away."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Generator
from typing import Any

import pytest

from tests.support.cluster import Bed, Kubectl, Object, batchjob, condition, temporary_namespace
from tests.support.helm import CHART
from tests.support.postgres import Database
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(600), pytest.mark.shared]

RELEASE = "try"
INSTALL_SECONDS = 240
SETTLED = (
    "from rowlock.demo import reference; print(reference.compare(os.environ['OWNER_DSN']).equal)"
)


class Release:
    """A release of the chart in a namespace of its own."""

    def __init__(self, kubectl: Kubectl, bed: Bed) -> None:
        self.kubectl = kubectl
        self.bed = bed
        self.notes = ""

    def helm(self, *words: str, values: Object | None = None) -> str:
        """Run helm here; what it prints."""
        assert self.kubectl.namespace is not None
        ended = subprocess.run(
            [os.environ.get("ROWLOCK_HELM", "helm"), "--namespace", self.kubectl.namespace, *words],
            input=json.dumps(values or {}),
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS + 60,
            check=False,
        )
        assert ended.returncode == 0, f"helm {' '.join(words)}: {ended.stdout} {ended.stderr}"
        return ended.stdout

    def install(self, **values: Any) -> None:
        """`helm install --wait`."""
        # The kit has applied the kind BatchJob, which the release now takes over.
        self.notes = self.helm(
            *("install", RELEASE, str(CHART), "--values", "-", "--wait"),
            *("--timeout", f"{INSTALL_SECONDS}s", "--take-ownership", "--force-conflicts"),
            values={**images(self.bed), **values},
        )

    def upgrade(self, **values: Any) -> None:
        """`helm upgrade --wait`, with what was given before and more."""
        self.helm(
            *("upgrade", RELEASE, str(CHART), "--reuse-values", "--values", "-", "--wait"),
            *("--timeout", f"{INSTALL_SECONDS}s"),
            values=values,
        )

    def in_database(self, program: str) -> str:
        """What a Python program prints in the pod of the demonstration's database."""
        return self.kubectl.text(
            *("exec", f"deploy/{RELEASE}-rowlock-demo-database", "--"),
            *("python", "-c", f"import os, psycopg; {program}"),
        ).strip()

    def pods(self, component: str) -> list[str]:
        """The living pods of a component."""
        chosen = f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/component={component}"
        return [
            pod["metadata"]["name"]
            for pod in self.kubectl.items("pods", "-l", chosen)
            if "deletionTimestamp" not in pod["metadata"]
        ]


def images(bed: Bed) -> Object:
    """The images of the bed as values."""

    def image(name: str) -> Object:
        repository, _, tag = name.rpartition(":")
        return {"repository": repository, "tag": tag}

    return {
        "image": image(bed.node_image),
        "operator": {"image": image(bed.operator_image)},
        "demo": {"postgres": {"image": image(bed.demo_image)}},
    }


def with_demo(inside: Kubectl, bed: Bed) -> Object:
    values = images(bed)
    values["demo"]["postgres"]["enabled"] = True
    # Rights for the whole cluster, but no eye on what other tests have there.
    values["operator"]["watchNamespaces"] = [inside.namespace]
    return values


@pytest.fixture(scope="module")
def demo(kubectl: Kubectl, bed: Bed) -> Generator[Release]:
    with temporary_namespace(kubectl, f"chart-{secrets.token_hex(3)}") as inside:
        release = Release(inside, bed)
        release.install(**with_demo(inside, bed))
        yield release
        release.helm("uninstall", RELEASE)


def test_the_batchjob_of_the_notes_runs_as_it_is_pasted(demo: Release) -> None:
    pasted = demo.notes.split("kubectl create")[1].split("\nEOF")[0]
    subprocess.run(["bash", "-c", f"kubectl create{pasted}\nEOF\n"], check=True, timeout=60)
    demo.kubectl.wait("batchjob/first", "condition=Finished", seconds=180)
    assert condition(demo.kubectl.get("batchjob", "first"), "Complete")["status"] == "True"


def test_helm_test_is_green(demo: Release) -> None:
    said = demo.helm("test", RELEASE, "--logs")
    assert "Phase:          Succeeded" in said
    # What succeeded is taken away again.
    names = [one["metadata"]["name"] for one in demo.kubectl.items("batchjobs")]
    assert [name for name in names if name.startswith("helm-test-")] == []


def test_every_pod_is_ready_and_none_has_started_twice(demo: Release) -> None:
    for pod in demo.kubectl.items("pods", "-l", f"app.kubernetes.io/instance={RELEASE}"):
        for status in pod["status"]["containerStatuses"]:
            assert status["ready"], pod["metadata"]["name"]
            assert status["restartCount"] == 0, pod["metadata"]["name"]


def test_an_upgrade_in_mid_run_loses_and_doubles_nothing(demo: Release) -> None:
    demo.in_database(
        "psycopg.connect(os.environ['OWNER_DSN'], autocommit=True).execute('TRUNCATE demo.ledger')"
    )
    old = {component: set(demo.pods(component)) for component in ("worker", "operator")}
    demo.kubectl.apply(batchjob("year", parameters={"pace_ms": 400}))

    def completed() -> int:
        status = demo.kubectl.get("batchjob", "year").get("status", {})
        return int(status.get("partitions", {}).get("succeeded", 0))

    wait_until(lambda: completed() > 0, seconds=60, what="the run is under way", every_seconds=0.2)
    # Short, so that the old workers are seen to go; every pod of the release but the database's is new.
    demo.upgrade(
        workers={"podAnnotations": {"upgrade": "1"}, "drainSeconds": 20},
        operator={"podAnnotations": {"upgrade": "1"}},
        exporter={"podAnnotations": {"upgrade": "1"}},
    )
    for component, before in old.items():
        assert before.isdisjoint(demo.pods(component)), component
    demo.kubectl.wait("batchjob/year", "condition=Finished", seconds=240)
    year = demo.kubectl.get("batchjob", "year")
    assert condition(year, "Complete")["status"] == "True"
    assert year["status"]["partitions"]["succeeded"] == 365
    assert demo.in_database(SETTLED) == "True"


def test_the_password_of_the_demonstration_outlives_an_upgrade(demo: Release) -> None:
    def passwords() -> Object:
        secret: Object = demo.kubectl.get("secret", f"{RELEASE}-rowlock-demo-database")["data"]
        return secret

    before = passwords()
    demo.upgrade()
    assert passwords() == before


def test_a_demonstration_whose_database_is_lost_begins_anew(demo: Release) -> None:
    (lost,) = demo.pods("demo-database")
    demo.kubectl.run("delete", "pod", lost, "--force", "--grace-period=0")
    demo.kubectl.run(
        *("rollout", "status", f"deployment/{RELEASE}-rowlock-demo-database", "--timeout=90s"),
        seconds=100,
    )
    # Operator and nodes find the new one, with nothing in it, by themselves.
    assert "Phase:          Succeeded" in demo.helm("test", RELEASE, "--logs")


def test_what_is_uninstalled_blocks_nothing_and_leaves_the_kind(
    kubectl: Kubectl, namespace: Kubectl, bed: Bed
) -> None:
    release = Release(namespace, bed)
    # The master's pod gets its time to drain, of which there is little here.
    soon = {"drainSeconds": 2, "terminationGracePeriodSeconds": 12}
    release.install(**with_demo(namespace, bed), workers=soon)
    namespace.apply(batchjob("running", parameters={"pace_ms": 5000}))
    wait_until(
        lambda: bool(namespace.items("jobs")), seconds=60, what="a master", every_seconds=0.2
    )

    release.helm("uninstall", RELEASE, "--wait", "--timeout", "120s")

    # The kind and the BatchJob with its master stay; of the release nothing does.
    assert kubectl.get("crd", "batchjobs.batch.rowlock.dev")
    assert namespace.get("batchjob", "running")
    ours = ("-l", f"app.kubernetes.io/instance={RELEASE}", "-o", "name")
    kinds = "deployments,services,configmaps,secrets,serviceaccounts,roles,rolebindings,pdb"
    assert namespace.text("get", kinds, *ours) == ""
    assert str(namespace.namespace) not in kubectl.text(
        "get", "clusterroles,clusterrolebindings", *ours
    )
    # Nothing holds on to what is left: no finalizer waits for an operator that is gone.
    namespace.run("delete", "batchjob", "running", "--wait=true", "--timeout=10s")
    namespace.run("delete", "namespace", str(namespace.namespace), "--timeout=60s", seconds=90)


def test_a_database_of_one_s_own_is_migrated_before_anything_starts(
    namespace: Kubectl, bed: Bed, empty_database: Database
) -> None:
    release = Release(namespace, bed)
    # As CloudNativePG writes it: one Secret with one connection string.
    namespace.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "pg-app"},
            "stringData": {"uri": empty_database.dsn},
        }
    )
    values = images(bed)
    release.install(
        database={"existingSecret": "pg-app", "sslMode": "disable"},
        workers={"image": values["demo"]["postgres"]["image"], "replicas": 1},
        rbac={"scope": "namespace"},
    )
    with empty_database.connect() as db:
        nodes = db.execute("SELECT count(*) FROM rowlock.nodes WHERE status = 'ACTIVE'").fetchone()
    assert nodes == (1,)
    # Without a job of its own the test waits for the operator's answer from the database.
    assert "Phase:          Succeeded" in release.helm("test", RELEASE, "--logs")
    release.helm("uninstall", RELEASE, "--wait")
