"""What a supervisor holds of one executor: its channel, its process tree, its end."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from rowlock.runtime import messages, processes
from rowlock.runtime.children import Children
from rowlock.runtime.executor_process import ExecutorProcess, describe_exit, executor_command
from tests.support import fake_executor
from tests.support.fake_executor import run
from tests.support.supervisor import (
    environment,
    identity,
    is_alive,
    next_messages,
    open_descriptors,
    send,
    state,
)
from tests.support.waiting import wait_until


@pytest.fixture
def executor() -> Iterator[ExecutorProcess]:
    """An executor that has said hello."""
    executor = start()
    assert next_messages(executor) == [messages.Hello(pid=executor.pid)]
    yield executor
    executor.close()


def start(command: list[str] = fake_executor.COMMAND) -> ExecutorProcess:
    return ExecutorProcess.start(Children(), command, env=environment(), mark=uuid4().hex)


def completed(result: str, attempt: int = 1) -> messages.Completed:
    return messages.Completed(attempt=attempt, result=result, committed=False)


def test_an_executor_answers_through_its_channel(executor: ExecutorProcess) -> None:
    assert executor.send(run("echo", "one"))
    assert next_messages(executor) == [completed("one")]


def test_several_runs_queued_together_are_answered_in_order(executor: ExecutorProcess) -> None:
    for number in range(1, 4):
        executor.queue(run("echo", str(number), attempt=number))
    assert executor.unsent > 0
    assert executor.flush()

    answers: list[messages.Message] = []
    while len(answers) < 3:
        answers += next_messages(executor)

    assert answers == [completed(str(number), number) for number in range(1, 4)]


def test_the_command_of_an_executor_names_the_modules_of_the_jobs() -> None:
    assert executor_command(["flights.jobs", "bills"]) == [
        *(sys.executable, "-m", "rowlock.runtime.executor"),
        *("--import", "flights.jobs", "--import", "bills"),
    ]


def test_an_executor_has_only_its_own_end_of_the_channel_open() -> None:
    # Otherwise a neighbour would keep the channel of a dead executor open.
    code = "import os, sys; sys.exit(len(os.listdir('/proc/self/fd')) - 1)"
    first = start()
    second = start([sys.executable, "-I", "-S", "-c", code])
    try:
        wait_until(lambda: second.poll() is not None)
        assert second.poll() == 4  # three standard ones and the channel
    finally:
        first.close()
        second.close()


def test_an_executor_that_is_told_to_exit_ends_with_status_0(executor: ExecutorProcess) -> None:
    executor.send(messages.Exit())

    with pytest.raises(EOFError):
        next_messages(executor)
    wait_until(lambda: executor.poll() is not None)

    assert executor.poll() == 0
    assert executor.is_reaped


@pytest.mark.parametrize(
    "job, argument, status, words",
    [
        ("exit", "3", 3, "exit status 3"),
        ("segfault", "", -signal.SIGSEGV, "killed by SIGSEGV"),
    ],
)
def test_the_status_says_how_an_executor_died(
    executor: ExecutorProcess, job: str, argument: str, status: int, words: str
) -> None:
    assert executor.poll() is None

    executor.send(run(job, argument))
    wait_until(lambda: executor.poll() is not None)

    assert executor.poll() == status
    assert describe_exit(status) == words


def test_a_signal_without_a_name_is_described_by_its_number() -> None:
    assert describe_exit(-63) == "killed by signal 63"


def test_the_end_is_seen_although_a_forked_process_keeps_the_channel_open(
    executor: ExecutorProcess,
) -> None:
    executor.send(run("fork"))
    (answer,) = next_messages(executor)
    assert isinstance(answer, messages.Completed)
    forked = identity(int(str(answer.result)))
    assert executor.exit_fd is not None
    assert select.select([executor.exit_fd], [], [], 0)[0] == []

    executor.send(run("exit", "1"))
    readable, _, _ = select.select([executor.exit_fd], [], [], 10)

    assert readable == [executor.exit_fd]
    assert executor.poll() == 1
    wait_until(lambda: not is_alive(forked))


def test_what_an_executor_leaves_behind_is_killed_before_its_status_is_told(
    executor: ExecutorProcess,
) -> None:
    executor.send(run("family"))
    (answer,) = next_messages(executor)
    assert isinstance(answer, messages.Completed)
    family = [identity(pid) for pid in json.loads(str(answer.result)).values()]
    # Cut off from its leader, and without the mark, this one cannot be told from a stranger's.
    unknown = family.pop(2)

    executor.send(run("exit", "1"))
    wait_until(lambda: executor.poll() is not None)

    wait_until(lambda: not any(map(is_alive, family)))
    send(unknown, signal.SIGKILL)


def test_killing_reaches_the_whole_tree(executor: ExecutorProcess) -> None:
    executor.send(run("family"))
    (answer,) = next_messages(executor)
    assert isinstance(answer, messages.Completed)
    family = [identity(pid) for pid in json.loads(str(answer.result)).values()]

    executor.kill()
    wait_until(lambda: executor.poll() is not None)

    assert executor.poll() == -signal.SIGKILL
    wait_until(lambda: not any(map(is_alive, family)))


def test_an_executor_is_frozen_and_continues(executor: ExecutorProcess) -> None:
    process = identity(executor.pid)

    assert executor.freeze()
    assert state(process) == "T"
    executor.send(run("echo", "later"))
    executor.thaw()

    assert next_messages(executor) == [completed("later")]


def test_nothing_is_signalled_after_the_status_was_collected(
    executor: ExecutorProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor.send(messages.Exit())
    wait_until(lambda: executor.poll() is not None)
    signalled: list[object] = []

    def record(*arguments: object) -> None:
        signalled.append(arguments)

    monkeypatch.setattr(processes, "_signal", record)
    monkeypatch.setattr(processes, "memory_bytes", record)
    monkeypatch.setattr(os, "killpg", record)
    monkeypatch.setattr(os, "kill", record)

    executor.kill()
    executor.thaw()
    assert executor.freeze()
    assert executor.poll() == 0
    assert executor.memory_bytes() is None
    executor.close()
    executor.close()

    assert signalled == []


def test_an_unfinished_executor_is_killed_when_it_is_closed() -> None:
    executor = start()
    process = identity(executor.pid)
    before = open_descriptors()

    executor.close()

    assert state(process) == ""
    assert open_descriptors() == before - 2  # channel and pidfd


def test_a_command_that_cannot_be_started_leaves_nothing_open() -> None:
    before = open_descriptors()
    with pytest.raises(FileNotFoundError):
        start(["/no/such/program"])
    assert open_descriptors() == before


def test_an_executor_is_sacrificed_before_its_supervisor(executor: ExecutorProcess) -> None:
    assert Path(f"/proc/{executor.pid}/oom_score_adj").read_text() == "500\n"


def test_its_memory_is_told_while_it_runs(executor: ExecutorProcess) -> None:
    assert 1_000_000 < (executor.memory_bytes() or 0) < 500_000_000


def test_where_exits_cannot_be_looked_at_they_are_collected_at_once(
    executor: ExecutorProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "waitid")
    executor.send(run("exit", "4"))
    wait_until(lambda: executor.poll() is not None)
    assert executor.poll() == 4
