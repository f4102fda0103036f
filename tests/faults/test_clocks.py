"""Clocks that are wrong, zones that differ, and a database whose clock is set while nodes run."""

import time
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest

from tests.support.faketime import WallClock
from tests.support.fault_jobs import part, parts, step
from tests.support.fleet import TIMES, Fleet, eventually
from tests.support.postgres import Cluster, chosen_binaries
from tests.support.waiting import SLACK_SECONDS

SILENCE: Final = {"unreachable_seconds": 3.0}
"""Clocks are wrong by half an hour and more here; that a machine is busy for a second is not looked for."""

REMOVAL_AND_CLAIM_SECONDS = (
    SILENCE["unreachable_seconds"] + TIMES["removal_grace_seconds"] + TIMES["poll_seconds"]
)

ADJUSTABLE = """
CREATE TABLE fleet.clock AS SELECT interval '0' AS ahead;
GRANT SELECT ON fleet.clock TO PUBLIC;
CREATE OR REPLACE FUNCTION rowlock.now() RETURNS timestamptz LANGUAGE sql STABLE
AS 'SELECT pg_catalog.clock_timestamp() + ahead FROM fleet.clock';
"""
SET_CLOCK = "UPDATE fleet.clock SET ahead = make_interval(hours => %s)"


@pytest.fixture
def fleet(fleet: Fleet) -> Fleet:
    fleet.settings.update(SILENCE)
    return fleet


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


def summer_time_begins(at: datetime) -> str:
    """A zone that is an hour ahead of UTC from this moment on, for half a year, as POSIX writes it."""
    day = at.timetuple().tm_yday - 1
    return f"STD0DST,{day}/{at:%H:%M:%S},{(day + 180) % 365}/0"


OFFSET = "SELECT extract(timezone FROM clock_timestamp())::int"


def test_summer_time_that_begins_while_nodes_work_moves_nothing(fleet: Fleet) -> None:
    """The clocks of the nodes and of their sessions go forward by an hour while work runs, and then their
    database gets another zone for its new sessions: nobody is found unreachable, nothing is begun twice, and
    what was put off is run after as many seconds as it asked for."""
    began = time.monotonic()
    stays = fleet.node("stays", slots=2)
    run = fleet.request(parts=parts(2, step("tick", fleet.path("go"))))
    for key in ("p0", "p1"):
        fleet.wait_started(key)
    # Twice as late as another node takes to begin with its work; the machine may be busy.
    until_jump = round(3 + 2 * (time.monotonic() - began))
    zone = summer_time_begins(datetime.now(UTC) + timedelta(seconds=until_jump))
    fleet.rows("SELECT set_config('TimeZone', %s, false)", zone)
    jumps = fleet.node("jumps", TZ=zone, PGTZ=zone, PGOPTIONS=f"-c TimeZone={zone}")
    nodes = [jumps, stays]
    later_seconds = until_jump + 2
    put_off = fleet.request(parts=[part("later", step("retry_later", later_seconds, attempts=[1]))])
    assert fleet.wait_started("later").node == "jumps", "no other has a slot"
    assert fleet.value(OFFSET) == 0, "it has not begun"

    eventually(lambda: fleet.value(OFFSET) == 3600, "it has begun")
    for node in nodes:
        node.wait_beats(8)
    fleet.rows(
        "DO $$ BEGIN EXECUTE format($q$ALTER DATABASE %I SET timezone = 'Pacific/Kiritimati'$q$,"
        " current_database()); END $$"
    )
    ended = fleet.value(
        "SELECT count(*) FILTER (WHERE pg_terminate_backend(pid)) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name ^@ 'rowlock '"
    )
    assert ended >= 4, "both connections of both nodes"
    for node in nodes:
        node.wait_beats(8)

    again = fleet.wait_started("later", 2)
    waited = again.at - fleet.ledger().starts("later")[0].at
    assert later_seconds <= waited < later_seconds + TIMES["poll_seconds"] + SLACK_SECONDS
    fleet.wait(put_off)
    fleet.open("go")
    fleet.wait(run)
    assert [len(fleet.ledger().starts(key)) for key in ("p0", "p1", "later")] == [1, 1, 2]
    assert not fleet.db_events("node_unreachable")
    assert not fleet.db_events("node_gone")
    assert [len(node.incarnations) for node in nodes] == [1, 1]


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
    assert took < REMOVAL_AND_CLAIM_SECONDS + SLACK_SECONDS
    fleet.open("late")
    fleet.wait(late)
    eventually(lambda: fleet.db_events("node_removed"), "the dead node is removed")
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


