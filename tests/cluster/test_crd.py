"""What the API server itself does with BatchJobs, before any operator sees them."""

import re
import secrets
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import yaml

from tests.support.cluster import MANIFESTS, Kubectl, Object, batchjob, temporary_namespace
from tests.support.waiting import wait_until

ACCEPTED: list[tuple[str, Object]] = [
    ("the least", {}),
    ("any JSON as parameters", {"parameters": {"a": [1, {"b": None}], "c": 1.5, "d": True}}),
    ("a number of failures", {"partitions": {"maxFailed": 0}}),
    ("a percentage of failures", {"partitions": {"maxFailed": "5%"}}),
    ("all failures", {"partitions": {"maxFailed": "100%"}}),
    ("once, said twice", {"partitions": {"delivery": "AtMostOnce", "maxAttempts": 1}}),
    ("a wait that does not grow", {"partitions": {"backoff": {"initialSeconds": 5, "factor": 1}}}),
    ("a limit of one", {"parallelism": 1}),
    ("the lowest priority", {"priority": -1000}),
    ("a life of no seconds", {"ttlSecondsAfterFinished": 0}),
    ("waiting from the start", {"suspend": True}),
    ("no pod", {"master": {"mode": "Pool"}}),
    ("part of a pod", {"master": {"podTemplate": {"spec": {"nodeSelector": {"disk": "ssd"}}}}}),
    ("the longest job name", {"job": "j" * 200}),
]

REFUSED: list[tuple[str, Object, str]] = [
    ("no job", {"job": None}, "spec.job: Required value"),
    ("an empty job", {"job": ""}, "spec.job"),
    ("a job that no code could register", {"job": "9 lives"}, "spec.job"),
    ("a long job", {"job": "j" * 201}, "Too long"),
    ("a list of parameters", {"parameters": [1]}, "spec.parameters"),
    ("a hundred and one parameters", {"parameters": {f"p{n}": n for n in range(101)}}, "100"),
    ("an empty key", {"instanceKey": ""}, "spec.instanceKey"),
    ("a pool that is no label", {"pool": "Big Ones"}, "spec.pool"),
    ("a priority out of range", {"priority": 1001}, "spec.priority"),
    ("a limit of nothing", {"parallelism": 0}, "spec.parallelism"),
    ("a limit that is text", {"parallelism": "20"}, "spec.parallelism"),
    ("a deadline that is over", {"activeDeadlineSeconds": 0}, "spec.activeDeadlineSeconds"),
    ("another policy", {"deletionPolicy": "Keep"}, 'supported values: "Cancel", "Orphan"'),
    ("another delivery", {"partitions": {"delivery": "ExactlyOnce"}}, "supported values"),
    (
        "retries of what must not be retried",
        {"partitions": {"delivery": "AtMostOnce", "maxAttempts": 3}},
        "AtMostOnce partitions cannot be retried; set maxAttempts to 1",
    ),
    ("no attempt", {"partitions": {"maxAttempts": 0}}, "spec.partitions.maxAttempts"),
    ("more than all", {"partitions": {"maxFailed": "101%"}}, "a percentage such as 5%"),
    ("less than nothing", {"partitions": {"maxFailed": -1}}, "a percentage such as 5%"),
    ("a word for a number", {"partitions": {"maxFailed": "few"}}, "a percentage such as 5%"),
    (
        "a wait that shrinks",
        {"partitions": {"backoff": {"initialSeconds": 60, "maxSeconds": 10}}},
        "maxSeconds must not be below initialSeconds",
    ),
    ("another master", {"master": {"mode": "Deployment"}}, "supported values"),
    ("fewer slots than none", {"master": {"slots": -1}}, "spec.master.slots"),
    ("a misspelt field", {"paralellism": 5}, 'unknown field "spec.paralellism"'),
    ("a misspelt field further down", {"master": {"slot": 1}}, 'unknown field "spec.master.slot"'),
]

