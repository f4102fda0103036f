"""Waiting for what another process does: a condition, looked at often, with a bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

SLACK_SECONDS: Final = 4.0
"""What a machine with other work may add to a time that is promised."""


def wait_until(
    condition: Callable[[], object],
    *,
    seconds: float = 10.0,
    what: str = "",
    every_seconds: float = 0.002,
) -> None:
    """Return as soon as the condition holds; fail the test when it does not within `seconds`.

    `every_seconds` is the pause between two looks: longer for a condition that costs something.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {what or condition}")
        time.sleep(every_seconds)
