"""A node: the supervisor that owns everything, from registration to the last write.

One main loop turns over the executors' sockets and the mailbox; two threads speak to the database,
one process guards the lease, and author code runs in the executors alone.
"""

from __future__ import annotations

import logging
import os
import random
import selectors
import signal
import socket
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final
from uuid import UUID

import psycopg

import rowlock
from rowlock.db.connect import is_pooled
from rowlock.db.migrate import check, too_new
from rowlock.db.store import Store
from rowlock.errors import (
    RowlockError,
    SchemaAhead,
    SchemaMismatch,
    Unavailable,
    UsageError,
)
from rowlock.protocol.model import Progress, ServerIdentity
from rowlock.registry import Registry
from rowlock.runtime import processes
from rowlock.runtime.attempts import Attempts
from rowlock.runtime.children import Children
from rowlock.runtime.follower import Follower
from rowlock.runtime.health import HealthServer
from rowlock.runtime.heartbeat import Heartbeat, Look, Report
from rowlock.runtime.host import Host
from rowlock.runtime.mailbox import Mailbox
from rowlock.runtime.masters import Masters
from rowlock.runtime.messages import Message
from rowlock.runtime.metrics import NodeMetrics
from rowlock.runtime.pool import Executor, Pool
from rowlock.runtime.retention import Retention
from rowlock.runtime.transaction import check_work_database
from rowlock.runtime.watch import Watch
from rowlock.runtime.watchdog import LeaseBoard, Watchdog, boottime_ns
from rowlock.runtime.work import Work
from rowlock.settings import FILE_VARIABLES, Settings

log = logging.getLogger(__name__)

TURN_SECONDS_MAX: Final = 0.2
"""The longest sleep of the main loop."""
HOUSEKEEPING_SECONDS: Final = 0.02
"""How often to look for what no message brings about."""
BEATING_SECONDS_MAX: Final = 300.0
"""How long one beat may be on its way. Each wait in it is bounded, but name servers that do not answer
take their time, for each name that is tried; what exceeds this will never end."""
LEAVE_SECONDS_MAX: Final = 5.0
"""How long a drained node waits for the database to take its last writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What a node is asked to be."""

    name: str = ""
    """For people; "" = the host's name."""
    pool: str = "default"
    slots: int = 1
    """Attempts at a time; 0 = it only drives executions."""
    imports: tuple[str, ...] = ()
    """Modules that its executors import beside the entry points."""
    http_port: int | None = None
    """Where /metrics, /livez and /readyz are; None = nowhere, 0 = the system chooses."""
    only_execution: UUID | None = None
    """Claims and drives this execution alone."""


