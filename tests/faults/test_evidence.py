"""Evidence: a node whose process died is known by its ended sessions, and nobody else is taken for one.

Silence is made so long here that nothing can be recovered by it, unless a test says otherwise.
"""

import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from tests.support.fault_jobs import part, parts, step
from tests.support.fleet import IDLE_SECONDS, PATIENCE_SECONDS, Fleet, NodeProcess, eventually
from tests.support.pgbouncer import PgBouncer
from tests.support.pgproxy import PgProxy
from tests.support.postgres import Database
from tests.support.replica import Pair
from tests.support.tools import program

SILENCE: Final = {"unreachable_seconds": 30, "removal_grace_seconds": 30}

ANNOUNCED = """
SELECT count(*) FROM rowlock.batch_nodes n
WHERE n.status <> 'REMOVED'
  AND NOT rowlock._is_gone(n.beat_backend) AND NOT rowlock._is_gone(n.work_backend)
"""
"""How many nodes have two living backends that are known. NULL, not known, is not counted."""


@pytest.fixture
def patient(fleet: Fleet) -> Fleet:
    fleet.settings.update(SILENCE)
    return fleet


def nobody_was_taken_for_gone(fleet: Fleet) -> None:
    for event in ("node_gone", "node_unreachable", "node_removed", "partition_recovered"):
        assert not fleet.db_events(event), event


# -- who is gone --------------------------------------------------------------------------------------


def test_work_of_a_killed_node_runs_elsewhere_long_before_its_silence_would_count(
    patient: Fleet,
) -> None:
    """kill -9: about three beats later its work has begun on another node. It is not removed for that."""
    fleet = patient
    one = fleet.node("one")
    run = fleet.request(parts=[part("a", step("wait", fleet.path("go")))])
    fleet.wait_started("a")
    two = fleet.node("two")
    two.wait_beats(2)

    one.kill()
    killed = two.row().beat
    two.wait_event("node_gone")

    assert two.row().beat - killed <= 5
    assert fleet.wait_started("a", attempts=2).node == "two"
    assert one.row().status == "UNREACHABLE"
    assert not fleet.db_events("node_removed")
    assert (
        two.metrics()['rowlock_partitions_reassigned_total{pool="default",reason="evidence"}'] == 1
    )
    fleet.open("go")
    fleet.wait(run)
    row = fleet.partition("a")
    assert (row.claims, row.failures, row.lost) == (2, 1, 1)


def test_the_execution_of_a_killed_master_goes_on_and_no_partition_runs_twice(
    patient: Fleet,
) -> None:
    fleet = patient
    one = fleet.node("one", slots=2)
    launch = fleet.launch("fault.summed", parts=parts(3, step("wait", fleet.path("go"))))
    for key in ("p0", "p1"):
        fleet.wait_started(key)

    launch.kill()
    took_over = one.wait_event("master_adopted")

    assert took_over["epoch"] == 2
    assert not fleet.db_events("node_removed")
    fleet.open("go")
    fleet.wait(launch.execution)
    assert sorted(s.key for s in fleet.ledger().of("start")) == ["p0", "p1", "p2"]
    assert {fleet.partition(f"p{n}").claims for n in range(3)} == {1}


def test_a_restarted_node_runs_what_its_predecessor_of_the_same_name_held(patient: Fleet) -> None:
    """A pod is killed and comes back under its name at once. It beats for itself alone: what the process
    before held is recovered by evidence, and costs one more attempt.

    Reported as procrastinate#1518, oban#862 and dbos-transact-py#804.
    """
    fleet = patient
    before = fleet.node("worker-0")
    run = fleet.request(parts=[part("a", step("wait", fleet.path("never"), attempts=[1]))])
    fleet.wait_started("a")
    before.kill()
    after = fleet.node("worker-0")

    fleet.wait(run)

    assert not fleet.db_events("node_removed")
    row = fleet.partition("a")
    assert (row.claims, row.failures, row.lost, row.assigned_node) == (2, 1, 1, after.incarnation)


def test_of_two_nodes_under_one_name_the_living_one_is_left_alone(patient: Fleet) -> None:
    """A name alone proves nothing. Reported as dbos-transact-py#804, quartznet#703 and quartznet#3436."""
    fleet = patient
    dying = fleet.node("worker-0")
    run = fleet.request(parts=parts(2, step("wait", fleet.path("go"))))
    fleet.wait_started("p0")
    living = fleet.node("worker-0")
    fleet.wait_started("p1")

    dying.kill()
    living.wait_event("node_gone")

    assert [event.node_id for event in fleet.db_events("node_gone")] == [dying.incarnation]
    fleet.open("go")
    fleet.wait(run)
    assert fleet.partition("p0").claims == 2
    assert fleet.partition("p1").claims == 1
    assert len(living.incarnations) == 1