FIXED: list[tuple[str, Object, Object, str]] = [
    ("job", {}, {"job": "flights.payout"}, "spec.job is immutable"),
    ("parameters", {"parameters": {"a": 1}}, {"parameters": {"a": 2}}, "spec.parameters is immu"),
    ("parameters, added", {}, {"parameters": {"a": 2}}, "spec.parameters is immutable"),
    ("parameters, gone", {"parameters": {"a": 1}}, {"parameters": None}, "spec.parameters is immu"),
    ("instanceKey", {"instanceKey": "a"}, {"instanceKey": "b"}, "spec.instanceKey is immutable"),
    ("instanceKey, added", {}, {"instanceKey": "b"}, "spec.instanceKey is immutable"),
    ("pool", {}, {"pool": "big"}, "spec.pool is immutable"),
    (
        "delivery",
        {"partitions": {"delivery": "AtLeastOnce"}},
        {"partitions": {"delivery": "AtMostOnce"}},
        "spec.partitions.delivery is immutable",
    ),
    (
        "delivery, added",
        {},
        {"partitions": {"delivery": "AtMostOnce"}},
        "spec.partitions.delivery is immutable",
    ),
    (
        "delivery, gone",
        {"partitions": {"delivery": "AtMostOnce"}},
        {"partitions": None},
        "spec.partitions.delivery is immutable",
    ),
    ("master", {"master": {"slots": 1}}, {"master": {"slots": 2}}, "spec.master is immutable"),
    ("master, added", {}, {"master": {"mode": "Pool"}}, "spec.master is immutable"),
    ("cancel, withdrawn", {"cancel": True}, {"cancel": False}, "spec.cancel cannot be withdrawn"),
    ("restartNonce, back", {"restartNonce": 2}, {"restartNonce": 1}, "can only grow"),
    (
        "restartNonce of what was cancelled",
        {"cancel": True},
        {"restartNonce": 1},
        "a cancelled BatchJob cannot be restarted",
    ),
]

FREE: list[Object] = [
    {"priority": 5, "parallelism": 3},
    {"parallelism": None},
    {"suspend": True},
    {"suspend": False},
    {"activeDeadlineSeconds": 60, "ttlSecondsAfterFinished": 60},
    {"deletionPolicy": "Orphan"},
    {"partitions": {"maxAttempts": 7, "timeoutSeconds": 9, "maxFailed": 3}},
    {"partitions": {"backoff": {"initialSeconds": 1, "factor": 2, "maxSeconds": 3}}},
    {"restartNonce": 1},
    {"restartNonce": 7},
    {"cancel": True},
]


@pytest.fixture(scope="module")
def schema() -> Object:
    crd = yaml.safe_load((MANIFESTS / "crd" / "crd.yaml").read_text())
    found: Object = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


@pytest.fixture(scope="module")
def one_for_all(kubectl: Kubectl) -> Generator[Kubectl]:
    """A namespace for many tests: to make and delete one is more work than each of them."""
    with temporary_namespace(kubectl, f"crd-{secrets.token_hex(3)}") as inside:
        yield inside


def test_what_it_takes(namespace: Kubectl) -> None:
    refused = {
        name: why
        for number, (name, spec) in enumerate(ACCEPTED)
        if (why := namespace.refusal(batchjob(f"job-{number}", **spec)))
    }
    assert refused == {}


@pytest.mark.parametrize("name,spec,why", REFUSED, ids=[name for name, _, _ in REFUSED])
def test_what_it_refuses(one_for_all: Kubectl, name: str, spec: Object, why: str) -> None:
    assert why in one_for_all.refusal(batchjob("wrong", **spec)), name


def test_a_name_leaves_room_for_the_number_of_the_attempt(namespace: Kubectl) -> None:
    assert namespace.refusal(batchjob("n" * 52)) == ""
    assert "at most 52 characters" in namespace.refusal(batchjob("n" * 53))


@pytest.mark.parametrize("name,first,change,why", FIXED, ids=[name for name, *_ in FIXED])
def test_what_cannot_be_changed(
    one_for_all: Kubectl, name: str, first: Object, change: Object, why: str
) -> None:
    fixed = re.sub("[^a-z]+", "-", name.lower())
    one_for_all.apply(batchjob(fixed, **first))
    with pytest.raises(AssertionError) as refused:
        one_for_all.patch("batchjob", fixed, {"spec": change})
    assert why in str(refused.value), name


