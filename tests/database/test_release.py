"""Releasing: what a node hands back, and that a start is not handed back by accident."""

from uuid import UUID, uuid4

import pytest

from rowlock.protocol.model import Claim
from tests.support.builders import AT_MOST_ONCE, Scene, at_once


def test_a_drain_hands_work_back_and_it_runs_elsewhere(scene: Scene) -> None:
    run = scene.an_execution(2)
    node, heir = scene.a_node(), scene.a_node()
    claims = scene.claim(node, slots=1, prefetch=1)
    scene.store.beat(node, load=1, draining=True)
    scene.store.checkpoint(node, claims[0].id, claims[0].token, '{"after": 3}')

    assert scene.release(node, *claims) == ["released", "released"]

    again = {claim.id: claim for claim in scene.claim(heir, slots=2)}
    assert [again[c.id].claims for c in claims] == [2, 2]
    assert [(again[c.id].failures, again[c.id].lost) for c in claims] == [(0, 0), (0, 0)]
    assert again[claims[0].id].checkpoint == '{"after": 3}'
    assert scene.events(run).count("partition_released") == 2


def test_a_started_at_most_once_claim_is_kept(scene: Scene) -> None:
    node, claim = scene.a_claim(delivery=AT_MOST_ONCE)

    assert scene.release(node, claim) == ["kept"]

    assert scene.partition(claim).status == "CLAIMED"
    assert scene.start_of(claim).claim_token == claim.token
    assert scene.complete(node, claim) == ["completed"]


def test_an_unstarted_at_most_once_claim_goes_back_with_its_start(scene: Scene) -> None:
    node, claim = scene.a_claim(delivery=AT_MOST_ONCE)

    assert scene.release(node, claim, unstarted=True) == ["released"]

    assert scene.start_of(claim) is None
    (again,) = scene.claim(scene.a_node())
    assert again.id == claim.id
    assert scene.start_of(again).claim_token == again.token


def test_a_process_that_died_before_author_code_began_is_a_failure_of_what_is_handed_back(
    scene: Scene,
) -> None:
    """Counted, because work that kills one process after the other is not handed back for ever. Told twice, once."""
    node, claim = scene.a_claim(delivery=AT_MOST_ONCE)
    pair = [(claim.id, claim.token)]

    for _ in range(2):
        answer = scene.store.release(node, pair, unstarted=True, died=True)
        assert answer == {claim.id: "released"}

    (again,) = scene.claim(node)
    assert (again.failures, again.claims) == (1, 2)
    scene.release(node, again, unstarted=True)
    assert scene.partition(claim).failures == 1


def test_a_late_hand_back_does_not_delete_the_next_start(scene: Scene) -> None:
    node, claim = scene.a_claim(delivery=AT_MOST_ONCE)
    scene.release(node, claim, unstarted=True)
    (again,) = scene.claim(node)

    assert scene.release(node, claim, unstarted=True) == ["lost"]

    assert scene.start_of(again).claim_token == again.token


def test_what_is_handed_back_to_an_execution_that_ends_is_cancelled(scene: Scene) -> None:
    run = scene.an_execution(2)
    node = scene.a_node()
    claims = scene.claim(node, slots=2)
    scene.store.cancel(run.id, "test", None)

    assert scene.release(node, *claims) == ["cancelled", "cancelled"]

    assert scene.counted(run) == (0, 0, 2)
    assert scene.advance(run) == "CANCELLED"


def test_an_unstarted_at_most_once_claim_of_an_execution_that_ends_leaves_no_start(
    scene: Scene,
) -> None:
    node, claim = scene.a_claim(delivery=AT_MOST_ONCE)
    scene.store.cancel(claim.execution_id, "test", None)

    assert scene.release(node, claim, unstarted=True) == ["cancelled"]

    assert scene.start_of(claim) is None


def test_a_repetition_gets_the_answer_of_the_first(scene: Scene) -> None:
    scene.an_execution(2)
    node = scene.a_node()
    one, two = scene.claim(node, slots=2)
    assert scene.release(node, one) == scene.release(node, one) == ["released"]

    scene.store.cancel(two.execution_id, "test", None)
    assert scene.release(node, two) == scene.release(node, two) == ["cancelled"]
    assert scene.counted(scene.run_of(two)) == (0, 0, 2)


def test_a_release_says_what_became_of_the_claim_before(scene: Scene) -> None:
    """After a COMMIT with unknown outcome the node asks by releasing: completed, or not."""
    scene.an_execution(3)
    node = scene.a_node()
    completed, failed, gone = scene.claim(node, slots=3)
    scene.complete(node, completed)
    scene.fail(node, failed, "never")
    scene.release(node, gone)
    scene.claim(node)

    assert scene.release(node, completed, failed, gone) == ["completed", "lost", "lost"]
    assert scene.store.release(node, [(2**40, uuid4())], unstarted=True) == {2**40: "lost"}


def test_an_unreachable_node_may_hand_back(scene: Scene) -> None:
    node, claim = scene.a_claim()
    scene.suspect(node)

    assert scene.release(node, claim) == ["released"]


def test_releases_and_completions_of_several_executions_do_not_deadlock(scene: Scene) -> None:
    """Both count under the same node: the counters in one order, whatever the order of the rows."""
    stores = [scene.a_store(), scene.a_store()]
    for _ in range(15):
        runs = [scene.an_execution(4) for _ in range(3)]
        node = scene.a_node(slots=12)
        claims = scene.claim(node, slots=12)
        for run in runs:
            scene.store.cancel(run.id, "test", None)
        half = {id_: n % 2 for n, id_ in enumerate(sorted(claim.id for claim in claims))}
        back = [claim for claim in claims if half[claim.id]]
        done = [claim for claim in claims if not half[claim.id]][::-1]

        def release(node: UUID = node, back: list[Claim] = back) -> set[str]:
            pairs = [(claim.id, claim.token) for claim in back]
            return set(stores[0].release(node, pairs, unstarted=False).values())

        def complete(node: UUID = node, done: list[Claim] = done) -> set[str]:
            return set(scene.complete(node, *done, store=stores[1]))

        assert at_once(release, complete) == [{"cancelled"}, {"completed"}]
        assert [scene.counted(run) for run in runs] == [(2, 0, 2)] * 3


@pytest.mark.parametrize("unstarted", [True, False])
def test_a_stranger_hands_nothing_back(scene: Scene, unstarted: bool) -> None:
    """Another node knows the partition but not the token."""
    _, claim = scene.a_claim()
    stranger = scene.a_node()

    answers = scene.store.release(stranger, [(claim.id, uuid4())], unstarted=unstarted)

    assert answers == {claim.id: "lost"}
    assert scene.partition(claim).status == "CLAIMED"
