"""The geometry of the chart of quality against speed; the template only draws it.

Coordinates are SVG units of a canvas of width x height; y points downwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from smelt.evaluate.report import view
from smelt.evaluate.report.schema import LatencyReport, ReportData, StepReport

_CHAR_WIDTH = 6.6  # width of a label's letter at 12 units, an upper estimate
_LINE_HEIGHT = 14.0
_LOG_SCALE_RATIO = 4.0  # the speed axis is logarithmic from this ratio of the fastest to the slowest

Box = tuple[float, float, float, float]
Scale = Callable[[float], float]


@dataclass(frozen=True)
class Canvas:
    """The size of a chart, and the margins of its axes on each side."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    name_letters: int

    @property
    def floor(self) -> int:
        """Position of the horizontal axis."""
        return self.height - self.bottom

    @property
    def end(self) -> int:
        """Right end of the horizontal axis."""
        return self.width - self.right


WIDE_CANVAS = Canvas(640, 420, 62, 24, 18, 52, 28)
# for phones, at its own size: the letters of the wide one would be too small to read
NARROW_CANVAS = Canvas(330, 340, 48, 12, 14, 52, 20)


@dataclass
class ChartPoint:
    """One step in the chart, with its error bars and the position of its label.

    competes: it can be deployed and its speed-up is claimed.
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
    label_x: float = 0.0
    label_y: float = 0.0
    anchor: str = "start"


@dataclass
class Chart:
    """The chart: points, axes with (position, text) ticks, and the Pareto front."""

    canvas: Canvas
    metric: str
    batch_size: int
    logarithmic: bool
    points: list[ChartPoint]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    front: str
    shapes: list[str] = field(default_factory=list)


def scatter_chart(report: ReportData, canvas: Canvas = WIDE_CANVAS) -> Chart | None:
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
    spans = [_speedup_range(row) for _, row in drawn]
    speeds = [span[0] for span in spans]
    logarithmic = max(speeds) >= _LOG_SCALE_RATIO * min(speeds)
    x_scale, x_ticks = _x_axis([v for span in spans for v in span], logarithmic, canvas)
    scores = [step.quality[metric] for step, _ in drawn]
    y_scale, y_ticks = _y_axis([v for score in scores for v in (score.value, *(score.ci95 or ()))], canvas)
    points = [_chart_point(step, row, metric, x_scale, y_scale, report, canvas) for step, row in drawn]
    _place_labels(points, canvas)
    shapes = list(dict.fromkeys(point.shape for point in points))
    front = _front_path([point for point in points if point.front])
    name = view.metric_label(metric) + ("" if scores[0].higher_is_better else " (lower is better)")
    return Chart(canvas, name, sizes[0], logarithmic, points, x_ticks, y_ticks, front, shapes)


def _speedup_range(row: LatencyReport) -> tuple[float, float, float]:
    """Return the speed-up and its interval."""
    value = row.speedup or 0.0
    low, high = row.speedup_ci95 or (value, value)
    return value, low if low > 0 else value, high


def _chart_point(
    step: StepReport, row: LatencyReport, metric: str, x: Scale, y: Scale, report: ReportData, canvas: Canvas
) -> ChartPoint:
    score, span, most = step.quality[metric], _speedup_range(row), canvas.name_letters
    low, high = score.ci95 or (score.value, score.value)
    title = (
        f"{step.name}: {view.metric_label(metric)}"
        f" {view.number_text(score.value, view.metric_digits(metric))}"
        + f" {view.interval_text(score.ci95, view.metric_digits(metric))}".rstrip()
        + f", {view.speedup_text(row)} {view.interval_text(row.speedup_ci95)}".rstrip()
        + f", p50 {view.significant_digits(row.p50_ms)} ms"
    )
    baseline = step.name == report.baseline
    name = step.name + (f" {view.DISTURBED_MARK}" if row.stable is False and not baseline else "")
    return ChartPoint(
        name=name if len(name) <= most else name[: most - 1] + "…",
        shape=step.format or "other",
        x=x(span[0]),
        y=y(score.value),
        x_low=x(span[1]),
        x_high=x(span[2]),
        y_low=y(low),
        y_high=y(high),
        front=step.name in report.frontier,
        baseline=baseline,
        competes=baseline or (step.deployable is not False and row.stable is not False),
        title=title,
    )


def _x_axis(
    values: Sequence[float], logarithmic: bool, canvas: Canvas
) -> tuple[Scale, list[tuple[float, str]]]:
    if not logarithmic:
        low, high, ticks = _tick_range(min(values), max(values), floor=0.0)
        linear = _linear_scale(low, high, canvas.left, canvas.end)
        return linear, [(linear(t), f"{t:g}×") for t in ticks]
    low, high = math.log(min(values) / 1.25), math.log(max(values) * 1.25)
    scale = _linear_scale(low, high, canvas.left, canvas.end)
    powers = range(math.floor(low / math.log(10)), math.ceil(high / math.log(10)) + 1)
    for digits in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        marks = [digit * 10.0**power for power in powers for digit in digits]
        ticks = [mark for mark in marks if low <= math.log(mark) <= high]
        if len(ticks) >= 4:
            break
    return lambda value: scale(math.log(value)), [(scale(math.log(t)), f"{t:g}×") for t in ticks]


def _y_axis(values: Sequence[float], canvas: Canvas) -> tuple[Scale, list[tuple[float, str]]]:
    low, high, ticks = _tick_range(min(values), max(values))
    scale = _linear_scale(low, high, canvas.floor, canvas.top)
    # as many digits as are needed to distinguish the ticks
    shown = next((n for n in range(7) if all(abs(t - round(t, n)) < 1e-9 for t in ticks)), 6)
    return scale, [(scale(t), view.number_text(t, shown)) for t in ticks]


def _linear_scale(low: float, high: float, start: float, end: float) -> Scale:
    return lambda value: round(start + (value - low) / (high - low) * (end - start), 2)


def _tick_range(low: float, high: float, floor: float = -math.inf) -> tuple[float, float, list[float]]:
    """Return a range a little wider than the values, and its ticks: 1, 2 or 5 times a power of ten."""
    room = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = max(floor, low - room), high + room
    raw = (high - low) / 7
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    first = math.ceil(low / step)
    return low, high, [round(i * step, 10) for i in range(first, math.floor(high / step) + 1)]


def _front_path(points: Sequence[ChartPoint]) -> str:
    """Return an SVG path: from each point of the front down to the next faster one, then across to it."""
    path = ""
    for point in sorted(points, key=lambda p: (p.x, p.y)):
        path += f"V{point.y}H{point.x}" if path else f"M{point.x},{point.y}"
    return path


def _place_labels(points: Sequence[ChartPoint], canvas: Canvas) -> None:
    """Place each label where it covers the fewest labels, points and bars around its point."""
    taken: list[tuple[Box, float]] = []
    for p in points:
        taken.append(((p.x - 7, p.y - 7, p.x + 7, p.y + 7), 3.0))
        taken.append(((p.x - 2, p.y_high, p.x + 2, p.y_low), 1.0))
        taken.append(((p.x_low, p.y - 2, p.x_high, p.y + 2), 1.0))
    for point in sorted(points, key=lambda p: p.y):
        best = min(_label_candidates(point), key=lambda place: _overlap_cost(place, taken, canvas))
        point.label_x, point.label_y, point.anchor, box = best
        taken.append((box, 4.0))


def _label_candidates(point: ChartPoint) -> list[tuple[float, float, str, Box]]:
    """Return (x, y of the baseline, text-anchor, box) of the candidate positions, the preferred first."""
    length = len(point.name) * _CHAR_WIDTH
    found = []
    for far in (0.0, 9.0, 20.0, 34.0):
        for right, down in ((1, -1), (1, 1), (-1, -1), (-1, 1), (1, 0), (-1, 0), (0, -1), (0, 1)):
            x = point.x + right * 10
            y = point.y + down * (13 + far) + 4
            start = x if right > 0 else x - length if right < 0 else x - length / 2
            anchor = {1: "start", -1: "end", 0: "middle"}[right]
            found.append((x, y, anchor, (start, y - _LINE_HEIGHT + 3, start + length, y + 3)))
    return found


def _overlap_cost(
    place: tuple[float, float, str, Box], taken: Sequence[tuple[Box, float]], canvas: Canvas
) -> float:
    left, top, right, bottom = place[3]
    outside = max(0, canvas.left + 2 - left) + max(0, right - canvas.width)
    outside += max(0, canvas.top - top) + max(0, bottom - canvas.floor)
    covered = sum(
        weight * max(0, min(right, b[2]) - max(left, b[0])) * max(0, min(bottom, b[3]) - max(top, b[1]))
        for b, weight in taken
    )
    return covered + 100 * outside
