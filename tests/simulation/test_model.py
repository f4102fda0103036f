"""The protocol, tried in every order for a few nodes; and coordination by names, which fails at once.

Each scope is explored to its end: no step breaks a guarantee, and from every state the execution can still
end without another fault. The functions that are explored are those that the simulation holds the SQL to.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import pytest

from tests.simulation.explore import Left, Scope, explore, start
from tests.simulation.model import NAIVE, RULES

OFTEN: Final = "AT_LEAST_ONCE"
ONCE: Final = "AT_MOST_ONCE"


class Case(NamedTuple):
    """What is explored, and the kinds of steps without which it would show nothing."""

    delivery: str
    nodes: int
    left: Left
    scope: Scope
    shows: frozenset[str]


CASES: Final = {
    "a node is removed, an answer lost": Case(
        OFTEN,
        2,
        Left(suspicions=1, replies=1),
        Scope(claims=2, failures=False),
        frozenset({"is removed", "compares what it holds", "hears that it was removed"}),
    ),
    "an attempt fails, a node is removed": Case(
        OFTEN, 2, Left(suspicions=1), Scope(claims=2), frozenset({"is removed", "beats"})
    ),
    "a node crashes, another comes": Case(
        OFTEN,
        2,
        Left(crashes=1, incarnations=1),
        Scope(claims=2, failures=False),
        frozenset({"crashes", "registers", "recovers"}),
    ),
    "a cancel comes between": Case(
        OFTEN,
        2,
        Left(suspicions=1, cancels=1),
        Scope(claims=2, failures=False),
        frozenset({"cancels execution 0", "half-cancels execution 0", "is removed"}),
    ),
    "once: an answer is lost, a node removed": Case(
        ONCE,
        2,
        Left(suspicions=1, replies=1),
        Scope(claims=2, failures=False),
        frozenset({"is removed", "compares what it holds"}),
    ),
    "once: among three nodes": Case(
        ONCE, 3, Left(suspicions=1), Scope(claims=2, failures=False), frozenset({"is removed"})
    ),
    "once: cancelled and restarted": Case(
        ONCE,
        2,
        Left(suspicions=1, cancels=1, restarts=1),
        Scope(claims=1, failures=False),
        frozenset({"restarts execution 0", "is removed"}),
    ),
    "a node is taken for gone, and removed": Case(
        OFTEN,
        2,
        Left(evidence=1, suspicions=1),
        Scope(claims=2, failures=False),
        frozenset({"is taken for gone", "is removed", "beats"}),
    ),
    "once: a node is taken for gone, and removed": Case(
        ONCE,
        2,
        Left(evidence=1, suspicions=1),
        Scope(claims=2, failures=False),
        frozenset({"is taken for gone", "is removed"}),
    ),
    "masters: one is taken for gone": Case(
        OFTEN,
        2,
        Left(evidence=1),
        Scope(claims=1, failures=False, planning=True),
        frozenset({"is taken for gone", "adopts execution 0", "finishes"}),
    ),
    "masters: an answer is lost, one is replaced": Case(
        OFTEN,
        2,
        Left(suspicions=1, replies=1),
        Scope(claims=1, failures=False, planning=True),
        frozenset({"adopts execution 0", "stages its plan", "seals its plan", "finishes"}),
    ),
    "masters: one crashes, another node comes": Case(
        OFTEN,
        2,
        Left(crashes=1, incarnations=1),
        Scope(claims=1, failures=False, planning=True),
        frozenset({"adopts execution 0", "crashes", "finishes"}),
    ),
    "masters: one is replaced, a cancel comes between": Case(
        OFTEN,
        2,
        Left(suspicions=1, cancels=1),
        Scope(claims=1, failures=False, planning=True),
        frozenset({"cancels execution 0", "finishes"}),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_nothing_breaks_in_any_order(case: Case) -> None:
    world = start(
        delivery=case.delivery,
        nodes=case.nodes,
        left=case.left,
        planning=case.scope.planning,
    )

    found = explore(world, case.scope)

    assert found.broken == "", "\n".join(found.trace)
    assert found.stuck == (), "\n".join(found.stuck)
    for wanted in case.shows:
        assert any(label.startswith(wanted) for label in found.labels), wanted


def test_without_tokens_under_one_name_a_zombie_completes_what_another_attempt_runs() -> None:
    world = start(delivery=OFTEN, nodes=2, left=Left(suspicions=1))

    found = explore(world, Scope(rules=NAIVE, slots=2))

    assert found.broken.startswith("G3")
    assert _deeds(found.trace) == [
        "claims",
        "begins",
        "is marked",
        "is removed",
        "beats",  # as the node that it was
        "claims",
        "completing",  # the attempt from before: accepted, while the new one has not begun
    ]


def test_without_takeover_and_starts_a_restart_runs_what_still_runs() -> None:
    world = start(delivery=ONCE, nodes=2, left=Left(suspicions=1, restarts=1))

    found = explore(world, Scope(rules=NAIVE, failures=False))

    assert found.broken.startswith("G5")
    assert _deeds(found.trace) == [
        "claims",
        "begins",
        "is marked",
        "is removed",
        "fails execution",  # its master is lost; nobody tells the attempt
        "restarts execution",
        "claims",
        "begins",
    ]


def test_under_one_name_the_claims_of_a_process_that_died_are_nobodys() -> None:
    """Its successor beats for it, so that it is never missed."""
    world = start(delivery=OFTEN, nodes=2, left=Left(crashes=1))

    found = explore(world, Scope(rules=RULES._replace(incarnations=False)))

    assert found.broken == ""
    assert any(label.endswith("crashes, starts again") for label in found.stuck)


def _deeds(trace: tuple[str, ...]) -> list[str]:
    """What was done at each step, without by whom and to what."""
    found: list[str] = []
    for label in trace:
        deed = label.partition(": ")[2].split(" ")
        found.append(" ".join(deed[:2] if deed[0] in {"is", "fails", "restarts"} else deed[:1]))
    return found
