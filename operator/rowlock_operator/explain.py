"""The message of a BatchJob's status: in one sentence, what a person should know now.

The first thing that holds is said: how it ended, else what keeps it from moving. Nothing in it changes
while nothing happens, since every change costs a patch.
"""

from __future__ import annotations

from rowlock_operator.masterjob import has_own_master
from rowlock_operator.model import Execution, MasterJob, Observed


def explain(observed: Observed, execution: Execution, job: MasterJob | None) -> str:
    """The message for an execution.

    Args:
        observed: Everything else.
        execution: What it is about.
        job: Its master Job, if there is one that is ours.
    """
    if execution.ended:
        return _end(execution)
    if execution.status == "CLOSING" or execution.cancel_requested:
        why = "it is being cancelled" if execution.cancel_requested else _reason(execution)
        return f"{why}; {_many(execution.running)} still running"
    if execution.suspended:
        return f"suspended: nothing is claimed; {_many(execution.running)} still running"
    waiting = _waiting(observed, execution)
    return "; ".join(part for part in (waiting, _master(observed, execution, job)) if part)


def _end(execution: Execution) -> str:
    if execution.status == "COMPLETED":
        return f"all {execution.total or 0} partitions are accounted for"
    if execution.status == "ABANDONED":
        return "abandoned by a person; this instance is never launched again"
    done = f"{execution.completed} of {execution.total or 0} partitions are completed"
    if execution.status == "CANCELLED":
        return f"cancelled; {done}"
    return f"{_reason(execution)}; {done}"


def _reason(execution: Execution) -> str:
    return execution.failure_message or execution.failure_reason or "it has failed"


def _many(count: int) -> str:
    return f"{count} partition{'' if count == 1 else 's'}"


def _waiting(observed: Observed, execution: Execution) -> str:
    """Why no partition moves, as far as the pool is the cause."""
    batchjob = observed.batchjob
    where = f"no living node of pool {batchjob.spec.pool} runs job {batchjob.spec.job}"
    if execution.status in ("REQUESTED", "PLANNING"):
        if execution.master_node:
            return "partitions are being planned"
        if has_own_master(batchjob):
            return "waits for its master pod"
        return where if observed.pool_nodes == 0 else "waits for a node to become its master"
    if execution.status == "FINISHING":
        return "all partitions have ended; finish() is due"
    if execution.pending and not execution.running and observed.pool_nodes == 0:
        return f"{_many(execution.pending)} waiting: {where}"
    limit = execution.parallelism
    if execution.pending and limit is not None and execution.running >= limit:
        return f"runs as many partitions as spec.parallelism allows ({limit})"
    return "running"


def _master(observed: Observed, execution: Execution, job: MasterJob | None) -> str:
    """What is wrong with its master pod. The execution may go on without it."""
    if not has_own_master(observed.batchjob):
        return ""
    if observed.create_problem:
        return f"the master Job cannot be created: {observed.create_problem}"
    if job is None:
        return ""
    if job.failed:
        led = execution.master_node
        rest = (
            f"node {led} leads the execution" if led else "a node that knows the job may take over"
        )
        cause = job.pod_trouble or job.failure_message or "its pods failed"
        return f"master Job {job.name} has failed ({cause}); {rest}; delete the Job to have it made anew"
    if job.suspended:
        return f"master Job {job.name} is held back (spec.suspend of the Job: Kueue has not admitted it)"
    if job.pod_trouble and not job.succeeded:
        return f"master {job.pod_trouble}"
    return ""
