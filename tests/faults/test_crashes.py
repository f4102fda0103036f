"""Crashes of nodes: what was running is run again, or is known to be unknown, and nothing is left."""

import signal
import time

from tests.support.fault_jobs import part, parts, step
from tests.support.fleet import IDLE_SECONDS, TIMES, Fleet, eventually
from tests.support.supervisor import identity, is_alive, send
from tests.support.waiting import SLACK_SECONDS, wait_until


def test_work_of_a_killed_node_goes_on_elsewhere_at_its_last_checkpoint(fleet: Fleet) -> None:
    """kill -9 in the middle of a chunk: its transaction is undone, the next attempt resumes behind
    the last one that was committed, and every item is written once."""
    hold = {"15": fleet.path("never")}
    one = fleet.node("one")
    run = fleet.request(parts=[part("a", step("chunks", {"items": 40, "size": 10, "hold": hold}))])
    fleet.wait_ledger("held", "a")
    fleet.node("two")

    one.kill()

    fleet.wait(run)
    row = fleet.partition("a")
    assert (row.claims, row.failures, row.lost) == (2, 1, 1)
    chunks = [(e.attempt, e.more["first"], e.more["last"]) for e in fleet.ledger().of("chunk", "a")]
    assert chunks == [(1, 1, 10), (2, 11, 20), (2, 21, 30), (2, 31, 40)]
    written = fleet.rows("SELECT item, attempt FROM fleet.effects ORDER BY item")
    assert [(r.item, r.attempt) for r in written] == [
        (n, 1 if n <= 10 else 2) for n in range(1, 41)
    ]
    assert not fleet.ledger().overlaps()


def test_a_started_once_partition_of_a_killed_node_is_failed_and_one_that_was_not_runs_elsewhere(
    fleet: Fleet,
) -> None:
    """AT_MOST_ONCE: of two partitions the node has begun one. That one ends FAILED, its outcome
    unknown, and is begun by nobody else; the other, which only waited, runs on another node."""
    one = fleet.node("one")
    run = fleet.request(
        "fault.once",
        parts=[part("begun", step("wait", fleet.path("never")), weight=1), part("waits")],
    )
    fleet.wait_started("begun")
    fleet.node("two")
    one.kill()

    row = fleet.wait(run, "FAILED")

    assert row.failure_reason == "PartitionsFailed"
    assert row.counts == {"total": 2, "completed": 1, "failed": 1, "cancelled": 0}
    begun = fleet.partition("begun")
    assert (begun.status, begun.claims) == ("FAILED", 1)
    assert begun.last_error["outcome"] == "unknown"
    assert [start.node for start in fleet.ledger().starts("begun")] == ["one"]
    assert [start.node for start in fleet.ledger().starts("waits")] == ["two"]
    started = fleet.rows("SELECT partition_key FROM rowlock.batch_starts ORDER BY 1")
    assert [r.partition_key for r in started] == ["begun", "waits"]


def test_a_claim_of_a_node_that_died_before_the_first_statement_is_recovered(fleet: Fleet) -> None:
    """kill -9 between the claim and the author's first statement: AT_LEAST_ONCE work runs elsewhere,
    as its second attempt; AT_MOST_ONCE work is FAILED, because nobody can know, and never runs."""
    one = fleet.node("one", slots=2)
    fleet.warm_up(one)
    for executor in one.executors():
        fleet.hold_still(executor)  # they are given work and do not begin with it
    work = fleet.request(parts=parts(1))
    once = fleet.request("fault.once", parts=parts(1, prefix="o"))
    for key in ("p0", "o0"):
        fleet.wait_partition(key, "CLAIMED")
    assert {fleet.partition(key).assigned_node for key in ("p0", "o0")} == {one.incarnation}
    fleet.node("two")

    one.crash()

    fleet.wait(work)
    fleet.wait(once, "FAILED")
    assert [(start.node, start.attempt) for start in fleet.ledger().starts("p0")] == [("two", 2)]
    assert not fleet.ledger().starts("o0")
    lost = fleet.partition("o0")
    assert (lost.status, lost.claims, lost.last_error["outcome"]) == ("FAILED", 1, "unknown")


