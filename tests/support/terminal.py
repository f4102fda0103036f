"""Runs commands as people do: in this process where that is enough, else in one of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest

from rowlock.cli.main import main
from tests.support.postgres import Database
from tests.support.supervisor import environment
from tests.support.waiting import wait_until

JOBS = "tests.support.cli_jobs"
PATIENCE_SECONDS = 60.0

TIMES = {
    "ROWLOCK_BEAT_SECONDS": "0.2",
    "ROWLOCK_UNREACHABLE_SECONDS": "1",
    "ROWLOCK_REMOVAL_GRACE_SECONDS": "1",
    "ROWLOCK_LEASE_MARGIN_SECONDS": "0.2",
    "ROWLOCK_POLL_SECONDS": "1",
    "ROWLOCK_DRAIN_SECONDS": "5",
    "ROWLOCK_CANCEL_SECONDS": "1",
}

Captured = pytest.CaptureFixture[str]


@dataclass(frozen=True, slots=True)
class Said:
    """What a command printed and exited with."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The JSON document on standard output."""
        return json.loads(self.out)

    @property
    def objects(self) -> list[dict[str, Any]]:
        """The JSON objects on the lines of standard output."""
        return [json.loads(line) for line in self.out.splitlines()]


def variables(dsn: str, **more: str) -> dict[str, str]:
    """The environment of a command in a process of its own."""
    kept = {name: value for name, value in environment().items() if not name.startswith("ROWLOCK_")}
    return {**kept, **TIMES, "ROWLOCK_DSN": dsn, **more}


def start(dsn: str, *words: str, **more: str) -> subprocess.Popen[str]:
    """Start a command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "rowlock", *words],
        env=variables(dsn, **more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finished(process: subprocess.Popen[str]) -> Said:
    """Wait for the end of a command."""
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    return Said(process.returncode, out, err)


def finished_unread(process: subprocess.Popen[str]) -> Said:
    """Wait for the end of a command whose standard output was closed."""
    assert process.stderr is not None
    with process.stderr:
        err = process.stderr.read()
    return Said(process.wait(PATIENCE_SECONDS), "", err)


def run(dsn: str, *words: str, **more: str) -> Said:
    """Run a command in a process of its own: what is a master or a node needs one."""
    return finished(start(dsn, *words, **more))


@contextmanager
def node(dsn: str, name: str) -> Generator[subprocess.Popen[str]]:
    """A node that knows the jobs of these tests, and is killed at the end if it is still there."""
    process = start(dsn, "node", "--import", JOBS, "--name", name, "--slots", "2", "--json")
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@dataclass(frozen=True, slots=True)
class Terminal:
    """Runs commands in this process, over one database."""

    database: Database
    capsys: Captured

    def __call__(self, *words: str) -> Said:
        self.capsys.readouterr()
        code = main(words)
        said = self.capsys.readouterr()
        return Said(code, said.out, said.err)

    def executions(self) -> int:
        """How many executions there are."""
        return int(self.database.value("SELECT count(*) FROM rowlock.batch_job_coordination"))

    def wait_status(self, execution: UUID | str, status: str) -> None:
        """Wait until an execution is in this state."""
        wait_until(
            lambda: (
                self.database.value(
                    "SELECT status FROM rowlock.executions WHERE execution_id = %s", [execution]
                )
                == status
            ),
            seconds=PATIENCE_SECONDS,
            what=f"{execution} is {status}",
            every_seconds=0.05,
        )


def numbers(count: int, **more: object) -> str:
    """Parameters of `cli.count`."""
    return json.dumps({"count": count, **more})


def one_line(said: Said) -> str:
    """The only line on standard error, without its beginning."""
    assert said.err.startswith("rowlock: "), said
    assert said.err.count("\n") == 1, said
    return said.err.removeprefix("rowlock: ").rstrip()
