"""Nodes that stand still and wake up again: what they may do then, and what they did meanwhile."""

import signal
import time
from uuid import UUID, uuid4

from tests.support.fault_jobs import part, parts, step
from tests.support.fleet import TIMES, Entry, Fleet, Row, eventually
from tests.support.supervisor import send, state
from tests.support.waiting import SLACK_SECONDS, wait_until


def test_a_node_that_slept_past_its_removal_changes_nothing_and_begins_anew(fleet: Fleet) -> None:
    """Paused in an open transaction, its work reassigned and running on another node, then woken:
    its COMMIT is refused, it ends the attempt and registers as a new incarnation; the new owner is
    not disturbed, and every row is written once. (A zombie of other systems fails the owner.)"""
    one = fleet.node("one")
    held = {"15": fleet.path("commit")}
    run = fleet.request(
        parts=[
            part(
                "a",
                step("chunks", {"items": 30, "size": 10, "hold": held}),
                step("wait", fleet.path("go"), attempts=[2]),
            )
        ]
    )
    fleet.wait_ledger("held", "a")
    fleet.node("two")
    one.pause()
    fleet.wait_ledger("chunk", "a", 3)  # the second attempt has written all
    first = one.incarnation
    fleet.open("commit")

    one.resume()

    one.wait_registered(2)
    one.wait_event("write_fenced")
    assert fleet.partition("a").status == "CLAIMED"
    fleet.open("go")
    fleet.wait(run)
    row = fleet.partition("a")
    assert (row.claims, row.assigned_node != first) == (2, True)
    written = fleet.rows("SELECT item, node FROM fleet.effects ORDER BY item")
    assert [(r.item, r.node) for r in written] == [
        (n, "one" if n <= 10 else "two") for n in range(1, 31)
    ]
    assert not fleet.ledger().overlaps()
    assert fleet.one("SELECT status FROM rowlock.batch_nodes WHERE node_id = %s", first).status == (
        "REMOVED"
    )
    assert [event.node_id for event in fleet.db_events("node_removed")] == [first]


def claimed_by(fleet: Fleet, node: UUID) -> list[Row]:
    """The claims of an incarnation, with the beat at which it made them."""
    return fleet.rows(
        "SELECT key, beat FROM fleet.transitions WHERE node = %s AND became = 'CLAIMED' ORDER BY id",
        node,
    )


def begun_since(fleet: Fleet, node: str, moment: float) -> list[Entry]:
    """The attempts that a node has begun since, in their order."""
    return [
        entry for entry in fleet.ledger().of("start") if entry.node == node and entry.at > moment
    ]


def test_nothing_that_a_node_writes_after_three_graces_of_sleep_counts_and_it_works_on(
    fleet: Fleet,
) -> None:
    """A node with four attempts sleeps for three removal graces, among them holders of open transactions.
    Another node has all four by one removal. Then the sleeper's executors wake first: a result, a checkpoint, a
    COMMIT and a COMMIT that the author sends himself, all too late. Each changes nothing, is counted and
    logged, and within two beats of its waking the node works again, as a new incarnation.

    Reported as solid_queue#589, db-scheduler#402, quartz-scheduler#469, quartznet#703: the unit ends done and
    failed, or is done twice.
    """
    go, again = fleet.path("go"), fleet.path("again")
    first, second = [1], [2]
    one = fleet.node("one", slots=4)
    run = fleet.request(
        parts=[
            part("ends", step("wait", go, attempts=first), step("wait", again, attempts=second)),
            part("saves", step("steps_with_saves", {"count": 2, "hold": {"2": go}})),
            part(
                "rows",
                step("rows_then_wait", go, attempts=first),
                step("rows_then_wait", again, attempts=second),
            ),
            part(
                "commits",
                step("commit_by_hand", go, attempts=first),
                step("commit_by_hand", again, attempts=second),
            ),
        ]
    )
    fleet.wait_ledger("held", "saves")
    fleet.wait_started("ends")
    for key in ("rows", "commits"):
        fleet.wait_ledger("in_transaction", key)
    fleet.node("two", slots=4)

    one.pause()
    asleep = time.monotonic()
    for key in ("ends", "rows", "commits", "saves"):
        fleet.wait_started(key, 2)
    (removal,) = fleet.db_events("node_removed")
    recovered = fleet.rows(
        "SELECT at FROM fleet.transitions WHERE was = 'CLAIMED' AND became = 'PENDING'"
    )
    assert len(recovered) == 4
    assert max(abs((row.at - removal.at).total_seconds()) for row in recovered) < 1.0
    more = fleet.request(parts=parts(4, step("wait", again), prefix="more"))
    three_graces = 3 * float(fleet.settings["removal_grace_seconds"])
    wait_until(lambda: time.monotonic() > asleep + three_graces)
    held = {key: fleet.partition(key) for key in ("ends", "rows", "commits")}
    fleet.open("go")
    for process in one.executors():
        send(process, signal.SIGCONT)
    fleet.wait_ledger("end", "ends")
    woken = time.monotonic()
    one.resume()

    two_beats = 2 * float(fleet.settings["beat_seconds"])
    one.wait_registered(2)
    assert time.monotonic() - woken < two_beats + SLACK_SECONDS
    eventually(lambda: begun_since(fleet, one.name, woken), "it works again")
    assert begun_since(fleet, one.name, woken)[0].at - woken < two_beats + SLACK_SECONDS
    late = {"ends", "saves", "rows", "commits"}
    eventually(
        lambda: {line["partition"] for line in one.events("write_fenced")} == late,
        "every late write is logged",
    )
    assert one.metric("rowlock_fenced_writes_total") >= len(late)
    assert {key: fleet.partition(key) for key in held} == held, "the new owner is not disturbed"
    assert claimed_by(fleet, one.incarnation)[0].beat <= 2, (
        "within two beats of its new incarnation"
    )
    fleet.open("again")
    for execution in (run, more):
        fleet.wait(execution)
    written = fleet.rows("SELECT key, node, attempt FROM fleet.effects ORDER BY key")
    assert [tuple(row) for row in written] == [("commits", "two", 2), ("rows", "two", 2)]
    assert {fleet.partition(key).claims for key in late} == {2}


