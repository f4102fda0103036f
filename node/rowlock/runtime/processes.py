"""Whole trees of processes: find, freeze, continue and kill an executor with all it has started.

Author code starts programs, and programs daemonise. A `Tree` therefore looks for its members in
four places: the executor's process group, its session, the descendants of both, and a mark in the
environment that even a daemon adopted by somebody else still carries.

On systems without /proc and prctl (macOS, for development) only the process group is reached and
nothing dies with its parent by itself. This module imports nothing of rowlock, and of the standard
library only what starts fast, because the watchdog lives on it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

MARK_VARIABLE: Final = "ROWLOCK_EXECUTOR"
"""Environment variable whose value says which executor a process belongs to."""

_PASSES_MAX: Final = 20
"""Looks at /proc before a tree that will not hold still is given up for this time."""

_PASS_PAUSE_SECONDS: Final = 0.001

_GONE: Final = frozenset("ZX")
_STOPPED: Final = frozenset("Tt")

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


class Process(NamedTuple):
    """One line of the process table."""

    pid: int
    parent: int
    group: int
    session: int
    state: str
    """One letter of the kernel's: R and S run, T is stopped, Z waits to be reaped."""
    started: int
    """Clock ticks from boot to start. Pids are used again; a pid with its start is not."""


class Tree(NamedTuple):
    """An executor, which leads its own session, and everything started in it."""

    leader: int
    """Pid of the executor; also the number of its group and session."""
    started: int
    """`Process.started` of the leader; 0 where it cannot be known."""
    mark: str
    """Value of `MARK_VARIABLE` in the leader's environment."""


# -- reading the process table -----------------------------------------------------------------


def look_up(pid: int) -> Process | None:
    """The process with this pid, also a zombie; None when there is none (or no /proc)."""
    raw = _read(f"/proc/{pid}/stat")
    if not raw:
        return None
    # The name in parentheses may hold spaces and parentheses itself.
    fields = raw[raw.rindex(b")") + 2 :].split(None, 20)
    return Process(
        pid=pid,
        state=chr(fields[0][0]),
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        started=int(fields[19]),
    )


def table() -> dict[int, Process]:
    """All processes that can be seen, by pid; empty where there is no /proc."""
    try:
        with os.scandir("/proc") as entries:
            pids = [int(entry.name) for entry in entries if entry.name.isdigit()]
    except FileNotFoundError:
        return {}
    return {pid: process for pid in pids if (process := look_up(pid)) is not None}


def _read(path: str) -> bytes:
    """The contents of a file under /proc; empty when its process is gone or not ours to see."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123  pathlib would slow the watchdog's start
            return file.read()
    except OSError:
        return b""


def _is_marked(process: Process, trees: Iterable[Tree]) -> bool:
    # What started before the executor cannot come from it: this spares nearly all the reading.
    younger = [tree for tree in trees if tree.mark and process.started >= tree.started]
    if not younger:
        return False
    variables = _read(f"/proc/{process.pid}/environ").split(b"\0")
    return any(f"{MARK_VARIABLE}={tree.mark}".encode() in variables for tree in younger)


def _leads(process: Process | None, tree: Tree) -> bool:
    """Whether a process found under the leader's pid still is the leader, or nobody is."""
    return process is None or tree.started in (0, process.started)


def members(trees: Collection[Tree]) -> list[Process]:
    """The living processes of these trees, youngest first; never the calling process."""
    seen = table()
    groups = {tree.leader for tree in trees if _leads(seen.get(tree.leader), tree)}
    children: dict[int, list[Process]] = {}
    for process in seen.values():
        children.setdefault(process.parent, []).append(process)

    chosen: dict[int, Process] = {}

    def choose(root: Process) -> None:
        waiting = [root]
        while waiting:
            process = waiting.pop()
            if process.pid not in chosen:
                chosen[process.pid] = process
                waiting += children.get(process.pid, ())

    for process in seen.values():
        if process.group in groups or process.session in groups:
            choose(process)
    for process in seen.values():
        if process.pid not in chosen and _is_marked(process, trees):
            choose(process)
    chosen.pop(os.getpid(), None)
    alive = [process for process in chosen.values() if process.state not in _GONE]
    return sorted(alive, key=lambda process: (process.started, process.pid), reverse=True)


