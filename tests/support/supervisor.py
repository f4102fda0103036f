"""A supervisor to be stopped and killed: executors, lease board and watchdog, run by commands.

`Supervisor` is the test's handle; the other end is `python -m tests.support.supervisor`, which
takes one JSON array per line, a command of `Served` and its arguments, and answers each with one
JSON value.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from rowlock.runtime import messages, processes
from rowlock.runtime.children import Children
from rowlock.runtime.executor_process import ExecutorProcess
from rowlock.runtime.processes import Process
from rowlock.runtime.watchdog import LeaseBoard, Watchdog, boottime_ns
from tests.support import fake_executor

SLOTS = 4


def environment() -> dict[str, str]:
    """That of this process, with its import path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def identity(pid: int) -> Process:
    """The process that has this pid now."""
    process = processes.look_up(pid)
    assert process is not None, f"there is no process {pid}"
    return process


def state(process: Process) -> str:
    """The kernel's letter for its state, or "" if it has ended."""
    now = processes.look_up(process.pid)
    return now.state if now is not None and now.started == process.started else ""


def is_alive(process: Process) -> bool:
    """Whether it can still do anything (a zombie cannot)."""
    return state(process) not in {"", "Z", "X"}


def send(process: Process, signum: int) -> None:
    """Signal exactly this process, if it is still there."""
    if is_alive(process):
        os.kill(process.pid, signum)


def open_descriptors() -> int:
    """How many descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def next_messages(executor: ExecutorProcess) -> list[messages.Message]:
    """Wait for what the executor says next."""
    while not (found := executor.feed()):
        readable, _, _ = select.select([executor], [], [], 30)
        assert readable, f"executor {executor.pid} says nothing"
    return found


class Supervisor:
    """A supervisor in a process of its own. Kills everything it has started at the end."""

    def __init__(self, *, before: str = "") -> None:
        """Start it; `before` is Python code to run first."""
        code = f"{before}\nfrom tests.support.supervisor import main\nmain()"
        self._popen = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self.process = identity(self._popen.pid)
        self._seen = [self.process]
        self.watchdog = self._note(self.ask("watchdog"))

    def ask(self, *command: object) -> Any:  # a JSON value: the caller knows which
        """Have it run a command; its answer."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.write(json.dumps(command) + "\n")
        self._popen.stdin.flush()
        return json.loads(self._popen.stdout.readline())

    def _note(self, pid: int) -> Process:
        process = identity(pid)
        self._seen.append(process)
        return process

    def executor(self, index: int, *, freeze: bool) -> Process:
        """Start an executor and enter it on the board."""
        return self._note(self.ask("executor", index, freeze))

    def run(self, index: int, job: str, argument: str = "") -> None:
        """Have an executor begin a job of `fake_executor` that does not end."""
        self.ask("run", index, job, argument)

    def family(self, index: int) -> dict[str, Process]:
        """Have an executor start processes of all kinds."""
        pids = json.loads(self.ask("run", index, "family", ""))
        return {name: self._note(pid) for name, pid in pids.items()}

    def extend(self, seconds: float) -> int:
        """Extend the lease to so many seconds from now; the new deadline."""
        deadline: int = self.ask("extend", seconds)
        return deadline

    def signal(self, signum: int) -> None:
        """Signal the supervisor alone."""
        send(self.process, signum)

    def finish(self) -> int:
        """Let it end in peace; its exit status."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        return self._popen.wait()

    def close(self) -> None:
        """End whatever is left, also when the test has failed half-way."""
        for process in self._seen:
            send(process, signal.SIGKILL)
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()


class Served:
    """The other end; its methods are the commands."""

    def __init__(self) -> None:
        """Begin as a supervisor does, without executors."""
        processes.become_subreaper()
        self._children = Children()
        self._board = LeaseBoard.create(SLOTS)
        self._watchdog = Watchdog.start(self._children, self._board)
        self._executors: dict[int, ExecutorProcess] = {}

    def watchdog(self) -> int:
        """Pid of the watchdog."""
        return self._watchdog.pid

    def executor(self, index: int, freeze: bool) -> int:
        """Start an executor; its pid."""
        executor = ExecutorProcess.start(
            self._children,
            fake_executor.COMMAND,
            env=environment(),
            mark=self._board.mark(index),
        )
        self._executors[index] = executor
        self._board.protect(index, executor.tree, freeze=freeze)
        assert next_messages(executor) == [messages.Hello(pid=executor.pid)]
        return executor.pid

    def run(self, index: int, job: str, argument: str) -> str | None:
        """Have it run a job until its first answer; the result if that is one."""
        self._executors[index].send(fake_executor.run(job, argument))
        (answer,) = next_messages(self._executors[index])
        return answer.result if isinstance(answer, messages.Completed) else None

    def extend(self, seconds: float) -> int:
        """Extend the lease to so many seconds from now."""
        self._board.extend(boottime_ns() + int(seconds * 1e9))
        return self._board.deadline()

    def protect(self, index: int, freeze: bool) -> None:
        """Change whether an executor is to be frozen."""
        self._board.protect(index, self._executors[index].tree, freeze=freeze)

    def clear(self, index: int) -> None:
        """Take an executor off the board."""
        self._board.clear(index)

    def looked_at(self) -> int:
        """When the watchdog last looked."""
        return self._board.looked_at()

    def frozen(self, index: int) -> bool:
        """Whether the board says that the executor is frozen."""
        return self._board.frozen(index)

    def thaw(self, index: int) -> None:
        """Let the executor continue."""
        self._board.thaw(index)

    def kill(self, index: int) -> None:
        """Kill the executor's tree."""
        self._executors[index].kill()

    def poll(self, index: int) -> int | None:
        """The executor's exit status."""
        return self._executors[index].poll()

    def reap_orphans(self) -> int:
        """Collect adopted children that have ended."""
        return self._children.reap_orphans()

    def end_orphans(self) -> None:
        """Kill adopted children."""
        self._children.end_orphans()

    def close(self) -> None:
        """End as a supervisor does."""
        for executor in self._executors.values():
            executor.close()
        self._watchdog.close()
        self._board.close()


def main() -> None:
    """Obey until standard input ends."""
    served = Served()
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        answer = getattr(served, command)(*arguments)
        print(json.dumps(answer), flush=True)  # noqa: T201  the protocol
    served.close()
