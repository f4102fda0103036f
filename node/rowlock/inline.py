"""Runs an execution of a job in this process: what `rowlock.testing` is made of.

It plays the executor, the master and the database for one job. Contexts are the executor's own;
transactions are real but have no fence, because nobody else could take the claim away.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar, cast

import psycopg
from psycopg.pq import TransactionStatus

from rowlock.contract import partition_key, partition_weight
from rowlock.errors import ContractError, Fail, RetryLater, Stopped, UsageError
from rowlock.job import AT_MOST_ONCE, Cluster
from rowlock.registry import Definition
from rowlock.runtime.context import ExecutorContext, ExecutorOutcome
from rowlock.runtime.messages import (
    Checkpoint,
    Finish,
    Lock,
    Progress,
    Reply,
    Run,
    ToSupervisor,
    Unlock,
)
from rowlock.runtime.transaction import Fence, WorkConnection, WorkSession

__all__ = [
    "Interruption",
    "Line",
    "Partition",
    "PartitionRun",
    "Planned",
    "RunResult",
    "Runner",
    "Session",
    "plan",
    "session_for",
]

SliceT = TypeVar("SliceT")
ResultT = TypeVar("ResultT")

_EXECUTION: Final = "00000000-0000-4000-8000-000000000000"
_STEP: Final = "main"
_ATTEMPTS_MAX: Final = 10_000
"""A partition that was interrupted or asked for another time so often will never end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition(Generic[SliceT]):
    """A planned partition."""

    key: str
    """Its key: what `key()` said, or the digest of the slice."""

    slice: SliceT
    """The slice as `process()` gets it, decoded from JSON."""

    weight: int
    """What `weight()` said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRun(Generic[ResultT]):
    """How one partition ended."""

    key: str
    """The key of the partition."""

    attempts: int
    """How often it was run, interrupted attempts included."""

    result: ResultT | None
    """What `process()` returned, decoded from JSON; None if it failed."""

    error: BaseException | None
    """What its last attempt raised; None if it completed."""

    skipped: int = 0
    """Items that it left out with `ctx.skip`; 0 if it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult(Generic[ResultT]):
    """How an execution ended."""

    status: str
    """COMPLETED, or FAILED as the job's `max_failed` decides."""

    partitions: tuple[PartitionRun[ResultT], ...]
    """All partitions, in the order of planning."""

    summary: Any
    """What `finish()` returned, decoded from JSON; None without one or if the execution failed."""

    @property
    def results(self) -> dict[str, ResultT]:
        """The results of the partitions that completed, by key."""
        return {p.key: cast("ResultT", p.result) for p in self.partitions if p.error is None}

    @property
    def errors(self) -> dict[str, BaseException]:
        """The errors of the partitions that failed, by key."""
        return {p.key: p.error for p in self.partitions if p.error is not None}


# -- planning ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A planned partition with what is needed to run it."""

    partition: Partition[Any]
    """What the author sees of it."""

    text: str
    """The slice as JSON."""


def plan(definition: Definition, params: Any, cluster: Cluster) -> list[Planned]:
    """What `partition()` yields, through the same checks as in production.

    Raises:
        ContractError: A slice, a key or a weight breaks its contract, or a key comes twice.
    """
    made: dict[str, Planned] = {}
    for part in definition.job.partition(params, cluster):
        text = definition.slice.encode(part)
        key = partition_key(definition.job, part, text)
        if key in made:
            raise ContractError("key", "$", f"two partitions have the key {key!r}")
        weight = partition_weight(definition.job, part)
        decoded = definition.slice.decode(text)
        made[key] = Planned(partition=Partition(key=key, slice=decoded, weight=weight), text=text)
    return list(made.values())


# -- running -----------------------------------------------------------------------------------