# -- signals to a tree -------------------------------------------------------------------------


def freeze(trees: Collection[Tree]) -> bool:
    """Stop every process of these trees (SIGSTOP); True when all of them were seen stopped.

    False means that some would not hold still within a few looks, for example in an
    uninterruptible wait: call again.
    """
    _signal(_leaders(trees), signal.SIGSTOP)  # at once; what follows takes some milliseconds
    was_still = False
    for _ in range(_PASSES_MAX):
        moving = [process for process in members(trees) if process.state not in _STOPPED]
        # A process that was still running during one look may have forked behind it, so only a
        # second quiet look proves that nobody was missed.
        if not moving and was_still:
            return True
        was_still = not moving
        if moving:
            _signal((process.group for process in moving), signal.SIGSTOP)
            time.sleep(_PASS_PAUSE_SECONDS)  # no event tells that a process has stopped
    return False


def thaw(trees: Collection[Tree]) -> None:
    """Let every process of these trees continue (SIGCONT), also one that author code stopped."""
    _signal([*_leaders(trees), *(process.group for process in members(trees))], signal.SIGCONT)


def kill(trees: Collection[Tree]) -> None:
    """Kill every process of these trees (SIGKILL), without waiting for them to be gone.

    They are frozen first: children of a process that dies too early would be adopted by another
    one, and with that leave the tree.
    """
    freeze(trees)
    # Youngest first: when a parent dies, the kernel may let its stopped children continue.
    _signal([*(process.group for process in members(trees)), *_leaders(trees)], signal.SIGKILL)


def _leaders(trees: Iterable[Tree]) -> list[int]:
    """The leaders' groups, as far as they still are theirs."""
    return [tree.leader for tree in trees if _leads(look_up(tree.leader), tree)]


def _signal(groups: Iterable[int], signum: int) -> None:
    """Signal whole groups: in one step, so that a process that forks and exits does not escape.

    An executor leads a session, and a group never spans two, so strangers are in none of them.
    """
    for group in dict.fromkeys(groups):
        try:
            if group > 1:  # 0: its leader is outside of our pid namespace, and to killpg our own
                os.killpg(group, signum)
        except (ProcessLookupError, PermissionError):
            pass  # nobody left in it, or only set-uid programs (macOS: only zombies)


# -- life and death of parents and children ----------------------------------------------------


def open_pidfd(pid: int) -> int | None:
    """A descriptor of the process itself, readable once it has ended; close it after use.

    None when the process is gone or the system has no such thing (before Linux 5.3, macOS).
    """
    if sys.platform != "linux":
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def become_subreaper() -> None:
    """Make this process adopt its orphaned descendants, so that it can end them. Linux only."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, whatever code it is stuck in.

    To be called first thing in a child, with the pid that the parent said it has. Linux only;
    elsewhere the watchdog and the end of the channel do the same later.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def prefer_as_memory_victim(pid: int) -> None:
    """Have the kernel choose this process before its supervisor when memory runs out."""
    try:
        with open(f"/proc/{pid}/oom_score_adj", "w") as file:  # noqa: PTH123  as above
            file.write("500")
    except OSError:
        pass  # no /proc, or already gone: a preference, not a promise


def memory_bytes(pid: int) -> int | None:
    """Resident memory of a process; None when it is gone or there is no /proc."""
    fields = _read(f"/proc/{pid}/statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if fields else None


def cpu_seconds(pid: int) -> float | None:
    """Processor time of a process and of those of its children that have ended and were waited for.

    None when it is gone or there is no /proc.
    """
    raw = _read(f"/proc/{pid}/stat")
    if not raw:
        return None
    ticks = raw[raw.rindex(b")") + 2 :].split(None, 16)[11:15]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def _prctl(option: int, value: int) -> None:
    if sys.platform != "linux":
        return
    import ctypes  # the watchdog does without

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, *(ctypes.c_ulong(argument) for argument in (value, 0, 0, 0))) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")