def test_wall_clocks_of_nodes_that_disagree_by_hours_decide_nothing(fleet: Fleet) -> None:
    """One node's wall clock is an hour ahead, another's an hour behind, a third's is set while it works:
    nobody is taken for dead, each of 100 partitions runs once, and all times in the database are its
    own. (Where clocks of machines are compared, living peers are declared dead and their work is
    doubled. Reported as quartznet PR#3515 and #435, db-scheduler#364 and #433, ShedLock#231 and #263,
    and jobrunr#629.)"""
    with WallClock("+1h") as ahead, WallClock("-1h") as behind, WallClock() as moves:
        clocks = {"ahead": ahead, "behind": behind, "moves": moves}
        nodes = [
            fleet.node(name, slots=2, wait=False, **under(clock)) for name, clock in clocks.items()
        ]
        for node in nodes:
            node.wait_registered()
        before = fleet.now()
        run = fleet.request(
            "fault.summed",
            parts=[*parts(6, step("wait", fleet.path("go"))), *parts(94, prefix="q")],
        )
        eventually(lambda: len(fleet.ledger().of("start")) == 6, "every slot works")
        for offset in ("+1h", "-1h"):
            moves.set(offset)
            nodes[2].wait_beats(6)
        offsets = [node.metric("rowlock_node_clock_offset_seconds") for node in nodes]
        fleet.open("go")
        fleet.wait(run)

        starts = fleet.ledger().of("start")
        assert len(starts) == len({start.key for start in starts}) == 100
        assert [round(offset / 3600) for offset in offsets] == [1, -1, -1]
        assert not fleet.db_events("node_unreachable")
        assert all(len(node.incarnations) == 1 for node in nodes)
        wrong = fleet.rows(
            "SELECT partition_key FROM rowlock.batch_partitions WHERE execution_id = %s"
            " AND NOT (%s <= claimed_at AND claimed_at <= ended_at AND ended_at <= clock_timestamp())",
            *(run, before),
        )
        assert not wrong
        for node in nodes:  # its watchdog could not: time.sleep fails where libfaketime is
            node.crash()


def under(clock: WallClock) -> dict[str, Any]:
    """The environment of a node that lives by this clock."""
    return dict(clock.environment)


def test_a_server_whose_own_clock_is_set_removes_nobody_and_hides_no_dead_node() -> None:
    """The wall clock of the database's machine jumps an hour forth and two back while work runs: nobody
    is removed and no attempt ends. A node that dies then is found as soon as ever."""
    with WallClock() as clock:
        cluster = Cluster.private(binaries=clock.binaries(chosen_binaries()))
        try:
            cluster.prepare()
            with Fleet(cluster.create(), **SILENCE) as fleet:
                a_server_whose_clock_is_set(fleet, clock)
        finally:
            cluster.close()


def a_server_whose_clock_is_set(fleet: Fleet, clock: WallClock) -> None:
    """The test above, once there is a fleet."""
    one, two = fleet.node("one"), fleet.node("two")
    run = fleet.request(parts=parts(2, step("tick", fleet.path("go"))))
    for key in ("p0", "p1"):
        fleet.wait_started(key)
    started = fleet.now()

    for offset in ("+1h", "-1h"):
        clock.set(offset)
        fleet.look_on()
        for node in (one, two):
            node.wait_beats(8)
        assert abs((fleet.now() - started).total_seconds()) > 3000, "it was set"
        assert not fleet.db_events("node_unreachable")

    killed = time.monotonic()
    one.crash()
    key = next(start.key for start in fleet.ledger().of("start") if start.node == "one")
    fleet.open("go")
    fleet.wait(run)
    assert fleet.ledger().starts(key)[-1].node == "two"
    assert time.monotonic() - killed < REMOVAL_AND_CLAIM_SECONDS + SLACK_SECONDS
    eventually(lambda: fleet.db_events("node_removed"), "the dead node is removed")
    assert [event.node_id for event in fleet.db_events("node_removed")] == [one.incarnation]
    assert len(two.incarnations) == 1
