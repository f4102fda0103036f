"""Render the status of a BatchJob: a mirror of the database, small whatever the size of the job.

It holds counters and at most ten failed partitions, cut to a budget of bytes. What it says comes from
the database and from Kubernetes; connection strings, environments and Secrets never pass through here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from rowlock_operator import conditions
from rowlock_operator.conditions import Condition, Type, time_text, truth
from rowlock_operator.model import Execution, FailedPartition, JsonObject, Observed
from rowlock_operator.refusal import Reason
from rowlock_operator.resources import as_object, is_object, is_whole, parse_time

STATUS_BYTES: Final = 2_560
"""Size of the JSON of a status. With metadata and a spec, a BatchJob so stays below 4 kB."""
MESSAGE_BYTES: Final = 400
CONDITION_BYTES: Final = 160
FAILED_PARTITIONS_MAX: Final = 10
_KEY_BYTES: Final = 64
_REASON_BYTES: Final = 40
_TEXT_BYTES: Final = 120
_INT32: Final = 2**31 - 1

_VOLATILE: Final = frozenset({"lastSyncTime"})
"""Says when the status was written; alone it is no reason to write one."""
_PROGRESS: Final = frozenset(
    {*_VOLATILE, "progress", "partitions", "nodes", "failedPartitions", "duration", "message"}
)
"""May wait until the least time between two patches is over."""

PHASES: Final = frozenset(
    {"Pending", "Running", "Suspended", "Cancelling", "Succeeded", "Failed", "Cancelled"}
)

_PHASE_OF: Final = {
    "REQUESTED": "Pending",
    "PLANNING": "Pending",
    "RUNNING": "Running",
    "FINISHING": "Running",
    "CLOSING": "Running",
    "COMPLETED": "Succeeded",
    "FAILED": "Failed",
    "CANCELLED": "Cancelled",
    "ABANDONED": "Cancelled",
}

# Reasons of the database that have another name in Kubernetes.
_REASONS: Final = {"MaxFailedExceeded": "MaxFailedPartitionsExceeded"}
_LOST: Final = "NonTransferablePartitionsLost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a status is about."""

    attempt: int
    execution: Execution | None
    """None: nothing runs, and nothing has."""
    accepted: Condition
    message: str = ""
    ended: Reason | None = None
    """Why it has ended without an execution."""
    master_job: str | None = None
    """Name of the Job that runs the master, as far as there is one."""

    @property
    def finished(self) -> bool:
        """Whether the attempt has ended."""
        return self.ended is not None or (self.execution is not None and self.execution.ended)


def render(observed: Observed, situation: Situation) -> dict[str, Any]:
    """The whole status for a situation that the database has confirmed."""
    old = observed.batchjob.status
    execution = situation.execution
    status: dict[str, Any] = {
        "observedGeneration": observed.batchjob.generation,
        "phase": _phase(observed, situation),
        "message": clip(situation.message, MESSAGE_BYTES),
        **of_attempt(situation.attempt),
        "lastSyncTime": time_text(observed.now),
        "conditions": conditions.stamp(
            old,
            [situation.accepted, *_outcome(observed, situation), _fresh()],
            generation=observed.batchjob.generation,
            now=observed.now,
        ),
    }
    if situation.master_job:
        status["masterJobName"] = situation.master_job
    if execution is not None:
        status |= _of_execution(execution)
    elif situation.ended:
        status["completionTime"] = _completion(old, situation, observed.now)
    return _within_budget(status)


def carry(
    observed: Observed, *changed: Condition, phase: str | None = None, message: str | None = None
) -> dict[str, Any]:
    """The status as it stands, with only these changes: for what the database cannot confirm.

    On a first visit all conditions are there afterwards.
    """
    old = observed.batchjob.status
    said = {one.type: one for one in changed}
    wanted = [said.get(kind) or _as_it_stands(old, kind) for kind in Type]
    status = {
        **old,
        "phase": phase or _phase_as_it_stands(old),
        "conditions": conditions.stamp(
            old, wanted, generation=observed.batchjob.generation, now=observed.now
        ),
    }
    if message is not None:
        status["message"] = clip(message, MESSAGE_BYTES)
    return status


