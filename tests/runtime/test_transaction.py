"""The fence, against a real PostgreSQL: what an author writes counts once, or not at all."""

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

import rowlock
from rowlock.registry import Registry
from rowlock.runtime.channel import Channel
from rowlock.runtime.executor import Executor
from rowlock.runtime.messages import (
    Checkpoint,
    CommitUnknown,
    Completed,
    Exit,
    Failed,
    Finish,
    Finished,
    Lock,
    Lost,
    Message,
    Reply,
    Run,
    Stop,
    Stopped,
    ToSupervisor,
    Unlock,
)
from rowlock.runtime.transaction import WorkConnection
from tests.support.executor_peer import Peer, error_of
from tests.support.postgres import Cluster, Database
from tests.support.waiting import wait_until

Author = Callable[[rowlock.Context[None]], Any]
Ending = Callable[[rowlock.Outcome[str]], Any]
Attack = Callable[[Any], object]

INSERT = "INSERT INTO public.ledger (n) VALUES (%s)"

_author: list[Author] = []
_ending: list[Ending] = []


class Scripted(rowlock.Job[None, int, str]):
    """Its author code is what a test says."""

    name = "test.scripted"

    def partition(self, params: None, cluster: rowlock.Cluster) -> list[int]:
        return [1]

    def process(self, part: int, ctx: rowlock.Context[None]) -> str:
        result: str = _author[0](ctx)
        return result

    def finish(self, params: None, outcome: rowlock.Outcome[str]) -> str:
        result: str = _ending[0](outcome)
        return result


class FakeChannel(Channel):
    """Answers a checkpoint as a supervisor does, by writing it under the token."""

    def __init__(self, work: "Work") -> None:
        self.work = work
        self.checkpoints: list[str] = []
        self.locks: list[Lock | Unlock] = []

    def send(self, message: Message) -> None:
        if isinstance(message, Checkpoint):
            self.checkpoints.append(message.checkpoint)
            ok = self.work.write_checkpoint(message.checkpoint)
            self.work.receive(Reply(request=message.request, ok=ok))
        elif isinstance(message, (Lock, Unlock)):
            self.locks.append(message)
            self.work.receive(Reply(request=message.request, ok=True, body="acquired"))


class Work:
    """A claimed partition of a running execution, a table of the author's, and an executor."""

    def __init__(self, database: Database, *, dsn: str | None = None) -> None:
        self.database = database
        self.execution = uuid4()
        self.token = uuid4()
        with database.connect() as db:
            db.execute("DROP TABLE IF EXISTS public.ledger")
            db.execute("CREATE TABLE public.ledger (n integer)")
            db.execute("GRANT SELECT, INSERT, TRUNCATE ON public.ledger TO rowlock_node")
            db.execute(
                "INSERT INTO rowlock.batch_job_coordination (execution_id, job_name, contract_hash,"
                " policy, delivery, instance_key, parameters, pool, adopt_after, requested_at,"
                " status, total, step, master_node, master_epoch) VALUES (%s, 'test.scripted', 'h',"
                " %s, 'AT_LEAST_ONCE', 'i', 'null', 'p', now(), now(), 'RUNNING', 1, 'main', %s, 7)",
                (self.execution, json.dumps(Scripted.policy()), uuid4()),
            )
            row = db.execute(
                "INSERT INTO rowlock.batch_partitions (execution_id, step, partition_key, status,"
                " assigned_node, claim_token, claimed_at, started_at, delivery, slice)"
                " VALUES (%s, 'main', 'k', 'CLAIMED', %s, %s, now(), now(), 'AT_LEAST_ONCE', '1')"
                " RETURNING id",
                (self.execution, uuid4(), self.token),
            ).fetchone()
        assert row is not None
        self.partition: int = row[0]
        self.channel = FakeChannel(self)
        self.executor = Executor(
            self.channel, Registry([Scripted]), dsn or database.dsn_as("rowlock_node")
        )
        self._attempt = 0

    def close(self) -> None:
        session = self.executor.work_session()
        session.close()

    # -- the supervisor's part -----------------------------------------------------------------

    def receive(self, message: Message) -> None:
        self.executor._inbox._take(message)

    def write_checkpoint(self, checkpoint: str) -> bool:
        with self.database.connect() as db:
            updated = db.execute(
                "UPDATE rowlock.batch_partitions SET checkpoint = %s"
                " WHERE id = %s AND claim_token = %s AND status = 'CLAIMED'",
                (checkpoint, self.partition, self.token),
            )
            return updated.rowcount == 1

    def run(self, author: Author, **change: Any) -> ToSupervisor:
        """One attempt, as the main thread of an executor makes it."""
        self._attempt += 1
        _author[:] = [author]
        checkpoint = self.row()["checkpoint"]
        run = Run(
            attempt=self._attempt,
            job="test.scripted",
            execution_id=str(self.execution),
            instance_key="i",
            step="main",
            partition_id=self.partition,
            key="k",
            claim_token=str(self.token),
            attempt_number=1,
            slice="1",
            parameters="null",
            checkpoint=None if checkpoint is None else json.dumps(checkpoint),
            handshake=False,
        )
        return self.end(self.executor._perform(replace(run, **change)))

    def finish(self, ending: Ending, *, epoch: int = 7) -> ToSupervisor:
        _ending[:] = [ending]
        self._attempt += 1
        finish = Finish(
            attempt=self._attempt,
            job="test.scripted",
            execution_id=str(self.execution),
            epoch=epoch,
            parameters="null",
            counts='{"total": 1, "completed": 1, "failed": 0, "cancelled": 0}',
        )
        return self.end(self.executor._perform(finish))

    def end(self, answer: ToSupervisor) -> ToSupervisor:
        self.executor._after(answer)
        return answer

    # -- what others do meanwhile --------------------------------------------------------------

    def take_claim_away(self) -> None:
        """As a reaper does; fails if it would have to wait for the holder."""
        with self.database.connect() as db:
            db.execute("SET lock_timeout = '2s'")
            db.execute(
                "UPDATE rowlock.batch_partitions SET claim_token = %s WHERE id = %s",
                (uuid4(), self.partition),
            )

    def kill_backend(self) -> None:
        """End the server's side of the work connection."""
        gone = (
            "SELECT NOT EXISTS (SELECT FROM pg_stat_activity"
            " WHERE starts_with(application_name, 'rowlock work') AND datname = current_database())"
        )
        self.database.rows(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE starts_with(application_name, 'rowlock work') AND datname = current_database()"
        )
        wait_until(lambda: self.database.value(gone))

    # -- what is in the database ---------------------------------------------------------------

    def ledger(self) -> list[int]:
        return [n for (n,) in self.database.rows("SELECT n FROM public.ledger ORDER BY n")]

    def row(self) -> dict[str, Any]:
        with self.database.connect() as db, db.cursor(row_factory=dict_row) as cursor:
            cursor.execute(
                "SELECT * FROM rowlock.batch_partitions WHERE id = %s", (self.partition,)
            )
            found = cursor.fetchone()
        assert found is not None
        return found

    def status(self) -> str:
        status: str = self.row()["status"]
        return status


