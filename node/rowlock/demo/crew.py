"""The nodes of the demonstration: real `rowlock node` processes, started, killed and ended.

None of them outlives this process, not even after a kill -9 of it: the kernel ends each node with
its parent, and a node's own watchdog ends what it has started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rowlock.errors import RowlockError
from rowlock.runtime import processes
from rowlock.runtime.children import Children

JOBS: Final = "rowlock.demo.jobs"
LEAVE_SECONDS: Final = 8.0
"""How long nodes may take to leave before they are killed."""


class NodeDied(RowlockError):
    """A node has ended by itself. What it said last is in the message; nothing can be done here."""


@dataclass(slots=True, kw_only=True)
class _Node:
    name: str
    log: Path
    process: subprocess.Popen[bytes]
    killed: bool = False


class Crew:
    """All node processes. To be used from the main thread, in a `with` block that ends them all."""

    def __init__(self, *, folder: Path, environment: Mapping[str, str], words: list[str]) -> None:
        """Start nothing yet.

        Args:
            folder: Where each node's log goes.
            environment: Settings of the nodes. Those that this process was given do not count.
            words: Arguments of `rowlock node`, beside the name.
        """
        # Orphans of a killed node come to us, so that we know when the last of them is gone.
        processes.become_subreaper()
        self._children = Children()
        self._folder = folder
        inherited = {
            key: text for key, text in os.environ.items() if not key.startswith("ROWLOCK_")
        }
        self._environment = {**inherited, **environment}
        self._words = words
        self._nodes: dict[str, _Node] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    @property
    def names(self) -> list[str]:
        """The names of all nodes that were started."""
        return list(self._nodes)

    def start(self, name: str) -> None:
        """Start a node, or start it again after it was killed."""
        log = self._folder / f"{name}.log"
        # In a session of its own: Ctrl-C in the terminal reaches us, and we say what to do.
        with log.open("ab") as output:
            process = self._children.spawn(
                [
                    *(sys.executable, "-m", "rowlock.cli.dev_node", str(os.getpid())),
                    *("--name", name, "--import", JOBS, "--log-format", "json", *self._words),
                ],
                env=self._environment,
                output=output.fileno(),
            )
        self._nodes[name] = _Node(name=name, log=log, process=process)

    def hold(self, name: str) -> None:
        """Stop a node where it is (SIGSTOP): what the database says it holds, it goes on holding."""
        self._nodes[name].process.send_signal(signal.SIGSTOP)

    def let_go(self, name: str) -> None:
        """Let a node that was held continue."""
        self._nodes[name].process.send_signal(signal.SIGCONT)

    def kill(self, name: str) -> int:
        """Kill a node with SIGKILL, wait until it is gone, and return its pid."""
        node = self._nodes[name]
        node.killed = True
        node.process.kill()
        node.process.wait()
        return node.process.pid

    def check(self) -> None:
        """Make sure that every node runs that nobody has killed.

        Raises:
            NodeDied: One has ended by itself.
        """
        self._children.reap_orphans()
        for node in self._nodes.values():
            code = node.process.poll()
            if code is not None and not node.killed:
                how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
                raise NodeDied(f"{node.name} {how}; it said: {_last_words(node.log)}")

    def end(self) -> None:
        """Let every node leave, kill those that do not, and wait until nothing of them is left."""
        until = time.monotonic() + LEAVE_SECONDS
        running = [node for node in self._nodes.values() if node.process.poll() is None]
        for node in running:
            node.process.send_signal(signal.SIGCONT)
            node.process.terminate()
        for node in running:
            node.killed = True
            try:
                node.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                node.process.kill()
                node.process.wait()
        self._children.end_orphans()

    def fenced_writes(self) -> int:
        """How many writes the nodes report that came too late and were refused."""
        said = '"event": "write_fenced"'
        return sum(log.read_text(errors="replace").count(said) for log in self.logs.values())

    @property
    def logs(self) -> dict[str, Path]:
        """The logs of the nodes, by name."""
        return {node.name: node.log for node in self._nodes.values()}


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "nothing"
