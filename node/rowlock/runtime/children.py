"""The processes that a supervisor starts, and the orphans of theirs that it inherits.

A subreaper becomes the parent of every orphaned descendant and has to reap it. Done carelessly
(`waitpid(-1)`), that takes away the exit status some `Popen` waits for; so the children that were
started here are known, and only adopted ones are touched.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from rowlock.runtime import processes
from rowlock.runtime.processes import Process

_STDERR: Final = 2
_PASSES_MAX: Final = 200
_PASS_PAUSE_SECONDS: Final = 0.005


class Children:
    """The children of this process. One for each supervisor, used from its main thread."""

    def __init__(self) -> None:
        # Inherited from a careless parent, "ignore" makes the kernel throw every status away.
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._started: list[subprocess.Popen[bytes]] = []
        # A process that becomes a supervisor late may have children that are none of its business.
        self._earlier = {
            (process.pid, process.started)
            for process in processes.table().values()
            if process.parent == os.getpid()
        }

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        pass_fds: Collection[int] = (),
        stdin: int = subprocess.DEVNULL,
        output: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a program in a session of its own, with this environment and nothing else.

        Its standard output goes to standard error, because that of a command is its product.

        Args:
            argv: The program and its arguments.
            env: Its environment.
            pass_fds: Descriptors that it keeps.
            stdin: Where it reads from.
            output: Where standard output and standard error go; None: to our standard error.

        Raises:
            RuntimeError: Not called from the main thread. The kernel ties "die with the parent" to
                the thread that created the child, and only the main thread lives long enough.
            OSError: The program cannot be started.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"thread {threading.current_thread().name!r} tried to start a process: start it"
                " from the main thread, or it is killed when that thread ends"
            )
        child = subprocess.Popen(
            argv,
            env=env,
            pass_fds=tuple(pass_fds),
            stdin=stdin,
            stdout=_STDERR if output is None else output,
            stderr=output,
            start_new_session=True,
        )
        self._started = [known for known in self._started if known.returncode is None]
        self._started.append(child)
        return child

    def reap_orphans(self) -> int:
        """Collect adopted children that have ended; how many. One system call if there are none."""
        if not _some_child_has_ended():
            return 0
        reaped = 0
        for orphan in self._adopted():
            try:
                reaped += os.waitpid(orphan.pid, os.WNOHANG)[0] == orphan.pid
            except ChildProcessError:
                pass  # not ours after all: it was adopted by a process in between
        return reaped

    def end_orphans(self) -> None:
        """Kill every adopted child, and what it leaves, until none is left (for shutting down)."""
        for _ in range(_PASSES_MAX):
            orphans = self._adopted()
            if not orphans:
                return
            for orphan in orphans:
                try:
                    os.kill(orphan.pid, signal.SIGKILL)  # not reaped, so its pid is still its own
                except PermissionError:
                    pass  # a set-uid program
            self.reap_orphans()
            time.sleep(_PASS_PAUSE_SECONDS)  # their own children are adopted as they die

    def _adopted(self) -> list[Process]:
        """Children that came from elsewhere: not started here, and of another session than ours.

        The session spares a child that some library started in this process with its own Popen.
        """
        me = os.getpid()
        session = os.getsid(0)
        own = {child.pid for child in self._started if child.returncode is None}
        return [
            process
            for process in processes.table().values()
            if process.parent == me
            and process.session != session
            and process.pid not in own
            and (process.pid, process.started) not in self._earlier
        ]


def _some_child_has_ended() -> bool:
    if not hasattr(os, "waitid"):  # macOS, where nothing is adopted either
        return False
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False
