"""What a node does about executions that it believes to drive, where answers cross."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, cast
from uuid import uuid4

import psycopg
import pytest

from rowlock.protocol.model import Mastership, Progress
from rowlock.runtime.host import Host
from rowlock.runtime.masters import SUPERSEDED, Masters
from rowlock.runtime.pool import Executor
from rowlock.runtime.watchdog import LeaseBoard, boottime_ns
from tests.runtime.test_attempts import Database, FakePool, a_host


@dataclass
class Desk:
    """One node's masterships, between the database and the executor that the test answers for."""

    masters: Masters
    database: Database
    executor: Executor[Any]
    host: Host

    def drives(self, status: str) -> None:
        """Have it adopt an execution in this state."""
        execution = uuid4()
        self.masters.adopt(execution)
        self.database.take("adopt").answer(
            Mastership(
                execution_id=execution,
                epoch=1,
                status=status,
                job="j",
                contract_hash="h",
                policy={},
                delivery="AT_LEAST_ONCE",
                instance_key="i",
                parameters="{}",
                pool="default",
                masters_lost=0,
            )
        )

    def fail(self, name: str) -> None:
        """Have an operation fail."""
        fail = self.database.take(name).fail
        assert fail is not None
        fail(psycopg.OperationalError("gone"))


@pytest.fixture
def desk() -> Generator[Desk]:
    database, pool, board = Database(), FakePool(1), LeaseBoard.create(1)
    board.extend(boottime_ns() + 10**12)
    host = a_host(database, board)
    (executor,) = pool.executors
    masters = Masters(host, cast(Any, pool), cast(Any, executor), lambda _id, _progress: None)
    yield Desk(masters, database, cast(Any, executor), host)
    board.close()


def test_a_mastership_that_was_taken_away_meanwhile_ends_a_beat_later(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node was cut off for two beats, taken for gone by evidence, and came back in the middle of finish(),
    which another master runs now. The second comparison must not wait for a sweep, a minute later."""
    database, masters, executor = desk.database, desk.masters, desk.executor
    desk.drives("FINISHING")
    masters.turn(time.monotonic())
    database.take("advance").answer((Progress(status="FINISHING"), 0.001))
    masters.turn(time.monotonic())
    assert executor.work, "finish() runs"

    masters.compare()
    database.take("masterships_of").answer({})
    before = masters.needs_comparing
    now = time.monotonic() + desk.host.settings.beat_seconds
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert (before, masters.needs_comparing) == (False, True)
    masters.compare()
    database.take("masterships_of").answer({})
    database.take("advance").answer((Progress(status=SUPERSEDED), 0.001))

    after = masters.needs_comparing
    assert (executor.killed, masters.executions, after) == (True, set(), False)


def test_one_comparison_is_enough(desk: Desk) -> None:
    """Those of a long outage would each adopt again what was adopted without an answer, and end its partition()."""
    for _ in range(3):
        desk.masters.compare()
    assert desk.database.names == ["masterships_of"]

    desk.database.take("masterships_of").answer({})
    desk.masters.compare()
    assert desk.database.names == ["masterships_of"]
    desk.fail("masterships_of")
    desk.masters.compare()
    assert desk.database.names == ["masterships_of"]


def test_a_look_that_took_long_is_not_repeated_at_once(desk: Desk) -> None:
    """While somebody holds an old snapshot, a look at an execution of which nothing waits passes over all of it."""
    desk.drives("RUNNING")
    desk.masters.turn(time.monotonic())
    desk.database.take("advance").answer((Progress(status="RUNNING"), 0.3))

    due = desk.masters.next_due()
    assert due is not None
    assert 2.5 < due - time.monotonic() < 3.1


def test_no_author_code_begins_beside_an_attempt_that_is_to_be_alone(desk: Desk) -> None:
    desk.drives("PLANNING")

    desk.masters.turn(time.monotonic(), held=True)
    assert (list(desk.executor.work), desk.database.names) == ([], [])
    desk.masters.turn(time.monotonic())
    assert desk.executor.work


def test_nothing_is_adopted_that_could_not_be_planned_now(desk: Desk) -> None:
    desk.masters.adoptable = True

    desk.masters.turn(time.monotonic(), held=True)
    assert desk.database.names == []
    desk.masters.turn(time.monotonic())
    assert desk.database.names == ["adopt"]
