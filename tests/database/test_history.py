"""What claims, beats and monitors cost beside very much, or very large, finished work.

Two databases that differ in nothing else answer in turn, so that a machine that is busy slows both.
ROWLOCK_HISTORY_ROWS is how many finished partitions there are (200000).
"""

import os
import time
from collections.abc import Callable, Generator
from typing import Any, LiteralString
from uuid import UUID

import psycopg
import pytest

from rowlock.db import readings, views
from tests.database.test_plans import plans
from tests.support.builders import Run, Scene
from tests.support.postgres import Cluster

HISTORY_ROWS = int(os.environ.get("ROWLOCK_HISTORY_ROWS") or 200_000)

FILL: LiteralString = """
INSERT INTO rowlock.batch_partitions (execution_id, step, partition_key, delivery, slice, status, ended_at, result)
SELECT coalesce(%(execution)s, gen_random_uuid()), 'main', %(prefix)s || g, 'AT_LEAST_ONCE', '{}',
       CASE WHEN %(result)s::jsonb IS NULL THEN 'PENDING' ELSE 'COMPLETED' END,
       CASE WHEN %(result)s::jsonb IS NULL THEN NULL ELSE now() END, %(result)s::jsonb
  FROM generate_series(1, %(count)s) g
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
        self.scene.admin.execute(
            FILL, {"execution": execution, "prefix": prefix, "count": count, "result": result}
        )

    def claim(self) -> None:
        """Claim one partition; its completion is not what is measured."""
        self.taken = self.scene.claim(self.node)

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
    """Two of them, each in a database of its own, with 100,000 partitions that wait."""
    other = postgres.create()
    with Scene(other) as second:
        made = Side(alone), Side(second)
        for side in made:
            side.fill(100_000, "waits-")
        yield made
    postgres.drop(other.name)


def settle(*sides: Side) -> None:
    """Let the planner know what there is."""
    for side in sides:
        side.scene.admin.execute("VACUUM ANALYZE")


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def compared(one: Side, other: Side) -> tuple[float, dict[str, float]]:
    """How many times as long it takes on the other side: the slowest of ten claims, which is about their 95th
    percentile, in the quietest of forty stretches; of every look the shortest of a hundred. What else the
    machine does only ever adds."""
    sides = (one, other)
    claims: dict[Side, list[float]] = {one: [], other: []}
    for _ in range(40):
        for side in sides:
            slowest = 0.0
            for _ in range(10):
                slowest = max(slowest, seconds(side.claim))
                side.give_back()
            claims[side].append(slowest)
    looks: dict[str, float] = {}
    for name in one.looks():
        first, second = (side.looks()[name] for side in sides)
        pairs = [(seconds(first), seconds(second)) for _ in range(100)]
        looks[name] = min(b for _, b in pairs) / min(a for a, _ in pairs)
    return min(claims[other]) / min(claims[one]), looks


@pytest.mark.timeout(120 + HISTORY_ROWS // 5000)
def test_claims_and_looks_take_no_longer_beside_finished_work(sides: tuple[Side, Side]) -> None:
    """Half of it is of the job that runs. (They get slower with all that was ever done: reported as argo#14904,
    argo#14526, que#90.)"""
    short, long = sides
    long.fill(HISTORY_ROWS // 2, "done-", result="1")
    long.fill(HISTORY_ROWS // 2, "done-", result="1", foreign=True)
    settle(short, long)

    claims, looks = compared(short, long)

    assert claims < 2
    assert {name: ratio for name, ratio in looks.items() if ratio >= 2} == {}
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
    large.fill(1000, "done-", result='"' + "x" * 1_000_000 + '"')
    settle(small, large)

    claims, looks = compared(small, large)

    assert claims < 1.5
    assert {name: ratio for name, ratio in looks.items() if ratio >= 1.5} == {}
