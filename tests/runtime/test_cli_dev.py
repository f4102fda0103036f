"""`rowlock dev`: a database and nodes in one terminal, of which nothing stays but the data."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from rowlock.cli.main import main
from rowlock.runtime.processes import Process, table
from tests.support.supervisor import is_alive
from tests.support.terminal import (
    JOBS,
    PATIENCE_SECONDS,
    Captured,
    numbers,
    one_line,
    run,
    variables,
)
from tests.support.waiting import wait_until


@pytest.fixture
def data() -> Generator[Path]:
    """A folder to be made; root's PostgreSQL runs as nobody, who must be able to reach it."""
    with tempfile.TemporaryDirectory(prefix="rowlock-dev-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder) / "data"


class Dev:
    """A `rowlock dev` that is up."""

    def __init__(self, data: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "rowlock", "dev", "--import", JOBS),
                *("--data", str(data), *options),
            ],
            env=variables(""),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.said: list[str] = []
        self.dsn = self._wait_dsn()
        self.family: list[Process] = [
            process for process in table().values() if process.parent == self.process.pid
        ]

    def _wait_dsn(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            found = re.search(r"postgresql://[^\"\s]+", line)
            if found:
                return found.group()
        raise AssertionError(self.process.communicate())

    def wait_line(self, words: str) -> str:
        """Read what it says until a line has these words."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if words in line:
                return line
        raise AssertionError(f"it ended without saying {words!r}")

    def wait_nothing_left(self) -> None:
        """Wait until no node and no database of it is there any more."""
        wait_until(
            lambda: not any(map(is_alive, self.family)) and main(["nodes", "--dsn", self.dsn]) == 5,
            seconds=PATIENCE_SECONDS,
            what="nothing is left",
            every_seconds=0.1,
        )

    def end(self) -> None:
        """End it if it is still there."""
        self.process.kill()
        self.process.communicate()


@pytest.mark.timeout(240)
def test_dev_runs_nodes_and_keeps_its_data_and_leaves_nothing_running(
    data: Path, capsys: Captured
) -> None:
    dev = Dev(data, "--nodes", "2", "--json")
    try:
        document = json.loads(dev.said[0])
        assert [one["name"] for one in document["nodes"]] == ["node-1", "node-2"]
        assert document["jobs"] == ["cli.count", "cli.items", "cli.nothing"]
        launched = run(dev.dsn, "launch", "cli.count", "--params", numbers(4), "--json")
        assert launched.code == 0, launched

        os.kill(document["nodes"][0]["pid"], signal.SIGKILL)
        assert "was ended by signal 9; its work goes to the others" in dev.wait_line("node-1 (pid")

        dev.process.send_signal(signal.SIGINT)
        dev.wait_line("draining; Ctrl-C again ends everything at once")
        dev.process.communicate(timeout=PATIENCE_SECONDS)
        assert dev.process.returncode == 0
        dev.wait_nothing_left()
    finally:
        dev.end()

    again = Dev(data, "--nodes", "1")
    try:
        assert again.dsn == dev.dsn
        assert again.said == [
            f"database  {data}\n",
            "nodes     node-1\n",
            "jobs      cli.count, cli.items, cli.nothing\n",
            "in another terminal:\n",
            f"    export ROWLOCK_DSN={dev.dsn}\n",
        ]
        capsys.readouterr()
        assert main(["executions", "--dsn", again.dsn, "--json"]) == 0
        (kept,) = json.loads(capsys.readouterr().out)["executions"]
        assert kept["execution_id"] == launched.objects[0]["execution_id"]

        again.process.kill()
        again.process.wait(PATIENCE_SECONDS)
        again.wait_nothing_left()
    finally:
        again.end()


def test_dev_without_jobs_starts_nothing(data: Path) -> None:
    said = run("", "dev", "--data", str(data))
    assert said.code == 2
    assert "there are no jobs here" in one_line(said)
    assert not data.exists()


def test_dev_refuses_wrong_settings_before_anything_starts(data: Path) -> None:
    blocked = {"ROWLOCK_LOG_FORMAT": "xml"}
    said = run("", "dev", "--import", JOBS, "--data", str(data), **blocked)
    assert said.code == 2
    assert "ROWLOCK_LOG_FORMAT" in one_line(said)
