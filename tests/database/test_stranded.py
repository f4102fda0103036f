"""Transactions whose claim or mastership is gone: who sees them, and who may end them."""

import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from rowlock.protocol.model import Claim
from tests.support.builders import Run, Scene, a_policy
from tests.support.waiting import wait_until


@contextmanager
def a_transaction(
    scene: Scene, fence: str, row: Any, guard: Any, *, role: str | None = "rowlock_node"
) -> Generator[psycopg.Connection[Any]]:
    """An author's transaction behind a fence, open until the block ends."""
    db = scene.database.connect(role=role, autocommit=False)
    try:
        if fence == "work":
            db.execute("SELECT rowlock.fence_open(%s, %s)", [row, guard])
        else:
            db.execute("SELECT rowlock.fence_open_finish(%s, %s)", [row, guard])
        yield db
    finally:
        db.close()


def of(scene: Scene, claim: Claim, **role: Any) -> Any:
    return a_transaction(scene, "work", claim.id, claim.token, **role)


def stranded(scene: Scene) -> list[int]:
    """What a node would end."""
    db = scene.store.connection
    return [pid for (pid,) in db.execute("SELECT pid FROM rowlock.stranded_sessions()").fetchall()]


def test_the_transaction_of_a_claim_that_stands_is_left_alone(alone: Scene) -> None:
    _, claim = alone.a_claim()

    with of(alone, claim):
        assert stranded(alone) == []
        assert alone.store.end_stranded() == 0


def test_the_transaction_of_a_lost_claim_is_ended_and_frees_its_locks(alone: Scene) -> None:
    node, claim = alone.a_claim()
    with of(alone, claim) as db:
        db.execute("SELECT pg_advisory_xact_lock(7)")
        alone.remove(node)

        assert stranded(alone) == [db.info.backend_pid]
        assert alone.store.end_stranded() == 1

        wait_until(lambda: alone.one("SELECT pg_try_advisory_lock(7) AS got").got)
        wait_until(lambda: stranded(alone) == [])


def test_the_next_claim_does_not_save_the_transaction_of_the_last(alone: Scene) -> None:
    node, claim = alone.a_claim()
    with of(alone, claim) as old:
        alone.release(node, claim)
        (again,) = alone.claim(node)
        with of(alone, again):
            assert stranded(alone) == [old.info.backend_pid]


def test_an_attempt_that_begins_between_two_looks_is_left_alone(alone: Scene) -> None:
    """The claims were read, then the machine was busy for a moment, then the sessions were read."""
    alone.an_execution(1)
    node = alone.a_node()
    (source,) = alone.one(
        "SELECT prosrc FROM pg_proc WHERE oid = 'rowlock.stranded_sessions'::regproc"
    )
    sessions = "FROM pg_stat_activity a"
    assert source.count(sessions) == 1
    paused = source.replace(
        sessions,
        "FROM (SELECT pg_sleep(CASE v_look WHEN 1 THEN 1 ELSE 0 END) OFFSET 0) paused,"
        " LATERAL (SELECT * FROM pg_stat_activity WHERE paused IS NOT NULL OFFSET 0) a",
    )
    alone.admin.execute(
        sql.SQL(
            "CREATE FUNCTION public.paused() RETURNS TABLE (pid integer) LANGUAGE plpgsql SECURITY DEFINER"
            " SET search_path = pg_catalog, rowlock, pg_temp AS {}"
        ).format(sql.Literal(paused))
    )
    looking = alone.a_store().connection
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(lambda: looking.execute("SELECT pid FROM public.paused()").fetchall())
        time.sleep(0.3)
        (claim,) = alone.claim(node, idle=True)
        with of(alone, claim):
            assert found.result() == []


def test_a_session_between_transactions_is_nobodys(alone: Scene) -> None:
    """The name lasts as long as the transaction."""
    node, claim = alone.a_claim()
    with of(alone, claim) as db:
        db.rollback()
        alone.remove(node)

        assert stranded(alone) == []


def test_the_transaction_of_a_finish_is_stranded_under_another_master(alone: Scene) -> None:
    run: Run = alone.an_execution(1, policy=a_policy(has_finish=True))
    node = alone.a_node()
    (claim,) = alone.claim(node)
    alone.complete(node, claim)
    alone.store.advance(run.master, run.id, run.epoch)
    with a_transaction(alone, "finish", run.id, run.epoch) as db:
        assert stranded(alone) == []
        alone.remove(run.master)
        taken = alone.store.adopt(node, run.id)
        assert taken is not None

        assert stranded(alone) == [db.info.backend_pid]


def test_sessions_of_a_login_that_the_node_may_not_end_are_left_to_themselves(alone: Scene) -> None:
    """pg_terminate_backend would raise, and with it the whole statement."""
    node, claim = alone.a_claim()
    with of(alone, claim, role=None):  # a superuser
        alone.remove(node)

        assert stranded(alone) == []


def test_sessions_of_a_login_that_was_granted_to_that_of_the_nodes_are_ended(alone: Scene) -> None:
    """That is what a login of its own for authors' transactions needs."""
    name = f"work_{uuid4().hex[:8]}"
    work = sql.Identifier(name)
    nodes = sql.Identifier(alone.database.cluster.login("rowlock_node"))
    node, claim = alone.a_claim()
    make = "CREATE ROLE {} LOGIN PASSWORD 'secret' IN ROLE rowlock_node"
    alone.admin.execute(sql.SQL(make).format(work))
    try:
        dsn = make_conninfo(alone.database.dsn, user=name, password="secret")
        with psycopg.connect(dsn) as db:
            db.execute("SELECT rowlock.fence_open(%s, %s)", [claim.id, claim.token])
            alone.remove(node)
            assert stranded(alone) == []

            alone.admin.execute(sql.SQL("GRANT {} TO {}").format(work, nodes))

            assert stranded(alone) == [db.info.backend_pid]
            assert alone.store.end_stranded() == 1
            wait_until(lambda: stranded(alone) == [])
            db.close()
    finally:
        alone.admin.execute(sql.SQL("DROP ROLE {}").format(work))


def test_names_that_only_look_like_ours_stop_nothing(alone: Scene) -> None:
    alone.a_claim()
    for name in (
        f"rowlock work {'-' * 36}",
        f"rowlock finish {'0' * 32} {'9' * 18}",
        "rowlock work",
    ):
        with alone.database.connect(role="rowlock_node") as db:
            db.execute("SELECT set_config('application_name', %s, false)", [name])
            found = stranded(alone)
            assert found in ([], [db.info.backend_pid]), name
