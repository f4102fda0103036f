"""The beat: a thread and a connection of its own, so that nothing else can hold it up.

The thread beats, extends the lease by the moment the answered beat was *sent*, and posts the answer.
It speaks for the whole node: it stops beating when the main loop stands still, and it carries the
waiting operations of a work connection that has failed for too long.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import psycopg

from rowlock.db.store import Connection, Observe, Store
from rowlock.errors import Unavailable
from rowlock.protocol.backoff import reconnect_seconds
from rowlock.protocol.lines import pause_seconds
from rowlock.protocol.model import BeatAnswer, Evidence
from rowlock.runtime.link import Link
from rowlock.runtime.mailbox import Mailbox
from rowlock.runtime.watchdog import LeaseBoard, boottime_ns
from rowlock.runtime.work import Operation, carry_out

log = logging.getLogger(__name__)


_WHY: Final[Mapping[Evidence, str]] = {
    "on": "the connections of this node can prove its death",
    "off": "ROWLOCK_EVIDENCE=off",
    "pooler": "ROWLOCK_DSN leads through a pooler, whose connections prove nothing about this node;"
    " its loss, and that of others, is noticed here by silence only",
    "unreadable": "the owner of the schema may not see which backends live; a superuser can let it:"
    " GRANT pg_read_all_stats TO rowlock_owner",
    "hidden": "this service does not show since when its server runs (no checkpointer in pg_stat_activity), and"
    " nothing can be granted: the loss of nodes is noticed by silence only",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a node says of itself with each beat."""

    node_id: UUID
    """The incarnation that beats."""
    load: int
    draining: bool
    orphans: tuple[Mapping[str, Any], ...]
    executions: tuple[UUID, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """An answered beat, with the times of question and answer on the monotonic clock."""

    node_id: UUID
    answer: BeatAnswer
    sent_at: float
    answered_at: float
    late_seconds: float
    """How much later than it was due the beat was sent."""
    connection: int | None
    """Which connection it came over, counted from 1; None: no evidence is to be sought over it."""
    clock_offset_seconds: float
    """How far this machine's clock is ahead of the database's, give or take half the round trip."""


class Heartbeat(threading.Thread):
    """Beats for the incarnation that `report` names; None means: nothing is registered yet."""

    def __init__(
        self,
        dsn: str,
        mailbox: Mailbox,
        board: LeaseBoard,
        *,
        application_name: str,
        beat_seconds: float,
        lease_seconds: float,
        limit_seconds: float,
        reconnect_cap_seconds: float,
        evidence: bool,
        report: Callable[[], Report | None],
        is_turning: Callable[[], bool],
        on_look: Callable[[Look], None],
        on_failure: Callable[[Exception], None],
        on_crash: Callable[[Exception], None],
        observe: Observe | None = None,
        rng: random.Random,
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._mailbox = mailbox
        self._board = board
        self._beat_seconds = beat_seconds
        self._lease_ns = int(lease_seconds * 1e9)
        self._limit_seconds = limit_seconds
        self._cap_seconds = reconnect_cap_seconds
        self._wants_evidence = evidence
        self._evidence: Evidence = "on" if evidence else "off"
        self._announced: tuple[Connection | None, UUID | None] = (None, None)
        self._connections = 0
        self._report = report
        self._is_turning = is_turning
        self._on_look = on_look
        self._on_failure = on_failure
        self._on_crash = on_crash
        self._rng = rng
        self._link = Link(
            dsn,
            application_name=application_name,
            idle_in_transaction_seconds=beat_seconds,
            # What is carried over may wait for a lock that a stranger holds; the beats must not.
            lock_seconds=beat_seconds,
            observe=observe,
        )
        self._wake = threading.Event()
        self._stopping = False
        self._carried: deque[Operation] = deque()
        self._sent_at: float | None = None
        self.turned_at = time.monotonic()
        """When this loop last turned (monotonic)."""
        self.answered_at: float | None = None
        """When a beat was last answered (monotonic)."""
        self._refused_at: float | None = None
        """When the database last refused a beat, over a connection that stands (monotonic)."""
        self._look_at = -math.inf

    # -- for the main thread -------------------------------------------------------------------

    def hurry(self) -> None:
        """Beat now."""
        self._wake.set()

    def carry(self, operations: Iterable[Operation]) -> None:
        """Carry out these operations over this connection, after the next beat."""
        self._carried.extend(operations)
        self._wake.set()

    def end_stuck(self, now: float) -> None:
        """Break the connection if a beat has no answer for too long."""
        sent_at = self._sent_at
        if sent_at is not None and now - sent_at > self._limit_seconds:
            self._sent_at = now
            self._link.shut()

    def stop(self) -> None:
        """End the thread."""
        self._stopping = True
        self._wake.set()
        self._link.shut()

    def has_beaten_since(self, moment: float) -> bool:
        """Whether a beat was answered after a moment (monotonic), over a connection that stands.

        Or refused: a schema that has gone on may lack what a beat needs, and only the other connection
        finds out why.
        """
        heard = [at for at in (self.answered_at, self._refused_at) if at is not None]
        return max(heard, default=-math.inf) >= moment and self._link.connection is not None

    def connect(self) -> None:
        """Open the connection, if there is none. From any thread.

        :raises Unavailable: the database cannot be reached, or has no room.
        """
        self._link.open()

    @property
    def is_beating(self) -> bool:
        """Whether a beat is on its way; a frozen database can keep one waiting."""
        return self._sent_at is not None

    # -- the thread ----------------------------------------------------------------------------

    def run(self) -> None:
        """Beat until stopped."""
        try:
            self._beat_on()
        except Exception as error:  # noqa: BLE001  a node that cannot beat any more must not live on
            crash = error
            self._mailbox.post(lambda: self._on_crash(crash))
        self._link.drop()

    def _beat_on(self) -> None:
        due = time.monotonic()
        while not self._stopping:
            self.turned_at = time.monotonic()
            self._wake.wait(max(0.0, due - self.turned_at))
            self._wake.clear()
            report = self._report()
            if report is None:
                self._carry_out()  # for a node that leaves, and beats no more
            if report is None or not self._may_beat():
                due = time.monotonic() + self._beat_seconds
                continue
            started = time.monotonic()
            error = self._beat(report, late_seconds=max(0.0, started - due))
            if error is None:
                self._carry_out()
                due = started + self._beat_seconds
            else:
                due = time.monotonic() + reconnect_seconds(
                    tries=self._link.tries, cap_seconds=self._cap_seconds, draw=self._rng.random()
                )

    def _may_beat(self) -> bool:
        if self._is_turning():
            return True
        log.error(
            "the main loop stands still: this node stops beating", extra={"event": "beat_withheld"}
        )
        return False

    def _beat(self, report: Report, *, late_seconds: float) -> Exception | None:
        self._sent_at = time.monotonic()
        try:
            store = self._link.store()
            self._announce(store, report.node_id)
            sent_ns = boottime_ns()
            sent_at = self._sent_at = time.monotonic()
            answer = store.beat(
                report.node_id,
                load=report.load,
                draining=report.draining,
                orphans=report.orphans,
                executions=report.executions,
                look=sent_at >= self._look_at,
            )
        except (psycopg.Error, Unavailable) as error:
            failure = error
            self._link.failed(failure)
            self._mailbox.post(lambda: self._on_failure(failure))
            if self._link.connection is not None:
                self._refused_at = time.monotonic()
                log.debug("beat failed: %s", failure, extra={"event": "beat_failed"})
            elif not self._stopping:  # else it was cut off on purpose
                self._link.tell(failure)
            return failure
        finally:
            self._sent_at = None
        self._link.succeeded()
        answered_at, wall = time.monotonic(), time.time()
        if sent_at >= self._look_at:
            # Who waits for work is told of it; this look is for when that was missed. Where nothing waits in a
            # line in which much was claimed under an old snapshot, it may take a second.
            self._look_at = answered_at + pause_seconds(answered_at - sent_at)
        if answer.alive:
            self._board.extend(sent_ns + self._lease_ns)
            self.answered_at = answered_at
        look = Look(
            node_id=report.node_id,
            answer=answer,
            sent_at=sent_at,
            answered_at=answered_at,
            late_seconds=late_seconds,
            connection=self._connections if self._evidence == "on" else None,
            clock_offset_seconds=wall - (answered_at - sent_at) / 2 - answer.at.timestamp(),
        )
        self._mailbox.post(lambda: self._on_look(look))
        return None

    def _announce(self, store: Store, node_id: UUID) -> None:
        """Before the first beat of an incarnation, or over a new connection: whose backend this is."""
        connection, known = self._announced
        if connection is store.connection and known == node_id:
            return
        before = self._evidence
        self._evidence = store.connected(node_id, "beat", evidence=self._wants_evidence)
        if connection is not store.connection:
            self._connections += 1
        self._announced = store.connection, node_id
        if self._evidence != before:
            log.warning(
                "evidence is %s: %s",
                "on" if self._evidence == "on" else "off",
                _WHY[self._evidence],
                extra={"event": "evidence_changed", "evidence": self._evidence},
            )

    def _carry_out(self) -> None:
        """For no longer than a beat: the lease hangs on the next one, and after an outage there may be much."""
        until = time.monotonic() + self._beat_seconds
        for _ in range(len(self._carried)):
            if time.monotonic() > until:
                return
            operation = self._carried.popleft()
            self._sent_at = time.monotonic()  # for `end_stuck`
            error = carry_out(operation, self._link, self._mailbox)
            self._sent_at = None
            if error is None:
                continue
            if operation.is_repeated_after(error):
                # In order, unless the database answers, and refuses this one alone.
                broken = self._link.connection is None
                (self._carried.appendleft if broken else self._carried.append)(operation)
            return  # beat first
