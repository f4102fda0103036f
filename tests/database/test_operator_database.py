"""The operator's side of the database: one function per verb, bounded waits, and no right but its own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, LiteralString
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from rowlock.errors import Unavailable
from rowlock.protocol.model import ServerIdentity
from rowlock_operator import database as database_module
from rowlock_operator.database import Database, Declined
from rowlock_operator.model import (
    Answer,
    Cancel,
    RequestExecution,
    Resume,
    SetLimits,
    Suspend,
    launch_key,
)
from rowlock_operator.settings import Settings
from tests.support.builders import HASH, Run, Scene, a_policy
from tests.support.postgres import Database as PrivateDatabase
from tests.support.releases import KNOWN, record_migration
from tests.support.waiting import wait_until

CLUSTER = "eu-1"


class Operator:
    """An operator's database and a loop to use it in."""

    def __init__(self, dsn: Callable[[], str], cluster: str = CLUSTER) -> None:
        self.runner = asyncio.Runner()
        self.database = Database(dsn, cluster)

    def do(self, work: Awaitable[Any]) -> Any:  # Any: the result of whatever is done
        async def wrapped() -> Any:
            return await work

        return self.runner.run(wrapped())

    def close(self) -> None:
        self.do(self.database.close())
        self.runner.close()


@contextmanager
def an_operator(dsn: Callable[[], str], cluster: str = CLUSTER) -> Generator[Operator]:
    made = Operator(dsn, cluster)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def operator(scene: Scene) -> Generator[Operator]:
    with an_operator(lambda: scene.database.dsn_as("rowlock_operator")) as made:
        yield made


def a_request(
    scene: Scene,
    *,
    uid: str | None = None,
    attempt: int = 1,
    cluster: str = CLUSTER,
    instance: str | None = None,
    **options: Any,
) -> RequestExecution:
    uid = uid or uuid4().hex
    return RequestExecution(
        attempt=attempt,
        job=scene.job,
        contract_hash=HASH,
        policy=a_policy(),
        delivery="AT_LEAST_ONCE",
        instance_key=instance or uid,
        launch_key=launch_key(cluster, uid, attempt),
        parameters='{"month": 7}',
        pool=scene.pool,
        priority=0,
        adopt_after_seconds=0,
        requester={
            "kind": "BatchJob",
            "cluster": cluster,
            "namespace": "billing",
            "name": f"nightly-{uid[:6]}",
            "uid": uid,
            "actor": "operator",
        },
        options=options,
    )


def uid_of(request: RequestExecution) -> str:
    return str(request.requester["uid"])


def requested(operator: Operator, request: RequestExecution) -> UUID:
    answer = operator.do(operator.database.act(request))
    assert answer.outcome == "requested"
    id_: UUID = answer.execution_id
    return id_


# -- requests ----------------------------------------------------------------------------------


def test_a_request_is_one_execution_however_often_it_is_made(
    scene: Scene, operator: Operator
) -> None:
    request = a_request(scene, parallelism=3, deadline_seconds=60, suspended=True)

    first = operator.do(operator.database.act(request))
    again = operator.do(operator.database.act(request))

    assert first == Answer(attempt=1, outcome="requested", execution_id=first.execution_id)
    assert again == Answer(attempt=1, outcome="exists", execution_id=first.execution_id)
    row = operator.do(operator.database.execution_of(uid_of(request)))
    assert (row.namespace, row.uid) == ("billing", uid_of(request))
    execution = row.execution
    assert execution.execution_id == first.execution_id
    assert (execution.status, execution.attempt) == ("REQUESTED", 1)
    assert (execution.parallelism, execution.suspended) == (3, True)
    assert execution.deadline_at is not None


def test_an_instance_that_somebody_else_runs_is_refused(scene: Scene, operator: Operator) -> None:
    mine = requested(operator, a_request(scene, instance=f"july-{scene.job}"))

    answer = operator.do(operator.database.act(a_request(scene, instance=f"july-{scene.job}")))

    assert (answer.outcome, answer.execution_id) == ("running", mine)


