"""Stays with one execution until it has ended: as its master, or beside the node that is its master.

A node for this execution alone. While another living node drives the execution, this one works its
slots and looks; when that one goes, the beat says so and this one takes over, as any node would.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

from rowlock.db import views
from rowlock.db.store import Store
from rowlock.db.views import Execution
from rowlock.errors import NotFound, RowlockError, UsageError
from rowlock.protocol.model import Progress
from rowlock.protocol.statuses import ENDED
from rowlock.registry import Registry
from rowlock.runtime.follower import GONE
from rowlock.runtime.masters import SUPERSEDED
from rowlock.runtime.node import Node, NodeOptions
from rowlock.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveResult:
    """How it ended."""

    execution_id: UUID
    status: str
    """The execution's status, as this node saw it last."""

    @property
    def left(self) -> bool:
        """Whether this node was told to leave; the execution goes on elsewhere."""
        return self.status not in ENDED


class Driver(ABC):
    """A node for one execution, which ends with it. Main thread only."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        options: NodeOptions,
        *,
        on_progress: Callable[[Progress], None] | None,
        on_superseded: Callable[[], None] | None,
    ) -> None:
        """Prepare it.

        :param options: `only_execution` names the execution.
        :param on_progress: called at each look at the execution, whoever drives it.
        :param on_superseded: called once, when another node turns out to be the master.
        """
        assert options.only_execution is not None
        self.execution_id = options.only_execution
        self.node = Node(
            settings,
            registry,
            options,
            on_progress=self._progressed,
            on_registered=self._registered,
        )
        self._on_progress = on_progress
        self._on_superseded = on_superseded
        self._status = "REQUESTED"
        self._superseded = False
        self._begun = False
        self._error: RowlockError | None = None

    def run(self) -> DriveResult:
        """Be the node until the execution has ended, or until told to leave.

        :raises RowlockError: there is nothing to drive, or this node cannot.
        """
        self.node.run()
        if self._error is not None:
            raise self._error
        return DriveResult(execution_id=self.execution_id, status=self._status)

    @abstractmethod
    def begin(self) -> None:
        """The first incarnation is registered: see to it that there is something to `take`."""

    def take(self) -> None:
        """Become the master, unless another living node is; follow the execution in any case."""
        self.node.follow(self.execution_id)
        self.node.masters.adopt(self.execution_id)

    def leave(self, error: RowlockError | None = None) -> None:
        """Be a node no longer, and let `run` raise the error."""
        self._error = self._error or error
        self.node.drain()

    def _registered(self) -> None:
        if self._begun:
            self.take()  # a new incarnation: the earlier one was removed
        else:
            self._begun = True
            self.begin()

    def _progressed(self, _execution: UUID, progress: Progress) -> None:
        if progress.status == SUPERSEDED:
            if not self._superseded and self._on_superseded is not None:
                self._on_superseded()
            self._superseded = True
            return
        if progress.status == GONE:
            self.leave(NotFound("execution", str(self.execution_id)))
            return
        self._status = progress.status
        if self._on_progress is not None:
            self._on_progress(progress)
        if progress.status in ENDED:
            self.leave()


def drive(
    settings: Settings,
    registry: Registry,
    execution: UUID,
    *,
    pool: str,
    slots: int = 0,
    imports: tuple[str, ...] = (),
    http_port: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_superseded: Callable[[], None] | None = None,
) -> DriveResult:
    """Drive an execution that exists to its end, or stay beside its master. Main thread only.

    Waits for a database that is away, at the start as later on.

    :param slots: attempts that this node runs itself; 0 leaves all to the nodes of the pool.
    :param on_progress: called at each look at the execution, whoever drives it.
    :param on_superseded: called once, when another node turns out to be the master.
    :raises NotFound: there is no such execution.
    :raises UsageError: its job is not here, or not in the form that the execution needs.
    """
    options = NodeOptions(
        pool=pool, slots=slots, imports=imports, http_port=http_port, only_execution=execution
    )
    return _Successor(
        settings, registry, options, on_progress=on_progress, on_superseded=on_superseded
    ).run()


class _Successor(Driver):
    """Drives what was requested elsewhere."""

    def begin(self) -> None:
        self.node.host.work.tell(self._read, self._check)

    def _read(self, store: Store) -> Execution | None:
        try:
            return views.execution(store.connection, self.execution_id)
        except NotFound:
            return None

    def _check(self, execution: Execution | None) -> None:
        if execution is None:
            self.leave(NotFound("execution", str(self.execution_id)))
        elif execution.ended:
            self._status = execution.status
            self.leave()
        elif problem := _unfit(execution, self.node.registry, self.node.options):
            self.leave(UsageError(problem))
        else:
            self.take()


def _unfit(execution: Execution, registry: Registry, options: NodeOptions) -> str | None:
    """Why a node can do nothing for an execution; None if it can."""
    job = execution.job_name
    what = f"execution {execution.execution_id} is of job {job!r}"
    definition = registry.definitions.get(job)
    if definition is None:
        return f"{what}, which is not here: name its module with --import"
    if definition.contract_hash != execution.contract_hash:
        return (
            f"{what} with contract {execution.contract_hash}, and the code here has contract "
            f"{definition.contract_hash}: run the release of the job that it was requested with"
        )
    if options.slots and options.pool != execution.pool:
        return (
            f"{what} in pool {execution.pool!r}, of which a node of pool {options.pool!r} "
            f"processes nothing: use --pool {execution.pool}, or no --slots"
        )
    return None
