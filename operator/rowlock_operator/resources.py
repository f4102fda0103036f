"""Read a BatchJob, as any API server may hand it out, into a typed value.

The CRD checks what people write, but an older or a newer CRD may have let something else through, and
`x-kubernetes-preserve-unknown-fields` lets everything through. So nothing is believed here: a field
that is not what it should be becomes a problem with its path, never an exception and never a guess.
Fields that this version does not know are ignored, as Kubernetes expects of an older controller.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Final, Literal, TypeGuard

from rowlock.jsontext import KEY_BYTES, text_problem
from rowlock_operator.model import (
    Backoff,
    BatchJob,
    DeletionPolicy,
    Json,
    JsonObject,
    Master,
    Mode,
    Spec,
)

_INT32: Final = 2**31 - 1
_INT64: Final = 2**63 - 1
_PERCENTAGE: Final = re.compile(r"(100|[0-9]{1,2})([.][0-9]{1,6})?%", re.ASCII)
_SHOWN_CHARS: Final = 60

_DELIVERIES: Final[Mapping[str, Literal["AT_LEAST_ONCE", "AT_MOST_ONCE"]]] = {
    "AtLeastOnce": "AT_LEAST_ONCE",
    "AtMostOnce": "AT_MOST_ONCE",
}


def parse(found: object) -> BatchJob:
    """A BatchJob from an object of the API server, with a list of what is wrong with its spec."""
    whole = as_object(found)
    metadata = as_object(whole.get("metadata"))
    problems: list[str] = []
    spec = _spec(whole.get("spec"), problems)
    generation = metadata.get("generation")
    return BatchJob(
        name=_text(metadata.get("name")),
        namespace=_text(metadata.get("namespace")),
        uid=_text(metadata.get("uid")),
        generation=generation if is_whole(generation) else 0,
        resource_version=_text(metadata.get("resourceVersion")),
        labels=_texts(metadata.get("labels")),
        annotations=_texts(metadata.get("annotations")),
        created_at=parse_time(metadata.get("creationTimestamp")),
        deleting=metadata.get("deletionTimestamp") is not None,
        spec=spec,
        status=as_object(whole.get("status")),
        problems=tuple(problems),
    )


def is_object(value: object) -> TypeGuard[JsonObject]:
    """Whether it is a JSON object."""
    return isinstance(value, Mapping)


def as_object(value: object) -> JsonObject:
    """The value if it is a JSON object, else an empty one."""
    return value if is_object(value) else {}


def as_list(value: object) -> list[Json]:
    """The value if it is a JSON array, else an empty one."""
    return value if is_array(value) else []


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number of JSON; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def parse_time(value: object) -> datetime | None:
    """A moment as Kubernetes writes it; None if it is none."""
    if not isinstance(value, str):
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return None
    return moment if moment.tzinfo else None


def is_array(value: object) -> TypeGuard[list[Json]]:
    """Whether it is a JSON array."""
    return isinstance(value, list)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _texts(value: object) -> Mapping[str, str]:
    pairs = as_object(value).items()
    return MappingProxyType({key: text for key, text in pairs if isinstance(text, str)})


# -- the spec ----------------------------------------------------------------------------------


class _Fields:
    """The fields of one object; what cannot be read is None and becomes a problem."""

    def __init__(self, value: object, path: str, problems: list[str]) -> None:
        if value is not None and not is_object(value):
            problems.append(f"{path} is {_shown(value)}; an object is expected")
        self._fields = as_object(value)
        self._path = path
        self._problems = problems

    def within(self, name: str) -> _Fields:
        return _Fields(self._fields.get(name), f"{self._path}.{name}", self._problems)

    def text(self, name: str) -> str | None:
        value = self._fields.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or not value:
            self._refuse(name, value, "a text is expected")
            return None
        problem = text_problem(value)
        if not problem and len(value.encode()) > KEY_BYTES:
            problem = f"is longer than {KEY_BYTES} bytes"
        if problem:
            self._problems.append(f"{self._path}.{name} {problem}")
            return None
        return value

    def flag(self, name: str) -> bool:
        value = self._fields.get(name)
        if value is None or isinstance(value, bool):
            return value or False
        self._refuse(name, value, "true or false is expected")
        return False

    def whole(self, name: str, low: int, high: int = _INT32) -> int | None:
        value = self._fields.get(name)
        if value is None or (is_whole(value) and low <= value <= high):
            return value
        self._refuse(name, value, f"a whole number from {low} to {high} is expected")
        return None

    def mapping(self, name: str) -> JsonObject | None:
        value = self._fields.get(name)
        if value is None or is_object(value):
            return value
        self._refuse(name, value, "an object is expected")
        return None

    def choice(self, name: str, among: list[str]) -> str | None:
        value = self._fields.get(name)
        if value is None or (isinstance(value, str) and value in among):
            return value
        self._refuse(name, value, f"{' or '.join(among)} is expected")
        return None

    def count_or_percentage(self, name: str) -> int | str | None:
        value = self._fields.get(name)
        if value is None or (is_whole(value) and 0 <= value <= _INT32):
            return value
        if isinstance(value, str) and _PERCENTAGE.fullmatch(value):
            return value
        self._refuse(name, value, "a number of partitions, or a percentage such as 5%")
        return None

    def _refuse(self, name: str, value: object, expected: str) -> None:
        self._problems.append(f"{self._path}.{name} is {_shown(value)}; {expected}")


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of a million digits, a thousand brackets
        text = type(value).__name__
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def _spec(value: object, problems: list[str]) -> Spec:
    fields = _Fields(value, "spec", problems)
    job = fields.text("job")
    if job is None and not problems:
        problems.append("spec.job is missing: name a registered job")
    partitions = fields.within("partitions")
    backoff = partitions.within("backoff")
    delivery = partitions.choice("delivery", list(_DELIVERIES))
    policy = fields.choice("deletionPolicy", [one.value for one in DeletionPolicy])
    return Spec(
        job=job or "",
        parameters=fields.mapping("parameters"),
        instance_key=fields.text("instanceKey"),
        pool=fields.text("pool") or "default",
        priority=fields.whole("priority", -_INT32, _INT32) or 0,
        parallelism=fields.whole("parallelism", 1),
        suspend=fields.flag("suspend"),
        cancel=fields.flag("cancel"),
        restart_nonce=fields.whole("restartNonce", 0, _INT64) or 0,
        active_deadline_seconds=fields.whole("activeDeadlineSeconds", 1, _INT32),
        ttl_seconds=fields.whole("ttlSecondsAfterFinished", 0),
        deletion_policy=DeletionPolicy(policy) if policy else DeletionPolicy.CANCEL,
        delivery=_DELIVERIES[delivery] if delivery else None,
        max_attempts=partitions.whole("maxAttempts", 1, 1000),
        timeout_seconds=partitions.whole("timeoutSeconds", 1),
        max_failed=partitions.count_or_percentage("maxFailed"),
        backoff=Backoff(
            initial_seconds=backoff.whole("initialSeconds", 0),
            factor=backoff.whole("factor", 1, 100),
            max_seconds=backoff.whole("maxSeconds", 0),
        ),
        master=_master(fields.within("master")),
    )


def _master(fields: _Fields) -> Master:
    mode = fields.choice("mode", [one.value for one in Mode])
    return Master(
        mode=Mode(mode) if mode else Mode.JOB,
        slots=fields.whole("slots", 0, 1000),
        image=fields.text("image"),
        service_account=fields.text("serviceAccountName"),
        backoff_limit=fields.whole("backoffLimit", 0),
        resources=fields.mapping("resources"),
        pod_template=fields.mapping("podTemplate"),
    )
