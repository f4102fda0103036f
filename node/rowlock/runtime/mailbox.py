"""How the threads of a supervisor speak to its main loop: they post calls, the loop makes them.

All state of a node is owned by its main thread. Other threads never touch it; they post what they
learned, in order, and wake the loop.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable


class Mailbox:
    """A queue of calls with a descriptor to select on."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)

    def fileno(self) -> int:
        """Readable when something was posted."""
        return self._read_fd

    def post(self, call: Callable[[], None]) -> None:
        """Have the main loop make this call, after all that was posted before. From any thread."""
        self._calls.append(call)
        self.wake()

    def wake(self) -> None:
        """Make the main loop turn. From any thread, and from signal handlers."""
        try:
            os.write(self._write_fd, b"\0")
        except BlockingIOError:
            pass  # the pipe is full of earlier wakes

    def deliver(self) -> None:
        """Make every call that was posted before now. Main thread only."""
        try:
            os.read(self._read_fd, 65536)
        except BlockingIOError:
            pass
        for _ in range(len(self._calls)):
            self._calls.popleft()()

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self._read_fd)
        os.close(self._write_fd)