def differs(old: JsonObject, new: JsonObject) -> bool:
    """Whether a patch would tell anything new."""
    return _without(old, _VOLATILE) != _without(new, _VOLATILE)


def is_urgent(old: JsonObject, new: JsonObject) -> bool:
    """Whether the difference is more than progress, and so should be seen at once."""
    if _without(old, {*_PROGRESS, "conditions"}) != _without(new, {*_PROGRESS, "conditions"}):
        return True
    return [_verdict(old, kind) for kind in Type] != [_verdict(new, kind) for kind in Type]


def merge_patch(old: JsonObject, new: JsonObject) -> JsonObject:
    """What turns the old status into the new one by a JSON merge patch (RFC 7386)."""
    patch: dict[str, Any] = {field: None for field in old if field not in new}
    for field, value in new.items():
        before = old.get(field)
        if before == value:
            continue
        both = is_object(value) and is_object(before)
        patch[field] = merge_patch(as_object(before), value) if both else value
    return patch


def completion_time(status: JsonObject) -> datetime | None:
    """When the attempt that a status tells of has ended; None if it has not."""
    ended = conditions.is_true(status, Type.FINISHED)
    return parse_time(status.get("completionTime")) if ended else None


def of_attempt(attempt: int) -> dict[str, Any]:
    """The fields that say which attempt a status is about."""
    return {"observedRestartNonce": attempt - 1, "attempt": min(attempt, _INT32)}


def observed_attempt(status: JsonObject) -> int | None:
    """The attempt that a status is about; None if it does not say."""
    nonce = status.get("observedRestartNonce")
    return nonce + 1 if is_whole(nonce) else None


def failure_reason(execution: Execution) -> str:
    """Why an execution ended without success, as the condition Failed says it."""
    if execution.status in ("CANCELLED", "ABANDONED"):
        return execution.status.capitalize()
    lost = any(one.outcome_unknown for one in execution.failed_partitions)
    if lost and execution.failure_reason == "PartitionsFailed":
        return _LOST
    reason = execution.failure_reason or ""
    return _REASONS.get(reason, reason) or "Failed"


def clip(text: str, limit: int) -> str:
    """As much of a text as fits into so many bytes of UTF-8, on one line."""
    flat = " ".join(text.encode(errors="replace").decode().replace("\0", "").split())
    if len(flat.encode()) <= limit:
        return flat
    return flat.encode()[: limit - 3].decode(errors="ignore") + "…"


# -- phase and conditions ----------------------------------------------------------------------


def _phase(observed: Observed, situation: Situation) -> str:
    execution = situation.execution
    if situation.ended is Reason.CANCELLED:
        return "Cancelled"
    if situation.ended:
        return "Failed"
    if execution is None:
        return "Suspended" if observed.batchjob.spec.suspend else "Pending"
    if not execution.ended and execution.cancel_requested:
        return "Cancelling"
    if not execution.ended and execution.suspended:
        return "Suspended"
    return _PHASE_OF.get(execution.status, "Pending")


def _outcome(observed: Observed, situation: Situation) -> Iterator[Condition]:
    """The conditions Suspended, Complete, Failed and Finished."""
    execution = situation.execution
    if situation.finished:
        suspended = False
    else:
        suspended = execution.suspended if execution else observed.batchjob.spec.suspend
    yield Condition(
        type=Type.SUSPENDED,
        status=truth(suspended),
        reason="Suspended" if suspended else "NotSuspended",
    )
    success = execution is not None and execution.status == "COMPLETED"
    reason, message = "NotFinished", ""
    if situation.ended:
        reason = str(situation.ended)
    elif situation.finished and execution is not None:
        reason = "Completed" if success else failure_reason(execution)
    failed = situation.finished and not success
    if failed:
        message = clip(situation.message, CONDITION_BYTES)
    finished = truth(situation.finished)
    yield Condition(type=Type.COMPLETE, status=truth(success), reason=reason)
    yield Condition(type=Type.FAILED, status=truth(failed), reason=reason, message=message)
    yield Condition(type=Type.FINISHED, status=finished, reason=reason)


