"""How long the slow ones of many calls take, told so that neither a busy machine nor a lucky moment decides it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

STRETCH: Final = {95: 40, 99: 100}
"""By percentile: how many calls make a stretch. In a shorter one a single call would decide."""


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def percentile(values: Sequence[float], percent: int) -> float:
    """The lowest of the values that so many per cent of them do not exceed (the nearest rank)."""
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]


def slow_ones(values: Sequence[float], percent: int = 95) -> float:
    """The median, over stretches of calls that follow one another, of each one's percentile.

    Something else that the machine does for a moment spoils some stretches and moves the median little. What
    slows a share of all calls is in most of them, and cannot be missed; `tests/unit/test_latency.py` tries it.

    Args:
        values: Seconds, in the order of the calls; what fills no stretch at the end is left out.
        percent: 95 or 99.
    """
    length = STRETCH[percent]
    assert len(values) >= 5 * length, f"{len(values)} calls are no five stretches of {length}"
    starts = range(0, len(values) - length + 1, length)
    return statistics.median(percentile(values[at : at + length], percent) for at in starts)
