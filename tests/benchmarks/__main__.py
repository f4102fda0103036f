"""`make bench`: what rowlock costs, beside bare psycopg with the same statements in the same run.

`python -m tests.benchmarks [--times N] [name …]` runs some of: throughput, latency, idle, plan, notify,
recovery, drain, master, outage. The last four are the losses, each repeated N times.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from rowlock.db.connect import connect
from rowlock.db.store import Store
from rowlock.protocol.model import FIRST_STEP, Completion
from rowlock.registry import Registry
from tests.benchmarks import losses
from tests.benchmarks.notify import notify
from tests.benchmarks.report import fleet_on, say
from tests.support.fleet import TERMINAL, Fleet, eventually
from tests.support.postgres import Cluster

JOBS: Final = "tests.benchmarks.jobs"
PARTITIONS: Final = 20_000
BATCH: Final = 256


def main(arguments: list[str]) -> int:
    """Run the named measurements, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks")
    parser.add_argument("--times", type=int, default=5, help="repetitions of each loss")
    parser.add_argument("names", nargs="*", metavar="name")
    given = parser.parse_args(arguments)
    names: list[str] = given.names
    known: dict[str, Callable[[Cluster], None]] = {
        "throughput": throughput,
        "latency": latency,
        "idle": idle,
        "plan": plan,
        "notify": notify,
        **{name: partial(measure, times=given.times) for name, measure in losses.MEASURES.items()},
    }
    unknown = sorted(set(names) - set(known))
    if unknown:
        print(f"no such measurement: {', '.join(unknown)}; there are {', '.join(known)}")
        return 2
    cluster = Cluster.of_this_run()
    try:
        cluster.prepare()
        for name in names or list(known):
            known[name](cluster)
    finally:
        cluster.close()
    return 0


def request(fleet: Fleet, partitions: int) -> UUID:
    """Ask for an execution of no-ops."""
    found = Registry().load([JOBS]).definition("bench.noop")
    with fleet.database.connect(role="rowlock_node") as db:
        execution, outcome = Store(db).request(
            uuid.uuid4(),
            job=found.name,
            contract_hash=found.contract_hash,
            policy=found.policy,
            delivery=found.job.delivery,
            instance_key=uuid.uuid4().hex,
            parameters=f'{{"partitions": {partitions}}}',
            pool="default",
        )
    assert outcome == "requested"
    return execution


def seconds_of(fleet: Fleet, execution: UUID) -> tuple[float, float]:
    """From request to end, and from the seal to the end."""
    eventually(lambda: fleet.status(execution) in TERMINAL, "it ends", 300)
    row: Any = fleet.execution(execution)
    assert row.status == "COMPLETED", row.failure_message
    whole = (row.ended_at - row.requested_at).total_seconds()
    return whole, (row.ended_at - row.started_at).total_seconds()


