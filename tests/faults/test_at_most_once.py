"""AT_MOST_ONCE work under every fault that there is a tool for: what was started is never started again.

ROWLOCK_ONCE_SCHEDULES runs so many schedules (1), each from a seed of its own.
"""

import os
import random
import time
from collections.abc import Callable, Generator

import pytest

from tests.faults.test_chaos import Chaos
from tests.support import seeds
from tests.support.fault_jobs import part, step
from tests.support.fleet import TERMINAL, Fleet, NodeProcess, eventually
from tests.support.pgproxy import PgProxy
from tests.support.waiting import wait_until

PARTITIONS = 40
PAUSE_SECONDS = 4.0
SCHEDULES = int(os.environ.get("ROWLOCK_ONCE_SCHEDULES") or 1)


class Harm(Chaos):
    """Each kind of harm at least once, in an order of chance; all nodes reach the server through a proxy."""

    def __init__(self, fleet: Fleet, rng: random.Random, proxy: PgProxy) -> None:
        self._proxy = proxy
        super().__init__(fleet, rng)
        kinds: list[Callable[[NodeProcess], None]] = [
            *(self._kill, self._kill, self._crash, self._kill_executor),
            *(self._sleep, self._sleep, self._stop_supervisor),
            *(self._reset, self._claim_unanswered, self._claim_unsent, self._result_unanswered),
            *(self._restart_server, self._restart_server),
        ]
        rng.shuffle(kinds)
        self.left = kinds

    def _fresh(self) -> NodeProcess:
        name = f"node-{len(self.fleet.members)}"
        return self.fleet.node(name, slots=2, wait=False, ROWLOCK_DSN=self._proxy.dsn)

    def strike(self) -> None:
        """Do the next harm, to a node that can feel it."""
        able = [n for n in self.nodes if n not in self.asleep and n.events("node_registered")]
        if able:
            self.left.pop()(self.rng.choice(able))

    def _crash(self, node: NodeProcess) -> None:
        node.crash()

    def _sleep(self, node: NodeProcess) -> None:
        node.pause()
        self.asleep[node] = (time.monotonic() + PAUSE_SECONDS, node.resume)

    def _reset(self, _node: NodeProcess) -> None:
        self._proxy.reset()

    def _claim_unanswered(self, _node: NodeProcess) -> None:
        self._proxy.cut(b"rowlock.claim(", after=True, times=2)

    def _claim_unsent(self, _node: NodeProcess) -> None:
        self._proxy.cut(b"rowlock.claim(", after=False, times=2)

    def _result_unanswered(self, _node: NodeProcess) -> None:
        self._proxy.cut(b"rowlock.complete(", after=True, times=2)

    def _restart_server(self, _node: NodeProcess) -> None:
        self.fleet.database.server.restart(self.rng.choice(["fast", "immediate"]))


@pytest.fixture
def proxy(private_fleet: Fleet) -> Generator[PgProxy]:
    with PgProxy(private_fleet.database.dsn_as("rowlock_node")) as made:
        yield made


@seeds.several(SCHEDULES)
def test_at_most_once_work_is_started_once_whatever_is_killed_paused_or_cut_off(
    private_fleet: Fleet, proxy: PgProxy, seed: int
) -> None:
    """40 partitions on nodes that are killed, put to sleep past their removal, and cut off before and after
    their claims and completions reach the server, which restarts: each is started at most once, ends COMPLETED
    or FAILED with its outcome unknown, and a restart of the execution starts none of them. (Run twice
    after a crash or a lost answer elsewhere: reported as sidekiq#1965, kubernetes#62772.)"""
    fleet, rng = private_fleet, random.Random(seed)
    pause = step("sleep", 0.35)
    steps = (pause, step("effect", "paid"), pause)
    run = fleet.request("fault.once", parts=[part(f"p{n}", *steps) for n in range(PARTITIONS)])
    harm = Harm(fleet, rng, proxy)

    eventually(lambda: fleet.ledger().of("start"), "the work begins")
    while harm.left:
        harm.strike()
        harm.go_on()
        next_strike = time.monotonic() + rng.uniform(0.1, 0.6)
        wait_until(lambda: time.monotonic() >= next_strike, seconds=5)  # noqa: B023
    harm.end()

    def has_ended() -> bool:
        harm.go_on()
        return fleet.status(run) in TERMINAL

    eventually(has_ended, "the execution ends", seconds=60)
    starts = check(fleet)
    if fleet.status(run) == "FAILED":
        again = fleet.restart(run)
        eventually(lambda: fleet.status(again) in TERMINAL, "its restart ends")
        assert {row.status for row in fleet.rows_of(again)} <= {"FAILED"}
    assert check(fleet) == starts, "a restart starts nothing that was started"


def check(fleet: Fleet) -> dict[str, int]:
    """How often each partition was started: once, and then it is known whether it came to its end."""
    ledger = fleet.ledger()
    rows = fleet.rows(
        "SELECT DISTINCT ON (partition_key) * FROM rowlock.batch_partitions"
        " ORDER BY partition_key, id"
    )
    assert len(rows) == PARTITIONS
    for row in rows:
        starts = len(ledger.starts(row.partition_key))
        effects = len(ledger.of("effect", row.partition_key))
        assert starts <= 1, row
        if row.status == "COMPLETED":
            assert starts == effects == 1, row
        else:
            assert (row.status, row.last_error["outcome"]) == ("FAILED", "unknown"), row
    return {row.partition_key: len(ledger.starts(row.partition_key)) for row in rows}
