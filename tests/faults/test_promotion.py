"""The primary goes away, and its asynchronous replica is promoted, while nodes work."""

import time
from collections.abc import Generator

import pytest

from tests.support.fault_jobs import part, parts, step
from tests.support.fleet import Fleet, NodeProcess, eventually
from tests.support.replica import Pair


@pytest.fixture
def pair() -> Generator[Pair]:
    with Pair.started() as made:
        yield made


@pytest.fixture
def fleet(pair: Pair) -> Generator[Fleet]:
    fleet = Fleet(pair.primary.create(), unreachable_seconds=4)
    with fleet:
        yield fleet


def node_of_both(fleet: Fleet, pair: Pair, name: str) -> NodeProcess:
    """A node whose connection string names both servers."""
    dsn = pair.dsn_as("rowlock_node", fleet.database)
    return fleet.node(name, slots=3, ROWLOCK_DSN=dsn)


def test_nodes_go_on_at_the_promoted_replica(fleet: Fleet, pair: Pair) -> None:
    """The primary crashes and comes back as a standby, which answers but takes no writes; the replica is
    promoted, but lacks what was committed last. The nodes find it without a restart and say that the
    server is another one; nobody is removed, all work that it knows ends, and no AT_MOST_ONCE partition
    whose start it has is started again, not even one whose end it has lost: that is an unknown
    outcome. A launch that it never had is gone. (Elsewhere clients stay for days with a server that
    is read-only by now. Reported as gpustack#6105, graphile-worker#449 and asyncpg PR#253.)"""
    nodes = [node_of_both(fleet, pair, name) for name in ("one", "two")]
    work = fleet.request(parts=[*parts(2, step("tick", fleet.path("go"))), *parts(30, prefix="q")])
    for key in ("p0", "p1"):
        fleet.wait_started(key)
    once = fleet.request(
        "fault.once", parts=parts(2, step("wait", fleet.path("go")), prefix="once")
    )
    for key in ("once0", "once1"):
        fleet.wait_started(key)
    ended = fleet.request("fault.once", parts=[part("ended", step("wait", fleet.path("end")))])
    fleet.wait_started("ended")
    before = nodes[0].metrics()
    eventually(
        lambda: (
            fleet.value(
                "SELECT count(*) FROM rowlock.batch_partitions"
                " WHERE starts_with(partition_key, 'q') AND status = 'COMPLETED'"
            )
            == 30
        ),
        "the short work is done: a claim that only the primary knew would be given again",
    )
    pair.wait_caught_up()
    pair.cut()
    lost = fleet.request(parts=[part("lost", step("wait", fleet.path("never")))])
    fleet.open("end")
    fleet.wait(ended)

    pair.primary_crashes()
    pair.promote()
    fleet.move_to(pair.replica_of(fleet.database))
    for node in nodes:
        node.wait_event("server_changed")
        node.wait_beats(3)
    fleet.open("go")
    fleet.wait(work)
    fleet.wait(once)

    assert not fleet.rows("SELECT FROM rowlock.executions WHERE execution_id = %s", lost)
    assert not fleet.db_events("node_removed")
    assert all(len(node.incarnations) == 1 for node in nodes)
    (event,) = fleet.db_events("server_changed")
    assert event.detail["timeline"] == event.detail["timeline_before"] + 1
    fleet.wait(ended, "FAILED")
    assert fleet.partition("ended").last_error["outcome"] == "unknown"
    assert [len(fleet.ledger().starts(key)) for key in ("once0", "once1", "ended")] == [1, 1, 1]
    assert info(before) != info(nodes[0].metrics())
    exporter = fleet.exporter()
    eventually(
        lambda: info(nodes[0].metrics()) in exporter.metrics(),
        "the exporter sees the same database",
    )


def test_nodes_leave_a_server_that_takes_no_writes_any_more(fleet: Fleet, pair: Pair) -> None:
    """The primary becomes read-only while all connections to it stand: the nodes drop them at the first
    refusal, and go on at the promoted replica, authors' transactions too, without a restart."""
    node = node_of_both(fleet, pair, "one")
    warm = fleet.request(parts=parts(3, step("rows", 2), prefix="before"))
    fleet.wait(warm)
    work = fleet.request(parts=[part("held", step("wait", fleet.path("go")), step("rows", 2))])
    fleet.wait_started("held")
    pair.wait_caught_up()

    pair.primary_takes_no_writes()
    pair.promote()
    promoted = time.monotonic()
    fleet.move_to(pair.replica_of(fleet.database))
    node.wait_event("server_changed")
    node.wait_beats(3)
    assert time.monotonic() - promoted < 30, "seconds"
    fleet.open("go")
    fleet.wait(work)
    more = fleet.request(parts=parts(6, step("rows", 2), prefix="after"))
    fleet.wait(more)

    assert fleet.value("SELECT count(*) FROM fleet.effects") == 20
    assert len(node.incarnations) == 1
    assert not fleet.db_events("node_removed")


def info(metrics: dict[str, float]) -> str:
    """The identity of the database, as a node exports it."""
    (found,) = [name for name in metrics if name.startswith("rowlock_database_info")]
    return found
