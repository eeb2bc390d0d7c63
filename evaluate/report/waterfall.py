"""Where the loss comes from: how quality, latency and size change with each stage of a chain of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from smelt.evaluate.report import view
from smelt.evaluate.report.drawing import PageFigure, new_figure, shorten, style_axes
from smelt.evaluate.report.schema import LatencyReport, ReportData, StepReport

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
    bytes.
    """

    step: StepReport
    changes: tuple[Change | None, Change | None, Change | None]


@dataclass(frozen=True)
class Waterfall:
    """The rows of a chain, from the original model, and the titles of the three quantities."""

    titles: tuple[str, str, str]
    rows: list[WaterfallRow]

    @property
    def panels(self) -> list[int]:
        """The quantities that change anywhere in the chain."""
        return [at for at in range(3) if sum(row.changes[at] is not None for row in self.rows) > 1]


def find_waterfall(report: ReportData) -> Waterfall | None:
    """Return the waterfall of the step that the verdict names, else of the longest chain; None for one step.

    Changes of quality have a `*` where the paired test against the step before gives p < 0.05.
    """
    named = (report.verdict.step or report.verdict.closest) if report.verdict else None
    chains = [_chain(report, step) for step in report.steps if step.status in ("done", "cached")]
    chain = max(chains, key=lambda chain: (bool(chain) and chain[-1].name == named, len(chain)), default=[])
    metric, sizes = next(iter(view.metric_names(report)), None), view.batch_sizes(report)
    timed = [step.latency_at(sizes[0]) if sizes else None for step in chain]
    paired = zip(chain, timed, strict=True)
    measure = _latency_measure([row for step, row in paired if row and step.name != report.baseline])
    what = "CPU time" if measure == "cpu_speedup" else "Latency"
    latency = f"{what} at batch {sizes[0]}, % of {report.baseline}" if sizes else what
    titles = (view.metric_label(metric) if metric else "Quality", latency, "Size, MB")
    rows: list[WaterfallRow] = []
    for step, row in zip(chain, timed, strict=True):
        last = [
            next((c.after for done in reversed(rows) if (c := done.changes[at]) is not None), None)
            for at in range(3)
        ]
        changes = (
            _quality_change(step, metric, last[0]) if metric else None,
            _latency_change(row, measure, last[1], step.name == report.baseline),
            _change(step.size_bytes and step.size_bytes / 1e6, last[2], view.significant_digits),
        )
        rows.append(WaterfallRow(step, changes))
    found = Waterfall(titles, rows)
    return found if found.panels else None


def _chain(report: ReportData, step: StepReport) -> list[StepReport]:
    """Return the steps from the original model to `step`."""
    named = {step.name: step for step in report.steps}
    chain = [step]
    while chain[0].parent is not None:
        chain.insert(0, named[chain[0].parent])
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
    found = _change(
        score.value, before, lambda value: view.number_text(value, digits), score.higher_is_better
    )
    return replace(found, text=f"{found.text}*") if found and before is not None and significant else found


def _latency_measure(rows: Sequence[LatencyReport]) -> str:
    """Return the speed-up to use: by CPU time where the clock of a row was disturbed and all rows have it."""
    disturbed = any(row.stable is False for row in rows)
    return "cpu_speedup" if disturbed and all(row.cpu_speedup for row in rows) else "speedup"


def _latency_change(
    row: LatencyReport | None, measure: str, before: float | None, is_baseline: bool
) -> Change | None:
    ratio = 1.0 if is_baseline and row else row and getattr(row, measure)
    found = _change(100 / ratio if ratio else None, before, lambda value: f"{value:.0f} %")
    if found and row and row.stable is False and measure == "speedup" and not is_baseline:
        return replace(found, text=f"{found.text} {view.DISTURBED_MARK}")
    return found


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


WIDE = WaterfallLayout("panels", 860, 150, 20, 30, 32, stacked=False, name_letters=20)
NARROW = WaterfallLayout("stack", 330, 112, 0, 30, 28, stacked=True, name_letters=15)


def waterfall_figure(waterfall: Waterfall, layout: WaterfallLayout) -> PageFigure:
    """Return the waterfall for a page."""
    names = " → ".join(row.step.name for row in waterfall.rows)
    label = f"Changes with each stage of {names}; the same numbers are in the table below."
    draw = partial(draw_waterfall, waterfall, layout=layout)
    return PageFigure(draw, layout.css_class, layout.width, layout.height(waterfall), label, {})


def draw_waterfall(waterfall: Waterfall, colors: Mapping[str, str], layout: WaterfallLayout = WIDE) -> Any:
    """Return the waterfall as a matplotlib Figure."""
    width, height = layout.width, layout.height(waterfall)
    figure = new_figure(width, height, colors)
    count = len(waterfall.panels)
    for place, at in enumerate(waterfall.panels):
        width_share, height_share = (1, count) if layout.stacked else (count, 1)
        each, panel = (width - layout.left - 8) / width_share, height / height_share
        left = layout.left + (0 if layout.stacked else each * place + layout.gap / 2)
        bottom = panel * (height_share - 1 - place) + 26 if layout.stacked else 26
        size = ((each - layout.gap) / width, (panel - layout.top - 26) / height)
        box = (left / width, bottom / height, *size)
        axes = figure.add_axes(box, facecolor=colors["card"])
        _draw_panel(axes, waterfall.titles[at], [row.changes[at] for row in waterfall.rows], colors)
        named = layout.stacked or place == 0
        names = [shorten(row.step.name, layout.name_letters) if named else "" for row in waterfall.rows]
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
    axes.set_title(shorten(title, 44), loc="left", fontsize=12, color=colors["soft"])
    last: tuple[int, float] | None = None
    for at, change in enumerate(changes):
        if change is None:
            continue
        color = colors["soft"] if change.is_better is None else colors["good" if change.is_better else "bad"]
        if last is not None:  # from the bar before, also across steps without a value
            axes.plot([last[1]] * 2, [last[0], at], color=colors["soft"], linewidth=1, zorder=1)
        if change.before is not None:
            begin, width = min(change.before, change.after), abs(change.after - change.before)
            axes.barh(at, width, left=begin, height=0.5, color=color, zorder=2)
        axes.plot(change.after, at, "o", markersize=5, color=color, zorder=3)
        right = max(change.after, change.after if change.before is None else change.before)
        axes.annotate(
            change.text, (right, at), (8, 0), textcoords="offset points", va="center", fontsize=12,
            color=colors["ink"], zorder=4,
        )  # fmt: skip
        last = (at, change.after)
