"""The dashboards: what is committed is what the generator writes, and every panel keeps the rules.

The rules are those of grafana/dashboard-linter and some of ours. Dashboards elsewhere name a data source that only
their author has, or show nothing on somebody else's Grafana (reported as grafana#10786, pi-cluster#18,
dragonfly-operator#256, grafana/helm-charts#2667, dockprom#200).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from charts.dashboards import FOLDER

from charts import catalogue, dashboards
from tests.support.promql import selectors

FILES = sorted(FOLDER.glob("*.json"))
UIDS = {"rowlock-queues", "rowlock-nodes", "rowlock-operator"}
Json = dict[str, Any]
"""Grafana's; its shape is its own."""

METRICS = {series: family for family in catalogue.families() for series in family.series}
LABELS = {
    series: {label for one in catalogue.families() if series in one.series for label in one.labels}
    for series in METRICS
}
FROM_THE_SCRAPER = {"namespace", "pod"}


def load(file: Path) -> Json:
    page: Json = json.loads(file.read_text())
    return page


def panels(page: Json) -> list[Json]:
    return [panel for panel in page["panels"] if panel["type"] != "row"]


def every_panel() -> Iterator[Any]:
    for file in FILES:
        for panel in panels(load(file)):
            yield pytest.param(panel, id=f"{file.stem}: {panel['title']}")


def every_query() -> Iterator[Any]:
    for file in FILES:
        for panel in panels(load(file)):
            for target in panel["targets"]:
                name = f"{file.stem}: {panel['title']} {target['refId']}"
                yield pytest.param(target["expr"], id=name)


PANELS = list(every_panel())
QUERIES = list(every_query())


def test_the_committed_files_are_what_the_generator_writes() -> None:
    written = {file.name: file.read_text() for file in FILES}
    assert written == dashboards.rendered(), "make reference brings them up to date"


def test_there_are_three_with_fixed_uids() -> None:
    assert {load(file)["uid"] for file in FILES} == UIDS


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_can_be_imported_anywhere(file: Path) -> None:
    page = load(file)
    assert "__inputs" not in page
    assert not page["editable"]
    assert "id" not in page or page["id"] is None
    variables = {one["name"]: one for one in page["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    assert variables["namespace"]["includeAll"]
    assert variables["namespace"]["allValue"] == ".*"
    assert set(re.findall(r"DS_\w+", file.read_text())) == set()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_answers_the_three_questions_in_their_order(file: Path) -> None:
    rows = [panel["title"] for panel in load(file)["panels"] if panel["type"] == "row"]
    assert rows == ["Is it well?", "What is slow?", "Where?"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_leads_to_the_others(file: Path) -> None:
    page = load(file)
    assert {f"/d/{uid}" for uid in UIDS - {page["uid"]}} == {link["url"] for link in page["links"]}
    assert all(link["keepTime"] and link["includeVars"] for link in page["links"])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_panel_lies_on_another(file: Path) -> None:
    taken: set[tuple[int, int]] = set()
    page = load(file)
    for panel in page["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + dx, place["y"] + dy)
            for dx in range(place["w"])
            for dy in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in page["panels"]]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in panels(page)]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("title", ["Queue size", "Success rate, 1 h", "Mean task time"])
def test_what_everybody_asks_for_has_its_panel(title: str) -> None:
    assert title in {panel["title"] for panel in panels(load(FOLDER / "queues.json"))}


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_says_what_it_shows_in_which_unit(panel: Json) -> None:
    assert panel["title"][0].isupper()
    assert len(panel["description"]) > 25
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"]["uid"] == "${datasource}"
    if panel["type"] == "stat":
        assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"]


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_has_queries_with_legends(panel: Json) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        assert target["expr"]
        legend = target.get("legendFormat")
        assert panel["type"] == "table" or legend not in {None, "", "__auto"}
        grouped = re.search(r"\bby \(([\w, ]+)\)", target["expr"])
        for label in re.findall(r"{{(\w+)}}", legend or ""):
            assert grouped, legend
            assert label in target["expr"], f"{label} is summed away"
    references = [target["refId"] for target in panel["targets"]]
    assert len(set(references)) == len(references)


@pytest.mark.parametrize("expr", QUERIES)
def test_a_query_asks_for_what_is_exported(expr: str) -> None:
    found = selectors(expr)
    assert found
    for one in found:
        assert one.metric in METRICS, one.metric
        unknown = one.labels - LABELS[one.metric] - FROM_THE_SCRAPER - {"le"}
        assert not unknown, f"{one.metric} has no label {unknown}"


@pytest.mark.parametrize("expr", QUERIES)
def test_a_query_groups_by_labels_that_there_are(expr: str) -> None:
    known = {label for one in selectors(expr) for label in LABELS[one.metric]}
    for group in re.findall(r"\bby \(([^)]*)\)", expr):
        for label in filter(None, map(str.strip, group.split(","))):
            assert label in known | FROM_THE_SCRAPER | {"le"}, label


@pytest.mark.parametrize("expr", QUERIES)
def test_a_query_keeps_to_the_chosen_namespaces(expr: str) -> None:
    for one in selectors(expr):
        assert "namespace" in one.labels, one.metric
        if "pool" in LABELS[one.metric] and "pool=~" in expr:
            assert "pool" in one.labels, one.metric


@pytest.mark.parametrize("expr", QUERIES)
def test_counters_and_only_counters_are_taken_as_rates(expr: str) -> None:
    for one in selectors(expr):
        kind = METRICS[one.metric].kind
        if one.function in {"rate", "increase"}:
            assert kind in {"counter", "histogram"}, one.metric
            assert one.seconds == (300 if one.function == "rate" else 3600)
        else:
            assert kind in {"gauge", "info"}, f"{one.metric} is a counter"
    assert not re.search(r"rate\([^[]*\[\d", expr), "a rate is taken over $__rate_interval"


@pytest.mark.parametrize("expr", QUERIES)
def test_a_quantile_is_taken_of_buckets_summed_by_le(expr: str) -> None:
    if "histogram_quantile" in expr:
        assert re.search(r"by \(le[,)]", expr)
        assert all(one.metric.endswith("_bucket") for one in selectors(expr))
    else:
        assert "_bucket" not in expr


@pytest.mark.parametrize("expr", QUERIES)
def test_gauges_of_the_exporter_are_not_counted_twice_when_two_run(expr: str) -> None:
    exported = {one.metric for one in selectors(expr) if METRICS[one.metric].source == "exporter"}
    for metric in exported - {"rowlock_build_info", "rowlock_database_info"}:
        assert re.search(rf"(max|min)( by \([^)]*\))? ?\({metric}\b", expr), metric