def test_a_partition_that_came_back_to_its_first_node_is_not_completed_by_the_old_attempt(
    fleet: Fleet,
) -> None:
    """Claimed by A, then by B, then by A again (its new incarnation), while the first attempt wakes
    up with its transaction open: only the third attempt counts."""
    one = fleet.node("one")
    run = fleet.request(
        parts=[
            part(
                "a",
                step("rows_then_wait", fleet.path("commit"), attempts=[1]),
                step("wait", fleet.path("never"), attempts=[2]),
                step("rows", 3, attempts=[3]),
            )
        ]
    )
    fleet.wait_ledger("in_transaction", "a")
    two = fleet.node("two")
    one.pause()
    fleet.wait_started("a", 2)
    two.crash()
    fleet.open("commit")

    one.resume()

    fleet.wait(run)
    starts = fleet.ledger().starts("a")
    assert [(start.node, start.attempt) for start in starts] == [("one", 1), ("two", 2), ("one", 3)]
    written = fleet.rows("SELECT item, attempt FROM fleet.effects ORDER BY item")
    assert [(r.item, r.attempt) for r in written] == [(0, 3), (1, 3), (2, 3)]
    assert fleet.partition("a").assigned_node == one.incarnation


def test_a_sleeping_node_keeps_no_lock_and_runs_its_old_work_for_an_instant_when_it_wakes(
    fleet: Fleet,
) -> None:
    """It sleeps in an open transaction which has locked business rows: once its claim is taken away the
    server ends that transaction, so that the next attempt does not wait for it. Author code that has
    effects outside the database runs on when its process wakes, until the watchdog, which wakes with
    it, has had its turn: the one overlap that is not excluded."""
    one = fleet.node("one", slots=2)
    run = fleet.request(
        parts=[
            part("locks", step("locked_rows", fleet.path("never"))),
            part("ticks", step("tick", fleet.path("go"))),
        ]
    )
    fleet.wait_ledger("in_transaction", "locks")
    fleet.wait_ledger("tick", "ticks")
    fleet.node("two", slots=2)

    one.pause()

    fleet.wait_partition("locks", "COMPLETED")
    fleet.wait_started("ticks", 2)
    woken = time.monotonic()
    one.resume()
    one.wait_registered(2)
    fleet.wait_ledger("tick", "ticks", len(fleet.ledger().of("tick")) + 10)
    fleet.open("go")
    fleet.wait(run)
    late = [tick.at - woken for tick in fleet.ledger().of("tick") if tick.attempt == 1]
    assert max(late) < 1.0, "an instant; on a machine that is not busy, less than 0.1 s"
    for key in ("locks", "ticks"):
        assert [start.node for start in fleet.ledger().starts(key)] == ["one", "two"]
        assert fleet.partition(key).claims == 2
    assert [row.node for row in fleet.rows("SELECT node FROM fleet.effects")] == ["two"]


