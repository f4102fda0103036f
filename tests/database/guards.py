"""Each guard of the SQL, a weaker form of it, and a scenario that tells the two apart.

A line of the migrations marked `-- guard: …` is a condition that a guarantee rests on. `guards()` finds
them; `MUTANTS` has, for each, the text that weakens exactly this condition and a scenario that passes on
the real function and fails on the weakened one. A guard without a mutant, or a mutant that survives its
scenario, fails the suite (test_guards.py).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, LiteralString
from uuid import UUID, uuid4

import psycopg

import rowlock.db
from rowlock.db.store import Store
from rowlock.protocol.model import Claim, Completion
from tests.support.builders import AT_LEAST_ONCE, AT_MOST_ONCE, HASH, Run, Scene, a_policy

MIGRATIONS: Final = Path(rowlock.db.__file__).parent / "sql" / "migrations"

# -- finding them ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """One marked line."""

    function: str
    text: str
    """What stands behind `-- guard:`."""
    ordinal: int
    """1 for the first guard of its function with this text."""
    source: str
    """The whole CREATE FUNCTION."""
    line: int
    """Which line of the source it is, from 0."""

    @property
    def key(self) -> str:
        """Its name: function, text, and a number where two have the same."""
        number = f" #{self.ordinal}" if self.ordinal > 1 else ""
        return f"{self.function}: {self.text}{number}"


_FUNCTION: Final = re.compile(
    r"^CREATE (?:OR REPLACE )?FUNCTION rowlock\.(\w+)\(.*?\$\$;$", re.MULTILINE | re.DOTALL
)
_GUARD: Final = re.compile(r"-- guard: (.+)$")


def functions() -> dict[str, str]:
    """The source of each function with a $$ body, as its last migration has it."""
    found: dict[str, str] = {}
    for file in sorted(MIGRATIONS.glob("*.sql")):
        for match in _FUNCTION.finditer(file.read_text()):
            found[match[1]] = match[0]
    return found


def guards() -> list[Guard]:
    """Every marked line, in the order of the migrations."""
    found: list[Guard] = []
    for function, source in functions().items():
        seen: dict[str, int] = {}
        for number, line in enumerate(source.splitlines()):
            if match := _GUARD.search(line):
                seen[match[1]] = seen.get(match[1], 0) + 1
                found.append(
                    Guard(
                        function=function,
                        text=match[1],
                        ordinal=seen[match[1]],
                        source=source,
                        line=number,
                    )
                )
    return found


def marks_in_the_files() -> int:
    """How many lines are marked, however they are written."""
    return sum(
        len(re.findall(r"-- *guard: ", file.read_text())) for file in MIGRATIONS.glob("*.sql")
    )


# -- weakening them ------------------------------------------------------------------------------------

Scenario = Callable[[Scene], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """How a guard is weakened, and what shows it."""

    old: str
    """Text of the guard's line, or of one of the few lines below it."""
    new: str
    scenario: Scenario
    dies_of: type[Exception] = AssertionError
    """Another class where a constraint of the schema catches the mutant as well."""


def weakened(guard: Guard, mutant: Mutant) -> str:
    """The source of the function with this one condition weakened."""
    lines = guard.source.splitlines()
    window = "\n".join(lines[guard.line : guard.line + 12])
    assert mutant.old in window, f"{guard.key}: {mutant.old!r} is not in\n{window}"
    changed = window.replace(mutant.old, mutant.new, 1)
    return "\n".join([*lines[: guard.line], *changed.splitlines(), *lines[guard.line + 12 :]])


@contextmanager
def replaced(scene: Scene, source: str, original: str) -> Generator[None]:
    """Run the block with another form of a function."""
    _create(scene, source)
    try:
        yield
    finally:
        _create(scene, original)


def _create(scene: Scene, source: str) -> None:
    statement = re.sub(r"^CREATE (OR REPLACE )?FUNCTION", "CREATE OR REPLACE FUNCTION", source)
    with scene.admin.transaction():
        scene.admin.execute("SET LOCAL ROLE rowlock_owner")
        scene.admin.execute("SET LOCAL search_path = rowlock, pg_temp")
        scene.admin.execute(statement.encode())


def described() -> list[str]:
    """The lines of the table in docs/protocol.md."""
    lines = ["| function | guard | weakened | noticed by |", "|---|---|---|---|"]
    for guard in guards():
        mutant = MUTANTS[guard.key]
        number = f" ({guard.ordinal})" if guard.ordinal > 1 else ""
        new = f"`{mutant.new.strip()}`" if mutant.new.strip() else "nothing"
        noticed = mutant.scenario.__name__.replace("_", " ")
        lines.append(
            f"| `{guard.function}` | {guard.text}{number} | `{mutant.old.strip()}`: {new} | {noticed} |"
        )
    return lines


# -- tools of the scenarios ----------------------------------------------------------------------------

EXECUTION: Final = "SELECT FROM rowlock.batch_job_coordination WHERE execution_id = %s FOR UPDATE"
INSTANCE: Final = "SELECT FROM rowlock.batch_instances WHERE instance_key = %s FOR UPDATE"


@contextmanager
def stopped_inside(
    scene: Scene, function: str, call: Callable[[Store], object]
) -> Generator[Callable[[], Any]]:
    """Start a call and stop it in the middle of the statement with which `function` looks.

    The statement has its snapshot then and has locked nothing. What the block does comes in between;
    the value that it gets lets the call go on and returns its answer.
    """
    original = functions()["_accepts"]
    gate = f"""
CREATE OR REPLACE FUNCTION rowlock._accepts(p_jobs jsonb, p_job text, p_hash text) RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    v_context text;
BEGIN
    GET DIAGNOSTICS v_context = PG_CONTEXT;
    IF v_context ~ '{function}\\(.*\\) line [0-9]+ at SQL statement' THEN
        PERFORM pg_advisory_lock_shared(4711);
        PERFORM pg_advisory_unlock_shared(4711);
    END IF;
    RETURN coalesce(p_jobs -> p_job ? p_hash, false);
END
$$;"""
    scene.admin.execute("SELECT pg_advisory_lock(4711)")
    store = scene.a_store()

    def go_on() -> Any:  # Any: what the call answers
        scene.admin.execute("SELECT pg_advisory_unlock(4711)")
        return running.result(timeout=10)

    try:
        with replaced(scene, gate, original), scene.started(store, call) as running:
            try:
                yield go_on
            finally:
                scene.admin.execute("SELECT pg_advisory_unlock_all()")
    finally:
        scene.admin.execute("SELECT pg_advisory_unlock_all()")


def waits(scene: Scene, call: Callable[[], object]) -> bool:
    """Whether a call on the scene's own connections waits for somebody's lock (half a second)."""
    for connection in (scene.admin, scene.store.connection):
        connection.execute("SET lock_timeout = '500ms'")
    try:
        call()
    except psycopg.errors.LockNotAvailable:
        return True
    finally:
        for connection in (scene.admin, scene.store.connection):
            connection.execute("RESET lock_timeout")
    return False


def heir_of(scene: Scene, run: Run) -> Run:
    """Another master; the one of `run` is history, although it lives."""
    assert scene.store.resign(run.master, run.id, run.epoch)
    heir = scene.a_node(slots=0, pool="masters")
    taken = scene.store.adopt(heir, run.id)
    assert taken is not None
    return Run(id=run.id, master=heir, epoch=taken.epoch, instance=run.instance)


@contextmanager
def removed_holder(scene: Scene, **request: Any) -> Generator[tuple[UUID, Claim]]:
    """A node that is REMOVED while its claim still stands, because the execution was locked."""
    node, claim = scene.a_claim(**request)
    with scene.held(EXECUTION, claim.execution_id):
        scene.remove(node)
        yield node, claim


def claimed_twice(scene: Scene, **request: Any) -> tuple[UUID, Claim, Claim]:
    """A node, a claim that it handed back, and its present claim on the same partition."""
    node, old = scene.a_claim(**request)
    scene.release(node, old, unstarted=True)
    (new,) = scene.claim(node, idle=True)
    assert new.id == old.id
    return node, old, new


def finishing(scene: Scene) -> Run:
    run = scene.an_execution(0, policy=a_policy(has_finish=True))
    assert scene.advance(run) == "FINISHING"
    return run


@contextmanager
def fenced(scene: Scene, claim: Claim) -> Generator[tuple[psycopg.Connection[Any], int]]:
    """An open transaction of an author under a fence, not armed yet."""
    with scene.database.connect(role="rowlock_node", autocommit=False) as work:
        opened = work.execute("SELECT rowlock.fence_open(%s, %s)", [claim.id, claim.token])
        row = opened.fetchone()
        assert row is not None
        yield work, row[0]
        work.rollback()


