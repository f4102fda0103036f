"""The executors of a node: started, fed, watched, replaced. It knows nothing of partitions.

Every index of the pool is one executor process at a time. The attempts an executor was given are
kept here in order, because they are answered in order: when one dies, the first of them is what it
was running.
"""

from __future__ import annotations

import logging
import selectors
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from rowlock.runtime.children import Children
from rowlock.runtime.executor_process import ExecutorProcess, describe_exit, executor_command
from rowlock.runtime.messages import Exit, Failed, Hello, Message, ToExecutor
from rowlock.runtime.watchdog import LeaseBoard

log = logging.getLogger(__name__)

START_AGAIN_SECONDS_MAX: Final = 10.0
MEMORY_EVERY_ATTEMPTS: Final = 16
"""How often the memory of an executor is looked at that is never empty."""
_EXIT_GRACE_SECONDS: Final = 5.0

FAILED_STARTS_MAX: Final = 3
"""Failures in a row after which an executor is taken for one that cannot be started."""

WorkT = TypeVar("WorkT")


@dataclass(slots=True, eq=False)
class Executor(Generic[WorkT]):
    """One executor of the pool."""

    index: int
    process: ExecutorProcess | None = None
    ready: bool = False
    """It has said Hello and was not asked to leave."""
    work: deque[WorkT] = field(default_factory=deque["WorkT"])
    """What it was given and has not answered, in the order of its answers."""
    served: int = 0
    """How much it was given."""
    answered: int = 0
    worn: bool = False
    """It gets no more, and leaves when it has answered for what it was given."""
    failed_starts: int = 0
    start_at: float = 0.0
    leave_by: float | None = None
    freezable: bool = False
    hung_up: bool = False
    killed: bool = False
    """This node has ended it, whatever it was doing."""

    @property
    def is_failing(self) -> bool:
        """Whether it was started again and again and never got ready."""
        return self.failed_starts >= FAILED_STARTS_MAX


