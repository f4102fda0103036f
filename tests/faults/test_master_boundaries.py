"""A master dies between any two statements that it sends: the execution ends all the same, once."""

from __future__ import annotations

from inspect import signature
from typing import Final

from rowlock.db.store import Store
from tests.support import failpoints
from tests.support.fault_jobs import parts
from tests.support.fleet import Fleet, LaunchProcess

OF_A_MASTER: Final = ("adopt", "cluster", "stage", "seal", "advance", "results", "finish")
"""What a launch without slots asks the database for on behalf of its execution, in its order."""

ONCE_IT_IS_OVER: Final = {"resign"}

PARTS: Final = 2


def called(launch: LaunchProcess) -> set[str]:
    """The places that a launch has noted."""
    return {line["place"] for line in launch.events("failpoint")}


def test_a_master_killed_between_any_two_statements_leaves_an_execution_that_ends_once(
    fleet: Fleet,
) -> None:
    """kill -9 before each statement of adopting, planning, sealing, watching and finishing, after the last one,
    and around the COMMIT of finish()'s transaction: another node goes on, no partition runs twice, and the
    effect of finish() is there once. That no statement of a master is left out is checked too.

    Reported as spring-batch#3127 and #5158, airflow#7927: executions stay STARTED for ever when their master
    dies, or lose what was done before.
    """
    note = ";".join(f"{name}:before:note" for name in failpoints.store_methods())
    points = [*(f"{name}:before:kill" for name in OF_A_MASTER), f"{OF_A_MASTER[-1]}:after:kill"]
    around_commit = ["commit:before:kill_node", "commit:after:kill_node"]
    fleet.node("heir", slots=4)
    untouched = [
        fleet.launch("fault.summed", parts=parts(PARTS, prefix="whole"), failpoint=note),
        fleet.launch("fault.planned", params=fleet.plan(PARTS), failpoint=note),
    ]
    launches = {
        point: fleet.launch("fault.planned", params=fleet.plan(PARTS), failpoint=point, name=point)
        for point in points
    }
    summed = {
        point: fleet.launch(
            "fault.summed", parts=parts(PARTS, prefix=f"{point}-"), failpoint=point, name=point
        )
        for point in around_commit
    }

    for launch in untouched:
        assert launch.wait_exit() == 0
    noted = called(untouched[0]) | called(untouched[1])
    under_its_epoch = {
        name for name in noted if "epoch" in signature(getattr(Store, name)).parameters
    }
    assert under_its_epoch - ONCE_IT_IS_OVER <= set(OF_A_MASTER) <= noted
    for launch in (*launches.values(), *summed.values()):
        launch.popen.wait(60)
        # A beat may tell of the end before the executor that committed it comes to die.
        assert launch.events("failpoint") or launch.name == around_commit[1], launch.name
    runs = fleet.rows(
        "SELECT execution_id AS id, job_name FROM rowlock.batch_job_coordination ORDER BY exec_no"
    )
    assert len(runs) == len(untouched) + len(launches) + len(summed)
    for run in runs:
        row = fleet.wait(run.id)
        expected = {"total": PARTS}
        expected |= {"sum": 3} if run.job_name == "fault.planned" else {"results": 2, "distinct": 2}
        assert row.summary == expected
        assert {(part.failures, part.lost) for part in fleet.rows_of(run.id)} == {(0, 0)}
        if run.job_name == "fault.summed":  # the other writes no ledger of its partitions
            assert fleet.was_begun_once(run.id)
    ends = [event.execution_id for event in fleet.db_events("execution_ended")]
    assert sorted(ends) == sorted(run.id for run in runs)
    finished = fleet.rows("SELECT key FROM fleet.effects WHERE key ^@ 'finish'")
    assert len(finished) == 1 + len(summed), "the rows of finish() are there once for each"
    assert fleet.value("SELECT count(*) FROM rowlock.batch_staging") == 0
