"""Jobs that do what their slices say, and write down what they do in a ledger outside the database.

A slice is a key and a list of steps; a step can hold its author code up until a file appears, so
that a test decides when it goes on. The ledger is a file with one JSON object a line: what happened
(`event`), where (`key`, `attempt`, `node`, `pid`) and when (`at`, the machine's monotonic clock).
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import re
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, LiteralString, NoReturn, cast

import rowlock
from rowlock.runtime.processes import MARK_VARIABLE

NODE_VARIABLE = "FLEET_NODE"
"""Environment variable with the name of the node that an executor belongs to."""

BREAK_VARIABLE = "FLEET_BREAK"
"""Names a file; while it exists, no executor can be started (its supervisor can)."""

TICK_SECONDS = 0.01

DEADLY = "deadly"
"""A slice with this key kills whoever decodes it, as native code of a validator can."""

_HOARD: list[bytes] = []
"""Memory that author code has forgotten to give back."""

_LEAKED: list[int] = []
"""File descriptors that author code has forgotten to close."""

if Path(os.environ.get(BREAK_VARIABLE, "")).is_file() and MARK_VARIABLE in os.environ:
    raise RuntimeError("this installation is broken")


@dataclass(frozen=True)
class Step:
    """One thing to do: the name of a method of `Acts`, and with what."""

    do: str
    with_: Any = None
    attempts: list[int] | None = None
    """Only in these attempts; None is all."""


@dataclass(frozen=True)
class Part:
    """One slice."""

    key: str
    steps: list[Step] = field(default_factory=list[Step])
    weight: int = 0

    def __post_init__(self) -> None:
        if self.key == DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Script:
    """Parameters of all jobs here."""

    ledger: str
    parts: list[Part]
    plan: list[Step] = field(default_factory=list[Step])
    """What partition() does before it yields the parts."""
    finish: list[Step] = field(default_factory=list[Step])
    commit: list[Step] = field(default_factory=list[Step])
    """What finish() does in its open transaction."""


@dataclass(frozen=True)
class Plan:
    """Parameters of `fault.planned`: how its partition() goes."""

    ledger: str
    count: int
    """How many slices it yields: 1, 2, …"""
    then: str = ""
    """What it does after them: "raise", "exit", "wait" (for ever), "duplicate", "wrong" (a slice of
    another type); "nothing": it returns None instead of slices; "list" or "tuple": the slices in one."""
    seconds: float = 0.0
    """What each partition takes."""


def step(do: str, with_: Any = None, *, attempts: Sequence[int] | None = None) -> Step:
    """Make a step; `attempts` limits it to these."""
    return Step(do=do, with_=with_, attempts=None if attempts is None else list(attempts))


def part(key: str, *steps: Step, weight: int = 0) -> Part:
    """Make a slice."""
    return Part(key=key, steps=list(steps), weight=weight)


def parts(count: int, *steps: Step, prefix: str = "p") -> list[Part]:
    """Make many slices that do the same: p0, p1, …"""
    return [part(f"{prefix}{number}", *steps) for number in range(count)]


def pause(seconds: float) -> None:
    """Take time. Not by time.sleep, which fails in a process whose wall clock libfaketime moves."""
    select.select([], [], [], seconds)


class _Enough(Exception):
    """process() is to return now: it was asked to stop."""


class Ledger:
    """An append-only file that many processes write."""

    def __init__(self, path: str, **always: Any) -> None:
        self._path = path
        self._always = always

    def write(self, event: str, **fields: Any) -> None:
        """Add a line, in one write."""
        line = {
            "event": event,
            **self._always,
            "node": os.environ.get(NODE_VARIABLE, ""),
            "pid": os.getpid(),
            "supervisor": os.getppid(),
            "at": time.monotonic(),
            **fields,
        }
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(fd, (json.dumps(line) + "\n").encode())
        finally:
            os.close(fd)


class Acts:
    """What steps can ask for. A method's argument is the step's `with_`."""

    def __init__(self, ledger: Ledger, ctx: rowlock.Context[Script] | None, key: str) -> None:
        self._ledger = ledger
        self._ctx = ctx
        self._key = key

    @property
    def ctx(self) -> rowlock.Context[Script]:
        """The context of process(); partition() and finish() have none."""
        assert self._ctx is not None
        return self._ctx

    def carry_out(self, steps: Sequence[Step], attempt: int) -> None:
        """Do all steps that concern this attempt."""
        for one in steps:
            if one.attempts is None or attempt in one.attempts:
                getattr(self, one.do)(one.with_)

    # -- telling and waiting -------------------------------------------------------------------

    def mark(self, event: str) -> None:
        """Write an event."""
        self._ledger.write(event)

    def wait(self, path: str) -> None:
        """Wait until a file appears, deaf to everything else."""
        while not Path(path).exists():
            pause(TICK_SECONDS)  # author code: the test makes the file

    def tick(self, path: str) -> None:
        """The same, and write an event every now and then: proof of when it really ran."""
        while not Path(path).exists():
            self._ledger.write("tick")
            pause(TICK_SECONDS)

    def wait_or_stop(self, path: str) -> None:
        """Wait until a file appears or the attempt is asked to stop."""
        while not Path(path).exists():
            if self.ctx.should_stop:
                self._ledger.write("asked_to_stop")
                raise _Enough
            pause(TICK_SECONDS)

    def sleep(self, seconds: float) -> None:
        """Take time."""
        time.sleep(seconds)

    def touch(self, path: str) -> None:
        """Make a file, for a test or another attempt."""
        Path(path).touch()

    # -- going wrong ---------------------------------------------------------------------------

    def error(self, text: str) -> NoReturn:
        """Raise an ordinary exception."""
        raise ValueError(text)

    def fail(self, reason: str) -> NoReturn:
        """Fail without a retry."""
        raise rowlock.Fail(reason)

    def fail_until(self, path: str) -> None:
        """Fail without a retry until a file is there."""
        if not Path(path).exists():
            raise rowlock.Fail(f"{path} is not there")

    def retry_later(self, seconds: float) -> NoReturn:
        """Ask for another time."""
        raise rowlock.RetryLater(seconds)

    def retry_until(self, path: str) -> None:
        """Ask for another time until a file is there."""
        if not Path(path).exists():
            raise rowlock.RetryLater(0.02)

    def exit(self, status: int) -> None:
        """End the executor as C code does that calls exit()."""
        os._exit(status)

    def segfault(self, _nothing: None) -> None:
        """Crash in native code."""
        _without_core_dump()
        ctypes.string_at(0)

    def kill_self(self, signum: int) -> None:
        """End the executor as the kernel does when memory runs out (9)."""
        os.kill(os.getpid(), signum)
        time.sleep(60)

    def kill_node(self, _nothing: None) -> None:
        """Poison: take the whole node along."""
        self._ledger.write("kills_node")
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

    def hold_gil(self, seconds: float) -> None:
        """Stay in native code that does not release the interpreter's lock."""
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    def backtrack(self, length: int) -> None:
        """A regular expression that takes twice as long for each character more."""
        re.match("(a+)+$", "a" * length + "b")

    def count(self, number: int) -> None:
        """One call of the interpreter's own C code, over so many numbers."""
        sum(range(number))

    def power(self, exponent: int) -> None:
        """Arithmetic with millions of digits."""
        pow(7, exponent)

    def hoard(self, megabytes: int) -> None:
        """Keep memory that nobody needs."""
        _HOARD.append(b"x" * (megabytes * 1024 * 1024))

    def leak_files(self, limit: int) -> None:
        """Open files until this process may open no more, and keep them open."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        while True:
            _LEAKED.append(os.open(os.devnull, os.O_RDONLY))

    def spawn(self, how: str) -> None:
        """Start a process that outlives its parent: "child", "session" (its own) or "daemon"."""
        code = "import time; time.sleep(600)"
        if how == "daemon":
            code = (
                "import os, sys, time\n"
                "if os.fork(): os._exit(0)\n"
                "os.setsid()\n"
                "print(os.getpid(), flush=True)\n"
                "os.close(1)\n"
                "time.sleep(600)"
            )
        child = subprocess.Popen(
            [sys.executable, "-S", "-c", code],
            start_new_session=how == "session",
            stdout=subprocess.PIPE,
            text=True,
        )
        pid = child.pid
        if how == "daemon":
            assert child.stdout is not None
            pid = int(child.stdout.readline())
        self._ledger.write("spawned", how=how, child=pid)

    def fork(self, _nothing: None) -> None:
        """A child that runs the interpreter's whole end, and pools of the two kinds that people use."""
        child = os.fork()
        if child == 0:
            sys.exit()  # through every `with` and `finally` of the parent's stack
        _, status = os.waitpid(child, 0)
        with multiprocessing.get_context("fork").Pool(2) as pool:
            doubled = pool.map(_double, [1, 2, 3])
        self._ledger.write("forked", status=status, doubled=doubled)

    def fork_in_transaction(self, _nothing: None) -> None:
        """The same while a transaction is open, which must survive it."""
        with self.ctx.transaction() as db:
            self._insert(db, 0)
            self.fork(None)
            self._insert(db, 1)

    # -- effects -------------------------------------------------------------------------------

    def effect(self, name: str) -> None:
        """An effect outside the database, which carries the idempotency key."""
        self._ledger.write("effect", name=name, idempotency_key=self.ctx.idempotency_key)

    def rows(self, items: int) -> None:
        """Business rows in one transaction, whose COMMIT carries the completion."""
        with self.ctx.transaction() as db:
            for item in range(items):
                self._insert(db, item)

    def rows_then_wait(self, path: str) -> None:
        """A business row, and then an open transaction until a file appears."""
        with self.ctx.transaction() as db:
            self._insert(db, 0)
            self._ledger.write("in_transaction")
            self.wait(path)

    def commit_by_hand(self, path: str) -> None:
        """The same, and a COMMIT that the author sends in the first attempt."""
        with self.ctx.transaction() as db:
            self._insert(db, 0)
            self._ledger.write("in_transaction")
            self.wait(path)
            if self.ctx.attempt == 1:
                db.execute("COMMIT")

    def locked_rows(self, path: str) -> None:
        """A transaction that first takes a lock which every attempt needs, and in the first attempt
        keeps it until a file appears."""
        with self.ctx.transaction() as db:
            db.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (self._key,))
            self._insert(db, 0)
            self._ledger.write("in_transaction")
            if self.ctx.attempt == 1:
                self.wait(path)

    def locked_statement(self, statement: LiteralString) -> None:
        """The same, but what keeps it in the first attempt is this statement."""
        with self.ctx.transaction() as db:
            db.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (self._key,))
            self._insert(db, 0)
            self._ledger.write("in_transaction")
            if self.ctx.attempt == 1:
                db.execute(statement)

    def locked(self, how: dict[str, Any]) -> None:
        """Hold the lock `name`, if it is free within `timeout`, for `seconds` or until there is the file
        `until`."""
        with self.ctx.lock(how["name"], timeout_seconds=how.get("timeout")):
            self._ledger.write("locked", name=how["name"])
            time.sleep(how.get("seconds", 0))
            if "until" in how:
                self.wait(how["until"])
            self._ledger.write("unlocked", name=how["name"])

    def locked_count(self, name: str) -> None:
        """Read the highest item and then write one more: without the lock two would write the same."""
        with self.ctx.lock(name), self.ctx.transaction() as db:
            found = db.execute("SELECT coalesce(max(item), 0) FROM fleet.effects").fetchone()
            assert found is not None
            time.sleep(0.005)
            self._insert(db, found[0] + 1)

    def chunks(self, how: dict[str, Any]) -> None:
        """Business rows in chunks that carry the checkpoint.

        `items`, `size`; `hold` = {item: path}: wait for a file before this item's chunk commits, in
        the first attempt only.
        """
        hold: dict[str, str] = how.get("hold", {})
        for chunk in self.ctx.chunks(
            lambda after: range((after or 0) + 1, how["items"] + 1),
            size=how["size"],
            key=lambda item: item,
        ):
            with self.ctx.transaction() as db:
                for item in chunk:
                    self._insert(db, item)
                    if str(item) in hold and self.ctx.attempt == 1:
                        self._ledger.write("held", item=item)
                        self.wait(hold[str(item)])
            self._ledger.write("chunk", first=chunk[0], last=chunk[-1])

    def steps_with_saves(self, how: dict[str, Any]) -> None:
        """Steps 1 to `count`, saved one by one; `hold` = {step: path}: wait before this one."""
        hold: dict[str, str] = how.get("hold", {})
        done = int(self.ctx.checkpoint or 0)
        while done < how["count"]:
            if str(done + 1) in hold:
                self._ledger.write("held", item=done + 1)
                self.wait(hold[str(done + 1)])
            done += 1
            self._ledger.write("step", number=done)
            self.ctx.save(done)

    def _insert(self, db: Any, item: int) -> None:
        db.execute(
            "INSERT INTO fleet.effects (key, item, attempt, node) VALUES (%s, %s, %s, %s)",
            (self._key, item, self.ctx.attempt, os.environ.get(NODE_VARIABLE, "")),
        )


