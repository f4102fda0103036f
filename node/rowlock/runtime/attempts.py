"""The attempts of a node: from the claim to the write that ends it.

The pipeline of one attempt, from top to bottom:

    claim → (queue) → send → [ready → go] → answer → write under the token → forget

Everything here happens on the main thread. An attempt is *live* until its end is decided, then
*settling* until the database has answered the write that says so.
"""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any, Final
from uuid import UUID

from rowlock.db.store import Store
from rowlock.errors import ContractError
from rowlock.failure import clean_text
from rowlock.protocol import ownership
from rowlock.protocol.backoff import delay_seconds
from rowlock.protocol.lines import Lines
from rowlock.protocol.model import Claim, Completion, ExecutionFacts
from rowlock.protocol.prefetch import Pace
from rowlock.runtime.exchange import Answer, Exchange
from rowlock.runtime.host import Host
from rowlock.runtime.link import TRANSIENT, is_final, is_lock_timeout
from rowlock.runtime.locks import Locks, Wait
from rowlock.runtime.messages import (
    Checkpoint,
    CommitUnknown,
    Completed,
    Failed,
    Go,
    Lock,
    Lost,
    Message,
    Progress,
    Ready,
    Reply,
    Run,
    Stop,
    Stopped,
    Unlock,
)
from rowlock.runtime.pool import Executor, Pool

log = logging.getLogger(__name__)

COMPLETIONS_MAX: Final = 500
"""Completions in one statement."""
COMPLETIONS_ENOUGH: Final = 128
"""So many are sent at once, even where the next ones are near."""
HOLD_SECONDS: Final = 0.05
"""How long a result waits for others, while more work is ready."""
PIPELINE_MAX: Final = 8
"""Attempts one executor is given at a time, where they take milliseconds."""
PIPELINE_SECONDS_MAX: Final = 0.005
REPORT_SECONDS: Final = 2.0
"""How often the progress of all attempts is written, in one statement."""
HELD_SECONDS_MAX: Final = 0.5
"""How long what is kept ready waits behind an attempt that takes longer than was expected."""
PREFETCH_SECONDS_MAX: Final = 1.0
"""How long a node may live on work that it keeps ready. Then that runs out once, so that a slot is
free for what is never kept ready: AT_MOST_ONCE work, and work that was lost with a node. Otherwise
both would wait for as long as there is other work (tried: a lost partition came last of 365)."""
FACTS_MAX: Final = 64
BEGUN_MAX: Final = 100_000
"""How many AT_MOST_ONCE starts a node remembers: what it starts while a replica falls behind."""
UNSTARTED_DEATHS_MAX: Final = 5
"""So many processes may die with AT_MOST_ONCE work before author code could begin; then it is not handed back once
more: what kills them is its slice, and it would take one after the other for ever."""
FROZEN_SECONDS_MAX: Final = 600.0
"""How long frozen work waits for the database before it is given up."""
INFRASTRUCTURE_DELAY_SECONDS: Final = 1.0
"""Wait before work is tried again that lost its database connection; doubled by jitter."""


_REASON_BYTES: Final = 500


class Ending(Enum):
    """Why an executor was killed, which decides what becomes of its attempt."""

    TIMEOUT = "it ran longer than timeout_seconds"
    CANCEL = "its execution was cancelled"
    DRAIN = "its node was drained"
    LOST = "its claim was gone"
    FROZEN = "it was frozen for too long without an answer of the database"
    NEIGHBOUR = "its executor was killed for the attempt before it"


@dataclass(slots=True, eq=False)
class Attempt:
    """One try at running a claimed partition."""

    number: int
    node_id: UUID
    claim: Claim
    facts: ExecutionFacts
    executor: Executor[Attempt] | None = None
    sent_at: float | None = None
    seconds: float | None = None
    """How long it ran, once it has ended."""
    began: bool = False
    """Author code may have begun."""
    stop_by: float | None = None
    asked_to_stop: bool = False
    """Its executor was told to stop it."""
    locks: dict[str, int] = field(default_factory=dict[str, int])
    """Named locks that it has taken and not given back, by the number of the acquisition."""
    withdrawn: bool = False
    """It was asked for back before its turn."""
    ending: Ending | None = None
    orphan: bool = False
    """AT_MOST_ONCE work whose node was removed: it runs on, nothing of it is accepted."""
    missing: bool = False
    """The last comparison with the database did not show its claim."""
    end: tuple[str, str | None] = ("unknown", None)
    """How it ended, and the JSON text of its result or error."""
    counters: str | None = None
    """What it has told of itself and the database does not know yet; JSON text."""
    postponed: bool = False
    """It goes back without a failure, for another time."""

    def describe(self) -> dict[str, Any]:
        """The fields that log lines about this attempt carry."""
        return {
            "execution": str(self.claim.execution_id),
            "job": self.facts.job,
            "partition": self.claim.key,
            "partition_id": self.claim.id,
            "attempt": self.claim.claims,
            "token": str(self.claim.token),
        }


