"""The master of an execution dies, sleeps or is raced: the execution continues and ends once."""

import random
import signal
import time

import pytest

from tests.support import seeds
from tests.support.fault_jobs import Step, part, parts, step
from tests.support.fleet import Fleet, LaunchProcess, Row, eventually
from tests.support.waiting import SLACK_SECONDS, wait_until


def finished_by(fleet: Fleet) -> list[str]:
    """The nodes whose finish() has written its row."""
    return [row.node for row in fleet.rows("SELECT node FROM fleet.effects WHERE key ^@ 'finish'")]


def ended_once(fleet: Fleet, row: Row, count: int) -> None:
    """The execution has ended COMPLETED, once, and finish() took effect once."""
    assert row.summary == {"results": count, "distinct": count, "total": count}
    ends = [e for e in fleet.db_events("execution_ended") if e.execution_id == row.execution_id]
    assert len(ends) == 1
    assert len(finished_by(fleet)) == 1
    assert fleet.value("SELECT count(*) FROM rowlock.batch_staging") == 0


def epochs(fleet: Fleet) -> list[int]:
    """The epochs that were taken from an earlier master."""
    return [event.detail["epoch"] for event in fleet.db_events("master_took_over")]


def test_a_master_killed_while_partitions_run_is_replaced_and_disturbs_none(fleet: Fleet) -> None:
    """The launch is gone with kill -9; its execution continues on a node, and what ran runs on."""
    for name in ("one", "two"):
        fleet.node(name)
    launch = fleet.launch("fault.summed", parts=parts(4, step("wait", fleet.path("go"))))
    for n in range(2):
        fleet.wait_started(f"p{n}")

    killed = time.monotonic()
    launch.kill()
    eventually(lambda: epochs(fleet), "another node takes over")

    seconds = fleet.settings
    removal = float(seconds["unreachable_seconds"]) + float(seconds["removal_grace_seconds"])
    taken_over = removal + 2 * float(seconds["beat_seconds"])
    assert time.monotonic() - killed < taken_over + SLACK_SECONDS
    fleet.open("go")
    row = fleet.wait(launch.execution)
    assert epochs(fleet) == [2]
    assert sorted(s.key for s in fleet.ledger().of("start")) == ["p0", "p1", "p2", "p3"]
    assert {fleet.partition(f"p{n}").claims for n in range(4)} == {1}
    ended_once(fleet, row, 4)


def test_a_node_that_is_master_and_works_is_killed_and_the_execution_goes_on(fleet: Fleet) -> None:
    """The node that drives the execution also runs a partition of it: the partition moves, the
    mastership moves, and the partition that ran elsewhere is not touched."""
    one = fleet.node("one")
    go = step("wait", fleet.path("go"))
    run = fleet.request("fault.summed", parts=[part("a", go), part("b", go)])
    eventually(lambda: fleet.ledger().of("start"), "one partition runs")
    fleet.node("two")
    eventually(lambda: len(fleet.ledger().of("start")) == 2, "both partitions run")

    one.crash()
    eventually(lambda: epochs(fleet), "the other node takes over")
    fleet.open("go")

    row = fleet.wait(run)
    nodes = [[s.node for s in fleet.ledger().starts(key)] for key in ("a", "b")]
    assert sorted(nodes) == [["one", "two"], ["two"]]
    ended_once(fleet, row, 2)