@pytest.fixture(scope="module")
def arena(postgres: Cluster) -> Iterator[Database]:
    """One database for all tests here; each has rows and a table of its own."""
    made = postgres.create()
    yield made
    postgres.drop(made.name)


@pytest.fixture
def work(arena: Database) -> Iterator[Work]:
    made = Work(arena)
    yield made
    made.close()


@pytest.fixture
def as_superuser(arena: Database) -> Iterator[Work]:
    """The author's connection may do anything."""
    made = Work(arena, dsn=arena.dsn)
    yield made
    made.close()


def usage_error(answer: ToSupervisor) -> str:
    """The message of an attempt that failed because its author broke a rule."""
    assert isinstance(answer, Failed), answer
    error = error_of(answer)
    assert error["type"] == "rowlock.errors.UsageError", error
    return error["message"]


def write(*values: int, result: str = "done") -> Author:
    """One transaction that inserts these."""

    def author(ctx: rowlock.Context[None]) -> str:
        with ctx.transaction() as db:
            for value in values:
                db.execute(INSERT, (value,))
        return result

    return author


def chunks(ctx: rowlock.Context[None], total: int, size: int = 2) -> Iterator[list[int]]:
    return ctx.chunks(
        lambda after: range((after or 0) + 1, total + 1), size=size, key=lambda item: item
    )


# -- one transaction per attempt -----------------------------------------------------------------


def test_rows_and_completion_are_committed_together(work: Work) -> None:
    seen: list[tuple[list[int], str]] = []

    def author(ctx: rowlock.Context[None]) -> str:
        with ctx.transaction() as db:
            db.execute(INSERT, (1,))
        seen.append((work.ledger(), work.status()))  # the block has ended, process() has not
        return "done"

    answer = work.run(author)

    assert answer == Completed(attempt=1, result='"done"', committed=True)
    assert seen == [([], "CLAIMED")]
    assert work.ledger() == [1]
    assert (work.status(), work.row()["result"]) == ("COMPLETED", "done")


def test_an_attempt_without_a_transaction_is_completed_by_the_supervisor(work: Work) -> None:
    answer = work.run(lambda ctx: "done")
    assert answer == Completed(attempt=1, result='"done"', committed=False)
    assert work.status() == "CLAIMED"


def test_a_result_of_any_text_arrives_whole(work: Work) -> None:
    result = "it's \\ \" é % %s {} \n €"
    assert isinstance(work.run(write(1, result=result)), Completed)
    assert work.row()["result"] == result


def test_an_exception_after_the_block_rolls_back(work: Work) -> None:
    def author(ctx: rowlock.Context[None]) -> str:
        write(1)(ctx)
        raise ValueError("after the block")

    answer = work.run(author)
    assert isinstance(answer, Failed)
    assert (answer.retry, error_of(answer)["message"]) == ("policy", "after the block")
    assert (work.ledger(), work.status()) == ([], "CLAIMED")


def test_a_wrong_result_rolls_back(work: Work) -> None:
    def author(ctx: rowlock.Context[None]) -> Any:
        write(1)(ctx)
        return 5

    answer = work.run(author)
    assert isinstance(answer, Failed)
    assert answer.retry == "never"
    assert (work.ledger(), work.status()) == ([], "CLAIMED")


def test_stopping_rolls_back(work: Work) -> None:
    def author(ctx: rowlock.Context[None]) -> str:
        write(1)(ctx)
        work.receive(Stop(attempt=1))
        assert ctx.should_stop
        return "half"

    work.executor._inbox._current = 1
    assert work.run(author) == Stopped(attempt=1)
    assert (work.ledger(), work.status()) == ([], "CLAIMED")


