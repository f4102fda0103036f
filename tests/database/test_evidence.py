"""Evidence: what is taken from a node whose connections the server has ended, and what never is."""

from uuid import UUID, uuid4

import psycopg

from rowlock.db.store import Store
from rowlock.protocol.model import Evident
from tests.support.builders import AT_MOST_ONCE, Scene, a_policy
from tests.support.pooler import Pooler
from tests.support.postgres import Database

NOTHING = Evident(acted=False, moved=0, failed=0, freed=0)


def seek(scene: Scene, node: UUID) -> Evident:
    """What an observer finds that has watched the node's present beat."""
    return scene.store.recover_by_evidence(uuid4(), node, scene.beat_of(node))


def events_of(scene: Scene, node: UUID) -> list[str]:
    """The kinds of events about a node, oldest first."""
    rows = scene.all("SELECT event FROM rowlock.batch_events WHERE node_id = %s ORDER BY id", node)
    return [row.event for row in rows]


# -- what it takes -----------------------------------------------------------------------------------


def test_a_node_that_is_gone_loses_what_others_may_repeat_and_is_not_removed(scene: Scene) -> None:
    node = scene.gone()
    run = scene.an_execution(3, master=node)
    claims = scene.claim(node, slots=1, prefetch=1)

    assert seek(scene, node) == Evident(acted=True, moved=2, failed=0, freed=1)

    assert scene.node(node).status == "UNREACHABLE"
    assert [scene.partition(claim).status for claim in claims] == ["PENDING", "PENDING"]
    assert [scene.partition(claim).lost for claim in claims] == [1, 1]
    assert [scene.partition(claim).failures for claim in claims] == [1, 0], "one had not begun"
    assert scene.execution(run).master_node is None
    assert events_of(scene, node).count("node_gone") == 1


def test_its_masterships_are_adopted_at_once(scene: Scene) -> None:
    node = scene.gone()
    run = scene.an_execution(1, master=node)
    seek(scene, node)
    other = scene.a_node()
    assert scene.store.beat(other, load=0, draining=False).adoptable

    taken = scene.store.adopt(other)

    assert taken is not None
    assert (taken.execution_id, taken.epoch) == (run.id, run.epoch + 1)


def test_a_master_that_lives_after_all_ends_its_execution_if_nobody_has_taken_over(
    scene: Scene,
) -> None:
    node = scene.gone()
    run = scene.an_execution(0, master=node, policy=a_policy(has_finish=True))
    assert scene.advance(run) == "FINISHING"
    seek(scene, node)

    assert scene.store.finish(run.id, run.epoch, summary="1") == "COMPLETED"

    ended = scene.one(
        "SELECT actor FROM rowlock.batch_events WHERE execution_id = %s AND event = 'execution_ended'",
        run.id,
    )
    assert ended.actor == f"the master of epoch {run.epoch}"


def test_once_work_waits_for_the_removal_by_silence(scene: Scene) -> None:
    node, claim = scene.a_claim(scene.gone(), delivery=AT_MOST_ONCE)

    assert seek(scene, node) == Evident(acted=True, moved=0, failed=0, freed=0)

    assert scene.partition(claim).status == "CLAIMED"
    assert scene.start_of(claim) is not None
    removed, after = scene.store.remove_node(uuid4(), node, scene.beat_of(node))
    assert removed
    assert (after.moved, after.failed, after.unknown) == (0, 1, 1)


def test_the_removal_that_follows_counts_nothing_twice(scene: Scene) -> None:
    node, claim = scene.a_claim(scene.gone())
    seek(scene, node)

    removed, after = scene.store.remove_node(uuid4(), node, scene.beat_of(node))

    assert removed
    assert (after.moved, after.failed) == (0, 0)
    row = scene.partition(claim)
    assert (row.status, row.lost, row.failures) == ("PENDING", 1, 1)
    assert scene.node(node).recovered_at is not None


def test_a_second_observer_finds_nothing_left_to_do(scene: Scene) -> None:
    node, _ = scene.a_claim(scene.gone())

    assert seek(scene, node).acted
    assert seek(scene, node) == NOTHING
    assert events_of(scene, node).count("node_gone") == 1


