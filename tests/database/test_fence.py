"""The fence of ctx.transaction(): business rows stand only under a claim that stands (G3, G6)."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, LiteralString
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql

from rowlock.db.store import Store
from rowlock.protocol.model import Claim
from tests.support.builders import Run, Scene, a_policy, at_once

NOT_ARMED = "RL001"
GONE = "RL002"

Work = psycopg.Connection[Any]
"""A work connection: autocommit, read-only by default, as an executor opens it."""


@pytest.fixture
def work(scene: Scene) -> Generator[Work]:
    scene.admin.execute(
        "CREATE TABLE IF NOT EXISTS public.ledger (id bigserial, what text NOT NULL)"
    )
    scene.admin.execute("GRANT SELECT, INSERT, DELETE ON public.ledger TO PUBLIC")
    scene.admin.execute("GRANT USAGE ON SEQUENCE public.ledger_id_seq TO PUBLIC")
    with scene.database.connect(role="rowlock_node") as connection:
        connection.execute("SET default_transaction_read_only = on")
        yield connection


def ledger(scene: Scene) -> int:
    found = scene.one("SELECT count(*) AS n FROM public.ledger WHERE what = %s", scene.job)
    return int(found.n)


def write(work: Work, scene: Scene) -> None:
    work.execute("INSERT INTO public.ledger (what) VALUES (%s)", [scene.job])


def open_(work: Work, claim: Claim) -> int:
    work.execute("BEGIN READ WRITE")
    return int(value(work, "SELECT rowlock.fence_open(%s, %s)", claim.id, claim.token))


def arm(work: Work, fence: int, kind: str, body: str | None = "1") -> bool:
    return bool(value(work, "SELECT rowlock.fence_arm(%s, %s, %s)", fence, kind, body))


def value(work: Work, query: LiteralString, *parameters: object) -> Any:
    row = work.execute(query, parameters).fetchone()
    assert row is not None
    return row[0]


@contextmanager
def refused(state: str) -> Generator[None]:
    with pytest.raises(psycopg.Error) as caught:
        yield
    assert caught.value.sqlstate == state, caught.value


# -- armed -----------------------------------------------------------------------------------------


def test_rows_and_checkpoint_commit_together(scene: Scene, work: Work) -> None:
    _, claim = scene.a_claim()

    for n in (1, 2):
        fence = open_(work, claim)
        write(work, scene)
        assert arm(work, fence, "checkpoint", f'{{"after": {n}}}')
        work.execute("COMMIT")

    row = scene.partition(claim)
    assert (row.status, row.checkpoint, row.ended_at) == ("CLAIMED", {"after": 2}, None)
    assert ledger(scene) == 2


def test_rows_and_completion_commit_together(scene: Scene, work: Work) -> None:
    node, claim = scene.a_claim()

    fence = open_(work, claim)
    write(work, scene)
    arm(work, fence, "completion", '{"sum": 3}')
    assert scene.partition(claim).status == "CLAIMED"
    work.execute("COMMIT")

    row = scene.partition(claim)
    assert (row.status, row.result, row.checkpoint) == ("COMPLETED", {"sum": 3}, None)
    assert ledger(scene) == 1
    assert scene.counted(scene.run_of(claim)) == (1, 0, 0)
    assert scene.complete(node, claim) == ["completed"], "known when it is asked for by token"


def test_rows_and_the_end_of_the_execution_commit_together(scene: Scene, work: Work) -> None:
    run = scene.an_execution(0, policy=a_policy(has_finish=True))
    scene.advance(run)

    work.execute("BEGIN READ WRITE")
    fence = value(work, "SELECT rowlock.fence_open_finish(%s, %s)", run.id, run.epoch)
    write(work, scene)
    arm(work, fence, "finish", '{"total": 7}')
    work.execute("COMMIT")

    row = scene.execution(run)
    assert (row.status, row.summary) == ("COMPLETED", {"total": 7})
    assert ledger(scene) == 1


def test_a_rolled_back_transaction_leaves_nothing_and_the_claim_stands(
    scene: Scene, work: Work
) -> None:
    node, claim = scene.a_claim()
    fence = open_(work, claim)
    write(work, scene)
    arm(work, fence, "completion")

    work.execute("ROLLBACK")

    assert ledger(scene) == 0
    assert scene.all("SELECT FROM rowlock.batch_fences") == []
    assert scene.complete(node, claim) == ["completed"]


def test_fences_leave_no_rows_behind(scene: Scene, work: Work) -> None:
    _, claim = scene.a_claim()
    fence = open_(work, claim)
    arm(work, fence, "checkpoint")
    work.execute("COMMIT")

    assert scene.all("SELECT FROM rowlock.batch_fences") == []


# -- the claim is gone -------------------------------------------------------------------------------

Taken = Callable[[Scene, UUID, Claim], object]

WAYS_TO_LOSE: dict[str, Taken] = {
    "removed": lambda scene, node, claim: scene.remove(node),
    "released": lambda scene, node, claim: scene.release(node, claim),
    "released and claimed by the same node": lambda scene, node, claim: (
        scene.release(node, claim),
        scene.claim(node),
    ),
    "failed": lambda scene, node, claim: scene.fail(node, claim, "never"),
    "completed": lambda scene, node, claim: scene.complete(node, claim),
}


@pytest.mark.parametrize("how", WAYS_TO_LOSE)
@pytest.mark.parametrize("kind", ["checkpoint", "completion"])
def test_a_holder_whose_claim_is_gone_commits_nothing(
    scene: Scene, work: Work, how: str, kind: str
) -> None:
    node, claim = scene.a_claim()
    fence = open_(work, claim)
    write(work, scene)
    arm(work, fence, kind, '"stolen"')

    WAYS_TO_LOSE[how](scene, node, claim)
    before = scene.partition(claim)
    with refused(GONE):
        work.execute("COMMIT")

    assert ledger(scene) == 0
    assert scene.partition(claim) == before


@pytest.mark.parametrize("how", WAYS_TO_LOSE)
def test_a_holder_whose_claim_is_gone_opens_nothing(scene: Scene, work: Work, how: str) -> None:
    node, claim = scene.a_claim()
    WAYS_TO_LOSE[how](scene, node, claim)

    with refused(GONE):
        open_(work, claim)


def test_a_stranger_opens_no_fence(scene: Scene, work: Work) -> None:
    _, claim = scene.a_claim()

    work.execute("BEGIN READ WRITE")
    with refused(GONE):
        value(work, "SELECT rowlock.fence_open(%s, %s)", claim.id, uuid4())


def another_master(scene: Scene, run: Run) -> None:
    scene.remove(run.master)
    assert scene.store.adopt(scene.a_node(), run.id) is not None


@pytest.mark.parametrize("how", ["superseded", "cancelled", "finished"])
def test_finish_commits_nothing_after_the_mastership_or_the_execution_is_over(
    scene: Scene, work: Work, how: str
) -> None:
    run = scene.an_execution(0, policy=a_policy(has_finish=True))
    scene.advance(run)
    work.execute("BEGIN READ WRITE")
    fence = value(work, "SELECT rowlock.fence_open_finish(%s, %s)", run.id, run.epoch)
    write(work, scene)
    arm(work, fence, "finish", '"stolen"')

    if how == "superseded":
        another_master(scene, run)
    elif how == "cancelled":
        scene.store.cancel(run.id, "test", None)
    else:
        scene.store.finish(run.id, run.epoch, summary='"first"')
    with refused(GONE):
        work.execute("COMMIT")

    assert ledger(scene) == 0
    assert scene.execution(run).summary != "stolen"
    work.execute("BEGIN READ WRITE")
    with refused(GONE):
        value(work, "SELECT rowlock.fence_open_finish(%s, %s)", run.id, run.epoch)


def test_a_completion_by_commit_and_one_by_the_supervisor_count_once(
    scene: Scene, work: Work
) -> None:
    """The COMMIT's answer was lost and the supervisor asks while it is still on its way."""
    for _ in range(20):
        node, claim = scene.a_claim()
        fence = open_(work, claim)
        write(work, scene)
        arm(work, fence, "completion", '"by commit"')

        def commit() -> str:
            try:
                work.execute("COMMIT")
            except psycopg.Error as error:
                return str(error.sqlstate)
            return "committed"

        def ask(node: UUID = node, claim: Claim = claim) -> str:
            return scene.release(node, claim)[0]

        before = ledger(scene)
        committed, answer = at_once(commit, ask)

        assert (committed, answer, ledger(scene) - before) in {
            ("committed", "completed", 1),
            (GONE, "released", 0),
        }
        scene.store.cancel(claim.execution_id, "test", None)


