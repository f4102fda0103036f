"""The database stumbles or goes away: no node is removed for it, and nothing runs twice."""

import os
import signal
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager

import pytest

from rowlock.runtime import processes
from tests.support.fault_jobs import part, parts, step
from tests.support.fleet import Fleet, eventually
from tests.support.pgproxy import PgProxy
from tests.support.supervisor import identity, state
from tests.support.waiting import wait_until

# Makes every beat raise while the test says so.
FAILING_BEATS = """
CREATE TABLE fleet.beats_fail (yes boolean);
GRANT SELECT ON fleet.beats_fail TO PUBLIC;
ALTER FUNCTION rowlock.beat RENAME TO beat_as_it_is;
CREATE FUNCTION rowlock.beat(
    p_node uuid, p_load integer, p_draining boolean, p_orphans jsonb, p_executions uuid[]
) RETURNS TABLE (
    alive boolean, claimable boolean, adoptable boolean, due boolean, unrecovered boolean,
    ended uuid[], peers jsonb, at timestamptz, schema_version integer, schema_works_with integer
)
LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    IF EXISTS (SELECT FROM fleet.beats_fail) THEN
        RAISE EXCEPTION 'not now';
    END IF;
    RETURN QUERY SELECT * FROM rowlock.beat_as_it_is(
        p_node, p_load, p_draining, p_orphans, p_executions);
END
$$;
GRANT EXECUTE ON FUNCTION rowlock.beat TO rowlock_node;
"""


def test_a_burst_of_failed_beats_ends_no_work(fleet: Fleet) -> None:
    """Beats fail for a while that is shorter than it takes to be removed: the node stays active, no
    attempt is cancelled. (A system that cancels at the first error loses the work.)"""
    fleet.rows(FAILING_BEATS)
    one = fleet.node("one", slots=2, unreachable_seconds=20)
    fleet.node("two", unreachable_seconds=20)
    run = fleet.request(
        parts=[
            part("ticks", step("tick", fleet.path("go"))),
            part("rows", step("wait", fleet.path("go")), step("rows", 3)),
        ]
    )
    for key in ("ticks", "rows"):
        fleet.wait_started(key)

    fleet.rows("INSERT INTO fleet.beats_fail VALUES (true)")
    eventually(lambda: one.metric("rowlock_heartbeat_failures_total") >= 4, "beats fail")
    ticks = len(fleet.ledger().of("tick"))
    fleet.wait_ledger("tick", "ticks", ticks + 20)
    fleet.rows("TRUNCATE fleet.beats_fail")

    fleet.open("go")
    fleet.wait(run)
    assert all(fleet.partition(key).claims == 1 for key in ("ticks", "rows"))
    assert not fleet.db_events("node_unreachable")
    assert one.metric("rowlock_lease_ends_total") == 0


def test_transactions_that_last_longer_than_the_removal_starve_no_beat(fleet: Fleet) -> None:
    """Every slot holds a transaction or the interpreter's lock for longer than a silent node has:
    beats go on over their own connection. (A shared pool of connections starves them.)"""
    one = fleet.node("one", slots=2)
    fleet.node("watches", pool="elsewhere")
    run = fleet.request(
        parts=[
            part("a", step("rows_then_wait", fleet.path("go"))),
            part("b", step("hold_gil", 3.5), step("wait", fleet.path("go"))),
        ]
    )
    fleet.wait_ledger("in_transaction", "a")
    fleet.wait_started("b")
    since = time.monotonic()
    one.wait_beats(10)
    wait_until(lambda: time.monotonic() - since > 3.0, what="longer than the removal")

    assert (one.row().status, len(one.incarnations)) == ("ACTIVE", 1)
    fleet.open("go")
    fleet.wait(run)
    assert {fleet.partition(key).claims for key in ("a", "b")} == {1}
    assert not fleet.db_events("node_removed")


@contextmanager
def down(fleet: Fleet) -> Generator[None]:
    """The server is stopped, and starts again."""
    fleet.database.server.down("immediate")
    try:
        yield
    finally:
        fleet.database.server.up()


@contextmanager
def silent(fleet: Fleet) -> Generator[None]:
    """The server answers nothing, and closes nothing either."""
    server = fleet.database.server.pid
    os.kill(server, signal.SIGSTOP)
    family = [server, *(p.pid for p in processes.table().values() if p.parent == server)]
    for pid in family:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in family:
            os.kill(pid, signal.SIGCONT)


Outage = Callable[[Fleet], AbstractContextManager[None]]


