"""The bookkeeping of attempts, where two answers cross: orders of events too rare to wait for.

The database and the executors are replaced by two lists: of what was asked, which a test answers
when it likes, and of what was sent. Everything with real processes is under tests/faults.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import re
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
from psycopg.errors import DataError, LockNotAvailable

from rowlock.protocol.model import Claim, ExecutionFacts, Place
from rowlock.registry import Registry
from rowlock.runtime.attempts import PREFETCH_SECONDS_MAX, Attempt, Attempts
from rowlock.runtime.exchange import Answer
from rowlock.runtime.host import Host
from rowlock.runtime.messages import (
    Completed,
    Failed,
    Lock,
    Message,
    Progress,
    Ready,
    Reply,
    Run,
    Stop,
    Stopped,
    Unlock,
)
from rowlock.runtime.metrics import NodeMetrics
from rowlock.runtime.pool import Executor
from rowlock.runtime.watchdog import LeaseBoard, boottime_ns
from rowlock.runtime.work import Work
from rowlock.settings import Settings

Anything = Any  # what a function of the Store takes and answers


class _Named(Exception):
    """Carries the name of the function of the Store that an operation calls first, and how it is called."""

    def __init__(self, name: str, arguments: dict[str, Anything]) -> None:
        super().__init__(name)
        self.arguments = arguments


class _Store:
    def passed(self, _node: UUID, _seconds: float) -> dict[UUID, Place]:
        return {}

    def __getattr__(self, name: str) -> Callable[..., None]:
        def called(*_: Anything, **arguments: Anything) -> None:
            raise _Named(name, arguments)

        return called


@dataclass
class Asked:
    """One operation that waits for its answer."""

    name: str
    answer: Callable[[Anything], None]
    fail: Callable[[Exception], None] | None
    arguments: dict[str, Anything]
    """Those that it is called with by name."""


@dataclass
class Database:
    """In place of the thread of the work connection."""

    asked: list[Asked] = field(default_factory=list[Asked])

    def ask(
        self,
        run: Callable[[Anything], Anything],
        done: Callable[[Anything], None] = lambda _answer: None,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        try:
            run(_Store())
        except _Named as called:
            self.asked.append(Asked(str(called), done, failed, called.arguments))

    tell = ask

    def take(self, name: str) -> Asked:
        """The first operation of this name, which is then no longer waiting."""
        found = next(asked for asked in self.asked if asked.name == name)
        self.asked.remove(found)
        return found

    @property
    def names(self) -> list[str]:
        return [asked.name for asked in self.asked]


class FakePool:
    """In place of the executors' processes."""

    def __init__(self, slots: int) -> None:
        self.executors = [Executor[Attempt](index, ready=True) for index in range(slots)]
        self.sent: list[tuple[int, Message]] = []

    def send(self, executor: Executor[Attempt], message: Message) -> None:
        self.sent.append((executor.index, message))

    def give(self, executor: Executor[Attempt], work: Attempt, *, freezable: bool) -> None:
        executor.work.append(work)

    def taken_back(self, executor: Executor[Attempt], work: Attempt) -> None:
        executor.work.remove(work)

    def kill(self, executor: Executor[Attempt]) -> None:
        executor.ready, executor.killed = False, True

    @property
    def runs(self) -> list[Run]:
        return [message for _, message in self.sent if isinstance(message, Run)]


@dataclass
class Desk:
    """One node's attempts, between the two."""

    attempts: Attempts
    database: Database
    pool: FakePool
    host: Host

    def turn(self) -> float:
        now = time.monotonic()
        self.attempts.turn(now)
        return now

    def fail(self, name: str, error: Exception) -> None:
        """Have an operation fail."""
        fail = self.database.take(name).fail
        assert fail is not None
        fail(error)

    def claimed(self, *claims: Claim, **policy: Any) -> None:
        """Have the node claim these."""
        self.attempts.notice_work()
        self.turn()
        self.database.take("complete_and_claim").answer(an_answer(*claims, **policy))
        self.turn()


_ids = itertools.count(1)


def a_claim(*, delivery: str = "AT_LEAST_ONCE", execution: UUID | None = None) -> Claim:
    return Claim(
        id=next(_ids),
        execution_id=execution or uuid4(),
        step="main",
        key="k",
        token=uuid4(),
        claims=1,
        failures=0,
        lost=0,
        alone=False,
        weight=0,
        started=True,
        delivery=cast(Any, delivery),
        slice="1",
        checkpoint=None,
        waited=0.1,
    )


