"""What an exchange costs, and what it finds, however much of a line must be passed over.

ROWLOCK_SNAPSHOT_CHANGES is how many changes of partitions an old snapshot keeps (100000), and
ROWLOCK_SNAPSHOT_SECONDS for how long fifty nodes beat meanwhile (60).
"""

import itertools
import os
import random
import select
from collections.abc import Generator
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any, LiteralString
from uuid import UUID

import pytest

from rowlock.db.store import Store
from rowlock.protocol.lines import Lines
from rowlock.protocol.model import Claim, Completion, Place
from rowlock.runtime.exchange import Exchange
from tests.support.builders import Run, Scene, a_policy
from tests.support.latency import seconds, slow_ones
from tests.support.postgres import Cluster, Database

SNAPSHOT_CHANGES = int(os.environ.get("ROWLOCK_SNAPSHOT_CHANGES") or 100_000)
SNAPSHOT_SECONDS = int(os.environ.get("ROWLOCK_SNAPSHOT_SECONDS") or 60)

# A beat of every node, as far as it leaves a version of its row.
BEATS: LiteralString = "UPDATE rowlock.batch_nodes SET beat = beat + 1, heartbeat_at = now()"


@pytest.fixture
def alone(database: Database) -> Generator[Scene]:
    with Scene(database) as made:
        yield made


@pytest.fixture
def twin(postgres: Cluster) -> Generator[Scene]:
    """The same in another database."""
    other = postgres.create()
    with Scene(other) as made:
        yield made
    postgres.drop(other.name)


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


@pytest.mark.timeout(120 + SNAPSHOT_CHANGES // 500 + SNAPSHOT_SECONDS // 2)
def test_claims_stay_quick_for_as_long_as_somebody_holds_an_old_snapshot(
    alone: Scene, twin: Scene
) -> None:
    """A report in one long transaction keeps every version of every row, and elsewhere claims get slower with
    each that was made since (brandur.org/postgres-queues, planetscale.com/blog/keeping-a-postgres-queue-healthy).
    Here partitions change their state meanwhile, and fifty nodes beat. Claims at the end are compared with those
    at the beginning: with a twin that stays there, in turns, so that the machine is as busy for both."""
    scenes = {"first": twin, "last": alone}
    nodes: dict[str, Node] = {}
    with ExitStack() as reports:
        for when, scene in scenes.items():
            a_long_line(scene, SNAPSHOT_CHANGES // 2 + 2000)
            nodes[when] = Node(scene)
            for _ in range(49):
                scene.a_node()
            report = reports.enter_context(scene.database.connect(autocommit=False))
            report.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            report.execute("SELECT count(*) FROM rowlock.executions")

        for _ in range(SNAPSHOT_SECONDS):
            alone.admin.execute(BEATS)
        others = Node(alone)
        for _ in range(SNAPSHOT_CHANGES // 2000):
            assert len(others.exchange(alone.store, slots=1000)) == 1000

        claims: dict[str, list[float]] = {"first": [], "last": []}
        from_the_head: dict[str, list[float]] = {"first": [], "last": []}
        order = list(scenes)
        for number in range(320):
            order.reverse()
            for when in order:
                node, store = nodes[when], scenes[when].store
                claims[when].append(seconds(partial(node.exchange, store)))
                assert node.held
                if number % 20 == 0:
                    head = partial(store.claim, node.id, slots=1, idle=False, seed=number)
                    from_the_head[when].append(seconds(head))

    assert median(from_the_head["last"]) > 3 * median(from_the_head["first"]), "nothing piled up"
    assert slow_ones(claims["last"]) < 3 * slow_ones(claims["first"])


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