def _double(number: int) -> int:
    return 2 * number


def _without_core_dump() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class _Scripted(rowlock.Job[Script, Part, str]):
    """What all jobs here share. A result is the key of its partition."""

    retry = rowlock.Retry(max_attempts=3, initial_seconds=0.05, factor=2.0, max_seconds=0.2)

    def partition(self, params: Script, cluster: rowlock.Cluster) -> Iterator[Part]:
        ledger = Ledger(params.ledger, key="plan", attempt=0)
        ledger.write("plan_start", slots=cluster.slots)
        Acts(ledger, None, "plan").carry_out(params.plan, 0)
        yield from params.parts
        ledger.write("plan_end")

    def key(self, part: Part) -> str:
        return part.key

    def weight(self, part: Part) -> int:
        return part.weight

    def process(self, part: Part, ctx: rowlock.Context[Script]) -> str:
        ledger = Ledger(ctx.params.ledger, key=part.key, attempt=ctx.attempt)
        ledger.write("start", job=self.name, of=ctx.idempotency_key)
        try:
            Acts(ledger, ctx, part.key).carry_out(part.steps, ctx.attempt)
        except _Enough:
            return part.key  # a plain return after should_stop counts as stopped
        ledger.write("end")
        return part.key


class Work(_Scripted):
    """AT_LEAST_ONCE, three attempts."""

    name = "fault.work"


