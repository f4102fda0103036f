"""A BatchJob is read strictly, whatever a CRD has let through."""

from typing import Any

import pytest

from rowlock_operator.model import (
    DeletionPolicy,
    Mode,
    attempt_of,
    launch_key,
    master_job_name,
)
from rowlock_operator.resources import parse
from tests.support.batchjobs import NAME, UID, a_batchjob

FULL: dict[str, Any] = {
    "job": "invoices.monthly",
    "parameters": {"month": "2026-11"},
    "instanceKey": "2026-11",
    "pool": "night",
    "priority": -5,
    "parallelism": 20,
    "suspend": True,
    "cancel": False,
    "restartNonce": 2,
    "activeDeadlineSeconds": 14_400,
    "ttlSecondsAfterFinished": 0,
    "deletionPolicy": "Orphan",
    "partitions": {
        "delivery": "AtMostOnce",
        "maxAttempts": 1,
        "timeoutSeconds": 900,
        "maxFailed": "1%",
        "backoff": {"initialSeconds": 10, "factor": 2, "maxSeconds": 600},
    },
    "master": {
        "mode": "Pool",
        "slots": 0,
        "image": "mine:1",
        "serviceAccountName": "mine",
        "backoffLimit": 0,
        "resources": {"limits": {"memory": "1Gi"}},
        "podTemplate": {"metadata": {"labels": {"team": "billing"}}},
    },
}


def test_every_field_is_read() -> None:
    batchjob = a_batchjob(FULL)
    spec = batchjob.spec

    assert batchjob.problems == ()
    assert (spec.job, spec.parameters) == ("invoices.monthly", {"month": "2026-11"})
    assert (spec.pool, spec.priority, spec.parallelism) == ("night", -5, 20)
    assert (spec.suspend, spec.cancel, spec.restart_nonce) == (True, False, 2)
    assert (spec.active_deadline_seconds, spec.ttl_seconds) == (14_400, 0)
    assert spec.deletion_policy is DeletionPolicy.ORPHAN
    assert (spec.delivery, spec.max_attempts, spec.max_failed) == ("AT_MOST_ONCE", 1, "1%")
    assert (spec.timeout_seconds, spec.backoff.initial_seconds) == (900, 10)
    assert (spec.backoff.factor, spec.backoff.max_seconds) == (2, 600)
    assert (spec.master.mode, spec.master.slots, spec.master.backoff_limit) == (Mode.POOL, 0, 0)
    assert (spec.master.image, spec.master.service_account) == ("mine:1", "mine")
    assert batchjob.instance_key == "2026-11"
    assert batchjob.attempt == 3
    assert batchjob.job_name == f"{NAME}-3"


def test_what_is_not_said_is_left_to_the_author() -> None:
    spec = parse({"spec": {"job": "invoices.monthly"}}).spec

    assert spec.pool == "default"
    assert spec.master.mode is Mode.JOB
    for left in (spec.parameters, spec.delivery, spec.max_attempts, spec.timeout_seconds):
        assert left is None
    assert spec.max_failed is None
    assert spec.backoff.initial_seconds is None


def test_an_instance_without_a_key_is_that_of_the_object() -> None:
    assert a_batchjob().instance_key == UID


@pytest.mark.parametrize(
    "spec, problem",
    [
        ({"job": None}, "spec.job is missing"),
        ({"job": 7}, "spec.job is 7; a text is expected"),
        ({"job": "a\0b"}, "spec.job contains the NUL character"),
        ({"instanceKey": ""}, "spec.instanceKey is ''; a text is expected"),
        ({"instanceKey": "ü" * 300}, "spec.instanceKey is longer than 512 bytes"),
        ({"parameters": [1]}, "spec.parameters is [1]; an object is expected"),
        ({"priority": 1.5}, "spec.priority is 1.5; a whole number"),
        ({"priority": True}, "spec.priority is True; a whole number"),
        ({"parallelism": 0}, "spec.parallelism is 0; a whole number from 1"),
        ({"suspend": "yes"}, "spec.suspend is 'yes'; true or false is expected"),
        ({"restartNonce": -1}, "spec.restartNonce is -1"),
        ({"deletionPolicy": "Keep"}, "spec.deletionPolicy is 'Keep'; Cancel or Orphan is expected"),
        ({"partitions": "all"}, "spec.partitions is 'all'; an object is expected"),
        ({"partitions": {"maxFailed": "101%"}}, "spec.partitions.maxFailed is '101%'"),
        ({"partitions": {"maxFailed": -1}}, "spec.partitions.maxFailed is -1"),
        ({"partitions": {"delivery": "Once"}}, "AtLeastOnce or AtMostOnce is expected"),
        ({"partitions": {"backoff": 3}}, "spec.partitions.backoff is 3"),
        ({"master": {"mode": "Pod"}}, "spec.master.mode is 'Pod'; Job or Pool is expected"),
        ({"master": {"podTemplate": "x" * 100}}, "xxx…; an object is expected"),
    ],
)
def test_a_field_that_is_wrong_is_named(spec: dict[str, Any], problem: str) -> None:
    problems = a_batchjob(spec).problems

    assert len(problems) == 1
    assert problem in problems[0]


def test_every_problem_is_named_and_the_rest_is_read() -> None:
    batchjob = a_batchjob({"parallelism": "all", "priority": [], "suspend": True})

    assert len(batchjob.problems) == 2
    assert (batchjob.spec.suspend, batchjob.spec.parallelism) == (True, None)


def test_fields_of_a_newer_version_are_ignored() -> None:
    assert a_batchjob({"fromTheFuture": {"x": 1}}).problems == ()


@pytest.mark.parametrize("found", [None, [], "x", {}, {"spec": 3, "metadata": [], "status": "x"}])
def test_what_is_no_batchjob_is_no_crash(found: object) -> None:
    batchjob = parse(found)

    assert batchjob.problems
    assert batchjob.status == {}


def test_a_launch_key_belongs_to_one_attempt_of_one_object_in_one_cluster() -> None:
    key = launch_key("eu-1", UID, 3)

    assert attempt_of(key, "eu-1", UID) == 3
    for cluster, uid in (("us-1", UID), ("eu-1", "another")):
        assert attempt_of(key, cluster, uid) is None
    for other in (None, "", f"eu-1/{UID}/", f"eu-1/{UID}/x", f"eu-1/{UID}/²", "nightly"):
        assert attempt_of(other, "eu-1", UID) is None


def test_names_of_jobs_are_distinct_and_fit_into_a_label() -> None:
    names = [
        master_job_name(name, attempt)
        for name in ("a", "a" * 52, "a" * 62, "a" * 62 + "b", "a" * 250 + ".x", "a." * 30 + "a")
        for attempt in (1, 2, 2**62)
    ]

    assert len(set(names)) == len(names)
    assert all(len(name) <= 63 for name in names)
    assert names[0] == "a-1"