def commits(work: psycopg.Connection[Any]) -> bool:
    try:
        work.commit()
    except psycopg.Error as error:
        if error.sqlstate not in {"RL001", "RL002"}:
            raise
        return False
    return True


# -- nodes ---------------------------------------------------------------------------------------------


def a_removed_node_beats(scene: Scene) -> None:
    node = scene.a_node()
    scene.remove(node)
    assert not scene.store.beat(node, load=0, draining=False).alive


def a_living_master_is_offered(scene: Scene) -> None:
    scene.an_execution(1)
    assert not scene.store.beat(scene.a_node(), load=0, draining=False).adoptable


def a_beat_comes_before_the_mark(scene: Scene) -> None:
    node = scene.a_node()
    seen = scene.beat_of(node)
    scene.store.beat(node, load=0, draining=False)
    assert not scene.store.mark_unreachable(uuid4(), node, seen)


def a_node_is_removed_at_once(scene: Scene) -> None:
    node = scene.a_node()
    assert not scene.store.remove_node(uuid4(), node, scene.beat_of(node))[0]


def a_beat_comes_before_the_removal(scene: Scene) -> None:
    node = scene.a_node()
    seen = scene.beat_of(node)
    scene.suspect(node)
    scene.store.beat(node, load=0, draining=False)
    scene.suspect(node)
    assert not scene.store.remove_node(uuid4(), node, seen)[0]


def a_beat_comes_before_the_evidence(scene: Scene) -> None:
    node = scene.a_node()
    beat, work = scene.connected(node)
    seen = scene.beat_of(node)
    beat.beat(node, load=0, draining=False)
    scene.cut(beat, work)
    assert not scene.store.recover_by_evidence(uuid4(), node, seen).acted


def only_the_work_connection_is_gone(scene: Scene) -> None:
    node = scene.a_node()
    _, work = scene.connected(node)
    scene.cut(work)
    assert not scene.store.recover_by_evidence(uuid4(), node, scene.beat_of(node)).acted


def only_the_beats_connection_is_gone(scene: Scene) -> None:
    node = scene.a_node()
    beat, _ = scene.connected(node)
    scene.cut(beat)
    assert not scene.store.recover_by_evidence(uuid4(), node, scene.beat_of(node)).acted


def the_server_was_restarted_since(scene: Scene) -> None:
    node = scene.gone()
    scene.admin.execute(
        "UPDATE rowlock.batch_nodes SET beat_backend.server_runs_since = '2020-01-01',"
        " work_backend.server_runs_since = '2020-01-01' WHERE node_id = %s",
        [node],
    )
    assert not scene.store.recover_by_evidence(uuid4(), node, scene.beat_of(node)).acted


def a_pooler_lends_its_connection(scene: Scene) -> None:
    told = scene.store.connection.info.backend_pid + 1
    row = scene.store.connection.execute(
        "SELECT rowlock.connected(%s, 'beat', %s, 1)", [scene.a_node(), told]
    ).fetchone()
    assert row == ("pooler",)


def an_announcement_comes_late(scene: Scene) -> None:
    node = scene.a_node()
    first, _ = scene.connected(node)
    scene.connected(node)
    present = scene.node(node).beat_backend
    first.connection.execute("SELECT rowlock.connected(%s, 'beat', pg_backend_pid(), 1)", [node])
    assert scene.node(node).beat_backend == present


def a_start_is_held_by_a_node_that_is_gone(scene: Scene) -> None:
    node, claim = scene.a_claim(scene.gone(), delivery=AT_MOST_ONCE)
    scene.store.recover_by_evidence(uuid4(), node, scene.beat_of(node))
    assert scene.partition(claim).status == "CLAIMED"


def a_node_is_recovered_and_may_come_back(scene: Scene) -> None:
    node = scene.gone()
    scene.store.recover_by_evidence(uuid4(), node, scene.beat_of(node))
    assert scene.node(node).recovered_at is None


def a_start_is_lost(scene: Scene) -> None:
    node, claim = scene.a_claim(delivery=AT_MOST_ONCE)
    scene.remove(node)
    assert scene.partition(claim).status == "FAILED"


def a_node_is_lost_in_a_closing_execution(scene: Scene) -> None:
    node, claim = scene.a_claim()
    scene.store.cancel(claim.execution_id, "test", None)
    scene.remove(node)
    assert scene.partition(claim).status == "CANCELLED"


def a_recovery_meets_a_cancel(scene: Scene) -> None:
    node, claim = scene.a_claim()
    scene.suspect(node)
    reaping = scene.a_store()
    with reaping.connection.transaction():
        assert reaping.remove_node(uuid4(), node, scene.beat_of(node)) == (True, (1, 0, 0))
        assert waits(scene, lambda: scene.store.cancel(claim.execution_id, "test", None))


def a_neighbour_is_lost_in_its_last_attempt(scene: Scene) -> None:
    node, claim = scene.a_claim(policy=a_policy(max_attempts=1))
    scene.remove(node)
    assert scene.partition(claim).status == "PENDING"


def a_living_node_is_recovered(scene: Scene) -> None:
    _, claim = scene.a_claim()
    scene.store.recover(uuid4())
    assert scene.partition(claim).status == "CLAIMED"


def a_claim_commits_after_the_goodbye(scene: Scene) -> None:
    scene.an_execution(1)
    node, claiming = scene.a_node(), scene.a_store()
    with claiming.connection.transaction():
        assert scene.claim(node, store=claiming)
        assert waits(scene, lambda: scene.store.deregister(node, "test"))


# -- claims --------------------------------------------------------------------------------------------


def a_suspect_waits_beside_other_work(scene: Scene) -> None:
    scene.an_execution(1, policy=a_policy(max_attempts=1))
    lost = scene.a_node()
    scene.claim(lost)
    scene.remove(lost)
    assert scene.claim(scene.a_node(), slots=2, idle=False) == []


def a_cancel_comes_between_look_and_lock(scene: Scene) -> None:
    run, node = scene.an_execution(2), scene.a_node()
    with stopped_inside(
        scene, "claim", lambda s: s.claim(node, slots=2, idle=False, seed=1)
    ) as go_on:
        # As somebody would who knows only the second half: `stopping` alone is not the guard.
        scene.one("SELECT rowlock.cancel(%s, 'test', NULL)", run.id)
        scene.admin.execute(
            "UPDATE rowlock.batch_partitions SET status = 'PENDING', ended_at = NULL"
            " WHERE execution_id = %s",
            [run.id],
        )
        scene.admin.execute(
            "UPDATE rowlock.batch_job_coordination SET stopping = false WHERE execution_id = %s",
            [run.id],
        )
        assert go_on() == []


def an_end_meets_a_claim(scene: Scene) -> None:
    """Cancel would wait for the claimed row as well; whatever looks at no partition would not."""
    run, node, claiming = scene.an_execution(2), scene.a_node(), scene.a_store()
    with claiming.connection.transaction():
        assert scene.claim(node, store=claiming)
        assert waits(scene, lambda: scene.admin.execute(EXECUTION, [run.id]))


def a_removal_comes_between_look_and_lock(scene: Scene) -> None:
    scene.an_execution(2)
    node = scene.a_node()
    with stopped_inside(
        scene, "claim", lambda s: s.claim(node, slots=2, idle=False, seed=1)
    ) as go_on:
        scene.remove(node)
        assert go_on() == []


def a_drain_comes_between_look_and_lock(scene: Scene) -> None:
    scene.an_execution(2)
    node = scene.a_node()
    with stopped_inside(
        scene, "claim", lambda s: s.claim(node, slots=2, idle=False, seed=1)
    ) as go_on:
        scene.store.beat(node, load=0, draining=True)
        assert go_on() == []


def a_removal_meets_a_claim(scene: Scene) -> None:
    scene.an_execution(1)
    node, claiming = scene.a_node(), scene.a_store()
    with claiming.connection.transaction():
        assert scene.claim(node, store=claiming)
        scene.suspect(node)
        assert not scene.store.remove_node(uuid4(), node, scene.beat_of(node))[0]


def a_row_with_a_loss_is_prefetched(scene: Scene) -> None:
    scene.an_execution(3)
    lost = scene.a_node()
    scene.claim(lost, slots=3)
    scene.remove(lost)
    assert all(claim.started for claim in scene.claim(scene.a_node(), slots=1, prefetch=5))