class Once(_Scripted):
    """AT_MOST_ONCE."""

    name = "fault.once"
    delivery = rowlock.AT_MOST_ONCE
    retry = rowlock.Retry(max_attempts=1)


class Summed(_Scripted):
    """AT_LEAST_ONCE with a finish(), which counts the results and writes one business row."""

    name = "fault.summed"

    def finish(self, params: Script, outcome: rowlock.Outcome[str]) -> dict[str, Any]:
        ledger = Ledger(params.ledger, key="finish", attempt=0)
        ledger.write("finish_start")
        Acts(ledger, None, "finish").carry_out(params.finish, 0)
        keys = [key for key, _ in outcome.results()]
        with outcome.transaction() as db:
            db.execute(
                "INSERT INTO fleet.effects (key, item, attempt, node) VALUES (%s, 0, 0, %s)",
                (f"finish {','.join(sorted(keys))}", os.environ.get(NODE_VARIABLE, "")),
            )
            ledger.write("finish_in_transaction")
            Acts(ledger, None, "finish").carry_out(params.commit, 0)
        ledger.write("finish_end")
        return {"results": len(keys), "distinct": len(set(keys)), "total": outcome.total}


class Returned(rowlock.Job[Script, Part, Any]):
    """Returns, or raises, what the key of a partition names in `POISON`; any other key is good."""

    name = "fault.returned"
    retry = rowlock.Retry(max_attempts=2, initial_seconds=0.05, max_seconds=0.2)

    def partition(self, params: Script, cluster: rowlock.Cluster) -> Iterator[Part]:
        yield from params.parts

    def key(self, part: Part) -> str:
        return part.key

    def process(self, part: Part, ctx: rowlock.Context[Script]) -> Any:
        Ledger(ctx.params.ledger, key=part.key, attempt=ctx.attempt).write("begin")
        made = POISON.get(part.key, dict)()
        if isinstance(made, BaseException):
            raise made
        return made


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class _Unpicklable(Exception):
    def __reduce__(self) -> NoReturn:
        raise TypeError("cannot be pickled")


