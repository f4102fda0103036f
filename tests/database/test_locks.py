"""Named locks of author code: one claim at a time, and only for as long as that claim stands."""

from collections.abc import Callable
from uuid import UUID, uuid4

import psycopg
import pytest

from rowlock.db.store import Store
from rowlock.protocol.model import Claim
from tests.support.builders import AT_MOST_ONCE, Scene, at_once


def acquire(scene: Scene, node: UUID, claim: Claim, name: str = "tariffs") -> str:
    return scene.store.acquire_lock(node, claim.id, claim.token, name)


def asking(store: Store, node: UUID, claim: Claim, name: str) -> Callable[[], str]:
    return lambda: store.acquire_lock(node, claim.id, claim.token, name)


def holders(scene: Scene) -> list[tuple[str, UUID, str]]:
    """What people see."""
    rows = scene.store.connection.execute(
        "SELECT name, execution_id, partition_key FROM rowlock.locks ORDER BY name"
    )
    return rows.fetchall()


def test_a_lock_has_one_holder_until_it_is_given_back(alone: Scene) -> None:
    (one, first), (two, second) = alone.a_claim(), alone.a_claim()

    assert acquire(alone, one, first) == "acquired"
    assert acquire(alone, two, second) == "busy"
    assert holders(alone) == [("tariffs", first.execution_id, first.key)]
    assert alone.store.release_lock(first.token, "tariffs")
    assert acquire(alone, two, second) == "acquired"
    assert holders(alone) == [("tariffs", second.execution_id, second.key)]


def test_each_name_is_a_lock_of_its_own(scene: Scene) -> None:
    (one, first), (two, second) = scene.a_claim(), scene.a_claim()

    assert acquire(scene, one, first, "one name") == "acquired"
    assert acquire(scene, two, second, "another") == "acquired"
    assert acquire(scene, one, first, "another") == "busy"


def test_an_answer_that_was_lost_is_given_again(scene: Scene) -> None:
    node, claim = scene.a_claim()

    assert [acquire(scene, node, claim, "again") for _ in range(2)] == ["acquired", "acquired"]
    assert [scene.store.release_lock(claim.token, "again") for _ in range(2)] == [True, False]


@pytest.mark.parametrize("end", ["complete", "fail", "release", "remove", "abandon"])
def test_whatever_ends_a_claim_frees_its_lock_in_the_same_moment(scene: Scene, end: str) -> None:
    node, claim = scene.a_claim()
    assert acquire(scene, node, claim, end) == "acquired"
    other, waiting = scene.a_claim()
    assert acquire(scene, other, waiting, end) == "busy"

    match end:
        case "complete":
            scene.complete(node, claim)
        case "fail":
            scene.fail(node, claim)
        case "release":
            scene.release(node, claim)
        case "remove":
            scene.remove(node)
        case _:
            scene.people.abandon(claim.execution_id, "test", None)

    assert acquire(scene, other, waiting, end) == "acquired"
    assert acquire(scene, node, claim, end) == "lost"
    assert not scene.store.release_lock(claim.token, end)
    assert acquire(scene, other, waiting, end) == "acquired"


def test_the_lock_of_at_most_once_work_is_free_when_its_node_is_removed(scene: Scene) -> None:
    node, claim = scene.a_claim(delivery=AT_MOST_ONCE)
    assert acquire(scene, node, claim, "once") == "acquired"

    scene.remove(node)

    assert acquire(scene, *scene.a_claim(), name="once") == "acquired"


def test_an_unreachable_node_keeps_its_locks_and_may_take_another(scene: Scene) -> None:
    node, claim = scene.a_claim()
    assert acquire(scene, node, claim, "kept") == "acquired"

    scene.suspect(node)

    assert acquire(scene, *scene.a_claim(), name="kept") == "busy"
    assert acquire(scene, node, claim, "new") == "acquired"


def test_of_many_that_take_over_at_once_one_gets_it(scene: Scene) -> None:
    for number in range(20):
        name = f"round {number}"
        dead, claim = scene.a_claim()
        assert acquire(scene, dead, claim, name) == "acquired"
        scene.release(dead, claim)
        scene.store.cancel(claim.execution_id, "test", None)
        askers = [(scene.a_store(), *scene.a_claim()) for _ in range(2)]

        answers = at_once(*(asking(*asker, name) for asker in askers))

        assert sorted(answers) == ["acquired", "busy"]


def test_who_asks_for_a_busy_lock_waits_for_nothing_and_locks_nothing(scene: Scene) -> None:
    (node, claim), (other, waiting) = scene.a_claim(), scene.a_claim()
    assert acquire(scene, node, claim, "busy") == "acquired"

    with scene.held("SELECT FROM rowlock.batch_locks WHERE name = 'busy' FOR UPDATE"):
        assert acquire(scene, other, waiting, "busy") == "busy"
    with scene.held("SELECT FROM rowlock.batch_partitions WHERE id = %s FOR UPDATE", claim.id):
        assert acquire(scene, other, waiting, "busy") == "busy"


@pytest.mark.parametrize("name", ["", "x" * 201])
def test_the_table_refuses_what_is_no_name(scene: Scene, name: str) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        acquire(scene, *scene.a_claim(), name=name)


def test_what_dead_holders_leave_behind_is_deleted_with_other_old_things(alone: Scene) -> None:
    for number in range(5):
        node, claim = alone.a_claim()
        assert acquire(alone, node, claim, f"left {number}") == "acquired"
        alone.complete(node, claim)
    held, holder = alone.a_claim()
    assert acquire(alone, held, holder, "held") == "acquired"

    alone.store.retain(completed_seconds=9e9, failed_seconds=9e9, events_seconds=9e9, limit=3)

    assert alone.one("SELECT count(*) AS n FROM rowlock.batch_locks").n == 3
    alone.store.retain(completed_seconds=9e9, failed_seconds=9e9, events_seconds=9e9, limit=3)
    assert [row.name for row in alone.all("SELECT name FROM rowlock.batch_locks")] == ["held"]


def test_a_claim_that_never_was_takes_no_lock(scene: Scene) -> None:
    node, claim = scene.a_claim()

    assert scene.store.acquire_lock(node, claim.id, uuid4(), "x") == "lost"
    assert scene.store.acquire_lock(uuid4(), claim.id, claim.token, "x") == "lost"
