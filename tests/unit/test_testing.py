"""rowlock.testing: what an author can rely on when a job runs inline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import date

import pytest

import rowlock
from rowlock import testing
from rowlock.errors import ContractError, UsageError
from tests.unit.typechecks.settle import Day, Month, Settle


class Sum(rowlock.Job[int, list[int], int]):
    """Adds the numbers below a bound, three at a time."""

    name = "sum"

    def __init__(self) -> None:
        self.chunks: list[list[int]] = []

    def partition(self, params: int, cluster: rowlock.Cluster) -> Iterator[list[int]]:
        size = max(1, params // max(1, cluster.slots))
        for first in range(0, params, size):
            yield list(range(first, min(first + size, params)))

    def process(self, part: list[int], ctx: rowlock.Context[int]) -> int:
        def numbers(after: int | None) -> Iterator[int]:
            return (number for number in part if after is None or number > after)

        for chunk in ctx.chunks(numbers, size=3, key=lambda number: number):
            self.chunks.append(chunk)
        return sum(part)

    def finish(self, params: int, outcome: rowlock.Outcome[int]) -> int:
        return sum(result for _, result in outcome.results())


class Tally(Sum):
    """Counts what it has really seen, which forgets what an earlier attempt saw."""

    def process(self, part: list[int], ctx: rowlock.Context[int]) -> int:
        before = len(self.chunks)
        super().process(part, ctx)
        return len(self.chunks) - before


class Careful(Sum):
    """Keeps its running total in the checkpoint."""

    def process(self, part: list[int], ctx: rowlock.Context[int]) -> int:
        total: int = ctx.checkpoint or 0
        for chunk in ctx.chunks(
            lambda after: (n for n in part if after is None or n > after), size=3, key=lambda n: n
        ):
            total += sum(chunk)
            ctx.save(total)
        return total


def test_an_execution_runs_to_its_summary() -> None:
    result = testing.run(Sum, 20, nodes=2)
    assert result.status == "COMPLETED"
    assert list(result.results.values()) == [10, 35, 60, 85]
    assert result.summary == 190
    assert [part.attempts for part in result.partitions] == [1, 1, 1, 1]


def test_no_partitions_are_an_execution_too() -> None:
    result = testing.run(Sum, 0)
    assert (result.status, result.partitions, result.summary) == ("COMPLETED", (), 0)


def test_partitions_are_planned_as_in_production() -> None:
    planned = testing.partitions(Settle, Month(year=2024, month=2))
    assert len(planned) == 29
    assert planned[0] == testing.Partition(
        key="2024-02-01", slice=Day(date=date(2024, 2, 1)), weight=0
    )
    assert len(testing.partitions(Sum, 10, nodes=3)) == 10


class Wrong(rowlock.Job[int, list[int], int]):
    """Breaks the contract that its parameters name."""

    name = "wrong"

    def partition(self, params: int, cluster: rowlock.Cluster) -> Iterator[list[int]]:
        yield [params]
        yield [params, 1] if params else [params]

    def key(self, part: list[int]) -> str | None:
        return "same" if part[0] == 1 else None

    def weight(self, part: list[int]) -> int:
        return 2**40 if part[0] == 2 else len(part)

    def process(self, part: list[int], ctx: rowlock.Context[int]) -> int:
        return float("nan") if part[0] == 3 else len(part)  # type: ignore[return-value]


@pytest.mark.parametrize(
    "params, message",
    [
        (0, "two partitions have the key 'sha256:"),
        (1, "two partitions have the key 'same'"),
        (2, "weight() returned int 1099511627776"),
        (3, "result $: nan is no JSON"),
        ("3", "parameters $: expected int, got str '3'"),
        (2**64, "does not fit into 64 bits"),
    ],
)
def test_a_broken_contract_shows(params: int, message: str) -> None:
    with pytest.raises(ContractError) as caught:
        testing.run(Wrong, params)
    assert message in str(caught.value)


def test_heavier_partitions_run_first_and_results_keep_the_order_of_planning() -> None:
    seen: list[int] = []

    class Weighted(Wrong):
        name = "weighted"

        def process(self, part: list[int], ctx: rowlock.Context[int]) -> int:
            seen.append(len(part))
            return len(part)

    result = testing.run(Weighted, 5)
    assert seen == [2, 1]
    assert list(result.results.values()) == [1, 2]


# -- interruption ------------------------------------------------------------------------------


def test_a_stopped_attempt_resumes_after_its_last_chunk() -> None:
    job = Sum()
    result = testing.run(job, 10, nodes=rowlock.Cluster(), stop_after=1)
    assert job.chunks == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert result.partitions[0].attempts == 4
    assert result.summary == 45


def test_an_attempt_that_ends_before_its_checkpoint_repeats_the_chunk() -> None:
    job = Sum()
    testing.run(job, 10, nodes=rowlock.Cluster(), crash_after=1)
    assert job.chunks == [[0, 1, 2], [3, 4, 5], [3, 4, 5], [6, 7, 8], [6, 7, 8], [9], [9]]


def test_an_attempt_that_gets_nowhere_is_let_through() -> None:
    assert testing.run(Sum, 10, stop_after=0).summary == 45
    assert testing.run(Sum, 10, crash_after=0).summary == 45


def test_resumable_jobs_are_told_from_forgetful_ones() -> None:
    testing.assert_resumable(Sum, 30)
    testing.assert_resumable(Careful, 30)
    with pytest.raises(AssertionError, match="returned 0 after it was stopped, and 5 undisturbed"):
        testing.assert_resumable(Tally, 30, nodes=1)


def test_at_most_once_work_is_never_interrupted() -> None:
    class Once(Sum):
        delivery = rowlock.AT_MOST_ONCE

    job = Once()
    testing.run(job, 10, nodes=rowlock.Cluster(), stop_after=1, crash_after=1)
    assert len(job.chunks) == 4


def test_work_that_was_complete_all_the_same_says_so() -> None:
    class Finishing(Sum):
        def process(self, part: list[int], ctx: rowlock.Context[int]) -> int:
            self.chunks.append(part)
            return ctx.finished(1) if ctx.should_stop else 2

    assert list(testing.run(Finishing, 2, stop_after=0).results.values()) == [1, 1]


# -- errors ------------------------------------------------------------------------------------


class Flaky(rowlock.Job[list[int], int, int]):
    """Each number is how often its partition fails; negative ones fail for good."""

    name = "flaky"
    retry = rowlock.Retry(max_attempts=3)

    def __init__(self) -> None:
        self.calls: dict[int, int] = {}

    def partition(self, params: list[int], cluster: rowlock.Cluster) -> Iterable[int]:
        return params

    def process(self, part: int, ctx: rowlock.Context[list[int]]) -> int:
        calls = self.calls[part] = self.calls.get(part, 0) + 1
        if part < 0:
            raise rowlock.Fail("for good")
        if calls <= part:
            raise rowlock.RetryLater(3600) if part % 2 else ValueError(f"call {calls}")
        return ctx.attempt

    def finish(self, params: list[int], outcome: rowlock.Outcome[int]) -> list[int]:
        return [outcome.total, outcome.completed, outcome.failed, outcome.cancelled]


def test_what_author_code_raises_reaches_the_test_with_its_partition() -> None:
    with pytest.raises(ValueError, match="call 1") as caught:
        testing.run(Flaky, [2])
    assert caught.value.__notes__[-1].startswith("(partition 'sha256:")


def test_errors_can_be_recorded_and_retried_instead() -> None:
    result = testing.run(Flaky, [0, 1, 2], raise_errors=False)
    assert (result.status, list(result.results.values())) == ("COMPLETED", [1, 2, 3])
    assert result.summary == [3, 3, 0, 0]

    result = testing.run(Flaky, [0, 3, -1], raise_errors=False)
    assert (result.status, result.summary) == ("FAILED", None)
    assert [part.attempts for part in result.partitions] == [1, 4, 1], "RetryLater is no failure"
    assert [type(error).__name__ for error in result.errors.values()] == ["Fail"]

    result = testing.run(Flaky, [0, 4], raise_errors=False)
    assert [part.attempts for part in result.partitions] == [1, 3]
    assert [type(error).__name__ for error in result.errors.values()] == ["ValueError"]


def test_work_that_asks_for_another_time_for_ever_is_told_so_and_once_work_is_failed() -> None:
    class Never(rowlock.Job[int, int, None]):
        name = "test.never"
        retry = rowlock.Retry(max_attempts=1)

        def partition(self, params: int, cluster: rowlock.Cluster) -> Iterable[int]:
            return range(params)

        def process(self, part: int, ctx: rowlock.Context[int]) -> None:
            raise rowlock.RetryLater(0)

    class Once(Never):
        name = "test.never-twice"
        delivery = rowlock.AT_MOST_ONCE

    with pytest.raises(rowlock.UsageError, match="has not ended after 10000 attempts"):
        testing.run(Never, 1, raise_errors=False)
    result = testing.run(Once, 1, raise_errors=False)
    assert [part.attempts for part in result.partitions] == [1]


@pytest.mark.parametrize("limit, status", [(0, "FAILED"), (1, "COMPLETED"), ("25%", "COMPLETED")])
def test_the_failure_policy_decides_the_end(limit: int | str, status: str) -> None:
    class Lenient(Flaky):
        max_failed = limit

    result = testing.run(Lenient, [0, 1, 2, -1], raise_errors=False)
    assert result.status == status
    assert result.summary == ([4, 3, 1, 0] if status == "COMPLETED" else None)


def test_a_transaction_needs_a_database() -> None:
    with pytest.raises(UsageError, match=r"give run\(…, database=…\) a connection"):
        testing.run(Settle, Month(year=2024, month=2))


# -- covering ----------------------------------------------------------------------------------


def test_partitions_that_cover_the_input_pass() -> None:
    testing.assert_covers(Sum, 20, range(20), of=lambda part: part)


def test_gaps_and_overlaps_are_named() -> None:
    with pytest.raises(AssertionError, match=r"1 items are in no partition, for example \['20'\]"):
        testing.assert_covers(Sum, 20, range(21), of=lambda part: part)
    with pytest.raises(AssertionError, match=r"with nodes=3: 1 items are in a partition too many"):
        testing.assert_covers(Sum, 20, range(19), of=lambda part: part, nodes=[3])
    with pytest.raises(AssertionError, match="too many"):
        testing.assert_covers(Sum, 20, range(20), of=lambda part: [*part, part[0]])


class Serial(Sum):
    """Holds one lock for all of it, and another one for each chunk."""

    name = "serial"
    inner = "chunk"

    def process(self, part: list[int], ctx: rowlock.Context[int]) -> int:
        with ctx.lock("all", timeout_seconds=0):
            for chunk in ctx.chunks(
                lambda after: (n for n in part if after is None or n > after),
                size=3,
                key=lambda n: n,
            ):
                with ctx.lock(self.inner):
                    self.chunks.append(chunk)
        return sum(part)


class Greedy(Serial):
    """Wants what it has."""

    name = "greedy"
    inner = "all"


def test_locks_are_free_inline_and_their_rules_are_those_of_production() -> None:
    assert testing.run(Serial, 10).summary == 45
    with pytest.raises(UsageError, match="inside itself"):
        testing.run(Greedy, 10)


class Fussy(Sum):
    """Leaves out every fourth number."""

    name = "fussy"

    def process(self, part: list[int], ctx: rowlock.Context[int]) -> int:
        for chunk in ctx.chunks(
            lambda after: (n for n in part if after is None or n > after), size=3, key=lambda n: n
        ):
            for number in chunk:
                if number % 4 == 0:
                    ctx.skip(number, "not today")
            ctx.progress(chunk[-1], len(part))
        return ctx.skipped


@pytest.mark.parametrize("crash_after", [None, 0, 1, 2])
def test_skipped_items_count_once_however_often_a_chunk_is_repeated(
    crash_after: int | None,
) -> None:
    result = testing.run(Fussy, 20, crash_after=crash_after)

    assert result.summary == 5
    assert sum(one.skipped for one in result.partitions) == 5
