"""Jobs whose author code behaves, or misbehaves, as each slice says. Registered by the tests."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import rowlock


@dataclass(frozen=True)
class Params:
    """Parameters of all jobs here."""

    factor: int


@dataclass(frozen=True)
class Part:
    """One slice: what to do, and with what."""

    how: str
    with_: Any

    def __post_init__(self) -> None:
        if self.how == "leave":
            sys.exit("a validator that means it")


class Hostile(Exception):
    """An exception that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text for you")


class Odd(BaseException):
    """Neither an Exception nor one of Python's own."""


def _raises(name: str) -> NoReturn:
    if name == "Fail":
        raise rowlock.Fail("no such customer")
    if name == "RetryLater":
        raise rowlock.RetryLater(2.5)
    if name == "Hostile":
        raise Hostile
    if name == "Odd":
        raise Odd("odd")
    if name in {"LeaseLost", "Stopped", "UsageError", "ContractError"}:
        error = {
            "LeaseLost": rowlock.LeaseLost("mine"),
            "Stopped": rowlock.Stopped("mine"),
            "UsageError": rowlock.UsageError("mine"),
            "ContractError": rowlock.ContractError("file", "$.x", "is wrong"),
        }[name]
        raise error
    raise getattr(builtins, name)(f"{name} from the author")


def _await_stop(ctx: rowlock.Context[Params]) -> None:
    ctx.progress(0)  # tells the test that the attempt has begun
    while not ctx.should_stop:
        time.sleep(0.001)  # author code; the test waits for its answer


