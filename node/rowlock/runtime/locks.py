"""The named locks that attempts of this node wait for: asked for again and again until one is free.

The database says who has a lock, and it belongs to the claim of the attempt (`rowlock.acquire_lock`);
here is only the waiting. Main thread only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol
from uuid import UUID

from rowlock.protocol.backoff import reconnect_seconds
from rowlock.protocol.model import Claim
from rowlock.runtime.host import Host
from rowlock.runtime.work import ignore

POLL_SECONDS_MAX: Final = 1.0
"""The longest wait between two looks at a lock that somebody else has; the first ones are short."""


class Holder(Protocol):
    """What this module knows of an attempt."""

    node_id: UUID
    claim: Claim
    asked_to_stop: bool
    locks: dict[str, int]
    """What it has, with the number of the acquisition; it may have lost them with its claim."""


@dataclass(slots=True, kw_only=True, eq=False)
class Wait:
    """One attempt that wants one lock."""

    holder: Holder
    name: str
    give_up_at: float | None
    over: Callable[[], str | None]
    """How the attempt has ended meanwhile: 'lost', or 'stopped' for any other end; None: it waits."""
    reply: Callable[[bool, str], None]
    number: int = 0
    """Which acquisition: a release that arrives late must not give back a later one."""
    due: float = field(default=0.0)
    asking: bool = False
    looks: int = 0


class Locks:
    """The waits of one node."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._waits: list[Wait] = []
        self._numbers = itertools.count(1)

    def wait(self, wait: Wait) -> None:
        """Ask for a lock until there is an answer."""
        wait.number = next(self._numbers)
        self._waits.append(wait)

    def give_back(self, holder: Holder, name: str, done: Callable[[bool], None]) -> None:
        """Make a lock free, and tell when it is."""
        token, number = holder.claim.token, holder.locks.pop(name, 0)
        self._host.work.tell(lambda store: store.release_lock(token, name, number), done)

    def forget(self, holder: Holder) -> None:
        """Delete what is left of the locks of a claim that has ended."""
        for name in list(holder.locks):
            self.give_back(holder, name, ignore)

    def next_due(self) -> float | None:
        """When the next look is due."""
        return min((wait.due for wait in self._waits if not wait.asking), default=None)

    def turn(self, now: float) -> None:
        """Look at the locks that are due."""
        for wait in [wait for wait in self._waits if not wait.asking]:
            ended = self._ended(wait, now)
            if ended is not None:
                self._end(wait, ended)
            elif now >= wait.due:
                self._look(wait, now)

    def _ended(self, wait: Wait, now: float) -> str | None:
        ended = wait.over()
        if ended is not None:
            return ended
        if wait.looks and wait.holder.asked_to_stop:
            return "stopped"
        if wait.looks and wait.give_up_at is not None and now >= wait.give_up_at:
            return "timed_out"
        return None

    def _look(self, wait: Wait, now: float) -> None:
        holder, name = wait.holder, wait.name
        wait.asking = True
        wait.looks += 1
        seconds = reconnect_seconds(
            tries=wait.looks, cap_seconds=POLL_SECONDS_MAX, draw=self._host.rng.random()
        )
        wait.due = now + seconds
        if wait.give_up_at is not None:
            wait.due = min(wait.due, max(now, wait.give_up_at))
        self._host.work.tell(
            lambda store: store.acquire_lock(
                holder.node_id, holder.claim.id, holder.claim.token, name, wait.number
            ),
            lambda answer: self._answered(wait, answer),
        )

    def _answered(self, wait: Wait, answer: str) -> None:
        wait.asking = False
        if answer == "acquired":
            wait.holder.locks[wait.name] = wait.number
            self._end(wait, "acquired")
        elif answer == "lost":
            self._end(wait, "lost")

    def _end(self, wait: Wait, how: str) -> None:
        self._waits.remove(wait)
        waited = how == "acquired" and wait.looks > 1
        self._host.metrics.lock_ended("waited" if waited else how)
        wait.reply(how != "lost", how)
