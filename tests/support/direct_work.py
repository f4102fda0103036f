"""A work connection without its thread: what a part of a node asks is answered before it returns."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import psycopg

from rowlock.db.store import Store
from rowlock.runtime.host import Host
from rowlock.settings import Settings


class DirectWork:
    """Carries each operation out at once, or fails it while `broken`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.asked = 0
        self.broken = False

    def ask(
        self,
        run: Callable[[Store], Any],
        done: Callable[[Any], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """As `Work.ask`."""
        self.asked += 1
        if self.broken:
            failed(psycopg.OperationalError("gone"))
        else:
            done(run(self.store))


def a_host(work: DirectWork, **settings: Any) -> Host:
    """A registered node, as far as a part of it looks at it; its first chance is always 0."""
    rng = SimpleNamespace(random=lambda: 0.0, uniform=random.Random(1).uniform)
    host = SimpleNamespace(
        settings=Settings(**settings), work=work, rng=rng, registered=True, draining=False
    )
    return cast(Host, host)
