"""What a node does about executions that it believes to drive, where answers cross."""

from __future__ import annotations

import time
from typing import Any, cast
from uuid import uuid4

import pytest

from rowlock.protocol.model import Mastership, Progress
from rowlock.runtime.masters import SUPERSEDED, Masters
from rowlock.runtime.watchdog import LeaseBoard, boottime_ns
from tests.runtime.test_attempts import Database, FakePool, a_host


def test_a_mastership_that_was_taken_away_meanwhile_ends_a_beat_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its node was cut off for two beats, taken for gone by evidence, and came back in the middle of finish(),
    which another master runs now. The second comparison must not wait for a sweep, a minute later."""
    database, pool, board = Database(), FakePool(1), LeaseBoard.create(1)
    board.extend(boottime_ns() + 10**12)
    host = a_host(database, board)
    (executor,) = pool.executors
    masters = Masters(host, cast(Any, pool), cast(Any, executor), lambda _id, _progress: None)
    execution = uuid4()
    masters.adopt(execution)
    database.take("adopt").answer(
        Mastership(
            execution_id=execution,
            epoch=1,
            status="FINISHING",
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
    masters.turn(time.monotonic())
    database.take("advance").answer(Progress(status="FINISHING"))
    masters.turn(time.monotonic())
    assert executor.work, "finish() runs"

    masters.compare()
    database.take("masterships_of").answer({})
    before = masters.needs_comparing
    now = time.monotonic() + host.settings.beat_seconds
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert (before, masters.needs_comparing) == (False, True)
    masters.compare()
    database.take("masterships_of").answer({})
    database.take("advance").answer(Progress(status=SUPERSEDED))

    after = masters.needs_comparing
    assert (executor.killed, masters.executions, after) == (True, set(), False)
    board.close()
