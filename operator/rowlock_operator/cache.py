"""The last seen state of BatchJobs and of the Jobs of their master runs.

Fed by the watches, by the lists and by the answers to our own requests, which overtake each other:
of two states of one object the newer one stays. Nothing here asks anybody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from rowlock_operator.model import BatchJob, DeletionPolicy, MasterJob
from rowlock_operator.resources import as_list, as_object, is_whole, parse

GRAVE_SECONDS: Final = 600.0
"""How long a BatchJob that is gone is remembered; no list takes longer."""


class Key(NamedTuple):
    """Where a BatchJob is."""

    namespace: str
    name: str


class Gone(NamedTuple):
    """A BatchJob that was deleted, and what was to become of its execution."""

    namespace: str
    name: str
    uid: str
    policy: DeletionPolicy


@dataclass(frozen=True, slots=True)
class Seen:
    """A BatchJob, and when we got this state of it (monotonic seconds)."""

    batchjob: BatchJob
    at: float


@dataclass(frozen=True, slots=True)
class SeenJob:
    """A Job, and what the pods of it say."""

    job: MasterJob
    version: str
    at: float
    ready: int
    """Pods of it that are ready."""


class Cache:
    """What the API server said last."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._batchjobs: dict[Key, Seen] = {}
        self._jobs: dict[Key, SeenJob] = {}
        # uids of BatchJobs that are gone: a list that was made before must not raise them again.
        self._graves: dict[str, float] = {}

    # -- BatchJobs -----------------------------------------------------------------------------

    def batchjob(self, key: Key) -> Seen | None:
        """The last state of a BatchJob; None if there is none."""
        return self._batchjobs.get(key)

    def places(self) -> list[Key]:
        """Where all BatchJobs are."""
        return list(self._batchjobs)

    def uids(self) -> frozenset[str]:
        """The uids of all BatchJobs."""
        return frozenset(seen.batchjob.uid for seen in self._batchjobs.values())

    def put_batchjob(self, found: Mapping[str, Any]) -> tuple[Key, bool, Gone | None]:
        """Take note of a BatchJob.

        Returns:
            Where it is; whether this state is news; and the BatchJob of the same name that it must
            have followed, if there was one.
        """
        batchjob = parse(found)
        key = Key(batchjob.namespace, batchjob.name)
        known = self._batchjobs.get(key)
        if batchjob.uid in self._graves or (
            known is not None
            and not _newer(batchjob.resource_version, known.batchjob.resource_version)
        ):
            return key, False, None
        self._batchjobs[key] = Seen(batchjob, self._clock())
        before = known.batchjob if known is not None else batchjob
        return key, True, _gone(before) if before.uid != batchjob.uid else None

    def drop_batchjob(self, found: Mapping[str, Any]) -> Gone:
        """Take note that a BatchJob is gone; one of the same name that came later stays."""
        batchjob = parse(found)
        self.bury(batchjob)
        return _gone(batchjob)

    def bury(self, batchjob: BatchJob) -> None:
        """Take note that this very BatchJob is gone."""
        key = Key(batchjob.namespace, batchjob.name)
        known = self._batchjobs.get(key)
        if known is not None and known.batchjob.uid == batchjob.uid:
            del self._batchjobs[key]
        now = self._clock()
        self._graves = {uid: at for uid, at in self._graves.items() if now - at < GRAVE_SECONDS} | {
            batchjob.uid: now
        }

    def replace_batchjobs(
        self, found: Iterable[Mapping[str, Any]], *, namespace: str | None, asked_at: float
    ) -> list[Gone]:
        """Take note of a whole list.

        Args:
            found: The list.
            namespace: The only namespace that it is about; None: it is about all.
            asked_at: When it was asked for. What we got to know since then stays.

        Returns:
            The BatchJobs that have gone without our noticing.
        """
        listed: set[str] = set()
        gone: list[Gone] = []
        for one in found:
            _, _, before = self.put_batchjob(one)
            listed.add(str(as_object(one.get("metadata")).get("uid")))
            if before is not None:
                gone.append(before)
        for key, seen in list(self._batchjobs.items()):
            inside = namespace is None or key.namespace == namespace
            if inside and seen.at < asked_at and seen.batchjob.uid not in listed:
                self.bury(seen.batchjob)
                gone.append(_gone(seen.batchjob))
        return gone

    # -- Jobs ----------------------------------------------------------------------------------

    def jobs_of(self, batchjob: BatchJob, also: Iterable[str] = ()) -> dict[str, SeenJob]:
        """The Jobs that a BatchJob controls, and those in the place of its master Jobs, by name.

        Args:
            batchjob: The BatchJob.
            also: Names of other Jobs of its namespace that are in its way.
        """
        names = {batchjob.job_name, *also}
        return {
            key.name: seen
            for key, seen in self._jobs.items()
            if key.namespace == batchjob.namespace
            and (seen.job.owner_uid == batchjob.uid or key.name in names)
        }

    def put_job(self, found: Mapping[str, Any]) -> Key | None:
        """Take note of a Job.

        Returns:
            The BatchJob that is to look at it; None if it is no news, or belongs to none.
        """
        metadata = as_object(found.get("metadata"))
        place = Key(str(metadata.get("namespace")), str(metadata.get("name")))
        seen = _seen_job(found, self._clock())
        known = self._jobs.get(place)
        if known is not None and not _newer(seen.version, known.version):
            return None
        self._jobs[place] = seen
        return _owner(found)

    def drop_job(self, found: Mapping[str, Any]) -> Key | None:
        """Take note that a Job is gone.

        Returns:
            The BatchJob that is to look for it.
        """
        metadata = as_object(found.get("metadata"))
        place = Key(str(metadata.get("namespace")), str(metadata.get("name")))
        known = self._jobs.get(place)
        if known is not None and known.job.uid == metadata.get("uid"):
            del self._jobs[place]
        return _owner(found)

    def forget_job(self, namespace: str, name: str) -> None:
        """A Job was there and is not."""
        self._jobs.pop(Key(namespace, name), None)

    def replace_jobs(
        self, found: Iterable[Mapping[str, Any]], *, namespace: str | None, asked_at: float
    ) -> None:
        """Take note of a whole list of Jobs; see `replace_batchjobs`."""
        listed: set[str] = set()
        for one in found:
            self.put_job(one)
            listed.add(str(as_object(one.get("metadata")).get("uid")))
        for key, seen in list(self._jobs.items()):
            inside = namespace is None or key.namespace == namespace
            if inside and seen.at < asked_at and seen.job.uid not in listed:
                del self._jobs[key]


