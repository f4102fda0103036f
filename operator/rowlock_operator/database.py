"""What the operator asks of the database, as a member of rowlock_operator and of nothing else.

Two connections at most: one for the verbs and the looks at single BatchJobs, one for the mirror, so
that a verb which waits for a lock does not delay anybody's status. Each verb is one function call. A
connection is made anew from the connection string as it is then, so a password may be rotated.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, LiteralString, TypeAlias
from uuid import UUID, uuid4

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.rows import DictRow, dict_row

from rowlock.db import connect, migrate
from rowlock.errors import RowlockError, SettingsError, Unavailable
from rowlock.protocol.model import Schema, ServerIdentity
from rowlock_operator.model import (
    KIND,
    Answer,
    Cancel,
    Contract,
    DatabaseAction,
    Execution,
    FailedPartition,
    RequestExecution,
    Resume,
    SetLimits,
    Suspend,
    attempt_of,
)

Connection: TypeAlias = psycopg.AsyncConnection[DictRow]

ACTOR: Final = "operator"
"""Who acts, in the audit."""
FAILED_PARTITIONS_MAX: Final = 10
JOB_NAMES_MAX: Final = 200
_ERROR_TEXT_MAX: Final = 256

_STATEMENT_SECONDS: Final = 60.0
"""A restart copies what is unfinished: of a million partitions it takes a good part of this."""
_LOCK_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 15.0
"""A server that has not answered by then is frozen: it heeds no time-out of its own."""
SCHEMA_SECONDS: Final = 5.0
"""How often to look whether the schema still works with this release."""
_PAUSE_SECONDS: Final = (0.1, 2.5)
"""Bounds of the pause between two tries to connect: the first, and the last."""


class Declined(RowlockError):
    """The database does not accept the values of a call, and will not accept them later either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An execution, and whose it is."""

    execution: Execution
    number: int
    """exec_no: of two executions the later one has the larger."""
    namespace: str
    name: str
    uid: str


class Link:
    """One connection, used by one at a time, and made anew after it has broken."""

    def __init__(self, dsn: Callable[[], str], name: str) -> None:
        """Make a link that connects when it is used first.

        Args:
            dsn: The connection string as it is now.
            name: application_name.
        """
        self._dsn = dsn
        self._name = name
        self._connection: Connection | None = None
        self._turn = asyncio.Lock()
        self._failures = 0
        self._not_before = float("-inf")
        self._problem = ""
        self._fits_until = float("-inf")

    def hurry(self) -> None:
        """Connect at the next use, if there is no connection: the database is known to answer."""
        self._not_before = float("-inf")

    async def close(self) -> None:
        """Close the connection. The next use would make another one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    @asynccontextmanager
    async def use(self, *, waiting_seconds: float = 0.0) -> AsyncGenerator[Connection]:
        """The connection, for one statement.

        Args:
            waiting_seconds: For how long the statement waits by intent, beside the time to answer.

        Raises:
            Unavailable: There is none, or it broke; or the schema does not fit; or the statement
                failed for a reason that may pass, such as a lock or a right that is missing.
            Declined: The statement failed because of its values.
        """
        async with self._turn:
            connection = await self._connected()
            # psycopg waits for a frozen server for ever, even when it is cancelled.
            guard = asyncio.get_running_loop().call_later(
                waiting_seconds + ANSWER_SECONDS, connect.shut, connection
            )
            try:
                await self._check_schema(connection)
                yield connection
            except Unavailable:
                raise  # the schema does not fit: that is no fault of the connection
            except psycopg.DataError as error:
                raise Declined(connect.first_line(error)) from error
            except psycopg.Error as error:
                if error.sqlstate == connect.READ_ONLY_SQL_TRANSACTION or connection.broken:
                    await self.close()
                raise Unavailable(self._told(error)) from error
            except BaseException:
                # Cancelled in mid-statement: what the connection would say next is not known.
                await self.close()
                raise
            finally:
                guard.cancel()

    async def _check_schema(self, connection: Connection) -> None:
        now = time.monotonic()
        if now < self._fits_until:
            return
        try:
            (row,) = await (await connection.execute(migrate.SCHEMA)).fetchall()
            schema = Schema(**row)
        except psycopg.errors.UndefinedTable:
            schema = Schema(version=0, works_with=0)
        problem = migrate.refusal(schema, connection.info.dbname)
        if problem is not None:
            raise Unavailable(str(problem))
        self._fits_until = now + SCHEMA_SECONDS

    async def _connected(self) -> Connection:
        if self._connection is not None and not self._connection.closed:
            return self._connection
        if time.monotonic() < self._not_before:
            raise Unavailable(self._problem)
        try:
            self._connection = await self._connect()
        except (psycopg.Error, RowlockError, OSError) as error:
            bound = min(_PAUSE_SECONDS[1], _PAUSE_SECONDS[0] * 2 ** min(self._failures, 16))
            self._failures += 1
            self._not_before = time.monotonic() + random.uniform(0.0, bound)
            self._problem = self._told(error)
            raise Unavailable(self._problem) from error
        self._failures = 0
        return self._connection

    async def _connect(self) -> Connection:
        options: dict[str, Any] = {
            **connect.DEFAULTS,
            **connect.parameters_of(self._dsn()),
            "application_name": self._name,
        }
        connection = await psycopg.AsyncConnection[DictRow].connect(
            make_conninfo(**options),
            autocommit=True,
            row_factory=dict_row,
        )
        guard = asyncio.get_running_loop().call_later(ANSWER_SECONDS, connect.shut, connection)
        try:
            parameters = connect.session_parameters(
                connection.info.backend_pid,
                idle_in_transaction_seconds=1,
                lock_seconds=_LOCK_SECONDS,
                statement_seconds=_STATEMENT_SECONDS,
            )
            cursor = await connection.execute(connect.SESSION, parameters, prepare=False)
            (row,) = await cursor.fetchall()
            connect.check_session(connection, **row)
        except BaseException:
            await connection.close()
            raise
        finally:
            guard.cancel()
        return connection

    def _told(self, error: BaseException) -> str:
        if isinstance(error, SettingsError):
            return str(error)
        try:
            where = connect.describe(self._dsn())
        except SettingsError:
            where = "database"
        return f"{where}: {connect.first_line(error)}"


