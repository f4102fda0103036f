"""A proxy between one operator and the API server: it counts, holds, freezes and forgets.

    with ApiProxy(operators.kubeconfig) as proxy:
        operators.kubeconfig = proxy.kubeconfig
        held = proxy.hold("POST", "/jobs$")
        ...

It speaks HTTP to the operator and passes the operator's own token on, so the API server sees the
same rights. Tests that use kubectl go past it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import ssl
import threading
import time
from collections.abc import Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeAlias, TypeVar, cast
from weakref import WeakSet

import aiohttp
import yaml
from aiohttp import web

T = TypeVar("T")

_OWN_HEADERS: Final = frozenset(
    {"host", "connection", "transfer-encoding", "content-length", "accept-encoding"}
)
"""Headers of a connection, not of what it carries."""
_WRITES: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})


@dataclass(slots=True)
class Request:
    """A request that came by."""

    at: float
    """When, in monotonic seconds."""
    method: str
    path: str
    query: str
    status: int = 0
    """What the API server answered; 0 while it has not, or could not."""

    @property
    def writes(self) -> bool:
        """Whether it was to change something."""
        return self.method in _WRITES


@dataclass(slots=True)
class Hold:
    """Requests of one kind that wait in the proxy, before the API server sees them."""

    method: str
    what: re.Pattern[str]
    arrived: threading.Event = field(default_factory=threading.Event)
    """Set once the first of them is there."""
    go_on: asyncio.Event = field(default_factory=asyncio.Event)


class ApiProxy:
    """Listens on a port of its own; use `with` to stop it."""

    def __init__(self, kubeconfig: Path) -> None:
        """Stand in for the API server of a kubeconfig.

        Args:
            kubeconfig: With the credentials that the operator is to have; a copy that leads through
                the proxy is written beside it.
        """
        config = yaml.safe_load(kubeconfig.read_text())
        target = config["clusters"][0]["cluster"]
        self._server: str = target["server"].rstrip("/")
        self._trust = _trust(target)
        self.requests: list[Request] = []
        """Everything that came by, oldest first."""
        self._holds: list[Hold] = []
        self._frozen: WeakSet[asyncio.BaseTransport] = WeakSet()
        self._known: WeakSet[asyncio.BaseTransport] = WeakSet()
        self._paused = False
        self._refuses = False
        self._watches: set[_Watch] = set()
        self._errors: dict[str, bytes] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        port = self._ask(self._start())
        self.kubeconfig = kubeconfig.with_suffix(".proxied")
        """It leads through the proxy."""
        config["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{port}"}
        self.kubeconfig.write_text(json.dumps(config))
        self.kubeconfig.chmod(0o600)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ask(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- what tests do -------------------------------------------------------------------------

    def seen(
        self, method: str, path: str, *, query: str = "", since: float = float("-inf")
    ) -> list[Request]:
        """The requests so far of a method to a path.

        Args:
            method: For example "PATCH".
            path: A regular expression that is found somewhere in it.
            query: A part of its query.
            since: Only those from this moment on (monotonic seconds).
        """
        return [
            one
            for one in list(self.requests)
            if one.method == method
            and one.at >= since
            and query in one.query
            and re.search(path, one.path)
        ]

    def writes(self, *, since: float) -> list[Request]:
        """The requests from a moment on that were to change something."""
        return [one for one in list(self.requests) if one.writes and one.at >= since]

    def hold(self, method: str, path: str) -> Hold:
        """Let no request of this kind through from now on; they wait, and are lost if their sender is.

        Args:
            method: For example "POST".
            path: A regular expression that is found somewhere in it and its query.
        """

        async def begin() -> Hold:
            hold = Hold(method, re.compile(path))
            self._holds.append(hold)
            return hold

        return self._ask(begin())

    def release(self, hold: Hold) -> None:
        """Let them through, and hold no more."""

        async def end() -> None:
            self._holds.remove(hold)
            hold.go_on.set()

        self._ask(end())

    def freeze(self) -> None:
        """From now on nothing passes on connections that are there, and nobody is told. New ones work."""

        async def begin() -> None:
            self._frozen.update(self._known)

        self._ask(begin())

    def pause(self) -> None:
        """Like `freeze`, and new connections are accepted and not answered either."""
        self.freeze()
        self._paused = True

    def refuse(self) -> None:
        """Like an API server that is restarted: all connections are reset, and so is each new one."""

        async def begin() -> None:
            self._refuses = True
            for transport in self._known:
                cast(asyncio.Transport, transport).abort()

        self._ask(begin())

    def go_on(self) -> None:
        """Answer new connections again. The old ones never wake."""
        self._paused = self._refuses = False

    def break_watches(self, path: str, code: int) -> int:
        """End the open watches of some kind, and answer the next one with an error in its stream.

        Args:
            path: A regular expression that is found somewhere in theirs.
            code: 410 as after a compaction, when the API server knows nothing of what was before.

        Returns:
            How many were open.
        """
        text = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
        event = {"type": "ERROR", "object": {**text, "message": "the kit says so"}}

        async def cut() -> int:
            watches = [one for one in self._watches if re.search(path, one.path)]
            for watch in watches:
                self._errors[watch.path] = json.dumps(event).encode() + b"\n"
                watch.task.cancel()
            return len(watches)

        return self._ask(cut())

    # -- passing on ----------------------------------------------------------------------------

    def _ask(self, what: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(timeout=30)

    async def _start(self) -> int:
        self._connector = aiohttp.TCPConnector(limit=0, ssl=self._trust)
        self._session = aiohttp.ClientSession(
            connector=self._connector,
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        self._runner = web.ServerRunner(
            web.Server(self._answer, access_log=None), shutdown_timeout=0.1
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return int(self._runner.addresses[0][1])

    async def _stop(self) -> None:
        await self._connector.close(abort_ssl=True)  # first: a polite end waits for the other side
        await self._runner.cleanup()
        # Whatever is still frozen, held or watching.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._session.close()
        for _ in range(3):
            await asyncio.sleep(0)  # sockets close in the next turns of the loop

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        noted = Request(time.monotonic(), request.method, request.path, request.query_string)
        self.requests.append(noted)
        transport = request.transport
        assert transport is not None
        self._known.add(transport)
        if self._refuses:
            transport.abort()
        for hold in list(self._holds):
            if hold.method == request.method and hold.what.search(request.path_qs):
                hold.arrived.set()
                await hold.go_on.wait()
        if transport.is_closing():
            raise ConnectionResetError("its sender is gone, and so is the request")
        await self._wait_if_frozen(transport)
        if "watch=true" in request.query_string:
            return await self._watch(request, noted)
        async with self._pass_on(request, await request.read()) as answer:
            noted.status = answer.status
            body = await answer.read()
        await self._wait_if_frozen(transport)
        return web.Response(status=answer.status, headers=_headers(answer.headers), body=body)

    async def _wait_if_frozen(self, transport: asyncio.BaseTransport) -> None:
        if self._paused:
            self._frozen.add(transport)
        if transport in self._frozen:
            await asyncio.Event().wait()

    def _pass_on(self, request: web.BaseRequest, body: bytes = b"") -> _Answer:
        return self._session.request(
            request.method,
            self._server + request.path_qs,
            data=body or None,
            headers=_headers(request.headers),
        )

    async def _watch(self, request: web.BaseRequest, noted: Request) -> web.StreamResponse:
        transport, task = request.transport, asyncio.current_task()
        assert transport is not None
        assert task is not None
        watch = _Watch(request.path, task)
        async with self._pass_on(request) as answer:
            noted.status = answer.status
            response = web.StreamResponse(status=answer.status, headers=_headers(answer.headers))
            await response.prepare(request)
            error = self._errors.pop(request.path, None)
            if error is not None:
                await response.write(error)
                return response
            self._watches.add(watch)
            try:
                async for chunk in answer.content.iter_any():
                    await self._wait_if_frozen(transport)
                    await response.write(chunk)
            finally:
                self._watches.discard(watch)
        return response


_Answer: TypeAlias = AbstractAsyncContextManager[aiohttp.ClientResponse]


@dataclass(frozen=True, slots=True, eq=False)
class _Watch:
    """A watch that is open, and who passes it on."""

    path: str
    task: asyncio.Task[Any]


def _headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _OWN_HEADERS}


def _trust(cluster: dict[str, Any]) -> ssl.SSLContext:
    """What proves that the API server of a kubeconfig is the right one."""
    data = cluster.get("certificate-authority-data")
    return ssl.create_default_context(
        cafile=cluster.get("certificate-authority"),
        cadata=base64.b64decode(data).decode() if data else None,
    )
