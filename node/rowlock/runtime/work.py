"""The work connection: a thread that carries out the node's statements, in order.

The main loop hands over operations and goes on turning; answers come back through the mailbox. What
must reach the database is repeated until the database has answered: every function of the schema
may be called twice with the same arguments.
"""

from __future__ import annotations

import logging
import os
import random
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import psycopg

from rowlock.db.connect import first_line, is_pooled
from rowlock.db.store import Connection, Observe, Store
from rowlock.errors import RowlockError, Unavailable
from rowlock.protocol.backoff import reconnect_seconds
from rowlock.runtime.link import TRANSIENT, Link, is_final
from rowlock.runtime.mailbox import Mailbox

log = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_POLL_SECONDS: Final = 0.02
"""How often to look whether the connection may be opened."""


@dataclass(slots=True)
class Operation:
    """One statement of the node, and whom to tell how it went."""

    run: Callable[[Store], Any]
    done: Callable[[Any], None]
    failed: Callable[[Exception], None] | None
    """None: it is repeated until the database has answered."""
    limit_seconds: float
    tries: int = 0
    """How often it was refused by itself, over a connection that works."""

    def is_repeated_after(self, error: Exception) -> bool:
        """Whether it must be carried out again."""
        return self.failed is None and not is_final(error)


def carry_out(operation: Operation, link: Link, mailbox: Mailbox) -> Exception | None:
    """Try an operation once and post what came of it; the error if there was one.

    An operation that is to be repeated is not posted in that case: the caller keeps it.

    :raises UsageError: no connection can ever be made from this connection string.
    """
    answer: Any = None  # Any: whatever the operation answers, its own `done` knows
    try:
        store = link.store()
    except (psycopg.Error, Unavailable) as error:
        link.failed(error)
        _post_failure(operation, error, mailbox)
        return error
    try:
        answer = operation.run(store)
    except (psycopg.Error, RowlockError) as error:
        link.failed(error)
        if operation.failed is None and not isinstance(error, TRANSIENT):
            log.exception(
                "the database refused an operation of this node",
                extra={"event": "operation_refused"},
            )
        _post_failure(operation, error, mailbox)
        return error
    link.succeeded()
    mailbox.post(lambda: operation.done(answer))
    return None


def _post_failure(operation: Operation, error: Exception, mailbox: Mailbox) -> None:
    failed = operation.failed
    if failed is not None:
        mailbox.post(lambda: failed(error))


