"""Reads the vendored flights file: a stream of days, never more than one of them in memory.

The file is text, so that `xz -dc flights.txt.xz | less` shows it, and it lies by columns within
each day, which makes it 1.6 MB where rows take 2.4 MB. DATA.md describes it and names its source;
`vendor.py` writes it. This module knows no database.
"""

from __future__ import annotations

import hashlib
import io
import lzma
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from importlib import resources
from typing import Final, TextIO

FILE_NAME: Final = "flights.txt.xz"
FILE = resources.files("rowlock.demo").joinpath(FILE_NAME)
FORMAT_LINE: Final = "rowlock flights 1"
NOTHING: Final = "-"
"""Stands for an absent value: no tail number, no departure, no arrival."""

COLUMNS: Final = (
    "carrier",
    "number",
    "origin",
    "destination",
    "distance_miles",
    "scheduled_departure",
    "tail_number",
    "departure_delay",
    "arrival_delay",
)
"""The lines of a day, in the order of the file."""

FLIGHTS: Final = 336_776
DAYS: Final = 365
CARRIERS: Final = 16
PLANES: Final = 3_322
CONTENT_SHA256: Final = "f0d2b25799ee9f4abe305c9ffc48c8c27fb4de1d40913bef255684d579dc1955"
"""Digest of the text. The compressed bytes may differ between versions of liblzma."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """An aeroplane of the fleet list."""

    tail_number: str
    seats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """All flights of one day, as text columns of equal length."""

    date: str
    """ISO form, for example 2013-01-31."""
    columns: tuple[list[str], ...]
    """One list for each name in `COLUMNS`; `NOTHING` where the source says NA."""

    def __len__(self) -> int:
        return len(self.columns[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """One scheduled flight."""

    flight_id: int
    """1 to `FLIGHTS`, in the order of the file: by date, carrier, number and origin."""
    flight_date: date
    carrier: str
    number: int
    origin: str
    destination: str
    distance_miles: int
    scheduled_departure: int
    """Local time as HHMM, for example 1755."""
    tail_number: str | None
    departure_delay: int | None
    """Minutes; negative is early; None: the flight was cancelled."""
    arrival_delay: int | None
    """Minutes; None: cancelled, or diverted to another airport."""


def carriers() -> dict[str, str]:
    """The names of the airlines by their code."""
    with _text() as text:
        return _read_carriers(text)


def planes() -> list[Plane]:
    """The fleet list, by tail number. About one flight in six uses a plane that is not in it."""
    with _text() as text:
        _read_carriers(text)
        return _read_planes(text)


def days() -> Iterator[Day]:
    """The days of the year in order, each with its flights.

    Raises:
        ValueError: The file is not what `vendor.py` wrote.
        lzma.LZMAError: The file is damaged.
    """
    with _text() as text:
        _read_carriers(text)
        _read_planes(text)
        for _ in range(_count(text, "days")):
            yield _read_day(text)


def flights() -> Iterator[Flight]:
    """Every flight of the year, typed, in the order of its id."""
    flight_id = 0
    for day in days():
        flight_date = date.fromisoformat(day.date)
        for row in zip(*day.columns, strict=True):
            flight_id += 1
            yield _flight(flight_id, flight_date, row)


def content_sha256() -> str:
    """The digest of the text that the file holds; equals `CONTENT_SHA256`."""
    digest = hashlib.sha256()
    with FILE.open("rb") as packed, lzma.LZMAFile(packed) as content:
        while block := content.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _text() -> Generator[TextIO]:
    with (
        FILE.open("rb") as packed,
        lzma.LZMAFile(packed) as content,
        io.TextIOWrapper(content, encoding="utf-8", newline="\n") as text,
    ):
        if (found := _line(text)) != FORMAT_LINE:
            raise ValueError(f"{FILE_NAME} begins with {found!r}, not {FORMAT_LINE!r}")
        yield text


def _line(text: TextIO) -> str:
    return text.readline().rstrip("\n")


def _count(text: TextIO, what: str) -> int:
    name, count = _line(text).split(" ")
    if name != what:
        raise ValueError(f"{FILE_NAME} has section {name!r} where {what!r} belongs")
    return int(count)


def _read_carriers(text: TextIO) -> dict[str, str]:
    found: dict[str, str] = {}
    for _ in range(_count(text, "carriers")):
        code, name = _line(text).split("\t")
        found[code] = name
    return found


def _read_planes(text: TextIO) -> list[Plane]:
    count = _count(text, "planes")
    tail_numbers, seats = _line(text).split(" "), _line(text).split(" ")
    if len(tail_numbers) != count:
        raise ValueError(f"{FILE_NAME} lists {len(tail_numbers)} planes, not {count}")
    return [
        Plane(tail_number=tail_number, seats=int(number))
        for tail_number, number in zip(tail_numbers, seats, strict=True)
    ]


def _read_day(text: TextIO) -> Day:
    day, count = _line(text).split(" ")
    columns = tuple(_line(text).split(" ") for _ in COLUMNS)
    lengths = {len(column) for column in columns}
    if lengths != {int(count)}:
        raise ValueError(
            f"{FILE_NAME}: {day} has columns of {sorted(lengths)} flights, not {count}"
        )
    return Day(date=day, columns=columns)


def _flight(flight_id: int, flight_date: date, row: tuple[str, ...]) -> Flight:
    carrier, number, origin, destination, distance, scheduled, tail, departure, arrival = row
    return Flight(
        flight_id=flight_id,
        flight_date=flight_date,
        carrier=carrier,
        number=int(number),
        origin=origin,
        destination=destination,
        distance_miles=int(distance),
        scheduled_departure=int(scheduled),
        tail_number=None if tail == NOTHING else tail,
        departure_delay=None if departure == NOTHING else int(departure),
        arrival_delay=None if arrival == NOTHING else int(arrival),
    )
