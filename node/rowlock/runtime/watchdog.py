"""The watchdog: a small process that freezes executors at the end of the lease.

It looks at a deadline in shared memory, on a clock that also counts the time a machine was
suspended. When the deadline passes, because the database does not answer or because the supervisor
itself stands still, it stops the AT_LEAST_ONCE executors before another node may run their work.
When the supervisor is gone it kills all executors. It never lets one continue: only the supervisor
knows whether a claim still stands.

It has no connection and runs no author code, so nothing but the kernel can hold it up. It runs
without site-packages and without the rest of rowlock: up in 20 ms, 11 MB of which 5 are its own,
0.2 % of a core (measured). A stopped supervisor's work stood still 1 ms after the deadline, also
with four busy processes on two cores.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from rowlock.runtime import processes
from rowlock.runtime.processes import Tree

if TYPE_CHECKING:  # slow to import, and only the supervisor needs them
    import subprocess

    from rowlock.runtime.children import Children

LOOK_SECONDS: Final = 0.05
"""The longest time between two looks at the clock; a timer alone sleeps through a suspend."""

_LOOK_NS: Final = int(LOOK_SECONDS * 1e9)
_KILL_PASSES_MAX: Final = 100
_KILL_PAUSE_SECONDS: Final = 0.02
_CLOSE_SECONDS_MAX: Final = 5.0
_STDIN: Final = 0
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # macOS has no BOOTTIME


def boottime_ns() -> int:
    """Nanoseconds since boot, suspends included: the clock of lease deadlines."""
    return time.clock_gettime_ns(_CLOCK)


# -- shared memory -----------------------------------------------------------------------------

_WORD: Final = 8
_TOKEN, _DEADLINE, _LOOKED_AT, _HEADER_WORDS = range(4)
_ENTRY_WORDS: Final = 2
_EMPTY: Final = 0
_UNSETTLED: Final = 1
"""In place of a frozen entry: some of its processes were not seen stopped yet."""


class Entry(NamedTuple):
    """One executor on the board."""

    tree: Tree
    freeze: bool
    """True for AT_LEAST_ONCE: freeze it at the end of the lease."""


class LeaseBoard:
    """The lease deadline and the executors it concerns, shared by supervisor and watchdog.

    Everything is a single 8-byte word, written and read in one step, so that neither side ever sees
    half of a change and no lock can be held by a process that stands still. The supervisor writes
    the deadline and the entries, the watchdog the marks of what it froze.

    The watchdog may act on a deadline just before it is extended. The supervisor therefore asks
    `frozen` after every beat, not only after a late one.
    """

    def __init__(self, fd: int) -> None:
        """Map a board that `create` has made; the descriptor belongs to this object."""
        self.fd = fd
        self._memory = mmap.mmap(fd, os.fstat(fd).st_size)
        self._words = memoryview(self._memory).cast("Q")
        self.slots = (len(self._words) - _HEADER_WORDS) // _ENTRY_WORDS
        """How many executors the board has room for; their indexes count from 0."""

    @classmethod
    def create(cls, slots: int) -> LeaseBoard:
        """Make an empty board: no deadline, no executors."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("rowlock-lease")
        else:
            import tempfile

            fd, path = tempfile.mkstemp()
            os.unlink(path)  # noqa: PTH108  no name is needed: the watchdog inherits the descriptor
        os.ftruncate(fd, (_HEADER_WORDS + slots * _ENTRY_WORDS) * _WORD)
        board = cls(fd)
        board._words[_TOKEN] = int.from_bytes(os.urandom(_WORD), "little")
        return board

    def close(self) -> None:
        """Unmap the memory and close the descriptor."""
        self._words.release()
        self._memory.close()
        os.close(self.fd)

    # -- the lease ---------------------------------------------------------------------------

    def extend(self, deadline_ns: int) -> None:
        """Set the end of the lease on `boottime_ns`; 0 = there is none (not registered)."""
        self._words[_DEADLINE] = deadline_ns

    def deadline(self) -> int:
        """The end of the lease on `boottime_ns`; 0 = there is none."""
        return self._words[_DEADLINE]

    def looked_at(self) -> int:
        """When the watchdog last looked, on `boottime_ns`; 0 = never. Old: it stands still."""
        return self._words[_LOOKED_AT]

    # -- executors ---------------------------------------------------------------------------

    def mark(self, index: int) -> str:
        """The mark to start the executor of this index with; no other board has the same."""
        return f"{self._words[_TOKEN]:016x}.{index}"

    def protect(self, index: int, tree: Tree, *, freeze: bool) -> None:
        """Enter an executor, or change whether it is to be frozen. Before its work is sent."""
        self._words[self._at(index)] = _packed(tree, freeze=freeze)

    def clear(self, index: int) -> None:
        """Take an executor off the board."""
        self._words[self._at(index)] = _EMPTY
        self._words[self._at(index) + 1] = _EMPTY

    def entry(self, index: int) -> Entry | None:
        """The executor entered at this index."""
        word = self._words[self._at(index)]
        return _unpacked(word, self.mark(index)) if word != _EMPTY else None

    def frozen(self, index: int) -> bool:
        """Whether the watchdog has stopped this executor since it was entered or thawed."""
        return self._words[self._at(index) + 1] != _EMPTY

    def thaw(self, index: int) -> None:
        """Let an executor continue. Only after its claim is confirmed and the lease extended."""
        # This order, and the watchdog's "stop, then note": whichever comes last, an executor that
        # stands still is noted as frozen, and the next beat thaws it.
        self._words[self._at(index) + 1] = _EMPTY
        entry = self.entry(index)
        if entry is not None:
            processes.thaw([entry.tree])

    # -- the watchdog's side -----------------------------------------------------------------

    def trees(self) -> list[Tree]:
        """Every executor on the board."""
        entries = (self.entry(index) for index in range(self.slots))
        return [entry.tree for entry in entries if entry is not None]

    def freeze_protected(self) -> None:
        """Stop every executor that asks for it and is not noted as frozen; note it."""
        found: dict[int, int] = {}
        for index in range(self.slots):
            at = self._at(index)
            word = self._words[at]
            if word & _FREEZE and self._words[at + 1] != word:
                found[index] = word
        if not found:
            return
        settled = processes.freeze(
            [_unpacked(word, self.mark(i)).tree for i, word in found.items()]
        )
        for index, word in found.items():
            # The noted word names the executor: a new one at this index is not taken for frozen.
            self._words[self._at(index) + 1] = word if settled else _UNSETTLED

    def note_look(self, now_ns: int) -> None:
        """Tell the supervisor that the watchdog turns."""
        self._words[_LOOKED_AT] = now_ns

    def _at(self, index: int) -> int:
        if not 0 <= index < self.slots:
            raise IndexError(f"index {index} is not on a board of {self.slots} executors")
        return _HEADER_WORDS + index * _ENTRY_WORDS


