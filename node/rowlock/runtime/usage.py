"""What a node uses of its machine: the supervisor and everything that it or author code has started.

Read from /proc when somebody scrapes, so that nobody needs a second exporter to see a node that is out
of memory or has nothing to do. Without /proc (macOS) there are no samples.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rowlock.runtime import processes


class Usage(NamedTuple):
    """Of a process and its descendants."""

    cpu_seconds: float
    """Also of those that have ended, once somebody has waited for them."""
    memory_bytes: int
    """Resident; a page that two of them share counts twice."""


def of_family(pid: int) -> Usage | None:
    """What a process and all its descendants use; None where there is no /proc."""
    seen = processes.table()
    if pid not in seen:
        return None
    children: dict[int, list[int]] = {}
    for process in seen.values():
        children.setdefault(process.parent, []).append(process.pid)
    seconds, memory, waiting = 0.0, 0, [pid]
    # Parents first: a child that ends meanwhile is missing this once, instead of counting twice.
    while waiting:
        one = waiting.pop()
        seconds += processes.cpu_seconds(one) or 0.0
        memory += processes.memory_bytes(one) or 0
        waiting += children.get(one, ())
    return Usage(seconds, memory)


class NodeUsage(Collector):
    """The two metrics of it."""

    def __init__(self, pool: str) -> None:
        self._pool: Final = pool
        self._pid: Final = os.getpid()
        self._cpu_seconds = 0.0

    def collect(self) -> Iterator[Metric]:
        """Look, and tell."""
        usage = of_family(self._pid)
        cpu = CounterMetricFamily(
            "rowlock_node_cpu_seconds",
            "Processor time of the node: the supervisor, its executors and what they started.",
            labels=["pool"],
        )
        memory = GaugeMetricFamily(
            "rowlock_node_memory_bytes",
            "Resident memory of the node: the supervisor, its executors and what they started. Pages"
            " that several of them share count for each.",
            labels=["pool"],
        )
        if usage is not None:
            # Of a process that ends while it is looked for some is missing: a counter never falls.
            self._cpu_seconds = max(self._cpu_seconds, usage.cpu_seconds)
            cpu.add_metric([self._pool], self._cpu_seconds)
            memory.add_metric([self._pool], usage.memory_bytes)
        yield cpu
        yield memory
