"""What a node tells Prometheus about itself. Names, labels and units are public API (docs/metrics.md).

No label holds an id: what is known of one execution is in the database. Series that an alert may look
at are there from the start, because a counter that appears with its first event hides that event.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Final
from uuid import UUID

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    disable_created_metrics,
)
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

import rowlock
from rowlock.runtime.usage import NodeUsage

DURATION_BUCKETS: Final = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 600, 1800, 3600)
STATEMENT_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
JOB_NAMES_MAX: Final = 200
EXEMPLAR_SECONDS_MIN: Final = 0.1
"""Quicker attempts carry no exemplar unless they fail: it costs as much as counting them."""

OUTCOMES: Final = (
    "completed",
    "failed",
    "retried",
    "timeout",
    "cancelled",
    "released",
    "fenced",
)

FAILURES: Final = frozenset({"failed", "retried", "timeout"})

LOCK_RESULTS: Final = ("acquired", "waited", "timed_out", "stopped", "lost")


class _Wait:
    """How long partitions of one job had waited; written by one thread."""

    def __init__(self) -> None:
        self.counts = [0] * (len(DURATION_BUCKETS) + 1)
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        """Add one; the database's clock may have been set back meanwhile."""
        self.counts[bisect_left(DURATION_BUCKETS, seconds)] += 1
        self.seconds += max(seconds, 0.0)


