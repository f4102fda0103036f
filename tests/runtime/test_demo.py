"""`rowlock demo` as a stranger runs it, and as it must end when it is disturbed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Generator
from pathlib import Path

import psycopg
import pytest

from rowlock.cli.main import main
from rowlock.db.store import Store
from rowlock.demo import check, venue
from rowlock.demo.crew import Crew, NodeDied
from tests.support.postgres import Database
from tests.support.waiting import wait_until


class Demo:
    """A run of the command. All that it starts carries a mark in its environment."""

    def __init__(self, *words: str, dsn: str = "", folder: Path | None = None) -> None:
        self.mark = f"DEMO_OF_THIS_TEST={uuid.uuid4()}"
        name, value = self.mark.split("=")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rowlock", "demo", *words],
            # A home that is not there, as in a container without one.
            env={
                **os.environ,
                **({"TMPDIR": str(folder)} if folder else {}),
                "ROWLOCK_DSN": dsn,
                "HOME": "/nonexistent",
                name: value,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self) -> tuple[str, str]:
        """What it has said, once it has ended."""
        return self.process.communicate()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def left(self) -> list[str]:
        """Command lines of the processes that it has left."""
        found: list[str] = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                    words = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                    found.append(words.decode(errors="replace"))
        return found


@contextlib.contextmanager
def a_demo(*words: str, dsn: str = "", folder: Path | None = None) -> Generator[Demo]:
    demo = Demo(*words, dsn=dsn, folder=folder)
    try:
        yield demo
    finally:
        demo.kill()


def has_schema(database: Database, name: str) -> bool:
    return bool(database.value("SELECT to_regnamespace(%s) IS NOT NULL", (name,)))


def runs_something(database: Database) -> bool:
    if not has_schema(database, "rowlock"):
        return False
    with contextlib.suppress(psycopg.errors.UndefinedTable):  # in the middle of migrating
        return bool(database.rows("SELECT FROM rowlock.partitions WHERE status = 'CLAIMED'"))
    return False


# -- the whole story -------------------------------------------------------------------------------


def test_the_fast_demo_kills_recovers_and_pays_nothing_twice() -> None:
    with a_demo("--fast", "--json") as demo:
        said, errors = demo.end()

        assert demo.process.returncode == 0, errors
        document = json.loads(said)
        assert check.is_right(document), said
        assert document["problems"] == []
        assert document["embedded"]
        settlement, payments = document["settlement"], document["payments"]
        assert settlement["kill"]["was_master"]
        assert settlement["ended"]["masters"] >= 2
        started = {held["key"] for held in settlement["kill"]["held"] if held["started"]}
        assert {one["key"] for one in settlement["recovered"]} == started
        for one in settlement["recovered"]:
            assert one["attempt"] >= 2
            assert one["seconds"] > 0.0
        assert any(one["flights_kept"] for one in settlement["recovered"])
        assert payments["kill"]["node"] != settlement["kill"]["node"]
        assert payments["ended"]["status"] == "FAILED"
        assert any(one["payment_id"] for one in payments["unknown"])
        assert demo.left() == []


# -- disturbed -------------------------------------------------------------------------------------


def test_an_interrupt_leaves_nothing_but_the_schema_rowlock(empty_database: Database) -> None:
    with a_demo(dsn=empty_database.dsn) as demo:
        wait_until(lambda: runs_something(empty_database), seconds=60)

        demo.process.send_signal(signal.SIGINT)
        said, errors = demo.end()

        assert demo.process.returncode == 130, errors
        assert "Act 1: flights.settle" in said
        assert errors == "rowlock: interrupted, ending the nodes\n"
        assert demo.left() == []
        assert not has_schema(empty_database, "demo")
        assert has_schema(empty_database, "rowlock")


def test_no_node_outlives_a_demo_that_is_killed(empty_database: Database, tmp_path: Path) -> None:
    with a_demo(dsn=empty_database.dsn, folder=tmp_path) as demo:
        wait_until(lambda: runs_something(empty_database), seconds=60)
        assert len(demo.left()) > 3

        demo.process.kill()

        wait_until(lambda: not demo.left(), what="the end of all that it had started")


def test_a_node_that_dies_by_itself_ends_the_demo_with_its_last_words(tmp_path: Path) -> None:
    with Crew(folder=tmp_path, environment={}, words=["--slots", "none"]) as crew:
        crew.start("node-1")

        died = wait_for_death(crew)

    assert "node-1 ended with exit code 2; it said: rowlock: --slots none" in str(died)


def wait_for_death(crew: Crew) -> NodeDied:
    died: list[NodeDied] = []

    def has_died() -> bool:
        try:
            crew.check()
        except NodeDied as error:
            died.append(error)
        return bool(died)

    wait_until(has_died)
    return died[0]


# -- an existing database --------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The line of a demo that is a mistake."""
    assert main(["demo", "--fast", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_schema_demo_of_somebody_else_is_refused_before_anything_is_written(
    empty_database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    with empty_database.connect() as db:
        db.execute("CREATE SCHEMA demo")
        db.execute("CREATE TABLE demo.flights AS SELECT 42 AS mine")

    line = refused(capsys, "--dsn", empty_database.dsn)

    assert "has a schema 'demo' that is not rowlock's" in line
    assert empty_database.value("SELECT mine FROM demo.flights") == 42
    assert not has_schema(empty_database, "rowlock")


def register_a_node(database: Database) -> None:
    with database.connect() as db:
        Store(db).register(
            uuid.uuid4(), name="worker", pool="default", slots=1, jobs={}, version="0"
        )


def test_a_database_where_nodes_live_is_refused(
    database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    register_a_node(database)

    line = refused(capsys, "--dsn", database.dsn)

    assert "has 1 nodes that beat within the last 30 s (worker)" in line
    assert not has_schema(database, "demo")


def test_nodes_that_are_long_silent_are_no_obstacle(database: Database) -> None:
    register_a_node(database)
    with database.connect() as db:
        db.execute("UPDATE rowlock.batch_nodes SET heartbeat_at = now() - interval '1 minute'")

    with venue.existing(database.dsn) as place:
        assert place.folder.is_dir()
        assert place.left is not None
    assert not place.folder.exists()


def test_two_demos_do_not_share_a_database(
    empty_database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    with venue.existing(empty_database.dsn):
        line = refused(capsys, "--dsn", empty_database.dsn)

    assert "another demonstration runs" in line


def test_a_login_that_may_create_nothing_is_refused(
    database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, "--dsn", database.dsn_as("rowlock_node"))

    assert "may not create a schema in database" in line


def test_a_number_of_nodes_that_makes_no_sense_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "--nodes 1 must be a whole number from 2 to 8" in refused(capsys, "--nodes", "1")


def test_a_database_that_is_not_there_is_an_outage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--dsn", "postgresql://127.0.0.1:1/x"]) == 5
    assert "database x at 127.0.0.1:1" in capsys.readouterr().err