@pytest.mark.parametrize("outage", [down, silent])
def test_work_is_frozen_in_an_outage_longer_than_the_lease_and_goes_on_after_it(
    private_fleet: Fleet, outage: Outage
) -> None:
    """The database is away for longer than the lease: AT_LEAST_ONCE attempts stand still, AT_MOST_ONCE
    ones run on. When it answers again, the claims are confirmed and the same attempts continue: no
    node was removed, and nothing runs again. All the time nodes are alive, though not ready, so that
    no probe restarts them. (Reported as airflow#19001: the probe needs the database, and kills every
    healthy pod.)"""
    fleet = private_fleet
    nodes = [fleet.node(name, slots=2) for name in ("one", "two")]
    work = fleet.request(parts=parts(2, step("tick", fleet.path("go"))))
    for n in range(2):
        fleet.wait_ledger("tick", f"p{n}")
    once = fleet.request("fault.once", parts=parts(2, step("tick", fleet.path("done")), prefix="o"))
    for n in range(2):
        fleet.wait_ledger("tick", f"o{n}")
    working = {fleet.ledger().starts(f"p{n}")[0].pid for n in range(2)}

    with outage(fleet):
        went = time.monotonic()
        for node in nodes:
            node.wait_event("lease_ended")
        wait_until(
            lambda: all(state(identity(pid)) == "T" for pid in working), what="they are frozen"
        )
        ticks = len(fleet.ledger().of("tick", "p0"))
        fleet.wait_ledger("tick", "o0", len(fleet.ledger().of("tick", "o0")) + 20)
        assert len(fleet.ledger().of("tick", "p0")) == ticks
        for node in nodes:
            assert node.probe("/livez") == (200, "ok")
            assert node.readiness() == (503, "no answered beat for too long")
            assert node.metric("rowlock_heartbeat_failures_total") >= 1, "no beat waits for ever"
        fleet.open("done")
        for n in range(2):
            fleet.wait_ledger("end", f"o{n}")
        three_graces = 3 * float(fleet.settings["removal_grace_seconds"])
        wait_until(lambda: time.monotonic() > went + three_graces, what="three graces")

    fleet.wait_ledger("tick", "p0", ticks + 5)
    eventually(lambda: all(node.readiness() == (200, "ok") for node in nodes), "they are ready")
    fleet.open("go")
    fleet.wait(work)
    fleet.wait(once)
    starts = fleet.ledger().of("start")
    assert len(starts) == 4
    assert all(fleet.partition(start.key).claims == 1 for start in starts)
    assert not fleet.db_events("node_removed")
    assert all(len(node.incarnations) == 1 for node in nodes)


def test_after_an_outage_only_the_work_of_a_node_that_died_in_it_moves(
    private_fleet: Fleet,
) -> None:
    """The database is away for longer than the lease. One node dies meanwhile, another one gets back
    to the database much later than the first. Whoever is back first takes nobody for dead: all have
    been silent for as long. Only what never beats again loses its work. (Reported as quartz#847 and
    jobrunr#453: the first to wake sees all its peers as stale.)"""
    fleet = private_fleet
    fleet.settings.update(unreachable_seconds=2, removal_grace_seconds=2, lease_margin_seconds=0.5)
    with PgProxy(fleet.database.dsn_as("rowlock_node")) as proxy:
        first, dies = (fleet.node(name, slots=2) for name in ("first", "dies"))
        late = fleet.node("late", slots=2, ROWLOCK_DSN=proxy.dsn)
        run = fleet.request(parts=parts(6, step("tick", fleet.path("go"))))
        for n in range(6):
            fleet.wait_ledger("tick", f"p{n}")

        with down(fleet):
            for node in (first, dies, late):
                node.wait_event("lease_ended")
            dies.kill()
            proxy.refuse()
        first.wait_beats(1)
        since = time.monotonic()
        wait_until(lambda: time.monotonic() - since > 1.0, what="the other node is late")
        proxy.pass_on()

        late.wait_beats(2)
        starts = fleet.ledger().of("start")
        moved = {start.key for start in starts if start.node == "dies"}
        fleet.open("go")
        fleet.wait(run)
    assert len(moved) == 2
    assert {key: fleet.partition(key).claims for key in (f"p{n}" for n in range(6))} == {
        f"p{n}": 2 if f"p{n}" in moved else 1 for n in range(6)
    }
    assert [event.node_id for event in fleet.db_events("node_removed")] == [dies.incarnation]
    assert len(first.incarnations) == len(late.incarnations) == 1


def test_an_idle_node_asks_little(private_fleet: Fleet) -> None:
    """At the default settings an idle node needs no more than 1.2 statements a second."""
    fleet = private_fleet
    fleet.rows(
        "DO $$ BEGIN"
        " EXECUTE format('ALTER DATABASE %I SET log_statement = ''all''', current_database());"
        " END $$"
    )
    fleet.settings.clear()
    node = fleet.node("idle")
    fleet.wait(fleet.request(parts=parts(2)))
    node.wait_beats(2)
    start, since = fleet.database.cluster.log_size(), time.monotonic()

    node.wait_beats(12)

    seconds = time.monotonic() - since
    lines = fleet.database.cluster.log_since(start).splitlines()
    asked = [line for line in lines if "rowlock" in line.split("@")[0] and "LOG:  " in line]
    statements = [line for line in asked if "statement:" in line or "execute" in line]
    assert len(statements) >= 12, "it has beaten meanwhile"
    assert len(statements) / seconds <= 1.2, statements


