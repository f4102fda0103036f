"""When the connection of the beats lets the other one be opened."""

from __future__ import annotations

import random
import select
import time
from typing import Any, cast
from uuid import UUID, uuid4

import psycopg
import pytest

from rowlock.protocol.model import BeatAnswer
from rowlock.runtime.heartbeat import Heartbeat, Report
from rowlock.runtime.link import Link
from rowlock.runtime.mailbox import Mailbox
from rowlock.runtime.watchdog import LeaseBoard
from rowlock.runtime.work import Operation
from tests.support.builders import a_beat_answer
from tests.support.waiting import wait_until


class Refusing:
    """A link whose connection stands, or does not, and whose server answers each statement with an error."""

    def __init__(self, connection: object | None, error: Exception) -> None:
        self.connection = connection
        self.tries = 0
        self.told: list[Exception] = []
        self._error = error

    def store(self) -> None:
        raise self._error

    def failed(self, _error: Exception) -> None: ...

    def shut(self) -> None: ...

    def tell(self, error: Exception) -> None:
        self.told.append(error)


def a_heartbeat() -> tuple[LeaseBoard, Heartbeat]:
    board = LeaseBoard.create(1)
    heartbeat = Heartbeat(
        "",
        Mailbox(),
        board,
        application_name="beat",
        beat_seconds=1,
        lease_seconds=9,
        limit_seconds=5,
        reconnect_cap_seconds=2,
        evidence=True,
        report=lambda: None,
        is_turning=lambda: True,
        on_look=lambda _look: None,
        on_failure=lambda _error: None,
        on_crash=lambda _error: None,
        rng=random.Random(1),
    )
    return board, heartbeat


@pytest.mark.parametrize(
    "connection, error, connects",
    [
        pytest.param(object(), psycopg.errors.UndefinedFunction("beat"), True, id="refused"),
        pytest.param(None, psycopg.OperationalError("gone"), False, id="broken"),
    ],
)
def test_a_beat_that_is_refused_lets_the_other_connection_find_out_why(
    connection: object | None, error: Exception, connects: bool
) -> None:
    """A migration went by while both connections were away: no beat is answered any more. Were the other
    connection to wait for one, the node would never learn that the schema has gone on."""
    board, heartbeat = a_heartbeat()
    heartbeat._link = cast(Link, cast(Any, Refusing(connection, error)))
    lost_at = time.monotonic()
    assert not heartbeat.has_beaten_since(lost_at)

    report = Report(node_id=uuid4(), load=0, draining=False, orphans=(), executions=())
    assert heartbeat._beat(report, late_seconds=0) is error

    assert heartbeat.has_beaten_since(lost_at) is connects
    board.close()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_beat_that_is_cut_off_by_the_end_of_its_node_is_no_news(stopped: bool) -> None:
    """A launch that is refused leaves while its first beat may be under way: it says why, and nothing else."""
    board, heartbeat = a_heartbeat()
    link = Refusing(None, psycopg.OperationalError("gone"))
    heartbeat._link = cast(Link, cast(Any, link))
    if stopped:
        heartbeat.stop()

    report = Report(node_id=uuid4(), load=0, draining=False, orphans=(), executions=())
    heartbeat._beat(report, late_seconds=0)

    assert len(link.told) == (0 if stopped else 1)
    board.close()


def _nothing(*_: object) -> None: ...


class Looking:
    """A store whose beats take long, and which keeps whether they were to look for work."""

    def __init__(self) -> None:
        self.looked: list[bool] = []

    def beat(self, _node: UUID, *, look: bool, **_: object) -> BeatAnswer:
        self.looked.append(look)
        select.select([], [], [], 0.05)
        return a_beat_answer()


class Answering(Refusing):
    """A link with such a store."""

    def __init__(self) -> None:
        super().__init__(object(), psycopg.OperationalError())
        self.beats = Looking()

    def store(self) -> Any:
        return self.beats

    def succeeded(self) -> None: ...

    def drop(self) -> None: ...


def carried(heartbeat: Heartbeat, count: int) -> list[int]:
    """Have it carry operations that take a moment each; which it has carried out."""
    done: list[int] = []

    def an_operation(number: int) -> Operation:
        def run(_store: object) -> None:
            select.select([], [], [], 0.05)
            done.append(number)

        return Operation(run, _nothing, None, 5.0)

    heartbeat.carry(map(an_operation, range(count)))
    return done


def test_what_is_carried_over_after_an_outage_holds_up_no_beat() -> None:
    """However much it is: the lease hangs on the next beat, and what others see of this node."""
    board, heartbeat = a_heartbeat()
    heartbeat._link = cast(Link, cast(Any, Answering()))
    done = carried(heartbeat, 40)

    heartbeat._carry_out()
    assert 5 <= len(done) < 30, "a second of them, as long as from beat to beat"
    heartbeat._carry_out()
    heartbeat._carry_out()
    assert done == list(range(40))
    board.close()


def test_who_beats_no_more_carries_out_what_it_has() -> None:
    """A node leaves: that it does so has waited for the other connection."""
    board, heartbeat = a_heartbeat()  # which has nothing to report
    heartbeat._link = cast(Link, cast(Any, Answering()))
    done = carried(heartbeat, 2)
    heartbeat.start()

    wait_until(lambda: done == [0, 1], what="both are carried out")

    heartbeat.stop()
    heartbeat.join()
    board.close()


def test_a_beat_that_took_long_to_look_for_work_leaves_that_out_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While somebody holds an old snapshot, looking where nothing waits passes over all that was claimed: every
    second, on every node, and the lease hangs on it."""
    board, heartbeat = a_heartbeat()
    link = Answering()
    heartbeat._link = cast(Link, cast(Any, link))
    monkeypatch.setattr(Heartbeat, "_announce", _nothing)
    report = Report(node_id=uuid4(), load=0, draining=False, orphans=(), executions=())

    while link.beats.looked.count(True) < 2:
        assert heartbeat._beat(report, late_seconds=0) is None

    assert len(link.beats.looked) >= 8, "ten times its duration, in which others take as long"
    board.close()