class Attempts:
    """All attempts of a node over the slots of its pool."""

    def __init__(self, host: Host, pool: Pool[Attempt], slots: int) -> None:
        self._host = host
        self._pool = pool
        self._executors = pool.executors[:slots]
        self._live: dict[int, Attempt] = {}
        self._locks = Locks(host)
        self._queue: deque[Attempt] = deque()
        self._completed: deque[tuple[Attempt, Completion]] = deque()
        self._send_completed_by = 0.0
        self._settling: dict[int, UUID] = {}
        self._begun: OrderedDict[UUID, None] = OrderedDict()
        """Tokens of AT_MOST_ONCE attempts whose author code may have begun, also of those that have ended:
        a server that lost the end (a replica was promoted) still shows the claim."""
        self._facts: OrderedDict[UUID, ExecutionFacts] = OrderedDict()
        self._pace = Pace()
        self._slot_claimed_at = time.monotonic()
        """When a claim for a free slot was answered last."""
        self._lines = Lines()
        self._exchanging = False
        self._exchanges = 0
        self._ends = 0
        self._reporting = False
        """How many were begun."""
        self._asked_idle = False
        """The one under way, or lost, may bring an attempt that is to be alone."""
        self._apart = False
        """After an error of the joint statement completions are sent alone."""
        self._singly = False
        """...and if they are refused alone too, one by one, to find the one that is."""
        self._synced = False
        """What this node holds was compared with the database since the last connection."""
        self._comparing = False
        self._carried_over = False
        """Since the comparison under way was asked for, operations have gone another way."""
        self._compare_again_at: float | None = None
        """Something was missing in the last comparison: when to look whether it still is."""
        self._claimable = False
        """A level: work may wait that this node may claim."""
        self._notices = 0
        """How often work was noticed."""
        self._turned_at = time.monotonic()
        self._report_at = 0.0

    # -- what the node asks --------------------------------------------------------------------

    @property
    def load(self) -> int:
        """Attempts that occupy a slot."""
        return sum(1 for executor in self._executors if executor.work)

    def oldest_age(self, now: float) -> float:
        """How long the attempt has run that has run longest. Seconds; 0: none runs."""
        running = [executor.work[0].sent_at for executor in self._executors if executor.work]
        return max((now - sent for sent in running if sent is not None), default=0.0)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is claimed, running or waiting for an answer of the database.

        Nor may there be a claim whose reply was lost: a node that left would let it fail for ever,
        if it is AT_MOST_ONCE work, instead of handing it back.
        """
        waiting = self._live or self._settling or self._completed or self._exchanging
        return self._synced and not waiting

    @property
    def must_be_alone(self) -> bool:
        """Whether nothing else may begin on this node.

        It holds an attempt that is to be alone, or may do so: the answer of a claim is under way, or lost.
        """
        return self._asked_idle or self._holds_alone

    @property
    def _holds_alone(self) -> bool:
        # It was claimed by an idle node: it is the only one.
        return any(attempt.claim.alone for attempt in islice(self._live.values(), 1))

    @property
    def executions(self) -> set[UUID]:
        """The executions of the live attempts."""
        return {attempt.claim.execution_id for attempt in self._live.values()}

    @property
    def orphans(self) -> tuple[dict[str, Any], ...]:
        """AT_MOST_ONCE attempts of an earlier incarnation that still run here."""
        return tuple(
            {"partition_id": attempt.claim.id, "token": str(attempt.claim.token)}
            for attempt in self._live.values()
            if attempt.orphan
        )

    def notice_work(self) -> None:
        """Work may wait that this node may claim."""
        self._claimable = True
        self._notices += 1

    def next_due(self) -> float | None:
        """When the main loop is wanted again, though no message may come."""
        return self._locks.next_due()

    def turn(self, now: float) -> None:
        """Do all that is due."""
        self._enforce_times(now)
        self._locks.turn(now)
        if now >= self._report_at:
            self._report(now)
        if self._host.lease_holds:
            self._hand_back_held(now)
            self._dispatch(now)
        self._exchange()

    def on_message(self, executor: Executor[Attempt], message: Message, now: float) -> None:
        """Take in an answer of an executor."""
        number: int | None = getattr(message, "attempt", None)
        attempt = self._live.get(number) if number is not None else None
        if attempt is None or attempt.executor is not executor:
            return  # the attempt was given up meanwhile
        match message:
            case Ready():
                self._decide_go(attempt)
            case Progress():
                self._note_progress(attempt, message)
            case Checkpoint():
                self._write_checkpoint(attempt, message)
            case Lock() | Unlock():
                self._mind_lock(attempt, message, now)
            case Completed(result=result, committed=committed):
                attempt.counters = None  # it was told in time what must be known of it
                self._answered(attempt, now)
                self._complete(attempt, result, committed=committed)
            case Failed():
                self._answered(attempt, now)
                self._fail(attempt, message)
            case Stopped():
                if attempt is not executor.work[0]:
                    attempt.began = False  # it was stopped before its turn
                self._answered(attempt, now)
                self._stopped(attempt)
            case Lost():
                self._answered(attempt, now)
                self._forget_lost(attempt)
            case CommitUnknown():
                self._answered(attempt, now)
                self._find_out(attempt)
            case _:
                log.error("unexpected message %s", message, extra={"event": "protocol_error"})

    def on_executor_end(self, work: list[Attempt], how: str, now: float, *, killed: bool) -> None:
        """An executor is gone: its first attempt ran, the others had not begun.

        :param killed: this node has ended it.
        """
        for position, attempt in enumerate(work):
            if attempt.number not in self._live:
                continue
            if position == 0:
                if killed and attempt.ending is None:
                    # It was killed for the attempt before, whose answer was under way.
                    attempt.ending = Ending.NEIGHBOUR
                self._cut_off(attempt, how, now)
            else:
                attempt.executor, attempt.sent_at = None, None
                if attempt.stop_by is not None or self._host.draining:
                    self._release([attempt], unstarted=True)
                else:
                    self._queue.appendleft(attempt)

    # -- claims --------------------------------------------------------------------------------

    def _exchange(self) -> None:
        """Send completions and claim more, in one transaction, whenever there is reason to."""
        if self._exchanging or not self._host.registered:
            return
        now = time.monotonic()
        slots, prefetch = (0, 0) if self._apart else self._wanted(now)
        if not slots and not prefetch and self._more_results_are_near(now):
            return
        batch: list[tuple[Attempt, Completion]] = []
        limit = 1 if self._singly else COMPLETIONS_MAX
        while self._completed and len(batch) < limit:
            batch.append(self._completed.popleft())
        if not batch and not slots and not prefetch:
            self._apart = False
            return
        self._exchanging = True
        self._exchanges += 1
        exchange = Exchange(
            node_id=self._host.node_id,
            completions=[completion for _, completion in batch],
            slots=slots,
            prefetch=prefetch,
            idle=None if self._masters_work else not self._live and not batch,
            seed=self._host.rng.getrandbits(62),
            known=frozenset(self._facts),
            notices=self._notices,
            lines=self._lines,
        )
        self._asked_idle = exchange.claims and exchange.idle is True
        self._host.work.ask(
            exchange.run,
            lambda answer: self._exchanged(exchange, batch, answer),
            lambda error: self._exchange_failed(exchange, batch, error),
        )

    @property
    def _masters_work(self) -> bool:
        """Whether the executor of the masters runs author code."""
        return any(executor.work for executor in self._pool.executors[len(self._executors) :])

    def _more_results_are_near(self, now: float) -> bool:
        """Whether results had better wait a moment, to share a transaction with the next ones."""
        return (
            bool(self._queue)
            and len(self._completed) < COMPLETIONS_ENOUGH
            and now < self._send_completed_by
            and not self._host.draining
        )

    def _exchanged(
        self, exchange: Exchange, batch: list[tuple[Attempt, Completion]], answer: Answer
    ) -> None:
        self._exchanging = self._asked_idle = False
        self._apart = False
        self._singly = self._singly and bool(self._completed)
        for attempt, completion in batch:
            self._settled(attempt, answer.outcomes.get(completion.id, "lost"))
        if exchange.slots:
            self._slot_claimed_at = time.monotonic()
        elif exchange.prefetch and not answer.claims:
            self._slot_claimed_at = float("-inf")  # none to keep ready: ask again for a free slot
        if exchange.claims:
            self._remember(answer.facts, answer.claims)
            self._host.metrics.polled("claimed" if answer.claims else "empty")
            # A short claim is repeated at once; an empty one waits for the next sign of work. One
            # that only looked for work to keep ready proves nothing about rows that need a slot,
            # and one that was under way when work was noticed may not have seen it.
            if exchange.slots and not answer.claims and self._notices == exchange.notices:
                self._claimable = False
            self._take(exchange.node_id, answer.claims)

    def _exchange_failed(
        self, exchange: Exchange, batch: list[tuple[Attempt, Completion]], error: Exception
    ) -> None:
        self._exchanging = False
        if exchange.node_id != self._host.node_id:
            self._give_up(batch)
        elif exchange.claims or not self._set_apart(batch, error):
            self._completed.extendleft(reversed(batch))
        if exchange.claims:
            self._host.metrics.polled("conflict" if is_lock_timeout(error) else "error")
            self._synced = False  # it may have claimed; only the database knows what
            self._apart = True
        if not isinstance(error, TRANSIENT):
            self._claimable = False  # until the next beat: a mistake must not become a storm

    def _wanted(self, now: float) -> tuple[int, int]:
        """How many partitions to claim for free slots, and how many to keep ready."""
        if not ownership.may_claim(
            claimable=self._claimable,
            synced=self._synced,
            lease_holds=self._host.lease_holds,
            draining=self._host.draining,
            alone=self._holds_alone,
        ):
            return 0, 0
        free = sum(1 for executor in self._executors if executor.ready and not executor.work)
        slots = max(0, free - len(self._queue))
        if now - self._slot_claimed_at > PREFETCH_SECONDS_MAX:
            return slots, 0
        ahead = self._pace.prefetch(len(self._executors))
        spare = max(0, len(self._queue) - free)
        prefetch = ahead - spare if spare * 2 <= ahead else 0
        return slots, max(0, prefetch)

    def _take(self, node_id: UUID, claims: list[Claim]) -> None:
        self._host.metrics.claims.inc(len(claims))
        taken: list[Attempt] = []
        for claim in claims:
            facts = self._facts[claim.execution_id]
            number = next(self._host.numbers)
            attempt = Attempt(number=number, node_id=node_id, claim=claim, facts=facts)
            self._live[number] = attempt
            taken.append(attempt)
            self._host.metrics.waited(facts.job, claim.waited)
            if log.isEnabledFor(logging.DEBUG):
                log.debug("claimed", extra={"event": "partition_claimed", **attempt.describe()})
        if node_id != self._host.node_id:
            for attempt in taken:  # the incarnation that claimed was removed meanwhile
                del self._live[attempt.number]
            return
        if taken and (self._host.draining or not self._host.lease_holds):
            self._release(taken, unstarted=True)
            return
        # What has its slot already goes first, and then as in the line.
        self._queue.extend(sorted(taken, key=_in_the_line))

    def _remember(self, facts: dict[UUID, ExecutionFacts], claims: list[Claim]) -> None:
        self._facts.update(facts)
        if len(self._facts) <= FACTS_MAX:
            return
        in_use = self.executions | {claim.execution_id for claim in claims}
        for execution in list(self._facts):
            if len(self._facts) <= FACTS_MAX:
                break
            if execution not in in_use:
                del self._facts[execution]

    # -- running -------------------------------------------------------------------------------

    def _dispatch(self, now: float) -> None:
        if not self._queue:
            return
        pace = self._pace.mean_seconds
        depth = PIPELINE_MAX if pace is not None and pace < PIPELINE_SECONDS_MAX else 1
        for room in range(depth):
            for executor in self._executors:
                if not self._queue:
                    return
                if executor.ready and len(executor.work) == room and self._may_join(executor):
                    self._send(executor, self._queue.popleft(), now)

    def _hand_back_held(self, now: float) -> None:
        """Work kept ready because it took milliseconds waits behind some that does not: hand it back.

        Another node may be free for it. The pace learns of the long attempt before its end, so that
        nothing is put behind it again.
        """
        held: list[Executor[Attempt]] = []
        for executor in self._executors:
            sent_at = executor.work[0].sent_at if executor.work else None
            if sent_at is None or now - sent_at < HELD_SECONDS_MAX or self._is_frozen(executor):
                continue
            held.append(executor)
            for attempt in islice(executor.work, 1, None):
                if not attempt.withdrawn:
                    attempt.withdrawn = True
                    self._pace.note(now - sent_at)
                    self._pool.send(executor, Stop(attempt=attempt.number))
        if self._queue and len(held) == len(self._executors):
            waiting = list(self._queue)
            self._queue.clear()
            self._pace.note(HELD_SECONDS_MAX)
            self._release(waiting, unstarted=True)

    def _may_join(self, executor: Executor[Attempt]) -> bool:
        """AT_MOST_ONCE and suspected work is never behind or before other work, and a worn one gets none."""
        if self._is_frozen(executor) or executor.worn:
            return False
        if not executor.work:
            return True
        head = self._queue[0].claim
        return not (head.at_most_once or head.lost) and not any(
            a.claim.at_most_once or a.claim.lost for a in executor.work
        )

    def _is_frozen(self, executor: Executor[Attempt]) -> bool:
        return self._host.board.frozen(executor.index)

    def _send(self, executor: Executor[Attempt], attempt: Attempt, now: float) -> None:
        claim = attempt.claim
        attempt.executor = executor
        attempt.sent_at = now
        attempt.began = not claim.at_most_once
        # On the board before it is sent: the lease may end between the two.
        self._pool.give(executor, attempt, freezable=not claim.at_most_once)
        self._pool.send(
            executor,
            Run(
                attempt=attempt.number,
                job=attempt.facts.job,
                execution_id=str(claim.execution_id),
                instance_key=attempt.facts.instance_key,
                step=claim.step,
                partition_id=claim.id,
                key=claim.key,
                claim_token=str(claim.token),
                attempt_number=claim.claims,
                slice=claim.slice,
                parameters=attempt.facts.parameters,
                checkpoint=claim.checkpoint,
                handshake=claim.at_most_once,
            ),
        )

    def _decide_go(self, attempt: Attempt) -> None:
        executor = attempt.executor
        assert executor is not None
        if ownership.may_begin(
            lease_holds=self._host.lease_holds,
            draining=self._host.draining,
            stopping=attempt.stop_by is not None,
        ):
            attempt.began = True
            self._begun[attempt.claim.token] = None
            if len(self._begun) > BEGUN_MAX:
                self._begun.popitem(last=False)
            self._pool.send(executor, Go(attempt=attempt.number))
        else:  # it answers Stopped, and has run nothing
            self._pool.send(executor, Stop(attempt=attempt.number))

    def _write_checkpoint(self, attempt: Attempt, message: Checkpoint) -> None:
        claim, executor = attempt.claim, attempt.executor
        assert executor is not None
        node_id = attempt.node_id

        def done(written: bool) -> None:
            if not written:
                self._host.metrics.fenced_writes.inc()
                log.warning(
                    "checkpoint refused: the claim is gone",
                    extra={"event": "write_fenced", **attempt.describe()},
                )
            if attempt.executor is executor:
                self._pool.send(executor, Reply(request=message.request, ok=written))

        self._host.work.tell(
            lambda store: store.checkpoint(node_id, claim.id, claim.token, message.checkpoint), done
        )

    def _note_progress(self, attempt: Attempt, message: Progress) -> None:
        if not message.request:
            attempt.counters = message.counters
            return
        attempt.counters = None
        reply = self._replier(attempt, message.request)
        node_id, claim = attempt.node_id, attempt.claim

        def done(standing: set[int]) -> None:
            reply(claim.id in standing, None)

        report = [(claim.id, claim.token, message.counters)]
        self._host.work.tell(lambda store: store.report(node_id, report), done)

    def _report(self, now: float) -> None:
        """Write what has been told of progress since the last time, once that is answered."""
        self._report_at = now + REPORT_SECONDS
        if not self._reporting:
            self._write_progress([one for one in self._live.values() if one.counters is not None])

    def _write_progress(self, attempts: list[Attempt]) -> None:
        node_id = self._host.node_id
        reports: list[tuple[int, UUID, str]] = []
        for one in attempts:
            if one.counters is not None and one.node_id == node_id:
                reports.append((one.claim.id, one.claim.token, one.counters))
            one.counters = None

        def answered(_answer: object) -> None:
            self._reporting = False

        if reports:  # tried once: it is for people, and there will be more of it
            self._reporting = True
            self._host.work.ask(lambda store: store.report(node_id, reports), answered, answered)

    def _mind_lock(self, attempt: Attempt, message: Lock | Unlock, now: float) -> None:
        """Take a named lock for the attempt, or give it back."""
        reply = self._replier(attempt, message.request)
        if isinstance(message, Unlock):
            self._locks.give_back(attempt, message.name, lambda _found: reply(True, None))
            return
        limit = message.timeout_seconds
        self._locks.wait(
            Wait(
                holder=attempt,
                name=message.name,
                give_up_at=None if limit is None else now + limit,
                over=lambda: self._over(attempt),
                reply=reply,
            )
        )

    def _over(self, attempt: Attempt) -> str | None:
        """What ended an attempt, for a lock that it waits for."""
        if attempt.ending is Ending.LOST:
            return "lost"
        ended = attempt.ending is not None or attempt.number not in self._live
        return "stopped" if ended else None

    def _replier(self, attempt: Attempt, request: int) -> Callable[[bool, str | None], None]:
        """How to answer a request, unless its executor is gone by then."""
        executor = attempt.executor
        assert executor is not None

        def reply(ok: bool, body: str | None) -> None:
            if attempt.executor is executor and attempt.number in self._live:
                self._pool.send(executor, Reply(request=request, ok=ok, body=body))

        return reply

    def _enforce_times(self, now: float) -> None:
        since_last_turn, self._turned_at = now - self._turned_at, now
        for executor in self._executors:
            if not executor.work:
                continue
            attempt = executor.work[0]
            if attempt.ending is not None or attempt.sent_at is None:
                continue
            if self._is_frozen(executor):
                attempt.sent_at += since_last_turn  # frozen time is not running time
            limit = attempt.facts.policy.get("timeout_seconds")
            if limit is not None and now - attempt.sent_at > limit and not attempt.orphan:
                self._end(attempt, Ending.TIMEOUT)
            elif attempt.stop_by is not None and now > attempt.stop_by:
                self._end(attempt, Ending.DRAIN if self._host.draining else Ending.CANCEL)

    def _end(self, attempt: Attempt, ending: Ending) -> None:
        """Kill the executor of an attempt; what becomes of it is decided when the executor is gone."""
        if attempt.ending is None or ending is Ending.LOST:
            attempt.ending = ending
        if attempt.executor is not None:
            log.warning(
                "ending an attempt: %s",
                ending.value,
                extra={"event": "attempt_ended", "reason": ending.name, **attempt.describe()},
            )
            self._pool.kill(attempt.executor)

    def _cut_off(self, attempt: Attempt, how: str, now: float) -> None:
        """The executor of a running attempt is gone."""
        ending, claim = attempt.ending, attempt.claim
        seconds = attempt.seconds = now - (attempt.sent_at or now)
        if ending is None:
            self._host.metrics.executor_deaths.inc()
            log.error(
                "an executor died: %s", how, extra={"event": "executor_died", **attempt.describe()}
            )
        if attempt.orphan or ending is Ending.LOST:
            self._forget(attempt)
        elif not attempt.began and not _kills_by_its_slice(attempt):
            self._release([attempt], unstarted=True, died=_ended_by_itself(attempt))
        elif ending not in {None, Ending.TIMEOUT} and not claim.at_most_once:
            self._release([attempt], unstarted=False)
        else:
            reason = ending.value if ending is not None else f"its executor died: {how}"
            kind = {None: "ExecutorDied", Ending.TIMEOUT: "TimeoutError"}.get(ending, "Interrupted")
            error = json.dumps(
                {"type": kind, "message": f"{reason} (after {seconds:.1f} s)", "traceback": ""}
            )
            if not claim.at_most_once:
                what = "retry"
            else:
                what = "unknown" if attempt.began else "unstarted"
            self._write_failure(attempt, error, kind=what, delay=self._backoff(attempt))

    # -- ends ----------------------------------------------------------------------------------

    def _answered(self, attempt: Attempt, now: float) -> None:
        executor = attempt.executor
        assert executor is not None
        assert attempt.sent_at is not None
        attempt.seconds = now - attempt.sent_at
        self._pace.note(attempt.seconds)
        self._pool.taken_back(executor, attempt)
        self._write_progress([attempt])
        if executor.work:
            executor.work[0].sent_at = now

    def _complete(self, attempt: Attempt, result: str | None, *, committed: bool) -> None:
        del self._live[attempt.number]
        attempt.end = ("completed", result)
        if attempt.orphan:
            self._fenced(attempt)
        elif committed:
            self._note_end(attempt, "completed")
        else:
            completion = Completion(id=attempt.claim.id, token=attempt.claim.token, result=result)
            self._settling[attempt.claim.id] = attempt.claim.token
            if attempt.claim.at_most_once:
                self._send_completed_by = 0.0
            elif not self._completed:
                self._send_completed_by = time.monotonic() + HOLD_SECONDS
            self._completed.append((attempt, completion))

    def _fail(self, attempt: Attempt, message: Failed) -> None:
        claim = attempt.claim
        if attempt.orphan:
            del self._live[attempt.number]
            attempt.end = ("failed", message.error)
            self._fenced(attempt)
            return
        kind, delay = "retry", self._backoff(attempt)
        if not message.started:
            self._host.metrics.rejected("slice")
            kind, delay = "unstarted", 0.0
        elif message.retry == "never":
            if json.loads(message.error).get("type") == ContractError.__name__:
                self._host.metrics.rejected("result")
            kind, delay = "never", 0.0
        elif message.retry == "later":
            kind, delay = "later", message.delay_seconds or 0.0
        elif message.retry == "infrastructure" and not claim.at_most_once:
            draw = self._host.rng.random()
            kind, delay = "later", INFRASTRUCTURE_DELAY_SECONDS * (1 + draw)
        self._write_failure(attempt, message.error, kind=kind, delay=delay)

    def _backoff(self, attempt: Attempt) -> float:
        return delay_seconds(
            attempt.facts.policy,
            failures=attempt.claim.failures + 1,
            draw=self._host.rng.random(),
        )

    def _write_failure(self, attempt: Attempt, error: str, *, kind: str, delay: float) -> None:
        claim, node_id = attempt.claim, attempt.node_id
        attempt.end = ("unknown" if kind == "unknown" else "failed", error)
        attempt.postponed = kind == "later"
        self._settle(
            attempt,
            lambda store: store.fail(
                node_id, claim.id, claim.token, error=error, kind=kind, delay_seconds=delay
            ),
        )

    def _release(self, attempts: list[Attempt], *, unstarted: bool, died: bool = False) -> None:
        node_id = attempts[0].node_id
        claims = [(attempt.claim.id, attempt.claim.token) for attempt in attempts]
        for attempt in attempts:
            self._live.pop(attempt.number, None)
            self._settling[attempt.claim.id] = attempt.claim.token

        def done(outcomes: dict[int, str]) -> None:
            for attempt in attempts:
                self._settled(attempt, outcomes.get(attempt.claim.id, "lost"))

        self._host.work.tell(
            lambda store: store.release(node_id, claims, unstarted=unstarted, died=died), done
        )

    def _stopped(self, attempt: Attempt) -> None:
        if attempt.claim.at_most_once and attempt.began:
            # It cannot start again, but its outcome is known.
            error = {"type": "Stopped", "message": "it stopped early because it was asked to"}
            self._write_failure(attempt, json.dumps(error), kind="never", delay=0.0)
        else:  # where it has not begun, Stopped is the answer of an executor that ran nothing of it
            self._release([attempt], unstarted=not attempt.began)

    def _find_out(self, attempt: Attempt) -> None:
        """The COMMIT of a transaction had no answer: only a fenced write may say *not committed*."""
        if attempt.claim.at_most_once:
            error = {"type": "CommitUnknown", "message": "the connection broke during COMMIT"}
            self._write_failure(attempt, json.dumps(error), kind="unknown", delay=0.0)
        else:
            self._release([attempt], unstarted=False)

    def _settle(self, attempt: Attempt, write: Callable[[Store], str]) -> None:
        self._live.pop(attempt.number, None)
        self._settling[attempt.claim.id] = attempt.claim.token
        self._host.work.tell(write, lambda outcome: self._settled(attempt, outcome))

    def _settled(self, attempt: Attempt, outcome: str) -> None:
        """The database has answered the write that ends an attempt."""
        if self._settling.get(attempt.claim.id) == attempt.claim.token:
            del self._settling[attempt.claim.id]
        if outcome == "lost":
            self._fenced(attempt)
        else:
            self._note_end(attempt, {"retry": "retried"}.get(outcome, outcome))

    def _note_end(self, attempt: Attempt, outcome: str) -> None:
        self._ends += 1
        self._locks.forget(attempt)
        self._host.metrics.ended(
            attempt.facts.job,
            _counted_as(attempt, outcome),
            attempt.seconds,
            execution=attempt.claim.execution_id,
            partition=attempt.claim.id,
        )
        level = logging.DEBUG if outcome == "completed" else logging.INFO
        if log.isEnabledFor(level):
            fields = {"event": f"partition_{outcome}", **attempt.describe()}
            text = outcome + (_reason(attempt) if outcome in {"retried", "failed"} else "")
            log.log(level, "partition %s: %s", attempt.claim.key, text, extra=fields)

    def _count_fenced(self, attempt: Attempt) -> None:
        self._host.metrics.fenced_writes.inc()
        self._host.metrics.ended(attempt.facts.job, "fenced")
        log.warning(
            "a late write changed nothing: the claim is gone",
            extra={"event": "write_fenced", **attempt.describe()},
        )

    def _forget(self, attempt: Attempt) -> None:
        self._live.pop(attempt.number, None)

    def _forget_lost(self, attempt: Attempt) -> None:
        self._forget(attempt)
        self._count_fenced(attempt)

    def _fenced(self, attempt: Attempt) -> None:
        """It ended after its claim was taken away. Of AT_MOST_ONCE work a person will want to know."""
        self._count_fenced(attempt)
        if not attempt.claim.at_most_once or not attempt.began:
            return
        claim, (outcome, text) = attempt.claim, attempt.end
        name = "result" if outcome == "completed" else "error"
        evidence = {"outcome": outcome, name: None if text is None else json.loads(text)}
        self._host.work.tell(lambda store: store.record_evidence(claim.id, claim.token, evidence))

    def _set_apart(self, batch: list[tuple[Attempt, Completion]], error: Exception) -> bool:
        """Deal with a completion that stands in the way of the others; of several, find it first."""
        if not is_final(error) and not is_lock_timeout(error):
            return False
        if len(batch) > 1:
            self._singly = True
            return False
        ((attempt, completion),) = batch
        self._apart = False
        if is_final(error):  # the database will never take it: the attempt fails with the reason
            self._host.metrics.rejected("result")
            text = f"the result was refused: {error}"
            failure = json.dumps({"type": type(error).__name__, "message": text})
            self._write_failure(attempt, failure, kind="never", delay=0.0)
            return True
        node_id = attempt.node_id  # a stranger holds its row: it is repeated by itself

        def done(outcomes: dict[int, str]) -> None:
            self._settled(attempt, outcomes.get(completion.id, "lost"))

        self._host.work.tell(lambda store: store.complete(node_id, [completion]), done)
        return True

    # -- agreeing with the database ------------------------------------------------------------

    def on_connected(self) -> None:
        """The work connection is new: the answers of the old one may be lost."""
        self._synced = False

    def on_carried_over(self) -> None:
        """Waiting operations go over another connection: two streams of answers have no order."""
        self._synced = False
        self._carried_over = True

    def compare(self) -> None:
        """Compare what this node believes to hold with what the database says it holds."""
        if self._comparing or not self._host.registered:
            return
        self._comparing = True
        self._carried_over = False
        self._compare_again_at = None
        node_id, exchanges, ends = self._host.node_id, self._exchanges, self._ends

        def done(held: dict[int, UUID]) -> None:
            self._comparing = False
            # Answers come in the order in which they were asked for, unless some were carried over: then an
            # exchange that is under way, or began meanwhile, may have claimed what is in `held`, and nobody
            # here knows it yet; and what has ended meanwhile may still be in it.
            begun_before = self._exchanges == exchanges
            overtaken = self._exchanging and begun_before
            if self._carried_over:
                overtaken = self._exchanging or not begun_before or self._ends != ends
            if node_id == self._host.node_id and not overtaken:
                self._synced = True
                self._asked_idle = self._asked_idle and self._exchanging
                self._reconcile(held)

            else:
                self._look_again_soon()

        def failed(_error: Exception) -> None:
            self._comparing = False
            self._look_again_soon()

        self._host.work.ask(lambda store: store.claims_of(node_id), done, failed)

    @property
    def needs_comparing(self) -> bool:
        """Whether nothing can be claimed or thawed before `compare`."""
        frozen = any(self._is_frozen(executor) for executor in self._executors)
        again_at = self._compare_again_at
        return not self._exchanging and (
            not self._synced
            or (frozen and self._host.lease_holds)
            or (again_at is not None and time.monotonic() >= again_at)
        )

    def _reconcile(self, held: dict[int, UUID]) -> None:
        mine = {(a.claim.id, a.claim.token): a for a in self._live.values() if not a.orphan}
        difference = ownership.compare(held, {*mine, *self._settling.items()})
        unknown = difference.unknown
        for partition, token in unknown:
            if token in self._begun:
                self._end_again(partition, token)
        # The rest is a repetition of the last claim's lost reply: author code cannot have begun.
        unknown = [claim for claim in unknown if claim[1] not in self._begun]
        if unknown:
            node_id = self._host.node_id
            log.info(
                "handing back %d claims whose reply was lost",
                len(unknown),
                extra={"event": "claims_reconciled", "count": len(unknown)},
            )
            self._host.work.tell(lambda store: store.release(node_id, unknown, unstarted=True))
        for claim, attempt in mine.items():
            gone = claim in difference.gone
            executor = attempt.executor
            frozen = executor is not None and self._is_frozen(executor)
            # Twice missing, or missing where it matters now: an answer may be on its way.
            if gone and (attempt.missing or frozen):
                self._lose(attempt)
            attempt.missing = gone
        self._look_again_soon()
        self._thaw_confirmed()

    def _look_again_soon(self) -> None:
        """What is missing may run elsewhere already: a beat is time enough for an answer on its way."""
        if any(a.missing and a.ending is None and not a.orphan for a in self._live.values()):
            self._compare_again_at = time.monotonic() + self._host.settings.beat_seconds

    def _end_again(self, partition: int, token: UUID) -> None:
        """End an AT_MOST_ONCE claim whose end the database has taken, and forgotten: no other may start it."""
        node_id = self._host.node_id
        error = {
            "type": "EndLost",
            "message": "it has run, but the server lost how it ended: a replica was promoted, or a backup"
            " restored",
        }
        log.error(
            "the server lost the end of an AT_MOST_ONCE attempt: its outcome is unknown",
            extra={"event": "end_lost", "partition_id": partition, "token": str(token)},
        )
        self._settling[partition] = token

        def done(_outcome: str) -> None:
            if self._settling.get(partition) == token:
                del self._settling[partition]

        self._host.work.tell(
            lambda store: store.fail(
                node_id,
                partition,
                token,
                error=json.dumps(error),
                kind="unknown",
                delay_seconds=0.0,
            ),
            done,
        )

    def _thaw_confirmed(self) -> None:
        if not self._host.lease_holds:
            return
        for executor in self._executors:
            if self._is_frozen(executor) and not any(
                attempt.ending is Ending.LOST for attempt in executor.work
            ):
                self._host.board.thaw(executor.index)
                log.info(
                    "the claim still stands: work continues",
                    extra={"event": "executor_thawed", "executor": executor.index},
                )

    def _lose(self, attempt: Attempt) -> None:
        """The claim is gone: nothing this attempt does counts any more."""
        if attempt.executor is None:
            self._forget_lost(attempt)
            if attempt in self._queue:
                self._queue.remove(attempt)
        else:
            self._count_fenced(attempt)
            self._end(attempt, Ending.LOST)

    def give_up_frozen(self, now: float, frozen_since: float | None) -> None:
        """Give up work that has been frozen for ten minutes."""
        if frozen_since is None or now - frozen_since < FROZEN_SECONDS_MAX:
            return
        for executor in self._executors:
            if executor.work and self._is_frozen(executor):
                self._end(executor.work[0], Ending.FROZEN)

    def removed(self) -> None:
        """This incarnation was removed: AT_LEAST_ONCE work ends, AT_MOST_ONCE work runs on."""
        for attempt in self._queue:
            self._forget(attempt)
        self._queue.clear()
        self._give_up(list(self._completed))
        self._completed.clear()
        for attempt in list(self._live.values()):
            at_most_once = attempt.claim.at_most_once
            if ownership.outlives_removal(at_most_once=at_most_once, began=attempt.began):
                attempt.orphan = True
            elif not at_most_once:
                self._lose(attempt)
            else:
                self._end(attempt, Ending.LOST)
        self._synced = False

    def _give_up(self, batch: list[tuple[Attempt, Completion]]) -> None:
        """Completions of a removed incarnation: the database would not take them any more."""
        for attempt, _ in batch:
            self._settling.pop(attempt.claim.id, None)
            self._fenced(attempt)

    # -- stopping ------------------------------------------------------------------------------

    def executions_ended(self, executions: Iterable[UUID], now: float) -> None:
        """Executions are closing or over: hand back what waits, ask what runs to stop."""
        ended = set(executions)
        by = now + self._host.settings.cancel_seconds
        self._stop([a for a in self._live.values() if a.claim.execution_id in ended], by)

    def drain(self, now: float) -> None:
        """Hand back what was not started, ask running work to stop, wait for the drain time."""
        by = now + self._host.settings.drain_seconds
        self._stop(list(self._live.values()), by, spare_started=True)

    def _stop(self, attempts: list[Attempt], by: float, *, spare_started: bool = False) -> None:
        waiting = [attempt for attempt in attempts if attempt.executor is None]
        for attempt in waiting:
            self._queue.remove(attempt)
        if waiting:
            self._release(waiting, unstarted=True)
        for attempt in attempts:
            executor = attempt.executor
            if executor is None or attempt.orphan:
                continue
            if attempt.stop_by is None:
                attempt.stop_by = by
                # A drained AT_MOST_ONCE attempt is left alone: it could not be started again.
                if not (attempt.claim.at_most_once and spare_started):
                    attempt.asked_to_stop = True
                    self._pool.send(executor, Stop(attempt=attempt.number))
            else:
                attempt.stop_by = min(attempt.stop_by, by)


def _in_the_line(attempt: Attempt) -> tuple[bool, int, int]:
    claim = attempt.claim
    return not claim.started, -claim.weight, claim.id


def _ended_by_itself(attempt: Attempt) -> bool:
    """Whether its executor died of it, and not of what this node had decided."""
    return attempt.ending in {None, Ending.TIMEOUT}


def _kills_by_its_slice(attempt: Attempt) -> bool:
    """Whether AT_MOST_ONCE work has cost one process after the other without ever beginning."""
    # Before it has begun, such a death is the only failure that it can have.
    deaths = attempt.claim.failures + 1
    at_most_once = attempt.claim.at_most_once
    return at_most_once and _ended_by_itself(attempt) and deaths >= UNSTARTED_DEATHS_MAX


def _counted_as(attempt: Attempt, outcome: str) -> str:
    """How the metrics name an end: by what happened to the attempt, whatever comes of its partition."""
    if outcome == "kept" or (attempt.postponed and outcome == "retried"):
        return "released"
    if attempt.ending is Ending.TIMEOUT and outcome in {"retried", "failed"}:
        return "timeout"
    return outcome


def _reason(attempt: Attempt) -> str:
    """What the log adds to *failed*: the first line of the error, without its traceback."""
    _, text = attempt.end
    if text is None:
        return ""
    error: dict[str, str] = json.loads(text)
    lines = error["message"].strip().splitlines()
    return clean_text(f": {error['type']}{': ' + lines[0] if lines else ''}", _REASON_BYTES)
