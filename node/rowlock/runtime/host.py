"""What the parts of a node share: its identity, its lease, its settings, its statements."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from uuid import UUID

from rowlock.registry import Registry
from rowlock.runtime.metrics import NodeMetrics
from rowlock.runtime.watchdog import LeaseBoard, boottime_ns
from rowlock.runtime.work import Work
from rowlock.settings import Settings


@dataclass(slots=True, kw_only=True)
class Host:
    """The node that `Attempts`, `Masters` and `Watch` belong to. Owned by the main thread."""

    settings: Settings
    registry: Registry
    metrics: NodeMetrics
    board: LeaseBoard
    work: Work
    rng: random.Random
    node_id: UUID
    """The present incarnation."""
    registered: bool = False
    draining: bool = False
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Numbers of attempts, so that every answer of an executor names one."""

    @property
    def lease_holds(self) -> bool:
        """Whether this node may start work: by its own clock nobody can have removed it yet."""
        return self.registered and boottime_ns() < self.board.deadline()
