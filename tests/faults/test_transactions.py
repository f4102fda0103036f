"""Rows that author code writes with ctx.transaction(), while processes die at any moment."""

import random
import signal
import time

import pytest

from tests.support import seeds
from tests.support.fault_jobs import part, step
from tests.support.fleet import Fleet, NodeProcess, eventually
from tests.support.supervisor import send
from tests.support.waiting import wait_until

CHUNKED, ITEMS = 4, 400
WHOLE, ROWS = 60, 5


@seeds.several(seeds.SEEDS)
def test_rows_are_written_once_whenever_a_process_is_killed(fleet: Fleet, seed: int) -> None:
    """kill -9 of executors and of whole nodes at random moments, while chunks commit with their
    checkpoint and whole attempts with their completion: every item is there exactly once."""
    rng = random.Random(seed)
    nodes = [fleet.node(f"n{n}", slots=2) for n in range(3)]
    chunks = {"items": ITEMS, "size": 4}
    run = fleet.request(
        parts=[
            *(part(f"c{n}", step("chunks", chunks), weight=1) for n in range(CHUNKED)),
            *(part(f"w{n}", step("rows", ROWS)) for n in range(WHOLE)),
        ],
        max_attempts=1000,
    )
    eventually(lambda: fleet.ledger().of("chunk"), "chunks are written")

    for number in range(12):
        pause_until(time.monotonic() + rng.uniform(0.01, 0.25))
        kill_one(fleet, nodes, rng, whole=number in {3, 8})

    fleet.wait(run)
    written = fleet.rows(
        "SELECT key, count(*) AS rows, count(DISTINCT item) AS items FROM fleet.effects GROUP BY key"
    )
    assert {row.key: (row.rows, row.items) for row in written} == {
        **{f"c{n}": (ITEMS, ITEMS) for n in range(CHUNKED)},
        **{f"w{n}": (ROWS, ROWS) for n in range(WHOLE)},
    }
    assert any(row.claims > 1 for row in fleet.rows_of(run)), "something was killed at work"


def pause_until(moment: float) -> None:
    """Let the nodes work until then."""
    wait_until(lambda: time.monotonic() > moment, what="a moment")


def kill_one(fleet: Fleet, nodes: list[NodeProcess], rng: random.Random, *, whole: bool) -> None:
    """Kill an executor, or a node, which another takes the place of."""
    at = rng.randrange(len(nodes))
    if whole:
        nodes[at].kill()
        nodes[at].wait_gone()
        nodes[at] = fleet.node(nodes[at].name + "x", slots=2)
        return
    for process in nodes[at].executors()[:1]:
        send(process, signal.SIGKILL)


@pytest.mark.parametrize("form", ["whole", "chunked"])
def test_a_process_that_dies_around_its_commit_leaves_all_of_it_or_nothing(
    fleet: Fleet, form: str
) -> None:
    """An executor dies just before its first COMMIT, its successor just after the one that follows: the rows and
    what says that they are there (the completion, or the checkpoint) stand or fall together. An effect
    elsewhere is repeated, under the same idempotency key.

    Reported as term-llm PR#840 and agenda PR#1346: the work is done, and its final status is not written.
    """
    points = f"commit:before:kill={fleet.path('before')};commit:after:kill={fleet.path('after')}"
    fleet.node("one", failpoint=points)
    work = step("rows", 4) if form == "whole" else step("chunks", {"items": 4, "size": 2})
    run = fleet.request(parts=[part("a", step("effect", "paid"), work)])

    fleet.wait(run)

    written = fleet.rows("SELECT item, attempt FROM fleet.effects ORDER BY item")
    row = fleet.partition("a")
    if form == "whole":  # the COMMIT of the second attempt was its completion
        assert [tuple(one) for one in written] == [(n, 2) for n in range(4)]
        assert row.claims == 2
    else:
        assert [tuple(one) for one in written] == [(1, 2), (2, 2), (3, 3), (4, 3)]
        assert row.claims == 3
    effects = fleet.ledger().of("effect", "a")
    assert len(effects) == row.claims
    assert len({effect.more["idempotency_key"] for effect in effects}) == 1
