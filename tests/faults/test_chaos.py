"""Faults at random, over nodes that do work of every kind at once: what is promised holds all the same.

ROWLOCK_CHAOS_SECONDS makes it last longer than the few seconds of an ordinary run, and ROWLOCK_FAULT_SEEDS runs it
from more than one seed.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self
from uuid import UUID

from tests.support import seeds
from tests.support.fault_jobs import Part, part, step
from tests.support.fleet import TERMINAL, Fleet, NodeProcess, eventually
from tests.support.pgproxy import PgProxy
from tests.support.supervisor import is_alive, send
from tests.support.waiting import wait_until

NODES = 3
SECONDS = float(os.environ.get("ROWLOCK_CHAOS_SECONDS") or 8)
ITEMS = 20


REQUESTS = (
    *(b"rowlock.claim(", b"rowlock.complete(", b"rowlock.checkpoint(", b"rowlock.beat("),
    *(b"rowlock.fail(", b"rowlock.release(", b"rowlock.seal(", b"rowlock.register(", b"COMMIT"),
)
"""What the network may lose, or the answer to it."""


class Chaos:
    """What may happen to a fleet of three, one thing at a time. Use it in a `with`."""

    def __init__(self, fleet: Fleet, rng: random.Random) -> None:
        self.fleet = fleet
        self.rng = rng
        self.proxies: dict[NodeProcess, PgProxy] = {}
        """What stands between each node and the database."""
        self.asleep: dict[NodeProcess, tuple[float, Callable[[], None]]] = {}
        """Nodes that stand still: until when, and what wakes them."""
        self.nodes = [self._fresh() for _ in range(NODES)]

    def _fresh(self) -> NodeProcess:
        name = f"node-{len(self.fleet.members)}"
        proxy = PgProxy(self.fleet.database.dsn_as("rowlock_node"))
        node = self.fleet.node(name, slots=2, wait=False, drain_seconds=2, ROWLOCK_DSN=proxy.dsn)
        self.proxies[node] = proxy
        return node

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for proxy in self.proxies.values():
            proxy.close()

    def go_on(self) -> None:
        """Wake who has slept enough, and replace who has died, as Kubernetes does."""
        now = time.monotonic()
        for node, (until, wake) in list(self.asleep.items()):
            if now >= until:
                del self.asleep[node]
                wake()
        for node in self.nodes[:]:
            if node.popen.poll() is not None:
                self.nodes.remove(node)
                self.asleep.pop(node, None)
                self.nodes.append(self._fresh())

    def strike(self) -> None:
        """Do some harm."""
        node = self.rng.choice(self.nodes)
        if node in self.asleep or not node.events("node_registered"):
            return
        self.rng.choice(
            [
                *(self._kill, self._drain, self._pause, self._stop_supervisor),
                *(self._kill_executor, self._kill_watchdog, self._cut_connections),
                *(self._lose_a_request, self._lose_a_request, self._lose_packets, self._freeze),
            ]
        )(node)

    def end(self) -> None:
        """Wake everybody."""
        for _, wake in self.asleep.values():
            wake()
        self.asleep.clear()

    # -- harm ----------------------------------------------------------------------------------

    def _kill(self, node: NodeProcess) -> None:
        node.kill()

    def _drain(self, node: NodeProcess) -> None:
        node.kill(signal.SIGTERM)

    def _pause(self, node: NodeProcess) -> None:
        node.pause()
        self.asleep[node] = (time.monotonic() + self.rng.choice([0.3, 1.5, 4.0]), node.resume)

    def _stop_supervisor(self, node: NodeProcess) -> None:
        node.stop()
        self.asleep[node] = (time.monotonic() + self.rng.choice([0.3, 1.5, 4.0]), node.cont)

    def _kill_executor(self, node: NodeProcess) -> None:
        for process in node.executors()[:1]:
            send(process, signal.SIGKILL)

    def _kill_watchdog(self, node: NodeProcess) -> None:
        for process in node.watchdogs():
            send(process, signal.SIGKILL)

    def _cut_connections(self, node: NodeProcess) -> None:
        self.fleet.rows(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname ="
            " current_database() AND (application_name IN (%s, %s)"
            " OR starts_with(application_name, 'rowlock work'))",
            *(f"rowlock node {node.name}", f"rowlock beat {node.name}"),
        )

    def _lose_a_request(self, node: NodeProcess) -> None:
        self.proxies[node].cut(self.rng.choice(REQUESTS), after=self.rng.random() < 0.5)

    def _lose_packets(self, node: NodeProcess) -> None:
        self._hold_back(node, self.proxies[node].drop)

    def _freeze(self, node: NodeProcess) -> None:
        self._hold_back(node, self.proxies[node].blackhole)

    def _hold_back(self, node: NodeProcess, how: Callable[[], None]) -> None:
        how()
        until = time.monotonic() + self.rng.choice([0.3, 1.5, 4.0])
        self.asleep[node] = (until, self.proxies[node].pass_on)


def work(number: int) -> list[Part]:
    """AT_LEAST_ONCE work that takes some time, of each way to write."""
    pause = step("sleep", 0.1)
    return [
        *(
            part(f"chunks{n}", step("chunks", {"items": ITEMS, "size": 4}), pause)
            for n in range(number)
        ),
        *(part(f"rows{n}", pause, step("rows", ITEMS), pause) for n in range(number)),
        *(
            part(f"saves{n}", step("steps_with_saves", {"count": ITEMS}), pause)
            for n in range(number)
        ),
    ]


@seeds.several(seeds.SEEDS)
def test_random_faults_break_no_promise(fleet: Fleet, seed: int) -> None:
    """Nodes and executors are killed, drained, paused and cut off while they work, and the network loses
    their requests, answers and packets. Every AT_LEAST_ONCE
    partition completes, with each of its rows written once; no AT_MOST_ONCE partition is begun twice,
    and one that did not complete is FAILED; nothing deadlocks, no claim is left behind."""
    rng = random.Random(seed)
    with Chaos(fleet, rng) as chaos:
        repeated, once = run_under(chaos, SECONDS)
    check(fleet, repeated, once)


def run_under(chaos: Chaos, seconds: float) -> tuple[list[UUID], list[UUID]]:
    """Work of both kinds, until all of it has ended: executions that may repeat, and that may not."""
    fleet = chaos.fleet
    repeated = [fleet.request(parts=work(int(seconds)), max_attempts=1000)]
    pause = step("sleep", 0.2)
    once = [
        fleet.request(
            "fault.once",
            parts=[part(f"once{n}", pause, step("effect", "paid"), pause) for n in range(30)],
        )
    ]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        chaos.strike()
        next_strike = time.monotonic() + chaos.rng.uniform(0.1, 0.8)
        wait_until(lambda: time.monotonic() >= next_strike, seconds=5)  # noqa: B023
        chaos.go_on()
    chaos.end()

    def have_ended() -> bool:
        chaos.go_on()
        return all(fleet.status(run) in TERMINAL for run in [*repeated, *once])

    eventually(have_ended, "all executions end", seconds=60)
    return repeated, once


def check(fleet: Fleet, repeated: list[UUID], once: list[UUID]) -> None:
    for run in repeated:
        assert fleet.status(run) == "COMPLETED", fleet.rows_of(run)
    expected = sum(
        ITEMS for run in repeated for row in fleet.rows_of(run) if row.partition_key[:5] != "saves"
    )
    written = fleet.one("SELECT count(*), count(DISTINCT (key, item)) AS kinds FROM fleet.effects")
    assert (written.count, written.kinds) == (expected, expected)

    ledger = fleet.ledger()
    for run in once:
        assert fleet.status(run) in {"COMPLETED", "FAILED"}
        for row in fleet.rows_of(run):
            starts = len(ledger.starts(row.partition_key))
            if row.status == "COMPLETED":
                assert starts == len(ledger.of("effect", row.partition_key)) == 1, row
            else:
                assert row.status == "FAILED", row
                assert starts <= 1, row
                assert row.last_error["outcome"] == "unknown", row
    # What each attempt says of itself is in order: the steps that were saved are not done again by a
    # later attempt, but for the one that was under way.
    for run in repeated:
        for row in fleet.rows_of(run):
            done = [entry.more["number"] for entry in ledger.of("step", row.partition_key)]
            assert set(done) == (set(range(1, ITEMS + 1)) if done else set()), row
    assert not any(is_alive(member.process) for member in fleet.members if member.popen.poll())