def an_answer(*claims: Claim, **policy: Any) -> Answer:
    known = {"initial_seconds": 1, "factor": 2, "max_seconds": 9, "timeout_seconds": None, **policy}
    facts = ExecutionFacts(job="j", instance_key="i", parameters="{}", policy=known)
    return Answer(
        outcomes={}, claims=list(claims), facts={claim.execution_id: facts for claim in claims}
    )


def a_host(database: Database, board: LeaseBoard) -> Host:
    """A registered node as its desks see it, over a database that the test answers for."""
    return Host(
        settings=Settings(),
        registry=Registry(),
        metrics=NodeMetrics("default"),
        board=board,
        work=cast(Work, database),
        rng=random.Random(1),
        node_id=uuid4(),
        registered=True,
    )


@pytest.fixture
def desk() -> Generator[Desk]:
    database, pool, board = Database(), FakePool(1), LeaseBoard.create(1)
    board.extend(boottime_ns() + 10**12)
    host = a_host(database, board)
    made = Desk(Attempts(host, cast(Any, pool), slots=1), database, pool, host)
    made.attempts.compare()
    database.take("claims_of").answer({})
    yield made
    board.close()


def test_only_a_node_whose_masters_rest_as_well_is_idle(desk: Desk) -> None:
    """partition() or finish() can take the node along, too, and with it what may not be lost once more."""
    masters = Executor[Attempt](1, ready=True)
    desk.pool.executors.append(masters)  # it has one slot: the last executor is the masters'
    masters.work.append(cast(Any, object()))
    desk.attempts.notice_work()
    desk.turn()
    beside = desk.database.take("complete_and_claim")
    assert not desk.attempts.must_be_alone
    beside.answer(an_answer())

    masters.work.clear()
    desk.attempts.notice_work()
    desk.turn()
    by_itself = desk.database.take("complete_and_claim")

    assert (beside.arguments["idle"], by_itself.arguments["idle"]) == (None, True)


def test_nothing_begins_beside_what_is_to_be_alone_or_may_be_on_its_way(desk: Desk) -> None:
    held = [desk.attempts.must_be_alone]
    desk.attempts.notice_work()
    desk.turn()
    held.append(desk.attempts.must_be_alone)
    suspect = replace(a_claim(), alone=True)
    desk.database.take("complete_and_claim").answer(an_answer(suspect))
    desk.turn()
    held.append(desk.attempts.must_be_alone)
    (executor,) = desk.pool.executors
    answer = Completed(attempt=executor.work[0].number, result="1", committed=False)
    desk.attempts.on_message(executor, answer, time.monotonic())
    held.append(desk.attempts.must_be_alone)

    assert held == [False, True, True, False]

    desk.attempts.notice_work()
    desk.turn()
    desk.database.take("complete_and_claim").answer(an_answer())
    desk.attempts.notice_work()
    desk.turn()
    desk.fail("complete_and_claim", LockNotAvailable())
    assert desk.attempts.must_be_alone, "the claim whose answer was lost may have brought one"
    desk.attempts.compare()
    desk.database.take("claims_of").answer({})
    assert not desk.attempts.must_be_alone


def test_a_new_connection_alone_keeps_no_master_from_its_work(desk: Desk) -> None:
    """No claim was under way, so none can have brought what is to be alone."""
    desk.attempts.on_connected()

    assert not desk.attempts.must_be_alone


def test_an_attempt_is_not_blamed_for_the_time_out_of_the_one_before_it(desk: Desk) -> None:
    """The executor is killed for its first attempt, whose answer was under way: it had begun with
    the second meanwhile."""
    (executor,) = desk.pool.executors
    desk.attempts._pace.note(0.0001)  # both are given to one executor
    execution = uuid4()
    first, second = a_claim(execution=execution), a_claim(execution=execution)
    desk.claimed(first, second, timeout_seconds=0.0)
    assert len(executor.work) == 2
    desk.turn()
    assert executor.killed

    answer = Completed(attempt=executor.work[0].number, result="1", committed=False)
    desk.attempts.on_message(executor, answer, time.monotonic())
    work = list(executor.work)
    executor.work.clear()
    desk.attempts.on_executor_end(work, "killed by SIGKILL", time.monotonic(), killed=True)

    assert [attempt.claim for attempt in work] == [second]
    assert "release" in desk.database.names
    assert "fail" not in desk.database.names


