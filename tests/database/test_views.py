"""What people and programs read: lists, pages, and finding an execution by what somebody types."""

import json
import re
from collections.abc import Callable, Generator
from dataclasses import fields
from uuid import UUID, uuid4

import pytest

from rowlock.db import views
from rowlock.errors import NotFound, UsageError
from rowlock.protocol.statuses import ENDED, EXECUTION_STATUSES, PARTITION_STATUSES
from tests.support.builders import HASH, Scene, a_policy
from tests.support.postgres import Cluster, Database

PAYLOADS = {"parameters", "summary", "slice", "checkpoint", "result", "schemas"}


def reader(scene: Scene) -> views.Connection:
    """A connection that may read the views and nothing else, closed with the scene."""
    store = scene.a_store()
    store.connection.close()
    store.connection = scene.database.connect(role="rowlock_reader")
    return store.connection


# -- the words of the schema -------------------------------------------------------------------


@pytest.mark.parametrize(
    "table, known",
    [
        ("batch_job_coordination", EXECUTION_STATUSES),
        ("batch_partitions", PARTITION_STATUSES),
    ],
)
def test_the_states_are_those_of_the_check_constraints(
    scene: Scene, table: str, known: tuple[str, ...]
) -> None:
    row = scene.one(
        "SELECT pg_get_constraintdef(oid) AS text FROM pg_constraint"
        " WHERE conrelid = ('rowlock.' || %s)::regclass AND conname = %s || '_status_check'",
        *(table, table),
    )
    assert set(re.findall(r"'([A-Z]+)'", row.text)) == set(known)


def test_the_states_that_end_are_those_that_need_a_time_of_the_end(scene: Scene) -> None:
    row = scene.one(
        "SELECT pg_get_constraintdef(oid) AS text FROM pg_constraint"
        " WHERE conname = 'ended_executions_say_when'"
    )
    assert set(re.findall(r"'([A-Z]+)'", row.text)) == ENDED


@pytest.mark.parametrize("kind", [views.Execution, views.Partition, views.Contract, views.Node])
def test_no_list_carries_payloads(kind: type) -> None:
    assert {field.name for field in fields(kind)} & PAYLOADS == set()


# -- executions --------------------------------------------------------------------------------


def test_executions_come_newest_first_in_pages(alone: Scene) -> None:
    asked = [alone.a_request() for _ in range(5)]
    db = reader(alone)

    first = views.executions(db, limit=2)
    second = views.executions(db, before=first[-1].exec_no, limit=2)
    third = views.executions(db, before=second[-1].exec_no, limit=2)

    assert [one.execution_id for one in first + second + third] == asked[::-1]


def test_executions_are_chosen_by_job_and_state(scene: Scene) -> None:
    running, asked = scene.an_execution(1).id, scene.a_request()
    scene.a_request(job="another")
    db = reader(scene)

    def listed(*statuses: str) -> list[UUID]:
        found = views.executions(db, job=scene.job, statuses=statuses, limit=10)
        return [one.execution_id for one in found]

    assert listed() == [asked, running]
    assert listed("RUNNING") == [running]
    assert listed("RUNNING", "REQUESTED") == [asked, running]
    assert listed("FAILED") == []


def test_one_look_shows_counts_and_who_runs_what(scene: Scene) -> None:
    run = scene.an_execution([f"k{n}" for n in range(6)], policy=a_policy(max_attempts=1))
    node = scene.a_node()
    done, failed, running, ahead = scene.claim(node, slots=3, prefetch=1)
    scene.complete(node, done)
    scene.fail(node, failed)
    db = reader(scene)

    look = views.look(db, run.id)
    assert (look.status, look.total, look.completed, look.failed) == ("RUNNING", 6, 1, 1)
    assert (look.running, look.nodes, look.ended) == (1, 1, False)

    (holder,) = views.holders(db, run.id)
    assert (holder.node_id, holder.running, holder.waiting) == (node, 1, 1)
    assert holder.keys == [running.key, ahead.key]
    assert holder.oldest_at is not None

    one = views.execution(db, run.id)
    assert (one.completed, one.failed, one.total, one.ended) == (1, 1, 6, False)
    assert views.payloads(db, run.id).parameters == {"month": 7}


