"""The values between the operator's pure half and its shell.

The shell observes (API server, database, mounted files) and fills an `Observed`; `reconcile` returns
actions; the shell carries them out in their order and observes again. Nothing here does anything.

Three rules keep a restarted, doubled or late operator harmless, and the shell has to follow them:

1. **Observe in this order**: first the BatchJob and its Job (the cache of the watch), then the
   database. What the database says is then never older than the status that it is compared with.
2. **The database first.** `DatabaseAction`s come alone: observe and reconcile again at once after them,
   and bound these passes. Stop at the first action that fails, and go back to the queue.
   `RequestExecution` has an answer: hand it over as `Observed.answer` in the passes that follow at
   once, and forget it when the BatchJob goes back to the queue, since answers change.
3. **Nothing is retried blindly.** 409 on creating a Job or an event means that it is there; 409 on a
   status means that somebody was quicker: observe again. 404 on deleting means done.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID

from rowlock.protocol.statuses import ENDED

GROUP: Final = "batch.rowlock.dev"
VERSION: Final = "v1alpha1"
PLURAL: Final = "batchjobs"
KIND: Final = "BatchJob"
API_VERSION: Final = f"{GROUP}/{VERSION}"

LABEL_BATCHJOB: Final = f"{GROUP}/batchjob"
"""Label of the master Job and its pods: the name of their BatchJob."""
LABEL_EXECUTION: Final = f"{GROUP}/execution-id"
"""Label of the master Job and its pods: the execution that they are for."""

LABEL_CHARS: Final = 63
"""How long the value of a label may be, and so the name of a Job."""

Json: TypeAlias = Any
"""Any JSON value: what is in a manifest, and in parameters, is not ours to type."""
JsonObject: TypeAlias = Mapping[str, Json]

_NOTHING: Final[JsonObject] = MappingProxyType({})


# -- what somebody asks for --------------------------------------------------------------------


class Mode(StrEnum):
    """Who is the master of an execution: `spec.master.mode`."""

    JOB = "Job"
    """A pod of its own, made by a Kubernetes Job from the pool's template."""
    POOL = "Pool"
    """A living node that knows the job."""


class DeletionPolicy(StrEnum):
    """What becomes of a live execution when its BatchJob is deleted."""

    CANCEL = "Cancel"
    ORPHAN = "Orphan"

    @property
    def stored(self) -> str:
        """As the database spells it."""
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """`spec.partitions.backoff`; None leaves a number to the job."""

    initial_seconds: float | None = None
    factor: float | None = None
    max_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Master:
    """`spec.master`; None leaves a value to the pool's template."""

    mode: Mode = Mode.JOB
    slots: int | None = None
    image: str | None = None
    service_account: str | None = None
    backoff_limit: int | None = None
    resources: JsonObject | None = None
    pod_template: JsonObject | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """`spec` of a BatchJob. What is None was not given, and the job's author decides."""

    job: str
    parameters: JsonObject | None = None
    instance_key: str | None = None
    pool: str = "default"
    priority: int = 0
    parallelism: int | None = None
    suspend: bool = False
    cancel: bool = False
    restart_nonce: int = 0
    active_deadline_seconds: int | None = None
    ttl_seconds: int | None = None
    deletion_policy: DeletionPolicy = DeletionPolicy.CANCEL
    delivery: Literal["AT_LEAST_ONCE", "AT_MOST_ONCE"] | None = None
    """As the database spells it."""
    max_attempts: int | None = None
    timeout_seconds: float | None = None
    max_failed: int | str | None = None
    """A number of partitions, or a percentage such as "5%"."""
    backoff: Backoff = field(default_factory=Backoff)
    master: Master = field(default_factory=Master)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """A BatchJob as the API server has it. `resources.parse` makes one of any object whatever."""

    name: str
    namespace: str
    uid: str
    generation: int
    resource_version: str
    labels: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    annotations: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    created_at: datetime | None = None
    deleting: bool = False
    """It has a deletionTimestamp (foreground deletion waits for its Jobs)."""
    spec: Spec
    status: JsonObject = field(default_factory=lambda: _NOTHING)
    """As it stands, whoever wrote it; never trusted to have a shape."""
    problems: tuple[str, ...] = ()
    """What is wrong with the spec, each with its path. Fields that could not be read have their
    defaults, so a BatchJob with problems is never launched and none of its limits are pushed; suspend
    and cancel act as far as they could be read."""

    @property
    def attempt(self) -> int:
        """The attempt that the spec asks for, counted from 1."""
        return 1 + self.spec.restart_nonce

    @property
    def instance_key(self) -> str:
        """The key of the instance in the database."""
        return self.spec.instance_key or self.uid

    @property
    def job_name(self) -> str:
        """The name of the master Job of the attempt that the spec asks for."""
        return master_job_name(self.name, self.attempt)