def test_what_somebody_holds_just_then_is_taken_by_the_next_look(scene: Scene) -> None:
    node = scene.gone()
    run = scene.an_execution(1, master=node)
    (claim,) = scene.claim(node)
    with scene.held(
        "SELECT FROM rowlock.batch_job_coordination WHERE execution_id = %s FOR UPDATE", run.id
    ):
        assert seek(scene, node) == Evident(acted=True, moved=0, failed=0, freed=0)
    assert scene.partition(claim).status == "CLAIMED"

    assert seek(scene, node) == Evident(acted=True, moved=1, failed=0, freed=1)


def test_work_that_no_node_survives_fails_by_the_rules_of_removal(scene: Scene) -> None:
    run = scene.an_execution(1, policy=a_policy(max_attempts=2))
    found: list[Evident] = []
    for _ in range(2):
        node = scene.gone()
        assert scene.claim(node, idle=True)
        found.append(seek(scene, node))

    assert [(one.moved, one.failed) for one in found] == [(1, 0), (0, 1)]
    assert scene.statuses(run) == ["FAILED"]


# -- whom it does not touch ----------------------------------------------------------------------------


def test_a_node_whose_connections_live_keeps_everything_however_silent_it_is(scene: Scene) -> None:
    node, claim = scene.a_claim()
    scene.connected(node)
    scene.suspect(node)

    assert seek(scene, node) == NOTHING
    assert scene.partition(claim).status == "CLAIMED"


def test_an_identity_must_be_known_before_it_can_be_gone(scene: Scene) -> None:
    """A node between its registration and its first beat has announced one connection only."""
    node, _ = scene.a_claim()
    assert seek(scene, node) == NOTHING

    work = scene.a_store()
    work.connected(node, "work", evidence=True)
    scene.cut(work)

    assert seek(scene, node) == NOTHING


def test_a_reconnected_node_is_known_by_its_new_connections(scene: Scene) -> None:
    node, claim = scene.a_claim(scene.gone())
    scene.connected(node)

    assert seek(scene, node) == NOTHING
    assert scene.partition(claim).status == "CLAIMED"


def test_a_node_that_comes_back_is_active_and_its_claims_are_gone(scene: Scene) -> None:
    """Evidence may be false: the node was cut off. Then an attempt is lost, and nothing doubled."""
    node, claim = scene.a_claim(scene.gone())
    seek(scene, node)
    other = scene.a_node()
    (again,) = scene.claim(other)

    assert scene.store.beat(node, load=1, draining=False).alive

    assert scene.node(node).status == "ACTIVE"
    assert scene.store.claims_of(node) == {}
    assert scene.complete(node, claim) == ["lost"]
    assert scene.complete(other, again) == ["completed"]


def test_what_it_claims_after_it_came_back_is_recovered_when_it_is_removed(scene: Scene) -> None:
    node = scene.gone()
    seek(scene, node)
    scene.store.beat(node, load=0, draining=False)
    _, claim = scene.a_claim(node)

    assert scene.remove(node) == (1, 0)
    assert scene.partition(claim).status == "PENDING"


def test_a_removed_node_is_nothing_to_it(scene: Scene) -> None:
    node = scene.gone()
    scene.remove(node)

    assert seek(scene, node) == NOTHING
    assert scene.node(node).status == "REMOVED"


def test_a_name_alone_proves_nothing(scene: Scene) -> None:
    """Two nodes under one name, of which one dies: the other keeps what it holds.

    Reported as dbos-transact-py#804 and quartznet#703.
    """
    dead, lost = scene.a_claim(scene.gone())
    living, held = scene.a_claim()
    scene.connected(living)
    scene.admin.execute("UPDATE rowlock.batch_nodes SET name = 'worker-0'")

    assert seek(scene, living) == NOTHING
    assert seek(scene, dead).moved == 1
    assert scene.partition(lost).status == "PENDING"
    assert scene.partition(held).status == "CLAIMED"


# -- what it rests on ------------------------------------------------------------------------------------


