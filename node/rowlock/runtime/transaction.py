"""The work connection of an executor, and the fence around what an author writes through it.

The fence is a row with a deferred constraint trigger. rowlock inserts it first (`fence_open`) and
arms it in the same message as its own COMMIT (`fence_arm`), with the checkpoint or the completion
in it. The trigger refuses a COMMIT that was not armed, so one that the author wrote keeps nothing,
and an armed one whose claim was taken away. Between attempts the connection is read-only, so what
follows an author's COMMIT or ROLLBACK cannot write either. An author who switches the connection
to read-write on purpose is outside the guarantee.
"""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, Final, LiteralString, NoReturn

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow, tuple_row

from rowlock.db.connect import (
    DEFAULTS,
    NOBODY_WAITS,
    describe,
    ended_after,
    first_line,
    is_pooled,
    parameters_of,
    prepare_nothing,
)
from rowlock.errors import Unavailable, UsageError
from rowlock.runtime.fate import Fate, chain

NOT_ARMED: Final = "RL001"
"""SQLSTATE of a COMMIT that rowlock did not arm."""
CLAIM_GONE: Final = "RL002"
"""SQLSTATE of a fence whose claim, or mastership, is gone."""
_DIVISION_BY_ZERO: Final = "22012"
_FAULTS_OF_THE_SERVER: Final = frozenset({"53100", "58030"})  # its disk is full, or fails
_CONFLICTS: Final = frozenset({"40001", "40P01"})  # somebody touched the row that COMMIT locks

# Each statement is one message of the simple protocol, and so one round trip. A failed SELECT ends
# the message: the COMMIT behind an arming that found no fence row (0) is never reached.
# The opening tells the session's default each time: behind a pooler every transaction may be in another session.
_OPEN_PARTITION: Final = (
    "BEGIN READ WRITE; "
    "SELECT rowlock.fence_open(%s, %s), current_setting('default_transaction_read_only')"
)
_OPEN_FINISH: Final = (
    "BEGIN READ WRITE; "
    "SELECT rowlock.fence_open_finish(%s, %s), current_setting('default_transaction_read_only')"
)
_ARM_AND_COMMIT: Final = "SELECT 1 / rowlock.fence_arm(%s, %s, %s::jsonb)::integer; COMMIT"
# What a session can carry into the next attempt, temporary tables and advisory locks included.
_RESET: Final[LiteralString] = (
    "SET SESSION AUTHORIZATION DEFAULT; RESET ALL; SELECT pg_advisory_unlock_all(); "
    f"CLOSE ALL; UNLISTEN *; DISCARD TEMP; SELECT {NOBODY_WAITS}"
)
# Behind a pooler it is a stranger's, in which nothing is set.
_WHOSE_SESSION: Final[LiteralString] = (
    "SELECT pg_backend_pid(), current_setting('default_transaction_read_only'),"
    f" CASE WHEN pg_backend_pid() = %s THEN {NOBODY_WAITS} END"
)
_SESSION_OPTIONS: Final = (
    "-c default_transaction_read_only=on "
    # A transaction lasts as long as its claim; only the loss of that, or a time-out, ends it.
    "-c idle_in_transaction_session_timeout=0 "
    # Of a machine that vanished the server would keep the author's locks for two hours. No
    # tcp_user_timeout: it would also end the session of an author who takes long to read a large result.
    "-c tcp_keepalives_idle=5 -c tcp_keepalives_interval=2 -c tcp_keepalives_count=3"
)

_ENDED_BY_AUTHOR: Final = (
    "the transaction of ctx.transaction() was ended inside its block (COMMIT, ROLLBACK, or SET "
    "CONSTRAINTS ALL IMMEDIATE); nothing of it was kept. rowlock commits when the block, or "
    "process(), ends. To undo a part, use a savepoint: `with db.transaction(): ...`"
)


