"""What `explain` reads, as somebody who may only read: from the views to the reasons."""

from uuid import UUID

from rowlock.cli import explain
from rowlock.cli.obstacles import reasons
from rowlock.db import diagnosis
from tests.database.test_views import reader
from tests.support.builders import AT_MOST_ONCE, Run, Scene, a_policy


def found(scene: Scene, run: Run | UUID) -> list[str]:
    """The reasons of where an execution is."""
    id_ = run.id if isinstance(run, Run) else run
    return [one.reason for one in reasons(explain.read(reader(scene), id_))]


def test_what_waits_is_told_apart(scene: Scene) -> None:
    run = scene.an_execution(4, policy=a_policy(max_attempts=2))
    node = scene.a_node()
    lost, later = scene.claim(node, slots=2)
    scene.fail(node, later, delay_seconds=300)
    scene.remove(node)

    waiting = diagnosis.waiting(reader(scene), run.id)

    assert (waiting.total, waiting.delayed, waiting.alone) == (4, 1, 1)
    assert waiting.next_at == scene.partition(later).available_at
    assert scene.partition(lost).alone


def test_a_suspect_holds_everything_up_until_a_node_runs_nothing_else(scene: Scene) -> None:
    run = scene.an_execution(3, policy=a_policy(max_attempts=2))
    node = scene.a_node()
    scene.claim(node)
    scene.remove(node)
    scene.a_node()

    assert found(scene, run) == ["suspect"]


def test_what_is_delayed_says_so_when_nothing_else_waits(scene: Scene) -> None:
    node, claim = scene.a_claim()
    run = scene.run_of(claim)
    scene.fail(node, claim, delay_seconds=300)

    assert found(scene, run) == ["delayed"]


def test_those_before_it_are_counted_if_they_may_be_claimed(scene: Scene) -> None:
    behind = scene.an_execution(2)
    scene.an_execution(3, priority=5)
    scene.an_execution(4, priority=5, pool="elsewhere")
    halted = scene.an_execution(5, priority=5)
    scene.people.suspend(halted.id, "a test", None)
    node = scene.a_node(slots=1)
    scene.claim(node)
    scene.store.beat(node, load=1, draining=False)

    before = diagnosis.waiting_before(reader(scene), pool=scene.pool, priority=0)

    assert before == 2
    assert found(scene, behind) == ["priority"]
    assert found(scene, halted) == ["suspended"]


def test_failures_of_the_infrastructure_are_told_from_wishes_for_another_time(scene: Scene) -> None:
    node, claim = scene.a_claim()
    run = scene.run_of(claim)

    def fails(kind: str) -> None:
        nonlocal claim
        scene.store.fail(
            *(node, claim.id, claim.token),
            error=f'{{"type": "{kind}", "message": "no"}}',
            kind="later",
            delay_seconds=0,
        )
        (claim,) = scene.claim(node)

    for _ in range(3):
        fails("RetryLater")
    assert diagnosis.interrupted(reader(scene), run.id) == []
    for _ in range(3):
        fails("OperationalError")

    assert len(diagnosis.interrupted(reader(scene), run.id)) == 3
    assert found(scene, run) == ["infrastructure", "last_attempts"]


def test_an_early_end_says_since_when_and_whom_it_waits_for(scene: Scene) -> None:
    node, claim = scene.a_claim()
    run = scene.run_of(claim)
    assert diagnosis.closing_since(reader(scene), run.id) is None
    assert scene.store.cancel(run.id, "a test", "enough") == "closing"

    since = diagnosis.closing_since(reader(scene), run.id)

    assert since is not None
    assert since >= scene.partition(claim).claimed_at
    assert found(scene, run) == ["closing"]
    scene.suspect(node)
    assert found(scene, run) == ["closing", "unreachable"]


def test_lost_work_is_unresolved_until_somebody_says_what_became_of_it(scene: Scene) -> None:
    node, claim = scene.a_claim(delivery=AT_MOST_ONCE)
    run = scene.run_of(claim)
    scene.remove(node)
    scene.advance(run)
    assert diagnosis.unresolved(reader(scene), run.id, limit=5) == [claim.key]
    assert found(scene, run) == ["ended", "unresolved"]

    scene.people.resolve(run.id, claim.key, how="completed", actor="a test", reason=None)

    assert diagnosis.unresolved(reader(scene), run.id, limit=5) == []
    assert found(scene, run) == ["ended"]


def test_what_was_restarted_knows_what_came_after_it(scene: Scene) -> None:
    first = scene.a_request()
    scene.store.cancel(first, "a test", None)
    assert diagnosis.restart_of(reader(scene), first) is None

    second, outcome = scene.store.restart(
        UUID(int=first.int ^ 1), first, actor="a test", reason=None
    )

    assert outcome == "restarted"
    later = diagnosis.restart_of(reader(scene), first)
    assert later is not None
    assert later.execution_id == second


def test_an_execution_that_waits_for_its_launcher_says_until_when(scene: Scene) -> None:
    waits = scene.a_request(adopt_after_seconds=30)
    nobody = scene.a_request(contract_hash="contract-2")
    scene.a_node()

    assert found(scene, waits) == ["waiting_for_master"]
    assert found(scene, nobody) == ["nobody_accepts"]
