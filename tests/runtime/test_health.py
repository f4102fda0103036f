"""A node whose loops really stand still says so, and only then."""

import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from rowlock.db.store import Store
from rowlock.registry import Registry
from rowlock.runtime import node as node_module
from rowlock.runtime.heartbeat import Heartbeat
from rowlock.runtime.node import Node, NodeOptions
from rowlock.settings import Settings
from tests.support.postgres import Database
from tests.support.waiting import wait_until


def livez(node: Node) -> tuple[int, str]:
    """What the probe gets."""
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{node.http_port}/livez", timeout=5
        ) as answer:
            return answer.status, answer.read().decode().strip()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode().strip()


def beats_never_return(monkeypatch: pytest.MonkeyPatch, free: threading.Event) -> None:
    monkeypatch.setattr(node_module, "BEATING_SECONDS_MAX", 0.5)
    beat = Store.beat

    def stuck(store: Store, *values: Any, **named: Any) -> Any:  # Any: as beat has them
        free.wait()
        return beat(store, *values, **named)

    monkeypatch.setattr(Store, "beat", stuck)


def beats_are_never_sent(monkeypatch: pytest.MonkeyPatch, free: threading.Event) -> None:
    def stuck(_heartbeat: Heartbeat) -> bool:
        return free.wait()

    monkeypatch.setattr(Heartbeat, "_may_beat", stuck)


def nothing(_monkeypatch: pytest.MonkeyPatch, _free: threading.Event) -> None:
    pass


@pytest.mark.parametrize(
    "broken, said",
    [
        (nothing, "the main loop stands still"),
        (beats_are_never_sent, "the heartbeat's loop stands still"),
        (beats_never_return, "a beat never ends"),
    ],
)
def test_a_loop_that_stands_still_turns_liveness_red(
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    broken: Callable[[pytest.MonkeyPatch, threading.Event], None],
    said: str,
) -> None:
    """The process lives, its database answers, and nothing would ever be claimed again. (Reported as
    lightdash#22893 and good_job#523: green health, and no work.)"""
    free = threading.Event()
    answers: list[tuple[int, str]] = []

    def look() -> None:
        """Until it is red; then let the node leave."""
        try:
            answers.append(livez(node))
            wait_until(lambda: livez(node)[0] != 200, seconds=30, every_seconds=0.05)
            answers.append(livez(node))
        finally:
            free.set()
            os.kill(os.getpid(), signal.SIGTERM)

    def registered() -> None:
        # Called by the main loop, which stands still until it returns.
        look() if broken is nothing else threading.Thread(target=look, daemon=True).start()

    broken(monkeypatch, free)
    settings = Settings(
        dsn=database.dsn,
        beat_seconds=0.1,
        unreachable_seconds=0.5,
        removal_grace_seconds=0.5,
        lease_margin_seconds=0.2,
    )
    options = NodeOptions(name="n", http_port=0)
    node = Node(settings, Registry(), options, on_registered=registered)
    node.run()

    assert answers == [(200, "ok"), (503, said)]
