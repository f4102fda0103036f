"""What claims, beats and monitors cost beside very much, or very large, finished work.

Two databases that differ in nothing else answer in turn, so that a machine that is busy slows both.
ROWLOCK_HISTORY_ROWS is how many finished partitions there are (100000).
"""

import os
from collections.abc import Callable, Generator, Mapping
from statistics import median
from typing import Any, LiteralString
from uuid import UUID

import psycopg
import pytest

from rowlock.db import readings, views
from tests.database.test_plans import plans
from tests.support.builders import Run, Scene
from tests.support.history import fill, settle
from tests.support.latency import seconds, slow_ones
from tests.support.postgres import Cluster

HISTORY_ROWS = int(os.environ.get("ROWLOCK_HISTORY_ROWS") or 100_000)
WAITING_ROWS = min(100_000, HISTORY_ROWS // 4)
CLAIMS = 500

# As it is stored: it is compressed once, not a thousand times.
COPY_RESULT: LiteralString = """
INSERT INTO rowlock.batch_partitions (execution_id, step, partition_key, delivery, slice, status, ended_at, result)
SELECT p.execution_id, p.step, 'done-' || g, p.delivery, p.slice, p.status, p.ended_at, p.result
  FROM rowlock.batch_partitions p, generate_series(2, 1000) g
 WHERE p.partition_key = 'done-first-1'
"""


class Side:
    """A job of many partitions, a node that works on it, and somebody who watches."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.run: Run = scene.an_execution(1)
        self.node: UUID = scene.a_node(slots=8)
        self.reader: psycopg.Connection[Any] = scene.a_store(role="rowlock_reader").connection

    def fill(
        self, count: int, prefix: str, *, result: str | None = None, foreign: bool = False
    ) -> None:
        """Add partitions of the job, or of executions that nobody knows any more; those with a result are over."""
        execution = None if foreign else self.run.id
        fill(self.scene.admin, count, prefix, execution=execution, result=result)

    def claim(self) -> None:
        """Claim one partition; its completion is not what is measured."""
        self.taken = self.scene.claim(self.node)
        assert self.taken

    def give_back(self) -> None:
        """Complete it."""
        self.scene.complete(self.node, *self.taken)

    def looks(self) -> dict[str, Callable[[], object]]:
        """What nodes and people ask again and again, by name."""
        return {
            "beat": lambda: self.scene.store.beat(self.node, load=0, draining=False),
            "advance": lambda: self.scene.advance(self.run),
            "look": lambda: views.look(self.reader, self.run.id),
            "executions": lambda: views.executions(self.reader, limit=20),
            "partitions": lambda: views.partitions(self.reader, self.run.id, limit=20),
            "pools": lambda: readings.pools(self.reader),
        }


@pytest.fixture
def sides(alone: Scene, postgres: Cluster) -> Generator[tuple[Side, Side]]:
    """Two of them, each in a database of its own, with many partitions that wait."""
    other = postgres.create()
    with Scene(other) as second:
        made = Side(alone), Side(second)
        for side in made:
            side.fill(WAITING_ROWS, "waits-")
        yield made
    postgres.drop(other.name)


def compared(one: Side, other: Side) -> dict[str, float]:
    """How many times as long it takes on the other side: claims, by percentile, and every look, by its median.

    Sides take turns in being the first, and each look comes in five rounds, with all others between them.
    """
    order = [one, other]
    claims: dict[Side, list[float]] = {one: [], other: []}
    for _ in range(CLAIMS):
        order.reverse()
        for side in order:
            claims[side].append(seconds(side.claim))
            side.give_back()
    looks: dict[str, dict[Side, list[float]]] = {name: {one: [], other: []} for name in one.looks()}
    for _ in range(5):
        for name, spent in looks.items():
            for _ in range(10):
                order.reverse()
                for side in order:
                    spent[side].append(seconds(side.looks()[name]))
    return {
        "claim p95": slow_ones(claims[other], 95) / slow_ones(claims[one], 95),
        "claim p99": slow_ones(claims[other], 99) / slow_ones(claims[one], 99),
        **{name: median(spent[other]) / median(spent[one]) for name, spent in looks.items()},
    }


def slower(one: Side, other: Side, bounds: Mapping[str, float], usual: float) -> dict[str, float]:
    """What takes longer on the other side than its bound allows, or than is usual, three times in a row: what
    has become slower is so each time, and a machine that does something else seldom hits the same thrice."""
    found: dict[str, float] = {}
    for turn in range(3):
        ratios = compared(one, other)
        too_slow = {name: by for name, by in ratios.items() if by >= bounds.get(name, usual)}
        found = {name: by for name, by in too_slow.items() if turn == 0 or name in found}
        if not found:
            break
    return found


@pytest.mark.timeout(120 + HISTORY_ROWS // 5000)
def test_claims_and_looks_take_no_longer_beside_finished_work(sides: tuple[Side, Side]) -> None:
    """Half of it is of the job that runs. (They get slower with all that was ever done: reported as argo#14904,
    argo#14526, que#90.)"""
    short, long = sides
    long.fill(HISTORY_ROWS // 2, "done-", result="1")
    long.fill(HISTORY_ROWS // 2, "done-", result="1", foreign=True)
    settle(short.scene.admin)
    settle(long.scene.admin)

    assert slower(short, long, {"claim p99": 1.5}, usual=2) == {}
    with plans(long.scene) as seen:
        for statement in (
            "SELECT count(*) FROM rowlock.claim(%(node)s, 4, 4, false, 1)",
            "SELECT * FROM rowlock.beat(%(node)s, 0, false, '[]', '{}')",
            "SELECT * FROM rowlock.executions WHERE execution_id = %(run)s",
            "SELECT * FROM rowlock.pools",
        ):
            long.scene.admin.execute(statement, {"node": long.node, "run": long.run.id})
    assert len([plan for plan in seen if "batch_partitions" in plan]) >= 4
    for plan in seen:
        assert "Seq Scan on batch_partitions" not in plan, plan


def test_claims_and_looks_take_no_longer_beside_large_results(sides: tuple[Side, Side]) -> None:
    """A thousand of a megabyte each, four times what a result may have. (Lists become slow: reported as
    odd-jobs#42, bull-board#413, delayed_job#595.)"""
    small, large = sides
    small.fill(1000, "done-", result="1")
    large.fill(1, "done-first-", result='"' + "x" * 1_000_000 + '"')
    large.scene.admin.execute(COPY_RESULT)
    settle(small.scene.admin)
    settle(large.scene.admin)

    assert slower(small, large, {}, usual=1.5) == {}
