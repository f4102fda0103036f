"""Completing: accepted once, under the token of the claim and nothing else.

ROWLOCK_REAPER_RACES is how many partitions are completed while they are taken away (480).
"""

import dataclasses
import json
import os
from uuid import UUID, uuid4

import psycopg
import pytest

from rowlock.protocol.model import Claim, Completion, Recovered
from tests.support import oracles
from tests.support.builders import Scene, at_once

REAPER_RACES = int(os.environ.get("ROWLOCK_REAPER_RACES") or 480)


def test_a_completion_writes_its_result_once(scene: Scene) -> None:
    node, claim = scene.a_claim()

    assert scene.complete(node, claim, result='{"sum": 12}') == ["completed"]

    row = scene.partition(claim)
    assert (row.status, row.result, row.assigned_node) == ("COMPLETED", {"sum": 12}, node)
    assert row.claim_token == claim.token
    assert row.ended_at is not None


def test_a_repeated_completion_is_answered_like_the_first_and_changes_nothing(scene: Scene) -> None:
    node, claim = scene.a_claim()
    scene.complete(node, claim, result="1")

    assert scene.complete(node, claim, result="2") == ["completed"]

    assert scene.partition(claim).result == 1
    assert scene.counted(scene.run_of(claim)) == (1, 0, 0)


def test_a_wrong_token_completes_nothing(scene: Scene) -> None:
    node, claim = scene.a_claim()

    answers = scene.store.complete(node, [Completion(id=claim.id, token=uuid4(), result="1")])

    assert answers == {claim.id: "lost"}
    assert scene.partition(claim).status == "CLAIMED"


def test_a_partition_that_does_not_exist_is_lost(scene: Scene) -> None:
    node, missing = scene.a_node(), 2**40

    answers = scene.store.complete(node, [Completion(id=missing, token=uuid4(), result=None)])

    assert answers == {missing: "lost"}


def test_an_old_attempt_of_the_same_node_is_told_from_the_new_one(scene: Scene) -> None:
    """ABA: handed back and claimed again by the same node; only the token tells the two apart."""
    node, old = scene.a_claim()
    scene.release(node, old)
    (new,) = scene.claim(node)
    assert (new.id, new.claims) == (old.id, 2)

    assert scene.complete(node, old, result='"old"') == ["lost"]
    assert scene.complete(node, new, result='"new"') == ["completed"]
    assert scene.complete(node, old, result='"old"') == ["lost"]

    assert scene.partition(new).result == "new"


def test_both_attempts_of_one_partition_in_one_batch_complete_the_right_one(scene: Scene) -> None:
    node, old = scene.a_claim()
    scene.release(node, old)
    (new,) = scene.claim(node)

    for batch in ([old, new], [new, old]):
        sent = [Completion(id=c.id, token=c.token, result=f'"{c.claims}"') for c in batch]
        scene.store.complete(node, sent)

    assert scene.partition(new).result == "2"
    assert scene.counted(scene.run_of(new)) == (1, 0, 0)


def test_an_unreachable_node_may_complete_and_so_proves_that_it_lives(scene: Scene) -> None:
    """Refusing it would start AT_MOST_ONCE work twice (protocol: G5)."""
    node, claim = scene.a_claim(delivery="AT_MOST_ONCE")
    scene.suspect(node)

    assert scene.complete(node, claim) == ["completed"]


def test_a_completion_after_the_removal_is_lost_and_the_second_holder_counts(scene: Scene) -> None:
    node, claim = scene.a_claim()
    scene.remove(node)
    heir = scene.a_node()
    (again,) = scene.claim(heir)

    assert scene.complete(node, claim, result='"first"') == ["lost"]
    assert scene.complete(heir, again, result='"second"') == ["completed"]
    assert scene.partition(claim).result == "second"


def test_what_was_completed_before_the_removal_is_still_known(scene: Scene) -> None:
    """Its answer was lost; the repetition comes after the node was removed."""
    node, claim = scene.a_claim()
    scene.complete(node, claim)
    scene.remove(node)

    assert scene.complete(node, claim) == ["completed"]


def test_nothing_is_completed_over_a_terminal_state(scene: Scene) -> None:
    node, claim = scene.a_claim()
    assert scene.fail(node, claim, "never") == "failed"

    assert scene.complete(node, claim) == ["lost"]

    assert scene.partition(claim).status == "FAILED"


