"""Claiming: who gets what, once, in which order, at which cost, and what stands in nobody's way.

ROWLOCK_CLAIM_ROUNDS is how often twenty claim one row (500).
"""

import os
from collections import Counter
from typing import Any
from uuid import UUID, uuid4

import pytest

from rowlock.protocol.model import Claim, Completion
from tests.support import oracles
from tests.support.builders import AT_MOST_ONCE, HASH, Run, Scene, a_policy, at_once

CLAIM_ROUNDS = int(os.environ.get("ROWLOCK_CLAIM_ROUNDS") or 500)


def keys(claims: list[Claim]) -> list[str]:
    return sorted(claim.key for claim in claims)


# -- exclusive -----------------------------------------------------------------------------------


def test_eight_claimers_never_get_the_same_partition(scene: Scene) -> None:
    """G1: over many rounds each partition goes to one claim, and none is left over."""
    stores = [scene.a_store() for _ in range(8)]
    nodes = [scene.a_node() for _ in stores]
    for round_ in range(25):
        run = scene.an_execution(30, policy=a_policy(max_attempts=1))

        def take(n: int, round_: int = round_) -> list[tuple[UUID, Claim]]:
            taken: list[tuple[UUID, Claim]] = []
            while claims := scene.claim(
                nodes[n], slots=3, prefetch=2, store=stores[n], seed=100 * round_ + n
            ):
                taken.extend((nodes[n], claim) for claim in claims)
            return taken

        all_taken = [
            one for share in at_once(*(lambda n=n: take(n) for n in range(8))) for one in share
        ]

        assert Counter(claim.key for _, claim in all_taken) == Counter(f"p{n}" for n in range(30))
        owners = {claim.id: (node, claim.token) for node, claim in all_taken}
        rows = scene.all(
            "SELECT id, assigned_node, claim_token FROM rowlock.batch_partitions"
            " WHERE execution_id = %s AND status = 'CLAIMED'",
            run.id,
        )
        assert {row.id: (row.assigned_node, row.claim_token) for row in rows} == owners


