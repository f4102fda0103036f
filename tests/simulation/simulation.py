"""Whole histories of a cluster in virtual time: one seed, one schedule, the real SQL.

Nodes are virtual: each has a clock of its own, beats, looks at its peers with the real `Observer`, claims, runs
author code that is nothing but a note in a ledger, drives executions, and believes what it was told. The
database is real, and so is every statement. Fate pauses and kills nodes, loses answers, restarts the server,
sets its clock, cancels, suspends and restarts executions, and delivers statements late.

After every statement `Lockstep` compares the database with the model and checks I1-I8 (`invariants`). At the
end the faults cease, and O1-O3 must come true: work is done and accepted once, nothing terminal has changed,
and everything comes to an end.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar
from uuid import UUID

from rowlock.protocol import ownership
from rowlock.protocol.backoff import delay_seconds
from rowlock.protocol.liveness import MarkUnreachable, Observer, Remove, SeekEvidence
from rowlock.protocol.model import Claim
from tests.simulation.invariants import Ledger
from tests.simulation.lockstep import Lockstep, Transaction
from tests.simulation.model import ENDED, Execution
from tests.support.builders import a_policy

T = TypeVar("T")

BEAT_SECONDS: Final = 1.0
UNREACHABLE_SECONDS: Final = 1.6
GRACE_SECONDS: Final = 1.4
LEASE_SECONDS: Final = UNREACHABLE_SECONDS + GRACE_SECONDS - 0.5
SLOTS: Final = 2
PROCESSES_MAX: Final = 4
CHAOS_TURNS: Final = 85
"""Turns of nodes and of fate before the faults cease."""
WARM_STATEMENTS_MAX: Final = 40
QUIET_TURNS_MAX: Final = 600
MASTERLESS_SECONDS_MAX: Final = 40.0
"""I7, once faults are over: removal by silence, and what a busy node needs to adopt."""
HISTORY_SECONDS: Final = 3600.0
"""The database's clock begins here, so that it can be set back."""


class NoAnswer(Exception):
    """The connection broke: the statement was carried out, or not."""


@dataclass(slots=True, eq=False)
class Attempt:
    """What a process believes to hold, or has begun and cannot stop."""

    claim: Claim
    node: UUID
    began: bool = False
    orphan: bool = False
    """AT_MOST_ONCE work that runs on after its node was removed."""
    transaction: Transaction | None = None


@dataclass(slots=True)
class Mastership:
    """An execution that a process believes to drive."""

    execution: int
    epoch: int
    keys: list[str]
    staged: int = 0
    """Chunks that are in the database."""
    planned: bool = False
    """There is nothing left to plan."""
    status: str = ""
    """What its last look showed."""


