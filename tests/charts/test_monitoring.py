"""Alerts and dashboards as the chart installs them."""

import json
from typing import Any, Final

import promql_parser
import pytest
import yaml

from tests.charts.cases import BASE, Values, with_values
from tests.support.helm import CHART, Helm, HelmRefused, Object, Rendered

RULES: Final[list[Object]] = [
    rule
    for file in sorted((CHART / "alerts").glob("*.yaml"))
    for group in yaml.safe_load(file.read_text())["groups"]
    for rule in group["rules"]
]
ALERTS: Final = {rule["alert"]: rule for rule in RULES if "alert" in rule}
WITH_THRESHOLD: Final = [
    name for name, rule in ALERTS.items() if "threshold" in rule["annotations"]
]
DASHBOARDS: Final = sorted((CHART / "dashboards").glob("*.json"))


def rendered(helm: Helm, **values: Any) -> dict[str, Object]:
    """The alerts of the chart by name."""
    return alerts_of(helm, with_values(BASE, metrics={"prometheusRule": values}))


def alerts_of(helm: Helm, values: Values) -> dict[str, Object]:
    rules = with_values(values, metrics={"prometheusRule": {"enabled": True}})
    chart = Rendered(helm.render(rules))
    groups = chart.one("PrometheusRule")["spec"]["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def test_every_alert_is_installed_as_it_was_tested(helm: Helm) -> None:
    assert ALERTS
    assert rendered(helm) == ALERTS


def test_an_alert_links_to_a_copy_of_its_runbook(helm: Helm) -> None:
    for name, rule in rendered(helm, runbookBaseUrl="https://wiki.example/rowlock/").items():
        assert rule["annotations"]["runbook_url"] == f"https://wiki.example/rowlock/{name}.md"


def test_alerts_can_be_left_out(helm: Helm) -> None:
    assert rendered(helm).keys() - rendered(helm, disabled=["RowlockNodeChurn"]).keys() == {
        "RowlockNodeChurn"
    }


@pytest.mark.parametrize(
    "component,names",
    [
        ("operator", {"RowlockOperatorDown", "RowlockOperatorSyncStale"}),
        ("exporter", {"RowlockExporterDown"}),
    ],
)
def test_what_is_not_installed_is_not_missed(helm: Helm, component: str, names: set[str]) -> None:
    alerts = alerts_of(helm, with_values(BASE, **{component: {"enabled": False}}))
    assert ALERTS.keys() - alerts.keys() == names


def test_alerts_have_other_times_severities_and_labels(helm: Helm) -> None:
    changed = rendered(
        helm,
        ruleLabels={"team": "billing"},
        severities={"RowlockQueueStalled": "page"},
        **{"for": {"RowlockQueueStalled": "7m", "RowlockJobFailed": "1m"}},
    )
    assert changed["RowlockQueueStalled"]["labels"] == {"severity": "page", "team": "billing"}
    assert changed["RowlockQueueStalled"]["for"] == "7m"
    assert changed["RowlockJobFailed"]["for"] == "1m"
    assert all(rule["labels"]["team"] == "billing" for rule in changed.values())


@pytest.mark.parametrize("name", WITH_THRESHOLD)
def test_a_threshold_is_replaced_and_nothing_else(helm: Helm, name: str) -> None:
    rule = rendered(helm, thresholds={name: 123456.5})[name]
    old = ALERTS[name]["annotations"]["threshold"]
    assert rule["annotations"]["threshold"] == "123456.5"
    assert rule["expr"] != ALERTS[name]["expr"]
    assert rule["expr"].replace("123456.5", old) == ALERTS[name]["expr"]
    promql_parser.parse(rule["expr"])


def test_an_alert_that_does_not_exist_is_refused(helm: Helm) -> None:
    for value in ({"disabled": ["RowlockTypo"]}, {"thresholds": {"RowlockTypo": 1}}):
        with pytest.raises(HelmRefused, match="there is no alert RowlockTypo"):
            rendered(helm, **value)


def test_a_threshold_of_an_alert_that_has_none_is_refused(helm: Helm) -> None:
    name = next(name for name in ALERTS if name not in WITH_THRESHOLD)
    with pytest.raises(HelmRefused, match="this alert has no threshold"):
        rendered(helm, thresholds={name: 1})


def test_every_dashboard_comes_to_the_sidecar(helm: Helm) -> None:
    dashboards = {
        "enabled": True,
        "namespace": "grafana",
        "label": "show",
        "labelValue": "yes",
        "folder": "Batch",
        "labels": {"team": "billing"},
    }
    chart = Rendered(helm.render(with_values(BASE, grafana={"dashboards": dashboards})))
    found = {
        name: one for one in chart.of("ConfigMap") for name in one["data"] if name.endswith(".json")
    }
    assert sorted(found) == [path.name for path in DASHBOARDS]
    for path in DASHBOARDS:
        one = found[path.name]
        assert json.loads(one["data"][path.name]) == json.loads(path.read_text())
        assert one["metadata"]["namespace"] == "grafana"
        assert one["metadata"]["labels"].items() >= {"show": "yes", "team": "billing"}.items()
        assert one["metadata"]["annotations"] == {"grafana_folder": "Batch"}


def test_a_dashboard_without_a_folder_has_no_annotation(helm: Helm) -> None:
    values = with_values(BASE, grafana={"dashboards": {"enabled": True, "folder": ""}})
    for one in Rendered(helm.render(values)).of("ConfigMap"):
        assert "grafana_folder" not in one["metadata"].get("annotations", {})
