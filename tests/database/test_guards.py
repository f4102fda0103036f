"""Every guard of the SQL is needed: weaken one, and something that is promised breaks."""

from pathlib import Path
from typing import Final

import pytest

from tests.database.guards import (
    MUTANTS,
    Guard,
    described,
    functions,
    guards,
    marks_in_the_files,
    replaced,
    weakened,
)
from tests.support.builders import Scene
from tests.support.postgres import Database

PAGE: Final = Path(__file__).parents[2] / "docs" / "protocol.md"


def test_every_guard_has_a_mutant_and_every_mutant_a_guard() -> None:
    assert {guard.key for guard in guards()} == set(MUTANTS)


def test_no_guard_is_overlooked() -> None:
    """Marks outside of functions would never be weakened."""
    assert len(guards()) == marks_in_the_files() > 50


def test_the_page_lists_every_guard_and_what_weakens_it() -> None:
    """`.venv/bin/python -m tests.database.guards` writes the table."""
    chapter = PAGE.read_text().partition("\n## How it is checked\n")[2].partition("\n## ")[0]

    assert [line for line in chapter.splitlines() if line.startswith("|")] == described()


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
