"""What author code can do with its context, and what the supervisor is told of it."""

import datetime
import json
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

import pytest

from rowlock.contract import RESULT_BYTES, Codec
from rowlock.errors import ContractError, LeaseLost, Stopped, UsageError
from rowlock.runtime.context import ExecutorContext, ExecutorOutcome, idempotency_key
from rowlock.runtime.messages import (
    Checkpoint,
    Finish,
    Lock,
    Progress,
    Reply,
    Results,
    Run,
    ToSupervisor,
    Unlock,
)
from rowlock.runtime.transaction import WorkSession


class Line:
    """The supervisor, as far as a context sees it."""

    def __init__(
        self,
        *,
        stop: bool = False,
        claim_stands: bool = True,
        stop_at: int | None = None,
        pages: Mapping[int, list[tuple[int, str, str]]] | None = None,
    ) -> None:
        self.stop = stop
        self.claim_stands = claim_stands
        self.stop_at = stop_at
        """Ask to stop when this many checkpoints have been written."""
        self.pages = pages or {}
        self.written: list[dict[str, Any]] = []
        self.told: list[ToSupervisor] = []
        self.lock_answer = "acquired"
        self.locks: list[Lock | Unlock] = []

    def tell(self, message: ToSupervisor) -> None:
        self.told.append(message)

    def ask(self, request: Callable[[int], ToSupervisor]) -> Reply:
        message = request(1)
        if isinstance(message, Results):
            body = json.dumps(self.pages.get(message.after, []))
            return Reply(request=1, ok=self.claim_stands, body=body)
        if isinstance(message, Progress):
            self.told.append(message)
            return Reply(request=1, ok=self.claim_stands)
        if isinstance(message, (Lock, Unlock)):
            self.locks.append(message)
            return Reply(request=1, ok=self.claim_stands, body=self.lock_answer)
        assert isinstance(message, Checkpoint)
        if self.claim_stands:
            self.written.append(json.loads(message.checkpoint))
        self.stop = self.stop or self.stop_at == len(self.written)
        return Reply(request=1, ok=self.claim_stands)

    def stop_asked(self, attempt: int) -> bool:
        return self.stop

    def work_session(self) -> WorkSession:
        raise AssertionError("these tests open no transaction")


def a_context(line: Line, checkpoint: object = None) -> ExecutorContext:
    run = Run(
        attempt=7,
        job="test.job",
        execution_id="11111111-1111-1111-1111-111111111111",
        instance_key="2013-01",
        step="main",
        partition_id=42,
        key="a key",
        claim_token="22222222-2222-2222-2222-222222222222",
        attempt_number=3,
        slice="{}",
        parameters="{}",
        checkpoint=None if checkpoint is None else json.dumps(checkpoint),
        handshake=False,
    )
    return ExecutorContext(run, {"year": 2013}, line)


def numbers(total: int) -> Callable[[int | None], Iterable[int]]:
    """Items 1 to total; the key of each is itself."""
    return lambda after: iter(range((after or 0) + 1, total + 1))


def same(item: Any) -> Any:
    return item


# -- chunks --------------------------------------------------------------------------------------


def test_each_chunk_is_followed_by_a_checkpoint_at_its_last_key() -> None:
    line = Line()

    chunks = list(a_context(line).chunks(numbers(7), size=3, key=same))

    assert chunks == [[1, 2, 3], [4, 5, 6], [7]]
    assert [(c["after"], c["items"]) for c in line.written] == [(3, 3), (6, 6), (7, 7)]


def test_the_checkpoint_of_a_chunk_is_written_only_when_its_body_has_ended() -> None:
    line = Line()
    chunks = a_context(line).chunks(numbers(4), size=2, key=same)

    next(chunks)
    assert line.written == []
    next(chunks)
    assert [c["after"] for c in line.written] == [2]


def test_a_later_attempt_resumes_after_the_checkpoint() -> None:
    line = Line()
    ctx = a_context(line, {"after": 3, "items": 3, "state": None})

    assert list(ctx.chunks(numbers(5), size=10, key=same)) == [[4, 5]]
    assert line.written == [{"after": 5, "items": 5, "state": None, "saves": 1}]


