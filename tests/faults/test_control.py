"""What a person changes while an execution runs: suspend, limits, priority, deadline, cancel.

ROWLOCK_HUGE_MILLISECONDS is what each of 10,000 partitions takes while a small execution comes in between (8).
"""

import os
import time
from uuid import UUID

import pytest

from tests.support.fault_jobs import part, parts, step
from tests.support.fleet import Fleet, NodeProcess, eventually

HUGE_SECONDS = float(os.environ.get("ROWLOCK_HUGE_MILLISECONDS") or 8) / 1000


def claimed(fleet: Fleet, execution: UUID) -> int:
    """How many partitions of an execution are claimed."""
    found: int = fleet.value(
        "SELECT count(*) FROM rowlock.batch_partitions"
        " WHERE execution_id = %s AND status = 'CLAIMED'",
        execution,
    )
    return found


def set_limits(fleet: Fleet, execution: UUID, **changes: float | None) -> None:
    """Change limits as the operator does."""
    with fleet.store("rowlock_operator") as store:
        assert store.set_limits(execution, changes, "a test", None) == "changed"


def owners(fleet: Fleet) -> list[str]:
    """The names of the nodes that hold claims, those with much lost work first."""
    found = fleet.rows(
        "SELECT n.name FROM rowlock.batch_partitions p"
        " JOIN rowlock.batch_nodes n ON n.node_id = p.assigned_node WHERE p.status = 'CLAIMED'"
        " ORDER BY p.claims DESC, p.id"
    )
    return [row.name for row in found]


def holds_at(fleet: Fleet, execution: UUID, nodes: list[NodeProcess], limit: int) -> None:
    """As many partitions are claimed as allowed, and no more, whatever the nodes try."""
    eventually(lambda: claimed(fleet, execution) == limit, f"{limit} are claimed")
    for node in nodes:
        node.wait_beats(3)
    assert claimed(fleet, execution) == fleet.most_claimed_of(execution) == limit


def test_a_suspended_execution_runs_out_under_load_and_goes_on_where_it_was(fleet: Fleet) -> None:
    """Two nodes in full swing: when what is claimed has come to its end nothing more is claimed, another
    execution is not touched, and after `resume` everything is done, once."""
    nodes = [fleet.node(f"n{n}", slots=2) for n in range(2)]
    run = fleet.request("fault.summed", parts=parts(300, step("sleep", 0.01)))
    eventually(lambda: len(fleet.ledger().of("end")) > 30, "it is in full swing")

    with fleet.store("rowlock_operator") as store:
        assert store.suspend(run, "a test", None) == "suspended"
        eventually(lambda: claimed(fleet, run) == 0, "what was claimed comes to its end")
        quiet = fleet.now()
        fleet.wait(fleet.request(parts=parts(4, prefix="other")))
        for node in nodes:
            node.wait_beats(3)
        assert fleet.claimed_since(run, quiet) == 0
        assert fleet.status(run) == "RUNNING"
        assert store.resume(run, "a test", None) == "resumed"

    row = fleet.wait(run)
    assert row.summary == {"results": 300, "distinct": 300, "total": 300}
    assert fleet.was_begun_once(run)


def test_a_limit_holds_and_follows_what_it_is_set_to(fleet: Fleet) -> None:
    """Eight slots and a limit of 3: three run, whatever else waits. 5: two more. None: all slots. 2, while
    eight run: nothing is taken away, and from then on two at a time."""
    nodes = [fleet.node(f"n{n}", slots=4) for n in range(2)]
    work = [*parts(8, step("wait", fleet.path("go"))), *parts(30, step("sleep", 0.02), prefix="q")]
    work = [part(one.key, *one.steps, weight=9 if one.key[0] == "p" else 0) for one in work]
    run = fleet.request(parts=work, options={"parallelism": 3})

    holds_at(fleet, run, nodes, 3)
    set_limits(fleet, run, parallelism=5)
    holds_at(fleet, run, nodes, 5)
    set_limits(fleet, run, parallelism=None)
    eventually(lambda: len(fleet.ledger().of("start")) >= 8, "all slots are busy")

    set_limits(fleet, run, parallelism=2)
    answered = fleet.now()
    fleet.open("go")

    fleet.wait(run)
    held = fleet.rows(
        "SELECT max(held) AS most FROM (SELECT at, became, sum(CASE WHEN became = 'CLAIMED' THEN 1"
        "  WHEN was = 'CLAIMED' THEN -1 ELSE 0 END) OVER (ORDER BY id) AS held"
        " FROM fleet.transitions WHERE execution_id = %s) h WHERE became = 'CLAIMED' AND at > %s",
        *(run, answered),
    )
    assert held[0].most <= 2
    assert fleet.was_begun_once(run)