def test_once_work_of_a_killed_node_waits_for_its_removal(fleet: Fleet) -> None:
    """Evidence moves what may be repeated; what may not ends when the silence is long enough."""
    one = fleet.node("one", slots=2)
    once = fleet.request("fault.once", parts=[part("o", step("wait", fleet.path("never")))])
    often = fleet.request(parts=[part("a", step("wait", fleet.path("never"), attempts=[1]))])
    for key in ("o", "a"):
        fleet.wait_started(key)
    fleet.node("two")
    one.kill()

    fleet.wait(often)
    fleet.wait(once, "FAILED")

    (moved,) = (e for e in fleet.db_events("partition_recovered") if e.detail["now"] == "PENDING")
    (ended,) = (e for e in fleet.db_events("partition_recovered") if e.detail["now"] == "FAILED")
    (gone,) = fleet.db_events("node_gone")
    (removed,) = fleet.db_events("node_removed")
    assert moved.id < gone.id < removed.id < ended.id
    assert fleet.partition("o").claims == 1
    assert fleet.partition("a").lost == 1


def test_without_evidence_only_silence_counts(fleet: Fleet) -> None:
    """Switched off at either end: the observer does not look, and the observed does not show."""
    off = fleet.node("off", evidence="off")
    run = fleet.request(parts=[part("a", step("wait", fleet.path("never"), attempts=[1]))])
    fleet.wait_started("a")
    fleet.node("on")
    assert off.row().evidence == "off"

    off.kill()

    fleet.wait(run)
    assert not fleet.db_events("node_gone")
    assert len(fleet.db_events("node_removed")) == 1


# -- who is not --------------------------------------------------------------------------------------


@contextmanager
def another_login(database: Database) -> Generator[str]:
    """The connection string of a login that is a member of rowlock_node, and of nothing else."""
    name, password = f"other_{uuid4().hex[:8]}", uuid4().hex
    with database.connect() as db:
        create = sql.SQL("CREATE ROLE {} LOGIN PASSWORD {} IN ROLE rowlock_node")
        db.execute(create.format(sql.Identifier(name), password))
        try:
            yield make_conninfo(database.dsn, user=name, password=password)
        finally:
            db.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = %s",
                [name],
            )
            db.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


def test_idle_nodes_under_two_logins_see_each_other_live(patient: Fleet) -> None:
    """For as many beats as a minute has by default (ROWLOCK_IDLE_SECONDS=60: for a minute). A login sees of the sessions of another only that
    there are some, unless it is a member of pg_read_all_stats: without that each looked dead to the other."""
    fleet = patient
    with another_login(fleet.database) as dsn:
        nodes = [fleet.node("one", beat_seconds=0.1)]
        nodes.append(fleet.node("two", beat_seconds=0.1, ROWLOCK_DSN=dsn))
        run = fleet.request("fault.once", parts=[part("o", step("wait", fleet.path("go")))])
        fleet.wait_started("o")

        nodes[0].wait_beats(round(IDLE_SECONDS / 0.1), IDLE_SECONDS + PATIENCE_SECONDS)
        nodes[1].wait_beats(10)

        assert [node.row().evidence for node in nodes] == ["on", "on"]
        nobody_was_taken_for_gone(fleet)
        fleet.open("go")
        fleet.wait(run)
        for node in nodes:
            node.terminate_and_wait()


def end_sessions(fleet: Fleet, node: NodeProcess, *kinds: str) -> None:
    """Terminate connections of a node, as an administrator may do."""
    for kind in kinds:
        ended = fleet.value(
            "SELECT count(*) FILTER (WHERE pg_terminate_backend(pid)) FROM pg_stat_activity"
            " WHERE application_name = %s",
            f"rowlock {kind} {node.name}",
        )
        assert ended == 1, kind


def crash_the_server(fleet: Fleet) -> None:
    """One backend dies badly: the server ends all others and recovers. Its postmaster lives on."""
    with psycopg.connect(fleet.database.dsn) as db:
        os.kill(db.info.backend_pid, signal.SIGKILL)
    eventually(lambda: answers(fleet.database), "the server has recovered")


def answers(database: Database) -> bool:
    try:
        psycopg.connect(database.dsn).close()
    except psycopg.OperationalError:
        return False
    return True


DISTURBANCES: Final[dict[str, Callable[[Fleet, NodeProcess], None]]] = {
    "its beat's session is terminated": lambda fleet, one: end_sessions(fleet, one, "beat"),
    "its work session is terminated": lambda fleet, one: end_sessions(fleet, one, "node"),
    "both are": lambda fleet, one: end_sessions(fleet, one, "beat", "node"),
    "the server restarts": lambda fleet, _: fleet.database.server.restart("fast"),
    "the server crashes": lambda fleet, _: crash_the_server(fleet),
}


