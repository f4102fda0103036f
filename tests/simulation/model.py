"""The database of the protocol as values, and each of its functions as a pure transition.

Far smaller than the SQL, and written apart from it: no locks, no indexes, no order that is not promised.
Two things stand on it. The simulation makes every call twice, here and on a real server, and demands the
same answer and the same rows; `explore` tries every interleaving of a few nodes over the very same
functions. So what is explored is what the SQL does.

A token is the number of a partition's claim, an owner the index of a node. Times are microseconds on the
clock of the database.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from rowlock.protocol.model import Evident, Recovered

T = TypeVar("T")

ENDED: Final = frozenset({"COMPLETED", "FAILED", "CANCELLED", "ABANDONED"})
OVER: Final = frozenset({"COMPLETED", "FAILED", "CANCELLED"})
"""Terminal states of a partition."""


class Rules(NamedTuple):
    """What this protocol has, and coordination by the names of nodes has not."""

    tokens: bool = True
    """A write names the claim it belongs to, not only the node."""
    incarnations: bool = True
    """Who comes back after a removal is somebody else, whatever its name."""
    takeover: bool = True
    """An execution whose master is lost gets another one; otherwise it is FAILED, and restarted."""
    starts: bool = True
    """The start of AT_MOST_ONCE work is on record for ever."""


RULES: Final = Rules()
NAIVE: Final = Rules(tokens=False, incarnations=False, takeover=False, starts=False)


class Node(NamedTuple):
    """One incarnation."""

    status: str = "ACTIVE"
    draining: bool = False
    beat: int = 0
    recovered: bool = False
    """REMOVED, and no claim names it any more."""


class Execution(NamedTuple):
    """One execution, with what its policy says."""

    instance: int
    delivery: str
    max_attempts: int = 3
    max_failed: int | None = None
    has_finish: bool = False
    limit: int | None = None
    status: str = "REQUESTED"
    stopping: bool = False
    suspended: bool = False
    cancelled: bool = False
    """A cancel was asked for."""
    master: int | None = None
    epoch: int = 0
    adopt_after: int = 0
    staged: tuple[tuple[int, int, tuple[str, ...]], ...] = ()
    """Epoch, chunk, keys."""
    total: int | None = None
    carried: int = 0
    restart_of: int | None = None
    summary: Any = None  # Any: whatever JSON the test wrote


class Partition(NamedTuple):
    """One partition of a sealed plan."""

    execution: int
    key: str
    delivery: str
    status: str = "PENDING"
    owner: int | None = None
    claims: int = 0
    failures: int = 0
    lost: int = 0
    alone: bool = False
    ready: bool = True
    available_at: int | None = None
    """Of what is not ready."""
    started: bool = False
    checkpoint: Any = None  # Any: whatever JSON the test wrote
    result: Any = None


class Start(NamedTuple):
    """A start of AT_MOST_ONCE work: by the claim `token` of the partition `row`."""

    instance: int
    key: str
    row: int
    token: int


class Database(NamedTuple):
    """Everything that the protocol decides by."""

    nodes: tuple[Node, ...] = ()
    executions: tuple[Execution, ...] = ()
    partitions: tuple[Partition, ...] = ()
    starts: frozenset[Start] = frozenset()
    instances: tuple[tuple[str, int], ...] = ()
    """Of each instance: its state and its last execution."""


class Illegal(AssertionError):
    """The database answered, or did, what no transition of the protocol does."""


# -- nodes -----------------------------------------------------------------------------------------------


def register(db: Database, node: int) -> Database:
    """A new incarnation, or the repetition of a registration whose answer was lost."""
    if node == len(db.nodes):
        return db._replace(nodes=(*db.nodes, Node()))
    row = db.nodes[node]
    if row.status == "REMOVED":
        return db
    return _node(db, node, status="ACTIVE", beat=row.beat + 1)


def beat(
    db: Database, node: int, *, draining: bool = False, rules: Rules = RULES
) -> tuple[Database, bool]:
    """One beat; whether the node is still a member."""
    row = db.nodes[node]
    if row.status == "REMOVED":
        if rules.incarnations:
            return db, False
        return _node(db, node, status="ACTIVE", beat=row.beat + 1, recovered=False), True
    return _node(db, node, status="ACTIVE", beat=row.beat + 1, draining=draining), True


class Levels(NamedTuple):
    """What a beat tells its node."""

    claimable: bool
    adoptable: bool
    due: bool
    unrecovered: bool


def levels(db: Database, node: int, now: int) -> Levels:
    """The flags that the answer of a beat carries."""
    working = not db.nodes[node].draining
    return Levels(
        claimable=working and any(True for _ in _waiting(db)),
        adoptable=working and adoptable(db, now) is not None,
        due=any(p.status == "PENDING" and not p.ready and _due(p, now) for p in db.partitions)
        or any(True for _ in _left_ending(db)),
        unrecovered=any(n.status == "REMOVED" and not n.recovered for n in db.nodes),
    )


def mark_unreachable(db: Database, node: int, seen: int) -> tuple[Database, bool]:
    """Phase one, for the beat that was seen."""
    row = db.nodes[node]
    if row.status != "ACTIVE" or row.beat != seen:
        return db, False
    return _node(db, node, status="UNREACHABLE"), True


def remove_node(
    db: Database, node: int, seen: int, locked: frozenset[int] = frozenset()
) -> tuple[Database, tuple[bool, Recovered]]:
    """Phase two, for the beat that was seen; claims of locked executions are left for later."""
    row = db.nodes[node]
    if row.status != "UNREACHABLE" or row.beat != seen:
        return db, (False, Recovered(0, 0, 0))
    db, recovered = _recover_claims(_node(db, node, status="REMOVED"), node, locked)
    return db, (True, recovered)


def recover_by_evidence(
    db: Database, node: int, seen: int, now: int = 0, locked: frozenset[int] = frozenset()
) -> tuple[Database, Evident]:
    """Take from a node what may be repeated, because it seems to be gone. Whether it is, does not matter."""
    row = db.nodes[node]
    if row.status == "REMOVED" or row.beat != seen:
        return db, Evident(acted=False, moved=0, failed=0, freed=0)
    db = _node(db, node, status="UNREACHABLE")
    db, recovered = _recover_claims(db, node, locked, removed=False)
    free = [number for number in masterships_of(db, node) if number not in locked]
    for number in free:
        adopt_after = min(db.executions[number].adopt_after, now)
        db = _execution(db, number, master=None, adopt_after=adopt_after)
    acted = row.status == "ACTIVE" or any(recovered) or bool(free)
    return db, Evident(acted, recovered.moved, recovered.failed, len(free))


def recover(db: Database) -> tuple[Database, Recovered]:
    """A pass over the claims of everybody who was removed."""
    total = Recovered(0, 0, 0)
    for node, row in enumerate(db.nodes):
        if row.status == "REMOVED" and not row.recovered:
            db, one = _recover_claims(db, node)
            total = Recovered(
                total.moved + one.moved, total.failed + one.failed, total.unknown + one.unknown
            )
    return db, total


def deregister(db: Database, node: int) -> tuple[Database, bool]:
    """The node itself leaves."""
    if db.nodes[node].status == "REMOVED":
        return db, False
    return _recover_claims(_node(db, node, status="REMOVED", draining=True), node)[0], True


def promote(db: Database, now: int) -> tuple[Database, int]:
    """Delayed partitions that are due."""
    due = [
        row
        for row, p in enumerate(db.partitions)
        if p.status == "PENDING" and not p.ready and _due(p, now)
    ]
    for row in due:
        db = _partition(db, row, ready=True, available_at=None)
    return db, len(due)


def expire(db: Database) -> Database:
    """Executions that only have to be ended, and have nobody who does it."""
    for execution in list(_left_ending(db)):
        db = _settle(_close(db, execution), execution)
    return db


def _left_ending(db: Database) -> Iterator[int]:
    for number, e in enumerate(db.executions):
        driven = e.master is not None and db.nodes[e.master].status != "REMOVED"
        if e.status in ENDED or not e.stopping or driven:
            continue
        rows = [p.status for p in db.partitions if p.execution == number]
        if e.status != "CLOSING" or "PENDING" in rows or not _is_live(db, number):
            yield number


def _due(row: Partition, now: int) -> bool:
    return row.available_at is not None and row.available_at <= now


def _recover_claims(
    db: Database, owner: int, locked: frozenset[int] = frozenset(), *, removed: bool = True
) -> tuple[Database, Recovered]:
    moved = failed = unknown = 0
    left = not removed
    for row, p in enumerate(db.partitions):
        if p.status != "CLAIMED" or p.owner != owner:
            continue
        if p.execution in locked:
            left = True
            continue
        if not removed and p.delivery == "AT_MOST_ONCE":
            continue
        execution = db.executions[p.execution]
        allowed = execution.max_attempts
        if p.delivery == "AT_MOST_ONCE" or (p.alone and p.started and p.failures + 1 >= allowed):
            verdict = "FAILED"
        else:
            verdict = "PENDING" if execution.status == "RUNNING" else "CANCELLED"
        failures = p.failures
        if p.delivery == "AT_LEAST_ONCE" and p.started:
            failures += 1
        again = verdict == "PENDING"
        db = _partition(
            db,
            row,
            status=verdict,
            owner=None if again else owner,
            lost=p.lost + 1,
            failures=failures if verdict == "FAILED" else min(failures, max(allowed - 1, 0)),
            alone=again and failures >= allowed - 1,
            ready=True,
            available_at=None,
            started=p.started and not again,
        )
        moved += again
        failed += verdict == "FAILED"
        unknown += p.delivery == "AT_MOST_ONCE"
    if not left:
        db = _node(db, owner, recovered=True)
    return db, Recovered(moved, failed, unknown)


# -- claims ----------------------------------------------------------------------------------------------


def room(db: Database, execution: int) -> int:
    """How many more claims the limit of an execution allows."""
    limit = db.executions[execution].limit
    if limit is None:
        return len(db.partitions)
    claimed = sum(1 for p in db.partitions if p.execution == execution and p.status == "CLAIMED")
    return limit - claimed


def _waiting(db: Database) -> Iterable[int]:
    """Partitions that some node may claim now."""
    open_ = {
        number
        for number, e in enumerate(db.executions)
        if e.status == "RUNNING" and not e.stopping and not e.suspended and room(db, number) > 0
    }
    return (
        row
        for row, p in enumerate(db.partitions)
        if p.status == "PENDING" and p.ready and p.execution in open_
    )


def claimable(db: Database, node: int, *, slots: int = 1, idle: bool = True) -> list[int]:
    """Partitions of which a claim of this node may take one, and takes at least one."""
    me = db.nodes[node]
    if slots < 1 or me.status != "ACTIVE" or me.draining:
        return []
    waiting = list(_waiting(db))
    suspects = [row for row in waiting if db.partitions[row].alone]
    if suspects:
        return suspects if idle else []
    return waiting


def claim(
    db: Database,
    node: int,
    took: Sequence[int],
    *,
    slots: int = 1,
    prefetch: int = 0,
    idle: bool = True,
    rules: Rules = RULES,
) -> Database:
    """A claim that took these partitions, those for free slots first.

    Raises:
        Illegal: No claim may take these.
    """
    allowed = claimable(db, node, slots=slots, idle=idle)
    if bool(took) != bool(allowed):
        raise Illegal(f"a claim took {list(took)}, of {allowed}")
    rows = [db.partitions[row] for row in took]
    single = any(p.alone or p.delivery == "AT_MOST_ONCE" for p in rows)
    if (
        not set(took) <= set(allowed)
        or len(took) > (1 if single else slots + prefetch)
        or any(p.lost for p in rows[slots:])
    ):
        raise Illegal(f"a claim for {slots} slots and {prefetch} more took {rows}")
    for number, row in enumerate(took):
        p = db.partitions[row]
        if room(db, p.execution) < 1:
            raise Illegal(f"more claims of execution {p.execution} than its limit")
        if p.delivery == "AT_MOST_ONCE" and rules.starts:
            instance = db.executions[p.execution].instance
            if _start_of(db, instance, p.key) is not None:
                raise Illegal(f"partition {row} waits, and is on record as started")
            start = Start(instance, p.key, row, p.claims + 1)
            db = db._replace(starts=db.starts | {start})
        db = _partition(
            db, row, status="CLAIMED", owner=node, claims=p.claims + 1, started=number < slots
        )
    return db


def _holds(db: Database, node: int, row: int, token: int, rules: Rules) -> bool:
    """Whether a write of this holder is accepted."""
    p = db.partitions[row]
    if rules.tokens:
        return db.nodes[node].status != "REMOVED" and p.status == "CLAIMED" and p.claims == token
    return p.status in {"PENDING", "CLAIMED"} and p.owner == node


def complete(
    db: Database, node: int, row: int, token: int, result: Any, *, rules: Rules = RULES
) -> tuple[Database, str]:
    """A result: 'completed', also if this very claim completed it before, or 'lost'."""
    p = db.partitions[row]
    if _holds(db, node, row, token, rules):
        return _partition(db, row, status="COMPLETED", result=result), "completed"
    return db, "completed" if p.status == "COMPLETED" and p.claims == token else "lost"


def fail(
    db: Database,
    node: int,
    row: int,
    token: int,
    kind: str,
    *,
    delay: int = 0,
    now: int = 0,
) -> tuple[Database, str]:
    """The end of an attempt without a result."""
    p = db.partitions[row]
    if db.nodes[node].status == "REMOVED" or p.claims != token:
        return db, "lost"
    if p.status != "CLAIMED":
        return db, "retry" if p.status == "PENDING" else p.status.lower()
    execution = db.executions[p.execution]
    failures = p.failures + (kind != "later")
    if (
        p.delivery == "AT_MOST_ONCE"
        or kind in {"never", "unstarted", "unknown"}
        or (kind != "later" and failures >= execution.max_attempts)
    ):
        answer = "failed"
    else:
        answer = "retry" if execution.status == "RUNNING" else "cancelled"
    again = answer == "retry"
    if kind == "unstarted":
        db = _forget_start(db, row, token)
    db = _partition(
        db,
        row,
        status="PENDING" if again else answer.upper(),
        owner=None if again else p.owner,
        failures=failures,
        alone=again and p.lost > 0 and failures >= execution.max_attempts - 1,
        ready=not again or delay == 0,
        available_at=now + delay if again and delay else None,
        started=p.started and not again,
    )
    return db, answer


def release(
    db: Database, node: int, row: int, token: int, *, unstarted: bool
) -> tuple[Database, str]:
    """Hand a claim back; that of a start only with the word that author code has not begun."""
    p = db.partitions[row]
    live = db.nodes[node].status != "REMOVED"
    if p.claims != token:
        return db, "lost"
    if live and p.status == "CLAIMED" and (p.delivery == "AT_LEAST_ONCE" or unstarted):
        again = db.executions[p.execution].status == "RUNNING"
        db = _partition(
            _forget_start(db, row, token),
            row,
            status="PENDING" if again else "CANCELLED",
            owner=None if again else p.owner,
            ready=True,
            available_at=None,
            started=False,
        )
        return db, "released" if again else "cancelled"
    if p.status == "CLAIMED":
        return db, "kept" if live else "lost"
    answers = {"COMPLETED": "completed", "PENDING": "released", "CANCELLED": "cancelled"}
    return db, answers.get(p.status, "lost")


def checkpoint(db: Database, node: int, row: int, token: int, value: Any) -> tuple[Database, bool]:
    """Progress of an attempt, outside a transaction of the author."""
    if not _holds(db, node, row, token, RULES):
        return db, False
    return _partition(db, row, checkpoint=value), True


def commit(db: Database, row: int, token: int, kind: str, value: Any) -> tuple[Database, bool]:
    """The COMMIT of an author's transaction, with a checkpoint or the completion in it.

    It asks for the claim, not for the node: what was removed and not recovered yet still holds it.
    """
    p = db.partitions[row]
    if p.status != "CLAIMED" or p.claims != token:
        return db, False
    if kind == "checkpoint":
        return _partition(db, row, checkpoint=value), True
    return _partition(db, row, status="COMPLETED", result=value), True


def claims_of(db: Database, node: int) -> dict[int, int]:
    """What the database says a node holds: partition and token."""
    return {
        row: p.claims
        for row, p in enumerate(db.partitions)
        if p.status == "CLAIMED" and p.owner == node
    }


def _start_of(db: Database, instance: int, key: str) -> Start | None:
    return next((s for s in db.starts if (s.instance, s.key) == (instance, key)), None)


def _forget_start(db: Database, row: int, token: int) -> Database:
    return db._replace(starts=frozenset(s for s in db.starts if (s.row, s.token) != (row, token)))


# -- executions --------------------------------------------------------------------------------------------


def request(db: Database, new: Execution) -> tuple[Database, str]:
    """Ask for an execution of an instance: a new one, a restart, or why not."""
    if new.instance == len(db.instances):
        db = db._replace(instances=(*db.instances, ("RUNNING", len(db.executions))))
        return db._replace(executions=(*db.executions, new)), "requested"
    state, last = db.instances[new.instance]
    if state not in {"FAILED", "CANCELLED"}:
        return db, state.lower()
    return restart(db, last, adopt_after=new.adopt_after)


def restart(
    db: Database, of: int, *, adopt_after: int = 0, rules: Rules = RULES
) -> tuple[Database, str]:
    """A new execution of what an ended one left unfinished."""
    before = db.executions[of]
    state, last = db.instances[before.instance]
    if last != of:
        return db, "superseded"
    if state not in {"FAILED", "CANCELLED"}:
        return db, state.lower()
    number = len(db.executions)
    rows: list[Partition] = []
    for p in db.partitions:
        if p.execution != of or p.status == "COMPLETED":
            continue
        started = p.delivery == "AT_MOST_ONCE" and _start_of(db, before.instance, p.key)
        rows.append(
            Partition(
                execution=number,
                key=p.key,
                delivery=p.delivery,
                status="FAILED" if started and rules.starts else "PENDING",
                checkpoint=p.checkpoint,
            )
        )
    sealed = before.total is not None
    new = Execution(
        instance=before.instance,
        delivery=before.delivery,
        max_attempts=before.max_attempts,
        max_failed=before.max_failed,
        has_finish=before.has_finish,
        limit=before.limit,
        status="RUNNING" if sealed else "REQUESTED",
        adopt_after=adopt_after,
        total=before.total,
        carried=before.carried + _count(db, of, "COMPLETED") if sealed else 0,
        restart_of=of,
    )
    return db._replace(
        executions=(*db.executions, new),
        partitions=(*db.partitions, *rows),
        instances=_put(db.instances, before.instance, ("RUNNING", number)),
    ), "restarted"


def _may_adopt(db: Database, execution: int) -> bool:
    master = db.executions[execution].master
    return master is None or db.nodes[master].status == "REMOVED"


def adoptable(db: Database, now: int) -> int | None:
    """The first execution that waits for a master."""
    for number, e in enumerate(db.executions):
        if e.status in ENDED or (e.suspended and e.status == "REQUESTED" and not e.stopping):
            continue
        if _may_adopt(db, number) and (e.master is not None or e.adopt_after <= now):
            return number
    return None


def adopt(
    db: Database, node: int, execution: int | None, now: int = 0
) -> tuple[Database, tuple[int, int] | None]:
    """Become master of this execution, or of the first that waits: which, and the epoch."""
    number = adoptable(db, now) if execution is None else execution
    me = db.nodes[node]
    if number is None or me.status != "ACTIVE" or me.draining:
        return db, None
    e = db.executions[number]
    if e.status in ENDED or (e.master != node and not _may_adopt(db, number)):
        return db, None
    status = "PLANNING" if e.status == "REQUESTED" else e.status
    db = _execution(db, number, master=node, epoch=e.epoch + 1, status=status)
    return db, (number, e.epoch + 1)


def resign(db: Database, node: int, execution: int, epoch: int, now: int) -> tuple[Database, bool]:
    """Give a mastership back."""
    e = db.executions[execution]
    if e.master != node or e.epoch != epoch or e.status in ENDED:
        return db, False
    return _execution(db, execution, master=None, adopt_after=now), True


def masterships_of(db: Database, node: int) -> dict[int, int]:
    """What the database says a node drives: execution and epoch."""
    return {
        number: e.epoch
        for number, e in enumerate(db.executions)
        if e.master == node and e.status not in ENDED
    }


def stage(
    db: Database, execution: int, epoch: int, chunk: int, keys: tuple[str, ...]
) -> tuple[Database, bool]:
    """Keep a chunk of a plan; again: the later one counts."""
    e = db.executions[execution]
    if e.status != "PLANNING" or e.epoch != epoch:
        return db, False
    kept = tuple(one for one in e.staged if one[:2] != (epoch, chunk))
    staged = tuple(sorted((*kept, (epoch, chunk, keys))))
    return _execution(db, execution, staged=staged), True


def seal(db: Database, execution: int, epoch: int, total: int) -> tuple[Database, str]:
    """Make the plan of this epoch visible, whole."""
    e = db.executions[execution]
    if e.epoch == epoch and e.status in {"RUNNING", "FINISHING"} and e.total == total:
        return db, "sealed"
    if e.status != "PLANNING" or e.epoch != epoch:
        return db, "superseded"
    keys = [key for one in e.staged if one[0] == epoch for key in one[2]]
    if len(set(keys)) < len(keys):
        return db, "duplicate"
    if len(keys) != total:
        return db, "incomplete"
    rows = [Partition(execution=execution, key=key, delivery=e.delivery) for key in keys]
    db = db._replace(partitions=(*db.partitions, *rows))
    return _execution(db, execution, status="RUNNING", total=total, staged=()), "sealed"


def advance(db: Database, execution: int, epoch: int) -> tuple[Database, str]:
    """The master's look, and what is due: close, end the step, stop the claims."""
    e = db.executions[execution]
    if e.epoch != epoch:
        return db, "SUPERSEDED"
    if e.status not in ENDED:
        if e.stopping and e.status != "CLOSING":
            db = _settle(_close(db, execution), execution)
        elif e.status in {"RUNNING", "CLOSING"} and not _is_live(db, execution):
            db = _settle(db, execution)
        elif (
            e.status == "RUNNING"
            and e.max_failed is not None
            and _count(db, execution, "FAILED") > e.max_failed
        ):
            db = _execution(db, execution, stopping=True)
    return db, db.executions[execution].status


