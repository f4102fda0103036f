"""Where what tests leave to chance comes from: one number for a run, which its header shows and a variable repeats.

    ROWLOCK_TEST_SEED=7 make faults ARGS="-k random_faults"

That repeats the choices of a run, not its times. The fixture `seed` is the number; a test that failed shows it.
"""

from __future__ import annotations

import os
import random

import pytest

VARIABLE = "ROWLOCK_TEST_SEED"

SEEDS = int(os.environ.get("ROWLOCK_FAULT_SEEDS") or 1)
"""From how many seeds each test runs whose faults come at random instants."""


def choose() -> None:
    """Choose the seed of this run, unless the environment has: the processes that it starts have it from there."""
    if not os.environ.get(VARIABLE):
        os.environ[VARIABLE] = str(random.randrange(1 << 32))


def told(seed: int | None = None) -> str:
    """What repeats a test from this seed; None is that of the run."""
    return f"{VARIABLE}={of_this_run() if seed is None else seed}"


def of_this_run() -> int:
    """The seed that was chosen or given."""
    return int(os.environ[VARIABLE])


def several(count: int) -> pytest.MarkDecorator:
    """Run a test from so many seeds: that of the run and those that follow it."""
    return pytest.mark.parametrize("seed", range(count), indirect=True)
