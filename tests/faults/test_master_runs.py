"""Master runs: processes that are there for one execution, killed, doubled and told to leave."""

import signal
from uuid import uuid4

import pytest

from tests.faults.test_masters import ended_once, epochs, finished_by
from tests.support.fault_jobs import part, parts, step
from tests.support.fleet import Fleet, NodeProcess, eventually

NEVER_BY_ITSELF = 600.0
"""Seconds after which nodes of the pool adopt: longer than any test."""


def is_master(node: NodeProcess) -> bool:
    """Whether it has ever become the master."""
    return bool(node.events("master_adopted"))


def test_a_master_run_plans_works_its_slots_and_exits_with_the_outcome(fleet: Fleet) -> None:
    """No other node is there: it is master and worker, of its own execution alone."""
    fleet.left_open = 1
    other = fleet.request(parts=parts(2, prefix="other"), adopt_after_seconds=NEVER_BY_ITSELF)
    run = fleet.request("fault.summed", parts=parts(5), adopt_after_seconds=NEVER_BY_ITSELF)

    master = fleet.master(run, slots=2)

    assert master.wait_gone() == 0
    ended_once(fleet, fleet.execution(run), 5)
    assert fleet.status(other) == "REQUESTED"
    assert not fleet.db_events("node_unreachable")


def test_a_master_run_killed_while_partitions_run_is_followed_by_the_next_one(
    fleet: Fleet,
) -> None:
    """kill -9 of the whole process group, as when a pod's machine dies. The next run starts before the
    first is removed: it works at once, takes over with a new epoch, and no partition is lost."""
    work = parts(6, step("wait", fleet.path("go")))
    run = fleet.request("fault.summed", parts=work, adopt_after_seconds=NEVER_BY_ITSELF)
    first = fleet.master(run, slots=2, name="first")
    for key in ("p0", "p1"):
        fleet.wait_started(key)

    first.crash()
    second = fleet.master(run, slots=4, name="second")
    fleet.wait_started("p2")  # also where a busy machine lets it begin after the removal
    eventually(lambda: epochs(fleet) == [2], "the next run takes over")
    fleet.open("go")

    assert second.wait_gone() == 0
    ended_once(fleet, fleet.execution(run), 6)
    assert {fleet.partition(f"p{n}").claims for n in range(2)} == {2}
    assert {fleet.partition(f"p{n}").claims for n in range(2, 6)} == {1}


def test_a_node_of_the_pool_goes_on_when_the_master_run_is_killed(fleet: Fleet) -> None:
    """The master run dies for good: what it drove continues on the pool, and ends."""
    one = fleet.node("one")
    run = fleet.request(
        "fault.summed",
        parts=parts(3, step("wait", fleet.path("go"))),
        adopt_after_seconds=NEVER_BY_ITSELF,
    )
    master = fleet.master(run)
    fleet.wait_started("p0")
    assert is_master(master)
    assert not is_master(one)

    master.kill()

    eventually(lambda: epochs(fleet) == [2], "the node takes over")
    one.wait_event("master_adopted")
    fleet.open("go")
    ended_once(fleet, fleet.wait(run), 3)


def test_of_two_master_runs_one_drives_both_work_and_the_other_takes_over(fleet: Fleet) -> None:
    """A Job's program may be started twice. The second says who it is, works its slots beside the first,
    and drives the execution once the first is killed; both would have exited with the outcome.

    Reported as kubernetes#120790, #130683, #115844 and #62772: a replacement is created while the old pod ends.
    """
    go = step("wait", fleet.path("go"))
    run = fleet.request("fault.summed", parts=parts(4, go), adopt_after_seconds=NEVER_BY_ITSELF)
    first = fleet.master(run, slots=1, name="first")
    fleet.wait_started("p0")
    second = fleet.master(run, slots=1, name="second")
    second.wait_event("master_is_another")
    eventually(lambda: len(fleet.ledger().of("start")) == 2, "both work")
    assert not is_master(second)

    first.crash()
    eventually(lambda: is_master(second), "the second takes over")
    fleet.open("go")

    assert second.wait_gone() == 0
    ended_once(fleet, fleet.execution(run), 4)


@pytest.mark.parametrize("where", ["partition", "finish"])
def test_of_two_master_runs_the_first_sleeps_past_its_removal_and_changes_nothing(
    fleet: Fleet, where: str
) -> None:
    """Paused in the author's method, it wakes beside its successor, which is in the same one. Both exit with
    the outcome; the plan is there once, and so are the rows of finish()."""
    hold = [step("wait", fleet.path("go"))]
    event, key = (
        ("plan_start", "plan") if where == "partition" else ("finish_in_transaction", "finish")
    )
    script = fleet.script(
        parts(3), plan=hold if where == "partition" else (), commit=hold if key == "finish" else ()
    )
    run = fleet.request("fault.summed", params=script, adopt_after_seconds=NEVER_BY_ITSELF)
    first = fleet.master(run, slots=1, name="first")
    fleet.wait_ledger(event, key)
    second = fleet.master(run, slots=1, name="second")
    second.wait_event("master_is_another")

    first.pause()
    fleet.wait_ledger(event, key, 2)
    first.resume()
    first.wait_event("node_was_removed")
    fleet.open("go")

    assert second.wait_gone() == first.wait_gone() == 0
    assert finished_by(fleet) == ["second"]
    ended_once(fleet, fleet.execution(run), 3)


