"""What kopf is used for: to watch, and to run until a signal comes.

Only `on.event` handlers, which write nothing: no finalizer, no annotation, no patch. So deleting a
BatchJob never waits for an operator, and several operators may watch at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final, cast

import kopf

from rowlock.errors import UsageError
from rowlock_operator.client import Kubernetes, Object, credentials
from rowlock_operator.controller import Controller
from rowlock_operator.health import HealthServer
from rowlock_operator.model import GROUP, LABEL_EXECUTION, PLURAL, VERSION
from rowlock_operator.settings import Settings

log = logging.getLogger(__name__)

_AGAIN_SECONDS: Final = 5.0
"""Pause before a new start, or a new login."""
_EXIT_SECONDS: Final = 20.0
"""kopf ends the process after that; a pod has 30 seconds."""


def kopf_settings(watch_seconds: float) -> kopf.OperatorSettings:
    """How kopf is to behave.

    Args:
        watch_seconds: How long a watch may be silent.
    """
    settings = kopf.OperatorSettings()
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.watching.connect_timeout = 5
    settings.watching.server_timeout = 600
    settings.watching.inactivity_timeout = watch_seconds
    settings.watching.label_selectors["batch", "v1", "jobs"] = LABEL_EXECUTION
    # Otherwise it looks for namespaces and kinds with rights that a Role cannot give.
    settings.scanning.disabled = True
    settings.peering.standalone = True
    # kopf takes its own finalizer off whatever it watches, also where another operator set it.
    settings.persistence.finalizer = f"{GROUP}/unused"
    settings.posting.enabled = False
    settings.queueing.worker_limit = 16
    settings.queueing.idle_timeout = 1.0
    settings.execution.max_workers = 4
    settings.process.ultimate_exiting_timeout = _EXIT_SECONDS
    return settings


def run(settings: Settings) -> None:
    """Run the operator in the main thread until SIGTERM or SIGINT.

    kopf gives up, and takes everything with it, when a watch is refused: because BatchJobs are no kind
    of this cluster any more, a right is missing, or the API server is ill for a minute. That is
    nothing that a new pod would mend, so everything begins anew here, and soon.

    Raises:
        UsageError: The HTTP port cannot be bound.
    """
    namespaces = sorted(settings.namespaces)
    while True:
        framework = kopf_settings(settings.watch_seconds)
        running = _Running(settings, framework)
        try:
            kopf.run(
                registry=registry(running, framework),
                settings=framework,
                clusterwide=not namespaces,
                namespaces=namespaces,
                standalone=True,
                stop_flag=running.rewatch,
            )
        except Exception as error:
            if running.problem is not None:
                raise running.problem from error
            log.warning(
                f"the watches have ended, again in {_AGAIN_SECONDS:g} s: {error}",
                extra={"event": "watches_ended"},
            )
            time.sleep(_AGAIN_SECONDS)
        else:
            if not running.rewatch.is_set():
                return


def registry(running: _Running, framework: kopf.OperatorSettings) -> kopf.OperatorRegistry:
    """The handlers of one operator."""
    handlers = kopf.OperatorRegistry()

    # kopf passes more arguments than each takes, and asks for the rest by **_.
    # All of them are coroutines, because kopf runs anything else in threads.
    @kopf.on.login(registry=handlers, backoff=_AGAIN_SECONDS)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return credentials(framework)

    @kopf.on.startup(registry=handlers, errors=kopf.ErrorsMode.PERMANENT)
    async def startup(**_: Any) -> None:
        await running.start()

    @kopf.on.cleanup(registry=handlers)
    async def cleanup(**_: Any) -> None:
        await running.stop()

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=handlers)
    async def batchjob_event(event: kopf.RawEvent, **_: Any) -> None:
        running.controller.batchjob_event(event["type"], cast(Object, event["object"]))

    @kopf.on.event("batch", "v1", "jobs", registry=handlers)
    async def job_event(event: kopf.RawEvent, **_: Any) -> None:
        running.controller.job_event(event["type"], cast(Object, event["object"]))

    return handlers


class _Running:
    """What lives from startup to cleanup, in kopf's event loop."""

    def __init__(self, settings: Settings, framework: kopf.OperatorSettings) -> None:
        self._settings = settings
        self._framework = framework
        self._task: asyncio.Task[None] | None = None
        self._kubernetes: Kubernetes | None = None
        self._health: HealthServer | None = None
        self._controller: Controller | None = None
        self.rewatch = asyncio.Event()
        """Set when kopf has to look anew for what there is to watch."""
        self.problem: UsageError | None = None
        """Why it could not start, if another start would do no better."""

    @property
    def controller(self) -> Controller:
        assert self._controller is not None, "kopf watches only after startup"
        return self._controller

    async def start(self) -> None:
        self._kubernetes = Kubernetes(self._framework)
        self._controller = controller = Controller(
            self._settings, kubernetes=self._kubernetes, rewatch=self.rewatch.set
        )
        if self._settings.http_port:
            self._health = HealthServer(
                metrics=controller.metrics, livez=controller.livez, readyz=controller.readyz
            )
            try:
                await self._health.start(self._settings.http_port)
            except UsageError as problem:
                self.problem = problem
                raise
        self._task = asyncio.create_task(controller.run(), name="controller")

    async def stop(self) -> None:
        if self._task is not None:
            await self.controller.settle()
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._health is not None:
            await self._health.close()
        if self._kubernetes is not None:
            await self._kubernetes.close()
