"""Where the story is told: plain lines, or nowhere. `terminal.py` has the live form.

A screen is told what happens and decides how it looks; it knows nothing of the database.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from importlib.util import find_spec
from typing import Final, Protocol

from rowlock.demo.closing import Closing

PROGRESS_SECONDS: Final = 2.0
"""Least time between two plain lines of progress."""

LABEL_WIDTH: Final = 12


class Tone(Enum):
    """How an event feels."""

    PLAIN = "plain"
    BAD = "bad"
    GOOD = "good"
    QUIET = "quiet"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLine:
    """One node, for a person."""

    name: str
    state: str
    tone: Tone = Tone.PLAIN
    completed: int
    running: Sequence[str] = ()
    """Keys of partitions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """How far an act is."""

    completed: int
    failed: int
    total: int | None
    """None before the plan is made."""
    nodes: Sequence[NodeLine] = ()


@dataclass(slots=True)
class Step:
    """A step of the preparations; what it has come to is told when it ends."""

    name: str
    text: str = ""
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """How long it has taken."""
        return time.monotonic() - self.began


class Screen(Protocol):
    """What every screen can do."""

    has_audience: bool
    """False: nobody sees anything, so nobody need look for anything to show."""

    def open(self, title: str, lines: Sequence[str]) -> None:
        """Begin."""

    def begin_step(self, step: Step) -> None:
        """A step of the preparations begins."""

    def end_step(self, step: Step) -> None:
        """It has ended well."""

    def begin_act(self, title: str, lines: Sequence[str]) -> None:
        """An act begins."""

    def show(self, view: View) -> None:
        """What is to be seen now; called often."""

    def event(self, seconds: float, text: str, tone: Tone = Tone.PLAIN) -> None:
        """Something has happened, so many seconds after the act began."""

    def end_act(self) -> None:
        """An act has ended. May be called twice."""

    def close(self, closing: Closing) -> None:
        """The end: the table, and what it means."""

    def release(self) -> None:
        """Leave the terminal as it was, whatever happens. May be called twice."""


@contextmanager
def step(screen: Screen, name: str) -> Generator[Step]:
    """A step of the preparations, shown while it lasts."""
    one = Step(name)
    screen.begin_step(one)
    yield one
    screen.end_step(one)


def choose_screen(*, as_json: bool) -> Screen:
    """The screen for this output: none for JSON, a live one where a person watches, else lines."""
    if as_json:
        return Silent()
    # find_spec does not import it: that costs a tenth of a second.
    if sys.stdout.isatty() and find_spec("rich") is not None:
        from rowlock.demo.terminal import Terminal, is_capable

        if is_capable():
            return Terminal()
    return Lines()


class Silent:
    """Tells nothing; the output is one JSON document."""

    has_audience = False

    def open(self, title: str, lines: Sequence[str]) -> None:
        """Nothing."""

    def begin_step(self, step: Step) -> None:
        """Nothing."""

    def end_step(self, step: Step) -> None:
        """Nothing."""

    def begin_act(self, title: str, lines: Sequence[str]) -> None:
        """Nothing."""

    def show(self, view: View) -> None:
        """Nothing."""

    def event(self, seconds: float, text: str, tone: Tone = Tone.PLAIN) -> None:
        """Nothing."""

    def end_act(self) -> None:
        """Nothing."""

    def close(self, closing: Closing) -> None:
        """Nothing."""

    def release(self) -> None:
        """Nothing."""


class Lines:
    """Plain lines, for a log or a terminal without rich."""

    has_audience = True

    def __init__(
        self,
        write: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write or _print
        self._clock = clock
        self._shown_at = float("-inf")
        self._shown: View | None = None
        self._began = 0.0

    def open(self, title: str, lines: Sequence[str]) -> None:
        """Title and introduction."""
        self._say("", title, *lines, "")

    def begin_step(self, step: Step) -> None:
        """Nothing: its end says it all."""

    def end_step(self, step: Step) -> None:
        """One line."""
        self._say(f"  {step.name:<{LABEL_WIDTH}} {step.text} ({step.seconds:.1f} s)")

    def begin_act(self, title: str, lines: Sequence[str]) -> None:
        """Title and introduction."""
        self._began = self._clock()
        self._shown = None
        self._say("", title, *lines, "")

    def show(self, view: View) -> None:
        """A line every two seconds, and only if something has changed."""
        now = self._clock()
        if view == self._shown or now - self._shown_at < PROGRESS_SECONDS:
            return
        self._shown, self._shown_at = view, now
        self._say(f"  {stamp(now - self._began)}  {progress_text(view)}")

    def event(self, seconds: float, text: str, tone: Tone = Tone.PLAIN) -> None:  # noqa: ARG002
        """One line."""
        self._say(f"  {stamp(seconds)}  {text}")

    def end_act(self) -> None:
        """Nothing."""

    def close(self, closing: Closing) -> None:
        """The table in aligned columns."""
        self._say("", *closing.lines())

    def release(self) -> None:
        """Nothing."""

    def _say(self, *lines: str) -> None:
        for line in lines:
            self._write(line)


def progress_text(view: View) -> str:
    """A view in one line."""
    if view.total is None:
        return "making the plan"
    failed = f", {view.failed} failed" if view.failed else ""
    nodes = "; ".join(f"{node.name}: {node_text(node)}" for node in view.nodes)
    return f"{view.completed}/{view.total} completed{failed} | {nodes}"


def node_text(node: NodeLine) -> str:
    """A node's state in a few words."""
    if node.state:
        return node.state
    return f"runs {len(node.running)}, did {node.completed}"


def stamp(seconds: float) -> str:
    """How long after the beginning of an act."""
    return f"{seconds:5.1f} s"


def _print(line: str) -> None:
    print(line, flush=True)