def test_behind_a_pooler_nobody_is_judged(scene: Scene) -> None:
    node, _ = scene.a_claim()
    scene.connected(node)
    with Pooler(scene.database.dsn_as("rowlock_node")) as pooler, psycopg.connect(pooler.dsn) as db:
        db.autocommit = True
        pooled = Store(db)
        assert pooled.connected(node, "beat", evidence=True) == "pooler"

    assert scene.node(node).evidence == "pooler"
    assert scene.node(node).beat_backend is None


def test_a_node_that_does_not_want_it_says_so(scene: Scene) -> None:
    node = scene.a_node()
    beat, work = scene.connected(node)

    assert beat.connected(node, "beat", evidence=False) == "off"
    assert work.connected(node, "work", evidence=False) == "off"
    scene.cut(beat, work)

    assert seek(scene, node) == NOTHING


def without_the_right_to_read(database: Database) -> psycopg.Connection[tuple[object, ...]]:
    """A superuser's transaction in which the owner may not see which backends live."""
    db = psycopg.connect(database.dsn)
    db.execute("REVOKE pg_read_all_stats FROM rowlock_owner")
    return db


def test_what_cannot_be_read_counts_as_alive(scene: Scene) -> None:
    """Otherwise every living node of another login would look dead."""
    node, claim = scene.a_claim(scene.gone())
    with without_the_right_to_read(scene.database) as db:
        found = db.execute(
            "SELECT acted FROM rowlock.recover_by_evidence(%s, %s, %s)",
            [uuid4(), node, scene.beat_of(node)],
        ).fetchone()
        answer = db.execute(
            "SELECT rowlock.connected(%s, 'beat', pg_backend_pid(), 1)", [node]
        ).fetchone()
        db.rollback()

    assert found == (False,)
    assert answer == ("unreadable",)
    assert scene.partition(claim).status == "CLAIMED"
    assert seek(scene, node).acted


def test_a_service_without_a_checkpointer_to_be_seen_is_told_from_a_missing_right(
    scene: Scene,
) -> None:
    """A grant would not help there, so none is advised."""
    node, claim = scene.a_claim(scene.gone())
    with psycopg.connect(scene.database.dsn) as db:
        db.execute(
            "CREATE OR REPLACE FUNCTION rowlock._server_runs_since() RETURNS timestamptz"
            " LANGUAGE sql STABLE AS 'SELECT NULL::timestamptz'"
        )
        found = db.execute(
            "SELECT acted FROM rowlock.recover_by_evidence(%s, %s, %s)",
            [uuid4(), node, scene.beat_of(node)],
        ).fetchone()
        answer = db.execute(
            "SELECT rowlock.connected(%s, 'beat', pg_backend_pid(), %s)", [node, 2**62]
        ).fetchone()
        told = db.execute(
            "SELECT evidence FROM rowlock.nodes WHERE node_id = %s", [node]
        ).fetchone()
        db.rollback()

    assert (found, answer, told) == ((False,), ("hidden",), ("hidden",))
    assert scene.partition(claim).status == "CLAIMED"


def test_an_announcement_that_comes_late_takes_the_place_of_none(scene: Scene) -> None:
    """The network delivers it after the node has connected again. Taken for the present one, its backend, which the
    server ends a moment later, would show a living node as gone."""
    node, claim = scene.a_claim()
    old_beat, old_work = scene.connected(node)
    scene.connected(node)

    for purpose, store in (("beat", old_beat), ("work", old_work)):
        store.connection.execute(
            "SELECT rowlock.connected(%s, %s, pg_backend_pid(), 1)", [node, purpose]
        )
    scene.cut(old_beat, old_work)

    assert seek(scene, node) == NOTHING
    assert scene.partition(claim).status == "CLAIMED"


def test_the_next_backend_under_the_same_pid_is_another(scene: Scene) -> None:
    node = scene.a_node()
    scene.connected(node)
    scene.admin.execute(
        "UPDATE rowlock.batch_nodes SET beat_backend.started_at = '2020-01-01',"
        " work_backend.started_at = '2020-01-01' WHERE node_id = %s",
        [node],
    )

    assert seek(scene, node).acted
