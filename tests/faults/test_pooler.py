"""A real PgBouncer, in transaction mode, between the nodes and the database."""

import asyncio
import re
from collections.abc import Generator

import psycopg
import pytest
from psycopg import sql

from rowlock_operator.database import Database
from tests.support.fault_jobs import part, parts, step
from tests.support.fleet import Fleet, NodeProcess
from tests.support.pgbouncer import PgBouncer
from tests.support.tools import program

SETTINGS = (
    "SELECT name, setting FROM pg_settings WHERE name ~ '_timeout$|^jit$|^default_transaction'"
    " ORDER BY name"
)


@pytest.fixture
def pooler(fleet: Fleet) -> Generator[PgBouncer]:
    program("pgbouncer")
    with PgBouncer(fleet.database) as bouncer:
        yield bouncer


def pooled_node(fleet: Fleet, pooler: PgBouncer, name: str) -> NodeProcess:
    """A node that reaches its database through the pooler alone."""
    return fleet.node(
        name,
        slots=2,
        wait=False,
        ROWLOCK_DSN=pooler.dsn_as("rowlock_node"),
        ROWLOCK_WORK_DSN=pooler.work_dsn_as("rowlock_node"),
    )


def test_four_nodes_do_everything_through_a_pool_of_two_sessions(
    fleet: Fleet, pooler: PgBouncer
) -> None:
    """Four nodes have two sessions between them, and two more for their authors' transactions. All is done once, in exactly-once transactions too; a node that is killed is found, a
    cancel arrives, nobody is removed by mistake, and no setting is left in a session for strangers.
    (Elsewhere prepared statements vanish, locks of the session exclude nobody and settings leak.
    Reported as good_job#52, #1214 and #269, netbox#23009, pgbouncer#418, psycopg#280, #935 and #1151.)"""
    nodes = [pooled_node(fleet, pooler, f"n{n}") for n in range(4)]
    for node in nodes:
        node.wait_registered()
    work = fleet.request(
        "fault.summed",
        parts=[
            *parts(60, step("sleep", 0.02), prefix="plain"),
            *parts(20, step("rows", 3), prefix="rows"),
            *parts(4, step("chunks", {"items": 20, "size": 5}), prefix="chunks"),
        ],
    )
    once = fleet.request("fault.once", parts=parts(12, step("sleep", 0.02), prefix="once"))
    fleet.wait(work)
    fleet.wait(once)
    starts = [start.key for start in fleet.ledger().of("start")]
    assert len(starts) == len(set(starts)) == 96
    effects = fleet.rows("SELECT key, count(*) FROM fleet.effects WHERE key ^@ 'rows' GROUP BY key")
    assert [effect.count for effect in effects] == [3] * 20
    assert not fleet.db_events("node_removed")

    late = fleet.request(parts=[part("late", step("wait", fleet.path("go")))])
    victim = next(node for node in nodes if node.name == fleet.wait_started("late").node)
    victim.crash()
    assert fleet.wait_started("late", 2).node != victim.name
    fleet.rows("SELECT rowlock.cancel(%s, 'a test', NULL)", late)
    fleet.wait(late, "CANCELLED")
    assert [event.node_id for event in fleet.db_events("node_removed")] == [victim.incarnation]

    assert not re.search("prepared statement|query_wait_timeout", pooler.log())
    with fleet.database.connect(role="rowlock_node") as fresh:
        untouched = fresh.execute(SETTINGS).fetchall()
    dsn = pooler.dsn_as("rowlock_node")
    with psycopg.connect(dsn) as first, psycopg.connect(dsn) as second:  # all sessions of the pool
        assert first.execute(SETTINGS, prepare=False).fetchall() == untouched
        assert second.execute(SETTINGS, prepare=False).fetchall() == untouched