def _circular() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def _long_chain() -> Exception:
    error = ValueError(0)
    for number in range(1, 3000):
        above = ValueError(number)
        above.__cause__ = error
        error = above
    return error


POISON: dict[str, Callable[[], object]] = {
    "object": object,
    "set": lambda: {1, 2},
    "bytes": lambda: b"x",
    "decimal": lambda: Decimal("1.5"),
    "datetime": lambda: datetime(2026, 1, 1, tzinfo=UTC),
    "circular": _circular,
    "generator": lambda: (number for number in range(3)),
    "nan": lambda: {"loss": float("nan")},
    "infinity": lambda: [float("inf")],
    "nul": lambda: {"text": "a\0b"},
    "nul in a name": lambda: {"a\0b": 1},
    "literal nul": lambda: {"text": "\\u0000"},  # six characters, and no NUL: it is kept
    "half a character": lambda: "\ud800",
    "2 MB": lambda: "x" * 2_000_000,
    "20 MB": lambda: ["é" * 10_000_000],
    "unprintable error": _Unprintable,
    "unpicklable error": lambda: _Unpicklable("x"),
    "group of errors": lambda: ExceptionGroup("many", [ValueError(n) for n in range(1000)]),
    "long chain of errors": _long_chain,
    "nul in an error": lambda: ValueError("a\0b"),
    "long error": lambda: ValueError("é😀\0" * 700_000),
    "exit": lambda: SystemExit(3),
    "interrupt": KeyboardInterrupt,
}
"""What author code may hand back, by name."""