def master_job_name(name: str, attempt: int) -> str:
    """The name of the Job for one attempt of a BatchJob: the second belt of the launch.

    A name that no pod label could hold is cut, and told apart by a digest.
    """
    whole = f"{name}-{attempt}"
    if len(whole) <= LABEL_CHARS:
        return whole
    digest = hashlib.sha256(whole.encode()).hexdigest()[:12]
    return f"{whole[: LABEL_CHARS - 13].rstrip('-.')}-{digest}"


def launch_key(cluster: str, uid: str, attempt: int) -> str:
    """The key that lets the database make one execution per attempt: the first belt of the launch."""
    return f"{cluster}/{uid}/{attempt}"


def attempt_of(key: str | None, cluster: str, uid: str) -> int | None:
    """The attempt in a launch key of this BatchJob; None for any other key."""
    if not key or not key.startswith(f"{cluster}/{uid}/"):
        return None
    number = key.rpartition("/")[2]
    return int(number) if number.isascii() and number.isdigit() else None


# -- what is there -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedPartition:
    """One of the first FAILED partitions of an execution."""

    key: str
    attempts: int
    """How often it was claimed."""
    reason: str
    """The type of its last error."""
    message: str
    outcome_unknown: bool = False
    """AT_MOST_ONCE work that was cut off: `last_error ->> 'outcome'` is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What matters here of a row of the view `executions`."""

    execution_id: UUID
    status: str
    attempt: int | None
    """`attempt_of(launch_key, …)`. None: a person restarted the instance by a command; such an
    execution is mirrored, and gets no Job."""
    suspended: bool = False
    cancel_requested: bool = False
    priority: int = 0
    parallelism: int | None = None
    deletion_policy: str = "CANCEL"
    requested_at: datetime
    deadline_at: datetime | None = None
    total: int | None = None
    """None before the plan is sealed."""
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    running: int = 0
    pending: int = 0
    retried: int = 0
    nodes: int = 0
    failure_reason: str | None = None
    failure_message: str | None = None
    revision: int = 0
    started_at: datetime | None = None
    ended_at: datetime | None = None
    master_node: str | None = None
    """Name of the node that drives it; None while nobody does."""
    failed_partitions: tuple[FailedPartition, ...] = ()

    @property
    def ended(self) -> bool:
        """Whether its status is its last one."""
        return self.status in ENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterJob:
    """A Kubernetes Job that is, or stands in the place of, the master Job of an attempt."""

    name: str
    uid: str
    owner_uid: str | None
    """uid of its controller; None if it has none."""
    owner_name: str | None = None
    """Name of its controller, if that is a BatchJob."""
    deleting: bool = False
    suspended: bool = False
    """`spec.suspend`: Kueue, or somebody, holds it back."""
    active: int = 0
    succeeded: bool = False
    """Its condition Complete is True."""
    failed: bool = False
    """Its condition Failed is True: it will start no pod any more."""
    failure_message: str = ""
    """Reason and message of that condition."""
    pod_trouble: str = ""
    """`podtrouble.trouble(pods)`: why its pod does not start; empty if nothing is known."""

    def is_left_over(self, batchjob: BatchJob) -> bool:
        """Whether it belongs to an earlier BatchJob of this name, and so is about to be removed."""
        if self.owner_uid == batchjob.uid:
            return False
        return self.deleting or self.owner_name == batchjob.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """What nodes have published of a job: the contract that living nodes accept, else the newest."""

    hash: str
    delivery: str
    policy: JsonObject
    schemas: JsonObject
    """By role; only "parameters" is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One entry of the pools file: how a master pod of this pool looks."""

    name: str
    slots: int = 0
    """Partitions that a master pod runs itself unless the BatchJob says otherwise."""
    template: JsonObject
    """A PodTemplateSpec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The settings that `reconcile` depends on."""

    cluster: str
    pools: Mapping[str, Pool] = field(default_factory=lambda: MappingProxyType({}))
    pools_problem: str = ""
    """Why the pools file cannot be used; empty if it can."""
    allow_pod_template: bool = True
    adopt_after_seconds: float = 60.0
    """How long nodes leave a requested execution to the pod of its Job."""
    stale_seconds: float = 30.0
    """After this time without the database, the status says that it is stale."""
    patch_seconds: float = 5.0
    """Least time between two patches that carry only progress."""
    resync_seconds: float = 60.0
    """When to look again at something that may heal by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the database said to a `RequestExecution`."""

    attempt: int
    outcome: str
    """requested, restarted, exists; refused: running, completed, abandoned, parameters."""
    execution_id: UUID | None = None
    """The execution made, or the one in the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Everything that one decision rests on."""

    batchjob: BatchJob
    options: Options
    now: datetime
    """UTC, from the operator's clock: for conditions, the pace of patches, and time to live."""
    database_up: bool
    """The queries of this pass succeeded. If not, what comes from the database is None here."""
    database_seen_at: datetime | None = None
    """When a query last succeeded, by the clock of `now`; None: not since the operator started, which
    then counts from `started_at`."""
    started_at: datetime | None = None
    """When this operator started."""
    execution: Execution | None = None
    """The latest execution (by exec_no) whose requester is this BatchJob: kind BatchJob, this cluster
    and this uid."""
    jobs: Mapping[str, MasterJob] = field(default_factory=lambda: MappingProxyType({}))
    """Jobs by name: all that this BatchJob controls, the one named `batchjob.job_name` whoever owns it,
    and any other that a CreateJob found in its way (409)."""
    create_problem: str = ""
    """What the API server said when it refused the last CreateJob (403, 422): quota, admission, an
    invalid template. Only in the pass right after it."""
    contract: Contract | None = None
    """Of `spec.job`; needed only while there is no execution for `batchjob.attempt`."""
    job_names: tuple[str, ...] = ()
    """Names of published jobs, to suggest near ones; needed only if there is no contract."""
    pool_nodes: int | None = None
    """Living nodes with slots that accept the job in the BatchJob's pool; None: not asked."""
    answer: Answer | None = None
    """The answer to the last `RequestExecution`, see above."""
    revision_written: int | None = None
    """Highest revision of `execution` that this operator has shown in the status; None: none in the
    last minute (a database restored from a backup begins anew)."""


