"""Draws a dashboard from what a Prometheus knows, as Grafana would roughly do: to look at, and for README.

Pictures are SVG, made here by hand, so that no drawing library is needed for three files.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from tests.support.prometheus import Prometheus
from tests.support.promql import filled

Json = dict[str, Any]
"""Grafana's."""
Point = tuple[float, float]
Span = tuple[float, float]
"""Begin and end, in Unix time; the same for all panels."""

COLUMN: Final = 50
LINE: Final = 34
GAP: Final = 6
COLOURS: Final = (
    *("#5794f2", "#73bf69", "#fade2a", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#96d98d"),
    *("#ffb357", "#ff7383", "#ca95e5", "#37872d", "#1f60c4", "#c4162a"),
)
NAMED: Final = {
    "green": "#73bf69",
    "dark-green": "#37872d",
    "orange": "#ff9830",
    "red": "#f2495c",
    "blue": "#5794f2",
    "dark-blue": "#1f60c4",
}
INK: Final = "#24292f"
PALE: Final = "#8b949e"


@dataclass(frozen=True, slots=True)
class Series:
    """A curve, with its name."""

    name: str
    points: list[Point]


def draw(page: Json, prometheus: Prometheus, *, seconds: float) -> str:
    """The picture of a dashboard over the last seconds."""
    height = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in page["panels"]) * LINE + LINE
    width = 24 * COLUMN
    now = time.time()
    span = (now - seconds, now)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            ' font-family="Inter, Helvetica, Arial, sans-serif" font-size="11">'
        ),
        f'<rect width="{width}" height="{height}" fill="#f6f8fa"/>',
        _text(GAP, 23, page["title"], size=16, weight="bold"),
    ]
    for panel in page["panels"]:
        place = panel["gridPos"]
        box = (
            place["x"] * COLUMN + GAP / 2,
            place["y"] * LINE + LINE,
            place["w"] * COLUMN - GAP,
            place["h"] * LINE - GAP,
        )
        if panel["type"] == "row":
            parts.append(_text(box[0] + 2, box[1] + 20, panel["title"], size=14, weight="bold"))
        else:
            parts += _panel(panel, box, _ask(panel, prometheus, seconds), span)
    return "\n".join([*parts, "</svg>\n"])


def _ask(panel: Json, prometheus: Prometheus, seconds: float) -> list[Series]:
    found: list[Series] = []
    for target in panel["targets"]:
        expr = filled(target["expr"], "10s")
        for one in prometheus.history(expr, seconds=seconds):
            points = [
                (float(at), float(value))
                for at, value in one["values"]
                if math.isfinite(float(value))
            ]
            if points:
                found.append(Series(_name(target.get("legendFormat"), one["metric"]), points))
    return found


def _name(legend: str | None, labels: dict[str, str]) -> str:
    if legend in {None, "", "__auto"}:
        return ", ".join(labels.values())
    name = str(legend)
    for label, value in labels.items():
        name = name.replace(f"{{{{{label}}}}}", value)
    return name


Box = tuple[float, float, float, float]


def _panel(panel: Json, box: Box, series: list[Series], span: Span) -> Iterator[str]:
    left, top, width, height = box
    yield (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3"'
        ' fill="#ffffff" stroke="#d0d7de"/>'
    )
    kind = {"stat": _stat, "table": _table, "state-timeline": _states}.get(panel["type"], _curves)
    yield from kind(panel, box, series, span)
    colour = "#ffffff" if panel["type"] == "stat" and series else INK
    yield _text(left + 8, top + 17, panel["title"], weight="bold", colour=colour)


def _stat(panel: Json, box: Box, series: list[Series], _span: Span) -> Iterator[str]:
    left, top, width, height = box
    if not series:
        yield _text(left + width / 2, top + height / 2 + 14, "none", size=26, anchor="middle")
        return
    value = series[0].points[-1][1]
    yield (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3"'
        f' fill="{_colour(panel, value)}"/>'
    )
    shown = _shown(panel, value)
    middle = left + width / 2
    yield _text(middle, top + height / 2 + 18, shown, size=28, anchor="middle", colour="#ffffff")


def _table(panel: Json, box: Box, series: list[Series], _span: Span) -> Iterator[str]:
    left, top, width, _ = box
    rows = sorted(series, key=lambda one: -one.points[-1][1])[:9]
    for number, one in enumerate(rows):
        line = top + 40 + number * 22
        yield _text(left + 10, line, one.name)
        yield _text(left + width - 10, line, _shown(panel, one.points[-1][1]), anchor="end")


