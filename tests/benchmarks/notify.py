"""What announcing each commit would cost: the reason why NOTIFY comes once for a launch and never for a partition.

Fifty sessions write rows on the server itself, so that nothing of a client's speed is in the figures.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any, Final, LiteralString

import psycopg

from tests.benchmarks.report import say
from tests.support.postgres import Cluster, Database

WRITERS: Final = 50
LISTENERS: Final = 10
WINDOW: Final = "1 second"
ROUNDS: Final = 5

_SCHEMA: LiteralString = """
CREATE TABLE written (writer integer, at timestamptz);
CREATE PROCEDURE write_rows(p_writer integer, p_until timestamptz, p_notify boolean, INOUT p_commits integer)
LANGUAGE plpgsql AS $$
BEGIN
    WHILE clock_timestamp() < p_until LOOP
        INSERT INTO written VALUES (p_writer, clock_timestamp());
        IF p_notify THEN
            PERFORM pg_notify('work', '');
        END IF;
        COMMIT;
        p_commits := p_commits + 1;
    END LOOP;
END
$$;
"""


def notify(cluster: Cluster) -> None:
    """Commits of fifty writers: silent, announced, and announced to ten sessions that listen; in turns."""
    database = cluster.create(migrated=False)
    try:
        with ExitStack() as sessions:
            writers = [sessions.enter_context(database.connect()) for _ in range(WRITERS)]
            writers[0].execute(_SCHEMA)
            rates: dict[str, list[float]] = {"silent": [], "announced": [], "heard": []}
            for _ in range(ROUNDS):
                rates["silent"].append(rate(writers, announce=False))
                rates["announced"].append(rate(writers, announce=True))
                with listeners(database):
                    rates["heard"].append(rate(writers, announce=True))
            fsync = database.value("SHOW fsync")
    finally:
        cluster.drop(database.name)
    silent, announced, heard = (median(found) for found in rates.values())
    say(
        "notify",
        f"{WRITERS} writers, fsync {fsync}: {silent:,.0f} commits/s; announced each, nobody listens: ratio"
        f" {announced / silent:.2f}; {LISTENERS} listen: ratio {heard / silent:.2f}",
    )


def rate(writers: list[psycopg.Connection[Any]], *, announce: bool) -> float:
    """Commits in a second, by all of them, who end at the same moment."""
    until = writers[0].execute("SELECT clock_timestamp() + %s::interval", [WINDOW]).fetchone()
    assert until is not None

    def write(number: int) -> int:
        row = writers[number].execute(
            "CALL write_rows(%s, %s, %s, 0)", [number, until[0], announce]
        )
        ((commits,),) = row.fetchall()
        return int(commits)

    began = time.perf_counter()
    with ThreadPoolExecutor(len(writers)) as threads:
        commits = sum(threads.map(write, range(len(writers))))
    return commits / (time.perf_counter() - began)


@contextmanager
def listeners(database: Database) -> Generator[None]:
    """Sessions that hear every announcement, as nodes would."""
    over, ready = threading.Event(), threading.Barrier(LISTENERS + 1, timeout=10)

    def listen() -> None:
        with database.connect() as session:
            session.execute("LISTEN work")
            ready.wait()
            while not over.is_set():
                for _ in session.notifies(timeout=0.1):
                    if over.is_set():
                        break

    threads = [threading.Thread(target=listen) for _ in range(LISTENERS)]
    for thread in threads:
        thread.start()
    ready.wait()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
