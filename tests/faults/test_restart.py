"""Executions that failed or were cancelled, and the ones that go on from there."""

from uuid import UUID

import pytest

from tests.support.fault_jobs import Part, part, parts, step
from tests.support.fleet import Fleet, eventually


def loaded_parts(fleet: Fleet, count: int) -> list[Part]:
    """Each writes four business rows in two chunks; every second one then fails until `repaired`."""
    rows = step("chunks", {"items": 4, "size": 2})
    late = step("fail_until", fleet.path("repaired"))
    return [part(f"p{n}", rows, *([late] if n % 2 else [])) for n in range(count)]


def ended(fleet: Fleet, execution: UUID) -> set[str]:
    """The partitions of one execution whose author code came to its end."""
    completed = [row.partition_key for row in fleet.rows_of(execution) if row.status == "COMPLETED"]
    return set(completed)


@pytest.mark.parametrize("before, after", [(2, 3), (3, 1)])
def test_a_restart_with_more_or_fewer_nodes_does_what_is_left_and_no_more(
    fleet: Fleet, before: int, after: int
) -> None:
    """Half of the partitions fail, after they have written their rows. The restart has other nodes and another
    number of them: the parts that both executions completed are the plan, without overlap and without a gap; no
    business row is written twice, and finish() sees every result. (The partitioner is called again over changed
    data elsewhere: reported as spring-batch#2051, #1376.)"""
    old = [fleet.node(f"old{n}", slots=2) for n in range(before)]
    first = fleet.request("fault.summed", parts=loaded_parts(fleet, 12))
    row = fleet.wait(first, "FAILED")
    assert row.counts == {"total": 12, "completed": 6, "failed": 6, "cancelled": 0}
    for node in old:
        assert node.terminate_and_wait() == 0
    fleet.open("repaired")

    second = fleet.restart(first)
    for n in range(after):
        fleet.node(f"new{n}", slots=2)

    row = fleet.wait(second)
    assert row.summary == {"results": 12, "distinct": 12, "total": 12}
    assert row.counts == {"total": 12, "completed": 12, "failed": 0, "cancelled": 0}
    assert (row.restart_of, row.carried) == (first, 6)
    assert ended(fleet, first) | ended(fleet, second) == {f"p{n}" for n in range(12)}
    assert not ended(fleet, first) & ended(fleet, second)
    assert fleet.value("SELECT count(*) FROM fleet.effects WHERE key NOT LIKE 'finish%%'") == 48
    assert len(fleet.ledger().of("plan_start")) == 1, "the plan is not made again"
    assert len(fleet.ledger().of("finish_start")) == 1


def test_attempts_of_the_execution_before_change_nothing_when_they_wake(fleet: Fleet) -> None:
    """Paused with transactions open, one of them behind a checkpoint. Their execution is cancelled and restarted,
    and the restart completes: woken, they commit nothing, and no row is written twice. (The same partition is
    active twice after a restart elsewhere: reported as spring-batch#2031, OpenLiberty#9392.)"""
    one = fleet.node("one", slots=2)
    held = step("rows_then_wait", fleet.path("go"))
    chunks = step("chunks", {"items": 4, "size": 2})
    first = fleet.request("fault.summed", parts=[part("a", chunks, held), part("b", held)])
    eventually(
        lambda: (
            fleet.value(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'rowlock work%%'"
            )
            == 2
        ),
        "both are in their transactions",
    )
    one.pause()
    fleet.node("two", slots=2)
    fleet.cancel(first)
    fleet.wait(first, "CANCELLED")
    fleet.open("go")

    second = fleet.restart(first)
    row = fleet.wait(second)
    one.resume()
    one.wait_event("node_was_removed")
    one.wait_registered(2)

    assert one.terminate_and_wait() == 0
    assert row.counts == {"total": 2, "completed": 2, "failed": 0, "cancelled": 0}
    assert fleet.execution(second) == row
    assert fleet.status(first) == "CANCELLED"


def test_once_work_that_was_lost_is_not_started_again_until_somebody_says_so(fleet: Fleet) -> None:
    """kill -9 in the middle of AT_MOST_ONCE work: FAILED, outcome unknown. A restart carries it and
    starts nothing. Resolved as completed, the next one has its result, and the plan is complete."""
    one = fleet.node("one")
    first = fleet.request("fault.once", parts=[part("a", step("wait", fleet.path("never")))])
    fleet.wait_started("a")
    one.crash()
    fleet.node("two")
    assert fleet.wait(first, "FAILED").failure_reason == "PartitionsFailed"
    assert fleet.partition("a").last_error["outcome"] == "unknown"

    second = fleet.restart(first)
    fleet.wait(second, "FAILED")
    assert fleet.partition("a", second).last_error["carried"] is True
    assert len(fleet.ledger().starts("a")) == 1

    with fleet.store() as store:
        answer = store.resolve(
            second, "a", how="completed", result='"by hand"', actor="a test", reason=None
        )
    assert answer == "resolved"
    third = fleet.restart(second)
    row = fleet.wait(third)
    assert row.counts == {"total": 1, "completed": 1, "failed": 0, "cancelled": 0}
    assert fleet.partition("a", third).result == "by hand"
    assert len(fleet.ledger().starts("a")) == 1


