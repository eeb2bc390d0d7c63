"""The chart of quality against speed, drawn with matplotlib: for the page, and as SVG and PNG files.

On the page its colors are the page's CSS variables, so it follows the light and the dark theme. Its texts
remain texts, so they have the browser's font, and names can be found and copied.
"""

from __future__ import annotations

import io
import logging
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

from smelt.core.messages import escape_controls
from smelt.evaluate.report import view
from smelt.evaluate.report.schema import LatencyReport, ReportData, StepReport

_LOG_SCALE_RATIO = 4.0  # the speed axis is logarithmic from this ratio of the fastest to the slowest
_PALE = 0.38  # opacity of steps that do not compete
_FILE_DPI = 216  # of a PNG: three times the size on the page, for slides
_CHAR_WIDTH = 6.6  # width of a label's letter at 12 points, an upper estimate
_LINE_HEIGHT = 14.0
_MARKERS = {"onnx": "s", "tensorrt": "^"}

PALETTES = {
    "light": {
        "card": "#ffffff", "ink": "#1b2330", "soft": "#5b6675", "line": "#dfe3e9", "accent": "#0b6bcb",
        "torch": "#5b6ee1", "onnx": "#0f9d8a", "tensorrt": "#c2570c",
    },
    "dark": {
        "card": "#1a2028", "ink": "#e6eaf0", "soft": "#9aa6b5", "line": "#2d3641", "accent": "#6bb1ff",
        "torch": "#93a1ff", "onnx": "#3fd0bb", "tensorrt": "#ff9d5c",
    },
}  # fmt: skip
"""The colors of the chart by theme; the page has the same, as CSS variables."""

# stand for the variables while matplotlib draws, which accepts colors only
_PLACEHOLDERS = {name: f"#fedc{number:02x}" for number, name in enumerate(PALETTES["light"])}

CHART_FILES = {
    "report.svg": "light",
    "report.png": "light",
    "report-dark.svg": "dark",
    "report-dark.png": "dark",
}
"""The files of the chart next to report.html, with their themes."""


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
NARROW = ChartSize("narrow", 330, 340, 48, 12, 14, 52, 20)
_FILE = ChartSize("file", 640, 444, 62, 24, 18, 76, 28)  # with a legend


@dataclass(frozen=True)
class ChartPoint:
    """One step in the chart, with the ends of its error bars.

    x: speed-up. y: score. competes: it can be deployed and its speed-up is claimed.
    """

    name: str
    shape: str
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
    """What the chart shows: one metric against the speed-up at one batch size."""

    metric: str
    batch_size: int
    points: list[ChartPoint]

    @property
    def logarithmic(self) -> bool:
        """Whether the speed axis is logarithmic."""
        speeds = [point.x for point in self.points]
        return max(speeds) >= _LOG_SCALE_RATIO * min(speeds)

    @property
    def shapes(self) -> list[str]:
        """The formats of the steps, each once."""
        return list(dict.fromkeys(point.shape for point in self.points))


def scatter_chart(report: ReportData) -> Chart | None:
    """Return the chart, or None where no step has both quality and a speed-up."""
    metric, sizes = next(iter(view.metric_names(report)), None), view.batch_sizes(report)
    if metric is None or not sizes:
        return None
    timed = [(step, step.latency_at(sizes[0])) for step in report.steps if metric in step.quality]
    drawn = [(step, row) for step, row in timed if row and row.speedup]
    # a chance-level score would stretch the axis, and such a step is not useful
    drawn = [(step, row) for step, row in drawn if not step.quality[metric].at_chance] or drawn
    if not drawn:
        return None
    better = drawn[0][0].quality[metric].higher_is_better
    name = view.metric_label(metric) + ("" if better else " (lower is better)")
    return Chart(name, sizes[0], [_chart_point(step, row, metric, report) for step, row in drawn])


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
        x=speed,
        y=score.value,
        x_low=slow if slow > 0 else speed,
        x_high=fast,
        y_low=low,
        y_high=high,
        front=step.name in report.frontier,
        baseline=baseline,
        competes=baseline or (step.deployable is not False and row.stable is not False),
        title=title,
    )


