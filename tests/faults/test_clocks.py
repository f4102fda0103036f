"""Clocks that are wrong, zones that differ, and a database whose clock is set while nodes run."""

import time

from tests.support.fault_jobs import part, parts, step
from tests.support.fleet import Fleet, eventually

ADJUSTABLE = """
CREATE TABLE fleet.clock AS SELECT interval '0' AS ahead;
GRANT SELECT ON fleet.clock TO PUBLIC;
CREATE OR REPLACE FUNCTION rowlock.now() RETURNS timestamptz LANGUAGE sql STABLE
AS 'SELECT pg_catalog.clock_timestamp() + ahead FROM fleet.clock';
"""
SET_CLOCK = "UPDATE fleet.clock SET ahead = make_interval(hours => %s)"


def test_zones_of_nodes_and_of_their_sessions_decide_nothing(fleet: Fleet) -> None:
    """Nodes live in time zones 26 hours apart, and tell the database so: all stay members, share the
    work, and nothing is begun twice."""
    zones = {"east": "Pacific/Kiritimati", "west": "Etc/GMT+12", "new-york": "America/New_York"}
    nodes = [
        fleet.node(name, slots=2, TZ=zone, PGTZ=zone, PGOPTIONS=f"-c TimeZone={zone}")
        for name, zone in zones.items()
    ]

    run = fleet.request(
        "fault.summed", parts=[*parts(6, step("wait", fleet.path("go"))), *parts(24, prefix="q")]
    )

    eventually(lambda: len(fleet.ledger().of("start")) == 6, "every slot works")
    fleet.open("go")
    fleet.wait(run)
    for node in nodes:
        node.wait_beats(8)
    starts = fleet.ledger().of("start")
    assert len(starts) == len({start.key for start in starts}) == 30
    assert {start.node for start in starts} == set(zones)
    assert not fleet.db_events("node_unreachable")


def test_steps_of_the_databases_clock_remove_nobody_and_hide_no_dead_node(fleet: Fleet) -> None:
    """The clock of the database jumps an hour forth and two back while work runs: nobody is removed
    and no attempt ends. A node that dies then is found as soon as ever."""
    fleet.rows(ADJUSTABLE)
    one, two = fleet.node("one"), fleet.node("two")
    once = fleet.request("fault.once", parts=[part("once", step("wait", fleet.path("go")))])
    fleet.wait_started("once")
    work = fleet.request(parts=[part("work", step("tick", fleet.path("go")))])
    fleet.wait_started("work")

    for hours in (1, -1):
        fleet.rows(SET_CLOCK, hours)
        for node in (one, two):
            node.wait_beats(8)
        assert not fleet.db_events("node_unreachable")
    assert len(one.incarnations) == len(two.incarnations) == 1

    fleet.open("go")
    fleet.wait(once)
    fleet.wait(work)
    late = fleet.request(parts=[part("late", step("wait", fleet.path("late")))])
    dies, lives = (one, two) if fleet.wait_started("late").node == "one" else (two, one)
    killed = time.monotonic()
    dies.crash()
    assert fleet.wait_started("late", 2).node == lives.name
    took = time.monotonic() - killed
    assert took < 10, "2 s of silence, and what a busy machine takes"
    fleet.open("late")
    fleet.wait(late)
    assert [event.node_id for event in fleet.db_events("node_removed")] == [dies.incarnation]


def test_a_delayed_retry_waits_by_the_databases_clock(fleet: Fleet) -> None:
    """A partition asks for another time in half an hour: it is not run before, and it is run when the
    database's clock says that the time has come, whatever the nodes think."""
    fleet.rows(ADJUSTABLE)
    fleet.node("one")
    run = fleet.request(parts=[part("a", step("retry_later", 1800, attempts=[1]))])
    eventually(
        lambda: fleet.rows("SELECT FROM rowlock.batch_partitions WHERE NOT ready"), "it is put off"
    )
    row = fleet.partition("a")
    assert (row.failures, row.claims) == (0, 1), "another time costs no failure"

    fleet.rows(SET_CLOCK, 1)

    fleet.wait(run)
    assert [start.attempt for start in fleet.ledger().starts("a")] == [1, 2]
    assert fleet.partition("a").failures == 0
