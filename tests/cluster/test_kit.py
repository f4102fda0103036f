"""The kit itself: what it says about a cluster is so."""

from tests.support.cluster import Bed, Kubectl, Operators, batchjob
from tests.support.postgres import Database


def test_a_namespace_takes_a_batchjob(namespace: Kubectl) -> None:
    namespace.apply(batchjob("nightly", parameters={"month": 1}))
    assert namespace.get("batchjob", "nightly")["spec"]["parameters"] == {"month": 1}


def test_the_operators_account_reads_batchjobs_and_nothing_of_others(
    namespace: Kubectl, operators: Operators
) -> None:
    account = Kubectl(namespace=namespace.namespace, kubeconfig=operators.kubeconfig)
    assert account.items("batchjobs") == []
    assert "forbidden" in account.run("get", "secrets", check=False).stderr


def test_the_database_is_where_pods_find_it(bed: Bed, database: Database) -> None:
    with database.connect(role="rowlock_node") as db:
        assert db.info.host == bed.database_address


def test_an_operator_runs_with_the_rights_of_its_account(operators: Operators) -> None:
    operator = operators.start()
    assert operator.answers("/livez")
    assert "rowlock_operator_" in operator.metrics()
    assert operator.stop() == 0
