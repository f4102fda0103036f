"""Strict contracts: payloads become typed values and back, or a `ContractError` with the path.

Whatever an author's types accept on their own, here `"3"` is not 3, unknown fields are refused, and
a value that would not come back equal is not written. PostgreSQL keeps the text of `encode` number
by number. Three rules follow, which a reader may not expect:

- Integers have 64 bits. A larger one is refused in every payload; write it as a string.
- A float is the nearest double. Minus zero is stored as zero, NaN and infinities are refused.
- Sets have no order, so a slice that holds one needs the author's own `key()`.

The module never imports author code and never touches a database.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final, Generic, TypeGuard, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from rowlock.contract_schema import (
    Schema,
    check_against_schema,
    closed,
    contract_hash,
    fields_at,
    got,
    has_sets,
    unknown_field,
)
from rowlock.errors import ContractError, JobDefinitionError
from rowlock.failure import ERROR_BYTES, clean_text, describe_error
from rowlock.job import AnyJob, has_key, job_title, summary_type, type_arguments
from rowlock.jsontext import (
    CHECKPOINT_BYTES,
    DEPTH,
    KEY_BYTES,
    PARAMETERS_BYTES,
    RESULT_BYTES,
    SLICE_BYTES,
    SUMMARY_BYTES,
    check_json,
    child_path,
    path_text,
    text_problem,
)

# What PostgreSQL can hold, JSON Schemas and the texts of errors have files of their own; for callers
# they are one subject.
__all__ = [
    "CHECKPOINT_BYTES",
    "DEPTH",
    "ERROR_BYTES",
    "KEY_BYTES",
    "PARAMETERS_BYTES",
    "RESULT_BYTES",
    "SLICE_BYTES",
    "SUMMARY_BYTES",
    "Codec",
    "Codecs",
    "check_against_schema",
    "check_json",
    "clean_text",
    "codecs",
    "contract_hash",
    "describe_error",
    "partition_key",
    "partition_weight",
    "schemas",
]

T = TypeVar("T")


class Codec(Generic[T]):
    """Reads and writes the payloads of one type."""

    def __init__(self, tp: Any, what: str, max_bytes: int) -> None:
        """Prepare the codec of a type.

        Args:
            tp: A pydantic model, dataclass, TypedDict, plain type, None or Any.
            what: What the payload is, for errors: "parameters", "slice", …
            max_bytes: The size limit of its JSON text.

        Raises:
            JobDefinitionError: The type cannot be written as JSON.
        """
        self.what = what
        self.max_bytes = max_bytes
        try:
            self._adapter: TypeAdapter[T] = TypeAdapter(tp)
            self._schema = closed(self._adapter.json_schema())
        except Exception as error:
            raise JobDefinitionError(
                f"the type of the {what}, {tp!r}, cannot be a contract: {_first_line(error)}; "
                "use a pydantic model, a dataclass, a TypedDict or a plain type"
            ) from error

    def decode(self, raw: str | bytes) -> T:
        """The value that the JSON text stands for.

        Raises:
            ContractError: The text breaks the contract; the error names the path.
        """
        text = check_json(raw, self.what, self.max_bytes)
        try:
            return self._validated(text)
        except Exception as error:
            raise self._refused(error, text) from error

    def encode(self, value: T) -> str:
        """The JSON text of a value, compact, as PostgreSQL will return it number by number.

        Raises:
            ContractError: The value is not of the type, or would not come back equal.
        """
        text = "null"
        try:
            # pydantic only warns of a value of the wrong type, and writes null for NaN: reading
            # the text back decides. It costs less than a second validation of the value.
            raw = self._adapter.dump_json(
                value, by_alias=True, warnings=False, exclude_computed_fields=True
            )
            text = check_json(raw, self.what, self.max_bytes)
            back = self._validated(text)
            # Without an __eq__ of its own a class is equal if all its fields come back equal.
            if back == value or not (changed := _changed(value, back)):
                return text
        except ContractError:
            raise
        except Exception as error:
            raise self._unwritable(value, error, text) from error
        raise ContractError(self.what, *changed)

    def schema(self) -> dict[str, Any]:  # Any: JSON Schema
        """The JSON Schema of what `decode` accepts."""
        return self._schema

    def _validated(self, text: str) -> T:
        # Run-time strictness reaches nested models whatever their own configuration says.
        return self._adapter.validate_json(text, strict=True, extra="forbid")

    def _unwritable(self, value: T, error: Exception, text: str) -> ContractError:
        try:
            place = next(_unstorable(value, "$", 0), None)
        except Exception:  # noqa: BLE001 - the value may refuse to be looked at, too
            place = None
        return ContractError(self.what, *place) if place else self._refused(error, text)

    def _refused(self, error: Exception, text: str) -> ContractError:
        if not isinstance(error, ValidationError):
            name = type(error).__name__
            return ContractError(self.what, "$", f"is refused: {name}: {_first_line(error)}")
        document = json.loads(text)
        found: dict[str, str] = {}
        for details in error.errors(include_url=False, include_context=False):
            parts = _parts_in(document, details["loc"], details["type"] in _MISSING)
            path = path_text(parts)
            problem = self._problem(details, parts)
            found[path] = f"{found[path]}, or {problem}" if path in found else problem
        (path, problem), *others = found.items()
        also = [f"; also {other}: {text}" for other, text in others[:3]]
        more = f"; and {len(others) - 3} more" if len(others) > 3 else ""
        return ContractError(self.what, path, problem + "".join(also) + more)

    def _problem(self, details: Any, parts: list[str | int]) -> str:
        """One of pydantic's error details, in our words."""
        kind: str = details["type"]
        if kind in _MISSING:
            return "is required and missing"
        if kind in _UNKNOWN:
            return unknown_field(fields_at(self._schema, parts[:-1]), str(parts[-1]))
        message: str = _EXPECTED.get(kind) or details["msg"]
        message = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
        if message.startswith("Input should be "):
            message = f"expected {message.removeprefix('Input should be ')}"
        return f"{message}, got {got(details['input'])}"


