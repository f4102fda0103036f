"""Whole runs on a cluster: installed as users install it, broken as clusters break."""

import json
import re
from pathlib import Path

import pytest

from rowlock.demo import data, reference
from tests.support.cluster import (
    MANIFESTS,
    ROOT,
    Bed,
    Kubectl,
    batchjob,
    condition,
    install,
    overlay,
)
from tests.support.postgres import Database
from tests.support.waiting import wait_until

pytestmark = pytest.mark.nodes

WORKERS = "app.kubernetes.io/component=worker"
OPERATORS = "app.kubernetes.io/component=operator"


def load_flights(database: Database) -> None:
    """The tables of the jobs' author, with what they grant to the nodes."""
    data.load(database.dsn)
    with database.connect() as db:
        db.execute("GRANT USAGE ON SCHEMA demo TO rowlock_node")
        db.execute("GRANT SELECT ON ALL TABLES IN SCHEMA demo TO rowlock_node")
        db.execute("GRANT INSERT ON demo.ledger, demo.bank TO rowlock_node")


def busy(database: Database, pods: set[str]) -> list[str]:
    """Those of the pods whose nodes hold partitions, busiest first."""
    rows = database.rows(
        """
        SELECT node.name FROM rowlock.batch_partitions AS part
        JOIN rowlock.batch_nodes AS node ON node.node_id = part.assigned_node
        WHERE part.status = 'CLAIMED'
        GROUP BY node.name ORDER BY count(*) DESC
        """
    )
    return [name for (name,) in rows if name in pods]


def busy_in_mid_run(database: Database, pods: set[str]) -> str:
    """Wait until some days are settled and one of the pods is at others; that pod."""
    found: list[str] = []

    def at_it() -> bool:
        settled = database.value("SELECT count(DISTINCT flight_date) FROM demo.ledger")
        found[:] = busy(database, pods) if settled > 6 else []
        return bool(found)

    wait_until(at_it, seconds=90, what="workers are in the middle of it", every_seconds=0.1)
    return found[0]


def pods(namespace: Kubectl, label: str) -> dict[str, str]:
    """Names of pods, and the machines that they are on."""
    found = namespace.items("pods", "-l", label)
    return {one["metadata"]["name"]: one["spec"]["nodeName"] for one in found}


def lost(database: Database) -> int:
    """How often a partition was taken from a node that had fallen silent."""
    count: int = database.value("SELECT coalesce(sum(lost), 0) FROM rowlock.batch_partitions")
    return count


def assert_settled(
    namespace: Kubectl, database: Database, name: str, *, days: int, month: int | None = None
) -> None:
    """Wait for the end; it is success, and the ledger is that of the reference."""
    namespace.wait(f"batchjob/{name}", "condition=Finished", seconds=240)
    ended = namespace.get("batchjob", name)
    assert condition(ended, "Complete")["status"] == "True", ended["status"]
    assert ended["status"]["progress"] == f"{days}/{days}"
    comparison = reference.compare(database.dsn, month=month)
    assert comparison.equal, comparison.differences[:3]


def run_january(namespace: Kubectl, bed: Bed, database: Database, folder: Path) -> None:
    """Install, and begin one month, slowly enough to be broken in the middle of it."""
    install(namespace, bed, database, folder)
    load_flights(database)
    namespace.apply(batchjob("january", parameters={"month": 1, "pace_ms": 2000}))


def test_a_worker_that_is_deleted_by_force_loses_nothing(
    bed: Bed, namespace: Kubectl, empty_database: Database, tmp_path: Path
) -> None:
    run_january(namespace, bed, empty_database, tmp_path / "mine")
    namespace.wait("batchjob/january", "condition=Accepted", seconds=10)
    victim = busy_in_mid_run(empty_database, set(pods(namespace, WORKERS)))
    namespace.run("delete", "pod", victim, "--force", "--grace-period=0")
    assert_settled(namespace, empty_database, "january", days=31, month=1)
    # The kubelet gives it two seconds even so: what it held was lost or handed back, and claimed anew.
    claimed_anew = "SELECT count(*) FROM rowlock.batch_partitions WHERE claims > 1"
    assert empty_database.value(claimed_anew) > 0


@pytest.mark.fault
def test_a_worker_that_is_killed_loses_nothing(
    bed: Bed, namespace: Kubectl, database: Database, tmp_path: Path
) -> None:
    run_january(namespace, bed, database, tmp_path / "mine")
    victim = busy_in_mid_run(database, set(pods(namespace, WORKERS)))
    bed.break_something("pod-kill9", str(namespace.namespace), victim)
    assert_settled(namespace, database, "january", days=31, month=1)
    assert lost(database) > 0


