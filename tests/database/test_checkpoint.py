"""Checkpoints outside the author's transaction, and the evidence of late AT_MOST_ONCE work."""

from uuid import uuid4

from tests.support.builders import AT_MOST_ONCE, Scene


def test_a_checkpoint_is_read_by_the_next_attempt(scene: Scene) -> None:
    node, claim = scene.a_claim()
    assert claim.checkpoint is None

    for n in (1, 2):
        assert scene.store.checkpoint(node, claim.id, claim.token, f'{{"after": {n}}}')
    scene.fail(node, claim)

    (again,) = scene.claim(node)
    assert again.checkpoint == '{"after": 2}'


def test_a_checkpoint_changes_nothing_else(scene: Scene) -> None:
    node, claim = scene.a_claim()
    before = scene.partition(claim)

    scene.store.checkpoint(node, claim.id, claim.token, "[1]")

    assert scene.partition(claim)._replace(checkpoint=None) == before


def test_a_checkpoint_that_comes_late_does_not_undo_that_of_a_transaction(scene: Scene) -> None:
    """The network broke while the first was under way. It was sent again over another connection, a
    transaction committed the next with rows of the author's, and then the first arrives once more. The
    next attempt would write those rows a second time (G6)."""
    node, claim = scene.a_claim()
    first = '{"after": 1, "items": 1, "state": null, "saves": 1}'
    assert scene.store.checkpoint(node, claim.id, claim.token, first)
    with scene.database.connect(role="rowlock_node") as work, work.transaction():
        opened = work.execute("SELECT rowlock.fence_open(%s, %s)", [claim.id, claim.token])
        ((fence,),) = opened.fetchall()
        second = '{"after": 2, "items": 2, "state": null, "saves": 2}'
        work.execute("SELECT rowlock.fence_arm(%s, 'checkpoint', %s)", [fence, second])

    assert scene.store.checkpoint(node, claim.id, claim.token, first)

    assert scene.partition(claim).checkpoint["after"] == 2


def test_a_checkpoint_needs_the_token_of_a_standing_claim(scene: Scene) -> None:
    node, claim = scene.a_claim()
    assert not scene.store.checkpoint(node, claim.id, uuid4(), "1")
    assert not scene.store.checkpoint(node, 2**40, claim.token, "1")

    scene.release(node, claim)
    assert not scene.store.checkpoint(node, claim.id, claim.token, "1")
    (again,) = scene.claim(node)
    assert not scene.store.checkpoint(node, claim.id, claim.token, "1")
    scene.complete(node, again)
    assert not scene.store.checkpoint(node, again.id, again.token, "1")

    assert scene.partition(claim).checkpoint is None


def test_an_unreachable_node_may_write_a_checkpoint(scene: Scene) -> None:
    node, claim = scene.a_claim()
    scene.suspect(node)

    assert scene.store.checkpoint(node, claim.id, claim.token, "1")


def test_a_node_sees_what_the_database_says_it_holds(scene: Scene) -> None:
    node, claim = scene.a_claim()
    assert scene.store.claims_of(node) == {claim.id: claim.token}

    scene.complete(node, claim)

    assert scene.store.claims_of(node) == {}


def test_a_late_report_is_kept_as_evidence_beside_the_start(scene: Scene) -> None:
    node, claim = scene.a_claim(delivery=AT_MOST_ONCE)
    scene.remove(node)
    assert scene.complete(node, claim) == ["lost"]

    assert scene.store.record_evidence(claim.id, claim.token, {"outcome": "completed"})

    assert scene.start_of(claim).evidence["outcome"] == "completed"
    assert scene.partition(claim).status == "FAILED"
    kept = scene.start_of(claim)
    assert scene.store.record_evidence(claim.id, claim.token, {"outcome": "completed"})
    assert scene.start_of(claim) == kept
    assert scene.events(claim.execution_id).count("late_evidence") == 1


def test_evidence_of_another_start_is_refused(scene: Scene) -> None:
    node, claim = scene.a_claim(delivery=AT_MOST_ONCE)
    scene.release(node, claim, unstarted=True)
    (again,) = scene.claim(node)

    assert not scene.store.record_evidence(claim.id, claim.token, {"outcome": "completed"})

    assert scene.start_of(again).evidence is None


def test_what_a_node_needs_to_know_of_an_execution(scene: Scene) -> None:
    run = scene.an_execution(1)

    facts = scene.store.execution_of(run.id)

    assert facts is not None
    assert (facts.job, facts.instance_key) == (scene.job, run.instance)
    assert facts.parameters == '{"month": 7}'
    assert facts.policy["max_attempts"] == 3
    assert scene.store.execution_of(uuid4()) is None
