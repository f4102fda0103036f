"""The job of the tests of pods: it writes down what it does, and waits where a test tells it to.

The tests mount this file into their pods, so it needs nothing that an image does not have. What it
says and hears goes through the tables of `SCHEMA`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, LiteralString

import psycopg
from psycopg.conninfo import make_conninfo

import rowlock
from rowlock.db.connect import parameters_of

SCHEMA: Final[LiteralString] = """
CREATE SCHEMA pods;
-- What has happened: "begin plan", "begin finish", and what committed: "3/0" (part and chunk), "finish".
CREATE TABLE pods.ledger (run text NOT NULL, what text NOT NULL, pod text NOT NULL);
-- Waits that are over.
CREATE TABLE pods.opened (run text NOT NULL, step text NOT NULL, PRIMARY KEY (run, step));
GRANT USAGE ON SCHEMA pods TO rowlock_node;
GRANT INSERT ON pods.ledger TO rowlock_node;
GRANT SELECT ON pods.opened TO rowlock_node;
"""

JOB: Final = "pods.scripted"
LOOK_SECONDS: Final = 0.3
_NOTE: Final[LiteralString] = "INSERT INTO pods.ledger (run, what, pod) VALUES (%s, %s, %s)"


@dataclass(frozen=True)
class Script:
    """Parameters: how a run goes."""

    run: str
    """Its name in the tables."""
    parts: int
    chunks: int
    """Of each part, one transaction and checkpoint each."""
    waits: list[str] = field(default_factory=list[str])
    """Where it waits for the test: plan; work (after each chunk but a part's last); finish."""


class Scripted(rowlock.Job[Script, int, int]):
    """Parts of chunks, each of which writes a line of the ledger exactly once."""

    name = JOB

    def partition(self, params: Script, _cluster: rowlock.Cluster) -> Iterator[int]:
        """The parts are numbers; half of them come before the wait."""
        _note(params.run, "begin plan")
        yield from range(params.parts // 2)
        while _is_closed(params, "plan"):
            time.sleep(LOOK_SECONDS)
        yield from range(params.parts // 2, params.parts)

    def process(self, part: int, ctx: rowlock.Context[Script]) -> int:
        """Write the chunks that are left."""
        params = ctx.params
        for (chunk,) in ctx.chunks(
            lambda last: range(0 if last is None else last + 1, params.chunks), size=1, key=int
        ):
            with ctx.transaction() as db:
                db.execute(_NOTE, (params.run, f"{part}/{chunk}", socket.gethostname()))
            while chunk < params.chunks - 1 and not ctx.should_stop and _is_closed(params, "work"):
                time.sleep(LOOK_SECONDS)
        return part

    def finish(self, params: Script, outcome: rowlock.Outcome[int]) -> int:
        """Write one more line."""
        _note(params.run, "begin finish")
        while _is_closed(params, "finish"):
            time.sleep(LOOK_SECONDS)
        with outcome.transaction() as db:
            db.execute(_NOTE, (params.run, "finish", socket.gethostname()))
        return sum(1 for _ in outcome.results())


def _note(run: str, what: str) -> None:
    with _connect() as db:
        db.execute(_NOTE, (run, what, socket.gethostname()))


def _is_closed(params: Script, step: str) -> bool:
    if step not in params.waits:
        return False
    query = "SELECT 1 FROM pods.opened WHERE run = %s AND step = %s"
    try:
        with _connect() as db:
            return db.execute(query, (params.run, step)).fetchone() is None
    except psycopg.OperationalError:
        return True  # the test has taken the database away


def _connect() -> psycopg.Connection[tuple[object, ...]]:
    # In a worker it names a file.
    given = {**parameters_of(os.environ["ROWLOCK_DSN"]), "connect_timeout": "3"}
    return psycopg.connect(make_conninfo(**given), autocommit=True)
