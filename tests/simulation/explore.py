"""Every interleaving of a few nodes over the model of the database: breadth first, the alike merged.

A process believes what it was told and acts on it as late as it likes: so each of them may be a zombie. Who
suspects whom, and when, is left open altogether: a node may be marked and removed at any moment, whatever
it does. What holds here does not rest on time. Replies are lost a bounded number of times, processes crash
and come back, masters are replaced, an execution is cancelled and restarted.

`explore` stops at the first step that breaks a guarantee, and tells the shortest way there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, groupby, permutations, product
from typing import Any, Final, NamedTuple

from tests.simulation import model
from tests.simulation.model import ENDED, OVER, RULES, Database, Execution, Partition, Rules

KEYS: Final = ("a", "b")


class Attempt(NamedTuple):
    """What a process believes to hold."""

    row: int
    token: int
    phase: str
    """held, running, or the write that is to end it: completing, failing, releasing, unstarted."""


class Process(NamedTuple):
    """What runs under one incarnation."""

    up: bool = True
    synced: bool = True
    """False: the reply of a claim was lost, and what it took is not known here."""
    attempts: tuple[Attempt, ...] = ()
    epoch: int = 0
    """Of the mastership that it believes to have."""
    planned: str = ""
    """staged: what it planned is in the database."""


class Left(NamedTuple):
    """What may still happen."""

    replies: int = 0
    """Replies that are lost."""
    crashes: int = 0
    incarnations: int = 0
    """Registrations of new ones."""
    suspicions: int = 0
    """Processes that live and are marked unreachable; those that are dead may always be."""
    evidence: int = 0
    """Nodes that are taken for gone, rightly or not, and lose what others may repeat."""
    cancels: int = 0
    restarts: int = 0


class World(NamedTuple):
    """The database, what everybody believes of it, and what has really happened."""

    db: Database
    processes: tuple[Process, ...]
    left: Left
    begun: tuple[tuple[str, int], ...] = ()
    """How often author code of an AT_MOST_ONCE partition has begun."""
    finished: int = 0
    """How often finish() took effect."""


class Step(NamedTuple):
    """One thing that can happen next."""

    label: str
    world: World
    broken: str = ""
    """The guarantee that this step breaks, and how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What is explored."""

    rules: Rules = RULES
    claims: int = 3
    """More claims of one partition are not looked at."""
    slots: int = 1
    """Attempts that a process has at a time."""
    failures: bool = True
    """Author code may raise."""
    planning: bool = False
    """Masters plan and finish; otherwise the plan is there, and any process looks after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What an exploration has come to."""

    states: int
    steps: int
    broken: str
    trace: tuple[str, ...]
    """The shortest way to the step that broke it; empty if none does."""
    labels: frozenset[str]
    """Kinds of steps that were taken."""
    stuck: tuple[str, ...]
    """The shortest way to a state from which the execution can never end; empty if there is none."""


def start(
    *, delivery: str, nodes: int, left: Left, planning: bool = False, max_attempts: int = 2
) -> World:
    """Nodes that have just registered, and one execution: requested, or with its plan sealed."""
    execution = Execution(
        instance=0, delivery=delivery, max_attempts=max_attempts, has_finish=planning
    )
    rows: tuple[Partition, ...] = ()
    if not planning:
        execution = execution._replace(status="RUNNING", total=len(KEYS), master=0, epoch=1)
        rows = tuple(Partition(execution=0, key=key, delivery=delivery) for key in KEYS)
    db = Database(
        nodes=(model.Node(),) * nodes,
        executions=(execution,),
        partitions=rows,
        instances=(("RUNNING", 0),),
    )
    return World(db=db, processes=(Process(),) * nodes, left=left)


def explore(world: World, scope: Scope) -> Found:
    """Visit every state that can be reached; stop at the first broken guarantee."""
    first = canonical(world)
    came_from: dict[World, World | None] = {first: None}
    leads_to: dict[World, list[World]] = {}
    labels: set[str] = set()
    steps = 0
    known: dict[World, World] = {}
    layer = [first]
    while layer:
        following: list[World] = []
        for here in layer:
            after = leads_to[here] = []
            for step in successors(here, scope):
                steps += 1
                labels.add(step.label.partition(":")[2].strip().partition(" of ")[0])
                broken = step.broken or _broken_between(here, step.world)
                if broken:
                    trace = _way(world, _path(came_from, here), scope, broken)
                    return Found(
                        states=len(came_from),
                        steps=steps,
                        broken=broken,
                        trace=trace,
                        labels=frozenset(labels),
                        stuck=(),
                    )
                there = known.get(step.world)
                if there is None:
                    there = known[step.world] = canonical(step.world)
                after.append(there)
                if there not in came_from:
                    came_from[there] = here
                    following.append(there)
        layer = following
    stuck = _stuck(came_from, leads_to, scope)
    return Found(
        states=len(came_from),
        steps=steps,
        broken="",
        trace=(),
        labels=frozenset(labels),
        stuck=_way(world, _path(came_from, stuck), scope, "") if stuck else (),
    )


# -- what can happen -----------------------------------------------------------------------------------------


def successors(world: World, scope: Scope) -> Iterator[Step]:
    """Everything that can happen next."""
    for number, process in enumerate(world.processes):
        if process.up:
            yield from _claims(world, number, scope)
            yield from _attempts(world, number, scope)
            yield from _membership(world, number, scope)
            yield from (_mastership if scope.planning else _care)(world, number, scope)
    yield from _detection(world)
    yield from _people(world, scope)


def _claims(world: World, number: int, scope: Scope) -> Iterator[Step]:
    db, process = world.db, world.processes[number]
    busy = sum(a.phase in {"held", "running"} for a in process.attempts)
    if process.synced and busy < scope.slots:
        for row in model.claimable(db, number):
            if db.partitions[row].claims >= scope.claims:
                continue
            after = model.claim(db, number, [row], rules=scope.rules)
            token = after.partitions[row].claims
            what = f"n{number}: claims partition {_name(db, row)}"
            held = (*process.attempts, Attempt(row, token, "held"))
            yield Step(what, _with(world, number, after, attempts=held))
            if world.left.replies:
                yield Step(f"{what}, reply lost", _lost(world, number, after, synced=False))
    if not process.synced:
        known = {(a.row, a.token) for a in process.attempts}
        unknown = [one for one in model.claims_of(db, number).items() if one not in known]
        found = tuple(Attempt(row, token, "unstarted") for row, token in unknown)
        yield Step(
            f"n{number}: compares what it holds",
            _with(world, number, db, synced=True, attempts=(*process.attempts, *found)),
        )


def _attempts(world: World, number: int, scope: Scope) -> Iterator[Step]:
    db, process = world.db, world.processes[number]
    for index, attempt in enumerate(process.attempts):
        row = db.partitions[attempt.row]
        if attempt.phase == "held":
            begun, broken = _begin(world, row, attempt)
            running = model._put(process.attempts, index, attempt._replace(phase="running"))
            after = _with(world, number, db, attempts=running)._replace(begun=begun)
            yield Step(f"n{number}: begins partition {_name(db, attempt.row)}", after, broken)
            yield from _send(world, number, index, "unstarted", scope)
        elif attempt.phase == "running":
            yield from _send(world, number, index, "completing", scope)
            if scope.failures:
                yield from _send(world, number, index, "failing", scope)
            if row.delivery == "AT_LEAST_ONCE":
                yield from _send(world, number, index, "releasing", scope)
                yield from _commit(world, number, index, scope)
        else:
            yield from _send(world, number, index, attempt.phase, scope)


def _begin(
    world: World, row: Partition, attempt: Attempt
) -> tuple[tuple[tuple[str, int], ...], str]:
    """Author code begins: the count of starts afterwards, and what that breaks."""
    holders = sum(
        (a.row, a.token) == (attempt.row, attempt.token)
        for process in world.processes
        for a in process.attempts
    )
    if holders > 1:
        return world.begun, "G1: two processes hold one claim"
    if row.delivery == "AT_LEAST_ONCE":
        return world.begun, ""
    counts = dict(world.begun)
    counts[row.key] = counts.get(row.key, 0) + 1
    broken = f"G5: partition {row.key} was started twice" if counts[row.key] > 1 else ""
    return tuple(sorted(counts.items())), broken


def _commit(world: World, number: int, index: int, scope: Scope) -> Iterator[Step]:
    """The author's transaction commits with the completion in it; the answer may be lost."""
    process = world.processes[number]
    attempt = process.attempts[index]
    if not scope.rules.tokens:
        return  # there is no fence then
    db, kept = model.commit(world.db, attempt.row, attempt.token, "completion", None)
    what = f"n{number}: commits in partition {_name(world.db, attempt.row)}"
    rest = _without(process.attempts, index)
    broken = _accepted(world, attempt) if kept else ""
    yield Step(what, _with(world, number, db, attempts=rest), broken)
    if world.left.replies:
        doubt = model._put(process.attempts, index, attempt._replace(phase="releasing"))
        yield Step(f"{what}, reply lost", _lost(world, number, db, attempts=doubt), broken)


