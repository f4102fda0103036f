"""Nodes: beats, the two phases of removal, and what becomes of the claims of a node that is gone.

ROWLOCK_RECOVERY_CRASHES is how often the server crashes in the middle of a recovery (3).
"""

import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID, uuid4

import psycopg
import pytest

from rowlock.db.store import Store
from rowlock.protocol.model import Claim, Recovered
from tests.support.builders import AT_MOST_ONCE, Scene, a_policy, at_once
from tests.support.postgres import Database
from tests.support.waiting import wait_until

RECOVERY_CRASHES = int(os.environ.get("ROWLOCK_RECOVERY_CRASHES") or 3)

# -- beats -------------------------------------------------------------------------------------


def test_a_beat_counts_up_and_shows_load_and_draining(scene: Scene) -> None:
    node = scene.a_node()

    for load in (1, 2):
        assert scene.store.beat(node, load=load, draining=load == 2).alive

    row = scene.node(node)
    assert (row.beat, row.load, row.draining, row.status) == (2, 2, True, "ACTIVE")


def test_a_beat_makes_an_unreachable_node_active_again_and_keeps_draining(scene: Scene) -> None:
    node = scene.a_node()
    scene.store.beat(node, load=0, draining=True)
    scene.suspect(node)
    assert (scene.node(node).status, scene.node(node).draining) == ("UNREACHABLE", True)

    scene.store.beat(node, load=0, draining=True)

    assert (scene.node(node).status, scene.node(node).draining) == ("ACTIVE", True)


def test_a_removed_incarnation_is_told_so_and_stays_removed(scene: Scene) -> None:
    node = scene.a_node()
    scene.remove(node)

    assert not scene.store.beat(node, load=0, draining=False).alive
    assert scene.node(node).status == "REMOVED"


def test_a_node_that_never_registered_is_told_that_it_is_not_alive(scene: Scene) -> None:
    assert not scene.store.beat(uuid4(), load=0, draining=False).alive


def register_again(scene: Scene, node: UUID) -> None:
    """As a node does that has lost the answer of the first time."""
    scene.store.register(node, name="n", pool=scene.pool, slots=1, jobs={}, version="0")


def test_registering_again_counts_as_a_beat(scene: Scene) -> None:
    """The node counts its lease from it, so it must count for those who watch the node, too."""
    node = scene.a_node()
    scene.suspect(node)
    beat = scene.node(node).beat

    register_again(scene, node)

    assert (scene.node(node).status, scene.node(node).beat) == ("ACTIVE", beat + 1)


def test_registering_again_after_the_removal_does_not_bring_an_incarnation_back(
    scene: Scene,
) -> None:
    node = scene.a_node()
    scene.remove(node)

    register_again(scene, node)

    assert scene.node(node).status == "REMOVED"
    assert not scene.store.beat(node, load=0, draining=False).alive


def test_a_beat_says_whether_there_is_work_that_this_node_may_claim(scene: Scene) -> None:
    knows, foreign = scene.a_node(), scene.a_node(jobs={"another": ["x"]})
    elsewhere = scene.a_node(pool="elsewhere")
    other_contract, confined = scene.a_node(jobs={scene.job: ["x"]}), scene.a_node(only=uuid4())

    def claimable(node: UUID, *, draining: bool = False) -> bool:
        return scene.store.beat(node, load=0, draining=draining).claimable

    assert not claimable(knows)
    run = scene.an_execution(1)
    assert claimable(knows)
    assert claimable(scene.a_node(only=run.id))
    assert not claimable(knows, draining=True)
    assert not any(claimable(node) for node in (foreign, elsewhere, other_contract, confined))


