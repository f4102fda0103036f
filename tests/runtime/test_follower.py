"""A node that follows an execution which another one drives: when it looks, and when it stops."""

from __future__ import annotations

from collections.abc import Generator
from uuid import UUID, uuid4

import pytest

from rowlock.protocol.model import Progress
from rowlock.runtime.follower import GONE, Follower
from tests.support.builders import Scene
from tests.support.direct_work import DirectWork, a_host
from tests.support.postgres import Database

NOW = 1e9
"""Long after every look that is due."""


@pytest.fixture
def scene(database: Database) -> Generator[Scene]:
    with Scene(database) as made:
        yield made


class Seen:
    """A follower, and what it has reported."""

    def __init__(self, scene: Scene, execution: UUID) -> None:
        self.work = DirectWork(scene.store)
        self.statuses: list[str] = []
        self.follower = Follower(a_host(self.work), execution, self._hear)

    def _hear(self, _execution: UUID, progress: Progress) -> None:
        self.statuses.append(progress.status)

    def turn(self, now: float = NOW, *, driven: bool = False) -> list[str]:
        """Turn once; everything that was reported so far."""
        self.follower.turn(now, driven=driven)
        return self.statuses


def test_it_reports_what_it_sees_until_the_end_and_looks_no_more(scene: Scene) -> None:
    run = scene.an_execution(2)
    seen = Seen(scene, run.id)

    assert seen.turn() == ["RUNNING"]
    assert scene.store.cancel(run.id, "a test", None) == "cancelled"
    assert seen.turn() == ["RUNNING", "CANCELLED"]
    seen.turn()
    assert seen.work.asked == 2


def test_it_looks_at_once_when_something_has_ended_and_else_now_and_then(scene: Scene) -> None:
    seen = Seen(scene, scene.an_execution(1).id)
    seen.turn()

    seen.turn(0.1)
    assert seen.work.asked == 1
    seen.follower.hurry()
    seen.turn(0.1)
    assert seen.work.asked == 2


def test_who_drives_needs_no_looks(scene: Scene) -> None:
    seen = Seen(scene, scene.an_execution(1).id)
    assert seen.turn(driven=True) == []
    assert seen.work.asked == 0


def test_an_outage_is_waited_for_and_what_is_gone_is_reported_once(scene: Scene) -> None:
    seen = Seen(scene, uuid4())
    seen.work.broken = True
    assert seen.turn() == []
    seen.work.broken = False

    assert seen.turn() == [GONE]
    assert seen.turn() == [GONE]