def _send(world: World, number: int, index: int, phase: str, scope: Scope) -> Iterator[Step]:
    """The write that ends an attempt; without an answer it stays, to be sent again."""
    process = world.processes[number]
    attempt = process.attempts[index]
    row, token = attempt.row, attempt.token
    before = world.db
    if phase == "completing":
        db, answer = model.complete(before, number, row, token, None, rules=scope.rules)
    elif phase == "failing":
        db, answer = model.fail(before, number, row, token, "retry")
    else:
        db, answer = model.release(before, number, row, token, unstarted=phase == "unstarted")
    what = f"n{number}: {phase} partition {_name(before, row)}: {answer}"
    broken = _accepted(world, attempt) if db != before else ""
    rest = _without(process.attempts, index)
    yield Step(what, _with(world, number, db, attempts=rest), broken)
    if world.left.replies and db != before:
        again = model._put(process.attempts, index, attempt._replace(phase=phase))
        yield Step(f"{what}, reply lost", _lost(world, number, db, attempts=again), broken)


def _accepted(world: World, attempt: Attempt) -> str:
    """A write of this attempt has changed something: may it?"""
    row = world.db.partitions[attempt.row]
    if row.status == "CLAIMED" and row.claims == attempt.token:
        return ""
    return f"G3: claim {attempt.token} of partition {row.key} was gone, and its write counted"


