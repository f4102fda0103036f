"""Partitions that take their process or their node along: they die alone, and their neighbours live."""

import json
import signal

import pytest

from tests.support.fault_jobs import DEADLY, part, parts, step
from tests.support.fleet import PATIENCE_SECONDS, TERMINAL, Fleet, NodeProcess, eventually


def test_a_partition_that_kills_its_node_is_given_up_after_its_attempts(fleet: Fleet) -> None:
    """Each attempt at the poison kills the node that makes it, and a fresh one takes its place, as Kubernetes does.
    After max_attempts such deaths the partition is FAILED as poison; the others complete, the last time the poison
    ran there was nothing beside it, and no neighbour is blamed. (Redelivered for ever elsewhere, one worker after
    the other: reported as sidekiq#3400, activepieces#15130, OasisPlatform PR#975.)"""
    nodes: list[NodeProcess] = [fleet.node(f"node-{n}", slots=2) for n in range(2)]
    run = fleet.request(
        parts=[
            part("poison", step("kill_node"), weight=1),
            *(part(f"p{n}", step("sleep", 0.2)) for n in range(6)),
        ]
    )

    def keep_two_nodes() -> bool:
        gone = [node for node in nodes if node.popen.poll() is not None]
        for node in gone:
            nodes.remove(node)
            number = len(fleet.members)
            nodes.append(fleet.node(f"node-{number}", slots=2, wait=False))
        return fleet.status(run) in TERMINAL

    eventually(keep_two_nodes, "the execution ends", seconds=90)

    row = fleet.wait(run, "FAILED")
    assert row.counts == {"total": 7, "completed": 6, "failed": 1, "cancelled": 0}
    poison = fleet.partition("poison")
    assert (poison.status, poison.claims, poison.failures, poison.lost) == ("FAILED", 3, 3, 3)
    assert poison.last_error["outcome"] == "poison"
    kills = fleet.ledger().of("kills_node")
    assert len(kills) == len({kill.node for kill in kills}) == 3
    assert len(fleet.members) == 2 + 3, "one fresh node for each that died"
    alone = fleet.ledger().of("start", "poison")[-1]
    beside = [
        entry
        for entry in fleet.ledger()
        if entry.node == alone.node
        and entry.key.startswith("p")
        and entry.key != "poison"
        and entry.event == "start"
        and entry.at <= alone.at
        and not any(
            end.at < alone.at
            for end in fleet.ledger().ends(entry.key)
            if end.attempt == entry.attempt
        )
    ]
    assert not beside, "nothing else ran where it ran for the last time"
    for neighbour in (fleet.partition(f"p{n}") for n in range(6)):
        assert neighbour.status == "COMPLETED"
        assert neighbour.failures <= 2


def test_partitions_that_crash_their_process_cost_no_node_and_no_neighbour(fleet: Fleet) -> None:
    """One dies of a null pointer in native code, one kills its process as the kernel does when memory runs
    out, each time. Both are given up after their attempts, with a growing wait between them; no node has died,
    the slots are there again, and fifty neighbours have completed. (Such a unit takes one worker after the
    other elsewhere, because only caught exceptions count: reported as sidekiq#3400 and #5300,
    activepieces#15130, hindsight#2675, hitobito#4198, taskiq-aio-pika#35. A slot whose process died stays away:
    reported as solid_queue#751, tasktiger PR#335.)"""
    nodes = [fleet.node(f"node-{n}", slots=2) for n in range(3)]
    run = fleet.request(
        parts=[
            part("native", step("segfault"), weight=1),
            part("killed", step("kill_self", signal.SIGKILL), weight=1),
            *(part(f"p{n}", step("sleep", 0.02)) for n in range(50)),
        ],
        max_attempts=3,
        initial_seconds=0.3,
        factor=3.0,
        max_seconds=5.0,
    )

    row = fleet.wait(run, "FAILED")

    assert row.counts == {"total": 52, "completed": 50, "failed": 2, "cancelled": 0}
    for key, how in (("native", "SIGSEGV"), ("killed", "SIGKILL")):
        crashed = fleet.partition(key)
        assert (crashed.status, crashed.failures, crashed.lost) == ("FAILED", 3, 0)
        assert how in crashed.last_error["message"]
        assert len(fleet.ledger().starts(key)) == 3
    assert sum(node.metric("rowlock_executor_deaths_total") for node in nodes) == 6
    delays = [event.detail["delay_seconds"] for event in fleet.db_events("partition_retried")]
    assert len(delays) == 4
    assert max(delays) <= 0.9, "full jitter: up to 0.3 s, then up to 0.9 s"
    assert all(len(node.incarnations) == 1 for node in nodes)
    for node in nodes:
        eventually(lambda: len(node.executors()) == 2, "its slots are there again")  # noqa: B023
        eventually(lambda: slots_used(node) == 0, "and free")  # noqa: B023