@pytest.mark.parametrize("swallow", [False, True])
def test_a_second_transaction_is_refused_and_nothing_is_kept(work: Work, swallow: bool) -> None:
    def author(ctx: rowlock.Context[None]) -> str:
        write(1)(ctx)
        try:
            write(2)(ctx)
        except Exception:
            if not swallow:
                raise
        return "done"

    assert "a second ctx.transaction() in one attempt" in usage_error(work.run(author))
    assert (work.ledger(), work.status()) == ([], "CLAIMED")


def test_a_block_that_was_rolled_back_may_be_tried_again(work: Work) -> None:
    def author(ctx: rowlock.Context[None]) -> str:
        for value in (1, 2):
            try:
                with ctx.transaction() as db:
                    db.execute(INSERT, (value,))
                    if value == 1:
                        raise ValueError("not this one")
            except ValueError:
                continue
        return "done"

    assert isinstance(work.run(author), Completed)
    assert (work.ledger(), work.status()) == ([2], "COMPLETED")


def test_a_transaction_inside_a_transaction_is_refused(work: Work) -> None:
    def author(ctx: rowlock.Context[None]) -> str:
        with ctx.transaction():
            return write(1)(ctx)  # type: ignore[no-any-return]  # never returns

    assert "ctx.transaction() inside ctx.transaction()" in usage_error(work.run(author))
    assert work.ledger() == []


def test_save_while_the_transaction_is_open_is_refused(work: Work) -> None:
    def inside(ctx: rowlock.Context[None]) -> str:
        with ctx.transaction():
            ctx.save("state")
        return "done"

    def behind(ctx: rowlock.Context[None]) -> str:
        write(1)(ctx)
        ctx.save("state")
        return "done"

    for author in (inside, behind):
        assert "ctx.save() while" in usage_error(work.run(author))
    assert (work.ledger(), work.row()["checkpoint"]) == ([], None)


def test_savepoints_are_the_author_s(work: Work) -> None:
    def author(ctx: rowlock.Context[None]) -> str:
        with ctx.transaction() as db:
            db.execute(INSERT, (1,))
            try:
                with db.transaction():
                    db.execute(INSERT, (2,))
                    raise ValueError("undo this part")
            except ValueError:
                db.execute(INSERT, (3,))
        return "done"

    assert isinstance(work.run(author), Completed)
    assert work.ledger() == [1, 3]


# -- transactions inside chunks ------------------------------------------------------------------


def test_each_chunk_s_rows_and_checkpoint_are_committed_together(work: Work) -> None:
    seen: list[tuple[list[int], Any]] = []

    def author(ctx: rowlock.Context[None]) -> str:
        for chunk in chunks(ctx, 5):
            with ctx.transaction() as db:
                for item in chunk:
                    db.execute(INSERT, (item,))
            seen.append((work.ledger(), work.row()["checkpoint"]["after"]))
        return "done"

    assert work.run(author) == Completed(attempt=1, result='"done"', committed=False)
    assert seen == [([1, 2], 2), ([1, 2, 3, 4], 4), ([1, 2, 3, 4, 5], 5)]
    assert work.channel.checkpoints == []  # the supervisor was asked for none
    assert work.row()["checkpoint"] == {"after": 5, "items": 5, "state": None, "saves": 3}


@pytest.mark.parametrize("fail_at", range(1, 8))
def test_attempts_that_fail_anywhere_write_every_item_once(work: Work, fail_at: int) -> None:
    def author(ctx: rowlock.Context[None]) -> str:
        for chunk in chunks(ctx, 7, size=3):
            with ctx.transaction() as db:
                for item in chunk:
                    db.execute(INSERT, (item,))
                    if item == fail_at and ctx.attempt == 1:
                        raise ValueError(item)
        return "done"

    assert isinstance(work.run(author), Failed)
    assert isinstance(work.run(author, attempt_number=2), Completed)
    assert work.ledger() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("swallow", [False, True])
def test_a_second_transaction_in_one_chunk_is_refused(work: Work, swallow: bool) -> None:
    def author(ctx: rowlock.Context[None]) -> str:
        for chunk in chunks(ctx, 4):
            write(chunk[0])(ctx)
            try:
                write(chunk[1])(ctx)
            except Exception:
                if not swallow:
                    raise
        return "done"

    assert "a second ctx.transaction() in one chunk" in usage_error(work.run(author))
    assert work.ledger() == [1]
    assert work.row()["checkpoint"]["after"] == 2  # which is why a second one would be lost


def test_a_chunk_s_block_that_was_rolled_back_may_be_tried_again(work: Work) -> None:
    def author(ctx: rowlock.Context[None]) -> str:
        for chunk in chunks(ctx, 2):
            try:
                with ctx.transaction() as db:
                    ctx.save("first try")
                    db.execute("SELECT 1 / 0")
            except psycopg.errors.DivisionByZero:
                write(*chunk)(ctx)
        return "done"

    assert isinstance(work.run(author), Completed)
    assert work.ledger() == [1, 2]
    assert work.row()["checkpoint"]["state"] is None  # it was rolled back as well


def test_save_inside_a_chunk_s_block_travels_with_its_commit(work: Work) -> None:
    seen: list[Any] = []

    def author(ctx: rowlock.Context[None]) -> str:
        for chunk in chunks(ctx, 4):
            with ctx.transaction() as db:
                db.execute(INSERT, (chunk[0],))
                ctx.save({"sum": sum(chunk)})
                seen.append((ctx.checkpoint, work.row()["checkpoint"]))
        return "done"

    assert isinstance(work.run(author), Completed)
    first = {"after": 2, "items": 2, "state": {"sum": 3}, "saves": 1}
    assert seen == [({"sum": 3}, None), ({"sum": 7}, first)]
    assert work.row()["checkpoint"] == {
        **first,
        "after": 4,
        "items": 4,
        "state": {"sum": 7},
        "saves": 2,
    }


