"""Carry out what was decided about a BatchJob, one action at a time."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import Enum, auto
from typing import Any, Final

from rowlock_operator.cache import Cache
from rowlock_operator.client import (
    BATCHJOBS,
    EVENTS,
    JOBS,
    ApiError,
    Conflict,
    Forbidden,
    Invalid,
    Kubernetes,
    Missing,
)
from rowlock_operator.database import Database
from rowlock_operator.metrics import Metrics
from rowlock_operator.model import (
    API_VERSION,
    KIND,
    Action,
    Answer,
    BatchJob,
    CreateJob,
    DeleteBatchJob,
    DeleteJob,
    Emit,
    Observed,
    PatchStatus,
    Requeue,
)
from rowlock_operator.observe import Observer
from rowlock_operator.status import merge_patch

log = logging.getLogger(__name__)

_COMPONENT: Final = "rowlock-operator"
_EVENT_TEXT_MAX: Final = 1_024
"""What the API server accepts as the message of an event."""


class Next(Enum):
    """What comes after an action."""

    GO_ON = auto()
    """The next action."""
    LOOK_AGAIN = auto()
    """Something has changed that the decision did not know: observe, and decide anew."""
    STOP = auto()
    """The BatchJob is gone."""


class Turn:
    """Carries out the actions of one turn of a BatchJob, and notes what came of them."""

    def __init__(
        self,
        *,
        cache: Cache,
        database: Database,
        kubernetes: Kubernetes,
        observer: Observer,
        metrics: Metrics,
    ) -> None:
        self._cache = cache
        self._database = database
        self._kubernetes = kubernetes
        self._observer = observer
        self._metrics = metrics
        self.create_problem = ""
        """Why the API server refused a Job in this turn; empty if it did not."""
        self.answer: Answer | None = None
        """What the database said to a request in this turn; None if nothing was requested."""
        self.in_the_way: set[str] = set()
        """Names of Jobs that were found in this turn where ours should be."""

    async def act(self, observed: Observed, action: Action) -> Next:
        """Carry out one action. `Requeue` is none: the queue's owner does that.

        Raises:
            Unavailable: The database does not answer; look again later.
            ApiError: The API server does not, or does not want to.
        """
        batchjob = observed.batchjob
        match action:
            case CreateJob():
                return await self._create_job(batchjob, action.manifest)
            case DeleteJob():
                await self._delete_job(batchjob, action)
            case PatchStatus():
                return await self._patch_status(observed, action)
            case Emit():
                await self.emit(batchjob, action)
            case DeleteBatchJob():
                return await self._delete_batchjob(batchjob, action)
            case Requeue():
                pass
            case _:
                try:
                    answer = await self._database.act(action)
                finally:
                    # Also after an error: the call may have taken effect.
                    self._observer.acted(batchjob.uid)
                if answer is not None:
                    self.answer = answer
                return Next.LOOK_AGAIN
        return Next.GO_ON

    async def _create_job(self, batchjob: BatchJob, manifest: Mapping[str, Any]) -> Next:
        name = str(manifest["metadata"]["name"])
        try:
            self._cache.put_job(await self._kubernetes.create(JOBS, batchjob.namespace, manifest))
        except Conflict:
            return await self._look_at_job(batchjob, name)
        except (Forbidden, Invalid) as error:
            self.create_problem = error.message
            log.warning(
                f"Job {name} is refused: {error.message}",
                extra={"event": "job_refused", **_about(batchjob)},
            )
            return Next.LOOK_AGAIN
        self._metrics.jobs_created.labels("created").inc()
        log.info(f"created Job {name}", extra={"event": "job_created", **_about(batchjob)})
        return Next.GO_ON

    async def _look_at_job(self, batchjob: BatchJob, name: str) -> Next:
        """A Job of this name is there: ours, by another replica, or somebody else's."""
        self.in_the_way.add(name)
        try:
            found = await self._kubernetes.get(JOBS, batchjob.namespace, name)
        except Missing:
            self._cache.forget_job(batchjob.namespace, name)
            return Next.LOOK_AGAIN
        self._cache.put_job(found)
        seen = self._cache.jobs_of(batchjob, (name,)).get(name)
        ours = seen is not None and seen.job.owner_uid == batchjob.uid
        self._metrics.jobs_created.labels("exists" if ours else "conflict").inc()
        return Next.LOOK_AGAIN

    async def _delete_job(self, batchjob: BatchJob, action: DeleteJob) -> None:
        try:
            await self._kubernetes.delete(JOBS, batchjob.namespace, action.name, uid=action.uid)
        except Conflict:
            return  # another Job by now
        log.info(f"deleted Job {action.name}", extra={"event": "job_deleted", **_about(batchjob)})

    async def _patch_status(self, observed: Observed, action: PatchStatus) -> Next:
        batchjob = observed.batchjob
        try:
            patched = await self._kubernetes.patch_status(
                batchjob.namespace,
                batchjob.name,
                resource_version=batchjob.resource_version,
                patch=merge_patch(batchjob.status, action.status),
            )
        except ApiError as error:
            self._metrics.status_patches.labels(str(error.status)).inc()
            if isinstance(error, Conflict):
                return await self._refresh(batchjob)
            if isinstance(error, Missing):
                return self._lost(batchjob)
            raise
        self._metrics.status_patches.labels("200").inc()
        self._cache.put_batchjob(patched)
        self._observer.shown(batchjob.uid, observed.execution)
        return Next.GO_ON

    async def _refresh(self, batchjob: BatchJob) -> Next:
        """The BatchJob has changed under our hands, and the watch has not told us yet."""
        try:
            found = await self._kubernetes.get(BATCHJOBS, batchjob.namespace, batchjob.name)
        except Missing:
            return self._lost(batchjob)
        self._cache.put_batchjob(found)
        return Next.LOOK_AGAIN

    def _lost(self, batchjob: BatchJob) -> Next:
        """It is gone, and the watch has not told us yet. When it does, the execution is seen to."""
        log.info("the BatchJob is gone", extra={"event": "batchjob_gone", **_about(batchjob)})
        return Next.STOP

    async def _delete_batchjob(self, batchjob: BatchJob, action: DeleteBatchJob) -> Next:
        try:
            await self._kubernetes.delete(
                BATCHJOBS,
                batchjob.namespace,
                batchjob.name,
                uid=action.uid,
                resource_version=action.resource_version,
            )
        except Conflict:
            return await self._refresh(batchjob)
        log.info(
            "deleted the BatchJob: its time to live is over",
            extra={"event": "batchjob_expired", **_about(batchjob)},
        )
        return Next.STOP

    async def emit(self, batchjob: BatchJob, emit: Emit) -> None:
        """Create an event. It is for people: whatever the API server says to it stops nothing."""
        try:
            await self._kubernetes.create(EVENTS, batchjob.namespace, event_of(batchjob, emit))
        except (Conflict, Forbidden, Missing):
            return  # it was told already, or the namespace is being deleted
        except ApiError as error:
            log.warning(f"event {emit.reason} is lost: {error}", extra={"event": "event_lost"})


def event_of(batchjob: BatchJob, emit: Emit) -> dict[str, Any]:
    """The manifest of an event about a BatchJob."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": emit.name, "namespace": batchjob.namespace},
        "type": emit.type,
        "reason": emit.reason,
        "message": emit.message[:_EVENT_TEXT_MAX],
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": batchjob.name,
            "namespace": batchjob.namespace,
            "uid": batchjob.uid,
            "resourceVersion": batchjob.resource_version,
        },
        "source": {"component": _COMPONENT},
        "reportingComponent": _COMPONENT,
        "reportingInstance": os.environ.get("POD_NAME") or socket.gethostname(),
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def _about(batchjob: BatchJob) -> dict[str, str]:
    """Fields of a log line."""
    return {"namespace": batchjob.namespace, "batchjob": batchjob.name, "uid": batchjob.uid}
