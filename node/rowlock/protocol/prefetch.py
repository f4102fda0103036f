"""How many partitions to keep ready beyond the free slots: enough to hide a round trip, no more.

What a node keeps ready, another cannot take. So only work that takes milliseconds is prefetched, and
only as much as the node does in a tenth of a second.
"""

from __future__ import annotations

from typing import Final

HORIZON_SECONDS: Final = 0.1
PREFETCH_MAX: Final = 256
_MEAN_WEIGHT: Final = 0.05


class Pace:
    """A moving mean of how long the attempts of this node take, seconds."""

    def __init__(self) -> None:
        self.mean_seconds: float | None = None

    def note(self, seconds: float) -> None:
        """Take in one attempt. A long one counts at once, a short one little by little."""
        if self.mean_seconds is None or seconds > 10 * self.mean_seconds:
            self.mean_seconds = seconds
        else:
            self.mean_seconds += _MEAN_WEIGHT * (seconds - self.mean_seconds)

    def prefetch(self, slots: int) -> int:
        """How many partitions to keep ready for this many slots."""
        if self.mean_seconds is None or self.mean_seconds * 2 > HORIZON_SECONDS:
            return 0
        return min(PREFETCH_MAX, int(slots * HORIZON_SECONDS / max(self.mean_seconds, 1e-6)))
