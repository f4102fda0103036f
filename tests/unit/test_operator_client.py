"""Requests to the API server end in the object or in one typed error, within a bound, with today's token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import kopf
import pytest
from aiohttp import web

from rowlock_operator import client
from rowlock_operator.client import (
    BATCHJOBS,
    EVENTS,
    JOBS,
    ApiError,
    Conflict,
    Forbidden,
    Invalid,
    Kubernetes,
    Missing,
    Object,
    Unreachable,
)


class Server:
    """An API server that answers what a test tells it to, and keeps what it was asked."""

    def __init__(self, answer: Callable[[web.BaseRequest], web.StreamResponse]) -> None:
        self.answer = answer
        self.asked: list[tuple[str, str, str, object]] = []
        self.tokens: list[str] = []

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        text = await request.text()
        body = json.loads(text) if text else None
        self.asked.append(
            (request.method, request.path_qs, request.headers.get("Content-Type", ""), body)
        )
        self.tokens.append(request.headers.get("Authorization", ""))
        return self.answer(request)


def play(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[web.BaseRequest], web.StreamResponse],
    scene: Callable[[Kubernetes, Server], Awaitable[None]],
) -> Server:
    """Run a scene with a client that is logged in at such a server."""
    server = Server(answer)

    async def run() -> None:
        runner = web.ServerRunner(web.Server(server.handle, access_log=None))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        log_in(tmp_path, monkeypatch, f"http://127.0.0.1:{runner.addresses[0][1]}", "first-token")
        async with Kubernetes(kopf.OperatorSettings()) as kubernetes:
            await scene(kubernetes, server)
        await runner.cleanup()

    asyncio.run(run())
    return server


def log_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, token: str) -> None:
    config = {
        "current-context": "x",
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        "clusters": [{"name": "x", "cluster": {"server": address}}],
        "users": [{"name": "x", "user": {"token": token}}],
    }
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(path))


def reply(status: int = 200, **body: Any) -> web.Response:
    return web.json_response(body, status=status)


def always(status: int = 200, **body: Any) -> Callable[[web.BaseRequest], web.Response]:
    return lambda _: reply(status, **body)


@pytest.mark.parametrize(
    "status, kind",
    [
        (400, Invalid),
        (403, Forbidden),
        (404, Missing),
        (409, Conflict),
        (418, ApiError),
        (422, Invalid),
        (429, Unreachable),
        (500, Unreachable),
        (503, Unreachable),
    ],
)
def test_an_answer_that_is_no_object_is_an_error_of_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, kind: type[ApiError]
) -> None:
    async def scene(kubernetes: Kubernetes, _: Server) -> None:
        with pytest.raises(kind) as caught:
            await kubernetes.get(BATCHJOBS, "billing", "nightly")
        assert caught.value.status == status
        assert "because of this" in str(caught.value)
        assert "/apis/batch.rowlock.dev/v1alpha1/namespaces/billing/batchjobs/nightly" in str(
            caught.value
        )
        assert "first-token" not in str(caught.value)

    play(tmp_path, monkeypatch, always(status, message="because of this"), scene)


def test_a_proxy_that_speaks_no_json_is_an_error_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(kubernetes: Kubernetes, _: Server) -> None:
        with pytest.raises(Unreachable, match="502"):
            await kubernetes.get(BATCHJOBS, "billing", "nightly")

    play(tmp_path, monkeypatch, lambda _: web.Response(status=502, text="<html>"), scene)


def test_nobody_there_is_an_error_and_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        async with Kubernetes(kopf.OperatorSettings()) as kubernetes:
            with pytest.raises(Unreachable):
                await kubernetes.get(BATCHJOBS, "billing", "nightly")

    log_in(tmp_path, monkeypatch, "http://127.0.0.1:1", "first-token")
    asyncio.run(scene())


def test_without_credentials_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        async with Kubernetes(kopf.OperatorSettings()) as kubernetes:
            with pytest.raises(Unreachable, match="log in"):
                await kubernetes.get(BATCHJOBS, "billing", "nightly")

    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    asyncio.run(scene())


def test_a_list_is_read_page_by_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: web.BaseRequest) -> web.Response:
        rest = request.query.get("continue")
        if rest is None:
            return reply(items=[{"n": 1}, {"n": 2}], metadata={"continue": "more"})
        return reply(items=[{"n": 3}], metadata={})

    async def scene(kubernetes: Kubernetes, _: Server) -> None:
        assert await kubernetes.list_all(JOBS, None, labels="a=b") == [
            {"n": 1},
            {"n": 2},
            {"n": 3},
        ]

    server = play(tmp_path, monkeypatch, answer, scene)

    paths = [path for _, path, _, _ in server.asked]
    assert all(path.startswith("/apis/batch/v1/jobs?") for path in paths)
    assert all("labelSelector=a" in path for path in paths)


def test_a_list_whose_rest_has_expired_is_read_again_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expired = iter([True])

    def answer(request: web.BaseRequest) -> web.Response:
        if "continue" not in request.query:
            return reply(items=[{"n": 1}], metadata={"continue": "more"})
        if next(expired, False):
            return reply(410, message="too old")
        return reply(items=[{"n": 2}], metadata={})

    async def scene(kubernetes: Kubernetes, _: Server) -> None:
        assert await kubernetes.list_all(BATCHJOBS, "billing") == [{"n": 1}, {"n": 2}]

    play(tmp_path, monkeypatch, answer, scene)


def test_a_status_is_patched_as_it_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(kubernetes: Kubernetes, _: Server) -> None:
        await kubernetes.patch_status(
            "billing",
            "nightly",
            resource_version="7",
            patch={"phase": "Running", "message": None},
        )

    server = play(tmp_path, monkeypatch, always(), scene)

    ((method, path, content_type, body),) = server.asked
    assert method == "PATCH"
    assert path == "/apis/batch.rowlock.dev/v1alpha1/namespaces/billing/batchjobs/nightly/status"
    assert content_type == "application/merge-patch+json"
    assert body == {
        "metadata": {"resourceVersion": "7"},
        "status": {"phase": "Running", "message": None},
    }


def test_only_this_very_object_is_deleted_and_one_that_is_gone_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(kubernetes: Kubernetes, server: Server) -> None:
        await kubernetes.delete(JOBS, "billing", "nightly-1", uid="u", resource_version="7")
        server.answer = always(409, message="another uid")
        with pytest.raises(Conflict):
            await kubernetes.delete(JOBS, "billing", "nightly-1", uid="u")

    server = play(tmp_path, monkeypatch, always(404, message="gone"), scene)

    assert server.asked[0][3] == {
        "propagationPolicy": "Background",
        "preconditions": {"uid": "u", "resourceVersion": "7"},
    }


def test_a_kind_that_is_being_removed_or_is_not_served_has_no_create(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(kubernetes: Kubernetes, server: Server) -> None:
        assert "create" in await kubernetes.served(BATCHJOBS)
        server.answer = always(resources=[{"name": "batchjobs", "verbs": ["get"]}])
        assert await kubernetes.served(BATCHJOBS) == {"get"}
        server.answer = always(404, message="no such group")
        assert await kubernetes.served(BATCHJOBS) == frozenset()

    known: list[Object] = [
        {"name": "batchjobs/status", "verbs": []},
        {"name": "batchjobs", "verbs": ["create"]},
    ]
    play(tmp_path, monkeypatch, always(resources=known), scene)


def test_a_token_that_was_renewed_is_read_again_and_the_request_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(request: web.BaseRequest) -> web.Response:
        known = request.headers.get("Authorization") == "Bearer second-token"
        return reply(ok=True) if known else reply(401, message="Unauthorized")

    async def scene(kubernetes: Kubernetes, server: Server) -> None:
        with pytest.raises(ApiError, match="401"):
            await kubernetes.get(JOBS, "billing", "nightly-1")
        address = str(
            json.loads((tmp_path / "kubeconfig").read_text())["clusters"][0]["cluster"]["server"]
        )
        log_in(tmp_path, monkeypatch, address, "second-token")
        assert await kubernetes.get(JOBS, "billing", "nightly-1") == {"ok": True}

    server = play(tmp_path, monkeypatch, answer, scene)

    assert server.tokens[-1] == "Bearer second-token"


def test_a_token_is_read_again_after_a_while_also_without_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(kubernetes: Kubernetes, server: Server) -> None:
        await kubernetes.create(EVENTS, "billing", {"kind": "Event"})
        address = str(
            json.loads((tmp_path / "kubeconfig").read_text())["clusters"][0]["cluster"]["server"]
        )
        log_in(tmp_path, monkeypatch, address, "second-token")
        await kubernetes.create(EVENTS, "billing", {"kind": "Event"})
        monkeypatch.setattr(client, "_LOGIN_SECONDS", -1.0)
        await kubernetes.create(EVENTS, "billing", {"kind": "Event"})

    server = play(tmp_path, monkeypatch, always(), scene)

    assert server.tokens == ["Bearer first-token", "Bearer first-token", "Bearer second-token"]
