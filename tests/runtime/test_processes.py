"""Process groups, descendants and orphans: nothing that author code starts outlives its attempt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import pytest

from rowlock.runtime import processes
from rowlock.runtime import usage as usage_module
from rowlock.runtime.processes import MARK_VARIABLE, Process, Tree
from rowlock.runtime.usage import Usage, of_family
from tests.support.supervisor import Supervisor, environment, identity, is_alive, send, state
from tests.support.waiting import wait_until

MARK = uuid4().hex  # another run of these tests at the same time has another one
LOOP = [sys.executable, "-I", "-S", "-c", "import time\nwhile True: time.sleep(0.001)"]


@dataclass
class Started:
    """Processes that a test has started; they are killed at its end."""

    popens: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])

    def leader(self, command: list[str] = LOOP, *, mark: str = MARK) -> Tree:
        """A process that leads its own session, as an executor does."""
        popen = subprocess.Popen(
            command,
            start_new_session=True,
            env={**environment(), MARK_VARIABLE: mark},
            stdout=subprocess.PIPE,
        )
        self.popens.append(popen)
        return Tree(leader=popen.pid, started=identity(popen.pid).started, mark=mark)

    def line(self) -> str:
        """The next line of the newest process."""
        stdout = self.popens[-1].stdout
        assert stdout is not None
        return stdout.readline().decode()

    def close(self) -> None:
        for popen in self.popens:
            popen.kill()
            popen.wait()
            if popen.stdout is not None:
                popen.stdout.close()


@pytest.fixture
def started() -> Iterator[Started]:
    started = Started()
    yield started
    started.close()


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    supervisor.close()


def ended(process: Process) -> bool:
    return not is_alive(process)


# -- reading the process table -----------------------------------------------------------------


def test_a_process_is_read_whatever_its_name_looks_like(started: Started, tmp_path: Path) -> None:
    odd = tmp_path / ") R 1 1 ("
    odd.symlink_to(sys.executable)
    tree = started.leader([str(odd), *LOOP[1:]])
    wait_until(lambda: b") R 1 1 (" in Path(f"/proc/{tree.leader}/stat").read_bytes())

    process = identity(tree.leader)

    assert process.parent == os.getpid()
    assert process.group == process.session == process.pid == tree.leader
    assert process.state in {"R", "S"}


def test_there_is_nothing_to_look_up_under_a_free_pid() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as popen:
        pass
    assert processes.look_up(popen.pid) is None


def test_the_table_holds_this_process_and_its_parent() -> None:
    seen = processes.table()
    assert seen[os.getpid()].parent == os.getppid()
    assert os.getppid() in seen


# -- trees -------------------------------------------------------------------------------------


def test_members_are_found_wherever_author_code_left_them(supervisor: Supervisor) -> None:
    executor = supervisor.executor(0, freeze=True)
    family = supervisor.family(0)
    mark = Path(f"/proc/{executor.pid}/environ").read_bytes().split(MARK_VARIABLE.encode() + b"=")
    tree = Tree(executor.pid, executor.started, mark[1].split(b"\0")[0].decode())

    found = {process.pid for process in processes.members([tree])}

    assert found == {executor.pid, *(process.pid for process in family.values())}
    assert identity(family["daemon"].pid).parent == supervisor.process.pid  # the subreaper
    assert identity(family["daemon"].pid).session != executor.pid


def test_a_daemon_of_one_executor_is_no_member_of_its_neighbour(supervisor: Supervisor) -> None:
    supervisor.executor(0, freeze=True)
    neighbour = supervisor.executor(1, freeze=True)
    mine, theirs = supervisor.family(0), supervisor.family(1)

    supervisor.ask("kill", 0)

    wait_until(lambda: all(map(ended, mine.values())))
    assert is_alive(neighbour)
    assert all(map(is_alive, theirs.values()))


def test_the_calling_process_is_never_a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    myself = Tree(leader=os.getpgrp(), started=0, mark="")
    assert os.getpid() not in {process.pid for process in processes.members([myself])}


def test_a_tree_is_frozen_and_thawed_with_all_that_left_it(supervisor: Supervisor) -> None:
    executor = supervisor.executor(0, freeze=True)
    everyone = [executor, *supervisor.family(0).values()]

    supervisor.extend(-1)
    wait_until(lambda: {state(process) for process in everyone} == {"T"})
    wait_until(lambda: supervisor.ask("frozen", 0))
    supervisor.extend(60)
    supervisor.ask("thaw", 0)

    assert not any(state(process) == "T" for process in everyone)
    assert all(map(is_alive, everyone))


def test_freezing_outruns_a_tree_that_keeps_forking(started: Started) -> None:
    # In a session of its own, every process forks its successor after a millisecond.
    growing = """