def test_a_pause_shorter_than_the_removal_changes_nothing(fleet: Fleet) -> None:
    """Paused until it is marked unreachable, then woken: the node is active again, keeps its work,
    and nothing was frozen, reassigned or begun twice."""
    one = fleet.node("one", removal_grace_seconds=20)
    run = fleet.request(parts=[part("a", step("tick", fleet.path("go")))])
    fleet.wait_ledger("tick", "a")
    fleet.node("two", removal_grace_seconds=20)
    one.pause()
    eventually(lambda: one.row().status == "UNREACHABLE", "the other node marks it")

    one.resume()

    eventually(lambda: one.row().status == "ACTIVE", "it is active again")
    fleet.open("go")
    fleet.wait(run)
    assert [start.node for start in fleet.ledger().starts("a")] == ["one"]
    assert fleet.partition("a").claims == 1
    assert len(one.incarnations) == 1
    assert one.metric("rowlock_lease_ends_total") == 0
    assert not fleet.db_events("node_removed")
    assert [event.node_id for event in fleet.db_events("node_returned")] == [one.incarnation]


def test_a_node_that_is_alone_goes_on_by_itself_after_any_pause(fleet: Fleet) -> None:
    """Nobody is there when it wakes. Without anybody who could have removed it, it is the node that it was; removed
    by one that has left since, it registers anew: in both cases the same process works again, within two
    polls. (A node that stays away for ever, or finds itself healthy: reported as jobrunr#192, #453, #663.)"""
    one = fleet.node("one")
    polls_seconds = 2 * TIMES["poll_seconds"]

    one.pause()
    asleep_since = time.monotonic()
    removal_seconds = 1.2 * (TIMES["unreachable_seconds"] + TIMES["removal_grace_seconds"])
    wait_until(lambda: time.monotonic() - asleep_since > removal_seconds, seconds=10)
    one.resume()
    fleet.wait(fleet.request(parts=[part("first")]), seconds=polls_seconds + SLACK_SECONDS)
    assert len(one.incarnations) == 1

    observer = fleet.node("two", pool="another")
    one.pause()
    eventually(lambda: fleet.db_events("node_removed"), "it is removed")
    assert observer.terminate_and_wait() == 0
    one.resume()
    fleet.wait(fleet.request(parts=[part("second")]), seconds=polls_seconds + SLACK_SECONDS)
    assert len(one.incarnations) == 2
    assert one.popen.poll() is None
    assert {start.node for start in fleet.ledger().of("start")} == {"one"}


def test_once_work_of_a_node_that_slept_past_its_removal_leaves_evidence(fleet: Fleet) -> None:
    """AT_MOST_ONCE: the row says FAILED, outcome unknown, while the node sleeps. The attempt ends
    after it wakes: the row stays, the result is kept beside the start, and nobody begins again."""
    one = fleet.node("one")
    run = fleet.request("fault.once", parts=[part("a", step("tick", fleet.path("go")))])
    fleet.wait_ledger("tick", "a")
    fleet.node("two")
    one.pause()
    fleet.wait(run, "FAILED")

    one.resume()

    one.wait_registered(2)
    eventually(lambda: one.row().orphans, "it reports the attempt that still runs")
    row = fleet.partition("a")
    assert one.row().orphans == [{"partition_id": row.id, "token": str(row.claim_token)}]
    fleet.open("go")
    eventually(lambda: fleet.evidence("a"), "the late result is kept")
    assert fleet.evidence("a")["outcome"] == "completed"
    assert fleet.evidence("a")["result"] == "a"
    eventually(lambda: not one.row().orphans, "nothing of it runs any more")
    row = fleet.partition("a")
    assert (row.status, row.claims, row.last_error["outcome"]) == ("FAILED", 1, "unknown")
    assert len(fleet.ledger().starts("a")) == len(fleet.ledger().ends("a")) == 1
    # the slot is free again
    fleet.wait(fleet.request(parts=[part("next"), part("more")]))


