"""Failing: when it is tried again, when it is over, and that recording it cannot itself fail."""

import math
from uuid import uuid4

import pytest

from rowlock.protocol.model import Claim
from tests.support.builders import AT_MOST_ONCE, Scene, a_policy


def test_a_failure_is_tried_again_until_max_attempts(scene: Scene) -> None:
    run = scene.an_execution(1, policy=a_policy(max_attempts=3))
    node = scene.a_node()

    claims: list[Claim] = []
    answers: list[str] = []
    for _ in range(3):
        claims += scene.claim(node)
        answers.append(scene.fail(node, claims[-1]))

    assert answers == ["retry", "retry", "failed"]
    row = scene.partition(claims[0])
    assert (row.status, row.failures, row.claims, row.assigned_node) == ("FAILED", 3, 3, node)
    assert row.last_error == {"type": "Boom", "message": "it broke", "attempt": 3}
    assert scene.counted(run) == (0, 1, 0)
    assert scene.claim(node) == []


def test_between_two_attempts_the_row_is_nobodys(scene: Scene) -> None:
    node, claim = scene.a_claim()

    scene.fail(node, claim)

    row = scene.partition(claim)
    assert (row.status, row.assigned_node, row.started_at, row.ended_at) == (
        *("PENDING", None, None, None),
    )
    assert row.last_error["message"] == "it broke"


def test_a_delay_is_kept_by_the_databases_clock_and_then_promoted(alone: Scene) -> None:
    node, claim = alone.a_claim()

    assert alone.fail(node, claim, delay_seconds=90) == "retry"

    row = alone.partition(claim)
    assert not row.ready
    wait = alone.one("SELECT extract(epoch FROM %s - now())::int AS s", row.available_at).s
    assert 80 < wait <= 90
    assert alone.store.promote(100) == 0
    assert alone.claim(node) == []
    alone.make_due(claim)
    assert alone.store.promote(100) == 1
    assert [one.id for one in alone.claim(node)] == [claim.id]


def test_promotion_is_bounded_and_oldest_first(alone: Scene) -> None:
    alone.an_execution(5)
    node = alone.a_node(slots=5)
    claims = alone.claim(node, slots=5)
    for n, claim in enumerate(claims):
        alone.fail(node, claim, delay_seconds=100 + n)
    alone.admin.execute(
        "UPDATE rowlock.batch_partitions SET available_at = available_at - interval '1 h'"
        " WHERE status = 'PENDING' AND NOT ready"
    )

    assert [alone.store.promote(2) for _ in range(4)] == [2, 2, 1, 0]


def test_promotion_takes_the_oldest_and_waits_for_nobody(alone: Scene) -> None:
    alone.an_execution(2)
    node = alone.a_node()
    old, young = alone.claim(node, slots=2)
    alone.fail(node, old, delay_seconds=100)
    alone.fail(node, young, delay_seconds=200)
    for claim in (old, young):
        alone.admin.execute(
            "UPDATE rowlock.batch_partitions SET available_at = available_at - interval '1 h'"
            " WHERE id = %s",
            [claim.id],
        )
    alone.store.connection.execute("SET lock_timeout = '1s'")

    with alone.held("SELECT FROM rowlock.batch_partitions WHERE id = %s FOR UPDATE", old.id):
        assert alone.store.promote(1) == 1
        assert alone.partition(young).ready
    assert alone.store.promote(1) == 1


def test_the_databases_clock_can_be_replaced_by_a_test(alone: Scene) -> None:
    """Every reading goes through one function: an hour later is a statement away."""
    node, claim = alone.a_claim()
    alone.fail(node, claim, delay_seconds=3600)
    alone.admin.execute(
        "CREATE OR REPLACE FUNCTION rowlock.now() RETURNS timestamptz LANGUAGE sql STABLE"
        " AS 'SELECT pg_catalog.clock_timestamp() + interval ''1 h'''"
    )

    assert alone.store.beat(node, load=0, draining=False).due
    assert alone.store.promote(10) == 1
    (again,) = alone.claim(node)
    assert alone.partition(again).claimed_at > alone.one("SELECT now() AS t").t


def test_never_ends_at_once(scene: Scene) -> None:
    node, claim = scene.a_claim(policy=a_policy(max_attempts=9))

    assert scene.fail(node, claim, "never") == "failed"

    assert scene.partition(claim).failures == 1


