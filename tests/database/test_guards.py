"""Every guard of the SQL is needed: weaken one, and something that is promised breaks."""

import pytest

from tests.database.guards import (
    MUTANTS,
    Guard,
    functions,
    guards,
    marks_in_the_files,
    replaced,
    weakened,
)
from tests.support.builders import Scene
from tests.support.postgres import Database


def test_every_guard_has_a_mutant_and_every_mutant_a_guard() -> None:
    assert {guard.key for guard in guards()} == set(MUTANTS)


def test_no_guard_is_overlooked() -> None:
    """Marks outside of functions would never be weakened."""
    assert len(guards()) == marks_in_the_files() > 50


@pytest.mark.parametrize("guard", guards(), ids=lambda guard: guard.key)
def test_a_weakened_guard_is_noticed(shared: Database, guard: Guard) -> None:
    mutant = MUTANTS[guard.key]

    with (
        Scene(shared) as scene,
        replaced(scene, weakened(guard, mutant), functions()[guard.function]),
        pytest.raises(mutant.dies_of),
    ):
        mutant.scenario(scene)

    # After the mutant, in the same database: neither its traces nor the scenario itself are to blame.
    with Scene(shared) as scene:
        mutant.scenario(scene)