import os, time
os.setsid() if os.fork() == 0 else time.sleep(1000)
print("go", flush=True)
for _ in range(500):
    if os.fork():
        time.sleep(1000)
    time.sleep(0.001)
"""
    tree = started.leader([sys.executable, "-I", "-S", "-c", growing])
    assert started.line() == "go\n"

    settled = processes.freeze([tree])
    frozen = processes.members([tree])
    again = processes.members([tree])
    processes.kill([tree])

    assert settled
    assert {process.state for process in frozen} == {"T"}
    assert 1 < len(frozen) < 500
    assert again == frozen  # nobody is left who could fork
    wait_until(lambda: processes.members([tree]) == [])


class Scripted:
    """A process table that changes between two looks as written down, and the signals sent."""

    def __init__(self, patch: pytest.MonkeyPatch, *looks: str) -> None:
        """Each look is one letter of state for each process."""
        self.looks = list(looks)
        self.sent: list[tuple[list[int], int]] = []
        patch.setattr(processes, "members", self._members)
        patch.setattr(processes, "_signal", self._signal)

    def _members(self, trees: object) -> list[Process]:
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        return [Process(7 + at, 1, 7 + at, 7, letter, 1) for at, letter in enumerate(look)]

    def _signal(self, groups: Iterable[int], signum: int) -> None:
        self.sent.append((list(groups), signum))


def test_one_quiet_look_does_not_prove_that_nobody_was_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripted = Scripted(monkeypatch, "R", "T", "TR", "TT")  # the second was born behind a look

    assert processes.freeze([])

    assert [groups for groups, _ in scripted.sent] == [[], [7], [8]]


def test_a_tree_is_stopped_before_any_of_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = Scripted(monkeypatch, "RR", "TT")

    processes.kill([])

    assert scripted.sent == [
        ([], signal.SIGSTOP),
        ([7, 8], signal.SIGSTOP),
        ([7, 8], signal.SIGKILL),
    ]


def test_a_tree_that_will_not_hold_still_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    Scripted(monkeypatch, "TD")  # D: waiting for a disk or a network file system

    assert not processes.freeze([])


def test_nothing_left_to_freeze_counts_as_frozen() -> None:
    assert processes.freeze([])
    processes.thaw([])
    processes.kill([])


def test_a_frozen_tree_can_be_killed(started: Started) -> None:
    tree = started.leader()
    assert processes.freeze([tree])

    processes.kill([tree])

    assert started.popens[0].wait() == -signal.SIGKILL


@pytest.mark.parametrize("how", ["env={}", "env={}, process_group=0"], ids=["group", "session"])
def test_what_outlives_its_leader_is_killed_by_group_and_session(
    started: Started, how: str
) -> None:
    program = f"import subprocess; print(subprocess.Popen({LOOP!r}, {how}).pid)"
    tree = started.leader([sys.executable, "-c", program])
    orphan = identity(int(started.line()))
    started.popens[0].wait()  # no leader, no mark, no ancestry

    processes.kill([tree])

    wait_until(lambda: ended(orphan))


def test_a_new_process_under_the_leaders_old_pid_is_not_touched(started: Started) -> None:
    tree = started.leader(mark="somebody else's")
    stale = Tree(leader=tree.leader, started=tree.started - 1, mark=MARK)

    processes.kill([stale])
    processes.freeze([stale])

    assert processes.members([stale]) == []
    assert state(identity(tree.leader)) in {"R", "S"}


def test_groups_from_outside_the_pid_namespace_are_not_taken_for_our_own(started: Started) -> None:
    processes._signal([0, 1], signal.SIGKILL)  # killpg would end this test run


def test_without_proc_the_process_group_is_what_is_reached(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = started.leader()._replace(started=0)
    leader = identity(tree.leader)

    def nothing(pid: int) -> None: ...

    def without_proc(act: Callable[[list[Tree]], object]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(processes, "table", dict)
            patch.setattr(processes, "look_up", nothing)
            act([tree])

    without_proc(processes.freeze)
    wait_until(lambda: state(leader) == "T")
    without_proc(processes.thaw)
    wait_until(lambda: state(leader) != "T")
    without_proc(processes.kill)

    assert started.popens[0].wait() == -signal.SIGKILL


# -- parents and children ----------------------------------------------------------------------


@pytest.mark.parametrize("job, argument", [("regex", ""), ("big integer", "3")])
def test_sigkill_of_the_supervisor_kills_an_executor_inside_a_long_c_call(
    supervisor: Supervisor, job: str, argument: str
) -> None:
    executor = supervisor.executor(0, freeze=False)
    supervisor.run(0, job, argument)
    send(supervisor.watchdog, signal.SIGSTOP)  # the kernel alone has to do it
    wait_until(lambda: state(supervisor.watchdog) == "T")

    supervisor.signal(signal.SIGKILL)

    wait_until(lambda: ended(executor), seconds=5)


def test_a_child_whose_parent_died_before_it_asked_ends_itself() -> None:
    code = "from rowlock.runtime import processes; processes.die_with_parent(1); print('alive')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, b"")


def test_the_kernel_prefers_an_executor_when_memory_runs_out(started: Started) -> None:
    tree = started.leader()
    before = int(Path(f"/proc/{os.getpid()}/oom_score_adj").read_text())

    processes.prefer_as_memory_victim(tree.leader)

    assert int(Path(f"/proc/{tree.leader}/oom_score_adj").read_text()) == 500 > before
    processes.prefer_as_memory_victim(2**22)  # no such process: no error


def test_memory_of_a_process_is_told_in_bytes(started: Started) -> None:
    mine = processes.memory_bytes(os.getpid())
    assert mine is not None
    assert 10_000_000 < mine < 2_000_000_000
    assert processes.memory_bytes(2**22) is None


# -- what they use -----------------------------------------------------------------------------


def test_the_usage_of_a_family_counts_its_descendants_also_those_that_have_ended(
    started: Started,
) -> None:
    """A parent that sleeps, whose first child has burnt processor time and whose second holds memory."""
    code = (
        "import subprocess, sys, time\n"
        "burn = 'import time\\nwhile time.process_time() < 0.3: pass'\n"
        "hold = 'x = bytearray(50_000_000); print(1, flush=True); import time; time.sleep(600)'\n"
        "run = [sys.executable, '-I', '-S', '-c']\n"
        "subprocess.run([*run, burn])\n"
        "held = subprocess.Popen([*run, hold], stdout=subprocess.PIPE)\n"
        "held.stdout.readline()\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)"
    )
    tree = started.leader([sys.executable, "-I", "-S", "-c", code])
    assert started.line() == "ready\n"

    usage = of_family(tree.leader)

    assert usage is not None
    assert 0.3 <= usage.cpu_seconds < 60
    assert 50_000_000 < usage.memory_bytes < 500_000_000
    assert of_family(2**22) is None
    processes.kill([tree])


def test_the_processor_time_of_a_node_never_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([Usage(2.0, 10), Usage(1.5, 20), Usage(3.0, 30)])

    def look(_pid: int) -> Usage:
        return next(looks)

    monkeypatch.setattr(usage_module, "of_family", look)
    node = usage_module.NodeUsage("default")

    told = [[family.samples[0].value for family in node.collect()] for _ in range(3)]

    assert told == [[2.0, 10], [2.0, 20], [3.0, 30]]