def test_what_can_be_changed(namespace: Kubectl) -> None:
    namespace.apply(batchjob("free"))
    for change in FREE:
        namespace.patch("batchjob", "free", {"spec": change})
    assert namespace.get("batchjob", "free")["spec"]["restartNonce"] == 7


def test_only_what_the_authors_code_cannot_know_has_a_default(namespace: Kubectl) -> None:
    namespace.apply(batchjob("bare"), batchjob("deeper", partitions={"backoff": {}}, master={}))
    defaults = {
        "job": "flights.settle",
        "pool": "default",
        "priority": 0,
        "suspend": False,
        "cancel": False,
        "restartNonce": 0,
        "deletionPolicy": "Cancel",
    }
    assert namespace.get("batchjob", "bare")["spec"] == defaults
    deeper: Object = {**defaults, "partitions": {"backoff": {}}, "master": {}}
    assert namespace.get("batchjob", "deeper")["spec"] == deeper


def undescribed(schema: Any, path: str) -> Iterator[str]:
    """Paths of the fields below that have no description."""
    for name, field in schema.get("properties", {}).items():
        if "description" not in field and path + name != "metadata":  # Kubernetes describes that
            yield path + name
        yield from undescribed(field, f"{path}{name}.")
        if "items" in field:
            yield from undescribed(field["items"], f"{path}{name}[].")


def test_every_field_is_described(schema: Object) -> None:
    assert list(undescribed(schema, "")) == []


def test_kubectl_explains_every_field(kubectl: Kubectl, schema: Object) -> None:
    # The API server publishes a new schema a moment after it has taken the CRD.
    wait_until(
        lambda: kubectl.run("explain", "batchjob.spec", check=False).returncode == 0,
        seconds=30,
        every_seconds=0.5,
    )
    everything = "".join(
        kubectl.text("explain", path)
        for path in ("batchjob", *nested(schema, "batchjob"))
        if not path.startswith("batchjob.metadata")
    )
    assert "DESCRIPTION" in everything
    assert "<no description>" not in everything
    assert "<empty>" not in everything


def nested(schema: Any, path: str) -> Iterator[str]:
    """The fields that have fields."""
    for name, field in schema.get("properties", {}).items():
        inner = field.get("items", field)
        if "properties" in inner:
            yield f"{path}.{name}"
            yield from nested(inner, f"{path}.{name}")


STATUS: Object = {
    "observedGeneration": 1,
    "observedRestartNonce": 0,
    "phase": "Running",
    "message": "150 of 200 partitions have ended",
    "executionID": "0195c8a4-7b8e-7c1a-9f00-000000000001",
    "attempt": 1,
    "startTime": "2026-01-31T10:00:00Z",
    "lastSyncTime": "2026-01-31T10:04:00Z",
    "duration": "4m",
    "progress": "150/200",
    "nodes": 5,
    "masterJobName": "nightly-1",
    "partitions": {
        "total": 200,
        "pending": 40,
        "running": 10,
        "succeeded": 149,
        "failed": 1,
        "retried": 3,
    },
    "failedPartitions": [
        {"key": "2013-01-31", "attempts": 3, "reason": "ValueError", "message": "no such flight"}
    ],
    "conditions": [
        {
            "type": "Accepted",
            "status": "True",
            "reason": "Requested",
            "message": "the database has it",
            "lastTransitionTime": "2026-01-31T10:00:00Z",
            "observedGeneration": 1,
        }
    ],
}


def test_columns(namespace: Kubectl) -> None:
    namespace.apply(batchjob("nightly"))
    namespace.set_status("batchjob", "nightly", STATUS)
    head, row = namespace.text("get", "bj").splitlines()
    assert head.split() == ["NAME", "JOB", "PHASE", "PROGRESS", "FAILED", "NODES", "AGE"]
    assert row.split()[:6] == ["nightly", "flights.settle", "Running", "150/200", "1", "5"]
    wide, row = namespace.text("get", "rowlock", "-o", "wide").splitlines()
    assert wide.split()[7:] == ["POOL", "ATTEMPT", "DURATION", "EXECUTION", "MESSAGE"]
    assert row.split()[7:10] == ["default", "1", "4m"]
    assert row.endswith("150 of 200 partitions have ended")