def _membership(world: World, number: int, scope: Scope) -> Iterator[Step]:
    db, alive = model.beat(world.db, number, rules=scope.rules)
    process = world.processes[number]
    if not alive:
        # AT_LEAST_ONCE work ends; what runs on of the other kind is refused whatever it writes.
        if not any(a.phase == "running" and _once(world.db, a) for a in process.attempts):
            yield Step(f"n{number}: hears that it was removed", _gone(world, number))
    elif db.nodes[number].status != world.db.nodes[number].status:
        yield Step(f"n{number}: beats", _with(world, number, db))
    idle = process.synced and not process.attempts and not process.epoch
    if alive and idle and scope.rules.incarnations:
        after, _ = model.deregister(world.db, number)
        yield Step(f"n{number}: leaves", _gone(world._replace(db=after), number))
    if world.left.crashes:
        left = world.left._replace(crashes=world.left.crashes - 1)
        if scope.rules.incarnations:
            yield Step(f"n{number}: crashes", _gone(world, number)._replace(left=left))
        else:  # its name comes back at once, and beats for it
            again = _with(world, number, world.db, attempts=(), synced=True, epoch=0)
            yield Step(f"n{number}: crashes, starts again", again._replace(left=left))


def _once(db: Database, attempt: Attempt) -> bool:
    return db.partitions[attempt.row].delivery == "AT_MOST_ONCE"


def _care(world: World, number: int, scope: Scope) -> Iterator[Step]:
    """Whoever is the master looks after the execution; who it is does not matter here."""
    if scope.rules.incarnations and model.recover(world.db)[0] != world.db:
        yield Step(f"n{number}: recovers", world._replace(db=model.recover(world.db)[0]))
    for execution, e in enumerate(world.db.executions):
        if not scope.rules.takeover:
            lost = model.lose_master(world.db, execution)
            if lost != world.db:
                what = f"n{number}: fails execution {execution}, whose master is lost"
                yield Step(what, world._replace(db=lost))
        db, status = model.advance(world.db, execution, e.epoch)
        if db != world.db:
            what = f"n{number}: looks after execution {execution}: {status}"
            yield Step(what, world._replace(db=db))


