"""/livez, /readyz and /metrics of the operator, and nothing on any other path.

The probes look at what the loops have written down. They ask neither the API server nor the
database and never raise: a probe that hangs while the API server does would have the pod killed,
and a new pod would find the same API server.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from rowlock.errors import UsageError
from rowlock_operator.metrics import Metrics

Check = Callable[[], str | None]
"""None when all is well, else what is wrong, in one line."""


class HealthServer:
    """The operator's own HTTP server, in its event loop: it answers only while the loop turns."""

    def __init__(self, *, metrics: Metrics, livez: Check, readyz: Check) -> None:
        self._metrics = metrics
        self._checks = {"/livez": livez, "/readyz": readyz}
        self._runner: web.ServerRunner | None = None

    async def start(self, port: int) -> None:
        """Listen on this port of all addresses.

        Raises:
            UsageError: It cannot be bound.
        """
        runner = web.ServerRunner(web.Server(self._answer, access_log=None), shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, port=port).start()
        except OSError as error:
            await runner.cleanup()
            raise UsageError(
                f"ROWLOCK_HTTP_PORT={port}: cannot listen there ({error.strerror}); choose another"
            ) from error
        self._runner = runner

    async def close(self) -> None:
        """Stop listening."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method not in {"GET", "HEAD"}:
            return web.Response(status=405, text="GET only\n")
        if request.path == "/metrics":
            body, content_type = self._metrics.render(request.headers.get("Accept", ""))
            return web.Response(body=body, headers={"Content-Type": content_type})
        check = self._checks.get(request.path)
        if check is None:
            return web.Response(status=404, text="try /metrics, /livez or /readyz\n")
        problem = _problem(check)
        return web.Response(status=200 if problem is None else 503, text=f"{problem or 'ok'}\n")


def _problem(check: Check) -> str | None:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - a probe that raises says so, and does not hang
        return f"the check itself failed: {type(error).__name__}"
