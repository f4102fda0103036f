"""A node registers as soon as the database lets it, and ends only for what no waiting can mend."""

import threading
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql

from rowlock.db.migrate import check, migrate
from rowlock.db.store import Store
from rowlock.errors import SchemaAhead, SchemaBehind, Unavailable
from rowlock.registry import Registry
from rowlock.runtime import node as node_module
from rowlock.runtime.node import Node, NodeOptions
from rowlock.settings import Settings
from tests.support.postgres import Database
from tests.support.releases import KNOWN, record_migration
from tests.support.waiting import wait_until


def run_a_node(
    database: Database, *, only_execution: UUID | None = None, role: str | None = None
) -> int:
    """Run a node that leaves as soon as it is registered; how often it was registered."""
    registered: list[None] = []

    def leave() -> None:
        registered.append(None)
        node.drain()

    settings = Settings(
        dsn=database.dsn_as(role) if role else database.dsn,
        beat_seconds=0.1,
        unreachable_seconds=0.5,
        removal_grace_seconds=0.5,
        lease_margin_seconds=0.2,
    )
    node = Node(
        settings,
        Registry(),
        NodeOptions(name="n", only_execution=only_execution),
        on_registered=leave,
    )
    node.run()
    return len(registered)


def test_an_outage_in_the_middle_of_registering_is_waited_out(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Any] = []

    def check_and_fail_once(connection: Any) -> None:
        looks.append(connection)
        if len(looks) == 1:
            raise Unavailable("the connection to the database was lost")

    monkeypatch.setattr(node_module, "check", check_and_fail_once)

    assert run_a_node(database) == 1
    assert len(looks) == 2


def test_a_node_that_finds_room_for_one_connection_is_no_member_and_keeps_none(
    database: Database,
) -> None:
    """It would have none to beat with, be removed, and go on holding what another node lacks: nodes that
    start together where there is too little room would all stand still for ever."""
    admin = psycopg.connect(database.cluster.admin_dsn, autocommit=True)
    seen: list[int] = []

    def limit(connections: int) -> None:
        admin.execute(
            sql.SQL("ALTER DATABASE {} CONNECTION LIMIT {}").format(
                sql.Identifier(database.name), sql.Literal(connections)
            )
        )

    def connections() -> int:
        query = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND usename ^@ 'rowlock_node'"
        )
        row = admin.execute(query, [database.name]).fetchone()
        assert row is not None
        return int(row[0])

    def look() -> None:
        try:
            for _ in range(2):
                wait_until(lambda: connections() == 1, seconds=30, what="it connects")
                wait_until(lambda: connections() == 0, seconds=30, what="it keeps nothing")
            seen.append(database.value("SELECT count(*) FROM rowlock.nodes"))
        finally:
            limit(-1)

    limit(1)
    looking = threading.Thread(target=look)
    looking.start()
    assert run_a_node(database, role="rowlock_node") == 1
    looking.join()
    admin.close()
    assert seen == [0], "it tried twice, and was no member"


def test_registering_again_after_a_lost_answer_is_the_same_incarnation(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statement was done, the connection broke, and the repetition met its own row: the node
    waited for ever."""
    register = Store.register
    calls: list[UUID] = []

    def register_and_lose_the_answer_once(store: Store, node: UUID, **row: Any) -> None:
        register(store, node, **row)
        calls.append(node)
        if len(calls) == 1:
            raise psycopg.OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(Store, "register", register_and_lose_the_answer_once)

    assert run_a_node(database) == 1
    assert len(calls) == 2
    assert database.value("SELECT count(*) FROM rowlock.nodes") == 1


def test_a_schema_that_is_not_there_yet_is_waited_for(
    empty_database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever installs nodes and migrations together has no order between them."""
    looks: list[Any] = []

    def migrate_after_the_first_look(connection: Any) -> None:
        looks.append(connection)
        try:
            check(connection)
        except SchemaBehind:
            with empty_database.connect() as db:
                migrate(db)
            raise

    monkeypatch.setattr(node_module, "check", migrate_after_the_first_look)

    assert run_a_node(empty_database) == 1
    assert len(looks) == 2
    assert "run rowlock migrate; trying again" in caplog.text


def test_a_newer_schema_that_works_with_this_code_is_no_obstacle(database: Database) -> None:
    record_migration(database, works_with=KNOWN)

    assert run_a_node(database) == 1


def test_a_node_for_one_execution_ends_where_the_schema_no_longer_works_with_it(
    database: Database,
) -> None:
    """It stands in the way of nodes that can do more for its execution."""
    record_migration(database, works_with=KNOWN + 1)

    with pytest.raises(SchemaAhead, match="upgrade rowlock"):
        run_a_node(database, only_execution=uuid4())
    assert database.value("SELECT count(*) FROM rowlock.nodes") == 0
