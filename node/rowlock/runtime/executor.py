"""The executor: a child process of a node in which author code runs, one attempt at a time.

The main thread runs the attempts, in the order in which the supervisor sent them. A second thread
reads the socket, so that a request to stop, an answer, or the end of the supervisor is noticed
while author code is busy. Nothing here decides what becomes of a partition: every attempt ends in
exactly one message, and the supervisor acts on it.

After `Exit`, or at the end of the stream, an attempt that has no answer and was not the running one
has not begun.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import itertools
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from rowlock import contract, logs
from rowlock.errors import (
    ContractError,
    Fail,
    LeaseLost,
    RetryLater,
    RowlockError,
    Stopped,
    UsageError,
)
from rowlock.job import Cluster, NodeInfo
from rowlock.registry import Definition, Registry
from rowlock.runtime import messages, processes
from rowlock.runtime.channel import Channel
from rowlock.runtime.context import ExecutorContext, ExecutorOutcome, Fenced
from rowlock.runtime.messages import (
    CommitUnknown,
    Completed,
    Exit,
    Failed,
    Finish,
    Finished,
    Go,
    Hello,
    Lost,
    Plan,
    Planned,
    Ready,
    Reply,
    Run,
    Slices,
    Stop,
    ToSupervisor,
)

if TYPE_CHECKING:  # the database driver is loaded when author code first asks for a transaction
    from rowlock.runtime.transaction import WorkSession

log = logging.getLogger("rowlock.runtime.executor")  # __name__ is __main__ here

PLAN_ITEMS_MAX: Final = 1_000
"""Slices in one message of a plan."""
PLAN_BYTES_MAX: Final = 1024 * 1024
"""Bytes of keys and slices in one message of a plan; escaping can treble them on the wire."""
PARAMETERS_KEPT: Final = 8
"""Executions whose decoded parameters are kept."""
IDLE_SECONDS: Final = 30.0
"""How long an executor without work keeps its connection to the work database."""
LEAVE_SECONDS: Final = 5.0
"""How long threads and exit handlers of the author's may delay the end after `Exit`."""

Work: TypeAlias = Run | Plan | Finish


class Leave(BaseException):
    """The supervisor wants no answer any more: end this process."""