@pytest.mark.fault
def test_a_frozen_worker_that_wakes_again_changes_nothing(
    bed: Bed, namespace: Kubectl, database: Database, tmp_path: Path
) -> None:
    run_january(namespace, bed, database, tmp_path / "mine")
    victim = busy_in_mid_run(database, set(pods(namespace, WORKERS)))
    place = (str(namespace.namespace), victim)
    bed.break_something("pod-freeze", *place, "on")
    try:
        wait_until(
            lambda: not busy(database, {victim}),
            seconds=40,
            what="its work was taken from it",
            every_seconds=0.1,
        )
    finally:
        bed.break_something("pod-freeze", *place, "off")
    assert_settled(namespace, database, "january", days=31, month=1)
    assert lost(database) > 0
    # It goes on as a node like any other.
    assert namespace.get("pod", victim)["status"]["phase"] == "Running"


@pytest.mark.fault
@pytest.mark.alone
@pytest.mark.timeout(420)
def test_a_machine_that_crashes_takes_no_execution_with_it(
    bed: Bed, kubectl: Kubectl, namespace: Kubectl, database: Database, tmp_path: Path
) -> None:
    run_january(namespace, bed, database, tmp_path / "mine")
    # Kubernetes moves an operator after five minutes only, and we want to see the end in its status.
    (spared,) = pods(namespace, OPERATORS).values()
    elsewhere = {
        pod: machine for pod, machine in pods(namespace, WORKERS).items() if machine != spared
    }
    victim = busy_in_mid_run(database, set(elsewhere))
    machine = elsewhere[victim]
    number = machine.removeprefix("node")
    bed.break_something("node-crash", number)
    try:
        assert_settled(namespace, database, "january", days=31, month=1)
        assert lost(database) > 0
    finally:
        bed.break_something("node-start", number)
        kubectl.wait(f"node/{machine}", "condition=Ready", seconds=60)


def test_a_pool_without_masters_of_its_own(
    bed: Bed, namespace: Kubectl, empty_database: Database, tmp_path: Path
) -> None:
    install(namespace, bed, empty_database, tmp_path / "mine", workers=1)
    load_flights(empty_database)
    namespace.apply(
        batchjob("quick", parameters={"month": 1}, master={"mode": "Pool"}),
    )
    namespace.wait("batchjob/quick", "condition=Complete", seconds=60)
    assert reference.compare(empty_database.dsn, month=1).equal
    assert namespace.items("jobs", "-l", "app.kubernetes.io/component=master") == []


def documented(pattern: str) -> str:
    """A piece of a command in docs/kubernetes.md."""
    found = re.search(pattern, (ROOT / "docs" / "kubernetes.md").read_text(), re.DOTALL)
    assert found is not None, f"docs/kubernetes.md says no more: {pattern}"
    return found[1]


@pytest.mark.timeout(480)
def test_the_quick_start(bed: Bed, kubectl: Kubectl, namespace: Kubectl, tmp_path: Path) -> None:
    """What docs/kubernetes.md promises, in a namespace of the test's own."""
    assert namespace.namespace is not None
    about_this_namespace = {
        "op": "add",
        "path": "/spec/template/spec/containers/0/env/-",
        "value": {"name": "ROWLOCK_NAMESPACES", "value": namespace.namespace},
    }
    mine = overlay(
        tmp_path / "mine",
        MANIFESTS / "demo",
        namespace=namespace.namespace,
        bed=bed,
        patches=[
            {
                "target": {"kind": "Deployment", "name": "rowlock-operator"},
                "patch": json.dumps([about_this_namespace]),
            }
        ],
    )
    try:
        namespace.run("apply", "--server-side", "--force-conflicts", "-k", str(mine))
        namespace.run("rollout", "status", "deployment", "--timeout=180s", seconds=200)
        sample = documented(r"kubectl -n rowlock apply -f (manifests/samples/[\w-]+\.yaml)")
        namespace.run("apply", "-f", str(ROOT / sample))
        wait_until(
            lambda: ended_partitions(namespace, "flights-2013") > 20,
            seconds=120,
            what="the year is in the middle",
            every_seconds=0.5,
        )
        victim = namespace.text("get", "pod", "-l", WORKERS, "-o", "name").split()[0]
        namespace.run("delete", "--force", "--grace-period=0", victim)
        namespace.wait("bj/flights-2013", "condition=Finished", seconds=240)
        comparison = documented(r'exec deploy/demo-database -- python -c \\\n +"([^"]+)"')
        said = namespace.text("exec", "deploy/demo-database", "--", "python", "-c", comparison)
        assert said.strip() == "True"
    finally:
        kubectl.delete("clusterrolebinding", "rowlock-operator")
        kubectl.delete("clusterrole", "rowlock-operator")


def ended_partitions(namespace: Kubectl, name: str) -> int:
    """As `kubectl get` shows them."""
    progress: str = namespace.get("batchjob", name).get("status", {}).get("progress", "0/0")
    return int(progress.partition("/")[0])
