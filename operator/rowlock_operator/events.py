"""The events of a BatchJob: what `kubectl describe` tells, derived from two statuses.

Nobody remembers what was said. An event is due when the status that is about to be written says
something that the status before does not; its name is the same whoever reports it and however often, so
that replicas and restarts repeat nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Literal

from rowlock_operator import conditions
from rowlock_operator.conditions import Type
from rowlock_operator.model import BatchJob, Emit, JsonObject
from rowlock_operator.refusal import Reason
from rowlock_operator.resources import as_object, is_whole

_NAME_CHARS = 200


def event_name(batchjob: BatchJob, reason: str, extra: object = "") -> str:
    """The name of an event: one for each reason and attempt, or whatever else tells two apart."""
    key = "\n".join((batchjob.uid, reason, str(extra)))
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return f"{batchjob.name[:_NAME_CHARS]}.{digest}"


def emit(
    batchjob: BatchJob,
    reason: str,
    message: str,
    extra: object = "",
    kind: Literal["Normal", "Warning"] = "Normal",
) -> Emit:
    """An event about a BatchJob."""
    return Emit(type=kind, reason=reason, message=message, name=event_name(batchjob, reason, extra))


def happened(batchjob: BatchJob, new: JsonObject) -> Iterator[Emit]:
    """What a new status says that the one before does not."""
    old = batchjob.status
    execution = new.get("executionID")
    run = execution or f"attempt {new.get('attempt')}"
    if execution and execution != old.get("executionID"):
        text = f"execution {execution} is attempt {new.get('attempt')}"
        yield emit(batchjob, "RunCreated", text, run)
        old_counts: JsonObject = {}
    else:
        old_counts = as_object(old.get("partitions"))
    yield from _counted(batchjob, old_counts, as_object(new.get("partitions")), run)
    yield from _turned(batchjob, new, run)


def _counted(batchjob: BatchJob, old: JsonObject, new: JsonObject, run: object) -> Iterator[Emit]:
    total = new.get("total")
    if is_whole(total) and old.get("total") is None:
        yield emit(batchjob, "PartitionsPlanned", f"{total} partitions are planned", run)
    failed = new.get("failed")
    if is_whole(failed) and failed > 0 and not old.get("failed"):
        # Once an attempt: the count goes on in the status.
        text = f"first failures: {failed} partitions have failed for good"
        yield emit(batchjob, "PartitionsFailed", text, run, "Warning")


def _turned(batchjob: BatchJob, new: JsonObject, run: object) -> Iterator[Emit]:
    """Conditions that have another status or reason than before."""
    old, message = batchjob.status, str(new.get("message") or "")
    reason = conditions.reason_of(new, Type.ACCEPTED)
    refused = conditions.status_of(new, Type.ACCEPTED) == "False" and reason != Reason.CANCELLED
    if refused and reason != conditions.reason_of(old, Type.ACCEPTED):
        yield emit(batchjob, reason, message, new.get("attempt"), "Warning")
    was = conditions.is_true(old, Type.SUSPENDED)
    now = conditions.is_true(new, Type.SUSPENDED)
    ended = conditions.is_true(new, Type.FINISHED)
    if now and not was:
        yield emit(batchjob, "Suspended", "no partition is claimed", batchjob.generation)
    if was and not now and not ended:
        yield emit(batchjob, "Resumed", "partitions are claimed again", batchjob.generation)
    # A refusal for good has been told already.
    if ended and not refused and not conditions.is_true(old, Type.FINISHED):
        yield _end(batchjob, new, message, run)


def _end(batchjob: BatchJob, new: JsonObject, message: str, run: object) -> Emit:
    if conditions.is_true(new, Type.COMPLETE):
        return emit(batchjob, "Completed", message, run)
    if new.get("phase") == "Cancelled":
        return emit(batchjob, "Cancelled", message, run)
    return emit(batchjob, "Failed", message, run, "Warning")
