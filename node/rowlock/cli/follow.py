"""Follows an execution through the views until it ends, and through outages of the database."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import psycopg

from rowlock.cli import output
from rowlock.cli.database import opened
from rowlock.cli.progress import Display, Snapshot
from rowlock.db import views
from rowlock.db.connect import first_line, is_pooled
from rowlock.db.views import Connection, Execution, Look, Partition
from rowlock.errors import Unavailable

LOOK_SECONDS: Final = 1.0
"""Longest time between two looks; a notification makes it shorter."""

LOOK_MIN_SECONDS: Final = 0.1
"""Shortest time between two looks: other executions of a busy database notify as well."""

OUTAGE_SECONDS_MAX: Final = 60.0
"""How long the database may be away before following is given up. The execution goes on."""

FAILURES_SHOWN: Final = 3
ERROR_CHARS: Final = 200

EXIT_CODES: Final = {"COMPLETED": 0, "FAILED": 4, "CANCELLED": 3, "ABANDONED": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an execution ended."""

    execution: Execution
    summary: Any  # Any: the author's JSON value
    failed: list[Partition]
    """The first few of the partitions that failed."""

    @property
    def exit_code(self) -> int:
        """What a command that stood for the execution exits with."""
        return EXIT_CODES[self.execution.status]


def follow(dsn: str, execution_id: UUID, *, command: str, display: Display) -> Ending:
    """Show an execution until it has ended.

    A first connection that fails is an error at once; later ones are tried again for a minute.

    Raises:
        Unavailable: The database cannot be reached.
        NotFound: The execution does not exist.
    """
    patience = _Patience(execution_id)
    while True:
        try:
            with opened(dsn, command) as db:
                if not is_pooled(db):
                    db.execute("LISTEN rowlock")
                for look in _looks(db, execution_id):
                    patience.renew()
                    display.show(snapshot_of(look))
                return ending(db, execution_id)
        except (Unavailable, psycopg.OperationalError) as error:
            patience.wait(error)


def ending(db: Connection, execution_id: UUID) -> Ending:
    """How an execution that has ended did so."""
    execution = views.execution(db, execution_id)
    return Ending(
        execution=execution,
        summary=views.payloads(db, execution_id).summary,
        failed=views.partitions(db, execution_id, statuses=["FAILED"], limit=FAILURES_SHOWN)
        if execution.failed
        else [],
    )


def snapshot_of(look: Look) -> Snapshot:
    """What a display wants to know."""
    return Snapshot(
        status=look.status,
        total=look.total,
        completed=look.completed,
        failed=look.failed,
        cancelled=look.cancelled,
        running=look.running,
        nodes=look.nodes,
    )


def _looks(db: Connection, execution_id: UUID) -> Iterator[Look]:
    """One look after the other; the last one shows the end."""
    while True:
        looked_at = time.monotonic()
        look = views.look(db, execution_id)
        yield look
        if look.ended:
            return
        for _ in db.notifies(timeout=LOOK_SECONDS, stop_after=1):
            too_early = looked_at + LOOK_MIN_SECONDS - time.monotonic()
            threading.Event().wait(max(0.0, too_early))


class _Patience:
    """How long an outage may last, and how often to look whether it is over."""

    def __init__(self, execution_id: UUID) -> None:
        self._execution_id = execution_id
        self._until: float | None = None
        self._seen_once = False
        self._pause_seconds = 0.0

    def renew(self) -> None:
        """The database has answered."""
        self._seen_once = True
        self._until = None

    def wait(self, error: Exception) -> None:
        """Wait a little, or raise the error if it has lasted too long."""
        now = time.monotonic()
        if not self._seen_once:
            raise error
        if self._until is None:
            self._until, self._pause_seconds = now + OUTAGE_SECONDS_MAX, 0.1
            output.warn(
                f"the database is away ({first_line(error)}); trying again for "
                f"{OUTAGE_SECONDS_MAX:g} s"
            )
        if now > self._until:
            raise Unavailable(
                f"{first_line(error)}; execution {self._execution_id} goes on without being "
                f"watched: rowlock status {self._execution_id} --watch"
            ) from error
        threading.Event().wait(self._pause_seconds)
        self._pause_seconds = min(2 * self._pause_seconds, 2.0)


class Glance:
    """What only the views know, read now and then beside a master that reports its own progress.

    It has a thread and a connection of its own, because a master must never wait for a display.
    """

    def __init__(self, dsn: str, execution_id: UUID) -> None:
        self._dsn = dsn
        self._execution_id = execution_id
        self._stop = threading.Event()
        self._look: Look | None = None
        self._thread = threading.Thread(target=self._run, name="glance", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more. Does not wait for a database that says nothing."""
        self._stop.set()

    @property
    def running(self) -> int | None:
        """Attempts that run; None while it is not known."""
        return self._look.running if self._look else None

    @property
    def nodes(self) -> int | None:
        """Nodes that hold partitions; None while it is not known."""
        return self._look.nodes if self._look else None

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with opened(self._dsn, "launch") as db:
                    while not self._stop.is_set():
                        self._look = views.look(db, self._execution_id)
                        self._stop.wait(LOOK_SECONDS)
            except Exception:  # noqa: BLE001  a display that knows less is no reason for anything
                self._look = None
                self._stop.wait(LOOK_SECONDS)


# -- the last words ----------------------------------------------------------------------------


def print_ending(end: Ending, *, as_json: bool) -> int:
    """Say how an execution ended; answers with the exit code."""
    if as_json:
        output.print_json_line(
            {
                "type": "result",
                "exit_code": end.exit_code,
                **output.fields_of(end.execution),
                "summary": end.summary,
                "failed_partitions": end.failed,
            }
        )
        return end.exit_code
    _print_outcome(end.execution)
    if end.summary is not None:
        print(f"summary: {output.compact(end.summary, limit=10_000)}")
    if end.failed:
        print_failures(end.execution, end.failed)
    return end.exit_code


def print_failures(execution: Execution, failed: list[Partition]) -> None:
    """The first partitions that failed, and the command that shows all."""
    for one in failed:
        error = output.cut(output.printable(one.error_text or "?"), ERROR_CHARS)
        times = "once" if one.claims == 1 else f"{one.claims} times"
        print(f"  {output.cell(one.partition_key)} (claimed {times}): {error}")
    if execution.failed > len(failed):
        print(f"  … and {execution.failed - len(failed)} more")
    print(f"see more: rowlock partitions {execution.execution_id} --status FAILED")


def _print_outcome(one: Execution) -> None:
    took = output.between(one.requested_at, one.ended_at)
    counts = "no plan was made"
    if one.total is not None:
        counts = f"{one.completed} of {one.total} partitions completed"
    for number, word in ((one.failed, "failed"), (one.cancelled, "cancelled")):
        counts += f", {number} {word}" if number else ""
    print(f"execution {one.execution_id} of {one.job_name} {one.status} in {took}: {counts}")
    if one.failure_reason is not None:
        message = f": {one.failure_message}" if one.failure_message else ""
        print(output.printable(f"reason: {one.failure_reason}{message}"))


@contextmanager
def shown(display: Display) -> Generator[Display]:
    """A display that is closed whatever happens."""
    try:
        yield display
    finally:
        display.close()
