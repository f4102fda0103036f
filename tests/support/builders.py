"""What a test of the protocol starts from: nodes, executions and claims, in a line each.

A `Scene` has a pool and a job of its own, so that many tests can share one database. It acts as
the role rowlock_node, as real nodes do, and looks at the rows as superuser.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, LiteralString, Self, TypeVar
from uuid import UUID, uuid4

import psycopg
from psycopg.rows import namedtuple_row

from rowlock.db.store import Store
from rowlock.protocol.model import FIRST_STEP, BeatAnswer, Claim, Completion, Peer, Place, Schema
from tests.support.postgres import Database
from tests.support.waiting import wait_until

T = TypeVar("T")

AT_LEAST_ONCE: Final = "AT_LEAST_ONCE"
AT_MOST_ONCE: Final = "AT_MOST_ONCE"
HASH: Final = "contract-1"
NIL: Final = UUID(int=0)
"""The owner of counters that belong to no node."""


EVERYBODY_IS_GONE: Final[LiteralString] = """
CREATE OR REPLACE FUNCTION rowlock._is_gone(p_backend rowlock.backend) RETURNS boolean LANGUAGE sql STABLE
AS $$ SELECT true $$;
"""
"""Evidence is false whenever somebody asks for it: nothing that the database promises may rest on it."""


def a_policy(
    *, max_attempts: int = 3, max_failed: int | str | None = None, has_finish: bool = False
) -> dict[str, Any]:
    """A policy as `Job.policy` resolves it."""
    return {
        "max_attempts": max_attempts,
        "initial_seconds": 1.0,
        "factor": 2.0,
        "max_seconds": 300.0,
        "timeout_seconds": None,
        "max_failed": max_failed,
        "has_finish": has_finish,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """An execution and the mastership under which a scene drives it."""

    id: UUID
    master: UUID
    epoch: int
    instance: str


class Scene:
    """Nodes, executions and claims of one test. Use it in a `with`, which closes its connections."""

    def __init__(self, database: Database) -> None:
        mark = uuid4().hex[:8]
        self.database = database
        self.pool = f"pool-{mark}"
        self.job = f"job-{mark}"
        self.admin = psycopg.connect(database.dsn, autocommit=True, row_factory=namedtuple_row)
        self._stores: list[Store] = []
        self._seeds = itertools.count(1)
        self.store = self.a_store()
        """The store of everything that is done one after the other."""
        self.people = self.a_store(role="rowlock_admin")
        """The store of the verbs that only a person has."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection."""
        self.admin.close()
        for store in self._stores:
            store.connection.close()

    def a_store(self, *, role: str = "rowlock_node") -> Store:
        """A store on a connection of its own, as a node has."""
        store = Store(self.database.connect(role=role))
        self._stores.append(store)
        return store

    # -- nodes ---------------------------------------------------------------------------------

    def a_node(
        self,
        *,
        slots: int = 4,
        pool: str | None = None,
        jobs: Mapping[str, Sequence[str]] | None = None,
        only: UUID | None = None,
    ) -> UUID:
        """Register a node that knows the scene's job."""
        node = uuid4()
        self.store.register(
            node,
            name=f"node-{node.hex[:4]}",
            pool=pool or self.pool,
            slots=slots,
            jobs={self.job: [HASH]} if jobs is None else jobs,
            version="test",
            only_execution=only,
        )
        return node

    def connected(self, node: UUID) -> tuple[Store, Store]:
        """The two connections of a node, for the beat and for work, announced as its own."""
        beat, work = self.a_store(), self.a_store()
        assert beat.connected(node, "beat", evidence=True) == "on"
        assert work.connected(node, "work", evidence=True) == "on"
        return beat, work

    def cut(self, *stores: Store) -> None:
        """End connections, and wait until the server has noticed."""
        pids = [store.connection.info.backend_pid for store in stores]
        for store in stores:
            store.connection.close()
        wait_until(
            lambda: not self.all("SELECT FROM pg_stat_activity WHERE pid = ANY (%s)", pids),
            what="the server to end the backends",
        )

    def gone(self, **node: Any) -> UUID:
        """A node whose process has died."""
        id_ = self.a_node(**node)
        self.cut(*self.connected(id_))
        return id_

    def beat_of(self, node: UUID) -> int:
        """What an observer would see now."""
        return int(self.one("SELECT beat FROM rowlock.batch_nodes WHERE node_id = %s", node).beat)

    def suspect(self, node: UUID) -> None:
        """Phase one: some observer has seen the node's present beat for long enough."""
        assert self.store.mark_unreachable(uuid4(), node, self.beat_of(node))

    def remove(self, node: UUID) -> tuple[int, int]:
        """Both phases; how many claims moved and how many failed."""
        self.suspect(node)
        removed, recovered = self.store.remove_node(uuid4(), node, self.beat_of(node))
        assert removed
        return recovered.moved, recovered.failed

    def node(self, node: UUID) -> Any:  # Any: a row with the table's columns as attributes
        """The node's row."""
        return self.one("SELECT * FROM rowlock.batch_nodes WHERE node_id = %s", node)

    # -- executions ----------------------------------------------------------------------------

    def a_request(
        self,
        *,
        delivery: str = AT_LEAST_ONCE,
        policy: Mapping[str, Any] | None = None,
        priority: int = 0,
        pool: str | None = None,
        job: str | None = None,
        contract_hash: str = HASH,
        instance: str | None = None,
        adopt_after_seconds: float = 0,
        options: Mapping[str, Any] | None = None,
    ) -> UUID:
        """Request an execution that nobody has taken yet."""
        id_, outcome = self.store.request(
            uuid4(),
            job=job or self.job,
            contract_hash=contract_hash,
            policy=policy or a_policy(),
            delivery=delivery,
            instance_key=instance or uuid4().hex,
            parameters='{"month": 7}',
            pool=pool or self.pool,
            priority=priority,
            adopt_after_seconds=adopt_after_seconds,
            options=options,
        )
        assert outcome == "requested", outcome
        return id_

    def a_plan_being_made(self, *, master: UUID | None = None, **request: Any) -> Run:
        """An execution in PLANNING, driven by `master` or by a node without slots of its own."""
        id_ = self.a_request(**request)
        job, hash_ = request.get("job") or self.job, request.get("contract_hash") or HASH
        master = master or self.a_node(slots=0, pool="masters", jobs={job: [hash_]})
        taken = self.store.adopt(master, id_)
        assert taken is not None
        return Run(id=id_, master=master, epoch=taken.epoch, instance=taken.instance_key)

    def an_execution(
        self,
        partitions: int | Sequence[str] = 3,
        *,
        weights: Sequence[int] | None = None,
        **request: Any,
    ) -> Run:
        """A RUNNING execution.

        Args:
            partitions: How many, or their keys.
            weights: Of the partitions, in their order; all alike if not given.
            request: As for `a_request` and `a_plan_being_made`.
        """
        run = self.a_plan_being_made(**request)
        keys = (
            [f"p{n}" for n in range(partitions)]
            if isinstance(partitions, int)
            else list(partitions)
        )
        self.stage(run, keys, weights=weights)
        sealed = self.store.seal(run.id, run.epoch, FIRST_STEP, len(keys))
        assert sealed == ("sealed", None), sealed
        return run

    def stage(
        self, run: Run, keys: Sequence[str], *, chunk: int = 0, weights: Sequence[int] | None = None
    ) -> bool:
        """Stage one chunk of a plan; every slice names its key."""
        return self.store.stage(
            run.id,
            run.epoch,
            chunk,
            keys=keys,
            slices=[f'{{"key": "{key}"}}' for key in keys],
            weights=weights or [0] * len(keys),
        )

    def add(self, run: Run, count: int) -> None:
        """Many more partitions, all alike, without the pace of a plan; the total is as it was."""
        self.admin.execute(
            "INSERT INTO rowlock.batch_partitions (execution_id, step, partition_key, delivery, slice)"
            " SELECT %s, 'main', 'more-' || g, 'AT_LEAST_ONCE', '{}' FROM generate_series(1, %s) g",
            [run.id, count],
        )

    def advance(self, run: Run) -> str:
        """The master's look; the status that it sees."""
        return self.store.advance(run.master, run.id, run.epoch).status

    def execution(self, run: Run | UUID) -> Any:  # Any: a row with the table's columns
        """The execution's row."""
        id_ = run.id if isinstance(run, Run) else run
        return self.one("SELECT * FROM rowlock.batch_job_coordination WHERE execution_id = %s", id_)

    def a_restart(self, run: Run | UUID, *, master: UUID | None = None) -> Run:
        """Restart an execution that has ended, and drive it by `master` or by a node without slots."""
        of = run.id if isinstance(run, Run) else run
        id_, outcome = self.store.restart(uuid4(), of, actor="test", reason=None)
        assert outcome == "restarted", outcome
        master = master or self.a_node(slots=0, pool="masters")
        taken = self.store.adopt(master, id_)
        assert taken is not None
        return Run(id=id_, master=master, epoch=taken.epoch, instance=taken.instance_key)

    # -- partitions ----------------------------------------------------------------------------

    def claim(
        self,
        node: UUID,
        *,
        slots: int = 1,
        prefetch: int = 0,
        idle: bool | None = False,
        store: Store | None = None,
        seed: int | None = None,
        after: Mapping[UUID, Place] | None = None,
    ) -> list[Claim]:
        """What a node's claim statement returns."""
        return (store or self.store).claim(
            node,
            slots=slots,
            prefetch=prefetch,
            idle=idle,
            seed=next(self._seeds) if seed is None else seed,
            after=after or {},
        )

    def a_claim(self, node: UUID | None = None, **request: Any) -> tuple[UUID, Claim]:
        """A node and a partition that it has claimed, of an execution of one partition.

        Args:
            node: The holder; a new one if not given.
            request: As for `an_execution`.
        """
        self.an_execution(1, **request)
        holder = node or self.a_node()
        (claim,) = self.claim(holder, idle=True)
        return holder, claim

    def complete(
        self, node: UUID, *claims: Claim, result: str | None = "1", store: Store | None = None
    ) -> list[str]:
        """Complete claims; the answers in the order of the claims."""
        sent = [Completion(id=one.id, token=one.token, result=result) for one in claims]
        answers = (store or self.store).complete(node, sent)
        return [answers[one.id] for one in claims]

    def fail(
        self, node: UUID, claim: Claim, kind: str = "retry", *, delay_seconds: float = 0
    ) -> str:
        """End an attempt without a result."""
        return self.store.fail(
            node,
            claim.id,
            claim.token,
            error='{"type": "Boom", "message": "it broke"}',
            kind=kind,
            delay_seconds=delay_seconds,
        )

    def a_failure(self, node: UUID) -> Claim:
        """Claim one partition and fail it for good."""
        (claim,) = self.claim(node)
        assert self.fail(node, claim, "never") == "failed"
        return claim

    def release(self, node: UUID, *claims: Claim, unstarted: bool = False) -> list[str]:
        """Hand claims back; the answers in the order of the claims."""
        answers = self.store.release(
            node, [(one.id, one.token) for one in claims], unstarted=unstarted
        )
        return [answers[one.id] for one in claims]

    def run_of(self, claim: Claim) -> Run:
        """The execution that a claim belongs to."""
        row = self.execution(claim.execution_id)
        return Run(
            id=row.execution_id,
            master=row.master_node,
            epoch=row.master_epoch,
            instance=row.instance_key,
        )

    def partition(self, claim: Claim | int) -> Any:  # Any: a row with the table's columns
        """The partition's row."""
        id_ = claim if isinstance(claim, int) else claim.id
        return self.one("SELECT * FROM rowlock.batch_partitions WHERE id = %s", id_)

    def statuses(self, run: Run) -> list[str]:
        """The states of an execution's partitions, in the order of the plan."""
        rows = self.all(
            "SELECT status FROM rowlock.batch_partitions WHERE execution_id = %s ORDER BY id",
            run.id,
        )
        return [row.status for row in rows]

    def start_of(self, claim: Claim) -> Any:  # Any: a row with the table's columns, or None
        """The recorded start of an AT_MOST_ONCE partition."""
        found = self.all(
            "SELECT s.* FROM rowlock.batch_starts s"
            " JOIN rowlock.batch_job_coordination e USING (job_name, instance_key)"
            " WHERE e.execution_id = %s AND s.partition_key = %s",
            *(claim.execution_id, claim.key),
        )
        return found[0] if found else None

    # -- looking -------------------------------------------------------------------------------

    def all(self, query: LiteralString, *parameters: Any) -> list[Any]:
        """Rows of any table, as superuser."""
        return self.admin.execute(query, parameters or None).fetchall()

    def one(self, query: LiteralString, *parameters: Any) -> Any:
        """The only row."""
        (row,) = self.all(query, *parameters)
        return row

    def events(self, run: Run | UUID) -> list[str]:
        """The kinds of an execution's events, oldest first."""
        id_ = run.id if isinstance(run, Run) else run
        rows = self.all(
            "SELECT event FROM rowlock.batch_events WHERE execution_id = %s ORDER BY id", id_
        )
        return [row.event for row in rows]

    def counted(self, run: Run) -> tuple[int, int, int]:
        """Completed, failed and cancelled as the counters say, once they agree with the rows."""
        sums = self.one(
            "SELECT coalesce(sum(completed), 0)::int AS completed,"
            " coalesce(sum(failed), 0)::int AS failed,"
            " coalesce(sum(cancelled), 0)::int AS cancelled"
            " FROM rowlock.batch_counts WHERE execution_id = %s",
            run.id,
        )
        rows = self.statuses(run)
        recount = rows.count("COMPLETED"), rows.count("FAILED"), rows.count("CANCELLED")
        assert tuple(sums) == recount, f"counters say {tuple(sums)}, rows {recount}"
        return recount

    # -- time and concurrency ------------------------------------------------------------------

    @contextmanager
    def held(self, query: LiteralString, *parameters: Any) -> Generator[psycopg.Connection[Any]]:
        """Run a statement in a transaction of somebody else, which stays open inside the block."""
        with psycopg.connect(self.database.dsn, row_factory=namedtuple_row) as other:
            other.execute(query, parameters or None)
            yield other
            other.rollback()

    def waiting(self, store: Store) -> bool:
        """Whether the statement that runs on this store's connection waits for a lock."""
        found = self.all(
            "SELECT FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'",
            store.connection.info.backend_pid,
        )
        return bool(found)

    @contextmanager
    def started(self, store: Store, call: Callable[[Store], T]) -> Generator[Future[T]]:
        """Start a call that waits for a lock, and enter the block once it does."""
        with ThreadPoolExecutor(1) as thread:
            future = thread.submit(call, store)
            wait_until(
                lambda: future.done() or self.waiting(store), what="the call to wait for a lock"
            )
            assert not future.done(), (
                f"the call did not wait: {future.exception() or future.result()}"
            )
            yield future
            future.result(timeout=10)

    def make_due(self, claim: Claim) -> None:
        """Let the delay of a partition be over."""
        self.admin.execute(
            "UPDATE rowlock.batch_partitions SET available_at = now() - interval '1 s'"
            " WHERE id = %s AND NOT ready",
            [claim.id],
        )


def at_once(*calls: Callable[[], T]) -> list[T]:
    """Run calls in threads that start as nearly together as threads can; their results in order."""
    ready: list[int] = []

    def run(call: Callable[[], T]) -> T:
        ready.append(1)
        while len(ready) < len(calls):
            time.sleep(0)
        return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(run, call) for call in calls]]


def a_beat_answer(*peers: Peer) -> BeatAnswer:
    """What the database answers where nothing waits and nothing is wrong."""
    return BeatAnswer(
        alive=True,
        claimable=False,
        adoptable=False,
        due=False,
        unrecovered=False,
        ended=(),
        peers=peers,
        at=datetime.now(UTC),
        schema=Schema(version=1, works_with=1),
    )
