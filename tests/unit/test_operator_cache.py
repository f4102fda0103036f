"""Watches, lists and answers overtake each other: in the cache the newer state stays."""

from __future__ import annotations

from typing import Any

from rowlock_operator.cache import Cache, Gone, Key
from rowlock_operator.model import DeletionPolicy

PLACE = Key("billing", "nightly")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def a_batchjob(version: int, *, uid: str = "u1", **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "namespace": "billing",
            "name": "nightly",
            "uid": uid,
            "resourceVersion": str(version),
        },
        "spec": {"job": "invoices", **spec},
    }


def a_job(
    version: int, *, uid: str = "j1", owner: str | None = "u1", **status: Any
) -> dict[str, Any]:
    owners = [{"kind": "BatchJob", "name": "nightly", "uid": owner, "controller": True}]
    return {
        "metadata": {
            "namespace": "billing",
            "name": "nightly-1",
            "uid": uid,
            "resourceVersion": str(version),
            "ownerReferences": owners if owner else [],
        },
        "spec": {},
        "status": status,
    }


def version(cache: Cache) -> str:
    seen = cache.batchjob(PLACE)
    return seen.batchjob.resource_version if seen else ""


def test_an_older_state_that_arrives_late_changes_nothing() -> None:
    cache = Cache(Clock())

    assert cache.put_batchjob(a_batchjob(9)) == (PLACE, True, None)
    assert cache.put_batchjob(a_batchjob(10)) == (PLACE, True, None)
    assert cache.put_batchjob(a_batchjob(9)) == (PLACE, False, None)
    assert cache.put_batchjob(a_batchjob(10)) == (PLACE, False, None), "seen already"

    assert version(cache) == "10"


def test_a_batchjob_of_the_same_name_tells_that_the_one_before_is_gone() -> None:
    cache = Cache(Clock())
    cache.put_batchjob(a_batchjob(1, deletionPolicy="Orphan"))

    _, is_news, gone = cache.put_batchjob(a_batchjob(5, uid="u2"))

    assert is_news
    assert gone == Gone("billing", "nightly", "u1", DeletionPolicy.ORPHAN)


def test_a_deleted_batchjob_is_not_raised_by_a_list_that_was_made_before() -> None:
    cache = Cache(Clock())
    cache.put_batchjob(a_batchjob(1))

    cache.drop_batchjob(a_batchjob(3))
    cache.replace_batchjobs([a_batchjob(2)], namespace=None, asked_at=0.0)

    assert cache.places() == []


def test_deleting_one_leaves_the_next_of_the_same_name() -> None:
    cache = Cache(Clock())
    cache.put_batchjob(a_batchjob(1))
    cache.put_batchjob(a_batchjob(5, uid="u2"))

    cache.drop_batchjob(a_batchjob(4, uid="u1"))

    assert cache.uids() == {"u2"}


def test_what_a_list_lacks_has_gone_unless_it_came_after_the_list_was_asked_for() -> None:
    clock = Clock()
    cache = Cache(clock)
    cache.put_batchjob(a_batchjob(1))
    asked_at = clock()
    newcomer = a_batchjob(7, uid="u7")
    newcomer["metadata"]["name"] = "hourly"
    cache.put_batchjob(newcomer)

    gone = cache.replace_batchjobs([], namespace=None, asked_at=asked_at)

    assert [one.uid for one in gone] == ["u1"]
    assert cache.uids() == {"u7"}


def test_a_list_of_one_namespace_says_nothing_about_another() -> None:
    cache = Cache(Clock())
    cache.put_batchjob(a_batchjob(1))

    assert cache.replace_batchjobs([], namespace="reports", asked_at=1e9) == []
    assert cache.uids() == {"u1"}


def test_a_job_calls_for_the_batchjob_that_controls_it() -> None:
    cache = Cache(Clock())

    assert cache.put_job(a_job(1)) == PLACE
    assert cache.put_job(a_job(1)) is None, "no news"
    assert cache.put_job(a_job(2, active=1, ready=1)) == PLACE
    assert cache.drop_job(a_job(3)) == PLACE


def test_a_job_of_somebody_else_is_seen_where_ours_should_be() -> None:
    cache = Cache(Clock())
    cache.put_batchjob(a_batchjob(1))
    seen = cache.batchjob(PLACE)
    assert seen is not None

    assert cache.put_job(a_job(1, owner=None)) is None

    (job,) = cache.jobs_of(seen.batchjob).values()
    assert job.job.owner_uid is None
    cache.forget_job("billing", "nightly-1")
    assert cache.jobs_of(seen.batchjob) == {}


def test_a_job_is_read_with_what_its_conditions_say() -> None:
    cache = Cache(Clock())
    cache.put_batchjob(a_batchjob(1))
    seen = cache.batchjob(PLACE)
    assert seen is not None
    cache.put_job(
        a_job(
            4,
            active=0,
            conditions=[
                {
                    "type": "Failed",
                    "status": "True",
                    "reason": "BackoffLimitExceeded",
                    "message": "6",
                },
                {"type": "Complete", "status": "False"},
            ],
        )
    )

    job = cache.jobs_of(seen.batchjob)["nightly-1"].job

    assert (job.failed, job.succeeded) == (True, False)
    assert job.failure_message == "BackoffLimitExceeded: 6"
