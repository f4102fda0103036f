"""Tests in several processes on one cluster: most run beside others, a few must be alone."""

from __future__ import annotations

import fcntl
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


class Turns:
    """Lets tests of all processes that name the same folder run beside each other, or one alone."""

    def __init__(self, folder: Path) -> None:
        """Name the folder.

        Args:
            folder: It is there, and all processes of the run can write to it.
        """
        self._room = folder / "room"
        self._door = folder / "door"

    @contextmanager
    def beside_others(self) -> Generator[None]:
        """Wait while a test is alone, or waits to be."""
        with _held(self._room, fcntl.LOCK_SH, door=self._door):
            yield

    @contextmanager
    def alone(self) -> Generator[None]:
        """Wait for the tests that run, and keep others from beginning."""
        with _held(self._room, fcntl.LOCK_EX, door=self._door):
            yield


@contextmanager
def _held(room: Path, how: int, *, door: Path) -> Generator[None]:
    with room.open("w") as inside:
        # Through the door one goes after the other: whoever waits for the whole room waits in it, and
        # is not overtaken for ever by those who would fit in beside the rest.
        with door.open("w") as waiting:
            fcntl.flock(waiting, fcntl.LOCK_EX)
            fcntl.flock(inside, how)
        yield
