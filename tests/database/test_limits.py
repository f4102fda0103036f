"""Limits of an execution: parallelism that is never exceeded, fair shares, priority, deadline, suspend."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from rowlock.db import views
from rowlock.db.store import Store
from rowlock.protocol.model import Claim, Completion
from tests.support import oracles
from tests.support.builders import AT_MOST_ONCE, Run, Scene, a_policy, at_once
from tests.support.waiting import wait_until

CLAIMERS = 6
ROUNDS = 1_000
SAMPLE_SECONDS = 0.05


def limited(scene: Scene, partitions: int, parallelism: float, **request: Any) -> Run:
    return scene.an_execution(partitions, options={"parallelism": parallelism}, **request)


def change(scene: Scene, run: Run | UUID, **changes: Any) -> str:
    id_ = run.id if isinstance(run, Run) else run
    return scene.people.set_limits(id_, changes, "alice", "because")


def seen(scene: Scene, run: Run) -> views.Execution:
    return views.execution(scene.admin, run.id)


# -- parallelism -----------------------------------------------------------------------------------


def test_no_more_is_claimed_than_the_limit_and_an_end_makes_room(scene: Scene) -> None:
    run = limited(scene, 10, 3)
    one, other = scene.a_node(slots=8), scene.a_node(slots=8)

    held = scene.claim(one, slots=2)
    held += scene.claim(other, slots=8, prefetch=8)
    assert len(held) == 3
    assert scene.claim(one, slots=8) == []
    assert seen(scene, run).running == 3

    scene.complete(one, held[0])
    assert len(scene.claim(other, slots=8)) == 1


def test_what_is_kept_ready_counts(scene: Scene) -> None:
    limited(scene, 10, 3)

    claims = scene.claim(scene.a_node(), slots=1, prefetch=8)

    assert sorted(claim.started for claim in claims) == [False, False, True]


@pytest.mark.parametrize("ending", ["complete", "fail", "release", "lost"])
def test_however_a_claim_ends_nothing_has_to_be_given_back(scene: Scene, ending: str) -> None:
    limited(scene, 5, 1)
    node = scene.a_node()
    for _ in range(3):
        (claim,) = scene.claim(node, slots=4, idle=True)
        if ending == "complete":
            scene.complete(node, claim)
        elif ending == "fail":
            scene.fail(node, claim, "retry")
        elif ending == "release":
            scene.release(node, claim)
        else:
            scene.remove(node)
            node = scene.a_node()


def test_at_most_once_work_is_limited_too(scene: Scene) -> None:
    limited(scene, 5, 2, delivery=AT_MOST_ONCE)
    node = scene.a_node()

    assert [len(scene.claim(node, slots=4)) for _ in range(3)] == [1, 1, 0]


def test_a_suspect_waits_for_room_and_others_do_not_wait_for_it(scene: Scene) -> None:
    """A node that sees a row that must run alone takes nothing else: but not while it may not have it."""
    run = limited(scene, 2, 1, policy=a_policy(max_attempts=1), priority=5)
    other = scene.an_execution(5)
    lost = scene.a_node(only=run.id)
    scene.claim(lost, slots=1)
    scene.remove(lost)
    holder = scene.a_node(only=run.id)
    scene.admin.execute(
        "UPDATE rowlock.batch_partitions SET alone = NOT alone WHERE execution_id = %s", [run.id]
    )
    (claim,) = scene.claim(holder, idle=True)  # the other row, made the suspect for a moment
    scene.admin.execute(
        "UPDATE rowlock.batch_partitions SET alone = true"
        " WHERE execution_id = %s AND status = 'PENDING'",
        [run.id],
    )
    node = scene.a_node()

    assert {one.execution_id for one in scene.claim(node, slots=2, idle=True)} == {other.id}
    scene.complete(holder, claim)
    assert scene.claim(node, slots=2, idle=False) == []
    (suspect,) = scene.claim(holder, slots=2, idle=True)
    assert (suspect.execution_id, suspect.alone) == (run.id, True)


def test_a_full_execution_neither_starves_lower_priorities_nor_takes_a_share(scene: Scene) -> None:
    full = limited(scene, 50, 2, priority=10)
    low = scene.an_execution(50, priority=0)
    node = scene.a_node(slots=8)
    first = scene.claim(node, slots=2)
    assert {claim.execution_id for claim in first} == {full.id}

    for _ in range(5):
        assert {c.execution_id for c in scene.claim(node, slots=1)} == {low.id}
    assert len(scene.claim(node, slots=6)) == 6


def test_a_node_is_told_of_no_work_while_the_limit_is_reached(scene: Scene) -> None:
    limited(scene, 5, 1)
    node, other = scene.a_node(), scene.a_node()
    assert scene.store.beat(other, load=0, draining=False).claimable
    (claim,) = scene.claim(node)

    assert not scene.store.beat(other, load=0, draining=False).claimable
    scene.complete(node, claim)
    assert scene.store.beat(other, load=0, draining=False).claimable


def test_who_comes_too_late_for_the_last_place_looks_for_other_work(scene: Scene) -> None:
    limited(scene, 10, 1, priority=10)
    low = scene.an_execution(10)
    quick, late = scene.a_node(), scene.a_node()
    first = scene.a_store()
    with first.connection.transaction():
        scene.claim(quick, slots=1, store=first)
        with scene.started(
            scene.a_store(), lambda s: s.claim(late, slots=1, prefetch=0, idle=False, seed=1)
        ) as waiting:
            first.connection.execute("COMMIT")
            (claim,) = waiting.result(timeout=10)
            assert claim.execution_id == low.id


class Crew:
    """Claimers on connections of their own, which check the limit inside each of their claims."""

    def __init__(self, scene: Scene, run: Run, seed: int) -> None:
        self.scene, self.run = scene, run
        self.claimed = 0
        self.exceeded: list[tuple[int, int]] = []
        self.samples: list[tuple[int, int | None]] = []
        self.over = threading.Event()
        self.members = [
            (Store(scene.database.connect()), scene.a_node(), random.Random(seed + n))
            for n in range(CLAIMERS)
        ]

    def rounds(self, member: tuple[Store, UUID, random.Random]) -> int:
        store, node, rng = member
        held: list[Claim] = []
        claimed = 0
        for _ in range(ROUNDS):
            cut = rng.randrange(len(held) + 1)
            sent = [Completion(id=c.id, token=c.token, result=None) for c in held[:cut]]
            with store.connection.transaction():
                _, claims = store.complete_and_claim(
                    node,
                    sent,
                    slots=rng.randrange(1, 4),
                    prefetch=rng.randrange(3),
                    idle=False,
                    seed=rng.getrandbits(60),
                )
                if claims:
                    self.check(store)
            held = held[cut:] + claims
            claimed += len(claims)
        return claimed

    def check(self, store: Store) -> None:
        """Who has claimed holds the limit: in its transaction nobody else can claim or change it."""
        row = store.connection.execute(
            "SELECT l.parallelism, l.settled, (SELECT count(*) FROM rowlock.batch_partitions p"
            "  WHERE p.execution_id = l.execution_id AND p.status = 'CLAIMED')"
            " FROM rowlock.batch_limits l WHERE l.execution_id = %s",
            [self.run.id],
        ).fetchone()
        if row is not None:
            limit, settled, running = row
            # Unsettled: this claim began before anybody had set a limit.
            if settled and limit is not None and running > limit:
                self.exceeded.append((running, limit))

    def sample(self) -> None:
        with self.scene.database.connect(role="rowlock_reader") as db:
            while not self.over.wait(SAMPLE_SECONDS):
                row = db.execute(
                    "SELECT running, parallelism FROM rowlock.executions WHERE execution_id = %s",
                    [self.run.id],
                ).fetchone()
                assert row is not None
                self.samples.append((row[0], row[1]))

    def work(self, *, beside: Any = None) -> None:
        with ThreadPoolExecutor(CLAIMERS + 2) as threads:
            sampling = threads.submit(self.sample)
            working = [threads.submit(self.rounds, member) for member in self.members]
            changing = threads.submit(beside, working) if beside else None
            self.claimed = sum(one.result() for one in working)
            self.over.set()
            sampling.result()
            if changing:
                changing.result()
        for store, _, _ in self.members:
            store.connection.close()


def test_the_limit_holds_for_six_claimers_over_a_thousand_rounds(alone: Scene, seed: int) -> None:
    run = limited(alone, 60_000, 5)
    crew = Crew(alone, run, seed)

    crew.work()

    assert crew.exceeded == []
    assert len(crew.samples) > 20
    assert max(running for running, _ in crew.samples) == 5
    assert crew.claimed > ROUNDS
    assert oracles.deadlocks(alone) == 0
    assert oracles.miscounted(alone) == []


def test_the_limit_holds_while_it_is_changed(alone: Scene, seed: int) -> None:
    """Up, down, away and back, as fast as the changes go through."""
    run = alone.an_execution(60_000)
    crew = Crew(alone, run, seed)
    changes: Counter[str] = Counter()

    def beside(working: list[Any]) -> None:
        rng = random.Random(seed)
        while not all(one.done() for one in working):
            changes[change(alone, run, parallelism=rng.choice([1, 2, 4, 8, None]))] += 1

    crew.work(beside=beside)

    assert crew.exceeded == []
    assert changes["changed"] > 50
    assert oracles.deadlocks(alone) == 0
    assert oracles.miscounted(alone) == []


def test_claims_under_way_are_counted_before_a_new_limit_gives_room(scene: Scene) -> None:
    run = scene.an_execution(20)
    node, claiming = scene.a_node(), scene.a_store()
    with claiming.connection.transaction():
        assert len(scene.claim(node, slots=4, store=claiming)) == 4
        settling = scene.a_store()
        with scene.started(settling, lambda s: s.set_limits(run.id, {"parallelism": 5}, "t", None)):
            assert scene.claim(node, slots=4) == []  # the limit is known, and not settled
            assert scene.store.expire("test") == 0  # waits for nobody
            assert scene.claim(node, slots=4) == []
            claiming.connection.execute("COMMIT")

    assert len(scene.claim(node, slots=4)) == 1


def test_a_limit_that_nobody_settled_is_settled_by_a_beat(alone: Scene) -> None:
    """Whoever set it has died between the two calls."""
    run = alone.an_execution(20)
    node = alone.a_node()
    alone.one("SELECT rowlock.set_limits(%s, '{\"parallelism\": 2}', 'alice', NULL)", run.id)
    assert alone.claim(node, slots=4) == []
    assert alone.store.beat(node, load=0, draining=False).due

    alone.store.expire("node")

    assert not alone.store.beat(node, load=0, draining=False).due
    assert len(alone.claim(node, slots=4)) == 2


def test_lowering_takes_nothing_away_and_raising_is_announced(scene: Scene) -> None:
    run = limited(scene, 20, 6)
    node = scene.a_node()
    held = scene.claim(node, slots=6)

    assert change(scene, run, parallelism=2) == "changed"
    scene.complete(node, *held[:4])
    assert scene.claim(node, slots=6) == []
    with scene.database.connect() as db:
        db.execute("LISTEN rowlock")
        assert change(scene, run, parallelism=3) == "changed"
        said = {one.payload for one in db.notifies(timeout=10, stop_after=2)}
    assert "work" in said
    assert len(scene.claim(node, slots=6)) == 1
    assert change(scene, run, parallelism=None) == "changed"
    assert seen(scene, run).parallelism is None
    assert len(scene.claim(node, slots=6)) == 6


# -- fair shares and priority ------------------------------------------------------------------------


def test_executions_of_one_priority_share_a_node_fairly(scene: Scene) -> None:
    runs = [scene.an_execution(400) for _ in range(3)]
    node = scene.a_node()
    got: Counter[UUID] = Counter()

    while sum(got.values()) < 300:
        for claim in scene.claim(node, slots=1):
            got[claim.execution_id] += 1
            scene.complete(node, claim)

    assert set(got) == {run.id for run in runs}
    assert min(got.values()) > 60, got  # 100 each in expectation


def test_a_changed_priority_counts_at_the_next_claim(scene: Scene) -> None:
    first, second = scene.an_execution(5, priority=1), scene.an_execution(5)
    node = scene.a_node()
    assert scene.claim(node)[0].execution_id == first.id

    assert change(scene, second, priority=2) == "changed"

    assert scene.claim(node)[0].execution_id == second.id


# -- set_limits --------------------------------------------------------------------------------------


def test_limits_are_kept_as_they_were_asked_for(scene: Scene) -> None:
    options = {"parallelism": 3, "deadline_seconds": 60, "deletion_policy": "ORPHAN"}
    id_ = scene.a_request(options={**options, "suspended": True})

    one = views.execution(scene.admin, id_)
    assert (one.parallelism, one.deletion_policy, one.suspended) == (3, "ORPHAN", True)
    assert one.deadline_at is not None
    assert (one.deadline_at - one.requested_at).total_seconds() == 60


def test_a_change_says_who_and_why_and_only_if_it_is_one(scene: Scene) -> None:
    run = limited(scene, 1, 3)
    wanted = {
        "priority": 4,
        "parallelism": 5,
        "deadline_seconds": 3600,
        "deletion_policy": "ORPHAN",
    }

    assert change(scene, run, **wanted) == "changed"
    revision = scene.execution(run).revision
    assert change(scene, run, **wanted) == change(scene, run) == "same"

    one = seen(scene, run)
    assert (one.priority, one.parallelism, one.deletion_policy) == (4, 5, "ORPHAN")
    assert one.revision == revision
    (event,) = scene.all(
        "SELECT * FROM rowlock.batch_events WHERE execution_id = %s AND event = 'limits_changed'",
        run.id,
    )
    assert (event.actor, event.detail["reason"], event.detail["changes"]) == (
        "alice",
        "because",
        wanted,
    )
    assert change(scene, run, deadline_seconds=None, parallelism=None) == "changed"
    assert (seen(scene, run).deadline_at, seen(scene, run).parallelism) == (None, None)


def test_limits_of_what_is_over_or_unknown_stay(scene: Scene) -> None:
    run = scene.an_execution(0)
    scene.advance(run)

    assert change(scene, run, priority=7) == "completed"
    assert change(scene, uuid4(), priority=7) == "unknown"
    assert scene.execution(run).priority == 0


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"parallel": 3},
            "unknown limit 'parallel': known are priority, parallelism, deadline_seconds",
        ),
        ({"suspended": True}, "unknown limit 'suspended'"),
        ({"parallelism": 0}, "parallelism is 0; it must be a whole number from 1"),
        ({"parallelism": 2.5}, "parallelism is 2.5; it must be"),
        ({"parallelism": "3"}, 'parallelism is "3"; it must be'),
        ({"priority": None}, "priority is null; it must be a whole number"),
        ({"priority": 1e12}, "priority is 1000000000000"),
        ({"deadline_seconds": 0}, "deadline_seconds is 0; it must be a number of seconds above 0"),
        ({"deadline_seconds": 1e300}, "deadline_seconds is 1"),
        ({"deletion_policy": "KEEP"}, 'deletion_policy is "KEEP"; it must be CANCEL or ORPHAN'),
        ({"deletion_policy": None}, "deletion_policy is null"),
    ],
)
def test_a_limit_that_cannot_be_is_refused_with_its_name(
    scene: Scene, changes: Mapping[str, Any], message: str
) -> None:
    run = scene.an_execution(1)

    with pytest.raises(psycopg.errors.InvalidParameterValue) as caught:
        scene.people.set_limits(run.id, changes, "alice", None)

    assert str(caught.value).startswith(message)
    assert "limits_changed" not in scene.events(run)


def test_options_of_a_request_are_checked_too(scene: Scene) -> None:
    with pytest.raises(
        psycopg.errors.InvalidParameterValue, match="suspended is 1; it must be true"
    ):
        scene.a_request(options={"suspended": 1})
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="unknown limit 'priority'"):
        scene.a_request(options={"priority": 1})
    with pytest.raises(psycopg.errors.InvalidParameterValue, match='parallelism is "many"'):
        scene.a_request(options={"parallelism": "many"})
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="limits are a JSON object"):
        scene.one("SELECT rowlock._check_limits('[]', '{}')")


def test_a_whole_number_may_be_written_with_a_fraction(scene: Scene) -> None:
    run = limited(scene, 1, 4.0)
    assert seen(scene, run).parallelism == 4

    assert change(scene, run, parallelism=5.0, priority=3.0) == "changed"

    assert seen(scene, run).parallelism == 5
    assert scene.execution(run).priority == 3


# -- suspend -----------------------------------------------------------------------------------------


def test_a_suspended_execution_is_not_claimed_and_what_runs_goes_on(scene: Scene) -> None:
    run = scene.an_execution(3)
    node = scene.a_node()
    (claim,) = scene.claim(node)

    assert scene.store.suspend(run.id, "alice", "lunch") == "suspended"
    assert scene.claim(node) == []
    beat = scene.store.beat(node, load=1, draining=False, executions=[run.id])
    assert (beat.claimable, beat.ended) == (False, ())
    assert scene.complete(node, claim) == ["completed"]
    assert scene.store.resume(run.id, "bob", "back") == "resumed"
    assert scene.store.beat(node, load=0, draining=False).claimable
    assert len(scene.claim(node, slots=5)) == 2

    rows = scene.all(
        "SELECT event, actor, detail ->> 'reason' AS why FROM rowlock.batch_events"
        " WHERE execution_id = %s AND event IN ('execution_suspended', 'execution_resumed')"
        " ORDER BY id",
        run.id,
    )
    assert [tuple(row) for row in rows] == [
        ("execution_suspended", "alice", "lunch"),
        ("execution_resumed", "bob", "back"),
    ]


def test_suspend_and_resume_may_be_said_twice(scene: Scene) -> None:
    run = scene.an_execution(1)

    assert scene.store.resume(run.id, "t", None) == "same"
    assert [scene.store.suspend(run.id, "t", None) for _ in range(2)] == ["suspended", "same"]
    assert [scene.store.resume(run.id, "t", None) for _ in range(2)] == ["resumed", "same"]
    assert scene.store.suspend(uuid4(), "t", None) == "unknown"
    scene.store.cancel(run.id, "t", None)
    assert scene.store.suspend(run.id, "t", None) == "cancelled"
    assert scene.events(run).count("execution_suspended") == 1


def test_a_suspend_waits_for_no_claim_and_is_seen_by_the_next(scene: Scene) -> None:
    run = scene.an_execution(5)
    node, claiming = scene.a_node(), scene.a_store()
    with claiming.connection.transaction():
        assert scene.claim(node, store=claiming)
        assert scene.store.suspend(run.id, "t", None) == "suspended"
        assert scene.claim(node) == []


def test_what_waits_suspended_is_begun_by_nobody_but_who_is_told_to(scene: Scene) -> None:
    id_ = scene.a_request(options={"suspended": True})
    node = scene.a_node()
    assert not scene.store.beat(node, load=0, draining=False).adoptable
    assert scene.store.adopt(node) is None

    with scene.database.connect() as db:
        db.execute("LISTEN rowlock")
        scene.store.resume(id_, "t", None)
        said = {one.payload for one in db.notifies(timeout=10, stop_after=2)}

    assert said == {"work", "adopt"}
    assert scene.store.beat(node, load=0, draining=False).adoptable
    assert scene.store.adopt(node) is not None


def test_a_suspended_execution_can_be_cancelled_in_every_state(scene: Scene) -> None:
    waiting = scene.a_request(options={"suspended": True})
    half = scene.a_request(options={"suspended": True})
    running = scene.an_execution(3, options={"suspended": True})

    assert scene.store.cancel(waiting, "t", None) == "cancelled"
    assert scene.store.cancel(running.id, "t", None) == "cancelled"
    scene.one("SELECT rowlock.request_cancel(%s, 't', NULL)", half)  # and its author died
    node = scene.a_node()
    assert scene.store.beat(node, load=0, draining=False).adoptable
    taken = scene.store.adopt(node)
    assert taken is not None
    assert scene.store.advance(node, half, taken.epoch).status == "CANCELLED"


# -- deadline ----------------------------------------------------------------------------------------


def overdue(scene: Scene, run: Run | UUID) -> None:
    scene.admin.execute(
        "UPDATE rowlock.batch_job_coordination SET deadline_at = rowlock.now() - interval '1 s'"
        " WHERE execution_id = %s",
        [run.id if isinstance(run, Run) else run],
    )


def test_an_execution_past_its_deadline_is_closed_and_fails(alone: Scene) -> None:
    run = alone.an_execution(3, options={"deadline_seconds": 3600})
    node = alone.a_node()
    (claim,) = alone.claim(node)
    assert alone.store.expire("node n") == 0
    assert not alone.store.beat(node, load=0, draining=False).due

    overdue(alone, run)
    assert alone.store.beat(node, load=0, draining=False).due
    assert alone.store.expire("node n") == 1
    assert alone.store.expire("node n") == 0

    assert not alone.store.beat(node, load=0, draining=False).due
    assert alone.statuses(run) == ["CLAIMED", "CANCELLED", "CANCELLED"]
    assert alone.execution(run).status == "CLOSING"
    alone.release(node, claim)
    assert alone.advance(run) == "FAILED"
    row = alone.execution(run)
    assert row.failure_reason == "DeadlineExceeded"
    (event,) = alone.all("SELECT * FROM rowlock.batch_events WHERE event = 'deadline_exceeded'")
    assert (event.execution_id, event.actor) == (run.id, "node n")


@pytest.mark.parametrize("state", ["requested", "planning", "finishing"])
def test_a_deadline_ends_what_nobody_drives(alone: Scene, state: str) -> None:
    if state == "requested":
        id_ = alone.a_request(options={"suspended": True})
    elif state == "planning":
        id_ = alone.a_plan_being_made().id
    else:
        run = alone.an_execution(0, policy=a_policy(has_finish=True))
        assert alone.advance(run) == "FINISHING"
        id_ = run.id
    overdue(alone, id_)

    alone.store.expire("test")

    row = alone.execution(id_)
    assert (row.status, row.failure_reason) == ("FAILED", "DeadlineExceeded")


def test_a_deadline_waits_for_no_claim_and_lets_none_follow(alone: Scene) -> None:
    run = alone.an_execution(5)
    overdue(alone, run)
    node, claiming = alone.a_node(), alone.a_store()
    with claiming.connection.transaction():
        assert alone.claim(node, store=claiming)
        assert alone.store.expire("test") == 1
        assert alone.execution(run).status == "RUNNING"
        assert alone.claim(node) == []
        assert alone.store.beat(node, load=0, draining=False).due

    assert alone.store.expire("test") == 0
    assert alone.execution(run).status == "CLOSING"


def test_what_a_pass_over_deadlines_leaves_of_a_large_plan_is_closed_by_its_master(
    alone: Scene,
) -> None:
    run = alone.a_plan_being_made()
    keys = [f"p{n}" for n in range(60_000)]
    alone.stage(run, keys)
    alone.store.seal(run.id, run.epoch, "main", len(keys))
    overdue(alone, run)

    assert alone.store.expire("test") == 1
    assert alone.statuses(run).count("PENDING") == 10_000
    assert alone.advance(run) == "FAILED"

    assert alone.execution(run).failure_reason == "DeadlineExceeded"
    assert alone.counted(run) == (0, 0, 60_000)


def test_many_deadlines_and_many_who_look_end_each_once(alone: Scene) -> None:
    runs = [alone.an_execution(3) for _ in range(20)]
    for run in runs:
        overdue(alone, run)
    stores = [alone.a_store() for _ in range(4)]

    found = sum(at_once(*(partial(store.expire, "test") for store in stores)))
    wait_until(lambda: alone.store.expire("test") == 0)

    assert found == 20
    ends = alone.all(
        "SELECT execution_id FROM rowlock.batch_events WHERE event = 'execution_ended'"
    )
    assert sorted(row.execution_id for row in ends) == sorted(run.id for run in runs)
    assert oracles.deadlocks(alone) == 0
