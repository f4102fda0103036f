"""Points at which a process dies or stands still, named from outside. Normal runs import none of it.

    FAILPOINT="seal:after:kill"  python -m tests.support.failpoints rowlock launch JOB …

A point is `PLACE:WHEN:ACTION`; several stand with a `;` between them.

- PLACE: a method of `Store` (`adopt`, `seal`, `beat`, …), in every thread that calls it. Two places stand for
  what a node does with them: `claim` is any statement that claims (its `after` only counts if something was
  claimed), `complete` any that carries results. In executors `begin` and `commit` are the BEGIN and the COMMIT
  of `ctx.transaction()` and of the transaction of finish().
- WHEN: `before`, or `after`: the database has answered, the caller does not know yet.
- ACTION: `kill` (this process), `kill_node` (its supervisor, in an executor), `stop` (SIGSTOP), `note` (nothing
  but the line in the log).
  With `=PATH` behind it only for the first process that can make that file; with `@N` at the end only the N-th time
  that this process comes by.

A process that reaches one logs the event `failpoint` first.
"""

from __future__ import annotations

import functools
import logging
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

from rowlock.db.store import Store
from rowlock.runtime import executor_process, pool
from rowlock.runtime.transaction import WorkSession

VARIABLE: Final = "FAILPOINT"
MODULE: Final = "tests.support.failpoints"
EXECUTOR: Final = "rowlock.runtime.executor"

When = Literal["before", "after"]
_ACTIONS: Final = frozenset({"kill", "kill_node", "stop", "note"})

log = logging.getLogger("rowlock.failpoint")


@dataclass(slots=True)
class Failpoint:
    """One point; counts how often it is passed."""

    place: str
    when: str
    action: str
    path: str
    """Only the first process that can make this file acts; "": every one."""
    only: int | None
    """Which time it acts; None is every time."""
    passed: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def parse(cls, text: str) -> Failpoint:
        """Read `PLACE:WHEN:ACTION[=PATH][@N]`.

        Raises:
            ValueError: It is none; a test with a wrong one must not pass by doing nothing.
        """
        place, when, rest = text.split(":", 2)
        rest, _, only = rest.partition("@")
        action, _, path = rest.partition("=")
        known = {*CLAIMS_AND_RESULTS, *store_methods(), *IN_EXECUTORS}
        if place not in known or when not in get_args(When) or action not in _ACTIONS:
            raise ValueError(f"no failpoint: {text}")
        return cls(place, when, action, path, int(only) if only else None)

    def reach(self) -> None:
        """Act, if it is the time for it."""
        with self.lock:
            self.passed += 1
            if self.only not in {None, self.passed} or not self._is_first():
                return
        log.warning("%s:%s", self.place, self.when, extra={"event": "failpoint", **self._facts()})
        match self.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "kill_node":
                os.kill(os.getppid(), signal.SIGKILL)
                threading.Event().wait()  # it takes its executors along
            case "stop":
                # To this thread: one sent to the process stops it a little after the call has returned.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            case _:
                pass  # the line in the log is all

    def _is_first(self) -> bool:
        if not self.path:
            return True
        try:
            Path(self.path).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _facts(self) -> dict[str, object]:
        return {"place": self.place, "when": self.when, "action": self.action}


def store_methods() -> list[str]:
    """The moves of the protocol, each a place."""
    return [name for name, it in vars(Store).items() if callable(it) and not name.startswith("_")]


def _claims(arguments: Sequence[Any], answer: Any) -> bool:
    if isinstance(answer, tuple):  # of the statement that completes too
        return bool(cast(Sequence[Any], answer)[1])
    return answer is None or bool(answer)


def _completes(arguments: Sequence[Any], answer: Any) -> bool:
    return bool(arguments[1])  # node, completions, …


def _always(arguments: Sequence[Any], answer: Any) -> bool:
    return True


_Concerns = Callable[[Sequence[Any], Any], bool]

CLAIMS_AND_RESULTS: Final[dict[str, tuple[Sequence[str], _Concerns]]] = {
    "claim": (("claim", "complete_and_claim"), _claims),
    "complete": (("complete", "complete_and_claim"), _completes),
}
IN_EXECUTORS: Final = ("begin", "commit")


def _wrap(owner: type, method: str, point: Failpoint, concerns: _Concerns) -> None:
    inner = getattr(owner, method)

    @functools.wraps(inner)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if point.when == "before" and concerns(args, None):
            point.reach()
        answer = inner(self, *args, **kwargs)
        if point.when == "after" and concerns(args, answer):
            point.reach()
        return answer

    setattr(owner, method, run)


def install(points: Iterable[Failpoint], *, in_executor: bool) -> None:
    """Put them into this process; a supervisor starts its executors with them too."""
    for point in points:
        if point.place in IN_EXECUTORS:
            if in_executor:
                _wrap(WorkSession, point.place, point, _always)
        elif not in_executor:
            methods, concerns = CLAIMS_AND_RESULTS.get(point.place, ((point.place,), _always))
            for method in methods:
                _wrap(Store, method, point, concerns)
    if not in_executor:
        usual = executor_process.executor_command

        def executor_command(imports: Iterable[str]) -> list[str]:
            python, _m, module, *flags = usual(imports)
            assert module == EXECUTOR
            return [python, "-m", MODULE, module, *flags]

        setattr(pool, "executor_command", executor_command)  # noqa: B010  not exported, but called


def points(text: str) -> list[Failpoint]:
    """The points of a text as in `FAILPOINT`."""
    return [Failpoint.parse(part.strip()) for part in text.split(";")]


def main() -> None:
    """Run the module that the first argument names, as `python -m` does, with failpoints in it."""
    module = sys.argv[1]
    del sys.argv[1]
    install(points(os.environ[VARIABLE]), in_executor=module == EXECUTOR)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