def a_start_is_on_record(scene: Scene) -> None:
    run = scene.an_execution(["a"], delivery=AT_MOST_ONCE)
    scene.admin.execute(
        "INSERT INTO rowlock.batch_starts VALUES (%s, %s, 'main', 'a', %s, %s, %s, now())",
        [scene.job, run.instance, uuid4(), uuid4(), uuid4()],
    )
    assert scene.claim(scene.a_node()) == []


def a_removed_node_completes(scene: Scene) -> None:
    with removed_holder(scene) as (node, claim):
        assert scene.complete(node, claim) == ["lost"]


def a_removal_meets_a_completion(scene: Scene) -> None:
    node, claim = scene.a_claim()
    scene.suspect(node)
    completing = scene.a_store()
    with completing.connection.transaction():
        assert scene.complete(node, claim, store=completing) == ["completed"]
        assert not scene.store.remove_node(uuid4(), node, scene.beat_of(node))[0]


def an_old_attempt_completes(scene: Scene) -> None:
    node, old, _ = claimed_twice(scene)
    scene.store.complete(node, [Completion(id=old.id, token=old.token, result="1")])
    assert scene.partition(old).status == "CLAIMED"


def a_completion_is_repeated(scene: Scene) -> None:
    node, claim = scene.a_claim()
    scene.complete(node, claim, result="1")
    scene.complete(node, claim, result="2")
    assert scene.partition(claim).result == 1


def an_execution_ends_before_the_retry(scene: Scene) -> None:
    node, claim = scene.a_claim()
    failing = scene.a_store()
    with failing.connection.transaction():
        answer = failing.fail(
            node, claim.id, claim.token, error="{}", kind="retry", delay_seconds=0
        )
        assert answer == "retry"
        assert waits(scene, lambda: scene.store.cancel(claim.execution_id, "test", None))


def a_removed_node_fails(scene: Scene) -> None:
    node, claim = scene.a_claim()
    with scene.held(EXECUTION, claim.execution_id):
        scene.remove(node)
    assert scene.fail(node, claim, "never") == "lost"


def an_old_attempt_fails(scene: Scene) -> None:
    node, old, _ = claimed_twice(scene)
    scene.fail(node, old, "never")
    assert scene.partition(old).status == "CLAIMED"


def a_failure_is_repeated(scene: Scene) -> None:
    node, claim = scene.a_claim(policy=a_policy(max_attempts=5))
    scene.fail(node, claim, "never")
    scene.fail(node, claim, "retry")
    assert scene.partition(claim).status == "FAILED"


def at_most_once_work_raises(scene: Scene) -> None:
    node, claim = scene.a_claim(delivery=AT_MOST_ONCE, policy=a_policy(max_attempts=5))
    assert scene.fail(node, claim, "retry") == "failed"


def an_attempt_fails_in_a_closing_execution(scene: Scene) -> None:
    node, claim = scene.a_claim()
    scene.store.cancel(claim.execution_id, "test", None)
    assert scene.fail(node, claim, "retry") == "cancelled"


def an_unstarted_failure_meets_a_foreign_start(scene: Scene) -> None:
    """Its own record was replaced, for example by a restore: the other one must stay."""
    node, claim = scene.a_claim(delivery=AT_MOST_ONCE)
    other = uuid4()
    scene.admin.execute(
        "UPDATE rowlock.batch_starts SET claim_token = %s WHERE claim_token = %s",
        [other, claim.token],
    )
    scene.fail(node, claim, "unstarted")
    start = scene.start_of(claim)
    assert start is not None
    assert start.claim_token == other


def an_execution_ends_before_the_hand_back(scene: Scene) -> None:
    node, claim = scene.a_claim()
    releasing = scene.a_store()
    with releasing.connection.transaction():
        releasing.release(node, [(claim.id, claim.token)], unstarted=False)
        assert waits(scene, lambda: scene.store.cancel(claim.execution_id, "test", None))


def a_removed_node_releases(scene: Scene) -> None:
    node, claim = scene.a_claim()
    with scene.held(EXECUTION, claim.execution_id):
        scene.remove(node)
    assert scene.release(node, claim) == ["lost"]


def an_old_attempt_releases(scene: Scene) -> None:
    node, old, _ = claimed_twice(scene)
    scene.release(node, old)
    assert scene.partition(old).status == "CLAIMED"


def a_completed_row_is_released(scene: Scene) -> None:
    node, claim = scene.a_claim()
    scene.complete(node, claim)
    assert scene.release(node, claim) == ["completed"]


def a_start_is_released(scene: Scene) -> None:
    node, claim = scene.a_claim(delivery=AT_MOST_ONCE)
    assert scene.release(node, claim) == ["kept"]


def a_release_in_a_closing_execution(scene: Scene) -> None:
    node, claim = scene.a_claim()
    scene.store.cancel(claim.execution_id, "test", None)
    assert scene.release(node, claim) == ["cancelled"]
    assert scene.partition(claim).status == "CANCELLED"


def a_removed_node_writes_a_checkpoint(scene: Scene) -> None:
    with removed_holder(scene) as (node, claim):
        assert not scene.store.checkpoint(node, claim.id, claim.token, "1")


def a_report_comes_late(scene: Scene) -> None:
    node, claim = scene.a_claim()
    for told in (1, 2, 1):
        counters = f'{{"skipped": {told}, "told": [1, {told}]}}'
        assert scene.store.report(node, [(claim.id, claim.token, counters)]) == {claim.id}
    assert scene.partition(claim).counters["skipped"] == 2


def an_old_attempt_writes_a_checkpoint(scene: Scene) -> None:
    node, old, _ = claimed_twice(scene)
    assert not scene.store.checkpoint(node, old.id, old.token, "1")


def a_completed_row_gets_a_checkpoint(scene: Scene) -> None:
    node, claim = scene.a_claim()
    scene.complete(node, claim)
    assert not scene.store.checkpoint(node, claim.id, claim.token, "1")


def a_checkpoint_comes_late(scene: Scene) -> None:
    """Its answer was lost, so it was sent again; then the old connection delivers what it still had."""
    node, claim = scene.a_claim()
    for saves in (1, 2, 1):
        document = f'{{"after": {saves}, "saves": {saves}}}'
        assert scene.store.checkpoint(node, claim.id, claim.token, document)
    assert scene.partition(claim).checkpoint["after"] == 2


def evidence_of_an_old_start(scene: Scene) -> None:
    _, old, new = claimed_twice(scene, delivery=AT_MOST_ONCE)
    scene.store.record_evidence(old.id, old.token, {"outcome": "completed"})
    assert scene.start_of(new).evidence is None


# -- executions ------------------------------------------------------------------------------------------


def an_instance_is_launched_twice(scene: Scene) -> None:
    run = scene.an_execution(1)
    id_, outcome = scene.store.request(
        uuid4(),
        job=scene.job,
        contract_hash="contract-1",
        policy=a_policy(),
        delivery="AT_LEAST_ONCE",
        instance_key=run.instance,
        parameters="{}",
        pool=scene.pool,
    )
    assert (id_, outcome) == (run.id, "running")


def an_inactive_node_adopts(scene: Scene) -> None:
    id_, node = scene.a_request(), scene.a_node()
    scene.suspect(node)
    assert scene.store.adopt(node, id_) is None


def an_execution_ends_between_look_and_lock(scene: Scene) -> None:
    id_, node = scene.a_request(), scene.a_node()
    with stopped_inside(scene, "adopt", lambda s: s.adopt(node)) as go_on:
        assert scene.store.cancel(id_, "test", None) == "cancelled"
        assert go_on() is None
    assert scene.execution(id_).master_node is None


def a_suspend_comes_between_look_and_lock(scene: Scene) -> None:
    id_, node = scene.a_request(), scene.a_node()
    with stopped_inside(scene, "adopt", lambda s: s.adopt(node)) as go_on:
        assert scene.store.suspend(id_, "test", None) == "suspended"
        assert go_on() is None
    assert scene.execution(id_).status == "REQUESTED"


def a_living_master_is_replaced(scene: Scene) -> None:
    run = scene.an_execution(1)
    assert scene.store.adopt(scene.a_node(), run.id) is None


def an_old_mastership_is_given_back(scene: Scene) -> None:
    run = scene.an_execution(1)
    again = scene.store.adopt(run.master, run.id)
    assert again is not None
    assert not scene.store.resign(run.master, run.id, run.epoch)


def a_sealed_plan_is_added_to(scene: Scene) -> None:
    run = scene.an_execution(1)
    assert not scene.stage(run, ["late"], chunk=1)


def an_old_master_stages(scene: Scene) -> None:
    run = scene.a_plan_being_made()
    heir_of(scene, run)
    assert not scene.stage(run, ["a"])


