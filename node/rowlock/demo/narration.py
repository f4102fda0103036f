"""Puts what happened into words for a person: one sentence for each event. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple
from uuid import UUID

from rowlock.db.views import Node
from rowlock.demo.closing import listed
from rowlock.demo.findings import Ended
from rowlock.demo.lookout import Fate, Happening, Tally
from rowlock.demo.screen import NodeLine, Tone
from rowlock.demo.victim import Held, Holding


class Line(NamedTuple):
    """A sentence and how it feels."""

    text: str
    tone: Tone = Tone.PLAIN


def of_happenings(happenings: Sequence[Happening], *, removal_seconds: float) -> Iterator[Line]:
    """What nodes have noticed and done about each other."""
    for (event, node), group in groupby(happenings, key=lambda one: (one.event, one.node)):
        together = list(group)
        match event:
            case "node_unreachable":
                yield Line(f"{node} is UNREACHABLE, and keeps its work for now", Tone.BAD)
            case "node_returned":
                yield Line(f"{node} beats again")
            case "node_removed":
                yield Line(f"{node} is REMOVED after {removal_seconds:g} s of silence", Tone.BAD)
            case "partition_recovered":
                yield from _recovered(together)
            case "partition_failed":
                yield Line(f"{_keys(together)} FAILED on {node}", Tone.BAD)
            case "partition_retried":
                yield Line(f"{_keys(together)} is tried again after a failure on {node}", Tone.BAD)
            case _:
                pass  # told elsewhere, or of no interest to an audience


def of_kill(holding: Holding) -> Iterator[Line]:
    """A node dies."""
    master = ", the master of the execution," if holding.is_master else ""
    yield Line(f"kill -9 {holding.node}{master} while it runs", Tone.BAD)
    for held in holding.started:
        yield Line(f"    {held}", Tone.BAD)


def of_second_attempt(held: Held, fate: Fate) -> Line:
    """A partition of a dead node runs again."""
    where = f"after {held.kept} settled flights" if held.kept else "from its beginning"
    return Line(f"{fate.key} runs again: {fate.node}, attempt {fate.attempt}, {where}", Tone.GOOD)


def of_restart(node: str) -> Line:
    """A node that was killed is started again."""
    return Line(f"{node} is started again, as a new incarnation")


def of_end(ended: Ended) -> Line:
    """An execution has ended."""
    failed = f", {ended.failed} failed" if ended.failed else ""
    return Line(
        f"{ended.job} is {ended.status}: {ended.completed} of {ended.partitions} completed{failed}",
        Tone.GOOD if ended.status == "COMPLETED" else Tone.BAD,
    )


def of_nodes(
    names: Sequence[str],
    nodes: Sequence[Node],
    tallies: Mapping[UUID, Tally],
    *,
    killed: Collection[UUID],
) -> list[NodeLine]:
    """The newest incarnation of each name."""
    newest: dict[str, Node] = {}
    for node in sorted(nodes, key=lambda one: one.started_at):
        newest[node.name] = node
    return [_node_line(name, newest.get(name), tallies, killed) for name in names]


def _node_line(
    name: str, node: Node | None, tallies: Mapping[UUID, Tally], killed: Collection[UUID]
) -> NodeLine:
    if node is None:
        return NodeLine(name=name, state="starting", tone=Tone.QUIET, completed=0)
    tally = tallies.get(node.node_id)
    completed, running = (tally.completed, tally.running) if tally else (0, [])
    state, tone = "", Tone.PLAIN
    if node.node_id in killed:
        silent = f"killed, silent for {node.heartbeat_age_seconds:.1f} s"
        state = "killed, removed" if node.status == "REMOVED" else silent
        tone = Tone.BAD
    elif node.status != "ACTIVE":
        state, tone = node.status, Tone.BAD
    return NodeLine(name=name, state=state, tone=tone, completed=completed, running=running)


def _recovered(happenings: Sequence[Happening]) -> Iterator[Line]:
    for now, group in groupby(happenings, key=lambda one: str(one.detail.get("now"))):
        keys = _keys(list(group))
        if now == "PENDING":
            yield Line(f"{keys} taken back, to run again elsewhere")
        elif now == "FAILED":
            yield Line(f"{keys} FAILED: started once, outcome unknown", Tone.BAD)


def _keys(happenings: Sequence[Happening]) -> str:
    return listed([one.key or "?" for one in happenings])
