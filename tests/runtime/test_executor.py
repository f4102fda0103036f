"""A real executor process, and what it answers for whatever author code does."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rowlock.runtime import messages
from rowlock.runtime.channel import Channel
from rowlock.runtime.executor_process import executor_command
from rowlock.runtime.messages import (
    Checkpoint,
    Completed,
    Exit,
    Failed,
    Go,
    Lost,
    Planned,
    Progress,
    Ready,
    Reply,
    Results,
    Slices,
    Stop,
)
from tests.support.executor_peer import EXECUTION, Peer, error_of
from tests.support.supervisor import environment, identity, is_alive
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def shared() -> Iterator[Peer]:
    """One executor for all tests that leave it alive."""
    made = Peer(env={"ROWLOCK_WORK_DSN": "host=/nonexistent"})
    yield made
    made.close()


@pytest.fixture
def peer(shared: Peer) -> Peer:
    assert shared.process.poll() is None, shared.text()
    return shared


@pytest.fixture
def own_peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.close()


def accept(peer: Peer, checkpoint: Checkpoint | Slices, *, ok: bool = True) -> None:
    peer.send(Reply(request=checkpoint.request, ok=ok))


# -- the ordinary way ----------------------------------------------------------------------------


def test_hello_names_the_process(peer: Peer) -> None:
    assert peer.hello.pid == peer.process.pid


def test_a_result_is_json_text_of_its_type(peer: Peer) -> None:
    answer = peer.completed(peer.a_run("return", 42))
    assert (answer.result, answer.committed) == ("42", False)


def test_several_queued_attempts_run_in_order(peer: Peer) -> None:
    runs = [peer.a_run("return", number) for number in range(50)]
    peer.send(*runs)
    answers = [peer.next(Completed) for _ in runs]
    assert [(a.attempt, a.result) for a in answers] == [
        (run.attempt, str(number)) for number, run in enumerate(runs)
    ]


def test_parameters_are_those_of_the_execution(peer: Peer) -> None:
    run = peer.a_run("multiply", 5, execution_id="other", parameters='{"factor": 7}')
    assert peer.completed(run).result == "35"
    assert peer.completed(peer.a_run("multiply", 5)).result == "15"


def test_parameters_are_decoded_once_per_execution(peer: Peer) -> None:
    first = peer.a_run("multiply", 2, execution_id="decoded once")
    second = peer.a_run("multiply", 2, execution_id="decoded once", parameters="broken")
    assert peer.completed(first).result == "6"
    assert peer.completed(second).result == "6"


def test_a_result_of_none_is_null(peer: Peer) -> None:
    assert peer.completed(peer.a_run("", job="test.nothing", slice="1")).result == "null"


# -- what cannot be decoded ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"slice": '{"how": 5, "with_": null}'},
        {"slice": '{"how": "return", "with_": 1, "more": 2}'},
        {"slice": "{"},
        {"slice": '{"how": "\\u0000", "with_": 1}'},
        {"execution_id": "bad parameters", "parameters": '{"factor": "3"}'},
        {"checkpoint": "[]"},
    ],
)
def test_what_does_not_decode_fails_its_own_attempt_only(
    peer: Peer, change: dict[str, Any]
) -> None:
    bad, good = peer.a_run("return", 1, **change), peer.a_run("return", 2)
    peer.send(bad, good)
    failed = peer.next(Failed)
    assert (failed.attempt, failed.started, failed.retry) == (bad.attempt, False, "never")
    assert error_of(failed)["type"] == "rowlock.errors.ContractError"
    assert "$" in error_of(failed)["message"]
    assert peer.next(Completed).attempt == good.attempt


def test_a_validator_that_leaves_fails_its_own_attempt_only(peer: Peer) -> None:
    failed = peer.failed(peer.a_run("leave"))
    assert (failed.started, error_of(failed)["type"]) == (False, "SystemExit")
    assert peer.completed(peer.a_run("return", 1)).result == "1"


def test_an_unknown_job_is_not_started_and_may_run_elsewhere(peer: Peer) -> None:
    failed = peer.failed(peer.a_run("return", 1, job="test.authro"))
    assert (failed.started, failed.retry) == (False, "policy")
    assert "did you mean 'test.author'" in error_of(failed)["message"]


# -- what author code raises ---------------------------------------------------------------------


@pytest.mark.parametrize("result", ["text", None, 1.5, [1]])
def test_a_wrong_result_fails_for_good_and_is_never_a_completion(peer: Peer, result: Any) -> None:
    failed = peer.failed(peer.a_run("return", result))
    assert (failed.retry, failed.started) == ("never", True)
    assert "result" in error_of(failed)["message"]


@pytest.mark.parametrize(
    "name",
    [
        "ValueError",
        "SystemExit",
        "KeyboardInterrupt",
        "GeneratorExit",
        "StopIteration",
        "Odd",
        "MemoryError",
        "UsageError",
        "LeaseLost",
        "Stopped",
    ],
)
def test_what_author_code_raises_is_retried_by_policy(peer: Peer, name: str) -> None:
    failed = peer.failed(peer.a_run("raise", name))
    assert (failed.retry, failed.started, failed.delay_seconds) == ("policy", True, None)
    assert "author_jobs.py" in error_of(failed)["traceback"]


def test_an_exception_that_cannot_be_shown_is_reported_all_the_same(peer: Peer) -> None:
    failed = peer.failed(peer.a_run("raise", "Hostile"))
    assert error_of(failed)["type"] == "tests.support.author_jobs.Hostile"


def test_endless_recursion_fails_the_attempt_only(peer: Peer) -> None:
    failed = peer.failed(peer.a_run("recurse"))
    assert error_of(failed)["type"] == "RecursionError"
    assert peer.completed(peer.a_run("return", 1)).result == "1"


def test_fail_is_never_retried(peer: Peer) -> None:
    failed = peer.failed(peer.a_run("raise", "Fail"))
    assert failed.retry == "never"
    assert error_of(failed)["message"] == "no such customer"


def test_a_broken_contract_inside_author_code_is_never_retried(peer: Peer) -> None:
    assert peer.failed(peer.a_run("raise", "ContractError")).retry == "never"


def test_retry_later_carries_its_delay(peer: Peer) -> None:
    failed = peer.failed(peer.a_run("raise", "RetryLater"))
    assert (failed.retry, failed.delay_seconds) == ("later", 2.5)


@pytest.mark.parametrize("name", ["ValueError", "RetryLater", "SystemExit"])
def test_at_most_once_work_is_never_retried(peer: Peer, name: str) -> None:
    failed = peer.failed(peer.a_run("raise", name, job="test.once"))
    assert (failed.retry, failed.delay_seconds, failed.started) == ("never", None, True)


def test_retry_later_in_at_most_once_work_explains_itself(peer: Peer) -> None:
    failed = peer.failed(peer.a_run("raise", "RetryLater", job="test.once"))
    assert error_of(failed)["type"] == "rowlock.errors.UsageError"
    assert "never started twice" in error_of(failed)["message"]


# -- the handshake of AT_MOST_ONCE ---------------------------------------------------------------


def test_author_code_begins_only_after_go(peer: Peer, tmp_path: Path) -> None:
    mark = tmp_path / "begun"
    run = peer.a_run("touch", str(mark), job="test.once")
    peer.send(run)
    assert peer.next(Ready).attempt == run.attempt
    # A word for another attempt is no word for this one.
    peer.send(Go(attempt=run.attempt - 1), Stop(attempt=run.attempt - 1))
    peer.channel._socket.settimeout(0.2)
    with pytest.raises(TimeoutError):
        peer.channel.receive()
    peer.channel._socket.settimeout(30)
    assert not mark.exists()

    peer.send(Go(attempt=run.attempt))
    assert peer.next(Completed).attempt == run.attempt
    assert mark.exists()


def test_stop_instead_of_go_gives_the_attempt_back(peer: Peer, tmp_path: Path) -> None:
    run = peer.a_run("touch", str(tmp_path / "begun"), job="test.once")
    peer.send(run)
    peer.next(Ready)
    peer.send(Stop(attempt=run.attempt))
    assert peer.next(messages.Stopped).attempt == run.attempt
    assert not (tmp_path / "begun").exists()


def test_a_slice_that_does_not_decode_asks_for_no_go(peer: Peer) -> None:
    failed = peer.a_run("return", 1, job="test.once", slice="{}")
    peer.send(failed)
    assert peer.next(Failed).started is False


@pytest.mark.parametrize("end", ["exit", "end of stream"])
def test_the_end_instead_of_go_leaves_without_running(
    own_peer: Peer, tmp_path: Path, end: str
) -> None:
    own_peer.send(own_peer.a_run("touch", str(tmp_path / "begun"), job="test.once"))
    own_peer.next(Ready)
    if end == "exit":
        own_peer.send(Exit())
    else:
        own_peer.channel.close()
    assert own_peer.process.wait(30) == 0
    assert not (tmp_path / "begun").exists()


def test_at_most_once_work_stops_only_when_it_is_asked_to(peer: Peer) -> None:
    """A drain does not ask it, since nobody could continue; a cancel does."""
    run = peer.a_run("chunks", 30, job="test.once")
    peer.send(run)
    peer.next(Ready)
    peer.send(Go(attempt=run.attempt))
    accept(peer, peer.next(Checkpoint))
    second = peer.next(Checkpoint)
    peer.send(Stop(attempt=run.attempt))
    accept(peer, second)
    assert peer.next(messages.Stopped).attempt == run.attempt


# -- stop and exit -------------------------------------------------------------------------------


def test_a_plain_return_after_should_stop_is_stopped(peer: Peer) -> None:
    run = peer.a_run("stop and return", 5)
    peer.send(run)
    peer.next(Progress)
    peer.send(Stop(attempt=run.attempt))
    assert peer.next(messages.Stopped).attempt == run.attempt


def test_stop_reaches_author_code_that_runs(peer: Peer, tmp_path: Path) -> None:
    run = peer.a_run("chunks", 1_000)
    peer.send(run)
    first = peer.next(Checkpoint)
    peer.send(Stop(attempt=run.attempt))
    accept(peer, first)
    assert peer.next(messages.Stopped).attempt == run.attempt
    assert json.loads(first.checkpoint)["after"] == 10


def test_stopped_work_continues_from_its_checkpoint(peer: Peer) -> None:
    run = peer.a_run("chunks", 25, checkpoint='{"after": 20, "items": 20, "state": null}')
    peer.send(run)
    last = peer.next(Checkpoint)
    assert json.loads(last.checkpoint) == {"after": 25, "items": 25, "state": None, "saves": 1}
    accept(peer, last)
    assert peer.next(Completed).result == "5"


def test_finished_completes_after_should_stop(peer: Peer) -> None:
    run = peer.a_run("stop and finish", 5)
    peer.send(run)
    peer.next(Progress)
    peer.send(Stop(attempt=run.attempt))
    assert peer.next(Completed).result == "5"


@pytest.mark.parametrize("name", ["ValueError", "Stopped"])
def test_an_exception_after_stop_is_told_apart_from_stopping(peer: Peer, name: str) -> None:
    run = peer.a_run("stop and raise", name)
    peer.send(run)
    peer.next(Progress)
    peer.send(Stop(attempt=run.attempt))
    if name == "Stopped":
        assert peer.next(messages.Stopped).attempt == run.attempt
    else:
        assert peer.next(Failed).retry == "policy"


def test_a_queued_attempt_is_withdrawn_at_once(peer: Peer, tmp_path: Path) -> None:
    running = peer.a_run("stop and return", 1)
    queued = [peer.a_run("touch", str(tmp_path / str(n))) for n in range(3)]
    peer.send(running)
    peer.next(Progress)
    peer.send(*queued, *(Stop(attempt=run.attempt) for run in queued[:2]))

    withdrawn = [peer.next(messages.Stopped).attempt for _ in range(2)]
    assert withdrawn == [run.attempt for run in queued[:2]]  # while the first still runs
    peer.send(Stop(attempt=running.attempt))
    assert peer.next(messages.Stopped).attempt == running.attempt
    assert peer.next(Completed).attempt == queued[2].attempt
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


def test_exit_lets_the_running_attempt_end_and_begins_no_other(
    own_peer: Peer, tmp_path: Path
) -> None:
    running = own_peer.a_run("save", "state")
    own_peer.send(running, own_peer.a_run("touch", str(tmp_path / "begun")))
    save = own_peer.next(Checkpoint)
    own_peer.send(Exit())
    accept(own_peer, save)
    assert own_peer.next(Completed).attempt == running.attempt
    assert own_peer.ended()
    assert own_peer.process.wait(30) == 0
    assert not (tmp_path / "begun").exists()


def test_exit_when_idle_ends_the_process(own_peer: Peer) -> None:
    own_peer.send(Exit())
    assert own_peer.ended()
    assert own_peer.process.wait(30) == 0


def test_a_thread_that_author_code_left_delays_the_end_by_seconds_only(own_peer: Peer) -> None:
    assert own_peer.completed(own_peer.a_run("leave a thread", 1)).result == "1"
    own_peer.send(Exit())
    assert own_peer.process.wait(30) == 0


def test_the_end_of_the_stream_ends_running_author_code(own_peer: Peer, tmp_path: Path) -> None:
    own_peer.send(own_peer.a_run("run for ever", str(tmp_path / "begun")))
    wait_until((tmp_path / "begun").exists)
    own_peer.channel.close()
    assert own_peer.process.wait(30) == 0


def test_the_death_of_the_parent_ends_the_executor() -> None:
    """Here the channel stays open: only the kernel tells."""
    ours, theirs = socket.socketpair()
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(theirs.fileno())],
        stdin=subprocess.PIPE,
        pass_fds=[theirs.fileno()],
        env=environment(),
    )
    channel = Channel(ours)
    ours.settimeout(30)
    try:
        hello = channel.receive()
        assert isinstance(hello, messages.Hello)
        executor = identity(hello.pid)
        parent.kill()
        wait_until(lambda: not is_alive(executor), what="the executor is gone")
    finally:
        parent.kill()
        parent.communicate()
        channel.close()
        theirs.close()


_PARENT = """
import os, subprocess, sys
from rowlock.runtime.executor_process import executor_command
fd = sys.argv[1]
command = executor_command(["tests.support.author_jobs"])
subprocess.Popen([*command, "--fd", fd, "--parent", str(os.getpid())], pass_fds=[int(fd)])
sys.stdin.read(1)
"""


def test_an_executor_whose_parent_is_another_one_ends_at_once() -> None:
    command = [*executor_command([]), "--fd", "0", "--parent", "1"]
    assert subprocess.run(command, env=environment(), check=False, timeout=30).returncode == 1


# -- checkpoints ---------------------------------------------------------------------------------


def test_a_refused_checkpoint_is_a_lost_claim(peer: Peer) -> None:
    run = peer.a_run("save", {"page": 1})
    peer.send(run)
    accept(peer, peer.next(Checkpoint), ok=False)
    assert peer.next(Lost).attempt == run.attempt


@pytest.mark.parametrize("stop", [False, True])
def test_a_swallowed_lease_lost_or_stopped_is_no_completion(peer: Peer, stop: bool) -> None:
    run = peer.a_run("save and swallow", 1)
    peer.send(run)
    save = peer.next(Checkpoint)
    if stop:
        peer.send(Stop(attempt=run.attempt))
    accept(peer, save, ok=stop)
    answer = peer.channel.receive()
    assert answer == (messages.Stopped if stop else Lost)(attempt=run.attempt)


def test_threads_of_an_author_may_save(peer: Peer) -> None:
    run = peer.a_run("save in threads", 8)
    peer.send(run)
    for _ in range(8):
        accept(peer, peer.next(Checkpoint))
    assert peer.next(Completed).result == "8"


def test_a_thread_that_comes_too_late_disturbs_nobody(peer: Peer, tmp_path: Path) -> None:
    late, told = tmp_path / "late", tmp_path / "told"
    first = peer.a_run("save late", [str(late), str(told)])
    assert peer.completed(first).result == "1"
    second = peer.a_run("save", 1)
    peer.send(second)
    save = peer.next(Checkpoint)
    late.touch()  # now the thread of the first attempt saves, while the second waits
    wait_until(told.exists)
    accept(peer, save)
    assert peer.next(Completed).attempt == second.attempt
    assert "after its attempt had ended" in told.read_text()


def test_an_answer_that_nobody_waits_for_is_dropped(peer: Peer) -> None:
    peer.send(Reply(request=10**9, ok=False))
    assert peer.completed(peer.a_run("return", 1)).result == "1"


# -- the process around author code --------------------------------------------------------------


def test_what_author_code_prints_goes_to_standard_error() -> None:
    peer = Peer(env={"PYTHONUNBUFFERED": ""})
    try:
        peer.send(peer.a_run("print", "hello from the author"), peer.a_run("return", 1))
        assert peer.next(Completed).result == "0"  # and standard input is empty
        assert peer.next(Completed).result == "1"
        peer.process.kill()  # which flushes nothing
        peer.process.wait()
        for text in ("hello from the author", "raw", "a child"):
            assert text in peer.text()
        assert peer.printed() == ""
    finally:
        peer.close()


def test_lines_of_the_context_s_logger_are_json_with_the_ids() -> None:
    peer = Peer(env={"ROWLOCK_LOG_FORMAT": "json"})
    try:
        run = peer.a_run("log", "look here", attempt_number=2)
        peer.completed(run)
        (line,) = [text for text in peer.text().splitlines() if "look here" in text]
        found = json.loads(line)
    finally:
        peer.close()
    expected = {
        "event": "test_line",
        "execution_id": EXECUTION,
        "job": "test.author",
        "partition_key": run.key,
        "attempt": 2,
    }
    assert {name: found[name] for name in expected} == expected


def test_sigterm_and_sigint_do_not_end_an_attempt(peer: Peer) -> None:
    assert peer.completed(peer.a_run("terminate self", 1)).result == "1"


def test_processes_that_author_code_forks_can_be_terminated(peer: Peer) -> None:
    answer = peer.completed(peer.a_run("signals of a fork"))
    assert answer.result == str(int(signal.SIGTERM))


def test_a_forked_copy_that_returns_from_author_code_answers_nothing(own_peer: Peer) -> None:
    own_peer.send(own_peer.a_run("fork and return", 5), own_peer.a_run("return", 6))
    assert [own_peer.next(Completed).result for _ in range(2)] == ["5", "6"]
    assert "forked copy" in own_peer.text()


def test_a_module_that_cannot_be_imported_is_one_clear_line() -> None:
    with pytest.raises(AssertionError, match=r"no module 'no_such_module'") as failure:
        Peer("no_such_module")
    assert "Traceback" not in str(failure.value).split("\n", 1)[1]


# -- plans ---------------------------------------------------------------------------------------


def plan(peer: Peer, factor: int, cluster: str = "[]") -> tuple[list[Slices], messages.Message]:
    """Stage everything; the batches and the last message."""
    peer.send(peer.a_plan(factor, cluster=cluster))
    batches: list[Slices] = []
    while isinstance(message := peer.channel.receive(), Slices):
        batches.append(message)
        accept(peer, message)
    assert message is not None
    return batches, message


def test_a_plan_is_streamed_in_batches(peer: Peer) -> None:
    batches, end = plan(peer, 2_500)
    assert [len(batch.keys) for batch in batches] == [1_000, 1_000, 500]
    assert isinstance(end, Planned)
    assert end.total == 2_500
    assert json.loads(batches[2].slices[-1]) == {"number": 2_500, "text": ""}
    assert batches[2].weights[-1] == 2_500
    assert all(re.fullmatch(r"sha256:[0-9a-f]{32}", key) for key in batches[0].keys)
    assert len({key for batch in batches for key in batch.keys}) == 2_500


def test_the_same_slices_have_the_same_keys_in_every_process(peer: Peer, own_peer: Peer) -> None:
    assert plan(peer, 10)[0][0].keys == plan(own_peer, 10)[0][0].keys


def test_an_empty_plan_has_no_batch(peer: Peer) -> None:
    batches, end = plan(peer, 0)
    assert batches == []
    assert isinstance(end, Planned)
    assert end.total == 0


def test_large_slices_are_bounded_by_bytes(peer: Peer) -> None:
    batches, end = plan(peer, -3)
    assert isinstance(end, Planned)
    sizes = [sum(len(text.encode()) for text in (*b.slices, *b.keys)) for b in batches]
    assert max(sizes) <= 1024 * 1024
    assert len(batches) == 4


def test_one_batch_is_unanswered_at_a_time(peer: Peer) -> None:
    peer.send(peer.a_plan(3_000))
    first = peer.next(Slices)
    peer.channel._socket.settimeout(0.3)
    with pytest.raises(TimeoutError):
        peer.channel.receive()
    peer.channel._socket.settimeout(30)
    accept(peer, first)
    for _ in range(2):
        accept(peer, peer.next(Slices))
    assert peer.next(Planned).total == 3_000


def test_partition_sees_the_cluster(peer: Peer) -> None:
    nodes = [{"name": "a", "pool": "p", "slots": 4, "load": 1, "later": "ignored"}]
    batches, _ = plan(peer, -4, cluster=json.dumps(nodes))
    assert [json.loads(text) for text in batches[0].slices] == [{"number": 4, "text": "a"}]


@pytest.mark.parametrize(
    "factor, retry, message",
    [
        (1_000_001, "policy", "no more days"),
        (1_000_002, "never", r"slice \$\.number: expected int"),
    ],
)
def test_a_plan_that_fails_names_the_item(
    peer: Peer, factor: int, retry: str, message: str
) -> None:
    batches, failed = plan(peer, factor)
    assert isinstance(failed, Failed)
    assert (failed.retry, failed.started) == (retry, True)
    assert re.search(message, error_of(failed)["message"])
    assert "item 5,000 of partition()" in error_of(failed)["message"]
    assert sum(len(batch.keys) for batch in batches) <= 4_999


@pytest.mark.parametrize("factor, returned", [(-1, "None"), (-2, "a value of type int")])
def test_a_plan_that_is_no_iterable_explains_itself(peer: Peer, factor: int, returned: str) -> None:
    _, failed = plan(peer, factor)
    assert isinstance(failed, Failed)
    message = error_of(failed)["message"]
    assert f"partition() of job 'test.planned' returned {returned}: yield the slices" in message


def test_a_plan_of_a_superseded_master_is_lost(peer: Peer) -> None:
    work = peer.a_plan(5_000)
    peer.send(work)
    accept(peer, peer.next(Slices), ok=False)
    assert peer.next(Lost).attempt == work.attempt


def test_a_plan_can_be_stopped_between_batches(peer: Peer) -> None:
    work = peer.a_plan(1_000_000)
    peer.send(work)
    batch = peer.next(Slices)
    peer.send(Stop(attempt=work.attempt))
    accept(peer, batch)
    assert peer.next(messages.Stopped).attempt == work.attempt


# -- finish() ------------------------------------------------------------------------------------


def test_finish_reads_all_results_page_by_page(peer: Peer) -> None:
    work = peer.a_finish(1)
    pages: dict[int, list[Any]] = {0: [[3, "a", "1"], [9, "b", "10"]], 9: [[12, "c", "100"]]}
    peer.send(work)
    while isinstance(message := peer.channel.receive(), Results):
        body = json.dumps(pages.get(message.after, []))
        peer.send(Reply(request=message.request, ok=True, body=body))
    assert isinstance(message, messages.Finished)
    assert (message.attempt, message.committed) == (work.attempt, False)
    assert json.loads(message.summary or "") == {"sum": 111, "total": 3}


def test_finish_of_a_superseded_master_is_lost(peer: Peer) -> None:
    work = peer.a_finish(1)
    peer.send(work)
    peer.send(Reply(request=peer.next(Results).request, ok=False))
    assert peer.next(Lost).attempt == work.attempt


def test_what_finish_raises_is_reported(peer: Peer) -> None:
    failed = peer.failed(peer.a_finish(-1))
    assert (failed.retry, failed.delay_seconds) == ("later", 5.0)


def test_a_wrong_summary_fails_for_good(peer: Peer) -> None:
    failed = peer.failed(peer.a_finish(-2))
    assert failed.retry == "never"
    assert "summary $.wrong" in error_of(failed)["message"]


def test_finish_with_broken_counts_is_not_started(peer: Peer) -> None:
    assert peer.failed(peer.a_finish(1, counts="{}")).started is False


# -- many ----------------------------------------------------------------------------------------


def test_messages_from_two_threads_do_not_mix(peer: Peer) -> None:
    """Withdrawals are answered by the reading thread while the main one answers attempts."""
    runs = [peer.a_run("return", number) for number in range(2_000)]
    late = runs[1_000:]

    def send() -> None:
        peer.send(*runs, *(Stop(attempt=run.attempt) for run in late))

    sender = threading.Thread(target=send)
    sender.start()
    answers = [peer.channel.receive() for _ in runs]
    sender.join()
    answered = [a.attempt for a in answers if isinstance(a, Completed | messages.Stopped)]
    assert sorted(answered) == [run.attempt for run in runs]
