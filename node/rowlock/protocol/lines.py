"""Where in the lines of the executions a node begins to look for work.

A claim begins at the head of each line and takes what waits there. While somebody holds an old snapshot (a report in one
long transaction, a replication slot) the database must keep everything that was claimed since, and each claim passes over
all of it: half a millisecond for each thousand, without end. So a node that claims looks now and then up to which place
of each line nothing waits. Where finding that takes long, its claims begin there.

What comes back before that place (a retry, work of a lost node) is seen at the next look, which is due when ten times the
duration of the last one has passed, and at the latest after ten seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final
from uuid import UUID

from rowlock.protocol.model import Claim, Place

SLOW_SECONDS: Final = 0.001
"""A line in which finding the first takes longer is one in which much must be passed over."""
LOOK_SECONDS: Final = 1.0
"""How often to look while there is no such line."""
SHARE: Final = 10
"""So many times its duration passes until a look is repeated..."""
LOOK_SECONDS_MAX: Final = 10.0
"""...or, when it had no answer or was very slow, so long."""


def pause_seconds(seconds: float) -> float:
    """How long not to repeat a look that took so long."""
    return min(SHARE * seconds, LOOK_SECONDS_MAX)


class Lines:
    """Up to which place of a line nothing waits, as far as one node knows; times are monotonic seconds."""

    def __init__(self) -> None:
        self.passed: dict[UUID, Place] = {}
        self._look_at = float("-inf")

    def must_look(self, now: float) -> bool:
        """Whether to ask the database now. Should there be no answer, what is known is used meanwhile."""
        due = now >= self._look_at
        if due:
            self._look_at = now + LOOK_SECONDS_MAX
        return due

    def looked(self, found: Mapping[UUID, Place], began: float, ended: float) -> None:
        """Take in the answer: the lines in which claims are not to begin at the head."""
        self.passed = dict(found)
        self._look_at = ended + (pause_seconds(ended - began) if found else LOOK_SECONDS)

    def claimed(self, claims: Iterable[Claim]) -> None:
        """Take in what a claim has brought: nothing waits before it, but for what others had locked.

        Not by what was prefetched: a claim leaves what was lost before it, which must not wait in a queue.
        """
        for claim in claims:
            passed = self.passed.get(claim.execution_id)
            # What must run alone stands in a line of its own.
            if passed is not None and claim.started and not claim.alone:
                self.passed[claim.execution_id] = max(
                    passed, (claim.weight, claim.id), key=_in_the_line
                )


def _in_the_line(place: Place) -> tuple[int, int]:
    weight, number = place
    return -weight, number
