"""From the database to the keys that need a look: one query for all executions of this cluster."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final
from uuid import UUID

from rowlock.errors import Unavailable
from rowlock_operator.cache import Key
from rowlock_operator.database import Database, Row
from rowlock_operator.metrics import Metrics
from rowlock_operator.observe import Observer

log = logging.getLogger(__name__)

_PAUSE_SECONDS: Final = 0.25
"""Least time between two looks, however many hints the database gives."""


class Mirror:
    """Looks at the database again and again and says whose execution has changed."""

    def __init__(
        self,
        *,
        database: Database,
        observer: Observer,
        metrics: Metrics,
        changed: Callable[[Key], None],
        turned: Callable[[bool], None],
        sync_seconds: float,
    ) -> None:
        """Make it.

        Args:
            database: The database.
            observer: Is told what was seen.
            metrics: When it was.
            changed: Called with each BatchJob whose execution is not as it was.
            turned: Called with whether the database answers, when that changes.
            sync_seconds: How often it looks when there is no hint.
        """
        self._database = database
        self._observer = observer
        self._metrics = metrics
        self._changed = changed
        self._turned = turned
        self._sync_seconds = sync_seconds
        self._known: dict[UUID, Row] = {}
        self.live: tuple[Row, ...] = ()
        """What had not ended at the last look."""
        self.problem = "it has not been asked yet"
        """Why the database does not answer; empty if it does."""

    async def turn(self) -> None:
        """Look once, and wait for a hint or for the next look."""
        try:
            await self.look()
            await self._database.hint(self._sync_seconds)
            await asyncio.sleep(_PAUSE_SECONDS)
        except Unavailable as error:
            self._metrics.database_up.set(0)
            if not self.problem:
                self._turned(False)
            if self.problem != str(error):
                log.warning(
                    f"the database does not answer: {error}", extra={"event": "database_down"}
                )
            self.problem = str(error)
            await asyncio.sleep(self._sync_seconds)

    async def look(self) -> None:
        """Look once.

        Raises:
            Unavailable: The database does not answer.
        """
        asked_at = time.monotonic()
        rows = await self._database.live(self._known)
        self._observer.mirrored(rows, asked_at)
        self._metrics.database_up.set(1)
        self._metrics.last_sync.set(time.time())
        before = self._known
        # Those that have ended are reported once more, now, and then followed no longer.
        self._known = {row.execution.execution_id: row for row in rows if not row.execution.ended}
        self.live = tuple(self._known.values())
        if self.problem:
            # Perhaps another one than before: a replica that was promoted, or another address.
            server = await self._database.server()
            self._metrics.database.info(server.labels)
            log.info("the database answers", extra={"event": "database_up", **server.labels})
            self.problem = ""
            self._turned(True)
        for row in rows:
            known = before.get(row.execution.execution_id)
            if known is None or known.execution != row.execution:
                self._changed(Key(row.namespace, row.name))
