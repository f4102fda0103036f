"""What the database says, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, TypeAlias
from uuid import UUID

FIRST_STEP: Final = "main"
"""The name of the only step of a `Job`; steps are part of every key, so that more can follow."""

Delivery: TypeAlias = Literal["AT_LEAST_ONCE", "AT_MOST_ONCE"]

Evidence: TypeAlias = Literal["on", "off", "pooler", "unreadable", "hidden"]
"""Whether the connections of a node can prove that it is gone, or why not."""


Place: TypeAlias = tuple[int, int]
"""Weight and id of a partition: its place in the line of its execution, the heavy ones first and those of one weight
by id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A partition that this node's claim statement returned."""

    id: int
    execution_id: UUID
    step: str
    key: str
    token: UUID
    claims: int
    failures: int
    lost: int
    alone: bool
    """Its next loss would be its last: nothing else may run on the node meanwhile."""
    weight: int
    started: bool
    """False: prefetched, for a slot that is not free yet."""
    delivery: Delivery
    slice: str
    checkpoint: str | None
    waited: float | None
    """Seconds from when it could be claimed until it was."""

    @property
    def at_most_once(self) -> bool:
        """Whether a start of it must never be repeated."""
        return self.delivery == "AT_MOST_ONCE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A result to be written under the token of its claim."""

    id: int
    token: UUID
    result: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What one look at another node showed."""

    node_id: UUID
    beat: int
    unreachable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """How new the database's schema is, and how old code may be to work with it."""

    version: int
    """That of the newest migration; 0 where there is no schema."""
    works_with: int
    """The lowest version that code must know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerIdentity:
    """Which database it is: two with the same identity are one."""

    system_identifier: str | None
    """Made by initdb, the same on all replicas. None: the service keeps it to itself."""
    database: str
    timeline: int | None
    """Grows when a replica is promoted or a backup is restored. None: not known."""

    @property
    def labels(self) -> dict[str, str]:
        """For the metric `rowlock_database_info`."""
        return {
            "system_identifier": self.system_identifier or "",
            "database": self.database,
            "timeline": "" if self.timeline is None else str(self.timeline),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatAnswer:
    """The answer to a beat: levels, not events, so that a lost answer costs one beat."""

    alive: bool
    claimable: bool
    adoptable: bool
    due: bool
    unrecovered: bool
    ended: tuple[UUID, ...]
    """Of the executions this node asked about: those that are closing or over."""
    peers: tuple[Peer, ...]
    at: datetime
    """The database's clock when it answered. Nothing is decided by it."""
    schema: Schema


class Recovered(NamedTuple):
    """What became of the claims of lost nodes."""

    moved: int
    """Claimable again."""
    failed: int
    """FAILED: AT_MOST_ONCE work, and work that no node survives."""
    unknown: int
    """Of these the AT_MOST_ONCE ones: whether the work was done is not known."""


class Evident(NamedTuple):
    """What came of looking for evidence that a node is gone."""

    acted: bool
    """It is gone, and this look has changed something."""
    moved: int
    """Of its claims, those that are claimable again."""
    failed: int
    """Those that no node survives."""
    freed: int
    """Executions that it drove."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mastership:
    """An execution that this node drives, under the epoch of its compare-and-set."""

    execution_id: UUID
    epoch: int
    status: str
    job: str
    contract_hash: str
    policy: Mapping[str, Any]
    delivery: Delivery
    instance_key: str
    parameters: str
    pool: str
    masters_lost: int
    """How many of its masters went without a word while partition() or finish() may have run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A look at an execution, by its master or by a node that follows it."""

    status: str
    """A status of the execution; or SUPERSEDED or GONE, which say nothing else."""
    total: int | None = None
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    failure_message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Purged:
    """What one call of the retention has deleted."""

    executions: int
    partitions: int
    events: int
    nodes: int
    more: bool
    """There is more to delete: call again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionFacts:
    """What an attempt needs to know of its execution; it never changes."""

    job: str
    instance_key: str
    parameters: str
    policy: Mapping[str, Any]
