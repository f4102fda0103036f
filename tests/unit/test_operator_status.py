"""The status mirrors an execution: whole, small, and in the words of Kubernetes."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from rowlock_operator import status
from rowlock_operator.model import Execution, FailedPartition
from rowlock_operator.status import clip, duration_text, failure_reason, merge_patch
from tests.support.batchjobs import NAME, NOW, RUN, World, a_job, an_execution, an_observation


def the_status(execution: Execution, **fields: Any) -> Any:
    world = World(an_observation(execution=execution, jobs=a_job(), **fields))
    world.settle()
    return world.status


def test_a_running_execution_is_counted() -> None:
    found = the_status(
        an_execution(
            pending=40,
            running=10,
            completed=147,
            failed=2,
            cancelled=1,
            nodes=5,
            retried=7,
        )
    )

    assert found["partitions"] == {
        "total": 200,
        "pending": 40,
        "running": 10,
        "succeeded": 147,
        "failed": 2,
        "retried": 7,
    }
    assert (found["progress"], found["nodes"]) == ("150/200", 5)
    assert found["executionID"] == str(RUN)
    assert (found["attempt"], found["observedRestartNonce"]) == (1, 0)
    assert found["masterJobName"] == f"{NAME}-1"
    assert found["startTime"] == "2026-11-30T11:56:00Z"
    assert found["lastSyncTime"] == "2026-11-30T12:00:00Z"
    assert not {"completionTime", "duration", "failedPartitions"} & set(found)


def test_before_the_plan_there_is_no_total() -> None:
    found = the_status(an_execution("PLANNING"))

    assert "total" not in found["partitions"]
    assert not {"progress", "startTime"} & set(found)


def test_an_ended_execution_has_its_times_and_runs_nowhere() -> None:
    found = the_status(an_execution("COMPLETED", completed=200, nodes=3, running=1))

    assert found["completionTime"] == "2026-11-30T11:59:00Z"
    assert found["duration"] == "3m0s"
    assert (found["nodes"], found["partitions"]["running"]) == (0, 0)


def test_a_restart_takes_the_end_of_the_attempt_before_away() -> None:
    world = World(
        an_observation(execution=an_execution("FAILED", failure_reason="PlanFailed"), jobs=a_job())
    )
    world.settle()
    world.edits(restart_nonce=1)
    world.sees(execution=an_execution("REQUESTED", attempt=2), jobs=a_job(2))
    world.settle()

    assert world.status["attempt"] == 2
    assert not {"completionTime", "duration", "startTime"} & set(world.status)


def test_failed_partitions_are_few_and_their_texts_short() -> None:
    long = FailedPartition(key="k" * 500, attempts=3, reason="E" * 300, message="m" * 5000)
    short = replace(long, key="2026-11-01", reason="ValueError", message="no such month")
    found = the_status(an_execution(failed=12, failed_partitions=(long, *[short] * 11)))

    shown = found["failedPartitions"]
    assert len(shown) <= status.FAILED_PARTITIONS_MAX
    assert len(shown[0]["key"]) < 70
    assert len(shown[0]["message"]) <= 120
    assert shown[1] == {
        "key": "2026-11-01",
        "attempts": 3,
        "reason": "ValueError",
        "message": "no such month",
    }


def test_a_plan_of_nothing_has_a_progress_without_a_division() -> None:
    """(0/0 becomes NaN or null elsewhere: reported as spring-batch#2005, planetary-computer-tasks PR#56.)"""
    found = the_status(an_execution("COMPLETED", pending=0, completed=0, total=0))

    assert found["progress"] == "0/0"
    assert found["partitions"]["total"] == found["partitions"]["succeeded"] == 0


def test_counters_fit_into_what_the_crd_takes() -> None:
    found = the_status(an_execution(pending=2**40, total=2**40))

    assert found["partitions"]["total"] == found["partitions"]["pending"] == 2**31 - 1


@pytest.mark.parametrize(
    "execution, reason",
    [
        (an_execution("FAILED", failure_reason="DeadlineExceeded"), "DeadlineExceeded"),
        (an_execution("FAILED", failure_reason="MaxFailedExceeded"), "MaxFailedPartitionsExceeded"),
        (an_execution("FAILED", failure_reason="PartitionsFailed"), "PartitionsFailed"),
        (an_execution("FAILED", failure_reason="FinishFailed"), "FinishFailed"),
        (an_execution("FAILED"), "Failed"),
        (an_execution("CANCELLED", failure_reason="Cancelled"), "Cancelled"),
        (an_execution("ABANDONED", failure_reason="Cancelled"), "Abandoned"),
        (
            an_execution(
                "FAILED",
                failure_reason="PartitionsFailed",
                failed_partitions=(
                    FailedPartition(
                        key="a", attempts=1, reason="NodeLost", message="", outcome_unknown=True
                    ),
                ),
            ),
            "NonTransferablePartitionsLost",
        ),
    ],
)
def test_the_reason_of_a_failure_is_one_of_kubernetes(execution: Execution, reason: str) -> None:
    assert failure_reason(execution) == reason


@pytest.mark.parametrize(
    "seconds, text",
    [(-5, "0s"), (12, "12s"), (252, "4m12s"), (11_040, "3h4m"), (183_600, "2d3h")],
)
def test_a_duration_has_two_units(seconds: int, text: str) -> None:
    assert duration_text(timedelta(seconds=seconds)) == text


def test_a_text_is_cut_between_characters() -> None:
    assert clip("short", 10) == "short"
    assert clip("a  b\n\tc\0", 10) == "a b c"
    cut = clip("é" * 100, 20)
    assert len(cut.encode()) <= 20
    assert cut == "é" * 8 + "…"
    assert clip("half \ud800 pair", 40) == "half ? pair"


def test_a_merge_patch_turns_one_status_into_the_other() -> None:
    old = {"a": 1, "gone": 2, "deep": {"x": 1, "gone": 2}, "list": [1, 2], "kind": {"x": 1}}
    new = {"a": 1, "deep": {"x": 3}, "list": [1], "kind": "text", "more": {"y": 1}}

    assert merge_patch(old, new) == {
        "gone": None,
        "deep": {"x": 3, "gone": None},
        "list": [1],
        "kind": "text",
        "more": {"y": 1},
    }
    assert merge_patch(new, new) == {}


def test_times_are_those_of_the_database() -> None:
    found = the_status(an_execution("FAILED", failure_reason="PlanFailed", ended_at=NOW))

    assert found["completionTime"] == "2026-11-30T12:00:00Z"
