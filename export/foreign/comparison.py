"""How far the outputs of a quantized graph are from those of the float one, and whether that is too far.

Shapes: R = rows of a call, K = classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import ParityError
from smelt.core.rows.arrays import NO_AXES, Axes
from smelt.core.stage import Context

Feeds = dict[str, NDArray[Any]]
_LARGE = 0.5  # share of the limit from which on an error is warned of
_SURE = 1.96  # standard errors
_KAPPA = 0.25  # share of the way from chance to full agreement
_DEGENERATE = 0.9  # chance, from where on nearly all rows have one class
# Of the range of a row's values: two that are nearer than that are the same choice, as 1 and 0.999 of a
# sigmoid are, or two peaks of a wave.
_TIE = 0.05
_NAMES = ("logits", "scores", "probabilities", "label", "output_label", "output_probability")
_MANY_CLASSES = 0.25  # distinct whole numbers, as a share of the rows, from where on they are no classes


@dataclass
class Output:
    """What was seen of one output.

    squares: of the differences. hits: rows with the class that the float graph chooses. near: those, and rows
    whose class has nearly the largest value in the float graph. classes: how often the float graph chooses
    each. odd: values that are finite in one graph alone, or outputs of another shape.
    """

    count: int = 0
    squares: float = 0.0
    total: float = 0.0
    total_squares: float = 0.0
    odd: int = 0
    chosen: int = 0
    hits: int = 0
    near: int = 0
    classes: Counter[Any] = field(default_factory=Counter)

    @property
    def relative(self) -> float:
        """The root mean square of the differences, in standard deviations of the float graph's values.

        A value that is finite in one graph alone counts as one standard deviation off.
        """
        if not self.count:
            return 1.0 if self.odd else 0.0
        variance = max(0.0, self.total_squares / self.count - (self.total / self.count) ** 2)
        scale = (
            variance
            if variance > 1e-12 * self.total_squares / self.count
            else self.total_squares / self.count
        )
        share = self.squares / self.count / (scale or 1.0)
        return sqrt((share * self.count + self.odd) / (self.count + self.odd))

    @property
    def top1(self) -> float | None:
        """The share of rows with the same class, 0 to 1; None where the output chooses none."""
        if not self.chosen or self._whole_numbers_that_are_no_classes():
            return None
        return self.hits / self.chosen

    def at_chance(self) -> bool:
        """Return whether significantly less of the classes agree than chance and a quarter of the rest.

        Chance is the agreement of two graphs that choose each class as often as the float graph, each on its
        own (as in Cohen's kappa, 1960). The upper end of Wilson's interval is compared. A class that has
        nearly the largest value in the float graph agrees too.
        """
        if self.top1 is None:
            return False
        chance = sum((times / self.chosen) ** 2 for times in self.classes.values())
        floor = chance + _KAPPA * (1 - chance)
        return chance < _DEGENERATE and _upper(self.near / self.chosen, self.chosen) < floor

    def _whole_numbers_that_are_no_classes(self) -> bool:
        return len(self.classes) > max(2, _MANY_CLASSES * self.chosen) and not self.count

    def add(self, got: NDArray[Any], wanted: NDArray[Any], classes: bool) -> None:
        """Count one call: both arrays [R, ...]; classes: whether the output chooses one of its last axis."""
        if got.shape != wanted.shape:
            self.odd += max(1, wanted.size)
            return
        if wanted.dtype.kind != "f":
            self._choose(got.ravel(), wanted.ravel())
            self.near = self.hits
            return
        if classes and wanted.ndim > 1 and wanted.shape[-1] > 1:
            self._choose(got.argmax(-1).ravel(), wanted.argmax(-1).ravel())
            self.near += _nearly_largest(wanted, got.argmax(-1))
        one, other = np.isfinite(got), np.isfinite(wanted)
        both = one & other
        same = ~one & ~other & ((got == wanted) | (np.isnan(got) & np.isnan(wanted)))
        self.odd += int((~both & ~same).sum())
        a, b = got[both].astype(np.float64), wanted[both].astype(np.float64)
        self.count += a.size
        self.squares += float(((a - b) ** 2).sum())
        self.total += float(b.sum())
        self.total_squares += float((b**2).sum())

    def _choose(self, got: NDArray[Any], wanted: NDArray[Any]) -> None:
        self.chosen += wanted.size
        self.hits += int((got == wanted).sum())
        self.classes.update(wanted.tolist())


class Comparison:
    """Compares two graphs call by call, so that no more than one call's outputs are in memory."""

    def __init__(self, axes: Axes = NO_AXES) -> None:
        """axes: which axis of an input holds the samples, where it is not the first."""
        self.axes = axes
        self.outputs: dict[str, Output] = {}
        self.rows = 0
        self._largest = 0.0
        self._changed = self._whole = 0

    def add(self, feeds: Feeds, got: Feeds, wanted: Feeds) -> None:
        """Count the outputs of one call."""
        from smelt.export.foreign.rows import changed_of, difference, rows_in

        self.rows += rows_in(feeds, self.axes)
        got, wanted = _counting(feeds, got, wanted)
        self._largest = max(self._largest, difference([got], [wanted], exact=False))
        changed, whole = changed_of([got], [wanted])
        self._changed, self._whole = self._changed + changed, self._whole + whole
        for name, value in wanted.items():
            classes = value.ndim == 2 or name in _NAMES  # those of a row; of a token where the name says so
            self.outputs.setdefault(name, Output()).add(got[name], value, classes)

    def too_far(self, limit: float, judge_classes: bool) -> Iterator[tuple[str, str]]:
        """Yield the outputs that are too far off, each with how far."""
        for name, output in self.outputs.items():
            if output.relative > limit:
                yield name, f"{output.relative:.2g} of its standard deviation (limit {limit:g})"
            elif judge_classes and output.at_chance():
                yield (
                    name,
                    f"the same class in {100 * (output.top1 or 0):.0f} % of {output.chosen:,} rows alone",
                )

    def note(self, ctx: Context) -> None:
        """Write the worst of all outputs into the details, and what a person should know as a warning."""
        from smelt.export.foreign.rows import note_difference

        note_difference(ctx, self.rows, self._largest, self._changed / (self._whole or 1))
        top1 = [output.top1 for output in self.outputs.values() if output.top1 is not None]
        error = max((output.relative for output in self.outputs.values()), default=0.0)
        ctx.details["parity"] |= {"error": error, "top1": min(top1, default=None)}


def require_near(
    found: Comparison, limit: float, judge_classes: bool, advice: str, ctx: Context, noise: Comparison | None
) -> None:
    """Require that no output is further off than `limit`, in its standard deviations.

    Args:
        found: the quantized graph next to the float one.
        limit: largest root mean square difference.
        judge_classes: whether outputs that choose a class must agree more often than by chance.
        advice: what to do.
        ctx: gets a warning where the float graph differs from itself as much.
        noise: the float graph next to itself, of outputs that are random.

    Raises:
        ParityError: `quantization-error`.
    """
    wrong = dict(found.too_far(limit, judge_classes))
    random = {} if noise is None else dict(noise.too_far(limit, judge_classes))
    for name in wrong.keys() & random.keys():
        ctx.warn(
            "random-outputs",
            f"Output '{name}' is not compared: the float graph returns other values in each call,"
            f" {random[name]}.",
        )
        del wrong[name]
    for name, output in found.outputs.items():
        if name not in {*wrong, *random} and output.relative > limit * _LARGE:
            ctx.warn(
                "large-quantization-error",
                f"Output '{name}' differs from the float graph by {output.relative:.2g} of its standard"
                f" deviation (limit {limit:g}). {advice}",
            )
    if not wrong:
        return
    told = "; ".join(f"output '{name}': {how}" for name, how in list(wrong.items())[:3])
    more = f"; and {len(wrong) - 3} more outputs" if len(wrong) > 3 else ""
    raise ParityError(
        f"The quantized graph differs too much from the float one on {found.rows} samples: {told}{more}."
        f" {advice} To accept it, set max_difference above it.",
        code="quantization-error",
    )


def _counting(feeds: Feeds, *outputs: Feeds) -> Iterator[Feeds]:
    """Yield outputs without what they hold for padding, which nobody reads: [R, T, ...] -> [1, n, ...]."""
    mask = feeds.get("attention_mask")
    for found in outputs:
        if mask is None or mask.ndim != 2:
            yield found
            continue
        yield {
            name: value[mask == 1][None] if value.ndim > 2 and value.shape[:2] == mask.shape else value
            for name, value in found.items()
        }


def _nearly_largest(values: NDArray[Any], chosen: NDArray[Any]) -> int:
    """Return in how many rows the value at the place `chosen` is the largest of the last axis, or nearly."""
    most, least = values.max(-1), values.min(-1)
    value = np.take_along_axis(values, chosen[..., None], -1)[..., 0]
    same = chosen == values.argmax(-1)  # also where the range is infinite
    with np.errstate(invalid="ignore"):
        return int((same | (value >= most - _TIE * (most - least))).sum())


def _upper(share: float, n: int) -> float:
    """Return the upper end of the 95 % Wilson score interval (Wilson 1927)."""
    spread = _SURE**2 / n
    half = _SURE * sqrt(share * (1 - share) / n + spread / (4 * n))
    return (share + spread / 2 + half) / (1 + spread)