def an_old_master_seals(scene: Scene) -> None:
    run = scene.a_plan_being_made()
    scene.stage(run, ["a"])
    heir_of(scene, run)
    assert scene.store.seal(run.id, run.epoch, "main", 1)[0] == "superseded"


def two_masters_have_staged(scene: Scene) -> None:
    run = scene.a_plan_being_made()
    scene.stage(run, ["a", "b"])
    heir = heir_of(scene, run)
    scene.stage(heir, ["c"])
    assert scene.store.seal(heir.id, heir.epoch, "main", 1) == ("sealed", None)


def a_cancel_while_work_runs(scene: Scene) -> None:
    _, claim = scene.a_claim()
    assert scene.store.cancel(claim.execution_id, "test", None) == "closing"


def a_partition_fails(scene: Scene) -> None:
    run, node = scene.an_execution(1), scene.a_node()
    scene.a_failure(node)
    assert scene.advance(run) == "FAILED"


def an_old_master_waits(scene: Scene, run: Run) -> None:
    """It has looked and waits for the instance's row while another takes over."""
    waiting = scene.a_store()
    with (
        scene.held(INSTANCE, run.instance) as holder,
        scene.started(waiting, lambda s: s.advance(run.master, run.id, run.epoch)) as looking,
    ):
        heir_of(scene, run)
        holder.rollback()
        assert looking.result(timeout=10).status == "SUPERSEDED"


def an_old_master_closes(scene: Scene) -> None:
    run = scene.an_execution(2)
    scene.store.connection.execute("SELECT rowlock.request_cancel(%s, 'test', NULL)", [run.id])
    an_old_master_waits(scene, run)
    assert scene.execution(run).status == "RUNNING"


def a_row_waits_again_while_it_closes(scene: Scene) -> None:
    """As after a failure that was written while the execution closed, had its lock been overlooked."""
    run, node = scene.an_execution(3), scene.a_node()
    (claim,) = scene.claim(node)
    scene.store.cancel(run.id, "test", None)
    scene.admin.execute(
        "UPDATE rowlock.batch_partitions SET status = 'PENDING', assigned_node = NULL WHERE id = %s",
        [claim.id],
    )
    assert scene.advance(run) == "CANCELLED"


def an_old_master_ends_the_step(scene: Scene) -> None:
    run = scene.an_execution(0)
    an_old_master_waits(scene, run)
    assert scene.execution(run).status == "RUNNING"


def an_old_master_stops_the_claims(scene: Scene) -> None:
    run = scene.an_execution(2, policy=a_policy(max_failed=0))
    node = scene.a_node()
    scene.a_failure(node)
    taking, waiting = scene.a_store(), scene.a_store()
    scene.store.resign(run.master, run.id, run.epoch)
    heir = scene.a_node(slots=0, pool="masters")
    with taking.connection.transaction():
        assert taking.adopt(heir, run.id) is not None
        with scene.started(waiting, lambda s: s.advance(run.master, run.id, run.epoch)):
            taking.connection.execute("COMMIT")
    assert not scene.execution(run).stopping


def an_old_master_gives_the_plan_up(scene: Scene) -> None:
    run = scene.a_plan_being_made()
    heir_of(scene, run)
    assert not scene.store.fail_plan(run.master, run.id, run.epoch, "Test", "late")


def an_old_master_finishes(scene: Scene) -> None:
    run = finishing(scene)
    heir_of(scene, run)
    assert scene.store.finish(run.id, run.epoch, summary="1") == "SUPERSEDED"


def a_cancel_after_the_end(scene: Scene) -> None:
    run = scene.an_execution(0)
    assert scene.advance(run) == "COMPLETED"
    before = scene.execution(run)
    scene.store.connection.execute("SELECT rowlock.request_cancel(%s, 'test', NULL)", [run.id])
    assert scene.execution(run) == before


# -- the fence -------------------------------------------------------------------------------------------


def a_stranger_opens_a_fence(scene: Scene) -> None:
    _, old, _ = claimed_twice(scene)
    with scene.database.connect(role="rowlock_node", autocommit=False) as work:
        refused = False
        try:
            work.execute("SELECT rowlock.fence_open(%s, %s)", [old.id, old.token])
        except psycopg.Error as error:
            refused = error.sqlstate == "RL002"
        work.rollback()
    assert refused


def a_fence_is_armed_for_something_else(scene: Scene) -> None:
    _, claim = scene.a_claim()
    with fenced(scene, claim) as (work, fence):
        armed = work.execute("SELECT rowlock.fence_arm(%s, 'finish', '1')", [fence]).fetchone()
        assert armed == (False,)


def an_author_commits(scene: Scene) -> None:
    _, claim = scene.a_claim()
    with fenced(scene, claim) as (work, _):
        assert not commits(work)


def finish_commits_twice(scene: Scene) -> None:
    run = finishing(scene)
    with scene.database.connect(role="rowlock_node", autocommit=False) as work:
        opened = work.execute("SELECT rowlock.fence_open_finish(%s, %s)", [run.id, run.epoch])
        work.execute("SELECT rowlock.fence_arm(%s, 'finish', '2')", opened.fetchone())
        scene.store.finish(run.id, run.epoch, summary="1")
        assert not commits(work)


def an_old_attempt_commits(scene: Scene) -> None:
    node, claim = scene.a_claim()
    with fenced(scene, claim) as (work, fence):
        work.execute("SELECT rowlock.fence_arm(%s, 'checkpoint', '1')", [fence])
        scene.release(node, claim)
        assert scene.claim(node)
        assert not commits(work)


def a_completed_attempt_commits(scene: Scene) -> None:
    node, claim = scene.a_claim()
    with fenced(scene, claim) as (work, fence):
        work.execute("SELECT rowlock.fence_arm(%s, 'completion', '2')", [fence])
        scene.complete(node, claim)
        assert not commits(work)


def a_claim_stands_while_its_holder_works(scene: Scene) -> None:
    _, claim = scene.a_claim()
    with fenced(scene, claim) as (work, _):
        found = scene.store.connection.execute("SELECT pid FROM rowlock.stranded_sessions()")
        assert (work.info.backend_pid,) not in found.fetchall()


# -- lifecycle -----------------------------------------------------------------------------------------


def a_suspended_request_waits(scene: Scene) -> None:
    scene.a_request(options={"suspended": True})
    assert not scene.store.beat(scene.a_node(), load=0, draining=False).adoptable


def a_suspended_execution_is_claimed(scene: Scene) -> None:
    run = scene.an_execution(2)
    scene.store.suspend(run.id, "test", None)
    assert scene.claim(scene.a_node()) == []


def limited(scene: Scene, parallelism: int, **request: Any) -> Run:
    return scene.an_execution(10, options={"parallelism": parallelism}, **request)


def two_claims_meet_at_a_limit(scene: Scene) -> None:
    limited(scene, 1)
    node, claiming = scene.a_node(), scene.a_store()
    with claiming.connection.transaction():
        assert scene.claim(node, store=claiming)
        assert waits(scene, lambda: scene.claim(node))


def more_is_wanted_than_the_limit(scene: Scene) -> None:
    limited(scene, 3)
    assert len(scene.claim(scene.a_node(), slots=8)) == 3


def the_last_place_goes_to_another(scene: Scene) -> None:
    """A claim of AT_MOST_ONCE work takes one row, whatever its share."""
    limited(scene, 1, delivery=AT_MOST_ONCE)
    node, first = scene.a_node(), scene.a_store()
    with first.connection.transaction():
        assert scene.claim(node, store=first)
        with scene.started(scene.a_store(), lambda s: scene.claim(node, store=s)) as second:
            first.connection.execute("COMMIT")
            assert second.result(timeout=10) == []


def relaunched(
    scene: Scene,
    run: Run,
    *,
    store: Store | None = None,
    launch_key: str | None = None,
    parameters: str = '{"month": 7}',
) -> str:
    """How a second launch of the instance ends."""
    return (store or scene.store).request(
        uuid4(),
        job=scene.job,
        contract_hash=HASH,
        policy=a_policy(),
        delivery=AT_LEAST_ONCE,
        instance_key=run.instance,
        launch_key=launch_key,
        parameters=parameters,
        pool=scene.pool,
    )[1]


def restarted(scene: Scene, of: Run, *, store: Store | None = None) -> str:
    """How a restart ends."""
    return (store or scene.store).restart(uuid4(), of.id, actor="test", reason=None)[1]


def cancelled(scene: Scene, **request: Any) -> Run:
    run = scene.an_execution(2, **request)
    scene.store.cancel(run.id, "test", None)
    return run


