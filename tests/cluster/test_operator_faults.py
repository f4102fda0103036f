"""Whatever is away, forbidden, restored or in the way: the operator says so, and goes on afterwards."""

from __future__ import annotations

import copy
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import yaml
from psycopg import sql
from psycopg.conninfo import make_conninfo

from tests.support.cluster import (
    MANIFESTS,
    Kubectl,
    Object,
    OperatorProcess,
    Operators,
    becomes,
)
from tests.support.operator_scene import OperatorScene
from tests.support.postgres import Database
from tests.support.waiting import wait_until


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


def test_a_database_session_that_has_gone_meanwhile_delays_nobody(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    operators.start()
    namespace.apply(scene.batchjob("before"))
    becomes(namespace, "before", "Accepted", "True")
    scene.all(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = 'rowlock-operator'"
    )

    namespace.apply(scene.batchjob("nightly"))

    becomes(namespace, "nightly", "Accepted", "True", seconds=10)


def test_whatever_right_is_missing_is_named_and_with_all_of_them_it_works_without_any_in_the_cluster(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    """An operator with too few rights must say which, and one of a namespace must need no others.

    Known from dask/dask-kubernetes#916, nolar/kopf#1153 and homer-operator#51: it retried in silence and
    watched nothing.
    """
    role = namespace.get("role", "rowlock-operator")

    def grant(rules: Sequence[Object]) -> None:
        change = json.dumps({"rules": rules})
        namespace.run("patch", "role", "rowlock-operator", "--type=merge", "-p", change)

    grant([])
    operator = operators.start(ready=False, ROWLOCK_RESYNC_SECONDS="0.5")
    namespace.apply(scene.batchjob("nightly"))
    for number, rule in enumerate(role["rules"]):
        (resource,), (group,) = rule["resources"], rule["apiGroups"]
        for verb in rule["verbs"]:
            if (resource, verb) in {("pods", "get"), ("pods", "watch"), ("events", "patch")}:
                continue  # granted for the future, and not used
            rules = copy.deepcopy(role["rules"])
            rules[number]["verbs"].remove(verb)
            grant([rule for rule in rules if rule["verbs"]])
            kind, _, sub = resource.partition("/")
            name = ".".join(filter(None, (kind, group))) + (f"/{sub}" if sub else "")
            wait_until(
                lambda said=f"{verb} {name} in namespace {namespace.namespace}": (  # type: ignore[misc]
                    said in readyz(operator)
                ),
                seconds=60,
                what=f"{verb} {name}",
                every_seconds=0.05,
            )
            assert operator.answers("/livez")

    grant(role["rules"])
    operator.ready()
    becomes(namespace, "nightly", "Accepted", "True")
    assert operator.process.poll() is None


def test_a_job_that_is_deleted_by_hand_is_made_again_while_the_execution_lives(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    operators.start()
    namespace.apply(scene.batchjob("nightly"))
    becomes(namespace, "nightly", "Accepted", "True")

    def job_uid() -> str:
        found = namespace.find("job", "nightly-1")
        return found["metadata"]["uid"] if found else ""

    wait_until(job_uid, seconds=60, what="the Job", every_seconds=0.1)
    first = job_uid()
    namespace.run("delete", "job", "nightly-1", seconds=30)
    wait_until(
        lambda: job_uid() not in {"", first}, seconds=60, what="another Job", every_seconds=0.1
    )


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

    wait_until(told, seconds=60, what="the conflict in the message", every_seconds=0.2)
    assert namespace.get("job", "nightly-1")["metadata"]["uid"] == foreign
    namespace.run("delete", "job", "nightly-1", seconds=30)

    def ours() -> bool:
        found = namespace.find("job", "nightly-1")
        return bool(found and found["metadata"].get("ownerReferences"))

    wait_until(ours, seconds=60, what="our Job", every_seconds=0.2)
    assert len(scene.executions("nightly")) == 1


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
        lambda: not operator.answers("/readyz"), seconds=60, what="noticed", every_seconds=0.1
    )
    path.write_text(make_conninfo(dsn, password="second-secret"))

    operator.ready()
    with OperatorScene(private_database) as scene:
        namespace.apply(scene.batchjob("nightly"))
        becomes(namespace, "nightly", "Accepted", "True")
    told = operator.log + namespace.text("get", "batchjobs,events,jobs", "-o", "json")
    assert "first-secret" not in told
    assert "second-secret" not in told


def test_a_password_is_nowhere_but_where_it_has_to_be(
    namespace: Kubectl, operators: Operators, scene: OperatorScene, tmp_path: Path
) -> None:
    planted = ["planted-in-the-dsn", "planted-in-the-env", "planted-in-the-image"]
    pools = yaml.safe_load((MANIFESTS / "operator" / "pools.yaml").read_text())
    (container,) = pools["pools"]["default"]["template"]["spec"]["containers"]
    container["env"].append({"name": "TOKEN", "value": planted[1]})
    container["image"] = f"https://user:{planted[2]}@registry.example/jobs:1"
    broken = copy.deepcopy(pools["pools"]["default"])
    broken["template"]["spec"]["containers"][0]["env"].append({"name": "", "value": planted[1]})
    pools["pools"]["broken"] = broken
    pools_file = tmp_path / "pools.yaml"
    pools_file.write_text(json.dumps(pools))  # which is YAML, too
    login = scene.database.cluster.login("rowlock_operator")
    dsn_file = tmp_path / "dsn"
    right = scene.database.dsn_as("rowlock_operator")
    wrong = make_conninfo(right, user=f"{login}-wrong", password=planted[0])
    dsn_file.write_text(wrong)
    settings = {
        "ROWLOCK_DSN": "",
        "ROWLOCK_DSN_FILE": str(dsn_file),
        "ROWLOCK_POOLS_FILE": str(pools_file),
        "ROWLOCK_STALE_SECONDS": "1",
    }
    operator = operators.start(ready=False, **settings)

    # Whatever can go wrong about each of them, and what it makes the operator say.
    namespace.apply(scene.batchjob("nightly"), scene.batchjob("other", pool="broken"))
    becomes(namespace, "nightly", "Accepted", "Unknown")
    said = readyz(operator)
    dsn_file.write_text(f"{right} {planted[0]}")
    wait_until(lambda: readyz(operator) != said, what="the next failure", every_seconds=0.1)
    said += readyz(operator)
    dsn_file.write_text(right)
    operator.ready()
    for name in ("nightly", "other"):
        becomes(namespace, name, "Accepted", "True")
    run = scene.plan(scene.execution_of("nightly").execution_id, 1)
    scene.a_failure(run.master)
    assert scene.advance(run) == "FAILED"
    becomes(namespace, "nightly", "Failed", "True")
    wait_until(
        lambda: "env[" in namespace.get("batchjob", "other")["status"]["message"],
        what="why the Job is refused",
        every_seconds=0.1,
    )
    said += operator.log + operator.metrics()
    operator.kill()
    pools_file.write_text(f"pools: [{planted[1]}: {{")
    operator = operators.start(ready=True, **settings)
    namespace.apply(scene.batchjob("third"))
    becomes(namespace, "third", "Accepted", "False", "PoolUnknown")

    said += operator.log + operator.metrics()
    said += namespace.text("get", "batchjobs", "-o", "json")
    # Those of the operator: where pods run, the kubelet quotes an image as it stands in the pod.
    ours = "involvedObject.kind=BatchJob"
    said += namespace.text("get", "events", "--field-selector", ours, "-o", "json")
    for table in ("batch_job_coordination", "batch_instances", "batch_events"):
        rows = scene.admin.execute(
            sql.SQL("SELECT * FROM rowlock.{}").format(sql.Identifier(table))
        )
        said += str(rows.fetchall())
    assert [word for word in planted if word in said] == []


def _a_pod() -> Object:
    security = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {"name": "main", "image": "other:1", "securityContext": security}
    return {"spec": {"restartPolicy": "Never", "containers": [container]}}
