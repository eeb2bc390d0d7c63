"""Sensitivity by layer: the SQNR of each layer of the torch steps, worst blocks first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from smelt.evaluate.report import view
from smelt.evaluate.report.schema import ReportData, StepReport
from smelt.evaluate.report.step_schema import LayerRatio

NUM_WORST = 8
"""Blocks in the first table of the page; a second one has all layers."""
_PARTS_OF_BLOCKS = ("self-attention", "cross-attention", "feed-forward")
# From this ratio on (an error of 1 % of the output) a cell has no color.
_CLEAN_DB = 40.0


@dataclass(frozen=True)
class LayerRow:
    """A layer, with its ratio in each step; None where the step was not compared in it."""

    name: str
    part: str
    ratios: tuple[LayerRatio | None, ...]

    @property
    def is_part(self) -> bool:
        """Whether it is a part of a block."""
        return self.part in _PARTS_OF_BLOCKS

    @property
    def lowest(self) -> float:
        """The lowest ratio of all steps, dB."""
        ratios_db = [r.sqnr_db for r in self.ratios if r is not None and r.sqnr_db is not None]
        return min(ratios_db, default=float("inf"))


@dataclass(frozen=True)
class LayerTable:
    """The compared steps, and a row for each layer in the order of the model."""

    steps: list[StepReport]
    rows: list[LayerRow]

    @property
    def worst(self) -> list[LayerRow]:
        """The rows of whole blocks, embeddings and the output layer with the lowest ratios, lowest first."""
        changed_rows = [row for row in self.rows if not row.is_part and row.lowest < float("inf")]
        return sorted(changed_rows, key=lambda row: row.lowest)[:NUM_WORST]

    def weakest_part(self, row: LayerRow, step_index: int) -> LayerRow | None:
        """Return the part of the block `row` with the lowest ratio in a step; None if there is none."""

        def ratio(other: LayerRow) -> float:
            layer_ratio = other.ratios[step_index]
            return float("inf") if layer_ratio is None or layer_ratio.sqnr_db is None else layer_ratio.sqnr_db

        parts = [other for other in self.rows if other.is_part and other.name == row.name]
        lowest = min(parts, key=ratio, default=None)
        return lowest if lowest is not None and ratio(lowest) < float("inf") else None


def find_layer_table(report: ReportData) -> LayerTable | None:
    """Return the table of all steps whose layers were compared; None if there is none."""
    steps = [row.step for row in view.tree_rows(report) if row.step.layer_sqnr is not None]
    if not steps:
        return None
    ratios_by_block: dict[tuple[str, str], dict[str, LayerRatio]] = {}
    for step in steps:
        for ratio in step.layer_sqnr.layers if step.layer_sqnr else ():
            ratios_by_block.setdefault((ratio.name, ratio.part), {})[step.name] = ratio
    rows = [
        LayerRow(name, part, tuple(by_step.get(step.name) for step in steps))
        for (name, part), by_step in ratios_by_block.items()
    ]
    return LayerTable(steps, rows)


def ratio_text(ratio: LayerRatio | None) -> str:
    """Return `21.3`, `equal`, or `removed, 4.2`."""
    if ratio is None:
        return view.MISSING_TEXT
    text = "equal" if ratio.sqnr_db is None else view.number_text(ratio.sqnr_db, 1)
    return f"removed, {text}" if ratio.removed else text


def output_text(step: StepReport) -> str:
    """Return the ratio of a step's outputs, or why it is not known."""
    layer_sqnr = step.layer_sqnr
    if layer_sqnr is None:
        return view.MISSING_TEXT
    if layer_sqnr.output_sqnr_db is None:
        return view.MISSING_TEXT if layer_sqnr.reason else "equal"
    return view.number_text(layer_sqnr.output_sqnr_db, 1)


def shade(ratio: LayerRatio | None) -> int:
    """Return how much a cell is colored, in percent: 0 from 40 dB on, 100 at 0 dB."""
    if ratio is None or ratio.sqnr_db is None:
        return 0
    return round(100 * min(1.0, max(0.0, 1 - ratio.sqnr_db / _CLEAN_DB)))


def reason_texts(table: LayerTable) -> list[str]:
    """Return why layers of steps were not compared."""
    return [
        f"{step.name}: {step.layer_sqnr.reason}."
        for step in table.steps
        if step.layer_sqnr and step.layer_sqnr.reason
    ]


def summary_rows(table: LayerTable, num_layers: int = 3) -> tuple[Sequence[str], list[list[str]]]:
    """Return head and rows of a table with a row for each step, its outputs, and its worst blocks."""
    rows = []
    for step_index, step in enumerate(table.steps):
        blocks = [
            (ratio, row)
            for row in table.rows
            if (ratio := row.ratios[step_index]) and ratio.sqnr_db is not None and not row.is_part
        ]
        worst = sorted(blocks, key=lambda pair: pair[0].sqnr_db or 0.0)[:num_layers]
        texts = [f"{row.name} {ratio_text(ratio)}" for ratio, row in worst]
        is_compared = any(row.ratios[step_index] for row in table.rows)
        reason = step.layer_sqnr.reason if step.layer_sqnr else None
        missing_text = reason or ("all equal" if is_compared else view.MISSING_TEXT)
        rows.append([step.name, output_text(step), ", ".join(texts) or missing_text])
    return ("step", "outputs, dB", "worst layers, dB"), rows


LEGEND = (
    "Signal-to-quantization-noise ratio (SQNR) in dB against the baseline, on the baseline's hidden states:"
    " 40 dB is an error of 1 % of the output, 20 dB of 10 %, 0 dB of 100 %. Lower is worse; training changes"
    " it too. Outputs: each model on its own."
)