def doubtful(scene: Scene) -> Run:
    """An execution that has ended over one AT_MOST_ONCE partition that was started, "p0"."""
    run = scene.an_execution(2, delivery=AT_MOST_ONCE)
    scene.a_failure(scene.a_node())
    scene.store.cancel(run.id, "test", None)
    return run


def aged(scene: Scene, run: Run) -> None:
    scene.admin.execute(
        "UPDATE rowlock.batch_job_coordination SET ended_at = ended_at - interval '100 d'"
        " WHERE execution_id = %s",
        [run.id],
    )


def purged(scene: Scene, store: Store | None = None) -> None:
    month = 30 * 86_400.0
    (store or scene.store).retain(
        completed_seconds=month, failed_seconds=month, events_seconds=month, limit=1000
    )


def is_there(scene: Scene, run: Run) -> bool:
    return bool(scene.all(EXECUTION, run.id))


def two_launchers_restart(scene: Scene) -> None:
    run, one, other = cancelled(scene), scene.a_store(), scene.a_store()
    with (
        scene.held(INSTANCE, run.instance) as nobody,  # until both have seen that there is one
        scene.started(one, lambda s: relaunched(scene, run, store=s)) as first,
        scene.started(other, lambda s: relaunched(scene, run, store=s)) as second,
    ):
        nobody.rollback()
        answers = [first.result(timeout=10), second.result(timeout=10)]
    assert sorted(answers) == ["restarted", "running"]


def a_launch_is_asked_for_again_after_the_purge(scene: Scene) -> None:
    run, key = cancelled(scene), uuid4().hex
    scene.admin.execute(
        "UPDATE rowlock.batch_job_coordination SET launch_key = %s WHERE execution_id = %s",
        [key, run.id],
    )
    aged(scene, run)
    purged(scene)
    assert relaunched(scene, run, launch_key=key) == "exists"


def a_completed_instance_is_launched(scene: Scene) -> None:
    run = scene.an_execution(0)
    assert scene.advance(run) == "COMPLETED"
    assert relaunched(scene, run) == "completed"


def an_instance_is_launched_with_other_parameters(scene: Scene) -> None:
    assert relaunched(scene, cancelled(scene), parameters='{"month": 8}') == "parameters"


def a_start_is_in_the_plan_of_a_restart(scene: Scene) -> None:
    again = scene.a_restart(doubtful(scene))
    assert scene.statuses(again) == ["FAILED", "PENDING"]


def a_completed_row_is_in_the_plan_of_a_restart(scene: Scene) -> None:
    run, node = scene.an_execution(2), scene.a_node()
    scene.complete(node, *scene.claim(node))
    scene.store.cancel(run.id, "test", None)
    assert scene.statuses(scene.a_restart(run)) == ["PENDING"]


def two_people_restart(scene: Scene) -> None:
    run, first = cancelled(scene), scene.a_store()
    with first.connection.transaction():
        assert restarted(scene, run, store=first) == "restarted"
        with scene.started(scene.a_store(), lambda s: restarted(scene, run, store=s)) as second:
            first.connection.execute("COMMIT")
            assert second.result(timeout=10) == "superseded"


def an_old_execution_is_restarted(scene: Scene) -> None:
    run = cancelled(scene)
    scene.store.cancel(scene.a_restart(run).id, "test", None)
    assert restarted(scene, run) == "superseded"


def a_completed_execution_is_restarted(scene: Scene) -> None:
    run = scene.an_execution(0)
    assert scene.advance(run) == "COMPLETED"
    assert restarted(scene, run) == "completed"


def a_suspend_after_the_end(scene: Scene) -> None:
    run = cancelled(scene)
    assert scene.store.suspend(run.id, "test", None) == "cancelled"


def a_limit_after_the_end(scene: Scene) -> None:
    run = cancelled(scene)
    assert scene.store.set_limits(run.id, {"priority": 3}, "test", None) == "cancelled"


SET_LIMIT: Final = "SELECT rowlock.set_limits(%s, '{\"parallelism\": 3}', 'test', NULL)"


def a_new_limit_meets_a_claim(scene: Scene) -> None:
    run, node, claiming = scene.an_execution(5), scene.a_node(), scene.a_store()
    with claiming.connection.transaction():
        assert scene.claim(node, store=claiming)
        scene.one(SET_LIMIT, run.id)
        assert waits(scene, lambda: scene.one(SET_LIMIT, run.id))


def a_pass_over_new_limits_meets_a_claim(scene: Scene) -> None:
    run, node, claiming = scene.an_execution(5), scene.a_node(), scene.a_store()
    with claiming.connection.transaction():
        assert scene.claim(node, store=claiming)
        scene.one(SET_LIMIT, run.id)
        scene.store.expire("test")
        assert scene.claim(node, slots=3) == []


def a_limit_is_set_between_look_and_lock(scene: Scene) -> None:
    run, node = scene.an_execution(5), scene.a_node()
    with stopped_inside(
        scene, "claim", lambda s: s.claim(node, slots=4, prefetch=0, idle=False, seed=1)
    ) as go_on:
        assert scene.store.set_limits(run.id, {"parallelism": 1}, "test", None) == "changed"
        assert len(go_on()) == 1


def a_completed_execution_is_abandoned(scene: Scene) -> None:
    run = scene.an_execution(0)
    scene.advance(run)
    assert scene.people.abandon(run.id, "test", None) == "completed"


def an_old_execution_is_abandoned(scene: Scene) -> None:
    run = cancelled(scene)
    scene.a_restart(run)
    assert scene.people.abandon(run.id, "test", None) == "superseded"


def refused(scene: Scene, query: LiteralString, *parameters: Any) -> bool:
    """Whether a function says that this is not the moment."""
    try:
        scene.all(query, *parameters)
    except psycopg.Error as error:
        if error.sqlstate != "RL004":
            raise
        return True
    return False


def an_abandon_meets_a_completion(scene: Scene) -> None:
    node, claim = scene.a_claim()
    completing = scene.a_store()
    with completing.connection.transaction():
        scene.complete(node, claim, store=completing)
        assert refused(scene, "SELECT rowlock._abandon(%s, 'test', NULL)", claim.execution_id)
        completing.connection.execute("COMMIT")
    assert scene.people.abandon(claim.execution_id, "test", None) == "abandoned"
    assert scene.execution(claim.execution_id).counts["completed"] == 1


def a_start_is_abandoned(scene: Scene) -> None:
    _, claim = scene.a_claim(delivery=AT_MOST_ONCE)
    scene.people.abandon(claim.execution_id, "test", None)
    assert scene.partition(claim).status == "FAILED"


def resolved(
    scene: Scene, run: Run, how: str = "retry", *, key: str = "p0", store: Store | None = None
) -> str:
    return (store or scene.people).resolve(run.id, key, how, actor="test", reason=None)


def a_restart_meets_a_resolution(scene: Scene) -> None:
    run, resolving = doubtful(scene), scene.a_store(role="rowlock_admin")
    with resolving.connection.transaction():
        assert resolved(scene, run, store=resolving) == "resolved"
        assert waits(scene, lambda: restarted(scene, run))


def an_old_execution_is_resolved(scene: Scene) -> None:
    run = doubtful(scene)
    scene.a_restart(run)
    assert resolved(scene, run) == "superseded"


def a_cancelled_row_is_resolved(scene: Scene) -> None:
    assert resolved(scene, doubtful(scene), "completed", key="p1") == "not_failed"


def an_orphan_still_runs(scene: Scene) -> None:
    run, node = scene.an_execution(1, delivery=AT_MOST_ONCE), scene.a_node()
    (claim,) = scene.claim(node)
    scene.remove(node)
    scene.advance(run)
    orphan = {"partition_id": claim.id, "token": str(claim.token)}
    scene.store.beat(scene.a_node(), load=1, draining=False, orphans=[orphan])
    assert resolved(scene, run) == "orphan"


def only_the_first_of_a_chain_is_old(scene: Scene) -> None:
    run = cancelled(scene)
    again = scene.a_restart(run)
    scene.store.cancel(again.id, "test", None)
    aged(scene, run)
    purged(scene)
    assert is_there(scene, run)
    assert is_there(scene, again)


def a_purge_meets_a_restart(scene: Scene) -> None:
    run, restarting = cancelled(scene), scene.a_store()
    aged(scene, run)
    with restarting.connection.transaction():
        assert restarted(scene, run, store=restarting) == "restarted"
        assert not waits(scene, lambda: purged(scene))
    assert is_there(scene, run)


def a_removed_node_has_claims_left(scene: Scene) -> None:
    with removed_holder(scene) as (node, _):
        scene.admin.execute(
            "UPDATE rowlock.batch_nodes SET removed_at = removed_at - interval '100 d'"
            " WHERE node_id = %s",
            [node],
        )
        purged(scene)
        scene.node(node)


