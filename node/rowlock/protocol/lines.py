"""Where in the lines of the executions a node begins to look for work.

A claim begins at the head of each line and takes what waits there. While somebody holds an old snapshot (a report in one
long transaction, a replication slot) the database must keep everything that was claimed since, and each claim passes over
all of it: half a millisecond for each thousand, without end. So a node that claims looks now and then up to which place
nothing waits. If that takes long, its claims begin there.

What comes back before that place (a retry, work of a lost node) is seen at the next look, which is due when ten times the
duration of the last one has passed. So looking takes at most a tenth of the time, however long the lines become.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final
from uuid import UUID

from rowlock.protocol.model import Claim, Place

LOOK_SECONDS: Final = 1.0
"""How often to look while there is nothing to save."""
SLOW_SECONDS: Final = 0.003
"""A look that takes longer has passed over much: else it takes about one millisecond."""
SHARE: Final = 10
"""So many times its duration passes until a slow look is repeated."""


class Lines:
    """Up to which place of each line nothing waits, as far as one node knows; times are monotonic seconds."""

    def __init__(self) -> None:
        self.passed: dict[UUID, Place] = {}
        self._look_at = float("-inf")

    def must_look(self, now: float) -> bool:
        """Whether to ask the database up to where nothing waits, before the next claim."""
        return now >= self._look_at

    def looked(self, found: Mapping[UUID, Place], began: float, ended: float) -> None:
        """Take in the answer. If it came soon there is nothing to save: claims begin at the heads."""
        seconds = ended - began
        slow = seconds >= SLOW_SECONDS
        self.passed = dict(found) if slow else {}
        self._look_at = ended + (SHARE * seconds if slow else LOOK_SECONDS)

    def claimed(self, claims: Iterable[Claim]) -> None:
        """Take in what a claim has brought: nothing waits before it, but for what others had locked."""
        for claim in claims:
            passed = self.passed.get(claim.execution_id)
            if passed is not None and not claim.alone:  # such stand in a line of their own
                self.passed[claim.execution_id] = max(
                    passed, (claim.weight, claim.id), key=_in_the_line
                )


def _in_the_line(place: Place) -> tuple[int, int]:
    weight, number = place
    return -weight, number
