"""The fleet's own checks: whatever no scenario may show fails the test that shows it.

What must never happen is done here by hand, by nodes that are only rows.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import LiteralString

import psycopg
import pytest

from tests.support.builders import Scene
from tests.support.fault_jobs import part, parts, step
from tests.support.fleet import Fleet, eventually


@pytest.fixture
def scene(fleet: Fleet) -> Generator[Scene]:
    """Nodes of the same database that beat when the test says so."""
    with Scene(fleet.database) as made:
        yield made


def fails(what: str) -> AbstractContextManager[object]:
    return pytest.raises(AssertionError, match=what)


def wait_seen(fleet: Fleet, what: str, looks: int, meanwhile: Callable[[], object]) -> None:
    """Wait until this was seen in so many looks in a row, while something goes on."""

    def seen() -> bool:
        meanwhile()
        return bool(
            fleet.rows("SELECT FROM fleet.sightings WHERE what = %s AND looks > %s", what, looks)
        )

    eventually(seen, f"the onlooker sees a {what}")


def forget(fleet: Fleet) -> None:
    """Let the end of this test be like that of any other."""
    fleet.rows("DELETE FROM rowlock.batch_partitions")
    fleet.rows("DELETE FROM rowlock.batch_counts")
    fleet.rows("DELETE FROM rowlock.batch_job_coordination")
    fleet.rows("DELETE FROM fleet.sightings")


@pytest.mark.parametrize("owner", ["deleted", "silent"])
def test_a_claim_that_nobody_recovers_is_seen(fleet: Fleet, scene: Scene, owner: str) -> None:
    """Its owner has no row, or beats no more, while another node lives that does nothing about it."""
    fleet.left_open = 1
    fleet.recovery_seconds_max = 0.5
    holder, _ = scene.a_claim()
    lives = scene.a_node()
    if owner == "deleted":
        what = "claim without an owner"
        fleet.rows("DELETE FROM rowlock.batch_nodes WHERE node_id = %s", holder)
    else:
        what = "claim of a silent node"

    wait_seen(fleet, what, 40, lambda: scene.store.beat(lives, load=0, draining=False))

    with fails(what):
        fleet.check_sightings()
    forget(fleet)
    fleet.left_open = 0


def test_a_claim_of_a_node_that_beats_is_in_order_and_so_is_one_that_nobody_could_recover(
    fleet: Fleet, scene: Scene
) -> None:
    """What was seen while a node lived counts, and nothing else."""
    holder, _ = scene.a_claim()
    looks = "SELECT last_value FROM fleet.looks"

    def pass_by(meanwhile: Callable[[], object]) -> None:
        before = fleet.value(looks)
        eventually(lambda: (meanwhile(), fleet.value(looks) > before + 60)[1], "sixty looks")

    lives = scene.a_node()
    pass_by(lambda: [scene.store.beat(node, load=0, draining=False) for node in (holder, lives)])
    pass_by(lambda: None)

    assert not fleet.rows("SELECT FROM fleet.sightings WHERE looks > 30")
    forget(fleet)


def test_sessions_that_sit_in_a_transaction_are_seen_also_two_of_one_name(fleet: Fleet) -> None:
    """Two nodes of one name do the same; whoever looks goes on looking."""
    with (
        fleet.database.connect(role="rowlock_node") as one,
        fleet.database.connect(role="rowlock_node") as two,
    ):
        for session in (one, two):
            session.autocommit = True
            session.execute("SET application_name = 'rowlock node twin'")
            session.execute("BEGIN")
            session.execute("SELECT 1")
        wait_seen(fleet, "idle in transaction", 21, lambda: None)
        eventually(
            lambda: fleet.value("SELECT count(*) FROM fleet.sightings") == 2, "both are seen"
        )
        with fails("idle in transaction.*twin"):
            fleet.check_sightings()
    forget(fleet)


def test_nobody_looks_away_unnoticed(fleet: Fleet) -> None:
    """The session that looks on has ended, and the test does not know."""
    fleet.rows(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = 'fleet looks on'"
    )
    with fails("the onlooker looks on"):
        fleet.check_sightings(patience=1)
    fleet.look_on()


TAMPERING: dict[str, tuple[LiteralString, str]] = {
    "a result is changed": (
        "UPDATE rowlock.batch_partitions SET result = '2' WHERE status = 'COMPLETED'",
        "partition .* is COMPLETED and was to be changed",
    ),
    "it runs again": (
        "UPDATE rowlock.batch_partitions SET status = 'PENDING' WHERE status = 'COMPLETED'",
        "partition .* is COMPLETED and was to be changed",
    ),
    "a count of claims goes back": (
        "UPDATE rowlock.batch_partitions SET claims = claims - 1 WHERE status = 'CLAIMED'",
        "counters of partition .* went wrong",
    ),
    "a token changes without a claim": (
        "UPDATE rowlock.batch_partitions SET claim_token = gen_random_uuid() WHERE status = 'CLAIMED'",
        "counters of partition .* went wrong",
    ),
    "a removed node claims": (
        (
            "UPDATE rowlock.batch_partitions SET status = 'CLAIMED', claims = claims + 1,"
            " claim_token = gen_random_uuid(), assigned_node = gen_random_uuid()"
            " WHERE status = 'PENDING'"
        ),
        "claimed by a node that is not active",
    ),
    "an epoch goes back": (
        "UPDATE rowlock.batch_job_coordination SET master_epoch = master_epoch - 1",
        "execution .* was to be changed",
    ),
}


@pytest.mark.parametrize("what", TAMPERING)
def test_changes_that_must_never_be_are_refused_and_counted(
    fleet: Fleet, scene: Scene, what: str
) -> None:
    """Also where whoever made them rolls back and says nothing."""
    statement, message = TAMPERING[what]
    scene.an_execution(3)
    node = scene.a_node()
    done, _ = scene.claim(node, slots=2)
    scene.complete(node, done)
    assert not fleet.value("SELECT is_called FROM fleet.violations")

    with pytest.raises(psycopg.errors.RaiseException, match=message):
        fleet.rows(statement)

    with fails("violation"):
        fleet.check()
    forget(fleet)
    fleet.rows("SELECT setval('fleet.violations', 1, false)")


def test_a_worker_that_ends_unasked_is_a_mistake_whatever_its_status(fleet: Fleet) -> None:
    """It ends as one does that was asked to, with status 0, and the test knows of nobody who did."""
    node = fleet.node("one")
    node.terminate_and_wait()
    node.may_end = False
    with fails("ended unexpectedly: {'one': 0}"):
        fleet.check()
    node.may_end = True


def test_what_author_code_began_twice_is_told_apart_from_what_it_began_once(fleet: Fleet) -> None:
    fleet.node("one")
    once = fleet.request(parts=parts(3))
    twice = fleet.request(parts=[part("fails", step("error", "once", attempts=[1]))])
    for run in (once, twice):
        fleet.wait(run)

    assert fleet.was_begun_once(once)
    assert not fleet.was_begun_once(twice)