def test_an_operator_asks_through_the_pooler_and_leaves_no_trace(
    fleet: Fleet, pooler: PgBouncer
) -> None:
    """Its questions are asked often enough to be prepared elsewhere, in two connections over one pool."""
    dsn = pooler.dsn_as("rowlock_operator")

    async def ask() -> None:
        database = Database(lambda: dsn, "eu-1")
        for _ in range(12):
            assert await database.live() == []
            assert await database.execution_of("uid") is None
            await database.hint(0.01)
        await database.close()

    asyncio.run(ask())
    with fleet.database.connect(role="rowlock_operator") as fresh:
        untouched = fresh.execute(SETTINGS).fetchall()
    with psycopg.connect(dsn) as first, psycopg.connect(dsn) as second:
        assert first.execute(SETTINGS, prepare=False).fetchall() == untouched
        assert second.execute(SETTINGS, prepare=False).fetchall() == untouched


def test_a_node_whose_transactions_could_not_be_fenced_refuses_to_start(
    fleet: Fleet, pooler: PgBouncer
) -> None:
    """The pooler would give an author's transaction a session that may write after a COMMIT of the
    author's own: the node ends at once, and says what to set."""
    node = fleet.node("one", wait=False, ROWLOCK_DSN=pooler.dsn_as("rowlock_node"))

    assert node.wait_gone() == 2
    told = node.log_path.read_text()
    assert "leads through a pooler" in told
    assert "ROWLOCK_WORK_DSN" in told
    assert "default_transaction_read_only" in told
    assert not fleet.rows("SELECT FROM rowlock.batch_nodes")


def test_transactions_are_fenced_in_sessions_that_are_reset_after_each(fleet: Fleet) -> None:
    """The pooler takes away whatever was SET in a session before another gets it; that it is read-only by default
    must be the login's own, then. (What the pooler SETs itself when it connects is gone after one transaction:
    the attempt fails and says so. It does not go on unfenced.)"""
    program("pgbouncer")
    login = fleet.database.cluster.login("rowlock_reader")
    for statement in (
        "ALTER ROLE {} IN DATABASE {} SET default_transaction_read_only = on",
        "GRANT EXECUTE ON FUNCTION rowlock.fence_open, rowlock.fence_arm TO {}",
    ):
        with fleet.database.connect() as db:
            names = sql.Identifier(login), sql.Identifier(fleet.database.name)
            db.execute(sql.SQL(statement).format(*names))
    with PgBouncer(fleet.database, server_reset_query_always=1) as pooler:
        dsn = pooler.dsn_as("rowlock_node")
        node = fleet.node(
            "fenced", wait=False, ROWLOCK_DSN=dsn, ROWLOCK_WORK_DSN=pooler.dsn_as("rowlock_reader")
        )
        node.wait_registered()
        work = step("chunks", {"items": 20, "size": 5})
        fleet.wait(fleet.request(parts=[part("fenced", work)]))
        node.stop()

        fleet.node(
            "not", wait=False, ROWLOCK_DSN=dsn, ROWLOCK_WORK_DSN=pooler.work_dsn_as("rowlock_node")
        )
        run = fleet.request("fault.once", parts=[part("not", work)])
        fleet.wait(run, "FAILED")
        (row,) = fleet.rows_of(run)
        assert "not read-only by default" in row.last_error["message"]


def test_a_login_whose_defaults_could_lose_a_claim_is_refused_behind_a_pooler(
    fleet: Fleet, pooler: PgBouncer
) -> None:
    """The database's own default is not to wait for the disk at COMMIT. A direct connection is set up
    otherwise; behind a pooler that cannot be done, so the node ends at once, and says why."""
    fleet.rows(
        "DO $$ BEGIN EXECUTE format("
        "'ALTER DATABASE %I SET synchronous_commit = off', current_database()); END $$"
    )
    fleet.node("direct")

    node = pooled_node(fleet, pooler, "pooled")

    assert node.wait_gone() == 2
    assert "synchronous_commit = off" in node.log_path.read_text()
