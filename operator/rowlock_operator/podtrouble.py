"""Why the pod of a master Job does not start, in one short sentence: read from its pods' status.

Only what Kubernetes itself says is repeated, and credentials in the address of an image never are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

from rowlock_operator.model import JsonObject
from rowlock_operator.resources import as_list, as_object, is_whole, parse_time

SENTENCE_CHARS: Final = 240
DELAY_SECONDS: Final = 60.0
"""After this time on a machine, a pod that has not started is worth a word."""

_IMAGE: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
)
_CONFIG: Final = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
)
_USERINFO: Final = re.compile(r"//[^/@\s]+@")


def trouble(pods: Sequence[JsonObject], now: datetime) -> str:
    """What keeps the newest pod from running; empty if it runs, has ended well, or only starts.

    Args:
        pods: The pods of one Job, as the API server has them, in any order.
        now: To tell a pod that starts from one that hangs.
    """
    if not pods:
        return ""
    newest = max(pods, key=_created)
    name = str(as_object(newest.get("metadata")).get("name") or "?")
    status = as_object(newest.get("status"))
    causes: Iterable[str] = (
        # Of a pod that has ended, what it once waited for is of no interest any more.
        [_end(status)]
        if status.get("phase") == "Failed"
        else [*_container_troubles(status), _scheduling_trouble(status), _delay(status, now)]
    )
    for cause in filter(None, causes):
        return _short(f"pod {name}: {cause}")
    return ""


def _created(pod: JsonObject) -> str:
    # RFC 3339 in UTC sorts as text.
    return str(as_object(pod.get("metadata")).get("creationTimestamp") or "")


def _container_troubles(status: JsonObject) -> Iterable[str]:
    for field in ("initContainerStatuses", "containerStatuses"):
        for container in as_list(status.get(field)):
            yield _waiting(as_object(container))


def _waiting(container: JsonObject) -> str:
    waiting = as_object(as_object(container.get("state")).get("waiting"))
    reason, message = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
    if reason in _IMAGE:
        return _with(f"image {container.get('image') or '?'} cannot be pulled ({reason})", message)
    if reason in _CONFIG:
        return _with(f"container {container.get('name')} cannot be made ({reason})", message)
    if reason == "CrashLoopBackOff":
        ended = as_object(as_object(container.get("lastState")).get("terminated"))
        return f"container {container.get('name')} keeps crashing{_exit(ended)}"
    return ""


def _scheduling_trouble(status: JsonObject) -> str:
    for condition in map(as_object, as_list(status.get("conditions"))):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            reason = str(condition.get("reason") or "Unschedulable")
            return _with(
                f"no cluster node takes it ({reason})", str(condition.get("message") or "")
            )
    return ""


def _end(status: JsonObject) -> str:
    """How a pod that has failed came to its end."""
    for condition in map(as_object, as_list(status.get("conditions"))):
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            # Why it was told to go says more than the code that its process then ended with.
            reason = str(condition.get("reason") or "disrupted")
            return _with(f"it had to go ({reason})", str(condition.get("message") or ""))
    for field in ("initContainerStatuses", "containerStatuses"):
        for container in map(as_object, as_list(status.get(field))):
            ended = as_object(as_object(container.get("state")).get("terminated"))
            if ended.get("exitCode") not in (0, None):
                return f"container {container.get('name')} ended{_exit(ended)}"
    reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
    return _with(f"it failed ({reason})" if reason else "it failed", message)


def _delay(status: JsonObject, now: datetime) -> str:
    """A pod that hangs before its start: why a volume cannot be mounted stands in events only."""
    if status.get("phase") != "Pending":
        return ""
    for condition in map(as_object, as_list(status.get("conditions"))):
        since = parse_time(condition.get("lastTransitionTime"))
        bound = condition.get("type") == "PodScheduled" and condition.get("status") == "True"
        if bound and since is not None and (now - since).total_seconds() > DELAY_SECONDS:
            return (
                "it has a machine and does not start; kubectl describe pod tells why (a large image, "
                "or a volume whose Secret or ConfigMap is missing)"
            )
    return ""


def _exit(ended: JsonObject) -> str:
    code, reason = ended.get("exitCode"), ended.get("reason")
    if not is_whole(code):
        return ""
    said = f", {reason}" if reason and reason != "Error" else ""
    return f" (exit code {code}{said})"


def _with(sentence: str, message: str) -> str:
    return f"{sentence}: {message}" if message else sentence


def _short(text: str) -> str:
    flat = _USERINFO.sub("//***@", " ".join(text.split()))
    return flat if len(flat) <= SENTENCE_CHARS else f"{flat[: SENTENCE_CHARS - 1]}…"
