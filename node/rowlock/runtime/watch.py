"""Watch and reap, on every node: what this node does about the beats of its peers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, TypeVar
from uuid import UUID

from rowlock.db.connect import DEFAULTS
from rowlock.db.store import Store
from rowlock.protocol.liveness import MarkUnreachable, Observer, Remove, SeekEvidence
from rowlock.protocol.model import Evident, Recovered
from rowlock.runtime.heartbeat import Look
from rowlock.runtime.host import Host
from rowlock.runtime.work import ignore

T = TypeVar("T")

log = logging.getLogger(__name__)

COMPARE_SWEEPS: Final = 6
"""A node compares itself with the database at every sixth sweep, beside every new connection."""
LATE_SECONDS_MAX: Final = DEFAULTS["tcp_user_timeout"] / 1000
"""How late a statement arrives that a lost connection still had under way: its system gives up after that
(`tcp_user_timeout`)."""
STRANDED_SWEEPS: Final = 3
"""...and looks for transactions whose claim is gone at every third, beside every removal."""
PROMOTE_MAX: Final = 500
"""Delayed partitions made claimable in one statement."""


class Watch:
    """Observes peers by the answers of this node's own beats, and recovers what the dead held."""

    def __init__(self, host: Host) -> None:
        self._host = host
        settings = host.settings
        self._observer = Observer(
            beat_seconds=settings.beat_seconds,
            unreachable_seconds=settings.unreachable_seconds,
            removal_grace_seconds=settings.removal_grace_seconds,
        )
        self._busy: set[str] = set()
        self._sweeps = 0
        self._sweep_at = time.monotonic() + self._jittered_poll()
        self._late_until: float | None = None

    def reconnected(self) -> None:
        """Work goes over another connection: a claim or an adoption of the one before may still come.

        No comparison shows it before it has. So all sweeps compare until none can come any more.
        """
        self._late_until = time.monotonic() + LATE_SECONDS_MAX

    def look_failed(self) -> None:
        """A beat had no answer: the observation starts again."""
        self._observer.look_failed()

    def look(self, look: Look) -> None:
        """Take in the answer of a beat and do what it shows to be due."""
        for verdict in self._observer.look(
            sent_at=look.sent_at,
            answered_at=look.answered_at,
            peers=look.answer.peers,
            connection=look.connection,
        ):
            match verdict:
                case MarkUnreachable():
                    self._mark_unreachable(verdict.node_id, verdict.beat)
                case Remove():
                    self._remove(verdict.node_id, verdict.beat)
                case SeekEvidence():
                    self._seek_evidence(verdict.node_id, verdict.beat)
        if look.answer.unrecovered:
            self._recover()
        if look.answer.due:
            self._promote()
            self._expire()

    def turn(self, now: float, compare: Callable[[], None]) -> None:
        """Every now and then look for what no flag shows: claims without an owner, lost replies."""
        if now < self._sweep_at or not self._host.registered:
            return
        self._sweep_at = now + self._jittered_poll()
        self._sweeps += 1
        self._recover()
        if self._sweeps % COMPARE_SWEEPS == 0 or self._late_until is not None:
            compare()
        if self._late_until is not None and now >= self._late_until:
            self._late_until = None
        if self._sweeps % STRANDED_SWEEPS == 0:
            self._end_stranded()

    def _jittered_poll(self) -> float:
        return self._host.settings.poll_seconds * self._host.rng.uniform(0.8, 1.2)

    def _mark_unreachable(self, peer: UUID, beat: int) -> None:
        me = self._host.node_id

        def done(marked: bool) -> None:
            if marked:
                log.warning(
                    "node %s is unreachable",
                    peer,
                    extra={"event": "node_unreachable", "peer": str(peer), "beat": beat},
                )

        self._once(f"mark {peer}", lambda store: store.mark_unreachable(me, peer, beat), done)

    def _remove(self, peer: UUID, beat: int) -> None:
        me = self._host.node_id

        def done(answer: tuple[bool, Recovered]) -> None:
            removed, recovered = answer
            if removed:
                self._host.metrics.removed("silence")
                self._count(recovered, "silence")
                log.warning(
                    "removed node %s: %d of its claims moved, %d failed",
                    peer,
                    recovered.moved,
                    recovered.failed,
                    extra={"event": "node_removed", "peer": str(peer), "moved": recovered.moved},
                )
                self._end_stranded()

        self._once(f"remove {peer}", lambda store: store.remove_node(me, peer, beat), done)

    def _seek_evidence(self, peer: UUID, beat: int) -> None:
        me = self._host.node_id
        over = self._host.work.connection

        def run(store: Store) -> Evident:
            # It may have waited for its turn. Whatever has ended the connection that stood when the peer was found
            # silent may have ended the peer's as well, which is not back yet. The next beats ask again.
            if store.connection is not over:
                return Evident(acted=False, moved=0, failed=0, freed=0)
            return store.recover_by_evidence(me, peer, beat)

        def done(evident: Evident) -> None:
            if evident.acted:
                self._count(Recovered(evident.moved, evident.failed, 0), "evidence")
                log.warning(
                    "node %s is gone: %d of its claims moved, %d failed, %d executions are free",
                    peer,
                    evident.moved,
                    evident.failed,
                    evident.freed,
                    extra={"event": "node_gone", "peer": str(peer), "moved": evident.moved},
                )
                self._end_stranded()

        self._once(f"seek {peer}", run, done)

    def _recover(self) -> None:
        me = self._host.node_id

        def done(recovered: Recovered) -> None:
            self._count(recovered, "sweep")
            self._host.metrics.reaper_success.set_to_current_time()

        self._once("recover", lambda store: store.recover(me), done)

    def _end_stranded(self) -> None:
        def done(ended: int) -> None:
            if ended:
                log.warning(
                    "ended %d transactions whose claim is gone",
                    ended,
                    extra={"event": "transactions_ended", "count": ended},
                )

        self._once("end stranded", lambda store: store.end_stranded(), done)

    def _promote(self) -> None:
        self._once("promote", lambda store: store.promote(PROMOTE_MAX), ignore)

    def _expire(self) -> None:
        me = self._host.node_id

        def done(ended: int) -> None:
            if ended:
                log.warning(
                    "%d executions have passed their deadline",
                    ended,
                    extra={"event": "executions_expired", "count": ended},
                )

        self._once("expire", lambda store: store.expire(f"node {me}"), done)

    def _count(self, recovered: Recovered, reason: str) -> None:
        metrics = self._host.metrics
        metrics.reassigned(reason, recovered.moved)
        metrics.lost("at_most_once", recovered.unknown)
        metrics.lost("at_least_once", recovered.failed - recovered.unknown)

    def _once(self, name: str, run: Callable[[Store], T], done: Callable[[T], None]) -> None:
        """Not again while the last one of the same kind has no answer."""
        if name in self._busy:
            return
        self._busy.add(name)

        def answered(answer: T) -> None:
            self._busy.discard(name)
            done(answer)

        def failed(_error: Exception) -> None:
            self._busy.discard(name)

        self._host.work.ask(run, answered, failed)