class _Waits(Collector):
    """A histogram of its own: every claim adds to it, and the library's takes five times as long."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._jobs: dict[str, _Wait] = {}

    def of(self, job: str) -> _Wait:
        """What is known of a job."""
        found = self._jobs.get(job)
        if found is None:
            found = self._jobs[job] = _Wait()
        return found

    def collect(self) -> Iterator[Metric]:
        """All of it, as buckets that hold what is less, too."""
        family = HistogramMetricFamily(
            "rowlock_partition_wait_seconds",
            "From when a partition could be claimed until this node claimed it.",
            labels=["pool", "job_name"],
        )
        bounds = [*(str(float(bound)) for bound in DURATION_BUCKETS), "+Inf"]
        for job, wait in list(self._jobs.items()):
            buckets = list(zip(bounds, accumulate(wait.counts), strict=True))
            family.add_metric([self._pool, job], buckets, wait.seconds)
        yield family


class NodeMetrics:
    """The collectors of one node, in a registry of their own."""

    def __init__(self, pool: str, jobs: Iterable[str] = ()) -> None:
        """Make every series.

        :param jobs: the jobs that this node has registered.
        """
        # A second series for each counter, that says when it began; Prometheus knows without.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no types
        self._pool = pool
        self._jobs: set[str] = set()
        self._ends: dict[tuple[str, str], tuple[Counter, Histogram]] = {}
        self._statements: dict[str, Histogram] = {}
        self.registry = registry = CollectorRegistry()
        build = Info("rowlock_build", "Version of rowlock.", registry=registry)
        build.info({"version": rowlock.__version__})
        self.database = Info(
            "rowlock_database",
            "Which database it is: the same for everybody who works together. Another timeline is that"
            " of a server that was promoted, or restored.",
            registry=registry,
        )
        self.database_up = Gauge(
            "rowlock_database_up",
            "1 while the database answers: here the beats of this node.",
            ["component"],
            registry=registry,
        ).labels("node")
        self.claims = self._counter(
            "rowlock_partition_claims", "Partitions claimed by this node.", registry
        )
        self._polls = Counter(
            "rowlock_claim_polls",
            "Claim statements by their result: claimed, empty, conflict (it waited too long for a"
            " lock) or error.",
            ["pool", "result"],
            registry=registry,
        )
        self._outcomes = Counter(
            "rowlock_partition_outcomes",
            "Attempts by how they ended: completed, failed (for good), retried (failed, and made"
            " again), timeout (killed for it), cancelled, released (handed back without a failure) or"
            " fenced (its claim was gone).",
            ["pool", "job_name", "outcome"],
            registry=registry,
        )
        self._waits = _Waits(pool)
        registry.register(self._waits)
        self._duration = Histogram(
            "rowlock_partition_duration_seconds",
            "From the start of an attempt to its end.",
            ["pool", "job_name"],
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        slots = Gauge(
            "rowlock_slots",
            "Slots of this node: used and total.",
            ["pool", "state"],
            registry=registry,
        )
        self.slots_used = slots.labels(pool, "used")
        self.slots_total = slots.labels(pool, "total")
        self.oldest_attempt_age = Gauge(
            "rowlock_oldest_attempt_age_seconds",
            "How long the attempt has been running that has run longest of this node's. 0: none runs.",
            ["pool"],
            registry=registry,
        ).labels(pool)
        self.executor_deaths = self._counter(
            "rowlock_executor_deaths",
            "Executors that ended although nobody had ended them.",
            registry,
        )
        self.fenced_writes = self._counter(
            "rowlock_fenced_writes",
            "Late writes that changed nothing because the claim was gone.",
            registry,
        )
        self.beat_duration = Histogram(
            "rowlock_heartbeat_duration_seconds",
            "From sending a beat to its answer.",
            ["pool"],
            buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2, 5),
            registry=registry,
        ).labels(pool)
        self.beat_lateness = Histogram(
            "rowlock_heartbeat_lateness_seconds",
            "How much later than it was due a beat was sent: what a busy machine, or a statement before it, cost.",
            ["pool"],
            buckets=(0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10),
            registry=registry,
        ).labels(pool)
        self.beat_failures = self._counter(
            "rowlock_heartbeat_failures", "Beats without an answer.", registry
        )
        self.clock_offset = Gauge(
            "rowlock_node_clock_offset_seconds",
            "How far this node's clock is ahead of the database's. Nothing is decided by it.",
            ["pool"],
            registry=registry,
        ).labels(pool)
        self.lease_ends = self._counter(
            "rowlock_lease_ends",
            "Times this node stopped work because its lease had ended.",
            registry,
        )
        self._removed = Counter(
            "rowlock_nodes_removed",
            "Nodes that this node removed, and why: silence.",
            ["pool", "reason"],
            registry=registry,
        )
        self._reassigned = Counter(
            "rowlock_partitions_reassigned",
            "Claims of lost nodes made claimable by this node: when their connections were gone"
            " (evidence), at the removal (silence) or by a later pass (sweep).",
            ["pool", "reason"],
            registry=registry,
        )
        self._lost = Counter(
            "rowlock_partitions_lost",
            "Claims of lost nodes that this node set to FAILED. at_most_once: whether the work was"
            " done is not known, and a person must decide.",
            ["pool", "delivery"],
            registry=registry,
        )
        self.reaper_success = Gauge(
            "rowlock_reaper_last_success_timestamp_seconds",
            "When this node last looked for lost claims successfully, in Unix time.",
            ["pool"],
            registry=registry,
        ).labels(pool)
        self.takeovers = self._counter(
            "rowlock_master_takeovers", "Executions whose lost master this node replaced.", registry
        )
        self._rejected = Counter(
            "rowlock_messages_rejected",
            "Payloads that broke their contract: slice, result or plan.",
            ["pool", "reason"],
            registry=registry,
        )
        self._locks = Counter(
            "rowlock_lock_acquisitions",
            "Named locks that attempts asked for: acquired (at once), waited (acquired after a wait),"
            " timed_out, stopped (the attempt was to stop, or ended, while it waited) or lost (so was"
            " its claim).",
            ["pool", "result"],
            registry=registry,
        )
        self._queries = Histogram(
            "rowlock_db_query_duration_seconds",
            "From sending a statement of this node to its answer or error, by operation.",
            ["operation"],
            buckets=STATEMENT_BUCKETS,
            registry=registry,
        )
        registry.register(NodeUsage(pool))
        self._begin_at_zero(jobs)

    def _begin_at_zero(self, jobs: Iterable[str]) -> None:
        for result in ("claimed", "empty", "conflict", "error"):
            self._polls.labels(self._pool, result)
        for result in LOCK_RESULTS:
            self._locks.labels(self._pool, result)
        for reason in ("slice", "result", "plan"):
            self._rejected.labels(self._pool, reason)
        for reason in ("evidence", "silence", "sweep"):
            self._reassigned.labels(self._pool, reason)
        for delivery in ("at_least_once", "at_most_once"):
            self._lost.labels(self._pool, delivery)
        self._removed.labels(self._pool, "silence")
        for job in jobs:
            self._waits.of(self._job_name(job))
            for outcome in OUTCOMES:
                self._remember_end(job, outcome)

    def _counter(self, name: str, text: str, registry: CollectorRegistry) -> Counter:
        counter: Counter = Counter(name, text, ["pool"], registry=registry).labels(self._pool)
        return counter

    def polled(self, result: str) -> None:
        """Count a claim statement."""
        self._polls.labels(self._pool, result).inc()

    def waited(self, job: str, seconds: float | None) -> None:
        """Note how long a partition had waited when it was claimed; None: nobody knows."""
        if seconds is not None:
            self._waits.of(self._job_name(job)).observe(seconds)

    def ended(
        self,
        job: str,
        outcome: str,
        seconds: float | None = None,
        *,
        execution: UUID | None = None,
        partition: int | None = None,
    ) -> None:
        """Count the end of an attempt, and how long it took if it had started.

        `execution` and `partition` become the exemplar of one that failed or took its time: a scraper
        that asks for OpenMetrics can show which one it was.
        """
        outcomes, duration = self._ends.get((job, outcome)) or self._remember_end(job, outcome)
        slow = seconds is not None and seconds >= EXEMPLAR_SECONDS_MIN
        which: dict[str, str] | None = None
        if execution is not None and (slow or outcome in FAILURES):
            which = {"execution_id": str(execution), "partition_id": str(partition)}
        outcomes.inc(1, which if outcome in FAILURES else None)
        if seconds is not None:
            duration.observe(seconds, which)

    def removed(self, reason: str) -> None:
        """Count a node that this node removed."""
        self._removed.labels(self._pool, reason).inc()

    def reassigned(self, reason: str, count: int) -> None:
        """Count claims of lost nodes that wait again."""
        self._reassigned.labels(self._pool, reason).inc(count)

    def lost(self, delivery: str, count: int) -> None:
        """Count claims of lost nodes that ended FAILED."""
        self._lost.labels(self._pool, delivery).inc(count)

    def rejected(self, reason: str) -> None:
        """Count a payload that broke its contract."""
        self._rejected.labels(self._pool, reason).inc()

    def lock_ended(self, result: str) -> None:
        """Count how the request for a named lock has ended."""
        self._locks.labels(self._pool, result).inc()

    def queried(self, operation: str, seconds: float) -> None:
        """Note how long an operation of the store took. From any thread."""
        found = self._statements.get(operation)
        if found is None:
            found = self._statements[operation] = self._queries.labels(operation)
        found.observe(seconds)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition for a scrape with this Accept header, and its content type."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type

    # Looking a label up takes longer than counting; a busy node ends thousands a second.

    def _remember_end(self, job: str, outcome: str) -> tuple[Counter, Histogram]:
        name = self._job_name(job)
        found = (
            self._outcomes.labels(self._pool, name, outcome),
            self._duration.labels(self._pool, name),
        )
        self._ends[job, outcome] = found
        return found

    def _job_name(self, job: str) -> str:
        # Bounded by the registry in practice; the cap holds whatever is registered.
        if job not in self._jobs and len(self._jobs) >= JOB_NAMES_MAX:
            return "other"
        self._jobs.add(job)
        return job