def test_a_beat_says_which_executions_are_closing_or_over_or_unknown(scene: Scene) -> None:
    node, unknown = scene.a_node(), uuid4()
    requested = scene.a_request()
    planning, running = scene.a_plan_being_made(), scene.an_execution(1)
    closing = scene.an_execution(1)
    scene.claim(node, slots=2)
    assert scene.store.cancel(closing.id, "test", None) == "closing"
    over = scene.an_execution(0)
    assert scene.advance(over) == "COMPLETED"

    asked = [requested, planning.id, running.id, closing.id, over.id, unknown]
    answer = scene.store.beat(node, load=0, draining=False, executions=asked)

    assert answer.ended == (closing.id, over.id, unknown)


def test_a_beat_says_when_a_delayed_partition_is_due(alone: Scene) -> None:
    node, claim = alone.a_claim()
    assert alone.fail(node, claim, delay_seconds=3600) == "retry"
    assert not alone.store.beat(node, load=0, draining=False).due

    alone.make_due(claim)

    assert alone.store.beat(node, load=0, draining=False).due
    assert alone.store.promote(500) == 1
    assert not alone.store.beat(node, load=0, draining=False).due


def test_a_beat_shows_all_peers_that_are_not_removed(alone: Scene) -> None:
    looking, healthy, silent, gone = (alone.a_node() for _ in range(4))
    alone.store.beat(healthy, load=0, draining=False)
    alone.suspect(silent)
    alone.remove(gone)

    peers = alone.store.beat(looking, load=0, draining=False).peers

    seen = {peer.node_id: (peer.beat, peer.unreachable) for peer in peers}
    assert seen == {healthy: (1, False), silent: (0, True)}


def test_a_beat_waits_for_no_partition_and_no_execution(scene: Scene) -> None:
    node, claim = scene.a_claim()
    scene.store.connection.execute("SET lock_timeout = '1s'")

    with (
        scene.held("SELECT FROM rowlock.batch_partitions WHERE id = %s FOR UPDATE", claim.id),
        scene.held(
            "SELECT FROM rowlock.batch_job_coordination WHERE execution_id = %s FOR UPDATE",
            claim.execution_id,
        ),
    ):
        answer = scene.store.beat(node, load=1, draining=False, executions=[claim.execution_id])

    assert answer.alive


# -- the two phases ----------------------------------------------------------------------------


def test_a_beat_in_between_makes_marking_and_removing_change_nothing(scene: Scene) -> None:
    node, observer = scene.a_node(), uuid4()
    seen = scene.beat_of(node)
    scene.store.beat(node, load=0, draining=False)
    assert not scene.store.mark_unreachable(observer, node, seen)

    seen = scene.beat_of(node)
    assert scene.store.mark_unreachable(observer, node, seen)
    scene.store.beat(node, load=0, draining=False)
    assert scene.store.remove_node(observer, node, seen) == (False, (0, 0, 0))

    # It was marked again, by another observer: the beat that the first one watched is history.
    scene.suspect(node)
    assert scene.store.remove_node(observer, node, seen) == (False, (0, 0, 0))
    assert scene.node(node).status == "UNREACHABLE"


def test_a_node_is_not_removed_before_it_was_marked(scene: Scene) -> None:
    node = scene.a_node()

    assert scene.store.remove_node(uuid4(), node, scene.beat_of(node)) == (False, (0, 0, 0))

    assert scene.node(node).status == "ACTIVE"


def test_of_many_observers_one_marks_and_one_removes(scene: Scene) -> None:
    stores = [scene.a_store() for _ in range(4)]
    for _ in range(10):
        node, claim = scene.a_claim()
        beat = scene.beat_of(node)

        def mark(store: Store, node: UUID = node, beat: int = beat) -> bool:
            return store.mark_unreachable(uuid4(), node, beat)

        def remove(store: Store, node: UUID = node, beat: int = beat) -> tuple[bool, Recovered]:
            return store.remove_node(uuid4(), node, beat)

        marked = at_once(*(lambda s=s: mark(s) for s in stores))
        removed = at_once(*(lambda s=s: remove(s) for s in stores))

        assert marked.count(True) == 1
        assert sorted(done for done, _ in removed) == [False, False, False, True]
        assert sum(came.moved + came.failed for _, came in removed) == 1
        assert scene.partition(claim).lost == claim.lost + 1
        events = scene.all("SELECT event FROM rowlock.batch_events WHERE node_id = %s", node)
        kinds = [row.event for row in events]
        assert kinds.count("node_unreachable") == kinds.count("node_removed") == 1