def test_the_two_forms_do_not_mix(work: Work) -> None:
    def chunks_first(ctx: rowlock.Context[None]) -> str:
        for chunk in chunks(ctx, 2):
            write(*chunk)(ctx)
        write(9)(ctx)
        return "done"

    def inside(ctx: rowlock.Context[None]) -> str:
        with ctx.transaction():
            list(chunks(ctx, 2))
        return "done"

    def behind(ctx: rowlock.Context[None]) -> str:
        write(9)(ctx)
        list(chunks(ctx, 2))
        return "done"

    assert "after transactions inside it" in usage_error(work.run(chunks_first))
    for author in (inside, behind):
        assert "ctx.chunks inside, or after" in usage_error(work.run(author))
    assert work.ledger() == [1, 2]
    assert work.status() == "CLAIMED"


def test_a_chunk_loop_without_transactions_may_end_in_one(work: Work) -> None:
    def author(ctx: rowlock.Context[None]) -> str:
        total = sum(sum(chunk) for chunk in chunks(ctx, 4))
        write(total)(ctx)
        return "done"

    assert isinstance(work.run(author), Completed)
    assert work.ledger() == [10]


# -- named locks ---------------------------------------------------------------------------------


def test_a_lock_around_the_attempt_s_transaction_is_held_until_its_commit(work: Work) -> None:
    def author(ctx: rowlock.Context[None]) -> str:
        with ctx.lock("x"), ctx.transaction() as db:
            insert(db, 1)
        return "done"

    answer = work.run(author)

    assert isinstance(answer, Completed)
    assert answer.committed
    assert work.ledger() == [1]
    assert [type(sent) for sent in work.channel.locks] == [Lock]


def test_a_lock_around_a_chunk_s_transaction_is_free_after_it(work: Work) -> None:
    def author(ctx: rowlock.Context[None]) -> str:
        for chunk in chunks(ctx, 4):
            with ctx.lock("x"), ctx.transaction() as db:
                insert(db, chunk[0])
        return "done"

    assert isinstance(work.run(author), Completed)
    assert work.ledger() == [1, 3]
    assert [type(sent) for sent in work.channel.locks] == [Lock, Unlock, Lock, Unlock]


def test_a_lock_is_free_after_a_transaction_that_was_rolled_back(work: Work) -> None:
    def author(ctx: rowlock.Context[None]) -> str:
        with ctx.lock("x"):
            try:
                with ctx.transaction() as db:
                    insert(db, 1)
                    raise KeyError
            except KeyError:
                pass
        return "done"

    assert isinstance(work.run(author), Completed)
    assert work.ledger() == []
    assert [type(sent) for sent in work.channel.locks] == [Lock, Unlock]


@pytest.mark.parametrize("inside", [True, False])
def test_a_lock_inside_or_after_an_open_transaction_is_refused(work: Work, inside: bool) -> None:
    """It would be free before the rows are committed, or wait while they are locked."""

    def author(ctx: rowlock.Context[None]) -> str:
        with ctx.transaction() as db:
            insert(db, 1)
            if inside:
                with ctx.lock("x"):
                    pass
        with ctx.lock("x"):
            return "done"

    assert "Take the lock first" in usage_error(work.run(author))
    assert work.ledger() == []
    assert work.channel.locks == []


# -- attacks on the fence ------------------------------------------------------------------------


def insert(db: Any, value: int = 99) -> None:
    db.execute(INSERT, (value,))


def in_turn(*statements: str) -> Attack:
    """Execute these one after the other, whatever the earlier ones raise."""

    def attack(db: Any) -> None:
        errors: list[Exception] = []
        for statement in statements:
            try:
                db.execute(statement)
            except psycopg.Error as error:
                errors.append(error)
        if errors:
            raise errors[0]

    return attack


WRITE = "INSERT INTO public.ledger VALUES (99)"

ATTACKS: dict[str, Attack] = {
    "execute commit": in_turn("COMMIT"),
    "execute end": in_turn("END"),
    "commit, then write": in_turn("COMMIT", WRITE),
    "commit and write in one": in_turn(f"COMMIT; {WRITE}"),
    "commit, begin, write in one": in_turn(f"COMMIT; BEGIN; {WRITE}; COMMIT"),
    "commit and chain": in_turn("COMMIT AND CHAIN", WRITE, "COMMIT"),
    "execute rollback": in_turn("ROLLBACK"),
    "rollback, then write": in_turn("ROLLBACK", WRITE),
    "rollback and write in one": in_turn(f"ROLLBACK; {WRITE}"),
    "abort": in_turn("ABORT"),
    "set constraints": in_turn("SET CONSTRAINTS ALL IMMEDIATE"),
    "set constraints, commit, write": in_turn("SET CONSTRAINTS ALL IMMEDIATE", "COMMIT", WRITE),
    "prepare transaction": in_turn("PREPARE TRANSACTION 'mine'", WRITE),
    "connection commit": lambda db: db.commit(),
    "connection rollback": lambda db: db.rollback(),
    "connection close": lambda db: db.close(),
    "with connection": lambda db: db.__enter__(),
}

