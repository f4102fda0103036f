"""Gather everything that one decision about a BatchJob rests on.

First what the API server said, then the database, so that what the database says is never older
than the status that it is compared with. A look of the mirror counts if it began after we got the
BatchJob and after our last act; otherwise the database is asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from rowlock.errors import Unavailable
from rowlock_operator.cache import Cache, Seen, SeenJob
from rowlock_operator.client import JOBS, PODS, ApiError, Kubernetes, Missing
from rowlock_operator.database import FAILED_PARTITIONS_MAX, Database, Row
from rowlock_operator.model import (
    Answer,
    BatchJob,
    Contract,
    Execution,
    FailedPartition,
    MasterJob,
    Observed,
    Options,
)
from rowlock_operator.podtrouble import trouble

LOOK_SECONDS: Final = 5.0
"""How long a look at the database counts."""
_SHOWN_SECONDS: Final = 60.0
"""How long the database is expected to know what a status shows already."""
POD_SECONDS: Final = (5.0, 60.0)
"""Pauses between two looks at the pods of a Job that does not start: the first, and the longest. Each
is twice the one before while nothing new is seen."""


@dataclass(frozen=True, slots=True)
class _Look:
    """An execution as a query showed it that began at this moment (monotonic seconds)."""

    row: Row
    at: float


@dataclass(frozen=True, slots=True)
class _PodLook:
    """What was seen of the pods of a Job, when, and for how long that counts."""

    trouble: str
    at: float
    pause_seconds: float
    version: str
    """Of the Job: when it changes, its pods have."""


class Observer:
    """Knows what was seen of each BatchJob and asks for the rest."""

    def __init__(
        self,
        *,
        cache: Cache,
        database: Database,
        kubernetes: Kubernetes,
        options: Callable[[], Options],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._database = database
        self._kubernetes = kubernetes
        self._options = options
        self._clock = clock
        self._started_at = datetime.now(UTC)
        self._looks: dict[str, _Look] = {}
        self._acted: dict[str, float] = {}
        self._shown: dict[str, tuple[UUID, int, float]] = {}
        self._failed: dict[UUID, tuple[int, tuple[FailedPartition, ...]]] = {}
        self._pods: dict[str, dict[str, _PodLook]] = {}
        self.database_seen_at: datetime | None = None
        """When the database last answered, by the clock of this machine."""

    # -- what the others know ------------------------------------------------------------------

    def mirrored(self, rows: Iterable[Row], asked_at: float) -> None:
        """Take note of the executions that the mirror saw by a query that began then."""
        self.database_seen_at = datetime.now(UTC)
        for row in rows:
            known = self._looks.get(row.uid)
            if known is None or row.number >= known.row.number:
                self._looks[row.uid] = _Look(row, asked_at)

    def acted(self, uid: str) -> None:
        """Something was changed in the database for this BatchJob: earlier looks are out of date."""
        self._acted[uid] = self._clock()

    def shown(self, uid: str, execution: Execution | None) -> None:
        """A status with this state of an execution was written."""
        if execution is not None:
            self._shown[uid] = (execution.execution_id, execution.revision, self._clock())

    def forget(self, uid: str) -> None:
        """The BatchJob is gone."""
        for known in (self._looks, self._acted, self._shown, self._pods):
            known.pop(uid, None)

    def forget_all_but(self, uids: Collection[str]) -> None:
        """Only these BatchJobs are left.

        What is heard of a BatchJob after it has gone, as of the end of its execution, would stay for
        ever otherwise. One that is missing here by mistake costs another look.
        """
        for known in (self._looks, self._acted, self._shown, self._pods):
            for uid in known.keys() - uids:
                del known[uid]
        runs = {look.row.execution.execution_id for look in self._looks.values()}
        for run in self._failed.keys() - runs:
            del self._failed[run]

    def pods_due_seconds(self, batchjob: BatchJob) -> float | None:
        """In how many seconds a pod that does not start should be looked at again; None: no need."""
        looks = self._pods.get(batchjob.uid, {})
        now = self._clock()
        due = [
            looks[seen.job.uid].at + looks[seen.job.uid].pause_seconds - now
            for seen in self._cache.jobs_of(batchjob).values()
            if seen.job.uid in looks and is_starting(batchjob, seen)
        ]
        return max(0.0, min(due)) if due else None

    # -- gathering -----------------------------------------------------------------------------

    async def observe(
        self,
        seen: Seen,
        *,
        in_the_way: Iterable[str] = (),
        create_problem: str = "",
        answer: Answer | None = None,
    ) -> Observed:
        """Everything about a BatchJob.

        Args:
            seen: The BatchJob.
            in_the_way: Names of Jobs that were found where ours should be.
            create_problem: Why the API server refused the last Job.
            answer: What the database said to a request in this turn. An older one would hide that the
                instance has become free.
        """
        batchjob = seen.batchjob
        jobs = await self._jobs(batchjob, in_the_way)
        observed = Observed(
            batchjob=batchjob,
            options=self._options(),
            now=datetime.now(UTC),
            database_up=True,
            started_at=self._started_at,
            jobs={name: one.job for name, one in jobs.items()},
            create_problem=create_problem,
            answer=answer,
        )
        # Twice, since the first may only have found that its connection has gone meanwhile.
        for _ in range(2):
            try:
                observed = await self._with_database(observed, seen)
            except Unavailable:
                continue
            break
        else:
            observed = replace(observed, database_up=False)
        execution = observed.execution
        ended = execution is not None and execution.ended
        troubled = {
            name: await self._with_trouble(batchjob, one)
            for name, one in jobs.items()
            if is_starting(batchjob, one) or (one.job.failed and not ended)
        }
        return replace(
            observed,
            now=datetime.now(UTC),
            jobs={**observed.jobs, **troubled},
            database_seen_at=self.database_seen_at,
            revision_written=self._revision_written(batchjob.uid, execution),
        )

    async def _jobs(self, batchjob: BatchJob, in_the_way: Iterable[str]) -> dict[str, SeenJob]:
        """The Jobs that matter. No watch tells of one that is not ours: is it still there?"""
        also = tuple(in_the_way)
        for name, seen in self._cache.jobs_of(batchjob, also).items():
            if seen.job.owner_uid == batchjob.uid:
                continue
            try:
                self._cache.put_job(await self._kubernetes.get(JOBS, batchjob.namespace, name))
            except Missing:
                self._cache.forget_job(batchjob.namespace, name)
            except ApiError:
                pass  # then it is taken to be there as it was
        return self._cache.jobs_of(batchjob, also)

    def _revision_written(self, uid: str, execution: Execution | None) -> int | None:
        """The revision that the status shows, while a look may still be older than that."""
        run, revision, at = self._shown.get(uid, (None, 0, 0.0))
        if execution is None or run != execution.execution_id:
            return None
        # Afterwards a lower one is the truth: the database was restored from a backup.
        return revision if self._clock() - at < _SHOWN_SECONDS else None

    async def _with_database(self, observed: Observed, seen: Seen) -> Observed:
        batchjob = observed.batchjob
        execution = await self._execution(seen)
        contract: Contract | None = None
        names: tuple[str, ...] = ()
        nodes: int | None = None
        if execution is None or execution.attempt != batchjob.attempt:
            contract = await self._database.contract(batchjob.spec.job)
            if contract is None:
                names = await self._database.job_names()
        if execution is None or (not execution.ended and execution.running == 0):
            nodes = await self._database.pool_nodes(batchjob.spec.job, batchjob.spec.pool)
        self.database_seen_at = datetime.now(UTC)
        return replace(
            observed, execution=execution, contract=contract, job_names=names, pool_nodes=nodes
        )

    async def _execution(self, seen: Seen) -> Execution | None:
        uid = seen.batchjob.uid
        look = self._looks.get(uid)
        after = max(seen.at, self._acted.get(uid, seen.at), self._clock() - LOOK_SECONDS)
        if look is not None and look.at > after:
            execution: Execution | None = look.row.execution
        else:
            asked_at = self._clock()
            row = await self._database.execution_of(uid)
            if row is not None:
                self._looks[uid] = _Look(row, asked_at)
            execution = row.execution if row is not None else None
        if execution is None or execution.failed == 0:
            return execution
        return replace(execution, failed_partitions=await self._failed_of(execution))

    async def _failed_of(self, execution: Execution) -> tuple[FailedPartition, ...]:
        """The first failed partitions: read when there are more of them than we know."""
        count, known = self._failed.get(execution.execution_id, (0, ()))
        if count == execution.failed or len(known) >= FAILED_PARTITIONS_MAX:
            return known
        found = await self._database.failed_partitions(execution.execution_id)
        self._failed[execution.execution_id] = (execution.failed, found)
        return found

    async def _with_trouble(self, batchjob: BatchJob, seen: SeenJob) -> MasterJob:
        """The Job, with what keeps its pod from running."""
        looks = self._pods.setdefault(batchjob.uid, {})
        known = looks.get(seen.job.uid)
        now = self._clock()
        if known is None or known.version != seen.version or now - known.at >= known.pause_seconds:
            try:
                pods = await self._kubernetes.list_all(
                    PODS, batchjob.namespace, labels=f"batch.kubernetes.io/job-name={seen.job.name}"
                )
            except ApiError:
                return seen.job  # what is not known keeps nothing else from being done
            text = trouble(pods, datetime.now(UTC))
            first, longest = POD_SECONDS
            same = known is not None and known.trouble == text
            pause = min(longest, known.pause_seconds * 2) if known is not None and same else first
            known = looks[seen.job.uid] = _PodLook(text, now, pause, seen.version)
        return replace(seen.job, pod_trouble=known.trouble)


def is_starting(batchjob: BatchJob, seen: SeenJob) -> bool:
    """Whether a Job of a BatchJob is to have a pod, and none is ready."""
    job = seen.job
    over = job.succeeded or job.failed or job.suspended or job.deleting
    return job.owner_uid == batchjob.uid and not over and seen.ready == 0
