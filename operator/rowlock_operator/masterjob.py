"""The Kubernetes Job whose pod is the master of one attempt.

The same BatchJob, execution and template give the same manifest, byte for byte. The Job limits
nothing that the database decides: it has no deadline of its own, and `spec.suspend` belongs to Kueue.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from rowlock_operator.model import (
    API_VERSION,
    KIND,
    LABEL_BATCHJOB,
    LABEL_CHARS,
    LABEL_EXECUTION,
    BatchJob,
    JsonObject,
    Mode,
    Options,
    Pool,
    master_job_name,
)
from rowlock_operator.pools import main_container
from rowlock_operator.refusal import Reason, Refusal
from rowlock_operator.resources import as_list, as_object, is_array, is_object

HTTP_PORT: Final = 8080
BACKOFF_LIMIT: Final = 6
FINAL_EXIT_CODES: Final = (2, 3, 4)
"""Exit codes of `rowlock master` that another try would only repeat: usage or contract error, cancelled,
failed. 5 (no database) is none of them."""
KUEUE: Final = "kueue.x-k8s.io/"

_Object = dict[str, Any]  # Any: parts of a manifest

# What tells the members of these lists apart, as in Kubernetes' own strategic merge.
_MERGE_KEYS: Final[Mapping[str, str]] = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "hostAliases": "ip",
}


def choose_pool(batchjob: BatchJob, options: Options) -> Pool:
    """The pool whose template the master pod gets.

    Raises:
        Refusal: There is no such template, or the BatchJob asks for more than it may.
    """
    master = batchjob.spec.master
    chosen = {
        "podTemplate": master.pod_template,
        "image": master.image,
        "serviceAccountName": master.service_account,
    }
    forbidden = [f"spec.master.{name}" for name, value in chosen.items() if value is not None]
    if forbidden and not options.allow_pod_template:
        raise Refusal(
            Reason.POD_TEMPLATE_FORBIDDEN,
            f"{' and '.join(forbidden)} may not be set: this operator takes the pod of a master from "
            "the template of its pool only",
        )
    if options.pools_problem:
        raise Refusal(Reason.POOL_UNKNOWN, options.pools_problem)
    pool = options.pools.get(batchjob.spec.pool)
    if pool is None:
        known = ", ".join(sorted(options.pools)[:10]) or "none"
        raise Refusal(
            Reason.POOL_UNKNOWN,
            f"there is no pod template for pool {batchjob.spec.pool} (pools: {known}); choose one of "
            "them, or set spec.master.mode to Pool",
        )
    return pool


def render(batchjob: BatchJob, *, attempt: int, execution_id: UUID, pool: Pool) -> JsonObject:
    """The manifest of the master Job.

    Args:
        batchjob: Its owner.
        attempt: Which of its attempts; part of the name.
        execution_id: The execution that the pod becomes master of.
        pool: Whose template it gets.

    Raises:
        Refusal: `spec.master.podTemplate` cannot be laid over the template.
    """
    labels = _labels(batchjob, execution_id)
    template, container = _template(batchjob, execution_id, pool, labels)
    limit = batchjob.spec.master.backoff_limit
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": master_job_name(batchjob.name, attempt),
            "namespace": batchjob.namespace,
            "labels": {**_of_kueue(batchjob.labels), **labels},
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": KIND,
                    "name": batchjob.name,
                    "uid": batchjob.uid,
                    "controller": True,
                    # True would need the right to update batchjobs/finalizers.
                    "blockOwnerDeletion": False,
                }
            ],
        },
        "spec": {
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": BACKOFF_LIMIT if limit is None else limit,
            # No replacement before the old pod is gone: the epoch would fence it, but why pay twice.
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [
                    # First, because a drained pod also exits with some code: it costs no try.
                    {
                        "action": "Ignore",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    },
                    {
                        "action": "FailJob",
                        "onExitCodes": {
                            "containerName": container,
                            "operator": "In",
                            "values": list(FINAL_EXIT_CODES),
                        },
                    },
                ]
            },
            "template": template,
        },
    }


def has_own_master(batchjob: BatchJob) -> bool:
    """Whether its executions get a Job."""
    return batchjob.spec.master.mode is Mode.JOB


def held_by_kueue(batchjob: BatchJob) -> bool:
    """Whether Kueue will decide when its Job may start."""
    return bool(batchjob.labels.get(f"{KUEUE}queue-name"))


def _labels(batchjob: BatchJob, execution_id: UUID) -> dict[str, str]:
    name = _label_value(batchjob.name)
    return {
        "app.kubernetes.io/name": "rowlock",
        "app.kubernetes.io/component": "master",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/managed-by": "rowlock-operator",
        LABEL_BATCHJOB: name,
        LABEL_EXECUTION: str(execution_id),
    }


def _label_value(text: str) -> str:
    """As much of the text as a label can hold; the whole of any name that the CRD accepts."""
    return re.sub(r"[^A-Za-z0-9]+$", "", text[:LABEL_CHARS])


def _of_kueue(labels: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in labels.items() if name.startswith(KUEUE)}


# -- the pod -----------------------------------------------------------------------------------


def _template(
    batchjob: BatchJob, execution_id: UUID, pool: Pool, labels: Mapping[str, str]
) -> tuple[JsonObject, str]:
    """The pod template, and the name of the container that runs the master."""
    master = batchjob.spec.master
    template = copy.deepcopy(dict(pool.template))
    containers = as_list(as_object(template.get("spec")).get("containers"))
    main = main_container(containers)
    assert main is not None, "parse_pools lets no template without containers pass"
    name: str = containers[main]["name"]
    if master.pod_template is not None:
        template = _laid_over(template, _checked(master.pod_template), "spec.master.podTemplate")
    template["metadata"] = dict(as_object(template.get("metadata")))
    template["metadata"]["labels"] = {
        **as_object(template["metadata"].get("labels")),
        **labels,
    }
    spec = template["spec"] = dict(as_object(template.get("spec")))
    spec["restartPolicy"] = "Never"
    if master.service_account is not None:
        spec["serviceAccountName"] = master.service_account
    spec["containers"] = [dict(as_object(one)) for one in as_list(spec.get("containers"))]
    container = next((one for one in spec["containers"] if one.get("name") == name), None)
    if container is None:
        raise _refusal(f"spec.master.podTemplate removes container {name}, which runs the master")
    slots = pool.slots if master.slots is None else master.slots
    container["args"] = [
        *("master", str(execution_id), "--slots", str(slots)),
        *("--pool", batchjob.spec.pool, "--http", str(HTTP_PORT)),
    ]
    if master.image is not None:
        container["image"] = master.image
    if master.resources is not None:
        container["resources"] = copy.deepcopy(dict(master.resources))
    return template, name


def _checked(overlay: JsonObject) -> JsonObject:
    unknown = sorted(set(overlay) - {"metadata", "spec"})
    if unknown:
        raise _refusal(
            f"spec.master.podTemplate has {', '.join(unknown)}; it takes metadata and spec, as the "
            "template of a Job"
        )
    return overlay


def _laid_over(below: JsonObject, above: JsonObject, path: str) -> _Object:
    """A strategic merge: objects field by field, named lists member by member, null removes."""
    merged = dict(below)
    for field, value in above.items():
        here = f"{path}.{field}"
        if value is None:
            merged.pop(field, None)
        elif field in _MERGE_KEYS:
            if not is_array(value):
                raise _refusal(f"{here} is not a list")
            merged[field] = _lists(as_list(merged.get(field)), value, _MERGE_KEYS[field], here)
        elif is_object(value):
            merged[field] = _laid_over(as_object(merged.get(field)), value, here)
        else:
            merged[field] = copy.deepcopy(value)
    return merged


def _lists(below: list[Any], above: list[Any], key: str, path: str) -> list[Any]:
    merged = list(below)
    for index, member in enumerate(above):
        name = as_object(member).get(key)
        if name is None:
            raise _refusal(f"{path}[{index}].{key} is missing, so nobody can tell what it replaces")
        places = [at for at, one in enumerate(merged) if as_object(one).get(key) == name]
        beneath = as_object(merged[places[0]] if places else None)
        laid = _laid_over(beneath, as_object(member), f"{path}[{index}]")
        if places:
            merged[places[0]] = laid
        else:
            merged.append(laid)
    return merged


def _refusal(message: str) -> Refusal:
    return Refusal(Reason.INVALID_POD_TEMPLATE, message)
