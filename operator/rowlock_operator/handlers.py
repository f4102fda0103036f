"""What kopf is used for: to watch, and to run until a signal comes.

Only `on.event` handlers, which write nothing: no finalizer, no annotation, no patch. So deleting a
BatchJob never waits for an operator, and several operators may watch at once.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

import kopf

from rowlock_operator.client import Kubernetes, Object, credentials
from rowlock_operator.controller import Controller
from rowlock_operator.health import HealthServer
from rowlock_operator.model import GROUP, LABEL_EXECUTION, PLURAL, VERSION
from rowlock_operator.settings import Settings

_EXIT_SECONDS: Final = 20.0
"""kopf ends the process after that; a pod has 30 seconds."""


def kopf_settings() -> kopf.OperatorSettings:
    """How kopf is to behave."""
    settings = kopf.OperatorSettings()
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.watching.connect_timeout = 5
    settings.watching.server_timeout = 600
    # A watch that a firewall has dropped says nothing: bookmarks come each minute.
    settings.watching.inactivity_timeout = 70
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

    Raises:
        UsageError: The HTTP port cannot be bound.
    """
    framework = kopf_settings()
    namespaces = sorted(settings.namespaces)
    kopf.run(
        registry=registry(settings, framework),
        settings=framework,
        clusterwide=not namespaces,
        namespaces=namespaces,
        standalone=True,
    )


def registry(settings: Settings, framework: kopf.OperatorSettings) -> kopf.OperatorRegistry:
    """The handlers of one operator."""
    handlers = kopf.OperatorRegistry()
    running = _Running(settings, framework)

    # kopf passes more arguments than each takes, and asks for the rest by **_.
    # All of them are coroutines, because kopf runs anything else in threads.
    @kopf.on.login(registry=handlers)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return credentials(framework)

    @kopf.on.startup(registry=handlers)
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

    @property
    def controller(self) -> Controller:
        assert self._controller is not None, "kopf watches only after startup"
        return self._controller

    async def start(self) -> None:
        self._kubernetes = Kubernetes(self._framework)
        self._controller = controller = Controller(self._settings, kubernetes=self._kubernetes)
        if self._settings.http_port:
            self._health = HealthServer(
                metrics=controller.metrics, livez=controller.livez, readyz=controller.readyz
            )
            await self._health.start(self._settings.http_port)
        self._task = asyncio.create_task(controller.run(), name="controller")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._health is not None:
            await self._health.close()
        if self._kubernetes is not None:
            await self._kubernetes.close()