def _gone(batchjob: BatchJob) -> Gone:
    return Gone(
        batchjob.namespace, batchjob.name, batchjob.uid, policy=batchjob.spec.deletion_policy
    )


def _newer(version: str, known: str) -> bool:
    """Whether a resourceVersion is later than another one of the same object.

    They are numbers that grow, although an API server may promise less: where they are none,
    whatever differs is taken to be newer.
    """
    if version.isdecimal() and known.isdecimal():
        return int(version) > int(known)
    return version != known


def _owner(job: Mapping[str, Any]) -> Key | None:
    metadata = as_object(job.get("metadata"))
    controller = _controller(metadata)
    if controller.get("kind") != "BatchJob":
        return None
    return Key(str(metadata.get("namespace")), str(controller.get("name")))


def _controller(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    for owner in as_list(metadata.get("ownerReferences")):
        if as_object(owner).get("controller") is True:
            return as_object(owner)
    return {}


def _seen_job(found: Mapping[str, Any], at: float) -> SeenJob:
    owner = _owner(found)
    metadata, status = as_object(found.get("metadata")), as_object(found.get("status"))
    conditions = {
        condition.get("type"): condition
        for condition in map(as_object, as_list(status.get("conditions")))
        if condition.get("status") == "True"
    }
    failed = conditions.get("Failed")
    said = [str(failed.get(part) or "") for part in ("reason", "message")] if failed else []
    job = MasterJob(
        name=str(metadata.get("name")),
        uid=str(metadata.get("uid")),
        owner_uid=_controller(metadata).get("uid"),
        owner_name=owner.name if owner is not None else None,
        deleting=metadata.get("deletionTimestamp") is not None,
        suspended=as_object(found.get("spec")).get("suspend") is True,
        active=_whole(status.get("active")),
        succeeded="Complete" in conditions,
        failed=failed is not None,
        failure_message=": ".join(part for part in said if part),
    )
    return SeenJob(job, str(metadata.get("resourceVersion")), at, _whole(status.get("ready")))


def _whole(value: object) -> int:
    return value if is_whole(value) else 0
