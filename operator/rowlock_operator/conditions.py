"""The conditions of a BatchJob: what programs wait for.

All six are written on the first visit. `lastTransitionTime` moves only when the status of a condition
does, so that "since when" stays true.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, Literal, TypeAlias

from rowlock_operator.model import JsonObject
from rowlock_operator.resources import as_list, as_object, is_whole, parse_time

Truth: TypeAlias = Literal["True", "False", "Unknown"]


class Type(StrEnum):
    """Conditions, in the order in which they are written."""

    ACCEPTED = "Accepted"
    """The database has an execution for the attempt. False: the reason is one of `refusal.Reason`."""
    SUSPENDED = "Suspended"
    """No partition is claimed until `spec.suspend` is false."""
    COMPLETE = "Complete"
    """It has ended with success."""
    FAILED = "Failed"
    """It has ended without success."""
    FINISHED = "Finished"
    """It has ended, either way."""
    STATUS_STALE = "StatusStale"
    """The database has not answered for a while: the rest of the status may be old."""


DATABASE_UNAVAILABLE: Final = "DatabaseUnavailable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What a condition should say."""

    type: Type
    status: Truth
    reason: str
    message: str = ""
    generation: int | None = None
    """Generation of the spec that it answers to; None: the one at hand."""


def truth(value: bool) -> Truth:
    """A bool as Kubernetes writes it in conditions."""
    return "True" if value else "False"


def stamp(
    old: JsonObject, wanted: Iterable[Condition], *, generation: int, now: datetime
) -> list[dict[str, Any]]:
    """The conditions to write.

    Args:
        old: The status as it stands, of whatever shape.
        wanted: What they should say.
        generation: Of the spec that they answer to.
        now: When those change that change.
    """
    return [_stamped(_find(old, one.type), one, generation, now) for one in wanted]


def status_of(status: JsonObject, kind: Type) -> str:
    """True, False or Unknown as a condition stands; empty if it is not there."""
    return str(_find(status, kind).get("status") or "")


def reason_of(status: JsonObject, kind: Type) -> str:
    """The reason of a condition as it stands; empty if it is not there."""
    return str(_find(status, kind).get("reason") or "")


def generation_of(status: JsonObject, kind: Type) -> int | None:
    """The generation that a condition answers to as it stands; None if it does not say."""
    generation = _find(status, kind).get("observedGeneration")
    return generation if is_whole(generation) else None


def message_of(status: JsonObject, kind: Type) -> str:
    """The message of a condition as it stands; empty if it is not there."""
    return str(_find(status, kind).get("message") or "")


def is_true(status: JsonObject, kind: Type) -> bool:
    """Whether a condition stands at True."""
    return status_of(status, kind) == "True"


def time_text(moment: datetime) -> str:
    """A moment as Kubernetes writes it: UTC, whole seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _find(status: JsonObject, kind: Type) -> JsonObject:
    for one in map(as_object, as_list(status.get("conditions"))):
        if one.get("type") == kind:
            return one
    return {}


def _stamped(
    old: JsonObject, condition: Condition, generation: int, now: datetime
) -> dict[str, Any]:
    since = old.get("lastTransitionTime")
    kept = old.get("status") == condition.status and parse_time(since) is not None
    return {
        "type": str(condition.type),
        "status": condition.status,
        "observedGeneration": generation if condition.generation is None else condition.generation,
        "lastTransitionTime": since if kept else time_text(now),
        "reason": condition.reason,
        "message": condition.message,
    }
