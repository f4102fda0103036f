"""A queue of keys: each is worked on by one worker at a time, and waits there only once.

What has to be done for a key is found out when its turn comes, so a key that is added ten times
while it waits is one piece of work; added while it is being worked on, it comes once more. The
queue knows nothing about what the keys mean.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class WorkQueue(Generic[K]):
    """Keys that wait, keys in work, and keys that come back later. For one event loop."""

    def __init__(
        self,
        *,
        base_seconds: float = 0.2,
        max_seconds: float = 60.0,
        uniform: Callable[[float, float], float] = random.uniform,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an empty queue.

        Args:
            base_seconds: Upper bound of the first pause of `retry`; it doubles with each failure.
            max_seconds: No pause of `retry` is longer.
            uniform: Draws the pause between 0 and its bound: full jitter, so that keys which fail
                together do not come back together.
            clock: Monotonic seconds.
        """
        self._base_seconds = base_seconds
        self._max_seconds = max_seconds
        self._uniform = uniform
        self._clock = clock
        self._waiting: asyncio.Queue[K] = asyncio.Queue()
        self._dirty: set[K] = set()
        self._working: dict[K, float] = {}
        self._failures: dict[K, int] = {}
        self._later: dict[K, asyncio.TimerHandle] = {}

    @property
    def depth(self) -> int:
        """Keys that wait for a worker; those in work and those that come later do not count."""
        return self._waiting.qsize()

    @property
    def longest_seconds(self) -> float:
        """How long the key that has been in work longest has been so; 0 if none is."""
        return max((self._clock() - since for since in self._working.values()), default=0.0)

    def pending(self) -> list[K]:
        """All keys that wait or come later."""
        return [*self._dirty, *self._later]

    def failures(self, key: K) -> int:
        """How often a key has failed since it last succeeded."""
        return self._failures.get(key, 0)

    def add(self, key: K) -> None:
        """Let a key be worked on as soon as a worker is free; at once if it was to come later."""
        later = self._later.pop(key, None)
        if later is not None:
            later.cancel()
        if key in self._dirty:
            return
        self._dirty.add(key)
        if key not in self._working:
            self._waiting.put_nowait(key)

    def add_after(self, key: K, seconds: float) -> None:
        """Let a key be worked on in so many seconds, unless it is added earlier."""
        if seconds <= 0:
            self.add(key)
            return
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        known = self._later.get(key)
        if known is not None:
            if known.when() <= due:
                return
            known.cancel()
        self._later[key] = loop.call_at(due, self.add, key)

    def retry(self, key: K) -> float:
        """Let a key that has failed come again, later each time.

        Returns:
            In how many seconds.
        """
        failed = self._failures.get(key, 0)
        self._failures[key] = failed + 1
        bound = min(self._max_seconds, self._base_seconds * 2 ** min(failed, 32))
        pause = self._uniform(0.0, bound)
        self.add_after(key, pause)
        return pause

    def succeeded(self, key: K) -> None:
        """Forget the failures of a key."""
        self._failures.pop(key, None)

    async def take(self) -> K:
        """Wait for the next key. Who takes one calls `done` afterwards, whatever happened."""
        key = await self._waiting.get()
        self._dirty.discard(key)
        self._working[key] = self._clock()
        return key

    def done(self, key: K) -> None:
        """A worker is finished with a key. What was added meanwhile gets its turn."""
        del self._working[key]
        if key in self._dirty:
            self._waiting.put_nowait(key)

    def close(self) -> None:
        """Forget what was to come later, so that nothing is left behind in the loop."""
        for later in self._later.values():
            later.cancel()
        self._later.clear()