def test_an_attempt_is_told_from_its_launch_key_and_the_latest_execution_counts(
    scene: Scene, operator: Operator
) -> None:
    request = a_request(scene)
    first = requested(operator, request)
    operator.do(operator.database.cancel(first, "test"))

    second = operator.do(operator.database.act(a_request(scene, uid=uid_of(request), attempt=2)))

    assert second.outcome == "restarted"
    row = operator.do(operator.database.execution_of(uid_of(request)))
    assert (row.execution.execution_id, row.execution.attempt) == (second.execution_id, 2)


def test_values_that_the_database_refuses_are_declined_and_the_connection_stays(
    scene: Scene, operator: Operator
) -> None:
    execution = requested(operator, a_request(scene))
    wrong = SetLimits(execution_id=execution, changes={"parallelism": 0}, reason="test")

    with pytest.raises(Declined, match="parallelism"):
        operator.do(operator.database.act(wrong))

    assert operator.do(operator.database.pool_nodes(scene.job, scene.pool)) == 0


# -- verbs -------------------------------------------------------------------------------------


def test_each_verb_arrives_with_who_and_why(scene: Scene, operator: Operator) -> None:
    request = a_request(scene)
    execution = requested(operator, request)

    for action in (
        Suspend(execution_id=execution, reason="spec.suspend"),
        Resume(execution_id=execution, reason="spec.suspend"),
        SetLimits(execution_id=execution, changes={"priority": 5}, reason="spec.priority"),
        Cancel(execution_id=execution, reason="spec.cancel"),
    ):
        assert operator.do(operator.database.act(action)) is None

    row = operator.do(operator.database.execution_of(uid_of(request)))
    assert row.execution.priority == 5
    assert row.execution.cancel_requested
    told = scene.all(
        "SELECT event, actor, detail ->> 'reason' AS reason FROM rowlock.events"
        " WHERE execution_id = %s ORDER BY id",
        execution,
    )
    said = {(one.event, one.actor, one.reason) for one in told}
    assert {
        ("execution_suspended", "operator", "spec.suspend"),
        ("execution_resumed", "operator", "spec.suspend"),
        ("limits_changed", "operator", "spec.priority"),
        ("cancel_requested", "operator", "spec.cancel"),
    } <= said


def test_an_execution_may_outlive_its_batchjob(scene: Scene, operator: Operator) -> None:
    request = a_request(scene)
    execution = requested(operator, request)

    operator.do(operator.database.orphan(execution, "test"))

    (row,) = operator.do(operator.database.live_executions_of(uid_of(request)))
    assert row.execution.deletion_policy == "ORPHAN"


# -- looks -------------------------------------------------------------------------------------


def test_the_mirror_sees_what_lives_of_this_cluster_and_what_it_asks_for(
    scene: Scene, operator: Operator
) -> None:
    mine, ended = a_request(scene), a_request(scene)
    foreign = a_request(scene, cluster="us-1")
    live_id, ended_id = requested(operator, mine), requested(operator, ended)
    foreign_id = requested(operator, foreign)
    launched = scene.a_request()
    operator.do(operator.database.cancel(ended_id, "test"))

    seen = {row.execution.execution_id for row in operator.do(operator.database.live())}
    assert live_id in seen
    assert seen.isdisjoint({ended_id, foreign_id, launched})

    rows = operator.do(operator.database.live([ended_id, foreign_id]))
    by_id = {row.execution.execution_id: row.execution for row in rows}
    assert by_id[ended_id].status == "CANCELLED"
    assert foreign_id not in by_id, "not even by its id"