def test_the_time_that_an_attempt_is_frozen_is_not_running_time(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database was away for longer than the time-out: the attempt has the rest of its time when
    it goes on."""
    (executor,) = desk.pool.executors
    desk.claimed(a_claim(), timeout_seconds=10.0)
    now = desk.turn()
    frozen = True

    def is_frozen(_executor: object) -> bool:
        return frozen

    monkeypatch.setattr(desk.attempts, "_is_frozen", is_frozen)
    desk.attempts.turn(now + 100)
    frozen = False

    desk.attempts.turn(now + 105)
    assert not executor.killed
    desk.attempts.turn(now + 111)
    assert executor.killed


@pytest.mark.parametrize(
    "deaths, outcome", [(0, "release"), (3, "release"), (4, "fail")], ids=["none", "3", "4"]
)
def test_processes_that_died_are_counted_and_not_how_often_work_was_handed_back(
    desk: Desk, deaths: int, outcome: str
) -> None:
    """AT_MOST_ONCE work that kills five processes before author code begins is given up. How often it was claimed
    says nothing: a node that drains, or an execution that is suspended, hands it back as well."""
    (executor,) = desk.pool.executors
    desk.claimed(replace(a_claim(delivery="AT_MOST_ONCE"), claims=9, failures=deaths))
    work = list(executor.work)
    executor.work.clear()

    desk.attempts.on_executor_end(work, "killed by SIGSEGV", time.monotonic(), killed=False)

    told = desk.database.take(outcome).arguments
    assert told.get("died", False) is (outcome == "release")
    assert told.get("kind", "unstarted") == "unstarted"


def test_an_attempt_that_killed_its_executor_is_blamed(desk: Desk) -> None:
    (executor,) = desk.pool.executors
    desk.claimed(a_claim())
    work = list(executor.work)
    executor.work.clear()

    desk.attempts.on_executor_end(work, "killed by SIGSEGV", time.monotonic(), killed=False)

    assert "fail" in desk.database.names
    assert "release" not in desk.database.names


def test_a_claim_whose_reply_is_overtaken_by_a_comparison_is_not_handed_back(desk: Desk) -> None:
    """The claim went over the beat's connection, because the other had failed for long. The answer
    of a comparison that was asked for later comes first, and shows a claim that nobody knows here:
    handing back AT_MOST_ONCE work that is about to start would start it twice."""
    claim = a_claim(delivery="AT_MOST_ONCE")
    desk.attempts.notice_work()
    desk.turn()
    reply = desk.database.take("complete_and_claim")
    desk.attempts.on_carried_over()
    desk.attempts.compare()

    desk.database.take("claims_of").answer({claim.id: claim.token})
    assert not desk.database.names
    reply.answer(an_answer(claim))
    desk.turn()

    assert [run.partition_id for run in desk.pool.runs] == [claim.id]
    assert "release" not in desk.database.names


def test_operations_that_are_carried_over_make_a_comparison_under_way_worthless(desk: Desk) -> None:
    """The comparison was asked for before the claim; the claim took the other way and was quicker."""
    claim = a_claim(delivery="AT_MOST_ONCE")
    desk.attempts.compare()
    desk.attempts.notice_work()
    desk.turn()
    desk.attempts.on_carried_over()

    desk.database.take("claims_of").answer({claim.id: claim.token})

    assert "release" not in desk.database.names
    desk.database.take("complete_and_claim").answer(an_answer(claim))
    desk.turn()
    assert [run.partition_id for run in desk.pool.runs] == [claim.id]
    assert "release" not in desk.database.names


def test_a_comparison_that_is_carried_over_alone_counts(desk: Desk) -> None:
    """A node that has but the beat's connection for long asks for nothing else: no answer can be out of order."""
    desk.attempts.compare()
    desk.attempts.on_carried_over()

    desk.database.take("claims_of").answer({7: uuid4()})

    assert desk.database.names == ["release"]


def test_an_exchange_that_was_begun_and_answered_meanwhile_makes_a_comparison_worthless(
    desk: Desk,
) -> None:
    """One of the two was carried over: what the comparison saw may be older than the claim."""
    claim = a_claim(delivery="AT_MOST_ONCE")
    desk.attempts.compare()
    desk.attempts.notice_work()
    desk.turn()
    desk.attempts.on_carried_over()
    desk.database.take("complete_and_claim").answer(an_answer(claim))
    desk.turn()

    desk.database.take("claims_of").answer({7: uuid4()})

    assert "release" not in desk.database.names
    assert desk.attempts.needs_comparing


def test_an_end_that_was_answered_meanwhile_makes_a_comparison_that_was_carried_over_worthless(
    desk: Desk,
) -> None:
    """What it saw is older: the claim in it is not one whose end the server has lost."""
    (executor,) = desk.pool.executors
    claim = a_claim(delivery="AT_MOST_ONCE")
    desk.claimed(claim)
    number = executor.work[0].number
    desk.attempts.on_message(executor, Ready(attempt=number), time.monotonic())
    desk.attempts.compare()
    desk.attempts.on_carried_over()
    failed = Failed(attempt=number, error='{"type": "E", "message": ""}', retry="policy")
    desk.attempts.on_message(executor, failed, time.monotonic())
    desk.database.take("fail").answer("failed")

    desk.database.take("claims_of").answer({claim.id: claim.token})

    assert not {"fail", "release"} & set(desk.database.names)
    assert desk.attempts.needs_comparing


def test_a_claim_that_nobody_here_knows_is_handed_back(desk: Desk) -> None:
    """Its reply was lost with the connection."""
    desk.attempts.compare()

    desk.database.take("claims_of").answer({7: uuid4()})

    assert desk.database.names == ["release"]


def test_a_start_whose_end_the_server_lost_is_never_handed_back(desk: Desk) -> None:
    """Its completion was answered by a server that is gone: the one that was promoted shows the claim
    as it was before. Author code has run, so the claim ends with an unknown outcome."""
    (executor,) = desk.pool.executors
    claim = a_claim(delivery="AT_MOST_ONCE")
    desk.claimed(claim)
    number = executor.work[0].number
    desk.attempts.on_message(executor, Ready(attempt=number), time.monotonic())
    desk.attempts.on_message(
        executor, Completed(attempt=number, result="1", committed=False), time.monotonic()
    )
    desk.turn()
    desk.database.take("complete_and_claim").answer(
        Answer(outcomes={claim.id: "completed"}, claims=[], facts={})
    )

    desk.attempts.on_connected()
    desk.attempts.compare()
    desk.database.take("claims_of").answer({claim.id: claim.token})

    assert "release" not in desk.database.names
    desk.database.take("fail").answer("failed")


def test_an_attempt_whose_claim_was_taken_away_meanwhile_ends_a_beat_later(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off for two beats, taken for gone by evidence, and back before the lease has ended: nothing is
    frozen, and the claim is somebody else's. The first comparison may have crossed an answer; the second
    must not wait for a sweep, a minute later."""
    (executor,) = desk.pool.executors
    desk.claimed(a_claim())
    desk.attempts.on_connected()
    desk.attempts.compare()
    desk.database.take("claims_of").answer({})
    before = executor.killed, desk.attempts.needs_comparing

    now = time.monotonic() + desk.host.settings.beat_seconds
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert (before, desk.attempts.needs_comparing) == ((False, False), True)
    desk.attempts.compare()
    desk.database.take("claims_of").answer({})

    after = executor.killed, desk.attempts.needs_comparing
    assert after == (True, False)


def test_a_node_with_a_new_connection_is_not_idle_before_it_knows_its_claims(desk: Desk) -> None:
    """It drains when its connection breaks, the reply of its last claim with it. Were it to leave
    now, the claim of an AT_MOST_ONCE partition that never began would end as unknown."""
    before = desk.attempts.is_idle
    desk.attempts.on_connected()
    after = desk.attempts.is_idle
    assert (before, after) == (True, False)

    desk.attempts.compare()
    desk.database.take("claims_of").answer({7: uuid4()})

    desk.database.take("release").answer({7: "released"})
    assert desk.attempts.is_idle


def test_a_completion_whose_row_is_locked_holds_up_neither_others_nor_claims(desk: Desk) -> None:
    """Somebody holds the row of one of two: both are refused together, then one by one; the one in
    trouble is repeated by itself, and the node claims again."""
    (executor,) = desk.pool.executors
    desk.attempts._pace.note(0.0001)
    first, second = a_claim(), a_claim()
    desk.claimed(first, second)
    for attempt in list(executor.work):
        answer = Completed(attempt=attempt.number, result="1", committed=False)
        desk.attempts.on_message(executor, answer, time.monotonic())
    desk.attempts.notice_work()
    desk.turn()
    desk.fail("complete_and_claim", LockNotAvailable("locked"))
    desk.attempts.compare()
    desk.database.take("claims_of").answer({first.id: first.token, second.id: second.token})
    desk.turn()
    desk.fail("complete", LockNotAvailable("locked"))
    desk.turn()
    desk.fail("complete", LockNotAvailable("locked"))
    assert desk.database.names == ["complete"], "the first, by itself"

    desk.turn()

    assert desk.database.names == ["complete", "complete_and_claim"]


def test_completions_of_a_removed_incarnation_are_given_up_whatever_the_error(desk: Desk) -> None:
    """They are refused after the node has heard of its removal: nothing that was completed since is
    mistaken for them."""
    (executor,) = desk.pool.executors
    desk.claimed(a_claim(delivery="AT_MOST_ONCE"))
    number = executor.work[0].number
    desk.attempts.on_message(executor, Ready(attempt=number), time.monotonic())
    done = Completed(attempt=number, result="1", committed=False)
    desk.attempts.on_message(executor, done, time.monotonic())
    desk.attempts.on_connected()  # it claims nothing with it
    desk.turn()
    desk.attempts.removed()
    desk.host.node_id = uuid4()

    desk.fail("complete", DataError("no such number"))

    assert desk.database.names == ["record_evidence"]


def test_work_that_is_noticed_while_a_claim_is_under_way_is_claimed_at_once(desk: Desk) -> None:
    """The statement had its snapshot before the work was there, and its empty answer comes after the
    notification: without a second claim the node would idle until its next beat."""
    desk.attempts.notice_work()
    desk.turn()
    empty = desk.database.take("complete_and_claim")
    desk.attempts.notice_work()
    empty.answer(an_answer())

    desk.turn()

    desk.database.take("complete_and_claim").answer(an_answer())
    desk.turn()
    assert not desk.database.names, "an empty answer without a notice in between ends it"


def test_work_kept_ready_runs_out_now_and_then_for_what_needs_a_slot(desk: Desk) -> None:
    """AT_MOST_ONCE work and work that was lost before are only claimed for a free slot, and there is
    none while something is always kept ready."""
    attempts = desk.attempts
    attempts._pace.note(0.02)
    execution = uuid4()
    desk.claimed(a_claim(execution=execution))
    begun = time.monotonic()

    assert attempts._wanted(begun) == (0, 5)
    assert attempts._wanted(begun + PREFETCH_SECONDS_MAX + 0.1) == (0, 0)

    (executor,) = desk.pool.executors
    executor.work.clear()
    attempts._queue.clear()
    assert attempts._wanted(begun + PREFETCH_SECONDS_MAX + 0.1) == (1, 0)
    desk.turn()
    desk.database.take("complete_and_claim").answer(an_answer(a_claim(execution=execution)))
    assert attempts._wanted(time.monotonic())[1] > 0


def test_a_node_that_finds_nothing_to_keep_ready_asks_again_when_a_slot_is_free(
    desk: Desk,
) -> None:
    """It asked again and again, as fast as the database answers, while the last partition ran."""
    desk.attempts._pace.note(0.02)
    desk.claimed(a_claim())

    desk.database.take("complete_and_claim").answer(an_answer())
    desk.turn()
    assert not desk.database.names

    (executor,) = desk.pool.executors
    executor.work.clear()
    desk.turn()
    assert desk.database.names == ["complete_and_claim"]


def test_once_work_that_is_ready_after_the_end_of_the_lease_is_not_begun(desk: Desk) -> None:
    """No Go is sent for it: it is handed back, since author code cannot have begun."""
    (executor,) = desk.pool.executors
    desk.claimed(a_claim(delivery="AT_MOST_ONCE"))
    desk.host.board.extend(boottime_ns() - 1)

    number = executor.work[0].number
    desk.attempts.on_message(executor, Ready(attempt=number), time.monotonic())
    desk.attempts.on_message(executor, Stopped(attempt=number), time.monotonic())

    assert [type(message) for _, message in desk.pool.sent] == [Run, Stop]
    assert desk.database.names == ["release"]


@pytest.mark.parametrize(
    "outcome, message, logged",
    [
        ("retry", "no tariff\nDETAIL: for OO", "partition k: retried: ValueError: no tariff"),
        ("failed", "no tariff", "partition k: failed: ValueError: no tariff"),
        ("failed", "", "partition k: failed: ValueError"),
    ],
)
def test_the_log_says_why_an_attempt_failed(
    desk: Desk, caplog: pytest.LogCaptureFixture, outcome: str, message: str, logged: str
) -> None:
    (executor,) = desk.pool.executors
    desk.claimed(a_claim())
    number = executor.work[0].number
    error = json.dumps({"type": "ValueError", "message": message, "traceback": "long"})

    with caplog.at_level(logging.INFO, "rowlock.runtime.attempts"):
        failed = Failed(attempt=number, error=error, retry="policy")
        desk.attempts.on_message(executor, failed, time.monotonic())
        desk.database.take("fail").answer(outcome)

    assert [one.getMessage() for one in caplog.records] == [logged]


# -- named locks -----------------------------------------------------------------------------------


def asks_for_a_lock(desk: Desk, timeout_seconds: float | None = None) -> Attempt:
    """An attempt that runs, and waits for a lock; the first look is under way."""
    (executor,) = desk.pool.executors
    desk.claimed(a_claim())
    (attempt,) = executor.work
    request = Lock(request=1, attempt=attempt.number, name="x", timeout_seconds=timeout_seconds)
    desk.attempts.on_message(executor, request, time.monotonic())
    desk.turn()
    return attempt


def answers(desk: Desk) -> list[tuple[bool, str | None]]:
    return [(sent.ok, sent.body) for _, sent in desk.pool.sent if isinstance(sent, Reply)]


def lock_counts(desk: Desk) -> dict[str, float]:
    text = desk.host.metrics.render("")[0].decode()
    found = re.findall(
        r'^rowlock_lock_acquisitions_total{.*result="(\w+)"} (\S+)$', text, re.MULTILINE
    )
    return {result: float(value) for result, value in found if float(value)}


def test_a_lock_that_is_free_is_answered_at_once(desk: Desk) -> None:
    attempt = asks_for_a_lock(desk)

    desk.database.take("acquire_lock").answer("acquired")

    assert answers(desk) == [(True, "acquired")]
    assert set(attempt.locks) == {"x"}
    assert lock_counts(desk) == {"acquired": 1}


def test_a_busy_lock_is_looked_at_again_within_a_second(desk: Desk) -> None:
    asks_for_a_lock(desk)
    now = time.monotonic()
    for look in range(20):
        desk.database.take("acquire_lock").answer("busy")
        due = desk.attempts.next_due()
        assert due is not None
        assert due <= max(now, time.monotonic()) + 1.0, look
        now = due
        desk.attempts.turn(now)
    assert not answers(desk)

    desk.database.take("acquire_lock").answer("acquired")

    assert answers(desk) == [(True, "acquired")]
    assert lock_counts(desk) == {"waited": 1}


def test_who_has_waited_long_enough_is_told_after_a_look_that_had_an_answer(desk: Desk) -> None:
    asks_for_a_lock(desk, timeout_seconds=5.0)
    desk.attempts.turn(time.monotonic() + 60)
    assert not answers(desk), "while the database cannot answer, nobody gives up"

    desk.database.take("acquire_lock").answer("busy")
    desk.attempts.turn(time.monotonic() + 60)

    assert answers(desk) == [(True, "timed_out")]
    assert lock_counts(desk) == {"timed_out": 1}
    assert desk.attempts.next_due() is None


def test_an_attempt_that_is_to_stop_waits_no_longer_unless_it_has_the_lock(desk: Desk) -> None:
    attempt = asks_for_a_lock(desk)
    desk.attempts.executions_ended([attempt.claim.execution_id], time.monotonic())
    desk.turn()
    assert not answers(desk)

    desk.database.take("acquire_lock").answer("busy")
    desk.turn()

    assert answers(desk) == [(True, "stopped")]
    assert lock_counts(desk) == {"stopped": 1}


def test_a_claim_that_is_gone_ends_the_wait(desk: Desk) -> None:
    asks_for_a_lock(desk)

    desk.database.take("acquire_lock").answer("lost")

    assert answers(desk) == [(False, "lost")]
    assert lock_counts(desk) == {"lost": 1}


def test_nobody_waits_for_an_executor_that_has_died(desk: Desk) -> None:
    (executor,) = desk.pool.executors
    asks_for_a_lock(desk)
    work = list(executor.work)
    executor.work.clear()
    desk.attempts.on_executor_end(work, "killed by SIGKILL", time.monotonic(), killed=False)

    desk.database.take("acquire_lock").answer("busy")
    desk.turn()

    assert "acquire_lock" not in desk.database.names
    assert not answers(desk)
    assert lock_counts(desk) == {"stopped": 1}


def test_a_lock_is_given_back_before_its_holder_goes_on(desk: Desk) -> None:
    (executor,) = desk.pool.executors
    attempt = asks_for_a_lock(desk)
    desk.database.take("acquire_lock").answer("acquired")

    request = Unlock(request=2, attempt=attempt.number, name="x")
    desk.attempts.on_message(executor, request, time.monotonic())

    assert len(answers(desk)) == 1
    desk.database.take("release_lock").answer(True)
    assert answers(desk)[1:] == [(True, None)]
    assert not attempt.locks


def test_a_lock_that_was_held_until_the_commit_is_tidied_up(desk: Desk) -> None:
    (executor,) = desk.pool.executors
    attempt = asks_for_a_lock(desk)
    desk.database.take("acquire_lock").answer("acquired")

    done = Completed(attempt=attempt.number, result="1", committed=True)
    desk.attempts.on_message(executor, done, time.monotonic())

    assert "release_lock" in desk.database.names


# -- progress --------------------------------------------------------------------------------------


def tells(desk: Desk, counters: str = '{"done": 1}', request: int = 0) -> Attempt:
    """An attempt that runs and tells something of itself."""
    (executor,) = desk.pool.executors
    if not executor.work:
        desk.claimed(a_claim())
    (attempt,) = executor.work
    told = Progress(attempt=attempt.number, counters=counters, request=request)
    desk.attempts.on_message(executor, told, time.monotonic())
    return attempt


def test_progress_is_written_now_and_then_not_each_time_it_is_told(desk: Desk) -> None:
    now = time.monotonic()
    for number in range(50):
        tells(desk, f'{{"done": {number}}}')
        desk.attempts.turn(now)
    assert desk.database.names.count("report") <= 1

    desk.attempts.turn(now + 10)

    assert desk.database.names.count("report") <= 2
    desk.attempts.turn(now + 20)
    assert desk.database.names.count("report") <= 2, "nothing new was told"


def test_progress_that_has_no_answer_yet_is_not_written_again(desk: Desk) -> None:
    """In an outage of hours it would pile up, and be written before the next beat when that is over."""
    now = time.monotonic()
    for number in range(50):
        tells(desk, f'{{"done": {number}}}')
        desk.attempts.turn(now + 10 * number)
    assert desk.database.names.count("report") == 1

    desk.database.take("report").answer(set())
    desk.attempts.turn(now + 1000)

    assert desk.database.names.count("report") == 1, "what was told meanwhile"


def test_what_must_be_known_before_the_completion_is_answered(desk: Desk) -> None:
    attempt = tells(desk, '{"skipped": 1}', request=5)
    assert not answers(desk)

    desk.database.take("report").answer({attempt.claim.id})

    assert answers(desk) == [(True, None)]
    tells(desk, '{"skipped": 2}', request=6)
    desk.database.take("report").answer(set())
    assert answers(desk)[1:] == [(False, None)]


def test_how_far_a_failed_attempt_came_is_written_before_its_failure(desk: Desk) -> None:
    (executor,) = desk.pool.executors
    attempt = tells(desk)
    failed = Failed(attempt=attempt.number, error='{"type": "E", "message": ""}', retry="policy")

    desk.attempts.on_message(executor, failed, time.monotonic())

    assert desk.database.names[-2:] == ["report", "fail"]
