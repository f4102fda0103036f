"""A node deletes what is old, a little at a time, through its work connection."""

from __future__ import annotations

from collections.abc import Generator
from uuid import uuid4

import pytest

from rowlock.db.store import Store
from rowlock.runtime import retention
from rowlock.runtime.retention import Retention
from tests.support.direct_work import DirectWork, a_host
from tests.support.postgres import Database

POLICY = {"max_attempts": 1, "has_finish": False, "max_failed": None}


@pytest.fixture
def work(database: Database) -> Generator[DirectWork]:
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
        yield DirectWork(store)


def test_what_is_old_is_deleted_a_little_at_a_time_and_the_rest_is_kept(
    work: DirectWork, database: Database, monkeypatch: pytest.MonkeyPatch
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


def test_between_two_passes_lie_about_ten_minutes(work: DirectWork) -> None:
    one = Retention(a_host(work))
    one.turn(1e9)
    one.turn(0.0)
    assert work.asked == 1


def test_never_asks_for_nothing(work: DirectWork) -> None:
    never = {f"retention_{kind}_days": None for kind in ("completed", "failed", "events")}
    Retention(a_host(work, **never)).turn(1e9)
    assert work.asked == 0


def test_a_database_that_is_away_is_asked_again_in_the_next_period(work: DirectWork) -> None:
    work.broken = True
    one = Retention(a_host(work))
    one.turn(1e9)
    one.turn(1e9)
    assert work.asked == 2