def fail_plan(db: Database, execution: int, epoch: int) -> tuple[Database, bool]:
    """There is no plan."""
    e = db.executions[execution]
    if e.epoch != epoch or e.status != "PLANNING":
        return db, False
    return _end(db, execution, "FAILED"), True


def finish(
    db: Database, execution: int, epoch: int, summary: Any, reason: str | None = None
) -> tuple[Database, str]:
    """The end of a FINISHING execution."""
    e = db.executions[execution]
    if e.epoch != epoch:
        return db, "SUPERSEDED"
    if e.status != "FINISHING":
        return db, e.status
    status = "COMPLETED" if reason is None else "FAILED"
    return _execution(_end(db, execution, status), execution, summary=summary), status


def request_cancel(db: Database, execution: int) -> Database:
    """The first half of a cancel: no more claims."""
    e = db.executions[execution]
    if e.cancelled or e.status in ENDED:
        return db
    return _execution(db, execution, cancelled=True, stopping=True)


def cancel(db: Database, execution: int) -> tuple[Database, str]:
    """Both halves."""
    e = db.executions[execution]
    if e.status not in ENDED:
        db = request_cancel(db, execution)
        if e.status != "CLOSING":
            db = _close(db, execution)
        db = _settle(db, execution)
    return db, db.executions[execution].status.lower()


