"""The master Job is the pool's template, with what the BatchJob lays over it and what must be so."""

import copy
import json
from typing import Any

import pytest

from rowlock.errors import SettingsError
from rowlock_operator.masterjob import choose_pool, render
from rowlock_operator.pools import parse_pools
from rowlock_operator.refusal import Reason, Refusal
from tests.support.batchjobs import NAME, OPTIONS, RUN, TEMPLATE, UID, a_batchjob


def rendered(master: dict[str, Any] | None = None, **fields: Any) -> Any:
    batchjob = a_batchjob({"master": master or {}}, **fields)
    pool = choose_pool(batchjob, OPTIONS)
    return render(batchjob, attempt=2, execution_id=RUN, pool=pool)


def the_container(manifest: Any) -> Any:
    containers = manifest["spec"]["template"]["spec"]["containers"]
    return next(one for one in containers if one["name"] == "rowlock")


def test_the_job_runs_one_pod_and_limits_nothing_that_the_database_decides() -> None:
    job = rendered()

    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert job["metadata"]["name"] == f"{NAME}-2"
    assert job["metadata"]["namespace"] == "billing"
    spec = {key: value for key, value in job["spec"].items() if key != "template"}
    assert spec == {
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": 6,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": "rowlock",
                        "operator": "In",
                        "values": [2, 3, 4],
                    },
                },
            ]
        },
    }
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"


def test_it_belongs_to_the_batchjob_and_holds_up_no_deletion() -> None:
    assert rendered()["metadata"]["ownerReferences"] == [
        {
            "apiVersion": "batch.rowlock.dev/v1alpha1",
            "kind": "BatchJob",
            "name": NAME,
            "uid": UID,
            "controller": True,
            "blockOwnerDeletion": False,
        }
    ]


def test_the_template_of_the_pool_is_kept_but_for_the_arguments() -> None:
    before = copy.deepcopy(dict(TEMPLATE))
    job = rendered()

    container = the_container(job)
    assert container == {
        "name": "rowlock",
        "image": "invoices:7",
        "command": ["rowlock"],
        "env": [{"name": "ROWLOCK_DSN", "value": "from-a-secret"}],
        "args": ["master", str(RUN), "--slots", "4", "--pool", "default", "--http", "8080"],
    }
    assert job["spec"]["template"]["spec"]["containers"][0] == {
        "name": "sidecar",
        "image": "proxy:1",
    }
    assert job["spec"]["template"]["spec"]["serviceAccountName"] == "worker"
    assert before == TEMPLATE


def test_job_and_pod_are_labelled_for_people_and_programs() -> None:
    job = rendered()

    ours = {
        "app.kubernetes.io/name": "rowlock",
        "app.kubernetes.io/component": "master",
        "app.kubernetes.io/instance": NAME,
        "app.kubernetes.io/managed-by": "rowlock-operator",
        "batch.rowlock.dev/batchjob": NAME,
        "batch.rowlock.dev/execution-id": str(RUN),
    }
    assert job["metadata"]["labels"] == ours
    assert job["spec"]["template"]["metadata"]["labels"] == {"team": "billing", **ours}


def test_labels_of_kueue_are_copied_and_no_others() -> None:
    labels = {"kueue.x-k8s.io/queue-name": "nightly", "team": "billing"}
    job = rendered(labels=labels)

    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "nightly"
    assert "team" not in job["metadata"]["labels"]
    assert "suspend" not in job["spec"]


def test_the_same_input_gives_the_same_bytes() -> None:
    assert json.dumps(rendered()) == json.dumps(rendered())


def test_the_batchjob_chooses_image_account_resources_slots_and_tries() -> None:
    job = rendered(
        {
            "image": "mine:1",
            "serviceAccountName": "mine",
            "resources": {"limits": {"memory": "1Gi"}},
            "slots": 0,
            "backoffLimit": 0,
        }
    )

    container = the_container(job)
    assert container["image"] == "mine:1"
    assert container["resources"] == {"limits": {"memory": "1Gi"}}
    assert container["args"][2:4] == ["--slots", "0"]
    assert job["spec"]["template"]["spec"]["serviceAccountName"] == "mine"
    assert job["spec"]["backoffLimit"] == 0