def test_an_observer_waits_for_nobody(scene: Scene) -> None:
    node = scene.a_node()
    beat = scene.beat_of(node)
    scene.store.connection.execute("SET lock_timeout = '1s'")

    # A claim or a completion of the node that is still on its way.
    with scene.held("SELECT FROM rowlock.batch_nodes WHERE node_id = %s FOR KEY SHARE", node):
        assert scene.store.mark_unreachable(uuid4(), node, beat)
        assert scene.store.remove_node(uuid4(), node, beat) == (False, (0, 0, 0))
    # A beat that is still on its way.
    with scene.held("SELECT FROM rowlock.batch_nodes WHERE node_id = %s FOR NO KEY UPDATE", node):
        assert not scene.store.mark_unreachable(uuid4(), node, beat)
        assert scene.store.remove_node(uuid4(), node, beat) == (False, (0, 0, 0))


# -- recovery ----------------------------------------------------------------------------------


def test_the_work_of_a_removed_node_is_claimed_again(scene: Scene) -> None:
    node, heir = scene.a_node(), scene.a_node()
    run = scene.an_execution(3)
    scene.claim(node, slots=2)

    assert scene.remove(node) == (2, 0)

    assert scene.statuses(run) == ["PENDING"] * 3
    again = scene.claim(heir, slots=5)
    assert sorted((one.key, one.claims, one.failures, one.lost) for one in again) == [
        *(("p0", 2, 1, 1), ("p1", 2, 1, 1)),
        ("p2", 1, 0, 0),
    ]
    assert scene.node(node).recovered_at is not None


def test_a_checkpoint_outlives_the_node_that_wrote_it(scene: Scene) -> None:
    node, claim = scene.a_claim()
    assert scene.store.checkpoint(node, claim.id, claim.token, '{"after": 7}')

    scene.remove(node)

    (again,) = scene.claim(scene.a_node())
    assert again.checkpoint == '{"after": 7}'


def test_a_lost_start_of_at_most_once_work_is_failed_with_outcome_unknown(scene: Scene) -> None:
    node, claim = scene.a_claim(delivery=AT_MOST_ONCE)

    assert scene.remove(node) == (0, 1)

    row = scene.partition(claim)
    assert (row.status, row.lost, row.failures, row.assigned_node) == ("FAILED", 1, 0, node)
    assert (row.last_error["type"], row.last_error["outcome"]) == ("NodeLost", "unknown")
    assert scene.start_of(claim).claim_token == claim.token
    assert not scene.claim(scene.a_node())


def test_nothing_becomes_pending_in_an_execution_that_is_closing(scene: Scene) -> None:
    node = scene.a_node()
    run = scene.an_execution(2)
    scene.claim(node, slots=2)
    scene.store.cancel(run.id, "test", None)

    assert scene.remove(node) == (0, 0)

    assert scene.statuses(run) == ["CANCELLED", "CANCELLED"]
    assert scene.counted(run) == (0, 0, 2)
    assert scene.advance(run) == "CANCELLED"


def test_recovery_leaves_a_locked_execution_to_a_later_pass(scene: Scene) -> None:
    node = scene.a_node(slots=8)
    free, locked = scene.an_execution(1), scene.an_execution(1)
    scene.claim(node, slots=8)
    scene.store.connection.execute("SET lock_timeout = '1s'")

    with scene.held(
        "SELECT FROM rowlock.batch_job_coordination WHERE execution_id = %s FOR UPDATE", locked.id
    ):
        assert scene.remove(node) == (1, 0)
        assert scene.store.recover(uuid4()) == (0, 0, 0)
        assert (scene.statuses(free), scene.statuses(locked)) == (["PENDING"], ["CLAIMED"])
        assert scene.store.beat(scene.a_node(), load=0, draining=False).unrecovered

    assert scene.store.recover(uuid4()) == (1, 0, 0)
    assert scene.statuses(locked) == ["PENDING"]
    assert scene.node(node).recovered_at is not None


