"""The probes answer from what the loops wrote down, and never hang or raise."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest

from rowlock.errors import UsageError
from rowlock_operator.health import Check, HealthServer
from rowlock_operator.metrics import Metrics
from tests.support.ports import free_port


def well() -> str | None:
    return None


def broken() -> str | None:
    raise RuntimeError("very-secret")


def asked(*paths: str, livez: Check = well, readyz: Check = well) -> list[tuple[int, str]]:
    async def run() -> list[tuple[int, str]]:
        server = HealthServer(metrics=Metrics(depth=lambda: 3), livez=livez, readyz=readyz)
        port = free_port()
        await server.start(port)
        answers: list[tuple[int, str]] = []
        async with aiohttp.ClientSession() as session:
            for path in paths:
                async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
                    answers.append((answer.status, await answer.text()))
        await server.close()
        return answers

    return asyncio.run(run())


def test_all_is_well() -> None:
    assert asked("/livez", "/readyz") == [(200, "ok\n"), (200, "ok\n")]


def test_a_problem_is_said_in_the_answer() -> None:
    answers = asked("/livez", "/readyz", readyz=lambda: "nothing has been listed yet")

    assert answers == [(200, "ok\n"), (503, "nothing has been listed yet\n")]


def test_a_check_that_raises_is_a_problem_and_no_hanging_probe() -> None:
    ((status, text),) = asked("/livez", livez=broken)

    assert status == 503
    assert "RuntimeError" in text
    assert "very-secret" not in text


def test_the_series_are_there_from_the_first_scrape_on() -> None:
    ((status, text),) = asked("/metrics")

    assert status == 200
    assert "rowlock_operator_queue_depth 3.0" in text
    for series in (
        'rowlock_operator_jobs_created_total{result="created"} 0.0',
        'rowlock_operator_jobs_created_total{result="exists"} 0.0',
        'rowlock_operator_jobs_created_total{result="conflict"} 0.0',
        'rowlock_operator_status_patches_total{code="200"} 0.0',
        'rowlock_operator_reconcile_errors_total{reason="internal"} 0.0',
        "rowlock_operator_reconcile_duration_seconds_bucket",
        "rowlock_operator_last_sync_timestamp_seconds",
        "rowlock_operator_watch_last_event_timestamp_seconds",
        'rowlock_database_up{component="operator"}',
        "rowlock_build_info",
        "rowlock_database_info",
        "process_resident_memory_bytes",
    ):
        assert series in text


def test_nothing_is_on_any_other_path() -> None:
    assert [status for status, _ in asked("/", "/healthz", "/metrics/x")] == [404, 404, 404]


def test_a_port_that_is_taken_is_said() -> None:
    async def run(port: int) -> None:
        server = HealthServer(metrics=Metrics(), livez=well, readyz=well)
        await server.start(port)

    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"ROWLOCK_HTTP_PORT={port}"):
            asyncio.run(run(port))
