"""Claims: who runs what, and how much at a time."""

from tests.support.fault_jobs import part, parts, step
from tests.support.fleet import Fleet


def test_a_fleet_of_two_completes_a_run(fleet: Fleet) -> None:
    for name in ("one", "two"):
        fleet.node(name, slots=2)

    run = fleet.request(parts=[*parts(10), part("rows", step("rows", 3))])

    fleet.wait(run)
    assert len(fleet.ledger().of("start")) == 11
    assert not fleet.ledger().overlaps()