SUPERUSER_ATTACKS: dict[str, Attack] = {
    **ATTACKS,
    "delete the fence": in_turn("DELETE FROM rowlock.batch_fences"),
    "delete the fence, commit": in_turn("DELETE FROM rowlock.batch_fences", "COMMIT"),
    "truncate the fence": in_turn("TRUNCATE rowlock.batch_fences"),
    "replica role, commit": in_turn("SET session_replication_role = replica", "COMMIT"),
    "replica role in one": in_turn("SET session_replication_role = replica; COMMIT"),
    "renumber the fence": in_turn("UPDATE rowlock.batch_fences SET fence_id = DEFAULT"),
}


@pytest.mark.parametrize("swallow", [False, True], ids=["raised", "swallowed"])
@pytest.mark.parametrize("form", ["attempt", "chunk"])
@pytest.mark.parametrize("name", SUPERUSER_ATTACKS)
def test_nothing_is_kept_of_a_transaction_that_the_author_ends(
    as_superuser: Work, name: str, form: str, swallow: bool
) -> None:
    work = as_superuser

    def block(ctx: rowlock.Context[None]) -> None:
        with ctx.transaction() as db:
            insert(db, 1)
            try:
                SUPERUSER_ATTACKS[name](db)
            except Exception:
                if not swallow:
                    raise

    def author(ctx: rowlock.Context[None]) -> str:
        if form == "attempt":
            block(ctx)
        else:
            for _ in chunks(ctx, 3):
                block(ctx)
        return "done"

    answer = work.run(author)

    assert isinstance(answer, Failed), answer
    assert work.ledger() == []
    row = work.row()
    assert (row["status"], row["result"], row["checkpoint"]) == ("CLAIMED", None, None)
    if "truncate" not in name and "prepare" not in name:  # those are refused by PostgreSQL itself
        assert "ctx.transaction()" in usage_error(answer)
    # and the executor goes on
    assert isinstance(work.run(write(5)), Completed)
    assert (work.ledger(), work.status()) == ([5], "COMPLETED")


@pytest.mark.parametrize("name", ATTACKS)
def test_the_attacks_fail_without_privileges_too(work: Work, name: str) -> None:
    def author(ctx: rowlock.Context[None]) -> str:
        with ctx.transaction() as db:
            insert(db, 1)
            ATTACKS[name](db)
        return "done"

    assert isinstance(work.run(author), Failed)
    assert (work.ledger(), work.status()) == ([], "CLAIMED")


def test_an_author_who_commits_after_the_block_is_told(work: Work) -> None:
    def author(ctx: rowlock.Context[None]) -> str:
        with ctx.transaction() as db:
            insert(db, 1)
        db.execute("COMMIT")
        return "done"

    assert "was ended inside its block" in usage_error(work.run(author))
    assert (work.ledger(), work.status()) == ([], "CLAIMED")


def test_a_replica_role_that_is_set_does_not_lift_the_fence(as_superuser: Work) -> None:
    work = as_superuser

    def author(ctx: rowlock.Context[None]) -> str:
        with ctx.transaction() as db:
            db.execute("SET session_replication_role = replica")
            insert(db, 1)
        work.take_claim_away()
        return "done"

    assert work.run(author) == Lost(attempt=1)
    assert work.ledger() == []


def test_an_error_that_was_caught_inside_the_block_is_explained(work: Work) -> None:
    def author(ctx: rowlock.Context[None]) -> str:
        with ctx.transaction() as db:
            insert(db, 1)
            try:
                db.execute("SELECT 1 / 0")
            except psycopg.Error:
                pass
        return "done"

    assert "its exception was caught" in usage_error(work.run(author))
    assert work.ledger() == []


def test_a_block_that_is_never_left_is_explained(work: Work) -> None:
    def author(ctx: rowlock.Context[None]) -> str:
        db = ctx.transaction().__enter__()
        insert(db, 1)
        return "done"

    assert "entered and never left" in usage_error(work.run(author))
    assert (work.ledger(), work.status()) == ([], "CLAIMED")


def test_a_checkpoint_that_is_too_large_undoes_its_chunk(work: Work) -> None:
    def author(ctx: rowlock.Context[None]) -> str:
        keys = ["a" * 300_000, "b"]
        for _ in ctx.chunks(lambda after: keys, size=1, key=lambda item: item):
            try:
                write(1)(ctx)
            except rowlock.ContractError:
                write(2)(ctx)  # the block is over: a second one is no block inside it
        return "done"

    answer = work.run(author)
    assert isinstance(answer, Failed)
    assert error_of(answer)["type"] == "rowlock.errors.ContractError"
    assert (answer.retry, work.ledger(), work.row()["checkpoint"]) == ("never", [], None)


def test_an_open_copy_is_explained(work: Work) -> None:
    left: list[Any] = []

    def author(ctx: rowlock.Context[None]) -> str:
        with ctx.transaction() as db:
            copy = db.cursor().copy("COPY public.ledger FROM STDIN")
            left.append(copy)
            copy.__enter__()
        return "done"

    assert "COPY or a pipeline was left open" in usage_error(work.run(author))
    assert work.ledger() == []


# -- a claim that is gone ------------------------------------------------------------------------


def test_a_claim_taken_away_before_the_commit_keeps_nothing(work: Work) -> None:
    def author(ctx: rowlock.Context[None]) -> str:
        write(1)(ctx)
        work.take_claim_away()
        return "done"

    assert work.run(author) == Lost(attempt=1)
    assert (work.ledger(), work.status()) == ([], "CLAIMED")


