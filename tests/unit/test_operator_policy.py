"""A BatchJob changes numbers of a policy and may tighten delivery; it never loosens it."""

from dataclasses import replace
from typing import Any

import pytest

from rowlock_operator.policy import resolve
from rowlock_operator.refusal import Reason, Refusal
from tests.support.batchjobs import CONTRACT, a_batchjob

ONCE = replace(CONTRACT, delivery="AT_MOST_ONCE", policy={**CONTRACT.policy, "max_attempts": 1})


def resolved(partitions: dict[str, Any], contract: Any = CONTRACT) -> tuple[Any, str]:
    return resolve(contract, a_batchjob({"partitions": partitions}).spec)


def test_what_is_not_said_is_as_the_author_has_it() -> None:
    assert resolved({}) == (CONTRACT.policy, "AT_LEAST_ONCE")


def test_what_is_said_replaces_it() -> None:
    policy, _ = resolved(
        {
            "maxAttempts": 5,
            "timeoutSeconds": 900,
            "maxFailed": "1%",
            "backoff": {"initialSeconds": 10, "factor": 3, "maxSeconds": 600},
        }
    )

    assert policy == {
        "max_attempts": 5,
        "timeout_seconds": 900.0,
        "max_failed": "1%",
        "initial_seconds": 10.0,
        "factor": 3.0,
        "max_seconds": 600.0,
        "has_finish": True,
    }


def test_zero_is_said_too() -> None:
    policy, _ = resolved({"maxFailed": 0, "backoff": {"initialSeconds": 0}})

    assert (policy["max_failed"], policy["initial_seconds"]) == (0, 0.0)


def test_delivery_is_tightened_and_nothing_is_retried_then() -> None:
    policy, delivery = resolved({"delivery": "AtMostOnce"})

    assert (delivery, policy["max_attempts"]) == ("AT_MOST_ONCE", 1)


@pytest.mark.parametrize(
    "partitions, contract, says",
    [
        ({"delivery": "AtLeastOnce"}, ONCE, "cannot be AtLeastOnce"),
        ({"delivery": "AtMostOnce", "maxAttempts": 2}, CONTRACT, "are never retried"),
        ({"maxAttempts": 2}, ONCE, "are never retried"),
        ({"backoff": {"initialSeconds": 400}}, CONTRACT, "first wait 400 s and the longest 300 s"),
    ],
)
def test_what_contradicts_the_job_is_refused(
    partitions: dict[str, Any], contract: Any, says: str
) -> None:
    with pytest.raises(Refusal, match=says) as caught:
        resolved(partitions, contract)

    assert caught.value.reason is Reason.INVALID_POLICY
    assert not caught.value.final