def page_svg(chart: Chart, size: ChartSize, label: str) -> str:
    """Return the chart as an SVG element of the page; `label` describes it to screen readers.

    It has no ids, links to elsewhere and styles that could affect the rest of the page.
    """
    text = _draw(chart, size, _PLACEHOLDERS, "svg").decode()
    for name, color in _PLACEHOLDERS.items():
        text = text.replace(color, f"var(--{name})")
    text = re.sub(
        r"^.*?<svg[^>]*>|<style.*?</style>| font-family: [^;]*;|<g id=[^>]*/>", "", text, flags=re.DOTALL
    )
    text = re.sub(r"\s*\n\s*", " ", text).replace("xlink:href", "href")
    titles = {
        f"point-{at}": f"<title>{escape(escape_controls(point.title))}</title>"
        for at, point in enumerate(chart.points)
    }
    text = re.sub(r'<g id="([^"]*)">', lambda found: "<g>" + titles.get(found[1], ""), text)
    return (
        f'<svg class="{size.name}" viewBox="0 0 {size.width} {size.height}" role="img"'
        f' aria-label="{escape(escape_controls(label))}">{text}'
    )


def chart_files(report: ReportData) -> dict[str, bytes]:
    """Return the content of `CHART_FILES` by name; empty where there is no chart."""
    chart = scatter_chart(report)
    if chart is None:
        return {}
    return {
        name: _draw(chart, _FILE, PALETTES[theme], name.rpartition(".")[2])
        for name, theme in CHART_FILES.items()
    }