class WorkConnection(psycopg.Connection[TupleRow]):
    """A psycopg connection whose transaction belongs to rowlock."""

    refuse: Callable[[str], UsageError] = UsageError
    """Makes the error for a rule that the author breaks; the attempt that uses the connection sets
    its own, which remembers: code that catches the refusal of a rollback() must not commit."""

    def commit(self) -> NoReturn:
        """Refuse.

        Raises:
            UsageError: Always.
        """
        raise self.refuse(
            "commit() inside ctx.transaction(): rowlock commits when the block, or process(), ends"
        )

    def rollback(self) -> NoReturn:
        """Refuse.

        Raises:
            UsageError: Always.
        """
        raise self.refuse(
            "rollback() inside ctx.transaction(): raise an exception to leave the block without "
            "writing, or undo a part with a savepoint: `with db.transaction(): ...`"
        )

    def __enter__(self) -> NoReturn:
        raise self.refuse(
            "`with db:` inside ctx.transaction() would commit and close rowlock's connection: use it "
            "directly, or `with db.transaction(): ...` for a savepoint"
        )

    def close(self) -> NoReturn:
        """Refuse.

        Raises:
            UsageError: Always.
        """
        raise self.refuse("close() inside ctx.transaction(): the connection belongs to rowlock")

    def hang_up(self) -> None:
        """Close the connection; the server rolls back what was open."""
        super().close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """Which claim, or which mastership, a transaction stands under."""

    statement: LiteralString
    row: int | uuid.UUID
    guard: uuid.UUID | int


def partition_fence(partition_id: int, claim_token: str) -> Fence:
    """The fence of an attempt at a partition."""
    return Fence(statement=_OPEN_PARTITION, row=partition_id, guard=uuid.UUID(claim_token))


def finish_fence(execution_id: str, epoch: int) -> Fence:
    """The fence of `finish()`."""
    return Fence(statement=_OPEN_FINISH, row=uuid.UUID(execution_id), guard=epoch)


class CommitConflict(Exception):
    """COMMIT met a serialization failure or a deadlock; nothing was kept and nobody is to blame."""