def test_the_status_keeps_all_of_its_fields(namespace: Kubectl) -> None:
    # What the schema does not know is dropped without a word, so the whole is compared.
    namespace.apply(batchjob("nightly"))
    namespace.set_status("batchjob", "nightly", STATUS)
    assert namespace.get("batchjob", "nightly")["status"] == STATUS


def test_spec_and_status_are_written_apart(namespace: Kubectl) -> None:
    namespace.apply(batchjob("nightly"))
    namespace.patch("batchjob", "nightly", {"status": STATUS})
    assert "status" not in namespace.get("batchjob", "nightly")
    namespace.patch("batchjob", "nightly", {"spec": {"priority": 9}}, "--subresource=status")
    one = namespace.get("batchjob", "nightly")
    assert one["spec"]["priority"] == 0
    assert one["metadata"]["generation"] == 1


def test_selectors(namespace: Kubectl) -> None:
    namespace.apply(batchjob("here"), batchjob("there", pool="big", job="flights.payout"))
    namespace.set_status("batchjob", "here", {"phase": "Running"})
    for selector, name in [
        ("spec.job=flights.payout", "there"),
        ("spec.pool=default", "here"),
        ("status.phase=Running", "here"),
    ]:
        found = namespace.items("batchjobs", "--field-selector", selector)
        assert [one["metadata"]["name"] for one in found] == [name], selector


@pytest.mark.parametrize("outcome", ["Complete", "Failed"])
def test_one_wait_is_enough_for_either_end(namespace: Kubectl, outcome: str) -> None:
    namespace.apply(batchjob("nightly"))
    ended = {
        "status": "True",
        "reason": "Ended",
        "message": "",
        "lastTransitionTime": "2026-01-31T10:00:00Z",
    }
    conditions = [{**ended, "type": kind} for kind in (outcome, "Finished")]
    namespace.set_status("batchjob", "nightly", {"conditions": conditions})
    namespace.wait("batchjob/nightly", "condition=Finished", seconds=5)


def test_a_condition_needs_a_reason(namespace: Kubectl) -> None:
    namespace.apply(batchjob("nightly"))
    with pytest.raises(AssertionError, match="reason"):
        namespace.set_status(
            "batchjob", "nightly", {"conditions": [{"type": "Failed", "status": "True"}]}
        )


@pytest.mark.alone
def test_an_older_batchjob_lives_on_under_a_newer_crd(kubectl: Kubectl, namespace: Kubectl) -> None:
    """A version adds fields and takes none away, so objects of the one before stay as they are."""
    newer = yaml.safe_load((MANIFESTS / "crd" / "crd.yaml").read_text())
    newer_spec = newer["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    newer_spec["properties"]["later"] = {"type": "string", "description": "Of a later version."}
    namespace.apply(batchjob("old", parallelism=3))
    namespace.set_status("batchjob", "old", STATUS)
    try:
        kubectl.apply(newer, server_side=True)
        wait_until(
            lambda: namespace.refusal(batchjob("new", later="x")) == "",
            seconds=30,
            what="the newer schema is served",
            every_seconds=0.2,
        )
        namespace.patch("batchjob", "old", {"spec": {"parallelism": 4}})
        assert namespace.get("batchjob", "old")["status"] == STATUS
    finally:
        kubectl.run("replace", "-f", str(MANIFESTS / "crd" / "crd.yaml"))
    # And back: the object with the field of the later version can still be changed.
    wait_until(
        lambda: "unknown field" in namespace.refusal(batchjob("newest", later="x")),
        seconds=30,
        what="the older schema is served",
        every_seconds=0.2,
    )
    namespace.patch("batchjob", "new", {"spec": {"priority": 1}})
