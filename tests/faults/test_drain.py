"""Nodes that are told to leave: nothing new, running work ends or is handed back, nothing is lost."""

import signal

from tests.support.fault_jobs import part, parts, step
from tests.support.fleet import Fleet


def test_a_draining_node_lets_work_end_hands_the_rest_back_and_takes_nothing_new(
    fleet: Fleet,
) -> None:
    """SIGTERM with four attempts that run: the one that ends in time completes there; the one that
    looks is asked to stop and goes on elsewhere at its checkpoint, at once; the deaf one is ended
    with the drain time and repeated; AT_MOST_ONCE work is not asked, and if it still runs then, the
    node itself says that its outcome is unknown. (A system that just exits loses all four.)"""
    one = fleet.node("one", slots=4, drain_seconds=4)
    saves = {"count": 6, "hold": {"4": fleet.path("stopping")}}
    run = fleet.request(
        parts=[
            part("short", step("wait", fleet.path("short"))),
            part("saver", step("steps_with_saves", saves)),
            part("deaf", step("wait", fleet.path("never"), attempts=[1])),
        ]
    )
    once = fleet.request(
        "fault.once", parts=[part("once", step("wait_or_stop", fleet.path("nev")))]
    )
    for key in ("short", "deaf", "once"):
        fleet.wait_started(key)
    fleet.wait_ledger("held", "saver")
    two = fleet.node("two", slots=3)
    fleet.warm_up(two)

    one.kill(signal.SIGTERM)

    one.wait_event("node_draining")
    more = fleet.request(parts=parts(4, prefix="more"))
    fleet.open("stopping")
    fleet.wait_started("saver", 2)
    fleet.wait(more)
    fleet.open("short")
    fleet.wait(run)
    fleet.wait(once, "FAILED")
    assert one.wait_gone() == 0

    ledger = fleet.ledger()
    saved = ledger.of("step", "saver")
    assert [(e.attempt, e.more["number"]) for e in saved] == [
        *((1, n) for n in (1, 2, 3, 4)),
        *((2, n) for n in (5, 6)),
    ]
    handed_over = ledger.starts("saver")[1].at - saved[3].at
    assert handed_over < 1.0, "seconds, as promised; 0.02 on a machine that is not busy"
    assert {start.node for n in range(4) for start in ledger.starts(f"more{n}")} == {"two"}
    rows = {key: fleet.partition(key) for key in ("short", "saver", "deaf", "once")}
    assert {key: row.claims for key, row in rows.items()} == {
        "short": 1,
        "saver": 2,
        "deaf": 2,
        "once": 1,
    }
    assert {key: row.failures for key, row in rows.items() if row.failures} == {"once": 1}
    assert not any(row.lost for row in rows.values())
    assert (rows["once"].status, rows["once"].last_error["outcome"]) == ("FAILED", "unknown")
    assert not ledger.of("asked_to_stop", "once")
    left = one.row()
    assert (left.status, left.removed_reason) == ("REMOVED", "drained")
    assert not ledger.overlaps()
    assert len(two.incarnations) == 1


def test_an_early_return_after_the_wish_to_stop_is_no_success(fleet: Fleet) -> None:
    """A plain return after should_stop was read as true counts as stopped: the partition runs again
    elsewhere, although process() returned a value."""
    one = fleet.node("one")
    run = fleet.request(parts=[part("a", step("wait_or_stop", fleet.path("never"), attempts=[1]))])
    fleet.wait_started("a")
    fleet.node("two")

    assert one.terminate_and_wait() == 0

    fleet.wait(run)
    assert len(fleet.ledger().of("asked_to_stop", "a")) == 1
    assert [end.node for end in fleet.ledger().ends("a")] == ["two"]
    row = fleet.partition("a")
    assert (row.claims, row.failures) == (2, 0)


def test_an_idle_node_leaves_at_once_and_a_second_signal_ends_a_busy_one(fleet: Fleet) -> None:
    """What is lost by the second signal is found by the others, like any crash."""
    idle = fleet.node("idle", pool="elsewhere", drain_seconds=600)
    assert idle.terminate_and_wait() == 0
    busy = fleet.node("busy", drain_seconds=600)
    run = fleet.request(parts=[part("a", step("wait", fleet.path("never"), attempts=[1]))])
    fleet.wait_started("a")
    fleet.node("two")

    busy.kill(signal.SIGTERM)
    busy.wait_event("node_draining")
    busy.kill(signal.SIGTERM)

    busy.wait_gone()
    fleet.wait(run)
    assert [start.node for start in fleet.ledger().starts("a")] == ["busy", "two"]
    assert fleet.partition("a").claims == 2


def test_once_work_that_was_not_begun_is_handed_back_by_a_draining_node(fleet: Fleet) -> None:
    """The node has claimed an AT_MOST_ONCE partition and given it to an executor that has not said
    that it is ready: author code cannot have begun, so another node may run it."""
    one = fleet.node("one", drain_seconds=1)
    fleet.warm_up(one)
    (executor,) = one.executors()
    fleet.hold_still(executor)
    run = fleet.request("fault.once", parts=[part("a")])
    fleet.wait_partition("a", "CLAIMED")
    fleet.node("two")

    assert one.terminate_and_wait() == 0

    fleet.wait(run)
    assert [(start.node, start.attempt) for start in fleet.ledger().starts("a")] == [("two", 2)]


def test_cancelled_work_is_asked_to_stop_and_ended_when_it_does_not(fleet: Fleet) -> None:
    """Cancel while attempts run: what waits is CANCELLED at once, what looks stops, what does not is
    ended after the time for that; no author code begins after the answer."""
    fleet.node("one", slots=3, cancel_seconds=1)
    run = fleet.request(
        parts=[
            part("looks", step("wait_or_stop", fleet.path("never")), weight=2),
            part("deaf", step("wait", fleet.path("never")), weight=2),
            part("once-more", step("tick", fleet.path("never")), weight=2),
            *parts(20, prefix="waits"),
        ]
    )
    for key in ("looks", "deaf", "once-more"):
        fleet.wait_started(key)

    assert fleet.cancel(run) == "closing"

    row = fleet.wait(run, "CANCELLED")
    assert row.counts == {"total": 23, "completed": 0, "failed": 0, "cancelled": 23}
    assert len(fleet.ledger().of("start")) == 3
    assert len(fleet.ledger().of("asked_to_stop", "looks")) == 1
    # and the slots are free again
    after = fleet.request(parts=parts(3, prefix="after"))
    fleet.wait(after)
