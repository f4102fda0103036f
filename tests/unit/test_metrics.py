"""What is exported: documented, bounded, there from the start."""

from __future__ import annotations

import re
from uuid import uuid4

from prometheus_client import generate_latest

from charts import catalogue
from rowlock.runtime.metrics import JOB_NAMES_MAX, OUTCOMES, NodeMetrics


def page(metrics: NodeMetrics, accept: str = "") -> str:
    return metrics.render(accept)[0].decode()


def test_the_document_is_what_the_registries_say() -> None:
    assert catalogue.PAGE.read_text() == catalogue.rendered(), "make reference brings it up to date"


def test_names_follow_the_conventions() -> None:
    for family in catalogue.families():
        assert re.fullmatch(r"rowlock(_[a-z]+)+", family.name)
        assert family.text.endswith(".")
        if family.kind == "histogram":
            assert family.name.endswith("_seconds")


def test_no_metric_has_two_meanings() -> None:
    seen: dict[str, tuple[str, tuple[str, ...]]] = {}
    for family in catalogue.families():
        assert seen.setdefault(family.name, (family.kind, family.labels)) == (
            family.kind,
            family.labels,
        )


def test_what_is_true_of_all_nodes_together_is_told_by_the_exporter_alone() -> None:
    """If every node told it, a sum would be multiplied by their number (pawtograder#946)."""
    told: dict[str, set[str]] = {}
    for family in catalogue.families():
        told.setdefault(family.name, set()).add(family.source)

    everybody = {"rowlock_build", "rowlock_database", "rowlock_database_up"}
    shared = {name for name, sources in told.items() if len(sources) > 1}
    assert shared <= everybody
    for name in ("rowlock_queue_partitions", "rowlock_nodes", "rowlock_executions"):
        assert told[name] == {"exporter"}


def test_what_an_alert_looks_at_is_there_before_it_happens() -> None:
    text = page(NodeMetrics("default", ["job"]))

    for outcome in OUTCOMES:
        assert f'rowlock_partition_outcomes_total{{job_name="job",outcome="{outcome}"' in text
    assert 'rowlock_partitions_lost_total{delivery="at_most_once",pool="default"} 0.0' in text
    assert 'rowlock_nodes_removed_total{pool="default",reason="silence"} 0.0' in text


def test_the_number_of_series_has_a_bound() -> None:
    metrics = NodeMetrics("default")
    for number in range(10 * JOB_NAMES_MAX):
        metrics.ended(f"job-{number}", "completed", 1.0)
        metrics.waited(f"job-{number}", 1.0)

    names = set(re.findall(r'job_name="([^"]+)"', page(metrics)))
    assert len(names) == JOB_NAMES_MAX + 1
    assert "other" in names
    more = page(metrics).count("\n")
    metrics.ended("yet another", "completed", 1.0)
    assert page(metrics).count("\n") == more


def test_a_slow_attempt_says_which_one_it_was_to_who_asks_for_openmetrics() -> None:
    metrics = NodeMetrics("default")
    execution = uuid4()
    metrics.ended("job", "completed", 0.001, execution=uuid4(), partition=1)
    metrics.ended("job", "completed", 2.0, execution=execution, partition=7)

    plain, open_ = page(metrics), page(metrics, "application/openmetrics-text; version=1.0.0")

    assert str(execution) not in plain
    (line,) = [line for line in open_.splitlines() if "execution_id" in line]
    assert f'# {{execution_id="{execution}",partition_id="7"}} 2.0' in line


def test_waits_are_counted_in_buckets_that_hold_what_is_less_too() -> None:
    metrics = NodeMetrics("default")
    for seconds in (-0.5, 0.01, 0.2, 40, 9999, None):
        metrics.waited("job", seconds)

    text = page(metrics)

    name = "rowlock_partition_wait_seconds"
    inside = 'job_name="job",le="%s",pool="default"'
    for bound, count in (("0.01", 2), ("0.1", 2), ("0.5", 3), ("60.0", 4), ("+Inf", 5)):
        assert f"{name}_bucket{{{inside % bound}}} {count}.0" in text
    assert f'{name}_count{{job_name="job",pool="default"}} 5.0' in text
    assert f'{name}_sum{{job_name="job",pool="default"}} 10039.21' in text


def test_the_autoscaler_asks_for_what_is_exported() -> None:
    chart = catalogue.PAGE.parents[1] / "charts" / "rowlock"
    known = {series for family in catalogue.families() for series in family.series}
    asked: set[str] = set()
    for file in (chart / "templates" / "autoscaling.yaml", chart / "values.yaml"):
        asked |= set(re.findall(r"\browlock_[a-z_]+(?=\{)", file.read_text()))
        asked |= set(re.findall(r"metricName: (rowlock_[a-z_]+)", file.read_text()))

    assert asked
    assert asked <= known


def test_no_second_series_says_when_a_counter_began() -> None:
    assert "_created" not in generate_latest(NodeMetrics("default", ["job"]).registry).decode()


def test_a_failure_and_a_long_attempt_name_themselves_but_no_label_does() -> None:
    metrics, execution = NodeMetrics("default"), uuid4()
    for outcome, seconds, partition in (("failed", 0.001, 7), ("completed", 1.5, 8)):
        metrics.ended("job", outcome, seconds, execution=execution, partition=partition)
    metrics.ended("job", "completed", 0.002, execution=execution, partition=9)

    lines = page(metrics, "application/openmetrics-text; version=1.0.0").splitlines()

    named = {line.partition(" # ")[0]: line.partition(" # ")[2] for line in lines if " # {" in line}
    failed = next(told for name, told in named.items() if 'outcome="failed"' in name)
    assert f'execution_id="{execution}"' in failed
    assert 'partition_id="7"' in failed
    slow = next(told for name, told in named.items() if 'le="5.0"' in name)
    assert 'partition_id="8"' in slow
    assert not any('partition_id="9"' in told for told in named.values())
    assert str(execution) not in page(metrics)
