"""Whole runs on a cluster: installed as users install it, broken as clusters break."""

from pathlib import Path

import pytest

from rowlock.demo import data, reference
from tests.support.cluster import MANIFESTS, Bed, Kubectl, batchjob, condition, install, overlay
from tests.support.postgres import Database
from tests.support.waiting import wait_until

pytestmark = pytest.mark.nodes

SETTLE = MANIFESTS / "samples" / "flights-settle.yaml"


def load_flights(database: Database) -> None:
    """The tables of the jobs' author, with what they grant to the nodes."""
    data.load(database.dsn)
    with database.connect() as db:
        db.execute("GRANT USAGE ON SCHEMA demo TO rowlock_node")
        db.execute("GRANT SELECT ON ALL TABLES IN SCHEMA demo TO rowlock_node")
        db.execute("GRANT INSERT ON demo.ledger, demo.bank TO rowlock_node")


def running_on(database: Database, prefix: str) -> list[str]:
    """Names of the nodes of a Deployment that hold partitions, busiest first."""
    rows = database.rows(
        """
        SELECT node.name FROM rowlock.batch_partitions AS part
        JOIN rowlock.batch_nodes AS node ON node.node_id = part.assigned_node
        WHERE part.status = 'CLAIMED' AND node.name LIKE %s || '%%'
        GROUP BY node.name ORDER BY count(*) DESC
        """,
        [prefix],
    )
    return [name for (name,) in rows]


@pytest.mark.timeout(420)
def test_a_year_is_settled_although_a_worker_is_deleted_by_force(
    bed: Bed, namespace: Kubectl, empty_database: Database, tmp_path: Path
) -> None:
    install(namespace, bed, empty_database, tmp_path / "mine", workers=2)
    load_flights(empty_database)
    namespace.run("apply", "-f", str(SETTLE))
    namespace.wait("batchjob/flights-2013", "condition=Accepted", seconds=10)

    # In mid-run: some days are settled, and a worker is at others.
    wait_until(
        lambda: (
            empty_database.value("SELECT count(DISTINCT flight_date) FROM demo.ledger") > 20
            and running_on(empty_database, "rowlock-worker")
        ),
        seconds=90,
        what="workers are at it",
        every_seconds=0.2,
    )
    victim = running_on(empty_database, "rowlock-worker")[0]
    namespace.run("delete", "pod", victim, "--force", "--grace-period=0")

    namespace.wait("batchjob/flights-2013", "condition=Finished", seconds=300)
    ended = namespace.get("batchjob", "flights-2013")
    assert condition(ended, "Complete")["status"] == "True", ended["status"]
    assert ended["status"]["progress"] == "365/365"
    comparison = reference.compare(empty_database.dsn)
    assert comparison.equal, comparison.differences[:3]
    # It was a loss, and not a hand-over: the work was taken from a node that had said nothing.
    assert empty_database.value("SELECT sum(lost) FROM rowlock.batch_partitions") > 0


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


@pytest.mark.timeout(420)
def test_the_quick_start(bed: Bed, kubectl: Kubectl, namespace: Kubectl, tmp_path: Path) -> None:
    """What docs/kubernetes.md promises, in a namespace of the test's own."""
    assert namespace.namespace is not None
    mine = overlay(
        tmp_path / "mine",
        MANIFESTS / "demo",
        namespace=namespace.namespace,
        bed=bed,
        # This cluster has tests besides: the operator is about this namespace only.
        patches=[
            {
                "target": {"kind": "Deployment", "name": "rowlock-operator"},
                "patch": (
                    '[{"op": "add", "path": "/spec/template/spec/containers/0/env/-", "value":'
                    f' {{"name": "ROWLOCK_NAMESPACES", "value": "{namespace.namespace}"}}}}]'
                ),
            }
        ],
    )
    try:
        namespace.run("apply", "--server-side", "--force-conflicts", "-k", str(mine))
        namespace.run("rollout", "status", "deployment", "--timeout=180s", seconds=200)
        namespace.run("apply", "-f", str(MANIFESTS / "samples" / "small.yaml"))
        namespace.wait("batchjob/small", "condition=Finished", seconds=120)
        said = namespace.text(
            *("exec", "deploy/demo-database", "--", "python", "-c"),
            "import os; from rowlock.demo import reference; "
            "print(reference.compare(os.environ['OWNER_DSN'], month=2).equal)",
        )
        assert said.strip() == "True"
    finally:
        kubectl.delete("clusterrolebinding", "rowlock-operator")
        kubectl.delete("clusterrole", "rowlock-operator")
