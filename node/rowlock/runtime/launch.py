"""Launch an execution and be its master: a node for this one execution, which ends with it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from rowlock.db.connect import first_line
from rowlock.db.store import refusal
from rowlock.errors import RowlockError, Unavailable
from rowlock.protocol.model import Progress
from rowlock.registry import Definition, Registry
from rowlock.runtime.link import TRANSIENT
from rowlock.runtime.masters import SUPERSEDED, TERMINAL
from rowlock.runtime.node import Node, NodeOptions
from rowlock.settings import Settings

ADOPT_AFTER_SECONDS: Final = 5.0
"""How long the launcher may take to become master before any node does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """What is to be launched. The parameters have been checked against the job's contract."""

    job: str
    parameters: str
    """JSON text."""
    instance_key: str
    execution_id: UUID = field(default_factory=uuid.uuid4)
    launch_key: str | None = None
    pool: str = "default"
    priority: int = 0
    requester: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """How a launch ended."""

    execution_id: UUID
    status: str
    """The execution's status, as this node saw it last."""
    superseded: bool
    """Another node became the master; the status may be old."""
    left: bool
    """This node was told to leave; the execution goes on elsewhere."""


def launch(
    settings: Settings,
    registry: Registry,
    request: LaunchRequest,
    *,
    slots: int = 0,
    name: str = "",
    imports: tuple[str, ...] = (),
    http_port: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_requested: Callable[[UUID], None] | None = None,
) -> LaunchResult:
    """Launch, drive the execution to its end, and say how it ended.

    The same launch key again is superseded by the execution that it stands for. Main thread only.

    :param slots: attempts that this node runs itself; 0 leaves all to the nodes of the pool.
    :param on_progress: called at each look at the execution.
    :param on_requested: called once, with the id of the execution.
    :raises Refused: the instance is running or has ended.
    :raises RowlockError: the schema does not fit, or the database says no.
    """
    return _Launch(registry.definition(request.job), request, on_progress, on_requested).run(
        settings,
        registry,
        NodeOptions(
            name=name,
            pool=request.pool,
            slots=slots,
            imports=imports,
            http_port=http_port,
            only_execution=request.execution_id,
        ),
    )


class _Launch:
    def __init__(
        self,
        definition: Definition,
        request: LaunchRequest,
        on_progress: Callable[[Progress], None] | None,
        on_requested: Callable[[UUID], None] | None,
    ) -> None:
        self._definition = definition
        self._request = request
        self._on_progress = on_progress
        self._on_requested = on_requested
        self._execution_id = request.execution_id
        self._status = "REQUESTED"
        self._superseded = False
        self._error: RowlockError | None = None
        self._requested = False

    def run(self, settings: Settings, registry: Registry, options: NodeOptions) -> LaunchResult:
        self._node = Node(
            settings,
            registry,
            options,
            on_progress=self._progressed,
            on_registered=self._registered,
        )
        self._node.run()
        if self._error is not None:
            raise self._error
        return LaunchResult(
            execution_id=self._execution_id,
            status=self._status,
            superseded=self._superseded,
            left=not self._superseded and self._status not in TERMINAL,
        )

    def _registered(self) -> None:
        if self._requested:
            return  # a new incarnation: the execution has been asked for
        self._requested = True
        request, definition = self._request, self._definition
        self._node.host.work.ask(
            lambda store: store.request(
                request.execution_id,
                job=request.job,
                contract_hash=definition.contract_hash,
                policy=definition.policy,
                delivery=definition.job.delivery,
                instance_key=request.instance_key,
                launch_key=request.launch_key,
                parameters=request.parameters,
                pool=request.pool,
                priority=request.priority,
                adopt_after_seconds=ADOPT_AFTER_SECONDS,
                requester=request.requester,
            ),
            self._answered,
            self._failed,
        )

    def _answered(self, answer: tuple[UUID, str]) -> None:
        execution, outcome = answer
        if execution != self._request.execution_id:
            if outcome == "exists":  # the launch key stands for it: whoever drives it goes on
                self._execution_id, self._superseded = execution, True
            else:
                request = self._request
                self._error = refusal(request.job, request.instance_key, execution, outcome)
            self._node.drain()
            return
        if self._on_requested is not None:
            self._on_requested(execution)
        self._node.masters.adopt(execution)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, RowlockError):
            self._error = error
        else:
            kind = Unavailable if isinstance(error, TRANSIENT) else RowlockError
            self._error = kind(first_line(error))
        self._node.drain()

    def _progressed(self, execution: UUID, progress: Progress) -> None:
        if execution != self._request.execution_id:
            return
        if progress.status == SUPERSEDED:
            self._superseded = True
        else:
            self._status = progress.status
            if self._on_progress is not None:
                self._on_progress(progress)
        if self._superseded or progress.status in TERMINAL:
            self._node.drain()
