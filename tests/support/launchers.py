"""Processes that ask for one execution at the same moment, round after round.

    python -m tests.support.launchers DSN JOB POOL PROCESSES ROUNDS

They are forked from one that has imported everything, which would take each longer than all its rounds.
It prints JSON: for each round what all were answered, the id of an execution and an outcome.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from multiprocessing.connection import Connection
from uuid import uuid4

from rowlock.db.connect import connect
from rowlock.db.store import Store
from tests.support.builders import AT_LEAST_ONCE, HASH, a_policy


def share_their_key(round_: int) -> bool:
    """Whether they are one user's retries in this round, with one launch key, or strangers."""
    return round_ % 2 == 0


def main(dsn: str, job: str, pool: str, processes: int, rounds: int) -> None:
    """Run them all and print what they were answered."""
    context = multiprocessing.get_context("fork")
    start = context.Barrier(processes)

    def ask(number: int, answers: Connection) -> None:
        try:
            with connect(dsn, application_name="launcher") as connection:
                for round_ in range(rounds):
                    start.wait()
                    answers.send(request(Store(connection), number, round_))
        except BaseException:
            start.abort()  # or all others would wait for this one
            raise

    def request(store: Store, number: int, round_: int) -> tuple[str, str]:
        own = "" if share_their_key(round_) else f"/{number}"
        execution, outcome = store.request(
            uuid4(),
            job=job,
            contract_hash=HASH,
            policy=a_policy(),
            delivery=AT_LEAST_ONCE,
            instance_key=f"i{round_}",
            launch_key=f"{job}/{round_}{own}",
            parameters="{}",
            pool=pool,
            requester={"actor": f"launcher {number}"},
        )
        return str(execution), outcome

    pipes: list[Connection] = []
    for number in range(processes):
        here, there = context.Pipe(duplex=False)
        context.Process(target=ask, args=(number, there)).start()
        there.close()
        pipes.append(here)
    print(json.dumps([[pipe.recv() for pipe in pipes] for _ in range(rounds)]))  # noqa: T201  # its answer


if __name__ == "__main__":
    given_dsn, given_job, given_pool, *counts = sys.argv[1:]
    main(given_dsn, given_job, given_pool, int(counts[0]), int(counts[1]))