def test_an_empty_source_writes_no_checkpoint() -> None:
    line = Line()
    assert list(a_context(line).chunks(numbers(0), size=3, key=same)) == []
    assert line.written == []


def test_a_source_that_has_become_shorter_than_the_checkpoint_yields_nothing() -> None:
    line = Line()
    ctx = a_context(line, {"after": 100, "items": 100, "state": None})
    assert list(ctx.chunks(numbers(50), size=3, key=same)) == []
    assert line.written == []


def test_a_body_that_raises_leaves_the_last_checkpoint() -> None:
    line = Line()
    ctx = a_context(line)

    def body() -> None:
        for chunk in ctx.chunks(numbers(6), size=2, key=same):
            if 3 in chunk:
                raise ValueError("item 3")

    with pytest.raises(ValueError, match="item 3"):
        body()
    assert [c["after"] for c in line.written] == [2]


def test_leaving_the_loop_early_leaves_the_chunk_without_a_checkpoint() -> None:
    line = Line()
    for _ in a_context(line).chunks(numbers(6), size=2, key=same):
        break
    assert line.written == []


@pytest.mark.parametrize(
    "key",
    [
        "text",
        -(2**63),
        2.5,
        True,
        datetime.date(2013, 1, 31),
        datetime.datetime(2013, 1, 31, 12, 30, 1, 5, tzinfo=datetime.UTC),
        Decimal("12.30"),
        uuid.UUID(int=5),
        ("JFK", datetime.date(2013, 1, 1), 7),
        (1, (2, "x")),
    ],
)
def test_a_key_comes_back_equal_and_of_its_type(key: object) -> None:
    first = Line()
    list(a_context(first).chunks(lambda after: [key], size=1, key=same))
    found: list[object] = []

    def source(after: object) -> Iterator[object]:
        found.append(after)
        return iter(())

    list(a_context(Line(), first.written[-1]).chunks(source, size=1, key=same))
    assert found == [key]
    assert type(found[0]) is type(key)


@pytest.mark.parametrize("key", [None, b"bytes", object(), float("nan"), {"a": 1}, {1, 2}])
def test_a_key_that_cannot_be_kept_is_refused_with_the_remedy(key: object) -> None:
    line = Line()
    with pytest.raises(UsageError, match=r"ctx.chunks: .*"):
        list(a_context(line).chunks(lambda after: [1], size=1, key=lambda item: key))
    assert line.written == []


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "3", None])
def test_a_wrong_size_is_refused_when_chunks_is_called(size: Any) -> None:
    with pytest.raises(UsageError, match="size="):
        a_context(Line()).chunks(numbers(1), size=size, key=same)


def test_a_second_loop_in_one_attempt_is_refused() -> None:
    ctx = a_context(Line())
    list(ctx.chunks(numbers(1), size=1, key=same))
    with pytest.raises(UsageError, match=r"a second ctx\.chunks"):
        ctx.chunks(numbers(1), size=1, key=same)


def test_a_source_that_begins_with_the_key_itself_is_refused() -> None:
    ctx = a_context(Line(), {"after": 3, "items": 3, "state": None})
    with pytest.raises(UsageError, match="begin behind the key"):
        list(ctx.chunks(lambda after: [3, 4, 5], size=2, key=same))


def test_equal_keys_on_both_sides_of_a_checkpoint_are_refused() -> None:
    ctx = a_context(Line())
    with pytest.raises(UsageError, match="keys must be unique"):
        list(ctx.chunks(lambda after: [1, 2, 2, 3], size=2, key=same))


def test_stop_is_raised_after_the_next_checkpoint() -> None:
    line = Line(stop_at=2)
    ctx = a_context(line)
    done: list[list[int]] = []
    with pytest.raises(Stopped):
        done.extend(ctx.chunks(numbers(8), size=2, key=same))
    assert done == [[1, 2], [3, 4]]
    assert line.written[-1]["after"] == 4