def reported(scene: Scene, node: UUID, claim: Claim) -> bool:
    return claim.id in scene.store.report(node, [(claim.id, claim.token, '{"done": 1}')])


def a_removed_node_reports(scene: Scene) -> None:
    with removed_holder(scene) as (node, claim):
        assert not reported(scene, node, claim)


def an_old_attempt_reports(scene: Scene) -> None:
    node, old, _ = claimed_twice(scene)
    assert not reported(scene, node, old)


def a_completed_row_is_reported(scene: Scene) -> None:
    node, claim = scene.a_claim()
    scene.complete(node, claim)
    assert not reported(scene, node, claim)


def locked(scene: Scene, node: UUID, claim: Claim, *, store: Store | None = None) -> str:
    return (store or scene.store).acquire_lock(node, claim.id, claim.token, scene.job)


def a_claim_that_was_taken_again_holds_a_lock(scene: Scene) -> None:
    node, claim = scene.a_claim()
    assert locked(scene, node, claim) == "acquired"
    scene.release(node, claim)
    (again,) = scene.claim(node, idle=True)
    assert again.id == claim.id
    assert locked(scene, *scene.a_claim()) == "acquired"


def a_completed_claim_holds_a_lock(scene: Scene) -> None:
    node, claim = scene.a_claim()
    assert locked(scene, node, claim) == "acquired"
    scene.complete(node, claim)
    assert locked(scene, *scene.a_claim()) == "acquired"


def a_removed_node_asks_for_a_lock(scene: Scene) -> None:
    with removed_holder(scene) as (node, claim):
        assert locked(scene, node, claim) == "lost"


def an_old_attempt_asks_for_a_lock(scene: Scene) -> None:
    node, old, _ = claimed_twice(scene)
    assert locked(scene, node, old) == "lost"


def a_lock_is_held(scene: Scene) -> None:
    assert locked(scene, *scene.a_claim()) == "acquired"
    assert locked(scene, *scene.a_claim()) == "busy"


def a_dead_holder(scene: Scene) -> None:
    node, claim = scene.a_claim()
    assert locked(scene, node, claim) == "acquired"
    scene.release(node, claim)
    scene.store.cancel(claim.execution_id, "test", None)


def two_take_over_a_lock(scene: Scene) -> None:
    a_dead_holder(scene)
    (one, first), (two, second) = scene.a_claim(), scene.a_claim()
    taking, asking = scene.a_store(), scene.a_store()
    with taking.connection.transaction():
        assert locked(scene, one, first, store=taking) == "acquired"
        with scene.started(asking, lambda store: locked(scene, two, second, store=store)) as answer:
            taking.connection.execute("COMMIT")
            assert answer.result() == "busy"


def an_old_attempt_gives_a_lock_back(scene: Scene) -> None:
    a_dead_holder(scene)
    node, claim = scene.a_claim()
    assert locked(scene, node, claim) == "acquired"
    assert not scene.store.release_lock(uuid4(), scene.job)
    assert locked(scene, *scene.a_claim()) == "busy"


def a_lock_is_given_back_late(scene: Scene) -> None:
    """The release was sent twice, and the first one arrives when the claim has the lock again."""
    node, claim = scene.a_claim()
    for number in (1, 2):
        answer = scene.store.acquire_lock(node, claim.id, claim.token, scene.job, number)
        assert answer == "acquired"
        scene.store.release_lock(claim.token, scene.job, 1)
    assert locked(scene, *scene.a_claim()) == "busy"


def a_purge_passes_a_held_lock(scene: Scene) -> None:
    assert locked(scene, *scene.a_claim()) == "acquired"
    purged(scene)
    assert locked(scene, *scene.a_claim()) == "busy"


def a_purge_meets_a_lock_that_is_taken_over(scene: Scene) -> None:
    a_dead_holder(scene)
    taking, purging = scene.a_store(), scene.a_store()
    with taking.connection.transaction():
        assert locked(scene, *scene.a_claim(), store=taking) == "acquired"
        with scene.started(purging, lambda store: purged(scene, store)):
            taking.connection.execute("COMMIT")
    assert locked(scene, *scene.a_claim()) == "busy"


# -- which belongs to which ------------------------------------------------------------------------------

TOKEN: Final = "only the claim that was taken"
TERMINAL: Final = "terminal states never change"
NOT_PENDING: Final = "nothing becomes PENDING in an execution that ends"
CHECK: Final = psycopg.errors.CheckViolation