def test_what_does_not_exist_is_not_found(scene: Scene) -> None:
    db = reader(scene)
    reads: list[Callable[[views.Connection, UUID], object]]
    reads = [views.execution, views.payloads, views.look]
    for read in reads:
        with pytest.raises(NotFound, match="there is no execution"):
            read(db, uuid4())


def test_an_execution_is_found_by_its_launch_key(scene: Scene) -> None:
    id_, _ = scene.store.request(
        uuid4(),
        job=scene.job,
        contract_hash=HASH,
        policy=a_policy(),
        delivery="AT_LEAST_ONCE",
        instance_key=uuid4().hex,
        parameters="{}",
        pool=scene.pool,
        launch_key="once",
    )
    db = reader(scene)

    found = views.launched_as(db, "once")
    assert found is not None
    assert found.execution_id == id_
    assert views.launched_as(db, "twice") is None


# -- finding by what a person types ------------------------------------------------------------


A = "aaaa0000-0000-4000-8000-000000000001"
B = "aaaa0000-0000-4000-8000-000000000002"
C = "cccc1234-0000-4000-8000-000000000003"
D = "12345678-0000-4000-8000-000000000004"


@pytest.fixture(scope="module")
def four(postgres: Cluster) -> Generator[views.Connection]:
    """A database with the executions A to D and nothing else, in this order."""
    made = postgres.create()
    with Scene(made) as scene:
        for id_ in (A, B, C, D):
            scene.store.request(
                UUID(id_),
                job=scene.job,
                contract_hash=HASH,
                policy=a_policy(),
                delivery="AT_LEAST_ONCE",
                instance_key=f"instance of {id_}",
                parameters="{}",
                pool=scene.pool,
            )
        yield reader(scene)
    postgres.drop(made.name)


@pytest.mark.parametrize(
    "typed, found",
    [
        (A, A),
        (A.upper(), A),
        (A.replace("-", ""), A),
        ("cccc", C),
        ("CCCC-12", C),
        (" cccc1234 ", C),
        ("1", A),
        ("3", C),
        ("12345678", D),  # there is no such number, so it is the beginning of an id
    ],
)
def test_an_execution_is_found_by_id_beginning_or_number(
    four: views.Connection, typed: str, found: str
) -> None:
    assert views.find_execution(four, typed) == UUID(found)


def test_an_ambiguous_beginning_names_what_it_may_be(four: views.Connection) -> None:
    with pytest.raises(UsageError, match=f"'aaaa' may be {B} or {A}: give more of its id"):
        views.find_execution(four, "aaaa")


@pytest.mark.parametrize(
    "typed, near",
    [
        ("7", ("3", "4")),
        ("0", ("1",)),
        ("ccdc12", (C,)),
        (C[:-1] + "9", (C,)),
        (f"Instance of {A}", (A,)),
        ("ccc", (C,)),  # too short to be sure, long enough for a suggestion
        ("no", ()),
        ("9" * 30, ()),
    ],
)
def test_what_is_not_found_suggests_what_is_near(
    four: views.Connection, typed: str, near: tuple[str, ...]
) -> None:
    with pytest.raises(NotFound) as caught:
        views.find_execution(four, typed)
    assert set(near) <= set(caught.value.near)
    assert near or not caught.value.near


# -- partitions --------------------------------------------------------------------------------


def test_partitions_come_by_key_in_pages(scene: Scene) -> None:
    run = scene.an_execution(["b", "a", "d", "c", "e"])
    scene.an_execution(["x"])
    db = reader(scene)

    seen: list[str] = []
    after = None
    while page := views.partitions(db, run.id, after=after, limit=2):
        seen += [one.partition_key for one in page]
        after = page[-1].id
    assert seen == ["a", "b", "c", "d", "e"]


