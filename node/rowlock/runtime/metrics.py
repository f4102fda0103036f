"""What a node tells Prometheus about itself. Names, labels and units are public API."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.exposition import choose_encoder

import rowlock

DURATION_BUCKETS: Final = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 600, 1800, 3600)
JOB_NAMES_MAX: Final = 200


class NodeMetrics:
    """The collectors of one node, in a registry of their own."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._jobs: set[str] = set()
        self._ends: dict[tuple[str, str], tuple[Counter, Histogram]] = {}
        self.registry = registry = CollectorRegistry()
        build = Info("rowlock_build", "Version of rowlock.", registry=registry)
        build.info({"version": rowlock.__version__})
        claims = Counter(
            "rowlock_partition_claims",
            "Partitions claimed by this node.",
            ["pool"],
            registry=registry,
        )
        self.claims = claims.labels(pool)
        self._polls = Counter(
            "rowlock_claim_polls",
            "Claim statements by their result: claimed, empty or error.",
            ["pool", "result"],
            registry=registry,
        )
        self._outcomes = Counter(
            "rowlock_partition_outcomes",
            "Attempts by how they ended: completed, failed, retried, released, cancelled, fenced.",
            ["pool", "job_name", "outcome"],
            registry=registry,
        )
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
        self.timeouts = self._counter(
            "rowlock_partition_timeouts", "Attempts killed for a time-out."
        )
        self.executor_deaths = self._counter(
            "rowlock_executor_deaths", "Executors that ended although nobody had ended them."
        )
        self.fenced_writes = self._counter(
            "rowlock_fenced_writes", "Late writes that changed nothing because the claim was gone."
        )
        self.beat_duration = Histogram(
            "rowlock_heartbeat_duration_seconds",
            "From sending a beat to its answer.",
            ["pool"],
            buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2, 5),
            registry=registry,
        ).labels(pool)
        self.beat_failures = self._counter("rowlock_heartbeat_failures", "Beats without an answer.")
        self.lease_ends = self._counter(
            "rowlock_lease_ends", "Times this node stopped work because its lease had ended."
        )
        self._removed = Counter(
            "rowlock_nodes_removed",
            "Nodes that this node removed.",
            ["pool", "reason"],
            registry=registry,
        )
        self.reassigned = self._counter(
            "rowlock_partitions_reassigned", "Claims of lost nodes made claimable by this node."
        )
        self._lost = Counter(
            "rowlock_partitions_lost",
            "Claims of lost nodes that this node set to FAILED.",
            ["pool", "delivery"],
            registry=registry,
        )
        self.reaper_success = Gauge(
            "rowlock_reaper_last_success_timestamp_seconds",
            "When this node last looked for lost claims successfully.",
            ["pool"],
            registry=registry,
        ).labels(pool)
        self.takeovers = self._counter(
            "rowlock_master_takeovers", "Executions whose lost master this node replaced."
        )
        self._rejected = Counter(
            "rowlock_messages_rejected",
            "Payloads that broke their contract.",
            ["pool", "reason"],
            registry=registry,
        )

    def _counter(self, name: str, text: str) -> Counter:
        counter: Counter = Counter(name, text, ["pool"], registry=self.registry).labels(self._pool)
        return counter

    def polled(self, result: str) -> None:
        """Count a claim statement."""
        self._polls.labels(self._pool, result).inc()

    def ended(self, job: str, outcome: str, seconds: float | None = None) -> None:
        """Count the end of an attempt, and how long it took if it had started."""
        outcomes, duration = self._ends.get((job, outcome)) or self._remember(job, outcome)
        outcomes.inc()
        if seconds is not None:
            duration.observe(seconds)

    def removed(self, reason: str) -> None:
        """Count a node that this node removed."""
        self._removed.labels(self._pool, reason).inc()

    def lost(self, delivery: str, count: int) -> None:
        """Count claims of lost nodes that ended FAILED."""
        self._lost.labels(self._pool, delivery).inc(count)

    def rejected(self, reason: str) -> None:
        """Count a payload that broke its contract."""
        self._rejected.labels(self._pool, reason).inc()

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition for a scrape with this Accept header, and its content type."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type

    def _remember(self, job: str, outcome: str) -> tuple[Counter, Histogram]:
        # Looking a label up takes longer than counting; a busy node ends thousands a second.
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