MUTANTS: Final[dict[str, Mutant]] = {
    "beat: a removed incarnation never beats again": Mutant(
        old="n.status <> 'REMOVED'", new="true", scenario=a_removed_node_beats, dies_of=CHECK
    ),
    "_adoptable: a living master is never replaced": Mutant(
        old="m.status <> 'REMOVED'", new="false", scenario=a_living_master_is_offered
    ),
    "mark_unreachable: only the beat that was watched": Mutant(
        old="beat = p_beat", new="true", scenario=a_beat_comes_before_the_mark
    ),
    "remove_node: two phases": Mutant(
        old="n.status = 'UNREACHABLE'", new="true", scenario=a_node_is_removed_at_once
    ),
    "remove_node: only the beat that was watched": Mutant(
        old="n.beat = p_beat", new="true", scenario=a_beat_comes_before_the_removal
    ),
    "connected: what a pooler lends and takes proves nothing": Mutant(
        old="p_client_pid <> pg_backend_pid()",
        new="false",
        scenario=a_pooler_lends_its_connection,
    ),
    "connected: none takes the place of a later one": Mutant(
        old="p_number > CASE", new="0 <= CASE", scenario=an_announcement_comes_late
    ),
    "_is_gone: only the server that knew it can miss it": Mutant(
        old="(p_backend).server_runs_since = rowlock._server_runs_since()",
        new="true",
        scenario=the_server_was_restarted_since,
    ),
    "recover_by_evidence: only the beat that was watched": Mutant(
        old="n.beat = p_beat", new="true", scenario=a_beat_comes_before_the_evidence
    ),
    "recover_by_evidence: a node that can beat lives": Mutant(
        old="rowlock._is_gone(n.beat_backend)",
        new="true",
        scenario=only_the_work_connection_is_gone,
    ),
    "recover_by_evidence: a node that can work lives": Mutant(
        old="rowlock._is_gone(n.work_backend)",
        new="true",
        scenario=only_the_beats_connection_is_gone,
    ),
    "_recover_claims: AT_MOST_ONCE waits for the removal": Mutant(
        old="p.delivery = 'AT_LEAST_ONCE'",
        new="true",
        scenario=a_start_is_held_by_a_node_that_is_gone,
    ),
    "_recover_claims: a node that may come back claims again": Mutant(
        old="n.status = 'REMOVED'", new="true", scenario=a_node_is_recovered_and_may_come_back
    ),
    "_recover_claims: it cannot begin to end before its rows are PENDING": Mutant(
        old="FOR KEY SHARE SKIP LOCKED", new="", scenario=a_recovery_meets_a_cancel
    ),
    "_recover_claims: a lost AT_MOST_ONCE start is never repeated": Mutant(
        old="'FAILED'", new="'PENDING'", scenario=a_start_is_lost
    ),
    "_recover_claims: the last loss is never a neighbour's fault": Mutant(
        old="WHEN p.alone ", new="WHEN true ", scenario=a_neighbour_is_lost_in_its_last_attempt
    ),
    f"_recover_claims: {NOT_PENDING}": Mutant(
        old="'CANCELLED'", new="'PENDING'", scenario=a_node_is_lost_in_a_closing_execution
    ),
    "recover: only of owners that are gone": Mutant(
        old="n.status <> 'REMOVED'", new="false", scenario=a_living_node_is_recovered
    ),
    "deregister: no claim of this node commits after it left": Mutant(
        old="FOR UPDATE", new="FOR NO KEY UPDATE", scenario=a_claim_commits_after_the_goodbye
    ),
    "claim: a suspect runs alone": Mutant(
        old="NOT p_idle", new="false", scenario=a_suspect_waits_beside_other_work
    ),
    "claim: no claim in an execution that is ending": Mutant(
        old="e.status = 'RUNNING'", new="true", scenario=a_cancel_comes_between_look_and_lock
    ),
    "claim: whoever locks the execution sees this claim": Mutant(
        old="FOR KEY SHARE OF e SKIP LOCKED", new="", scenario=an_end_meets_a_claim
    ),
    "claim: an unreachable or removed node claims nothing": Mutant(
        old="n.status = 'ACTIVE'", new="true", scenario=a_removal_comes_between_look_and_lock
    ),
    "claim: a draining node claims nothing": Mutant(
        old="NOT n.draining", new="true", scenario=a_drain_comes_between_look_and_lock
    ),
    "claim: nobody removes this node before the claim commits": Mutant(
        old="FOR KEY SHARE", new="", scenario=a_removal_meets_a_claim
    ),
    "claim: a row with a loss in its history is never prefetched": Mutant(
        old="t.lost = 0", new="true", scenario=a_row_with_a_loss_is_prefetched
    ),
    "claim: one start for ever, over all executions of the instance": Mutant(
        old="ON CONFLICT DO NOTHING",
        new="ON CONFLICT (job_name, instance_key, step, partition_key)"
        " DO UPDATE SET claim_token = excluded.claim_token",
        scenario=a_start_is_on_record,
    ),
    "complete: a removed node completes nothing": Mutant(
        old="n.status <> 'REMOVED'", new="true", scenario=a_removed_node_completes
    ),
    "complete: nobody removes this node before its completions commit": Mutant(
        old="FOR KEY SHARE", new="", scenario=a_removal_meets_a_completion
    ),
    f"complete: {TOKEN}": Mutant(
        old="p.id = p_ids[array_position(p_tokens, p.claim_token)]",
        new="true",
        scenario=an_old_attempt_completes,
    ),
    f"complete: {TERMINAL}": Mutant(
        old="p.status COLLATE \"C\" = 'CLAIMED'", new="true", scenario=a_completion_is_repeated
    ),
    "fail: it cannot begin to end before its row is PENDING": Mutant(
        old="FOR KEY SHARE", new="", scenario=an_execution_ends_before_the_retry
    ),
    "fail: a removed node fails nothing": Mutant(
        old="status <> 'REMOVED'", new="true", scenario=a_removed_node_fails
    ),
    f"fail: {TOKEN}": Mutant(
        old="p.claim_token = p_token", new="true", scenario=an_old_attempt_fails
    ),
    f"fail: {TERMINAL}": Mutant(
        old="v_row.status <> 'CLAIMED'", new="false", scenario=a_failure_is_repeated
    ),
    "fail: AT_MOST_ONCE work is never retried": Mutant(
        old="v_row.delivery = 'AT_MOST_ONCE'", new="false", scenario=at_most_once_work_raises
    ),
    f"fail: {NOT_PENDING}": Mutant(
        old="v_execution.status <> 'RUNNING'",
        new="false",
        scenario=an_attempt_fails_in_a_closing_execution,
    ),
    "fail: its own start, no other": Mutant(
        old="s.claim_token = p_token",
        new="true",
        scenario=an_unstarted_failure_meets_a_foreign_start,
    ),
    "release: it cannot begin to end before its rows are PENDING": Mutant(
        old="FOR KEY SHARE", new="", scenario=an_execution_ends_before_the_hand_back
    ),
    "release: a removed node releases nothing": Mutant(
        old="n.status <> 'REMOVED'", new="true", scenario=a_removed_node_releases
    ),
    f"release: {TOKEN}": Mutant(
        old="p.claim_token = s.token", new="true", scenario=an_old_attempt_releases
    ),
    f"release: {TERMINAL}": Mutant(
        old="p.status COLLATE \"C\" = 'CLAIMED'", new="true", scenario=a_completed_row_is_released
    ),
    "release: a start is not handed back": Mutant(
        old="(p.delivery = 'AT_LEAST_ONCE' OR p_unstarted)",
        new="true",
        scenario=a_start_is_released,
    ),
    f"release: {NOT_PENDING}": Mutant(
        old="'CANCELLED'",
        new="'PENDING'",
        scenario=a_release_in_a_closing_execution,
        dies_of=CHECK,
    ),
    "checkpoint: a removed node writes no checkpoint": Mutant(
        old="status <> 'REMOVED'", new="true", scenario=a_removed_node_writes_a_checkpoint
    ),
    f"checkpoint: {TOKEN}": Mutant(
        old="claim_token = p_token", new="true", scenario=an_old_attempt_writes_a_checkpoint
    ),
    f"checkpoint: {TERMINAL}": Mutant(
        old="status COLLATE \"C\" = 'CLAIMED'",
        new="true",
        scenario=a_completed_row_gets_a_checkpoint,
    ),
    "checkpoint: none takes the place of a later one": Mutant(
        old="coalesce((p_checkpoint ->> 'saves')::bigint > (checkpoint ->> 'saves')::bigint, true)",
        new="true",
        scenario=a_checkpoint_comes_late,
    ),
    "report: a removed node reports nothing": Mutant(
        old="status <> 'REMOVED'", new="true", scenario=a_removed_node_reports
    ),
    "report: none takes the place of a later one": Mutant(
        old="coalesce(s.counters -> 'told' > p.counters -> 'told', true)",
        new="true",
        scenario=a_report_comes_late,
    ),
    f"report: {TOKEN}": Mutant(
        old="p.claim_token = s.token", new="true", scenario=an_old_attempt_reports
    ),
    f"report: {TERMINAL}": Mutant(
        old="p.status COLLATE \"C\" = 'CLAIMED'", new="true", scenario=a_completed_row_is_reported
    ),
    f"_stands: {TOKEN}": Mutant(
        old="p.claim_token = p_token",
        new="true",
        scenario=a_claim_that_was_taken_again_holds_a_lock,
    ),
    "_stands: what has ended holds nothing": Mutant(
        old="p.status COLLATE \"C\" = 'CLAIMED'",
        new="true",
        scenario=a_completed_claim_holds_a_lock,
    ),
    "acquire_lock: a removed node takes no lock": Mutant(
        old="n.status <> 'REMOVED'", new="true", scenario=a_removed_node_asks_for_a_lock
    ),
    "acquire_lock: only for a claim that stands": Mutant(
        old="rowlock._stands(p_id, p_token)", new="true", scenario=an_old_attempt_asks_for_a_lock
    ),
    "acquire_lock: who holds a lock keeps it": Mutant(
        old="rowlock._stands(v_holder.partition_id, v_holder.claim_token)",
        new="false",
        scenario=a_lock_is_held,
    ),
    "acquire_lock: it is taken over only from who was seen to be gone": Mutant(
        old="l.claim_token = v_holder.claim_token", new="true", scenario=two_take_over_a_lock
    ),
    "release_lock: nobody gives back the lock of another": Mutant(
        old="l.claim_token = p_token", new="true", scenario=an_old_attempt_gives_a_lock_back
    ),
    "release_lock: what was acquired again stays": Mutant(
        old="l.number <= p_number", new="true", scenario=a_lock_is_given_back_late
    ),
    "retain: who holds a lock keeps it": Mutant(
        old="NOT rowlock._stands(o.partition_id, o.claim_token)",
        new="true",
        scenario=a_purge_passes_a_held_lock,
    ),
    "retain: a lock that was taken over meanwhile stays": Mutant(
        old="l.claim_token = void.claim_token",
        new="true",
        scenario=a_purge_meets_a_lock_that_is_taken_over,
    ),
    "record_evidence: evidence of this start, no other": Mutant(
        old="s.claim_token = p_token", new="true", scenario=evidence_of_an_old_start
    ),
    "request_execution: one launcher wins": Mutant(
        old="v_digest);",
        new="v_digest) ON CONFLICT DO NOTHING;",
        scenario=an_instance_is_launched_twice,
    ),
    "adopt: only an active node becomes master": Mutant(
        old="n.status = 'ACTIVE'", new="true", scenario=an_inactive_node_adopts
    ),
    "adopt: it may have ended between the look and the lock": Mutant(
        old="e.ended_at IS NULL", new="true", scenario=an_execution_ends_between_look_and_lock
    ),
    "adopt: compare and set; a living master is never replaced": Mutant(
        old="m.status <> 'REMOVED'", new="false", scenario=a_living_master_is_replaced
    ),
    "resign: only the current mastership is given back": Mutant(
        old="master_epoch = p_epoch", new="true", scenario=an_old_mastership_is_given_back
    ),
    "stage: nothing is added to a sealed plan": Mutant(
        old="status = 'PLANNING'", new="true", scenario=a_sealed_plan_is_added_to
    ),
    "stage: only the current master plans": Mutant(
        old="master_epoch = p_epoch", new="true", scenario=an_old_master_stages
    ),
    "seal: a plan is sealed once, by the current master": Mutant(
        old="v_execution.master_epoch <> p_epoch", new="false", scenario=an_old_master_seals
    ),
    "seal: nothing of an earlier master's plan": Mutant(
        old="s.epoch = p_epoch", new="true", scenario=two_masters_have_staged
    ),
    "_settle: an execution ends when nothing of it can still change": Mutant(
        old="rowlock._is_live(p_execution)", new="false", scenario=a_cancel_while_work_runs
    ),
    "_settle: never COMPLETED over partitions that failed": Mutant(
        old="v_failed > v_allowed", new="false", scenario=a_partition_fails
    ),
    "advance: what still waits, or waits again, in an execution that closes is cancelled": Mutant(
        old="rowlock._is_waiting(p_execution)",
        new="false",
        scenario=a_row_waits_again_while_it_closes,
    ),
    "advance: only the current master closes": Mutant(
        old="v_execution.master_epoch = p_epoch", new="true", scenario=an_old_master_closes
    ),
    "advance: only the current master ends a step": Mutant(
        old="v_execution.master_epoch = p_epoch", new="true", scenario=an_old_master_ends_the_step
    ),
    "advance: only the current master stops the claims": Mutant(
        old="e.master_epoch = p_epoch", new="true", scenario=an_old_master_stops_the_claims
    ),
    "fail_plan: only the current master gives a plan up": Mutant(
        old="v_execution.master_epoch = p_epoch",
        new="true",
        scenario=an_old_master_gives_the_plan_up,
    ),
    "finish: finish() takes effect once, by the current master": Mutant(
        old="v_execution.master_epoch <> p_epoch", new="false", scenario=an_old_master_finishes
    ),
    f"request_cancel: {TERMINAL}": Mutant(
        old="e.ended_at IS NULL", new="true", scenario=a_cancel_after_the_end
    ),
    f"fence_open: {TOKEN}": Mutant(
        old="claim_token = p_token", new="true", scenario=a_stranger_opens_a_fence
    ),
    "fence_arm: a fence is armed for what it guards": Mutant(
        old="(p_kind = 'finish') = (execution_id IS NOT NULL)",
        new="true",
        scenario=a_fence_is_armed_for_something_else,
    ),
    "_fence_check: only rowlock commits": Mutant(
        old="v_fence.armed IS NULL", new="false", scenario=an_author_commits
    ),
    "_fence_check: the transaction of finish() takes effect once": Mutant(
        old="v_execution.status <> 'FINISHING'", new="false", scenario=finish_commits_twice
    ),
    "_fence_check: business rows only of the claim that was taken": Mutant(
        old="p.claim_token = v_fence.claim_token", new="true", scenario=an_old_attempt_commits
    ),
    f"_fence_check: {TERMINAL}": Mutant(
        old="p.status COLLATE \"C\" = 'CLAIMED'",
        new="true",
        scenario=a_completed_attempt_commits,
    ),
    "stranded_sessions: the transaction of a claim that stands is its holder's": Mutant(
        old="p.status = 'CLAIMED'", new="false", scenario=a_claim_stands_while_its_holder_works
    ),
    "_adoptable: what waits suspended is not begun, only ended": Mutant(
        old="NOT (e.suspended AND e.status = 'REQUESTED' AND NOT e.stopping)",
        new="true",
        scenario=a_suspended_request_waits,
    ),
    "adopt: suspended since the look": Mutant(
        old="NOT (e.suspended AND e.status = 'REQUESTED' AND NOT e.stopping)",
        new="true",
        scenario=a_suspend_comes_between_look_and_lock,
    ),
    "claim: a suspended execution gives nothing": Mutant(
        old="NOT e.suspended", new="true", scenario=a_suspended_execution_is_claimed
    ),
    "claim: also a limit set since the look": Mutant(
        old="l.execution_id = ANY (v_exec)",
        new="false",
        scenario=a_limit_is_set_between_look_and_lock,
    ),
    "claim: claims of a limited execution take turns": Mutant(
        old="FOR UPDATE", new="", scenario=two_claims_meet_at_a_limit
    ),
    "claim: never more claims than the limit": Mutant(
        old="least(x.share, r.room)", new="x.share", scenario=more_is_wanted_than_the_limit
    ),
    "claim: nothing from an execution at its limit": Mutant(
        old="coalesce(r.room, 1) > 0", new="true", scenario=the_last_place_goes_to_another
    ),
    "request_execution: of launchers that restart an instance one wins": Mutant(
        old="FOR UPDATE", new="", scenario=two_launchers_restart
    ),
    "request_execution: a launch key has one execution, also a purged one": Mutant(
        old="p_launch_key = ANY (v_instance.launch_keys)",
        new="false",
        scenario=a_launch_is_asked_for_again_after_the_purge,
    ),
    "request_execution: only what failed or was cancelled is restarted": Mutant(
        old="v_instance.state NOT IN ('FAILED', 'CANCELLED')",
        new="v_instance.state = 'RUNNING'",
        scenario=a_completed_instance_is_launched,
    ),
    "request_execution: an instance stands for its parameters": Mutant(
        old="v_instance.parameters_digest <> v_digest",
        new="false",
        scenario=an_instance_is_launched_with_other_parameters,
    ),
    "_restart: what was started at most once is carried, not repeated": Mutant(
        old="'FAILED'", new="'PENDING'", scenario=a_start_is_in_the_plan_of_a_restart
    ),
    "_restart: a restart does only what is unfinished": Mutant(
        old="p.status <> 'COMPLETED'",
        new="true",
        scenario=a_completed_row_is_in_the_plan_of_a_restart,
    ),
    "restart: of people who restart an execution one wins": Mutant(
        old="FOR UPDATE", new="", scenario=two_people_restart
    ),
    "restart: only the last execution of an instance is restarted": Mutant(
        old="v_instance.execution_id <> p_of", new="false", scenario=an_old_execution_is_restarted
    ),
    "restart: only what failed or was cancelled is restarted": Mutant(
        old="v_instance.state NOT IN ('FAILED', 'CANCELLED')",
        new="v_instance.state = 'RUNNING'",
        scenario=a_completed_execution_is_restarted,
    ),
    f"_set_suspended: {TERMINAL}": Mutant(
        old="v_execution.ended_at IS NOT NULL", new="false", scenario=a_suspend_after_the_end
    ),
    f"set_limits: {TERMINAL}": Mutant(
        old="v_execution.ended_at IS NOT NULL", new="false", scenario=a_limit_after_the_end
    ),
    "set_limits: claims that know of no limit are over": Mutant(
        old="FOR UPDATE", new="FOR NO KEY UPDATE", scenario=a_new_limit_meets_a_claim
    ),
    "expire: claims that know of no limit are over": Mutant(
        old="FOR UPDATE SKIP LOCKED",
        new="FOR NO KEY UPDATE SKIP LOCKED",
        scenario=a_pass_over_new_limits_meets_a_claim,
    ),
    "_abandon: what has COMPLETED is not given up": Mutant(
        old="v_execution.status = 'COMPLETED'",
        new="false",
        scenario=a_completed_execution_is_abandoned,
    ),
    "_abandon: a later execution stands for the instance": Mutant(
        old="v_instance.execution_id <> p_execution",
        new="false",
        scenario=an_old_execution_is_abandoned,
    ),
    "_abandon: nothing can still change in what has ended": Mutant(
        old="rowlock._is_live(p_execution)", new="false", scenario=an_abandon_meets_a_completion
    ),
    "_abandon: a start is not forgotten": Mutant(
        old="'FAILED'", new="'CANCELLED'", scenario=a_start_is_abandoned
    ),
    "resolve: a restart sees all of a resolution or nothing": Mutant(
        old="FOR UPDATE", new="", scenario=a_restart_meets_a_resolution
    ),
    "resolve: what a restart has taken over is resolved there": Mutant(
        old="v_instance.execution_id <> p_execution",
        new="false",
        scenario=an_old_execution_is_resolved,
    ),
    "resolve: only a FAILED partition is in doubt": Mutant(
        old="v_row.status <> 'FAILED'", new="false", scenario=a_cancelled_row_is_resolved
    ),
    "resolve: a start that still runs is not repeated": Mutant(
        old="NOT p_force", new="false", scenario=an_orphan_still_runs
    ),
    "retain: while its last execution is young, none of an instance goes": Mutant(
        old="i.execution_id = e.execution_id",
        new="true",
        scenario=only_the_first_of_a_chain_is_old,
    ),
    "retain: a restart that is under way keeps what it restarts": Mutant(
        old="FOR UPDATE OF i SKIP LOCKED", new="", scenario=a_purge_meets_a_restart
    ),
    "retain: a node whose claims are not all recovered stays": Mutant(
        old="o.recovered_at IS NOT NULL",
        new="true",
        scenario=a_removed_node_has_claims_left,
        dies_of=ValueError,
    ),
}

if __name__ == "__main__":
    sys.stdout.write("\n".join(described()) + "\n")