def test_stop_before_the_first_chunk_runs_none() -> None:
    line = Line(stop=True)
    with pytest.raises(Stopped):
        list(a_context(line).chunks(numbers(8), size=2, key=same))
    assert line.written == []


def test_a_stop_during_the_last_chunk_lets_the_work_complete() -> None:
    line = Line(stop_at=2)
    ctx = a_context(line)

    assert list(ctx.chunks(numbers(3), size=2, key=same)) == [[1, 2], [3]]
    ctx.check_end()  # nothing says that it stopped


def test_a_lost_claim_is_raised_at_the_next_checkpoint_and_again_ever_after() -> None:
    ctx = a_context(Line(claim_stands=False))
    with pytest.raises(LeaseLost):
        list(ctx.chunks(numbers(8), size=2, key=same))
    for again in (lambda: ctx.save(1), ctx.transaction, ctx.check_end):
        with pytest.raises(LeaseLost):
            again()


def test_catching_exception_does_not_swallow_lease_lost_or_stopped() -> None:
    def author(ctx: ExecutorContext) -> None:
        try:
            ctx.save(1)
        except Exception:  # noqa: BLE001 - what authors write
            raise AssertionError("swallowed") from None

    with pytest.raises(LeaseLost):
        author(a_context(Line(claim_stands=False)))
    with pytest.raises(Stopped):
        author(a_context(Line(stop=True)))


# -- save and checkpoint -------------------------------------------------------------------------


def test_a_saved_state_is_read_back_by_this_and_by_a_later_attempt() -> None:
    line = Line()
    ctx = a_context(line)
    ctx.save({"page": 3})
    assert ctx.checkpoint == {"page": 3}
    assert a_context(line, line.written[-1]).checkpoint == {"page": 3}


def test_before_the_first_save_there_is_no_state() -> None:
    assert a_context(Line()).checkpoint is None


def test_a_saved_state_does_not_change_with_the_author_s_object() -> None:
    line = Line()
    ctx = a_context(line)
    state = {"pages": [1]}
    ctx.save(state)
    state["pages"].append(2)
    assert ctx.checkpoint == {"pages": [1]}


def test_a_state_saved_in_a_chunk_is_written_with_its_checkpoint() -> None:
    """On its own it would speak of items that a later attempt runs again, and count them twice."""
    line = Line()
    ctx = a_context(line)
    seen: list[object] = []
    for chunk in ctx.chunks(numbers(4), size=2, key=same):
        ctx.save({"sum": sum(chunk)})
        seen.append(ctx.checkpoint)
    assert seen == [{"sum": 3}, {"sum": 7}]
    assert line.written == [
        {"after": 2, "items": 2, "state": {"sum": 3}, "saves": 1},
        {"after": 4, "items": 4, "state": {"sum": 7}, "saves": 2},
    ]