def test_counters_and_the_first_failed_partitions_are_seen_without_tracebacks(
    scene: Scene, operator: Operator
) -> None:
    request = a_request(scene)
    execution = requested(operator, request)
    node = scene.a_node(only=execution)
    taken = scene.store.adopt(node, execution)
    assert taken is not None
    run = Run(id=execution, master=node, epoch=taken.epoch, instance=taken.instance_key)
    scene.stage(run, [f"p{number:02}" for number in range(14)])
    assert scene.store.seal(execution, taken.epoch, "main", 14) == ("sealed", None)
    (done,) = scene.claim(node, idle=True)
    assert scene.complete(node, done) == ["completed"]
    for _ in range(12):
        scene.a_failure(node)
    scene.claim(node)

    row = operator.do(operator.database.execution_of(uid_of(request)))
    failed = operator.do(operator.database.failed_partitions(execution))

    shown = row.execution
    assert (shown.total, shown.completed, shown.failed, shown.running) == (14, 1, 12, 1)
    assert (shown.status, shown.nodes) == ("RUNNING", 1)
    assert len(failed) == 10
    assert (failed[0].reason, failed[0].message) == ("Boom", "it broke")
    assert failed[0].attempts == 1
    assert not failed[0].outcome_unknown


def test_a_contract_that_living_nodes_accept_comes_before_a_newer_one(
    scene: Scene, operator: Operator
) -> None:
    assert operator.do(operator.database.contract(scene.job)) is None
    for contract in (HASH, "contract-2"):
        scene.store.publish_contract(
            scene.job,
            contract,
            schemas={"parameters": {"type": "object"}},
            policy=a_policy(),
            delivery="AT_LEAST_ONCE",
        )
    assert operator.do(operator.database.contract(scene.job)).hash == "contract-2"

    scene.a_node()

    assert operator.do(operator.database.contract(scene.job)).hash == HASH
    assert scene.job in operator.do(operator.database.job_names())


def test_nodes_count_that_could_take_work_of_the_pool(scene: Scene, operator: Operator) -> None:
    scene.a_node()
    scene.a_node(slots=0)
    scene.a_node(pool="other")
    scene.a_node(jobs={"another": [HASH]})
    scene.a_node(only=uuid4())

    assert operator.do(operator.database.pool_nodes(scene.job, scene.pool)) == 1


def test_a_notification_ends_the_wait_early(scene: Scene, operator: Operator) -> None:
    operator.do(operator.database.hint(0.01))  # listens from now on

    async def wait_and_notify() -> None:
        waiting = asyncio.create_task(operator.database.hint(30))
        await asyncio.to_thread(scene.one, "SELECT pg_notify('rowlock', 'control')")
        async with asyncio.timeout(5):
            await waiting

    operator.do(wait_and_notify())


# -- what can go wrong -------------------------------------------------------------------------


def test_a_session_that_was_ended_is_made_anew(scene: Scene, operator: Operator) -> None:
    request = a_request(scene)
    requested(operator, request)
    scene.all(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name = 'rowlock-operator' AND datname = current_database()"
    )

    with pytest.raises(Unavailable):
        operator.do(operator.database.execution_of(uid_of(request)))

    assert operator.do(operator.database.execution_of(uid_of(request))) is not None


def test_a_newer_schema_that_works_with_this_operator_is_worked_with(alone: Scene) -> None:
    record_migration(alone.database, works_with=KNOWN)

    with an_operator(lambda: alone.database.dsn_as("rowlock_operator")) as operator:
        requested(operator, a_request(alone))


UNFIT: dict[str, tuple[LiteralString, LiteralString, str]] = {
    "newer": (
        (
            "INSERT INTO rowlock.schema_migrations SELECT version + 1, 'next', checksum, version + 1"
            " FROM rowlock.schema_migrations ORDER BY version DESC LIMIT 1"
        ),
        "DELETE FROM rowlock.schema_migrations WHERE name = 'next'",
        f"version {KNOWN + 1} .* the {KNOWN} that this rowlock knows: upgrade rowlock",
    ),
    "older": (
        (
            "CREATE TABLE kept AS SELECT * FROM rowlock.schema_migrations ORDER BY version DESC LIMIT 1;"
            " DELETE FROM rowlock.schema_migrations WHERE version = (SELECT version FROM kept)"
        ),
        "INSERT INTO rowlock.schema_migrations SELECT * FROM kept",
        f"version {KNOWN - 1}, this rowlock needs {KNOWN}: run rowlock migrate",
    ),
    "missing": (
        "ALTER TABLE rowlock.schema_migrations RENAME TO kept",
        "ALTER TABLE rowlock.kept RENAME TO schema_migrations",
        "has no rowlock schema: run rowlock migrate",
    ),
}


