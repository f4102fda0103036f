"""Every call twice: on the real server through the real Store, and on the model.

The answers must be the same, and so must the rows afterwards. So every move that the database makes is a
transition of the model, which `explore` has tried in every order; and what the model says of who holds
what decides whether a write may count, whoever sends it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from uuid import UUID

import psycopg

from rowlock.db.store import Store
from rowlock.protocol.model import FIRST_STEP, BeatAnswer, Claim, Completion
from tests.simulation import invariants, model, snapshot
from tests.simulation.model import Database, Execution, Illegal
from tests.support.builders import HASH, a_policy
from tests.support.postgres import Database as TestDatabase

T = TypeVar("T")

JOB: Final = "simulated"
POOL: Final = "simulated"
_EPOCH: Final = datetime.datetime(2031, 1, 1, tzinfo=datetime.UTC)
REFUSED: Final = frozenset({"RL001", "RL002"})


_ZERO: Final = round(_EPOCH.timestamp() * 1_000_000)


class Transaction:
    """An open transaction of an author, under its fence."""

    def __init__(self, connection: psycopg.Connection[Any], row: int, token: UUID) -> None:
        self.connection = connection
        self.row = row
        self.token = token
        self.fence = 0


class Lockstep:
    """The database of a simulation. Times are microseconds on its clock."""

    def __init__(self, database: TestDatabase) -> None:
        self._admin = database.connect()
        self._nodes = Store(database.connect(role="rowlock_node"))
        self._somebody = Store(database.connect(role="rowlock_admin"))
        self._locker = database.connect(autocommit=False)
        self._works = [database.connect(role="rowlock_node") for _ in range(4)]
        self._clocks: dict[psycopg.Connection[Any], int] = {}
        self.now = 0
        """What the database's clock says."""
        self.begin()

    def begin(self) -> None:
        """Start again with empty tables."""
        self.forget_transactions()
        snapshot.empty(self._admin)
        self.names = snapshot.Names()
        self.db = Database()
        self.seen = snapshot.Snapshot(self.db, (), {})
        self.trace: list[str] = []
        self.moves: set[tuple[str, str | None, str]] = set()
        """Seen here: what kind of row, from which state, to which."""
        self.taken: list[tuple[UUID, Claim]] = []
        """Every claim there ever was, and whose it was."""
        self.driven: list[tuple[UUID, int, int]] = []
        """Every mastership there ever was: node, execution, epoch."""
        self.refused = 0
        """Writes of who had lost the claim."""
        self._free = list(self._works)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for connection in (
            self._admin,
            self._nodes.connection,
            self._somebody.connection,
            self._locker,
            *self._works,
        ):
            connection.close()

    @property
    def _store(self) -> Store:
        return self._on_time(self._nodes)

    @property
    def _people(self) -> Store:
        return self._on_time(self._somebody)

    def _on_time(self, store: Store) -> Store:
        self._set_clock(store.connection)
        return store

    def _set_clock(self, connection: psycopg.Connection[Any]) -> None:
        if self._clocks.get(connection) != self.now:
            self._clocks[connection] = self.now
            text = (_EPOCH + datetime.timedelta(microseconds=self.now)).isoformat()
            connection.execute("SELECT set_config('simulation.now', %s, false)", [text])

    # -- nodes ---------------------------------------------------------------------------------------

    def register(self, node: UUID) -> None:
        """A new incarnation, or again."""
        if node not in self.names.nodes:
            self.names.nodes.append(node)
        number = self.names.nodes.index(node)
        self._store.register(
            node, name="node", pool=POOL, slots=2, jobs={JOB: [HASH]}, version="simulated"
        )
        self._moved(f"register n{number}", model.register(self.db, number))

    def number(self, node: UUID) -> int:
        """The index of a node."""
        return self.names.nodes.index(node)

    def beat(self, node: UUID, *, draining: bool) -> BeatAnswer:
        """One beat, with the executions all asked about."""
        number = self.number(node)
        answer = self._store.beat(node, load=0, draining=draining, executions=self.names.executions)
        after, alive = model.beat(self.db, number, draining=draining)
        self._agree(f"beat n{number}", answer.alive, alive)
        if alive:
            said = model.Levels(
                claimable=answer.claimable,
                adoptable=answer.adoptable,
                due=answer.due,
                unrecovered=answer.unrecovered,
            )
            self._agree(f"levels n{number}", said, model.levels(after, number, self._clock))
            shown = {
                (self.number(p.node_id), p.beat, "UNREACHABLE" if p.unreachable else "ACTIVE")
                for p in answer.peers
            }
            living = {
                (other, row.beat, row.status)
                for other, row in enumerate(after.nodes)
                if other != number and row.status != "REMOVED"
            }
            self._agree(f"peers n{number}", shown, living)
        self._moved(f"beat n{number}", after)
        return answer

    def mark_unreachable(self, observer: UUID, node: UUID, beat: int) -> bool:
        """Phase one."""
        after, expected = model.mark_unreachable(self.db, self.number(node), beat)
        answer = self._store.mark_unreachable(observer, node, beat)
        return self._step(f"mark n{self.number(node)} at {beat}", answer, expected, after)

    def remove_node(
        self, observer: UUID, node: UUID, beat: int, *, locked: int | None = None
    ) -> bool:
        """Phase two, perhaps while somebody holds the row of an execution."""
        number = self.number(node)
        after, expected = model.remove_node(self.db, number, beat, _only(locked))
        with self._lock(locked):
            answer = self._store.remove_node(observer, node, beat)
        self._step(f"remove n{number} at {beat}, locked {locked}", answer, expected, after)
        return answer[0]

    def recover_by_evidence(
        self, observer: UUID, node: UUID, beat: int, *, locked: int | None = None
    ) -> None:
        """The node seems to be gone; whether it is, the database is not asked here."""
        number = self.number(node)
        after, expected = model.recover_by_evidence(
            self.db, number, beat, self._clock, _only(locked)
        )
        with self._lock(locked):
            answer = self._store.recover_by_evidence(observer, node, beat)
        self._step(f"evidence of n{number} at {beat}, locked {locked}", answer, expected, after)

    @contextmanager
    def _lock(self, execution: int | None) -> Generator[None]:
        """Somebody holds the row of an execution meanwhile."""
        if execution is not None:
            self._locker.execute(
                "SELECT FROM rowlock.batch_job_coordination WHERE execution_id = %s FOR UPDATE",
                [self.names.executions[execution]],
            )
        try:
            yield
        finally:
            self._locker.rollback()

    def recover(self, actor: UUID) -> None:
        """A pass over the claims of who is gone."""
        after, expected = model.recover(self.db)
        self._step("recover", self._store.recover(actor), expected, after)

    def promote(self) -> None:
        """Delayed partitions that are due."""
        after, expected = model.promote(self.db, self._clock)
        self._step("promote", self._store.promote(500), expected, after)

    def expire(self) -> None:
        """Executions that nobody is left to end."""
        self._step("expire", self._store.expire("simulation"), 0, model.expire(self.db))

    def deregister(self, node: UUID) -> bool:
        """Leave."""
        after, expected = model.deregister(self.db, self.number(node))
        answer = self._store.deregister(node, "drained")
        return self._step(f"deregister n{self.number(node)}", answer, expected, after)

    # -- claims --------------------------------------------------------------------------------------

    def claim(self, node: UUID, *, slots: int, prefetch: int, idle: bool, seed: int) -> list[Claim]:
        """Take partitions."""
        number = self.number(node)
        claims = self._store.claim(node, slots=slots, prefetch=prefetch, idle=idle, seed=seed)
        claims.sort(key=lambda claim: not claim.started)
        for claim in claims:
            self.names.tokens[claim.token] = (self.names.row(claim.id), claim.claims)
            self.taken.append((node, claim))
        after = model.claim(
            self.db,
            number,
            [self.names.row(claim.id) for claim in claims],
            slots=slots,
            prefetch=prefetch,
            idle=idle,
        )
        took = [self.names.tokens[claim.token] for claim in claims]
        self._moved(f"claim n{number} {slots}+{prefetch}: {took}", after)
        return claims

    def complete(self, node: UUID, partition: int, token: UUID, result: str) -> str:
        """A result."""
        row, number = self.names.tokens[token]
        sent = [Completion(id=partition, token=token, result=json.dumps(result))]
        answer = self._store.complete(node, sent)[partition]
        after, expected = model.complete(self.db, self.number(node), row, number, result)
        return self._write("complete", token, answer, expected, after)

    def fail(self, node: UUID, partition: int, token: UUID, kind: str, delay_seconds: float) -> str:
        """The end of an attempt without a result."""
        row, number = self.names.tokens[token]
        answer = self._store.fail(
            *(node, partition, token),
            error='{"type": "Boom", "message": "it broke"}',
            kind=kind,
            delay_seconds=delay_seconds,
        )
        after, expected = model.fail(
            *(self.db, self.number(node), row, number, kind),
            delay=round(delay_seconds * 1e6),
            now=self._clock,
        )
        return self._write(f"fail ({kind})", token, answer, expected, after)

    def release(self, node: UUID, partition: int, token: UUID, *, unstarted: bool) -> str:
        """Hand a claim back."""
        row, number = self.names.tokens[token]
        answers = self._store.release(node, [(partition, token)], unstarted=unstarted)
        after, expected = model.release(
            self.db, self.number(node), row, number, unstarted=unstarted
        )
        return self._write(f"release ({unstarted=})", token, answers[partition], expected, after)

    def checkpoint(self, node: UUID, partition: int, token: UUID, value: str) -> bool:
        """Progress."""
        row, number = self.names.tokens[token]
        answer = self._store.checkpoint(node, partition, token, json.dumps(value))
        after, expected = model.checkpoint(self.db, self.number(node), row, number, value)
        return self._write("checkpoint", token, answer, expected, after)

    def claims_of(self, node: UUID) -> dict[int, UUID]:
        """What the database says a node holds."""
        held = self._store.claims_of(node)
        said = dict(self.names.tokens[token] for token in held.values())
        self._agree("claims_of", said, model.claims_of(self.db, self.number(node)))
        return held

    def record_evidence(self, partition: int, token: UUID) -> None:
        """What came of AT_MOST_ONCE work whose claim was gone."""
        row, number = self.names.tokens[token]
        known = self.db.partitions[row].claims == number or any(
            (start.row, start.token) == (row, number) for start in self.db.starts
        )
        answer = self._store.record_evidence(partition, token, {"outcome": "completed"})
        self._step(f"evidence {(row, number)}", answer, known, self.db)

    # -- transactions of authors ---------------------------------------------------------------------

    def open(self, partition: int, token: UUID) -> Transaction | None:
        """Open one; None: the claim is gone, or there are too many already."""
        if not self._free:
            return None
        row, number = self.names.tokens[token]
        standing = self.db.partitions[row].status == "CLAIMED"
        expected = standing and self.db.partitions[row].claims == number
        made = Transaction(self._free.pop(), row, token)
        self._set_clock(made.connection)
        made.connection.execute("BEGIN READ WRITE")
        try:
            opened = made.connection.execute(
                "SELECT rowlock.fence_open(%s, %s)", [partition, token]
            ).fetchone()
        except psycopg.Error as error:
            self._agree("open", error.sqlstate, "RL002")
            self.roll_back(made)
            self._step(f"open {self.names.tokens[token]}", False, expected, self.db)
            return None
        assert opened is not None
        made.fence = opened[0]
        self._step(f"open {self.names.tokens[token]}", True, expected, self.db)
        return made

    def commit(self, transaction: Transaction, kind: str, value: str) -> bool:
        """Arm and commit it, with a checkpoint or the completion in it."""
        connection, token = transaction.connection, transaction.token
        row, number = self.names.tokens[token]
        if kind == "completion":
            self._write_business(transaction)
        connection.execute(
            "SELECT rowlock.fence_arm(%s, %s, %s)", [transaction.fence, kind, json.dumps(value)]
        )
        kept = self._committed(transaction)
        after, expected = model.commit(self.db, row, number, kind, value)
        return self._write(f"commit ({kind})", token, kept, expected, after)

    def commit_unarmed(self, transaction: Transaction) -> None:
        """The author writes COMMIT: nothing of it may be kept."""
        self._write_business(transaction)
        kept = self._committed(transaction)
        self._step("the author commits", kept, False, self.db)

    def roll_back(self, transaction: Transaction) -> None:
        """End it without a trace."""
        transaction.connection.rollback()
        self._free.append(transaction.connection)

    def roll_back_if_open(self, transaction: Transaction) -> None:
        """End it, if its COMMIT never reached the server."""
        if transaction.connection not in self._free:
            self.roll_back(transaction)

    def forget_transactions(self) -> None:
        """The server restarts: nothing that was open is kept."""
        for connection in self._works:
            connection.rollback()
        self._free = list(self._works)

    def _write_business(self, transaction: Transaction) -> None:
        transaction.connection.execute(
            "INSERT INTO public.business VALUES (%s, %s)",
            [self.names.rows[transaction.row], transaction.token],
        )

    def _committed(self, transaction: Transaction) -> bool:
        try:
            transaction.connection.execute("COMMIT")
        except psycopg.Error as error:
            if error.sqlstate not in REFUSED:
                raise
            return False
        finally:
            self.roll_back(transaction)
        return True

    # -- executions ----------------------------------------------------------------------------------

    def request(self, execution: UUID, new: Execution, adopt_after_seconds: float) -> str:
        """Ask for an execution of an instance."""
        policy = a_policy(
            max_attempts=new.max_attempts, max_failed=new.max_failed, has_finish=new.has_finish
        )
        options = {} if new.limit is None else {"parallelism": new.limit}
        _, answer = self._people.request(
            execution,
            job=JOB,
            contract_hash=HASH,
            policy=policy,
            delivery=new.delivery,
            instance_key=snapshot.instance_key(new.instance),
            parameters="{}",
            pool=POOL,
            adopt_after_seconds=adopt_after_seconds,
            options=options,
        )
        waiting = new._replace(adopt_after=self._clock + round(adopt_after_seconds * 1e6))
        after, expected = model.request(self.db, waiting)
        if len(after.executions) > len(self.db.executions):
            self.names.executions.append(execution)
        return self._step(f"request instance {new.instance}", answer, expected, after)

    def restart(self, execution: UUID, of: int) -> str:
        """What an execution left unfinished."""
        _, answer = self._people.restart(
            execution, self.names.executions[of], actor="somebody", reason=None
        )
        after, expected = model.restart(self.db, of, adopt_after=self._clock)
        if len(after.executions) > len(self.db.executions):
            self.names.executions.append(execution)
        return self._step(f"restart e{of}", answer, expected, after)

    def adopt(self, node: UUID, execution: int | None) -> tuple[int, int] | None:
        """Become master: of which, and the epoch."""
        id_ = None if execution is None else self.names.executions[execution]
        taken = self._store.adopt(node, id_)
        after, expected = model.adopt(self.db, self.number(node), execution, self._clock)
        answer = (
            None
            if taken is None
            else (self.names.executions.index(taken.execution_id), taken.epoch)
        )
        if answer is not None:
            self.driven.append((node, *answer))
        return self._step(f"adopt n{self.number(node)}", answer, expected, after)

    def resign(self, node: UUID, execution: int, epoch: int) -> bool:
        """Give a mastership back."""
        answer = self._store.resign(node, self.names.executions[execution], epoch)
        after, expected = model.resign(self.db, self.number(node), execution, epoch, self._clock)
        return self._step(f"resign e{execution} of epoch {epoch}", answer, expected, after)

    def masterships_of(self, node: UUID) -> dict[int, int]:
        """What the database says a node drives."""
        driven = self._store.masterships_of(node)
        answer = {self.names.executions.index(id_): epoch for id_, epoch in driven.items()}
        self._agree("masterships_of", answer, model.masterships_of(self.db, self.number(node)))
        return answer

    def stage(self, execution: int, epoch: int, chunk: int, keys: Sequence[str]) -> bool:
        """Keep a chunk of a plan."""
        answer = self._store.stage(
            *(self.names.executions[execution], epoch, chunk),
            keys=keys,
            slices=["{}"] * len(keys),
            weights=[0] * len(keys),
        )
        after, expected = model.stage(self.db, execution, epoch, chunk, tuple(keys))
        return self._step(
            f"stage e{execution} of epoch {epoch}: {list(keys)}", answer, expected, after
        )

    def seal(self, execution: int, epoch: int, total: int) -> str:
        """Make a plan visible."""
        answer, _ = self._store.seal(self.names.executions[execution], epoch, FIRST_STEP, total)
        after, expected = model.seal(self.db, execution, epoch, total)
        return self._step(f"seal e{execution} of epoch {epoch}", answer, expected, after)

    def advance(self, node: UUID, execution: int, epoch: int) -> str:
        """The master's look."""
        progress = self._store.advance(node, self.names.executions[execution], epoch)
        after, expected = model.advance(self.db, execution, epoch)
        return self._step(
            f"advance e{execution} of epoch {epoch}", progress.status, expected, after
        )

    def finish(self, execution: int, epoch: int, summary: str, reason: str | None) -> str:
        """The end of a FINISHING execution."""
        answer = self._store.finish(
            *(self.names.executions[execution], epoch),
            summary=json.dumps(summary),
            reason=reason,
            message=reason,
        )
        after, expected = model.finish(self.db, execution, epoch, summary, reason)
        return self._step(f"finish e{execution} of epoch {epoch}", answer, expected, after)

    def fail_plan(self, node: UUID, execution: int, epoch: int) -> bool:
        """There is no plan."""
        answer = self._store.fail_plan(
            node, self.names.executions[execution], epoch, "PlanFailed", "it broke"
        )
        after, expected = model.fail_plan(self.db, execution, epoch)
        return self._step(f"fail plan of e{execution}, epoch {epoch}", answer, expected, after)

    def half_cancel(self, execution: int) -> None:
        """Who cancels dies between the two statements."""
        self._people.connection.execute(
            "SELECT rowlock.request_cancel(%s, 'somebody', NULL)",
            [self.names.executions[execution]],
        )
        self._moved(f"half-cancel e{execution}", model.request_cancel(self.db, execution))

    def cancel(self, execution: int) -> str:
        """End an execution early."""
        answer = self._people.cancel(self.names.executions[execution], "somebody", None)
        after, expected = model.cancel(self.db, execution)
        return self._step(f"cancel e{execution}", answer, expected, after)

    def set_suspended(self, execution: int, wanted: bool) -> str:
        """Suspend or resume."""
        change = self._people.suspend if wanted else self._people.resume
        answer = change(self.names.executions[execution], "somebody", None)
        after, expected = model.set_suspended(self.db, execution, wanted)
        return self._step(f"suspend e{execution}: {wanted}", answer, expected, after)

    # -- agreeing ------------------------------------------------------------------------------------

    @property
    def _clock(self) -> int:
        """What `rowlock.now()` says, in microseconds since the epoch of the operating system."""
        return _ZERO + self.now

    def _agree(self, what: str, answer: object, expected: object) -> None:
        if answer != expected:
            raise Illegal(f"{what}: the database says {answer!r}, the model {expected!r}")

    def _step(self, what: str, answer: T, expected: object, after: Database) -> T:
        self._agree(what, answer, expected)
        self._moved(f"{what}: {answer}", after)
        return answer

    def _write(self, what: str, token: UUID, answer: T, expected: object, after: Database) -> T:
        """A write of a holder, or of who believes to be one."""
        row, number = self.names.tokens[token]
        before = self.seen
        self._step(f"{what} {(row, number)}", answer, expected, after)
        self.refused += answer in {"lost", False}
        invariants.check_write(before, self.seen, row, number)
        return answer

    def _moved(self, what: str, after: Database) -> None:
        """The rows must be what the model says, and keep every invariant."""
        self.trace.append(what)
        before, self.seen, self.db = self.seen, snapshot.take(self._admin, self.names), after
        self._note_moves(before.db, self.seen.db)
        invariants.check(before, self.seen)
        if self.seen.db != after:
            raise Illegal(f"after {what}: {_difference(self.seen.db, after)}")

    def _note_moves(self, before: Database, after: Database) -> None:
        old, new = _statuses(before), _statuses(after)
        for kind, now in new.items():
            for number, status in enumerate(now):
                was = old[kind][number] if number < len(old[kind]) else None
                if was != status:
                    self.moves.add((kind, was, status))


def _only(execution: int | None) -> frozenset[int]:
    return frozenset() if execution is None else frozenset({execution})


def _statuses(db: Database) -> dict[str, list[str]]:
    return {
        "node": [row.status for row in db.nodes],
        "partition": [row.status for row in db.partitions],
        "execution": [row.status for row in db.executions],
    }


def _difference(real: Database, model_: Database) -> str:
    """What tells two databases apart."""
    found: list[str] = []
    parts: Mapping[str, tuple[Sequence[Any], Sequence[Any]]] = {
        field: (getattr(real, field), getattr(model_, field))
        for field in ("nodes", "executions", "partitions", "instances")
    }
    for field, (here, there) in parts.items():
        if len(here) != len(there):
            found.append(f"{len(here)} {field}, not {len(there)}")
        found += [
            f"{field} {number} is {a}, not {b}"
            for number, (a, b) in enumerate(zip(here, there, strict=False))
            if a != b
        ]
    if real.starts != model_.starts:
        found.append(f"starts are {sorted(real.starts)}, not {sorted(model_.starts)}")
    return "; ".join(found)
