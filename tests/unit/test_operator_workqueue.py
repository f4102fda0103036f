"""The queue works on each key once at a time and brings failed ones back later and later."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rowlock_operator.workqueue import WorkQueue


def upper(low: float, high: float) -> float:
    return high


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def run(scene: Callable[[WorkQueue[str]], Awaitable[None]]) -> None:
    async def play() -> None:
        queue: WorkQueue[str] = WorkQueue(base_seconds=0.001, max_seconds=0.004, uniform=upper)
        await scene(queue)
        queue.close()

    asyncio.run(play())


def test_a_key_waits_only_once() -> None:
    async def scene(queue: WorkQueue[str]) -> None:
        queue.add("a")
        queue.add("a")
        queue.add("b")

        assert queue.depth == 2
        assert [await queue.take(), await queue.take()] == ["a", "b"]

    run(scene)


def test_a_key_that_is_added_while_it_is_worked_on_comes_once_more_and_not_before() -> None:
    async def scene(queue: WorkQueue[str]) -> None:
        queue.add("a")
        await queue.take()
        queue.add("a")
        queue.add("a")

        assert queue.depth == 0, "nobody else may work on it meanwhile"
        queue.done("a")
        assert await queue.take() == "a"
        queue.done("a")
        assert queue.depth == 0

    run(scene)


def test_many_workers_never_share_a_key() -> None:
    async def scene(queue: WorkQueue[str]) -> None:
        inside: set[str] = set()
        finished: list[str] = []

        async def worker() -> None:
            while True:
                key = await queue.take()
                assert key not in inside
                inside.add(key)
                await asyncio.sleep(0)
                inside.discard(key)
                finished.append(key)
                queue.done(key)

        async with asyncio.TaskGroup() as group:
            workers = [group.create_task(worker()) for _ in range(4)]
            for turn in range(200):
                queue.add(f"key-{turn % 3}")
                await asyncio.sleep(0)
            await eventually(lambda: queue.depth == 0 and not inside)
            for one in workers:
                one.cancel()

        assert set(finished) == {"key-0", "key-1", "key-2"}

    run(scene)


def test_of_two_times_to_come_back_the_earlier_counts() -> None:
    async def scene(queue: WorkQueue[str]) -> None:
        queue.add_after("a", 60)
        queue.add_after("a", 0.001)
        queue.add_after("a", 30)

        async with asyncio.timeout(5):
            assert await queue.take() == "a"
        queue.done("a")
        assert queue.depth == 0

    run(scene)


def test_a_key_that_is_added_does_not_come_back_later_as_well() -> None:
    async def scene(queue: WorkQueue[str]) -> None:
        queue.add_after("a", 0.001)
        queue.add("a")
        await queue.take()
        queue.done("a")
        await asyncio.sleep(0.01)

        assert queue.depth == 0

    run(scene)


def test_a_key_that_fails_pauses_longer_each_time_up_to_a_bound_and_success_forgets() -> None:
    async def scene(queue: WorkQueue[str]) -> None:
        pauses = [queue.retry("a") for _ in range(5)]

        assert pauses == [0.001, 0.002, 0.004, 0.004, 0.004]
        assert queue.failures("a") == 5
        queue.succeeded("a")
        assert queue.failures("a") == 0
        assert queue.retry("a") == 0.001

    run(scene)


def test_a_pause_is_drawn_from_the_whole_range_so_that_failures_do_not_return_together() -> None:
    drawn: list[tuple[float, float]] = []

    def draw(low: float, high: float) -> float:
        drawn.append((low, high))
        return low

    async def play() -> None:
        queue: WorkQueue[str] = WorkQueue(base_seconds=1.0, max_seconds=60.0, uniform=draw)
        for _ in range(100):
            queue.retry("a")
        queue.close()

    asyncio.run(play())

    assert drawn[:3] == [(0.0, 1.0), (0.0, 2.0), (0.0, 4.0)]
    assert drawn[-1] == (0.0, 60.0)


def test_the_queue_knows_for_how_long_a_key_has_been_worked_on() -> None:
    now = 100.0

    async def play() -> None:
        nonlocal now
        queue: WorkQueue[str] = WorkQueue(clock=lambda: now)
        assert queue.longest_seconds == 0
        queue.add("a")
        await queue.take()
        now = 107.0
        assert queue.longest_seconds == pytest.approx(7)
        queue.done("a")
        assert queue.longest_seconds == 0

    asyncio.run(play())