def test_claims_of_a_node_whose_row_was_deleted_by_hand_are_recovered(fleet: Fleet) -> None:
    """A killed node's row is pruned by somebody before anybody has recovered its claims. They are found without
    it: AT_LEAST_ONCE work runs elsewhere, AT_MOST_ONCE work that was begun is FAILED.

    Reported as procrastinate#1518 and solid_queue#542: a recovery that joins on the row never finds them.
    """
    one = fleet.node("one", slots=2)
    wait = step("wait", fleet.path("go"))
    work = fleet.request(parts=[part("a", wait)])
    once = fleet.request("fault.once", parts=[part("o", wait)])
    for key in ("a", "o"):
        fleet.wait_started(key)
    one.crash()
    deleted = fleet.rows(
        "DELETE FROM rowlock.batch_nodes WHERE node_id = %s RETURNING 1", one.incarnation
    )
    assert len(deleted) == 1
    fleet.open("go")

    fleet.node("two")

    fleet.wait(work)
    fleet.wait(once, "FAILED")
    assert [start.node for start in fleet.ledger().starts("a")] == ["one", "two"]
    assert [start.node for start in fleet.ledger().starts("o")] == ["one"]
    assert fleet.partition("o").last_error["outcome"] == "unknown"
    assert not fleet.db_events("node_removed")


def test_work_is_taken_over_for_silence_and_not_for_taking_long(fleet: Fleet) -> None:
    """Two partitions begin together, each on a node of its own. One node is killed: its work is back when the
    silence has lasted for the removal, and a moment more. The other's partition does nothing for three times as long
    (ROWLOCK_IDLE_SECONDS=60: thirty times), and is nobody else's.

    Reported as hexpm PR#1825, river#682 and #773, graphile-worker#204, pgqueuer#430: recovery by elapsed time
    runs long work twice, or lets crashed work wait for hours.
    """
    fleet.settings["evidence"] = "off"
    removal = float(fleet.settings["unreachable_seconds"])
    removal += float(fleet.settings["removal_grace_seconds"])
    nodes = {node.name: node for node in (fleet.node("one"), fleet.node("two"))}
    run = fleet.request(parts=parts(2, step("wait", fleet.path("go"), attempts=[1])))
    killed, long = (fleet.wait_started(key) for key in ("p0", "p1"))
    fleet.node("three")

    nodes[killed.node].kill()
    died = time.monotonic()
    again = fleet.wait_started(killed.key, 2)
    wait_until(lambda: time.monotonic() > died + IDLE_SECONDS, seconds=2 * IDLE_SECONDS + 60)
    fleet.open("go")

    fleet.wait(run)
    assert again.node == "three"
    assert again.at - died < removal + TIMES["poll_seconds"] + SLACK_SECONDS
    assert [start.node for start in fleet.ledger().starts(long.key)] == [long.node]
    assert fleet.partition(long.key).claims == 1


def test_nothing_survives_a_killed_supervisor(fleet: Fleet) -> None:
    """SIGKILL of the supervisor alone: watchdog, executors and whatever these have started, in their
    own session or as daemons, are gone before anybody else may begin with the work."""
    fleet.left_open = 1
    one = fleet.node("one", slots=2)
    spawning = [step("spawn", how) for how in ("child", "session", "daemon")]
    fleet.request(
        parts=[
            part("work", *spawning, step("tick", fleet.path("never"))),
            part("busy", step("hold_gil", 600)),
        ]
    )
    fleet.wait_ledger("tick", "work")
    fleet.wait_started("busy")
    children = [identity(entry.more["child"]) for entry in fleet.ledger().of("spawned")]
    assert len(children) == 3
    assert all(map(is_alive, children))
    family = one.family()

    one.kill()

    wait_until(lambda: not any(map(is_alive, [*family, *children])), what="all are gone")


