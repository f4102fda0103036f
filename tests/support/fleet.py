"""Real nodes, real masters and a real database, to be killed, paused and cut off by a test.

    with Fleet(database) as fleet:
        one = fleet.node("one", slots=2)
        run = fleet.request(parts=[part("a", step("wait", fleet.path("go")))])
        fleet.wait_started("a")
        one.kill()

A fleet starts `rowlock node` and `rowlock launch` as they are, with times that are short but keep
their arithmetic. When it ends without an error it checks what must hold after every scenario; in
any case it leaves no process behind. A test that fails shows the logs of its nodes.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, LiteralString, Self
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import namedtuple_row

from rowlock.db.store import Store
from rowlock.registry import Registry
from rowlock.runtime import processes
from rowlock.runtime.processes import MARK_VARIABLE, Process
from rowlock.settings import Settings
from tests.support import failpoints, oracles
from tests.support.fault_jobs import (
    NODE_VARIABLE,
    Once,
    Part,
    Plan,
    Script,
    Step,
    Summed,
    Work,
)
from tests.support.netns import Machine
from tests.support.postgres import Database
from tests.support.supervisor import environment, is_alive, send, state
from tests.support.waiting import wait_until

JOBS: Final = "tests.support.fault_jobs"
TERMINAL: Final = frozenset({"COMPLETED", "FAILED", "CANCELLED", "ABANDONED"})

TIMES: Final[Mapping[str, float]] = {
    "beat_seconds": 0.2,
    "unreachable_seconds": 1.0,
    "removal_grace_seconds": 1.0,
    "lease_margin_seconds": 0.2,
    "drain_seconds": 5,
    "cancel_seconds": 2,
    "poll_seconds": 1,
}
"""The settings of every node here, unless a test says otherwise."""

PATIENCE_SECONDS: Final = 40.0
"""How long to wait for what takes a second or two on an idle machine."""

IDLE_SECONDS: Final = float(os.environ.get("ROWLOCK_IDLE_SECONDS") or 6)
"""How long nodes and partitions do nothing where that must change nothing: three times the removal or longer."""

_MARK: Final = "FLEET"
"""Environment variable by which every process of a fleet is found, whoever adopted it."""
_LOG_LINES_SHOWN: Final = 150
_MISTAKES: Final = frozenset({1, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS})
"""Exit statuses of a supervisor that no fault excuses."""
_LOOK_SECONDS: Final = 0.05
_IDLE_SECONDS_MAX: Final = 1.0
"""How long a session of rowlock's own may sit in a transaction and do nothing."""
_SCHEMA: Final = Path(__file__).with_name("fleet.sql")

Row = Any  # a row with its columns as attributes


def eventually(
    condition: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS
) -> None:
    """Wait for something that costs a query or a file to look at."""
    wait_until(condition, seconds=seconds, what=what, every_seconds=0.02)


# -- processes ---------------------------------------------------------------------------------