@pytest.mark.timeout(120 + CLAIM_ROUNDS // 20)
def test_one_row_that_twenty_claim_again_and_again_has_one_holder_at_a_time(scene: Scene) -> None:
    """Who did not win gets nothing, whatever it read before: each claim is one answer to one claimer.

    Reported as dbos-transact-py#742: losers of the compare-and-set run the body with what they had read.
    """
    stores = [scene.a_store() for _ in range(20)]
    nodes = [scene.a_node() for _ in stores]
    run = scene.an_execution(1)
    holding: list[int] = []
    wins: list[UUID] = []

    def claim_and_hand_back(n: int) -> None:
        while len(wins) < CLAIM_ROUNDS:
            for claim in scene.claim(nodes[n], store=stores[n], seed=n):
                holding.append(n)
                wins.append(claim.token)
                assert holding == [n], "somebody else holds it too"
                holding.remove(n)
                held = [(claim.id, claim.token)]
                stores[n].release(nodes[n], held, unstarted=True)

    at_once(*(lambda n=n: claim_and_hand_back(n) for n in range(20)))

    row = scene.one("SELECT * FROM rowlock.batch_partitions WHERE execution_id = %s", run.id)
    assert row.claims == len(wins) == len(set(wins)) >= CLAIM_ROUNDS
    assert (row.status, row.failures, row.lost) == ("PENDING", 0, 0)


# -- who may claim -------------------------------------------------------------------------------


def test_only_an_active_node_that_is_not_draining_claims(scene: Scene) -> None:
    scene.an_execution(1)
    draining, unreachable, removed = scene.a_node(), scene.a_node(), scene.a_node()
    scene.store.beat(draining, load=0, draining=True)
    scene.suspect(unreachable)
    scene.remove(removed)

    for node in (draining, unreachable, removed, uuid4()):
        assert scene.claim(node, slots=4, idle=True) == []

    scene.store.beat(unreachable, load=0, draining=False)
    assert keys(scene.claim(unreachable)) == ["p0"]


def test_a_node_claims_only_its_pool_its_jobs_and_its_contracts(scene: Scene) -> None:
    scene.an_execution(["pool"], pool="elsewhere")
    scene.an_execution(["contract"], contract_hash="contract-2")
    scene.an_execution(["job"], job=f"{scene.job}-other")
    scene.an_execution(["mine"])
    node = scene.a_node()

    assert keys(scene.claim(node, slots=9)) == ["mine"]
    both = scene.a_node(jobs={scene.job: [HASH, "contract-2"], f"{scene.job}-other": [HASH]})
    assert keys(scene.claim(both, slots=9)) == ["contract", "job"]


def test_a_node_of_one_execution_claims_nothing_else(scene: Scene) -> None:
    scene.an_execution(["other"])
    run = scene.an_execution(["own"])

    assert keys(scene.claim(scene.a_node(only=run.id), slots=9)) == ["own"]


@pytest.mark.parametrize("state", ["requested", "planning", "stopping", "closing", "over"])
def test_only_a_running_execution_gives_work_away(scene: Scene, state: str) -> None:
    node = scene.a_node()
    if state == "requested":
        scene.a_request()
    elif state == "planning":
        run = scene.a_plan_being_made()
        scene.stage(run, ["a", "b"])
    else:
        run = scene.an_execution(3)
        scene.claim(node)
        if state == "stopping":
            run_sql = "SELECT rowlock.request_cancel(%s, 'test', NULL)"
            scene.store.connection.execute(run_sql, [run.id])
        else:
            scene.store.cancel(run.id, "test", None)
        if state == "over":
            scene.store.deregister(node, "test")
            assert scene.advance(run) == "CANCELLED"
            node = scene.a_node()

    assert scene.claim(node, slots=4, idle=True) == []


def test_a_node_without_a_free_slot_claims_nothing(scene: Scene) -> None:
    scene.an_execution(1)

    assert scene.claim(scene.a_node(), slots=0) == []


# -- how many, in which order --------------------------------------------------------------------


def test_heavier_partitions_come_first_and_equal_ones_in_plan_order(scene: Scene) -> None:
    scene.an_execution(["light", "heavy", "first", "second"], weights=[1, 9, 5, 5])
    node = scene.a_node()

    order = [scene.claim(node)[0].key for _ in range(4)]

    assert order == ["heavy", "first", "second", "light"]


def test_a_claim_takes_no_more_than_it_asked_for(scene: Scene) -> None:
    scene.an_execution(20)
    scene.an_execution(20)

    assert len(scene.claim(scene.a_node(), slots=3, prefetch=4)) == 7


def test_executions_of_equal_priority_share_a_claim(scene: Scene) -> None:
    runs = [scene.an_execution(50) for _ in range(4)]

    claims = scene.claim(scene.a_node(), slots=8)

    assert Counter(claim.execution_id for claim in claims) == {run.id: 2 for run in runs}


def test_single_claims_are_fair_over_executions_in_the_long_run(scene: Scene) -> None:
    runs = [scene.an_execution(200) for _ in range(4)]
    node = scene.a_node()

    taken = Counter(scene.claim(node, seed=seed)[0].execution_id for seed in range(200))

    assert set(taken) == {run.id for run in runs}
    # 50 each in expectation; 4 sigma of a binomial is 25.
    assert min(taken.values()) >= 25, taken


def test_a_higher_priority_is_served_first_and_alone(scene: Scene) -> None:
    low = scene.an_execution(10, priority=1)
    high = scene.an_execution(6, priority=2)
    node = scene.a_node()

    first, then = scene.claim(node, slots=4), scene.claim(node, slots=4)

    assert {claim.execution_id for claim in first} == {high.id}
    # What is left of the higher one, and only then the lower one.
    assert Counter(claim.execution_id for claim in then) == {high.id: 2, low.id: 2}


@pytest.mark.parametrize("seed", range(8))
def test_at_most_once_work_in_the_middle_is_not_overtaken(scene: Scene, seed: int) -> None:
    """One claim serves one kind of delivery; a lower priority of the other kind must wait."""
    scene.an_execution(["high"], priority=3)
    scene.an_execution(["once"], priority=2, delivery=AT_MOST_ONCE)
    scene.an_execution(["low"], priority=1)
    node = scene.a_node(slots=9)

    order = [keys(scene.claim(node, slots=9, seed=seed)) for _ in range(4)]

    assert order == [["high"], ["once"], ["low"], []]


def test_both_kinds_of_one_priority_get_their_turns(scene: Scene) -> None:
    scene.an_execution(100)
    scene.an_execution(100, delivery=AT_MOST_ONCE)
    node = scene.a_node()

    taken = Counter(scene.claim(node, seed=seed)[0].delivery for seed in range(60))

    assert min(taken[kind] for kind in ("AT_LEAST_ONCE", "AT_MOST_ONCE")) >= 10, taken


# -- prefetch --------------------------------------------------------------------------------------


def test_what_gets_a_slot_is_started_and_the_rest_is_kept_ready(scene: Scene) -> None:
    scene.an_execution(["a", "b", "c", "d"], weights=[4, 3, 2, 1])

    claims = scene.claim(scene.a_node(), slots=2, prefetch=2)

    assert {claim.key: claim.started for claim in claims} == {
        "a": True,
        "b": True,
        "c": False,
        "d": False,
    }
    for claim in claims:
        assert (scene.partition(claim).started_at is not None) is claim.started


def test_a_busy_node_may_prefetch_without_a_free_slot(scene: Scene) -> None:
    scene.an_execution(3)
    scene.an_execution(1, delivery=AT_MOST_ONCE, priority=5)

    claims = scene.claim(scene.a_node(), slots=0, prefetch=2)

    assert [(claim.started, claim.delivery) for claim in claims] == [(False, "AT_LEAST_ONCE")] * 2


def test_a_row_with_a_loss_in_its_history_is_never_prefetched(scene: Scene) -> None:
    scene.an_execution(4)
    lost, node = scene.a_node(), scene.a_node()
    scene.claim(lost, slots=3)
    scene.remove(lost)

    claims = scene.claim(node, slots=1, prefetch=4)

    # One with a slot of its own; of the others only the one that never lost a node.
    assert sorted((claim.lost, claim.started) for claim in claims) == [(0, False), (1, True)]
    assert scene.claim(node, slots=0, prefetch=4) == []


# -- alone -----------------------------------------------------------------------------------------


def a_suspect(scene: Scene, *, policy: dict[str, Any] | None = None) -> Run:
    """An execution of a partition whose next loss is its last."""
    run = scene.an_execution(["suspect"], policy=policy or a_policy(max_attempts=1))
    lost = scene.a_node(only=run.id)
    scene.claim(lost)
    scene.remove(lost)
    return run


def test_a_suspect_runs_only_on_a_node_that_runs_nothing_else(scene: Scene) -> None:
    a_suspect(scene)
    scene.an_execution(["a", "b"])
    busy, idle = scene.a_node(), scene.a_node()

    # A node that sees it takes no other work, so that it soon is empty.
    assert scene.claim(busy, slots=3, idle=False) == []
    assert scene.claim(busy, slots=0, prefetch=3, idle=True) == []
    (claim,) = scene.claim(idle, slots=3, prefetch=3, idle=True)
    assert (claim.key, claim.alone, claim.started) == ("suspect", True, True)
    # It is taken: the others go on.
    assert keys(scene.claim(busy, slots=3, idle=False)) == ["a", "b"]


def test_a_node_that_plans_takes_other_work_than_a_suspect(scene: Scene) -> None:
    """By claiming nothing it would not come to run nothing: partition() may take an hour."""
    a_suspect(scene)
    scene.an_execution(["a", "b"])
    planning, other = scene.a_node(), scene.a_node()

    assert keys(scene.claim(planning, slots=3, idle=None)) == ["a", "b"]
    assert scene.claim(planning, slots=3, idle=None) == []
    assert keys(scene.claim(other, slots=3, idle=True)) == ["suspect"]


def test_a_suspect_of_work_that_this_node_may_not_claim_holds_nobody_back(scene: Scene) -> None:
    a_suspect(scene)
    elsewhere = scene.a_node(pool="elsewhere")
    confined = scene.an_execution(["own"])
    scene.an_execution(["there"], pool="elsewhere")

    assert keys(scene.claim(elsewhere)) == ["there"]
    assert keys(scene.claim(scene.a_node(only=confined.id))) == ["own"]


def test_a_suspect_that_is_handed_back_stays_one(scene: Scene) -> None:
    a_suspect(scene)
    node = scene.a_node()
    (claim,) = scene.claim(node, idle=True)

    assert scene.release(node, claim) == ["released"]

    assert scene.claim(node, idle=False) == []
    assert scene.claim(node, idle=True)[0].alone


# -- at most once ------------------------------------------------------------------------------------


def test_at_most_once_work_is_claimed_singly_and_its_start_recorded(scene: Scene) -> None:
    run = scene.an_execution(3, delivery=AT_MOST_ONCE)
    node = scene.a_node()

    (claim,) = scene.claim(node, slots=4, prefetch=4)

    assert claim.started
    start = scene.start_of(claim)
    assert (start.instance_key, start.partition_key) == (run.instance, claim.key)
    assert (start.claim_token, start.node_id, start.execution_id) == (claim.token, node, run.id)


def started_before(scene: Scene, run: Run, *names: str) -> None:
    for name in names:
        scene.admin.execute(
            "INSERT INTO rowlock.batch_starts VALUES (%s, %s, 'main', %s, %s, %s, %s, now())",
            [scene.job, run.instance, name, uuid4(), uuid4(), uuid4()],
        )


def test_a_start_on_record_fails_the_row_and_the_claim_goes_on(scene: Scene) -> None:
    run = scene.an_execution(["a", "b", "c"], delivery=AT_MOST_ONCE)
    started_before(scene, run, "a", "b")
    node = scene.a_node()

    (claim,) = scene.claim(node)

    assert claim.key == "c"
    assert scene.statuses(run) == ["FAILED", "FAILED", "CLAIMED"]
    row = scene.one(
        "SELECT * FROM rowlock.batch_partitions WHERE execution_id = %s AND partition_key = 'a'",
        run.id,
    )
    assert (row.last_error["type"], row.last_error["outcome"]) == ("StartedBefore", "unknown")
    assert row.started_at is None, "it was not started here"
    assert scene.events(run).count("partition_started_before") == 2
    assert scene.counted(run) == (0, 2, 0)


def test_one_claim_settles_a_bounded_number_of_starts_on_record(scene: Scene) -> None:
    run = scene.an_execution(120, delivery=AT_MOST_ONCE)
    started_before(scene, run, *(f"p{n}" for n in range(120)))
    node = scene.a_node()

    assert scene.claim(node) == []
    assert Counter(scene.statuses(run)) == {"FAILED": 100, "PENDING": 20}
    assert scene.claim(node) == []
    assert Counter(scene.statuses(run)) == {"FAILED": 120}
    assert scene.advance(run) == "FAILED"


def test_two_executions_with_the_same_starts_fail_one_after_the_other(scene: Scene) -> None:
    """One claim touches the counters of one execution, so that two cannot wait for each other."""
    runs = [scene.an_execution(["a"], delivery=AT_MOST_ONCE) for _ in range(2)]
    for run in runs:
        started_before(scene, run, "a")
    node = scene.a_node()

    assert scene.claim(node) == []
    assert sorted(scene.statuses(runs[0]) + scene.statuses(runs[1])) == ["FAILED", "PENDING"]
    assert scene.claim(node) == []
    assert sorted(scene.statuses(runs[0]) + scene.statuses(runs[1])) == ["FAILED", "FAILED"]


# -- beside others -----------------------------------------------------------------------------------


def test_a_claim_beside_a_long_cancel_neither_waits_nor_claims(scene: Scene) -> None:
    locked = scene.an_execution(5, priority=9)
    scene.an_execution(["free"])
    node = scene.a_node()
    scene.store.connection.execute("SET lock_timeout = '1s'")

    with scene.held("SELECT rowlock.cancel(%s, 'somebody', NULL)", locked.id) as cancelling:
        assert keys(scene.claim(node, slots=3)) == ["free"]
        cancelling.commit()

    assert scene.statuses(locked) == ["CANCELLED"] * 5
    assert scene.claim(node, slots=3) == []


def test_a_claim_waits_for_no_partition(scene: Scene) -> None:
    run = scene.an_execution(["locked", "free"])
    scene.store.connection.execute("SET lock_timeout = '1s'")
    first = scene.one(
        "SELECT min(id) AS id FROM rowlock.batch_partitions WHERE execution_id = %s", run.id
    ).id

    with scene.held("SELECT FROM rowlock.batch_partitions WHERE id = %s FOR UPDATE", first):
        assert keys(scene.claim(scene.a_node(), slots=3)) == ["free"]


def test_a_completion_comes_before_the_claim_in_one_statement(alone: Scene) -> None:
    run = alone.an_execution(3)
    node = alone.a_node()
    (first,) = alone.claim(node)
    oracles.watch(alone)

    outcomes, claims = alone.store.complete_and_claim(
        node,
        [Completion(id=first.id, token=first.token, result='{"n": 1}')],
        slots=1,
        prefetch=1,
        idle=True,
        seed=1,
    )

    assert outcomes == {first.id: "completed"}
    assert [claim.started for claim in sorted(claims, key=lambda one: one.id)] == [True, False]
    moves = alone.all("SELECT became FROM public.moves WHERE kind = 'partition' ORDER BY ctid")
    assert [row.became for row in moves] == ["COMPLETED", "CLAIMED", "CLAIMED"]
    written = alone.all(
        "SELECT DISTINCT xmin::text AS xmin FROM rowlock.batch_partitions WHERE execution_id = %s",
        run.id,
    )
    assert len(written) == 1, "all were written by one transaction"


def test_completions_alone_need_no_free_slot(scene: Scene) -> None:
    scene.an_execution(2)
    node = scene.a_node()
    (first,) = scene.claim(node)

    sent = [Completion(id=first.id, token=first.token, result=None)]
    outcomes, claims = scene.store.complete_and_claim(
        node, sent, slots=0, prefetch=0, idle=False, seed=1
    )

    assert (outcomes, claims) == ({first.id: "completed"}, [])


def test_a_draining_node_completes_in_the_statement_in_which_it_claims_nothing(
    scene: Scene,
) -> None:
    """A claim that may not claim returns no rows; if it raised, the completion would be undone."""
    scene.an_execution(2)
    node = scene.a_node()
    (first,) = scene.claim(node)
    scene.store.beat(node, load=1, draining=True)

    sent = [Completion(id=first.id, token=first.token, result="1")]
    outcomes, claims = scene.store.complete_and_claim(
        node, sent, slots=4, prefetch=4, idle=True, seed=1
    )

    assert (outcomes, claims) == ({first.id: "completed"}, [])
    assert scene.partition(first).status == "COMPLETED"


# -- where in the line ---------------------------------------------------------------------------------

WEIGHTS = [0, 2**31 - 1, -(2**31), 0, -(2**31)]
IN_THE_LINE = ["p1", "p0", "p3", "p2", "p4"]


def a_line(scene: Scene, *, counts_as: int = 1000) -> Run:
    """A short one that counts as so long."""
    run = scene.an_execution(len(WEIGHTS), weights=WEIGHTS)
    scene.admin.execute(
        "UPDATE rowlock.batch_job_coordination SET total = %s WHERE execution_id = %s",
        [counts_as, run.id],
    )
    return run


def test_nothing_waits_up_to_the_place_that_is_passed(scene: Scene) -> None:
    run = a_line(scene)
    node = scene.a_node()
    claims = [c for _ in WEIGHTS for c in scene.claim(node, after=scene.store.passed(node, 0))]
    assert [claim.key for claim in claims] == IN_THE_LINE

    at_the_end = scene.store.passed(node, 0)
    assert list(at_the_end) == [run.id]
    scene.release(node, *claims)
    assert scene.claim(node, slots=9, after=at_the_end) == [], "all of it came back before that"
    assert len(scene.claim(node, slots=9, after=scene.store.passed(node, 0))) == len(WEIGHTS)


def test_a_claim_takes_what_stands_behind_the_place_that_it_names(scene: Scene) -> None:
    run, other = a_line(scene), scene.an_execution(["other"])
    line = {
        row.partition_key: (row.weight, row.id)
        for row in scene.all(
            "SELECT partition_key, weight, id FROM rowlock.batch_partitions WHERE execution_id = %s",
            run.id,
        )
    }
    node = scene.a_node()

    behind = {run.id: line["p3"]}
    assert keys(scene.claim(node, slots=9, after=behind)) == ["other", "p2", "p4"]
    assert scene.claim(node, slots=9, after=behind) == []
    assert keys(scene.claim(node, slots=9, after={other.id: line["p4"]})) == ["p0", "p1", "p3"]


def test_only_long_lines_that_the_node_serves_are_looked_over(scene: Scene) -> None:
    """What is short is cheap to pass over, and each place that is named is sent with each claim."""
    run = a_line(scene)
    a_line(scene, counts_as=999)
    assert list(scene.store.passed(scene.a_node(), 0)) == [run.id]
    assert scene.store.passed(scene.a_node(jobs={}), 0) == {}
    assert scene.store.passed(scene.a_node(pool="elsewhere"), 0) == {}