def test_recovery_leaves_a_locked_partition_to_a_later_pass(scene: Scene) -> None:
    node, claim = scene.a_claim()
    scene.store.connection.execute("SET lock_timeout = '1s'")

    with scene.held("SELECT FROM rowlock.batch_partitions WHERE id = %s FOR UPDATE", claim.id):
        assert scene.remove(node) == (0, 0)

    assert scene.store.recover(uuid4()) == (1, 0, 0)


def test_a_completion_that_commits_beside_the_removal_stands(scene: Scene) -> None:
    """The reaper looked while the completion was open: it must not undo it."""
    node, claim = scene.a_claim()
    scene.suspect(node)
    completing = scene.a_store()

    with completing.connection.transaction():
        sent = scene.complete(node, claim, store=completing)
        removed, _ = scene.store.remove_node(uuid4(), node, scene.beat_of(node))

    assert (sent, removed) == (["completed"], False)
    assert scene.store.remove_node(uuid4(), node, scene.beat_of(node)) == (True, (0, 0, 0))
    assert scene.partition(claim).status == "COMPLETED"


def test_claims_of_an_owner_that_has_no_row_are_recovered(alone: Scene) -> None:
    """Its row may be gone by a restore, a purge or a person: the recovery does not need it. (Reported as
    procrastinate#1518 and solid_queue#542.)"""
    node, claim = alone.a_claim()
    _, started = alone.a_claim(node, delivery=AT_MOST_ONCE)
    alone.admin.execute("DELETE FROM rowlock.batch_nodes WHERE node_id = %s", [node])

    assert alone.store.recover(uuid4()) == (1, 1, 1)

    assert alone.partition(claim).status == "PENDING"
    assert alone.partition(started).status == "FAILED"


def test_a_pass_over_nothing_changes_nothing(alone: Scene) -> None:
    node, claim = alone.a_claim()
    alone.suspect(node)

    assert alone.store.recover(uuid4()) == (0, 0, 0)

    assert alone.partition(claim).status == "CLAIMED"


def test_two_passes_that_meet_share_the_work_without_waiting(alone: Scene) -> None:
    """They lock counters of the same keys: in any other order they end in a deadlock."""
    nodes = [alone.a_node(slots=8) for _ in range(3)]
    runs = [alone.an_execution(6, delivery=AT_MOST_ONCE) for _ in range(3)]
    for node in nodes:
        for _ in range(6):
            assert alone.claim(node)
    locks = [
        alone.held(
            "SELECT FROM rowlock.batch_job_coordination WHERE execution_id = %s FOR UPDATE", run.id
        )
        for run in runs
    ]
    for lock in locks:
        lock.__enter__()
    for node in nodes:
        alone.remove(node)
    for lock in locks:
        lock.__exit__(None, None, None)
    stores = [alone.a_store() for _ in range(4)]

    shares = at_once(*(lambda s=s: s.recover(uuid4()) for s in stores))

    assert sum(share.failed for share in shares) == 18
    assert all(alone.counted(run) == (0, 6, 0) for run in runs)