def test_later_costs_no_failure(scene: Scene) -> None:
    scene.an_execution(1, policy=a_policy(max_attempts=1))
    node = scene.a_node()

    for attempt in range(1, 5):
        (claim,) = scene.claim(node)
        assert (claim.claims, claim.failures) == (attempt, 0)
        assert scene.fail(node, claim, "later") == "retry"


@pytest.mark.parametrize("kind", ["retry", "never", "unknown", "later"])
def test_at_most_once_work_is_never_retried(scene: Scene, kind: str) -> None:
    node, claim = scene.a_claim(delivery=AT_MOST_ONCE, policy=a_policy(max_attempts=9))

    assert scene.fail(node, claim, kind) == "failed"

    row = scene.partition(claim)
    assert row.status == "FAILED"
    assert row.last_error.get("outcome") == ("unknown" if kind == "unknown" else None)
    assert scene.start_of(claim) is not None


def test_work_that_did_not_start_takes_its_start_back(scene: Scene) -> None:
    node, claim = scene.a_claim(delivery=AT_MOST_ONCE)

    assert scene.fail(node, claim, "unstarted") == "failed"

    assert scene.partition(claim).last_error["outcome"] == "not started"
    assert scene.start_of(claim) is None


def test_a_failure_of_an_execution_that_is_closing_is_cancelled_or_failed(scene: Scene) -> None:
    run = scene.an_execution(3, policy=a_policy(max_attempts=2))
    node = scene.a_node()
    first, second, third = scene.claim(node, slots=3)
    scene.store.cancel(run.id, "test", None)

    assert scene.fail(node, first) == "cancelled"
    assert scene.fail(node, second, "later") == "cancelled"
    assert scene.fail(node, third, "never") == "failed"

    assert scene.counted(run) == (0, 1, 2)
    assert scene.advance(run) == "CANCELLED"


def test_a_repetition_gets_the_answer_of_the_first(scene: Scene) -> None:
    scene.an_execution(3, policy=a_policy(max_attempts=2))
    node = scene.a_node()
    retried, failed, cancelled = scene.claim(node, slots=3)

    for kind, claim in (("retry", retried), ("never", failed)):
        assert scene.fail(node, claim, kind) == scene.fail(node, claim, kind)
    scene.store.cancel(cancelled.execution_id, "test", None)
    assert [scene.fail(node, cancelled) for _ in range(2)] == ["cancelled", "cancelled"]

    assert scene.partition(retried).failures == 1
    assert scene.counted(scene.run_of(failed)) == (0, 1, 2)


def test_a_failure_of_a_claim_that_is_gone_is_lost(scene: Scene) -> None:
    node, claim = scene.a_claim()
    scene.release(node, claim)
    (again,) = scene.claim(node)

    assert scene.fail(node, claim) == "lost"
    assert scene.complete(node, again) == ["completed"]
    assert scene.fail(node, again) == "completed"
    assert (
        scene.store.fail(node, 2**40, uuid4(), error="{}", kind="retry", delay_seconds=0) == "lost"
    )


def test_an_unreachable_node_may_fail(scene: Scene) -> None:
    node, claim = scene.a_claim()
    scene.suspect(node)

    assert scene.fail(node, claim) == "retry"


@pytest.mark.parametrize("delay", [math.inf, math.nan, 1e300, -1.0, -math.inf])
def test_no_delay_keeps_a_failure_from_being_recorded(scene: Scene, delay: float) -> None:
    node, claim = scene.a_claim()

    assert scene.fail(node, claim, delay_seconds=delay) == "retry"

    row = scene.partition(claim)
    assert row.ready is (delay < 0)
    if not row.ready:
        years = scene.one("SELECT extract(day FROM %s - now())::int AS d", row.available_at).d
        assert 364 <= years <= 366


@pytest.mark.parametrize("error", ["null", '"text"', "[]", "3"])
def test_no_error_keeps_a_failure_from_being_recorded(scene: Scene, error: str) -> None:
    node, claim = scene.a_claim()

    answer = scene.store.fail(
        node, claim.id, claim.token, error=error, kind="never", delay_seconds=0
    )

    assert answer == "failed"


def test_a_kind_that_nobody_knows_still_counts_towards_max_attempts(scene: Scene) -> None:
    node, claim = scene.a_claim(policy=a_policy(max_attempts=1))

    assert scene.fail(node, claim, "surprise") == "failed"
