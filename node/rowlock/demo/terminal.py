"""The live screen of the demonstration, for a terminal where rich is installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rowlock.demo.closing import Closing
from rowlock.demo.screen import LABEL_WIDTH, NodeLine, Step, Tone, View, stamp

BAR_WIDTH: Final = 40
FRAMES_PER_SECOND: Final = 8
STYLES: Final = {Tone.PLAIN: "", Tone.BAD: "red", Tone.GOOD: "green", Tone.QUIET: "dim"}


def is_capable() -> bool:
    """Whether the terminal can move its cursor."""
    return not Console().is_dumb_terminal


class Terminal:
    """Events scroll up; below them a bar and the nodes show how things are at the moment."""

    has_audience = True

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._live: Live | None = None

    def open(self, title: str, lines: Sequence[str]) -> None:
        """Title and introduction."""
        self._heading(title, lines)

    def begin_step(self, step: Step) -> None:
        """A spinner beside the name."""
        self._show(Spinner("dots", text=Text(f" {step.name}"), style="cyan"))

    def end_step(self, step: Step) -> None:
        """A tick, and what it has come to."""
        self._stop()
        line = Text("  ")
        line.append("✓ ", "green")
        line.append(f"{step.name:<{LABEL_WIDTH}}", "bold")
        line.append(step.text)
        line.append(f"  {step.seconds:.1f} s", "dim")
        self._console.print(line)

    def begin_act(self, title: str, lines: Sequence[str]) -> None:
        """Title and introduction; the live part comes with the first view."""
        self._heading(title, lines)

    def show(self, view: View) -> None:
        """The live part."""
        self._show(_scene(view))

    def event(self, seconds: float, text: str, tone: Tone = Tone.PLAIN) -> None:
        """A line above the live part."""
        line = Text("  ")
        line.append(f"{stamp(seconds)}  ", "dim")
        line.append(text, STYLES[tone])
        self._console.print(line)

    def end_act(self) -> None:
        """Only the events stay."""
        self._stop()

    def close(self, closing: Closing) -> None:
        """The table, what a person must look at, and the verdict."""
        self._console.print()
        self._console.print(_table(closing))
        self._console.print()
        for line in closing.unknown:
            self._console.print(Text(line))
        if closing.unknown:
            self._console.print()
        self._console.print(Text(closing.verdict, "bold green" if closing.ok else "bold red"))
        for note in closing.notes:
            self._console.print(Text(note))

    def release(self) -> None:
        """Show the cursor again."""
        self._stop()

    def _heading(self, title: str, lines: Sequence[str]) -> None:
        self._console.print()
        self._console.print(Text(title, "bold"))
        for line in lines:
            self._console.print(Text(line, "dim"))
        self._console.print()

    def _show(self, what: RenderableType) -> None:
        if self._live is None:
            self._live = Live(
                console=self._console, transient=True, refresh_per_second=FRAMES_PER_SECOND
            )
            self._live.start()
        self._live.update(what)

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _scene(view: View) -> RenderableType:
    if view.total is None:
        return Text("\n  making the plan", "dim")
    done = view.completed + view.failed
    progress = Table.grid(padding=(0, 2))
    counts = Text(f"{view.completed} of {view.total} completed")
    if view.failed:
        counts.append(f", {view.failed} failed", "red")
    progress.add_row("", ProgressBar(total=view.total, completed=done, width=BAR_WIDTH), counts)
    nodes = Table.grid(padding=(0, 2))
    for node in view.nodes:
        nodes.add_row("", *_node_row(node))
    return Group("", progress, "", nodes)


def _node_row(node: NodeLine) -> list[RenderableType]:
    keys = "  ".join(node.running)
    if node.state:
        style = STYLES[node.tone]
        return [Text(node.name, style), Text(node.state, style), Text(keys, style)]
    return [Text(node.name, "bold"), Text(f"{node.completed} done", "dim"), Text(keys)]


def _table(closing: Closing) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    for heading in closing.headings:
        table.add_column(heading)
    for row in closing.rows:
        table.add_row(Text(row.label, "dim"), row.settle, row.payout)
    return table
