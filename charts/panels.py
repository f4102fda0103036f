"""The few kinds of panels that our dashboards are made of, so that all of them look and behave alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prometheus_models

COLUMNS: Final = 24
SOURCE: Final = models.DataSourceRef(type_val="prometheus", uid="${datasource}")

Query: TypeAlias = tuple[str, str]
"""PromQL and its legend."""
Levels: TypeAlias = Sequence[tuple[float | None, str]]
"""From which value on which colour; the first has no value."""

GOOD_IF_ZERO: Final[Levels] = ((None, "green"), (1, "red"))
BAD_IF_ZERO: Final[Levels] = ((None, "red"), (1, "green"))
NEUTRAL: Final[Levels] = ((None, "blue"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel: what it asks, what it means, and how it shows the answer."""

    title: str
    text: str
    """For somebody who has never seen rowlock: what it shows, and what is normal."""
    queries: Sequence[Query]
    unit: str
    kind: Literal["stat", "curves", "stack", "table", "states"] = "curves"
    width: int = 8
    levels: Levels = ()
    words: dict[str, str] = field(default_factory=dict[str, str])
    """What certain values are called."""
    most: float | None = None
    decimals: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Panels under a question."""

    question: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A dashboard."""

    uid: str
    title: str
    text: str
    pools: bool
    """Whether it can be narrowed to some pools."""
    rows: Sequence[Row]


def build(page: Page, others: Sequence[Page]) -> models.Dashboard:
    """The dashboard, with links to the others that keep the time and the variables."""
    made = (
        dashboard.Dashboard(page.title)
        .uid(page.uid)
        .description(page.text)
        .tags(["rowlock"])
        .readonly()
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .refresh("30s")
        .time("now-3h", "now")
    )
    for other in others:
        made.link(
            dashboard.DashboardLink(other.title)
            .type(models.DashboardLinkType.LINK)
            .url(f"/d/{other.uid}")
            .tooltip(other.text)
            .icon("dashboard")
            .keep_time(True)
            .include_vars(True)
        )
    made.with_variable(
        dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
    )
    made.with_variable(
        _choice("namespace", "Namespace", "label_values(rowlock_database_up, namespace)")
    )
    if page.pools:
        made.with_variable(
            _choice(
                "pool",
                "Pool",
                'label_values(rowlock_queue_partitions{namespace=~"$namespace"}, pool)',
            )
        )
    number, top = 1, 0
    for row in page.rows:
        made.with_row(dashboard.Row(row.question).id(number).grid_pos(_place(0, top, COLUMNS, 1)))
        number, top, left, height = number + 1, top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                top, left, height = top + height, 0, 0
            height = max(height, _height(panel))
            position = _place(left, top, panel.width, _height(panel))
            made.with_panel(_panel(panel).id(number).grid_pos(position))
            number, left = number + 1, left + panel.width
        top += height
    return made.build()


def _choice(name: str, label: str, query: str) -> Builder[models.VariableModel]:
    # ".*" also takes what has no such label, as outside Kubernetes.
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def _place(left: int, top: int, width: int, height: int) -> models.GridPos:
    return models.GridPos(h=height, w=width, x=left, y=top)


def _height(panel: Panel) -> int:
    return 4 if panel.kind == "stat" else 8


def _panel(
    panel: Panel,
) -> stat.Panel | timeseries.Panel | table.Panel | statetimeline.Panel:
    made = _of_kind(panel)
    made.title(panel.title).description(panel.text).datasource(SOURCE).unit(panel.unit).min(0)
    if panel.most is not None:
        made.max(panel.most)
    if panel.decimals is not None:
        made.decimals(panel.decimals)
    if panel.levels:
        made.thresholds(
            dashboard.ThresholdsConfig()
            .mode(models.ThresholdsMode.ABSOLUTE)
            .steps([models.Threshold(value=value, color=color) for value, color in panel.levels])
        )
    if panel.words:
        options = {
            value: models.ValueMappingResult(text=text, index=index)
            for index, (value, text) in enumerate(panel.words.items())
        }
        made.mappings([models.ValueMap(options=options)])
    for letter, (expr, legend) in zip("ABCDEF", panel.queries, strict=False):
        made.with_target(_query(panel, letter, expr, legend))
    return made


def _query(panel: Panel, letter: str, expr: str, legend: str) -> prometheus.Dataquery:
    query = prometheus.Dataquery().ref_id(letter).expr(expr).legend_format(legend or "__auto")
    if panel.kind == "table":
        return query.instant().format(prometheus_models.PromQueryFormat.TABLE)
    if panel.kind == "stat":
        return query.instant()
    exemplars = "_bucket" in expr
    return query.range().exemplar(exemplars) if exemplars else query.range()


def _of_kind(
    panel: Panel,
) -> stat.Panel | timeseries.Panel | table.Panel | statetimeline.Panel:
    match panel.kind:
        case "stat":
            return (
                stat.Panel()
                .color_mode(common_models.BigValueColorMode.BACKGROUND)
                .graph_mode(common_models.BigValueGraphMode.NONE)
                .no_value("none")
            )
        case "table":
            return table.Panel().transformations(
                [
                    models.DataTransformerConfig(
                        id_val="organize", options={"excludeByName": {"Time": True}}
                    )
                ]
            )
        case "states":
            return (
                statetimeline.Panel()
                .merge_values(True)
                .show_value(common_models.VisibilityMode.AUTO)
            )
        case "curves" | "stack":
            made = (
                timeseries.Panel()
                .fill_opacity(30 if panel.kind == "stack" else 8)
                .line_width(1)
                .show_points(common_models.VisibilityMode.NEVER)
                .legend(
                    common.VizLegendOptions()
                    .display_mode(common_models.LegendDisplayMode.LIST)
                    .placement(common_models.LegendPlacement.BOTTOM)
                    .show_legend(True)
                )
                .tooltip(
                    common.VizTooltipOptions()
                    .mode(common_models.TooltipDisplayMode.MULTI)
                    .sort(common_models.SortOrder.DESCENDING)
                )
            )
            if panel.kind == "stack":
                made.stacking(
                    common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A")
                )
            return made
