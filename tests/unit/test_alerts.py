"""The alerts: each asks for series that are exported, and each has a runbook whose commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from charts import catalogue
from rowlock.cli.main import parser_of
from tests.support.promql import selectors

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "charts" / "rowlock" / "alerts").glob("*.yaml"))
RUNBOOKS = ROOT / "docs" / "runbooks"
Rule = dict[str, Any]
"""As Prometheus reads it."""

RULES: list[Rule] = [
    rule
    for file in FILES
    for group in yaml.safe_load(file.read_text())["groups"]
    for rule in group["rules"]
]
BY_NAME = pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
EXPECTED = {
    *("QueueStalled", "QueueOldestPendingTooOld", "NoLiveNodes", "NodeUnreachable", "NodeChurn"),
    *("PartitionFailureRatioHigh", "JobFailed", "NonTransferableLost", "DatabaseDown"),
    *("HeartbeatSlow", "ReaperNotRunning", "OperatorDown", "OperatorSyncStale", "ClockSkew"),
    *("XminHeld", "SilentNodeNotRemoved", "ExporterDown", "ExecutionUnserved"),
}
LABELS = {
    series: {label for one in catalogue.families() if series in one.series for label in one.labels}
    for family in catalogue.families()
    for series in family.series
}


def test_there_is_an_alert_for_all_that_must_wake_somebody() -> None:
    names = [str(rule["alert"]) for rule in RULES]
    assert len(set(names)) == len(names)
    assert set(names) == {f"Rowlock{name}" for name in EXPECTED}


@BY_NAME
def test_it_asks_for_what_is_exported(rule: Rule) -> None:
    found = selectors(rule["expr"])
    assert found
    known: set[str] = set()
    for one in found:
        assert one.metric in LABELS, one.metric
        assert one.labels <= LABELS[one.metric], one
        known |= LABELS[one.metric]
    for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", rule["expr"]):
        for label in map(str.strip, group.split(",")):
            assert label in known | {"namespace", "pod", "le"}, label


@BY_NAME
def test_it_says_what_is_wrong_and_where_to_read_on(rule: Rule) -> None:
    assert rule["labels"]["severity"] in {"critical", "warning"}
    notes = rule["annotations"]
    assert set(notes) <= {"summary", "description", "threshold", "runbook_url"}
    assert not notes["summary"].endswith(".")
    assert notes["description"].endswith(".")
    assert (ROOT / notes["runbook_url"]).exists()
    assert Path(notes["runbook_url"]).stem == rule["alert"]
    for label in re.findall(r"\$labels\.(\w+)", notes["summary"] + notes["description"]):
        grouped = " ".join(re.findall(r"by \(([^)]*)\)", rule["expr"]))
        assert label in grouped, f"{label} is summed away"


@BY_NAME
def test_its_threshold_can_be_replaced(rule: Rule) -> None:
    """The chart looks for the number behind a comparison, and must find it once."""
    threshold = rule["annotations"].get("threshold")
    if threshold is not None:
        found = re.findall(rf"([<>]=?\s*){re.escape(threshold)}\b", rule["expr"])
        assert len(found) == 1


@BY_NAME
def test_its_runbook_has_the_four_chapters(rule: Rule) -> None:
    text = (RUNBOOKS / f"{rule['alert']}.md").read_text()
    assert text.startswith(f"# {rule['alert']}\n")
    chapters = re.split(r"^## (.*)$", text, flags=re.MULTILINE)
    assert chapters[1::2] == ["Meaning", "Impact", "Diagnosis", "Mitigation"]
    assert all(len(chapter.strip()) > 30 for chapter in chapters[2::2])
    assert "rowlock " in chapters[6]


def test_no_runbook_is_without_its_alert() -> None:
    assert {page.stem for page in RUNBOOKS.glob("*.md")} == {str(rule["alert"]) for rule in RULES}


@BY_NAME
def test_the_commands_of_its_runbook_exist(rule: Rule) -> None:
    text = (RUNBOOKS / f"{rule['alert']}.md").read_text()
    lines = re.findall(r"^\$ rowlock (.*)$", text, re.MULTILINE)
    lines += re.findall(r"`rowlock (\w+ [^`…]*[A-Z][^`…]*)`", text)
    for line in lines:
        command, *words = shlex.split(line.replace("--priority N", "--priority 1"))
        parser_of(command).parse_args([re.sub(r"^N$", "1", word) for word in words])