class Member:
    """A process of the fleet that is a node: a worker, or the master of a launch."""

    def __init__(
        self, fleet: Fleet, name: str, slots: int, argv: Sequence[str], env: Mapping[str, str]
    ) -> None:
        self.fleet = fleet
        self.name = name
        self.slots = slots
        self.host = "127.0.0.1"
        """Where its metrics and probes are asked for."""
        self.may_end = True
        """Whether the test expects its end: a worker goes on until somebody ends it."""
        self.mark = f"{fleet.mark}.{secrets.token_hex(4)}"
        self.log_path = fleet.folder / f"{name}-{self.mark[-8:]}.log"
        self.out_path = self.log_path.with_suffix(".out")
        with self.log_path.open("wb") as log, self.out_path.open("wb") as out:
            self.popen = subprocess.Popen(
                argv,
                # A run of the tests that is killed leaves nothing behind either.
                preexec_fn=partial(processes.die_with_parent, os.getpid()),  # noqa: PLW1509  no threads
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                env={**env, _MARK: self.mark, NODE_VARIABLE: name},
                start_new_session=True,
            )
        started = processes.look_up(self.popen.pid)
        assert started is not None  # not reaped, so its entry is there
        self.process: Process = started

    @property
    def pid(self) -> int:
        """Pid of the supervisor."""
        return self.popen.pid

    # -- what it says --------------------------------------------------------------------------

    def lines(self) -> list[dict[str, Any]]:
        """Its log so far."""
        found: list[dict[str, Any]] = []
        for line in self.log_path.read_text(errors="replace").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                found.append({"event": None, "level": "RAW", "message": line})
        return found

    def events(self, event: str) -> list[dict[str, Any]]:
        """The lines of one kind."""
        return [line for line in self.lines() if line.get("event") == event]

    def wait_event(self, event: str, count: int = 1) -> dict[str, Any]:
        """Wait until it has logged this so many times; the last of them."""
        eventually(
            lambda: self._is_gone_early() or len(self.events(event)) >= count,
            f"{self.name} logs {event} {count} times",
        )
        found = self.events(event)
        assert len(found) >= count, f"{self.name} has ended: {self.popen.returncode}"
        return found[count - 1]

    def _is_gone_early(self) -> bool:
        return self.popen.poll() is not None

    @property
    def http_port(self) -> int:
        """Where its metrics and probes are; waits until it listens."""
        return int(self.wait_event("http_listening")["port"])

    def metrics(self) -> dict[str, float]:
        """Its metrics, by name with labels as Prometheus writes them."""
        url = f"http://{self.host}:{self.http_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
        pairs = re.findall(r"^([a-z_]+(?:\{.*\})?) (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in pairs}

    def says_that_it_lives(self) -> bool:
        """Whether /livez says so, or there is nobody left to say it."""
        try:
            return self.probe("/livez")[0] == 200
        except OSError:
            return not is_alive(self.process)

    def readiness(self) -> tuple[int, str]:
        """What /readyz answers: status and text."""
        return self.probe("/readyz")

    def probe(self, path: str) -> tuple[int, str]:
        """What a probe gets: status and text."""
        url = f"http://{self.host}:{self.http_port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return answer.status, answer.read().decode().strip()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode().strip()

    def metric(self, name: str) -> float:
        """The sum of one metric over its labels."""
        found = self.metrics()
        return sum(value for key, value in found.items() if key.split("{")[0] == name)

    def outcomes(self, outcome: str) -> float:
        """How many attempts it has counted with this outcome."""
        return sum(
            value
            for key, value in self.metrics().items()
            if key.startswith("rowlock_partition_outcomes_total{") and f'outcome="{outcome}"' in key
        )

    # -- its processes -------------------------------------------------------------------------

    def family(self) -> list[Process]:
        """All living processes of this node, whoever is their parent."""
        return _marked(self.mark)

    def executors(self, *, all_: bool = False) -> list[Process]:
        """Its executors that live, without (unless `all_`) the one for partition() and finish()."""
        found = [p for p in self.family() if _runs(p, b"rowlock.runtime.executor")]
        masters = rb"%s=\w+\.%d\0" % (MARK_VARIABLE.encode(), self.slots)
        return [p for p in found if all_ or not re.search(masters, _environ(p.pid))]

    def watchdogs(self) -> list[Process]:
        """Its watchdog; for a moment there may be none."""
        return [p for p in self.family() if _runs(p, b"rowlock-watchdog")]

    # -- what is done to it --------------------------------------------------------------------

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Signal the supervisor alone."""
        self.may_end = True
        send(self.process, signum)

    def stop(self) -> None:
        """Pause the supervisor alone."""
        self.fleet.hold_still(self.process)

    def cont(self) -> None:
        """Let the supervisor go on."""
        send(self.process, signal.SIGCONT)

    def pause(self) -> None:
        """Pause the whole node: supervisor, watchdog, executors and what they started."""
        self.stop()
        wait_until(self._hold_still, what=f"{self.name} stands still")

    def _hold_still(self) -> bool:
        moving = [p for p in self.family() if state(p) not in {"T", "Z", ""}]
        for process in moving:
            send(process, signal.SIGSTOP)
        return not moving

    def resume(self) -> None:
        """Let the whole node go on, all at once."""
        for process in self.family():
            send(process, signal.SIGCONT)

    def crash(self) -> None:
        """End every process of the node at once, as a machine that loses power does."""
        self.pause()
        self.may_end = True
        for process in self.family():
            send(process, signal.SIGKILL)
        self.popen.wait(PATIENCE_SECONDS)

    def wait_gone(self) -> int:
        """Wait for the supervisor's end, and for that of all it started; its exit status."""
        self.may_end = True
        status = self.popen.wait(PATIENCE_SECONDS)
        wait_until(
            lambda: not self.family(),
            seconds=PATIENCE_SECONDS,
            what=f"all processes of {self.name} end: {self.family()}",
            every_seconds=0.02,
        )
        return status

    def terminate_and_wait(self) -> int:
        """Drain it and wait until it has left; its exit status."""
        self.kill(signal.SIGTERM)
        return self.wait_gone()


class NodeProcess(Member):
    """A `rowlock node`, or a `rowlock master`."""

    @property
    def incarnations(self) -> list[UUID]:
        """Every node id that it has had."""
        return [UUID(line["node"]) for line in self.events("node_registered")]

    @property
    def incarnation(self) -> UUID:
        """Its present node id."""
        return self.incarnations[-1]

    def wait_registered(self, count: int = 1) -> Self:
        """Wait until it has registered (so many times)."""
        self.wait_event("node_registered", count)
        return self

    def wait_beats(self, count: int, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until its present incarnation has beaten so many times more."""
        node, before = self.incarnation, self.row().beat
        eventually(
            lambda: (
                self.fleet.value("SELECT beat FROM rowlock.batch_nodes WHERE node_id = %s", node)
                >= before + count
            ),
            f"{self.name} beats {count} times",
            seconds,
        )

    def row(self) -> Row:
        """Its row in the database."""
        return self.fleet.one(
            "SELECT * FROM rowlock.batch_nodes WHERE node_id = %s", self.incarnation
        )


class LaunchProcess(Member):
    """A `rowlock launch`: a master, to be killed."""

    @property
    def out(self) -> list[dict[str, Any]]:
        """What it has printed."""
        return [json.loads(line) for line in _whole_lines(self.out_path) if line]

    @property
    def execution(self) -> UUID:
        """The execution it stands for; waits until it is known."""
        eventually(lambda: self.out or self._is_gone_early(), f"{self.name} prints its execution")
        assert self.out, f"{self.name} has ended without a word: {self.popen.returncode}"
        return UUID(self.out[0]["execution_id"])

    @property
    def incarnation(self) -> UUID:
        """Its latest node id."""
        return UUID(
            str(
                self.fleet.value(
                    "SELECT node_id FROM rowlock.batch_nodes WHERE only_execution = %s"
                    " ORDER BY started_at DESC LIMIT 1",
                    self.execution,
                )
            )
        )

    def wait_exit(self) -> int:
        """Wait for its end; the exit code."""
        return self.wait_gone()


def _rowlock(failpoint: str | None, env: dict[str, str | float]) -> list[str]:
    """How to start the command; with a failpoint by way of the module that puts it in."""
    if failpoint is None:
        return [sys.executable, "-m", "rowlock"]
    failpoints.points(failpoint)  # a mistake in it is the test's, not the process's
    env[failpoints.VARIABLE] = failpoint
    return [sys.executable, "-m", failpoints.MODULE, "rowlock"]


def _environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _runs(process: Process, word: bytes) -> bool:
    try:
        return word in Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def _marked(mark: str) -> list[Process]:
    """Living processes whose environment carries this mark, or one that it begins."""
    wanted = f"{_MARK}={mark}".encode()
    return [
        process
        for process in processes.table().values()
        if process.state not in {"Z", "X"}
        and any(variable.startswith(wanted) for variable in _environ(process.pid).split(b"\0"))
    ]


# -- the ledger --------------------------------------------------------------------------------


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file that is being written: a reader may meet the last one half done."""
    text = path.read_text()
    return text[: text.rfind("\n") + 1].splitlines()


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the ledger."""

    event: str
    key: str
    attempt: int
    node: str
    pid: int
    at: float
    more: Mapping[str, Any]


class Entries(list[Entry]):
    """What author code did, in the order in which it did it."""

    def of(self, event: str, key: str | None = None) -> Entries:
        """The entries of one kind, of one partition."""
        return Entries(e for e in self if e.event == event and key in {None, e.key})

    def starts(self, key: str) -> Entries:
        """When author code began with a partition."""
        return self.of("start", key)

    def ends(self, key: str) -> Entries:
        """When author code came to the end of a partition."""
        return self.of("end", key)

    def overlaps(self) -> list[tuple[Entry, Entry]]:
        """Pairs of attempts at one partition where the earlier still acted after the later began."""
        spans: dict[tuple[str, int], list[Entry]] = {}
        for entry in sorted(self, key=lambda entry: entry.at):
            spans.setdefault((entry.key, entry.attempt), []).append(entry)
        return [
            (first[-1], second[0])
            for (key, attempt), first in spans.items()
            for (other, later), second in spans.items()
            if key == other and attempt < later and first[-1].at >= second[0].at
        ]


# -- the fleet ---------------------------------------------------------------------------------


class Fleet:
    """Nodes over one database. Use it in a `with`."""

    def __init__(self, database: Database, **settings: float | str) -> None:
        """Prepare the database.

        Args:
            database: Of this test alone.
            settings: Of every node, by the names of `Settings`; the rest is `TIMES`.
        """
        self.database = database
        self.mark = secrets.token_hex(8)
        self.folder = Path(tempfile.mkdtemp(prefix="fleet-"))
        self.members: list[Member] = []
        self.settings = {**TIMES, **settings}
        self.alarming = {"operation_refused", "protocol_error"}
        """Events that no node may log in this test."""
        self.left_open = 0
        """How many executions the test means to leave behind that have not ended."""
        self.deadlocks_max = 0
        """How many deadlocks the test makes itself."""
        self.recovery_seconds_max = 5.0
        """How long a claim may stand, while another node lives, after its owner was removed or should have been.
        Those that could not be recovered with the removal wait for the next pass, and that for its turn on a
        busy machine."""
        self._removal_seconds_max = 0.0
        self._beat_seconds_max = TIMES["beat_seconds"]
        self._onlooker: psycopg.Connection[Any] | None = None
        self._registry = Registry().load([JOBS])
        with database.connect() as db:
            db.execute(_SCHEMA.read_bytes())
        self._admin = self._connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(check=error is None)
        if error is not None:
            error.add_note(self.story)

    def close(self, *, check: bool) -> None:
        """End every process; check first what must hold after every scenario if `check`."""
        try:
            if check:
                self.check()
        finally:
            self.story = self.tell()
            left = self._end_all()
            self._admin.close()
            if self._onlooker is not None:
                self._onlooker.close()
            shutil.rmtree(self.folder, ignore_errors=True)
        if check:
            assert not left, f"processes outlived their supervisor: {left}"
            deadlocks = self.database.value(
                "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
            )
            assert deadlocks <= self.deadlocks_max, f"{deadlocks} deadlocks"

    # -- nodes ---------------------------------------------------------------------------------

    def node(
        self,
        name: str,
        *,
        slots: int = 1,
        pool: str = "default",
        jobs: str = JOBS,
        wait: bool = True,
        failpoint: str | None = None,
        machine: Machine | None = None,
        **env: str | float,
    ) -> NodeProcess:
        """Start a node.

        Args:
            name: Also in its log's name and in the ledger.
            slots: Attempts at a time.
            pool: Its pool.
            jobs: The module of jobs that it imports.
            wait: Until it has registered.
            failpoint: Where it dies or stands still; see `failpoints`.
            machine: Where it runs; None is here.
            env: Settings by the names of `Settings`, or whole environment variables in capitals.
        """
        argv = [
            *(machine.inside if machine else []),
            *_rowlock(failpoint, env),
            *("node", "--name", name, "--slots", str(slots)),
            *("--pool", pool, "--import", jobs, "--http", "0", "--log-format", "json"),
        ]
        node = NodeProcess(self, name, slots, argv, self._environment(env))
        node.may_end = failpoint is not None
        if machine is not None:
            node.host = machine.address
        self.members.append(node)
        return node.wait_registered() if wait else node

    def master(
        self,
        execution: UUID,
        *,
        slots: int = 0,
        pool: str = "default",
        name: str = "master",
        jobs: str = JOBS,
        failpoint: str | None = None,
        **env: str | float,
    ) -> NodeProcess:
        """Start a master run of an execution.

        Args:
            execution: The execution that it is there for.
            slots: Attempts at a time.
            pool: Its pool.
            name: In its log's name and in the ledger.
            jobs: The module of jobs that it imports.
            failpoint: Where it dies or stands still; see `failpoints`.
            env: Settings by the names of `Settings`, or whole environment variables in capitals.
        """
        argv = [
            *_rowlock(failpoint, env),
            *("master", str(execution), "--slots", str(slots)),
            *("--pool", pool, "--import", jobs, "--http", "0", "--log-format", "json"),
        ]
        member = NodeProcess(self, name, slots, argv, self._environment(env))
        self.members.append(member)
        return member

    def launch(
        self,
        job: str = "fault.work",
        *,
        parts: Sequence[Part] = (),
        plan: Sequence[Step] = (),
        finish: Sequence[Step] = (),
        commit: Sequence[Step] = (),
        params: str | None = None,
        slots: int = 0,
        name: str = "launch",
        arguments: Sequence[str] = (),
        failpoint: str | None = None,
        **env: str | float,
    ) -> LaunchProcess:
        """Launch a job from a process of its own, which becomes its master.

        Args:
            params: JSON text instead of a script of these parts and steps.
            failpoint: Where it dies or stands still; see `failpoints`.
        """
        file = self.folder / f"params-{secrets.token_hex(4)}.json"
        file.write_text(params or self.script(parts, plan=plan, finish=finish, commit=commit))
        argv = [
            *_rowlock(failpoint, env),
            *("launch", job, "--params", f"@{file}"),
            *("--slots", str(slots), "--import", JOBS, "--json", *arguments),
        ]
        member = LaunchProcess(self, name, slots, argv, self._environment(env))
        self.members.append(member)
        return member

    def exporter(self, name: str = "exporter") -> Member:
        """Start an exporter that reads every second."""
        argv = [sys.executable, "-m", "rowlock", "exporter", "--http", "0", "--every", "1"]
        env = self._environment({"ROWLOCK_DSN": self.database.dsn_as("rowlock_reader")})
        member = Member(self, name, 0, argv, env)
        self.members.append(member)
        return member

    def _environment(self, env: Mapping[str, str | float]) -> dict[str, str]:
        own = {key: value for key, value in os.environ.items() if not key.startswith("ROWLOCK_")}
        found = {**own, "PYTHONPATH": environment()["PYTHONPATH"]}
        found["ROWLOCK_DSN"] = self.database.dsn_as("rowlock_node")
        found["ROWLOCK_LOG_FORMAT"] = "json"
        for key, value in {**self.settings, **env}.items():
            found[key if key.isupper() else f"ROWLOCK_{key.upper()}"] = str(value)
        beat_seconds = float(found.get("ROWLOCK_BEAT_SECONDS") or Settings().beat_seconds)
        if beat_seconds > self._beat_seconds_max:
            self._beat_seconds_max = beat_seconds
            self.look_on()
        self._removal_seconds_max = max(
            self._removal_seconds_max,
            sum(
                float(found.get(f"ROWLOCK_{name.upper()}") or getattr(Settings(), name))
                for name in ("unreachable_seconds", "removal_grace_seconds")
            ),
        )
        return found

    @contextmanager
    def work_login(self) -> Generator[str]:
        """The connection string of a login that may do no more than author code must, and that no node may
        speak for. It goes with the block."""
        role = f"work_{secrets.token_hex(4)}"
        with self.database.connect() as db:
            grant = (
                "CREATE ROLE {0} LOGIN PASSWORD 'secret'; GRANT USAGE ON SCHEMA rowlock TO {0};"
                " GRANT EXECUTE ON FUNCTION rowlock.fence_open, rowlock.fence_open_finish,"
                " rowlock.fence_arm TO {0}"
            )
            db.execute(sql.SQL(grant).format(sql.Identifier(role)))
        try:
            yield make_conninfo(self.database.dsn, user=role, password="secret")
        finally:
            with self.database.connect() as db:
                db.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(role)))

    # -- executions ----------------------------------------------------------------------------

    def script(
        self,
        parts: Sequence[Part],
        *,
        plan: Sequence[Step] = (),
        finish: Sequence[Step] = (),
        commit: Sequence[Step] = (),
    ) -> str:
        """JSON text of the parameters of a scripted job of `fault_jobs`."""
        script = Script(
            ledger=str(self.ledger_path),
            parts=list(parts),
            plan=list(plan),
            finish=list(finish),
            commit=list(commit),
        )
        return json.dumps(asdict(script))

    def plan(self, count: int, then: str = "", *, seconds: float = 0.0) -> str:
        """JSON text of the parameters of `fault.planned`."""
        plan = Plan(ledger=str(self.ledger_path), count=count, then=then, seconds=seconds)
        return json.dumps(asdict(plan))

    def request(
        self,
        job: str = "fault.work",
        *,
        parts: Sequence[Part] = (),
        plan: Sequence[Step] = (),
        finish: Sequence[Step] = (),
        params: str | None = None,
        pool: str = "default",
        instance: str | None = None,
        priority: int = 0,
        adopt_after_seconds: float = 0,
        contract_hash: str | None = None,
        options: Mapping[str, Any] | None = None,
        **policy: Any,
    ) -> UUID:
        """Ask for an execution, for any node to adopt.

        Args:
            params: JSON text instead of a script of these parts and steps.
            contract_hash: If not that of the job here.
            options: Limits: parallelism, deadline_seconds, suspended.
            policy: What differs from the job's own: max_attempts, timeout_seconds, max_failed, …
        """
        found = self._registry.definition(job)
        with self.database.connect(role="rowlock_node") as db:
            execution, outcome = Store(db).request(
                uuid.uuid4(),
                job=job,
                contract_hash=contract_hash or found.contract_hash,
                policy={**found.policy, **policy},
                delivery=found.job.delivery,
                instance_key=instance or uuid.uuid4().hex,
                parameters=found.parameters.encode(
                    found.parameters.decode(params or self.script(parts, plan=plan, finish=finish))
                ),
                pool=pool,
                priority=priority,
                adopt_after_seconds=adopt_after_seconds,
                options=options,
            )
        assert outcome == "requested", outcome
        return execution

    def restart(self, execution: UUID) -> UUID:
        """Restart an execution that has ended; the new one."""
        with self.store() as store:
            new, outcome = store.restart(uuid.uuid4(), execution, actor="a test", reason=None)
        assert outcome == "restarted", outcome
        return new

    @contextmanager
    def store(self, role: str = "rowlock_admin") -> Generator[Store]:
        """The moves of the protocol, as somebody with this role."""
        with self.database.connect(role=role) as db:
            yield Store(db)

    @staticmethod
    def hold_still(process: Process) -> None:
        """Stop one process, unless it has just ended."""
        send(process, signal.SIGSTOP)
        wait_until(lambda: state(process) in {"T", "Z", ""}, what="it stands still")

    def warm_up(self, node: NodeProcess) -> None:
        """Let every executor of a node run something, so that all are there and ready.

        The node must be the only one of its pool that has slots free.
        """
        go = f"warm-{secrets.token_hex(4)}"
        before = len(self.ledger().of("warm"))
        steps = (Step("mark", "warm"), Step("wait", self.path(go)))
        parts = [Part(key=f"{go}-{number}", steps=list(steps)) for number in range(node.slots)]
        execution = self.request(parts=parts)
        eventually(
            lambda: len(self.ledger().of("warm")) == before + node.slots, f"{node.name} is warm"
        )
        self.open(go)
        self.wait(execution)

    def cancel(self, execution: UUID) -> str:
        """Cancel an execution."""
        with self.store("rowlock_operator") as store:
            return store.cancel(execution, "a test", None)

    def status(self, execution: UUID) -> str:
        """The status of an execution."""
        return str(
            self.value(
                "SELECT status FROM rowlock.batch_job_coordination WHERE execution_id = %s",
                execution,
            )
        )

    def wait(
        self, execution: UUID, status: str = "COMPLETED", *, seconds: float = PATIENCE_SECONDS
    ) -> Row:
        """Wait until an execution has this status; its row. Another end fails at once."""
        reached = {status} | TERMINAL
        eventually(
            lambda: self.status(execution) in reached, f"{execution} becomes {status}", seconds
        )
        row = self.execution(execution)
        assert row.status == status, (
            f"{row.status}: {row.failure_message}; {self.rows_of(execution)}"
        )
        return row

    def execution(self, execution: UUID) -> Row:
        """The row of an execution."""
        return self.one(
            "SELECT * FROM rowlock.batch_job_coordination WHERE execution_id = %s", execution
        )

    def partition(self, key: str, execution: UUID | None = None) -> Row:
        """The row of a partition; of the only execution if none is named."""
        return self.one(
            "SELECT * FROM rowlock.batch_partitions WHERE partition_key = %s"
            " AND (%s::uuid IS NULL OR execution_id = %s)",
            *(key, execution, execution),
        )

    def rows_of(self, execution: UUID) -> list[Row]:
        """The partitions of an execution, in short."""
        return self.rows(
            "SELECT partition_key, status, claims, failures, lost, alone, last_error"
            " FROM rowlock.batch_partitions WHERE execution_id = %s ORDER BY id",
            execution,
        )

    def was_begun_once(self, execution: UUID) -> bool:
        """Whether author code began once with each of its partitions, and with no attempt in vain.

        It may have been claimed more often: what a node keeps ready it hands back, unstarted, when the attempt
        before it takes long, as any does on a busy machine.
        """
        ledger = self.ledger()
        return all(
            (len(ledger.starts(row.partition_key)), row.failures, row.lost) == (1, 0, 0)
            for row in self.rows_of(execution)
        )

    def wait_partition(self, key: str, status: str, execution: UUID | None = None) -> Row:
        """Wait until a partition has this status; its row."""
        eventually(
            lambda: self.rows(
                "SELECT FROM rowlock.batch_partitions WHERE partition_key = %s AND status = %s"
                " AND (%s::uuid IS NULL OR execution_id = %s)",
                *(key, status, execution, execution),
            ),
            f"partition {key} becomes {status}",
        )
        return self.partition(key, execution)

    def evidence(self, key: str) -> Any:
        """What an AT_MOST_ONCE attempt reported after its claim was gone: a JSON object, or None."""
        return self.value("SELECT evidence FROM rowlock.batch_starts WHERE partition_key = %s", key)

    def db_events(self, event: str) -> list[Row]:
        """The rows of batch_events of one kind."""
        return self.rows("SELECT * FROM rowlock.batch_events WHERE event = %s ORDER BY id", event)

    def most_claimed(self, node: NodeProcess) -> int:
        """The largest number of claims that a node has ever held at a time."""
        return int(
            self.value(
                "SELECT coalesce(max(held), 0) FROM (SELECT sum(CASE WHEN became = 'CLAIMED' THEN 1"
                "  WHEN was = 'CLAIMED' THEN -1 ELSE 0 END) OVER (ORDER BY id) AS held"
                " FROM fleet.transitions WHERE node = ANY (%s)) h",
                node.incarnations,
            )
        )

    def claimed_since(self, execution: UUID, moment: datetime) -> int:
        """How many claims of an execution began after a moment of the database's clock."""
        return int(
            self.value(
                "SELECT count(*) FROM fleet.transitions"
                " WHERE execution_id = %s AND became = 'CLAIMED' AND at > %s",
                *(execution, moment),
            )
        )

    def most_claimed_of(self, execution: UUID) -> int:
        """The largest number of claims that an execution has ever had at a time."""
        return int(
            self.value(
                "SELECT coalesce(max(held), 0) FROM (SELECT sum(CASE WHEN became = 'CLAIMED' THEN 1"
                "  WHEN was = 'CLAIMED' THEN -1 ELSE 0 END) OVER (ORDER BY id) AS held"
                " FROM fleet.transitions WHERE execution_id = %s) h",
                execution,
            )
        )

    def now(self) -> datetime:
        """The moment by the database's clock."""
        moment: datetime = self.value("SELECT clock_timestamp()")
        return moment

    def transitions(self, key: str) -> list[tuple[str, str]]:
        """Every change of state of a partition."""
        found = self.rows(
            "SELECT was, became FROM fleet.transitions WHERE key = %s ORDER BY id", key
        )
        return [(row.was, row.became) for row in found]

    # -- files ---------------------------------------------------------------------------------

    @property
    def ledger_path(self) -> Path:
        """Where author code writes down what it does."""
        return self.folder / "ledger"

    def path(self, name: str) -> str:
        """A file that does not exist yet, for a step that waits."""
        return str(self.folder / name)

    def open(self, name: str) -> None:
        """Make that file: whoever waits goes on."""
        (self.folder / name).touch()

    def ledger(self) -> Entries:
        """What author code has done so far."""
        if not self.ledger_path.exists():
            return Entries()
        found = Entries()
        for text in _whole_lines(self.ledger_path):
            line = json.loads(text)
            known = {
                name: line.pop(name) for name in ("event", "key", "attempt", "node", "pid", "at")
            }
            found.append(Entry(**known, more=line))
        return found

    def wait_ledger(self, event: str, key: str, count: int = 1) -> Entry:
        """Wait until author code has written this so many times; the last of them."""
        eventually(
            lambda: len(self.ledger().of(event, key)) >= count,
            f"{key} writes {event} {count} times",
        )
        return self.ledger().of(event, key)[count - 1]

    def wait_started(self, key: str, attempts: int = 1) -> Entry:
        """Wait until author code has begun with a partition (so many times)."""
        return self.wait_ledger("start", key, attempts)

    # -- the database --------------------------------------------------------------------------

    def move_to(self, database: Database) -> None:
        """Look at another database from now on: that of a server that was promoted."""
        self._admin.close()
        self.database = database

    def _connect(self) -> psycopg.Connection[Row]:
        """Connect as superuser, and have somebody look on over another connection."""
        self.look_on()
        return self._superuser("fleet")

    def _superuser(self, name: str) -> psycopg.Connection[Row]:
        """A connection that waits for its turn: where nodes use up all there are, those that are just being
        refused take even what is kept for superusers."""
        made: list[psycopg.Connection[Row]] = []

        def has_room() -> bool:
            try:
                made.append(
                    psycopg.connect(
                        self.database.dsn,
                        autocommit=True,
                        row_factory=namedtuple_row,
                        application_name=name,
                        options="-c client_connection_check_interval=200",
                    )
                )
            except psycopg.OperationalError as error:
                if "too many clients" not in str(error):
                    raise
            return bool(made)

        eventually(has_room, "the server has room for a superuser")
        return made[0]

    def rows(self, query: LiteralString, *parameters: Any) -> list[Row]:
        """The rows of a statement, as superuser."""
        if self._admin.closed:
            self._admin = self._connect()
        try:
            cursor = self._admin.execute(query, parameters or None)
        except psycopg.OperationalError:
            if not self._admin.closed:
                raise
            return self.rows(query, *parameters)  # the server went away and came back
        return cursor.fetchall() if cursor.description is not None else []

    def one(self, query: LiteralString, *parameters: Any) -> Row:
        """The only row of a statement."""
        (row,) = self.rows(query, *parameters)
        return row

    def value(self, query: LiteralString, *parameters: Any) -> Any:  # Any: the statement knows
        """The only value of a statement."""
        ((value,),) = self.rows(query, *parameters)
        return value

    # -- what must always hold -----------------------------------------------------------------

    def look_on(self) -> None:
        """Let the server look for what must not be, every 50 ms; anew if it did already. It costs no thread here:
        nobody waits for the answer of a statement that never ends.

        A test that sets the server's clock back calls it: whoever sleeps there sleeps longer by as much.
        """
        if self._onlooker is not None:
            self._onlooker.close()
        self._onlooker = self._superuser("fleet looks on")
        living_seconds = 2 * self._beat_seconds_max
        self._onlooker.pgconn.send_query(
            f"CALL fleet.look_on({_LOOK_SECONDS}, {living_seconds})".encode()
        )

    def check_sightings(self, *, patience: float = PATIENCE_SECONDS) -> None:
        """Somebody has looked on to the end, and has seen nothing for longer than it may be."""
        before = self.value("SELECT last_value FROM fleet.looks")
        eventually(
            lambda: self.value("SELECT last_value FROM fleet.looks") > before + 1,
            "the onlooker looks on; if it ended, its last statement is in the server's log",
            patience,
        )
        allowed = {
            "claim without an owner": self.recovery_seconds_max,
            "claim of a silent node": self._removal_seconds_max + self.recovery_seconds_max,
            "idle in transaction": _IDLE_SECONDS_MAX,
        }
        seen = [
            row
            for row in self.rows("SELECT * FROM fleet.sightings")
            if row.looks > allowed[row.what] / _LOOK_SECONDS
        ]
        assert not seen, f"seen while it ran, in so many looks of {_LOOK_SECONDS} s: {seen}"

    def check(self) -> None:
        """What must hold after every scenario."""
        assert not self.value("SELECT is_called FROM fleet.violations"), "see the logs: violation"
        eventually(
            lambda: (
                not self.rows(oracles.ORPHANS)
                or not any(is_alive(member.process) for member in self.members)
            ),
            "no claim of a removed node stands",
        )
        eventually(
            lambda: (
                self.value(
                    "SELECT count(*) FROM rowlock.batch_job_coordination WHERE ended_at IS NULL"
                )
                == self.left_open
            ),
            f"all executions end, but for {self.left_open} (Fleet.left_open)",
        )
        self.check_sightings()
        live = self.rows(oracles.LIVE_AFTER_THE_END)
        assert not live, f"an execution is over and this is not: {live}"
        wrong = self.rows(oracles.MISCOUNTED)
        assert not wrong, f"counts differ from a recount: {wrong}"
        doubled = self.rows(
            "SELECT key, item, count(*) FROM fleet.effects GROUP BY 1, 2 HAVING count(*) > 1"
        )
        assert not doubled, f"business rows written more than once: {doubled}"
        self._check_starts()
        self._check_ends()
        self._check_processes()

    def _check_ends(self) -> None:
        """What is COMPLETED was done to its end by the attempt that was accepted; what may start once did."""
        ends = {(entry.key, entry.attempt) for entry in self.ledger().of("end")}
        undone = [
            row
            for row in self.rows(
                "SELECT p.partition_key, p.claims FROM rowlock.batch_partitions p"
                " JOIN rowlock.batch_job_coordination e USING (execution_id)"
                " WHERE p.status = 'COMPLETED' AND p.claims > 0 AND e.job_name = ANY (%s)",
                [Work.name, Once.name, Summed.name],
            )
            if (row.partition_key, row.claims) not in ends
        ]
        assert not undone, f"completed, and author code never came to its end: {undone}"
        allowed = {
            row.partition_key
            for row in self.rows(
                "SELECT partition_key FROM rowlock.batch_partitions"
                " WHERE resolution ->> 'how' = 'retry'"
            )
        }
        starts = Counter(
            (entry.more["of"], entry.key)
            for entry in self.ledger().of("start")
            if entry.more["job"] == Once.name and entry.key not in allowed
        )
        twice = [key for (_, key), count in starts.items() if count > 1]
        assert not twice, f"AT_MOST_ONCE, and started more than once: {twice}"

    def _check_processes(self) -> None:
        """Nobody ended by a mistake of ours, or unasked; nodes that can say that they live do; none logged what it
        never should."""
        ends = [(member, member.popen.poll()) for member in self.members]
        killed = {entry.node for entry in self.ledger().of("kills_node")}
        wrong = {
            member.name: status
            for member, status in ends
            if status in _MISTAKES
            or (status is not None and not member.may_end and member.name not in killed)
        }
        assert not wrong, f"ended unexpectedly: {wrong}"
        for member in self.members:
            if not isinstance(member, NodeProcess) or not member.events("node_registered"):
                continue
            if is_alive(member.process) and state(member.process) != "T":
                eventually(member.says_that_it_lives, f"{member.name} says that it lives")
        alarming = [
            (member.name, line)
            for member in self.members
            for line in member.lines()
            if line.get("event") in self.alarming or "Traceback" in str(line.get("message"))
        ]
        assert not alarming, f"a node logged what it never should: {alarming}"

    def _check_starts(self) -> None:
        """Whoever began with a partition had claimed it, and nobody began twice with one claim."""
        claims = self.rows(
            "SELECT t.key, t.claims, n.name, n.only_execution IS NOT NULL AS launch"
            " FROM fleet.transitions t JOIN rowlock.batch_nodes n ON n.node_id = t.node"
            " WHERE t.became = 'CLAIMED' AND t.key NOT IN (SELECT key FROM fleet.transitions"
            "  GROUP BY key HAVING count(DISTINCT execution_id) > 1)"
        )
        owners = {(row.key, row.claims): row.name for row in claims if not row.launch}
        seen: set[tuple[str, int]] = set()
        for start in self.ledger().of("start"):
            claim = (start.key, start.attempt)
            if claim in owners:
                assert claim not in seen, f"started twice with one claim: {start}"
                assert start.node == owners[claim], f"claimed by {owners[claim]}: {start}"
                seen.add(claim)

    def _end_all(self) -> list[Process]:
        """Kill every supervisor; what does not end by itself is killed too, and returned."""
        for member in self.members:
            member.resume()
            member.kill()
        for member in self.members:
            member.popen.wait()
        try:
            wait_until(lambda: not _marked(self.mark), seconds=15, every_seconds=0.02)
        except AssertionError:
            left = _marked(self.mark)
            while remaining := _marked(self.mark):
                for process in remaining:
                    send(process, signal.SIGKILL)
            return left
        return []

    def tell(self) -> str:
        """The logs of all members and the ledger, for a test that failed."""
        told: list[str] = []
        for member in self.members:
            lines = member.log_path.read_text(errors="replace").splitlines()[-_LOG_LINES_SHOWN:]
            told += [f"--- {member.name} (pid {member.pid}, {member.popen.poll()})", *lines]
            if isinstance(member, LaunchProcess):
                told += ["--- printed", member.out_path.read_text(errors="replace")]
        if self.ledger_path.exists():
            ledger = self.ledger_path.read_text().splitlines()[-_LOG_LINES_SHOWN:]
            told += ["--- ledger", *(line for line in ledger if '"tick"' not in line)]
        return "\n".join(told)
