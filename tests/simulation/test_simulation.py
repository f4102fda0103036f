"""Histories of clusters under random faults: the database does what the protocol says, and nothing else.

`ROWLOCK_SIMULATION_SEEDS=N` runs N histories (300) and a quarter as many of AT_MOST_ONCE work alone, for which
`ROWLOCK_SIMULATION_ONCE_SEEDS=N` is there too. `ROWLOCK_SIMULATION_SEED=S` begins with this one; without it the date
chooses, so that each day tries others.
"""

from __future__ import annotations

import datetime
import os
from collections import Counter
from collections.abc import Generator, Sequence
from typing import Final, TypeAlias

import psycopg
import pytest

from rowlock.protocol.states import EXECUTION_MOVES, NODE_MOVES, PARTITION_MOVES
from tests.database.guards import MUTANTS, functions, guards, replaced, weakened
from tests.simulation import snapshot
from tests.simulation.lockstep import Lockstep
from tests.simulation.simulation import Simulation, describe
from tests.support.builders import Scene
from tests.support.postgres import Cluster, Database

SEEDS: Final = int(os.environ.get("ROWLOCK_SIMULATION_SEEDS") or 300)
ONCE_SEEDS: Final = int(os.environ.get("ROWLOCK_SIMULATION_ONCE_SEEDS") or -(-SEEDS // 4))
BATCH: Final = 10

Move: TypeAlias = tuple[str, str | None, str]
"""What kind of row, from which state, to which."""


def first_seed() -> int:
    """The seed of the first history."""
    chosen = os.environ.get("ROWLOCK_SIMULATION_SEED")
    today = datetime.datetime.now(datetime.UTC).date()
    return int(chosen) if chosen else today.toordinal() * 100_000


def replay(seed: int, *, once: bool = False) -> str:
    """The command that runs one history again."""
    return (
        f"ROWLOCK_SIMULATION_SEED={seed} ROWLOCK_SIMULATION_SEEDS=1 .venv/bin/pytest"
        f" tests/simulation/test_simulation.py -k {'starts_nothing' if once else 'histories'}"
    )


def run(db: Lockstep, seed: int, *, once: bool = False) -> Simulation:
    """One history, and what came of it.

    Raises:
        AssertionError: It went wrong, with all that happened and how to see it again.
    """
    history = Simulation(db, seed, once=once)
    try:
        history.run()
    except (AssertionError, psycopg.Error) as error:
        raise AssertionError(f"{describe(history, error)}\n\n{replay(seed, once=once)}") from error
    return history


def batches(seeds: int) -> Sequence[int]:
    """The numbers of the batches that so many histories are run in."""
    return range(-(-seeds // BATCH))


def batch_of(number: int, seeds: int) -> Sequence[int]:
    """The seeds of one batch."""
    first = first_seed() + number * BATCH
    return range(first, min(first + BATCH, first_seed() + seeds))


@pytest.fixture(scope="module")
def simulated(postgres: Cluster) -> Generator[Database]:
    made = postgres.create()
    snapshot.prepare(made)
    yield made
    postgres.drop(made.name)


@pytest.fixture(scope="module")
def lockstep(simulated: Database) -> Generator[Lockstep]:
    with Lockstep(simulated) as made:
        yield made


@pytest.mark.parametrize("batch", batches(SEEDS))
def test_histories_keep_every_promise(lockstep: Lockstep, batch: int) -> None:
    for seed in batch_of(batch, SEEDS):
        run(lockstep, seed)


@pytest.mark.parametrize("batch", batches(ONCE_SEEDS))
def test_at_most_once_work_starts_nothing_twice_whatever_happens(
    lockstep: Lockstep, batch: int
) -> None:
    """Of each instance, over all of its restarts: a crash, a lost answer or a second execution repeats no
    start, and what was lost after its start is FAILED. (Reported as sidekiq#1965, kubernetes#62772.)"""
    begun: Counter[int] = Counter()
    ends: Counter[str] = Counter()
    for seed in batch_of(batch, ONCE_SEEDS):
        history = run(lockstep, seed, once=True)
        begun.update(history.ledger.begun.values())
        ends.update(row.status for row in lockstep.db.partitions)
        assert {row.delivery for row in lockstep.db.partitions} <= {"AT_MOST_ONCE"}

    assert set(begun) == {1}, begun
    if ONCE_SEEDS >= BATCH:
        assert begun[1] > BATCH, "there is work to lose"
        assert ends["FAILED"] > 0, "and some of it is lost"


def test_one_seed_is_one_history(lockstep: Lockstep) -> None:
    traces: list[list[str]] = []
    for _ in range(2):
        run(lockstep, 7)
        traces.append(lockstep.trace)

    assert traces[0] == traces[1]


def single(move: Move) -> list[Move]:
    """A move, or the two that one statement makes where an early end finds nothing to wait for."""
    kind, before, after = move
    if kind == "execution" and after == "CANCELLED" and before != "CLOSING":
        return [(kind, before, "CLOSING"), (kind, "CLOSING", after)]
    return [move]


# A cancel while finish() runs, and too many failures while others still run.
SELDOM: Final[set[Move]] = {
    ("execution", "FINISHING", "CLOSING"),
    ("execution", "CLOSING", "FAILED"),
}


HISTORIES_MAX: Final = 80
"""The histories under the seeds from 0 on in which everything must come by that is looked for here."""


def test_histories_come_by_every_move_of_the_protocol(lockstep: Lockstep) -> None:
    """But for what only a person decides: to give an instance up, and to resolve a partition."""
    legal = {
        (kind, before, after)
        for kind, table in (
            ("node", NODE_MOVES),
            ("partition", PARTITION_MOVES),
            ("execution", EXECUTION_MOVES),
        )
        for before, afters in table.items()
        for after in afters
        if after != "ABANDONED"
    }
    usual = legal - SELDOM - {("partition", None, "COMPLETED")}
    seen: set[Move] = set()
    refused = 0
    for seed in range(HISTORIES_MAX):
        run(lockstep, seed)
        seen |= {step for move in lockstep.moves for step in single(move)}
        refused += lockstep.refused
        if usual <= seen and refused > 10:
            break

    assert usual <= seen <= legal
    assert refused > 10


NOTICED: Final = (
    "beat: a removed incarnation never beats again",
    "mark_unreachable: only the beat that was watched",
    "recover: only of owners that are gone",
    "_recover_claims: a lost AT_MOST_ONCE start is never repeated",
    "_recover_claims: nothing becomes PENDING in an execution that ends",
    "_recover_claims: AT_MOST_ONCE waits for the removal",
    "_recover_claims: a node that may come back claims again",
    "recover_by_evidence: only the beat that was watched",
    "complete: only the claim that was taken",
    "complete: terminal states never change",
    "fail: only the claim that was taken",
    "release: only the claim that was taken",
    "release: a start is not handed back",
    "checkpoint: only the claim that was taken",
    "_fence_check: only rowlock commits",
    "adopt: compare and set; a living master is never replaced",
    "_settle: an execution ends when nothing of it can still change",
)


@pytest.mark.parametrize("key", NOTICED)
def test_a_weakened_guard_is_noticed_in_a_few_histories(
    lockstep: Lockstep, simulated: Database, key: str
) -> None:
    guard = next(one for one in guards() if one.key == key)
    weaker = weakened(guard, MUTANTS[key])

    with Scene(simulated) as scene, replaced(scene, weaker, functions()[guard.function]):
        told = next(filter(None, (what_went_wrong(lockstep, s) for s in range(HISTORIES_MAX))), "")

    assert "ROWLOCK_SIMULATION_SEED=" in told


def what_went_wrong(db: Lockstep, seed: int) -> str:
    try:
        run(db, seed)
    except AssertionError as error:
        return str(error)
    return ""