def _states(panel: Json, box: Box, series: list[Series], span: Span) -> Iterator[str]:
    left, top, width, height = box
    to_x = _scale_of_time(span, left + 130, width - 140)
    step = min(28.0, (height - 34) / max(len(series), 1))
    for number, one in enumerate(series):
        line = top + 28 + number * step
        yield _text(left + 10, line + step / 2 + 4, one.name)
        for (at, value), (until, _) in zip(
            one.points, [*one.points[1:], one.points[-1]], strict=True
        ):
            if until - at < 3:
                yield (
                    f'<rect x="{to_x(at):.1f}" y="{line:.1f}" height="{step - 4:.1f}"'
                    f' width="{max(to_x(until) - to_x(at), 1) + 0.3:.1f}"'
                    f' fill="{_colour(panel, value) if value else "#d0d7de"}"/>'
                )


def _curves(panel: Json, box: Box, series: list[Series], span: Span) -> Iterator[str]:
    left, top, width, height = box
    stacked = panel["fieldConfig"]["defaults"]["custom"].get("stacking", {}).get("mode") == "normal"
    drawn = list(_stacked(series)) if stacked else [(one, None) for one in series]
    highest = max((value for one, _ in drawn for _, value in one.points), default=1.0) or 1.0
    plot_left, plot_width = left + 48, width - 58
    plot_top, plot_height = top + 28, height - 64
    to_x = _scale_of_time(span, plot_left, plot_width)

    def to_y(value: float) -> float:
        return plot_top + plot_height * (1 - value / highest)

    for share in (0, 0.5, 1):
        line = to_y(highest * share)
        yield (
            f'<line x1="{plot_left:.1f}" x2="{plot_left + plot_width:.1f}" y1="{line:.1f}"'
            f' y2="{line:.1f}" stroke="#eaeef2"/>'
        )
        label = _shown(panel, highest * share)
        yield _text(plot_left - 4, line + 4, label, anchor="end", colour=PALE, size=10)
    for number, (one, floor) in reversed(list(enumerate(drawn))):
        colour = COLOURS[number % len(COLOURS)]
        for piece, below in _pieces(one.points, floor):
            path = " ".join(f"{to_x(at):.1f},{to_y(value):.1f}" for at, value in piece)
            if below is not None:
                back = " ".join(f"{to_x(at):.1f},{to_y(v):.1f}" for at, v in reversed(below))
                yield f'<polygon points="{path} {back}" fill="{colour}" fill-opacity="0.45"/>'
            yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.4"/>'
    yield from _legend(series, box)


def _legend(series: list[Series], box: Box) -> Iterator[str]:
    left, top, width, height = box
    at, line = left + 10.0, top + height - 20
    for number, one in enumerate(series):
        room = 16 + 6.2 * len(one.name)
        if at + room > left + width:
            at, line = left + 10.0, line + 13
            if line > top + height - 4:
                return
        yield (
            f'<rect x="{at:.1f}" y="{line - 4:.1f}" width="9" height="3"'
            f' fill="{COLOURS[number % len(COLOURS)]}"/>'
        )
        yield _text(at + 12, line, one.name, size=10)
        at += room


def _stacked(series: Sequence[Series]) -> Iterator[tuple[Series, dict[float, float]]]:
    sums: dict[float, float] = {}
    for one in series:
        floor = {at: sums.get(at, 0.0) for at, _ in one.points}
        points = [(at, floor[at] + value) for at, value in one.points]
        sums.update(points)
        yield Series(one.name, points), floor


def _pieces(
    points: list[Point], floor: dict[float, float] | None
) -> Iterator[tuple[list[Point], list[Point] | None]]:
    """The stretches of a curve between the gaps where nothing is known."""
    piece: list[Point] = []
    for point in [*points, (math.inf, 0.0)]:
        if piece and point[0] - piece[-1][0] > 3:
            yield piece, None if floor is None else [(at, floor[at]) for at, _ in piece]
            piece = []
        piece.append(point)


def _scale_of_time(span: Span, left: float, width: float) -> Callable[[float], float]:
    return lambda at: left + width * (at - span[0]) / (span[1] - span[0])


def _colour(panel: Json, value: float) -> str:
    colour = "blue"
    for step in panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", ()):
        if step.get("value") is None or value >= step["value"]:
            colour = step["color"]
    return NAMED.get(colour, colour)


def _shown(panel: Json, value: float) -> str:
    defaults = panel["fieldConfig"]["defaults"]
    for mapping in defaults.get("mappings") or ():
        word = mapping["options"].get(f"{value:g}")
        if word:
            return str(word["text"])
    decimals = defaults.get("decimals")
    match defaults["unit"]:
        case "s":
            return _seconds(value)
        case "percentunit":
            return f"{value * 100:.{decimals or 0}f} %"
        case "short" if decimals is not None:
            return f"{value:.{decimals}f}"
        case "ops":
            return f"{value:.3g}/s"
        case "bytes":
            return f"{value / 1024:.0f} KiB"
        case _:
            return f"{value:.3g}"


def _seconds(value: float) -> str:
    if value == 0:
        return "0 s"
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 11,
    weight: str = "normal",
    anchor: str = "start",
    colour: str = INK,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}"'
        f' text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
    )
