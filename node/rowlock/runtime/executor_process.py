"""One executor as its supervisor sees it: its channel, its signals, its end.

The number of a process may belong to a stranger as soon as its exit status has been collected.
`ExecutorProcess` therefore owns the order of things: what is left of the tree is killed before the
status is collected, and afterwards nothing is signalled any more.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

from rowlock.runtime import processes
from rowlock.runtime.channel import PolledChannel
from rowlock.runtime.children import Children
from rowlock.runtime.messages import Message
from rowlock.runtime.processes import MARK_VARIABLE, Tree


def executor_command(imports: Iterable[str]) -> list[str]:
    """The command of an executor that registers the jobs of these modules."""
    flags = [word for module in imports for word in ("--import", module)]
    return [sys.executable, "-m", "rowlock.runtime.executor", *flags]


def describe_exit(status: int) -> str:
    """The status of `ExecutorProcess.poll` in words, for the error of the attempt it cost."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


class ExecutorProcess:
    """A child process that runs author code. Made by `start`; used from the main thread only."""

    def __init__(self, popen: subprocess.Popen[bytes], channel: PolledChannel, tree: Tree) -> None:
        """Take over a process that has just been started; see `start`."""
        self._popen = popen
        self._channel = channel
        self._exit_fd = processes.open_pidfd(popen.pid)
        self._killed = False
        self.tree = tree
        """What the watchdog needs to know of it (`LeaseBoard.protect`)."""

    @classmethod
    def start(
        cls, children: Children, command: Sequence[str], *, env: Mapping[str, str], mark: str
    ) -> ExecutorProcess:
        """Start `command` with `--fd` and `--parent` added.

        Args:
            children: Where the new process is known, so that nobody else collects its status.
            command: For example that of `executor_command`.
            env: The whole environment; nothing is inherited beside it.
            mark: Says which executor a process comes from; see `LeaseBoard.mark`.

        Raises:
            OSError: The program cannot be started.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                popen = children.spawn(
                    [*command, "--fd", str(theirs.fileno()), "--parent", str(os.getpid())],
                    env={**env, MARK_VARIABLE: mark},
                    pass_fds=[theirs.fileno()],
                )
        except BaseException:
            ours.close()
            raise
        processes.prefer_as_memory_victim(popen.pid)
        process = processes.look_up(popen.pid)
        tree = Tree(leader=popen.pid, started=process.started if process else 0, mark=mark)
        return cls(popen, PolledChannel(ours), tree)

    @property
    def pid(self) -> int:
        """Pid of the executor; also its process group and session. For messages, not for signals."""
        return self._popen.pid

    # -- its channel -------------------------------------------------------------------------

    def fileno(self) -> int:
        """The channel's descriptor: select on it for reading, and for writing while `unsent`."""
        return self._channel.fileno()

    @property
    def unsent(self) -> int:
        """Bytes queued that the channel has not taken yet."""
        return self._channel.unsent

    def queue(self, message: Message) -> None:
        """Add a message to the next `flush`."""
        self._channel.queue(message)

    def flush(self) -> bool:
        """Send what the channel takes; True when nothing is left, ConnectionError at its end."""
        return self._channel.flush()

    def send(self, message: Message) -> bool:
        """`queue` and `flush`."""
        self._channel.queue(message)
        return self._channel.flush()

    def feed(self) -> list[Message]:
        """What has arrived; EOFError or ConnectionError at its end (see `PolledChannel.feed`)."""
        return self._channel.feed()

    # -- its life ----------------------------------------------------------------------------

    @property
    def exit_fd(self) -> int | None:
        """Readable once the executor has ended: select on it. None where there is no such thing.

        The channel alone does not tell: a process forked by author code keeps it open.
        """
        return self._exit_fd

    @property
    def is_reaped(self) -> bool:
        """Whether `poll` has collected the exit status; nothing is signalled from then on."""
        return self._popen.returncode is not None

    def freeze(self) -> bool:
        """Stop the whole tree; False if some of it would not hold still yet."""
        return self.is_reaped or processes.freeze([self.tree])

    def thaw(self) -> None:
        """Let the whole tree continue. After a lease end use `LeaseBoard.thaw`."""
        if not self.is_reaped:
            processes.thaw([self.tree])

    def kill(self) -> None:
        """Kill the whole tree, without waiting: `poll` tells when the executor has ended.

        Looking for the tree takes milliseconds, so a repeated call does nothing; `poll` looks again
        for what may have escaped.
        """
        if not self.is_reaped and not self._killed:
            processes.kill([self.tree])
            self._killed = True

    def poll(self) -> int | None:
        """The exit status once the executor has ended (negative: a signal); None while it runs.

        What it left running is killed first, while its numbers are still its own.
        """
        if not self.is_reaped and self._has_ended():
            processes.kill([self.tree])
            self._popen.wait()
        return self._popen.returncode

    def _has_ended(self) -> bool:
        if not hasattr(os, "waitid"):  # macOS before Python 3.13: cannot look without collecting
            return self._popen.poll() is not None
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def memory_bytes(self) -> int | None:
        """Resident memory of the executor itself; None when it has ended or cannot be asked."""
        return None if self.is_reaped else processes.memory_bytes(self.pid)

    def close(self) -> None:
        """Kill it if it runs, collect its status, release its descriptors. Safe to repeat."""
        self.kill()
        self._popen.wait()
        self._channel.close()
        if self._exit_fd is not None:
            os.close(self._exit_fd)
            self._exit_fd = None