class Database:
    """The rowlock database as the operator of one cluster sees it."""

    def __init__(self, dsn: Callable[[], str], cluster: str) -> None:
        """Make it; nothing is connected yet.

        Args:
            dsn: The connection string as it is now; it may raise SettingsError.
            cluster: The name under which this operator signs its requests.
        """
        self._cluster = cluster
        self._work = Link(dsn, "rowlock-operator")
        self._mirror = Link(dsn, "rowlock-operator-mirror")
        self._listening: Connection | None = None

    async def close(self) -> None:
        """Close both connections."""
        await self._work.close()
        await self._mirror.close()

    # -- looks at one BatchJob -----------------------------------------------------------------

    async def execution_of(self, uid: str) -> Row | None:
        """The latest execution that a BatchJob has asked for.

        Raises:
            Unavailable: The database does not answer.
        """
        rows = await self._rows(
            _EXECUTION + " WHERE e.requester ->> 'uid' = %(uid)s"
            " AND e.requester ->> 'cluster' = %(cluster)s AND e.requester ->> 'kind' = %(kind)s"
            " ORDER BY e.exec_no DESC LIMIT 1",
            {"uid": uid, "cluster": self._cluster, "kind": KIND},
        )
        return self._row(rows[0]) if rows else None

    async def live_executions_of(self, uid: str) -> list[Row]:
        """The executions of a BatchJob that have not ended.

        Raises:
            Unavailable: The database does not answer.
        """
        rows = await self._rows(
            _EXECUTION + " WHERE e.requester ->> 'uid' = %(uid)s"
            " AND e.requester ->> 'cluster' = %(cluster)s AND e.requester ->> 'kind' = %(kind)s"
            " AND " + _LIVE,
            {"uid": uid, "cluster": self._cluster, "kind": KIND},
        )
        return [self._row(row) for row in rows]

    async def failed_partitions(self, execution_id: UUID) -> tuple[FailedPartition, ...]:
        """The first FAILED partitions of an execution, without their tracebacks.

        Raises:
            Unavailable: The database does not answer.
        """
        rows = await self._rows(
            "SELECT partition_key, claims, coalesce(last_error ->> 'type', '') AS reason,"
            " left(coalesce(last_error ->> 'message', ''), %(text)s) AS message,"
            " coalesce(last_error ->> 'outcome' = 'unknown', false) AS outcome_unknown"
            " FROM rowlock.partitions"
            " WHERE execution_id = %(id)s AND status = 'FAILED'"
            " ORDER BY step, partition_key LIMIT %(limit)s",
            {"id": execution_id, "limit": FAILED_PARTITIONS_MAX, "text": _ERROR_TEXT_MAX},
        )
        return tuple(
            FailedPartition(
                key=row["partition_key"],
                attempts=row["claims"],
                reason=row["reason"],
                message=row["message"],
                outcome_unknown=row["outcome_unknown"],
            )
            for row in rows
        )

    async def contract(self, job: str) -> Contract | None:
        """The contract of a job that living nodes accept, or else the newest; None if unpublished.

        Raises:
            Unavailable: The database does not answer.
        """
        rows = await self._rows(
            "SELECT contract_hash, delivery, policy, schemas FROM rowlock.jobs"
            " WHERE job_name = %(job)s"
            " ORDER BY nodes > 0 DESC, published_at DESC, contract_hash LIMIT 1",
            {"job": job},
        )
        if not rows:
            return None
        (row,) = rows
        return Contract(
            hash=row["contract_hash"],
            delivery=row["delivery"],
            policy=row["policy"],
            schemas=row["schemas"],
        )

    async def job_names(self) -> tuple[str, ...]:
        """The names of published jobs.

        Raises:
            Unavailable: The database does not answer.
        """
        rows = await self._rows(
            "SELECT DISTINCT job_name FROM rowlock.jobs ORDER BY job_name LIMIT %(limit)s",
            {"limit": JOB_NAMES_MAX},
        )
        return tuple(row["job_name"] for row in rows)

    async def pool_nodes(self, job: str, pool: str) -> int:
        """Living nodes of a pool that have slots, accept the job, and are not one run's own.

        Raises:
            Unavailable: The database does not answer.
        """
        (row,) = await self._rows(
            "SELECT count(*) AS nodes FROM rowlock.nodes"
            " WHERE status = 'ACTIVE' AND NOT draining AND slots > 0 AND pool = %(pool)s"
            " AND only_execution IS NULL AND jobs ? %(job)s",
            {"job": job, "pool": pool},
        )
        count: int = row["nodes"]
        return count

    # -- verbs ---------------------------------------------------------------------------------

    async def act(self, action: DatabaseAction) -> Answer | None:
        """Carry out one action.

        Returns:
            The answer to a request; None for the other verbs, after which one looks again.

        Raises:
            Unavailable: The database does not answer. The action may have taken effect: look again.
            Declined: It does not accept the values.
        """
        match action:
            case RequestExecution():
                return await self._request(action)
            case Suspend():
                await self._verb("suspend", action.execution_id, action.reason)
            case Resume():
                await self._verb("resume", action.execution_id, action.reason)
            case Cancel():
                await self.cancel(action.execution_id, action.reason)
            case SetLimits():
                await self._call(
                    "SELECT rowlock.set_limits(%(id)s, %(changes)s::jsonb, %(actor)s, %(reason)s)"
                    " AS outcome",
                    {
                        "id": action.execution_id,
                        "changes": _json(action.changes),
                        "reason": action.reason,
                    },
                )
        return None

    async def cancel(self, execution_id: UUID, reason: str) -> None:
        """Cancel an execution; one that has ended stays as it is.

        Raises:
            Unavailable: The database does not answer.
        """
        # First in a transaction of its own: it stops new claims, behind which the second would starve.
        await self._verb("request_cancel", execution_id, reason)
        await self._verb("cancel", execution_id, reason)

    async def expire(self) -> None:
        """End executions that are past their deadline, whoever asked for them.

        Nodes do that too; this is for a time when none lives.

        Raises:
            Unavailable: The database does not answer.
        """
        await self._call("SELECT rowlock.expire(%(actor)s) AS found", {})

    async def orphan(self, execution_id: UUID, reason: str) -> None:
        """Let an execution live on without its BatchJob.

        Raises:
            Unavailable: The database does not answer.
        """
        await self.act(
            SetLimits(
                execution_id=execution_id, changes={"deletion_policy": "ORPHAN"}, reason=reason
            )
        )

    async def _request(self, action: RequestExecution) -> Answer:
        row = await self._call(
            "SELECT execution_id, outcome FROM rowlock.request_execution("
            "%(id)s, %(job)s, %(hash)s, %(policy)s::jsonb, %(delivery)s, %(instance)s, %(launch)s,"
            " %(parameters)s::jsonb, %(pool)s, %(priority)s, %(adopt_after)s, %(requester)s::jsonb,"
            " %(options)s::jsonb)",
            {
                "id": uuid4(),
                "job": action.job,
                "hash": action.contract_hash,
                "policy": _json(action.policy),
                "delivery": action.delivery,
                "instance": action.instance_key,
                "launch": action.launch_key,
                "parameters": action.parameters,
                "pool": action.pool,
                "priority": action.priority,
                "adopt_after": float(action.adopt_after_seconds),
                "requester": _json(action.requester),
                "options": _json(action.options),
            },
            waiting_seconds=_STATEMENT_SECONDS,
        )
        return Answer(
            attempt=action.attempt, outcome=row["outcome"], execution_id=row["execution_id"]
        )

    async def _verb(self, verb: str, execution_id: UUID, reason: str) -> None:
        await self._call(_VERBS[verb], {"id": execution_id, "reason": reason})

    async def _call(
        self, statement: LiteralString, values: Mapping[str, Any], *, waiting_seconds: float = 0.0
    ) -> DictRow:
        (row,) = await self._rows(
            statement, {"actor": ACTOR, **values}, waiting_seconds=waiting_seconds
        )
        return row

    async def _rows(
        self, statement: LiteralString, values: Mapping[str, Any], *, waiting_seconds: float = 0.0
    ) -> list[DictRow]:
        async with self._work.use(waiting_seconds=waiting_seconds) as db:
            return await (await db.execute(statement, values)).fetchall()

    # -- the mirror ----------------------------------------------------------------------------

    async def server(self) -> ServerIdentity:
        """Which database this is.

        Raises:
            Unavailable: The database does not answer.
        """
        async with self._mirror.use() as db:
            cursor = await db.execute(
                "SELECT system_identifier, database, timeline FROM rowlock.server()"
            )
            (row,) = await cursor.fetchall()
        return ServerIdentity(**row)

    async def live(self, known: Iterable[UUID] = ()) -> list[Row]:
        """All executions that BatchJobs of this cluster have asked for and that have not ended.

        Args:
            known: Executions to return in any case: those that may have ended meanwhile.

        Raises:
            Unavailable: The database does not answer.
        """
        async with self._mirror.use() as db:
            cursor = await db.execute(
                _EXECUTION + " WHERE e.requester ->> 'cluster' = %(cluster)s"
                " AND e.requester ->> 'kind' = %(kind)s"
                " AND (" + _LIVE + " OR e.execution_id = ANY (%(known)s))",
                {"cluster": self._cluster, "kind": KIND, "known": list(known)},
            )
            rows = await cursor.fetchall()
        self._work.hurry()
        return [self._row(row) for row in rows]

    async def hint(self, seconds: float) -> None:
        """Return when the database says that something has happened, or after this time.

        Only a hint: behind a pooler it never comes.

        Raises:
            Unavailable: The database does not answer.
        """
        async with self._mirror.use(waiting_seconds=seconds) as db:
            if db is not self._listening and not connect.is_pooled(db):
                await db.execute("LISTEN rowlock")
                self._listening = db
            async for _ in db.notifies(timeout=seconds, stop_after=1):
                pass

    def _row(self, row: DictRow) -> Row:
        requester: Mapping[str, Any] = row["requester"]
        uid = str(requester.get("uid"))
        values = {name: row[name] for name in _COLUMNS}
        values["attempt"] = attempt_of(row["launch_key"], self._cluster, uid)
        return Row(
            execution=Execution(**values),
            number=row["exec_no"],
            namespace=str(requester.get("namespace")),
            name=str(requester.get("name")),
            uid=uid,
        )


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, default=dict)  # mappings that are no dict


