"""The charts of a report: quality against speed, and the changes of each stage.

The first shows the steps of a report or of several runs (comparison.py). The second, a waterfall, shows how
quality, latency and size change along a chain of steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from smelt.core.messages import escape_controls
from smelt.evaluate.report import view
from smelt.evaluate.report.drawing import (
    PageFigure,
    draw_theme_files,
    figure_bytes,
    new_figure,
    shorten,
    style_axes,
    theme_files,
)
from smelt.evaluate.report.schema import ReportData, StepReport
from smelt.evaluate.report.step_schema import LatencyReport

_OPERATIONS_PANEL = 3  # of a waterfall
_HEADROOM = 0.42  # of an axis, on the right of the values, for the labels of the changes


@dataclass(frozen=True)
class Change:
    """A quantity before and after one stage.

    before: its value at the last step of the chain that has one; None at the first. text: the change, or the
    first value; is_better: None where nothing changed, and at the first.
    """

    before: float | None
    after: float
    text: str
    is_better: bool | None


@dataclass(frozen=True)
class WaterfallRow:
    """One step of the chain; None where a quantity was not measured.

    changes: of quality in the metric's unit; of latency at the smallest batch size in percent of the
    baseline's, from the paired speed-up, or of CPU time where the clock was disturbed; of size in MB of 10^6
    bytes; of operations in million multiply-adds.
    """

    step: StepReport
    changes: tuple[Change | None, Change | None, Change | None, Change | None]


@dataclass(frozen=True)
class Waterfall:
    """The rows of a chain, from the original model, and the titles of the quantities."""

    titles: tuple[str, str, str, str]
    rows: list[WaterfallRow]

    @property
    def panels(self) -> list[int]:
        """The quantities that at least two steps have, operations only where they differ."""
        columns = [[row.changes[index] for row in self.rows] for index in range(len(self.titles))]
        values = [{change.after for change in column if change} for column in columns]
        return [
            index
            for index, column in enumerate(columns)
            if sum(change is not None for change in column) > 1
            and (index != _OPERATIONS_PANEL or len(values[index]) > 1)
        ]


def find_waterfall(report: ReportData) -> Waterfall | None:
    """Return the waterfall of the step that the verdict names, else of the longest chain; None for one step.

    Changes of quality have a `*` where the paired test against the step before is significant.
    """
    selected_name = (report.verdict.step or report.verdict.closest) if report.verdict else None
    chains = [_chain(report, step) for step in report.steps if step.status in ("done", "cached")]
    chain = max(
        chains, key=lambda chain: (bool(chain) and chain[-1].name == selected_name, len(chain)), default=[]
    )
    metric, sizes = next(iter(view.metric_names(report)), None), view.batch_sizes(report)
    timed = [step.latency_at(sizes[0]) if sizes else None for step in chain]
    paired = zip(chain, timed, strict=True)
    measure = _latency_measure([row for step, row in paired if row and step.name != report.baseline])
    time_label = "CPU time" if measure == "cpu_speedup" else "Latency"
    latency = f"{time_label} at batch {sizes[0]}, % of {report.baseline}" if sizes else time_label
    titles = (
        view.metric_label(metric) if metric else "Quality",
        latency,
        "Size, MB",
        "Multiply-adds, million",
    )
    rows: list[WaterfallRow] = []
    for step, row in zip(chain, timed, strict=True):
        last = [
            next((c.after for done in reversed(rows) if (c := done.changes[panel_index]) is not None), None)
            for panel_index in range(len(titles))
        ]
        changes = (
            _quality_change(step, metric, last[0]) if metric else None,
            _latency_change(row, measure, last[1], step.name == report.baseline),
            _change(
                step.size_bytes and step.size_bytes / 1e6,
                last[2],
                lambda size: view.megabytes(round(1e6 * size)),
            ),
            _change(step.operations and step.operations / 1e6, last[3], view.significant_digits),
        )
        rows.append(WaterfallRow(step, changes))
    waterfall = Waterfall(titles, rows)
    return waterfall if waterfall.panels else None


def _chain(report: ReportData, step: StepReport) -> list[StepReport]:
    """Return the steps from the original model to `step`."""
    steps_by_name = {step.name: step for step in report.steps}
    chain = [step]
    while chain[0].parent is not None:
        chain.insert(0, steps_by_name[chain[0].parent])
    return chain


def _change(
    value: float | None, before: float | None, shown: Callable[[float], str], higher_is_better: bool = False
) -> Change | None:
    if value is None:
        return None
    if before is None:
        return Change(None, value, shown(value), None)
    text = shown(abs(value - before))
    if not text.strip("0.,"):
        return Change(before, value, text, None)
    sign = "+" if value > before else view.MINUS
    return Change(before, value, sign + text, (value > before) == higher_is_better)


def _quality_change(step: StepReport, metric: str, before: float | None) -> Change | None:
    score = step.quality.get(metric)
    if score is None:
        return None
    paired = step.against_parent.get(metric)
    significant = paired is not None and view.is_significant(paired)
    digits = view.difference_digits(paired, metric) if paired and significant else view.metric_digits(metric)
    change = _change(
        score.value, before, lambda value: view.number_text(value, digits), score.higher_is_better
    )
    return (
        replace(change, text=f"{change.text}*") if change and before is not None and significant else change
    )


def _latency_measure(rows: Sequence[LatencyReport]) -> str:
    """Return the speed-up to use: by CPU time where the clock of a row was disturbed and all rows have it."""
    disturbed = any(row.stable is False for row in rows)
    return "cpu_speedup" if disturbed and all(row.cpu_speedup for row in rows) else "speedup"


def _latency_change(
    row: LatencyReport | None, measure: str, before: float | None, is_baseline: bool
) -> Change | None:
    ratio = 1.0 if is_baseline and row else row and getattr(row, measure)
    change = _change(100 / ratio if ratio else None, before, lambda value: f"{value:.0f} %")
    if change and row and row.stable is False and measure == "speedup" and not is_baseline:
        return replace(change, text=f"{change.text} {view.DISTURBED_MARK}")
    return change


@dataclass(frozen=True)
class WaterfallLayout:
    """How the panels are placed, in points: next to each other, or below each other for phones."""

    css_class: str
    width: int
    left: int
    gap: int
    top: int
    row_height: int
    stacked: bool
    name_letters: int

    def height(self, waterfall: Waterfall) -> int:
        """Return the height of the whole figure."""
        panel = self.top + self.row_height * len(waterfall.rows) + 26
        return panel * (len(waterfall.panels) if self.stacked else 1)


WATERFALL_WIDE = WaterfallLayout("panels", 860, 150, 20, 30, 32, stacked=False, name_letters=20)
WATERFALL_NARROW = WaterfallLayout("stack", 330, 112, 0, 30, 28, stacked=True, name_letters=15)


def waterfall_figure(waterfall: Waterfall, layout: WaterfallLayout) -> PageFigure:
    """Return the waterfall for a page."""
    names = " → ".join(row.step.name for row in waterfall.rows)
    label = f"Changes with each stage of {names}; the same numbers are in the table below."
    draw = partial(draw_waterfall, waterfall, layout=layout)
    return PageFigure(draw, layout.css_class, layout.width, layout.height(waterfall), label, {})


def draw_waterfall(
    waterfall: Waterfall, colors: Mapping[str, str], layout: WaterfallLayout = WATERFALL_WIDE
) -> Any:
    """Return the waterfall as a matplotlib Figure."""
    width, height = layout.width, layout.height(waterfall)
    figure = new_figure(width, height, colors)
    count = len(waterfall.panels)
    for position, panel_index in enumerate(waterfall.panels):
        width_share, height_share = (1, count) if layout.stacked else (count, 1)
        panel_width, panel = (width - layout.left - 8) / width_share, height / height_share
        panel_left = layout.left + (0 if layout.stacked else panel_width * position + layout.gap / 2)
        bottom = panel * (height_share - 1 - position) + 26 if layout.stacked else 26
        size = ((panel_width - layout.gap) / width, (panel - layout.top - 26) / height)
        box = (panel_left / width, bottom / height, *size)
        axes = figure.add_axes(box, facecolor=colors["card"])
        _draw_panel(
            axes,
            shorten(waterfall.titles[panel_index], int(panel_width / _CHAR_WIDTH)),
            [row.changes[panel_index] for row in waterfall.rows],
            colors,
        )
        shows_names = layout.stacked or position == 0
        names = [shorten(row.step.name, layout.name_letters) if shows_names else "" for row in waterfall.rows]
        axes.set_yticks(range(len(names)), names)
        for label in axes.get_yticklabels():
            label.set_color(colors["ink"])
    return figure


def _draw_panel(axes: Any, title: str, changes: Sequence[Change | None], colors: Mapping[str, str]) -> None:
    """Draw the bars of one quantity from the top down, each from the value before to the value after."""
    values = [change.after for change in changes if change]
    low, high = min(values), max(values)
    span = (high - low) or abs(high) or 1.0
    style_axes(axes, colors)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(low - 0.06 * span, high + _HEADROOM * span)
    axes.set_ylim(len(changes) - 0.5, -0.5)
    axes.locator_params(axis="x", nbins=4)
    axes.ticklabel_format(axis="x", useOffset=False, scilimits=(-4, 7))
    axes.set_title(title, loc="left", fontsize=12, color=colors["soft"])
    last: tuple[int, float] | None = None
    for row_index, change in enumerate(changes):
        if change is None:
            continue
        color = colors["soft"] if change.is_better is None else colors["good" if change.is_better else "bad"]
        if last is not None:  # from the bar before, also across steps without a value
            axes.plot([last[1]] * 2, [last[0], row_index], color=colors["soft"], linewidth=1, zorder=1)
        if change.before is not None:
            begin, width = min(change.before, change.after), abs(change.after - change.before)
            axes.barh(row_index, width, left=begin, height=0.5, color=color, zorder=2)
        axes.plot(change.after, row_index, "o", markersize=5, color=color, zorder=3)
        right = max(change.after, change.after if change.before is None else change.before)
        axes.annotate(
            change.text, (right, row_index), (8, 0), textcoords="offset points", va="center", fontsize=12,
            color=colors["ink"], zorder=4,
        )  # fmt: skip
        last = (row_index, change.after)


_LOG_SCALE_RATIO = 4.0  # the speed axis is logarithmic from this ratio of the fastest to the slowest
_PALE = 0.38  # opacity of steps that do not compete
_CHAR_WIDTH = 6.6  # width of a label's letter at 12 points, an upper estimate
_LINE_HEIGHT = 14.0
_MARKERS = {"onnx": "s", "tensorrt": "^"}

CHART_FILES = (*theme_files("report"), *theme_files("waterfall"))
"""The files of the charts next to report.html."""


@dataclass(frozen=True)
class ChartSize:
    """The size of a chart in points, which are CSS pixels on the page.

    left, right, top, bottom: margins around the axes. name_letters: the longest name.
    """

    name: str
    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    name_letters: int

    def axes_box(self) -> tuple[float, float, float, float]:
        """Return left, bottom, width and height of the axes, in fractions of the figure."""
        width, height = self.width - self.left - self.right, self.height - self.top - self.bottom
        return self.left / self.width, self.bottom / self.height, width / self.width, height / self.height


WIDE = ChartSize("wide", 640, 420, 62, 24, 18, 52, 28)
# for phones, at its own size: the letters of the wide one would be too small to read
NARROW = ChartSize("narrow", 330, 340, 48, 22, 14, 52, 20)
_FILE = ChartSize("file", 640, 444, 62, 24, 18, 76, 28)  # with a legend


@dataclass(frozen=True)
class ChartPoint:
    """One step in the chart, with the ends of its error bars.

    shape: format of the artifact, which the marker shows. color: name in the palette. x: speed-up, or the
    quantity of the chart. y: score. competes: it can be deployed and its speed-up is claimed.
    """

    name: str
    shape: str
    color: str
    x: float
    y: float
    x_low: float
    x_high: float
    y_low: float
    y_high: float
    front: bool
    baseline: bool
    competes: bool
    title: str


@dataclass(frozen=True)
class Chart:
    """What the chart shows: one metric against the speed-up at one batch size, or another quantity.

    metric: label of the quality. quantity: label of the other axis; unit: of its numbers; faster: the
    direction of better values, an arrow. legend: (label, shape, color) of the markers. paths: points that a
    line connects, each as places in `points`.
    """

    metric: str
    quantity: str
    points: list[ChartPoint]
    legend: list[tuple[str, str, str]]
    unit: str = "×"
    faster: str = "faster →"
    paths: Sequence[Sequence[int]] = ()

    @property
    def logarithmic(self) -> bool:
        """Whether the speed axis is logarithmic."""
        speeds = [point.x for point in self.points]
        return max(speeds) >= _LOG_SCALE_RATIO * min(speeds)


def scatter_chart(report: ReportData) -> Chart | None:
    """Return the chart, or None where no step has both quality and a speed-up."""
    metric, sizes = next(iter(view.metric_names(report)), None), view.batch_sizes(report)
    if metric is None or not sizes:
        return None
    timed = [(step, step.latency_at(sizes[0])) for step in report.steps if metric in step.quality]
    plotted = [(step, row) for step, row in timed if row and row.speedup]
    # a chance-level score would stretch the axis, and such a step is not useful
    plotted = [(step, row) for step, row in plotted if not step.quality[metric].at_chance] or plotted
    if not plotted:
        return None
    higher_is_better = plotted[0][0].quality[metric].higher_is_better
    points = [_chart_point(step, row, metric, report) for step, row in plotted]
    legend = list(dict.fromkeys((point.shape, point.shape, point.color) for point in points))
    return Chart(quality_label(metric, higher_is_better), f"speed-up at batch {sizes[0]}", points, legend)


def quality_label(metric: str, higher_is_better: bool) -> str:
    """Return the label of the axis of a metric."""
    return view.metric_label(metric) + ("" if higher_is_better else " (lower is better)")


def _chart_point(step: StepReport, row: LatencyReport, metric: str, report: ReportData) -> ChartPoint:
    score, speed = step.quality[metric], row.speedup or 0.0
    slow, fast = row.speedup_ci95 or (speed, speed)
    low, high = score.ci95 or (score.value, score.value)
    title = (
        f"{step.name}: {view.metric_label(metric)}"
        f" {view.number_text(score.value, view.metric_digits(metric))}"
        + f" {view.interval_text(score.ci95, view.metric_digits(metric))}".rstrip()
        + f", {view.speedup_text(row)} {view.interval_text(row.speedup_ci95)}".rstrip()
        + f", p50 {view.significant_digits(row.p50_ms)} ms"
    )
    baseline = step.name == report.baseline
    return ChartPoint(
        name=step.name + (f" {view.DISTURBED_MARK}" if row.stable is False and not baseline else ""),
        shape=step.format or "other",
        color=step.format if step.format in ("onnx", "tensorrt") else "torch",
        x=speed,
        y=score.value,
        x_low=slow if slow > 0 else speed,
        x_high=fast,
        y_low=low,
        y_high=high,
        front=step.name in report.pareto_front,
        baseline=baseline,
        competes=baseline or (step.deployable is not False and row.stable is not False),
        title=title,
    )


def page_figure(chart: Chart, size: ChartSize, label: str) -> PageFigure:
    """Return the chart for a page; `label` describes it to screen readers."""
    titles = {f"point-{point_index}": point.title for point_index, point in enumerate(chart.points)}
    return PageFigure(partial(_draw, chart, size), size.name, size.width, size.height, label, titles)


def chart_file(chart: Chart, colors: Mapping[str, str], kind: str) -> bytes:
    """Return the chart with its legend as a file of format `kind`, svg or png."""
    return figure_bytes(partial(_draw, chart, _FILE), colors, kind)


def chart_files(report: ReportData) -> dict[str, bytes]:
    """Return the content of `CHART_FILES` by name; without those of a chart that there is not."""
    scatter, waterfall = scatter_chart(report), find_waterfall(report)
    files = draw_theme_files(partial(_draw, scatter, _FILE), "report") if scatter else {}
    return files | (draw_theme_files(partial(draw_waterfall, waterfall), "waterfall") if waterfall else {})


def _draw(chart: Chart, size: ChartSize, colors: Mapping[str, str]) -> Any:
    """Return the chart as a matplotlib Figure; a file also has a legend."""
    figure = new_figure(size.width, size.height, colors)
    # a layout engine would draw everything several times to measure it
    axes = figure.add_axes(size.axes_box(), facecolor=colors["card"])
    for path in chart.paths:
        ends = [(chart.points[point_index].x, chart.points[point_index].y) for point_index in path]
        axes.plot(*zip(*ends, strict=True), color=colors["line"], linewidth=2, zorder=1)
    for point_index, point in enumerate(chart.points):
        opacity, color = 1.0 if point.competes else _PALE, colors[point.color]
        across, x_error = ([[value - low], [high - value]] for value, low, high in _spans(point))
        bars: dict[str, Any] = {"ecolor": colors["soft"], "elinewidth": 1.2, "alpha": 0.75 * opacity}
        axes.errorbar(point.x, point.y, x_error, across, fmt="none", zorder=2, **bars)
        marker: dict[str, Any] = {
            "marker": _MARKERS.get(point.shape, "o"),
            "markersize": 11,
            "color": color,
            "alpha": opacity,
        }
        axes.plot(
            point.x, point.y, **marker, markeredgecolor=colors["card"], zorder=4, gid=f"point-{point_index}"
        )
        if point.baseline:
            axes.plot(point.x, point.y, **_ring(colors), zorder=3)
    if front := _front(chart.points):
        axes.step(*zip(*front, strict=True), where="pre", **_front_line(colors), zorder=1.5)
    _draw_axes(axes, chart, colors)
    if size is _FILE:
        _draw_legend(figure, chart, colors)
    _draw_names(axes, chart.points, size, colors)
    return figure


def _spans(point: ChartPoint) -> list[tuple[float, float, float]]:
    """Return (value, low, high) of both axes; no bar is negative where an interval misses its value."""
    spans = [(point.x, point.x_low, point.x_high), (point.y, point.y_low, point.y_high)]
    return [(value, min(low, value), max(high, value)) for value, low, high in spans]


def _front(points: Sequence[ChartPoint]) -> list[tuple[float, float]]:
    """Return (x, y) of the steps of the front, by their speed."""
    return sorted((point.x, point.y) for point in points if point.front)


def _ring(colors: Mapping[str, str]) -> dict[str, Any]:
    return {
        "marker": "o", "markersize": 18, "markerfacecolor": "none", "markeredgecolor": colors["ink"],
        "markeredgewidth": 1.4, "linestyle": "none",
    }  # fmt: skip


def _front_line(colors: Mapping[str, str]) -> dict[str, Any]:
    return {"color": colors["accent"], "linewidth": 1.6, "linestyle": (0, (5, 4))}


def _draw_axes(axes: Any, chart: Chart, colors: Mapping[str, str]) -> None:
    """Set scales, ticks, labels and grid."""
    from matplotlib.ticker import FixedLocator, NullLocator

    if chart.logarithmic:
        axes.set_xscale("log")
        low = min(point.x_low for point in chart.points) / 1.25
        high = max(point.x_high for point in chart.points) * 1.25
        axes.set_xlim(low, high)
        axes.xaxis.set_major_locator(FixedLocator(_log_ticks(low, high)))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(left=max(0.0, axes.get_xlim()[0]))
        axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}{chart.unit}")
    low, high = axes.get_ylim()
    # nearly equal values would have ticks of many digits
    missing_height = max(0.0, 1e-3 * max(abs(low), abs(high)) - (high - low))
    axes.set_ylim(low - missing_height / 2, high + missing_height / 2)
    axes.ticklabel_format(axis="y", useOffset=False, scilimits=(-4, 7))
    axes.yaxis.get_offset_text().set_color(colors["soft"])
    scale = " (log scale)" if chart.logarithmic else ""
    text_style = {"fontsize": 12.5, "color": colors["soft"]}
    axes.set_xlabel(f"{chart.quantity}{scale} · {chart.faster}", labelpad=8, **text_style)
    axes.set_ylabel(escape_controls(chart.metric), rotation_mode="anchor", **text_style)
    style_axes(axes, colors)


def _log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two speed-ups, at least four if possible."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        candidates = [digit * 10.0**power for power in powers for digit in digits]
        ticks = [tick for tick in candidates if low <= tick <= high]
        if len(ticks) >= 4:
            break
    return ticks


def _draw_legend(figure: Any, chart: Chart, colors: Mapping[str, str]) -> None:
    from matplotlib.lines import Line2D

    marker: dict[str, Any] = {"markersize": 9, "markeredgecolor": colors["card"], "linestyle": "none"}
    keys = [
        Line2D(
            [], [], marker=_MARKERS.get(shape, "o"), color=colors[color], label=shorten(label, 24), **marker
        )
        for label, shape, color in chart.legend
    ]
    if any(point.baseline for point in chart.points):
        keys.append(Line2D([], [], **_ring(colors) | {"markersize": 11}, label="baseline"))
    if _front(chart.points):
        keys.append(Line2D([], [], **_front_line(colors), label="Pareto front"))
    style = {"frameon": False, "labelcolor": colors["soft"], "fontsize": 11, "handletextpad": 0.5}
    figure.legend(handles=keys, loc="lower center", ncols=min(len(keys), 5), **style)


Box = tuple[float, float, float, float]


def _draw_names(axes: Any, points: Sequence[ChartPoint], size: ChartSize, colors: Mapping[str, str]) -> None:
    """Write each name where it covers the fewest names, points, bars and lines around its point.

    Boxes are (left, bottom, right, top) in points.
    """
    to_pixels: Callable[[tuple[float, float]], Any] = axes.transData.transform
    occupied: list[tuple[Box, float]] = []
    for point in points:
        (x, y), (x_low, y_low), (x_high, y_high) = (
            to_pixels(corner) for corner in zip(*_spans(point), strict=True)
        )
        occupied.append(((x - 7, y - 7, x + 7, y + 7), 3.0))
        occupied.append(((x - 2, y_low, x + 2, y_high), 1.0))
        occupied.append(((x_low, y - 2, x_high, y + 2), 1.0))
    front = [to_pixels(corner) for corner in _front(points)]
    for (x, _), (right, y) in pairwise(front):
        occupied.append(((x, y - 2, right, y + 2), 1.0))
    bounds = axes.get_window_extent().bounds
    limits = (bounds[0] + 2, bounds[1], float(size.width), bounds[1] + bounds[3])
    for point in sorted((point for point in points if point.name), key=lambda point: -point.y):
        name = shorten(point.name, size.name_letters)
        x, y = to_pixels((point.x, point.y))
        dx, dy, side, box = min(
            _name_places(x, y, name), key=lambda placement: _overlap(placement[3], occupied, limits)
        )
        occupied.append((box, 4.0))
        axes.annotate(
            name, (point.x, point.y), (dx, dy), textcoords="offset points", ha=side, va="baseline",
            fontsize=12, fontweight="bold" if point.front else "normal", color=colors["ink"],
            alpha=1.0 if point.competes else _PALE, zorder=5,
        )  # fmt: skip


def _name_places(x: float, y: float, name: str) -> list[tuple[float, float, str, Box]]:
    """Return (dx, dy of the baseline, alignment, box) of the possible places, the preferred first."""
    length = len(name) * _CHAR_WIDTH
    placements = []
    for offset in (0.0, 9.0, 20.0, 34.0):
        for right, up in ((1, 1), (1, -1), (-1, 1), (-1, -1), (1, 0), (-1, 0), (0, 1), (0, -1)):
            dx, dy = right * 10.0, up * (13 + offset) - 4
            start = x + dx - {1: 0.0, -1: length, 0: length / 2}[right]
            side = {1: "left", -1: "right", 0: "center"}[right]
            placements.append((dx, dy, side, (start, y + dy - 3, start + length, y + dy + _LINE_HEIGHT - 3)))
    return placements


def _overlap(box: Box, taken: Sequence[tuple[Box, float]], limits: Box) -> float:
    left, bottom, right, top = box
    overflow = max(0, limits[0] - left) + max(0, right - limits[2])
    overflow += max(0, limits[1] - bottom) + max(0, top - limits[3])
    covered = sum(
        weight * max(0, min(right, b[2]) - max(left, b[0])) * max(0, min(top, b[3]) - max(bottom, b[1]))
        for b, weight in taken
    )
    return covered + 100 * overflow
