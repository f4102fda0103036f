"""How commands print: aligned plain tables, local times with their age, and JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

GAP: Final = "  "
CELL_MAX: Final = 60
"""Characters of a cell in a table; what is longer is cut, `--json` has it whole."""

NOTHING: Final = "-"

_STEPS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


# -- JSON --------------------------------------------------------------------------------------


def print_json(document: object) -> None:
    """Print one JSON document, indented: the whole output of a command."""
    print(json.dumps(document, default=as_json, ensure_ascii=False, indent=2))


def print_json_line(document: object) -> None:
    """Print one JSON object on a line of its own, at once: one of many."""
    print(json.dumps(document, default=as_json, ensure_ascii=False), flush=True)


def fields_of(value: DataclassInstance) -> dict[str, Any]:  # Any: the values of its fields
    """The fields of a value; unlike `dataclasses.asdict`, without a deep copy of their values."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def as_json(value: object) -> object:
    """What JSON has no form of its own for."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return fields_of(value)
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def compact(value: object, limit: int = CELL_MAX) -> str:
    """A JSON value in one short line."""
    return cut(json.dumps(value, default=as_json, ensure_ascii=False), limit)


# -- tables ------------------------------------------------------------------------------------


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str, indent: str = ""
) -> None:
    """Print rows under headings in aligned columns; numbers to the right.

    Args:
        headings: One word for each column.
        rows: The cells; None is shown as a dash.
        empty: What to print if there are no rows.
        indent: Put before each line.
    """
    table = [[cell(value) for value in row] for row in rows]
    if not table:
        print(f"{indent}{empty}")
        return
    right = [_are_numbers(column) for column in zip(*table, strict=True)]
    widths = [max(map(width, column)) for column in zip(headings, *table, strict=True)]
    for line in [list(headings), *table]:
        padded = [
            _padded(text, size, to_right)
            for text, size, to_right in zip(line, widths, right, strict=True)
        ]
        print(indent + GAP.join(padded).rstrip())


def print_fields(fields: Mapping[str, object]) -> None:
    """Print names and values below each other; None is left out."""
    shown = {name: value for name, value in fields.items() if value is not None}
    size = max(map(len, shown), default=0)
    for name, value in shown.items():
        print(f"{name:<{size}}{GAP}{printable(str(value))}")


def cell(value: object) -> str:
    """A value as the text of a cell."""
    return NOTHING if value is None or value == "" else cut(printable(str(value)))


def printable(text: str) -> str:
    """Text that cannot steer a terminal: keys and errors are written by authors."""
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def cut(text: str, limit: int = CELL_MAX) -> str:
    """Text of at most `limit` characters, marked if something was cut off."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def width(text: str) -> int:
    """Columns that a text takes in a terminal."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def _padded(text: str, size: int, to_right: bool) -> str:
    space = " " * (size - width(text))
    return space + text if to_right else text + space


def _are_numbers(column: Sequence[str]) -> bool:
    there = [text for text in column if text != NOTHING]
    return bool(there) and all(text.replace(".", "", 1).isdecimal() for text in there)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")


# -- times -------------------------------------------------------------------------------------


def local(moment: datetime | None) -> str | None:
    """A moment in this machine's time zone, in ISO form."""
    if moment is None:
        return None
    return moment.astimezone().isoformat(sep=" ", timespec="seconds")


def with_age(moment: datetime | None, now: datetime) -> str | None:
    """A moment, and how long ago it was by the database's clock."""
    if moment is None:
        return None
    return f"{local(moment)} ({age(moment, now)})"


def age(moment: datetime | None, now: datetime) -> str | None:
    """How long ago a moment was, in words."""
    if moment is None:
        return None
    seconds = (now - moment).total_seconds()
    if seconds < 0:
        return f"in {duration(-seconds)}"
    return f"{duration(seconds)} ago" if seconds >= 1 else "now"


def duration(seconds: float) -> str:
    """A length of time in its two largest units: `1.2 s`, `3 min 20 s`, `2 d 4 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    left = round(seconds)
    index = next(index for index, (size, _) in enumerate(_STEPS) if left >= size)
    size, unit = _STEPS[index]
    text = f"{left // size} {unit}"
    if size == 1:
        return text
    smaller, smaller_unit = _STEPS[index + 1]
    rest = left % size // smaller
    return f"{text} {rest} {smaller_unit}" if rest else text


def between(start: datetime | None, end: datetime | None) -> str | None:
    """The time from one moment to another."""
    if start is None or end is None:
        return None
    return duration(max(0.0, (end - start).total_seconds()))


def share(done: int | None, total: int | None) -> str | None:
    """How many of how many."""
    if done is None:
        return None
    return f"{done:,}" if total is None else f"{done:,}/{total:,}"


def warn(text: str) -> None:
    """Say something on standard error that is no reason to stop."""
    print(f"rowlock: {printable(text)}", file=sys.stderr)
