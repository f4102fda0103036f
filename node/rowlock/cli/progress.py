"""Shows how far an execution is: a live bar, plain lines, or JSON lines.

A display is told what is known as often as its caller likes, and decides by itself what to print.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Protocol

from rowlock.cli import output
from rowlock.protocol.statuses import ENDED

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_SECONDS: Final = 1.0
"""Least time between two plain lines."""

RATE_SECONDS: Final = 10.0
"""How far back the rate looks."""

RATE_MIN_SECONDS: Final = 1.0
"""A rate over less would only be noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """How far an execution is."""

    status: str
    total: int | None
    """None before the plan is sealed."""
    completed: int
    failed: int
    cancelled: int
    running: int | None = None
    """None: not known at the moment."""
    nodes: int | None = None

    @property
    def done(self) -> int:
        """Partitions that have ended."""
        return self.completed + self.failed + self.cancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast an execution goes, and how long it will take if nothing changes."""

    per_second: float | None
    left_seconds: float | None


class Display(Protocol):
    """Where progress is shown."""

    def show(self, snapshot: Snapshot) -> None:
        """Take note of what is known; print it if it is worth it."""

    def close(self) -> None:
        """Leave the terminal as it was. May be called twice."""


class Speedometer:
    """Computes the pace from what has ended within the last seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()

    def pace(self, snapshot: Snapshot) -> Pace:
        """Take note of a snapshot and say how fast things go."""
        now = self._clock()
        self._seen.append((now, snapshot.done))
        # One sample older than the window stays, so that the window is always covered.
        while len(self._seen) > 2 and self._seen[1][0] <= now - RATE_SECONDS:
            self._seen.popleft()
        began, done = self._seen[0]
        if now - began < RATE_MIN_SECONDS or snapshot.done <= done:
            return Pace(per_second=None, left_seconds=None)
        rate = (snapshot.done - done) / (now - began)
        left = None if snapshot.total is None else (snapshot.total - snapshot.done) / rate
        return Pace(per_second=rate, left_seconds=left)


def choose_display(*, as_json: bool) -> Display:
    """The display for this output: JSON lines, a bar where a person watches, else plain lines."""
    if as_json:
        return JsonLines()
    # find_spec does not import it: that costs a tenth of a second.
    if sys.stdout.isatty() and find_spec("rich") is not None:
        return Bar()
    return Lines()


class Lines:
    """Plain lines: at most one a second, and only when something has changed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._speed = Speedometer(clock)
        self._shown: Snapshot | None = None
        self._shown_at = float("-inf")

    def show(self, snapshot: Snapshot) -> None:
        """Print a line if it is time for one."""
        pace = self._speed.pace(snapshot)
        if snapshot == self._shown or self._clock() - self._shown_at < LINE_SECONDS:
            return
        self._shown, self._shown_at = snapshot, self._clock()
        self._print(snapshot, pace)

    def close(self) -> None:
        """Nothing is left open."""

    def _print(self, snapshot: Snapshot, pace: Pace) -> None:
        moment = datetime.now().astimezone().strftime("%H:%M:%S")
        print(f"{moment} {describe(snapshot, pace)}", flush=True)


class JsonLines(Lines):
    """As `Lines`, with a JSON object in each line."""

    def _print(self, snapshot: Snapshot, pace: Pace) -> None:
        output.print_json_line(
            {
                "type": "progress",
                **output.fields_of(snapshot),
                "per_second": _rounded(pace.per_second),
                "left_seconds": _rounded(pace.left_seconds),
            }
        )


class Nothing:
    """For a command whose output is one JSON document."""

    def show(self, snapshot: Snapshot) -> None:
        """Print nothing."""

    def close(self) -> None:
        """Nothing is left open."""


class Bar:
    """A live bar, for a terminal and with rich installed."""

    def __init__(self) -> None:
        self._speed = Speedometer()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def show(self, snapshot: Snapshot) -> None:
        """Update the bar."""
        text = details(snapshot, self._speed.pace(snapshot))
        if self._progress is None or self._task is None:
            self._progress = _bar()
            self._task = self._progress.add_task(snapshot.status, total=None, text=text)
            self._progress.start()
        self._progress.update(
            self._task,
            description=snapshot.status,
            total=snapshot.total,
            completed=snapshot.done,
            text=text,
        )

    def close(self) -> None:
        """Take the bar away; what follows says how it ended."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = self._task = None


def _bar() -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns: tuple[Any, ...] = (
        TextColumn("{task.description:<9}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[text]}", markup=False),
        TimeElapsedColumn(),
    )
    return Progress(*columns, transient=True, refresh_per_second=8)


def describe(snapshot: Snapshot, pace: Pace) -> str:
    """A snapshot in words."""
    return f"{snapshot.status} {details(snapshot, pace)}"


def details(snapshot: Snapshot, pace: Pace | None = None) -> str:
    """The counts of a snapshot, and how fast it goes, in words."""
    if snapshot.total is None:
        return "no plan yet"
    parts = [f"{snapshot.completed}/{snapshot.total} completed"]
    if snapshot.failed:
        parts.append(f"{snapshot.failed} failed")
    if snapshot.cancelled:
        parts.append(f"{snapshot.cancelled} cancelled")
    if snapshot.running is not None and snapshot.status not in ENDED:
        on = f" on {_several(snapshot.nodes, 'node')}" if snapshot.nodes else ""
        parts.append(f"{snapshot.running} running{on}")
    if pace is not None and pace.per_second is not None:
        parts.append(f"{pace.per_second:.3g}/s")
    if pace is not None and pace.left_seconds is not None and snapshot.done < snapshot.total:
        parts.append(f"{output.duration(pace.left_seconds)} left")
    return ", ".join(parts)


def _several(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