class WorkSession:
    """The executor's connection to the work database: opened when first needed, then kept.

    One transaction at a time. Every method leaves the connection either usable or closed.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection: WorkConnection | None = None
        self._fence_id = 0
        self._used = False
        _sessions.add(self)

    @property
    def broken(self) -> bool:
        """Whether the connection is gone (also before it was first opened)."""
        return self._connection is None or self._connection.closed

    def begin(self, fence: Fence) -> WorkConnection:
        """Open a read-write transaction whose first statement is the fence.

        Raises:
            Unavailable: The database cannot be reached.
            UsageError: The database is not rowlock's, its role may not use the fence, or the session is not
                read-only by default.
            psycopg.Error: With SQLSTATE `CLAIM_GONE`: the claim does not stand any more.
        """
        self._used = True
        while True:
            kept = self._connection
            connection = kept or self._connect()
            try:
                self._fence_id, read_only = _open_fence(connection, fence)
            except psycopg.Error as error:
                if error.sqlstate == CLAIM_GONE:
                    self.rollback()
                    raise
                self.close()
                if kept is None:
                    raise _explained(error) from error
                # A kept connection may have died since (a restart of the server); nothing was
                # written yet, so one fresh connection is tried.
            else:
                self._require(read_only)
                return connection

    def check(self) -> None:
        """Connect, if that is not done yet.

        Raises:
            Unavailable: The database cannot be reached.
            UsageError: The session would not be as the fence needs it.
        """
        if self._connection is None:
            self._connect()

    def problem(self) -> str | None:
        """Why the open transaction cannot be committed as it stands; None: it can."""
        status = self._status()
        if status is TransactionStatus.INTRANS:
            return None
        if status is TransactionStatus.INERROR:
            return (
                "a statement inside ctx.transaction() failed and its exception was caught: "
                "PostgreSQL has undone the whole block. Let the exception leave the block, or put "
                "the statement into a savepoint: `with db.transaction(): ...`"
            )
        if status is TransactionStatus.ACTIVE:
            return "a COPY or a pipeline was left open inside ctx.transaction(): close it first"
        return _ENDED_BY_AUTHOR

    def commit(self, kind: str, body: str) -> None:
        """Arm the fence with `body` and commit, in one message.

        Args:
            kind: "checkpoint", "completion" or "finish".
            body: JSON text: the checkpoint, the result or the summary.

        Raises:
            ConnectionError: The connection broke: whether the transaction counts is not known.
            CommitConflict: Serialization failure or deadlock at COMMIT.
            psycopg.Error: The server refused; the transaction is undone.
        """
        connection = self._connection
        assert connection is not None, "commit() needs a begin()"
        try:
            with psycopg.ClientCursor(connection) as cursor:
                cursor.execute(_ARM_AND_COMMIT, (self._fence_id, kind, body))
                cursor.nextset()
                outcome = cursor.statusmessage
        except psycopg.Error as error:
            if self.broken:
                self.close()
                raise ConnectionError("the connection broke during COMMIT") from error
            self.rollback()
            if error.sqlstate in _CONFLICTS:
                raise CommitConflict(str(error)) from error
            raise
        # An aborted transaction answers ROLLBACK to COMMIT; an arming in one would have raised.
        assert outcome == "COMMIT", f"COMMIT was answered with {outcome}"

    def rollback(self) -> None:
        """Undo what is open. Never raises: a connection that cannot is closed instead."""
        connection = self._connection
        status = self._status()
        if connection is None or status is TransactionStatus.IDLE:
            return
        try:
            if status not in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
                raise psycopg.OperationalError(f"cannot roll back in state {status.name}")
            connection.execute("ROLLBACK", prepare=False)
        except psycopg.Error:
            self.close()

    def end_attempt(self, *, keep: bool) -> None:
        """Leave nothing behind for the next attempt: settings, roles, locks, temporary tables.

        Args:
            keep: False closes the connection instead, after an attempt that went wrong.
        """
        connection, used = self._connection, self._used
        self._used = False
        if not used or connection is None:
            return
        if not keep or self._status() is not TransactionStatus.IDLE:
            self.close()
            return
        connection.row_factory = tuple_row
        connection.cursor_factory = psycopg.Cursor
        if is_pooled(connection):
            return  # whose session the next statement would be in, nobody knows
        try:
            connection.execute(_RESET, prepare=False)
        except psycopg.Error:
            self.close()

    def cut_off(self) -> None:
        """In a process that author code forked: whatever it sent would be its parent's word."""
        if self._connection is not None and not self._connection.closed:
            with open(os.devnull, "r+b") as nothing:  # noqa: PTH123 - a descriptor is wanted
                os.dup2(nothing.fileno(), self._connection.fileno())

    def close(self) -> None:
        """Close the connection, if there is one; the next `begin` opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.hang_up()

    def _status(self) -> TransactionStatus:
        connection = self._connection
        return TransactionStatus.IDLE if connection is None else connection.info.transaction_status

    def _connect(self) -> WorkConnection:
        try:
            connection = self._connection = _opened(self._dsn)
            with ended_after(connection):
                told = [connection.info.backend_pid]
                row = connection.execute(_WHOSE_SESSION, told, prepare=False).fetchone()
        except psycopg.Error as error:
            self.close()
            raise Unavailable(f"work {describe(self._dsn)}: {first_line(error)}") from error
        assert row is not None, "a SELECT without FROM has one row"
        pid, read_only, _ = row
        self._require(read_only)
        if pid != connection.info.backend_pid:
            prepare_nothing(connection)
        return connection

    def _require(self, read_only: str) -> None:
        if read_only == "on":
            return
        self.close()
        raise UsageError(
            "the work connection is not read-only by default, so an author's COMMIT could not "
            "be refused: a pooler ignored its start-up options, or somebody has SET it otherwise in "
            "this session. Let ROWLOCK_WORK_DSN name a login of its own (ALTER ROLE … SET "
            "default_transaction_read_only = on), or the server without the pooler"
        )


def check_work_database(dsn: str) -> None:
    """Make sure that `ctx.transaction()` can keep its promises over this connection string.

    Raises:
        UsageError: It cannot; says what would help.
        Unavailable: The database cannot be reached now.
    """
    session = WorkSession(dsn)
    try:
        session.check()
    finally:
        session.close()


def _opened(dsn: str) -> WorkConnection:
    given = _of_the_writable(parameters_of(dsn))
    parameters: dict[str, Any] = {  # Any: as psycopg takes them
        **DEFAULTS,
        # A COPY whose server is held up by a lock or a trigger has sent what nobody reads, which the system does not
        # tell from a server that vanished.
        "tcp_user_timeout": 60_000,
        **given,
        "options": f"{given.get('options', '')} {_SESSION_OPTIONS}".strip(),
        # read-write would refuse a session that is read-only by default
        "target_session_attrs": "primary",
        "application_name": "rowlock work",
    }
    try:
        return WorkConnection.connect(autocommit=True, row_factory=tuple_row, **parameters)
    except psycopg.OperationalError as error:
        if "unsupported startup parameter" not in str(error):
            raise
    # A pooler that takes no options: its sessions may be by themselves as these would make them.
    parameters["options"] = given.get("options")
    return WorkConnection.connect(autocommit=True, row_factory=tuple_row, **parameters)


def _of_the_writable(given: dict[str, Any]) -> dict[str, Any]:
    """Of several servers the one that takes writes, as the control plane finds it.

    libpq cannot tell in a session that is read-only by default: it would take a primary that was
    demoted by that very setting, whose claims are those of the past.
    """
    if not any("," in str(given.get(name, "")) for name in ("host", "hostaddr", "port")):
        return given
    with psycopg.connect(**{**DEFAULTS, **given}, autocommit=True) as found:
        chosen = {**given, "host": found.info.host, "port": found.info.port}
        if "hostaddr" in given:
            chosen["hostaddr"] = found.info.hostaddr
        return chosen


_sessions: Final[weakref.WeakSet[WorkSession]] = weakref.WeakSet()


def _cut_off_copies() -> None:
    for session in _sessions:
        session.cut_off()


os.register_at_fork(after_in_child=_cut_off_copies)


def _open_fence(connection: WorkConnection, fence: Fence) -> tuple[int, str]:
    """The id of the fence, and whether the session is read-only by default: "on" or "off"."""
    with psycopg.ClientCursor(connection, row_factory=tuple_row) as cursor:
        cursor.execute(fence.statement, (fence.row, fence.guard))
        cursor.nextset()
        row = cursor.fetchone()
    assert row is not None, "fence_open returns its id or raises"
    return int(row[0]), str(row[1])


def _explained(error: psycopg.Error) -> Exception:
    if isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)):
        return Unavailable(f"the work database cannot be used: {error}")
    return UsageError(
        f"the fence of ctx.transaction() cannot be opened: {error}. ROWLOCK_WORK_DSN must name "
        "rowlock's own database, with a role that may execute its fence functions"
    )


class _State(Enum):
    CLOSED = "closed"
    OPEN = "open"
    DEFERRED = "deferred"
    """Its block has ended; its COMMIT waits for process() or finish()."""


class Transactions:
    """The transactions of one attempt, or of one `finish()`: one at a time, all behind one fence.

    Translates what the database and the author do into errors that the author can read, and
    remembers in the attempt's fate what cannot be undone.
    """

    def __init__(self, session: WorkSession, fence: Fence, fate: Fate) -> None:
        self._session = session
        self._fence = fence
        self._fate = fate
        self._state = _State.CLOSED

    @property
    def open(self) -> bool:
        """Whether the author is inside a block."""
        return self._state is _State.OPEN

    @property
    def deferred(self) -> bool:
        """Whether a transaction waits for the end of the attempt."""
        return self._state is _State.DEFERRED

    def block(self, at_end: Callable[[], None]) -> Block:
        """A block for the author.

        Args:
            at_end: Called when the block ends without an exception and can be committed.
        """
        return Block(self, at_end)

    def defer(self) -> None:
        """Keep the transaction of the block that ends open until `commit`."""
        self._state = _State.DEFERRED

    def commit(self, kind: str, body: str) -> None:
        """Commit the open or deferred transaction with `body` in its fence.

        Raises:
            LeaseLost: The claim is gone; everything is undone.
            CommitUncertain: The connection broke.
            UsageError: The author had taken the fence away.
            CommitConflict: Serialization failure or deadlock.
            psycopg.Error: The server refused, for example a deferred constraint of the author's.
        """
        self._ensure_committable()
        self._state = _State.CLOSED
        try:
            self._session.commit(kind, body)
        except ConnectionError as error:
            raise self._fate.doubt() from error
        except CommitConflict as error:
            self._fate.infrastructure = error
            raise
        except psycopg.Error as error:
            if error.sqlstate == CLAIM_GONE:
                raise self._fate.lose("the claim was taken away before the COMMIT") from error
            if error.sqlstate in {NOT_ARMED, _DIVISION_BY_ZERO}:
                raise self._fate.refuse(_ENDED_BY_AUTHOR) from error
            if error.sqlstate in _FAULTS_OF_THE_SERVER:
                self._fate.infrastructure = error
            raise

    def fail(self, error: BaseException) -> None:
        """Undo what is open or deferred, because `error` ends it.

        Raises:
            LeaseLost: The error says that the claim is gone.
            UsageError: The error comes from a COMMIT or ROLLBACK of the author's.
        """
        if self._state is _State.CLOSED:
            return
        broken = self._session.broken
        ended = not broken and self._session.problem() == _ENDED_BY_AUTHOR
        self.abandon()
        if broken or _is_fault_of_the_server(error):
            self._fate.infrastructure = error
        elif isinstance(error, psycopg.Error):
            if error.sqlstate == CLAIM_GONE:
                raise self._fate.lose("the claim was taken away") from error
            if ended or error.sqlstate == NOT_ARMED:
                raise self._fate.refuse(_ENDED_BY_AUTHOR) from error

    def abandon(self) -> None:
        """Roll back whatever is open or deferred. Never raises."""
        if self._state is not _State.CLOSED:
            self._state = _State.CLOSED
            self._session.rollback()

    # -- called by the block -----------------------------------------------------------------

    def enter(self) -> WorkConnection:
        """Begin the transaction of a block."""
        self._fate.check()
        try:
            connection = self._session.begin(self._fence)
        except psycopg.Error as error:  # begin lets only CLAIM_GONE through
            raise self._fate.lose("the claim was taken away") from error
        except Unavailable as error:
            self._fate.infrastructure = error
            raise
        connection.refuse = self._fate.refuse
        self._state = _State.OPEN
        return connection

    def leave(self, at_end: Callable[[], None]) -> None:
        """End the block without an exception."""
        self._ensure_committable()
        try:
            at_end()
        except BaseException:
            self.abandon()
            raise

    def _ensure_committable(self) -> None:
        if self._fate.misuse is not None:
            self.abandon()
            raise self._fate.misuse
        if self._session.broken:
            self._state = _State.CLOSED
            error = Unavailable("the work connection broke inside ctx.transaction()")
            self._fate.infrastructure = error
            raise error
        problem = self._session.problem()
        if problem is not None:
            self.abandon()
            raise self._fate.refuse(problem)


def _is_fault_of_the_server(error: BaseException) -> bool:
    """Whether a statement failed for what no author can help, also where an error was raised from it."""
    return any(
        isinstance(one, psycopg.Error) and one.sqlstate in _FAULTS_OF_THE_SERVER
        for one in chain(error)
    )


class Block:
    """What `with ctx.transaction() as db` enters and leaves."""

    def __init__(self, transactions: Transactions, at_end: Callable[[], None]) -> None:
        self._transactions = transactions
        self._at_end = at_end

    def __enter__(self) -> WorkConnection:
        return self._transactions.enter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._transactions.leave(self._at_end)
        else:
            self._transactions.fail(error)