class Inbox:
    """What the reading thread passes to the main one."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._work: SimpleQueue[Work | None] = SimpleQueue()
        self._signals: SimpleQueue[Go | Stop | None] = SimpleQueue()
        # One for each request: a thread that author code has left behind may wait for an answer that
        # never comes, and must not take anybody else's.
        self._expected: dict[int, SimpleQueue[Reply]] = {}
        # Membership decides who answers for an attempt that is stopped before its turn: pop() is
        # one step for both threads.
        self._waiting: dict[int, Work] = {}
        self._current = 0
        self._stopped = 0
        self._leaving = False

    # -- the reading thread ------------------------------------------------------------------

    def read(self) -> None:
        """Read until the supervisor is gone, then end the process, whatever it is doing."""
        try:
            while (message := self._channel.receive()) is not None:
                self._take(message)
        except BaseException:
            log.exception("the channel broke", extra={"event": "executor_channel_broken"})
        finally:
            os._exit(0)

    def _take(self, message: Any) -> None:  # Any: the channel types both directions
        if isinstance(message, (Run, Plan, Finish)):
            self._waiting[message.attempt] = message
            self._work.put(message)
        elif isinstance(message, Stop):
            self._stop(message)
        elif isinstance(message, Go):
            self._signals.put(message)
        elif isinstance(message, Reply):
            expected = self._expected.pop(message.request, None)
            if expected is not None:
                expected.put(message)
        elif isinstance(message, Exit):
            self._leaving = True
            self._work.put(None)
            self._signals.put(None)

    def _stop(self, message: Stop) -> None:
        if self._waiting.pop(message.attempt, None) is not None:
            self._channel.send(messages.Stopped(attempt=message.attempt))
        elif message.attempt == self._current:
            self._stopped = message.attempt
            self._signals.put(message)

    # -- the main thread ---------------------------------------------------------------------

    def next(self, idle_seconds: float, when_idle: Callable[[], None]) -> Work | None:
        """The next attempt to run; None: leave.

        Args:
            idle_seconds: How long to wait before `when_idle` is called, once.
            when_idle: Gives back what an idle executor does not need.
        """
        while (work := self._get(idle_seconds, when_idle)) is not None and not self._leaving:
            # In this order: a Stop that no longer finds the attempt waiting finds it current.
            self._current = work.attempt
            if self._waiting.pop(work.attempt, None) is not None:
                return work
        return None

    def _get(self, idle_seconds: float, when_idle: Callable[[], None]) -> Work | None:
        try:
            return self._work.get(timeout=idle_seconds)
        except Empty:
            when_idle()
            return self._work.get()

    def go(self, attempt: int) -> bool:
        """Wait for the word after `Ready`: True for `Go`, False for `Stop`.

        Raises:
            Leave: The supervisor wants this process to end.
        """
        while (message := self._signals.get()) is not None:
            if message.attempt == attempt:
                return isinstance(message, Go)
        raise Leave

    def stop_asked(self, attempt: int) -> bool:
        """Whether the supervisor has sent `Stop` for this attempt."""
        return self._stopped == attempt

    def expect(self, request: int) -> SimpleQueue[Reply]:
        """Where the answer to a request will be; to be called before the request is sent."""
        answer: SimpleQueue[Reply] = SimpleQueue()
        self._expected[request] = answer
        return answer


class Executor:
    """Runs attempts and answers for each."""

    def __init__(self, channel: Channel, registry: Registry, work_dsn: str) -> None:
        """Build an executor.

        Args:
            channel: The way to the supervisor.
            registry: The jobs.
            work_dsn: The database of `ctx.transaction()`; connected to when first used.
        """
        self._channel = channel
        self._pid = os.getpid()
        self._registry = registry
        self._work_dsn = work_dsn
        self._inbox = Inbox(channel)
        self._numbers = itertools.count(1)
        self._session: WorkSession | None = None
        self._parameters: OrderedDict[str, Any] = OrderedDict()

    def serve(self) -> None:
        """Say hello, then run what comes until the supervisor says `Exit`."""
        threading.Thread(target=self._inbox.read, name="rowlock-reader", daemon=True).start()
        self.tell(Hello(pid=self._pid))
        while (work := self._inbox.next(IDLE_SECONDS, self._hang_up)) is not None:
            try:
                answer = self._perform(work)
            except Leave:
                break
            if isinstance(answer, Failed) and not _is_fit():
                self.tell(replace(answer, worn=True))
                break
            self.tell(answer)
            self._after(answer)
        self._hang_up()

    def _hang_up(self) -> None:
        if self._session is not None:
            self._session.close()

    def _after(self, answer: ToSupervisor) -> None:
        if self._session is not None:
            self._session.end_attempt(keep=isinstance(answer, (Completed, Finished)))

    def _perform(self, work: Work) -> ToSupervisor:
        if isinstance(work, Run):
            return self._run(work)
        if isinstance(work, Plan):
            return self._plan(work)
        return self._finish(work)

    @property
    def _is_copy(self) -> bool:
        """Whether author code forked this process, which then ends as it likes."""
        return os.getpid() != self._pid

    # -- the line of a context to the supervisor ----------------------------------------------

    def tell(self, message: ToSupervisor) -> None:
        """Send a message that has no answer.

        Raises:
            UsageError: The caller is a copy of this process that author code forked.
        """
        if self._is_copy:
            raise UsageError(
                "a forked copy of the executor used its context, or returned from author code: "
                "let the child process end with os._exit(), or hand its result to the parent"
            )
        try:
            self._channel.send(message)
        except OSError:
            os._exit(0)  # the supervisor is gone: nobody waits for this or any other answer

    def post(self, request: Callable[[int], ToSupervisor]) -> SimpleQueue[Reply]:
        """Send a request, made from its number; the answer will be in the queue."""
        number = next(self._numbers)
        answer = self._inbox.expect(number)
        self.tell(request(number))
        return answer

    def ask(self, request: Callable[[int], ToSupervisor]) -> Reply:
        """Send a request and wait for its answer."""
        return self.post(request).get()

    def stop_asked(self, attempt: int) -> bool:
        """Whether the supervisor has asked the attempt to stop."""
        return self._inbox.stop_asked(attempt)

    def work_session(self) -> WorkSession:
        """The connection for `ctx.transaction()`, kept between attempts."""
        if self._session is None:
            from rowlock.runtime.transaction import WorkSession

            self._session = WorkSession(self._work_dsn)
        return self._session

    # -- one attempt at a partition -----------------------------------------------------------

    def _run(self, run: Run) -> ToSupervisor:
        attempt = run.attempt
        try:
            definition = self._registry.definition(run.job)
            params = self._decoded_parameters(definition, run.execution_id, run.parameters)
            part = definition.slice.decode(run.slice)
            ctx = ExecutorContext(run, params, self)
        except BaseException as error:  # noqa: BLE001 - validators are author code too
            return _not_started(attempt, error)

        if run.handshake:
            self.tell(Ready(attempt=attempt))
            if not self._inbox.go(attempt):
                return messages.Stopped(attempt=attempt)

        try:
            result = definition.job.process(part, ctx)
            ctx.check_end()
            text = definition.result.encode(result)
            committed = ctx.commit_deferred("completion", text)
        except BaseException as error:
            if self._is_copy:
                raise
            return self._after_error(attempt, ctx, error, at_most_once=run.handshake)
        finally:
            ctx.fate.over = True
        return Completed(attempt=attempt, result=text, committed=committed)

    def _decoded_parameters(self, definition: Definition, execution_id: str, text: str) -> Any:
        kept = self._parameters
        if execution_id in kept:
            kept.move_to_end(execution_id)
            return kept[execution_id]
        params = definition.parameters.decode(text)
        kept[execution_id] = params
        if len(kept) > PARAMETERS_KEPT:
            kept.popitem(last=False)
        return params

    def _after_error(
        self, attempt: int, ctx: ExecutorContext, error: BaseException, *, at_most_once: bool
    ) -> ToSupervisor:
        stopped = isinstance(error, Stopped)
        if stopped and not (ctx.stop_raised or self._inbox.stop_asked(attempt)):
            text = "process() raised Stopped, but nobody asked this attempt to stop"
            error, stopped = _caused(UsageError(text), error), False
        ended = _undone(attempt, ctx, error)
        if ended is not None:
            return ended
        if stopped:
            return messages.Stopped(attempt=attempt)
        if at_most_once:
            return _failed(attempt, _once_only(error), retry="never")
        return _failed_by_policy(attempt, ctx, error)

    # -- partition() ---------------------------------------------------------------------------

    def _plan(self, plan: Plan) -> ToSupervisor:
        attempt = plan.attempt
        try:
            definition = self._registry.definition(plan.job)
            params = self._decoded_parameters(definition, plan.execution_id, plan.parameters)
            cluster = _cluster(plan.cluster)
        except BaseException as error:  # noqa: BLE001 - as for a partition
            return _not_started(attempt, error)
        planner = Planner(plan.attempt, definition, self)
        try:
            planner.stream(params, cluster)
        except LeaseLost:
            return Lost(attempt=attempt)
        except Stopped:
            return messages.Stopped(attempt=attempt)
        except BaseException as error:
            if self._is_copy:
                raise
            BaseException.add_note(error, f"(item {planner.item:,} of partition())")
            return _failed_by_policy(attempt, None, error)
        return Planned(attempt=attempt, total=planner.item - 1)

    # -- finish() ------------------------------------------------------------------------------

    def _finish(self, finish: Finish) -> ToSupervisor:
        attempt = finish.attempt
        try:
            definition = self._registry.definition(finish.job)
            params = self._decoded_parameters(definition, finish.execution_id, finish.parameters)
            outcome = ExecutorOutcome(finish, definition.result, self)
        except BaseException as error:  # noqa: BLE001 - as for a partition
            return _not_started(attempt, error)
        try:
            summary = definition.job.finish(params, outcome)
            outcome.fate.check()
            text = definition.summary.encode(summary)
            committed = outcome.commit_deferred("finish", text)
        except BaseException as error:
            if self._is_copy:
                raise
            ended = _undone(attempt, outcome, error)
            return ended or _failed_by_policy(attempt, outcome, error)
        finally:
            outcome.fate.over = True
        return Finished(attempt=attempt, summary=text, committed=committed)


class Planner:
    """Streams what `partition()` yields: one batch is staged while the next is made."""

    def __init__(self, attempt: int, definition: Definition, line: Executor) -> None:
        self.item = 1
        """Number of the item that is being made, from 1."""
        self._attempt = attempt
        self._definition = definition
        self._line = line
        self._unanswered: SimpleQueue[Reply] | None = None
        self._keys: list[str] = []
        self._slices: list[str] = []
        self._weights: list[int] = []
        self._bytes = 0

    def stream(self, params: Any, cluster: Cluster) -> None:
        """Run `partition()` to its end.

        Raises:
            ContractError: A slice, its key or its weight breaks the contract.
            UsageError: `partition()` returned something that cannot be iterated over.
            LeaseLost: Another node is the master now.
            Stopped: The supervisor asked to stop.
            BaseException: Whatever `partition()` raises.
        """
        job, encode = self._definition.job, self._definition.slice.encode
        for part in _iterable(job.name, job.partition(params, cluster)):
            text = encode(part)
            key = contract.partition_key(job, part, text)
            self._add(key, text, contract.partition_weight(job, part))
            self.item += 1
        if self._keys:
            self._send_batch()
        self._await_answer()

    def _add(self, key: str, text: str, weight: int) -> None:
        size = len(text.encode()) + len(key.encode())
        full = len(self._keys) >= PLAN_ITEMS_MAX or self._bytes + size > PLAN_BYTES_MAX
        if self._keys and full:
            self._send_batch()
        self._keys.append(key)
        self._slices.append(text)
        self._weights.append(weight)
        self._bytes += size

    def _send_batch(self) -> None:
        self._await_answer()
        if self._line.stop_asked(self._attempt):
            raise Stopped
        keys, slices, weights = self._keys, self._slices, self._weights
        self._keys, self._slices, self._weights, self._bytes = [], [], [], 0
        self._unanswered = self._line.post(
            lambda number: Slices(
                request=number, attempt=self._attempt, keys=keys, slices=slices, weights=weights
            )
        )

    def _await_answer(self) -> None:
        unanswered, self._unanswered = self._unanswered, None
        if unanswered is not None and not unanswered.get().ok:
            raise LeaseLost("another node is the master of this execution now")


def _iterable(job: str, slices: Any) -> Iterator[Any]:
    if slices is None:
        raise UsageError(
            f"partition() of job {job!r} returned None: yield the slices, or return a list of them "
            "([] when there is no work)"
        )
    try:
        return iter(slices)
    except TypeError as error:
        kind = type(slices).__name__
        raise UsageError(
            f"partition() of job {job!r} returned a value of type {kind}: yield the slices, or "
            "return a list of them"
        ) from error


def _cluster(text: str) -> Cluster:
    fields = ("name", "pool", "slots", "load")
    nodes = [NodeInfo(**{name: node[name] for name in fields}) for node in json.loads(text)]
    return Cluster(nodes=tuple(nodes))


# -- errors as messages ------------------------------------------------------------------------


def _undone(attempt: int, fenced: Fenced, error: BaseException) -> ToSupervisor | None:
    """Roll back, then what outranks the error itself; None: nothing does."""
    try:
        fenced.failing(error)
    except (LeaseLost, UsageError):
        pass  # remembered in the fate
    fate = fenced.fate
    if fate.lost:
        return Lost(attempt=attempt)
    if fate.uncertain:
        return CommitUnknown(attempt=attempt)
    if fate.misuse is not None:
        return _failed(attempt, fate.misuse, retry="policy")
    return None


def _is_fit() -> bool:
    """Whether this process can still open a file and start a thread, as the next attempt will.

    What author code has leaked would fail one partition after the other, here and nowhere else.
    """
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
        thread = threading.Thread(target=int)
        thread.start()
    except (OSError, RuntimeError):
        return False
    thread.join()
    return True


def _once_only(error: BaseException) -> BaseException:
    """The error of an AT_MOST_ONCE attempt."""
    if not isinstance(error, RetryLater):
        return error
    better = UsageError(
        "RetryLater in AT_MOST_ONCE work, which is never started twice: make the job "
        "AT_LEAST_ONCE, or raise Fail"
    )
    return _caused(better, error)


def _caused(error: BaseException, cause: BaseException) -> BaseException:
    """What `raise error from cause` would raise."""
    error.__cause__ = cause
    return error


def _not_started(attempt: int, error: BaseException) -> Failed:
    retry = "never" if isinstance(error, ContractError) else "policy"
    return _failed(attempt, error, retry=retry, started=False)


def _failed_by_policy(attempt: int, fenced: Fenced | None, error: BaseException) -> Failed:
    """What an ordinary error of author code means for the next attempt."""
    if fenced is not None and fenced.fate.is_infrastructure(error):
        return _failed(attempt, error, retry="infrastructure")
    if isinstance(error, RetryLater):
        return _failed(attempt, error, retry="later", delay_seconds=error.seconds)
    if isinstance(error, (Fail, ContractError)):
        return _failed(attempt, error, retry="never")
    return _failed(attempt, error, retry="policy")


def _failed(
    attempt: int,
    error: BaseException,
    *,
    retry: str,
    started: bool = True,
    delay_seconds: float | None = None,
) -> Failed:
    try:
        text = contract.describe_error(error)
    except BaseException:  # noqa: BLE001 - whatever a hostile exception does, it is reported
        text = '{"type":"unknown","message":"<the error cannot be shown>","traceback":""}'
    return Failed(
        attempt=attempt, error=text, retry=retry, delay_seconds=delay_seconds, started=started
    )


# -- the process -------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an executor until its supervisor says `Exit` or is gone; the exit code."""
    parser = argparse.ArgumentParser(prog="rowlock-executor", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the socket to the supervisor")
    parser.add_argument("--parent", type=int, required=True, help="pid of the supervisor")
    parser.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE")
    options = parser.parse_args(arguments)
    processes.die_with_parent(options.parent)
    sock = socket.socket(fileno=options.fd)
    _shield(sock)
    logs.configure(os.environ.get("ROWLOCK_LOG_FORMAT") or None)
    try:
        registry = Registry()
        registry.load(options.imports)
    except RowlockError as error:
        # One line: the supervisor has loaded the same jobs, and shows a traceback if there is one.
        log.error("%s", error, extra={"event": "executor_cannot_start"})  # noqa: TRY400
        return error.exit_code
    gc.collect()
    gc.freeze()  # what was imported stays: later collections need not look at it
    dsn = os.environ.get("ROWLOCK_WORK_DSN") or os.environ.get("ROWLOCK_DSN") or ""
    Executor(Channel(sock), registry, dsn).serve()
    # An author's thread that never ends must not keep a recycled executor alive.
    timer = threading.Timer(LEAVE_SECONDS, os._exit, [0])
    timer.daemon = True
    timer.start()
    return 0


def _shield(sock: socket.socket) -> None:
    """Keep author code, and what it starts, away from what belongs to the supervisor."""
    sock.set_inheritable(False)
    os.dup2(2, 1)  # standard output may be the machine-readable output of a command
    sys.stdout = sys.stderr  # which is flushed at each line: what was printed survives a kill
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a descriptor is wanted
        os.dup2(nothing.fileno(), 0)  # input() must not take a terminal's lines
    faulthandler.enable()  # a segfault names the line of author code it came from

    # The supervisor decides when an attempt ends. Handlers rather than SIG_IGN, which programs
    # started by author code would inherit.
    ours = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, _ignore) for number in ours}
    masks: dict[int, set[signal.Signals | int]] = {}

    # A forked child is to die of a signal as any program does, also of one that comes at once:
    # until the handlers are back the signal waits (a pool that is closed early terminates workers
    # that have hardly begun, and then waits for their end).
    def before_fork() -> None:
        masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, ours)

    def after_fork() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop(threading.get_ident()))

    def in_forked_child() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        sock.close()  # otherwise a grandchild keeps the channel open after our death
        after_fork()

    os.register_at_fork(
        before=before_fork, after_in_parent=after_fork, after_in_child=in_forked_child
    )


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing about a signal."""


if __name__ == "__main__":
    sys.exit(main())
