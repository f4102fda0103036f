"""Whatever is away, forbidden, restored or in the way: the operator says so, and goes on afterwards."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Generator
from pathlib import Path

import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from tests.support.cluster import Kubectl, Object, OperatorProcess, Operators, condition
from tests.support.operator_scene import OperatorScene
from tests.support.postgres import Database
from tests.support.waiting import wait_until


@pytest.fixture
def scene(database: Database) -> Generator[OperatorScene]:
    with OperatorScene(database) as made:
        yield made


def becomes(
    kubectl: Kubectl, name: str, kind: str, status: str, reason: str = "", *, seconds: float = 30
) -> Object:
    """Wait for a condition, and return it."""

    def there() -> bool:
        found = condition(kubectl.get("batchjob", name), kind)
        return found.get("status") == status and (not reason or found.get("reason") == reason)

    wait_until(there, seconds=seconds, what=f"{kind}={status} {reason}", every_seconds=0.1)
    return condition(kubectl.get("batchjob", name), kind)


def readyz(operator: OperatorProcess) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{operator.port}/readyz", timeout=5) as reply:
            text: str = reply.read().decode()
            return text
    except urllib.error.HTTPError as problem:
        return problem.read().decode()
    except OSError:
        return ""


def test_while_the_database_is_away_nothing_is_made_and_afterwards_everything_goes_on(
    namespace: Kubectl, operators: Operators, private_database: Database
) -> None:
    operators.dsn = private_database.dsn_as("rowlock_operator")
    with OperatorScene(private_database) as scene:
        operator = operators.start(ROWLOCK_STALE_SECONDS="2")
        namespace.apply(scene.batchjob("before"))
        becomes(namespace, "before", "Accepted", "True")
        later = scene.batchjob("later")
    private_database.server.down("immediate")

    becomes(namespace, "before", "StatusStale", "True", "DatabaseUnavailable")
    namespace.apply(later)
    becomes(namespace, "later", "Accepted", "Unknown", "DatabaseUnavailable")
    assert [job["metadata"]["name"] for job in namespace.items("jobs")] == ["before-1"]
    assert operator.answers("/livez")
    assert not operator.answers("/readyz")
    assert 'rowlock_database_up{component="operator"} 0.0' in operator.metrics()
    namespace.delete("batchjob", "before")

    private_database.server.up()

    becomes(namespace, "later", "Accepted", "True")
    becomes(namespace, "later", "StatusStale", "False")
    with OperatorScene(private_database) as scene:
        (gone,) = scene.executions("before")
        scene.status_becomes(gone.execution_id, "CLOSING", "CANCELLED")
        assert len(scene.executions("later")) == 1
    assert operator.answers("/readyz")


def test_a_namespace_goes_although_every_operator_is_dead(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    operator = operators.start()
    namespace.apply(scene.batchjob("nightly"))
    becomes(namespace, "nightly", "Accepted", "True")
    operator.kill()

    namespace.run("delete", "namespace", str(namespace.namespace), seconds=60)


def test_a_right_that_is_missing_is_named_and_nothing_is_done_without_it(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    role = namespace.get("role", "rowlock-operator")
    rules = [rule for rule in role["rules"] if rule["resources"] != ["jobs"]]
    namespace.run(
        "patch", "role", "rowlock-operator", "--type=merge", "-p", json.dumps({"rules": rules})
    )
    operator = operators.start(ready=False)

    wait_until(lambda: "jobs" in readyz(operator), seconds=30, what="the reason", every_seconds=0.1)
    said = readyz(operator)
    assert f"list jobs.batch in namespace {namespace.namespace}" in said
    assert "forbidden" in said
    assert operator.answers("/livez")

    namespace.run(
        "patch",
        "role",
        "rowlock-operator",
        "--type=merge",
        "-p",
        json.dumps({"rules": role["rules"]}),
    )
    operator.ready()
    namespace.apply(scene.batchjob("nightly"))
    becomes(namespace, "nightly", "Accepted", "True")


def test_a_job_that_is_deleted_by_hand_is_made_again_until_the_execution_has_ended(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    operators.start()
    namespace.apply(scene.batchjob("nightly"))
    becomes(namespace, "nightly", "Accepted", "True")

    def job_uid() -> str:
        found = namespace.find("job", "nightly-1")
        return found["metadata"]["uid"] if found else ""

    wait_until(job_uid, seconds=10, what="the Job", every_seconds=0.1)
    first = job_uid()
    namespace.run("delete", "job", "nightly-1", seconds=30)
    wait_until(
        lambda: job_uid() not in {"", first}, seconds=20, what="another Job", every_seconds=0.1
    )

    scene.run_to_the_end(scene.execution_of("nightly").execution_id)
    namespace.wait("batchjob/nightly", "condition=Complete", seconds=15)
    namespace.run("delete", "job", "nightly-1", seconds=30)
    operators.started[0].kill()
    operators.start()
    namespace.run("annotate", "batchjob", "nightly", "note=look-again")
    wait_until(
        lambda: (
            'rowlock_operator_jobs_created_total{result="created"} 0.0'
            in operators.started[1].metrics()
        ),
        what="metrics",
        every_seconds=0.1,
    )
    assert namespace.items("jobs") == []
    assert len(scene.executions("nightly")) == 1


def test_a_foreign_job_in_the_way_is_named_and_left_alone(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    operators.start()
    namespace.apply(
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "nightly-1"},
            "spec": {"suspend": True, "template": _a_pod()},
        }
    )
    foreign = namespace.get("job", "nightly-1")["metadata"]["uid"]

    namespace.apply(scene.batchjob("nightly"))

    def told() -> bool:
        status = namespace.get("batchjob", "nightly").get("status", {})
        return "Job nightly-1" in status.get("message", "")

    wait_until(told, seconds=20, what="the conflict in the message", every_seconds=0.2)
    assert namespace.get("job", "nightly-1")["metadata"]["uid"] == foreign
    namespace.run("delete", "job", "nightly-1", seconds=30)

    def ours() -> bool:
        found = namespace.find("job", "nightly-1")
        return bool(found and found["metadata"].get("ownerReferences"))

    wait_until(ours, seconds=30, what="our Job", every_seconds=0.2)
    assert len(scene.executions("nightly")) == 1


def test_an_execution_that_the_database_has_lost_is_not_launched_again_by_itself(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    operators.start()
    namespace.apply(scene.batchjob("nightly"))
    becomes(namespace, "nightly", "Accepted", "True")
    first = scene.execution_of("nightly").execution_id
    for statement in (
        sql.SQL("DELETE FROM rowlock.batch_job_coordination WHERE execution_id = {}"),
        sql.SQL("DELETE FROM rowlock.batch_instances WHERE execution_id = {}"),
    ):
        with scene.database.connect() as db:
            db.execute(statement.format(first))

    namespace.run("annotate", "batchjob", "nightly", "note=look-again")

    becomes(namespace, "nightly", "Accepted", "False", "RunNotFound")
    assert scene.executions("nightly") == []

    namespace.patch("batchjob", "nightly", {"spec": {"restartNonce": 1}})
    becomes(namespace, "nightly", "Accepted", "True")
    assert len(scene.executions("nightly")) == 1


def test_somebody_who_patches_the_batchjob_all_the_time_changes_nothing(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    operators.start()
    operators.start()
    namespace.apply(scene.batchjob("nightly"))
    for number in range(20):
        namespace.run("label", "batchjob", "nightly", "--overwrite", f"turn=t{number}")

    becomes(namespace, "nightly", "Accepted", "True")

    assert len(scene.executions("nightly")) == 1
    assert len(namespace.items("jobs")) == 1
    assert namespace.get("batchjob", "nightly")["metadata"]["labels"] == {"turn": "t19"}


def test_a_rotated_password_reaches_a_running_operator_and_is_never_told(
    namespace: Kubectl, operators: Operators, private_database: Database, tmp_path: Path
) -> None:
    login = private_database.cluster.login("rowlock_operator")
    dsn = private_database.dsn_as("rowlock_operator")
    path = tmp_path / "dsn"

    def rotate(password: str) -> None:
        with private_database.connect() as db:
            db.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(sql.Identifier(login), password))
            db.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s",
                (login,),
            )

    rotate("first-secret")
    path.write_text(make_conninfo(dsn, password="first-secret"))
    operator = operators.start(ROWLOCK_DSN="", ROWLOCK_DSN_FILE=str(path))

    rotate("second-secret")
    wait_until(
        lambda: not operator.answers("/readyz"), seconds=20, what="noticed", every_seconds=0.1
    )
    path.write_text(make_conninfo(dsn, password="second-secret"))

    operator.ready()
    with OperatorScene(private_database) as scene:
        namespace.apply(scene.batchjob("nightly"))
        becomes(namespace, "nightly", "Accepted", "True")
    told = operator.log + namespace.text("get", "batchjobs,events,jobs", "-o", "json")
    assert "first-secret" not in told
    assert "second-secret" not in told


def _a_pod() -> Object:
    security = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {"name": "main", "image": "other:1", "securityContext": security}
    return {"spec": {"restartPolicy": "Never", "containers": [container]}}
