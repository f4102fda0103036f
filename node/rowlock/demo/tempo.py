"""How fast the demonstration goes: heartbeats, and the pace that the jobs are asked to keep.

The arithmetic between the times is that of the defaults: five beats make a node unreachable, five
more remove it, and it stops its own work before that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rowlock.settings import Settings

WORK_MS: Final = 10
"""What a partition takes by itself, about, in milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tempo:
    """One tempo of the whole demonstration. All times are in seconds."""

    beat_seconds: float
    unreachable_seconds: float
    removal_grace_seconds: float
    lease_margin_seconds: float
    calm_seconds: float
    """How long an act runs undisturbed before a node is killed."""
    rest_seconds: float
    """How long an act should still have work after the victim's was taken back."""
    look_seconds: float
    """Time between two looks into the database."""
    slots: int
    """Partitions that each node runs at a time."""
    chunk_flights: int
    """Flights between two checkpoints of the first act."""

    @property
    def removal_seconds(self) -> float:
        """How long a killed node is silent before its work goes to others."""
        return self.unreachable_seconds + self.removal_grace_seconds

    def environment(self) -> dict[str, str]:
        """The settings of the nodes, as environment variables."""
        return {
            "ROWLOCK_BEAT_SECONDS": f"{self.beat_seconds:g}",
            "ROWLOCK_UNREACHABLE_SECONDS": f"{self.unreachable_seconds:g}",
            "ROWLOCK_REMOVAL_GRACE_SECONDS": f"{self.removal_grace_seconds:g}",
            "ROWLOCK_LEASE_MARGIN_SECONDS": f"{self.lease_margin_seconds:g}",
            # Nothing runs any more when the nodes are asked to leave, unless the person at the
            # terminal has interrupted them, and does not want to wait.
            "ROWLOCK_DRAIN_SECONDS": "1",
        }

    def pace_ms(self, *, nodes: int, partitions: int) -> int:
        """How long a partition must wait, in milliseconds, for an act to last as long as it should.

        It must still have work when the victim's comes back, or nobody would see it move.
        """
        alone_seconds = self.removal_seconds + self.rest_seconds
        slot_seconds = self.slots * (nodes * self.calm_seconds + (nodes - 1) * alone_seconds)
        return max(1, round(1000 * slot_seconds / partitions) - WORK_MS)


WATCHED: Final = Tempo(
    beat_seconds=0.5,
    unreachable_seconds=2.5,
    removal_grace_seconds=2.5,
    lease_margin_seconds=0.5,
    calm_seconds=1.5,
    rest_seconds=0.5,
    look_seconds=0.05,
    slots=2,
    chunk_flights=250,
)
"""For a person: half of the default times, because ten seconds of waiting are long."""

FAST: Final = Tempo(
    beat_seconds=0.2,
    unreachable_seconds=1.0,
    removal_grace_seconds=1.0,
    lease_margin_seconds=0.4,
    calm_seconds=0.2,
    rest_seconds=0.2,
    look_seconds=0.02,
    slots=1,
    chunk_flights=500,
)
"""For tests, which want the same facts for less work: fewer processes, fewer transactions."""


def in_words(tempo: Tempo) -> str:
    """The heartbeat, beside what a node does by default."""
    default = Settings()
    return (
        f"Heartbeat {tempo.beat_seconds:g} s, removal after {tempo.removal_seconds:g} s of silence"
        f" (defaults: {default.beat_seconds:g} s and {default.removal_seconds:g} s)."
    )
