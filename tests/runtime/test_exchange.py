"""What an exchange costs, and what it finds, however much of a line must be passed over."""

import itertools
import random
import select
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from rowlock.db.store import Store
from rowlock.protocol.lines import Lines
from rowlock.protocol.model import Claim, Completion, Place
from rowlock.runtime.exchange import Exchange
from tests.support.builders import Run, Scene, a_policy
from tests.support.postgres import Database


@pytest.fixture
def alone(database: Database) -> Generator[Scene]:
    with Scene(database) as made:
        yield made


class Node:
    """A node that completes what it has claimed with the next exchange."""

    def __init__(self, scene: Scene, pool: str | None = None) -> None:
        self.id = scene.a_node(pool=pool)
        self.lines = Lines()
        self.held: list[Claim] = []
        self._seeds = itertools.count()

    def exchange(self, store: Store, *, slots: int = 2) -> list[Claim]:
        done = [Completion(id=claim.id, token=claim.token, result="1") for claim in self.held]
        answer = Exchange(
            node_id=self.id,
            completions=done,
            slots=slots,
            prefetch=0,
            idle=False,
            seed=next(self._seeds),
            known=frozenset(claim.execution_id for claim in self.held),
            notices=0,
            lines=self.lines,
        ).run(store)
        assert set(answer.outcomes.values()) <= {"completed"}
        self.held = answer.claims
        return answer.claims


def a_long_line(scene: Scene, count: int, **request: Any) -> Run:
    run = scene.an_execution(1, **request)
    scene.add(run, count - 1)
    scene.admin.execute(
        "UPDATE rowlock.batch_job_coordination SET total = %s WHERE execution_id = %s",
        [count, run.id],
    )
    return run


def test_claims_stay_quick_for_as_long_as_somebody_holds_an_old_snapshot(alone: Scene) -> None:
    """A report in one long transaction keeps every version of every row, and elsewhere claims get slower with
    each that was made since (brandur.org/postgres-queues, planetscale.com/blog/keeping-a-postgres-queue-healthy).
    Here 200,000 changes of a partition's state go by meanwhile, in one line of two."""
    a_long_line(alone, 105_000, pool="long")
    a_long_line(alone, 2000, pool="short")
    long, short, others = Node(alone, "long"), Node(alone, "short"), Node(alone, "long")
    with alone.database.connect(autocommit=False) as report:
        report.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        report.execute("SELECT count(*) FROM rowlock.executions")
        for _ in range(100):
            others.exchange(alone.store, slots=1000)
        spent: dict[str, list[float]] = {"long": [], "short": [], "from the head": []}
        for _ in range(300):
            for name, node in (("long", long), ("short", short)):
                spent[name].append(seconds(partial(node.exchange, alone.store)))
        for seed in range(20):
            head = partial(alone.store.claim, long.id, slots=2, idle=False, seed=seed)
            spent["from the head"].append(seconds(head))

    assert quiet_p90(spent["from the head"]) > 3 * quiet_p90(spent["short"])
    assert quiet_p90(spent["long"]) < 3 * quiet_p90(spent["short"])


def seconds(call: Callable[[], object]) -> float:
    began = time.monotonic()
    assert call()
    return time.monotonic() - began


def quiet_p90(values: list[float]) -> float:
    """The slowest of ten in the quietest stretch: what else the machine does only ever adds."""
    return min(max(values[at : at + 10]) for at in range(0, len(values), 10))


class Slow(Store):
    """Each look over the lines takes long."""

    def passed(self, node: UUID, seconds: float) -> dict[UUID, Place]:
        found = super().passed(node, 0)
        select.select([], [], [], seconds * 5)
        return found


def test_what_comes_back_before_the_place_where_claims_begin_is_claimed_all_the_same(
    alone: Scene, seed: int
) -> None:
    run = a_long_line(alone, 1000, policy=a_policy(max_attempts=1000))
    node, store = Node(alone), Slow(alone.store.connection)
    hints, rng = 0, random.Random(seed)
    while set(alone.statuses(run)) != {"COMPLETED"}:
        for claim in node.exchange(store, slots=20):
            if rng.random() < 0.3:
                node.held.remove(claim)
                assert alone.fail(node.id, claim) == "retry"
        hints += bool(node.lines.passed)
    assert hints, "it always began at the head"