def test_a_state_saved_in_a_chunk_that_fails_is_not_written() -> None:
    line = Line()
    ctx = a_context(line)

    def process() -> None:
        for _ in ctx.chunks(numbers(4), size=2, key=same):
            ctx.save("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        process()
    assert line.written == []
    assert ctx.checkpoint is None


def test_save_raises_stopped_after_it_has_written() -> None:
    line = Line(stop=True)
    with pytest.raises(Stopped):
        a_context(line).save("half")
    assert [c["state"] for c in line.written] == ["half"]


@pytest.mark.parametrize(
    "state",
    [(1, 2), {1: 2}, {"when": datetime.date(2013, 1, 1)}, float("inf"), {"x": object()}, {1, 2}],
)
def test_a_state_that_would_not_come_back_the_same_is_refused(state: object) -> None:
    line = Line()
    with pytest.raises(ContractError, match=r"checkpoint \$\.state"):
        a_context(line).save(state)
    assert line.written == []


@pytest.mark.parametrize("state", ["x" * 300_000, "a\0b", "\ud800", 2**70])
def test_a_state_that_the_database_would_not_keep_is_refused(state: object) -> None:
    line = Line()
    with pytest.raises(ContractError, match="checkpoint"):
        a_context(line).save(state)
    assert line.written == []


@pytest.mark.parametrize("stored", ["3", "[]", "{}", '{"after": 1, "items": "x", "state": 1}'])
def test_a_stored_document_that_is_no_checkpoint_is_refused(stored: str) -> None:
    with pytest.raises(ContractError, match="checkpoint"):
        a_context(Line(), json.loads(stored))


# -- should_stop, finished -----------------------------------------------------------------------


def test_a_plain_return_after_reading_should_stop_as_true_is_stopped() -> None:
    ctx = a_context(Line(stop=True))
    ctx.check_end()  # nobody has looked yet
    assert ctx.should_stop
    with pytest.raises(Stopped):
        ctx.check_end()


def test_reading_should_stop_as_false_changes_nothing() -> None:
    ctx = a_context(Line())
    assert not ctx.should_stop
    ctx.check_end()


def test_finished_makes_it_complete() -> None:
    ctx = a_context(Line(stop=True))
    assert ctx.should_stop
    assert ctx.finished("result") == "result"
    ctx.check_end()


def test_a_swallowed_stopped_is_never_a_completion() -> None:
    ctx = a_context(Line(stop=True))
    try:
        ctx.save(1)
    except:  # noqa: E722 - what authors write
        pass
    ctx.finished(5)
    with pytest.raises(Stopped):
        ctx.check_end()


def test_a_swallowed_usage_error_is_never_a_completion() -> None:
    ctx = a_context(Line())
    try:
        ctx.chunks(numbers(1), size=0, key=same)
    except Exception:  # noqa: BLE001 - what authors write
        pass
    with pytest.raises(UsageError, match="size=0"):
        ctx.check_end()


# -- the rest ------------------------------------------------------------------------------------


def test_the_facts_of_the_attempt() -> None:
    ctx = a_context(Line())
    assert (ctx.params, ctx.attempt, ctx.key) == ({"year": 2013}, 3, "a key")


def test_the_idempotency_key_knows_instance_step_and_key_only() -> None:
    key = a_context(Line()).idempotency_key
    assert key == idempotency_key("test.job", "2013-01", "main", "a key")
    assert len(key) == 64
    # No two identities run into each other, however their parts are cut.
    assert idempotency_key("a", "b", "c", "d") != idempotency_key("a", "bc", "", "d")


def test_the_logger_s_lines_carry_the_ids(caplog: pytest.LogCaptureFixture) -> None:
    ctx = a_context(Line())
    with caplog.at_level(logging.INFO):
        ctx.logger.info("read %d rows", 5, extra={"rows": 5, "attempt": 99})
    (record,) = caplog.records
    assert record.getMessage() == "read 5 rows"
    fields = {k: record.__dict__[k] for k in ("execution_id", "job", "partition_key", "rows")}
    assert fields == {
        "execution_id": "11111111-1111-1111-1111-111111111111",
        "job": "test.job",
        "partition_key": "a key",
        "rows": 5,
    }
    assert record.__dict__["attempt"] == 99  # the call's own field wins


def test_progress_is_told_at_most_a_few_times_and_at_the_end() -> None:
    line = Line()
    ctx = a_context(line)
    for done in range(1, 1001):
        ctx.progress(done, 1000)
    first, last = line.told[0], line.told[-1]
    assert isinstance(first, Progress)
    assert isinstance(last, Progress)
    assert json.loads(first.counters) == {"done": 1, "total": 1000, "told": [ctx.attempt, 1]}
    assert json.loads(last.counters) == {
        "done": 1000,
        "total": 1000,
        "told": [ctx.attempt, len(line.told)],
    }
    assert len(line.told) < 50


# -- finish() ------------------------------------------------------------------------------------


def an_outcome(line: Line) -> ExecutorOutcome:
    finish = Finish(
        attempt=7,
        job="test.job",
        execution_id="11111111-1111-1111-1111-111111111111",
        epoch=1,
        parameters="{}",
        counts='{"total": 9, "completed": 7, "failed": 1, "cancelled": 1}',
    )
    return ExecutorOutcome(finish, Codec(int, "result", RESULT_BYTES), line)


def test_the_outcome_counts() -> None:
    outcome = an_outcome(Line())
    assert (outcome.total, outcome.completed, outcome.failed, outcome.cancelled) == (9, 7, 1, 1)


def test_results_are_read_page_by_page() -> None:
    line = Line(pages={0: [(3, "a", "1"), (5, "b", "2")], 5: [(9, "c", "3")]})
    outcome = an_outcome(line)
    assert list(outcome.results()) == [("a", 1), ("b", 2), ("c", 3)]
    assert list(outcome.results()) == [("a", 1), ("b", 2), ("c", 3)]  # as often as one likes


def test_a_result_that_breaks_its_contract_names_its_partition() -> None:
    outcome = an_outcome(Line(pages={0: [(3, "the key", '"x"')]}))
    with pytest.raises(ContractError, match="the key"):
        list(outcome.results())


def test_results_of_a_superseded_master_raise_lease_lost() -> None:
    outcome = an_outcome(Line(claim_stands=False))
    with pytest.raises(LeaseLost):
        list(outcome.results())
    assert outcome.fate.lost


# -- locks ---------------------------------------------------------------------------------------


def test_a_lock_is_taken_and_given_back_also_after_an_exception() -> None:
    line = Line()
    ctx = a_context(line)

    with ctx.lock("tariffs", timeout_seconds=3):
        assert [type(sent) for sent in line.locks] == [Lock]
    with pytest.raises(ZeroDivisionError), ctx.lock("tariffs"):
        raise ZeroDivisionError

    assert line.locks == [
        Lock(request=1, attempt=7, name="tariffs", timeout_seconds=3),
        Unlock(request=1, attempt=7, name="tariffs"),
        Lock(request=1, attempt=7, name="tariffs", timeout_seconds=None),
        Unlock(request=1, attempt=7, name="tariffs"),
    ]


def test_two_locks_may_be_held_but_none_twice() -> None:
    line = Line()
    ctx = a_context(line)

    with ctx.lock("a"), ctx.lock("b"):
        with pytest.raises(UsageError, match="'a' inside itself"), ctx.lock("a"):
            raise AssertionError
        assert len(line.locks) == 2

    with pytest.raises(UsageError, match="inside itself"):
        ctx.check_end()


def test_two_threads_of_one_attempt_do_not_share_a_lock() -> None:
    """For the database they are one: both would be told that they have it."""

    class Busy(Line):
        def ask(self, request: Callable[[int], ToSupervisor]) -> Reply:
            if not self.locks:
                self.locks.append(Lock(request=0, attempt=7, name="x", timeout_seconds=None))
                with pytest.raises(UsageError, match="in two threads"), ctx.lock("x"):
                    raise AssertionError
            return super().ask(request)

    ctx = a_context(Busy())
    with ctx.lock("x"):
        pass


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 201, "ü" * 101, "\ud800", 7, None], ids=repr)
def test_what_is_no_name_of_a_lock_is_refused(name: Any) -> None:
    line = Line()

    with pytest.raises(UsageError, match="name"), a_context(line).lock(name):
        raise AssertionError
    assert line.locks == []


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "3", True])
def test_what_is_no_time_to_wait_is_refused(seconds: Any) -> None:
    with (
        pytest.raises(UsageError, match="timeout_seconds"),
        a_context(Line()).lock("x", timeout_seconds=seconds),
    ):
        raise AssertionError