def test_a_master_killed_in_partition_leaves_nothing_of_its_plan(fleet: Fleet) -> None:
    """Thousands of slices are staged when the master dies: nobody has seen any. The next master plans
    anew, and what the first had staged is gone."""
    fleet.node("one")
    params = fleet.plan(3000, "wait")
    launch = fleet.launch("fault.planned", params=params)
    fleet.wait_ledger("planned", "plan")
    eventually(
        lambda: fleet.value("SELECT count(*) FROM rowlock.batch_staging") > 0, "a chunk is staged"
    )
    assert fleet.value("SELECT count(*) FROM rowlock.batch_partitions") == 0

    launch.kill()

    fleet.wait_ledger("planned", "plan", 2)
    fleet.open("ledger.never")  # both planners wait for it
    row = fleet.wait(launch.execution)
    assert row.counts == {"total": 3000, "completed": 3000, "failed": 0, "cancelled": 0}
    assert row.summary == {"total": 3000, "sum": 3000 * 3001 // 2}
    assert fleet.value("SELECT count(*) FROM rowlock.batch_staging") == 0


def test_a_master_killed_in_finish_is_followed_by_one_whose_finish_counts(fleet: Fleet) -> None:
    """Killed with the transaction of finish() open: its rows are gone, and the next master's stand."""
    fleet.node("one")
    launch = fleet.launch(
        "fault.summed", parts=parts(3), commit=[step("wait", fleet.path("commit"))]
    )
    fleet.wait_ledger("finish_in_transaction", "finish")

    launch.kill()

    fleet.wait_ledger("finish_in_transaction", "finish", 2)
    fleet.open("commit")
    row = fleet.wait(launch.execution)
    assert finished_by(fleet) == ["one"]
    assert len(fleet.ledger().of("start")) == 3
    ended_once(fleet, row, 3)


def superseded(launch: LaunchProcess) -> bool:
    """Whether the launch has said so."""
    return "another node is the master" in launch.log_path.read_text()


@pytest.mark.parametrize("where", ["running", "finishing"])
def test_a_master_that_slept_past_its_removal_changes_nothing_and_follows_to_the_end(
    fleet: Fleet, where: str
) -> None:
    """Paused past its removal, its execution finished by another node, then woken: the old master
    changes nothing, its launch says that it was superseded, and exits with the outcome."""
    fleet.node("one")
    commit = [step("wait", fleet.path("commit"))] if where == "finishing" else []
    work = [step("wait", fleet.path("go"))] if where == "running" else []
    launch = fleet.launch("fault.summed", parts=parts(3, *work), commit=commit)
    if where == "running":
        fleet.wait_started("p0")
    else:
        fleet.wait_ledger("finish_in_transaction", "finish")
    execution = launch.execution

    launch.pause()
    eventually(lambda: epochs(fleet) == [2], "the node takes over")
    fleet.open("go")
    fleet.open("commit")
    row = fleet.wait(execution)
    launch.resume()

    assert launch.wait_exit() == 0
    assert fleet.execution(execution) == row
    assert superseded(launch)
    assert launch.out[-1]["type"] == "result"
    assert launch.out[-1]["status"] == "COMPLETED"
    assert finished_by(fleet) == ["one"]
    ended_once(fleet, row, 3)


def test_a_superseded_master_follows_an_execution_that_still_runs(fleet: Fleet) -> None:
    """Woken while another master drives the execution: it says so at once, waits for the outcome,
    and exits with it: 4, because a partition fails."""
    fleet.node("one")
    launch = fleet.launch(
        "fault.summed", parts=[part("a", step("wait", fleet.path("go")), step("fail", "no"))]
    )
    fleet.wait_started("a")
    launch.pause()
    eventually(lambda: epochs(fleet) == [2], "the node takes over")

    launch.resume()

    eventually(lambda: superseded(launch), "the launch says that it was superseded")
    assert launch.popen.poll() is None
    assert fleet.status(launch.execution) == "RUNNING"
    assert fleet.execution(launch.execution).master_epoch == 2
    fleet.open("go")
    assert launch.wait_exit() == 4
    assert fleet.execution(launch.execution).failure_reason == "PartitionsFailed"


def test_the_last_two_completions_in_one_instant_end_an_execution_once(fleet: Fleet) -> None:
    """Two nodes complete the last two partitions at the same moment, again and again: no end is lost,
    and none comes twice. (Elsewhere both see the other still running, or both are the last.)"""
    for name in ("one", "two"):
        fleet.node(name)
    rounds = 12

    for n in range(rounds):
        go = fleet.path(f"go{n}")
        pair = [part(f"a{n}", step("wait", go)), part(f"b{n}", step("wait", go))]
        run = fleet.request("fault.summed", parts=pair)
        at = {fleet.wait_started(one.key).node for one in pair}
        assert at == {"one", "two"}
        fleet.open(f"go{n}")
        assert fleet.wait(run).summary["results"] == 2

    assert len(fleet.db_events("execution_ended")) == rounds
    assert len(fleet.ledger().of("finish_start")) == len(finished_by(fleet)) == rounds


CUT_FINISH = """
CREATE TABLE fleet.cuts (yes boolean);
INSERT INTO fleet.cuts VALUES (true);
CREATE FUNCTION fleet.cut() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    IF EXISTS (SELECT FROM fleet.cuts) THEN
        PERFORM pg_terminate_backend(pg_backend_pid());
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER cut BEFORE INSERT ON fleet.effects FOR EACH ROW EXECUTE FUNCTION fleet.cut();
"""


def test_finish_is_repeated_by_the_rules_of_partitions(fleet: Fleet) -> None:
    """`Fail` ends it at once, an exception after `max_attempts`; `RetryLater` and a connection that
    breaks in its transaction, however often, cost nothing."""
    fleet.rows(CUT_FINISH)
    fleet.node("one")

    def finished(steps: list[Step]) -> int:
        before = len(fleet.ledger().of("finish_start"))
        row = fleet.wait(fleet.request("fault.summed", finish=steps), "FAILED")
        assert row.failure_reason == "FinishFailed"
        return len(fleet.ledger().of("finish_start")) - before

    assert finished([step("fail", "never")]) == 1
    assert finished([step("error", "often")]) == 3
    again = [step("retry_until", fleet.path("now"))]
    later = fleet.request("fault.summed", finish=again, parts=parts(2))
    eventually(lambda: len(fleet.ledger().of("finish_start")) > 4 + 5, "it asks for other times")
    asked = len(fleet.ledger().of("finish_start"))
    fleet.open("now")
    eventually(
        lambda: len(fleet.ledger().of("finish_start")) > asked + 4,
        "its connection breaks again and again",
    )
    fleet.rows("TRUNCATE fleet.cuts")

    row = fleet.wait(later)
    ended_once(fleet, row, 2)


@seeds.several(seeds.SEEDS)
def test_masters_killed_at_random_moments_leave_executions_that_complete(
    fleet: Fleet, seed: int
) -> None:
    """kill -9 somewhere between the request and the end, five times at once: every execution ends
    COMPLETED, every partition is begun once, the effect of every finish() is there once."""
    rng = random.Random(seed)
    fleet.node("one", slots=2)
    fleet.node("two", slots=2)
    launches = [
        fleet.launch(
            "fault.summed",
            parts=parts(8, step("sleep", 0.02), prefix=f"l{n}-"),
            name=f"launch{n}",
        )
        for n in range(5)
    ]
    executions = [launch.execution for launch in launches]

    for launch in launches:
        pause_until(time.monotonic() + rng.uniform(0, 0.15))
        if launch.popen.poll() is None:
            launch.kill(signal.SIGKILL)

    for execution in executions:
        row = fleet.wait(execution)
        assert row.summary == {"results": 8, "distinct": 8, "total": 8}
    assert len(fleet.db_events("execution_ended")) == 5
    assert len(finished_by(fleet)) == 5
    starts = [start.key for start in fleet.ledger().of("start")]
    assert len(starts) == len(set(starts)) == 40


def pause_until(moment: float) -> None:
    """Let the masters work until then."""
    wait_until(lambda: time.monotonic() > moment, what="a moment")
