"""Author code that holds the interpreter, hangs, or uses up its process or the processors."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

import pytest

from rowlock.runtime import processes
from tests.support.fault_jobs import part, parts, step
from tests.support.fleet import IDLE_SECONDS, PATIENCE_SECONDS, Fleet, NodeProcess, eventually

BEAT_SECONDS = 0.5
REMOVAL_SECONDS = 2.5


def test_code_that_holds_the_interpreter_delays_no_beat(fleet: Fleet) -> None:
    """Native code that keeps the interpreter's lock for longer than the removal takes, a regular
    expression that backtracks, a sum and a power in one call of C code: the node beats on, nobody finds it
    unreachable, its probes and metrics answer meanwhile, and each partition runs once. (A heartbeat from a
    thread is late by the whole call: reported as dask/distributed#6324 and #2942, pgqueuer#323.)"""
    fleet.settings |= {
        "beat_seconds": BEAT_SECONDS,
        "unreachable_seconds": 1.5,
        "removal_grace_seconds": REMOVAL_SECONDS - 1.5,
    }
    one = fleet.node("one", slots=4)
    fleet.node("watches", pool="another")
    run = fleet.request(
        parts=[
            part("native", step("hold_gil", REMOVAL_SECONDS * 1.3)),
            part("regex", step("backtrack", 25)),
            part("sum", step("count", 5 * 10**7)),
            part("power", step("power", 2_000_000)),
        ]
    )
    for key in ("native", "regex", "sum", "power"):
        fleet.wait_started(key)
    port = one.http_port

    probes: list[tuple[int, str]] = []

    def have_ended() -> bool:
        probes.extend((one.probe("/livez"), one.readiness()))
        return fleet.status(run) != "RUNNING"

    eventually(have_ended, "all come to their end")
    assert port
    assert len(probes) > 10
    assert {status for status, _ in probes} == {200}
    assert fleet.wait(run).counts["completed"] == 4
    assert {(row.claims, row.failures) for row in fleet.rows_of(run)} == {(1, 0)}
    assert not fleet.db_events("node_unreachable")
    assert len(one.incarnations) == 1
    assert beats_later_than(one, BEAT_SECONDS) == 0, (
        "none was more than two intervals after another"
    )


def beats_later_than(node: NodeProcess, seconds: float) -> float:
    """How many beats were late by more than this, one of the bounds of the histogram."""
    name = "rowlock_heartbeat_lateness_seconds"
    found = node.metrics()
    within = found[f'{name}_bucket{{le="{seconds}",pool="default"}}']
    return found[f'{name}_count{{pool="default"}}'] - within


@pytest.mark.timeout(120 + 2 * IDLE_SECONDS)
def test_busy_neighbours_on_the_machine_remove_no_node(fleet: Fleet) -> None:
    """Eight times as many busy processes as there are processors, beside nodes whose times have the default
    ratio, for longer than a removal takes (ROWLOCK_IDLE_SECONDS=60: two minutes): nobody is removed, no work is
    run again, and no beat was as late as would have ended a lease. (Reported as
    quartznet#683, jobrunr#629, mars#470.)"""
    nodes = [fleet.node(f"node{n}", slots=2) for n in range(4)]
    with busy_processes(8 * (os.cpu_count() or 1)):
        run = fleet.request(parts=parts(16, step("sleep", IDLE_SECONDS)))
        fleet.wait(run, seconds=2 * IDLE_SECONDS + PATIENCE_SECONDS)

    assert not fleet.db_events("node_removed")
    assert {row.claims for row in fleet.rows_of(run)} == {1}
    for node in nodes:
        beats = node.metrics()['rowlock_heartbeat_lateness_seconds_count{pool="default"}']
        assert beats > IDLE_SECONDS, "one a second at least, of five"
        # The lease is 1.8 s, and a beat is due after 0.2 s of it.
        assert beats_later_than(node, 1.0) == 0
        assert node.metric("rowlock_lease_ends_total") == 0


@contextmanager
def busy_processes(count: int) -> Generator[None]:
    """Processes that do nothing but take time from others."""
    made = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", "while True: pass"],
            preexec_fn=partial(processes.die_with_parent, os.getpid()),  # noqa: PLW1509  no threads
        )
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in made:
            process.kill()
            process.wait()