def test_partitions_show_state_node_and_error_and_payloads_only_on_request(scene: Scene) -> None:
    run = scene.an_execution(["a", "b"], policy=a_policy(max_attempts=1))
    node = scene.a_node()
    done, failed = scene.claim(node, slots=2)
    scene.complete(node, done, result='{"sum": 2}')
    error = {"type": "Boom", "message": "it broke", "traceback": "line 1"}
    scene.store.fail(
        node, failed.id, failed.token, error=json.dumps(error), kind="never", delay_seconds=0
    )
    db = reader(scene)

    one, other = views.partitions(db, run.id, limit=10)
    assert (one.status, one.node_id, one.error_text) == ("COMPLETED", node, None)
    assert (other.status, other.error_text) == ("FAILED", "Boom: it broke")
    assert other.last_error is not None
    assert "traceback" not in other.last_error
    (only,) = views.partitions(db, run.id, statuses=["FAILED"], limit=10)
    assert only.id == other.id

    payloads = views.partition_payloads(db, [one.id, other.id])
    assert payloads[one.id].result == {"sum": 2}
    assert payloads[one.id].slice == {"key": "a"}
    assert payloads[other.id].traceback == "line 1"


# -- nodes, events, contracts ------------------------------------------------------------------


def test_nodes_that_are_gone_are_shown_on_request(scene: Scene) -> None:
    here, gone = scene.a_node(), scene.a_node()
    scene.remove(gone)
    db = reader(scene)

    assert [one.node_id for one in views.nodes(db, pool=scene.pool, limit=10)] == [here]
    both = views.nodes(db, pool=scene.pool, removed=True, limit=10)
    assert [one.node_id for one in both] == [here, gone]
    assert (both[1].status, both[1].removed_reason) == ("REMOVED", "silence")


def test_events_come_newest_last_and_are_chosen_by_execution_node_and_kind(scene: Scene) -> None:
    node, claim = scene.a_claim()
    scene.fail(node, claim, delay_seconds=60)
    scene.remove(node)
    id_ = claim.execution_id
    db = reader(scene)

    of_execution = views.events(db, execution_id=id_, limit=10)
    assert [one.event for one in of_execution] == ["execution_requested", "partition_retried"]
    assert of_execution[1].partition_key == claim.key
    assert [one.id for one in of_execution] == sorted(one.id for one in of_execution)

    name = scene.node(node).name
    of_node = [one.event for one in views.events(db, node=name, limit=10)]
    for given in (str(node), str(node)[:8].upper()):
        assert of_node == [one.event for one in views.events(db, node=given, limit=10)]
    assert views.events(db, node=str(node)[:7], limit=10) == []
    assert of_node == ["partition_retried", "node_unreachable", "node_removed"]
    assert [one.event for one in views.events(db, node=name, event="node_removed", limit=9)] == [
        "node_removed"
    ]

    latest = views.events(db, node=name, limit=1)
    before = views.events(db, node=name, before=latest[0].id, limit=10)
    assert [one.event for one in before] == of_node[:2]


def test_contracts_that_living_nodes_accept_come_first(scene: Scene) -> None:
    for hash_ in (HASH, "newer"):
        scene.store.publish_contract(
            scene.job,
            hash_,
            schemas={"parameters": {"const": hash_}},
            policy=a_policy(),
            delivery="AT_LEAST_ONCE",
        )
    node = scene.a_node()
    db = reader(scene)

    assert [
        (one.contract_hash, one.nodes) for one in views.contracts(db, job=scene.job, limit=9)
    ] == [
        (HASH, 1),
        ("newer", 0),
    ]
    scene.remove(node)
    first, _ = views.contracts(db, job=scene.job, limit=9)
    assert first.contract_hash == "newer"

    assert views.schemas(db, scene.job, HASH) == {"parameters": {"const": HASH}}
    assert scene.job in views.job_names(db)
    with pytest.raises(NotFound, match="there is no contract"):
        views.schemas(db, scene.job, "older")


@pytest.mark.parametrize("role", ["rowlock_node", "rowlock_operator", "rowlock_admin"])
def test_other_roles_may_read_as_well(shared: Database, role: str) -> None:
    with shared.connect(role=role) as db:
        assert views.executions(db, job="no such job", limit=1) == []
        assert views.nodes(db, pool="no such pool", limit=1) == []
        assert views.events(db, event="no such event", limit=1) == []
        assert views.contracts(db, job="no such job", limit=1) == []
        assert views.partitions(db, uuid4(), limit=1) == []
        assert views.read_at(db).tzinfo is not None