def test_a_lock_that_was_not_free_in_time_is_an_ordinary_error() -> None:
    line = Line()
    line.lock_answer = "timed_out"
    ctx = a_context(line)

    with (
        pytest.raises(TimeoutError, match="'x' was not free within 0 s"),
        ctx.lock("x", timeout_seconds=0),
    ):
        raise AssertionError

    ctx.check_end()
    line.lock_answer = "acquired"
    with ctx.lock("x"):
        pass


def test_an_attempt_that_is_to_stop_does_not_wait_for_a_lock() -> None:
    line = Line()
    line.lock_answer = "stopped"
    ctx = a_context(line)

    with pytest.raises(Stopped), ctx.lock("x"):
        raise AssertionError
    with pytest.raises(Stopped):
        ctx.check_end()

    asked = Line(stop=True)
    with pytest.raises(Stopped), a_context(asked).lock("x"):
        raise AssertionError
    assert asked.locks == []


def test_an_attempt_whose_claim_is_gone_gets_no_lock() -> None:
    line = Line(claim_stands=False)
    ctx = a_context(line)

    with pytest.raises(LeaseLost), ctx.lock("x"):
        raise AssertionError
    with pytest.raises(LeaseLost):
        ctx.check_end()


# -- skipped items -------------------------------------------------------------------------------


