"""What a node does about the one execution that it is there for, while another node drives it: looks.

The master reports what it sees by itself. Everybody else learns the end of an execution only by
looking, at once when an end is announced and every now and then in any case.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final
from uuid import UUID

from rowlock.protocol.model import Progress
from rowlock.protocol.statuses import ENDED
from rowlock.runtime.host import Host

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
"""Time between two looks."""
GONE: Final = "GONE"
"""Reported as the status of an execution that is not there any more."""


class Follower:
    """Looks at one execution over the work connection, for as long as it has not ended."""

    def __init__(
        self, host: Host, execution: UUID, on_progress: Callable[[UUID, Progress], None]
    ) -> None:
        self._host = host
        self._execution = execution
        self._on_progress = on_progress
        self._look_at = 0.0
        self._looking = False
        self._over = False

    def hurry(self) -> None:
        """Some execution has ended: look now."""
        self._look_at = 0.0

    def turn(self, now: float, *, driven: bool) -> None:
        """Look if it is time to.

        :param driven: this node is the master, which needs nobody to tell it.
        """
        if driven or self._looking or self._over or now < self._look_at:
            return
        if not self._host.registered:
            return
        self._looking = True
        execution = self._execution
        self._host.work.ask(
            lambda store: store.progress(execution), self._answered, lambda _error: self._pause()
        )

    def _pause(self) -> None:
        self._looking = False
        self._look_at = time.monotonic() + LOOK_SECONDS * self._host.rng.uniform(0.8, 1.2)

    def _answered(self, progress: Progress | None) -> None:
        self._pause()
        seen = progress or Progress(status=GONE)
        self._over = seen.status in ENDED or progress is None
        if self._over:
            log.info(
                "execution %s: %s",
                self._execution,
                seen.status,
                extra={
                    "event": "execution_ended",
                    "status": seen.status,
                    "execution": str(self._execution),
                },
            )
        self._on_progress(self._execution, seen)
