"""The executions that this node drives: plan, seal, watch, finish, end.

One extra executor, which is no slot, runs partition() and finish(), one at a time. Every write names
the epoch of the mastership; when one changes nothing, another node has taken over and this one
drops the execution.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID

from rowlock.db.store import Store
from rowlock.errors import ContractError
from rowlock.protocol import ownership
from rowlock.protocol.backoff import delay_seconds
from rowlock.protocol.lines import pause_seconds
from rowlock.protocol.model import FIRST_STEP, Mastership, Progress
from rowlock.protocol.statuses import ENDED
from rowlock.runtime.attempts import INFRASTRUCTURE_DELAY_SECONDS
from rowlock.runtime.host import Host
from rowlock.runtime.messages import (
    CommitUnknown,
    Failed,
    Finish,
    Finished,
    Lost,
    Message,
    Plan,
    Planned,
    Reply,
    Results,
    Slices,
    Stopped,
)
from rowlock.runtime.pool import Executor, Pool

log = logging.getLogger(__name__)

SEAL_SECONDS_MAX: Final = 3600.0
RESULTS_PAGE: Final = 500
RESULTS_PAGE_BYTES: Final = 512 * 1024
"""Bytes of results in one answer; escaping twice can make four times as much of them."""
TICK_SECONDS_MIN: Final = 0.02
TICK_SECONDS_MAX: Final = 1.0
TICK_SHARE: Final = 0.1
"""The next look comes after a tenth of the time that has passed: quick for short executions."""

MASTERS_LOST_MAX: Final = 5
"""After so many lost masters the next one does not call author code again, which would take all nodes along."""

SUPERSEDED: Final = "SUPERSEDED"
IN_AUTHOR_CODE: Final = {"PLANNING": "partition()", "FINISHING": "finish()"}
"""In which states of an execution its master runs which method of the author's."""

Call: TypeAlias = Literal["plan", "finish"]


@dataclass(slots=True, eq=False)
class Master:
    """One execution under this node's epoch, and what is being done about it."""

    mastership: Mastership
    since: float
    number: int | None = None
    """Number of the call that runs in the executor."""
    call: Call = "plan"
    """The author's method that runs, or ran last."""
    chunks: int = 0
    slices: int = 0
    """What partition() has yielded so far."""
    looking: bool = False
    look_at: float | None = None
    finish_at: float | None = None
    finish_failures: int = 0
    counts: dict[str, int] = field(default_factory=dict[str, int])
    missing: bool = False

    @property
    def execution_id(self) -> UUID:
        """The execution."""
        return self.mastership.execution_id

    def describe(self) -> dict[str, Any]:
        """The fields that log lines about this execution carry."""
        return {
            "execution": str(self.execution_id),
            "job": self.mastership.job,
            "epoch": self.mastership.epoch,
        }