def _mastership(world: World, number: int, scope: Scope) -> Iterator[Step]:
    db, process = world.db, world.processes[number]
    if model.recover(db)[0] != db:
        yield Step(f"n{number}: recovers", world._replace(db=model.recover(db)[0]))
    last = len(db.executions) - 1
    # Of the one that waits, or again of its own whose answer was lost.
    wanted = last if not process.epoch and last in model.masterships_of(db, number) else None
    if not process.epoch:
        after, taken = model.adopt(db, number, wanted)
        if taken is not None:
            what = f"n{number}: adopts execution {taken[0]}"
            yield Step(what, _with(world, number, after, epoch=taken[1], planned=""))
            if world.left.replies:
                yield Step(f"{what}, reply lost", _lost(world, number, after))
        return
    e, epoch = db.executions[last], process.epoch
    if process.planned == "":
        # The plans of two masters need not be alike.
        keys = KEYS if epoch == 1 else KEYS[::-1]
        after, kept = model.stage(db, last, epoch, 0, keys)
        yield from _answered(
            world,
            number,
            f"stages its plan: {kept}",
            after,
            planned="staged" if kept else "refused",
        )
    elif process.planned == "staged":
        after, outcome = model.seal(db, last, epoch, len(KEYS))
        yield from _answered(world, number, f"seals its plan: {outcome}", after, planned="sealed")
    if process.planned != "":
        after, status = model.advance(db, last, epoch)
        over = status in ENDED or status == "SUPERSEDED"
        if over or after != db:
            changes = {"epoch": 0, "planned": ""} if over else {}
            yield from _answered(world, number, f"looks: {status}", after, **changes)
    if e.status == "FINISHING" and process.planned != "":
        after, status = model.finish(db, last, epoch, epoch)
        finished = world.finished + (after != db)
        broken = "G7: finish() took effect twice" if finished > 1 else ""
        for step in _answered(world, number, f"finishes: {status}", after, epoch=0, planned=""):
            yield step._replace(world=step.world._replace(finished=finished), broken=broken)


def _answered(world: World, number: int, what: str, db: Database, **changes: Any) -> Iterator[Step]:
    label = f"n{number}: {what}"
    yield Step(label, _with(world, number, db, **changes))
    if world.left.replies and db != world.db:
        yield Step(f"{label}, reply lost", _lost(world, number, db))


def _detection(world: World) -> Iterator[Step]:
    """Somebody suspects somebody, rightly or not."""
    db, left = world.db, world.left
    for number, node in enumerate(db.nodes):
        if node.status == "ACTIVE" and (left.suspicions or not world.processes[number].up):
            marked, _ = model.mark_unreachable(db, number, node.beat)
            wrong = world.processes[number].up
            fewer = left._replace(suspicions=left.suspicions - wrong)
            yield Step(f"n{number}: is marked unreachable", world._replace(db=marked, left=fewer))
        if node.status != "REMOVED" and left.evidence:
            taken, evident = model.recover_by_evidence(db, number, node.beat)
            if evident.acted:
                fewer = left._replace(evidence=left.evidence - 1)
                yield Step(f"n{number}: is taken for gone", world._replace(db=taken, left=fewer))
        if node.status == "UNREACHABLE":
            for locked in (frozenset[int](), frozenset({len(db.executions) - 1})):
                gone, _ = model.remove_node(db, number, node.beat, locked)
                if not locked or not gone.nodes[number].recovered:
                    kept = ", its claims are left for later" if locked else ""
                    yield Step(f"n{number}: is removed{kept}", world._replace(db=gone))


