"""`rowlock dev`: a PostgreSQL that keeps its data and a few nodes, in one terminal."""

from __future__ import annotations

import argparse
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import IO, Final

from rowlock.cli import output
from rowlock.cli.database import opened
from rowlock.cli.node import no_jobs
from rowlock.db import views
from rowlock.db.migrate import migrate
from rowlock.embedded import Server
from rowlock.registry import Registry
from rowlock.settings import Settings

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

KILL_AFTER_SECONDS: Final = 15.0
"""How much longer than its drain time a node may take to end before it is killed."""


READY_POLL_SECONDS: Final = 0.1
"""How often it is looked whether the nodes are registered."""
NODES_SEEN_MAX: Final = 1000


def run(given: argparse.Namespace) -> int:
    """Run them until Ctrl-C, which lets running work finish; a second one does not."""
    settings = Settings.from_environment(os.environ)
    # Author code is imported here only to hear of mistakes once, and before anything starts.
    jobs = Registry().load(given.imports).names
    if not jobs:
        raise no_jobs()
    with _happenings() as happenings, Server.start(given.data) as server:
        applied = migrate(server.dsn)
        crew = Crew(server.dsn, happenings, drain_seconds=settings.drain_seconds)
        try:
            crew.start(given.nodes, _node_arguments(given, settings.log_format))
            if crew.is_up():
                _announce(given, crew, server.dsn, jobs, migrations=len(applied))
            return crew.watch()
        finally:
            crew.kill()


def _node_arguments(given: argparse.Namespace, log_format: str | None) -> list[str]:
    form = "json" if given.json else log_format or "human"
    imports = [word for module in given.imports for word in ("--import", module)]
    return ["--slots", str(given.slots), "--log-format", form, *imports]


def _announce(
    given: argparse.Namespace, crew: Crew, dsn: str, jobs: Sequence[str], *, migrations: int
) -> None:
    if given.json:
        output.print_json_line(
            {
                "dsn": dsn,
                "data": str(given.data.absolute()),
                "nodes": [{"name": node.name, "pid": node.process.pid} for node in crew.nodes],
                "jobs": list(jobs),
            }
        )
        return
    print(f"database  {given.data.absolute()}" + (" (new schema)" if migrations else ""))
    print(f"nodes     {', '.join(node.name for node in crew.nodes)}")
    print(f"jobs      {', '.join(jobs)}")
    print("in another terminal:")
    print(f"    export ROWLOCK_DSN={shlex.quote(dsn)}")
    print(f"    rowlock launch {jobs[0]} --params '{{…}}'", flush=True)


@dataclass(frozen=True, slots=True)
class Ended:
    """A node process has ended."""

    node: DevNode
    code: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A signal asks to end."""

    signum: int


Happenings = queue.SimpleQueue[Ended | Asked]


@contextmanager
def _happenings() -> Generator[Happenings]:
    """Where signals go while this is open; SimpleQueue.put may be called by a signal handler."""
    happenings: Happenings = queue.SimpleQueue()

    def note(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001  its signature is given
        happenings.put(Asked(signum))

    before = {signum: signal.signal(signum, note) for signum in SIGNALS}
    try:
        yield happenings
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DevNode:
    """One node of the terminal."""

    name: str
    process: subprocess.Popen[str]


class Crew:
    """The node processes: started together, watched, ended together."""

    def __init__(self, dsn: str, happenings: Happenings, *, drain_seconds: float) -> None:
        self.nodes: list[DevNode] = []
        with opened(dsn, "dev") as db:
            self._began_at = views.read_at(db)
        self._dsn = dsn
        self._environment = {**os.environ, "ROWLOCK_DSN": dsn}
        self._happenings = happenings
        self._drain_seconds = drain_seconds
        self._readers: list[threading.Thread] = []
        self._printing = threading.Lock()

    def start(self, number: int, words: Sequence[str]) -> None:
        """Start so many nodes with these arguments of `rowlock node`. Main thread only.

        The kernel ties a child to the thread that started it, not to the process.
        """
        assert threading.current_thread() is threading.main_thread()
        for index in range(1, number + 1):
            name = f"node-{index}"
            # A session of its own: Ctrl-C in the terminal reaches us, and we say what to do.
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "rowlock.cli.dev_node", str(os.getpid())),
                    *("--name", name, *words),
                ],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            node = DevNode(name=name, process=process)
            self.nodes.append(node)
            reader = threading.Thread(target=self._read, args=(node,), name=name, daemon=True)
            reader.start()
            self._readers.append(reader)

    def is_up(self) -> bool:
        """Wait until all nodes are registered. False: something else has happened before that."""
        with opened(self._dsn, "dev") as db:
            while self._happenings.empty():
                # Nodes of an earlier run may still be there; those of this one are younger.
                there = views.nodes(db, limit=NODES_SEEN_MAX)
                if sum(one.started_at >= self._began_at for one in there) >= len(self.nodes):
                    return True
                threading.Event().wait(READY_POLL_SECONDS)
        return False

    def watch(self) -> int:
        """Wait until all have ended, by themselves or because we were asked; the exit code."""
        running = set(self.nodes)
        asked = 0
        kill_at: float | None = None
        code = 0
        while running:
            match self._next(kill_at):
                case Ended(node, ended_with):
                    running.discard(node)
                    if not asked:
                        self._say(_obituary(node, ended_with, left=len(running)))
                        code = ended_with if ended_with > 0 else 1
                case Asked():
                    asked += 1
                    if asked == 1:
                        kill_at = time.monotonic() + self._drain_seconds + KILL_AFTER_SECONDS
                        self._say("draining; Ctrl-C again ends everything at once")
                        self._signal(signal.SIGTERM)
                    else:
                        self.kill()
                case None:
                    self.kill()
                    kill_at = None
        for reader in self._readers:
            reader.join()
        return 0 if asked else code

    def kill(self) -> None:
        """Kill what still runs."""
        self._signal(signal.SIGKILL)

    def _next(self, until: float | None) -> Ended | Asked | None:
        """What happens next; None: the time is up."""
        try:
            return self._happenings.get(
                timeout=None if until is None else max(0.0, until - time.monotonic())
            )
        except queue.Empty:
            return None

    def _signal(self, signum: signal.Signals) -> None:
        for node in self.nodes:
            node.process.send_signal(signum)  # does nothing for one that has ended

    def _read(self, node: DevNode) -> None:
        """Pass on what a node says, until it has ended and said everything."""
        lines: IO[str] | None = node.process.stdout
        assert lines is not None
        for line in lines:
            self._say(line.rstrip("\n"), name=node.name)
        self._happenings.put(Ended(node, node.process.wait()))

    def _say(self, text: str, *, name: str = "dev") -> None:
        with self._printing:
            try:
                print(f"{name:<7}| {text}", file=sys.stderr, flush=True)
            except OSError:
                pass  # nobody reads it; the nodes run on


def _obituary(node: DevNode, code: int, *, left: int) -> str:
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    rest = "its work goes to the others" if left else "no node is left"
    return f"{node.name} (pid {node.process.pid}) {how}; {rest}"