class Masters:
    """All masterships of a node."""

    def __init__(
        self,
        host: Host,
        pool: Pool[Any],
        executor: Executor[Any],
        on_progress: Callable[[UUID, Progress], None],
    ) -> None:
        self._host = host
        self._pool = pool
        self._executor = executor
        self._on_progress = on_progress
        self._driven: dict[UUID, Master] = {}
        self._calls: deque[tuple[Master, Call]] = deque()
        self._running: Master | None = None
        self._adopting = False
        self._comparing = False
        self._compare_again_at: float | None = None
        """Something was missing in the last comparison: when to look whether it still is."""
        self.adoptable = False
        """A level: an execution may wait for a master, and this node knows its job."""

    # -- what the node asks --------------------------------------------------------------------

    @property
    def executions(self) -> set[UUID]:
        """The executions that this node drives."""
        return set(self._driven)

    def next_due(self) -> float | None:
        """When the next look or finish() is due (monotonic)."""
        times = [
            t for m in self._driven.values() for t in (m.look_at, m.finish_at) if t is not None
        ]
        return min(times, default=None)

    def turn(self, now: float, *, held: bool = False) -> None:
        """Do all that is due.

        :param held: an attempt is to be alone on this node: no author code may begin beside it.
        """
        if self.adoptable and self._is_free and not held and not self._host.draining:
            self.adopt(None)
        if self._driven and self._executor.is_failing:
            log.error(
                "giving back %d executions: no executor can be started",
                len(self._driven),
                extra={"event": "masterships_given_back", "count": len(self._driven)},
            )
            self._give_back()
        for master in list(self._driven.values()):
            if master.look_at is not None and now >= master.look_at and not master.looking:
                self._look(master)
            if master.finish_at is not None and now >= master.finish_at:
                master.finish_at = None
                self._calls.append((master, "finish"))
        if not held:
            self._start_call()

    @property
    def _is_free(self) -> bool:
        """Whether a plan could begin now.

        A node that is busy with one, or whose executor cannot start (a broken installation), would
        keep what it adopts from nodes that are free.
        """
        return self._executor.ready and self._running is None and not self._calls

    def adopt(self, execution: UUID | None) -> None:
        """Try to become master of this execution, or of the first that waits."""
        looking = execution is None
        if not self._host.lease_holds or (looking and self._adopting):
            return
        if looking:
            self._adopting = True
            self.adoptable = False
        node_id = self._host.node_id

        def answered() -> None:
            if looking:
                self._adopting = False

        def done(mastership: Mastership | None) -> None:
            answered()
            if node_id != self._host.node_id:
                return
            if mastership is not None:
                self.adoptable = True  # where one waited, more may
                self._drive(mastership)
            elif execution is not None and execution not in self._driven:
                self._report_superseded(execution)  # another node was quicker, or it is over

        self._host.work.ask(
            lambda store: store.adopt(node_id, execution), done, lambda _error: answered()
        )

    def on_message(self, message: Message) -> None:
        """Take in an answer of the masters' executor."""
        master = self._running
        if master is None or getattr(message, "attempt", None) != master.number:
            return
        match message:
            case Slices():
                self._stage(master, message)
            case Planned(total=total):
                self._over(master)
                self._seal(master, total)
            case Results(request=request, after=after):
                self._page(master, request, after)
            case Finished(summary=summary, committed=committed):
                self._over(master)
                self._finished(master, summary, committed=committed)
            case Failed():
                self._over(master)
                self._failed(master, message)
            case Lost() | Stopped():
                self._over(master)
                self._look(master)
            case CommitUnknown():
                self._over(master)
                self._look(master)  # either it has ended, or finish() runs again
            case _:
                log.error("unexpected message %s", message, extra={"event": "protocol_error"})

    def on_executor_end(self, how: str) -> None:
        """The masters' executor is gone, with the call that it ran."""
        master = self._running
        if master is None:
            return
        self._over(master)
        if master.execution_id in self._driven and self._driven[master.execution_id] is master:
            error = {"type": "ExecutorDied", "message": f"the process that ran it died: {how}"}
            self._failed(master, Failed(attempt=0, error=json.dumps(error), retry="policy"))

    def executions_ended(self, executions: Iterable[UUID]) -> None:
        """Executions are closing or over: look at once, and end what still plans or finishes."""
        for execution in executions:
            master = self._driven.get(execution)
            if master is None:
                continue
            self._abort_call(master)
            self._look(master)

    def drain(self) -> None:
        """Give every execution back, for another node to take at once."""
        self._give_back()

    def _give_back(self) -> None:
        node_id = self._host.node_id
        for master in list(self._driven.values()):
            self._drop(master)
            execution, epoch = master.execution_id, master.mastership.epoch
            self._host.work.tell(_resign(node_id, execution, epoch))
            if not self._host.draining:
                self._report_superseded(execution)

    def removed(self) -> None:
        """This incarnation was removed: it drives nothing any more."""
        for master in list(self._driven.values()):
            self._drop(master)
            self._superseded(master)

    def compare(self) -> None:
        """Compare what this node believes to drive with what the database says."""
        if self._comparing:
            return
        self._comparing = True
        node_id = self._host.node_id
        self._compare_again_at = None

        def again() -> None:
            self._comparing = False
            if any(master.missing for master in self._driven.values()):
                self._compare_again_at = time.monotonic() + self._host.settings.beat_seconds

        def done(driven: dict[UUID, int]) -> None:
            self._comparing = False
            if node_id != self._host.node_id or self._host.draining:
                return
            mine = {(m.execution_id, m.mastership.epoch): m for m in self._driven.values()}
            difference = ownership.compare(driven, mine)
            for execution, _ in difference.unknown:  # the reply of the adoption was lost
                self.adopt(execution)
            for mastership, master in mine.items():
                gone = mastership in difference.gone
                if gone and master.missing:
                    self._look(master)
                master.missing = gone
            again()

        self._host.work.ask(
            lambda store: store.masterships_of(node_id), done, lambda _error: again()
        )

    @property
    def needs_comparing(self) -> bool:
        """Whether something that was missing may be driven elsewhere already."""
        again_at = self._compare_again_at
        return again_at is not None and time.monotonic() >= again_at

    def thaw_confirmed(self) -> None:
        """Let partition() or finish() continue after the lease was renewed.

        Nothing it does is accepted under a lost epoch, so its mastership needs no confirmation.
        """
        if self._host.lease_holds and self._host.board.frozen(self._executor.index):
            self._host.board.thaw(self._executor.index)

    # -- driving -------------------------------------------------------------------------------

    def _drive(self, mastership: Mastership) -> None:
        earlier = self._driven.get(mastership.execution_id)
        if earlier is not None:
            self._drop(earlier)
        now = time.monotonic()
        master = Master(mastership=mastership, since=now)
        self._driven[mastership.execution_id] = master
        log.info(
            "master of execution %s",
            mastership.execution_id,
            extra={"event": "master_adopted", "status": mastership.status, **master.describe()},
        )
        if mastership.epoch > 1:
            self._host.metrics.takeovers.inc()
        if mastership.masters_lost >= MASTERS_LOST_MAX and mastership.status in IN_AUTHOR_CODE:
            self._give_up(master)
        elif mastership.status == "PLANNING":
            self._calls.append((master, "plan"))
        else:
            master.look_at = now

    def _give_up(self, master: Master) -> None:
        """Its author code has taken one master after the other along: this node does not try it too."""
        what = IN_AUTHOR_CODE[master.mastership.status]
        message = (
            f"{master.mastership.masters_lost} masters were lost while {what} ran: it may take its"
            " node along, for example with all of its memory"
        )
        if master.mastership.status == "PLANNING":
            self._fail_plan(master, "PlanFailed", message)
        else:
            self._fail_finish(master, message)

    def _look(self, master: Master) -> None:
        if master.looking:
            return
        master.looking = True
        master.look_at = None
        node_id = self._host.node_id
        execution, epoch = master.execution_id, master.mastership.epoch

        def run(store: Store) -> tuple[Progress, float]:
            began = time.monotonic()
            return store.advance(node_id, execution, epoch), time.monotonic() - began

        def done(answer: tuple[Progress, float]) -> None:
            master.looking = False
            if self._driven.get(execution) is master:
                self._see(master, *answer)

        def failed(_error: Exception) -> None:
            master.looking = False
            master.look_at = time.monotonic() + TICK_SECONDS_MAX

        self._host.work.ask(run, done, failed)

    def _see(self, master: Master, progress: Progress, took_seconds: float) -> None:
        now = time.monotonic()
        if progress.status == SUPERSEDED:
            self._drop(master)
            self._superseded(master)
            return
        self._on_progress(master.execution_id, progress)
        if progress.status in ENDED:
            self._drop(master)
            log.info(
                "execution %s: %s",
                master.execution_id,
                progress.status,
                extra={"event": "execution_ended", "status": progress.status, **master.describe()},
            )
        elif progress.status == "FINISHING":
            master.counts = {
                "total": progress.total or 0,
                "completed": progress.completed,
                "failed": progress.failed,
                "cancelled": progress.cancelled,
            }
            if master is not self._running and master.finish_at is None:
                master.finish_at = now
        elif progress.status != "PLANNING":
            wait = (now - master.since) * TICK_SHARE
            tick = min(TICK_SECONDS_MAX, max(TICK_SECONDS_MIN, wait))
            master.look_at = now + max(tick, pause_seconds(took_seconds))

    def _drop(self, master: Master) -> None:
        if self._driven.get(master.execution_id) is master:
            del self._driven[master.execution_id]
        self._abort_call(master)

    def _superseded(self, master: Master) -> None:
        log.warning(
            "another node is the master of execution %s now",
            master.execution_id,
            extra={"event": "master_superseded", **master.describe()},
        )
        self._report_superseded(master.execution_id)

    def _report_superseded(self, execution: UUID) -> None:
        self._on_progress(execution, Progress(status=SUPERSEDED))

    # -- calls of author code ------------------------------------------------------------------

    def _start_call(self) -> None:
        if self._running is not None or not self._calls or not self._executor.ready:
            return
        if not self._host.lease_holds or self._host.board.frozen(self._executor.index):
            return
        master, call = self._calls.popleft()
        if self._driven.get(master.execution_id) is not master:
            return
        self._running = master
        master.call = call
        master.number = next(self._host.numbers)
        self._pool.give(self._executor, master, freezable=True)
        if call == "plan":
            self._plan(master, master.number)
        else:
            self._finish(master, master.number)

    def _plan(self, master: Master, number: int) -> None:
        mastership = master.mastership
        master.chunks = 0

        def done(cluster: str) -> None:
            if self._running is master and master.number == number:
                self._pool.send(
                    self._executor,
                    Plan(
                        attempt=number,
                        job=mastership.job,
                        execution_id=str(mastership.execution_id),
                        step=FIRST_STEP,
                        parameters=mastership.parameters,
                        cluster=cluster,
                    ),
                )

        self._host.work.tell(lambda store: store.cluster(mastership.pool), done)

    def _finish(self, master: Master, number: int) -> None:
        mastership = master.mastership
        self._pool.send(
            self._executor,
            Finish(
                attempt=number,
                job=mastership.job,
                execution_id=str(mastership.execution_id),
                epoch=mastership.epoch,
                parameters=mastership.parameters,
                counts=json.dumps(master.counts),
            ),
        )

    def _over(self, master: Master) -> None:
        """The call has answered, or its executor is gone."""
        if self._running is master:
            self._running = None
            master.number = None
            if master in self._executor.work:
                self._pool.taken_back(self._executor, master)

    def _abort_call(self, master: Master) -> None:
        """Author code of an execution that ends, or is driven elsewhere, is killed."""
        if self._running is master:
            self._running = None
            master.number = None
            self._pool.kill(self._executor)

    def _stage(self, master: Master, message: Slices) -> None:
        execution, epoch = master.execution_id, master.mastership.epoch
        chunk = master.chunks
        master.chunks += 1
        master.slices += len(message.keys)
        limit = self._host.settings.plan_partitions_max
        if 0 < limit < master.slices:
            self._abort_call(master)
            self._fail_plan(
                master,
                "PlanTooLarge",
                f"partition() has yielded more than {limit:,} slices: make them larger, or raise"
                " ROWLOCK_PLAN_PARTITIONS_MAX",
            )
            return

        def done(staged: bool) -> None:
            if self._running is not master:
                return
            self._pool.send(self._executor, Reply(request=message.request, ok=staged))

        self._host.work.tell(
            lambda store: store.stage(
                execution,
                epoch,
                chunk,
                keys=message.keys,
                slices=message.slices,
                weights=message.weights,
            ),
            done,
        )

    def _seal(self, master: Master, total: int) -> None:
        execution, epoch = master.execution_id, master.mastership.epoch

        def done(answer: tuple[str, str | None]) -> None:
            outcome, detail = answer
            if outcome == "duplicate":
                self._fail_plan(
                    master,
                    "DuplicatePartitionKey",
                    f"partition key {detail} twice: make key() unique",
                )
            elif outcome == "incomplete":
                self._fail_plan(
                    master, "PlanIncomplete", f"{detail} of {total} partitions were staged"
                )
            else:
                self._look(master)

        self._host.work.tell(
            lambda store: store.seal(execution, epoch, FIRST_STEP, total),
            done,
            limit_seconds=SEAL_SECONDS_MAX,
        )

    def _page(self, master: Master, request: int, after: int) -> None:
        execution = master.execution_id

        def done(rows: list[tuple[int, str, str | None]]) -> None:
            if self._running is master:
                body = json.dumps(fitting_results(rows))
                self._pool.send(self._executor, Reply(request=request, ok=True, body=body))

        self._host.work.tell(lambda store: store.results(execution, after, RESULTS_PAGE), done)

    def _finished(self, master: Master, summary: str | None, *, committed: bool) -> None:
        if committed:
            self._look(master)
            return
        execution, epoch = master.execution_id, master.mastership.epoch
        self._host.work.tell(
            lambda store: store.finish(execution, epoch, summary=summary),
            lambda _status: self._look(master),
        )

    def _failed(self, master: Master, message: Failed) -> None:
        """partition() or finish() raised, or its executor died."""
        what = json.loads(message.error)
        text = f"{what.get('type')}: {what.get('message')}"
        if master.call == "plan":
            if what.get("type") == ContractError.__name__:
                self._host.metrics.rejected("plan")
            self._fail_plan(master, "PlanFailed", f"partition() failed with {text}")
            return
        wait = self._finish_wait(master, message)
        if wait is not None:
            master.finish_at = time.monotonic() + wait
            log.warning(
                "finish() failed with %s; again in %.1f s",
                text,
                wait,
                extra={"event": "finish_failed", **master.describe()},
            )
            return
        self._fail_finish(master, f"finish() failed with {text}")

    def _fail_finish(self, master: Master, message: str) -> None:
        execution, epoch = master.execution_id, master.mastership.epoch
        self._host.work.tell(
            lambda store: store.finish(execution, epoch, reason="FinishFailed", message=message),
            lambda _status: self._look(master),
        )

    def _finish_wait(self, master: Master, message: Failed) -> float | None:
        """Seconds until finish() runs again; None: it does not."""
        draw, policy = self._host.rng.random(), master.mastership.policy
        # As with partitions, these two cost no failure.
        if message.retry == "later":
            return message.delay_seconds or 0.0
        if message.retry == "infrastructure":
            return INFRASTRUCTURE_DELAY_SECONDS * (1 + draw)
        master.finish_failures += 1
        if message.retry == "never" or master.finish_failures >= int(policy["max_attempts"]):
            return None
        return delay_seconds(policy, failures=master.finish_failures, draw=draw)

    def _fail_plan(self, master: Master, reason: str, message: str) -> None:
        node_id = self._host.node_id
        execution, epoch = master.execution_id, master.mastership.epoch
        log.error("no plan: %s", message, extra={"event": "plan_failed", **master.describe()})
        self._host.work.tell(
            lambda store: store.fail_plan(node_id, execution, epoch, reason, message),
            lambda _done: self._look(master),
        )


def fitting_results(
    rows: list[tuple[int, str, str | None]],
) -> list[tuple[int, str, str | None]]:
    """The first rows, at least one, that one message can hold; the executor asks for the rest."""
    size = 0
    for count, (_, key, result) in enumerate(rows):
        size += len(key.encode()) + len((result or "").encode())
        if count and size > RESULTS_PAGE_BYTES:
            return rows[:count]
    return rows


def _resign(node_id: UUID, execution: UUID, epoch: int) -> Callable[[Any], bool]:
    return lambda store: bool(store.resign(node_id, execution, epoch))
