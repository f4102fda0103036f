"""How long to wait before trying again: exponential, capped, with full jitter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

EXPONENT_MAX: Final = 60
"""The exponent is bounded before it is used: factor ** 1000 is no number any more."""


def delay_seconds(policy: Mapping[str, Any], *, failures: int, draw: float) -> float:
    """The wait before the next attempt of a partition.

    :param policy: the execution's policy: initial_seconds, factor, max_seconds.
    :param failures: how often the partition has failed, this time included.
    :param draw: a random number in [0, 1).
    """
    exponent = min(max(failures - 1, 0), EXPONENT_MAX)
    ceiling = float(policy["initial_seconds"]) * float(policy["factor"]) ** exponent
    return draw * min(ceiling, float(policy["max_seconds"]))


def reconnect_seconds(*, tries: int, cap_seconds: float, draw: float) -> float:
    """The wait before connecting again after `tries` failures in a row; at most `cap_seconds`."""
    ceiling: float = 0.05 * 2 ** min(tries, EXPONENT_MAX)
    return draw * min(ceiling, cap_seconds)