def test_a_late_result_is_kept_also_before_the_node_knows_that_it_was_removed(
    fleet: Fleet,
) -> None:
    """AT_MOST_ONCE attempts end between the removal of their node and its next beat: what the
    database refuses is kept beside the start, a result and an error alike."""
    one = fleet.node(
        "one",
        slots=2,
        beat_seconds=20,
        unreachable_seconds=60,
        removal_grace_seconds=60,
        poll_seconds=20,
    )
    fleet.request(
        "fault.once",
        parts=[
            part("ends", step("wait", fleet.path("go"))),
            part("raises", step("wait", fleet.path("go")), step("error", "too late")),
        ],
    )
    for key in ("ends", "raises"):
        fleet.wait_started(key)
    beat = one.row().beat

    fleet.rows("SELECT rowlock.mark_unreachable(%s, %s, %s)", uuid4(), one.incarnation, beat)
    removed = fleet.one(
        "SELECT * FROM rowlock.remove_node(%s, %s, %s)", uuid4(), one.incarnation, beat
    )
    assert (removed.removed, removed.failed) == (True, 2)
    fleet.open("go")

    eventually(lambda: fleet.evidence("ends") and fleet.evidence("raises"), "both are kept")
    assert fleet.evidence("ends")["outcome"] == "completed"
    assert fleet.evidence("raises")["outcome"] == "failed"
    assert fleet.evidence("raises")["error"]["message"] == "too late"
    assert one.row().beat == beat, "it has not heard of its removal"


def test_only_work_that_may_be_repeated_is_frozen_when_its_supervisor_stands_still(
    fleet: Fleet,
) -> None:
    """The supervisor alone is stopped past its lease: the watchdog freezes AT_LEAST_ONCE executors
    before another node begins with their work; AT_MOST_ONCE ones run on, since nobody may repeat
    them, and what they come to is known when the supervisor wakes."""
    one = fleet.node("one", slots=2)
    work = fleet.request(parts=[part("a", step("tick", fleet.path("go")))])
    once = fleet.request("fault.once", parts=[part("o", step("tick", fleet.path("done")))])
    for key in ("a", "o"):
        fleet.wait_ledger("tick", key)
    fleet.node("two")

    one.stop()

    second = fleet.wait_started("a", 2)
    assert second.node == "two"
    ticks = fleet.ledger().of("tick", "o")
    eventually(lambda: len(fleet.ledger().of("tick", "o")) > len(ticks) + 10, "the other runs on")
    assert not fleet.ledger().overlaps()
    fleet.wait(once, "FAILED")
    fleet.open("done")
    fleet.wait_ledger("end", "o")
    one.cont()
    one.wait_registered(2)
    eventually(lambda: fleet.evidence("o"), "the result that came too late is kept")
    fleet.open("go")
    fleet.wait(work)

    assert fleet.evidence("o")["outcome"] == "completed"
    assert not fleet.ledger().overlaps()
    row = fleet.partition("o")
    assert (row.status, row.last_error["outcome"]) == ("FAILED", "unknown")
    assert [start.node for start in fleet.ledger().starts("o")] == ["one"]
    last = [tick for tick in fleet.ledger().of("tick", "a") if tick.attempt == 1][-1]
    lease_seconds = 1.8
    assert last.at < second.at - (2.0 - lease_seconds) / 2, "frozen before it could begin elsewhere"


def test_a_frozen_attempt_of_a_supervisor_that_wakes_in_time_goes_on(fleet: Fleet) -> None:
    """Its lease is over and its work frozen, but nobody was there to remove it: the node wakes, is
    told that its claim stands, and the same attempt continues."""
    one = fleet.node("one")
    run = fleet.request(parts=[part("a", step("tick", fleet.path("go")))], timeout_seconds=60)
    fleet.wait_ledger("tick", "a")
    (executor,) = one.executors()

    one.stop()
    wait_until(lambda: state(executor) == "T", what="the watchdog freezes the executor")
    one.cont()

    one.wait_event("executor_thawed")
    fleet.wait_ledger("tick", "a", len(fleet.ledger().of("tick")) + 5)
    fleet.open("go")
    fleet.wait(run)
    assert len(fleet.ledger().starts("a")) == 1
    assert fleet.partition("a").claims == 1
    assert len(one.incarnations) == 1


def test_a_paused_executor_alone_harms_nobody(fleet: Fleet) -> None:
    """Somebody stops one executor (a debugger, a cgroup): the node beats on and is not removed, and
    the time-out of the attempt ends it."""
    one = fleet.node("one", slots=1)
    run = fleet.request(
        parts=[part("a", step("wait", fleet.path("never"), attempts=[1]))], timeout_seconds=1.5
    )
    fleet.wait_started("a")

    send(one.executors()[0], signal.SIGSTOP)

    fleet.wait(run)
    row = fleet.partition("a")
    assert (row.claims, row.failures, row.last_error["type"]) == (2, 1, "TimeoutError")
    assert len(one.incarnations) == 1