class _Crash(BaseException):
    """The attempt ends here, as if its process had been killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """When attempts are to end early."""

    stop_after: int | None
    """Ask the attempt to stop after so many checkpoints."""

    crash_after: int | None
    """End the attempt before it writes the checkpoint after so many."""


_NEVER: Final = Interruption(stop_after=None, crash_after=None)


class Line:
    """Stands where the executor stands: keeps checkpoints, asks to stop, hands out results."""

    def __init__(self, session: Session | None) -> None:
        self.checkpoint: str | None = None
        self.skipped = 0
        """Items that the partition has left out, as it has reported."""
        self.written = 0
        self.results: list[tuple[int, str, str]] = []
        self._interruption = _NEVER
        self._session = session
        if session is not None:
            session.line = self

    def begin(self, interruption: Interruption) -> None:
        """Start an attempt."""
        self.written = 0
        self._interruption = interruption

    def tell(self, message: ToSupervisor) -> None:
        """Take a message that has no answer: progress is for people."""

    def ask(self, request: Callable[[int], ToSupervisor]) -> Reply:
        """Answer a request."""
        message = request(1)
        if isinstance(message, Checkpoint):
            self.crash_if_due()
            self.keep(message.checkpoint)
            return Reply(request=1, ok=True)
        if isinstance(message, Progress):
            self.skipped = json.loads(message.counters).get("skipped", 0)
            return Reply(request=1, ok=True)
        if isinstance(message, (Lock, Unlock)):  # attempts follow one another: it is always free
            return Reply(request=1, ok=True, body="acquired")
        after = getattr(message, "after", 0)
        return Reply(request=1, ok=True, body=json.dumps(self.results[after : after + 100]))

    def crash_if_due(self) -> None:
        """End the attempt before it writes its next checkpoint."""
        if self.written == self._interruption.crash_after:
            raise _Crash

    def keep(self, checkpoint: str) -> None:
        """Keep a checkpoint that is written."""
        self.checkpoint = checkpoint
        self.written += 1

    def stop_asked(self, attempt: int) -> bool:  # noqa: ARG002 - there is one at a time
        """Whether the attempt is to stop."""
        limit = self._interruption.stop_after
        return limit is not None and self.written >= limit

    def work_session(self) -> WorkSession:
        """The session of `ctx.transaction()`."""
        if self._session is None:
            raise UsageError(
                "the job uses ctx.transaction(): give run(…, database=…) a connection, or a "
                "connection string"
            )
        return self._session

    def close(self) -> None:
        """Close a connection that this module opened."""
        if self._session is not None:
            self._session.close()


class Runner:
    """Runs one execution."""

    def __init__(
        self,
        definition: Definition,
        line: Line,
        *,
        params: Any,
        instance: str,
        interruption: Interruption,
        raise_errors: bool,
    ) -> None:
        self._definition = definition
        self._line = line
        self._params = params
        self._instance = instance
        # AT_MOST_ONCE work is never asked to stop, and never run again.
        self._once = definition.job.delivery is AT_MOST_ONCE
        self._interruption = _NEVER if self._once else interruption
        self._raise_errors = raise_errors

    def run(self, planned: list[Planned]) -> RunResult[Any]:
        """Process all partitions, then finish."""
        # Heavier partitions are claimed first; sorted() keeps the others in order.
        order = sorted(planned, key=lambda item: -item.partition.weight)
        ended = {item.partition.key: self._partition(item) for item in order}
        runs = tuple(ended[item.partition.key] for item in planned)
        failed = sum(one.error is not None for one in runs)
        if failed > _allowed(self._definition.policy["max_failed"], len(runs)):
            return RunResult(status="FAILED", partitions=runs, summary=None)
        self._line.results = [
            (number, one.key, self._definition.result.encode(one.result))
            for number, one in enumerate(runs, 1)
            if one.error is None
        ]
        return RunResult(status="COMPLETED", partitions=runs, summary=self._summary(runs, failed))

    def _partition(self, item: Planned) -> PartitionRun[Any]:
        """Run attempts until one ends; interrupted ones and RetryLater do not count as failed."""
        key = item.partition.key
        self._line.checkpoint, self._line.skipped = None, 0
        interruption, failures = self._interruption, 0
        for number in range(1, _ATTEMPTS_MAX):
            before = self._line.checkpoint
            try:
                result = self._attempt(item, number, interruption)
            except (Stopped, _Crash):
                # An attempt that got nowhere would get nowhere again.
                progressed = self._line.checkpoint != before
                interruption = self._interruption if progressed else _NEVER
            except BaseException as error:
                if self._raise_errors or not isinstance(error, Exception):
                    error.add_note(f"(partition {key!r}, attempt {number})")
                    raise
                if isinstance(error, RetryLater) and not self._once:
                    continue  # it costs no failure
                failures += 1
                final = isinstance(error, (Fail, ContractError, UsageError))
                if final or failures >= self._definition.policy["max_attempts"]:
                    return PartitionRun(key=key, attempts=number, result=None, error=error)
            else:
                skipped = self._line.skipped
                return PartitionRun(
                    key=key, attempts=number, result=result, error=None, skipped=skipped
                )
        raise UsageError(f"partition {key!r} has not ended after {_ATTEMPTS_MAX} attempts")

    def _attempt(self, item: Planned, number: int, interruption: Interruption) -> Any:
        definition, line = self._definition, self._line
        line.begin(interruption)
        message = Run(
            attempt=number,
            job=definition.name,
            execution_id=_EXECUTION,
            instance_key=self._instance,
            step=_STEP,
            partition_id=1,
            key=item.partition.key,
            claim_token=str(uuid.uuid4()),
            attempt_number=number,
            slice=item.text,
            parameters="null",
            checkpoint=line.checkpoint,
            handshake=False,
        )
        ctx = ExecutorContext(message, self._params, line)
        try:
            result = definition.job.process(definition.slice.decode(item.text), ctx)
            ctx.check_end()
            text = definition.result.encode(result)
            ctx.commit_deferred("completion", text)
        except BaseException as error:
            ctx.failing(error)
            raise
        return definition.result.decode(text)

    def _summary(self, runs: tuple[PartitionRun[Any], ...], failed: int) -> Any:
        definition = self._definition
        if not definition.policy["has_finish"]:
            return None
        counts = {
            "total": len(runs),
            "completed": len(runs) - failed,
            "failed": failed,
            "cancelled": 0,
        }
        message = Finish(
            attempt=1,
            job=definition.name,
            execution_id=_EXECUTION,
            epoch=1,
            parameters="null",
            counts=json.dumps(counts),
        )
        self._line.begin(_NEVER)
        outcome = ExecutorOutcome(message, definition.result, self._line)
        try:
            text = definition.summary.encode(definition.job.finish(self._params, outcome))
            outcome.fate.check()
            outcome.commit_deferred("finish", text)
        except BaseException as error:
            outcome.failing(error)
            raise
        return definition.summary.decode(text)


def _allowed(max_failed: int | str | None, total: int) -> float:
    """How many partitions may fail."""
    if isinstance(max_failed, str):
        return total * float(max_failed.removesuffix("%")) / 100
    return max_failed or 0


# -- transactions without a fence --------------------------------------------------------------


class Session(WorkSession):
    """A work session on a database that has no rowlock schema, and so no fence."""

    line: Line

    def commit(self, kind: str, body: str) -> None:
        """Commit, with the checkpoint kept here instead of in the fence."""
        try:
            if kind == "checkpoint":
                self.line.crash_if_due()
        except _Crash:
            self.rollback()  # what the server does when the connection of a dead process ends
            raise
        self._commit()
        if kind == "checkpoint":
            self.line.keep(body)

    def _commit(self) -> None:
        raise AssertionError("each kind of session commits in its own way")


class _OwnSession(Session):
    """Connects by itself; each transaction is a real one."""

    def begin(self, fence: Fence) -> WorkConnection:  # noqa: ARG002 - there is none to open
        """Open a transaction."""
        connection = self._connection or self._connect()
        connection.execute("BEGIN READ WRITE")
        return connection

    def _commit(self) -> None:
        assert self._connection is not None, "commit() needs a begin()"
        self._connection.execute("COMMIT")


class _BorrowedSession(Session):
    """Works inside the transaction of a connection that the test owns, by savepoints."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        super().__init__("")
        # It lacks the refusals of a work connection: a test that calls commit() sees it happen.
        self._connection = cast("WorkConnection", connection)
        self._begun = False

    def begin(self, fence: Fence) -> WorkConnection:  # noqa: ARG002 - there is none to open
        """Set a savepoint, or begin a transaction on an autocommit connection."""
        connection = self._borrowed
        idle = connection.info.transaction_status is TransactionStatus.IDLE
        self._begun = idle and connection.autocommit
        connection.execute("BEGIN" if self._begun else "SAVEPOINT rowlock_testing")
        return connection

    def rollback(self) -> None:
        """Undo what the block did."""
        if self.problem() is None or self._failed:
            undo = "ROLLBACK" if self._begun else "ROLLBACK TO rowlock_testing"
            self._borrowed.execute(undo)

    def close(self) -> None:
        """Leave the connection to its owner."""

    def _commit(self) -> None:
        self._borrowed.execute("COMMIT" if self._begun else "RELEASE rowlock_testing")

    @property
    def _borrowed(self) -> WorkConnection:
        assert self._connection is not None, "a borrowed connection is never given up"
        return self._connection

    @property
    def _failed(self) -> bool:
        return self._borrowed.info.transaction_status is TransactionStatus.INERROR


def session_for(database: str | psycopg.Connection[Any] | None) -> Session | None:
    """The session for what a test gave as its database."""
    if database is None:
        return None
    return _OwnSession(database) if isinstance(database, str) else _BorrowedSession(database)
