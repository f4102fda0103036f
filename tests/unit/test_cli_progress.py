"""Displays: what is worth a line, how fast things go, and the bar."""

import io
import json
import re

import pytest

from rowlock.cli import progress
from rowlock.cli.progress import Bar, JsonLines, Lines, Snapshot, Speedometer

Captured = pytest.CaptureFixture[str]


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def a_snapshot(
    completed: int = 0, *, status: str = "RUNNING", total: int | None = 100, **more: int
) -> Snapshot:
    counts = {"failed": 0, "cancelled": 0, **more}
    return Snapshot(status=status, total=total, completed=completed, **counts)


def test_the_rate_looks_back_a_few_seconds_and_says_how_much_is_left() -> None:
    clock = Clock()
    speed = Speedometer(clock)
    assert speed.pace(a_snapshot(0)).per_second is None

    clock.now += 2
    pace = speed.pace(a_snapshot(20))
    assert (pace.per_second, pace.left_seconds) == (10, 8)

    for completed in range(21, 41):
        clock.now += 1
        pace = speed.pace(a_snapshot(completed))
    assert pace.per_second == pytest.approx(1)


def test_there_is_no_rate_of_nothing_or_of_a_moment() -> None:
    clock = Clock()
    speed = Speedometer(clock)
    speed.pace(a_snapshot(0))
    clock.now += 0.5
    assert speed.pace(a_snapshot(5)).per_second is None
    clock.now += 50
    speed.pace(a_snapshot(5))
    clock.now += 50
    assert speed.pace(a_snapshot(5)).per_second is None


def test_a_plan_of_nothing_is_shown_as_what_it_is() -> None:
    clock = Clock()
    speed = Speedometer(clock)
    nothing = a_snapshot(0, status="COMPLETED", total=0)
    speed.pace(nothing)
    clock.now += 10

    assert progress.details(nothing, speed.pace(nothing)) == "0/0 completed"


def test_without_a_plan_there_is_a_rate_but_no_end() -> None:
    clock = Clock()
    speed = Speedometer(clock)
    speed.pace(a_snapshot(0, total=None))
    clock.now += 2
    pace = speed.pace(a_snapshot(4, total=None))
    assert (pace.per_second, pace.left_seconds) == (2, None)


def test_plain_lines_come_at_most_once_a_second_and_only_for_news(capsys: Captured) -> None:
    clock = Clock()
    lines = Lines(clock)
    for moment, completed in [(0, 0), (0.5, 1), (1.1, 2), (3, 2), (4, 3)]:
        clock.now = 100 + moment
        lines.show(a_snapshot(completed))

    said = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in capsys.readouterr().out.splitlines()]
    assert [line.partition(" completed")[0] for line in said] == [
        "RUNNING 0/100",
        "RUNNING 2/100",
        "RUNNING 3/100",
    ]


@pytest.mark.parametrize(
    "snapshot, words",
    [
        (a_snapshot(total=None, status="PLANNING"), "PLANNING no plan yet"),
        (a_snapshot(3), "RUNNING 3/100 completed"),
        (
            a_snapshot(3, failed=2, cancelled=1, running=4, nodes=1),
            "RUNNING 3/100 completed, 2 failed, 1 cancelled, 4 running on 1 node",
        ),
        (a_snapshot(3, running=0, nodes=0), "RUNNING 3/100 completed, 0 running"),
        (
            a_snapshot(100, status="COMPLETED", running=0, nodes=0),
            "COMPLETED 100/100 completed",
        ),
    ],
)
def test_snapshots_in_words(snapshot: Snapshot, words: str) -> None:
    pace = progress.Pace(per_second=None, left_seconds=None)
    assert progress.describe(snapshot, pace) == words


def test_the_pace_in_words() -> None:
    pace = progress.Pace(per_second=12.345, left_seconds=90)
    assert (
        progress.describe(a_snapshot(3), pace) == "RUNNING 3/100 completed, 12.3/s, 1 min 30 s left"
    )


def test_json_lines_are_objects_with_the_same_rule(capsys: Captured) -> None:
    clock = Clock()
    lines = JsonLines(clock)
    lines.show(a_snapshot(1, running=2, nodes=1))
    lines.show(a_snapshot(2, running=2, nodes=1))
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {
        "type": "progress",
        "status": "RUNNING",
        "total": 100,
        "completed": 1,
        "failed": 0,
        "cancelled": 0,
        "running": 2,
        "nodes": 1,
        "per_second": None,
        "left_seconds": None,
    }


class Terminal(io.StringIO):
    """Standard output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "as_json, terminal, chosen",
    [(True, True, JsonLines), (False, False, Lines), (False, True, Bar)],
)
def test_the_bar_is_for_people_at_a_terminal(
    as_json: bool, terminal: bool, chosen: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", Terminal() if terminal else io.StringIO())
    assert type(progress.choose_display(as_json=as_json)) is chosen


def test_without_rich_a_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", Terminal())

    def find_nothing(_name: str) -> None:
        return None

    monkeypatch.setattr(progress, "find_spec", find_nothing)
    assert type(progress.choose_display(as_json=False)) is Lines


def test_the_bar_shows_the_counts_and_leaves_the_terminal_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    bar = Bar()
    bar.show(a_snapshot(0, status="PLANNING", total=None))
    bar.show(a_snapshot(30, failed=1, running=2, nodes=2))
    bar.close()
    bar.close()

    shown = terminal.getvalue()
    assert "RUNNING" in shown
    assert "30/100 completed, 1 failed, 2 running on 2 nodes" in shown
    assert shown.count("\x1b[?25h") == shown.count("\x1b[?25l") == 1  # the cursor is back
