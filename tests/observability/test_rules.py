"""The alerts by promtool: each fires when it should, and keeps still when it should.

A series is written as promtool writes it: `5x40` is 5 for 40 minutes, `0+1x10` counts up.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.support.prometheus import ROOT, program

FILES: Final = sorted((ROOT / "charts" / "rowlock" / "alerts").glob("*.yaml"))
IN: Final = 'namespace="n",pool="p",pod="w"'


@dataclass(frozen=True, kw_only=True)
class Case:
    """What an alert does when these series are there."""

    alert: str
    why: str
    series: Mapping[str, str]
    at: str
    """When it is asked."""
    fires: Mapping[str, str] | None = None
    """With these labels; None: it does not."""


def pending(state: str = "pending") -> str:
    return f'rowlock_queue_partitions{{namespace="n",pool="p",state="{state}",pod="e"}}'


def outcomes(outcome: str) -> str:
    return f'rowlock_partition_outcomes_total{{{IN},job_name="j",outcome="{outcome}"}}'


def slots(state: str) -> str:
    return f'rowlock_slots{{{IN},state="{state}"}}'


CLAIMS: Final = f"rowlock_partition_claims_total{{{IN}}}"
POOL: Final = {"namespace": "n", "pool": "p"}
NODES: Final = 'rowlock_nodes{namespace="n",pool="p",status="%s",pod="e"}'
UP: Final = 'rowlock_database_up{namespace="n",component="%s",pod="x"}'
READING: Final = 'rowlock_exporter_reading_up{namespace="n",reading="%s",pod="%s"}'
BEATS: Final = 'rowlock_heartbeat_duration_seconds_bucket{namespace="n",pool="p",pod="w",le="%s"}'

CASES: Final = (
    Case(
        alert="QueueStalled",
        why="claims have ended, slots are free",
        series={
            pending(): "5x40",
            CLAIMS: "0+1x10 10x30",
            slots("used"): "0x40",
            slots("total"): "4x40",
        },
        at="30m",
        fires=POOL,
    ),
    Case(
        alert="QueueStalled",
        why="there is no node",
        series={pending(): "5x40"},
        at="30m",
        fires=POOL,
    ),
    Case(
        alert="QueueStalled",
        why="claims go on",
        series={pending(): "5x40", CLAIMS: "0+1x40"},
        at="30m",
    ),
    Case(
        alert="QueueStalled",
        why="every slot runs something that takes long",
        series={
            pending(): "5x40",
            CLAIMS: "10x40",
            slots("used"): "4x40",
            slots("total"): "4x40",
        },
        at="30m",
    ),
    Case(
        alert="QueueStalled",
        why="only a master without slots is there",
        series={
            pending(): "5x40",
            CLAIMS: "0x40",
            slots("used"): "0x40",
            slots("total"): "0x40",
        },
        at="30m",
        fires=POOL,
    ),
    Case(
        alert="QueueStalled",
        why="what waits is delayed",
        series={pending("delayed"): "5x40", pending(): "0x40"},
        at="30m",
    ),
    Case(
        alert="QueueOldestPendingTooOld",
        why="it has waited for an hour",
        series={
            'rowlock_queue_oldest_pending_age_seconds{namespace="n",pool="p",pod="e"}': "3600x40"
        },
        at="15m",
        fires=POOL,
    ),
    Case(
        alert="QueueOldestPendingTooOld",
        why="it has waited for a minute",
        series={
            'rowlock_queue_oldest_pending_age_seconds{namespace="n",pool="p",pod="e"}': "60x40"
        },
        at="15m",
    ),
    Case(
        alert="NoLiveNodes",
        why="work waits",
        series={NODES % "active": "0x20", pending(): "1x20"},
        at="5m",
        fires=POOL,
    ),
    Case(
        alert="NoLiveNodes",
        why="the dead hold it",
        series={NODES % "active": "0x20", pending(): "0x20", pending("claimed"): "2x20"},
        at="5m",
        fires=POOL,
    ),
    Case(
        alert="NoLiveNodes",
        why="there is nothing to do",
        series={NODES % "active": "0x20", pending(): "0x20"},
        at="5m",
    ),
    Case(
        alert="ExecutionUnserved",
        why="nobody knows its job",
        series={'rowlock_executions_unserved{namespace="n",pool="p",pod="e"}': "2x20"},
        at="15m",
        fires=POOL,
    ),
    Case(
        alert="ExecutionUnserved",
        why="a node comes in time",
        series={'rowlock_executions_unserved{namespace="n",pool="p",pod="e"}': "2x8 0x20"},
        at="15m",
    ),
    Case(
        alert="NodeUnreachable",
        why="it stays so",
        series={NODES % "unreachable": "1x20"},
        at="10m",
        fires=POOL,
    ),
    Case(
        alert="NodeUnreachable",
        why="it was removed soon",
        series={NODES % "unreachable": "1x2 0x20"},
        at="10m",
    ),
    Case(
        alert="NodeChurn",
        why="one after the other",
        series={f'rowlock_nodes_removed_total{{{IN},reason="silence"}}': "0+1x30"},
        at="25m",
        fires={"namespace": "n"},
    ),
    Case(
        alert="NodeChurn",
        why="one machine was lost",
        series={f'rowlock_nodes_removed_total{{{IN},reason="silence"}}': "0x10 1x20"},
        at="25m",
    ),
    Case(
        alert="PartitionFailureRatioHigh",
        why="a fifth of many is retried",
        series={outcomes("completed"): "0+8x60", outcomes("retried"): "0+2x60"},
        at="40m",
        fires=POOL,
    ),
    Case(
        alert="PartitionFailureRatioHigh",
        why="all of a few fail",
        series={outcomes("completed"): "0x60", outcomes("failed"): "0+1x5 5x60"},
        at="40m",
    ),
    Case(
        alert="PartitionFailureRatioHigh",
        why="what is handed back has not failed",
        series={outcomes("completed"): "0+8x60", outcomes("released"): "0+8x60"},
        at="40m",
    ),
    Case(
        alert="JobFailed",
        why="one has",
        series={
            'rowlock_executions_ended{namespace="n",pool="p",job_name="j",status="failed",pod="e"}': "1x5"
        },
        at="1m",
        fires={**POOL, "job_name": "j"},
    ),
    Case(
        alert="JobFailed",
        why="it was cancelled",
        series={
            'rowlock_executions_ended{namespace="n",pool="p",job_name="j",status="cancelled",pod="e"}': (
                "1x5"
            )
        },
        at="1m",
    ),
    Case(
        alert="NonTransferableLost",
        why="one was",
        series={f'rowlock_partitions_lost_total{{{IN},delivery="at_most_once"}}': "0x5 1x20"},
        at="10m",
        fires=POOL,
    ),
    Case(
        alert="NonTransferableLost",
        why="others were",
        series={
            f'rowlock_partitions_lost_total{{{IN},delivery="at_least_once"}}': "0x5 1x20",
            f'rowlock_partitions_lost_total{{{IN},delivery="at_most_once"}}': "0x25",
        },
        at="10m",
    ),
    Case(
        alert="DatabaseDown",
        why="the exporter cannot ask it",
        series={UP % "exporter": "1x3 0x20", UP % "node": "1x20"},
        at="10m",
        fires={"namespace": "n", "component": "exporter"},
    ),
    Case(
        alert="DatabaseDown",
        why="one node of two is cut off",
        series={
            UP % "node": "0x20",
            'rowlock_database_up{namespace="n",component="node",pod="y"}': "1x20",
        },
        at="10m",
    ),
    Case(
        alert="HeartbeatSlow",
        why="a tenth takes more than two seconds",
        series={
            BEATS % "1": "0+90x40",
            BEATS % "2": "0+90x40",
            BEATS % "5": "0+100x40",
            BEATS % "+Inf": "0+100x40",
        },
        at="30m",
        fires={"namespace": "n"},
    ),
    Case(
        alert="HeartbeatSlow",
        why="all are quick",
        series={BEATS % "1": "0+100x40", BEATS % "2": "0+100x40", BEATS % "+Inf": "0+100x40"},
        at="30m",
    ),
    Case(
        alert="ReaperNotRunning",
        why="the last pass was at the beginning",
        series={f"rowlock_reaper_last_success_timestamp_seconds{{{IN}}}": "60x20"},
        at="10m",
        fires={"namespace": "n"},
    ),
    Case(
        alert="ReaperNotRunning",
        why="one of two nodes passes",
        series={
            f"rowlock_reaper_last_success_timestamp_seconds{{{IN}}}": "0+60x20",
            'rowlock_reaper_last_success_timestamp_seconds{namespace="n",pool="p",pod="v"}': "60x20",
        },
        at="10m",
    ),
    Case(
        alert="OperatorDown",
        why="it has gone",
        series={'rowlock_operator_queue_depth{namespace="n",pod="o"}': "0x5 stale"},
        at="30m",
        fires={},
    ),
    Case(
        alert="OperatorDown",
        why="one of two is there",
        series={
            'rowlock_operator_queue_depth{namespace="n",pod="o"}': "0x5 stale",
            'rowlock_operator_queue_depth{namespace="n",pod="q"}': "0x40",
        },
        at="30m",
    ),
    Case(
        alert="OperatorSyncStale",
        why="it heard nothing",
        series={'rowlock_operator_last_sync_timestamp_seconds{namespace="n",pod="o"}': "60x40"},
        at="20m",
        fires={"namespace": "n"},
    ),
    Case(
        alert="OperatorSyncStale",
        why="it hears",
        series={'rowlock_operator_last_sync_timestamp_seconds{namespace="n",pod="o"}': "0+60x40"},
        at="20m",
    ),
    Case(
        alert="ClockSkew",
        why="it is behind",
        series={f"rowlock_node_clock_offset_seconds{{{IN}}}": "-7x40"},
        at="20m",
        fires={"namespace": "n", "pod": "w"},
    ),
    Case(
        alert="ClockSkew",
        why="it is right",
        series={f"rowlock_node_clock_offset_seconds{{{IN}}}": "0.02x40"},
        at="20m",
    ),
    Case(
        alert="XminHeld",
        why="for an hour",
        series={'rowlock_xmin_held_seconds{namespace="n",pod="e"}': "0+60x80"},
        at="60m",
        fires={"namespace": "n"},
    ),
    Case(
        alert="XminHeld",
        why="for minutes",
        series={'rowlock_xmin_held_seconds{namespace="n",pod="e"}': "0+60x10 0x60"},
        at="60m",
    ),
    Case(
        alert="SilentNodeNotRemoved",
        why="nobody is there to do it",
        series={
            'rowlock_nodes_oldest_heartbeat_age_seconds{namespace="n",pool="p",pod="e"}': "0+60x20"
        },
        at="10m",
        fires=POOL,
    ),
    Case(
        alert="SilentNodeNotRemoved",
        why="it was removed",
        series={
            'rowlock_nodes_oldest_heartbeat_age_seconds{namespace="n",pool="p",pod="e"}': "0 9 0x20"
        },
        at="10m",
    ),
    Case(
        alert="ExporterDown",
        why="there is none",
        series={UP % "node": "1x40"},
        at="15m",
        fires={"component": "exporter"},
    ),
    Case(
        alert="ExporterDown",
        why="it reads only half",
        series={
            UP % "exporter": "1x40",
            READING % ("pools", "e"): "0x40",
            READING % ("server", "e"): "1x40",
        },
        at="15m",
        fires={"namespace": "n"},
    ),
    Case(
        alert="ExporterDown",
        why="the other one reads everything",
        series={
            UP % "exporter": "1x40",
            READING % ("pools", "e"): "0x40",
            READING % ("pools", "f"): "1x40",
        },
        at="15m",
    ),
)


def severities() -> dict[str, str]:
    return {
        rule["alert"]: rule["labels"]["severity"]
        for file in FILES
        for group in yaml.safe_load(file.read_text())["groups"]
        for rule in group["rules"]
    }


def test_promtool_accepts_the_rules() -> None:
    ended = subprocess.run(
        [program("promtool"), "check", "rules", *map(str, FILES)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr + ended.stdout


def test_every_alert_is_shown_to_fire_and_to_keep_still() -> None:
    names = {name.removeprefix("Rowlock") for name in severities()}
    assert {case.alert for case in CASES if case.fires is not None} == names
    assert {case.alert for case in CASES if case.fires is None} == names


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.alert}: {case.why}")
def test_an_alert_fires_when_it_should(case: Case, tmp_path: Path) -> None:
    name = f"Rowlock{case.alert}"
    expected: list[dict[str, Any]] = []
    if case.fires is not None:
        labels = {
            "alertname": name,
            "alertstate": "firing",
            "severity": severities()[name],
            **case.fires,
        }
        inside = ", ".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
        expected = [{"labels": f"ALERTS{{{inside}}}", "value": 1}]
    test = {
        "rule_files": [str(file) for file in FILES],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": series, "values": values} for series, values in case.series.items()
                ],
                "promql_expr_test": [
                    {
                        "expr": f'ALERTS{{alertname="{name}", alertstate="firing"}}',
                        "eval_time": case.at,
                        "exp_samples": expected,
                    }
                ],
            }
        ],
    }
    file = tmp_path / "test.yaml"
    file.write_text(json.dumps(test))

    ended = subprocess.run(
        [program("promtool"), "test", "rules", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