def test_a_commit_that_waits_for_the_authors_rows_keeps_none_of_ours(
    scene: Scene, work: Work
) -> None:
    """A foreign key that is checked at COMMIT waits for a row which another attempt of the same node has locked.
    Were the completion written before, the node's counters would be locked meanwhile: its other completions
    and its removal would wait, and the other attempt's COMMIT would be a deadlock."""
    scene.admin.execute("CREATE TABLE public.account (id integer PRIMARY KEY)")
    scene.admin.execute("INSERT INTO public.account VALUES (1)")
    scene.admin.execute(
        "CREATE TABLE public.entry (account integer REFERENCES public.account DEFERRABLE INITIALLY DEFERRED)"
    )
    scene.admin.execute("GRANT ALL ON public.account, public.entry TO PUBLIC")
    run = scene.an_execution(3)
    node = scene.a_node()
    first, second, third = scene.claim(node, slots=3)
    fence = open_(work, first)
    work.execute("INSERT INTO public.entry VALUES (1)")
    arm(work, fence, "completion")

    with scene.database.connect(role="rowlock_node") as other:
        other_fence = open_(other, second)
        other.execute("SELECT FROM public.account WHERE id = 1 FOR UPDATE")
        arm(other, other_fence, "completion")
        with scene.started(Store(work), lambda store: store.connection.execute("COMMIT")):
            scene.store.connection.execute("SET lock_timeout = '1s'")
            assert scene.complete(node, third) == ["completed"]
            other.execute("COMMIT")

    assert scene.counted(run) == (3, 0, 0)


