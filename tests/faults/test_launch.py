"""Launches: a stranger's module, races between launchers, and launchers that come or leave."""

import json
import signal
from pathlib import Path
from uuid import UUID

from tests.support.fault_jobs import part, parts, step
from tests.support.fleet import Fleet, eventually
from tests.support.supervisor import environment
from tests.support.terminal import run

STRANGER = '''
"""Written by somebody who has read the page on authors, and nothing else."""

from collections.abc import Iterator
from datetime import date, timedelta

from pydantic import BaseModel

import rowlock


class Month(BaseModel):
    year: int
    month: int


class Day(BaseModel):
    date: date


class Settled(BaseModel):
    flights: int


class Settle(rowlock.Job[Month, Day, Settled]):
    name = "stranger.settle"
    delivery = rowlock.AT_LEAST_ONCE
    retry = rowlock.Retry(max_attempts=5, initial_seconds=2, factor=2, max_seconds=300)
    timeout_seconds = 600

    def partition(self, params: Month, cluster: rowlock.Cluster) -> Iterator[Day]:
        day = date(params.year, params.month, 1)
        while day.month == params.month:
            yield Day(date=day)
            day += timedelta(days=1)

    def process(self, day: Day, ctx: rowlock.Context[Month]) -> Settled:
        flights = 0
        for chunk in ctx.chunks(lambda after: range(after or 0, 6), size=4, key=lambda n: n + 1):
            with ctx.transaction() as db:
                for number in chunk:
                    db.execute(
                        "INSERT INTO ledger VALUES (%s, %s)", (day.date.isoformat(), number)
                    )
                    flights += 1
        return Settled(flights=flights)

    def finish(self, params: Month, outcome: rowlock.Outcome[Settled]) -> dict[str, int]:
        return {"flights": sum(settled.flights for _, settled in outcome.results())}
'''


def test_a_strangers_job_runs_on_two_nodes_and_is_launched_without_its_code(
    fleet: Fleet, tmp_path: Path
) -> None:
    """A module in a folder of its own, two nodes that import it, and a detached launch by a command
    that knows no job: the parameters are checked against the published contract."""
    (tmp_path / "strangers_module.py").write_text(STRANGER)
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    fleet.rows("CREATE TABLE ledger (day text, flight integer, PRIMARY KEY (day, flight))")
    fleet.rows("GRANT INSERT ON ledger TO PUBLIC")
    for name in ("one", "two"):
        fleet.node(name, slots=2, jobs="strangers_module", PYTHONPATH=path)
    dsn = fleet.database.dsn_as("rowlock_node")
    words = ("launch", "stranger.settle", "--detach", "--json", "--params")

    wrong = run(dsn, *words, '{"year": "2013", "month": 2}')
    assert (wrong.code, wrong.out) == (2, "")
    assert "parameters $.year: " in wrong.err
    assert not fleet.value("SELECT count(*) FROM rowlock.batch_job_coordination")
    said = run(dsn, *words, '{"year": 2013, "month": 2}')

    assert said.code == 0, said.err
    row = fleet.wait(UUID(json.loads(said.out)["execution_id"]))
    assert row.counts == {"total": 28, "completed": 28, "failed": 0, "cancelled": 0}
    assert row.summary == {"flights": 28 * 6}
    assert fleet.value("SELECT count(*) FROM ledger") == 28 * 6


def test_of_launchers_that_race_for_an_instance_one_wins(fleet: Fleet) -> None:
    """Three launches of one instance at once: one is the execution, the others exit 2 and name it."""
    fleet.node("one")
    rivals = [
        fleet.launch(
            "fault.summed",
            parts=[part("a", step("wait", fleet.path("go")))],
            name=f"rival{n}",
            arguments=("--instance", "2013-02"),
        )
        for n in range(3)
    ]

    fleet.wait_started("a")
    eventually(
        lambda: sum(rival.popen.poll() is not None for rival in rivals) == 2, "two have lost"
    )
    (winner,) = [rival for rival in rivals if rival.popen.poll() is None]
    for loser in rivals:
        if loser is not winner:
            assert loser.wait_exit() == 2
            assert str(winner.execution) in loser.log_path.read_text()
    fleet.open("go")

    assert winner.wait_exit() == 0
    assert fleet.value("SELECT count(*) FROM rowlock.batch_job_coordination") == 1
    assert len(fleet.ledger().starts("a")) == 1


def test_launchers_with_one_launch_key_stand_for_one_execution(fleet: Fleet) -> None:
    """The same request sent twice at the same moment: both wait for the same execution, and exit with
    its outcome."""
    fleet.node("one")
    script = [part("a", step("wait", fleet.path("go")), step("fail", "no"))]
    pair = [
        fleet.launch(parts=script, name=f"launch{n}", arguments=("--launch-key", "february"))
        for n in range(2)
    ]

    assert pair[0].execution == pair[1].execution
    fleet.open("go")

    assert [launch.wait_exit() for launch in pair] == [4, 4]
    assert fleet.value("SELECT count(*) FROM rowlock.batch_job_coordination") == 1
    assert len(fleet.ledger().starts("a")) == 1


def test_a_launch_that_works_itself_hands_all_back_when_it_is_told_to_leave(fleet: Fleet) -> None:
    """SIGTERM to the master, which runs a partition too: both go to another node, at once."""
    fleet.settings["unreachable_seconds"] = 3  # no machine is busy for so long
    launch = fleet.launch(
        "fault.summed",
        parts=[part("a", step("wait_or_stop", fleet.path("go"))), *parts(4)],
        slots=1,
    )
    fleet.wait_started("a")
    fleet.node("one")

    launch.kill(signal.SIGTERM)

    assert launch.wait_exit() == 130
    fleet.wait_started("a", 2)
    fleet.open("go")
    row = fleet.wait(launch.execution)
    assert row.summary == {"results": 5, "distinct": 5, "total": 5}
    assert [start.node for start in fleet.ledger().starts("a")] == ["launch", "one"]
    assert [end.node for end in fleet.ledger().ends("a")] == ["one"]
    assert not fleet.db_events("node_unreachable")
    assert fleet.partition("a").failures == 0


def test_a_node_without_a_database_tries_again_until_there_is_one(private_fleet: Fleet) -> None:
    """A node is started before its database: it says so, waits, and registers when it is there."""
    fleet = private_fleet
    fleet.database.server.down()
    node = fleet.node("early", wait=False)
    node.wait_event("database_unavailable")

    fleet.database.server.up()

    node.wait_registered()
    fleet.wait(fleet.request(parts=parts(2)))


def test_a_work_role_needs_only_the_fence(fleet: Fleet) -> None:
    """ROWLOCK_WORK_DSN with a role that may call the fence and write business rows, and nothing else
    of rowlock's: both forms of ctx.transaction(), and that of finish(), work."""
    with fleet.work_login() as work_dsn:
        node = fleet.node("one", work_dsn=work_dsn)
        run = fleet.request(
            "fault.summed",
            parts=[part("a", step("chunks", {"items": 9, "size": 4})), part("b", step("rows", 3))],
        )
        fleet.wait(run)
        assert fleet.value("SELECT count(*) FROM fleet.effects") == 9 + 3 + 1
        users = fleet.rows("SELECT FROM pg_stat_activity WHERE usename ^@ 'work_'")
        assert users, "the executors use it"
        assert node.terminate_and_wait() == 0
