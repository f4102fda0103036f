"""rowlock.testing with a database: transactions are real, on a database that rowlock never saw."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import rowlock
from rowlock import testing
from rowlock.errors import UsageError
from tests.support.postgres import Database
from tests.unit.typechecks.settle import Month, Settle

MONTH = Month(year=2024, month=2)
ROWS = 29 * 12


@pytest.fixture
def ledger(empty_database: Database) -> Database:
    with empty_database.connect() as db:
        db.execute("CREATE TABLE ledger (flight bigint PRIMARY KEY, cents bigint NOT NULL)")
    return empty_database


def count(database: Database) -> int:
    found: int = database.value("SELECT count(*) FROM ledger")
    return found


def test_a_job_writes_through_a_connection_string(ledger: Database) -> None:
    result = testing.run(Settle, MONTH, database=ledger.dsn)
    assert count(ledger) == ROWS
    assert result.summary.days == 29
    assert result.summary.cents == ledger.value("SELECT sum(cents)::bigint FROM ledger")


@pytest.mark.parametrize("stop, crash", [(1, None), (None, 1), (None, 0), (2, 1)])
def test_interrupted_attempts_write_every_row_once(
    ledger: Database, stop: int | None, crash: int | None
) -> None:
    """The primary key would refuse a second time."""
    result = testing.run(Settle, MONTH, database=ledger.dsn, stop_after=stop, crash_after=crash)
    assert count(ledger) == ROWS
    assert all(part.attempts > 1 for part in result.partitions)


@pytest.mark.parametrize("autocommit", [False, True])
def test_a_job_writes_inside_the_transaction_of_the_test(
    ledger: Database, autocommit: bool
) -> None:
    with ledger.connect(autocommit=autocommit) as db:
        db.execute("BEGIN") if autocommit else None
        testing.run(Settle, MONTH, database=db, crash_after=1)
        assert db.execute("SELECT count(*) FROM ledger").fetchone() == (ROWS,)
        db.rollback()
    assert count(ledger) == 0


def test_an_idle_autocommit_connection_commits(ledger: Database) -> None:
    with ledger.connect() as db:
        testing.run(Settle, MONTH, database=db)
        assert count(ledger) == ROWS


class Once(rowlock.Job[int, int, int]):
    """One transaction for each attempt, and one in finish()."""

    name = "once"

    def partition(self, params: int, cluster: rowlock.Cluster) -> Iterator[int]:
        yield from range(params)

    def process(self, part: int, ctx: rowlock.Context[int]) -> int:
        with ctx.transaction() as db:
            db.execute("INSERT INTO ledger VALUES (%s, 1)", [part])
        self.then(part, ctx)
        return part

    def then(self, part: int, ctx: rowlock.Context[int]) -> None:
        """What a test adds."""

    def finish(self, params: int, outcome: rowlock.Outcome[int]) -> int:
        with outcome.transaction() as db:
            db.execute("INSERT INTO ledger VALUES (-1, %s)", [outcome.completed])
        return outcome.completed


class Failing(Once):
    """Fails after its transaction."""

    def then(self, part: int, ctx: rowlock.Context[int]) -> None:
        raise rowlock.Fail("after the block")


class Twice(Once):
    """Opens a second transaction."""

    def then(self, part: int, ctx: rowlock.Context[int]) -> None:
        with ctx.transaction():
            pass


class Committing(Once):
    """Writes its own COMMIT."""

    def process(self, part: int, ctx: rowlock.Context[int]) -> int:
        with ctx.transaction() as db:
            db.execute("INSERT INTO ledger VALUES (%s, 1)", [part])
            db.execute("COMMIT")
        return part


def databases(ledger: Database) -> Iterator[Any]:
    yield ledger.dsn
    with ledger.connect() as db:
        yield db
    with ledger.connect(autocommit=False) as db:
        yield db


def test_the_transaction_of_an_attempt_waits_for_its_completion(ledger: Database) -> None:
    assert testing.run(Once, 3, database=ledger.dsn).summary == 3
    assert count(ledger) == 4


def test_an_attempt_that_fails_keeps_nothing(ledger: Database) -> None:
    for database in databases(ledger):
        result = testing.run(Failing, 3, database=database, raise_errors=False)
        assert result.status == "FAILED"
        assert count(ledger) == 0


def test_misuse_is_refused_as_in_production(ledger: Database) -> None:
    for database in databases(ledger):
        with pytest.raises(UsageError, match=r"a second ctx\.transaction"):
            testing.run(Twice, 1, database=database)
        assert count(ledger) == 0


def test_a_commit_of_the_author_is_noticed(ledger: Database) -> None:
    for database in databases(ledger):
        with pytest.raises(UsageError, match="was ended inside its block"):
            testing.run(Committing, 1, database=database)
        with ledger.connect() as db:
            db.execute("DELETE FROM ledger")  # without a fence it is noticed, not undone


def test_an_error_of_the_database_reaches_the_test(ledger: Database) -> None:
    with ledger.connect() as db:
        db.execute("INSERT INTO ledger VALUES (0, 0)")
    for database in databases(ledger):
        with pytest.raises(psycopg.errors.UniqueViolation):
            testing.run(Once, 1, database=database)


def test_a_running_total_survives_interruptions(ledger: Database) -> None:
    class Total(rowlock.Job[int, int, int]):
        name = "total"

        def partition(self, params: int, cluster: rowlock.Cluster) -> Iterator[int]:
            yield params

        def process(self, part: int, ctx: rowlock.Context[int]) -> int:
            total: int = ctx.checkpoint or 0
            for chunk in ctx.chunks(
                lambda after: range(0 if after is None else after + 1, part),
                size=2,
                key=lambda number: number,
            ):
                total += sum(chunk)
                with ctx.transaction() as db:
                    for number in chunk:
                        db.execute("INSERT INTO ledger VALUES (%s, 1)", [number])
                    ctx.save(total)
            return total

    for stop, crash in ((1, None), (None, 1)):
        with ledger.connect(autocommit=False) as db:
            result = testing.run(Total, 9, database=db, stop_after=stop, crash_after=crash)
            assert list(result.results.values()) == [36]
            db.rollback()
