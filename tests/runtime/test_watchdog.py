"""The watchdog freezes attempts when the lease ends, and kills them when the supervisor is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowlock.runtime import processes, watchdog
from rowlock.runtime.children import Children
from rowlock.runtime.processes import Process, Tree
from rowlock.runtime.watchdog import Entry, LeaseBoard, Watchdog, boottime_ns
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

A_TREE = Tree(leader=4_194_303, started=17_968_100, mark="")


@pytest.fixture
def board() -> Iterator[LeaseBoard]:
    board = LeaseBoard.create(slots=3)
    yield board
    board.close()


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    supervisor.close()


# -- the board ---------------------------------------------------------------------------------


def test_a_new_board_has_no_lease_and_no_executors(board: LeaseBoard) -> None:
    assert board.deadline() == 0
    assert board.slots == 3
    assert [board.entry(index) for index in range(3)] == [None] * 3
    assert board.trees() == []
    assert not any(board.frozen(index) for index in range(3))


@given(
    leader=st.integers(2, 4_194_303),
    started=st.integers(0, 2**41 - 1),
    freeze=st.booleans(),
    deadline=st.integers(0, 2**63),
)
def test_both_sides_read_what_the_supervisor_writes(
    leader: int, started: int, freeze: bool, deadline: int
) -> None:
    ours = LeaseBoard.create(slots=3)
    theirs = LeaseBoard(os.dup(ours.fd))
    try:
        tree = Tree(leader, started, ours.mark(2))
        ours.protect(2, tree, freeze=freeze)
        ours.extend(deadline)

        assert theirs.entry(2) == Entry(tree=tree, freeze=freeze)
        assert theirs.trees() == [tree]
        assert theirs.deadline() == deadline

        ours.clear(2)
        assert theirs.entry(2) is None
    finally:
        theirs.close()
        ours.close()


def test_marks_differ_between_executors_and_between_boards(board: LeaseBoard) -> None:
    other = LeaseBoard.create(slots=3)
    try:
        marks = {made.mark(index) for made in (board, other) for index in range(3)}
    finally:
        other.close()
    assert len(marks) == 6


@pytest.mark.parametrize("index", [-1, 3])
def test_an_index_outside_of_the_board_is_refused(board: LeaseBoard, index: int) -> None:
    with pytest.raises(IndexError, match=f"index {index} is not on a board of 3 executors"):
        board.protect(index, A_TREE, freeze=True)


def test_a_closed_board_leaves_nothing_open() -> None:
    before = open_descriptors()
    LeaseBoard.create(slots=1).close()
    assert open_descriptors() == before


def test_a_board_works_without_memfd_and_the_clock_without_boottime(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    board = LeaseBoard.create(slots=1)
    board.protect(0, A_TREE, freeze=True)

    assert board.trees() == [A_TREE._replace(mark=board.mark(0))]
    assert list(tmp_path.iterdir()) == []
    board.close()


def test_concurrent_writes_are_never_seen_by_halves(board: LeaseBoard) -> None:
    trees = [Tree(2, 3, board.mark(0)), Tree(4_194_303, 2**41 - 1, board.mark(0))]
    writer_code = f"""
from rowlock.runtime.processes import Tree
from rowlock.runtime.watchdog import LeaseBoard
board = LeaseBoard({board.fd})
for _ in range(100_000):
    board.protect(0, Tree(2, 3, ""), freeze=False)
    board.protect(0, Tree(4_194_303, 2**41 - 1, ""), freeze=True)
"""
    board.protect(0, trees[0], freeze=False)
    expected = {Entry(trees[0], freeze=False), Entry(trees[1], freeze=True)}
    seen: set[Entry | None] = set()
    with subprocess.Popen(
        [sys.executable, "-c", writer_code], env=environment(), pass_fds=[board.fd]
    ) as writer:
        while writer.poll() is None:
            seen |= {board.entry(0) for _ in range(1000)}

    assert writer.returncode == 0
    assert seen == expected


def test_a_new_executor_is_not_taken_for_the_frozen_one_before_it(
    board: LeaseBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[Tree] = []

    def freeze(trees: list[Tree]) -> bool:
        stopped.extend(trees)
        return True

    monkeypatch.setattr(processes, "freeze", freeze)
    old, new = A_TREE, A_TREE._replace(started=A_TREE.started + 1)

    board.protect(0, old, freeze=True)
    board.freeze_protected()
    board.freeze_protected()
    board.protect(0, new, freeze=True)
    board.freeze_protected()

    assert [tree.started for tree in stopped] == [old.started, new.started]


def test_a_tree_that_would_not_hold_still_is_frozen_again_at_the_next_look(
    board: LeaseBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([False, True])

    def freeze(trees: list[Tree]) -> bool:
        return next(answers)

    monkeypatch.setattr(processes, "freeze", freeze)
    board.protect(0, A_TREE, freeze=True)

    board.freeze_protected()
    assert board.frozen(0)
    board.freeze_protected()
    assert board.frozen(0)
    board.freeze_protected()  # would exhaust the answers

    assert next(answers, None) is None


def test_thawing_clears_the_note_before_it_lets_the_executor_continue(
    board: LeaseBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the other order a watchdog in between would leave it stopped and not noted."""
    noted: list[bool] = []

    def thaw(trees: list[Tree]) -> None:
        noted.append(board.frozen(0))

    def freeze(trees: list[Tree]) -> bool:
        noted.append(board.frozen(0))
        return True

    monkeypatch.setattr(processes, "thaw", thaw)
    monkeypatch.setattr(processes, "freeze", freeze)
    board.protect(0, A_TREE, freeze=True)
    board.freeze_protected()  # stop, then note
    board.thaw(0)  # clear, then continue

    assert noted == [False, False]
    assert not board.frozen(0)


