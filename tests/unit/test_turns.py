"""The kit's turns: who is alone really is, and is not kept waiting by those who come later."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Event, Thread

from tests.support.turns import Turns


class Visitor:
    """Takes a turn in a thread of its own, and stays until it is told to go."""

    def __init__(self, turn: Callable[[], AbstractContextManager[None]]) -> None:
        self.inside = Event()
        self._leave = Event()
        self._turn = turn
        self._thread = Thread(target=self._visit, daemon=True)
        self._thread.start()

    def leaves(self) -> None:
        self._leave.set()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _visit(self) -> None:
        with self._turn():
            self.inside.set()
            self._leave.wait(10)


def test_tests_run_beside_each_other(tmp_path: Path) -> None:
    visitors = [Visitor(Turns(tmp_path).beside_others) for _ in range(3)]
    assert all(one.inside.wait(10) for one in visitors)
    for one in visitors:
        one.leaves()


def test_who_is_alone_waits_for_those_before_and_holds_up_those_after(tmp_path: Path) -> None:
    first = Visitor(Turns(tmp_path).beside_others)
    assert first.inside.wait(10)
    alone = Visitor(Turns(tmp_path).alone)
    assert not alone.inside.wait(0.3)
    later = Visitor(Turns(tmp_path).beside_others)
    assert not later.inside.wait(0.3), "it would fit in beside the first, but overtakes"

    first.leaves()
    assert alone.inside.wait(10)
    assert not later.inside.wait(0.3)
    alone.leaves()
    assert later.inside.wait(10)
    later.leaves()