def test_a_limit_holds_and_is_given_back_when_owners_are_killed(fleet: Fleet) -> None:
    """Two executions with limits of 1 and 2, and three times the owner of a claim dies by kill -9: the limits are
    never exceeded, and the claims of the dead do not use them up.

    Reported as pgqueuer#475: claims of a crashed worker count for ever, and nothing is picked again.
    """
    nodes = {node.name: node for node in (fleet.node(f"n{n}", slots=2) for n in range(3))}
    slow = step("wait", fleet.path("go"))
    runs = {
        limit: fleet.request(
            parts=parts(6, slow, prefix=f"of{limit}-"),
            options={"parallelism": limit},
            max_attempts=100,
        )
        for limit in (1, 2)
    }
    for _ in range(3):
        eventually(
            lambda: sum(claimed(fleet, run) for run in runs.values()) == 3, "all limits are used"
        )
        owner = owners(fleet)[0]
        nodes.pop(owner).kill()
        fresh = fleet.node(f"n{len(fleet.members)}", slots=2)
        nodes[fresh.name] = fresh
        eventually(lambda: owner not in owners(fleet), "its claims are recovered")  # noqa: B023
    fleet.open("go")

    for limit, run in runs.items():
        fleet.wait(run)
        assert fleet.most_claimed_of(run) == limit
    assert fleet.value("SELECT sum(lost) FROM rowlock.batch_partitions") >= 3


def test_a_priority_that_is_raised_counts_from_the_next_claim_on(fleet: Fleet) -> None:
    """Two executions share two slots. One is raised: from then on only that one is claimed, until nothing of
    it waits."""
    fleet.node("one", slots=2)
    calm, urgent = (
        fleet.request(parts=parts(60, step("sleep", 0.02), prefix=name)) for name in "cu"
    )
    for execution in (calm, urgent):
        fleet.wait(execution, "RUNNING")
    eventually(
        lambda: {e.key[0] for e in fleet.ledger().of("start")} == {"c", "u"}, "both are served"
    )

    set_limits(fleet, urgent, priority=5)
    answered = fleet.now()
    eventually(
        lambda: fleet.claimed_since(urgent, answered) > 2, "a claim that was under way is over"
    )
    raised = fleet.now()

    fleet.wait(urgent)
    between = fleet.value(
        "SELECT count(*) FROM rowlock.batch_partitions WHERE execution_id = %s AND claimed_at > %s"
        # The claim that takes the last of the one fills up with the other.
        " AND claimed_at < (SELECT max(claimed_at) FROM rowlock.batch_partitions WHERE execution_id = %s)",
        *(calm, raised, urgent),
    )
    assert between == 0
    fleet.wait(calm)


def test_an_execution_past_its_deadline_is_ended_by_any_node(fleet: Fleet) -> None:
    """What runs is asked to stop, what waits is CANCELLED, and it is FAILED with the reason. A deadline that is
    taken away in time does nothing; one that is set while it runs counts from the request. One that nobody has
    begun, and that nobody here could, ends too."""
    fleet.node("one", slots=2)
    never = step("wait_or_stop", fleet.path("never"))
    late = fleet.request(
        parts=[part("late", never), *parts(5, never)], options={"deadline_seconds": 6}
    )
    spared = fleet.request(
        parts=[part("spared", step("wait", fleet.path("go")))], options={"deadline_seconds": 3600}
    )
    foreign = fleet.request(contract_hash="0" * 16, options={"deadline_seconds": 1})
    set_limits(fleet, spared, deadline_seconds=None)
    fleet.wait_started("late")

    row = fleet.wait(late, "FAILED")

    assert row.failure_reason == "DeadlineExceeded"
    assert row.counts["completed"] == row.counts["failed"] == 0
    assert row.counts["cancelled"] == 6
    assert fleet.wait(foreign, "FAILED").failure_reason == "DeadlineExceeded"
    fleet.wait_started("spared")
    fleet.open("go")
    fleet.wait(spared)

    changed = fleet.request(parts=[part("changed", never)])
    fleet.wait_started("changed")
    set_limits(fleet, changed, deadline_seconds=0.5)
    assert fleet.wait(changed, "FAILED").failure_reason == "DeadlineExceeded"


