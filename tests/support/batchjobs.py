"""What a test of the operator's decisions starts from: BatchJobs, executions and Jobs, in a line each.

`World` carries actions out as far as they say themselves what they do, so that tests can ask where they
lead. It is no database: a request makes a row, a cancel ends one, and that is all it knows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar
from uuid import UUID, uuid4

from rowlock_operator.model import (
    Action,
    Answer,
    BatchJob,
    Cancel,
    Contract,
    CreateJob,
    DatabaseAction,
    DeleteBatchJob,
    DeleteJob,
    Emit,
    Execution,
    MasterJob,
    Observed,
    Options,
    PatchStatus,
    RequestExecution,
    Requeue,
    Resume,
    SetLimits,
    Suspend,
)
from rowlock_operator.pools import parse_pools
from rowlock_operator.reconcile import reconcile
from rowlock_operator.resources import parse

Kind = TypeVar("Kind")

NOW: Final = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
UID: Final = "0b0a7c86-58a6-4d0c-b8a3-6f0a0f7c9f01"
RUN: Final = UUID("7d9b4f9e-0000-4000-8000-000000000001")
NAME: Final = "invoices-2026-11"
NAMESPACE: Final = "billing"
JOB: Final = "invoices.monthly"
CLUSTER: Final = "eu-1"
TEMPLATE: Final[Mapping[str, Any]] = {
    "metadata": {"labels": {"team": "billing"}},
    "spec": {
        "serviceAccountName": "worker",
        "containers": [
            {"name": "sidecar", "image": "proxy:1"},
            {
                "name": "rowlock",
                "image": "invoices:7",
                "command": ["rowlock"],
                "env": [{"name": "ROWLOCK_DSN", "value": "from-a-secret"}],
            },
        ],
    },
}
OPTIONS: Final = Options(
    cluster=CLUSTER,
    pools=parse_pools({"pools": {"default": {"slots": 4, "template": TEMPLATE}}}),
)
CONTRACT: Final = Contract(
    hash="c0ffee",
    delivery="AT_LEAST_ONCE",
    policy={
        "max_attempts": 3,
        "initial_seconds": 1.0,
        "factor": 2.0,
        "max_seconds": 300.0,
        "timeout_seconds": None,
        "max_failed": None,
        "has_finish": True,
    },
    schemas={
        "parameters": {
            "type": "object",
            "properties": {"month": {"type": "string"}, "batch": {"type": "integer"}},
            "required": ["month"],
            "additionalProperties": False,
        }
    },
)


def a_batchjob(
    spec: Mapping[str, Any] | None = None,
    *,
    status: Mapping[str, Any] | None = None,
    labels: Mapping[str, str] | None = None,
    generation: int = 1,
    deleting: bool = False,
) -> BatchJob:
    """A BatchJob as it comes from the API server."""
    metadata: dict[str, Any] = {
        "name": NAME,
        "namespace": NAMESPACE,
        "uid": UID,
        "generation": generation,
        "resourceVersion": "17",
        "labels": dict(labels or {}),
    }
    if deleting:
        metadata["deletionTimestamp"] = "2026-11-30T12:00:00Z"
    given = {"job": JOB, "parameters": {"month": "2026-11"}, **(spec or {})}
    return parse({"metadata": metadata, "spec": given, "status": dict(status or {})})


def an_execution(status: str = "RUNNING", **fields: Any) -> Execution:
    """An execution of the first attempt, with what its status makes of it."""
    begun = status not in ("REQUESTED", "PLANNING")
    given: dict[str, Any] = {
        "execution_id": RUN,
        "status": status,
        "attempt": 1,
        "requested_at": NOW - timedelta(minutes=5),
        "revision": 1,
        **({"started_at": NOW - timedelta(minutes=4), "total": 200} if begun else {}),
        **fields,
    }
    if given["status"] in ("COMPLETED", "FAILED", "CANCELLED", "ABANDONED"):
        given.setdefault("ended_at", NOW - timedelta(minutes=1))
    return Execution(**given)


def a_job(attempt: int = 1, **fields: Any) -> dict[str, MasterJob]:
    """The master Job of an attempt, by its name."""
    name = f"{NAME}-{attempt}"
    given: dict[str, Any] = {"uid": f"job-{attempt}", "owner_uid": UID, "active": 1, **fields}
    return {name: MasterJob(name=name, **given)}


def an_observation(batchjob: BatchJob | None = None, **fields: Any) -> Observed:
    """What is observed of a BatchJob (by default a new one) while all is well."""
    given: dict[str, Any] = {
        "batchjob": batchjob or a_batchjob(),
        "options": OPTIONS,
        "now": NOW,
        "database_up": True,
        "database_seen_at": NOW,
        "contract": CONTRACT,
        "job_names": (JOB,),
        **fields,
    }
    return Observed(**given)


def only(actions: Iterable[Action], kind: type[Kind]) -> Kind:
    """The one action of a kind."""
    found = [action for action in actions if isinstance(action, kind)]
    assert len(found) == 1, f"{len(found)} actions are {kind.__name__}"
    return found[0]


def told(batchjob: BatchJob) -> list[str]:
    """The conditions of its status in short: `Accepted=True Accepted`."""
    conditions: list[Any] = batchjob.status.get("conditions", [])
    return [f"{one['type']}={one['status']} {one['reason']}" for one in conditions]


@dataclass
class World:
    """A BatchJob and all around it, which actions change."""

    observed: Observed
    launched: list[str] = field(default_factory=list[str])
    """The launch keys of the executions that were made."""
    keys: set[str] = field(default_factory=set[str])
    """Those that the database knows."""
    events: dict[str, Emit] = field(default_factory=dict[str, Emit])
    patches: int = 0
    gone: bool = False

    @property
    def batchjob(self) -> BatchJob:
        return self.observed.batchjob

    @property
    def status(self) -> Mapping[str, Any]:
        return self.observed.batchjob.status

    def settle(self, passes: int = 8) -> list[Action]:
        """Reconcile until nothing is left to do; what was done, without the waiting."""
        done: list[Action] = []
        actions: list[Action] = []
        for _ in range(passes):
            actions = [one for one in reconcile(self.observed) if not isinstance(one, Requeue)]
            if not actions:
                self.observed = replace(self.observed, answer=None)
                return done
            done += actions
            self.apply(actions)
        raise AssertionError(f"no end after {passes} passes; the last one: {actions}")

    def apply(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, (RequestExecution, Suspend, Resume, Cancel, SetLimits)):
                self._in_database(action)
            else:
                self._in_cluster(action)

    def sees(self, **changes: Any) -> None:
        """Something has changed around the operator."""
        self.observed = replace(self.observed, **changes)

    def edits(self, **spec: Any) -> None:
        """Somebody edits the spec."""
        batchjob = self.batchjob
        edited = replace(batchjob.spec, **spec)
        self.sees(batchjob=replace(batchjob, spec=edited, generation=batchjob.generation + 1))

    def passes(self, seconds: float) -> None:
        """Time goes by; the database is still there if it was."""
        now = self.observed.now + timedelta(seconds=seconds)
        seen = now if self.observed.database_up else self.observed.database_seen_at
        self.sees(now=now, database_seen_at=seen)

    def _in_database(self, action: DatabaseAction) -> None:
        execution = self.observed.execution
        if isinstance(action, RequestExecution):
            self._request(action)
            return
        assert execution is not None
        assert execution.execution_id == action.execution_id
        changes: dict[str, Any] = {}
        if isinstance(action, (Suspend, Resume)):
            changes = {"suspended": isinstance(action, Suspend)}
        elif isinstance(action, Cancel):
            status = "CLOSING" if execution.running else "CANCELLED"
            ended = None if execution.running else self.observed.now
            changes = {"cancel_requested": True, "status": status, "ended_at": ended}
        else:
            changes = dict(action.changes)
            if "deadline_seconds" in changes:
                changes["deadline_at"] = _deadline(
                    execution.requested_at, changes.pop("deadline_seconds")
                )
        self.sees(execution=replace(execution, revision=execution.revision + 1, **changes))

    def _request(self, action: RequestExecution) -> None:
        if action.launch_key in self.keys:
            outcome = "exists"
        else:
            outcome = "requested"
            self.keys.add(action.launch_key)
            self.launched.append(action.launch_key)
            made = Execution(
                execution_id=uuid4(),
                status="REQUESTED",
                attempt=action.attempt,
                suspended=action.options["suspended"],
                priority=action.priority,
                parallelism=action.options["parallelism"],
                deletion_policy=action.options["deletion_policy"],
                requested_at=self.observed.now,
                deadline_at=_deadline(self.observed.now, action.options["deadline_seconds"]),
            )
            self.sees(execution=made)
        self.sees(answer=Answer(attempt=action.attempt, outcome=outcome))

    def _in_cluster(self, action: Action) -> None:
        jobs = dict(self.observed.jobs)
        if isinstance(action, CreateJob):
            name = action.manifest["metadata"]["name"]
            assert name not in jobs
            owner = self.batchjob.uid
            jobs[name] = MasterJob(name=name, uid=str(uuid4()), owner_uid=owner, active=1)
            self.sees(jobs=jobs)
        elif isinstance(action, DeleteJob):
            assert jobs.pop(action.name).uid == action.uid
            self.sees(jobs=jobs)
        elif isinstance(action, PatchStatus):
            self.patches += 1
            written = json.loads(json.dumps(action.status))
            self.sees(batchjob=replace(self.batchjob, status=written))
        elif isinstance(action, Emit):
            self.events.setdefault(action.name, action)
        elif isinstance(action, DeleteBatchJob):
            self.gone = True
            self.sees(batchjob=replace(self.batchjob, deleting=True))

    def said(self) -> list[str]:
        """The reasons of all events, each name once."""
        return [event.reason for event in self.events.values()]


def _deadline(since: datetime, seconds: float | None) -> datetime | None:
    return None if seconds is None else since + timedelta(seconds=seconds)
