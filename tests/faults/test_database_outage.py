"""The database restarts, or single connections of a node are cut or freeze, while work runs."""

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal

import pytest

from tests.support.fault_jobs import part, parts, step
from tests.support.fleet import Fleet, NodeProcess, eventually

COMPLETED = "SELECT count(*) FROM rowlock.batch_partitions WHERE status = 'COMPLETED'"


def wait_completed(fleet: Fleet, count: int) -> None:
    """Wait until so many partitions are COMPLETED."""
    eventually(lambda: fleet.value(COMPLETED) >= count, f"{count} are done")


def undisturbed(fleet: Fleet, nodes: list[NodeProcess]) -> None:
    """No node was removed, and none has had to begin anew."""
    assert not fleet.db_events("node_removed")
    assert all(len(node.incarnations) == 1 for node in nodes)


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_restart_of_the_database_costs_only_the_transactions_in_flight(
    private_fleet: Fleet, mode: Literal["fast", "immediate"]
) -> None:
    """The server restarts while four nodes run 100 partitions: the execution completes, no node is
    removed, and an attempt that does not use the database runs once. (In other systems running work
    ends in a state that needs manual SQL; reported as psycopg#701: a pool hands out one dead
    connection after another.)"""
    fleet = private_fleet
    fleet.settings["unreachable_seconds"] = 5
    nodes = [fleet.node(f"n{n}", slots=2) for n in range(4)]
    run = fleet.request(
        "fault.summed",
        parts=[
            *parts(80, step("sleep", 0.1), prefix="plain"),
            *parts(20, step("sleep", 0.05), step("rows", 3), prefix="rows"),
        ],
    )
    wait_completed(fleet, 10)

    fleet.database.server.restart(mode)

    row = fleet.wait(run)
    assert row.counts == {"total": 100, "completed": 100, "failed": 0, "cancelled": 0}
    plain = [s.key for s in fleet.ledger().of("start") if s.key.startswith("plain")]
    assert len(plain) == len(set(plain)) == 80
    effects = fleet.rows("SELECT key, count(*) FROM fleet.effects WHERE key ^@ 'rows' GROUP BY key")
    assert [effect.count for effect in effects] == [3] * 20
    assert {p.failures for p in fleet.rows_of(run)} == {0}, "an outage costs no failure"
    undisturbed(fleet, nodes)


def test_nodes_whose_connections_are_lost_again_and_again_find_work_afterwards(
    private_fleet: Fleet,
) -> None:
    """All connections are ended five times, the server restarts three times: the loops of idle nodes
    recover each time, in the same process. (Reported as good_job#523 and lightdash#26670: the process
    lives, its health is green, and nothing is ever claimed again.)"""
    fleet = private_fleet
    fleet.settings["unreachable_seconds"] = 5
    nodes = [fleet.node(f"n{n}") for n in range(2)]
    for _ in range(5):
        fleet.rows(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name ^@ 'rowlock' AND datname = current_database()"
        )
        for node in nodes:
            node.wait_beats(1)
    for _ in range(3):
        fleet.database.server.restart("immediate")
        for node in nodes:
            node.wait_beats(1)

    fleet.wait(fleet.request(parts=parts(20)))

    undisturbed(fleet, nodes)
    assert all(node.readiness() == (200, "ok") for node in nodes)


@contextmanager
def frozen_backend(fleet: Fleet, application: str) -> Generator[None]:
    """The server's process of one idle connection stands still: no answer, and no error either."""
    session = (
        "SELECT pid FROM pg_stat_activity WHERE application_name = %s AND state = 'idle'"
        " AND datname = current_database()"
    )
    while True:
        (row,) = fleet.rows(session, application) or (None,)
        if row is None:
            continue
        os.kill(row.pid, signal.SIGSTOP)
        if fleet.rows(session, application):  # still idle: it holds no lock
            break
        os.kill(row.pid, signal.SIGCONT)
    try:
        yield
    finally:
        os.kill(row.pid, signal.SIGCONT)


def test_a_frozen_connection_of_the_beat_is_broken_and_opened_again_in_time(fleet: Fleet) -> None:
    """No answer comes on the beat's connection: the node breaks it, beats on another, keeps its work,
    and is not removed. (Reported as pawtograder#946 and lightdash#22893: every query hangs, and no
    keepalive notices.)"""
    fleet.settings.update(unreachable_seconds=2, removal_grace_seconds=6)
    one = fleet.node("one")
    fleet.node("two", pool="elsewhere")
    run = fleet.request(parts=[part("a", step("tick", fleet.path("go")))])
    fleet.wait_ledger("tick", "a")

    with frozen_backend(fleet, "rowlock beat one"):
        fleet.wait_ledger("tick", "a", 20)
        before = one.row().beat
        eventually(lambda: one.row().beat >= before + 5, "it beats on another connection")
        assert one.row().status == "ACTIVE"
        fleet.open("go")
        fleet.wait(run)

    undisturbed(fleet, [one])
    assert fleet.partition("a").claims == 1


def test_a_frozen_work_connection_holds_no_result_back(fleet: Fleet) -> None:
    """No answer comes on the work connection: completions and claims still reach the database."""
    one = fleet.node("one", slots=2)
    run = fleet.request(parts=parts(10, step("wait", fleet.path("go"))))
    fleet.wait_started("p0")

    with frozen_backend(fleet, "rowlock node one"):
        fleet.open("go")
        fleet.wait(run)

    assert len(fleet.ledger().of("start")) == 10
    assert one.events("work_carried_over") or one.events("work_connection_stuck")
    undisturbed(fleet, [one])


def test_work_connections_that_are_cut_again_and_again_lose_nothing(fleet: Fleet) -> None:
    """The server ends the work connections of both nodes while partitions complete: every partition
    is begun once, every completion arrives."""
    nodes = [fleet.node(name, slots=2, unreachable_seconds=5) for name in ("one", "two")]
    run = fleet.request(parts=parts(120, step("sleep", 0.05)))
    cut = (
        "SELECT count(*) FILTER (WHERE pg_terminate_backend(pid)) FROM pg_stat_activity"
        " WHERE application_name ^@ 'rowlock node' AND datname = current_database()"
    )

    for n in range(1, 9):
        wait_completed(fleet, 12 * n)
        fleet.value(cut)

    fleet.wait(run)
    starts = [start.key for start in fleet.ledger().of("start")]
    assert len(starts) == len(set(starts)) == 120
    assert {(row.status, row.failures) for row in fleet.rows_of(run)} == {("COMPLETED", 0)}
    undisturbed(fleet, nodes)
