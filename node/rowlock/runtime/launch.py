"""Launch an execution and drive it: a node for this one execution, which ends with it."""

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
from rowlock.registry import Registry
from rowlock.runtime.driver import Driver, DriveResult
from rowlock.runtime.link import TRANSIENT
from rowlock.runtime.node import NodeOptions
from rowlock.settings import Settings

ADOPT_AFTER_SECONDS: Final = 5.0
"""How long the launcher may take to become master before any node does."""
REQUEST_SECONDS_MAX: Final = 60.0
"""A request that is a restart copies what is unfinished of the plan: 8 s for a million partitions."""


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
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What `Store.request` takes beside: parallelism, deadline_seconds, suspended."""


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
    on_requested: Callable[[str], None] | None = None,
    on_superseded: Callable[[], None] | None = None,
) -> DriveResult:
    """Launch, drive the execution to its end, and say how it ended.

    The answer is about another execution if the launch key stands for that one. Main thread only.

    :param slots: attempts that this node runs itself; 0 leaves all to the nodes of the pool.
    :param on_progress: called at each look at the execution, whoever drives it.
    :param on_requested: called once the database has taken the request, with its outcome.
    :param on_superseded: called once, when another node turns out to be the master.
    :raises Refused: the instance is running or may not run again.
    :raises RowlockError: the schema does not fit, or the database says no.
    """
    options = NodeOptions(
        name=name,
        pool=request.pool,
        slots=slots,
        imports=imports,
        http_port=http_port,
        only_execution=request.execution_id,
    )
    return _Launcher(
        settings,
        registry,
        options,
        request=request,
        on_progress=on_progress,
        on_requested=on_requested,
        on_superseded=on_superseded,
    ).run()


class _Launcher(Driver):
    """Asks for its execution first."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        options: NodeOptions,
        *,
        request: LaunchRequest,
        on_progress: Callable[[Progress], None] | None,
        on_requested: Callable[[str], None] | None,
        on_superseded: Callable[[], None] | None,
    ) -> None:
        super().__init__(
            settings, registry, options, on_progress=on_progress, on_superseded=on_superseded
        )
        self._definition = registry.definition(request.job)
        self._request = request
        self._on_requested = on_requested

    def begin(self) -> None:
        request, definition = self._request, self._definition
        self.node.host.work.ask(
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
                options=request.options,
            ),
            self._answered,
            self._failed,
            limit_seconds=REQUEST_SECONDS_MAX,
        )

    def _answered(self, answer: tuple[UUID, str]) -> None:
        execution, outcome = answer
        if execution == self.execution_id:
            if self._on_requested is not None:
                self._on_requested(outcome)
            self.take()
        elif outcome == "exists":
            self.execution_id = execution  # this node was registered for another one
            self.leave()
        else:
            request = self._request
            self.leave(refusal(request.job, request.instance_key, execution, outcome))

    def _failed(self, error: Exception) -> None:
        if isinstance(error, RowlockError):
            self.leave(error)
        else:
            kind = Unavailable if isinstance(error, TRANSIENT) else RowlockError
            self.leave(kind(first_line(error)))