class Node:
    """One node. `run` returns when it has left; SIGTERM and SIGINT drain it, twice ends it at once."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        options: NodeOptions,
        *,
        on_progress: Callable[[UUID, Progress], None] | None = None,
        on_registered: Callable[[], None] | None = None,
    ) -> None:
        self.settings = settings
        self.registry = registry
        self.options = options
        self.name = options.name or socket.gethostname()
        self.http_port: int | None = None
        """The port that /metrics is really on."""
        self._on_progress = on_progress
        self._on_registered = on_registered
        self._signals = 0
        self._housekeeping_at = 0.0
        self._fatal: Exception | None = None
        self._leaving = False
        self._left = False
        self._turned_at = time.monotonic()
        self._looked_at: float | None = None
        self._frozen_since: float | None = None
        self._leave_by: float | None = None
        self._unfit: SchemaMismatch | None = None
        """Why this node waits for another schema, or for another release of itself."""
        self._stands_aside = False
        """It drains because of the schema, and not to leave."""
        self._report: Report | None = None
        self._server: ServerIdentity | None = None
        self._carries_over = False
        self._checking = False
        self._server_is_sure = False
        self._follower: Follower | None = None
        self._announced: UUID | None = None
        """The incarnation whose backend each new work connection is. Of the work thread."""

    # -- life ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Be a node until drained.

        :raises RowlockError: the schema does not fit this version, or a port cannot be bound.
        """
        processes.become_subreaper()
        with self._parts(), self._handled_signals():
            self._register()
            while not self._left and self._fatal is None:
                self._turn()
        if self._fatal is not None:
            raise self._fatal

    def drain(self) -> None:
        """Leave gracefully: claim nothing more, let work end or hand it back. Main thread only."""
        self._stands_aside = False
        self._drain()

    def _drain(self) -> None:
        if self.host.draining:
            return
        self.host.draining = True
        log.info("draining", extra={"event": "node_draining", "node": str(self.host.node_id)})
        now = time.monotonic()
        self.masters.drain()
        self.attempts.drain(now)
        self._leave_by = now + self.settings.drain_seconds + LEAVE_SECONDS_MAX
        self._publish()
        self._heartbeat.hurry()

    def follow(self, execution: UUID) -> None:
        """Report the progress of an execution also while another node drives it. Main thread only."""
        if self._follower is None:
            self._follower = Follower(self.host, execution, self._progressed)

    @contextmanager
    def _parts(self) -> Generator[None]:
        settings, options = self.settings, self.options
        rng = random.Random()
        children = Children()
        self._mailbox = Mailbox()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._mailbox, selectors.EVENT_READ)
        board = LeaseBoard.create(options.slots + 1)
        self._children, self._board = children, board
        self._watchdog = Watchdog.start(children, board)
        metrics = NodeMetrics(options.pool, self.registry.names)
        metrics.slots_total.set(options.slots)
        dsn = settings.dsn or ""
        cap = settings.removal_grace_seconds / 2
        work = Work(
            dsn,
            self._mailbox,
            application_name=f"rowlock node {self.name}"[:63],
            beat_seconds=settings.beat_seconds,
            limit_seconds=settings.unreachable_seconds,
            reconnect_cap_seconds=cap,
            may_connect=self._may_connect,
            on_lost=lambda: self._heartbeat.hurry(),  # noqa: PLW0108  there is none yet
            announce=self._announce,
            on_connected=self._connected,
            on_notified=self._notified,
            on_crash=self._crashed,
            observe=metrics.queried,
            rng=rng,
        )
        self.host = Host(
            settings=settings,
            registry=self.registry,
            metrics=metrics,
            board=board,
            work=work,
            rng=rng,
            node_id=uuid.uuid4(),
        )
        pool: Pool[Any] = Pool(
            options.slots + 1,
            children=children,
            board=board,
            selector=self._selector,
            imports=options.imports,
            env=self._executor_environment(),
            on_message=self._on_message,
            on_end=self._on_end,
            recycle_attempts=settings.recycle_attempts,
            memory_bytes_max=settings.executor_memory_mb * 1024 * 1024,
        )
        self._pool = pool
        self._master_executor = pool.executors[-1]
        self.attempts = Attempts(self.host, pool, options.slots)
        self.masters = Masters(self.host, pool, self._master_executor, self._progressed)
        self._watch = Watch(self.host)
        self._retention = Retention(self.host)
        self._heartbeat = Heartbeat(
            dsn,
            self._mailbox,
            board,
            application_name=f"rowlock beat {self.name}"[:63],
            beat_seconds=settings.beat_seconds,
            lease_seconds=settings.lease_seconds,
            limit_seconds=settings.unreachable_seconds,
            reconnect_cap_seconds=cap,
            evidence=settings.evidence,
            report=lambda: self._report,
            is_turning=lambda: self._turns(self._turned_at),
            on_look=self._look,
            on_failure=self._look_failed,
            on_crash=self._crashed,
            observe=metrics.queried,
            rng=rng,
        )
        http: HealthServer | None = None
        try:
            if options.http_port is not None:
                http = HealthServer(
                    options.http_port, render=metrics.render, livez=self.livez, readyz=self.readyz
                )
                self.http_port = http.port
                log.info("listening", extra={"event": "http_listening", "port": http.port})
            work.start()
            self._heartbeat.start()
            yield
        finally:
            if http is not None:
                http.close()
            self._heartbeat.stop()
            work.stop()
            pool.close()
            self._watchdog.close()
            children.end_orphans()
            board.close()
            self._selector.close()

    @contextmanager
    def _handled_signals(self) -> Generator[None]:
        def handle(_signum: int, _frame: FrameType | None) -> None:
            self._signals += 1
            self._housekeeping_at = 0.0
            self._mailbox.wake()

        before = {
            signum: signal.signal(signum, handle) for signum in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _executor_environment(self) -> dict[str, str]:
        # What a file said is in the settings, as the address of that file.
        env = {k: v for k, v in os.environ.items() if k not in FILE_VARIABLES}
        if self.settings.dsn is not None:
            env["ROWLOCK_DSN"] = self.settings.dsn
        if self.settings.work_dsn is not None:
            env["ROWLOCK_WORK_DSN"] = self.settings.work_dsn
        return env

    # -- the main loop -------------------------------------------------------------------------

    def _turn(self) -> None:
        now = time.monotonic()
        due = [at for at in (self.masters.next_due(), self.attempts.next_due()) if at is not None]
        wait = min([TURN_SECONDS_MAX, *(max(0.0, at - now) for at in due)])
        for key, _ in self._selector.select(wait):
            executor: Executor[Any] | None = key.data
            if executor is None:
                self._mailbox.deliver()
            elif isinstance(key.fileobj, int):  # the descriptor of its exit
                self._housekeeping_at = 0.0
            else:
                self._pool.receive(executor)
        now = self._turned_at = time.monotonic()
        if now >= self._housekeeping_at:
            self._keep_house(now)
        self.attempts.turn(now)
        self.masters.turn(now, held=self.attempts.must_be_alone)
        self._pool.flush()
        self._leave_if_done(now)

    def _keep_house(self, now: float) -> None:
        """What no message brings about; apart, because a busy node turns thousands of times a second."""
        self._housekeeping_at = now + HOUSEKEEPING_SECONDS
        self._obey_signals()
        self._pool.turn(now)
        self._guard_watchdog()
        self._heartbeat.end_stuck(now)
        self.host.work.end_stuck(now)
        self._carry_over(now)
        self._mind_the_lease(now)
        self._watch.turn(now, self._compare)
        self._retention.turn(now)
        if self._follower is not None:
            self._follower.turn(now, driven=bool(self.masters.executions))
        self._publish_if_due()

    def _obey_signals(self) -> None:
        if self._signals == 1:
            self.drain()
        elif self._signals > 1:
            self._left = True

    def _guard_watchdog(self) -> None:
        if self._watchdog.poll() is None:
            return
        log.error("the watchdog died: starting another", extra={"event": "watchdog_died"})
        self._watchdog = Watchdog.start(self._children, self._board)
        if self.host.lease_holds:
            # The old one may have stopped executors without noting it.
            for executor in self._pool.executors:
                self._board.thaw(executor.index)

    def _carry_over(self, now: float) -> None:
        """The beat speaks for the whole node: waiting writes go over its connection if theirs fails."""
        work = self.host.work
        if work.unanswered_seconds(now) <= self.settings.unreachable_seconds:
            return
        taken = work.take_over() if self.host.registered else []
        if taken:
            log.log(
                logging.DEBUG if self._carries_over else logging.WARNING,
                "%d operations go over the beat's connection",
                len(taken),
                extra={"event": "work_carried_over", "count": len(taken)},
            )
            self._carries_over = True
            self._heartbeat.carry(taken)
            self.attempts.on_carried_over()
            self._watch.reconnected()

    def _mind_the_lease(self, now: float) -> None:
        frozen = any(self._board.frozen(executor.index) for executor in self._pool.executors)
        if frozen and self._frozen_since is None:
            self._frozen_since = now
            self.host.metrics.lease_ends.inc()
            log.warning(
                "the lease has ended without an answered beat: AT_LEAST_ONCE work is frozen",
                extra={"event": "lease_ended", "node": str(self.host.node_id)},
            )
        elif not frozen:
            self._frozen_since = None
        self.attempts.give_up_frozen(now, self._frozen_since)
        self.masters.thaw_confirmed()
        if self.attempts.needs_comparing:
            self.attempts.compare()
        if self.masters.needs_comparing:
            self.masters.compare()

    def _leave_if_done(self, now: float) -> None:
        if not self.host.draining or self._leaving:
            if self._leave_by is not None and now > self._leave_by:
                log.warning("leaving without the database", extra={"event": "node_left"})
                self._drained()
            return
        overdue = self._leave_by is not None and now > self._leave_by
        if not self.host.registered:
            if overdue or not self.attempts.load:  # orphans may still end
                self._drained()
        elif overdue or (self.attempts.is_idle and not self.host.work.waiting):
            self._leaving = True
            self._leave_by = now + LEAVE_SECONDS_MAX
            self._report = None
            node_id = self.host.node_id

            def done(_left: bool) -> None:
                log.info("left", extra={"event": "node_left", "node": str(node_id)})
                if node_id == self.host.node_id:
                    self._drained()

            self.host.work.tell(lambda store: store.deregister(node_id, "drained"), done)

    def _drained(self) -> None:
        """Nothing is held any more: end, unless it was for the schema's sake."""
        if not self._stands_aside:
            self._left = True
        elif self.options.only_execution is not None:
            self._fatal = self._unfit
        else:
            self._stands_aside = self._leaving = self.host.draining = False
            self._leave_by = None
            self._begin_anew()

    # -- being a member ------------------------------------------------------------------------

    def _register(self) -> None:
        """Register a new incarnation; claims and beats begin when the database has answered."""
        options, node_id = self.options, self.host.node_id
        definitions = list(self.registry.definitions.values())
        jobs = {definition.name: [definition.contract_hash] for definition in definitions}

        def run(store: Store) -> int | RowlockError:
            problem = self._hindrance(store)
            if problem is not None:
                return problem
            self._have_both_connections(store)
            sent = boottime_ns()
            store.register(
                node_id,
                name=self.name,
                pool=options.pool,
                slots=options.slots,
                jobs=jobs,
                version=rowlock.__version__,
                only_execution=options.only_execution,
            )
            self._announced = node_id
            self._announce(store)
            for definition in definitions:
                store.publish_contract(
                    definition.name,
                    definition.contract_hash,
                    schemas=definition.schemas,
                    policy=definition.policy,
                    delivery=definition.job.delivery,
                )
            return sent

        def done(answer: int | RowlockError) -> None:
            if isinstance(answer, RowlockError):
                self._fatal = answer
                return
            self._board.extend(answer + int(self.settings.lease_seconds * 1e9))
            self.host.registered = True
            self._looked_at = time.monotonic()
            self._publish()
            self._heartbeat.hurry()
            log.info(
                "registered as %s",
                node_id,
                extra={"event": "node_registered", "node": str(node_id), "pool": options.pool},
            )
            if self._on_registered is not None:
                self._on_registered()

        self.host.work.tell(run, done)

    def _hindrance(self, store: Store) -> RowlockError | None:
        """Why this node must end instead of registering; None: nothing is in its way.

        :raises Unavailable: something is that will pass, or that others will mend.
        """
        try:
            check(store.connection)
        except Unavailable:
            raise  # an outage of all times just now: repeated like any other operation
        except SchemaMismatch as error:
            # Only nodes of its own release could do more for an execution.
            if isinstance(error, SchemaAhead) and self.options.only_execution is not None:
                return error
            # Whoever installs or upgrades may start nodes before the migrations have run, or
            # have old ones start again after them. To end would help nobody.
            self._unfit = error
            raise Unavailable(str(error)) from error
        except RowlockError as error:
            return error
        self._unfit = None
        if is_pooled(store.connection):
            try:
                check_work_database(self.settings.work_dsn or self.settings.dsn or "")
            except UsageError as error:
                return UsageError(
                    "ROWLOCK_DSN leads through a pooler of transactions, so ctx.transaction() needs"
                    f" another way: {error}"
                )
        return None

    def _may_connect(self, lost_at: float) -> bool:
        """Whether the work connection may be opened again: a member sees first that it can beat."""
        return self._report is None or self._heartbeat.has_beaten_since(lost_at)

    def _have_both_connections(self, store: Store) -> None:
        """Be no member with one connection where the server has no room for two, and keep none.

        Otherwise nodes that start together may share its last connections so that each has one to
        register with and none has one to beat: all are removed, and stay.
        """
        try:
            self._heartbeat.connect()
        except Unavailable:
            store.connection.close()
            raise

    def _announce(self, store: Store) -> None:
        """Say whose backend this is: at the registration, and over each new work connection."""
        if self._announced is not None:
            store.connected(self._announced, "work", evidence=self.settings.evidence)

    def _removed(self) -> None:
        """Somebody removed this incarnation: end what may run elsewhere, and begin anew."""
        log.error(
            "this node was removed: AT_LEAST_ONCE work ends, registering anew",
            extra={"event": "node_was_removed", "node": str(self.host.node_id)},
        )
        self._begin_anew()

    def _begin_anew(self) -> None:
        """This incarnation is over; unless the node is on its way out, there is another."""
        self.host.registered = False
        self._report = None
        self._board.extend(0)
        self.attempts.removed()
        self.masters.removed()
        self.host.node_id = uuid.uuid4()
        if not self.host.draining:
            self._register()

    def _stand_aside(self, problem: SchemaAhead) -> None:
        """The schema went on without this code: hand everything back, then wait to be upgraded.

        As far as the functions that hand it back are still there, which an order of upgrade as
        documented makes sure of. A node that ended instead would be started again and again.
        """
        if self.host.draining:
            return
        log.error(
            "standing aside: %s",
            problem,
            extra={"event": "schema_ahead", "node": str(self.host.node_id)},
        )
        self._unfit = problem
        self._stands_aside = True
        self._drain()

    def _look(self, look: Look) -> None:
        metrics = self.host.metrics
        metrics.beat_duration.observe(look.answered_at - look.sent_at)
        metrics.beat_lateness.observe(look.late_seconds)
        metrics.clock_offset.set(look.clock_offset_seconds)
        metrics.database_up.set(1)
        if look.node_id != self.host.node_id or not self.host.registered:
            return
        if self._leaving:
            return  # a beat that crossed our own deregistration finds the row REMOVED
        answer = look.answer
        if not answer.alive:
            self._removed()
            return
        self._looked_at = time.monotonic()
        problem = too_new(answer.schema)
        if problem is not None:
            self._stand_aside(problem)
        self._ask_for_server()
        self._watch.look(look)
        # Never back to false: the answer may be older than a notification that came before it.
        if answer.claimable:
            self.attempts.notice_work()
        self.masters.adoptable = self.masters.adoptable or answer.adoptable
        if answer.ended:
            self.attempts.executions_ended(answer.ended, self._looked_at)
            self.masters.executions_ended(answer.ended)

    def _look_failed(self, error: Exception) -> None:
        self.host.metrics.beat_failures.inc()
        self.host.metrics.database_up.set(0)
        self._server_is_sure = False
        self._watch.look_failed()
        if isinstance(error, Unavailable) and self.host.registered:
            self.host.work.give_way()  # there may be room for one only
        if isinstance(error, psycopg.errors.UndefinedFunction) and not self.host.draining:
            # Not even a beat is left of the schema that this code knows.
            self._check()

    def _check(self) -> None:
        if not self._checking:
            self._checking = True
            self.host.work.ask(lambda store: check(store.connection), self._checked, self._checked)

    def _checked(self, error: object) -> None:
        self._checking = False
        if isinstance(error, SchemaAhead):
            self._stand_aside(error)

    def _ask_for_server(self) -> None:
        """Find out which server it is, after every break: a replica may have been promoted meanwhile."""
        if self._server_is_sure:
            return
        self._server_is_sure = True
        node_id = self.host.node_id

        def done(server: ServerIdentity) -> None:
            before, self._server = self._server, server
            self.host.metrics.database.info(server.labels)
            if before is not None and before != server:
                log.warning(
                    "the database is on another server or timeline: what the one before answered last"
                    " may be lost",
                    extra={"event": "server_changed", **server.labels},
                )

        def failed(_error: Exception) -> None:
            self._server_is_sure = False

        self.host.work.ask(lambda store: store.notice_server(node_id), done, failed)

    def _progressed(self, execution: UUID, progress: Progress) -> None:
        if self._on_progress is not None:
            self._on_progress(execution, progress)

    def _crashed(self, error: Exception) -> None:
        self._fatal = error

    def _connected(self) -> None:
        self._server_is_sure = self._carries_over = False
        self.attempts.on_connected()
        if self.host.registered:
            self.masters.compare()
            self._watch.reconnected()

    def _compare(self) -> None:
        self.attempts.compare()
        self.masters.compare()

    def _notified(self, payload: str) -> None:
        if payload == "work":
            self.attempts.notice_work()
        elif payload == "adopt":
            self.masters.adoptable = True
        elif payload == "control":
            self._heartbeat.hurry()
        elif payload == "ended" and self._follower is not None:
            self._follower.hurry()

    def _publish_if_due(self) -> None:
        if (
            self._report is None
            or self._turned_at - self._published_at < self.settings.beat_seconds / 2
        ):
            return
        self._publish()

    def _publish(self) -> None:
        """Say what the next beat is to say; the heartbeat's thread only ever reads it."""
        self._published_at = self._turned_at
        load = self.attempts.load
        self.host.metrics.slots_used.set(load)
        self.host.metrics.oldest_attempt_age.set(self.attempts.oldest_age(self._turned_at))
        if not self.host.registered or self._leaving:
            return
        self._report = Report(
            node_id=self.host.node_id,
            load=load,
            draining=self.host.draining,
            orphans=self.attempts.orphans,
            executions=tuple(self.attempts.executions | self.masters.executions),
        )

    # -- executors -----------------------------------------------------------------------------

    def _on_message(self, executor: Executor[Any], message: Message) -> None:
        if executor is self._master_executor:
            self.masters.on_message(message)
        else:
            self.attempts.on_message(executor, message, time.monotonic())

    def _on_end(self, executor: Executor[Any], work: list[Any], how: str) -> None:
        if executor is self._master_executor:
            self.masters.on_executor_end(how)
        else:
            self.attempts.on_executor_end(work, how, time.monotonic(), killed=executor.killed)

    # -- health --------------------------------------------------------------------------------

    def _turns(self, stamp: float) -> bool:
        return time.monotonic() - stamp < max(self.settings.removal_seconds, 5.0)

    def livez(self) -> str | None:
        """None while the loops turn, whatever the database does."""
        if not self._turns(self._turned_at):
            return "the main loop stands still"
        heartbeat = self._heartbeat
        if not self._turns(heartbeat.turned_at) and not heartbeat.is_beating:
            return "the heartbeat's loop stands still"
        if time.monotonic() - heartbeat.turned_at > BEATING_SECONDS_MAX:
            return "a beat never ends"
        return None

    def readyz(self) -> str | None:
        """None while this node is registered, hears the database and takes work."""
        if self._unfit is not None:
            return str(self._unfit)
        if not self.host.registered:
            return "not registered"
        if self.host.draining:
            return "draining"
        looked_at = self._looked_at
        if looked_at is None or time.monotonic() - looked_at > self.settings.unreachable_seconds:
            return "no answered beat for too long"
        if any(executor.is_failing for executor in self._pool.executors):
            return "executors cannot be started"
        return None
