"""Many nodes, much work, many deaths: what they cost the database, and what they leave behind."""

import os
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.fault_jobs import parts, step
from tests.support.fleet import IDLE_SECONDS, TIMES, Fleet, Member, eventually
from tests.support.history import fill, settle
from tests.support.supervisor import send

BEATS = "rowlock_heartbeat_duration_seconds_count"
STATEMENTS = "rowlock_db_query_duration_seconds_count"
HISTORY_ROWS = int(os.environ.get("ROWLOCK_HISTORY_ROWS") or 100_000)

NODES = int(os.environ.get("ROWLOCK_IDLE_NODES") or 5)

WAITING = """
SELECT count(*) FILTER (WHERE wait_event_type = 'Lock') AS held_up, count(*) AS busy FROM pg_stat_activity
WHERE datname = current_database() AND state <> 'idle' AND application_name LIKE 'rowlock %'
"""


@pytest.mark.timeout(120 + 4 * IDLE_SECONDS)
def test_idle_nodes_cost_one_statement_a_beat_and_many_claimers_do_not_queue(fleet: Fleet) -> None:
    """Idle workers that poll in step hammer the database, and then all wait for one lock
    (graphile-worker#564, machine#613, graphile_worker_rs#338)."""
    nodes = [fleet.node(f"n{number}", slots=2, poll_seconds=10) for number in range(NODES)]
    fleet.wait(fleet.request(parts=parts(20, step("rows", 1), prefix="warm")))

    def told(what: str) -> float:
        return sum(node.metric(what) for node in nodes)

    # What the nodes count themselves: the server hears of a session that has become idle ten seconds later.
    first, spent = told(BEATS), told(STATEMENTS)
    enough = NODES * IDLE_SECONDS / TIMES["beat_seconds"]
    eventually(lambda: told(BEATS) > first + enough, "they beat", seconds=4 * IDLE_SECONDS + 40)
    beaten, spent = told(BEATS) - first, told(STATEMENTS) - spent
    assert spent < 1.2 * beaten + 20, "each beat is one"

    run = fleet.request("fault.planned", params=fleet.plan(8000))
    waiting = looks = 0

    def is_over() -> bool:
        nonlocal waiting, looks
        ((held_up, busy),) = fleet.rows(WAITING)
        waiting, looks = waiting + held_up, looks + busy
        return fleet.status(run) == "COMPLETED"

    eventually(is_over, "all of it is done")
    assert waiting <= 0.1 * looks + 1, f"{waiting} of {looks} busy sessions waited for a lock"


@pytest.mark.timeout(120 + 4 * IDLE_SECONDS)
def test_an_idle_node_asks_no_more_beside_much_finished_work(fleet: Fleet) -> None:
    """Whatever was ever done leaves nothing that somebody would look after again and again."""
    node = fleet.node("one", slots=2, beat_seconds=0.1)
    fleet.warm_up(node)

    def sent() -> tuple[float, Counter[str]]:
        """When it was asked; the beats and, by operation, the statements so far, as one answer tells them."""
        asked_at, found = time.monotonic(), node.metrics()
        return asked_at, Counter(
            {key: int(n) for key, n in found.items() if key.startswith((STATEMENTS, BEATS))}
        )

    def sent_while_idle() -> tuple[float, Counter[str]]:
        """For how many seconds, and what it has sent in them, but for one statement a beat."""
        since, before = sent()
        beats = node.metric(BEATS) + IDLE_SECONDS / 0.1
        eventually(lambda: node.metric(BEATS) >= beats, "it beats", seconds=4 * IDLE_SECONDS)
        until, after = sent()
        came = after - before
        beaten = sum(came.pop(key) for key in [*came] if key.startswith(BEATS))
        assert abs(came.pop(f'{STATEMENTS}{{operation="beat"}}') - beaten) <= 1, "each beat is one"
        return until - since, came

    without_seconds, without = sent_while_idle()
    with fleet.database.connect() as db:
        fill(db, HISTORY_ROWS, "done-", execution=None, result="1")
        settle(db)
    beside_seconds, beside = sent_while_idle()

    assert 0 < without.total() < IDLE_SECONDS / 0.1, "it is idle"
    # What comes every second or every few may come once more in one span than in another.
    more = {
        key: (number, without[key])
        for key, number in beside.items()
        if number > without[key] * beside_seconds / without_seconds + 2
    }
    assert not more


def files(member: Member) -> int:
    """How many files the supervisor holds open."""
    return len(list(Path(f"/proc/{member.pid}/fd").iterdir()))


def series(member: Member) -> set[str]:
    """Its series, but for those of statements that it had no reason for before."""
    return {name for name in member.metrics() if not name.startswith("rowlock_db_query_")}


def scrape_seconds(member: Member) -> float:
    """What a scrape takes when nothing else is in the way: the shortest of thirty."""
    taken: list[float] = []
    for _ in range(30):
        began = time.perf_counter()
        member.metrics()
        taken.append(time.perf_counter() - began)
    return min(taken)


def test_executors_that_die_leave_no_series_and_no_file(fleet: Fleet) -> None:
    """Fifty are killed. Elsewhere each dead child leaves files and gauges for ever, and scrapes get slower with
    each (client_python#275, #495, #566, #568). Here executors have no metrics: their supervisor counts."""
    node = fleet.node("one", slots=10)
    fleet.warm_up(node)
    before, open_before, took_before = series(node), files(node), scrape_seconds(node)

    for _ in range(5):
        victims = node.executors()
        assert len(victims) == 10
        for process in victims:
            send(process, 9)
        pids = {process.pid for process in victims}
        eventually(lambda: not pids & {p.pid for p in node.executors()}, "they are gone")  # noqa: B023
        fleet.warm_up(node)

    assert series(node) == before
    assert not [name for name in before if "pid" in name or "executor=" in name]
    assert files(node) <= open_before + 2
    # The executors of the last turn may still be starting: what the dead have left would stay.
    eventually(lambda: scrape_seconds(node) < 1.5 * took_before, "scrapes take no longer")
