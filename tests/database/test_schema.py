"""The schema says what must always be true, and names the same states as the code."""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, LiteralString
from uuid import UUID, uuid4

import psycopg
import pytest

from rowlock.protocol import states
from rowlock.protocol.states import (
    EXECUTION_MOVES,
    NODE_MOVES,
    PARTITION_MOVES,
    ExecutionStatus,
    NodeStatus,
    PartitionStatus,
)
from tests.support import oracles
from tests.support.builders import AT_MOST_ONCE, Scene, a_policy

# -- broken rows ---------------------------------------------------------------------------------

BROKEN: dict[str, tuple[LiteralString, str]] = {
    "a claim without an owner": (
        (
            "UPDATE rowlock.batch_partitions SET status = 'CLAIMED', claim_token = gen_random_uuid(),"
            " claimed_at = now()"
        ),
        "claimed_rows_have_an_owner",
    ),
    "a claim without a token": (
        (
            "UPDATE rowlock.batch_partitions SET status = 'CLAIMED', assigned_node = gen_random_uuid(),"
            " claimed_at = now()"
        ),
        "claimed_rows_have_an_owner",
    ),
    "an end without a time": (
        "UPDATE rowlock.batch_partitions SET status = 'COMPLETED'",
        "terminal_rows_say_when",
    ),
    "a time of an end that was not": (
        "UPDATE rowlock.batch_partitions SET ended_at = now()",
        "terminal_rows_say_when",
    ),
    "a failure without a reason": (
        "UPDATE rowlock.batch_partitions SET status = 'FAILED', ended_at = now()",
        "failed_rows_say_why",
    ),
    "a delay without an end": (
        "UPDATE rowlock.batch_partitions SET ready = false, available_at = NULL",
        "delayed_rows_say_until_when",
    ),
    "a suspect that may not be repeated": (
        "UPDATE rowlock.batch_partitions SET alone = true, delivery = 'AT_MOST_ONCE'",
        "alone_rows_may_be_repeated",
    ),
    "a state of a partition that nobody knows": (
        "UPDATE rowlock.batch_partitions SET status = 'RUNNING'",
        "batch_partitions_status_check",
    ),
    "a partition without a key": (
        "UPDATE rowlock.batch_partitions SET partition_key = ''",
        "batch_partitions_partition_key_check",
    ),
    "a key that is too long": (
        "UPDATE rowlock.batch_partitions SET partition_key = repeat('ü', 257)",
        "batch_partitions_partition_key_check",
    ),
    "an execution that ended at no time": (
        "UPDATE rowlock.batch_job_coordination SET status = 'CANCELLED'",
        "ended_executions_say_when",
    ),
    "an execution that failed for no reason": (
        "UPDATE rowlock.batch_job_coordination SET status = 'FAILED', ended_at = now()",
        "failures_have_a_reason",
    ),
    "a plan that was not counted": (
        "UPDATE rowlock.batch_job_coordination SET total = NULL",
        "sealed_plans_are_counted",
    ),
    "a state of an execution that nobody knows": (
        "UPDATE rowlock.batch_job_coordination SET status = 'DONE'",
        "batch_job_coordination_status_check",
    ),
    "a delivery that nobody knows": (
        "UPDATE rowlock.batch_job_coordination SET delivery = 'EXACTLY_ONCE'",
        "batch_job_coordination_delivery_check",
    ),
    "a deletion policy that nobody knows": (
        "UPDATE rowlock.batch_job_coordination SET deletion_policy = 'KEEP'",
        "batch_job_coordination_deletion_policy_check",
    ),
    "a limit that lets nothing run": (
        "INSERT INTO rowlock.batch_limits VALUES (gen_random_uuid(), 0)",
        "batch_limits_parallelism_check",
    ),
    "a removed node that says no time": (
        "UPDATE rowlock.batch_nodes SET status = 'REMOVED'",
        "removed_nodes_say_when",
    ),
    "a node with a time of removal that lives": (
        "UPDATE rowlock.batch_nodes SET removed_at = now()",
        "removed_nodes_say_when",
    ),
    "a state of a node that nobody knows": (
        "UPDATE rowlock.batch_nodes SET status = 'DRAINING'",
        "batch_nodes_status_check",
    ),
    "evidence of a kind that nobody knows": (
        "UPDATE rowlock.batch_nodes SET evidence = 'perhaps'",
        "batch_nodes_evidence_check",
    ),
    "a node with fewer than no slots": (
        "UPDATE rowlock.batch_nodes SET slots = -1",
        "batch_nodes_slots_check",
    ),
    "an instance in no known state": (
        "UPDATE rowlock.batch_instances SET state = 'PENDING'",
        "batch_instances_state_check",
    ),
    "a chunk of a plan with a slice too few": (
        (
            "INSERT INTO rowlock.batch_staging VALUES"
            " (gen_random_uuid(), 1, 0, ARRAY['a', 'b'], ARRAY['1'::jsonb], ARRAY[0, 0])"
        ),
        "chunks_are_parallel",
    ),
    "a fence around nothing": (
        "INSERT INTO rowlock.batch_fences (claim_token) VALUES (gen_random_uuid())",
        "a_fence_guards_one_thing",
    ),
    "a migration that works with a later one": (
        "UPDATE rowlock.schema_migrations SET works_with = version + 1",
        "nothing_works_with_what_is_to_come",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_row_is_refused_whoever_writes_it(scene: Scene, what: str) -> None:
    scene.an_execution(1)
    statement, constraint = BROKEN[what]

    with pytest.raises(psycopg.errors.CheckViolation) as caught:
        scene.admin.execute(statement)

    assert caught.value.diag.constraint_name == constraint


def test_every_check_has_a_row_that_it_refuses(scene: Scene) -> None:
    """A CHECK that cannot fail protects nothing."""
    checks = scene.all(
        "SELECT conname, conrelid::regclass::text AS relation FROM pg_constraint"
        " WHERE contype = 'c' AND connamespace = 'rowlock'::regnamespace"
    )
    shown = {constraint for _, constraint in BROKEN.values()}
    elsewhere = {
        "batch_job_coordination_policy_check",  # test_request.py
        "schema_migrations_version_check",  # test_migrate.py
        "schema_migrations_checksum_check",
        # The same words as on batch_job_coordination and batch_partitions.
        "batch_partitions_delivery_check",
        "batch_contracts_delivery_check",
        "batch_instances_instance_key_check",
        "batch_nodes_name_check",
        "batch_nodes_pool_check",
        "batch_fences_armed_check",
        "batch_locks_name_check",  # test_locks.py
    }
    assert {check.conname for check in checks} == shown | elsewhere


def test_one_plan_has_each_key_once(scene: Scene) -> None:
    run = scene.an_execution(["a", "b"])

    with pytest.raises(psycopg.errors.UniqueViolation) as caught:
        scene.admin.execute(
            "UPDATE rowlock.batch_partitions SET partition_key = 'a' WHERE execution_id = %s",
            [run.id],
        )

    assert caught.value.diag.constraint_name == "one_plan_has_each_key_once"


# -- states --------------------------------------------------------------------------------------


def values_of_check(scene: Scene, constraint: str) -> set[str]:
    row = scene.one(
        "SELECT pg_get_constraintdef(oid) AS text FROM pg_constraint WHERE conname = %s", constraint
    )
    return set(re.findall(r"'([A-Z]+)'", row.text))


@pytest.mark.parametrize(
    "kind, table",
    [
        (NodeStatus, "batch_nodes"),
        (PartitionStatus, "batch_partitions"),
        (ExecutionStatus, "batch_job_coordination"),
    ],
)
def test_enum_and_check_name_the_same_states(scene: Scene, kind: type[StrEnum], table: str) -> None:
    assert values_of_check(scene, f"{table}_status_check") == {one.value for one in kind}


@pytest.mark.parametrize(
    "kind, moves",
    [
        (NodeStatus, NODE_MOVES),
        (PartitionStatus, PARTITION_MOVES),
        (ExecutionStatus, EXECUTION_MOVES),
    ],
)
def test_the_table_of_moves_speaks_of_every_state(
    kind: type[StrEnum], moves: Mapping[Any, frozenset[Any]]
) -> None:
    assert set(moves) == {None, *kind}
    assert {after for followers in moves.values() for after in followers} <= set(kind)


def test_terminal_states_are_those_that_say_when_they_ended(scene: Scene) -> None:
    partitions = values_of_check(scene, "terminal_rows_say_when")
    executions = values_of_check(scene, "ended_executions_say_when")

    assert partitions == states.terminal(PARTITION_MOVES)
    assert executions == states.terminal(EXECUTION_MOVES)
    assert states.terminal(NODE_MOVES) == {NodeStatus.REMOVED}


def legal() -> set[tuple[str, str | None, str]]:
    tables: dict[str, Mapping[Any, frozenset[Any]]] = {
        "node": NODE_MOVES,
        "partition": PARTITION_MOVES,
        "execution": EXECUTION_MOVES,
    }
    return {
        (kind, before and before.value, after.value)
        for kind, moves in tables.items()
        for before, followers in moves.items()
        for after in followers
    }


def test_every_legal_move_is_made_by_some_function_and_no_other(alone: Scene) -> None:
    """Each line of the tables in protocol/states.py, walked through once."""
    oracles.watch(alone)
    with_finish = a_policy(has_finish=True)

    # Nodes: both phases, a return, a leave.
    returns, goes, leaves = (alone.a_node() for _ in range(3))
    alone.suspect(returns)
    alone.store.beat(returns, load=0, draining=False)
    alone.remove(goes)
    alone.store.deregister(leaves, "test")

    # Partitions: back to PENDING, and each of the three ends of a claim.
    run = alone.an_execution(4)
    back, done, failed, cancelled = alone.claim(returns, slots=4)
    alone.release(returns, back)
    alone.complete(returns, done)
    alone.fail(returns, failed, "never")
    assert alone.store.cancel(run.id, "test", None) == "closing"  # PENDING -> CANCELLED
    alone.release(returns, cancelled)
    assert alone.advance(run) == "CANCELLED"

    # Executions: cancelled from each state, failed from each state, completed both ways.
    alone.store.cancel(alone.a_request(), "test", None)
    alone.store.cancel(alone.a_plan_being_made().id, "test", None)
    for last in ("cancel", "fail", "complete"):
        run = alone.an_execution(0, policy=with_finish)
        assert alone.advance(run) == "FINISHING"
        if last == "cancel":
            alone.store.cancel(run.id, "test", None)
        else:
            reason = "Test" if last == "fail" else None
            alone.store.finish(run.id, run.epoch, reason=reason)
    run = alone.a_plan_being_made()
    alone.store.fail_plan(run.master, run.id, run.epoch, "Test", "no plan")
    assert alone.advance(alone.an_execution(0)) == "COMPLETED"
    run = alone.an_execution(1)
    alone.a_failure(returns)
    assert alone.advance(run) == "FAILED"
    run = alone.an_execution(2, policy=a_policy(max_failed=0))
    alone.a_failure(returns)
    while alone.advance(run) != "FAILED":
        pass

    # Given up in each state.
    def give_up(execution: UUID) -> None:
        assert alone.people.abandon(execution, "test", None) == "abandoned"

    give_up(alone.a_request())
    give_up(alone.a_plan_being_made().id)
    give_up(alone.an_execution(1).id)
    finishing = alone.an_execution(0, policy=with_finish)
    alone.advance(finishing)
    give_up(finishing.id)
    closing = alone.an_execution(1)
    alone.claim(returns)
    assert alone.store.cancel(closing.id, "test", None) == "closing"
    give_up(closing.id)

    # A restart begins with what was started, what was resolved, and what is to be done.
    run = alone.an_execution(["carried", "resolved", "waits"], delivery=AT_MOST_ONCE)
    alone.a_failure(returns)
    alone.a_failure(returns)
    assert alone.store.cancel(run.id, "test", None) == "cancelled"
    alone.people.resolve(run.id, "resolved", "completed", actor="test", reason=None)
    assert alone.store.restart(uuid4(), run.id, actor="test", reason=None)[1] == "restarted"

    assert oracles.moves(alone) == legal()


# -- small rules -----------------------------------------------------------------------------------


def test_every_change_of_an_execution_raises_its_revision(scene: Scene) -> None:
    run = scene.an_execution(1)
    before = scene.execution(run).revision

    scene.admin.execute(
        "UPDATE rowlock.batch_job_coordination SET priority = 5, revision = 0"
        " WHERE execution_id = %s",
        [run.id],
    )

    assert scene.execution(run).revision == before + 1


def test_a_contract_that_did_not_change_is_not_written_again(scene: Scene) -> None:
    """Every node publishes at its start: a fleet must not rewrite what is there."""

    def publish(schemas: dict[str, Any]) -> Any:  # Any: a row
        scene.store.publish_contract(
            scene.job, "h", schemas=schemas, policy=a_policy(), delivery=AT_MOST_ONCE
        )
        return scene.one(
            "SELECT xmin::text AS xmin, schemas FROM rowlock.batch_contracts WHERE job_name = %s",
            scene.job,
        )

    first = publish({"slice": {"title": "Day"}})
    assert publish({"slice": {"title": "Day"}}) == first
    changed = publish({"slice": {"title": "A day"}})
    assert changed.schemas == {"slice": {"title": "A day"}}


def test_a_planner_sees_the_living_nodes_of_its_pool_that_take_work(scene: Scene) -> None:
    worker, draining, silent, gone = (scene.a_node(slots=n) for n in (3, 4, 5, 6))
    scene.a_node(slots=0)
    scene.a_node(pool="elsewhere")
    scene.store.beat(worker, load=2, draining=False)
    scene.store.beat(draining, load=0, draining=True)
    scene.suspect(silent)
    scene.remove(gone)

    (seen,) = scene.all("SELECT rowlock.cluster(%s) AS nodes", scene.pool)

    assert seen.nodes == [
        {"name": scene.node(worker).name, "pool": scene.pool, "slots": 3, "load": 2}
    ]
    assert scene.store.cluster(f"nobody-{uuid4().hex}") == "[]"


def test_no_time_is_kept_without_its_zone(scene: Scene) -> None:
    """G10: only timestamptz, so that no session's time zone changes what a row means."""
    naive = scene.all(
        "SELECT table_name, column_name FROM information_schema.columns"
        " WHERE table_schema = 'rowlock'"
        " AND data_type IN ('timestamp without time zone', 'date', 'time without time zone')"
    )
    assert naive == []


def test_the_clock_is_read_through_one_function(scene: Scene) -> None:
    readers = scene.all(
        "SELECT proname FROM pg_proc WHERE pronamespace = 'rowlock'::regnamespace"
        " AND prosrc ~* '(clock_timestamp|statement_timestamp|current_timestamp|localtimestamp"
        "|transaction_timestamp|pg_catalog[.]now|[^.]now[(])'"
    )
    assert [row.proname for row in readers] == ["now"]
