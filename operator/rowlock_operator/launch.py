"""The request that launches an attempt, or the reason why there is none.

Everything is checked before anything is written: a BatchJob that cannot run costs no row and no pod.
"""

from __future__ import annotations

import json
from typing import Final
from uuid import UUID

from rowlock.contract_schema import absent_parameters, check_against_schema
from rowlock.errors import ContractError, near_names
from rowlock_operator import masterjob, policy
from rowlock_operator.model import (
    KIND,
    Answer,
    BatchJob,
    Contract,
    MasterJob,
    Observed,
    RequestExecution,
    launch_key,
)
from rowlock_operator.refusal import Reason, Refusal
from rowlock_operator.resources import as_object

ACTOR: Final = "operator"

HELD_BACK_SECONDS: Final = 10 * 365 * 86_400.0
"""A Job that Kueue holds back may wait for as long as it likes, and no node is to jump the queue."""

_NOBODY: Final = UUID(int=0)
_PROBLEMS_SHOWN: Final = 5

_DUPLICATES: Final = {
    "running": "is being run by execution {id}; this BatchJob takes it over if that one fails",
    "completed": "has completed in execution {id}; it is never run twice",
    "abandoned": "was abandoned with execution {id}; it is never launched again",
    "parameters": "was launched with other parameters (execution {id}); use another instanceKey",
}
_MAY_CHANGE: Final = frozenset({"running"})


def request(observed: Observed, attempt: int) -> RequestExecution:
    """The request for an attempt.

    Raises:
        Refusal: It is not to be launched, at least not now.
    """
    batchjob, options = observed.batchjob, observed.options
    spec = batchjob.spec
    if spec.cancel:
        raise Refusal(Reason.CANCELLED, "cancelled before it was launched", final=True)
    if batchjob.problems:
        raise Refusal(Reason.INVALID_SPEC, "; ".join(batchjob.problems[:_PROBLEMS_SHOWN]))
    if observed.answer is not None and observed.answer.attempt == attempt:
        _refuse_duplicate(batchjob, observed.answer)
    contract = observed.contract or _unknown_job(observed)
    chosen, delivery = policy.resolve(contract, spec)
    parameters = _parameters(batchjob, contract)
    if masterjob.has_own_master(batchjob):
        _check_master(observed, attempt)
    return RequestExecution(
        attempt=attempt,
        job=spec.job,
        contract_hash=contract.hash,
        policy=chosen,
        delivery=delivery,
        instance_key=batchjob.instance_key,
        launch_key=launch_key(options.cluster, batchjob.uid, attempt),
        parameters=parameters,
        pool=spec.pool,
        priority=spec.priority,
        adopt_after_seconds=_adopt_after_seconds(observed),
        requester={
            "kind": KIND,
            "cluster": options.cluster,
            "namespace": batchjob.namespace,
            "name": batchjob.name,
            "uid": batchjob.uid,
            "actor": ACTOR,
        },
        options={
            "parallelism": spec.parallelism,
            "deadline_seconds": spec.active_deadline_seconds,
            "suspended": spec.suspend,
            "deletion_policy": spec.deletion_policy.stored,
        },
    )


def _refuse_duplicate(batchjob: BatchJob, answer: Answer) -> None:
    said = _DUPLICATES.get(answer.outcome)
    if said is None:
        return
    instance = f"instance {batchjob.instance_key} of job {batchjob.spec.job}"
    raise Refusal(
        Reason.DUPLICATE_INSTANCE,
        f"{instance} {said.format(id=answer.execution_id)}",
        final=answer.outcome not in _MAY_CHANGE,
    )


def _unknown_job(observed: Observed) -> Contract:
    name = observed.batchjob.spec.job
    near = near_names(name, observed.job_names)
    hint = f"did you mean {' or '.join(near)}?" if near else "it is launched as soon as one does"
    raise Refusal(Reason.UNKNOWN_JOB, f"no node has registered job {name}; {hint}")


def _parameters(batchjob: BatchJob, contract: Contract) -> str:
    """The JSON text of the parameters, as the published contract accepts it."""
    schema = dict(as_object(contract.schemas.get("parameters")))
    given = batchjob.spec.parameters
    try:
        text = absent_parameters(schema) if given is None else json.dumps(given, ensure_ascii=False)
        return check_against_schema(schema, text, "parameters")
    except ContractError as problem:
        raise Refusal(Reason.INVALID_PARAMETERS, f"spec.{problem}") from problem
    except RecursionError:
        text = "spec.parameters $: is nested too deep"
        raise Refusal(Reason.INVALID_PARAMETERS, text) from None


def _check_master(observed: Observed, attempt: int) -> None:
    """Whether a master Job could be made, before there is an execution that needs one."""
    batchjob = observed.batchjob
    pool = masterjob.choose_pool(batchjob, observed.options)
    masterjob.render(batchjob, attempt=attempt, execution_id=_NOBODY, pool=pool)
    there = observed.jobs.get(batchjob.job_name)
    if there is not None and not there.is_left_over(batchjob):
        refuse_foreign(batchjob, there)


def refuse_foreign(batchjob: BatchJob, job: MasterJob | None) -> None:
    """Refuse to take a Job of somebody else for the master Job.

    Raises:
        Refusal: The Job is not controlled by this BatchJob.
    """
    if job is None or job.owner_uid == batchjob.uid:
        return
    left = job.is_left_over(batchjob)
    what = (
        "of an earlier BatchJob is being removed" if left else "exists and belongs to somebody else"
    )
    raise Refusal(
        Reason.NAME_CONFLICT,
        f"Job {job.name} {what}; the master Job takes its place when it is gone",
    )


def _adopt_after_seconds(observed: Observed) -> float:
    if not masterjob.has_own_master(observed.batchjob):
        return 0.0
    if masterjob.held_by_kueue(observed.batchjob):
        return HELD_BACK_SECONDS
    return observed.options.adopt_after_seconds