@pytest.mark.parametrize("swallow", [False, True])
def test_a_claim_taken_away_inside_a_chunk_keeps_nothing_of_it(work: Work, swallow: bool) -> None:
    went_on: list[int] = []

    def author(ctx: rowlock.Context[None]) -> str:
        for chunk in chunks(ctx, 6):
            try:
                with ctx.transaction() as db:
                    insert(db, chunk[0])
                    if chunk[0] == 3:
                        work.take_claim_away()
            except BaseException:
                if not swallow:
                    raise
                went_on.append(chunk[0])
        return "done"

    assert work.run(author) == Lost(attempt=1)
    assert work.ledger() == [1]
    assert went_on == ([3] if swallow else [])  # the loop itself does not go on


def test_a_claim_taken_away_before_the_block_opens_none(work: Work) -> None:
    work.take_claim_away()
    assert work.run(write(1)) == Lost(attempt=1)
    assert work.ledger() == []


def test_an_author_who_commits_without_a_claim_keeps_nothing(work: Work) -> None:
    def author(ctx: rowlock.Context[None]) -> str:
        with ctx.transaction() as db:
            insert(db, 1)
            work.take_claim_away()
            db.execute("COMMIT")
        return "done"

    assert isinstance(work.run(author), Failed | Lost)
    assert work.ledger() == []


def test_nobody_waits_for_an_open_transaction(work: Work) -> None:
    def author(ctx: rowlock.Context[None]) -> str:
        with ctx.transaction() as db:
            insert(db, 1)
            work.take_claim_away()  # has a lock_timeout
        return "done"

    assert work.run(author) == Lost(attempt=1)


# -- a connection that breaks --------------------------------------------------------------------


@pytest.mark.parametrize("form", ["attempt", "chunk"])
@pytest.mark.parametrize("swallow", [False, True])
def test_a_connection_that_breaks_during_commit_leaves_its_outcome_unknown(
    work: Work, form: str, swallow: bool
) -> None:
    holder = work.database.connect(autocommit=False)
    holder.execute(
        "SELECT FROM rowlock.batch_partitions WHERE id = %s FOR UPDATE", (work.partition,)
    )

    def kill_during_commit() -> None:
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE starts_with(application_name, 'rowlock work')"
            " AND datname = current_database() AND wait_event_type = 'Lock'"
        )
        wait_until(lambda: work.database.value(waiting) == 1)
        work.kill_backend()

    def author(ctx: rowlock.Context[None]) -> str:
        try:
            if form == "attempt":
                write(1)(ctx)
            else:
                for _ in chunks(ctx, 4):
                    write(1)(ctx)
        except BaseException:
            if not swallow:
                raise
        return "done"

    killer = threading.Thread(target=kill_during_commit)
    killer.start()
    try:
        assert work.run(author) == CommitUnknown(attempt=1)
    finally:
        killer.join()
        holder.close()
    assert work.ledger() == []
    assert isinstance(work.run(write(2)), Completed)


def test_a_connection_that_breaks_before_commit_costs_no_failure(work: Work) -> None:
    def author(ctx: rowlock.Context[None]) -> str:
        with ctx.transaction() as db:
            insert(db, 1)
            work.kill_backend()
            insert(db, 2)
        return "done"

    answer = work.run(author)
    assert isinstance(answer, Failed)
    assert answer.retry == "infrastructure"
    assert work.ledger() == []
    assert isinstance(work.run(write(3)), Completed)


def test_an_error_that_wraps_the_loss_of_the_connection_costs_no_failure(work: Work) -> None:
    def author(ctx: rowlock.Context[None]) -> str:
        try:
            with ctx.transaction() as db:
                work.kill_backend()
                insert(db, 2)
        except psycopg.Error as error:
            raise RuntimeError("my own words") from error
        return "done"

    answer = work.run(author)
    assert isinstance(answer, Failed)
    assert answer.retry == "infrastructure"


def test_a_swallowed_loss_of_the_connection_is_no_completion(work: Work) -> None:
    def author(ctx: rowlock.Context[None]) -> str:
        with ctx.transaction() as db:
            try:
                work.kill_backend()
                insert(db, 2)
            except psycopg.Error:
                pass
        return "done"

    answer = work.run(author)
    assert isinstance(answer, Failed)
    assert answer.retry == "infrastructure"
    assert work.status() == "CLAIMED"


def test_the_author_s_own_connection_to_another_database_is_not_infrastructure(work: Work) -> None:
    def author(ctx: rowlock.Context[None]) -> str:
        psycopg.connect("host=/nonexistent")
        return "done"

    answer = work.run(author)
    assert isinstance(answer, Failed)
    assert answer.retry == "policy"


def test_a_connection_that_died_between_attempts_is_replaced(work: Work) -> None:
    assert isinstance(work.run(write(1)), Completed)
    work.kill_backend()
    with work.database.connect() as db:
        db.execute(
            "UPDATE rowlock.batch_partitions SET status = 'CLAIMED', ended_at = NULL WHERE id = %s",
            (work.partition,),
        )
    assert isinstance(work.run(write(2)), Completed)
    assert work.ledger() == [1, 2]


def test_a_database_that_cannot_be_reached_costs_no_failure(arena: Database) -> None:
    work = Work(arena, dsn=make_conninfo(arena.dsn, host="/nonexistent", password="secret"))
    answer = work.run(write(1))
    assert isinstance(answer, Failed)
    assert answer.retry == "infrastructure"
    message = error_of(answer)["message"]
    assert "/nonexistent" in message
    assert "secret" not in answer.error