def _draw(chart: Chart, size: ChartSize, colors: Mapping[str, str], kind: str) -> bytes:
    """Return the chart as a file of format svg or png; equal charts give equal files."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it reports that it caches fonts
    import matplotlib

    out = io.BytesIO()
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": size.name,
        "text.parse_math": False,
        "font.size": 12,
    }
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that the font of the PNG does not have
        figure = _draw_figure(chart, size, colors)
        unsigned = {"Date": None, "Creator": None, "Format": None, "Type": None}
        metadata = unsigned if kind == "svg" else {"Software": None}
        figure.savefig(out, format=kind, dpi=72 if kind == "svg" else _FILE_DPI, metadata=metadata)
    return out.getvalue()


def _draw_figure(chart: Chart, size: ChartSize, colors: Mapping[str, str]) -> Any:
    """Return the chart as a matplotlib Figure at 72 dots per inch; a file also has a legend."""
    from matplotlib.figure import Figure

    figure = Figure((size.width / 72, size.height / 72), dpi=72, facecolor=colors["card"])
    # a layout engine would draw everything several times to measure it
    axes = figure.add_axes(size.axes_box(), facecolor=colors["card"])
    for at, point in enumerate(chart.points):
        pale, color = 1.0 if point.competes else _PALE, _color(point.shape, colors)
        across, along = ([[value - low], [high - value]] for value, low, high in _spans(point))
        bars: dict[str, Any] = {"ecolor": colors["soft"], "elinewidth": 1.2, "alpha": 0.75 * pale}
        axes.errorbar(point.x, point.y, along, across, fmt="none", zorder=2, **bars)
        marker: dict[str, Any] = {
            "marker": _MARKERS.get(point.shape, "o"),
            "markersize": 11,
            "color": color,
            "alpha": pale,
        }
        axes.plot(point.x, point.y, **marker, markeredgecolor=colors["card"], zorder=4, gid=f"point-{at}")
        if point.baseline:
            axes.plot(point.x, point.y, **_ring(colors), zorder=3)
    if front := _front(chart.points):
        axes.step(*zip(*front, strict=True), where="pre", **_front_line(colors), zorder=1.5)
    _draw_axes(axes, chart, colors)
    if size is _FILE:
        _draw_legend(figure, chart, colors)
    _draw_names(axes, chart.points, size, colors)
    for artist in figure.findobj(lambda artist: hasattr(artist, "set_clip_on")):
        artist.set_clip_on(False)  # nothing reaches beyond the axes, and clip paths need links
    return figure


def _spans(point: ChartPoint) -> list[tuple[float, float, float]]:
    """Return (value, low, high) of both axes; no bar is negative where an interval misses its value."""
    found = [(point.x, point.x_low, point.x_high), (point.y, point.y_low, point.y_high)]
    return [(value, min(low, value), max(high, value)) for value, low, high in found]


def _front(points: Sequence[ChartPoint]) -> list[tuple[float, float]]:
    """Return (x, y) of the steps of the front, by their speed."""
    return sorted((point.x, point.y) for point in points if point.front)


def _color(shape: str, colors: Mapping[str, str]) -> str:
    return colors[shape if shape in ("onnx", "tensorrt") else "torch"]


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
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.ticklabel_format(axis="y", useOffset=False, scilimits=(-4, 7))
    axes.yaxis.get_offset_text().set_color(colors["soft"])
    scale = " (log scale)" if chart.logarithmic else ""
    words = {"fontsize": 12.5, "color": colors["soft"]}
    axes.set_xlabel(f"speed-up at batch {chart.batch_size}{scale} · faster →", labelpad=8, **words)
    axes.set_ylabel(escape_controls(chart.metric), rotation_mode="anchor", **words)
    axes.tick_params(length=0, labelsize=12, labelcolor=colors["soft"])
    axes.grid(color=colors["line"], linewidth=1)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


def _log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two speed-ups, at least four if possible."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for digits in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        marks = [digit * 10.0**power for power in powers for digit in digits]
        ticks = [mark for mark in marks if low <= mark <= high]
        if len(ticks) >= 4:
            break
    return ticks


def _draw_legend(figure: Any, chart: Chart, colors: Mapping[str, str]) -> None:
    from matplotlib.lines import Line2D

    marker: dict[str, Any] = {"markersize": 9, "markeredgecolor": colors["card"], "linestyle": "none"}
    keys = [
        Line2D([], [], marker=_MARKERS.get(shape, "o"), color=_color(shape, colors), label=shape, **marker)
        for shape in chart.shapes
    ]
    keys.append(Line2D([], [], **_ring(colors) | {"markersize": 11}, label="baseline"))
    keys.append(Line2D([], [], **_front_line(colors), label="Pareto front"))
    style = {"frameon": False, "labelcolor": colors["soft"], "fontsize": 11, "handletextpad": 0.5}
    figure.legend(handles=keys, loc="lower center", ncols=len(keys), **style)


Box = tuple[float, float, float, float]


def _draw_names(axes: Any, points: Sequence[ChartPoint], size: ChartSize, colors: Mapping[str, str]) -> None:
    """Write each name where it covers the fewest names, points, bars and lines around its point.

    Boxes are (left, bottom, right, top) in points.
    """
    place: Callable[[tuple[float, float]], Any] = axes.transData.transform
    taken: list[tuple[Box, float]] = []
    for point in points:
        (x, y), (x_low, y_low), (x_high, y_high) = (place(at) for at in zip(*_spans(point), strict=True))
        taken.append(((x - 7, y - 7, x + 7, y + 7), 3.0))
        taken.append(((x - 2, y_low, x + 2, y_high), 1.0))
        taken.append(((x_low, y - 2, x_high, y + 2), 1.0))
    front = [place(at) for at in _front(points)]
    for (x, _), (right, y) in pairwise(front):
        taken.append(((x, y - 2, right, y + 2), 1.0))
    room = axes.get_window_extent().bounds
    limits = (room[0] + 2, room[1], float(size.width), room[1] + room[3])
    for point in sorted(points, key=lambda point: -point.y):
        name = escape_controls(point.name)
        name = name if len(name) <= size.name_letters else name[: size.name_letters - 1] + "…"
        x, y = place((point.x, point.y))
        dx, dy, side, box = min(_name_places(x, y, name), key=lambda found: _overlap(found[3], taken, limits))
        taken.append((box, 4.0))
        axes.annotate(
            name, (point.x, point.y), (dx, dy), textcoords="offset points", ha=side, va="baseline",
            fontsize=12, fontweight="bold" if point.front else "normal", color=colors["ink"],
            alpha=1.0 if point.competes else _PALE, zorder=5,
        )  # fmt: skip


def _name_places(x: float, y: float, name: str) -> list[tuple[float, float, str, Box]]:
    """Return (dx, dy of the baseline, alignment, box) of the possible places, the preferred first."""
    length = len(name) * _CHAR_WIDTH
    found = []
    for far in (0.0, 9.0, 20.0, 34.0):
        for right, up in ((1, 1), (1, -1), (-1, 1), (-1, -1), (1, 0), (-1, 0), (0, 1), (0, -1)):
            dx, dy = right * 10.0, up * (13 + far) - 4
            start = x + dx - {1: 0.0, -1: length, 0: length / 2}[right]
            side = {1: "left", -1: "right", 0: "center"}[right]
            found.append((dx, dy, side, (start, y + dy - 3, start + length, y + dy + _LINE_HEIGHT - 3)))
    return found


def _overlap(box: Box, taken: Sequence[tuple[Box, float]], limits: Box) -> float:
    left, bottom, right, top = box
    outside = max(0, limits[0] - left) + max(0, right - limits[2])
    outside += max(0, limits[1] - bottom) + max(0, top - limits[3])
    covered = sum(
        weight * max(0, min(right, b[2]) - max(left, b[0])) * max(0, min(top, b[3]) - max(bottom, b[1]))
        for b, weight in taken
    )
    return covered + 100 * outside