def test_results_that_the_database_refuses_for_a_while_are_kept(fleet: Fleet) -> None:
    """A privilege is revoked while work runs (or a function is missing for a moment, in a
    migration): results and errors are sent again until they are taken; nothing fails and nothing runs
    again for it."""
    fleet.alarming.remove("operation_refused")
    node = fleet.node("one", slots=2)
    run = fleet.request(
        parts=[
            part("returns", step("wait", fleet.path("go"))),
            part("fails", step("wait", fleet.path("go")), step("fail", "for a reason")),
        ],
        max_failed=1,
    )
    for key in ("returns", "fails"):
        fleet.wait_started(key)
    fleet.rows("REVOKE EXECUTE ON FUNCTION rowlock.complete, rowlock.fail FROM rowlock_node")
    fleet.open("go")
    node.wait_event("operation_refused", 2)

    fleet.rows("GRANT EXECUTE ON FUNCTION rowlock.complete, rowlock.fail TO rowlock_node")

    fleet.wait(run)
    assert [(r.status, r.claims) for r in fleet.rows_of(run)] == [("COMPLETED", 1), ("FAILED", 1)]


def test_a_row_that_somebody_else_locks_for_long_costs_no_node_and_holds_up_no_other(
    fleet: Fleet,
) -> None:
    """An administrator's open transaction holds the row of a partition for longer than the removal
    takes. Its completion waits; the node beats on, is not removed for it, completes what else it has
    and claims more; and the result is taken once the row is free."""
    one = fleet.node("one", slots=2)
    run = fleet.request(parts=parts(2, step("wait", fleet.path("go"))))
    for key in ("p0", "p1"):
        fleet.wait_started(key)
    fleet.node("watches", pool="elsewhere")
    with fleet.database.connect(autocommit=False) as holder:
        holder.execute("SELECT FROM rowlock.batch_partitions WHERE partition_key = 'p0' FOR UPDATE")
        fleet.open("go")
        for key in ("p0", "p1"):
            fleet.wait_ledger("end", key)
        since = time.monotonic()
        fleet.wait_partition("p1", "COMPLETED")
        more = fleet.request(parts=parts(20, prefix="more"))
        eventually(
            lambda: (
                all(row.status == "COMPLETED" for row in fleet.rows_of(more))
                and len(fleet.rows_of(more)) == 20
            ),
            "the node goes on with other work",
        )
        wait_until(lambda: time.monotonic() - since > 3.0, what="longer than the removal")
        assert one.row().status == "ACTIVE"
        one.wait_beats(5)

    fleet.wait(run)
    fleet.wait(more)
    assert fleet.partition("p0").claims == 1
    assert len(one.incarnations) == 1
    assert not fleet.db_events("node_removed")
    assert one.metric("rowlock_lease_ends_total") == 0


def test_a_result_that_is_the_victim_of_a_deadlock_is_sent_again(fleet: Fleet) -> None:
    """rowlock's own statements never deadlock; somebody else's may, with them. A session locks a partition, and
    when the completion waits for it asks for the node's row, which the completion holds: the server ends the
    completion. It is sent again, and nothing is lost or run twice.

    Reported as kestra PR#9096, durable-workflow#408, hatchet PR#241, pg-boss#832.
    """
    tries = fleet.deadlocks_max = 10
    fleet.rows(
        "DO $$ BEGIN EXECUTE"
        " format('ALTER DATABASE %I SET deadlock_timeout = 500', current_database()); END $$"
    )
    one = fleet.node(
        "one", beat_seconds=2, unreachable_seconds=20, removal_grace_seconds=10, poll_seconds=2
    )
    found = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"

    def get_in_the_way(key: str) -> None:
        run = fleet.request(parts=[part(key, step("wait", fleet.path(key)))])
        fleet.wait_started(key)
        with fleet.database.connect(autocommit=False) as other:
            other.execute("SET LOCAL deadlock_timeout = '1h'")
            other.execute(
                "SELECT FROM rowlock.batch_partitions WHERE partition_key = %s FOR UPDATE", [key]
            )
            fleet.open(key)
            eventually(
                lambda: fleet.rows(
                    "SELECT FROM pg_stat_activity WHERE application_name = 'rowlock node one'"
                    " AND wait_event_type = 'Lock' AND query LIKE '%rowlock.complete(%'"
                ),
                "the completion waits",
            )
            other.execute(
                "SELECT FROM rowlock.batch_nodes WHERE node_id = %s FOR UPDATE", [one.incarnation]
            )
            other.rollback()
        fleet.wait(run)
        assert fleet.partition(key).claims == 1

    for number in range(tries):  # the server looks for a deadlock once, half a second into a wait
        get_in_the_way(f"p{number}")
        if fleet.value(found):
            break

    assert fleet.value(found) >= 1
    assert len(one.incarnations) == 1
    starts = [start.key for start in fleet.ledger().of("start")]
    assert len(starts) == len(set(starts))
