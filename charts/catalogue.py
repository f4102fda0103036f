"""Every metric that nodes, exporter and operator export, as their registries say; writes docs/metrics.md.

    python -m charts.catalogue      (part of `make reference`)

The tests of dashboards and alerts take what exists from here, so that nothing can ask for a series
that no code makes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry

from rowlock.db.readings import Ending, Pool, Server
from rowlock.exporter import Exporter, Reading
from rowlock.protocol.model import ServerIdentity
from rowlock.runtime.metrics import NodeMetrics
from rowlock_operator.metrics import Metrics

PAGE: Final = Path(__file__).parents[1] / "docs" / "metrics.md"

_IDENTITY: Final = ServerIdentity(system_identifier="1", database="jobs", timeline=1)

_SUFFIXES: Final = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
    "info": ("_info",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A metric: its name without suffixes, and what is known of it."""

    name: str
    kind: str
    text: str
    labels: tuple[str, ...]
    source: str
    """Who exports it: node, exporter or operator."""

    @property
    def series(self) -> tuple[str, ...]:
        """The names by which queries know it."""
        return tuple(self.name + suffix for suffix in _SUFFIXES[self.kind])

    @property
    def documented(self) -> str:
        """The name that the page gives it."""
        return self.name if self.kind == "histogram" else self.series[0]


def families() -> list[Family]:
    """All metrics of ours; what Python tells of a process is not among them."""
    return [
        *_of("node", _a_node().registry),
        *_of("exporter", _an_exporter().registry),
        *_of("operator", _an_operator().registry),
    ]


def _of(source: str, registry: CollectorRegistry) -> Iterable[Family]:
    for metric in registry.collect():
        if metric.name.startswith("rowlock_"):
            labels = {label for sample in metric.samples for label in sample.labels} - {"le"}
            yield Family(
                name=metric.name,
                kind=metric.type,
                text=metric.documentation,
                labels=tuple(sorted(labels)),
                source=source,
            )


def _a_node() -> NodeMetrics:
    metrics = NodeMetrics("default", ["job"])
    metrics.queried("claim", 0.0)
    metrics.database.info(_IDENTITY.labels)
    return metrics


def _an_operator() -> Metrics:
    metrics = Metrics()
    metrics.database.info(_IDENTITY.labels)
    return metrics


def _an_exporter() -> Exporter:
    """One that has read something of everything."""
    exporter = Exporter("")
    exporter.read_as(
        Reading(
            pools=[
                Pool(
                    pool="default",
                    pending=1,
                    delayed=0,
                    suspended=0,
                    limited=0,
                    claimed=0,
                    oldest_pending_seconds=0,
                    paused=False,
                    requested=0,
                    planning=0,
                    running=1,
                    closing=0,
                    finishing=0,
                    unserved=0,
                    nodes_active=1,
                    nodes_unreachable=0,
                    nodes_draining=0,
                    slots=1,
                    silent_seconds=0,
                )
            ],
            endings=[Ending(pool="default", job_name="job", status="FAILED", number=1)],
            server=Server(
                schema_version=1,
                tables={"batch_partitions": (0, 0, 0)},
                xmin=None,
                xmin_age=0,
                connections=1,
                connections_max=2,
                notify_queue=0,
                identity=_IDENTITY,
            ),
            took_seconds={"pools": 0.0},
        )
    )
    return exporter


_HEAD: Final = """# Metrics

<!-- made by charts/catalogue.py: make reference -->

Nodes, the operator and `rowlock exporter` serve `/metrics` in both expositions, text and OpenMetrics. No label holds
an id: what is known of one execution is in the database (`rowlock status`, `rowlock explain`). The number of series
has a bound: a node tells 200 jobs apart, an exporter 100 pools and 200 jobs, and what is more has the label `other`.
Labels such as `namespace` and `pod` come from the scraper.

With OpenMetrics, `rowlock_partition_duration_seconds` and `rowlock_partition_outcomes_total` carry exemplars: the
`execution_id` and `partition_id` of an attempt that took its time or failed. Prometheus keeps them with
`--enable-feature=exemplar-storage`, and Grafana shows them as points that name the execution to look at; `rowlock
partitions EXECUTION` has the rest. There is nothing to switch on in rowlock.

Wanted and available replicas of a pool are not exported: they are Kubernetes' to know (`kube_deployment_status_replicas`
of kube-state-metrics, `keda_scaler_metrics_value` of KEDA), a node sees only itself. The dashboards have no panel for
them, so that every panel has data wherever rowlock runs; compare with `rowlock_nodes`, which counts the nodes that live.
Processor and memory come from the nodes themselves and need no cAdvisor.

The chart brings [dashboards](../charts/rowlock/dashboards) and [alerts](../charts/rowlock/alerts), each alert with a
[runbook](runbooks). This is what the dashboards look like while a node is lost, work fails and the database goes away
(`make pictures`): [queues](pictures/queues.svg), [nodes](pictures/nodes.svg),
[operator and database](pictures/operator.svg).
"""

_CHAPTERS: Final = {
    "node": (
        "Nodes",
        "What this node did and saw; sum over pods. Counters begin at 0 with each start of a pod.",
    ),
    "exporter": (
        "Exporter",
        (
            "What the database knows of all pools. Where several exporters run, take the maximum first:\n"
            "`sum(max by (namespace, pool, state) (rowlock_queue_partitions))`."
        ),
    ),
    "operator": (
        "Operator",
        "What one operator did; beside these it tells of its process (`process_*`, `python_info`).",
    ),
}


def rendered() -> str:
    """The page."""
    lines = [_HEAD]
    for source, (title, text) in _CHAPTERS.items():
        lines += [f"## {title}", "", text, "", "| metric | type | labels | meaning |"]
        lines += ["|---|---|---|---|"]
        lines += [
            f"| `{one.documented}` | {one.kind} | {', '.join(one.labels)} | {one.text} |"
            for one in families()
            if one.source == source
        ]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Write the page."""
    PAGE.write_text(rendered())


if __name__ == "__main__":
    main()
