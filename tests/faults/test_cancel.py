"""Executions that are ended early, and partitions that fail and are tried again."""

import pytest

from tests.support.fault_jobs import part, parts, step
from tests.support.fleet import Fleet


def test_a_cancel_takes_what_waits_at_once_and_ends_when_the_last_attempt_has(fleet: Fleet) -> None:
    """What is PENDING is CANCELLED when the cancel answers. An attempt that stops when asked leaves CANCELLED; one
    that comes to its end in time is COMPLETED, which makes the execution no success: it is CANCELLED, without
    finish(), and the launch exits 3. (A cancel that running units do not hear of, or a late result that overwrites
    it: reported as OCA/queue PR#773, bcda-app PR#653, pgqueuer#87.)"""
    fleet.node("one", slots=2, cancel_seconds=30)
    launch = fleet.launch(
        "fault.summed",
        parts=[
            part("looks", step("wait_or_stop", fleet.path("never")), weight=9),
            part("ends", step("wait", fleet.path("go")), weight=9),
            *parts(50),
        ],
    )
    for key in ("looks", "ends"):
        fleet.wait_started(key)

    assert fleet.cancel(launch.execution) == "closing"

    statuses = {row.partition_key: row.status for row in fleet.rows_of(launch.execution)}
    assert [statuses[f"p{n}"] for n in range(50)] == ["CANCELLED"] * 50
    fleet.wait_partition("looks", "CANCELLED")
    assert fleet.status(launch.execution) == "CLOSING", "an attempt still runs"
    fleet.open("go")
    row = fleet.wait(launch.execution, "CANCELLED")
    assert launch.wait_exit() == 3
    assert len(fleet.ledger().ends("ends")) == 1, "it has come to its end"
    assert row.counts == {"total": 52, "completed": 1, "failed": 0, "cancelled": 51}
    assert (row.summary, row.failure_reason) == (None, "Cancelled")
    assert len(fleet.ledger().of("start")) == 2
    assert not fleet.ledger().of("finish_start")


def test_a_cancel_ends_a_finish_that_is_stuck(fleet: Fleet) -> None:
    """Cancelled in finish(), with its transaction open: the rows are not there, the execution is
    CANCELLED, and the node's executor of masters serves the next one."""
    fleet.node("one")
    launch = fleet.launch(
        "fault.summed", parts=parts(2), commit=[step("wait", fleet.path("never"))]
    )
    fleet.wait_ledger("finish_in_transaction", "finish")

    fleet.cancel(launch.execution)

    fleet.wait(launch.execution, "CANCELLED")
    assert launch.wait_exit() == 3
    assert not fleet.rows("SELECT FROM fleet.effects")
    fleet.wait(fleet.request("fault.summed", parts=parts(2, prefix="next")))


@pytest.mark.parametrize("limit, allowed", [(3, 3), ("5%", 2)])
def test_too_many_failed_partitions_close_an_execution(
    fleet: Fleet, limit: int | str, allowed: int
) -> None:
    """One more than `max_failed` allows: what waits is CANCELLED and the execution is FAILED with the
    reason. As many as it allows: COMPLETED."""
    fleet.node("one", slots=2)
    fails = [part(f"f{n}", step("fail", "no"), weight=9) for n in range(allowed + 1)]
    good = parts(40 - len(fails), step("wait_or_stop", fleet.path("never")))

    run = fleet.request(parts=[*fails, *good], max_failed=limit)
    row = fleet.wait(run, "FAILED")
    assert row.failure_reason == "MaxFailedExceeded"
    assert str(limit) in row.failure_message
    ends = {"failed": allowed + 1, "completed": 0, "cancelled": 40 - allowed - 1}
    assert row.counts == {"total": 40, **ends}

    few = fleet.request(
        parts=[
            *(part(f"g{n}", step("fail", "no")) for n in range(allowed)),
            *parts(40 - allowed, prefix="h"),
        ],
        max_failed=limit,
    )
    assert fleet.wait(few).counts["failed"] == allowed


def test_a_failed_attempt_is_repeated_later_and_later_until_none_is_left(fleet: Fleet) -> None:
    """Retries wait longer each time, and end after `max_attempts`; asking for another time costs no
    attempt, and `Fail` leaves none."""
    fleet.node("one", slots=3)
    run = fleet.request(
        parts=[
            part("always", step("error", "bad luck")),
            part("later", step("retry_later", 0.05, attempts=[1, 2, 3, 4, 5]), step("mark", "ok")),
            part("twice", step("error", "once more", attempts=[1, 2])),
            part("fail", step("fail", "for good")),
        ],
        max_attempts=3,
        initial_seconds=0.2,
        factor=3,
        max_seconds=5,
    )

    row = fleet.wait(run, "FAILED")

    ledger = fleet.ledger()
    assert [len(ledger.starts(k)) for k in ("always", "later", "twice", "fail")] == [3, 6, 3, 1]
    rows = {row.partition_key: row for row in fleet.rows_of(run)}
    assert {key: (one.status, one.failures) for key, one in rows.items()} == {
        "always": ("FAILED", 3),
        "later": ("COMPLETED", 0),
        "twice": ("COMPLETED", 2),
        "fail": ("FAILED", 1),
    }
    assert rows["always"].last_error["message"] == "bad luck"
    assert rows["fail"].last_error["message"] == "for good"
    assert row.failure_reason == "PartitionsFailed"
    delays = [
        event.detail["delay_seconds"]
        for event in fleet.db_events("partition_retried")
        if event.detail["kind"] == "retry"
    ]
    assert len(delays) == 4
    assert max(delays) <= 0.6, "full jitter: up to 0.2 s, then up to 0.6 s"
