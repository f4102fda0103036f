"""The JSON Schemas of contracts: published by nodes, compared by hash, checked without the code.

`check_against_schema` lets a launch refuse wrong parameters on a machine that has none of the
author's code. The schema is a little wider than the types (it knows no author's validators), so
the node that decodes the payload has the last word.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast
from uuid import UUID

from rowlock.errors import ContractError, near_names
from rowlock.jsontext import PARAMETERS_BYTES, check_json, path_text

if TYPE_CHECKING:
    from jsonschema import ValidationError

__all__ = [
    "Schema",
    "absent_parameters",
    "check_against_schema",
    "closed",
    "contract_hash",
    "fields_at",
    "got",
    "has_sets",
    "unknown_field",
]

Schema: TypeAlias = dict[str, Any]  # Any: JSON Schema is JSON

# The keywords whose values are schemas: one, a list of them, or a map from names to them.
_ONE: Final = ("items", "additionalProperties", "propertyNames", "contains", "not")
_LIST: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAP: Final = ("properties", "patternProperties", "$defs")

# The other keywords that decide what is accepted. Titles, descriptions, defaults, examples and
# whatever an author adds decide nothing.
_CONSTRAINTS: Final = frozenset(
    {
        *("type", "enum", "const", "format", "pattern", "required", "uniqueItems", "multipleOf"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength"),
        *("minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains"),
    }
)


def _with_subschemas(schema: Schema, change: Callable[[Schema], Schema]) -> Schema:
    """A copy of the schema with each schema directly below replaced."""
    changed = dict(schema)
    for keyword in _ONE:
        if isinstance(schema.get(keyword), dict):  # true and false are schemas too
            changed[keyword] = change(schema[keyword])
    for keyword in _LIST:
        if keyword in schema:
            changed[keyword] = [change(member) for member in schema[keyword]]
    for keyword in _MAP:
        if keyword in schema:
            changed[keyword] = {name: change(member) for name, member in schema[keyword].items()}
    return changed


def closed(schema: Schema) -> Schema:
    """The schema with unknown fields forbidden in every object that lists its fields."""
    changed = _with_subschemas(schema, closed)
    if "properties" in changed:
        changed["additionalProperties"] = False
    return changed


def has_sets(schema: Schema) -> bool:
    """Whether the type holds a set, whose items come in another order in each process."""
    return '"uniqueItems": true' in json.dumps(schema)


# -- the hash ----------------------------------------------------------------------------------


def contract_hash(schemas: Mapping[str, Schema]) -> str:
    """16 hexadecimal digits that change when, and only when, what is accepted changes.

    They cover types, required fields, constraints and enums; not titles, docstrings, class names,
    defaults, or the order of fields.
    """
    canonical = {
        role: _canonical(schema, schema.get("$defs", {}), ()) for role, schema in schemas.items()
    }
    return hashlib.sha256(_ordered(canonical).encode()).hexdigest()[:16]


def _referred(schema: Schema) -> str:
    """The name of the definition that the schema refers to."""
    reference: str = schema["$ref"]
    return reference.removeprefix("#/$defs/")


def _ordered(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _canonical(schema: Schema, defs: Mapping[str, Schema], inside: tuple[str, ...]) -> Schema:
    """The constraints of a schema, with definitions in place of their names.

    A definition that refers to itself becomes the number of definitions to go up, so that the
    names of classes leave no trace.
    """
    if "$ref" in schema:
        name = _referred(schema)
        beside = {keyword: schema[keyword] for keyword in schema if keyword in _CONSTRAINTS}
        if name in inside:
            return {"up": len(inside) - inside.index(name), **beside}
        return {**_canonical(defs[name], defs, (*inside, name)), **beside}
    below = _with_subschemas(schema, lambda member: _canonical(member, defs, inside))
    kept = {
        keyword: value
        for keyword, value in below.items()
        if keyword in _CONSTRAINTS or keyword in (*_ONE, *_LIST, "properties", "patternProperties")
    }
    if "const" in kept:
        kept["enum"] = [kept.pop("const")]
    for keyword in ("anyOf", "oneOf", "allOf", "enum", "required"):
        if keyword in kept:
            kept[keyword] = sorted(kept[keyword], key=_ordered)
    return kept


# -- fields and messages -----------------------------------------------------------------------


def fields_at(schema: Schema, parts: Iterable[str | int]) -> set[str]:
    """The names of the fields that an object at this place may have."""
    defs: Mapping[str, Schema] = schema.get("$defs", {})
    here = list(_alternatives(schema, defs))
    for part in parts:
        here = [deeper for node in here for deeper in _step(node, part, defs)]
    return {name for node in here for name in node.get("properties", ())}


def _alternatives(schema: Schema, defs: Mapping[str, Schema]) -> Iterator[Schema]:
    """The schema, or the members of its unions, with references followed."""
    if "$ref" in schema:
        yield from _alternatives(defs[_referred(schema)], defs)
        return
    yield schema
    for keyword in ("anyOf", "oneOf", "allOf"):
        for member in schema.get(keyword, ()):
            yield from _alternatives(member, defs)


def _step(node: Schema, part: str | int, defs: Mapping[str, Schema]) -> Iterator[Schema]:
    if isinstance(part, str):
        below = node.get("properties", {}).get(part, node.get("additionalProperties"))
    else:
        listed = node.get("prefixItems", ())
        below = listed[part] if part < len(listed) else node.get("items")
    if isinstance(below, dict):  # true and false are schemas too, and None is none
        yield from _alternatives(cast("Schema", below), defs)


def unknown_field(known: Iterable[str], name: str) -> str:
    """What to say of a field that the type has not."""
    near = near_names(name, known)
    if near:
        return f"is no known field; did you mean {' or '.join(map(repr, near))}?"
    return f"is no known field; the fields are: {', '.join(sorted(known)[:20]) or 'none'}"


def got(value: object) -> str:
    """A value for a message: its type and, if it is short, itself."""
    if value is None:
        return "null"
    name = type(value).__name__
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a class of the author's may do anything
        return name
    shown = f"{text[:60]}…" if len(text) > 60 else text
    return shown if text.startswith((name, "<")) else f"{name} {shown}"


# -- launching without the author's code -------------------------------------------------------


def absent_parameters(schema: Mapping[str, Any]) -> str:
    """The JSON text of parameters that nobody gave: `{}`, or `null` for a job that takes nothing."""
    return "null" if schema.get("type") == "null" else "{}"


def check_against_schema(
    schema: Schema, raw: str | bytes, what: str, max_bytes: int = PARAMETERS_BYTES
) -> str:
    """Check a payload against a published schema and return the text to store.

    Raises:
        ContractError: The payload breaks the contract; the error names the path.
    """
    # A tenth of a second to import, and only a launch without the author's code needs it.
    import jsonschema

    library: Any = jsonschema  # Any: its stubs have holes
    text = check_json(raw, what, max_bytes)
    payload = json.loads(text, parse_float=_Float)
    formats = library.FormatChecker(formats=())
    formats.checks("date", raises=ValueError)(_is_date)
    formats.checks("uuid", raises=ValueError)(_is_uuid)
    found = library.Draft202012Validator(schema, format_checker=formats).iter_errors(payload)
    try:
        error: ValidationError | None = library.exceptions.best_match(found)
    except re.error:
        # A pattern in a dialect of regular expressions that is not Python's: the node has the last word.
        return text
    if error is not None:
        raise ContractError(what, *_explained(error))
    return text


# Of the formats, only those whose check is sure to agree with pydantic's.


def _is_date(value: object) -> bool:
    return not isinstance(value, str) or (len(value) == 10 and bool(date.fromisoformat(value)))


def _is_uuid(value: object) -> bool:
    return not isinstance(value, str) or bool(UUID(value))


class _Float(float):
    """A float that is no integer: JSON Schema takes 3.0 for one, the strict types do not."""

    __slots__ = ()

    def is_integer(self) -> bool:
        return False


def _explained(error: ValidationError) -> tuple[str, str]:
    """Path and problem of an error of jsonschema, in our words."""
    parts: list[str | int] = list(error.absolute_path)
    rule: Any = error.validator_value  # Any: the value of a keyword of JSON Schema
    value: Any = error.instance
    if error.validator == "additionalProperties":
        known: dict[str, Any] = cast("Schema", error.schema).get("properties", {})
        name = next(name for name in value if name not in known)
        return path_text([*parts, name]), unknown_field(known, name)
    if error.validator == "required":
        name = next(name for name in rule if name not in value)
        return path_text([*parts, name]), "is required and missing"
    shown = got(float(value) if isinstance(value, float) else value)
    if error.validator == "type":
        return path_text(parts), f"expected {rule}, got {shown}"
    if error.validator == "format":
        return path_text(parts), f"expected a {rule}, got {shown}"
    if error.validator in ("anyOf", "oneOf"):
        kinds = [str(member.get("type", "another form")) for member in rule]
        return path_text(parts), f"expected {' or '.join(kinds)}, got {shown}"
    return path_text(parts), f"{shown} breaks the rule {error.validator}: {rule}"