@pytest.mark.parametrize("how", UNFIT)
def test_a_schema_that_does_not_fit_is_told_with_the_remedy_and_waited_for(
    alone: Scene, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start and while it runs: it asks nothing more of the database, and goes on by itself once
    the two fit again."""
    monkeypatch.setattr(database_module, "SCHEMA_SECONDS", 0.0)
    unfit, fit, told = UNFIT[how]
    with an_operator(lambda: alone.database.dsn_as("rowlock_operator")) as operator:
        requested(operator, a_request(alone))

        alone.admin.execute(unfit)
        with pytest.raises(Unavailable, match=told):
            operator.do(operator.database.act(a_request(alone)))
        with pytest.raises(Unavailable, match=told):
            operator.do(operator.database.live())

        alone.admin.execute(fit)
        requested(operator, a_request(alone))


def test_the_operator_has_two_connections_at_most_and_says_who_it_is(
    scene: Scene, operator: Operator
) -> None:
    async def all_at_once() -> None:
        await asyncio.gather(
            operator.database.live(),
            operator.database.hint(0.01),
            *(operator.database.pool_nodes(scene.job, scene.pool) for _ in range(10)),
        )

    operator.do(all_at_once())

    names = scene.all(
        "SELECT application_name AS name FROM pg_stat_activity"
        " WHERE starts_with(application_name, 'rowlock-operator') AND datname = current_database()"
    )
    assert sorted(one.name for one in names) == ["rowlock-operator", "rowlock-operator-mirror"]


def test_while_the_database_cannot_be_reached_nobody_waits_for_it_twice() -> None:
    tries: list[int] = []

    def dsn() -> str:
        tries.append(1)
        return "host=127.0.0.1 port=1 dbname=app user=rowlock password=very-secret"

    with an_operator(dsn) as operator:
        with pytest.raises(Unavailable) as first:
            operator.do(operator.database.execution_of("uid"))
        with pytest.raises(Unavailable) as second:
            operator.do(operator.database.execution_of("uid"))

    assert "127.0.0.1:1" in str(first.value)
    assert "very-secret" not in f"{first.value}{second.value}"


def test_once_the_mirror_has_an_answer_nobody_waits_any_longer_to_connect(scene: Scene) -> None:
    right = scene.database.dsn_as("rowlock_operator")
    dsns = ["host=127.0.0.1 port=1"]
    with an_operator(lambda: dsns[-1]) as operator:
        for _ in range(20):  # each failure makes the pause longer that comes next
            with pytest.raises(Unavailable):
                operator.do(operator.database.execution_of("uid"))
            operator.database._work.hurry()
        with pytest.raises(Unavailable):
            operator.do(operator.database.execution_of("uid"))
        dsns.append(right)

        operator.do(operator.database.live())

        assert operator.do(operator.database.execution_of("uid")) is None


def test_a_session_that_freezes_is_given_up(
    scene: Scene, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rowlock_operator.database.ANSWER_SECONDS", 0.5)
    operator.do(operator.database.live())
    backend = scene.one(
        "SELECT pid FROM pg_stat_activity WHERE application_name = 'rowlock-operator-mirror'"
        " AND datname = current_database()"
    )

    async def look() -> None:
        async with asyncio.timeout(10):
            await operator.database.live()

    os.kill(backend.pid, signal.SIGSTOP)
    try:
        with pytest.raises(Unavailable):
            operator.do(look())
        operator.do(look())
    finally:
        os.kill(backend.pid, signal.SIGCONT)


def test_a_rotated_password_is_read_again_from_its_file(
    private_database: PrivateDatabase, tmp_path: Path
) -> None:
    dsn = private_database.dsn_as("rowlock_operator")
    login = private_database.cluster.login("rowlock_operator")
    path = tmp_path / "dsn"

    def rotate(password: str) -> None:
        with private_database.connect() as db:
            db.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(sql.Identifier(login), password))
            db.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s",
                (login,),
            )

    rotate("old")
    path.write_text(make_conninfo(dsn, password="old"))
    settings = Settings(dsn_file=path, cluster=CLUSTER)
    with an_operator(settings.connection_string) as operator:

        def works() -> bool:
            try:
                operator.do(operator.database.live())
            except Unavailable:
                return False
            return True

        assert works()
        rotate("new")
        assert not works()
        path.write_text(make_conninfo(dsn, password="new"))

        wait_until(works, seconds=10, what="the new password", every_seconds=0.05)


# -- G13: its role can do nothing but ask ------------------------------------------------------

_CALLS: dict[str, tuple[LiteralString, tuple[Any, ...]]] = {
    "claim": ("SELECT * FROM rowlock.claim(%s, 1, 0, true, 0)", (uuid4(),)),
    "complete": (
        "SELECT * FROM rowlock.complete(%s, '{1}', %s::uuid[], '{null}'::jsonb[])",
        (uuid4(), [uuid4()]),
    ),
    "fail": ("SELECT rowlock.fail(%s, 1, %s, '{}', 'never', 0)", (uuid4(), uuid4())),
    "release": (
        "SELECT * FROM rowlock.release(%s, '{1}', %s::uuid[], false)",
        (uuid4(), [uuid4()]),
    ),
    "reap": ("SELECT * FROM rowlock.remove_node(%s, %s, 0)", (uuid4(), uuid4())),
    "suspect": ("SELECT rowlock.mark_unreachable(%s, %s, 0)", (uuid4(), uuid4())),
    "recover": ("SELECT * FROM rowlock.recover(%s)", (uuid4(),)),
    "adopt": ("SELECT * FROM rowlock.adopt(%s, %s)", (uuid4(), uuid4())),
    "seal": ("SELECT * FROM rowlock.seal(%s, 1, 'main', 1)", (uuid4(),)),
    "finish": ("SELECT rowlock.finish(%s, 1, '{}', NULL, NULL)", (uuid4(),)),
    "abandon": ("SELECT rowlock.abandon(%s, 'operator', 'test')", (uuid4(),)),
    "read a table": ("SELECT * FROM rowlock.batch_partitions LIMIT 1", ()),
    "write a table": ("UPDATE rowlock.batch_partitions SET status = 'COMPLETED'", ()),
    "write an execution": ("DELETE FROM rowlock.batch_job_coordination", ()),
}


@pytest.mark.parametrize("what", sorted(_CALLS))
def test_the_operators_role_is_refused(scene: Scene, what: str) -> None:
    statement, values = _CALLS[what]
    with (
        scene.database.connect(role="rowlock_operator") as db,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        db.execute(statement, values)


# -- which database it is ------------------------------------------------------------------------


def nodes_say(database: PrivateDatabase) -> ServerIdentity:
    with Scene(database) as nodes:
        return nodes.store.notice_server(nodes.a_node())


def test_operator_and_nodes_say_the_same_of_the_same_database_only(
    operator: Operator, scene: Scene, database: PrivateDatabase, private_database: PrivateDatabase
) -> None:
    """Whoever looks at another database than the rest, for weeks with an empty queue, is seen by its
    metric: on the same server by the name, on another one even under the same name. (Reported as
    eliza#15207.)"""
    mine: ServerIdentity = operator.do(operator.database.server())
    assert mine == nodes_say(scene.database)

    beside = nodes_say(database)
    assert beside == replace(mine, database=database.name)
    assert beside.labels != mine.labels

    namesake = replace(private_database, name=scene.database.name)
    with psycopg.connect(private_database.cluster.admin_dsn, autocommit=True) as db:
        rename = sql.SQL("ALTER DATABASE {} RENAME TO {}")
        db.execute(
            rename.format(sql.Identifier(private_database.name), sql.Identifier(namesake.name))
        )
    elsewhere = nodes_say(namesake)
    assert elsewhere.database == mine.database
    assert elsewhere.system_identifier != mine.system_identifier
    assert elsewhere.labels != mine.labels
