"""What a node does about its peers and its own lost answers, where the connection breaks in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import pytest

from rowlock.protocol.model import Evident, Peer, Recovered
from rowlock.runtime.heartbeat import Look
from rowlock.runtime.watch import LATE_SECONDS_MAX, Watch
from rowlock.runtime.watchdog import LeaseBoard
from rowlock.settings import Settings
from tests.runtime.test_attempts import a_host
from tests.support.builders import a_beat_answer

SWEEP_SECONDS = 3.6
"""The longest time between two sweeps here."""
NOTHING = Evident(acted=False, moved=0, failed=0, freed=0)


@dataclass
class Work:
    """In place of the thread of the work connection: it carries out when the test says so."""

    connection: object = field(default_factory=object)
    queue: list[tuple[Callable[[Any], Any], Callable[[Any], None]]] = field(
        default_factory=list[tuple[Callable[[Any], Any], Callable[[Any], None]]]
    )
    evidence_asked: int = 0

    def ask(
        self,
        run: Callable[[Any], Any],
        done: Callable[[Any], None],
        _failed: Callable[[Exception], None],
    ) -> None:
        self.queue.append((run, done))

    def carry_out(self, over: object) -> None:
        """Carry out what waits, over this connection."""

        def recover_by_evidence(*_: object) -> Evident:
            self.evidence_asked += 1
            return NOTHING

        def recover(*_: object) -> Recovered:
            return Recovered(0, 0, 0)

        def end_stranded() -> int:
            return 0

        store = SimpleNamespace(
            connection=over,
            recover_by_evidence=recover_by_evidence,
            recover=recover,
            end_stranded=end_stranded,
        )
        waiting, self.queue = self.queue, []
        for run, done in waiting:
            done(run(store))


@dataclass
class Desk:
    """One node's watch, over a work connection that the test answers for."""

    watch: Watch
    work: Work

    def misses_two_beats(self, peer: UUID) -> None:
        """Three looks, a beat apart, show the same beat of a peer."""
        for at in (0.0, 1.0, 2.0):
            answer = a_beat_answer(Peer(node_id=peer, beat=7, unreachable=False))
            self.watch.look(
                Look(
                    node_id=uuid4(),
                    answer=answer,
                    sent_at=at,
                    answered_at=at,
                    late_seconds=0.0,
                    connection=1,
                    clock_offset_seconds=0.0,
                )
            )

    def sweeps(self, count: int) -> list[bool]:
        """Let time pass in the longest steps of a sweep: which of them have compared."""
        found: list[bool] = []
        for number in range(count):
            compared: list[int] = []
            now = time.monotonic() + (number + 1) * SWEEP_SECONDS
            self.watch.turn(now, lambda: compared.append(1))  # noqa: B023  called at once
            self.work.carry_out(self.work.connection)
            found.append(bool(compared))
        return found


@pytest.fixture
def desk() -> Generator[Desk]:
    work, board = Work(), LeaseBoard.create(1)
    host = a_host(cast(Any, work), board)
    host.settings = Settings(poll_seconds=SWEEP_SECONDS / 1.2)
    yield Desk(Watch(host), work)
    board.close()


def test_evidence_is_asked_for_over_the_connection_that_stood_when_the_peer_was_silent(
    desk: Desk,
) -> None:
    desk.misses_two_beats(uuid4())

    desk.work.carry_out(desk.work.connection)

    assert desk.work.evidence_asked == 1


@pytest.mark.parametrize("stood", [True, False], ids=["another", "the first"])
def test_a_question_for_evidence_that_waits_over_a_reconnect_is_not_asked(
    desk: Desk, stood: bool
) -> None:
    """What ended the connection may have ended those of the peer, which is alive and not back yet."""
    if not stood:
        desk.work.connection = None
    desk.misses_two_beats(uuid4())

    desk.work.carry_out(object())
    assert desk.work.evidence_asked == 0

    desk.work.connection = object()
    desk.misses_two_beats(uuid4())
    desk.work.carry_out(desk.work.connection)
    assert desk.work.evidence_asked == 1


def test_after_a_reconnect_a_node_compares_until_no_late_claim_can_come(desk: Desk) -> None:
    """The network may deliver a claim of the lost connection after the comparison of the new one."""
    desk.watch.reconnected()

    assert 2 * SWEEP_SECONDS < LATE_SECONDS_MAX < 3 * SWEEP_SECONDS
    assert desk.sweeps(7) == [True, True, True, False, False, True, False]


def test_a_node_whose_connection_stands_compares_seldom(desk: Desk) -> None:
    assert desk.sweeps(7) == [False, False, False, False, False, True, False]