def test_a_dead_executor_costs_its_attempt_and_nothing_else(fleet: Fleet) -> None:
    """A segmentation fault, an exit from native code, the kernel's answer to a lack of memory: each costs the
    attempt one failure, the node and its other attempts nothing. (The parent goes on with less capacity, and the
    unit waits for a death that never comes, elsewhere: reported as solid_queue#751, tasktiger PR#335.)"""
    one = fleet.node("one", slots=2)
    held = fleet.request(parts=[part("neighbour", step("wait", fleet.path("go")))])
    fleet.wait_started("neighbour")
    deaths = [step("segfault"), step("exit", 3), step("kill_self", signal.SIGKILL)]
    for death in deaths:
        dying = part(death.do, step(death.do, death.with_, attempts=[1]), step("sleep", 0.15))
        fleet.wait(fleet.request(parts=[dying]))
    hopeless = fleet.request(parts=[part("hopeless", step("segfault"))], max_attempts=2)
    fleet.wait(hopeless, "FAILED")
    fleet.open("go")
    fleet.wait(held)

    for death, how in zip(deaths, ("SIGSEGV", "exit status 3", "SIGKILL"), strict=True):
        row = fleet.partition(death.do)
        assert (row.status, row.claims, row.failures, row.lost) == ("COMPLETED", 2, 1, 0)
        assert row.last_error["type"] == "ExecutorDied"
        assert how in row.last_error["message"]
        first, again = fleet.ledger().starts(death.do)
        assert again.at - first.at < 5, "seconds; the death of a node takes longer to find"
    row = fleet.partition("hopeless")
    assert (row.status, row.claims, row.last_error["type"]) == ("FAILED", 2, "ExecutorDied")
    assert fleet.partition("neighbour").claims == 1
    assert one.metric("rowlock_executor_deaths_total") == 5
    assert len(one.incarnations) == 1


def test_a_dead_executor_before_the_word_go_hands_once_work_back_and_after_it_fails_it(
    fleet: Fleet,
) -> None:
    """AT_MOST_ONCE: what an executor was given and died of before author code could begin is run by
    another; after it, the outcome is unknown and nobody runs it again."""
    one = fleet.node("one")
    fleet.warm_up(one)
    (executor,) = one.executors()
    fleet.hold_still(executor)
    run = fleet.request(
        "fault.once",
        parts=[part("before", weight=1), part("after", step("kill_self", signal.SIGKILL))],
    )
    fleet.wait_partition("before", "CLAIMED")
    assert not fleet.ledger().starts("before")

    send(executor, signal.SIGKILL)

    fleet.wait(run, "FAILED")

    row = fleet.partition("before")
    assert (row.status, row.claims, row.failures) == ("COMPLETED", 2, 1)
    assert [start.attempt for start in fleet.ledger().starts("before")] == [2]
    row = fleet.partition("after")
    assert (row.status, row.claims, row.last_error["outcome"]) == ("FAILED", 1, "unknown")
    assert len(fleet.ledger().starts("after")) == 1


def test_a_time_out_ends_one_attempt_with_all_it_has_started(fleet: Fleet) -> None:
    """The executor and its grandchildren are killed, the attempt counts as failed and is tried again; an attempt
    beside it, without a time-out, is not disturbed. AT_MOST_ONCE work that is cut off is FAILED, its outcome
    unknown. (Reported as db-scheduler#115, river#1258, rq#1516.)"""
    one = fleet.node("one", slots=2)
    held = fleet.request(parts=[part("neighbour", step("wait", fleet.path("go")))])
    fleet.wait_started("neighbour")
    spawning = [step("spawn", how, attempts=[1]) for how in ("child", "session", "daemon")]
    run = fleet.request(
        parts=[part("slow", *spawning, step("wait", fleet.path("never"), attempts=[1]))],
        timeout_seconds=1.5,
    )
    fleet.wait_ledger("spawned", "slow", 3)
    children = [identity(entry.more["child"]) for entry in fleet.ledger().of("spawned")]
    fleet.wait(run)
    once = fleet.request(
        "fault.once", parts=[part("once", step("wait", fleet.path("never")))], timeout_seconds=0.5
    )
    fleet.wait(once, "FAILED")
    fleet.open("go")
    fleet.wait(held)

    row = fleet.partition("slow")
    assert (row.claims, row.failures, row.last_error["type"]) == (2, 1, "TimeoutError")
    assert not any(map(is_alive, children))
    row = fleet.partition("once")
    assert (row.status, row.claims) == ("FAILED", 1)
    assert (row.last_error["type"], row.last_error["outcome"]) == ("TimeoutError", "unknown")
    assert fleet.partition("neighbour").claims == 1
    assert one.outcomes("timeout") == 2
    assert one.metric("rowlock_executor_deaths_total") == 0