def set_suspended(db: Database, execution: int, wanted: bool) -> tuple[Database, str]:
    """Suspend or resume."""
    e = db.executions[execution]
    if e.status in ENDED:
        return db, e.status.lower()
    if e.suspended == wanted:
        return db, "same"
    return _execution(db, execution, suspended=wanted), "suspended" if wanted else "resumed"


def lose_master(db: Database, execution: int) -> Database:
    """Without takeover: the loss of the master is the end, whoever still runs."""
    e = db.executions[execution]
    if e.status in ENDED or e.master is None or db.nodes[e.master].status != "REMOVED":
        return db
    return _end(db, execution, "FAILED")


def _is_live(db: Database, execution: int) -> bool:
    return any(p.execution == execution and p.status not in OVER for p in db.partitions)


def _count(db: Database, execution: int, status: str) -> int:
    return sum(1 for p in db.partitions if p.execution == execution and p.status == status)


def _close(db: Database, execution: int) -> Database:
    for row, p in enumerate(db.partitions):
        if p.execution == execution and p.status == "PENDING":
            db = _partition(db, row, status="CANCELLED")
    return _execution(db, execution, status="CLOSING", stopping=True)


def _settle(db: Database, execution: int) -> Database:
    e = db.executions[execution]
    if e.status not in {"RUNNING", "CLOSING"} or _is_live(db, execution):
        return db
    if e.status == "CLOSING":
        return _end(db, execution, "CANCELLED" if e.cancelled else "FAILED")
    if _count(db, execution, "FAILED") > (e.max_failed or 0):
        return _end(db, execution, "FAILED")
    if e.has_finish:
        return _execution(db, execution, status="FINISHING")
    return _end(db, execution, "COMPLETED")


def _end(db: Database, execution: int, status: str) -> Database:
    instance = db.executions[execution].instance
    db = _execution(db, execution, status=status, staged=())
    if db.instances[instance][1] == execution:
        db = db._replace(instances=_put(db.instances, instance, (status, execution)))
    return db


# -- tuples ------------------------------------------------------------------------------------------------


def _put(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _node(db: Database, node: int, **changes: Any) -> Database:
    return db._replace(nodes=_put(db.nodes, node, db.nodes[node]._replace(**changes)))


def _partition(db: Database, row: int, **changes: Any) -> Database:
    changed = db.partitions[row]._replace(**changes)
    return db._replace(partitions=_put(db.partitions, row, changed))


def _execution(db: Database, number: int, **changes: Any) -> Database:
    changed = db.executions[number]._replace(**changes)
    return db._replace(executions=_put(db.executions, number, changed))
