"""JSON text that PostgreSQL's jsonb keeps without refusing or altering it.

`check_json` is the pre-check of every payload. It refuses what jsonb refuses (NUL, half surrogate
pairs), what it silently changes (a second field of the same name, digits that a double has not),
what is no JSON (NaN) and what is too large or too deep. It knows no types: those are the business
of `rowlock.contract`.

Ordinary text passes a quick look in C that costs about as much as parsing it. Whatever is unusual
gets a closer look, which finds the path and decides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Final, TypeAlias

from rowlock.errors import ContractError

__all__ = [
    "CHECKPOINT_BYTES",
    "DEPTH",
    "KEY_BYTES",
    "NUMBER_CHARS",
    "PARAMETERS_BYTES",
    "RESULT_BYTES",
    "SLICE_BYTES",
    "SUMMARY_BYTES",
    "check_json",
    "child_path",
    "path_text",
    "text_problem",
]

# Limits of the UTF-8 text of each payload, white space between tokens not counted.
PARAMETERS_BYTES: Final = 262_144
SLICE_BYTES: Final = 65_536
RESULT_BYTES: Final = 262_144
SUMMARY_BYTES: Final = 262_144
CHECKPOINT_BYTES: Final = 262_144
KEY_BYTES: Final = 512

DEPTH: Final = 32
"""How deep objects and lists may be nested."""

NUMBER_CHARS: Final = 400
"""How long a number may be written. The longest double without exponent has 343 characters."""

_OVERSIZE: Final = 8
"""Text longer than this many times its limit is refused without a look at its white space."""

_INTEGERS: Final = range(-(2**63), 2**63)
_DOUBLE_DIGITS: Final = 17
"""Significant digits that every double survives; more of them may be silently lost."""

# The possessive quantifiers keep both patterns linear on any text, also without a closing quote.
_STRING: Final = r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)'
_STRING_OR_SPACE: Final = re.compile(rf"({_STRING})|[ \t\r\n]+", re.DOTALL)
_STRING_OR_NUMBER: Final = re.compile(rf"{_STRING}|-?\d[\d.eE+-]*", re.DOTALL)

_BAD_ESCAPE: Final = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_BRACKETS: Final = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))


def check_json(raw: str | bytes, what: str, max_bytes: int) -> str:
    """Check a payload and return the text to store, number by number as jsonb will return it.

    Numbers with an exponent are written out (`1e22` becomes `10000000000000000000000.0`, because
    jsonb would make an integer of it) and minus zero becomes zero, which jsonb has no sign for.
    Nothing else changes.

    Args:
        raw: JSON text, or its UTF-8 bytes.
        what: What the payload is, for the error: "parameters", "slice", …
        max_bytes: Its limit in UTF-8 bytes, not counting white space between tokens.

    Raises:
        ContractError: The text is refused; the error names the path.
    """
    text = _within_size(_decoded(raw, what), what, max_bytes)
    if _is_ordinary(text):
        return text
    path, problem = _first_problem(text)
    if problem:
        raise ContractError(what, path, problem)
    return _within_size(_STRING_OR_NUMBER.sub(_written_out, text), what, max_bytes)


def child_path(path: str, part: str | int) -> str:
    """The path of a field or an item: `$.lines[3]["unit price"]`."""
    if isinstance(part, int):
        return f"{path}[{part}]"
    shown = part if len(part) <= 100 else f"{part[:100]}…"
    if part.isidentifier():
        return f"{path}.{shown}"
    return f"{path}[{json.dumps(shown, ensure_ascii=not shown.isprintable())}]"


def path_text(parts: Iterable[str | int]) -> str:
    """The path that leads through these fields and items from the root."""
    path = "$"
    for part in parts:
        path = child_path(path, part)
    return path


def text_problem(text: str) -> str:
    """Why PostgreSQL cannot hold the text; empty if it can."""
    if "\0" in text:
        return "contains the NUL character, which PostgreSQL cannot store; remove it"
    half = _SURROGATE.search(text)
    if half:
        return f"contains half of a surrogate pair ({ascii(half[0])[1:-1]}), which is no character"
    return ""


def _decoded(raw: str | bytes, what: str) -> str:
    if isinstance(raw, bytes):
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ContractError(what, "$", f"is not UTF-8 (byte {error.start})") from None
    half = None if raw.isascii() else _SURROGATE.search(raw)
    if half:
        problem = f"{text_problem(half[0])} (character {half.start()})"
        raise ContractError(what, "$", problem)
    return raw


def _within_size(text: str, what: str, max_bytes: int) -> str:
    size = len(text) if text.isascii() else len(text.encode())
    if max_bytes < size <= max_bytes * _OVERSIZE:
        # jsonb prints a space after each comma and colon: what was stored must come back in.
        size = len(_STRING_OR_SPACE.sub(r"\1", text).encode())
    if size > max_bytes:
        raise ContractError(what, "$", f"is {size} bytes long; at most {max_bytes} are allowed")
    return text


# -- the quick look ----------------------------------------------------------------------------


class _Unusual(Exception):
    """The text needs the closer look."""


def _unique_fields(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Unusual
    return found


def _integer(digits: str) -> int:
    if len(digits) > 18 or digits == "-0":
        raise _Unusual
    return 0


def _float(token: str) -> float:
    if len(token) > _DOUBLE_DIGITS or "e" in token or "E" in token or token.startswith("-0"):
        raise _Unusual
    return 0.0


def _constant(token: str) -> float:
    raise _Unusual(token)


_QUICK: Final = json.JSONDecoder(
    object_pairs_hook=_unique_fields,
    parse_int=_integer,
    parse_float=_float,
    parse_constant=_constant,
)


def _is_ordinary(text: str) -> bool:
    """Whether the text is valid and jsonb keeps it as it stands. False may also mean: not sure."""
    if "\\u" in text and _BAD_ESCAPE.search(text):
        return False
    if text.count("{") + text.count("[") > DEPTH and _may_be_too_deep(text):
        return False
    try:
        _QUICK.decode(text)
    except (_Unusual, ValueError, RecursionError):
        return False
    return True


def _may_be_too_deep(text: str) -> bool:
    """Take the innermost pairs of brackets away, one level at a time; brackets in strings count."""
    brackets = text.encode().translate(_BRACKETS, _NO_BRACKETS)
    for _ in range(DEPTH):
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


# -- the closer look ---------------------------------------------------------------------------


class _Number(str):
    """A number as it is written."""

    __slots__ = ()


class _Constant(str):
    """NaN, Infinity or -Infinity: what Python writes and JSON has not."""

    __slots__ = ()


class _Object:
    """The fields of an object, repeated ones included."""

    __slots__ = ("fields",)

    def __init__(self, fields: list[tuple[str, _Node]]) -> None:
        self.fields = fields


_Node: TypeAlias = _Object | list["_Node"] | str | bool | None


_PRECISE: Final = json.JSONDecoder(
    object_pairs_hook=_Object,
    parse_int=_Number,
    parse_float=_Number,
    parse_constant=_Constant,
)


def _first_problem(text: str) -> tuple[str, str]:
    """Path and description of the first problem; both empty if there is none."""
    if not text.strip():
        return "$", "is empty; JSON is expected"
    try:
        tree = _PRECISE.decode(text)
    except json.JSONDecodeError as error:
        return "$", f"is not JSON: {error.msg} (line {error.lineno}, column {error.colno})"
    except RecursionError:
        return "$", f"is nested deeper than {DEPTH} levels"
    return next(_problems(tree, "$", 0), ("", ""))


def _problems(node: _Node, path: str, depth: int) -> Iterator[tuple[str, str]]:
    if depth == DEPTH and isinstance(node, (_Object, list)):
        yield path, f"is nested deeper than {DEPTH} levels"
    elif isinstance(node, _Object):
        seen: set[str] = set()
        for key, value in node.fields:
            below = child_path(path, key)
            if key in seen:
                yield below, "is given twice; keep one"
            seen.add(key)
            problem = text_problem(key)
            if problem:
                yield path, f"has a field whose name {problem}"
            yield from _problems(value, below, depth + 1)
    elif isinstance(node, list):
        for index, item in enumerate(node):
            yield from _problems(item, child_path(path, index), depth + 1)
    elif isinstance(node, str):
        problem = _leaf_problem(node)
        if problem:
            yield path, problem


def _leaf_problem(leaf: str) -> str:
    if isinstance(leaf, _Constant):
        return f"{leaf} is no JSON; use null or a number"
    if not isinstance(leaf, _Number):
        return text_problem(leaf)
    if len(leaf) > NUMBER_CHARS:
        return f"is a number of {len(leaf)} characters; at most {NUMBER_CHARS} are allowed"
    if leaf.lstrip("-").isdigit():
        too_wide = int(leaf) not in _INTEGERS
        return f"{_shown(leaf)} does not fit into 64 bits; write it as a string" if too_wide else ""
    return _float_problem(leaf)


def _float_problem(token: str) -> str:
    value = float(token)
    digits = token.lower().split("e")[0].replace(".", "").strip("-0")
    if value in (float("inf"), float("-inf")) or (value == 0 and digits):
        return f"{_shown(token)} is beyond the range of a double; write it as a string"
    if len(digits) > _DOUBLE_DIGITS and Decimal(token) != Decimal(repr(value)):
        return f"{_shown(token)} has more digits than a double keeps; write it as a string"
    return ""


def _shown(token: str) -> str:
    return token if len(token) <= 60 else f"{token[:60]}…"


def _written_out(match: re.Match[str]) -> str:
    """A number as jsonb keeps it, so that a float stays a float; strings pass unchanged."""
    written = match[0]
    exponent = "e" in written or "E" in written
    if written[0] == '"' or not (exponent or written.startswith("-0")):
        return written
    if written == "-0":
        return "0"
    if float(written) == 0:
        return "0.0"
    if not exponent:
        return written
    plain = format(Decimal(written), "f")
    return plain if "." in plain else f"{plain}.0"