# An entry is one word: pid (Linux allows 22 bits), the wish to be frozen, start of the leader in
# clock ticks (41 bits last for centuries).
_PID_BITS: Final = 22
_FREEZE: Final = 1 << _PID_BITS


def _packed(tree: Tree, *, freeze: bool) -> int:
    return tree.started << (_PID_BITS + 1) | (_FREEZE if freeze else 0) | tree.leader


def _unpacked(word: int, mark: str) -> Entry:
    tree = Tree(leader=word & (_FREEZE - 1), started=word >> (_PID_BITS + 1), mark=mark)
    return Entry(tree=tree, freeze=bool(word & _FREEZE))


# -- the watchdog's process --------------------------------------------------------------------


def watch(board: LeaseBoard, lifeline: int, supervisor: int) -> None:
    """Freeze what the lease no longer covers; once the supervisor is gone, kill all and return.

    Args:
        board: Shared with the supervisor.
        lifeline: Reading end of a pipe whose other end only the supervisor holds.
        supervisor: Its pid.
    """
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    pause_ns = 0
    while not poll.poll(pause_ns / 1e6) and os.getppid() == supervisor:
        now = boottime_ns()
        board.note_look(now)
        deadline = board.deadline()
        pause_ns = _LOOK_NS
        if deadline:
            if now >= deadline:
                board.freeze_protected()
            else:
                pause_ns = min(pause_ns, deadline - now)
    _kill_all(board.trees())


def _kill_all(trees: Sequence[Tree]) -> None:
    for _ in range(_KILL_PASSES_MAX):
        processes.kill(trees)
        if not processes.members(trees):
            return
        time.sleep(_KILL_PAUSE_SECONDS)


def main(arguments: Sequence[str]) -> None:
    """Run with the board's descriptor and the supervisor's pid; standard input is the lifeline."""
    board_fd, supervisor = map(int, arguments)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # it ends after the supervisor, never before
    watch(LeaseBoard(board_fd), lifeline=_STDIN, supervisor=supervisor)


# -- the supervisor's handle -------------------------------------------------------------------

# Importing `rowlock` loads pydantic and more: 30 MB and a third of a second for a process that
# must be small and early. An empty package of that name, with the same folder, avoids it.
_BOOTSTRAP: Final = """\
import sys
package = type(sys)("rowlock")
package.__path__ = [sys.argv[2]]
sys.modules["rowlock"] = package
from rowlock.runtime.watchdog import main
main(sys.argv[3:])
"""


class Watchdog:
    """The watchdog's process. When `poll` says that it has ended, start another at once.

    A watchdog that was killed may have frozen executors without noting it: after a new start, thaw
    all that may run, noted or not.
    """

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        """Take over a process that has just been started; see `start`."""
        self._popen = popen
        self.pid = popen.pid

    @classmethod
    def start(cls, children: Children, board: LeaseBoard) -> Watchdog:
        """Start a watchdog over this board; it dies with the calling process."""
        import subprocess

        package = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120  no pathlib here
        interpreter = [sys.executable, "-I", "-S", "-c", _BOOTSTRAP]
        return cls(
            children.spawn(
                [*interpreter, "rowlock-watchdog", package, str(board.fd), str(os.getpid())],
                env=os.environ,
                pass_fds=[board.fd],
                stdin=subprocess.PIPE,  # the lifeline
            )
        )

    def poll(self) -> int | None:
        """The exit status if it has ended, None while it watches."""
        return self._popen.poll()

    def close(self) -> None:
        """Cut the lifeline: the watchdog kills what is still on the board and ends."""
        import subprocess

        if self._popen.stdin is not None:
            self._popen.stdin.close()
        try:
            self._popen.wait(_CLOSE_SECONDS_MAX)
        except subprocess.TimeoutExpired:  # somebody has stopped it
            self._popen.kill()
            self._popen.wait()