def test_each_lost_attempt_is_recovered_once_whoever_looks_and_how_often(alone: Scene) -> None:
    """Several nodes remove the same dead node and look again and again, while somebody holds some of its rows:
    as many rows are moved and reported as it held, and each has one loss and one event.

    Reported as airflow#51969: one dead unit is detected again and again, and callbacks and counters with it.
    """
    held = 100
    node = alone.a_node(slots=held)
    run = alone.an_execution(held)
    claims = alone.claim(node, slots=held)
    alone.suspect(node)
    beat = alone.beat_of(node)
    stores = [alone.a_store() for _ in range(4)]
    some = [claim.id for claim in claims[::3]]

    def look(store: Store) -> int:
        _, found = store.remove_node(uuid4(), node, beat)
        moved = found.moved
        for _ in range(5):
            moved += store.recover(uuid4()).moved
        return moved

    with alone.held("SELECT FROM rowlock.batch_partitions WHERE id = ANY (%s) FOR UPDATE", some):
        first = sum(at_once(*(lambda s=s: look(s) for s in stores)))
    second = sum(at_once(*(lambda s=s: look(s) for s in stores)))

    assert (first, second) == (held - len(some), len(some))
    rows = alone.all(
        "SELECT p.status, p.lost, count(v.id) AS events FROM rowlock.batch_partitions p"
        " LEFT JOIN rowlock.batch_events v ON v.partition_id = p.id AND v.event = 'partition_recovered'"
        " WHERE p.execution_id = %s GROUP BY p.id",
        run.id,
    )
    assert [tuple(row) for row in rows] == [("PENDING", 1, 1)] * held


SLOW_RECOVERY = """
CREATE FUNCTION take_time() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM pg_sleep(0.004); RETURN NEW; END $$;
CREATE TRIGGER slow BEFORE UPDATE ON rowlock.batch_partitions FOR EACH ROW
    WHEN (OLD.status = 'CLAIMED') EXECUTE FUNCTION take_time();
"""


def test_a_recovery_that_the_server_interrupts_is_all_done_by_a_later_pass(
    private_database: Database, seed: int
) -> None:
    """The server crashes in the middle of a removal, and of passes over claims that were left, a fifth of a
    second after each has begun or at another moment: nothing of it stands, and the next one recovers all. (Reported
    as dbos-transact-py#716: the rows of a sweep that failed are never looked at again.)"""
    rng = random.Random(seed)
    moments = [0.2] + [rng.uniform(0, 0.9) for _ in range(RECOVERY_CRASHES - 2)]
    with Scene(private_database) as scene:
        scene.admin.execute(SLOW_RECOVERY)
        node = scene.a_node(slots=250)
        run = scene.an_execution(250)
        assert len(scene.claim(node, slots=250)) == 250
        scene.suspect(node)
        beat = scene.beat_of(node)
        crash_in_the_middle(scene, 0.2, lambda store: store.remove_node(uuid4(), node, beat))

    with Scene(private_database) as scene:
        assert scene.statuses(run) == ["CLAIMED"] * 250
        assert scene.node(node).status == "UNREACHABLE"
        with scene.held(
            "SELECT FROM rowlock.batch_job_coordination WHERE execution_id = %s FOR UPDATE", run.id
        ):
            assert scene.store.remove_node(uuid4(), node, beat) == (True, (0, 0, 0))

    for seconds in moments:
        with Scene(private_database) as scene:
            crash_in_the_middle(scene, seconds, lambda store: store.recover(uuid4()))
        with Scene(private_database) as scene:
            assert scene.statuses(run) == ["CLAIMED"] * 250
            assert scene.node(node).recovered_at is None

    with Scene(private_database) as scene:
        assert scene.store.recover(uuid4()).moved == 250
        assert scene.statuses(run) == ["PENDING"] * 250
        assert scene.store.recover(uuid4()) == (0, 0, 0)


def crash_in_the_middle(scene: Scene, seconds: float, move: Callable[[Store], object]) -> None:
    """Begin a move that takes more than a second, and let the server crash so many seconds later."""
    store = scene.a_store()
    pid = store.connection.info.backend_pid
    with ThreadPoolExecutor(1) as threads:
        moving = threads.submit(move, store)
        wait_until(
            lambda: scene.all(
                "SELECT FROM pg_stat_activity WHERE pid = %s AND wait_event = 'PgSleep'"
                " AND clock_timestamp() > query_start + make_interval(secs => %s)",
                *(pid, seconds),
            ),
            what="it is in the middle",
        )
        scene.database.server.restart("immediate")
        assert isinstance(moving.exception(20), psycopg.OperationalError)