# -- attacks -----------------------------------------------------------------------------------------


def test_an_unarmed_commit_is_refused(scene: Scene, work: Work) -> None:
    node, claim = scene.a_claim()
    open_(work, claim)
    write(work, scene)

    with refused(NOT_ARMED):
        work.execute("COMMIT")

    assert ledger(scene) == 0
    assert scene.complete(node, claim) == ["completed"]


ATTACKS: dict[str, list[LiteralString]] = {
    "commit": ["COMMIT"],
    "end": ["END"],
    "commit and chain": ["COMMIT AND CHAIN"],
    "commit with more behind it": ["COMMIT; INSERT INTO public.ledger (what) VALUES ({what})"],
    "rollback with more behind it": [
        "ROLLBACK; INSERT INTO public.ledger (what) VALUES ({what})",
    ],
    "commit, then write": ["COMMIT", "INSERT INTO public.ledger (what) VALUES ({what})"],
    "rollback, then write": ["ROLLBACK", "INSERT INTO public.ledger (what) VALUES ({what})"],
    "constraints at once": ["SET CONSTRAINTS ALL IMMEDIATE", "COMMIT"],
    "the constraint at once": ["SET CONSTRAINTS rowlock.fence_check IMMEDIATE", "COMMIT"],
    "the fence deleted": ["DELETE FROM rowlock.batch_fences", "COMMIT"],
    "the fence emptied": ["TRUNCATE rowlock.batch_fences", "COMMIT"],
    "the trigger off": ["ALTER TABLE rowlock.batch_fences DISABLE TRIGGER ALL", "COMMIT"],
    "triggers off for the session": ["SET session_replication_role = replica", "COMMIT"],
    "armed by hand": ["UPDATE rowlock.batch_fences SET armed = 'checkpoint'", "COMMIT"],
    "prepared": ["PREPARE TRANSACTION 'rowlock'"],
    "a savepoint rolled back": [
        "SAVEPOINT s",
        "ROLLBACK TO s",
        "COMMIT",
    ],
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_an_author_may_try_keeps_nothing(scene: Scene, work: Work, attack: str) -> None:
    """Whatever of it raises: no business row stands, and the claim is what it was."""
    node, claim = scene.a_claim()
    before = scene.partition(claim)
    open_(work, claim)
    write(work, scene)

    refusals = 0
    for statement in ATTACKS[attack]:
        try:
            # One message of the simple protocol, as a string with several statements is.
            work.execute(sql.SQL(statement).format(what=sql.Literal(scene.job)))
        except psycopg.Error:
            refusals += 1
    work.execute("ROLLBACK")

    assert refusals > 0
    assert ledger(scene) == 0
    assert scene.partition(claim) == before
    assert scene.complete(node, claim) == ["completed"]


def test_even_a_superuser_does_not_commit_past_the_fence_by_accident(scene: Scene) -> None:
    """Demonstrations use one login for everything: what is a matter of rights elsewhere."""
    _, claim = scene.a_claim()
    scene.admin.execute(
        "CREATE TABLE IF NOT EXISTS public.ledger (id bigserial, what text NOT NULL)"
    )
    for statement in (
        "DELETE FROM rowlock.batch_fences",
        "SET LOCAL session_replication_role = replica",
        "SELECT 1",
    ):
        with scene.database.connect() as work:
            open_(work, claim)
            write(work, scene)
            work.execute(statement)
            with refused(NOT_ARMED):
                work.execute("COMMIT")

    assert ledger(scene) == 0


def test_arming_after_the_authors_own_commit_finds_no_fence(scene: Scene, work: Work) -> None:
    """rowlock arms just before its COMMIT: false means that the transaction is not the one it opened."""
    _, claim = scene.a_claim()
    fence = open_(work, claim)
    work.execute("ROLLBACK")
    work.execute("BEGIN READ WRITE")

    assert not arm(work, fence, "completion")
    work.execute("ROLLBACK")


def test_a_chained_transaction_is_not_the_one_that_was_fenced(scene: Scene, work: Work) -> None:
    """ROLLBACK AND CHAIN goes on READ WRITE, the one form that the server lets through: rowlock's own
    COMMIT, which arms first, refuses it. A second COMMIT of the author's would not, and voids G3."""
    _, claim = scene.a_claim()
    fence = open_(work, claim)

    work.execute("ROLLBACK AND CHAIN")
    write(work, scene)

    assert not arm(work, fence, "completion")
    work.execute("ROLLBACK")
    assert ledger(scene) == 0


def test_a_fence_of_a_partition_is_not_armed_as_a_finish_nor_the_other_way(
    scene: Scene, work: Work
) -> None:
    _, claim = scene.a_claim()
    fence = open_(work, claim)
    assert not arm(work, fence, "finish")
    work.execute("ROLLBACK")

    run = scene.an_execution(0, policy=a_policy(has_finish=True))
    scene.advance(run)
    work.execute("BEGIN READ WRITE")
    fence = value(work, "SELECT rowlock.fence_open_finish(%s, %s)", run.id, run.epoch)
    assert not arm(work, fence, "completion")
    work.execute("ROLLBACK")


def test_a_repeatable_read_transaction_conflicts_only_if_the_row_was_touched(
    scene: Scene, work: Work
) -> None:
    node, claim = scene.a_claim()
    for touch, state in ((False, None), (True, "40001")):
        work.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ WRITE")
        fence = value(work, "SELECT rowlock.fence_open(%s, %s)", claim.id, claim.token)
        write(work, scene)
        arm(work, fence, "checkpoint")
        if touch:
            scene.store.checkpoint(node, claim.id, claim.token, "5")
        if state:
            with refused(state):
                work.execute("COMMIT")
        else:
            work.execute("COMMIT")

    assert ledger(scene) == 1


# -- a frozen holder ---------------------------------------------------------------------------------


@pytest.mark.parametrize("armed", [False, True])
def test_a_frozen_holder_stands_in_nobodys_way(scene: Scene, work: Work, armed: bool) -> None:
    """Its transaction stays open: the reaper, the heir, a cancel and the end go past it."""
    node, claim = scene.a_claim()
    fence = open_(work, claim)
    write(work, scene)
    if armed:
        arm(work, fence, "completion")
    scene.store.connection.execute("SET lock_timeout = '1s'")

    assert scene.remove(node) == (1, 0)
    heir = scene.a_node()
    (again,) = scene.claim(heir)
    assert scene.store.checkpoint(heir, again.id, again.token, "1")
    assert scene.complete(heir, again) == ["completed"]
    assert scene.advance(scene.run_of(claim)) == "COMPLETED"

    with refused(GONE if armed else NOT_ARMED):
        work.execute("COMMIT")
    assert ledger(scene) == 0
