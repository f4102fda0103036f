"""The parts of the demonstration that decide and that speak, without a database."""

import io
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console

from rowlock.db.views import Node
from rowlock.demo import closing, narration, tempo
from rowlock.demo.lookout import Fate, Happening, Tally
from rowlock.demo.screen import Lines, NodeLine, Screen, Silent, Step, Tone, View, choose_screen
from rowlock.demo.terminal import Terminal
from rowlock.demo.victim import Held, Holding, choose_victim
from rowlock.settings import Settings
from tests.support.demo_findings import an_end, held, the_findings

MOMENT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


# -- choosing the victim ---------------------------------------------------------------------------


def holding(node: str, *partitions: Held, master: bool = False) -> Holding:
    return Holding(node_id=uuid.uuid4(), node=node, is_master=master, partitions=partitions)


IDLE = holding("node-1")
WAITING = holding("node-2", held("a", started=False, halfway=True))
AT_THE_BEGINNING = holding("node-3", held("b", halfway=False))
HALFWAY = holding("node-4", held("c"))
BUSIER = holding("node-5", held("d"), held("e", halfway=False))
MASTER = holding("node-6", held("f"), master=True)


def test_a_node_dies_only_in_the_middle_of_a_partition() -> None:
    assert choose_victim([]) is None
    assert choose_victim([IDLE, WAITING, AT_THE_BEGINNING]) is None
    assert choose_victim([IDLE, WAITING, AT_THE_BEGINNING, HALFWAY]) is HALFWAY


def test_the_node_that_runs_most_comes_first() -> None:
    assert choose_victim([HALFWAY, BUSIER, MASTER]) is BUSIER


def test_the_master_can_be_demanded_or_left_alone() -> None:
    assert choose_victim([HALFWAY, BUSIER, MASTER], master=True) is MASTER
    assert choose_victim([HALFWAY, BUSIER], master=True) is None
    assert choose_victim([MASTER], master=False) is None


def test_a_node_can_be_spared() -> None:
    assert choose_victim([HALFWAY, BUSIER], spared=["node-5"]) is HALFWAY


def test_a_held_partition_says_how_far_it_is() -> None:
    assert str(held("2013-07-10", done="250 of 1004 flights settled")) == (
        "2013-07-10 (250 of 1004 flights settled)"
    )
    assert str(held("UA-2013H1")) == "UA-2013H1"


# -- the tempo -------------------------------------------------------------------------------------


@pytest.mark.parametrize("speed", [tempo.WATCHED, tempo.FAST])
def test_the_settings_of_the_nodes_keep_the_arithmetic(speed: tempo.Tempo) -> None:
    settings = Settings.from_environment(speed.environment())

    assert settings.beat_seconds * 5 == settings.unreachable_seconds
    assert settings.unreachable_seconds == settings.removal_grace_seconds
    assert settings.removal_seconds == speed.removal_seconds


@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_an_act_has_work_left_when_the_victims_comes_back(nodes: int) -> None:
    speed = tempo.WATCHED
    seconds = (speed.pace_ms(nodes=nodes, partitions=365) + tempo.WORK_MS) / 1000

    done_when_calm = speed.slots * nodes * speed.calm_seconds / seconds
    done_until_removal = speed.slots * (nodes - 1) * speed.removal_seconds / seconds

    assert done_when_calm + done_until_removal < 365


def test_the_heartbeat_is_told_beside_the_default() -> None:
    assert tempo.in_words(tempo.WATCHED) == (
        "Heartbeat 0.5 s, removal after 5 s of silence (defaults: 1 s and 10 s)."
    )


# -- the words -------------------------------------------------------------------------------------


def happening(event: str, key: str | None = None, **detail: Any) -> Happening:
    return Happening(
        id=1,
        at=MOMENT,
        event=event,
        node_id=uuid.UUID(int=1),
        node="node-2",
        key=key,
        detail=detail,
    )


def test_what_nodes_do_about_a_silent_one_is_told() -> None:
    lines = narration.of_happenings(
        [
            happening("node_unreachable"),
            happening("node_removed"),
            happening("partition_recovered", "2013-07-10", now="PENDING"),
            happening("partition_recovered", "2013-02-08", now="PENDING"),
            happening("partition_recovered", "UA-2013H1", now="FAILED"),
            happening("execution_ended"),
        ],
        removal_seconds=5.0,
    )

    assert [line.text for line in lines] == [
        "node-2 is UNREACHABLE, and keeps its work for now",
        "node-2 is REMOVED after 5 s of silence",
        "2013-07-10 and 2013-02-08 taken back, to run again elsewhere",
        "UA-2013H1 FAILED: started once, outcome unknown",
    ]


def test_what_goes_wrong_besides_is_told_too() -> None:
    lines = narration.of_happenings(
        [
            happening("node_returned"),
            happening("partition_failed", "a"),
            happening("partition_retried", "b"),
        ],
        removal_seconds=5.0,
    )

    assert [line.text for line in lines] == [
        "node-2 beats again",
        "a FAILED on node-2",
        "b is tried again after a failure on node-2",
    ]


def test_a_kill_is_told_with_what_it_hits() -> None:
    assert [line.text for line in narration.of_kill(MASTER)] == [
        "kill -9 node-6, the master of the execution, while it runs",
        "    f",
    ]


