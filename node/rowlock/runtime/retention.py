"""Deletes what is old enough, on every node: a little at a time, and rarely.

Nodes are not told who does it. The database lets one at a time, and the others find nothing left.
"""

from __future__ import annotations

import logging
import time
from typing import Final

from rowlock.protocol.model import Purged
from rowlock.runtime.host import Host
from rowlock.settings import DAY_SECONDS

log = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 600.0
"""Time between two passes, jittered."""
ROWS_MAX: Final = 1000
"""Rows deleted by one statement, which the node's other statements wait for."""


class Retention:
    """Applies the retention that the settings ask for."""

    def __init__(self, host: Host) -> None:
        self._host = host
        settings = host.settings
        self._ages = tuple(
            None if days is None else days * DAY_SECONDS
            for days in (
                settings.retention_completed_days,
                settings.retention_failed_days,
                settings.retention_events_days,
            )
        )
        self._busy = False
        # Anywhere in the first period: nodes that start together, or live for minutes only, share it.
        self._due_at = time.monotonic() + PERIOD_SECONDS * host.rng.random()

    def turn(self, now: float) -> None:
        """Delete a little if it is time to."""
        host = self._host
        if self._busy or now < self._due_at or not host.registered or host.draining:
            return
        if all(age is None for age in self._ages):
            return
        self._busy = True
        completed, failed, events = self._ages
        host.work.ask(
            lambda store: store.retain(
                completed_seconds=completed,
                failed_seconds=failed,
                events_seconds=events,
                limit=ROWS_MAX,
            ),
            self._answered,
            lambda _error: self._pause(),
        )

    def _answered(self, done: Purged) -> None:
        self._pause()
        if done.more:
            self._due_at = 0.0
        if done.executions or done.partitions or done.events or done.nodes:
            log.info(
                "deleted %d executions, %d partitions, %d events and %d nodes that are old",
                done.executions,
                done.partitions,
                done.events,
                done.nodes,
                extra={"event": "retention_applied"},
            )

    def _pause(self) -> None:
        self._busy = False
        self._due_at = time.monotonic() + PERIOD_SECONDS * self._host.rng.uniform(0.8, 1.2)