class _Author(rowlock.Job[Params, Part, int]):
    """What the jobs with and without AT_MOST_ONCE share."""

    def partition(self, params: Params, cluster: rowlock.Cluster) -> Iterator[Part]:
        yield Part(how="return", with_=1)

    def process(self, part: Part, ctx: rowlock.Context[Params]) -> int:
        how, value = part.how, part.with_
        act = getattr(self, f"_{how.replace(' ', '_')}")
        result: int = act(value, ctx)
        return result

    def _return(self, value: Any, ctx: rowlock.Context[Params]) -> Any:
        return value

    def _multiply(self, value: int, ctx: rowlock.Context[Params]) -> int:
        return value * ctx.params.factor

    def _raise(self, name: str, ctx: rowlock.Context[Params]) -> NoReturn:
        _raises(name)

    def _touch(self, path: str, ctx: rowlock.Context[Params]) -> int:
        Path(path).touch()
        return 1

    def _print(self, text: str, ctx: rowlock.Context[Params]) -> int:
        print(text)  # noqa: T201 - what authors do
        os.write(1, b"raw\n")
        subprocess.run([sys.executable, "-S", "-c", "print('a child')"], check=True)
        return len(sys.stdin.read())

    def _log(self, text: str, ctx: rowlock.Context[Params]) -> int:
        ctx.logger.warning(text, extra={"event": "test_line"})
        return 1

    def _stop_and_return(self, value: int, ctx: rowlock.Context[Params]) -> int:
        _await_stop(ctx)
        return value

    def _stop_and_finish(self, value: int, ctx: rowlock.Context[Params]) -> int:
        _await_stop(ctx)
        return ctx.finished(value)

    def _stop_and_raise(self, name: str, ctx: rowlock.Context[Params]) -> int:
        _await_stop(ctx)
        _raises(name)

    def _save(self, state: Any, ctx: rowlock.Context[Params]) -> int:
        ctx.save(state)
        return 1

    def _save_and_swallow(self, state: Any, ctx: rowlock.Context[Params]) -> int:
        try:
            ctx.save(state)
        except:  # noqa: E722 - the broadest that an author can write
            pass
        return 1

    def _save_in_threads(self, count: int, ctx: rowlock.Context[Params]) -> int:
        threads = [threading.Thread(target=ctx.save, args=[n]) for n in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return count

    def _save_late(self, paths: list[str], ctx: rowlock.Context[Params]) -> int:
        """Leave a thread that saves when a file appears, and writes what it was told into another."""
        late, told = map(Path, paths)

        def save() -> None:
            while not late.exists():
                time.sleep(0.001)
            try:
                ctx.save("late")
            except rowlock.UsageError as error:
                told.with_suffix(".part").write_text(str(error))
                told.with_suffix(".part").rename(told)

        threading.Thread(target=save).start()
        return 1

    def _insert(self, value: int, ctx: rowlock.Context[Params]) -> int:
        with ctx.transaction() as db:
            db.execute("INSERT INTO public.ledger (n) VALUES (%s)", (value,))
        return value

    def _chunks(self, total: int, ctx: rowlock.Context[Params]) -> int:
        done = 0
        for chunk in ctx.chunks(
            lambda after: range((after or 0) + 1, total + 1), size=10, key=lambda item: item
        ):
            done += len(chunk)
        return done

    def _fork_and_return(self, value: int, ctx: rowlock.Context[Params]) -> int:
        """A child that comes back from author code, as a careless fork does."""
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
        return value

    def _signals_of_a_fork(self, value: int, ctx: rowlock.Context[Params]) -> int:
        """The signal that ends a forked child which is sent SIGTERM."""
        begun, begin = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(begin, b"x")  # a signal during the fork itself would be lost by Python
            time.sleep(60)
            os._exit(0)
        os.read(begun, 1)
        os.kill(pid, 15)
        return os.WTERMSIG(os.waitpid(pid, 0)[1])

    def _terminate_self(self, value: int, ctx: rowlock.Context[Params]) -> int:
        os.kill(os.getpid(), 15)
        os.kill(os.getpid(), 2)
        time.sleep(0.01)  # a handler would run here
        return value

    def _run_for_ever(self, path: str, ctx: rowlock.Context[Params]) -> int:
        Path(path).touch()
        while True:
            time.sleep(0.01)

    def _leave_a_thread(self, value: int, ctx: rowlock.Context[Params]) -> int:
        threading.Thread(target=threading.Event().wait).start()  # no daemon: blocks a plain exit
        return value

    def _recurse(self, value: int, ctx: rowlock.Context[Params]) -> int:
        return self._recurse(value, ctx) + 1


class Author(_Author):
    """Does what its slices say."""

    name = "test.author"


class Once(_Author):
    """The same, started at most once."""

    name = "test.once"
    delivery = rowlock.AT_MOST_ONCE


class Nothing(rowlock.Job[Params, int, None]):
    """Costs nothing: what is measured is rowlock."""

    name = "test.nothing"

    def partition(self, params: Params, cluster: rowlock.Cluster) -> Iterator[int]:
        yield from range(params.factor)

    def process(self, part: int, ctx: rowlock.Context[Params]) -> None:
        return


@dataclass(frozen=True)
class Day:
    """A slice with a text, to fill messages."""

    number: int
    text: str


class Planned(rowlock.Job[Params, Day, int]):
    """Plans as its parameters say."""

    name = "test.planned"

    def partition(self, params: Params, cluster: rowlock.Cluster) -> Any:
        factor = params.factor
        if factor == -1:
            return None
        if factor == -2:
            return 5
        if factor == -3:
            return [Day(number=1, text="é" * 20_000) for _ in range(100)]
        if factor == -4:
            return [Day(number=slots, text=name) for name, slots in _nodes(cluster)]
        return self._days(factor)

    def _days(self, factor: int) -> Iterator[Any]:
        number = 0
        while True:
            number += 1
            if number == 5_000 and factor > 1_000_000:
                if factor == 1_000_001:
                    raise ValueError("no more days")
                if factor == 1_000_002:
                    yield {"number": "5000", "text": ""}
            if number > factor:
                return
            yield Day(number=number, text="")

    def key(self, part: Day) -> str | None:
        return "" if part.number == 4_321 and part.text == "bad key" else None

    def weight(self, part: Day) -> int:
        return part.number

    def process(self, part: Day, ctx: rowlock.Context[Params]) -> int:
        return 1

    def finish(self, params: Params, outcome: rowlock.Outcome[int]) -> dict[str, int]:
        factor = params.factor
        if factor == -1:
            raise rowlock.RetryLater(5)
        if factor == -2:
            return {"wrong": "type"}  # type: ignore[dict-item]  # what the test is about
        return {"sum": sum(result for _, result in outcome.results()), "total": outcome.total}


def _nodes(cluster: rowlock.Cluster) -> Iterator[tuple[str, int]]:
    for node in cluster.nodes:
        yield node.name, node.slots
