"""The operator's decisions, carried out in the real database, come to rest there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar
from uuid import uuid4

import pytest

from rowlock_operator.database import Database
from rowlock_operator.model import DatabaseAction, DeletionPolicy, Observed
from rowlock_operator.reconcile import reconcile
from tests.support.batchjobs import CONTRACT, OPTIONS, World, a_batchjob, told
from tests.support.builders import HASH, Scene
from tests.support.postgres import Database as NodesDatabase

T = TypeVar("T")


class Bench(World):
    """A BatchJob whose database is real; the cluster around it is not."""

    def __init__(self, scene: Scene, **spec: Any) -> None:
        self.scene = scene
        self.runner = asyncio.Runner()
        self.database = Database(lambda: scene.database.dsn_as("rowlock_operator"), "eu-1")
        batchjob = a_batchjob({"job": scene.job, "pool": scene.pool, **spec})
        pools = {scene.pool: OPTIONS.pools["default"]}
        super().__init__(
            Observed(
                batchjob=replace(batchjob, uid=str(uuid4())),
                options=replace(OPTIONS, pools=pools),
                now=datetime.now(UTC),
                database_up=True,
            )
        )
        self.look()

    def close(self) -> None:
        self.do(self.database.close())
        self.runner.close()

    def do(self, work: Awaitable[T]) -> T:
        async def wrapped() -> T:
            return await work

        return self.runner.run(wrapped())

    def look(self) -> None:
        """Observe again what the database says."""
        spec = self.batchjob.spec
        row = self.do(self.database.execution_of(self.batchjob.uid))
        self.sees(
            execution=None if row is None else row.execution,
            contract=self.do(self.database.contract(spec.job)),
            pool_nodes=self.do(self.database.pool_nodes(spec.job, spec.pool)),
            now=datetime.now(UTC),
        )

    def _in_database(self, action: DatabaseAction) -> None:
        answer = self.do(self.database.act(action))
        self.look()
        if answer is not None:
            self.sees(answer=answer)

    @property
    def row(self) -> Any:  # Any: a row with the table's columns as attributes
        execution = self.observed.execution
        assert execution is not None
        return self.scene.execution(execution.execution_id)

    def at_rest(self) -> bool:
        self.look()
        return reconcile(self.observed) == []


@pytest.fixture
def benches() -> Generator[list[Bench]]:
    made: list[Bench] = []
    yield made
    for bench in made:
        bench.close()


@pytest.fixture
def bench(scene: Scene, benches: list[Bench]) -> Bench:
    scene.store.publish_contract(
        scene.job,
        HASH,
        schemas=CONTRACT.schemas,
        policy=CONTRACT.policy,
        delivery=CONTRACT.delivery,
    )
    benches.append(Bench(scene))
    return benches[0]


def test_a_new_batchjob_becomes_an_execution(bench: Bench) -> None:
    bench.settle()

    assert bench.at_rest()
    assert "Accepted=True Accepted" in told(bench.batchjob)
    assert bench.row.launch_key == f"eu-1/{bench.batchjob.uid}/1"
    assert bench.row.parameters == {"month": "2026-11"}
    assert bench.row.policy["max_attempts"] == 3


@pytest.mark.parametrize(
    "edit",
    [
        {"suspend": True},
        {"priority": 7},
        {"parallelism": 3},
        {"active_deadline_seconds": 600},
        {"deletion_policy": DeletionPolicy.ORPHAN},
        {"suspend": True, "priority": -7, "parallelism": 1, "active_deadline_seconds": 3600},
        {"cancel": True},
        {"cancel": True, "suspend": True, "parallelism": 2},
    ],
    ids=str,
)
def test_an_edit_is_pushed_and_then_nothing_is_left_to_do(
    bench: Bench, edit: dict[str, Any]
) -> None:
    bench.settle()
    before = bench.batchjob.spec

    bench.edits(**edit)
    bench.settle()
    assert bench.at_rest()

    if "cancel" not in edit:
        bench.edits(**{field: getattr(before, field) for field in edit})
        bench.settle()
        assert bench.at_rest()


def test_a_batchjob_created_suspended_waits_and_is_resumed(
    scene: Scene, bench: Bench, benches: list[Bench]
) -> None:
    benches.append(Bench(scene, suspend=True, parallelism=2, activeDeadlineSeconds=600))
    held = benches[1]
    held.settle()
    assert held.at_rest()
    assert (held.row.suspended, held.status["phase"]) == (True, "Suspended")

    held.edits(suspend=False)
    held.settle()

    assert held.at_rest()
    assert (held.row.suspended, held.status["phase"]) == (False, "Pending")


def test_a_greater_nonce_restarts_what_was_cancelled_by_a_command(
    scene: Scene, bench: Bench
) -> None:
    bench.settle()
    first = bench.row.execution_id
    scene.people.cancel(first, "alice", None)
    bench.look()
    bench.settle()
    assert "Failed=True Cancelled" in told(bench.batchjob)

    bench.edits(restart_nonce=1)
    bench.settle()

    assert bench.at_rest()
    assert bench.row.execution_id != first
    assert (bench.status["attempt"], bench.status["phase"]) == (2, "Pending")


def test_a_second_batchjob_of_an_instance_takes_over_when_the_first_one_ends(
    scene: Scene, bench: Bench, benches: list[Bench]
) -> None:
    key = uuid4().hex
    benches += [Bench(scene, instanceKey=key), Bench(scene, instanceKey=key)]
    first, second = benches[1:]
    first.settle()
    second.settle()
    assert "Accepted=False DuplicateInstance" in told(second.batchjob)
    assert str(first.row.execution_id) in second.status["message"]

    first.edits(cancel=True)
    first.settle()
    second.settle()

    assert "Accepted=True Accepted" in told(second.batchjob)
    assert second.row.instance_key == key


def test_other_parameters_for_an_instance_are_refused_for_good(
    scene: Scene, bench: Bench, benches: list[Bench]
) -> None:
    key = uuid4().hex
    benches += [
        Bench(scene, instanceKey=key),
        Bench(scene, instanceKey=key, parameters={"month": "2026-12"}),
    ]
    first, second = benches[1:]
    first.settle()
    first.edits(cancel=True)
    first.settle()
    second.settle()

    assert "Finished=True DuplicateInstance" in told(second.batchjob)
    assert "was launched with other parameters" in second.status["message"]
    assert second.at_rest()


def test_a_deadline_ends_what_no_node_runs(scene: Scene, bench: Bench) -> None:
    bench.edits(active_deadline_seconds=60)
    bench.settle()
    scene.admin.execute(
        "UPDATE rowlock.batch_job_coordination SET deadline_at = now() - interval '1 second'"
        " WHERE execution_id = %s",
        (bench.row.execution_id,),
    )

    bench.do(bench.database.expire())
    bench.do(bench.database.expire())
    bench.look()
    bench.settle()

    assert "Failed=True DeadlineExceeded" in told(bench.batchjob)


def test_a_batchjob_says_that_none_runs_its_job_where_the_nodes_use_another_database(
    scene: Scene, bench: Bench, benches: list[Bench], database: NodesDatabase
) -> None:
    """They are alive and idle, there; the operator's database knows the job from before, or never knew it.
    (For three weeks all was green and nothing ran: reported as eliza#15207.)"""
    unknown = f"{scene.job}-unknown"
    benches += [Bench(scene, job=job, master={"mode": "Pool"}) for job in (scene.job, unknown)]
    with Scene(database) as elsewhere:
        elsewhere.a_node(pool=scene.pool, jobs={scene.job: [HASH], unknown: [HASH]})

        for one in benches[1:]:
            one.settle()
    _, waits, refused = benches
    none = f"no living node of pool {scene.pool} runs job {scene.job}"
    assert ("Accepted=True Accepted" in told(waits.batchjob), waits.status["message"]) == (
        True,
        none,
    )
    assert "Accepted=False UnknownJob" in told(refused.batchjob)

    scene.a_node()
    waits.look()
    waits.passes(60)  # what only explains is written now and then
    waits.settle()

    assert waits.status["message"] == "waits for a node to become its master"