class Pool(Generic[WorkT]):
    """A fixed number of executors, on the supervisor's selector."""

    def __init__(
        self,
        size: int,
        *,
        children: Children,
        board: LeaseBoard,
        selector: selectors.BaseSelector,
        imports: Sequence[str],
        env: Mapping[str, str],
        on_message: Callable[[Executor[WorkT], Message], None],
        on_end: Callable[[Executor[WorkT], list[WorkT], str], None],
        recycle_attempts: int,
        memory_bytes_max: int,
    ) -> None:
        self._children = children
        self._board = board
        self._selector = selector
        self._command = executor_command(imports)
        self._env = env
        self._on_message = on_message
        self._on_end = on_end
        self._recycle_attempts = recycle_attempts
        self._memory_bytes_max = memory_bytes_max
        self._closing = False
        self.executors = [Executor[WorkT](index) for index in range(size)]

    # -- what the node asks of it --------------------------------------------------------------

    def turn(self, now: float) -> None:
        """Start what is to be started, end what was to leave, notice what has ended."""
        for executor in self.executors:
            process = executor.process
            if process is None:
                if not self._closing and now >= executor.start_at:
                    self._start(executor, now)
                continue
            if executor.hung_up or (executor.leave_by is not None and now >= executor.leave_by):
                process.kill()
            status = process.poll()
            if status is not None:
                self._ended(executor, status, now)
        self._children.reap_orphans()

    def send(self, executor: Executor[WorkT], message: ToExecutor) -> None:
        """Queue a message; `flush` sends it."""
        if executor.process is not None:
            executor.process.queue(message)

    def flush(self) -> None:
        """Send what is queued, as far as the sockets take it."""
        for executor in self.executors:
            process = executor.process
            if process is None or not process.unsent or executor.hung_up:
                continue
            try:
                done = process.flush()
            except ConnectionError:
                executor.hung_up = True
                continue
            events = selectors.EVENT_READ if done else selectors.EVENT_READ | selectors.EVENT_WRITE
            if self._selector.get_key(process).events != events:
                self._selector.modify(process, events, executor)

    def receive(self, executor: Executor[WorkT]) -> None:
        """Take in what an executor has sent."""
        process = executor.process
        if process is None:
            return
        try:
            found = process.feed()
        except (EOFError, ConnectionError):
            executor.hung_up = True
            # Nothing more will come; without this the selector would spin until it is reaped.
            self._selector.unregister(process)
            return
        for message in found:
            if isinstance(message, Hello):
                executor.ready = True
                executor.failed_starts = 0
            else:
                self._on_message(executor, message)
                if isinstance(message, Failed) and message.worn:
                    log.warning(
                        "executor %d has run out of files or threads: it is replaced",
                        executor.index,
                        extra={"event": "executor_worn", "executor": executor.index},
                    )
                    self.kill(executor)  # nobody is blamed for its end

    def give(self, executor: Executor[WorkT], work: WorkT, *, freezable: bool) -> None:
        """Note what an executor is given, before it is sent."""
        executor.work.append(work)
        executor.served += 1
        # Of small work something always waits in it: that it is empty now and then is not enough.
        if executor.served >= self._recycle_attempts > 0:
            executor.worn = True
        self.set_freezable(executor, freezable=freezable)

    def set_freezable(self, executor: Executor[WorkT], *, freezable: bool) -> None:
        """Whether the watchdog is to freeze this executor at the end of the lease."""
        if executor.process is not None and executor.freezable != freezable:
            executor.freezable = freezable
            self._board.protect(executor.index, executor.process.tree, freeze=freezable)

    def taken_back(self, executor: Executor[WorkT], work: WorkT) -> None:
        """Note that an executor has answered for this work."""
        executor.work.remove(work)
        executor.answered += 1
        if not executor.work or executor.answered % MEMORY_EVERY_ATTEMPTS == 0:
            executor.worn = executor.worn or self._holds_too_much(executor)
        if executor.worn and not executor.work and executor.ready:
            self._retire(executor)

    def kill(self, executor: Executor[WorkT]) -> None:
        """End an executor with all it has started; `on_end` is called with what it had."""
        executor.ready = False
        executor.killed = True
        executor.leave_by = 0.0
        if executor.process is not None:
            executor.process.kill()

    def close(self) -> None:
        """End all executors, at once, and forget what they had."""
        self._closing = True
        for executor in self.executors:
            process = executor.process
            if process is None:
                continue
            self._unregister(process)
            process.close()
            self._board.clear(executor.index)
            executor.process = None
            executor.ready = False

    # -- the life of one executor ----------------------------------------------------------------

    def _start(self, executor: Executor[WorkT], now: float) -> None:
        try:
            process = ExecutorProcess.start(
                self._children,
                self._command,
                env=self._env,
                mark=self._board.mark(executor.index),
            )
        except OSError as error:
            self._put_off(executor, now, f"cannot be started: {error}")
            return
        executor.process = process
        executor.served = executor.answered = 0
        executor.worn = False
        executor.hung_up = executor.killed = False
        executor.freezable = True
        self._board.protect(executor.index, process.tree, freeze=True)
        self._selector.register(process, selectors.EVENT_READ, executor)
        if process.exit_fd is not None:
            self._selector.register(process.exit_fd, selectors.EVENT_READ, executor)

    def _ended(self, executor: Executor[WorkT], status: int, now: float) -> None:
        process = executor.process
        assert process is not None
        if not executor.hung_up:
            self._drain_channel(executor)
        greeted = executor.ready or executor.served or executor.leave_by is not None
        self._unregister(process)
        process.close()
        self._board.clear(executor.index)
        executor.process = None
        executor.ready = False
        executor.leave_by = None
        work, executor.work = list(executor.work), deque()
        if greeted:
            executor.start_at = now
        else:
            self._put_off(executor, now, f"ended before it was ready ({describe_exit(status)})")
        self._on_end(executor, work, describe_exit(status))

    def _drain_channel(self, executor: Executor[WorkT]) -> None:
        """Answers that arrived before the end count."""
        while not executor.hung_up and self._has_more(executor):
            self.receive(executor)

    def _has_more(self, executor: Executor[WorkT]) -> bool:
        process = executor.process
        if process is None:
            return False
        with selectors.DefaultSelector() as once:
            once.register(process, selectors.EVENT_READ)
            return bool(once.select(0))

    def _put_off(self, executor: Executor[WorkT], now: float, problem: str) -> None:
        executor.failed_starts += 1
        wait = min(START_AGAIN_SECONDS_MAX, 0.1 * 2 ** min(executor.failed_starts, 10))
        executor.start_at = now + wait
        log.error(
            "executor %d %s; trying again in %.1f s",
            executor.index,
            problem,
            wait,
            extra={"event": "executor_start_failed", "executor": executor.index},
        )

    def _holds_too_much(self, executor: Executor[WorkT]) -> bool:
        process = executor.process
        if process is None or not self._memory_bytes_max:
            return False
        return (process.memory_bytes() or 0) > self._memory_bytes_max

    def _retire(self, executor: Executor[WorkT]) -> None:
        executor.ready = False
        executor.leave_by = time.monotonic() + _EXIT_GRACE_SECONDS
        self.send(executor, Exit())

    def _unregister(self, process: ExecutorProcess) -> None:
        for fileobj in (process, process.exit_fd):
            if fileobj is not None:
                try:
                    self._selector.unregister(fileobj)
                except (KeyError, ValueError):
                    pass  # its channel was unregistered when it hung up