# -- poison ------------------------------------------------------------------------------------


def test_a_partition_that_kills_every_node_fails_after_max_attempts(scene: Scene) -> None:
    run = scene.an_execution(["poison"], policy=a_policy(max_attempts=3))

    seen: list[Claim] = []
    for _ in range(3):
        node = scene.a_node()
        seen += scene.claim(node, idle=True)
        scene.remove(node)

    assert [(claim.failures, claim.lost, claim.alone) for claim in seen] == [
        *((0, 0, False), (1, 1, False), (2, 2, True)),
    ]
    row = scene.partition(seen[0])
    assert (row.status, row.failures, row.lost) == ("FAILED", 3, 3)
    assert (row.last_error["type"], row.last_error["outcome"]) == ("NodeLost", "poison")
    assert scene.counted(run) == (0, 1, 0)


def test_the_neighbours_of_poison_never_fail_by_it(scene: Scene) -> None:
    """Three partitions beside one that kills its node each time it runs."""
    run = scene.an_execution(["poison", "a", "b", "c"], policy=a_policy(max_attempts=3))
    deaths = 0
    for _ in range(30):
        node = scene.a_node()
        claims = scene.claim(node, slots=4, idle=True)
        if not claims:
            break
        poisoned = any(claim.key == "poison" for claim in claims)
        if poisoned:
            deaths += 1
            scene.remove(node)
        else:
            scene.complete(node, *claims)

    assert scene.statuses(run) == ["FAILED", "COMPLETED", "COMPLETED", "COMPLETED"]
    # Each of the three neighbours may have been loaded as a suspect before the culprit was alone.
    assert deaths == 3


def test_a_neighbour_is_never_failed_by_a_lost_node_while_it_was_not_alone(scene: Scene) -> None:
    run = scene.an_execution(2, policy=a_policy(max_attempts=1))
    node = scene.a_node()
    scene.claim(node, slots=2)

    assert scene.remove(node) == (2, 0)

    rows = scene.all(
        "SELECT failures, alone FROM rowlock.batch_partitions WHERE execution_id = %s", run.id
    )
    assert [tuple(row) for row in rows] == [(0, True), (0, True)]


def test_with_one_attempt_a_second_loss_fails_because_it_was_alone(scene: Scene) -> None:
    run = scene.an_execution(1, policy=a_policy(max_attempts=1))
    for alone in (False, True):
        node = scene.a_node()
        (claim,) = scene.claim(node, idle=True)
        assert claim.alone is alone
        scene.remove(node)

    assert scene.statuses(run) == ["FAILED"]


def test_a_prefetched_partition_is_lost_without_a_failure(scene: Scene) -> None:
    scene.an_execution(2)
    node = scene.a_node()
    claims = scene.claim(node, slots=1, prefetch=1)
    started = {claim.key: claim.started for claim in claims}
    assert sorted(started.values()) == [False, True]

    scene.remove(node)

    for claim in claims:
        row = scene.partition(claim)
        assert (row.lost, row.failures) == (1, int(claim.started)), claim


def test_exceptions_do_not_isolate_a_partition_that_never_lost_a_node(scene: Scene) -> None:
    node, claim = scene.a_claim(policy=a_policy(max_attempts=2))
    assert scene.fail(node, claim) == "retry"

    (again,) = scene.claim(node)

    assert (again.failures, again.alone) == (1, False)


def test_an_exception_after_a_loss_isolates_the_last_attempt(scene: Scene) -> None:
    scene.an_execution(1, policy=a_policy(max_attempts=3))
    lost, node = scene.a_node(), scene.a_node()
    scene.claim(lost)
    scene.remove(lost)
    (claim,) = scene.claim(node)
    assert not claim.alone
    assert scene.fail(node, claim) == "retry"

    assert scene.claim(node) == []
    (last,) = scene.claim(node, idle=True)
    assert (last.failures, last.alone) == (2, True)


