"""What it costs to lose a node, a master, or the database for a while, at default settings.

A scenario is a generator over a fleet: up to its first `yield` it prepares, up to the second it strikes, and
then it waits and returns how long it took. So several fleets are prepared, struck and waited for together,
each over a database of its own on the one server, and twenty repetitions take a few minutes.
"""

from __future__ import annotations

import random
import signal
import statistics
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Final, Protocol, TypeAlias

from tests.benchmarks.report import DEFAULTS, fleet_on, say
from tests.support.fault_jobs import parts, step
from tests.support.fleet import Fleet, eventually
from tests.support.postgres import Cluster

TOGETHER: Final = 5
"""Fleets at a time: two nodes each."""

RECOVERY_SECONDS: Final = {"on": 3.0, "off": 12.0}
"""Until the work, or the executions, of a killed node go on: with evidence, and without."""

DRAIN_SECONDS: Final = 1.0
"""Until what a draining node hands back runs elsewhere."""

Scenario: TypeAlias = Callable[[Fleet], Generator[None, None, float]]


class Measure(Protocol):
    """A measurement that is repeated."""

    def __call__(self, cluster: Cluster, *, times: int) -> None:
        """Measure, and say it."""
        ...


def recovery(cluster: Cluster, *, times: int) -> None:
    """kill -9 of a node: until its work runs again, with evidence and without."""
    for evidence in ("on", "off"):
        found = repeat(cluster, times, moved_after(signal.SIGKILL), evidence=evidence)
        told("recovery", f"evidence {evidence}: the work of a killed node runs again", found)
        within("recovery", found, RECOVERY_SECONDS[evidence])


def drain(cluster: Cluster, *, times: int) -> None:
    """SIGTERM of a node that hands its work back: until it runs again."""
    found = repeat(cluster, times, moved_after(signal.SIGTERM))
    told("drain", "the work of a node that drains runs elsewhere", found)
    within("drain", found, DRAIN_SECONDS)


def master(cluster: Cluster, *, times: int) -> None:
    """kill -9 of a master: until another drives its execution."""
    for evidence in ("on", "off"):
        found = repeat(cluster, times, taken_over, evidence=evidence)
        told("master", f"evidence {evidence}: another master goes on, nothing ran twice", found)
        within("master", found, RECOVERY_SECONDS[evidence])


def outage(cluster: Cluster, *, times: int) -> None:
    """The database is away, shorter and longer than the lease: until everything has completed."""
    server = cluster.server
    if server is None:
        say("outage", "needs a server of its own: unset ROWLOCK_TEST_DSN")
        return

    def away(seconds: float) -> None:
        server.down()
        time.sleep(seconds)
        server.up()

    for seconds in (0.5, 30.0):
        found = repeat(cluster, times, continued, common=partial(away, seconds))
        told(
            "outage",
            f"{seconds:g} s without the database: COMPLETED, no removal, no attempt begun again,",
            found,
        )


MEASURES: Final[Mapping[str, Measure]] = {
    "recovery": recovery,
    "drain": drain,
    "master": master,
    "outage": outage,
}


# -- scenarios ---------------------------------------------------------------------------------------


def moved_after(signum: signal.Signals) -> Scenario:
    """A node gets a signal; seconds until its attempt runs on another."""

    def scenario(fleet: Fleet) -> Generator[None, None, float]:
        one = fleet.node("one")
        fleet.warm_up(one)
        fleet.request(parts=parts(1, step("wait_or_stop", fleet.path("go"))))
        first = fleet.wait_started("p0")
        fleet.warm_up(fleet.node("two"))  # the only one with a slot free
        yield
        struck = time.monotonic()
        one.kill(signum)
        yield
        second = fleet.wait_started("p0", 2)
        fleet.open("go")
        assert first.node != second.node
        one.wait_gone()
        return second.at - struck

    return scenario


def taken_over(fleet: Fleet) -> Generator[None, None, float]:
    """A launch is killed while a node works for it; seconds until the node is the master."""
    one = fleet.node("one", slots=2)
    fleet.warm_up(one)
    launch = fleet.launch("fault.summed", parts=parts(4, step("wait", fleet.path("go"))))
    for key in ("p0", "p1"):
        fleet.wait_started(key)
    one.wait_beats(2)
    yield
    struck = fleet.now()
    launch.kill()
    yield
    eventually(lambda: fleet.db_events("master_took_over"), "another node is the master")
    (event,) = fleet.db_events("master_took_over")
    fleet.open("go")
    fleet.wait(launch.execution)
    assert [len(fleet.ledger().starts(f"p{n}")) for n in range(4)] == [1] * 4, "one ran twice"
    return float((event.at - struck).total_seconds())


def continued(fleet: Fleet) -> Generator[None, None, float]:
    """Attempts run while the database is away; seconds until all is COMPLETED."""
    nodes = [fleet.node(name, slots=2) for name in ("one", "two")]
    work = fleet.request("fault.summed", parts=parts(6, step("wait", fleet.path("go"))))
    while len(fleet.ledger().of("start")) < 4:
        time.sleep(0.05)
    for node in nodes:
        node.wait_beats(2)
    yield
    struck = time.monotonic()
    yield
    fleet.open("go")
    fleet.wait(work, seconds=120)
    seconds = time.monotonic() - struck
    assert not fleet.db_events("node_removed")
    assert not fleet.db_events("node_gone")
    assert [len(node.incarnations) for node in nodes] == [1, 1]
    assert [len(fleet.ledger().starts(f"p{n}")) for n in range(6)] == [1] * 6, "one began again"
    return seconds


# -- repeating ---------------------------------------------------------------------------------------


def repeat(
    cluster: Cluster,
    times: int,
    scenario: Scenario,
    *,
    common: Callable[[], None] | None = None,
    **settings: float | str,
) -> list[float]:
    """What each of so many runs took, in seconds.

    Args:
        cluster: The server.
        times: How many runs.
        scenario: What happens in each.
        common: What happens to all fleets at once, after they were struck.
        settings: Of the nodes, where they differ from the defaults.
    """
    found: list[float] = []
    while len(found) < times:
        with ExitStack() as stack:
            runs = [
                scenario(stack.enter_context(fleet_on(cluster, **DEFAULTS, **settings)))
                for _ in range(min(TOGETHER, times - len(found)))
            ]
            for run in runs:
                next(run)
            for run in runs:
                time.sleep(random.uniform(0, 0.5))  # at any moment between two beats
                next(run)
            if common is not None:
                common()
            found += [_seconds(run) for run in runs]
    return found


def _seconds(run: Generator[None, None, float]) -> float:
    try:
        next(run)
    except StopIteration as end:
        return float(end.value)
    raise AssertionError("a scenario yields twice")


def told(name: str, what: str, seconds: list[float]) -> None:
    """One line of the report."""
    say(
        name,
        f"{what} after {statistics.median(seconds):.2f} s (median of {len(seconds)};"
        f" {min(seconds):.2f} to {max(seconds):.2f})",
    )


def within(name: str, seconds: list[float], limit: float) -> None:
    """Fail the benchmark when the median misses what is promised at default settings."""
    median = statistics.median(seconds)
    assert median < limit, f"{name}: median {median:.2f} s, promised are less than {limit:g} s"
