"""The policy of an execution: what the job's author published, with what the BatchJob overrides.

The author decides what is safe. A BatchJob may change numbers, and may forbid that work is repeated;
it may never allow repetition that the author has not.
"""

from __future__ import annotations

from rowlock_operator.model import Contract, JsonObject, Spec
from rowlock_operator.refusal import Reason, Refusal

_ONCE = "AT_MOST_ONCE"


def resolve(contract: Contract, spec: Spec) -> tuple[JsonObject, str]:
    """Policy and delivery to request an execution with.

    Raises:
        Refusal: The two contradict each other.
    """
    delivery = spec.delivery or contract.delivery
    if contract.delivery == _ONCE and delivery != _ONCE:
        raise _refusal(
            f"job {spec.job} is AtMostOnce: its author has not made it safe to repeat, so "
            "spec.partitions.delivery cannot be AtLeastOnce"
        )
    if delivery == _ONCE and (spec.max_attempts or 1) > 1:
        raise _refusal(
            f"spec.partitions.maxAttempts is {spec.max_attempts}, but AtMostOnce partitions are never "
            "retried: leave it out or set it to 1"
        )
    policy = {**contract.policy, **_overrides(spec)}
    if delivery == _ONCE:
        policy["max_attempts"] = 1
    first, longest = policy.get("initial_seconds"), policy.get("max_seconds")
    if isinstance(first, (int, float)) and isinstance(longest, (int, float)) and longest < first:
        raise _refusal(
            f"spec.partitions.backoff makes the first wait {first:g} s and the longest {longest:g} s; "
            "what it leaves out is as the job says: set both initialSeconds and maxSeconds"
        )
    return policy, delivery


def _overrides(spec: Spec) -> dict[str, object]:
    given = {
        "max_attempts": spec.max_attempts,
        "timeout_seconds": _number(spec.timeout_seconds),
        "max_failed": spec.max_failed,
        "initial_seconds": _number(spec.backoff.initial_seconds),
        "factor": _number(spec.backoff.factor),
        "max_seconds": _number(spec.backoff.max_seconds),
    }
    return {name: value for name, value in given.items() if value is not None}


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)


def _refusal(message: str) -> Refusal:
    return Refusal(Reason.INVALID_POLICY, message)