_MISSING: Final = frozenset(
    {
        "missing",
        "missing_argument",
        "missing_keyword_only_argument",
        "missing_positional_only_argument",
    }
)
_UNKNOWN: Final = frozenset({"extra_forbidden", "unexpected_keyword_argument"})
_EXPECTED: Final = {
    "int_type": "expected int",
    "float_type": "expected float",
    "string_type": "expected str",
    "bool_type": "expected bool",
    "list_type": "expected list",
    "dict_type": "expected object",
    "model_type": "expected object",
    "dataclass_type": "expected object",
    "none_required": "expected null",
}


# -- values that cannot be written -------------------------------------------------------------

_ANY: Final = TypeAdapter[Any](Any)


def _children(value: object) -> Iterable[tuple[Any, object]]:
    """The fields or items of a value, with their names or indices."""
    if isinstance(value, BaseModel):
        return [(name, getattr(value, name, None)) for name in type(value).model_fields]
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in fields(value)]
    if _is_object(value):
        return list(value.items())
    if _is_list(value):
        return list(enumerate(value))
    return ()


def _is_object(value: object) -> TypeGuard[dict[Any, Any]]:
    return isinstance(value, dict)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (list, tuple))


def _unstorable(value: object, path: str, depth: int) -> Iterator[tuple[str, str]]:
    """Where the value holds something that JSON or PostgreSQL has no place for."""
    if depth > DEPTH:
        yield path, f"is nested deeper than {DEPTH} levels, or refers to itself"
        return
    children = _children(value)
    for name, child in children:
        yield from _unstorable(child, _below(path, name), depth + 1)
    if isinstance(value, float) and value - value != 0:
        yield path, f"{value!r} is no JSON; use None or a number"
    elif isinstance(value, str) and text_problem(value):
        yield path, text_problem(value)
    elif not children:
        try:
            _ANY.dump_json(value)
        except Exception:  # noqa: BLE001 - whatever the serializer says, it is no JSON
            yield path, f"{got(value)} cannot be written as JSON"


def _changed(given: object, back: object) -> tuple[str, str] | None:
    """Where and how a value that was written would come back changed; None if nowhere."""
    return next(_unstorable(given, "$", 0), None) or next(_changes(given, back, "$"), None)