# -- what to do --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestExecution:
    """Call `request_execution` with a new uuid."""

    attempt: int
    """For the `Answer`."""
    job: str
    contract_hash: str
    policy: JsonObject
    delivery: str
    instance_key: str
    launch_key: str
    parameters: str
    """JSON text."""
    pool: str
    priority: int
    adopt_after_seconds: float
    requester: JsonObject
    options: JsonObject
    """parallelism, deadline_seconds, suspended, deletion_policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspend:
    """Call `suspend`."""

    execution_id: UUID
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Call `resume`."""

    execution_id: UUID
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Call `request_cancel`, in its own transaction, then `cancel`."""

    execution_id: UUID
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetLimits:
    """Call `set_limits`."""

    execution_id: UUID
    changes: JsonObject
    """Only what differs: priority, parallelism, deadline_seconds, deletion_policy."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateJob:
    """Create a Job in the BatchJob's namespace; 409 means that it exists."""

    manifest: JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteJob:
    """Delete a Job with its pods (propagationPolicy Background), if it still has this uid."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchStatus:
    """Replace the status, with the resourceVersion of the BatchJob that was observed.

    `status` is complete; `status.merge_patch` makes a merge patch of it.
    """

    status: JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Emit:
    """Create an event about the BatchJob; 409 means that it was said, 403 is ignored."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str
    name: str
    """metadata.name: the same for the same happening, whoever reports it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteBatchJob:
    """Delete the BatchJob (propagationPolicy Background), with both values as preconditions."""

    uid: str
    resource_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeue:
    """Observe again after this time, unless something happens before."""

    seconds: float


DatabaseAction: TypeAlias = RequestExecution | Suspend | Resume | Cancel | SetLimits
"""Actions that change rows: observe again after them."""

Action: TypeAlias = (
    DatabaseAction | CreateJob | DeleteJob | PatchStatus | Emit | DeleteBatchJob | Requeue
)
