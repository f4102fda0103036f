"""The network between nodes and the database loses requests, answers, connections and packets."""

import time
from collections.abc import Generator

import pytest

from tests.support.fault_jobs import part, parts, step
from tests.support.fleet import Fleet, eventually
from tests.support.pgproxy import PgProxy


@pytest.fixture
def proxy(fleet: Fleet) -> Generator[PgProxy]:
    """What stands between the database and the nodes that are given its `dsn`."""
    with PgProxy(fleet.database.dsn_as("rowlock_node")) as made:
        yield made


@pytest.mark.parametrize("after", [False, True], ids=["request", "answer"])
def test_results_and_claims_whose_request_or_answer_is_lost_count_once(
    fleet: Fleet, proxy: PgProxy, after: bool
) -> None:
    """The connection is cut before the server sees the statement, or after its COMMIT and before the
    reply: what it wrote is sent again with the same token, a claim that nobody heard of goes back,
    and beats go on. (Reported as airflow#5373 and agenda#1346: finished work stays running for ever,
    or runs again.)"""
    fleet.settings["unreachable_seconds"] = 5
    one = fleet.node("one", slots=4, ROWLOCK_DSN=proxy.dsn)
    cuts = [
        proxy.cut(b"rowlock.complete(", after=after, times=6),
        proxy.cut(b"rowlock.claim(", after=after, times=3),
    ]

    run = fleet.request(parts=parts(100, step("sleep", 0.02), step("effect", "paid")))

    row = fleet.wait(run)
    assert row.counts == {"total": 100, "completed": 100, "failed": 0, "cancelled": 0}
    assert [cut.times for cut in cuts] == [0, 0], "all of them were cut"
    for event in ("start", "effect", "end"):
        keys = [entry.key for entry in fleet.ledger().of(event)]
        assert len(keys) == len(set(keys)) == 100
    assert {p.failures for p in fleet.rows_of(run)} == {0}
    assert one.metric("rowlock_heartbeat_failures_total") == 0
    assert len(one.incarnations) == 1
    if after:
        assert one.events("claims_reconciled"), "claims that were never answered went back"


@pytest.mark.parametrize("after", [False, True], ids=["request", "answer"])
def test_the_only_place_of_an_execution_is_free_again_although_a_failure_was_hard_to_record(
    fleet: Fleet, proxy: PgProxy, after: bool
) -> None:
    """parallelism = 1, and the connection is reset at the statement that records the last failure:
    the next partition begins long before anybody could be removed. (Reported as graphile-worker#254:
    the lane stays blocked.)"""
    fleet.settings.update(unreachable_seconds=5, removal_grace_seconds=5)
    fleet.node("one", ROWLOCK_DSN=proxy.dsn)
    cut = proxy.cut(b"rowlock.fail(", after=after)
    run = fleet.request(
        parts=[part("a", step("fail", "for a reason"), weight=2), part("b")],
        max_failed=1,
        options={"parallelism": 1},
    )

    row = fleet.wait(run)

    assert row.counts == {"total": 2, "completed": 1, "failed": 1, "cancelled": 0}
    assert cut.count == 1
    (a,), (b,) = (fleet.ledger().starts(key) for key in ("a", "b"))
    assert b.at - a.at < 5


def test_work_that_is_launched_while_no_node_listens_begins_within_a_poll(
    fleet: Fleet, proxy: PgProxy
) -> None:
    """The announcement goes to a connection that has just been lost: the next beat finds the work.
    (A queue that rests on notifications alone leaves it until the next one: simonwillison.net of 2025-07-11 on
    Recall.ai, "Listen carefully" at FOSDEM 2026, minhle.xyz on dropped jobs.)"""
    fleet.settings.update(poll_seconds=5, unreachable_seconds=5)
    one = fleet.node("one", ROWLOCK_DSN=proxy.dsn)
    one.wait_beats(1)
    proxy.refuse()
    run = fleet.request(parts=parts(1))
    proxy.pass_on()
    since = time.monotonic()

    fleet.wait(run)

    (start,) = fleet.ledger().starts("p0")
    assert start.at - since < 5
    assert len(one.incarnations) == 1


def test_a_node_whose_packets_are_dropped_stops_before_others_begin_its_work(
    fleet: Fleet, proxy: PgProxy
) -> None:
    """No packet of one node arrives, and no error tells it so. For less than the grace: nothing
    happens. For longer: its AT_LEAST_ONCE work stands still at the end of its lease and before
    anybody else begins it, its AT_MOST_ONCE work goes on and is begun by nobody, and the node says
    that it is not ready. Back in the network it begins anew. (Reported as airflow#7925: a worker that
    is cut off goes on with work that was given to another.)"""
    fleet.settings.update(unreachable_seconds=2, removal_grace_seconds=2, lease_margin_seconds=0.5)
    cut = fleet.node("cut", slots=2, ROWLOCK_DSN=proxy.dsn)
    again = fleet.request(parts=[part("again", step("tick", fleet.path("go")))])
    once = fleet.request("fault.once", parts=[part("once", step("tick", fleet.path("go")))])
    for key in ("again", "once"):
        fleet.wait_ledger("tick", key)
    fleet.node("other", slots=2)
    cut.wait_beats(2)

    proxy.drop()
    beat, since = cut.row().beat, time.monotonic()
    eventually(lambda: time.monotonic() - since > 3 * 0.2, "three beats are lost")
    assert cut.row().beat <= beat + 1, "but for one that had arrived"
    proxy.pass_on()
    cut.wait_beats(2)
    assert cut.metric("rowlock_lease_ends_total") == 0
    assert not fleet.db_events("node_removed")

    proxy.drop()
    dropped = time.monotonic()
    eventually(lambda: cut.readiness()[0] == 503, "it says that it is not ready")
    assert time.monotonic() - dropped < 4, "before others may remove it"
    second = fleet.wait_started("again", 2)
    ticks = [tick for tick in fleet.ledger().of("tick", "again") if tick.attempt == 1]
    assert ticks[-1].at < min(dropped + 4, second.at), "before others may begin its work, and do"
    assert second.node == "other"
    assert cut.probe("/livez") == (200, "ok")
    so_far = len(fleet.ledger().of("tick", "once"))
    fleet.wait_ledger("tick", "once", so_far + 10)

    proxy.pass_on()
    cut.wait_registered(2)
    fleet.open("go")
    fleet.wait(again)
    assert fleet.wait(once, "FAILED").counts["failed"] == 1
    eventually(lambda: fleet.evidence("once"), "what became of it is kept")
    assert [start.node for start in fleet.ledger().starts("once")] == ["cut"]
    assert [start.node for start in fleet.ledger().starts("again")] == ["cut", "other"]
    late = [tick for tick in fleet.ledger().of("tick", "again") if tick.attempt == 1]
    assert late == ticks, "what was frozen never went on"