class Work(threading.Thread):
    """Carries out operations on the work connection."""

    def __init__(
        self,
        dsn: str,
        mailbox: Mailbox,
        *,
        application_name: str,
        beat_seconds: float,
        limit_seconds: float,
        reconnect_cap_seconds: float,
        may_connect: Callable[[float], bool],
        on_lost: Callable[[], None],
        announce: Callable[[Store], None],
        on_connected: Callable[[], None],
        on_notified: Callable[[str], None],
        on_crash: Callable[[Exception], None],
        observe: Observe | None = None,
        rng: random.Random,
    ) -> None:
        super().__init__(name="work", daemon=True)
        self._mailbox = mailbox
        self._limit_seconds = limit_seconds
        self._cap_seconds = reconnect_cap_seconds
        self._may_connect = may_connect
        self._announce = announce
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._on_notified = on_notified
        self._on_crash = on_crash
        self._rng = rng
        self._link = Link(
            dsn,
            application_name=application_name,
            idle_in_transaction_seconds=beat_seconds,
            lock_seconds=beat_seconds,
            on_connect=self._prepare,
            observe=observe,
        )
        self._queue: deque[Operation] = deque()
        self._put_off: list[tuple[float, Operation]] = []  # until when
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._stop = threading.Event()
        self._running: tuple[float, float] | None = None  # since when, until when it may take
        self._lost_at: float | None = None
        self._busy_since = 0.0
        self._answered_at = 0.0

    # -- for the main thread -------------------------------------------------------------------

    def ask(
        self,
        run: Callable[[Store], T],
        done: Callable[[T], None],
        failed: Callable[[Exception], None],
        *,
        limit_seconds: float | None = None,
    ) -> None:
        """Try once: `done` with the answer, or `failed` with the error."""
        self._put(Operation(run, done, failed, limit_seconds or self._limit_seconds))

    def tell(
        self,
        run: Callable[[Store], T],
        done: Callable[[T], None] | None = None,
        *,
        limit_seconds: float | None = None,
    ) -> None:
        """Repeat until the database has answered, before anything that comes after it.

        What comes after passes it only if the database answers, and refuses this one alone.
        """
        self._put(Operation(run, done or ignore, None, limit_seconds or self._limit_seconds))

    @property
    def connection(self) -> Connection | None:
        """The open connection, if there is one."""
        return self._link.connection

    @property
    def waiting(self) -> int:
        """How many operations are not answered yet."""
        return len(self._queue) + len(self._put_off) + (self._running is not None)

    def unanswered_seconds(self, now: float) -> float:
        """For how long operations have waited without any of them being answered."""
        return now - max(self._busy_since, self._answered_at) if self.waiting else 0.0

    def end_stuck(self, now: float) -> None:
        """Break the connection if the running operation takes longer than it may."""
        running = self._running
        if running is not None and now > running[1]:
            self._running = (running[0], now + self._limit_seconds)
            log.warning(
                "an operation has no answer: breaking the connection",
                extra={"event": "work_connection_stuck", "seconds": round(now - running[0], 3)},
            )
            self._link.shut()

    def give_way(self) -> None:
        """Break the connection, so that there is room for another; operations are repeated when this one is back."""
        if self._link.connection is not None:
            log.warning(
                "the beat has no connection: it gets the room of this one",
                extra={"event": "work_connection_gave_way"},
            )
            self._link.shut()

    def take_over(self) -> list[Operation]:
        """Take the waiting operations away, to carry them over another connection.

        Not those that may take long there, and hold up what it is for.
        """
        taken: list[Operation] = []
        kept: list[Operation] = []
        while True:
            try:
                operation = self._queue.popleft()
            except IndexError:  # the thread may have been quicker
                self._queue.extend(kept)
                return taken
            (taken if self._may_be_taken(operation) else kept).append(operation)

    def _may_be_taken(self, operation: Operation) -> bool:
        return operation.limit_seconds <= self._limit_seconds

    def stop(self) -> None:
        """End the thread; what is not answered is forgotten."""
        self._stop.set()
        self._wake()
        self._link.shut()

    # -- the thread ----------------------------------------------------------------------------

    def run(self) -> None:
        """Carry out operations until stopped."""
        try:
            self._carry_on()
        except Exception as error:  # noqa: BLE001  a node without this thread is none: it must not live on
            crash = error
            self._mailbox.post(lambda: self._on_crash(crash))
        self._link.drop()

    def _carry_on(self) -> None:
        while not self._stop.is_set():
            self._resume()
            if self._must_wait():
                self._sleep(CONNECT_POLL_SECONDS)
                continue
            if not self._queue:
                self._wait_for_work()
                continue
            try:
                operation = self._queue.popleft()
            except IndexError:
                continue  # taken over meanwhile
            self._carry_out(operation)

    def _must_wait(self) -> bool:
        """Whether others go first: with room for one connection, it is not this one."""
        if self._link.connection is not None:
            self._lost_at = None
            return False
        if self._lost_at is None:
            self._lost_at = time.monotonic()
            self._on_lost()
        return not self._may_connect(self._lost_at)

    def _carry_out(self, operation: Operation) -> None:
        started = time.monotonic()
        self._running = (started, started + operation.limit_seconds)
        if self._may_be_taken(operation) and (trouble := self._reconnect()) is not None:
            self._running = None
            # Nothing is wrong with it: it waits for this connection, or goes over the beat's.
            self._queue.appendleft(operation)
            self._pause(trouble)
            return
        error = carry_out(operation, self._link, self._mailbox)
        self._running = None
        if error is None:
            self._answered_at = time.monotonic()
            return
        repeated = operation.is_repeated_after(error)
        if repeated and self._link.connection is not None:
            self._put_off_alone(operation, error)
            return
        if repeated:
            self._queue.appendleft(operation)
        self._pause(error)

    def _put_off_alone(self, operation: Operation, error: Exception) -> None:
        """The database answers, but this operation is in trouble: the others need not wait for it.

        Somebody holds a lock that it needs, or a privilege is missing.
        """
        self._link.succeeded()
        now = self._answered_at = time.monotonic()
        operation.tries += 1
        seconds = reconnect_seconds(
            tries=operation.tries, cap_seconds=self._cap_seconds, draw=self._rng.random()
        )
        self._put_off.append((now + seconds, operation))
        log.log(
            logging.WARNING if operation.tries in {1, 10} else logging.DEBUG,
            "%s; trying again",
            first_line(error),
            extra={"event": "operation_put_off", "tries": operation.tries},
        )

    def _resume(self) -> None:
        """Queue what was put off for long enough."""
        now = time.monotonic()
        for entry in [entry for entry in self._put_off if entry[0] <= now]:
            self._put_off.remove(entry)
            self._queue.append(entry[1])

    def _pause(self, error: Exception) -> None:
        if self._stop.is_set():
            return
        seconds = reconnect_seconds(
            tries=self._link.tries, cap_seconds=self._cap_seconds, draw=self._rng.random()
        )
        self._link.tell(error)
        deadline = time.monotonic() + seconds
        while not self._stop.is_set() and (left := deadline - time.monotonic()) > 0:
            self._sleep(left)

    def _sleep(self, seconds: float) -> None:
        """Until woken, at most so long."""
        select.select([self._wake_read], [], [], seconds)
        self._clear_wake()

    def _wait_for_work(self) -> None:
        """Sleep until there is work, and listen meanwhile; reconnect when the server goes away."""
        connection = self._link.connection
        if connection is None:
            if (trouble := self._reconnect()) is not None:
                self._pause(trouble)
            return
        try:
            due = min((until for until, _ in self._put_off), default=None)
            wait = None if due is None else max(0.0, due - time.monotonic())
            readable, _, _ = select.select(
                [connection.pgconn.socket, self._wake_read], [], [], wait
            )
            if connection.pgconn.socket in readable:
                connection.pgconn.consume_input()
                while (notify := connection.pgconn.notifies()) is not None:
                    self._notified(notify.extra.decode(errors="replace"))
        except (psycopg.Error, OSError, ValueError) as error:
            self._link.drop()
            if not self._stop.is_set():
                log.warning("%s", first_line(error), extra={"event": "work_connection_lost"})
        self._clear_wake()

    def _reconnect(self) -> Exception | None:
        """Connect, if there is no connection; the error if there is no way."""
        try:
            self._link.open()
        except (psycopg.Error, Unavailable) as error:
            self._link.failed(error)
            return error
        return None

    def _prepare(self, connection: Connection) -> None:
        # Behind a pooler what it listens with is somebody else's a moment later. Polling does without.
        if not is_pooled(connection):
            connection.add_notify_handler(lambda notify: self._notified(notify.payload))
            connection.execute("LISTEN rowlock")
        self._announce(Store(connection))
        self._mailbox.post(self._on_connected)

    def _notified(self, payload: str) -> None:
        self._mailbox.post(lambda: self._on_notified(payload))

    def _put(self, operation: Operation) -> None:
        if not self.waiting:
            self._busy_since = time.monotonic()
        self._queue.append(operation)
        self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            pass

    def _clear_wake(self) -> None:
        try:
            os.read(self._wake_read, 65536)
        except BlockingIOError:
            pass


def ignore(_answer: object) -> None:
    """For answers, and errors, on which nothing depends."""
