"""Waiting for what another process does: a condition, looked at often, with a bound."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], *, seconds: float = 10.0, what: str = "") -> None:
    """Return as soon as the condition holds; fail the test when it does not within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {what or condition}")
        time.sleep(0.002)
