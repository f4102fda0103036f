"""Children are started by the main thread, and orphans of author code end with the supervisor."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from rowlock.runtime.children import Children
from tests.support.supervisor import (
    Supervisor,
    environment,
    identity,
    is_alive,
    open_descriptors,
    send,
    state,
)
from tests.support.waiting import wait_until


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    supervisor.close()


def test_a_child_runs_in_a_session_of_its_own_with_the_given_environment_only() -> None:
    code = "import os; print(os.getsid(0) == os.getpid(), sorted(os.environ), flush=True)"
    script = f"""
from rowlock.runtime.children import Children
env = {{"LC_ALL": "C", "ONLY": "this"}}
Children().spawn({[sys.executable, "-I", "-S", "-c", code]!r}, env=env).wait()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, check=True
    )

    assert done.stdout == b"", "standard output is the command's, not the author's"
    assert done.stderr.decode() == "True ['LC_ALL', 'ONLY']\n"


def test_only_the_main_thread_may_start_a_process() -> None:
    refused: list[str] = []

    def start() -> None:
        try:
            Children().spawn([sys.executable, "-c", ""], env={})
        except RuntimeError as error:
            refused.append(str(error))

    thread = threading.Thread(target=start, name="beat")
    thread.start()
    thread.join()

    assert "thread 'beat' tried to start a process: start it from the main thread" in refused[0]


def test_orphans_are_reaped_and_the_status_of_a_child_is_left_alone(
    supervisor: Supervisor,
) -> None:
    executor = supervisor.executor(0, freeze=False)
    neighbour = supervisor.executor(1, freeze=False)
    orphan = supervisor.family(0)["daemon"]
    send(orphan, signal.SIGKILL)
    send(neighbour, signal.SIGTERM)  # an ended Popen child beside an ended orphan
    wait_until(lambda: state(orphan) == state(neighbour) == "Z")

    assert supervisor.ask("reap_orphans") == 1

    assert state(orphan) == ""
    assert supervisor.ask("reap_orphans") == 0
    assert supervisor.ask("poll", 1) == -signal.SIGTERM
    assert supervisor.ask("poll", 0) is None
    assert is_alive(executor)


def test_a_child_of_a_library_in_this_process_is_no_orphan() -> None:
    children = Children()
    with subprocess.Popen([sys.executable, "-c", "exit(3)"]) as popen:
        ended = identity(popen.pid)
        wait_until(lambda: state(ended) == "Z")

        assert children.reap_orphans() == 0
        children.end_orphans()

        assert popen.wait() == 3


def test_without_children_there_is_nothing_to_reap() -> None:
    script = "from rowlock.runtime.children import Children; print(Children().reap_orphans())"
    assert subprocess.check_output([sys.executable, "-c", script], env=environment()) == b"0\n"


def test_orphans_and_those_that_become_orphans_by_it_are_ended(supervisor: Supervisor) -> None:
    executor = supervisor.executor(0, freeze=False)
    family = supervisor.family(0)

    supervisor.ask("end_orphans")

    ended = {name for name, process in family.items() if not is_alive(process)}
    assert ended == {"daemon", "child of the daemon"}
    assert state(family["child of the daemon"]) == "", "it is reaped too"
    assert is_alive(executor)
    assert is_alive(supervisor.watchdog)


def test_a_supervisor_told_to_ignore_its_children_still_learns_how_they_ended() -> None:
    supervisor = Supervisor(before="import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)")
    try:
        executor = supervisor.executor(0, freeze=False)
        send(executor, signal.SIGTERM)
        wait_until(lambda: not is_alive(executor))
        assert supervisor.ask("poll", 0) == -signal.SIGTERM
    finally:
        supervisor.close()


def test_a_program_that_does_not_exist_is_an_error_and_leaves_no_child() -> None:
    before = open_descriptors()
    with pytest.raises(FileNotFoundError):
        Children().spawn(["/no/such/program"], env={})
    assert open_descriptors() == before