def test_hung_code_is_ended_by_its_time_out_wherever_it_hangs(fleet: Fleet) -> None:
    """One waits for ever in Python, one in native code that keeps the interpreter's lock: both are ended from outside,
    in time, their slots serve the next partitions, and the node is not restarted. Without a time-out the age
    of the oldest attempt is there to see. (Reported as db-scheduler#115, river#1258, rq#1516.)"""
    timeout_seconds = 1.5
    one = fleet.node("one", slots=2)
    held = fleet.request(parts=[part("held", step("wait", fleet.path("go")))])
    fleet.wait_started("held")
    eventually(lambda: one.metric("rowlock_oldest_attempt_age_seconds") > 1, "its age is told")
    fleet.open("go")
    fleet.wait(held)
    eventually(lambda: one.metric("rowlock_oldest_attempt_age_seconds") == 0, "none runs")

    run = fleet.request(
        parts=[
            part("python", step("wait", fleet.path("never")), weight=1),
            part("native", step("hold_gil", 600), weight=1),
            *parts(4),
        ],
        timeout_seconds=timeout_seconds,
        max_attempts=1,
    )

    row = fleet.wait(run, "FAILED")
    assert row.counts == {"total": 6, "completed": 4, "failed": 2, "cancelled": 0}
    for key in ("python", "native"):
        hung = fleet.partition(key)
        assert (hung.claims, hung.last_error["type"]) == (1, "TimeoutError")
        assert (hung.ended_at - hung.claimed_at).total_seconds() < timeout_seconds + 2
    assert one.outcomes("timeout") == 2
    assert len(one.incarnations) == 1


def test_a_process_that_has_used_up_its_files_runs_nothing_more(fleet: Fleet) -> None:
    """A partition leaves its process without a file descriptor. It fails, once; its next attempt and all
    partitions behind it run in another process, and nobody else pays for it. (An executor that lived on
    would fail one partition after the other: reported as spring-batch#4006.)"""
    one = fleet.node("one")
    leaks = step("leak_files", 64, attempts=[1])
    run = fleet.request(
        parts=[part("leaks", leaks, step("rows", 1), weight=1), *parts(20, step("rows", 1))]
    )

    fleet.wait(run)

    row = fleet.partition("leaks")
    assert (row.failures, row.lost) == (1, 0)
    assert len(fleet.ledger().starts("leaks")) == 2
    assert "Too many open files" in row.last_error["message"]
    others = [row for row in fleet.rows_of(run) if row.partition_key != "leaks"]
    assert {row.failures for row in others} == {0}
    assert fleet.value("SELECT count(*) FROM fleet.effects") == 21
    assert one.readiness()[0] == 200
    assert len(one.incarnations) == 1
    assert one.metric("rowlock_executor_deaths_total") == 0


def test_a_process_that_hoards_memory_is_replaced_after_its_attempt(fleet: Fleet) -> None:
    """One partition leaves its process with more memory than an executor may hold, with a stream of small ones behind
    it: all complete, and the stream goes on in another process before it is over. Nobody fails for it."""
    one = fleet.node("one", executor_memory_mb=300)
    run = fleet.request(
        parts=[*parts(50), part("hoards", step("hoard", 400)), *parts(300, prefix="q")]
    )

    fleet.wait(run)

    starts = fleet.ledger().of("start")
    (hoarder,) = fleet.ledger().starts("hoards")
    after = [start.pid for start in starts if start.at > hoarder.at]
    assert after.count(hoarder.pid) <= 30, "what it was given before its memory was looked at"
    assert {row.failures for row in fleet.rows_of(run)} == {0}
    assert_calm(one)


@pytest.mark.parametrize("limit, least, most", [(50, 2, 100), (0, 1, 1)])
def test_a_process_is_replaced_after_so_many_attempts_however_small_they_are(
    fleet: Fleet, limit: int, least: int, most: int
) -> None:
    """Small work is sent ahead, so that an executor is never without; it is replaced all the same, between two
    attempts. A limit of 0 is none."""
    one = fleet.node("one", recycle_attempts=limit)
    run = fleet.request(parts=parts(100))

    fleet.wait(run)

    served = Counter(start.pid for start in fleet.ledger().of("start"))
    assert sum(served.values()) == 100
    assert max(served.values()) <= (limit or 100)
    assert least <= len(served) <= most
    assert_calm(one)


def assert_calm(node: NodeProcess) -> None:
    """No executor died, and no attempt was ended."""
    assert node.metric("rowlock_executor_deaths_total") == 0
    assert not node.events("attempt_ended")