class Process:
    """A virtual node: what it knows, and what it does in its turn."""

    def __init__(self, world: Simulation, skew: float) -> None:
        self._world = world
        self._rng = world.rng
        self._skew = skew
        self.alive = True
        self.draining = False
        self.left = False
        self.broken = False
        """Its connections are gone: the next statement has no answer."""
        self.asleep = False
        """It begins its next turn as if no time had passed."""
        self.next_turn = world.now
        self.pending: list[Callable[[], object]] = []
        """Writes that are sent until the database answers."""
        self.attempts: list[Attempt] = []
        self._observer = Observer(
            beat_seconds=BEAT_SECONDS,
            unreachable_seconds=UNREACHABLE_SECONDS,
            removal_grace_seconds=GRACE_SECONDS,
        )
        self._connection: int | None = world.rng.choice((None, 1, 1))
        """None: it seeks no evidence."""
        self._beat_at = self.clock
        self._begin_anew()

    @property
    def clock(self) -> float:
        """Its own monotonic clock."""
        return self._world.now + self._skew

    def turn(self) -> None:
        """Do one thing."""
        try:
            if self.asleep and self.attempts and self._rng.random() < 0.7:
                writing = [a for a in self.attempts if a.transaction is not None]
                self._go_on(self._rng.choice(writing or self.attempts))
            elif not self._registered:
                self._register()
            elif self.clock >= self._beat_at:
                self._beat()
            else:
                self._work()
        except NoAnswer:
            self._synced = False
        self.asleep = False
        self.next_turn = self._world.now + self._rng.uniform(0.1, 0.6)

    def die(self) -> None:
        """A kill: nothing is told to anybody."""
        self.alive = False
        for attempt in self.attempts:
            self._roll_back(attempt)

    def lose_connections(self) -> None:
        """The server restarts."""
        self.broken = True
        for attempt in self.attempts:
            attempt.transaction = None

    @property
    def at_rest(self) -> bool:
        """Nothing of it is on its way to the database."""
        return not self.pending and not self.attempts

    # -- being a member --------------------------------------------------------------------------------

    def _begin_anew(self) -> None:
        self.node = self._world.a_uuid()
        self._registered = False
        self._synced = True
        self._beat_at = self.clock
        self._lease_until = self.clock
        self._claimable = True
        self._adoptable = True
        self._driven: dict[int, Mastership] = {}
        self._sent: list[Callable[[], object]] = []

    def _register(self) -> None:
        sent = self.clock
        self._ask(lambda: self._world.db.register(self.node))
        self._registered = True
        self._lease_until = sent + LEASE_SECONDS
        self._beat_at = self.clock

    def _beat(self) -> None:
        db, sent = self._world.db, self.clock
        try:
            answer = self._ask(lambda: db.beat(self.node, draining=self.draining))
        except NoAnswer:
            self._observer.look_failed()
            raise
        if not answer.alive:
            self._removed()
            return
        self._beat_at = sent + BEAT_SECONDS
        self._lease_until = sent + LEASE_SECONDS
        self._claimable = self._claimable or answer.claimable
        self._adoptable = self._adoptable or answer.adoptable
        ended = {db.names.executions.index(id_) for id_ in answer.ended}
        for execution in ended & set(self._driven):
            self._driven[execution].planned = True  # nothing to plan: look at it
        for verdict in self._observer.look(
            sent_at=sent, answered_at=self.clock, peers=answer.peers, connection=self._connection
        ):
            peer, beat = verdict.node_id, verdict.beat
            locked = self._world.a_locked_execution(peer)
            match verdict:
                case MarkUnreachable():
                    mark = partial(db.mark_unreachable, self.node, peer, beat)
                    self._world.suspicions.append(mark)
                    self._ask(mark)
                case Remove():
                    self._ask(partial(db.remove_node, self.node, peer, beat, locked=locked))
                case SeekEvidence():
                    seek = partial(db.recover_by_evidence, self.node, peer, beat)
                    self._world.suspicions.append(seek)
                    self._ask(partial(seek, locked=locked))
        if answer.unrecovered and self._rng.random() < 0.3:
            self._ask(lambda: db.recover(self.node))
        if answer.due:
            self._ask(db.promote)
            self._ask(db.expire)

    def _removed(self) -> None:
        """It hears that it was removed: what may run elsewhere ends, and it begins anew."""
        self.pending.clear()
        for attempt in list(self.attempts):
            self._commit_in_vain(attempt)
            if ownership.outlives_removal(
                at_most_once=attempt.claim.at_most_once, began=attempt.began
            ):
                attempt.orphan = True
            else:
                self.attempts.remove(attempt)
        if self.draining:
            self.left = True
        self._begin_anew()

    # -- what it does between beats ----------------------------------------------------------------------

    def _work(self) -> None:
        if self.pending:
            self._ask(self.pending[0])
            self.pending.pop(0)
            return
        if not self._synced or self._rng.random() < 0.03:
            self._compare()
            return
        choices: list[Callable[[], None]] = [partial(self._go_on, a) for a in self.attempts]
        choices *= 2
        choices += [partial(self._drive, m) for m in self._driven.values()]
        if self.draining:
            if not choices:
                self._leave()
                return
        elif self.clock < self._lease_until:
            planning = [m for m in self._driven.values() if not m.planned]
            if (planning or self._adoptable) and self._rng.random() < 0.5:
                self._drive(planning[0]) if planning else self._adopt()
                return
            if not self._world.quiet and self._rng.random() < 0.05:
                self._adopt(self._world.an_execution())  # as a launch does with its own
                return
            if self._claimable and sum(a.began for a in self.attempts) < SLOTS:
                choices += [self._claim] * 2
        if choices:
            self._rng.choice(choices)()

    def _leave(self) -> None:
        self._ask(lambda: self._world.db.deregister(self.node))
        self.left = True

    def _compare(self) -> None:
        """What the database says it holds and drives, against what it knows of."""
        db = self._world.db
        held = self._ask(lambda: db.claims_of(self.node))
        driven = self._ask(lambda: db.masterships_of(self.node))
        self._synced = True
        mine = {(a.claim.id, a.claim.token): a for a in self.attempts}
        claims = ownership.compare(held, mine)
        for partition, token in claims.unknown:
            self._send(partial(db.release, self.node, partition, token, unstarted=True))
        for claim, attempt in mine.items():
            if claim in claims.gone and not attempt.orphan:
                self._forget(attempt)
        led = ownership.compare(driven, {(e, m.epoch) for e, m in self._driven.items()})
        for execution, _ in led.gone:
            del self._driven[execution]
        for execution, _ in led.unknown:
            if not self.draining:
                self._adopt(execution)  # the answer of the adoption was lost

    # -- attempts ----------------------------------------------------------------------------------------

    def _claim(self) -> None:
        prefetch = self._rng.choice((0, 0, 2))
        slots = SLOTS - len(self.attempts)
        if slots < 1 or not ownership.may_claim(
            claimable=self._claimable,
            synced=self._synced,
            lease_holds=self.clock < self._lease_until,
            draining=self.draining,
            alone=any(a.claim.alone for a in self.attempts),
        ):
            return
        claims = self._ask(
            lambda: self._world.db.claim(
                self.node,
                slots=slots,
                prefetch=prefetch,
                idle=not self.attempts,
                seed=self._rng.getrandbits(62),
            )
        )
        self._claimable = bool(claims)
        self.attempts += [Attempt(claim, self.node) for claim in claims]
        self._world.tempting = any(claim.claims > 1 for claim in claims)

    def _go_on(self, attempt: Attempt) -> None:
        """The next thing that happens in an attempt."""
        if attempt not in self.attempts:
            return
        if not attempt.began:
            self._start(attempt)
        elif attempt.orphan or attempt.claim.at_most_once:
            self._go_on_once(attempt)
        else:
            self._go_on_often(attempt)

    def _start(self, attempt: Attempt) -> None:
        db, claim, node = self._world.db, attempt.claim, attempt.node
        frozen = self.clock >= self._lease_until and not self.asleep
        may = ownership.may_begin(lease_holds=not frozen, draining=self.draining, stopping=False)
        if not may or self._rng.random() < 0.08:
            if claim.at_most_once and not frozen and self._rng.random() < 0.5:
                self._end(attempt, lambda: db.fail(node, claim.id, claim.token, "unstarted", 0.0))
            else:
                self._end(attempt, lambda: db.release(node, claim.id, claim.token, unstarted=True))
        elif sum(a.began for a in self.attempts) < SLOTS:
            attempt.began = True
            self._world.ledger.begin(db.db, *db.names.tokens[claim.token])

    def _go_on_once(self, attempt: Attempt) -> None:
        """AT_MOST_ONCE work knows no lease: it runs on, and tells how it went."""
        db, claim, node = self._world.db, attempt.claim, attempt.node
        draw = self._rng.random()
        if draw < 0.65:
            self._complete(attempt)
        elif draw < 0.8:
            kind = self._rng.choice(("retry", "never", "unknown"))
            self._end(attempt, lambda: db.fail(node, claim.id, claim.token, kind, 0.0))
        elif draw < 0.9:
            self._ask(lambda: db.checkpoint(node, claim.id, claim.token, f"of {claim.claims}"))
        else:  # the database keeps such a claim, whatever is asked
            self._ask(lambda: db.release(node, claim.id, claim.token, unstarted=False))

    def _go_on_often(self, attempt: Attempt) -> None:
        if self.clock >= self._lease_until and not self.asleep:
            return  # frozen
        db, claim, node = self._world.db, attempt.claim, attempt.node
        draw = self._rng.random()
        if attempt.transaction is not None:
            self._end_transaction(attempt)
        elif self.draining or draw < 0.05:
            self._end(attempt, lambda: db.release(node, claim.id, claim.token, unstarted=False))
        elif draw < 0.12:
            self._ask(lambda: db.checkpoint(node, claim.id, claim.token, f"of {claim.claims}"))
        elif draw < 0.5:
            attempt.transaction = self._ask(lambda: db.open(claim.id, claim.token))
        elif draw < 0.62:
            self._fail(attempt)
        else:
            self._complete(attempt)

    def _fail(self, attempt: Attempt) -> None:
        db, claim, node = self._world.db, attempt.claim, attempt.node
        kind = self._rng.choice(("retry", "retry", "retry", "never", "later"))
        delay = self._rng.choice((0.0, 1.0)) * delay_seconds(
            a_policy(), failures=claim.failures + 1, draw=self._rng.random()
        )
        self._end(attempt, lambda: db.fail(node, claim.id, claim.token, kind, delay))

    def _complete(self, attempt: Attempt) -> None:
        db, claim, node = self._world.db, attempt.claim, attempt.node
        self._world.ledger.end(*db.names.tokens[claim.token])

        def write() -> str:
            answer = db.complete(node, claim.id, claim.token, f"of {claim.claims}")
            if answer == "lost" and claim.at_most_once:
                db.record_evidence(claim.id, claim.token)
            return answer

        self._end(attempt, write)

    def _end_transaction(self, attempt: Attempt) -> None:
        db, claim, node = self._world.db, attempt.claim, attempt.node
        transaction = attempt.transaction
        assert transaction is not None
        attempt.transaction = None
        kind = self._rng.choice(("completion", "completion", "checkpoint", "unarmed"))
        if kind == "unarmed":
            self._ask(lambda: db.commit_unarmed(transaction))
            return
        if kind == "completion":
            self._world.ledger.end(*db.names.tokens[claim.token])
        try:
            kept = self._ask(lambda: db.commit(transaction, kind, f"in {claim.claims}"))
        except NoAnswer:
            db.roll_back_if_open(transaction)
            self._end(attempt, lambda: db.release(node, claim.id, claim.token, unstarted=False))
            return
        if not kept or kind == "completion":
            self._forget(attempt)

    def _end(self, attempt: Attempt, write: Callable[[], object]) -> None:
        """The write that ends an attempt, until the database has answered it."""
        self.attempts.remove(attempt)
        self._roll_back(attempt)
        self._send(write)

    def _forget(self, attempt: Attempt) -> None:
        self.attempts.remove(attempt)
        self._commit_in_vain(attempt)

    def _commit_in_vain(self, attempt: Attempt) -> None:
        """Its COMMIT was on its way when the claim was gone; or almost: then it may count."""
        transaction = attempt.transaction
        if transaction is not None and self._rng.random() < 0.7:
            attempt.transaction = None
            claim = attempt.claim
            self._world.ledger.end(*self._world.db.names.tokens[claim.token])
            self._world.db.commit(transaction, "completion", f"late in {claim.claims}")
        self._roll_back(attempt)

    def _roll_back(self, attempt: Attempt) -> None:
        if attempt.transaction is not None:
            self._world.db.roll_back(attempt.transaction)
            attempt.transaction = None

    # -- masterships -------------------------------------------------------------------------------------

    def _adopt(self, execution: int | None = None) -> None:
        taken = self._ask(lambda: self._world.db.adopt(self.node, execution))
        if execution is None:
            self._adoptable = taken is not None  # where one waited, more may
        if taken is not None:
            number, epoch = taken
            self._driven[number] = Mastership(
                number,
                epoch,
                self._world.a_plan(number),
                planned=self._world.db.db.executions[number].total is not None,
            )

    def _drive(self, mastership: Mastership) -> None:
        db, execution, epoch = self._world.db, mastership.execution, mastership.epoch
        if self.draining:
            del self._driven[execution]
            self._send(partial(db.resign, self.node, execution, epoch))
        elif not mastership.planned:
            self._plan(mastership)
        elif mastership.status == "FINISHING":
            reason = self._rng.choice((None, None, None, "FinishFailed"))
            self._end_mastership(
                mastership, self._ask(lambda: db.finish(execution, epoch, f"of {epoch}", reason))
            )
        else:
            status = self._ask(lambda: db.advance(self.node, execution, epoch))
            mastership.status = status
            self._end_mastership(mastership, status)

    def _plan(self, mastership: Mastership) -> None:
        db, execution, epoch = self._world.db, mastership.execution, mastership.epoch
        keys = mastership.keys
        half = len(keys) // 2
        chunks = [keys[:half], keys[half:]]
        if self._rng.random() < 0.04:
            self._ask(lambda: db.fail_plan(self.node, execution, epoch))
            mastership.planned = True
        elif mastership.staged < 2:
            number = mastership.staged
            kept = self._ask(lambda: db.stage(execution, epoch, number, chunks[number]))
            mastership.staged += 1
            mastership.planned = not kept
        else:
            self._ask(lambda: db.seal(execution, epoch, len(keys)))
            mastership.planned = True

    def _end_mastership(self, mastership: Mastership, status: str) -> None:
        if status in ENDED or status == "SUPERSEDED":
            del self._driven[mastership.execution]

    # -- statements --------------------------------------------------------------------------------------

    def _send(self, write: Callable[[], object]) -> None:
        """Repeat a write until it is answered, and remember it: it may arrive once more, late."""
        self._world.late.append(write)
        self.pending.append(write)
        self._work()

    def _ask(self, statement: Callable[[], T]) -> T:
        """Carry out a statement; the answer may be lost, before or after it took effect."""
        world = self._world
        if world.outage_until > world.now:
            raise NoAnswer
        broken, self.broken = self.broken, False
        draw = 0.0 if world.quiet else self._rng.random()
        if broken or draw > 0.93:
            if self._rng.random() < 0.6:
                statement()
            raise NoAnswer
        return statement()


