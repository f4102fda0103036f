"""Plans that are empty, wrong, endless or large: what becomes visible, and what it costs."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.fault_jobs import parts, step
from tests.support.fleet import Fleet, LaunchProcess, eventually

BROKEN = {
    # how partition() ends after 4,999 good slices: the reason, and what the message says
    "raise": ("PlanFailed", r"partition\(\) failed with LookupError: .*no such number"),
    "duplicate": ("DuplicatePartitionKey", r"'n1' twice"),
    "wrong": ("PlanFailed", r"slice \$: expected int"),
    "nothing": ("PlanFailed", r"partition\(\) of job 'fault.planned' returned None"),
    "exit": ("PlanFailed", r"the process that ran it died: exit status 7"),
}


def test_a_plan_that_breaks_fails_the_execution_before_anything_is_visible(fleet: Fleet) -> None:
    """partition() raises at item 5,000, yields a key twice or a slice that breaks its contract, returns
    None, or its process dies: the execution is FAILED with the reason, no partition was ever there,
    and the node plans the next execution as if nothing had been. (A plan of None is reported as
    OpenLiberty#9707.)"""
    fleet.node("one")

    for then, (reason, message) in BROKEN.items():
        run = fleet.request("fault.planned", params=fleet.plan(4999, then))
        row = fleet.wait(run, "FAILED")
        assert row.failure_reason == reason, row
        assert re.search(message, row.failure_message), row.failure_message
        assert (row.total, row.summary, row.started_at) == (None, None, None)
        assert fleet.value("SELECT count(*) FROM rowlock.batch_staging") == 0

    assert fleet.value("SELECT count(*) FROM rowlock.batch_partitions") == 0
    assert not fleet.ledger().of("finish_start")
    fleet.wait(fleet.request("fault.planned", params=fleet.plan(3)))
    assert fleet.value("SELECT count(*) FROM rowlock.batch_partitions") == 3


def test_a_plan_of_nothing_is_completed_and_finished(fleet: Fleet) -> None:
    """0 of 0 partitions, from a generator, a list or a tuple: COMPLETED, and finish() has run once. (Elsewhere it
    fails early, or waits for ever: reported as OpenLiberty#9707, spring-batch#2005, hapi-fhir#3878.)"""
    fleet.node("one")

    for number, form in enumerate(["", "list", "tuple"], start=1):
        row = fleet.wait(fleet.request("fault.planned", params=fleet.plan(0, form)))

        assert row.counts == {"total": 0, "completed": 0, "failed": 0, "cancelled": 0}, form
        assert row.summary == {"total": 0, "sum": 0}
        assert len(fleet.ledger().of("finish_start")) == number


@pytest.mark.parametrize("yielded", [0, 3000])
def test_a_plan_that_never_ends_is_cancelled_with_its_execution(fleet: Fleet, yielded: int) -> None:
    """partition() is stuck before its first slice, or with thousands of them staged: its master beats on, a cancel
    ends it and leaves no trace, and the executor of plans serves the next execution. (Reported as
    hapi-fhir#3878.)"""
    node = fleet.node("one")
    run = fleet.request("fault.planned", params=fleet.plan(yielded, "wait"))
    stuck = fleet.wait_ledger("planned", "plan").pid
    node.wait_beats(3)
    assert fleet.status(run) == "PLANNING"

    assert fleet.cancel(run) == "cancelled"

    row = fleet.wait(run, "CANCELLED")
    assert (row.total, row.summary) == (None, None)
    eventually(lambda: not Path(f"/proc/{stuck}").exists(), "partition() is ended")
    assert fleet.value("SELECT count(*) FROM rowlock.batch_partitions") == 0
    assert fleet.value("SELECT count(*) FROM rowlock.batch_staging") == 0
    fleet.wait(fleet.request("fault.planned", params=fleet.plan(2)))


def test_a_plan_without_an_end_is_refused_at_its_limit(fleet: Fleet) -> None:
    """partition() yields for ever: its execution is FAILED with the limit and where it is set, what was staged
    is gone, its process is ended, and the next execution is planned. A plan as large as the limit is one."""
    fleet.node("one", plan_partitions_max=4000)

    row = fleet.wait(fleet.request("fault.planned", params=fleet.plan(10**9)), "FAILED")

    assert row.failure_reason == "PlanTooLarge"
    assert "more than 4,000 slices" in row.failure_message
    assert "ROWLOCK_PLAN_PARTITIONS_MAX" in row.failure_message
    assert fleet.value("SELECT count(*) FROM rowlock.batch_partitions") == 0
    assert fleet.value("SELECT count(*) FROM rowlock.batch_staging") == 0
    largest = fleet.wait(fleet.request("fault.planned", params=fleet.plan(4000)))
    assert largest.counts["completed"] == 4000


def test_a_plan_that_takes_long_keeps_no_other_execution_waiting(fleet: Fleet) -> None:
    """A node plans one execution at a time. While it does it adopts no second one: another node that
    is free, or joins later, plans that."""
    one = fleet.node("one")
    long = fleet.request(plan=[step("wait", fleet.path("go"))], parts=parts(1))
    fleet.wait_ledger("plan_start", "plan")
    others = [fleet.request(parts=parts(1, prefix=f"q{n}")) for n in range(3)]
    one.wait_beats(5)
    assert {fleet.status(run) for run in others} == {"REQUESTED"}

    fleet.node("two")

    for run in others:
        fleet.wait(run)
    assert fleet.status(long) == "PLANNING"
    fleet.open("go")
    fleet.wait(long)


def test_a_large_plan_takes_no_more_memory_than_a_small_one_and_no_longer_for_each_partition(
    fleet: Fleet,
) -> None:
    """100,000 slices stream through executor and supervisor: neither holds the plan, and none is lost. (More than
    65,535 parameters fail elsewhere, or a part is dropped in silence: reported as oban#319, breeze#1696.)"""
    fleet.left_open = 2
    small, large = (planned(fleet, count) for count in (5_000, 100_000))

    for before, after in zip(small.kilobytes, large.kilobytes, strict=True):
        assert after - before < 12_000, "kilobytes; the keys alone are more if all are held"
    assert large.seconds < 20 * small.seconds, "twenty times as many, and one start of processes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What a plan has cost."""

    kilobytes: tuple[int, int]
    """The peak memory of its executor and of its supervisor."""
    seconds: float
    """From the request to the seal, by the database's clock."""


def planned(fleet: Fleet, count: int) -> Planned:
    """Plan so many slices, by a launch that no node helps."""
    times = len(fleet.ledger().of("memory")) + 1
    launch = fleet.launch("fault.planned", params=fleet.plan(count), name=f"plans-{count}")
    executor = fleet.wait_ledger("memory", "plan", times).more["kilobytes"]
    eventually(lambda: fleet.status(launch.execution) == "RUNNING", "it is sealed")
    row = fleet.execution(launch.execution)
    assert row.total == count
    supervisor = peak_kilobytes(launch)
    launch.kill()
    launch.wait_gone()
    took = row.started_at - row.requested_at
    return Planned(kilobytes=(executor, supervisor), seconds=took.total_seconds())


def peak_kilobytes(launch: LaunchProcess) -> int:
    """The largest resident memory that its supervisor has had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{launch.pid}/status").read_text())
    assert found
    return int(found[1])
