"""What the operator counts about itself. No label names a BatchJob, an execution or a namespace."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder

from rowlock_operator import __version__


class Metrics:
    """The series of one operator, in a registry of their own."""

    def __init__(self, *, depth: Callable[[], float] = lambda: 0.0) -> None:
        """Make every series, so that each is there from the first scrape on.

        Args:
            depth: How many keys wait.
        """
        # A second series for each counter, that says when it began; Prometheus knows without.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no types
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.reconcile_seconds = Histogram(
            "rowlock_operator_reconcile_duration_seconds",
            "How long one look at a BatchJob takes, with everything that it leads to.",
            registry=self.registry,
            buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
        )
        self.reconcile_errors = Counter(
            "rowlock_operator_reconcile_errors",
            "Looks at a BatchJob that failed and come again, by what failed.",
            ["reason"],
            registry=self.registry,
        )
        self.queue_depth = Gauge(
            "rowlock_operator_queue_depth",
            "BatchJobs that wait for a look.",
            registry=self.registry,
        )
        self.queue_depth.set_function(depth)
        self.last_sync = Gauge(
            "rowlock_operator_last_sync_timestamp_seconds",
            "When the database last answered what has changed, in Unix time.",
            registry=self.registry,
        )
        self.last_event = Gauge(
            "rowlock_operator_watch_last_event_timestamp_seconds",
            "When a watch last brought an event, in Unix time.",
            registry=self.registry,
        )
        self.last_list = Gauge(
            "rowlock_operator_last_list_timestamp_seconds",
            "When all BatchJobs were last listed, in Unix time.",
            registry=self.registry,
        )
        self.status_patches = Counter(
            "rowlock_operator_status_patches",
            "Patches of a status, by the API server's answer (0: none).",
            ["code"],
            registry=self.registry,
        )
        self.jobs_created = Counter(
            "rowlock_operator_jobs_created",
            "Attempts to create the Job of a master run: created, exists (ours already) or conflict"
            " (somebody else's of that name).",
            ["result"],
            registry=self.registry,
        )
        self.swept = Counter(
            "rowlock_operator_executions_swept",
            "Executions cancelled because their BatchJob was gone.",
            registry=self.registry,
        )
        self.database_up = Gauge(
            "rowlock_database_up",
            "1 while the database answers.",
            ["component"],
            registry=self.registry,
        ).labels("operator")
        self.database = Info(
            "rowlock_database",
            "Which database it is, as nodes and exporter say of theirs.",
            registry=self.registry,
        )
        build = Info("rowlock_build", "Version of rowlock.", registry=self.registry)
        build.info({"version": __version__})
        for code in ("200", "409"):
            self.status_patches.labels(code)
        for result in ("created", "exists", "conflict"):
            self.jobs_created.labels(result)
        for reason in ("api", "database", "conflict", "internal", "timeout"):
            self.reconcile_errors.labels(reason)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The page of /metrics and its content type, in the form that the reader accepts."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type