def test_a_pod_template_is_laid_over_by_name() -> None:
    job = rendered(
        {
            "podTemplate": {
                "metadata": {"labels": {"team": "night", "batch.rowlock.dev/batchjob": "x"}},
                "spec": {
                    "serviceAccountName": None,
                    "nodeSelector": {"disk": "fast"},
                    "restartPolicy": "OnFailure",
                    "containers": [
                        {
                            "name": "rowlock",
                            "args": ["sh"],
                            "env": [
                                {"name": "ROWLOCK_DSN", "value": "another"},
                                {"name": "LEVEL", "value": "debug"},
                            ],
                        },
                        {"name": "debugger", "image": "gdb:1"},
                    ],
                },
            }
        }
    )

    template = job["spec"]["template"]
    spec = template["spec"]
    assert template["metadata"]["labels"]["team"] == "night"
    assert template["metadata"]["labels"]["batch.rowlock.dev/batchjob"] == NAME
    assert "serviceAccountName" not in spec
    assert (spec["nodeSelector"], spec["restartPolicy"]) == ({"disk": "fast"}, "Never")
    assert [one["name"] for one in spec["containers"]] == ["sidecar", "rowlock", "debugger"]
    container = the_container(job)
    assert container["image"] == "invoices:7"
    assert container["args"][0] == "master"
    assert container["env"] == [
        {"name": "ROWLOCK_DSN", "value": "another"},
        {"name": "LEVEL", "value": "debug"},
    ]


@pytest.mark.parametrize(
    "overlay, says",
    [
        ({"kind": "Pod"}, "podTemplate has kind; it takes metadata and spec"),
        ({"spec": {"containers": [{"image": "x"}]}}, r"containers\[0\].name is missing"),
        ({"spec": {"containers": "x"}}, "containers is not a list"),
        ({"spec": {"containers": None}}, "removes container rowlock"),
        ({"spec": None}, "removes container rowlock"),
    ],
)
def test_a_pod_template_that_cannot_be_laid_over_is_refused(
    overlay: dict[str, Any], says: str
) -> None:
    with pytest.raises(Refusal, match=says) as caught:
        rendered({"podTemplate": overlay})

    assert caught.value.reason is Reason.INVALID_POD_TEMPLATE


def test_without_a_container_of_our_name_the_first_one_is_the_master() -> None:
    template = {"spec": {"containers": [{"name": "main", "image": "a"}, {"name": "b"}]}}
    pool = parse_pools({"pools": {"default": {"template": template}}})["default"]

    job: Any = render(a_batchjob(), attempt=1, execution_id=RUN, pool=pool)

    assert job["spec"]["template"]["spec"]["containers"][0]["args"][0] == "master"
    rule = job["spec"]["podFailurePolicy"]["rules"][1]
    assert rule["onExitCodes"]["containerName"] == "main"


def test_a_wrong_pools_file_lists_every_mistake() -> None:
    document = {
        "pools": {
            "a": {
                "slots": -1,
                "replicas": 2,
                "template": {"spec": {"containers": [{"image": "x"}]}},
            },
            "b": None,
        }
    }

    with pytest.raises(SettingsError) as caught:
        parse_pools(document)

    assert caught.value.problems == [
        "pools.a.replicas is no known field",
        "pools.a.slots is -1; a whole number of 0 or more is expected",
        "pools.a.template.spec.containers[0].name is missing",
        "pools.b.template.spec.containers is missing: name the worker's container",
    ]


@pytest.mark.parametrize("document", [None, [], {}, {"pools": []}])
def test_a_pools_file_without_pools_is_refused(document: object) -> None:
    with pytest.raises(SettingsError, match="a map from the name of each pool"):
        parse_pools(document)