def counted(line: Line) -> dict[str, Any]:
    """What was told last."""
    last = line.told[-1]
    assert isinstance(last, Progress)
    told: dict[str, Any] = json.loads(last.counters)
    return told


def test_skipped_items_are_counted_and_the_first_ten_kept_before_the_completion() -> None:
    line = Line()
    ctx = a_context(line)
    for number in range(1000):
        ctx.skip({"line": number}, ValueError(f"no amount in line {number}"))
    before = len(line.told)

    ctx.check_end()

    assert before < 10, "not a message for each"
    assert isinstance(line.told[-1], Progress)
    assert line.told[-1].request == 1
    told = counted(line)
    assert (ctx.skipped, told["skipped"], len(told["skips"])) == (1000, 1000, 10)
    assert told["skips"][0] == {"item": "{'line': 0}", "error": "ValueError: no amount in line 0"}
    ctx.check_end()
    assert len(line.told) == before + 1, "once"


def test_what_was_skipped_before_a_checkpoint_is_counted_once() -> None:
    """The first attempt ends in its second chunk; the next one repeats that and nothing before it."""
    line = Line()
    ctx = a_context(line)
    chunks = ctx.chunks(numbers(6), size=3, key=same)
    for item in next(chunks):
        if item % 3 == 0:
            ctx.skip(item, "divisible")
    for item in next(chunks):
        ctx.skip(item, "lost with its chunk")
    (kept,) = line.written
    assert kept["skips"] == {"count": 1, "first": [{"item": "3", "error": "divisible"}]}

    again = a_context(line, kept)
    for chunk in again.chunks(numbers(6), size=3, key=same):
        for item in chunk:
            if item % 3 == 0:
                again.skip(item, "divisible")
    again.check_end()

    assert again.skipped == 2
    assert [one["item"] for one in counted(line)["skips"]] == ["3", "6"]


class Unspeakable(Exception):
    def __repr__(self) -> str:
        raise RuntimeError

    __str__ = __repr__


def test_what_only_a_checkpoint_knows_is_reported_by_the_attempt_that_completes() -> None:
    kept: dict[str, Any] = {
        "after": 9,
        "items": 9,
        "state": None,
        "skips": {"count": 4, "first": []},
    }
    line = Line()

    ctx = a_context(line, kept)
    ctx.check_end()

    assert counted(line) == {"skipped": 4, "skips": [], "told": [ctx.attempt, 1]}


def test_a_skip_is_bounded_and_never_fails_itself() -> None:
    line = Line()
    ctx = a_context(line)
    hostile: list[tuple[object, BaseException | str]] = [
        ("x" * 10**6, ValueError("y" * 10**6)),
        (Unspeakable(), Unspeakable()),
        ("a\0b", "\ud800"),
    ]
    for item, error in hostile:
        ctx.skip(item, error)

    ctx.check_end()

    told = counted(line)
    assert told["skipped"] == 3
    assert max(len(json.dumps(one)) for one in told["skips"]) < 1000
    assert "\\u0000" not in json.dumps(told)


def test_an_attempt_whose_claim_is_gone_is_not_complete_over_its_skips() -> None:
    ctx = a_context(Line(claim_stands=False))
    ctx.skip(1, "bad")

    with pytest.raises(LeaseLost):
        ctx.check_end()


def test_progress_that_is_no_number_is_refused() -> None:
    for done in (1.5, "3", True, 10**18):
        with pytest.raises(UsageError, match="must be an int"):
            a_context(Line()).progress(done)  # type: ignore[arg-type]  # what a checker would find