# -- the end of the lease ----------------------------------------------------------------------


def last_effect(path: Path) -> int:
    """When author code had its last external effect, on `boottime_ns`; 0 = it had none yet."""
    return int.from_bytes(path.read_bytes(), "little") if path.exists() else 0


def ticking(supervisor: Supervisor, index: int, path: Path) -> None:
    """Have an executor begin work with an external effect every millisecond."""
    supervisor.run(index, "tick", str(path))
    wait_until(lambda: last_effect(path) > 0)


def test_a_stopped_supervisor_s_work_is_frozen_within_100_ms_of_the_deadline(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    transferable = supervisor.executor(0, freeze=True)
    once = supervisor.executor(1, freeze=False)
    everyone = [transferable, *supervisor.family(0).values()]
    neighbours = supervisor.family(1).values()
    ticking(supervisor, 0, tmp_path / "transferable")
    ticking(supervisor, 1, tmp_path / "once")

    deadline = supervisor.extend(0.3)
    supervisor.signal(signal.SIGSTOP)
    wait_until(lambda: state(supervisor.process) == "T")
    wait_until(lambda: {state(process) for process in everyone} == {"T"})

    assert deadline - 20_000_000 < last_effect(tmp_path / "transferable") < deadline + 100_000_000
    wait_until(lambda: last_effect(tmp_path / "once") > deadline + 200_000_000)
    assert state(once) in {"R", "S"}
    assert not any(state(process) == "T" for process in neighbours)


def test_work_entered_after_the_deadline_is_frozen_too(supervisor: Supervisor) -> None:
    first = supervisor.executor(0, freeze=True)
    supervisor.extend(-1)
    wait_until(lambda: supervisor.ask("frozen", 0))
    assert state(first) == "T"

    once = supervisor.executor(1, freeze=False)
    supervisor.ask("protect", 1, True)

    wait_until(lambda: state(once) == "T")
    wait_until(lambda: supervisor.ask("frozen", 1))


def test_a_later_deadline_thaws_nothing_by_itself(supervisor: Supervisor) -> None:
    executor = supervisor.executor(0, freeze=True)
    supervisor.extend(-1)
    wait_until(lambda: supervisor.ask("frozen", 0))

    supervisor.extend(60)
    looked = supervisor.ask("looked_at")
    wait_until(lambda: supervisor.ask("looked_at") > looked + 100_000_000)

    assert state(executor) == "T"
    assert supervisor.ask("frozen", 0)
    supervisor.ask("thaw", 0)
    assert state(executor) != "T"
    assert not supervisor.ask("frozen", 0)


def test_what_was_thawed_is_frozen_again_when_the_next_lease_ends(supervisor: Supervisor) -> None:
    executor = supervisor.executor(0, freeze=True)
    for _ in range(3):
        supervisor.extend(-1)
        wait_until(lambda: supervisor.ask("frozen", 0))
        assert state(executor) == "T"
        supervisor.extend(60)
        supervisor.ask("thaw", 0)
        assert state(executor) != "T"


def test_without_a_lease_nothing_is_frozen(supervisor: Supervisor) -> None:
    executor = supervisor.executor(0, freeze=True)
    looked = supervisor.ask("looked_at")
    wait_until(lambda: supervisor.ask("looked_at") > looked + 100_000_000)
    assert state(executor) != "T"


def test_an_executor_taken_off_the_board_is_left_alone(supervisor: Supervisor) -> None:
    cleared = supervisor.executor(0, freeze=True)
    other = supervisor.executor(1, freeze=True)
    supervisor.ask("clear", 0)

    supervisor.extend(-1)
    wait_until(lambda: state(other) == "T")

    assert state(cleared) != "T"


# -- the end of the supervisor -----------------------------------------------------------------


def all_ended(everyone: list[Process]) -> bool:
    return not any(map(is_alive, everyone))


@pytest.mark.parametrize("frozen", [False, True], ids=["running", "frozen"])
def test_kill_9_of_the_supervisor_ends_executors_and_all_they_started(
    supervisor: Supervisor, frozen: bool
) -> None:
    supervisor.executor(0, freeze=True)
    everyone = [*supervisor.family(0).values(), supervisor.watchdog]
    # Once its executor is dead nothing ties this one to it: not group, session, parent or mark.
    unknown = everyone.pop(2)
    if frozen:
        supervisor.extend(-1)
        wait_until(lambda: supervisor.ask("frozen", 0))

    supervisor.signal(signal.SIGKILL)

    wait_until(lambda: all_ended(everyone))
    send(unknown, signal.SIGKILL)


def test_kill_9_of_a_stopped_supervisor_ends_executors_too(supervisor: Supervisor) -> None:
    executor = supervisor.executor(0, freeze=False)
    supervisor.signal(signal.SIGSTOP)
    supervisor.signal(signal.SIGKILL)
    wait_until(lambda: all_ended([executor, supervisor.watchdog]))


def test_a_supervisor_that_ends_in_peace_takes_its_watchdog_along(supervisor: Supervisor) -> None:
    executor = supervisor.executor(0, freeze=True)
    assert supervisor.finish() == 0
    assert all_ended([executor, supervisor.watchdog])


def test_the_watchdog_outlives_the_signals_that_end_its_supervisor(supervisor: Supervisor) -> None:
    wait_until(lambda: supervisor.ask("looked_at"))
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        send(supervisor.watchdog, signum)
    looked = supervisor.ask("looked_at")
    wait_until(lambda: supervisor.ask("looked_at") > looked)
    assert is_alive(supervisor.watchdog)


def test_the_watchdog_notices_a_lost_parent_although_the_lifeline_holds(
    board: LeaseBoard,
) -> None:
    """The pipe may have been inherited by somebody; the parent's pid cannot be."""
    reading, writing = os.pipe()
    try:
        watchdog.watch(board, lifeline=reading, supervisor=os.getppid() + 1)  # returns at once
    finally:
        os.close(reading)
        os.close(writing)


def wait_for_a_look(board: LeaseBoard) -> None:
    looked = board.looked_at()
    wait_until(lambda: board.looked_at() > looked)


def test_the_loop_looks_until_its_lifeline_is_cut(board: LeaseBoard) -> None:
    reading, writing = os.pipe()
    board.extend(boottime_ns() + 3_600_000_000_000)
    thread = threading.Thread(target=watchdog.watch, args=[board, reading, os.getppid()])
    thread.start()
    for _ in range(3):
        wait_for_a_look(board)
    os.close(writing)
    thread.join()
    os.close(reading)


def test_the_watchdog_wakes_at_the_deadline_itself(
    board: LeaseBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_LOOK_NS", 3_600_000_000_000)  # not at the next look
    frozen = threading.Event()
    monkeypatch.setattr(board, "freeze_protected", frozen.set)
    reading, writing = os.pipe()
    board.extend(boottime_ns() + 50_000_000)
    thread = threading.Thread(target=watchdog.watch, args=[board, reading, os.getppid()])
    thread.start()

    woken = frozen.wait(10)
    os.close(writing)
    thread.join()
    os.close(reading)

    assert woken


# -- its process -------------------------------------------------------------------------------


def test_the_watchdog_is_small_and_starts_early(board: LeaseBoard) -> None:
    started = boottime_ns()
    dog = Watchdog.start(Children(), board)
    try:
        wait_until(board.looked_at)
        seconds = (board.looked_at() - started) / 1e9
        megabytes = (processes.memory_bytes(dog.pid) or 0) / 1e6
    finally:
        dog.close()

    assert 5 < megabytes < 15
    assert seconds < 2  # 0.02 on an idle machine


def test_the_watchdog_loads_nothing_but_the_standard_library() -> None:
    code = watchdog._BOOTSTRAP.replace("main(sys.argv[3:])", "print(*sys.modules)")
    package = Path(watchdog.__file__).parent.parent
    loaded = subprocess.check_output(
        [sys.executable, "-I", "-S", "-c", code, "rowlock-watchdog", str(package)], text=True
    ).split()

    ours = {name for name in loaded if name.startswith("rowlock")}
    assert ours == {
        *("rowlock", "rowlock.runtime", "rowlock.runtime.processes", "rowlock.runtime.watchdog")
    }
    foreign = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names
    assert foreign == {"rowlock", "__main__"}
    assert not {"subprocess", "ctypes", "dataclasses", "pathlib", "threading"} & set(loaded)


def test_a_watchdog_that_was_killed_is_noticed_and_replaced(board: LeaseBoard) -> None:
    children = Children()
    first = Watchdog.start(children, board)
    send(identity(first.pid), signal.SIGKILL)
    wait_until(lambda: first.poll() is not None)
    first.close()
    board.note_look(0)

    second = Watchdog.start(children, board)
    wait_until(board.looked_at)
    second.close()

    assert first.poll() == -signal.SIGKILL
    assert second.poll() == 0


def test_closing_a_watchdog_that_somebody_stopped_does_not_wait_for_ever(
    board: LeaseBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_CLOSE_SECONDS_MAX", 0.05)
    dog = Watchdog.start(Children(), board)
    send(identity(dog.pid), signal.SIGSTOP)

    dog.close()

    assert dog.poll() == -signal.SIGKILL
