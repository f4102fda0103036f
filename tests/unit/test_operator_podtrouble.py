"""Why a master's pod does not start is said in one short sentence."""

from datetime import timedelta
from typing import Any

import pytest

from rowlock_operator.podtrouble import SENTENCE_CHARS, trouble
from tests.support.batchjobs import NOW


def a_pod(*containers: dict[str, Any], created: str = "2026-11-30T12:00:00Z", **status: Any) -> Any:
    return {
        "metadata": {"name": "invoices-1-abc", "creationTimestamp": created},
        "status": {"containerStatuses": list(containers), **status},
    }


def waiting(reason: str, message: str = "", **fields: Any) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"name": "rowlock", "image": "invoices:7", "state": state, **fields}


def ended(code: int, reason: str = "Error") -> dict[str, Any]:
    state = {"terminated": {"exitCode": code, "reason": reason}}
    return {"name": "rowlock", "state": state}


EVICTED = {
    "type": "DisruptionTarget",
    "status": "True",
    "reason": "EvictionByEvictionAPI",
    "message": "Eviction API: evicting",
}

UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available: 3 Insufficient memory.",
}


@pytest.mark.parametrize(
    "pod, says",
    [
        (
            a_pod(waiting("ImagePullBackOff", "Back-off pulling image")),
            "image invoices:7 cannot be pulled (ImagePullBackOff): Back-off pulling image",
        ),
        (
            a_pod(waiting("InvalidImageName")),
            "image invoices:7 cannot be pulled (InvalidImageName)",
        ),
        (
            a_pod(waiting("CreateContainerConfigError", 'secret "db" not found')),
            'container rowlock cannot be made (CreateContainerConfigError): secret "db" not found',
        ),
        (
            a_pod(initContainerStatuses=[waiting("ErrImagePull")]),
            "image invoices:7 cannot be pulled (ErrImagePull)",
        ),
        (
            a_pod(conditions=[UNSCHEDULABLE]),
            "no cluster node takes it (Unschedulable): 0/3 nodes are available: 3 Insufficient memory.",
        ),
        (
            a_pod(
                waiting(
                    "CrashLoopBackOff",
                    lastState={"terminated": {"exitCode": 139, "reason": "Error"}},
                )
            ),
            "container rowlock keeps crashing (exit code 139)",
        ),
        (
            a_pod(ended(137, "OOMKilled"), phase="Failed"),
            "container rowlock ended (exit code 137, OOMKilled)",
        ),
        (
            a_pod(phase="Failed", reason="Evicted", message="The node was low on memory."),
            "it failed (Evicted): The node was low on memory.",
        ),
        (
            a_pod(ended(130), phase="Failed", conditions=[EVICTED]),
            "it had to go (EvictionByEvictionAPI): Eviction API: evicting",
        ),
    ],
)
def test_a_pod_that_does_not_run_says_why(pod: Any, says: str) -> None:
    assert trouble([pod], NOW) == f"pod invoices-1-abc: {says}"


@pytest.mark.parametrize(
    "pods",
    [
        [],
        [a_pod()],
        [a_pod(waiting("ContainerCreating"))],
        [a_pod({"name": "rowlock", "state": {"running": {}}}, phase="Running")],
        [a_pod(ended(0), phase="Succeeded")],
        [{}],
        [{"metadata": None, "status": {"containerStatuses": [None, 3], "conditions": "x"}}],
    ],
)
def test_a_pod_that_starts_runs_or_ended_well_is_no_trouble(pods: Any) -> None:
    assert trouble(pods, NOW) == ""


def test_a_pod_that_hangs_before_its_start_is_told_after_a_minute() -> None:
    since = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-11-30T12:00:00Z"}
    pods = [a_pod(waiting("ContainerCreating"), phase="Pending", conditions=[since])]

    assert trouble(pods, NOW + timedelta(seconds=60)) == ""
    assert "volume whose Secret or ConfigMap is missing" in trouble(
        pods, NOW + timedelta(seconds=61)
    )


def test_the_newest_pod_counts() -> None:
    old = a_pod(ended(137), phase="Failed", created="2026-11-30T11:00:00Z")
    new = a_pod({"name": "rowlock", "state": {"running": {}}}, phase="Running")

    assert trouble([new, old], NOW) == ""


def test_what_a_pod_waited_for_before_it_failed_does_not_count() -> None:
    unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    pod = a_pod(phase="Failed", reason="Evicted", conditions=[unplaced])

    assert trouble([pod], NOW).endswith("it failed (Evicted)")


def test_the_sentence_is_short_on_one_line_and_shows_no_password() -> None:
    message = "failed to pull\nfrom https://robot:very-secret@registry.example/x " + "x" * 1000
    said = trouble([a_pod(waiting("ErrImagePull", message))], NOW)

    assert "very-secret" not in said
    assert "https://***@registry.example/x" in said
    assert "\n" not in said
    assert len(said) <= SENTENCE_CHARS