@pytest.mark.parametrize("driven_by", ["itself", "a node"])
@pytest.mark.parametrize("end, code", [("COMPLETED", 0), ("FAILED", 4), ("CANCELLED", 3)])
def test_a_master_run_exits_with_the_outcome_whoever_drives(
    fleet: Fleet, end: str, code: int, driven_by: str
) -> None:
    """0 completed, 3 cancelled, 4 failed; also of an execution that has ended before it starts."""
    fleet.node("one")
    last = [step("fail", "no")] if end == "FAILED" else []
    run = fleet.request(
        parts=[part("a", step("wait_or_stop", fleet.path("go")), *last)],
        adopt_after_seconds=0 if driven_by == "a node" else NEVER_BY_ITSELF,
    )
    if driven_by == "a node":
        fleet.wait_started("a")
    master = fleet.master(run)
    fleet.wait_started("a")
    master.wait_event("master_is_another" if driven_by == "a node" else "master_adopted")

    if end == "CANCELLED":
        fleet.cancel(run)
    fleet.open("go")

    assert master.wait_gone() == code
    assert fleet.status(run) == end
    assert fleet.master(run, name="late").wait_gone() == code
    assert len(fleet.db_events("execution_ended")) == 1


def test_a_master_run_that_is_told_to_leave_hands_all_over_at_once(fleet: Fleet) -> None:
    """SIGTERM: partition and mastership go to a node, nobody waits for a removal, and the exit code is
    none that stands for an outcome."""
    fleet.settings["unreachable_seconds"] = 3  # no machine is busy for so long
    run = fleet.request(
        "fault.summed",
        parts=[part("a", step("wait_or_stop", fleet.path("go"))), *parts(3)],
        adopt_after_seconds=NEVER_BY_ITSELF,
    )
    master = fleet.master(run, slots=1)
    fleet.wait_started("a")
    fleet.node("one")

    master.kill(signal.SIGTERM)

    assert master.wait_gone() == 130
    fleet.wait_started("a", 2)
    fleet.open("go")
    ended_once(fleet, fleet.wait(run), 4)
    assert not fleet.db_events("node_unreachable")
    assert fleet.partition("a").failures == 0


def test_a_master_run_that_can_do_nothing_exits_2_and_says_why(fleet: Fleet) -> None:
    """No such execution, another job, another contract, another pool: nothing is adopted."""
    fleet.left_open = 2
    known = fleet.request(adopt_after_seconds=NEVER_BY_ITSELF)
    newer = fleet.request(adopt_after_seconds=NEVER_BY_ITSELF, contract_hash="0" * 16)
    nowhere = uuid4()

    cases = [
        (fleet.master(nowhere), f"there is no execution '{nowhere}'"),
        (fleet.master(known, jobs="tests.support.cli_jobs"), "name its module with --import"),
        (fleet.master(newer), "run the release of the job that it was requested with"),
        (fleet.master(known, slots=1, pool="other"), "use --pool default, or no --slots"),
    ]

    for master, says in cases:
        assert master.wait_gone() == 2, master.lines()
        assert says in master.log_path.read_text().splitlines()[-1]
    assert {fleet.status(known), fleet.status(newer)} == {"REQUESTED"}


def test_a_master_run_waits_for_its_database_at_its_start_and_later(private_fleet: Fleet) -> None:
    """Away before the process starts, and again while it works: it never exits because of that."""
    fleet = private_fleet
    work = parts(3, step("wait", fleet.path("go")))
    run = fleet.request("fault.summed", parts=work, adopt_after_seconds=NEVER_BY_ITSELF)
    fleet.database.server.down()
    master = fleet.master(run, slots=1)
    master.wait_event("database_unavailable")

    fleet.database.server.up()
    fleet.wait_started("p0")
    fleet.database.server.down()
    master.wait_event("database_unavailable", 2)
    fleet.open("go")
    assert master.popen.poll() is None
    fleet.database.server.up()

    assert master.wait_gone() == 0
    ended_once(fleet, fleet.execution(run), 3)


def test_a_launch_with_the_launch_key_of_one_that_was_killed_drives_its_execution(
    fleet: Fleet,
) -> None:
    """The same request again while the first launcher lives: it follows. The first is killed, and no
    node is there: the second becomes the master, and exits with the outcome."""
    script = parts(3, step("wait", fleet.path("go")))
    key = ("--launch-key", "february")
    first = fleet.launch("fault.summed", parts=script, name="first", slots=1, arguments=key)
    fleet.wait_started("p0")
    second = fleet.launch("fault.summed", parts=script, name="second", slots=1, arguments=key)
    assert second.execution == first.execution
    assert second.out[0]["outcome"] == "exists"
    fleet.wait_started("p1")

    first.crash()
    eventually(lambda: epochs(fleet) == [2], "the second launcher takes over")
    fleet.open("go")

    assert second.wait_exit() == 0
    ended_once(fleet, fleet.execution(second.execution), 3)


def test_a_launch_that_was_superseded_takes_over_again(fleet: Fleet) -> None:
    """It slept past its removal and woke beside the node that took over. That node is killed: the launch
    drives its execution again, works it to its end, and exits with the outcome."""
    one = fleet.node("one")
    script = parts(2, step("wait", fleet.path("go")))
    launch = fleet.launch("fault.summed", parts=script, slots=1)
    for key in ("p0", "p1"):
        fleet.wait_started(key)
    launch.pause()
    eventually(lambda: epochs(fleet) == [2], "the node takes over")
    launch.resume()
    eventually(
        lambda: "another node is the master" in launch.log_path.read_text(), "it is superseded"
    )

    one.crash()
    eventually(lambda: epochs(fleet) == [2, 3], "the launch takes over")
    fleet.open("go")

    assert launch.wait_exit() == 0
    ended_once(fleet, fleet.execution(launch.execution), 2)