def throughput(cluster: Cluster) -> None:
    """No-op partitions over two nodes, against two threads of bare psycopg."""
    with fleet_on(cluster) as fleet:
        bare = bare_rate(fleet)
        nodes = [fleet.node(f"n{i}", slots=1, jobs=JOBS) for i in range(2)]
        seconds_of(fleet, request(fleet, 100))
        before = [cpu_seconds(process.pid) for node in nodes for process in node.family()]
        _, seconds = seconds_of(fleet, request(fleet, PARTITIONS))
        after = [cpu_seconds(process.pid) for node in nodes for process in node.family()]
        rate = PARTITIONS / seconds
        cpu = (sum(after) - sum(before)) / PARTITIONS * 1e6
        say(
            "throughput",
            f"{rate:,.0f}/s over 2 nodes, bare psycopg {bare:,.0f}/s: ratio {rate / bare:.2f};"
            f" {cpu:.0f} us CPU of the nodes each",
        )


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def bare_rate(fleet: Fleet) -> float:
    """The same statements and the same batch, without nodes: two threads, two connections."""
    execution = uuid.uuid4()
    nodes = [uuid.uuid4(), uuid.uuid4()]
    with connect(fleet.database.dsn, application_name="bare") as db:
        store = Store(db)
        for node in nodes:
            store.register(
                node, name="bare", pool="bare", slots=1, jobs={"bare": ["h"]}, version="0"
            )
        policy = {"max_attempts": 3, "max_failed": None, "has_finish": False}
        store.request(
            execution,
            job="bare",
            contract_hash="h",
            policy=policy,
            delivery="AT_LEAST_ONCE",
            instance_key=str(execution),
            parameters="{}",
            pool="bare",
        )
        mastership = store.adopt(nodes[0], execution)
        assert mastership is not None
        for start in range(0, PARTITIONS, 1000):
            numbers = range(start, start + 1000)
            store.stage(
                execution,
                mastership.epoch,
                start,
                keys=[str(n) for n in numbers],
                slices=[str(n) for n in numbers],
                weights=[0] * 1000,
            )
        store.seal(execution, mastership.epoch, FIRST_STEP, PARTITIONS)
        threads = [threading.Thread(target=_drain_bare, args=(fleet, node)) for node in nodes]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - started
        for node in nodes:
            store.deregister(node, "measured")
        store.adopt(nodes[0], execution)
        fleet.rows(
            "UPDATE rowlock.batch_job_coordination SET status = 'COMPLETED', ended_at = now()"
            " WHERE execution_id = %s",
            execution,
        )
    return PARTITIONS / seconds


def _drain_bare(fleet: Fleet, node: UUID) -> None:
    with connect(fleet.database.dsn, application_name="bare") as db:
        store = Store(db)
        done: list[Completion] = []
        while True:
            _, claims = store.complete_and_claim(
                node, done, slots=1, prefetch=BATCH - 1, idle=False, seed=random.getrandbits(62)
            )
            done = [Completion(id=c.id, token=c.token, result=None) for c in claims]
            if not claims:
                return


def latency(cluster: Cluster) -> None:
    """Ten no-op partitions on two idle nodes, from request to end."""
    with fleet_on(cluster) as fleet:
        for i in range(2):
            fleet.node(f"n{i}", slots=2, jobs=JOBS)
        seconds_of(fleet, request(fleet, 10))
        times = sorted(seconds_of(fleet, request(fleet, 10))[0] for _ in range(9))
        say(
            "latency",
            f"10 partitions, 2 idle nodes: median {times[4]:.3f} s, worst {times[-1]:.3f} s",
        )


def idle(cluster: Cluster) -> None:
    """Statements of an idle node."""
    with fleet_on(cluster) as fleet:
        node = fleet.node("n", slots=2, jobs=JOBS)
        node.wait_beats(2)
        query = "SELECT sum(xact_commit) FROM pg_stat_database WHERE datname = current_database()"
        seconds = 20.0
        fleet.value("SELECT pg_stat_force_next_flush()")  # of our own waiting for the beats
        before = fleet.value(query)
        time.sleep(seconds)
        spent = int(fleet.value(query)) - int(before)
        say("idle", f"{spent / seconds:.2f} transactions/s (this measurement's own included)")


def plan(cluster: Cluster) -> None:
    """Plans of 10,000 and 100,000 partitions, from request to seal."""
    with fleet_on(cluster) as fleet:
        fleet.node("n", slots=1, jobs=JOBS)
        for partitions in (10_000, 100_000):
            execution = request(fleet, partitions)
            eventually(partial(_is_sealed, fleet, execution), "it is sealed", 120)
            row: Any = fleet.execution(execution)
            seconds = (row.started_at - row.requested_at).total_seconds()
            say("plan", f"{partitions:,} partitions sealed in {seconds:.2f} s")
            fleet.cancel(execution)


def _is_sealed(fleet: Fleet, execution: UUID) -> bool:
    return fleet.status(execution) == "RUNNING"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
