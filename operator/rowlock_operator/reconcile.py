"""The operator's one decision: from what is observed to what is to be done. Pure, and level-triggered.

It looks at how things are, never at what has just happened: run once or ten times, by one operator or
by three, it leads to the same place. It decides nothing that the database decides. What it promises:

- an attempt is requested at most once; one that was requested and is not to be found is never requested
  again, since that would run work twice that ran before a restore from backup;
- a Job is made only for a live execution of ours, only while the database answers;
- what the database says is shown, never guessed; while it does not answer, the old status stays;
- a status is written only if it says something new, and mere progress at most every few seconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from rowlock_operator import conditions, events, launch, masterjob, status
from rowlock_operator.conditions import DATABASE_UNAVAILABLE, Condition, Type
from rowlock_operator.explain import explain
from rowlock_operator.model import (
    Action,
    BatchJob,
    Cancel,
    CreateJob,
    DatabaseAction,
    DeleteBatchJob,
    DeleteJob,
    DeletionPolicy,
    Emit,
    Execution,
    JsonObject,
    MasterJob,
    Observed,
    PatchStatus,
    Requeue,
    Resume,
    SetLimits,
    Suspend,
    master_job_name,
)
from rowlock_operator.refusal import Reason, Refusal
from rowlock_operator.resources import parse_time
from rowlock_operator.status import Situation, observed_attempt

CONFLICT_SECONDS: Final = 10.0
"""When to look again whether a name or an instance has become free."""
LINGER_SECONDS: Final = 60.0
"""How long a Job may outlive its execution before it is removed, if its pod does not run."""
_BEHIND_SECONDS: Final = 1.0
_MAY_BE_SUSPENDED: Final = frozenset({"REQUESTED", "PLANNING", "RUNNING"})
_NEVER_RESTARTED: Final = frozenset({"COMPLETED", "ABANDONED"})


def reconcile(observed: Observed) -> list[Action]:
    """What to do, in this order. Nothing but at most a Requeue: all is as it should be."""
    if observed.batchjob.deleting:
        return list(_leave(observed))
    if not observed.database_up:
        return list(_hold(observed))
    if _is_behind(observed):
        return [Requeue(seconds=_BEHIND_SECONDS)]
    return list(_tidy(_decide(observed)))


# -- which attempt is at hand ------------------------------------------------------------------


def _decide(observed: Observed) -> Iterator[Action]:
    batchjob, execution = observed.batchjob, observed.execution
    wanted = batchjob.attempt
    at_hand = _attempt_of(observed)
    if execution is not None and at_hand >= wanted:
        return _follow(observed, execution, at_hand)
    if _is_lost(observed, at_hand):
        return _lost(observed)
    if execution is not None:
        if batchjob.spec.cancel or not execution.ended:
            note = "" if batchjob.spec.cancel else f"attempt {wanted} waits for the end of this one"
            return _follow(observed, execution, at_hand, note)
        if execution.status in _NEVER_RESTARTED:
            note = f"restartNonce {batchjob.spec.restart_nonce} changes nothing"
            return _follow(observed, execution, at_hand, note)
    return _launch(observed, wanted)


def _attempt_of(observed: Observed) -> int:
    """The attempt that the execution is; 0 if there is none."""
    execution = observed.execution
    if execution is None:
        return 0
    if execution.attempt is not None:
        return execution.attempt
    # Restarted by a person with a command: it stands for the attempt that the status is about.
    return observed_attempt(observed.batchjob.status) or observed.batchjob.attempt


def _is_lost(observed: Observed, at_hand: int) -> bool:
    """Whether the wanted attempt was requested once, although the database knows nothing of it."""
    batchjob = observed.batchjob
    old = batchjob.status
    known = observed_attempt(old) or batchjob.attempt
    told = bool(old.get("executionID")) or (
        conditions.reason_of(old, Type.ACCEPTED) == Reason.RUN_NOT_FOUND
    )
    if told and at_hand < batchjob.attempt <= known:
        return True
    job = observed.jobs.get(batchjob.job_name)
    # The row comes before the Job, so a Job of ours proves that there was a row.
    return job is not None and job.owner_uid == batchjob.uid


def _is_behind(observed: Observed) -> bool:
    """Whether the row is older than what the status shows already."""
    execution, shown = observed.execution, observed.revision_written
    return execution is not None and shown is not None and execution.revision < shown


# -- launching ---------------------------------------------------------------------------------


def _launch(observed: Observed, attempt: int) -> Iterator[Action]:
    if _is_refused_for_good(observed.batchjob, attempt):
        yield from _expire(observed, observed.batchjob.status)
        return
    try:
        request = launch.request(observed, attempt)
    except Refusal as refusal:
        yield from _refuse(observed, attempt, refusal)
        return
    if observed.answer is not None and observed.answer.attempt == attempt:
        # It was accepted, and its row is not to be seen yet.
        yield Requeue(seconds=_BEHIND_SECONDS)
        return
    yield request


def _is_refused_for_good(batchjob: BatchJob, attempt: int) -> bool:
    """Whether the status says that this attempt will never run; asking again would change nothing."""
    old = batchjob.status
    return (
        observed_attempt(old) == attempt
        and conditions.is_true(old, Type.FINISHED)
        and conditions.reason_of(old, Type.ACCEPTED) == Reason.DUPLICATE_INSTANCE
    )


def _refuse(observed: Observed, attempt: int, refusal: Refusal) -> Iterator[Action]:
    situation = Situation(
        attempt=attempt,
        execution=None,
        accepted=_refused(refusal),
        message=refusal.message,
        ended=refusal.reason if refusal.final else None,
    )
    yield from _report(observed, situation)
    if not refusal.final:
        quick = refusal.reason in (Reason.NAME_CONFLICT, Reason.DUPLICATE_INSTANCE)
        yield Requeue(seconds=CONFLICT_SECONDS if quick else observed.options.resync_seconds)


def _refused(refusal: Refusal) -> Condition:
    return Condition(
        type=Type.ACCEPTED,
        status="False",
        reason=str(refusal.reason),
        message=status.clip(refusal.message, status.CONDITION_BYTES),
    )


def _lost(observed: Observed) -> Iterator[Action]:
    """The database has forgotten the execution: purged after its end, or restored from a backup."""
    batchjob = observed.batchjob
    old = batchjob.status
    if conditions.is_true(old, Type.FINISHED) and observed_attempt(old) == batchjob.attempt:
        fresh = Condition(type=Type.STATUS_STALE, status="False", reason="DatabaseReachable")
        yield from _write(observed, status.carry(observed, fresh))
        yield from _expire(observed, old)
        return
    if batchjob.spec.cancel:
        text = "cancelled; its execution is not in the database"
        yield from _refuse(observed, batchjob.attempt, Refusal(Reason.CANCELLED, text, final=True))
        return
    refusal = Refusal(
        Reason.RUN_NOT_FOUND,
        f"execution {old.get('executionID') or '?'} of attempt {batchjob.attempt} is not in the "
        "database (restored from a backup?); it is not run again by itself: raise restartNonce to do "
        "so, or set cancel",
    )
    said = [
        _refused(refusal),
        *(
            Condition(type=kind, status="False", reason=str(refusal.reason))
            for kind in (Type.COMPLETE, Type.FAILED, Type.FINISHED)
        ),
        Condition(type=Type.STATUS_STALE, status="False", reason="DatabaseReachable"),
    ]
    new = {
        **status.carry(observed, *said, phase="Pending", message=refusal.message),
        # Whatever becomes of the traces, this attempt is known to have been requested.
        **status.of_attempt(batchjob.attempt),
    }
    yield from _write(observed, new)
    yield Requeue(seconds=observed.options.resync_seconds)


# -- following an execution --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Master:
    """What is to be done about the master Job of an execution."""

    job: MasterJob | None = None
    """It, if there is one that is ours."""
    name: str | None = None
    """What it is called, as far as there is one, or was."""
    actions: tuple[Action, ...] = ()
    problem: str = ""
    """Why there is none, although there should be."""


def _follow(
    observed: Observed, execution: Execution, attempt: int, note: str = ""
) -> Iterator[Action]:
    pushes = [] if execution.ended else list(_pushes(observed.batchjob, execution))
    if pushes:
        yield from pushes
        return  # the next pass, at once, tells how the row is then
    master = _master(observed, execution)
    yield from master.actions
    message = master.problem or explain(observed, execution, master.job)
    unread = "; ".join(observed.batchjob.problems)
    situation = Situation(
        attempt=attempt,
        execution=execution,
        accepted=Condition(type=Type.ACCEPTED, status="True", reason="Accepted"),
        message="; ".join(part for part in (unread, note, message) if part),
        master_job=master.name,
    )
    for action in _report(observed, situation):
        yield action
        if isinstance(action, PatchStatus):
            yield from _tell_trouble(observed.batchjob, action.status["message"], master.job)


def _pushes(batchjob: BatchJob, execution: Execution) -> Iterator[DatabaseAction]:
    """What the spec says and the row does not yet."""
    spec, run = batchjob.spec, execution.execution_id
    why = f"spec of BatchJob {batchjob.namespace}/{batchjob.name}"
    if spec.cancel:
        if not execution.cancel_requested:
            yield Cancel(execution_id=run, reason=why)
        return
    if execution.cancel_requested:
        return
    if spec.suspend and not execution.suspended and execution.status in _MAY_BE_SUSPENDED:
        yield Suspend(execution_id=run, reason=why)
    if batchjob.problems:
        return  # they hide no wish to stop, but nobody starts or widens anything on a misreading
    if execution.suspended and not spec.suspend:
        yield Resume(execution_id=run, reason=why)
    changes = _changed_limits(batchjob, execution)
    if changes:
        yield SetLimits(execution_id=run, changes=changes, reason=why)


def _changed_limits(batchjob: BatchJob, execution: Execution) -> dict[str, Any]:
    spec = batchjob.spec
    changes: dict[str, Any] = {}
    if spec.priority != execution.priority:
        changes["priority"] = spec.priority
    if spec.parallelism != execution.parallelism:
        changes["parallelism"] = spec.parallelism
    if not _is_deadline(spec.active_deadline_seconds, execution):
        changes["deadline_seconds"] = spec.active_deadline_seconds
    if spec.deletion_policy.stored != execution.deletion_policy:
        changes["deletion_policy"] = spec.deletion_policy.stored
    return changes


def _is_deadline(seconds: int | None, execution: Execution) -> bool:
    if seconds is None or execution.deadline_at is None:
        return seconds is None and execution.deadline_at is None
    length = (execution.deadline_at - execution.requested_at).total_seconds()
    return abs(length - seconds) < 1


# -- the master Job ----------------------------------------------------------------------------


def _master(observed: Observed, execution: Execution) -> _Master:
    batchjob = observed.batchjob
    if execution.attempt is None or not masterjob.has_own_master(batchjob):
        return _Master()
    name = master_job_name(batchjob.name, execution.attempt)
    there = observed.jobs.get(name)
    if there is not None and there.owner_uid == batchjob.uid:
        return _Master(job=there, name=name, actions=tuple(_remove(observed, execution, there)))
    if execution.ended:
        return _Master(name=name if batchjob.status.get("masterJobName") == name else None)
    if execution.suspended or (execution.cancel_requested and not execution.running):
        return _Master()  # nobody has to drive it; claims that are left need a node that ends them
    try:
        launch.refuse_foreign(batchjob, there)
        return _made(observed, execution, name)
    except Refusal as refusal:
        # The execution is accepted all the same: a node that knows the job may become its master.
        quick = refusal.reason is Reason.NAME_CONFLICT
        seconds = CONFLICT_SECONDS if quick else observed.options.resync_seconds
        return _Master(problem=refusal.message, actions=(Requeue(seconds=seconds),))


def _made(observed: Observed, execution: Execution, name: str) -> _Master:
    if observed.create_problem:
        return _Master(actions=(Requeue(seconds=observed.options.resync_seconds),))
    assert execution.attempt is not None, "only an attempt of ours gets a Job"
    batchjob = observed.batchjob
    manifest = masterjob.render(
        batchjob,
        attempt=execution.attempt,
        execution_id=execution.execution_id,
        pool=masterjob.choose_pool(batchjob, observed.options),
    )
    launched = events.emit(
        batchjob, "MasterLaunched", f"Job {name} is the master", execution.execution_id
    )
    return _Master(name=name, actions=(CreateJob(manifest=manifest), launched))


def _remove(observed: Observed, execution: Execution, job: MasterJob) -> Iterator[Action]:
    """A Job whose execution is over, and whose pod will not see that by itself."""
    if execution.ended_at is None or job.succeeded or job.failed or job.deleting:
        return
    if job.active and not job.pod_trouble:
        return  # its process follows the execution and ends with its outcome
    due = execution.ended_at + timedelta(seconds=LINGER_SECONDS)
    if observed.now >= due:
        yield DeleteJob(name=job.name, uid=job.uid)
    else:
        yield Requeue(seconds=(due - observed.now).total_seconds())


def _tell_trouble(batchjob: BatchJob, message: str, job: MasterJob | None) -> Iterator[Emit]:
    """A warning when the message begins to tell of trouble with the master."""
    if job is None or not (job.failed or job.pod_trouble) or job.name not in message:
        return
    if message != batchjob.status.get("message"):
        extra = hashlib.sha256(message.encode()).hexdigest()
        yield events.emit(batchjob, "MasterTrouble", message, extra, "Warning")


# -- without the database, and at the end ------------------------------------------------------


def _hold(observed: Observed) -> Iterator[Action]:
    """The database does not answer: nothing is made, and the status says that it is stale."""
    old = observed.batchjob.status
    if conditions.is_true(old, Type.FINISHED):
        return  # it cannot become stale
    said: list[Condition] = []
    message: str | None = None
    if conditions.status_of(old, Type.ACCEPTED) not in ("True", "False"):
        message = "the database cannot be reached; nothing is launched meanwhile"
        said.append(Condition(type=Type.ACCEPTED, status="Unknown", reason=DATABASE_UNAVAILABLE))
    seen = observed.database_seen_at or observed.started_at or observed.now
    left = observed.options.stale_seconds - (observed.now - seen).total_seconds()
    if left <= 0:
        said.append(Condition(type=Type.STATUS_STALE, status="True", reason=DATABASE_UNAVAILABLE))
    elif not conditions.status_of(old, Type.STATUS_STALE):
        said.append(Condition(type=Type.STATUS_STALE, status="False", reason="NotYetStale"))
    if said:
        yield from _write(observed, status.carry(observed, *said, message=message))
    yield Requeue(seconds=left if left > 0 else observed.options.resync_seconds)


def _leave(observed: Observed) -> Iterator[Action]:
    """The BatchJob is being deleted: its execution follows the policy, and nothing else is touched."""
    batchjob, execution = observed.batchjob, observed.execution
    if batchjob.spec.deletion_policy is not DeletionPolicy.CANCEL:
        return
    if execution is None or execution.ended or execution.cancel_requested:
        return
    if observed.database_up:
        why = f"BatchJob {batchjob.namespace}/{batchjob.name} is deleted"
        yield Cancel(execution_id=execution.execution_id, reason=why)
    else:
        yield Requeue(seconds=observed.options.resync_seconds)


def _expire(observed: Observed, written: JsonObject) -> Iterator[Action]:
    """Delete a finished BatchJob when its time to live is over."""
    batchjob = observed.batchjob
    seconds, ended_at = batchjob.spec.ttl_seconds, status.completion_time(written)
    if seconds is None or ended_at is None or batchjob.problems:
        return
    left = seconds - (observed.now - ended_at).total_seconds()
    if left > 0:
        yield Requeue(seconds=left)
    else:
        yield DeleteBatchJob(uid=batchjob.uid, resource_version=batchjob.resource_version)


# -- telling -----------------------------------------------------------------------------------


def _report(observed: Observed, situation: Situation) -> Iterator[Action]:
    """Write the status if there is news; delete the BatchJob if it has been told long enough."""
    old = observed.batchjob.status
    new = status.render(observed, situation)
    if status.differs(old, new):
        wait = 0.0 if status.is_urgent(old, new) else _wait(observed)
        if wait:
            yield Requeue(seconds=wait)
        else:
            yield from _write(observed, new)
            if situation.finished and observed.batchjob.spec.ttl_seconds is not None:
                yield Requeue(seconds=_BEHIND_SECONDS)
    else:
        yield from _expire(observed, old)


def _write(observed: Observed, new: JsonObject) -> Iterator[Action]:
    if not status.differs(observed.batchjob.status, new):
        return
    yield PatchStatus(status=new)
    yield from events.happened(observed.batchjob, new)


def _wait(observed: Observed) -> float:
    """How long progress has to wait for its turn; 0 if it is due."""
    last = parse_time(observed.batchjob.status.get("lastSyncTime"))
    if last is None:
        return 0.0
    since = (observed.now - last).total_seconds()
    least = observed.options.patch_seconds
    # A time of the future was written by another clock: it holds nobody up.
    return least - since if 0 <= since < least else 0.0


def _tidy(actions: Iterable[Action]) -> Iterator[Action]:
    """The actions with one Requeue at most, the soonest, at their end."""
    waits: list[float] = []
    for action in actions:
        if isinstance(action, Requeue):
            waits.append(action.seconds)
        else:
            yield action
    if waits:
        yield Requeue(seconds=min(waits))
