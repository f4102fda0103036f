"""A machine vanishes from the network: what the server keeps of its sessions, and for how long."""

import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from tests.support.fault_jobs import Step, part, step
from tests.support.fleet import Fleet, NodeProcess, eventually
from tests.support.netns import Machine
from tests.support.postgres import Cluster
from tests.support.supervisor import environment
from tests.support.waiting import SLACK_SECONDS

NOTICED_SECONDS = 11 + 2
"""Until the server knows of a client that vanished: 5 s of silence and three probes 2 s apart; a statement
that runs is asked for every 2 s whether anybody waits for it."""
UNREACHABLE_SECONDS = GRACE_SECONDS = 2.0

ASKS = """
import sys
from rowlock.db.connect import connect
connect(sys.argv[1], application_name="asks").execute(sys.argv[2])
"""
UNTIL_TOLD = "SELECT pg_advisory_xact_lock_shared(1)"
ANSWER_IT = "SELECT pg_advisory_unlock(1)"
ASKED = "SELECT FROM pg_stat_activity WHERE application_name = 'asks' AND wait_event = 'advisory'"


@pytest.fixture
def machine() -> Generator[Machine]:
    with Machine() as made:
        yield made


@contextmanager
def a_fleet(machine: Machine) -> Generator[Fleet]:
    """Nodes whose database is where the machine can reach it."""
    cluster = Cluster.private(machine.host)
    try:
        cluster.prepare()
        with Fleet(
            cluster.create(),
            unreachable_seconds=UNREACHABLE_SECONDS,
            removal_grace_seconds=GRACE_SECONDS,
            lease_margin_seconds=0.5,
        ) as fleet:
            yield fleet
    finally:
        cluster.close()


def sessions(fleet: Fleet, machine: Machine) -> list[str]:
    """What the server still keeps for a machine."""
    found = fleet.rows(
        "SELECT application_name FROM pg_stat_activity WHERE client_addr = %s::inet",
        machine.address,
    )
    return [row.application_name for row in found]


def vanish(machine: Machine, fleet: Fleet, held: int) -> float:
    """Cut the machine off while the server keeps so many locks of its authors; when that was."""
    locks = (
        "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)"
        " WHERE locktype = 'advisory' AND granted AND application_name ^@ 'rowlock work'"
    )
    eventually(lambda: fleet.value(locks) == held, "the locks are held")
    machine.vanish()
    vanished = time.monotonic()
    fleet.value(ANSWER_IT)  # to somebody who never acknowledges it
    return vanished


def done_elsewhere(fleet: Fleet, gone: NodeProcess, keys: list[str]) -> None:
    """Every partition ran on two nodes, and left one row: that of the second."""
    for key in keys:
        assert [start.node for start in fleet.ledger().starts(key)] == ["gone", "other"]
        assert (fleet.partition(key).claims, fleet.partition(key).lost) == (2, 1)
    written = fleet.rows("SELECT key, node FROM fleet.effects ORDER BY key")
    assert [(row.key, row.node) for row in written] == [(key, "other") for key in sorted(keys)]
    assert gone.events("lease_ended"), "it stopped by itself"


def test_the_locks_of_a_machine_that_vanished_are_free_as_soon_as_its_work_is_taken_over(
    machine: Machine,
) -> None:
    """A node loses its network while its author code has transactions open: one waits in Python, of one the server
    has an answer that never arrives, one is in a statement of an hour. No packet tells the server, which would
    keep the locks. Its work is taken over after its silence, the next attempts get the locks at once, each row is
    written once; back in the network it begins anew."""
    with a_fleet(machine) as fleet:
        steps: dict[str, Step] = {
            "waits": step("locked_rows", fleet.path("go")),
            "answer": step("locked_statement", UNTIL_TOLD),
            "statement": step("locked_statement", "SELECT pg_sleep(3600)"),
        }
        fleet.value("SELECT pg_advisory_lock(1)")
        gone = fleet.node("gone", slots=3, machine=machine)
        run = fleet.request(parts=[part(key, one) for key, one in steps.items()])
        for key in steps:
            fleet.wait_ledger("in_transaction", key)
        fleet.node("other", slots=3)

        vanished = vanish(machine, fleet, len(steps))

        for key in steps:
            second = fleet.wait_started(key, 2)
            assert second.at - vanished < UNREACHABLE_SECONDS + GRACE_SECONDS + SLACK_SECONDS
        fleet.wait(run)
        assert time.monotonic() - vanished < UNREACHABLE_SECONDS + GRACE_SECONDS + SLACK_SECONDS
        machine.come_back()
        fleet.open("go")
        gone.wait_registered(2)
        done_elsewhere(fleet, gone, [*steps])


def test_the_server_itself_ends_the_sessions_of_a_machine_that_vanished(
    machine: Machine,
) -> None:
    """Authors' transactions have a login of their own, which no node may end: the server finds out by keepalives, and
    while it runs a statement. The node's own two connections are ended as well, and one with an answer on its
    way that nobody acknowledges, which keepalives say nothing of: each would use up one of the server's. (Without
    a word of ours: two hours, or a quarter of an hour.)"""
    with a_fleet(machine) as fleet:
        steps: dict[str, Step] = {
            "waits": step("locked_rows", fleet.path("go")),
            "statement": step("locked_statement", "SELECT pg_sleep(3600)"),
        }
        fleet.value("SELECT pg_advisory_lock(1)")
        with fleet.work_login() as work_dsn:
            gone = fleet.node("gone", slots=2, machine=machine, work_dsn=work_dsn)
            run = fleet.request(parts=[part(key, one) for key, one in steps.items()])
            for key in steps:
                fleet.wait_ledger("in_transaction", key)
            fleet.node("other", slots=2, work_dsn=work_dsn)
            dsn = fleet.database.dsn_as("rowlock_node")
            asks = [*machine.inside, sys.executable, "-c", ASKS, dsn, UNTIL_TOLD]
            with subprocess.Popen(asks, env=environment(), stderr=subprocess.DEVNULL) as asking:
                eventually(lambda: fleet.rows(ASKED), "the server has the statement")

                vanished = vanish(machine, fleet, len(steps))

                eventually(
                    lambda: not sessions(fleet, machine), "the server has ended all sessions"
                )
                assert time.monotonic() - vanished < NOTICED_SECONDS + SLACK_SECONDS
                asking.kill()
            fleet.wait(run)
            machine.come_back()
            fleet.open("go")
            gone.wait_registered(2)
            done_elsewhere(fleet, gone, [*steps])
