"""Why an execution does not move: each reason from the facts that show it, with what to do."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from rowlock.cli.obstacles import Facts, Reason, reasons
from rowlock.db.diagnosis import Waiting
from rowlock.db.views import Event, Execution, Holder, Node, Partition

NOW = datetime(2026, 3, 14, 12, 0, tzinfo=UTC)
RUN = UUID("8f2d1c90-5d6c-4f43-9a75-06fb0c8c1b34")
MASTER = uuid4()


def an_execution(**differs: Any) -> Execution:
    """One that runs, with nothing wrong."""
    usual: dict[str, Any] = {
        "execution_id": RUN,
        "exec_no": 3,
        "job_name": "flights.settle",
        "instance_key": "2013-07",
        "status": "RUNNING",
        "pool": "default",
        "priority": 0,
        "delivery": "AT_LEAST_ONCE",
        "step": "main",
        "total": 31,
        "completed": 5,
        "failed": 0,
        "cancelled": 0,
        "master_node": MASTER,
        "master_name": "node-1",
        "master_epoch": 1,
        "cancel_requested": False,
        "failure_reason": None,
        "failure_message": None,
        "contract_hash": "18b939d0",
        "launch_key": None,
        "requested_at": NOW - timedelta(minutes=10),
        "started_at": NOW - timedelta(minutes=9),
        "ended_at": None,
        "revision": 7,
        "suspended": False,
        "parallelism": None,
        "deadline_at": None,
        "deletion_policy": "CANCEL",
        "restart_of": None,
        "carried": 0,
        "running": 2,
        "pending": 24,
        "retried": 0,
        "skipped": 0,
        "nodes": 1,
        "adopt_after": NOW - timedelta(minutes=10),
        "read_at": NOW,
    }
    return Execution(**{**usual, **differs})


def a_node(**differs: Any) -> Node:
    """One that knows the job, with a slot free."""
    usual: dict[str, Any] = {
        "node_id": MASTER,
        "name": "node-1",
        "pool": "default",
        "status": "ACTIVE",
        "draining": False,
        "slots": 4,
        "load": 2,
        "claims": 2,
        "beat": 900,
        "heartbeat_at": NOW,
        "heartbeat_age_seconds": 0.4,
        "started_at": NOW - timedelta(hours=1),
        "jobs": {"flights.settle": ["18b939d0"]},
        "only_execution": None,
        "labels": {},
        "orphans": [],
        "version": "0.1.0",
        "evidence": "on",
        "removed_at": None,
        "removed_reason": None,
        "read_at": NOW,
    }
    return Node(**{**usual, **differs})


def facts(**differs: Any) -> Facts:
    """An execution that moves; what `differs` is of `Facts`, or else of the execution."""
    usual: dict[str, Any] = {
        "nodes": [a_node()],
        "waiting": Waiting(total=24, delayed=0, alone=0, next_at=None),
        "holders": [a_holder()],
        "ahead": 0,
        "closing_since": None,
        "interrupted": [],
        "failed": [],
        "unresolved": [],
        "later": None,
    }
    own = {name: differs.pop(name) for name in list(differs) if name in usual}
    return Facts(execution=an_execution(**differs), **{**usual, **own})


def a_holder(**differs: Any) -> Holder:
    usual: dict[str, Any] = {
        "node_id": MASTER,
        "node_name": "node-1",
        "running": 2,
        "waiting": 0,
        "oldest_at": NOW - timedelta(seconds=95),
        "keys": ["2013-07-01"],
    }
    return Holder(**{**usual, **differs})


def an_interruption(kind: str = "OperationalError") -> Event:
    return Event(
        id=1,
        at=NOW - timedelta(seconds=20),
        event="partition_retried",
        execution_id=RUN,
        partition_id=1,
        partition_key="2013-07-01",
        node_id=MASTER,
        node_name="node-1",
        actor="node",
        detail={"kind": "later", "type": kind},
        read_at=NOW,
    )


def a_failure(key: str, message: str) -> Partition:
    return Partition(
        id=1,
        execution_id=RUN,
        step="main",
        partition_key=key,
        status="FAILED",
        node_id=MASTER,
        node_name="node-1",
        claims=3,
        failures=3,
        lost=0,
        alone=False,
        delivery="AT_LEAST_ONCE",
        ready=True,
        available_at=None,
        weight=0,
        last_error={"type": "ValueError", "message": message},
        resolution=None,
        counters=None,
        claimed_at=NOW,
        started_at=NOW,
        ended_at=NOW,
        read_at=NOW,
    )


def only(found: list[Reason]) -> Reason:
    """The one reason."""
    (one,) = found
    return one


NO_WAITING = Waiting(total=0, delayed=0, alone=0, next_at=None)
SILENT = a_node(status="UNREACHABLE", heartbeat_age_seconds=7)
NO_MASTER = {"master_node": None, "master_name": None, "master_epoch": 0}
REQUESTED: dict[str, Any] = {
    "status": "REQUESTED",
    "total": None,
    "holders": [],
    "waiting": NO_WAITING,
    **NO_MASTER,
}


@pytest.mark.parametrize(
    "given, reason, text, remedy",
    [
        pytest.param({}, "moving", "nothing holds it up: 24 partitions wait, 2 are", None, id="ok"),
        pytest.param(
            {"nodes": []},
            "no_node",
            "no node is alive in this database at all",
            "rowlock node --pool default --import MODULE, with the code of flights.settle",
            id="no node",
        ),
        pytest.param(
            {"nodes": [a_node(jobs={"flights.settle": ["0ld"]}), a_node(jobs={}, pool="gpu")]},
            "nobody_accepts",
            "no living node of pool 'default' with slots registers job 'flights.settle' with contract "
            "18b939d0, to process its partitions; there are contract 0ld in pool 'default'",
            "rowlock node --pool default",
            id="other contract",
        ),
        pytest.param(
            {"nodes": [a_node(pool="gpu")]},
            "nobody_accepts",
            "there are contract 18b939d0 in pool 'gpu'",
            "rowlock node --pool default",
            id="other pool",
        ),
        pytest.param(
            {"nodes": [a_node(slots=0)]},
            "nobody_accepts",
            "contract 18b939d0 in pool 'default' without slots",
            "rowlock node",
            id="only a master without slots",
        ),
        pytest.param(
            {"nodes": [a_node(jobs={}), a_node(jobs={}, pool="gpu")]},
            "nobody_accepts",
            "there are 2 nodes, in pool 'default', 'gpu', and none knows this job",
            "rowlock node",
            id="unknown job",
        ),
        pytest.param(
            {"nodes": [a_node(only_execution=uuid4())]},
            "nobody_accepts",
            "for one other execution",
            "rowlock node",
            id="a node of another execution",
        ),
        pytest.param(
            {"nodes": [a_node(draining=True)]},
            "nobody_takes_work",
            "every node that could process its partitions is draining or unreachable: node-1",
            "start another node",
            id="draining",
        ),
        pytest.param(
            {"suspended": True},
            "suspended",
            "it is suspended: nothing more of it begins",
            f"rowlock resume {RUN}",
            id="suspended",
        ),
        pytest.param(
            {"parallelism": 2},
            "limit",
            "its limit is reached: 2 of at most 2 partitions are claimed",
            f"rowlock set {RUN} --parallelism N|none",
            id="limit",
        ),
        pytest.param(
            {
                "waiting": Waiting(
                    total=3, delayed=3, alone=0, next_at=NOW + timedelta(minutes=2, seconds=5)
                )
            },
            "delayed",
            "all 3 partitions that wait are delayed after a failure or by their own wish; the next may "
            "run in 2 min 5 s",
            f"rowlock partitions {RUN} --status PENDING",
            id="delayed",
        ),
        pytest.param(
            {"nodes": [a_node(load=4)], "ahead": 120},
            "priority",
            "120 partitions of executions with a higher priority than 0 wait before it, and all 4 slots",
            f"rowlock set {RUN} --priority N",
            id="behind others",
        ),
        pytest.param(
            {"nodes": [a_node(load=4)], "running": 0, "holders": []},
            "busy",
            "all 4 slots of pool 'default' are busy with other work",
            "more nodes",
            id="busy",
        ),
        pytest.param(
            {"waiting": Waiting(total=3, delayed=0, alone=1, next_at=None)},
            "suspect",
            "1 of its partitions wait for a node that runs nothing else",
            f"rowlock events {RUN} --event partition_recovered",
            id="suspect",
        ),
        pytest.param(
            {"interrupted": [an_interruption()] * 3},
            "infrastructure",
            "(3 times lately, the last one a OperationalError on node-1 20 s ago)",
            "look at ROWLOCK_WORK_DSN",
            id="infrastructure",
        ),
        pytest.param(
            {"waiting": NO_WAITING},
            "last_attempts",
            "it waits for its last attempts: 2 on node-1, the oldest for 1 min 35 s",
            f"rowlock partitions {RUN} --status CLAIMED",
            id="last attempts",
        ),
        pytest.param(
            {"waiting": NO_WAITING, "holders": []},
            "moving",
            "everything is accounted for; its master ends it at its next look",
            None,
            id="about to end",
        ),
        pytest.param(
            {**REQUESTED, "adopt_after": NOW + timedelta(seconds=4)},
            "waiting_for_master",
            "it has no master yet: whoever launched it may become that until",
            None,
            id="waits for its launcher",
        ),
        pytest.param(
            REQUESTED,
            "waiting_for_adoption",
            "it has no master yet: node-1 may take over, within a beat unless busy",
            "the logs of these nodes",
            id="nobody has adopted it yet",
        ),
        pytest.param(
            {**REQUESTED, "nodes": [a_node(pool="gpu", slots=0, jobs={})]},
            "nobody_accepts",
            "no living node registers job 'flights.settle' with contract 18b939d0, to drive it",
            "rowlock node",
            id="nobody can drive it",
        ),
        pytest.param(
            {**REQUESTED, "suspended": True},
            "suspended",
            "it is suspended",
            "rowlock resume",
            id="suspended before it began",
        ),
        pytest.param(
            {"status": "PLANNING", "waiting": NO_WAITING, "holders": []},
            "planning",
            "partition() makes its plan on node node-1; it was requested 10 min ago",
            "the log of that node",
            id="planning",
        ),
        pytest.param(
            {"status": "FINISHING", "waiting": NO_WAITING, "holders": []},
            "finishing",
            "finish() runs on node node-1",
            "the log of that node",
            id="finishing",
        ),
        pytest.param(
            {
                "status": "CLOSING",
                "waiting": NO_WAITING,
                "failure_reason": "Cancelled",
                "failure_message": "wrong tariff",
                "closing_since": NOW - timedelta(seconds=30),
            },
            "closing",
            "(30 s ago): Cancelled: wrong tariff; it waits for attempts that run: 2 on node-1",
            "ROWLOCK_CANCEL_SECONDS",
            id="closing",
        ),
    ],
)
def test_one_reason_is_found_with_its_remedy(
    given: dict[str, Any], reason: str, text: str, remedy: str | None
) -> None:
    found = only(reasons(facts(**given)))

    assert found.reason == reason
    assert text in found.text
    assert remedy is None if found.remedy is None else remedy is not None and remedy in found.remedy


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"nodes": [SILENT]}, ["nobody_takes_work", "unreachable", "unreachable"]),
        ({"status": "CLOSING", "nodes": [SILENT]}, ["closing", "unreachable", "unreachable"]),
        ({"suspended": True, "nodes": []}, ["suspended", "no_node"]),
        (
            {"master_node": uuid4(), "suspended": True, "parallelism": 1},
            ["suspended", "limit", "waiting_for_adoption"],
        ),
        ({"unresolved": ["a"], "parallelism": 2}, ["limit", "unresolved"]),
    ],
)
def test_several_reasons_come_with_the_most_decisive_first(
    given: dict[str, Any], expected: list[str]
) -> None:
    assert [one.reason for one in reasons(facts(**given))] == expected


ENDED: dict[str, Any] = {"ended_at": NOW - timedelta(hours=2), "waiting": NO_WAITING, "holders": []}


def test_what_completed_needs_nothing() -> None:
    found = only(reasons(facts(status="COMPLETED", **ENDED)))
    assert found.text.startswith("it ended COMPLETED, ")
    assert found.remedy is None


def test_what_failed_says_why_names_a_failure_and_can_be_restarted() -> None:
    found = only(
        reasons(
            facts(
                status="FAILED",
                failed=[a_failure("2013-07-04", "no tariff for OO")],
                failure_reason="PartitionsFailed",
                failure_message="4 of 31 partitions failed, 0 allowed",
                **ENDED,
            )
        )
    )
    assert "PartitionsFailed: 4 of 31 partitions failed, 0 allowed" in found.text
    assert "first '2013-07-04': ValueError: no tariff for OO" in found.text
    assert found.remedy is not None
    assert f"rowlock restart {RUN}" in found.remedy
    assert f"rowlock partitions {RUN} --status FAILED" in found.remedy


def test_work_whose_outcome_nobody_knows_is_to_be_resolved_before_the_restart() -> None:
    lost = facts(
        status="FAILED", failure_reason="PartitionsFailed", unresolved=["k1", "k2"], **ENDED
    )
    ended, unresolved = reasons(lost)
    assert ended.reason == "ended"
    assert "whether the work was done: 'k1', 'k2'; a restart carries them" in unresolved.text
    assert unresolved.remedy is not None
    assert f"rowlock resolve {RUN} KEY --completed or --retry" in unresolved.remedy

    later = an_execution(execution_id=uuid4())
    restarted = only(reasons(replace(lost, later=later)))
    assert f"it was restarted as {later.execution_id}" in restarted.text
    assert restarted.remedy == f"rowlock status {later.execution_id}"


def test_what_was_abandoned_is_never_restarted() -> None:
    found = only(reasons(facts(status="ABANDONED", failure_reason="Abandoned", **ENDED)))
    assert found.remedy is not None
    assert "--instance" in found.remedy
    assert "restart" not in found.remedy


@pytest.mark.parametrize(
    "evidence, why",
    [
        ("off", "which it has switched off (ROWLOCK_EVIDENCE)"),
        ("pooler", "which its pooler hides"),
        ("unreadable", "GRANT pg_read_all_stats TO rowlock_owner"),
        ("hidden", "which this database service does not show"),
    ],
)
def test_a_silent_node_without_evidence_is_said_to_take_longer(evidence: str, why: str) -> None:
    silent = a_node(status="UNREACHABLE", heartbeat_age_seconds=7, evidence=evidence)

    found = [one.text for one in reasons(facts(nodes=[silent])) if one.reason == "unreachable"]

    assert found
    assert all(text.endswith(why) for text in found)
