"""Failure detection: what an observer may conclude from beats, on its own clock alone.

An observer removes a peer only after successful looks of its own, never more than two beats apart,
have shown the same beat for long enough. A failed or late look starts the observation again, so that
outages, suspended observers, clock steps and promotions of the database harm nobody.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias
from uuid import UUID

from rowlock.protocol.model import Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkUnreachable:
    """Phase one: the peer has shown this beat for *unreachable* seconds."""

    node_id: UUID
    beat: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """Phase two: the peer has shown this beat for *unreachable* plus *removal grace* seconds."""

    node_id: UUID
    beat: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeekEvidence:
    """The peer has missed two beats: its connections may show that it is gone."""

    node_id: UUID
    beat: int


Verdict: TypeAlias = MarkUnreachable | Remove | SeekEvidence

_MISSED_BEATS: Final = 2 - 0.1
"""Two, less what one look takes: the third look at a beat is sent two beats after the first was."""


@dataclass(slots=True)
class _Sight:
    beat: int
    since: float


class Observer:
    """One node's observation of all its peers. Times are seconds on one monotonic clock."""

    def __init__(
        self, *, beat_seconds: float, unreachable_seconds: float, removal_grace_seconds: float
    ) -> None:
        self._gap_seconds = 2 * beat_seconds
        self._missed_seconds = _MISSED_BEATS * beat_seconds
        self._unreachable_seconds = unreachable_seconds
        self._removal_seconds = unreachable_seconds + removal_grace_seconds
        self._sights: dict[UUID, _Sight] = {}
        self._answered_at: float | None = None
        self._connection: int | None = None

    def look_failed(self) -> None:
        """A look had no answer: whatever was observed before proves nothing any more."""
        self._answered_at = None
        self._sights.clear()

    def look(
        self,
        *,
        sent_at: float,
        answered_at: float,
        peers: Iterable[Peer],
        connection: int | None = None,
    ) -> list[Verdict]:
        """Take in one look and say what it proves.

        The beats were read at some time between the sending of the question and its answer, so a
        silence is only as long as from the answer of its first look to the sending of this one.

        Args:
            connection: Which one the look came over, another number for each. Whatever ended the one
                before may have ended those of peers as well. None: no evidence is to be sought.
        """
        late = (
            self._answered_at is None
            or connection != self._connection
            or sent_at - self._answered_at > self._gap_seconds
            or answered_at - sent_at > self._gap_seconds
        )
        self._answered_at = answered_at
        self._connection = connection
        seen: dict[UUID, _Sight] = {}
        verdicts: list[Verdict] = []
        for peer in peers:
            known = self._sights.get(peer.node_id)
            if late or known is None or known.beat != peer.beat:
                seen[peer.node_id] = _Sight(peer.beat, answered_at)
                continue
            seen[peer.node_id] = known
            silence = sent_at - known.since
            if not peer.unreachable and silence >= self._unreachable_seconds:
                verdicts.append(MarkUnreachable(node_id=peer.node_id, beat=peer.beat))
            if peer.unreachable and silence >= self._removal_seconds:
                verdicts.append(Remove(node_id=peer.node_id, beat=peer.beat))
            elif connection is not None and silence >= self._missed_seconds:
                verdicts.append(SeekEvidence(node_id=peer.node_id, beat=peer.beat))
        self._sights = seen
        return verdicts