@pytest.mark.parametrize(
    "kept, where", [(250, "after 250 settled flights"), (0, "from its beginning")]
)
def test_a_second_attempt_is_told_with_its_place(kept: int, where: str) -> None:
    fate = Fate(
        id=1,
        key="2013-07-10",
        status="CLAIMED",
        attempt=2,
        node_id=uuid.uuid4(),
        node="node-3",
        started_at=MOMENT,
    )

    line = narration.of_second_attempt(replace(held("2013-07-10"), kept=kept), fate)

    assert line.text == f"2013-07-10 runs again: node-3, attempt 2, {where}"


def test_an_end_is_told() -> None:
    end = an_end("flights.payout", "FAILED", partitions=32, completed=30, attempts=32)

    assert narration.of_end(end).text == "flights.payout is FAILED: 30 of 32 completed, 2 failed"


def a_node(name: str, status: str = "ACTIVE", *, minutes: int = 0) -> Node:
    return Node(
        node_id=uuid.uuid4(),
        name=name,
        pool="demo",
        status=status,
        draining=False,
        slots=2,
        load=0,
        claims=0,
        beat=1,
        heartbeat_at=MOMENT,
        heartbeat_age_seconds=3.14,
        started_at=MOMENT + timedelta(minutes=minutes),
        jobs={},
        only_execution=None,
        labels={},
        orphans=[],
        version="0",
        evidence="on",
        removed_at=None,
        removed_reason=None,
        read_at=MOMENT,
    )


def test_each_name_shows_its_newest_incarnation() -> None:
    at_work, silent, gone, odd = (
        a_node("node-1"),
        a_node("node-2", "UNREACHABLE"),
        a_node("node-3", "REMOVED"),
        a_node("node-4", "UNREACHABLE"),
    )
    again = a_node("node-1", minutes=1)
    tally = Tally(node_id=again.node_id, completed=7, running=["2013-07-10"])

    lines = narration.of_nodes(
        ["node-1", "node-2", "node-3", "node-4", "node-5"],
        [again, at_work, silent, gone, odd],
        {again.node_id: tally},
        killed={silent.node_id, gone.node_id},
    )

    assert [(line.name, line.state, line.completed, list(line.running)) for line in lines] == [
        ("node-1", "", 7, ["2013-07-10"]),
        ("node-2", "killed, silent for 3.1 s", 0, []),
        ("node-3", "killed, removed", 0, []),
        ("node-4", "UNREACHABLE", 0, []),
        ("node-5", "starting", 0, []),
    ]


# -- the screens -----------------------------------------------------------------------------------

VIEW = View(
    completed=30,
    failed=2,
    total=32,
    nodes=[
        NodeLine(name="node-1", state="", completed=20, running=["UA-2013H1"]),
        NodeLine(name="node-2", state="killed, removed", tone=Tone.BAD, completed=10),
    ],
)


def perform(screen: Screen) -> None:
    screen.open("Title", ["intro"])
    step = Step("Flights", "many", began=0.0)
    screen.begin_step(step)
    screen.end_step(step)
    screen.begin_act("Act 1", ["about it"])
    screen.show(View(completed=0, failed=0, total=None))
    screen.show(VIEW)
    screen.event(1.25, "kill -9 node-2", Tone.BAD)
    screen.end_act()
    screen.end_act()
    screen.close(closing.close(the_findings()))
    screen.release()


def test_plain_lines_tell_everything_in_order() -> None:
    said: list[str] = []
    moments: Iterator[float] = iter([0.0, 0.0, 10.0])

    perform(Lines(said.append, clock=lambda: next(moments)))

    told = [line for line in said if line]
    assert told[:2] == ["Title", "intro"]
    assert told[2].startswith("  Flights      many (")
    assert told[3:5] == ["Act 1", "about it"]
    assert "    0.0 s  making the plan" in said
    assert (
        "   10.0 s  30/32 completed, 2 failed | node-1: runs 1, did 20; node-2: killed, removed"
    ) in said
    assert "    1.2 s  kill -9 node-2" in said
    assert said[-2].startswith("The ledger equals the reference")


def test_plain_progress_is_not_told_too_often() -> None:
    said: list[str] = []
    moments = iter([0.0, 10.0, 10.5, 13.0, 16.0])
    screen = Lines(said.append, clock=lambda: next(moments))
    screen.begin_act("Act", [])
    said.clear()

    screen.show(VIEW)
    screen.show(View(completed=31, failed=0, total=32))  # half a second later
    screen.show(View(completed=32, failed=0, total=32))
    screen.show(View(completed=32, failed=0, total=32))  # nothing new

    assert [line.split("completed")[0].strip() for line in said] == [
        "10.0 s  30/32",
        "13.0 s  32/32",
    ]


@pytest.mark.parametrize("columns", [80, 200])
def test_a_terminal_shows_bar_nodes_and_table(columns: int) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=columns, height=40, highlight=False)

    perform(Terminal(console))

    text = stream.getvalue()
    for part in ("Flights", "Act 1", "30 of 32 completed", "UA-2013H1", "killed, removed"):
        assert part in text
    assert "The ledger equals the reference" in text
    assert text.endswith("\x1b[?25h") or "\x1b[?25h" in text, "the cursor is there again"


def test_silence_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    perform(Silent())

    assert capsys.readouterr() == ("", "")


def test_json_and_files_get_no_live_screen() -> None:
    assert isinstance(choose_screen(as_json=True), Silent)
    assert isinstance(choose_screen(as_json=False), Lines)