def _changes(given: object, back: object, path: str) -> Iterator[tuple[str, str]]:
    """Where a value differs from what came back of it."""
    below, below_back = dict(_children(given)), dict(_children(back))
    if type(given) is type(back) and below and below.keys() == below_back.keys():
        for name, child in below.items():
            yield from _changes(child, below_back[name], _below(path, name))
    elif given != back:
        yield path, f"is {got(given)}, which would come back as {got(back)}"


def _below(path: str, name: object) -> str:
    return child_path(path, name if isinstance(name, int) else str(name))


def _first_line(error: Exception) -> str:
    return clean_text(str(error).partition("\n")[0], 500)


def _parts_in(document: Any, loc: tuple[str | int, ...], missing: bool) -> list[str | int]:
    """The part of pydantic's location that is in the document.

    Locations also name the members of unions and such, which no reader would look for.
    """
    parts: list[str | int] = []
    for index, part in enumerate(loc):
        if _has(document, part):
            document = document[part]
            parts.append(part)
        elif missing and index == len(loc) - 1:
            parts.append(part)
    return parts


def _has(document: object, part: str | int) -> bool:
    if isinstance(part, str):
        return _is_object(document) and part in document
    return _is_list(document) and part < len(document)


# -- the contract of a job ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Codecs:
    """The four payload types of a job."""

    parameters: Codec[Any]
    slice: Codec[Any]
    result: Codec[Any]
    summary: Codec[Any]

    def schemas(self) -> dict[str, Schema]:
        """The JSON Schema of each, by its name."""
        return {
            "parameters": self.parameters.schema(),
            "slice": self.slice.schema(),
            "result": self.result.schema(),
            "summary": self.summary.schema(),
        }


def codecs(job: type[AnyJob]) -> Codecs:
    """The codecs of a job class.

    Raises:
        JobDefinitionError: A type cannot be written as JSON, or is no stable partition key.
    """
    parameters, part, result = type_arguments(job)
    try:
        found = Codecs(
            parameters=Codec(parameters, "parameters", PARAMETERS_BYTES),
            slice=Codec(part, "slice", SLICE_BYTES),
            result=Codec(result, "result", RESULT_BYTES),
            summary=Codec(summary_type(job), "summary", SUMMARY_BYTES),
        )
    except JobDefinitionError as error:
        raise JobDefinitionError(f"{job_title(job)}: {error}") from error
    if not has_key(job) and has_sets(found.slice.schema()):
        raise JobDefinitionError(
            f"{job_title(job)}: the slice holds a set, whose order differs between processes, so "
            "it makes no stable partition key; define key(), or use a list or tuple"
        )
    return found


def schemas(job: type[AnyJob]) -> dict[str, Schema]:
    """The JSON Schemas of a job: "parameters", "slice", "result" and "summary"."""
    return codecs(job).schemas()


# -- partition keys ----------------------------------------------------------------------------

_canonical = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode


def partition_key(job: AnyJob, value: Any, text: str) -> str:
    """The key of a partition: what the job's `key()` says, else a digest of the slice.

    Keys are compared byte by byte: "a" and "A", or two Unicode spellings of "é", are different.
    The digest does not depend on the order of the slice's fields.

    Args:
        job: The job.
        value: The slice.
        text: The slice as `Codec.encode` wrote it.

    Raises:
        ContractError: `key()` returned something that cannot be a key.
    """
    key: object = job.key(value)
    if key is None:
        digest = hashlib.sha256(_canonical(json.loads(text)).encode()).hexdigest()
        return f"sha256:{digest[:32]}"
    if not isinstance(key, str):
        raise ContractError("key", "$", f"key() returned {got(key)}; return a str or None")
    problem = text_problem(key)
    if problem:
        raise ContractError("key", "$", f"{key[:60]!a} {problem}")
    size = len(key.encode())
    if not 0 < size <= KEY_BYTES:
        raise ContractError("key", "$", f"{got(key)} has {size} bytes; use 1 to {KEY_BYTES}")
    return key


def partition_weight(job: AnyJob, value: Any) -> int:
    """The weight of a slice, from the job's `weight()`.

    Raises:
        ContractError: `weight()` returned no int of 32 bits.
    """
    weight: object = job.weight(value)
    if not isinstance(weight, int) or isinstance(weight, bool) or not -(2**31) <= weight < 2**31:
        raise ContractError(
            "weight", "$", f"weight() returned {got(weight)}; use an int of 32 bits"
        )
    return weight