def test_one_batch_may_be_mixed(scene: Scene) -> None:
    run = scene.an_execution(5)
    node = scene.a_node()
    good, gone, done, failed, foreign = scene.claim(node, slots=5)
    scene.release(node, gone)
    scene.complete(node, done)
    scene.fail(node, failed, "never")
    forged = dataclasses.replace(foreign, token=uuid4())

    answers = scene.complete(node, good, gone, done, failed, forged)

    assert answers == ["completed", "lost", "completed", "lost", "lost"]
    assert scene.counted(run) == (2, 1, 0)


@pytest.mark.parametrize(
    "result",
    [None, "null", "0", '"text"', '["ü", {"deep": [1.5, true]}]', json.dumps("x" * 200_000)],
    ids=["absent", "null", "number", "text", "nested", "large"],
)
def test_a_result_comes_back_as_it_was(scene: Scene, result: str | None) -> None:
    node, claim = scene.a_claim()

    scene.complete(node, claim, result=result)

    (page,) = scene.store.results(claim.execution_id, 0, 10)
    id_, key, text = page
    assert (id_, key) == (claim.id, claim.key)
    assert (text is None) is (result is None)
    if result is not None and text is not None:
        assert json.loads(text) == json.loads(result)


def test_results_come_in_pages_in_the_order_of_the_plan(scene: Scene) -> None:
    run = scene.an_execution([f"k{n}" for n in (3, 1, 2, 5, 4)])
    scene.an_execution(3)  # of another execution, with ids in between
    node = scene.a_node(only=run.id)
    claims = scene.claim(node, slots=9)
    scene.fail(node, claims[2], "never")
    scene.complete(node, *claims[:2], *claims[3:])

    seen: list[str] = []
    after = 0
    while page := scene.store.results(run.id, after, 2):
        assert len(page) <= 2
        seen += [key for _, key, _ in page]
        after = page[-1][0]

    planned = [claim.key for claim in sorted(claims, key=lambda one: one.id)]
    assert seen == [key for key in planned if key != claims[2].key]


def test_bad_json_fails_the_batch_and_changes_nothing(scene: Scene) -> None:
    node = scene.a_node()
    scene.an_execution(2)
    one, two = scene.claim(node, slots=2)

    with pytest.raises(psycopg.DataError):
        scene.store.complete(
            node,
            [
                Completion(id=one.id, token=one.token, result="1"),
                Completion(id=two.id, token=two.token, result='"\\u0000"'),
            ],
        )

    assert scene.partition(one).status == scene.partition(two).status == "CLAIMED"


def test_the_same_completions_on_two_connections_count_once(scene: Scene) -> None:
    """The first connection hung, the node sends them again over the other one, in its own order."""
    stores = [scene.a_store(), scene.a_store()]
    node = scene.a_node(slots=40)
    for _ in range(15):
        runs = [scene.an_execution(6), scene.an_execution(6)]
        claims = scene.claim(node, slots=12)
        orders = (claims, claims[::-1])

        def send(n: int, orders: tuple[list[Claim], ...] = orders) -> list[str]:
            return scene.complete(node, *orders[n], store=stores[n])

        first, second = at_once(lambda: send(0), lambda: send(1))

        assert set(first) == set(second) == {"completed"}
        assert all(scene.counted(run) == (6, 0, 0) for run in runs)


def test_completions_and_the_reaper_agree_about_each_partition(alone: Scene) -> None:
    """Each row is either completed by its holder or taken away, never both, and never counted twice; a row that
    has ended never changes again.

    Reported as river#1302 and raster-foundry#315: the reaper read the row before it was completed, and wrote after.
    """
    scene = alone
    oracles.watch(scene)
    completing, reaping = scene.a_store(), scene.a_store()
    for _ in range(REAPER_RACES // 8):
        run = scene.an_execution(8)
        node = scene.a_node(slots=8)
        claims = [one for one in scene.claim(node, slots=8) if one.execution_id == run.id]
        scene.suspect(node)
        beat = scene.beat_of(node)

        def reap(node: UUID = node, beat: int = beat) -> tuple[bool, Recovered]:
            return reaping.remove_node(uuid4(), node, beat)

        def finish(node: UUID = node, claims: list[Claim] = claims) -> list[str]:
            return scene.complete(node, *claims, store=completing)

        answers, _ = at_once(finish, reap)
        reaping.remove_node(uuid4(), node, beat)
        reaping.recover(uuid4())

        for claim, answer in zip(claims, answers, strict=True):
            expected = "COMPLETED" if answer == "completed" else "PENDING"
            assert scene.partition(claim).status == expected
        scene.counted(run)
        scene.store.cancel(run.id, "test", None)