def _people(world: World, scope: Scope) -> Iterator[Step]:
    db, left = world.db, world.left
    last = len(db.executions) - 1
    if left.incarnations:
        number = len(db.nodes)
        yield Step(
            f"n{number}: registers",
            world._replace(
                db=model.register(db, number),
                processes=(*world.processes, Process()),
                left=left._replace(incarnations=left.incarnations - 1),
            ),
        )
    if left.cancels and db.executions[last].status not in ENDED:
        fewer = left._replace(cancels=left.cancels - 1)
        asked = model.request_cancel(db, last)
        yield Step(f"somebody: half-cancels execution {last}", world._replace(db=asked, left=fewer))
        done, _ = model.cancel(db, last)
        yield Step(f"somebody: cancels execution {last}", world._replace(db=done, left=fewer))
    if left.restarts and db.executions[last].status in {"FAILED", "CANCELLED"}:
        again, answer = model.restart(db, last, rules=scope.rules)
        if answer == "restarted":
            yield Step(
                f"somebody: restarts execution {last}",
                world._replace(db=again, left=left._replace(restarts=left.restarts - 1)),
            )


# -- what must hold -------------------------------------------------------------------------------------------


def _broken_between(before: World, after: World) -> str:
    """The guarantee that a step between these two breaks, whoever took it."""
    for old, new in zip(before.db.partitions, after.db.partitions, strict=False):
        if old.status in OVER and old != new:
            return f"G2: a terminal partition has changed: {old.status} to {new.status}"
    for number, e in enumerate(after.db.executions):
        old_status = (
            before.db.executions[number].status if number < len(before.db.executions) else ""
        )
        if old_status in ENDED and e != before.db.executions[number]:
            return f"G2: an execution that has ended has changed: {old_status} to {e.status}"
        rows = [p for p in after.db.partitions if p.execution == number]
        if e.total is not None and e.carried + len(rows) != e.total:
            return f"G7: the plan of execution {number} has {len(rows)} partitions, not {e.total}"
        if e.status == "COMPLETED":
            failed = sum(p.status == "FAILED" for p in rows)
            if any(p.status not in OVER for p in rows) or failed > (e.max_failed or 0):
                return f"G7: execution {number} is COMPLETED over {[p.status for p in rows]}"
    return ""


def _stuck(
    came_from: dict[World, World | None], leads_to: dict[World, list[World]], scope: Scope
) -> World | None:
    """A state that no way leads out of to the end of its last execution; None: there is none."""
    leads_from: dict[World, list[World]] = {}
    for here, after in leads_to.items():
        for there in after:
            leads_from.setdefault(there, []).append(here)
    good = [w for w in came_from if w.db.executions[-1].status in ENDED or _exhausted(w, scope)]
    seen = set(good)
    while good:
        for here in leads_from.get(good.pop(), ()):
            if here not in seen:
                seen.add(here)
                good.append(here)
    return next((w for w in came_from if w not in seen), None)


def _exhausted(world: World, scope: Scope) -> bool:
    """Whether it is the bounds of this exploration that keep it from going on."""
    if any(p.status == "PENDING" and p.claims >= scope.claims for p in world.db.partitions):
        return True
    return not world.left.incarnations and not any(
        process.up and world.db.nodes[number].status != "REMOVED"
        for number, process in enumerate(world.processes)
    )


# -- worlds ---------------------------------------------------------------------------------------------------


def _with(world: World, number: int, db: Database, **changes: Any) -> World:
    changed = world.processes[number]._replace(**changes)
    return world._replace(db=db, processes=model._put(world.processes, number, changed))


def _lost(world: World, number: int, db: Database, **changes: Any) -> World:
    fewer = world.left._replace(replies=world.left.replies - 1)
    return _with(world, number, db, **changes)._replace(left=fewer)


def _gone(world: World, number: int) -> World:
    process = Process(up=False, synced=True)
    return world._replace(processes=model._put(world.processes, number, process))


def _without(attempts: tuple[Attempt, ...], index: int) -> tuple[Attempt, ...]:
    return (*attempts[:index], *attempts[index + 1 :])


def _name(db: Database, row: int) -> str:
    p = db.partitions[row]
    return p.key if p.execution == 0 else f"{p.key} of execution {p.execution}"


# -- the alike --------------------------------------------------------------------------------------------------


def canonical(world: World) -> World:
    """The same world under the names that nodes and partitions get from what they are like.

    What is like what is told by hashes: two that collide would be looked at twice, no more.
    """
    world = _forget_beats(world)
    orders = list(product(_node_orders(world), _key_orders(world)))
    renamed = [_renamed(world, nodes, keys) for nodes, keys in orders]
    return renamed[0] if len(renamed) == 1 else min(renamed, key=hash)