def test_a_database_that_is_not_rowlock_s_is_explained(
    arena: Database, empty_database: Database
) -> None:
    work = Work(arena, dsn=empty_database.dsn)
    assert "ROWLOCK_WORK_DSN must name" in usage_error(work.run(write(1)))


def test_a_role_without_the_fence_is_explained(arena: Database) -> None:
    work = Work(arena, dsn=arena.dsn_as("rowlock_reader"))
    assert "may execute its fence functions" in usage_error(work.run(write(1)))


def test_a_deferred_constraint_of_the_author_s_is_the_author_s_error(work: Work) -> None:
    with work.database.connect() as db:
        db.execute("ALTER TABLE public.ledger ADD UNIQUE (n) DEFERRABLE INITIALLY DEFERRED")
    answer = work.run(write(1, 1))
    assert isinstance(answer, Failed)
    assert answer.retry == "policy"
    assert "duplicate key" in error_of(answer)["message"]
    assert (work.ledger(), work.status()) == ([], "CLAIMED")


def test_a_serialization_failure_at_commit_costs_no_failure(arena: Database) -> None:
    options = "-c default_transaction_isolation=repeatable\\ read"
    work = Work(arena, dsn=make_conninfo(arena.dsn, options=options))

    def author(ctx: rowlock.Context[None]) -> str:
        write(1)(ctx)
        assert work.write_checkpoint('{"after": null, "items": 0, "state": 1}')
        return "done"

    answer = work.run(author)
    assert isinstance(answer, Failed)
    assert answer.retry == "infrastructure"
    assert work.ledger() == []
    work.close()


# -- the session ---------------------------------------------------------------------------------


def test_nothing_of_the_session_reaches_the_next_attempt(as_superuser: Work) -> None:
    work = as_superuser
    pids: list[int] = []

    def messy(ctx: rowlock.Context[None]) -> str:
        for _ in chunks(ctx, 1):
            with ctx.transaction() as db:
                pids.append(db.info.backend_pid)
                db.execute("CREATE TEMP TABLE mine (n integer)")
                db.execute("SELECT pg_advisory_lock(5)")
                db.execute("SET search_path = nowhere")
                db.execute("SET default_transaction_read_only = off")
                db.execute("SET SESSION AUTHORIZATION rowlock_node")
                db.execute("LISTEN mine")
                db.execute("DECLARE held CURSOR WITH HOLD FOR SELECT 1")
                db.execute("RESET SESSION AUTHORIZATION")
                db.execute("SET ROLE rowlock_node")
                db.row_factory = dict_row  # type: ignore[assignment]  # what authors do
        return "done"

    assert isinstance(work.run(messy), Completed)
    locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted"
    assert work.database.value(locks) == 0

    def tidy(ctx: rowlock.Context[None]) -> str:
        with ctx.transaction() as db:
            pids.append(db.info.backend_pid)
            row = db.execute(
                "SELECT current_setting('search_path'), to_regclass('pg_temp.mine'),"
                " current_setting('default_transaction_read_only'), current_user = session_user,"
                " (SELECT count(*) FROM pg_listening_channels()),"
                " (SELECT count(*) FROM pg_cursors WHERE is_holdable),"
                " current_setting('idle_in_transaction_session_timeout'),"
                " current_setting('client_connection_check_interval')"
            ).fetchone()
        return repr(row)

    answer = work.run(tidy)
    assert isinstance(answer, Completed)
    assert (
        json.loads(answer.result or "")
        == "('\"$user\", public', None, 'on', True, 0, 0, '0', '2s')"
    )
    assert pids[0] == pids[1]  # the connection itself is kept


def test_a_session_that_is_not_read_only_any_more_gets_no_transaction(work: Work) -> None:
    """Somebody has SET that: the author, or behind a pooler whoever had the session before. What follows a COMMIT of the
    author's could be written there. The next attempt has a session of its own."""

    def author(ctx: rowlock.Context[None]) -> str:
        for _ in chunks(ctx, 2, size=1):
            with ctx.transaction() as db:
                db.execute("INSERT INTO public.ledger VALUES (%s)", [ctx.attempt])
                if ctx.attempt == 1:
                    db.execute("SET default_transaction_read_only = off")
        return "done"

    answer = work.run(author)
    assert isinstance(answer, Failed)
    assert error_of(answer)["type"] == "rowlock.errors.UsageError"
    assert "not read-only by default" in error_of(answer)["message"]
    assert work.ledger() == [1], "the first chunk stands"

    assert isinstance(work.run(author, attempt_number=2), Completed)


def test_a_copy_whose_server_is_held_up_is_given_a_minute(work: Work) -> None:
    """A lock, or a trigger, keeps the server from reading on. What was sent is not acknowledged then either, and ten
    seconds of that, at which a node gives its own connections up, ended such attempts again and again."""

    def author(ctx: rowlock.Context[None]) -> str:
        with (
            ctx.transaction() as db,
            socket.socket(fileno=os.dup(db.pgconn.socket)) as tcp,
        ):
            return str(tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))

    answer = work.run(author)
    assert isinstance(answer, Completed)
    assert json.loads(answer.result or "") == "60000"


def test_a_failed_attempt_costs_its_connection(work: Work) -> None:
    pids: list[int] = []

    def author(ctx: rowlock.Context[None]) -> str:
        with ctx.transaction() as db:
            pids.append(db.info.backend_pid)
            if ctx.attempt == 1:
                raise ValueError("first")
        return "done"

    work.run(author)
    work.run(author, attempt_number=2)
    assert pids[0] != pids[1]