class Planned(rowlock.Job[Plan, int, int]):
    """Plans numbers, or fails to; its finish() counts them."""

    name = "fault.planned"
    retry = rowlock.Retry(max_attempts=1)

    def partition(self, params: Plan, cluster: rowlock.Cluster) -> Iterable[int]:
        match params.then:
            case "nothing":
                return cast(Iterable[int], None)  # a mistake that only a type checker sees
            case "list":
                return list(self._numbers(params))
            case "tuple":
                return tuple(self._numbers(params))
            case _:
                return self._numbers(params)

    def _numbers(self, params: Plan) -> Iterator[int]:
        yield from range(1, params.count + 1)
        ledger = Ledger(params.ledger, key="plan", attempt=0)
        ledger.write("planned")
        match params.then:
            case "raise":
                raise LookupError("no such number")
            case "exit":
                os._exit(7)
            case "wait":
                Acts(ledger, None, "plan").wait(params.ledger + ".never")
            case "duplicate":
                yield 1
            case "wrong":
                yield cast(int, {"number": 1})
            case _:
                pass
        ledger.write("memory", kilobytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

    def key(self, part: int) -> str:
        return f"n{part}"

    def process(self, part: int, ctx: rowlock.Context[Plan]) -> int:
        pause(ctx.params.seconds)
        return part

    def finish(self, params: Plan, outcome: rowlock.Outcome[int]) -> dict[str, int]:
        Ledger(params.ledger, key="finish", attempt=0).write("finish_start")
        return {"total": outcome.total, "sum": sum(result for _, result in outcome.results())}