def _forget_beats(world: World) -> World:
    """Whoever is suspected is suspected by its present beat, so that the number does not matter."""
    if not any(node.beat for node in world.db.nodes):
        return world
    nodes = tuple(node._replace(beat=0) for node in world.db.nodes)
    return world._replace(db=world.db._replace(nodes=nodes))


def _node_orders(world: World) -> list[tuple[int, ...]]:
    masters = [e.master for e in world.db.executions]
    likeness = [
        hash(
            (
                node,
                process[:2],
                process[3:],
                frozenset((a.token, a.phase) for a in process.attempts),
                tuple(master == number for master in masters),
                sum(p.owner == number for p in world.db.partitions),
            )
        )
        for number, (node, process) in enumerate(zip(world.db.nodes, world.processes, strict=True))
    ]
    return _orders(likeness)


def _key_orders(world: World) -> list[tuple[str, ...]]:
    begun = dict(world.begun)
    likeness = [
        hash(
            (
                tuple(p[2:4] + p[5:] for p in world.db.partitions if p.key == key),
                begun.get(key, 0),
            )
        )
        for key in KEYS
    ]
    return [tuple(KEYS[i] for i in order) for order in _orders(likeness)]


def _orders(likeness: list[int]) -> list[tuple[int, ...]]:
    """All orders by likeness; those that are alike, in each order among themselves."""
    order = sorted(range(len(likeness)), key=likeness.__getitem__)
    if len(set(likeness)) == len(likeness):
        return [tuple(order)]
    groups = [list(group) for _, group in groupby(order, key=likeness.__getitem__)]
    parts = product(*(permutations(group) for group in groups))
    return [tuple(chain.from_iterable(chosen)) for chosen in parts]


def _renamed(world: World, nodes: tuple[int, ...], keys: tuple[str, ...]) -> World:
    db = world.db
    if nodes == tuple(range(len(nodes))) and keys == KEYS:
        return _sorted(world)
    node = {old: new for new, old in enumerate(nodes)}
    key = {old: KEYS[new] for new, old in enumerate(keys)}
    renamed = [p._replace(key=key[p.key], owner=_of(node, p.owner)) for p in db.partitions]
    order = sorted(range(len(renamed)), key=lambda i: (renamed[i].execution, renamed[i].key))
    row = {old: new for new, old in enumerate(order)}
    return world._replace(
        db=db._replace(
            nodes=tuple(db.nodes[i] for i in nodes),
            executions=tuple(e._replace(master=_of(node, e.master)) for e in db.executions),
            partitions=tuple(renamed[i] for i in order),
            starts=frozenset(s._replace(key=key[s.key], row=row[s.row]) for s in db.starts),
        ),
        processes=tuple(
            world.processes[i]._replace(
                attempts=tuple(
                    sorted(a._replace(row=row[a.row]) for a in world.processes[i].attempts)
                )
            )
            for i in nodes
        ),
        begun=tuple(sorted((key[k], n) for k, n in world.begun)),
    )


def _sorted(world: World) -> World:
    """Nobody has another name; what a process holds has no order."""
    if all(len(process.attempts) < 2 for process in world.processes):
        return world
    return world._replace(
        processes=tuple(p._replace(attempts=tuple(sorted(p.attempts))) for p in world.processes)
    )


def _of(names: dict[int, int], number: int | None) -> int | None:
    return None if number is None else names[number]


# -- ways -------------------------------------------------------------------------------------------------------


def _path(came_from: dict[World, World | None], end: World) -> list[World]:
    path = [end]
    while (before := came_from[path[-1]]) is not None:
        path.append(before)
    return path[::-1]


def _way(world: World, path: list[World], scope: Scope, broken: str) -> tuple[str, ...]:
    """The steps along a path of canonical worlds, told from one world under its own names."""
    labels: list[str] = []
    for target in path[1:]:
        step = next(s for s in successors(world, scope) if canonical(s.world) == target)
        labels.append(step.label)
        world = step.world
    if broken:
        kind = broken.partition(":")[0]
        last = next(
            s
            for s in successors(world, scope)
            if (s.broken or _broken_between(world, s.world)).startswith(kind)
        )
        labels.append(last.label)
    return tuple(labels)