def test_an_attempt_without_a_transaction_opens_no_connection(work: Work) -> None:
    work.run(lambda ctx: "done")
    assert work.executor.work_session().broken


def test_an_idle_executor_gives_its_connection_back(work: Work) -> None:
    work.run(write(1))
    session = work.executor.work_session()
    assert not session.broken

    def give_back() -> None:
        work.executor._hang_up()
        work.receive(Exit())

    assert work.executor._inbox.next(0.01, give_back) is None
    assert session.broken


def test_what_author_code_gets_is_a_psycopg_connection(work: Work) -> None:
    def author(ctx: rowlock.Context[None]) -> str:
        with ctx.transaction() as db:
            assert isinstance(db, WorkConnection)
            with db.cursor() as cursor:
                cursor.executemany(INSERT, [(1,), (2,)])
            with db.cursor() as cursor, cursor.copy("COPY public.ledger FROM STDIN") as copy:
                copy.write_row((3,))
            with db.pipeline():
                db.execute(INSERT, (4,))
        return "done"

    assert isinstance(work.run(author), Completed)
    assert work.ledger() == [1, 2, 3, 4]


def test_many_transactions_on_one_connection(work: Work) -> None:
    """psycopg prepares what it sees often, which a message of two statements cannot be."""

    def author(ctx: rowlock.Context[None]) -> str:
        for chunk in chunks(ctx, 60, size=3):
            write(*chunk)(ctx)
        return "done"

    assert isinstance(work.run(author), Completed)
    assert work.ledger() == list(range(1, 61))


# -- finish() ------------------------------------------------------------------------------------


@pytest.fixture
def ending(work: Work) -> Work:
    """An execution whose partitions are done."""
    with work.database.connect() as db:
        db.execute(
            "UPDATE rowlock.batch_partitions SET status = 'COMPLETED', ended_at = now()"
            " WHERE id = %s",
            (work.partition,),
        )
        db.execute(
            "UPDATE rowlock.batch_job_coordination SET status = 'FINISHING' WHERE execution_id = %s",
            (work.execution,),
        )
    return work


def execution(work: Work) -> tuple[str, Any]:
    ((status, summary),) = work.database.rows(
        "SELECT status, summary FROM rowlock.batch_job_coordination WHERE execution_id = %s",
        (work.execution,),
    )
    return status, summary


def end_with(value: int) -> Ending:
    def ending(outcome: rowlock.Outcome[str]) -> str:
        with outcome.transaction() as db:
            db.execute(INSERT, (value,))
        return "summed up"

    return ending


def test_the_transaction_of_finish_carries_the_end(ending: Work) -> None:
    answer = ending.finish(end_with(1))
    assert answer == Finished(attempt=1, summary='"summed up"', committed=True)
    assert ending.ledger() == [1]
    assert execution(ending) == ("COMPLETED", "summed up")


def test_finish_without_a_transaction_is_ended_by_the_master(ending: Work) -> None:
    answer = ending.finish(lambda outcome: "summed up")
    assert answer == Finished(attempt=1, summary='"summed up"', committed=False)
    assert execution(ending) == ("FINISHING", None)


def test_a_superseded_master_s_finish_keeps_nothing(ending: Work) -> None:
    def superseded(outcome: rowlock.Outcome[str]) -> str:
        result = end_with(1)(outcome)
        with ending.database.connect() as db:
            db.execute(
                "UPDATE rowlock.batch_job_coordination SET master_epoch = 8 WHERE execution_id = %s",
                (ending.execution,),
            )
        return str(result)

    assert ending.finish(superseded) == Lost(attempt=1)
    assert ending.finish(end_with(2)) == Lost(attempt=2)
    assert (ending.ledger(), execution(ending)) == ([], ("FINISHING", None))


def test_a_second_transaction_of_finish_is_refused(ending: Work) -> None:
    def twice(outcome: rowlock.Outcome[str]) -> str:
        end_with(1)(outcome)
        end_with(2)(outcome)
        return "done"

    assert "a second outcome.transaction()" in usage_error(ending.finish(twice))
    assert (ending.ledger(), execution(ending)) == ([], ("FINISHING", None))


def test_an_exception_in_finish_rolls_back(ending: Work) -> None:
    def fails(outcome: rowlock.Outcome[str]) -> str:
        end_with(1)(outcome)
        raise ValueError("sum is wrong")

    answer = ending.finish(fails)
    assert isinstance(answer, Failed)
    assert answer.retry == "policy"
    assert (ending.ledger(), execution(ending)) == ([], ("FINISHING", None))


# -- a real executor -----------------------------------------------------------------------------


def test_an_executor_finds_the_work_database_in_its_environment(work: Work) -> None:
    peer = Peer(env={"ROWLOCK_WORK_DSN": work.database.dsn_as("rowlock_node")})
    try:
        run = peer.a_run("insert", 7, partition_id=work.partition, claim_token=str(work.token))
        answer = peer.completed(run)
        assert (answer.result, answer.committed) == ("7", True)
    finally:
        peer.close()
    assert (work.ledger(), work.status()) == ([7], "COMPLETED")


def test_a_claim_token_that_is_none_fails_the_attempt(work: Work) -> None:
    assert isinstance(work.run(write(1), claim_token="'; DROP TABLE public.ledger; --"), Failed)
    assert work.ledger() == []