def test_whoever_comes_back_at_once_is_never_taken_for_gone(private_fleet: Fleet) -> None:
    """Sessions are terminated, one and both, the server restarts and crashes: the nodes are there again
    after an instant, keep what they hold, and AT_MOST_ONCE work is not moved."""
    fleet = private_fleet
    fleet.settings.update(SILENCE, beat_seconds=1)
    one, two = fleet.node("one", slots=2), fleet.node("two", pool="watchers")
    runs = [
        fleet.request(job, parts=[part(key, step("wait", fleet.path("go")))])
        for job, key in (("fault.once", "o"), ("fault.work", "a"))
    ]
    for key in ("o", "a"):
        fleet.wait_started(key)

    for what, disturb in DISTURBANCES.items():
        disturb(fleet, one)
        eventually(lambda: fleet.value(ANNOUNCED) == 2, f"both are known again after {what}")
        two.wait_beats(2)
        nobody_was_taken_for_gone(fleet)

    fleet.open("go")
    for run in runs:
        fleet.wait(run)
    assert [fleet.partition(key).claims for key in ("o", "a")] == [1, 1]


def test_a_node_that_is_cut_off_loses_what_others_may_repeat_and_nothing_else(
    patient: Fleet,
) -> None:
    """Evidence can be false: the server has ended both sessions of a living node, which cannot come back.
    Its AT_LEAST_ONCE work runs elsewhere, its AT_MOST_ONCE work goes on where it is, and counts."""
    fleet = patient
    with PgProxy(fleet.database.dsn_as("rowlock_node")) as network:
        one = fleet.node("one", slots=2, ROWLOCK_DSN=network.dsn)
        once = fleet.request("fault.once", parts=[part("o", step("wait", fleet.path("once")))])
        often = fleet.request(parts=[part("a", step("wait", fleet.path("never"), attempts=[1]))])
        for key in ("o", "a"):
            fleet.wait_started(key)
        fleet.node("two")

        network.refuse()
        fleet.wait(often)
        network.pass_on()

        one.wait_beats(1)
        assert (one.row().status, len(one.incarnations)) == ("ACTIVE", 1)
        fleet.open("once")
        fleet.wait(once)
        assert (fleet.partition("o").claims, fleet.partition("a").claims) == (1, 2)
        assert fleet.partition("o").assigned_node == one.incarnation
        assert len(fleet.db_events("node_gone")) == len(fleet.db_events("node_returned")) == 1
        one.terminate_and_wait()


def test_a_promotion_takes_nobody_for_gone() -> None:
    """The primary is lost and its replica promoted: what the rows say of sessions is of another server."""
    with Pair.started() as pair, Fleet(pair.primary.create(), **SILENCE) as fleet:
        dsn = pair.dsn_as("rowlock_node", fleet.database)
        nodes = [fleet.node(name, ROWLOCK_DSN=dsn) for name in ("one", "two")]
        run = fleet.request("fault.once", parts=parts(1, step("wait", fleet.path("go"))))
        fleet.wait_started("p0")
        pair.wait_caught_up()

        fleet.database.server.down("immediate")
        pair.promote()
        fleet.database = pair.replica_of(fleet.database)

        eventually(lambda: fleet.value(ANNOUNCED) == 2, "both are known to the new primary")
        for node in nodes:
            node.wait_beats(5)
        nobody_was_taken_for_gone(fleet)
        fleet.open("go")
        fleet.wait(run)
        assert fleet.partition("p0").claims == 1


def test_behind_a_pooler_nobody_judges_by_evidence_or_is_judged(fleet: Fleet) -> None:
    """A pooler's sessions are its own: they end while the node lives, and outlive it. A node that is
    killed there is found by its silence, and its work runs again all the same."""
    program("pgbouncer")
    with PgBouncer(fleet.database) as pooler:
        pooled = fleet.node(
            "pooled",
            ROWLOCK_DSN=pooler.dsn_as("rowlock_node"),
            ROWLOCK_WORK_DSN=pooler.work_dsn_as("rowlock_node"),
        )
        run = fleet.request(parts=[part("a", step("wait", fleet.path("never"), attempts=[1]))])
        fleet.wait_started("a")
        direct = fleet.node("direct")
        assert (pooled.row().evidence, direct.row().evidence) == ("pooler", "on")
        assert pooled.wait_event("evidence_changed")["evidence"] == "pooler"
        fleet.rows(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE %s",
            "rowlock % pooled",
        )
        pooled.wait_beats(4)
        nobody_was_taken_for_gone(fleet)

        pooled.kill()

        fleet.wait(run)
        assert not fleet.db_events("node_gone")
        assert len(fleet.db_events("node_removed")) == 1
