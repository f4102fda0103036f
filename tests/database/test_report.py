"""What attempts tell of themselves: progress and skipped items, for people."""

import json
from typing import Any
from uuid import UUID, uuid4

from rowlock.db import views
from rowlock.protocol.model import Claim
from tests.support.builders import Run, Scene


def report(scene: Scene, node: UUID, *told: tuple[Claim, dict[str, Any]]) -> set[int]:
    return scene.store.report(
        node, [(claim.id, claim.token, json.dumps(counters)) for claim, counters in told]
    )


def skipped(scene: Scene, run: Run | Claim) -> int:
    id_ = run.id if isinstance(run, Run) else run.execution_id
    return views.execution(scene.store.connection, id_).skipped


def test_the_latest_report_takes_the_place_of_the_one_before(scene: Scene) -> None:
    node, claim = scene.a_claim()

    for done in (1, 2, 2):
        assert report(scene, node, (claim, {"done": done, "total": 9})) == {claim.id}

    (row,) = views.partitions(scene.store.connection, claim.execution_id, limit=2)
    assert row.counters == {"done": 2, "total": 9}


def test_many_are_reported_in_one_statement_also_in_no_order(scene: Scene) -> None:
    run, node = scene.an_execution(5), scene.a_node()
    claims = scene.claim(node, slots=5)
    claims.reverse()

    assert len(report(scene, node, *((claim, {"done": 1}) for claim in claims))) == 5

    (holder,) = views.holders(scene.store.connection, run.id)
    assert (holder.done, holder.total) == (5, None)
    report(scene, node, *((claim, {"done": 2, "total": 10}) for claim in claims))
    (holder,) = views.holders(scene.store.connection, run.id)
    assert (holder.done, holder.total) == (10, 50)


def test_skipped_items_are_summed_over_partitions_nodes_and_attempts(scene: Scene) -> None:
    """The second attempt goes on from a checkpoint that knew of fewer than the first had reported."""
    run = scene.an_execution(2)
    one, two = scene.a_node(), scene.a_node()
    (first,), (other,) = scene.claim(one), scene.claim(two)
    report(scene, one, (first, {"skipped": 5}))
    report(scene, two, (other, {"skipped": 1}))
    assert skipped(scene, run) == 6
    scene.release(one, first)
    (again,) = scene.claim(two)

    report(scene, two, (again, {"skipped": 2}))

    assert skipped(scene, run) == 3
    scene.complete(two, again, other)
    assert scene.advance(run) == "COMPLETED"
    assert skipped(scene, run) == 3


def test_a_report_that_comes_late_takes_the_place_of_none(scene: Scene) -> None:
    """It was put off, or the network delivers it after one that was sent over the next connection."""
    run, node = scene.an_execution(1), scene.a_node()
    (claim,) = scene.claim(node)
    for told in (1, 2, 1):
        assert report(scene, node, (claim, {"skipped": told, "told": [1, told]})) == {claim.id}

    assert scene.partition(claim).counters["skipped"] == 2
    assert skipped(scene, run) == 2
    (row,) = views.partitions(scene.store.connection, run.id, limit=2)
    assert row.counters == {"skipped": 2}


def test_the_first_report_of_an_attempt_is_later_than_all_of_the_one_before(scene: Scene) -> None:
    run, node = scene.an_execution(1), scene.a_node()
    (first,) = scene.claim(node)
    report(scene, node, (first, {"skipped": 5, "told": [1, 10]}))
    scene.release(node, first)
    (again,) = scene.claim(node)

    report(scene, node, (again, {"skipped": 2, "told": [2, 1]}))

    assert skipped(scene, run) == 2


def test_a_report_needs_the_token_of_a_standing_claim(scene: Scene) -> None:
    node, claim = scene.a_claim()
    assert scene.store.report(node, [(claim.id, uuid4(), "{}")]) == set()
    assert scene.store.report(uuid4(), [(claim.id, claim.token, "{}")]) == set()

    scene.complete(node, claim)

    assert report(scene, node, (claim, {"skipped": 1})) == set()
    assert scene.partition(claim).counters is None
    assert skipped(scene, claim) == 0


def test_an_unreachable_node_may_report(scene: Scene) -> None:
    node, claim = scene.a_claim()
    scene.suspect(node)

    assert report(scene, node, (claim, {"done": 1})) == {claim.id}


def test_a_report_changes_nothing_else(scene: Scene) -> None:
    node, claim = scene.a_claim()
    before = scene.partition(claim)

    report(scene, node, (claim, {"done": 1}))

    assert scene.partition(claim)._replace(counters=None) == before