@dataclass(slots=True)
class Simulation:
    """One history."""

    db: Lockstep
    seed: int
    once: bool = False
    """Only AT_MOST_ONCE work, and a restart of whatever has failed."""
    rng: random.Random = field(init=False)
    now: float = 0.0
    """True time, seconds; nobody reads it but through a clock of his own."""
    db_skew: float = HISTORY_SECONDS * 10
    outage_until: float = 0.0
    quiet: bool = False
    tempting: bool = False
    """Somebody holds what another has held before: the moment for a zombie to write."""
    ledger: Ledger = field(default_factory=Ledger)
    processes: list[Process] = field(default_factory=list[Process])
    late: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])
    """Writes that were sent once, and may be delivered again."""
    suspicions: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])
    """The same of what observers have concluded."""
    _next_fate: float = 0.0
    _instances: int = 0
    _masterless: dict[int, float] = field(default_factory=dict[int, float])

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.db.begin()

    def run(self) -> None:
        """The whole history.

        Raises:
            AssertionError: The database did what the protocol does not.
        """
        self._tick(0.0)
        for _ in range(self.rng.choice((2, 3, 3))):
            self._start_process()
        for _ in range(self.rng.choice((1, 2))):
            self._request()
        if self.rng.random() < 0.8:
            self._warm_up()
        for _ in range(CHAOS_TURNS):
            self._turn()
        self._cease()
        self._settle_down()
        if self.once or self.rng.random() < 0.5:
            self._restart()
            self._settle_down()

    def _settle_down(self) -> None:
        """Until nothing is left to do.

        Raises:
            AssertionError: Something is left for ever, or was done by nobody.
        """
        for _ in range(QUIET_TURNS_MAX):
            if self._is_over:
                break
            self._turn()
            self._check_masters()
        assert self._is_over, f"O3: it does not come to an end: {self.db.db}"
        self.ledger.check_end(self.db.db)

    def _warm_up(self) -> None:
        """Until there is work to disturb."""
        self.quiet = True
        while not self.db.db.partitions and len(self.db.trace) < WARM_STATEMENTS_MAX:
            self._turn()
        self.quiet = False
        self._next_fate = self.now

    # -- time --------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        if self.tempting:
            self.tempting = False
            self._write_as_a_zombie()  # also in quiet times: it must change nothing
        actor = min(
            (p for p in self.processes if p.alive and not p.left),
            key=lambda p: p.next_turn,
            default=None,
        )
        if not self.quiet and (actor is None or self._next_fate < actor.next_turn):
            self._tick(self._next_fate)
            self._next_fate = self.now + self.rng.uniform(0.1, 0.6)
            self.rng.choice(self._fates())()
        elif actor is not None:
            self._tick(max(self.now, actor.next_turn))
            actor.turn()

    def _tick(self, now: float) -> None:
        self.now = now
        self.db.now = round((now + self.db_skew) * 1e6)

    # -- what processes ask of the world -------------------------------------------------------------------

    def a_uuid(self) -> UUID:
        """A new identity."""
        return UUID(int=self.rng.getrandbits(128), version=4)

    def a_plan(self, execution: int) -> list[str]:
        """The keys of a plan, in the order in which this master happens to find them."""
        keys = [f"p{n}" for n in range(4 - self.db.db.executions[execution].instance)]
        self.rng.shuffle(keys)
        return keys

    def an_execution(self) -> int:
        """Any of them."""
        return self.rng.randrange(len(self.db.db.executions))

    def a_locked_execution(self, node: UUID) -> int | None:
        """An execution of which this node has claims, and whose row somebody holds just now."""
        number = self.db.number(node)
        held = [
            p.execution
            for p in self.db.db.partitions
            if p.status == "CLAIMED" and p.owner == number
        ]
        return self.rng.choice(held) if held and self.rng.random() < 0.7 else None

    # -- fate ----------------------------------------------------------------------------------------------

    def _fates(self) -> list[Callable[[], None]]:
        often = [self._pause] * 2 + [self._deliver_late] * 2 + [self._write_as_a_zombie] * 6
        often += [self._write_as_an_old_master] * 3 + [self._take_for_gone] * 2
        often += [self._suspect_late]
        seldom = [
            self._kill,
            self._start_process,
            self._start_process,
            self._restart_server,
            self._set_clock,
            self._drain,
            self._request,
            self._verb,
            self._verb,
            self._restart,
        ]
        return often + seldom

    def _living(self) -> list[Process]:
        return [p for p in self.processes if p.alive and not p.left]

    def _victim(self) -> Process | None:
        """Somebody; by preference in the middle of something."""
        living = self._living()
        busy = [p for p in living if any(a.began for a in p.attempts)]
        writing = [p for p in living if any(a.transaction for a in p.attempts)]
        chosen = (writing or busy or living) if self.rng.random() < 0.7 else living
        return self.rng.choice(chosen) if chosen else None

    def _pause(self) -> None:
        if victim := self._victim():
            victim.next_turn = self.now + self.rng.uniform(1.0, 7.0)
            victim.asleep = True

    def _kill(self) -> None:
        if victim := self._victim():
            victim.die()

    def _take_for_gone(self) -> None:
        """Evidence about somebody who lives and works: nothing in the database may rest on its truth."""
        victim = self._victim()
        if victim is not None and victim.node in self.db.names.nodes:
            beat = self.db.db.nodes[self.db.number(victim.node)].beat
            beat -= self.rng.choice((0, 0, 1))  # it has beaten since: then it must change nothing
            locked = self.a_locked_execution(victim.node)
            self.db.recover_by_evidence(self.a_uuid(), victim.node, beat, locked=locked)

    def _drain(self) -> None:
        if victim := self._victim():
            victim.draining = True

    def _start_process(self) -> None:
        if len(self._living()) < PROCESSES_MAX:
            self.processes.append(Process(self, self.rng.uniform(0, 1e6)))

    def _restart_server(self) -> None:
        self.outage_until = self.now + self.rng.choice((0.0, 0.5, 5.0))
        for process in self._living():
            process.lose_connections()
        self.db.forget_transactions()

    def _set_clock(self) -> None:
        self.db_skew += self.rng.choice((-HISTORY_SECONDS, HISTORY_SECONDS))
        self._tick(self.now)

    def _deliver_late(self) -> None:
        """A statement arrives that somebody gave up waiting for, or had sent before."""
        if self.late:
            self.rng.choice(self.late)()

    def _suspect_late(self) -> None:
        """A conclusion arrives when its peer has beaten again."""
        if self.suspicions:
            self.rng.choice(self.suspicions)()

    def _write_as_a_zombie(self) -> None:
        """Somebody writes under a claim that it has lost, whatever it has heard since."""
        kinds: dict[tuple[bool, bool, bool], list[tuple[UUID, Claim]]] = {}
        for node, claim in self.db.taken:
            row, number = self.db.names.tokens[claim.token]
            partition = self.db.db.partitions[row]
            member = self.db.db.nodes[self.db.number(node)].status != "REMOVED"
            stands = partition.status == "CLAIMED" and partition.claims == number
            if not (stands and member):
                claimed = partition.status == "CLAIMED"
                kinds.setdefault((member, claimed, stands), []).append((node, claim))
        if not kinds:
            return
        another_holds_it = kinds.get((True, True, False))
        chosen = self.rng.choice(list(kinds.values()))
        if another_holds_it and self.rng.random() < 0.5:
            chosen = another_holds_it
        node, claim = self.rng.choice(chosen)
        db, id_, token = self.db, claim.id, claim.token
        writes: list[Callable[[], object]] = [
            lambda: db.complete(node, id_, token, f"of a zombie {claim.claims}"),
            lambda: db.fail(node, id_, token, self.rng.choice(("retry", "never")), 0.0),
            lambda: db.release(node, id_, token, unstarted=self.rng.random() < 0.5),
            lambda: db.checkpoint(node, id_, token, f"of a zombie {claim.claims}"),
        ]
        self.rng.choice(writes)()

    def _write_as_an_old_master(self) -> None:
        """Somebody writes under an epoch that may be over."""
        db = self.db
        node, execution, epoch = self.rng.choice(db.driven or [(UUID(int=0), -1, 0)])
        if execution < 0 or db.db.executions[execution].epoch == epoch:
            return
        writes: list[Callable[[], object]] = [
            lambda: db.stage(execution, epoch, 7, ["late"]),
            lambda: db.seal(execution, epoch, 1),
            lambda: db.advance(node, execution, epoch),
            lambda: db.finish(execution, epoch, "late", None),
            lambda: db.fail_plan(node, execution, epoch),
            lambda: db.resign(node, execution, epoch),
            lambda: db.adopt(node, execution),
        ]
        self.rng.choice(writes)()

    def _request(self) -> None:
        if self._instances >= 3:
            return
        rng = self.rng
        delivery = rng.choice(("AT_LEAST_ONCE", "AT_LEAST_ONCE", "AT_MOST_ONCE"))
        self.db.request(
            self.a_uuid(),
            Execution(
                instance=self._instances,
                delivery="AT_MOST_ONCE" if self.once else delivery,
                max_attempts=rng.choice((1, 2, 3)),
                max_failed=rng.choice((None, 0, 0, 1)),
                has_finish=rng.random() < 0.5,
                limit=rng.choice((None, None, None, 1)),
            ),
            adopt_after_seconds=rng.choice((0.0, 0.0, 1.0)),
        )
        self._instances += 1

    def _verb(self) -> None:
        execution = self.an_execution()
        verbs: list[Callable[[], object]] = [
            lambda: self.db.cancel(execution),
            lambda: self.db.half_cancel(execution),
            lambda: self.db.set_suspended(execution, True),
            lambda: self.db.set_suspended(execution, True),
            lambda: self.db.set_suspended(execution, False),
            lambda: self.db.set_suspended(execution, False),
        ]
        self.rng.choice(verbs)()

    def _restart(self) -> None:
        executions = self.db.db.executions
        ended = [n for n, e in enumerate(executions) if e.status in {"FAILED", "CANCELLED"}]
        if ended and len(executions) < 6:
            self.db.restart(self.a_uuid(), self.rng.choice(ended))

    # -- the end -------------------------------------------------------------------------------------------

    def _cease(self) -> None:
        """No more faults: who sleeps wakes, and somebody is there to do the work."""
        self.quiet = True
        self.outage_until = 0.0
        # Nothing waits for a time that a clock step has put far away.
        self.db_skew += HISTORY_SECONDS * 24
        self._tick(self.now)
        for number, execution in enumerate(self.db.db.executions):
            if execution.suspended:
                self.db.set_suspended(number, False)
        for process in self._living():
            process.next_turn = min(process.next_turn, self.now + self.rng.uniform(0, 2))
        if not any(not process.draining for process in self._living()):
            self.processes.append(Process(self, self.rng.uniform(0, 1e6)))

    @property
    def _is_over(self) -> bool:
        db = self.db.db
        return (
            all(e.status in ENDED for e in db.executions)
            and not any(p.status == "CLAIMED" for p in db.partitions)
            and all(p.at_rest for p in self._living())
        )

    def _check_masters(self) -> None:
        """I7: whoever lives takes over in time."""
        driving = {p.node for p in self._living()}
        for number, execution in enumerate(self.db.db.executions):
            master = execution.master
            driven = master is not None and self.db.names.nodes[master] in driving
            if execution.status in ENDED or driven:
                self._masterless.pop(number, None)
                continue
            since = self._masterless.setdefault(number, self.now)
            waited = self.now - since
            assert waited < MASTERLESS_SECONDS_MAX, f"I7: {execution} has no master"


def describe(world: Simulation, error: BaseException) -> str:
    """What to show of a history that went wrong."""
    steps = "\n".join(f"  {n:3} {line}" for n, line in enumerate(world.db.trace))
    return f"seed {world.seed}, after {len(world.db.trace)} statements:\n{steps}\n{error}"