def test_after_all_nodes_were_replaced_a_restart_runs_what_never_started(fleet: Fleet) -> None:
    """Every node dies while AT_MOST_ONCE work runs in a cancelled execution, and none comes back under its
    name. A restart on the new ones begins within a poll: what had never started runs, what was lost is
    carried, and runs once more only after `resolve --retry`."""
    one = fleet.node("one")
    script = [
        part("done", weight=9),
        part("lost", step("wait", fleet.path("go")), weight=8),
        *parts(3),
    ]
    first = fleet.request("fault.once", parts=script)
    fleet.wait_started("lost")
    fleet.cancel(first)
    one.crash()
    two = fleet.node("two", slots=2)
    fleet.wait(first, "CANCELLED")
    statuses = {row.partition_key: row.status for row in fleet.rows_of(first)}
    assert statuses == {
        "done": "COMPLETED",
        "lost": "FAILED",
        **{f"p{n}": "CANCELLED" for n in range(3)},
    }

    asked = fleet.now()
    second = fleet.restart(first)

    fleet.wait(second, "FAILED")
    begun = fleet.rows(
        "SELECT extract(epoch FROM min(at) - %s) AS seconds FROM fleet.transitions"
        " WHERE execution_id = %s AND became = 'CLAIMED'",
        *(asked, second),
    )
    assert begun[0].seconds < 2 * fleet.settings["poll_seconds"]
    assert {len(fleet.ledger().starts(f"p{n}")) for n in range(3)} == {1}
    assert len(fleet.ledger().starts("lost")) == len(fleet.ledger().starts("done")) == 1

    with fleet.store() as store:
        answer = store.resolve(
            second, "lost", how="retry", actor="a test", reason="the bank knows of none"
        )
    assert answer == "resolved"
    fleet.open("go")
    third = fleet.restart(second)
    row = fleet.wait(third)
    assert row.counts == {"total": 5, "completed": 5, "failed": 0, "cancelled": 0}
    assert row.carried == 4
    assert [start.node for start in fleet.ledger().starts("lost")] == ["one", two.name]


def test_of_launchers_that_restart_an_instance_at_once_one_wins(fleet: Fleet) -> None:
    """An instance has FAILED, and three launch it again at the same moment: one restarts it, the others
    are told that it runs."""
    fleet.node("one")
    script = [part("good"), part("bad", step("fail_until", fleet.path("repaired")))]
    again = ("--instance", "2013-02")
    assert fleet.launch(parts=script, arguments=again).wait_exit() == 4
    fleet.open("repaired")

    rivals = [fleet.launch(parts=script, name=f"rival{n}", arguments=again) for n in range(3)]

    codes = sorted(rival.wait_exit() for rival in rivals)
    assert codes.count(0) == 1
    assert set(codes) <= {0, 2}
    (winner,) = [rival for rival in rivals if rival.popen.returncode == 0]
    assert winner.out[0]["outcome"] == "restarted"
    assert fleet.value("SELECT count(*) FROM rowlock.batch_job_coordination") == 2
    assert len(fleet.ledger().starts("good")) == 1
    assert len(fleet.ledger().ends("bad")) == 1


def test_nothing_is_claimed_after_a_cancel_and_a_restart_does_the_rest(fleet: Fleet) -> None:
    """Three nodes in the middle of a storm of small partitions when the cancel comes: nothing is claimed once
    it has answered, nothing is lost or unknown, and the restart completes the plan."""
    for n in range(3):
        fleet.node(f"n{n}", slots=2)
    first = fleet.request(parts=parts(400, step("sleep", 0.01)))
    eventually(lambda: len(fleet.ledger().of("end")) > 40, "the storm is on")

    fleet.cancel(first)
    answered = fleet.now()

    row = fleet.wait(first, "CANCELLED")
    assert fleet.claimed_since(first, answered) == 0
    assert row.counts["completed"] + row.counts["cancelled"] == 400
    assert row.counts["cancelled"] > 0
    assert {one.status for one in fleet.rows_of(first)} == {"COMPLETED", "CANCELLED"}

    second = fleet.wait(fleet.restart(first))
    assert second.counts == {"total": 400, "completed": 400, "failed": 0, "cancelled": 0}
    assert second.carried == row.counts["completed"]
    done = ended(fleet, first) & ended(fleet, second.execution_id)
    assert not done