def _fresh() -> Condition:
    return Condition(type=Type.STATUS_STALE, status="False", reason="DatabaseReachable")


def _as_it_stands(old: JsonObject, kind: Type) -> Condition:
    status = conditions.status_of(old, kind)
    known = status in ("True", "False")
    return Condition(
        type=kind,
        status=truth(status == "True") if known else "Unknown",
        reason=conditions.reason_of(old, kind) or "NotYetKnown",
        message=conditions.message_of(old, kind),
        generation=conditions.generation_of(old, kind),
    )


def _phase_as_it_stands(old: JsonObject) -> str:
    phase = old.get("phase")
    return phase if isinstance(phase, str) and phase in PHASES else "Pending"


def _completion(old: JsonObject, situation: Situation, now: datetime) -> str:
    """When it ended without an execution: at the first look that said so."""
    before = old.get("completionTime")
    same = observed_attempt(old) == situation.attempt and completion_time(old) is not None
    return before if same and isinstance(before, str) else time_text(now)


def _verdict(status: JsonObject, kind: Type) -> tuple[str, str]:
    return conditions.status_of(status, kind), conditions.reason_of(status, kind)


def _without(status: JsonObject, fields: frozenset[str] | set[str]) -> dict[str, Any]:
    return {field: value for field, value in status.items() if field not in fields}


# -- numbers -----------------------------------------------------------------------------------


def _of_execution(execution: Execution) -> dict[str, Any]:
    live = not execution.ended
    done = execution.completed + execution.failed + execution.cancelled
    counts = {
        "pending": execution.pending if live else 0,
        "running": execution.running if live else 0,
        "succeeded": execution.completed,
        "failed": execution.failed,
        "retried": execution.retried,
    }
    found: dict[str, Any] = {
        "executionID": str(execution.execution_id),
        "nodes": _int32(execution.nodes if live else 0),
    }
    if execution.total is not None:
        counts = {"total": execution.total, **counts}
        found["progress"] = f"{done}/{execution.total}"
    found["partitions"] = {name: _int32(count) for name, count in counts.items()}
    if execution.started_at is not None:
        found["startTime"] = time_text(execution.started_at)
    if execution.ended_at is not None:
        found["completionTime"] = time_text(execution.ended_at)
        begun = execution.started_at or execution.requested_at
        found["duration"] = duration_text(execution.ended_at - begun)
    if execution.failed_partitions:
        shown = execution.failed_partitions[:FAILED_PARTITIONS_MAX]
        found["failedPartitions"] = [_failed(one) for one in shown]
    return found


def _failed(partition: FailedPartition) -> dict[str, Any]:
    return {
        "key": clip(partition.key, _KEY_BYTES),
        "attempts": _int32(partition.attempts),
        "reason": clip(partition.reason, _REASON_BYTES),
        "message": clip(partition.message, _TEXT_BYTES),
    }


def _int32(count: int) -> int:
    return min(max(count, 0), _INT32)


def duration_text(length: timedelta) -> str:
    """A duration for people, in its two largest units: 12s, 4m12s, 3h4m, 2d3h."""
    seconds = max(0, int(length.total_seconds()))
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if days:
        return f"{days}d{hours % 24}h"
    if hours:
        return f"{hours}h{minutes % 60}m"
    return f"{minutes}m{seconds % 60}s" if minutes else f"{seconds}s"


def _within_budget(status: dict[str, Any]) -> dict[str, Any]:
    """Drop failed partitions from the end until the status is small enough."""
    failed = list(status.get("failedPartitions", ()))
    while failed and len(json.dumps(status, ensure_ascii=False).encode()) > STATUS_BYTES:
        failed.pop()
        status = {**status, "failedPartitions": failed}
    if not failed:
        return _without(status, {"failedPartitions"})
    return status
