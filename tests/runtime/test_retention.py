"""A node deletes what is old, a little at a time, through its work connection."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import psycopg
import pytest

from rowlock.db.store import Store
from rowlock.runtime import retention
from rowlock.runtime.host import Host
from rowlock.runtime.retention import Retention
from rowlock.settings import Settings
from tests.support.postgres import Database

POLICY = {"max_attempts": 1, "has_finish": False, "max_failed": None}


class Work:
    """Carries an operation out at once, or fails it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.asked = 0
        self.broken = False

    def ask(
        self,
        run: Callable[[Store], Any],
        done: Callable[[Any], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self.asked += 1
        if self.broken:
            failed(psycopg.OperationalError("gone"))
        else:
            done(run(self.store))


def a_host(work: Work, **settings: Any) -> Host:
    """A registered node, as far as the retention looks at it; its chance is always 0."""
    rng = SimpleNamespace(random=lambda: 0.0, uniform=random.Random(1).uniform)
    host = SimpleNamespace(
        settings=Settings(**settings), work=work, rng=rng, registered=True, draining=False
    )
    return cast(Host, host)


@pytest.fixture
def work(database: Database) -> Generator[Work]:
    """Over a database with three executions that were cancelled two days ago."""
    with database.connect(role="rowlock_node") as connection:
        store = Store(connection)
        for _ in range(3):
            execution = uuid4()
            store.request(
                execution,
                job="j",
                contract_hash="h",
                policy=POLICY,
                delivery="AT_LEAST_ONCE",
                instance_key=execution.hex,
                parameters="{}",
                pool="default",
            )
            store.cancel(execution, "a test", None)
        with database.connect() as db:
            db.execute(
                "UPDATE rowlock.batch_job_coordination SET ended_at = ended_at - interval '2 days'"
            )
        yield Work(store)


def test_what_is_old_is_deleted_a_little_at_a_time_and_the_rest_is_kept(
    work: Work, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "ROWS_MAX", 1)
    executions = "SELECT count(*) FROM rowlock.batch_job_coordination"
    kept = Retention(a_host(work, retention_failed_days=3))
    kept.turn(1e9)
    assert database.value(executions) == 3

    deleting = Retention(a_host(work, retention_failed_days=1))
    deleting.turn(1e9)
    for _ in range(9):
        deleting.turn(0.1)  # at once again, while there is more

    assert database.value(executions) == 0
    assert database.value("SELECT count(*) FROM rowlock.batch_instances") == 3


def test_between_two_passes_lie_about_ten_minutes(work: Work) -> None:
    one = Retention(a_host(work))
    one.turn(1e9)
    one.turn(0.0)
    assert work.asked == 1


def test_never_asks_for_nothing(work: Work) -> None:
    never = {f"retention_{kind}_days": None for kind in ("completed", "failed", "events")}
    Retention(a_host(work, **never)).turn(1e9)
    assert work.asked == 0


def test_a_database_that_is_away_is_asked_again_in_the_next_period(work: Work) -> None:
    work.broken = True
    one = Retention(a_host(work))
    one.turn(1e9)
    one.turn(1e9)
    assert work.asked == 2
