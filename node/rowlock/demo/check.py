"""Runs the fast demonstration again and again; each run must end with ledger = reference.

    python -m rowlock.demo.check --runs 20

Every run is `rowlock demo --fast --json` as anybody runs it, with real nodes and real kills, in a
new database. One server serves all of them, because starting one is not what is checked here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Final

import psycopg
from psycopg import sql

from rowlock.embedded import Server

RUN_SECONDS_MAX: Final = 120.0

Document = Mapping[str, Any]


def main(words: list[str] | None = None) -> int:
    """Run it so often, and say how each run went; 0 if all went well."""
    parser = argparse.ArgumentParser(prog="rowlock.demo.check", description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="how often (default 20)")
    runs: int = parser.parse_args(words).runs
    failed = 0
    with ExitStack() as stack:
        server = stack.enter_context(Server.start())
        print(f"PostgreSQL {server.binaries.version}, {runs} runs", flush=True)
        for number in range(1, runs + 1):
            began = time.monotonic()
            problem, text = _run(server, f"check_{number}")
            failed += problem is not None
            verdict = "ok    " if problem is None else "FAILED"
            seconds = time.monotonic() - began
            print(f"{number:3} of {runs}  {verdict}  {seconds:5.1f} s  {text}", flush=True)
            if problem:
                print(problem, flush=True)
    print(f"{runs - failed} passed, {failed} failed")
    return 1 if failed or runs < 1 else 0


def _run(server: Server, database: str) -> tuple[str | None, str]:
    """One run in a database of its own: what is wrong with it (None: nothing), and its facts."""
    server.create_database(database)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "rowlock", "demo", "--fast", "--json"],
            env={**os.environ, "ROWLOCK_DSN": server.dsn_of(database)},
            capture_output=True,
            text=True,
            check=False,
            timeout=RUN_SECONDS_MAX,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {RUN_SECONDS_MAX:g} s", "stuck"
    finally:
        _drop(server, database)
    if done.returncode != 0:
        return f"{done.stdout}\n{done.stderr}", f"exit code {done.returncode}"
    document: Document = json.loads(done.stdout)
    if not is_right(document):
        return done.stdout, "exit code 0, but the facts are wrong"
    return None, in_words(document)


def is_right(document: Document) -> bool:
    """Whether the facts of a run are as they must be, judged without the run's own verdict."""
    settlement, payments = document["settlement"], document["payments"]
    ledger, books = settlement["ledger"], payments["books"]
    return bool(
        document["ok"]
        and settlement["ended"]["completed"] == settlement["ended"]["partitions"] == 365
        and any(held["started"] for held in settlement["kill"]["held"])
        and ledger["ledger_cents"] == ledger["reference_cents"] == 71_086_819_513
        and ledger["ledger_entries"] == ledger["flights"] == 336_776
        and ledger["doubled"] == 0
        and any(held["started"] for held in payments["kill"]["held"])
        and payments["unknown"]
        and books["doubled"] == 0
        and books["paid_once"] + books["unpaid"] == books["orders"] == 32
    )


def in_words(document: Document) -> str:
    """The facts of a run that was right, in one line."""
    settlement, payments = document["settlement"], document["payments"]
    kill = settlement["kill"]
    also = f", and {', '.join(document['bystanders'])} too slow" if document["bystanders"] else ""
    return (
        f"ledger = reference; {kill['node']} killed, {len(settlement['recovered'])} recovered in "
        f"{settlement['recovery_seconds']:.1f} s; {payments['kill']['node']} killed, "
        f"{len(payments['unknown'])} of 32 payments unknown, 0 doubled{also}"
    )


def _drop(server: Server, database: str) -> None:
    with psycopg.connect(server.dsn_of("postgres"), autocommit=True) as db:
        db.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(database)))


if __name__ == "__main__":
    sys.exit(main())