# -- leaving -----------------------------------------------------------------------------------


def test_a_node_that_leaves_hands_back_what_it_still_holds(scene: Scene) -> None:
    node, claim = scene.a_claim()
    _, started = scene.a_claim(node, delivery=AT_MOST_ONCE)

    assert scene.store.deregister(node, "drained")
    assert not scene.store.deregister(node, "drained")

    row = scene.node(node)
    assert (row.status, row.removed_reason, row.draining) == ("REMOVED", "drained", True)
    assert scene.partition(claim).status == "PENDING"
    assert scene.partition(started).status == "FAILED"


def test_no_claim_of_a_node_commits_after_it_left(scene: Scene) -> None:
    """Its connection broke and the claim runs on in the server while the node says goodbye."""
    run = scene.an_execution(2)
    node = scene.a_node()
    claiming, leaving = scene.a_store(), scene.a_store()

    with claiming.connection.transaction():
        assert len(scene.claim(node, slots=2, store=claiming)) == 2
        with scene.started(leaving, lambda store: store.deregister(node, "stopped")) as left:
            claiming.connection.execute("COMMIT")
            assert left.result(timeout=10)

    assert scene.statuses(run) == ["PENDING", "PENDING"]


@pytest.mark.parametrize("how", ["removed", "left"])
def test_a_node_that_is_gone_can_write_nothing(scene: Scene, how: str) -> None:
    run = scene.an_execution(2)
    node = scene.a_node()
    (claim,) = scene.claim(node)
    with scene.held(
        "SELECT FROM rowlock.batch_job_coordination WHERE execution_id = %s FOR UPDATE", run.id
    ):
        # The claim still stands, because its execution could not be locked.
        if how == "removed":
            scene.remove(node)
        else:
            scene.store.deregister(node, "stopped")
        assert scene.partition(claim).status == "CLAIMED"
        assert scene.complete(node, claim) == ["lost"]
        assert not scene.store.checkpoint(node, claim.id, claim.token, "{}")

    assert scene.fail(node, claim) == "lost"
    assert scene.release(node, claim) == ["lost"]
    assert scene.claim(node, slots=2) == []
    assert scene.store.adopt(node, run.id) is None
    assert scene.partition(claim).status == "CLAIMED"


# -- the server --------------------------------------------------------------------------------


def test_the_first_node_on_another_server_or_timeline_says_so(alone: Scene) -> None:
    """A replica that was promoted, or a restored backup, may lack what was answered last. The first
    server of all is news to nobody, and each other is told once."""
    node, other = alone.a_node(), alone.a_node()
    told = "SELECT node_id, detail FROM rowlock.events WHERE event = 'server_changed' ORDER BY id"
    server = alone.store.notice_server(node)
    assert server == alone.store.notice_server(other)
    assert server.timeline is not None
    assert not alone.admin.execute(told).fetchall()

    alone.admin.execute(
        "UPDATE rowlock.batch_servers SET timeline = timeline - 1, seen_at = seen_at - interval '1 s'"
    )
    alone.store.notice_server(node)
    alone.store.notice_server(other)

    ((node_id, detail),) = alone.admin.execute(told).fetchall()
    assert node_id == node
    assert (detail["timeline"], detail["timeline_before"]) == (server.timeline, server.timeline - 1)
    assert detail["system_identifier_before"] == server.system_identifier


def test_a_server_that_keeps_its_identity_to_itself_is_no_trouble(alone: Scene) -> None:
    alone.admin.execute(
        "CREATE FUNCTION rowlock.pg_control_system(OUT system_identifier bigint) LANGUAGE plpgsql"
        " AS $$ BEGIN RAISE EXCEPTION 'not here'; END $$"
    )
    alone.admin.execute(
        "ALTER FUNCTION rowlock.server() SET search_path = rowlock, pg_catalog, pg_temp"
    )

    server = alone.store.notice_server(alone.a_node())

    assert (server.system_identifier, server.timeline) == (None, None)
    assert server.labels["database"]
