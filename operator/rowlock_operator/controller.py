"""The operator's loops: what feeds the queue, and what is done when a key's turn comes."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeAlias

from rowlock.errors import Unavailable
from rowlock_operator import rights
from rowlock_operator.act import Next, Turn
from rowlock_operator.cache import Cache, Gone, Key
from rowlock_operator.client import (
    BATCHJOBS,
    JOBS,
    ApiError,
    Forbidden,
    Kubernetes,
    Missing,
    Resource,
    Unreachable,
)
from rowlock_operator.database import Database, Declined
from rowlock_operator.events import emit
from rowlock_operator.metrics import Metrics
from rowlock_operator.mirror import Mirror
from rowlock_operator.model import LABEL_EXECUTION, DeletionPolicy, Options, Requeue
from rowlock_operator.observe import Observer
from rowlock_operator.poolfile import PoolFile
from rowlock_operator.reconcile import reconcile
from rowlock_operator.settings import Settings
from rowlock_operator.sweeper import Absences, Listing, suspects
from rowlock_operator.workqueue import WorkQueue

log = logging.getLogger(__name__)

Work: TypeAlias = Key | Gone

WORKERS: Final = 4
PASSES_MAX: Final = 10
"""Looks at one BatchJob in one turn; then others are due."""
TURN_SECONDS_MAX: Final = 60.0
STUCK_SECONDS: Final = 180.0
"""A loop that has not turned for so long will not turn again: the pod is to be restarted."""
_GONE_SECONDS: Final = 1.0
"""How long an execution outlives its BatchJob: time to see whether the whole kind is being removed."""
_POOLS_SECONDS: Final = 10.0
_SETTLE_SECONDS: Final = 8.0
"""How long an operator that ends may see to what cannot wait for the next one."""
_RIGHTS_SECONDS: Final = 600.0
"""How often the operator asks for its rights; sooner after the API server has refused something."""
_FAILURES_TOLD: Final = 3
"""After so many failures in a row an event tells of them."""


class Controller:
    """One operator. Its loops end when `run` is cancelled, and only then."""

    def __init__(
        self,
        settings: Settings,
        *,
        kubernetes: Kubernetes,
        rewatch: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make it.

        Args:
            settings: Its settings.
            kubernetes: The API server.
            rewatch: Called when BatchJobs have become a kind of this cluster, which nobody watches
                yet.
            clock: Monotonic seconds.
        """
        self._settings = settings
        self._kubernetes = kubernetes
        self._rewatch = rewatch
        self._clock = clock
        self._scopes: tuple[str | None, ...] = tuple(sorted(settings.namespaces)) or (None,)
        self.queue: WorkQueue[Work] = WorkQueue()
        self.metrics = Metrics(depth=lambda: self.queue.depth)
        self.cache = Cache()
        self.database = Database(settings.connection_string, settings.cluster)
        self._pools = PoolFile(settings.pools_file)
        self.observer = Observer(
            cache=self.cache,
            database=self.database,
            kubernetes=kubernetes,
            options=self._options,
        )
        self.mirror = Mirror(
            database=self.database,
            observer=self.observer,
            metrics=self.metrics,
            changed=self._changed,
            turned=self._database_turned,
            sync_seconds=settings.sync_seconds,
        )
        self._absences = Absences(settings.sweep_seconds)
        self._listed = asyncio.Event()
        self._list_problem = "nothing has been listed yet"
        self._is_kind_missing = False
        self._missing_right = ""
        self._rights_due = float("-inf")
        self._turns: dict[str, float] = {}

    # -- what the watches bring ----------------------------------------------------------------

    def batchjob_event(self, kind: str | None, found: Mapping[str, Any]) -> None:
        """A BatchJob was seen, has changed, or is gone (`DELETED`)."""
        self.metrics.last_event.set(time.time())
        if kind == "DELETED":
            self._gone(self.cache.drop_batchjob(found))
            return
        key, is_news, before = self.cache.put_batchjob(found)
        if before is not None:
            self._gone(before)
        if is_news:
            self.queue.add(key)

    def job_event(self, kind: str | None, found: Mapping[str, Any]) -> None:
        """A Job of a master run was seen, has changed, or is gone."""
        self.metrics.last_event.set(time.time())
        put = self.cache.drop_job if kind == "DELETED" else self.cache.put_job
        key = put(found)
        if key is not None:
            self.queue.add(key)

    def _gone(self, gone: Gone) -> None:
        self.observer.forget(gone.uid)
        self.queue.add_after(gone, _GONE_SECONDS)

    def _changed(self, key: Key) -> None:
        if self.cache.batchjob(key) is not None:
            self.queue.add(key)

    def _database_turned(self, up: bool) -> None:
        # Not all at once when it comes back; and when it goes, each is to say so when it is time.
        delay = 0.0 if up else self._settings.stale_seconds
        for key in self.cache.places():
            self.queue.add_after(key, delay + random.uniform(0.0, self._settings.sync_seconds))

    # -- loops ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until cancelled."""
        loops: dict[str, Callable[[], Awaitable[None]]] = {
            "mirror": self.mirror.turn,
            "resync": self._resync_turn,
            "sweeper": self._sweep_turn,
            "pools": self._pools_turn,
        }
        try:
            async with asyncio.TaskGroup() as group:
                for name, turn in loops.items():
                    group.create_task(self._repeat(name, turn), name=name)
                for number in range(WORKERS):
                    group.create_task(self._repeat(f"worker-{number}", self._work), name="worker")
        finally:
            self.queue.close()
            await self.database.close()

    async def _repeat(self, name: str, turn: Callable[[], Awaitable[None]]) -> None:
        """Take one turn after another; an error of ours is logged and ends none of them."""
        if name.startswith("worker"):
            # Before the first list a Job that is there would be missed, and made again.
            await self._listed.wait()
        while True:
            self._turns[name] = self._clock()
            try:
                await turn()
            except Exception:
                log.exception(f"{name} failed", extra={"event": "loop_failed", "loop": name})
                await asyncio.sleep(1.0)

    async def _work(self) -> None:
        """One turn of a worker: wait for a key and see to it."""
        try:
            async with asyncio.timeout(TURN_SECONDS_MAX):
                work = await self.queue.take()
        except TimeoutError:
            return  # nothing to do, and that is worth a sign of life
        try:
            with self.metrics.reconcile_seconds.time():
                async with asyncio.timeout(TURN_SECONDS_MAX):
                    await (self._release(work) if isinstance(work, Gone) else self._see_to(work))
            self.queue.succeeded(work)
        except Exception as error:  # noqa: BLE001 - one key that fails must not end the worker
            await self._failed(work, error)
        finally:
            self.queue.done(work)

    # -- one BatchJob --------------------------------------------------------------------------

    async def _see_to(self, key: Key) -> None:
        """Observe, decide and act, until there is nothing to do now."""
        turn = Turn(
            cache=self.cache,
            database=self.database,
            kubernetes=self._kubernetes,
            observer=self.observer,
            metrics=self.metrics,
        )
        for _ in range(PASSES_MAX):
            seen = self.cache.batchjob(key)
            if seen is None:
                return
            observed = await self.observer.observe(
                seen,
                in_the_way=turn.in_the_way,
                create_problem=turn.create_problem,
                answer=turn.answer,
            )
            after = Next.GO_ON
            for action in reconcile(observed):
                if isinstance(action, Requeue):
                    self.queue.add_after(key, action.seconds)
                    continue
                after = await turn.act(observed, action)
                if after is not Next.GO_ON:
                    break
            if after is Next.STOP:
                return
            if after is Next.GO_ON:
                due = self.observer.pods_due_seconds(seen.batchjob)
                if due is not None:
                    self.queue.add_after(key, due)
                return
        log.warning(
            f"{key.namespace}/{key.name} does not come to rest",
            extra={"event": "reconcile_restless", "namespace": key.namespace, "batchjob": key.name},
        )
        self.queue.add_after(key, self._settings.sync_seconds)

    async def _failed(self, work: Work, error: Exception) -> None:
        reason = _reason(error)
        self.metrics.reconcile_errors.labels(reason).inc()
        if isinstance(error, Forbidden):
            self._rights_due = float("-inf")
        pause = self.queue.retry(work)
        log.log(
            logging.ERROR if reason == "internal" else logging.WARNING,
            f"{work.namespace}/{work.name}: {str(error) or type(error).__name__};"
            f" again in {pause:.1f} s",
            exc_info=error if reason == "internal" else None,
            extra={
                "event": "reconcile_failed",
                "reason": reason,
                "namespace": work.namespace,
                "batchjob": work.name,
            },
        )
        seen = None if isinstance(work, Gone) else self.cache.batchjob(work)
        if seen is None or reason not in {"internal", "declined"}:
            return
        if self.queue.failures(work) == _FAILURES_TOLD:
            what = str(error) if reason == "declined" else f"{type(error).__name__}, see the log"
            text = f"the operator cannot handle this BatchJob: {what}"
            turn = Turn(
                cache=self.cache,
                database=self.database,
                kubernetes=self._kubernetes,
                observer=self.observer,
                metrics=self.metrics,
            )
            told = emit(seen.batchjob, "InternalError", text, seen.batchjob.generation, "Warning")
            await turn.emit(seen.batchjob, told)

    # -- BatchJobs that are gone ---------------------------------------------------------------

    async def _release(self, gone: Gone) -> None:
        """Do with the execution of a deleted BatchJob what it said."""
        for row in await self.database.live_executions_of(gone.uid):
            run = row.execution.execution_id
            if gone.policy is not DeletionPolicy.CANCEL:
                if row.execution.deletion_policy != gone.policy.stored:
                    await self.database.orphan(run, f"deletionPolicy of {_name(gone)}")
            elif await self._is_uninstalled():
                await self.database.orphan(run, "BatchJobs are no kind of this cluster any more")
            else:
                await self.database.cancel(run, f"BatchJob {_name(gone)} was deleted")
                log.info(
                    f"cancelled execution {run}: BatchJob {_name(gone)} was deleted",
                    extra={"event": "execution_cancelled", "execution": str(run)},
                )

    async def settle(self) -> None:
        """Before the end: release what waits for it, as far as a few seconds suffice.

        The next operator finds it too. But if the whole kind was removed and comes back, it could not
        tell that from BatchJobs that somebody has deleted.
        """
        try:
            async with asyncio.timeout(_SETTLE_SECONDS):
                for work in self.queue.pending():
                    if isinstance(work, Gone):
                        await self._release(work)
                await self._orphan_if_uninstalled()
        except (ApiError, Unavailable, TimeoutError) as error:
            log.info(f"left to the next operator: {error}", extra={"event": "release_skipped"})

    async def _orphan_if_uninstalled(self) -> bool:
        """If the kind is gone, and every BatchJob with it, let their executions outlive them.

        Also those whose end no watch has told: it may have been refused before that.
        """
        if not await self._is_uninstalled():
            return False
        for row in suspects(await self.database.live(), is_known=()):
            await self.database.orphan(
                row.execution.execution_id, "BatchJobs are no kind of this cluster any more"
            )
        return True

    async def _is_uninstalled(self) -> bool:
        """Whether the kind itself is being removed, which deletes every BatchJob on the way."""
        return "create" not in await self._kubernetes.served(BATCHJOBS)

    async def _sweep_turn(self) -> None:
        await self._listed.wait()
        try:
            await self.database.expire()
            await self.sweep()
        except (ApiError, Unavailable) as error:
            log.info(f"nothing is swept now: {error}", extra={"event": "sweep_skipped"})
        await asyncio.sleep(self._settings.sweep_seconds)

    async def sweep(self) -> None:
        """Cancel the executions whose BatchJob has gone without our noticing.

        Raises:
            ApiError: The API server does not answer.
            Unavailable: The database does not answer.
        """
        if self._is_kind_missing and await self._orphan_if_uninstalled():
            return
        known = self.cache.uids()
        # The executions first: a BatchJob that asked for one of them existed before the list.
        rows = suspects(await self.database.live(), is_known=known)
        if not rows:
            self._absences.orphans((), Listing(uids=(), namespaces=()), self._clock())
            return
        listing = await self._list_uids()
        orphans = self._absences.orphans(rows, listing, self._clock())
        if not orphans or await self._is_uninstalled():
            return
        for row in orphans:
            run = row.execution.execution_id
            await self.database.cancel(run, f"BatchJob {row.namespace}/{row.name} is gone")
            self.metrics.swept.inc()
            log.info(
                f"cancelled execution {run}: BatchJob {row.namespace}/{row.name} is gone",
                extra={"event": "execution_swept", "execution": str(run)},
            )

    async def _list_uids(self) -> Listing:
        uids: set[str] = set()
        namespaces: set[str] = set()
        for namespace in self._scopes:
            found, problem = await self._list("sweeper", BATCHJOBS, namespace)
            if found is None:
                log.info(f"not swept: {problem}", extra={"event": "sweep_skipped"})
                continue
            uids.update(str(one["metadata"]["uid"]) for one in found)
            namespaces.add(namespace or "")
        whole = "" in namespaces
        return Listing(uids=uids, namespaces=None if whole else namespaces)

    # -- everything, again ---------------------------------------------------------------------

    async def _resync_turn(self) -> None:
        await self._look_at_rights()
        listed = await self.resync()
        if listed:
            self._listed.set()
        pause = self._settings.resync_seconds
        await asyncio.sleep(pause if listed and not self._missing_right else min(5.0, pause))

    async def resync(self) -> bool:
        """List everything and let it be looked at again.

        Returns:
            Whether every list succeeded.
        """
        problems: list[str] = []
        for namespace in self._scopes:
            try:
                problems += filter(None, [await self._resync_batchjobs(namespace)])
                problems += filter(None, [await self._resync_jobs(namespace)])
            except Unreachable as error:
                problems.append(str(error))
                break  # each of the others would take as long to say so
        if problems and problems[0] != self._list_problem:
            log.warning(f"cannot list: {problems[0]}", extra={"event": "list_failed"})
        self._list_problem = problems[0] if problems else ""
        if problems:
            return False
        self.metrics.last_list.set(time.time())
        self.observer.forget_all_but(self.cache.uids())
        if self._is_kind_missing:
            self._is_kind_missing = False
            log.info(
                "BatchJobs have become a kind of this cluster", extra={"event": "kind_appeared"}
            )
            self._rewatch()
        first = not self._listed.is_set()
        spread = 0.0 if first else min(10.0, self._settings.resync_seconds / 4)
        for key in self.cache.places():
            self.queue.add_after(key, random.uniform(0.0, spread))
        return True

    async def _look_at_rights(self) -> None:
        if self._clock() < self._rights_due:
            return
        found = ""
        try:
            for namespace in self._scopes:
                self._turns["resync"] = self._clock()
                found = await rights.missing(self._kubernetes, namespace)
                if found:
                    break
        except ApiError:
            return  # as good as not asked; the lists tell why
        if found and found != self._missing_right:
            log.error(f"missing right: {found}", extra={"event": "right_missing"})
        self._missing_right = found
        self._rights_due = float("-inf") if found else self._clock() + _RIGHTS_SECONDS

    async def _resync_batchjobs(self, namespace: str | None) -> str:
        asked_at = self._clock()
        found, problem = await self._list("resync", BATCHJOBS, namespace)
        if found is None:
            return problem
        gone = self.cache.replace_batchjobs(found, namespace=namespace, asked_at=asked_at)
        for one in gone:
            self._gone(one)
        return ""

    async def _resync_jobs(self, namespace: str | None) -> str:
        asked_at = self._clock()
        found, problem = await self._list("resync", JOBS, namespace, LABEL_EXECUTION)
        if found is None:
            return problem
        self.cache.replace_jobs(found, namespace=namespace, asked_at=asked_at)
        return ""

    async def _list(
        self, loop: str, resource: Resource, namespace: str | None, labels: str | None = None
    ) -> tuple[list[dict[str, Any]] | None, str]:
        """A list, or why there is none.

        Raises:
            Unreachable: The API server does not answer, nor would it for another list.
        """
        # An API server that does not answer costs half a minute for each list, and is no reason
        # to restart this pod.
        self._turns[loop] = self._clock()
        try:
            return await self._kubernetes.list_all(resource, namespace, labels=labels), ""
        except Unreachable:
            raise
        except ApiError as error:
            self._is_kind_missing |= resource == BATCHJOBS and isinstance(error, Missing)
            where = f"namespace {namespace}" if namespace else "all namespaces"
            return None, f"list {resource} in {where}: {error.message}"

    async def _pools_turn(self) -> None:
        await asyncio.sleep(_POOLS_SECONDS)
        if self._pools.refresh():
            for key in self.cache.places():
                self.queue.add(key)

    def _options(self) -> Options:
        settings = self._settings
        return Options(
            cluster=settings.cluster,
            pools=self._pools.pools,
            pools_problem=self._pools.problem,
            allow_pod_template=settings.allow_pod_template,
            stale_seconds=settings.stale_seconds,
            resync_seconds=settings.resync_seconds,
        )

    # -- probes --------------------------------------------------------------------------------

    def livez(self) -> str | None:
        """What keeps the loops from turning; None if they turn. API server and database may be away."""
        now = self._clock()
        limit = STUCK_SECONDS + max(self._settings.resync_seconds, self._settings.sweep_seconds)
        for name, turned in self._turns.items():
            if now - turned > limit:
                return f"{name} has not turned for {now - turned:.0f} s"
        if self.queue.longest_seconds > STUCK_SECONDS:
            return f"one BatchJob has been looked at for {self.queue.longest_seconds:.0f} s"
        return None

    def readyz(self) -> str | None:
        """What keeps the operator from its work; None if nothing does."""
        if self._list_problem:
            return self._list_problem
        if self._missing_right:
            return f"missing right: {self._missing_right}"
        return (
            f"the database does not answer: {self.mirror.problem}" if self.mirror.problem else None
        )


def _name(gone: Gone) -> str:
    return f"{gone.namespace}/{gone.name}"


def _reason(error: Exception) -> str:
    match error:
        case Unavailable():
            return "database"
        case Declined():
            return "declined"
        case ApiError():
            return "api"
        case TimeoutError():
            return "timeout"
        case _:
            return "internal"