@pytest.mark.parametrize("job", ["fault.work", "fault.once"])
def test_a_slice_whose_decoding_kills_the_process_is_given_up_too(fleet: Fleet, job: str) -> None:
    """No attempt ever begins, so nothing of it could fail: it is given up all the same after a few processes, its
    neighbours complete, and an AT_MOST_ONCE one has no start on record."""
    launch = fleet.launch(job, parts=parts(5))
    eventually(lambda: launch.out and fleet.status(launch.execution) == "RUNNING", "it is planned")
    fleet.rows(
        "UPDATE rowlock.batch_partitions SET slice = %s::jsonb WHERE partition_key = 'p2'",
        json.dumps({"key": DEADLY}),
    )

    one = fleet.node("one")

    assert launch.wait_exit() == 4
    row = fleet.execution(launch.execution)
    assert row.counts == {"total": 5, "completed": 4, "failed": 1, "cancelled": 0}
    given_up = fleet.partition("p2")
    assert "SIGKILL" in given_up.last_error["message"]
    assert not fleet.rows("SELECT FROM rowlock.batch_starts WHERE partition_key = 'p2'")
    assert not fleet.ledger().starts("p2")
    assert len(one.incarnations) == 1
    if job == "fault.once":
        assert given_up.last_error["outcome"] == "not started"


def slots_used(node: NodeProcess) -> float:
    return node.metrics()['rowlock_slots{pool="default",state="used"}']


@pytest.mark.parametrize(
    "call, reason", [("partition()", "PlanFailed"), ("finish()", "FinishFailed")]
)
def test_a_plan_or_an_end_that_takes_its_nodes_along_is_given_up(
    fleet: Fleet, call: str, reason: str
) -> None:
    """partition() or finish() takes its node along for the fifth time, as one does that fills the memory of its
    pod: the next master does not try it a sixth time, the execution is FAILED with the reason, and the node
    that says so runs others."""
    kill = [step("wait", fleet.path("go")), step("kill_node")]
    planning = call == "partition()"
    run = fleet.request(
        "fault.summed",
        parts=parts(2),
        plan=kill if planning else [],
        finish=[] if planning else kill,
    )
    first = fleet.node("first")
    status = "PLANNING" if planning else "FINISHING"
    eventually(lambda: fleet.status(run) == status, f"{call} runs")
    fleet.rows("UPDATE rowlock.batch_job_coordination SET masters_lost = 4")
    fleet.open("go")
    first.popen.wait(PATIENCE_SECONDS)
    second = fleet.node("second")

    row = fleet.wait(run, "FAILED")

    assert row.failure_reason == reason
    assert row.failure_message.startswith(f"5 masters were lost while {call} ran")
    assert [kill.node for kill in fleet.ledger().of("kills_node")] == ["first"]
    fleet.wait(fleet.request(parts=parts(2, prefix="next")))
    assert len(second.incarnations) == 1