def test_a_cancelled_attempt_hears_of_it_within_a_poll_and_is_killed_if_it_does_not_listen(
    fleet: Fleet,
) -> None:
    """One looks at should_stop, one saves a checkpoint, one is deaf: the first two stop by themselves, the last is
    killed after the cancel time and no later than a little after it. None of them is run again. (Reported as
    sourcegraph PR#56365, CartoDB-SQL-API#293.)"""
    cancel_seconds = 2.0
    node = fleet.node("one", slots=3, cancel_seconds=cancel_seconds)
    fleet.warm_up(node)
    saves = {"count": 5, "hold": {"2": fleet.path("saved"), "4": fleet.path("never")}}
    run = fleet.request(
        parts=[
            part("looks", step("wait_or_stop", fleet.path("never"))),
            part("saves", step("steps_with_saves", saves)),
            part("deaf", step("tick", fleet.path("never"))),
        ]
    )
    fleet.wait_ledger("held", "saves")
    for key in ("looks", "deaf"):
        fleet.wait_started(key)

    asked = time.monotonic()
    assert fleet.cancel(run) == "closing"
    heard = fleet.wait_ledger("asked_to_stop", "looks").at - asked
    fleet.open("saved")
    fleet.wait(run, "CANCELLED")

    assert heard < float(fleet.settings["poll_seconds"])
    steps = [entry.more["number"] for entry in fleet.ledger().of("step", "saves")]
    assert steps == [1, 2], "it stopped at its next checkpoint"
    last = fleet.ledger().of("tick", "deaf")[-1].at - asked
    assert cancel_seconds * 0.9 < last < cancel_seconds + 2
    rows = {row.partition_key: (row.status, row.claims) for row in fleet.rows_of(run)}
    assert rows == dict.fromkeys(("looks", "saves", "deaf"), ("CANCELLED", 1))


@pytest.mark.timeout(120 + 10_000 * HUGE_SECONDS)
def test_a_small_execution_does_not_wait_for_a_huge_one(fleet: Fleet) -> None:
    """10,000 small partitions run when four arrive: these are claimed before another twentieth of the ten
    thousand is, because executions of one priority take turns, and are done in less than a twentieth of the
    time. (One job occupies all workers for hours elsewhere: reported as sourcegraph#26895, postel#126,
    pgbus#426, ballista#138.)"""
    node = fleet.node("one", slots=4)
    fleet.warm_up(node)
    each = HUGE_SECONDS
    huge = fleet.request("fault.planned", params=fleet.plan(10_000, seconds=each))
    eventually(lambda: claims(fleet, huge) > 100, "the huge one runs")

    small = fleet.wait(fleet.request("fault.planned", params=fleet.plan(4, seconds=each)))

    meanwhile = fleet.value(
        "SELECT count(*) FROM fleet.transitions WHERE execution_id = %s AND became = 'CLAIMED'"
        " AND at BETWEEN %s AND (SELECT max(at) FROM fleet.transitions"
        "  WHERE execution_id = %s AND became = 'CLAIMED')",
        *(huge, small.started_at, small.execution_id),
    )
    assert claims(fleet, huge) < 10_000, "it was still running"
    assert meanwhile < 500
    whole = fleet.wait(huge, seconds=40 + 10_000 * each)
    assert whole.counts["completed"] == 10_000
    took, took_whole = (run.ended_at - run.requested_at for run in (small, whole))
    assert took < took_whole / 20, f"{took} of {took_whole}"


def claims(fleet: Fleet, execution: UUID) -> int:
    """How often partitions of an execution have been claimed."""
    return fleet.claimed_since(execution, fleet.execution(execution).requested_at)