def test_an_exception_is_kept_with_its_type_message_and_place(fleet: Fleet) -> None:
    """A partition that always raises is FAILED after its retries, with the reason; the others
    complete, and the execution is FAILED. (A system that only logs it ends in an unknown state.)"""
    fleet.node("one", slots=2)
    run = fleet.request(
        parts=[
            *parts(5),
            part("raises", step("error", "no such account")),
            part("fails", step("fail", "closed account")),
            part("mends", step("error", "not yet", attempts=[1, 2])),
            part("later", step("retry_later", 0.1, attempts=[1, 2, 3])),
        ]
    )

    row = fleet.wait(run, "FAILED")

    assert row.counts == {"total": 9, "completed": 7, "failed": 2, "cancelled": 0}
    assert row.failure_message == "2 of 9 partitions failed, 0 allowed"
    raises = fleet.partition("raises")
    assert (raises.status, raises.claims, raises.failures) == ("FAILED", 3, 3)
    assert (raises.last_error["type"], raises.last_error["message"]) == (
        "ValueError",
        "no such account",
    )
    assert "fault_jobs.py" in raises.last_error["traceback"]
    fails = fleet.partition("fails")
    assert (fails.status, fails.claims, fails.last_error["type"]) == (
        "FAILED",
        1,
        "rowlock.errors.Fail",
    )
    mends, later = fleet.partition("mends"), fleet.partition("later")
    assert (mends.status, mends.claims, mends.failures) == ("COMPLETED", 3, 2)
    assert (later.status, later.claims, later.failures) == ("COMPLETED", 4, 0)
    assert not fleet.ledger().overlaps()


def test_a_node_whose_executors_cannot_start_leaves_executions_to_others(fleet: Fleet) -> None:
    """Its installation breaks while it is the master (a full disk, a deleted package): it adopts
    nothing more, gives back what it drives, claims nothing and says that it is not ready; a node
    that is well runs everything to its end."""
    broken = fleet.node("one", FLEET_BREAK=fleet.path("broken"))
    run = fleet.request("fault.summed", parts=parts(2, step("wait", fleet.path("go"))))
    fleet.wait_started("p0")
    assert fleet.execution(run).master_node == broken.incarnation
    fleet.open("broken")
    for executor in broken.executors(all_=True):
        send(executor, signal.SIGKILL)
    broken.wait_event("masterships_given_back")
    eventually(lambda: broken.readiness() == (503, "executors cannot be started"), "not ready")
    again = fleet.request(parts=parts(3, prefix="q"))
    broken.wait_beats(5)
    assert (fleet.status(run), fleet.status(again)) == ("RUNNING", "REQUESTED")

    two = fleet.node("two", slots=2)
    fleet.open("go")

    fleet.wait(run)
    fleet.wait(again)
    assert fleet.execution(run).master_node == two.incarnation
    assert {start.node for start in fleet.ledger().starts("p1")} == {"two"}
    assert len(fleet.ledger().of("finish_end")) == 1


def test_a_dead_watchdog_is_replaced_and_work_goes_on(fleet: Fleet) -> None:
    """The process that guards the lease is killed: another takes its place; no attempt notices."""
    one = fleet.node("one")
    run = fleet.request(parts=[part("a", step("tick", fleet.path("go")))])
    fleet.wait_ledger("tick", "a")
    (first,) = one.watchdogs()

    send(first, signal.SIGKILL)

    one.wait_event("watchdog_died")
    eventually(lambda: any(p.pid != first.pid for p in one.watchdogs()), "another watches")
    fleet.wait_ledger("tick", "a", len(fleet.ledger().of("tick")) + 5)
    fleet.open("go")
    fleet.wait(run)
    assert fleet.partition("a").claims == 1