_COLUMNS: Final = (
    "execution_id",
    "status",
    "suspended",
    "cancel_requested",
    "priority",
    "parallelism",
    "deletion_policy",
    "requested_at",
    "deadline_at",
    "total",
    "completed",
    "failed",
    "cancelled",
    "running",
    "pending",
    "retried",
    "nodes",
    "failure_reason",
    "failure_message",
    "revision",
    "started_at",
    "ended_at",
    "master_node",
)
"""The columns of `_EXECUTION` that are fields of `Execution`."""

_EXECUTION: Final[LiteralString] = (
    "SELECT e.execution_id, e.exec_no, e.status, e.launch_key, e.suspended, e.cancel_requested, e.priority,"
    " e.parallelism, e.deletion_policy, e.requested_at, e.deadline_at, e.total, e.completed,"
    " e.failed, e.cancelled, e.running, e.pending, e.retried, e.nodes, e.failure_reason,"
    " e.failure_message, e.revision, e.started_at, e.ended_at, e.master_name AS master_node,"
    " e.requester FROM rowlock.executions e"
)

# In these words, which a partial index has too.
_LIVE: Final[LiteralString] = "e.status NOT IN ('COMPLETED', 'FAILED', 'CANCELLED', 'ABANDONED')"

_VERBS: Final[Mapping[str, LiteralString]] = {
    "suspend": "SELECT rowlock.suspend(%(id)s, %(actor)s, %(reason)s) AS outcome",
    "resume": "SELECT rowlock.resume(%(id)s, %(actor)s, %(reason)s) AS outcome",
    "request_cancel": "SELECT rowlock.request_cancel(%(id)s, %(actor)s, %(reason)s) AS outcome",
    "cancel": "SELECT rowlock.cancel(%(id)s, %(actor)s, %(reason)s) AS outcome",
}
