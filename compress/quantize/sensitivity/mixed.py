"""Mixed precision: each matrix gets its bits, by a budget of bits or by what validation data may lose.

Damages of single matrices are added up; what two of them do together is not measured. With `max_drop` whole
models are scored, so that what they do together counts there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from smelt.compress.calibration.rows import CalibrationRows
from smelt.compress.candidate import candidate
from smelt.compress.quantize.coding import Coder
from smelt.compress.quantize.planned import Planned, plan_layers, quantize_layers
from smelt.compress.quantize.sensitivity.choice import Chosen, frontier, within
from smelt.compress.quantize.sensitivity.settings import MixedPrecision
from smelt.compress.quantize.sensitivity.widths import Unit, measure, units_of
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError, nearest
from smelt.core.stage import Context

# bits a weight between two models, below which no further one is tried
_FINE = 0.1


def choose_widths(
    model: Any,
    layers: Sequence[Planned],
    rows: CalibrationRows,
    src: Artifact,
    settings: QuantizeSettings,
    coder_of: Callable[[Planned], Coder | None],
    ctx: Context,
) -> list[Planned]:
    """Return `layers` with a width for each, as `settings.mixed_precision` asks; tell the details.

    Args:
        model: left as it was.
        layers: of it, whose schemes do not count.
        rows: on which damage is measured.
        src: the artifact of `model`.
        settings: of the stage.
        coder_of: what decides codes while damage is measured and models are scored.
        ctx: gets details and warnings; its `score` is asked for `max_drop`.

    Raises:
        InputError: the budget is less than the narrowest codes take, or the metric is not scored.
    """
    asked = settings.mixed_precision
    assert asked is not None
    widths = sorted(asked.bit_widths)
    units = units_of(layers, settings, widths)
    total = sum(unit.weights for unit in units)
    least = sum(unit.costs[widths[0]] for unit in units) / total
    if asked.target_bits is not None and asked.target_bits < least:
        raise InputError(
            f"quantize: mixed_precision: target_bits {asked.target_bits:g} cannot be met: {widths[0]} bits"
            f" throughout take"
            f" {least:.3g} a weight in this model, with scales and what fills the last groups up.",
            code="budget-too-small",
            setting="mixed_precision.target_bits",
        )
    trial = _Trial(src, settings, coder_of, ctx)
    # the float model first: a metric that nobody scores is said before the long part
    whole = trial.whole() if asked.target_bits is None else 0.0
    measure(model, units, rows, settings, coder_of, ctx)
    found = frontier([[(unit.costs[b], unit.damage[b]) for b in widths] for unit in units])
    told: dict[str, Any] = {}
    if asked.target_bits is not None:
        chosen = within(found, asked.target_bits * total)
        assert chosen is not None
    else:
        chosen = _within_drop(found, widths, total, asked, whole, trial, ctx)
        told = {"metric": trial.metric, "score_of_floats": trial.of_floats, "scores": trial.told}
    picked = {unit.name: widths[at] for unit, at in zip(units, chosen.picks, strict=True)}
    ctx.details["mixed_precision"] = {
        "average_bits": round(chosen.cost / total, 3),
        "bits": picked,
        "sensitivity": _damage(units),
        "sensitivity_samples": rows.rows,
        **told,
    }
    by_weight = {unit.layers[0].weight: unit.at(picked[unit.name], settings) for unit in units}
    new = {layer.name: layer for several in by_weight.values() for layer in several}
    return [new[layer.name] for layer in layers]


def _damage(units: Sequence[Unit]) -> dict[str, dict[str, float]]:
    """Return the damage of each matrix by its bits, the worst (in the fewest bits) first."""
    worst = sorted(units, key=lambda unit: -unit.damage[min(unit.damage)])
    return {u.name: {str(b): float(f"{d:.3g}") for b, d in sorted(u.damage.items())} for u in worst}


class _Trial:
    """Scores whole models on validation data.

    of_floats: what the float model has. told: average bits and scores, in the order of trying.
    """

    def __init__(
        self,
        src: Artifact,
        settings: QuantizeSettings,
        coder_of: Callable[[Planned], Coder | None],
        ctx: Context,
    ) -> None:
        self.src, self.settings, self.coder_of, self.ctx = src, settings, coder_of, ctx
        assert settings.mixed_precision is not None
        self.metric = settings.mixed_precision.metric or ""
        self.of_floats: float | None = None
        self.told: list[dict[str, float]] = []

    def whole(self) -> float:
        """Return the score of the float model."""
        scores = self.ctx.score(self.src)
        self.metric = self.metric or next(iter(scores), "")
        if self.metric not in scores:
            known = ", ".join(scores) or "none"
            raise InputError(
                f"quantize: mixed_precision: metric '{self.metric}' is not among those that this recipe"
                f" scores: {known}."
                f"{nearest(self.metric, scores)} Add it to score: {{quality: [...]}}, or give target_bits.",
                code="metric-not-scored",
                setting="mixed_precision.metric",
            )
        self.of_floats = self._sign() * scores[self.metric]
        return float(scores[self.metric])

    def _sign(self) -> int:
        """Return -1 where less is better, whose scores come turned round."""
        return -1 if self.metric in self.ctx.turned else 1

    def score(self, picks: Sequence[int], average: float) -> float:
        """Return the score of the model whose matrices have `picks` bits."""
        from smelt.runtime.models.checkpoint import load_model, save_model

        model, edits = load_model(self.src.path)
        units = units_of(plan_layers(model, self.settings), self.settings, ())
        layers = [layer for unit, b in zip(units, picks, strict=True) for layer in unit.at(b, self.settings)]
        new = quantize_layers(model, layers, {}, self.coder_of)
        with tempfile.TemporaryDirectory(prefix="score-", dir=self.ctx.out.parent) as space:
            save_model(model, edits + new, Path(space), self.src.path)
            scores = self.ctx.score(candidate(Path(space), self.src, self.ctx))
        self.told.append({"average_bits": round(average, 3), self.metric: self._sign() * scores[self.metric]})
        return float(scores[self.metric])


def _within_drop(
    found: Sequence[Chosen],
    widths: Sequence[int],
    total: int,
    asked: MixedPrecision,
    whole: float,
    trial: _Trial,
    ctx: Context,
) -> Chosen:
    """Return the cheapest of `found` that was seen to lose at most `asked.max_drop`: a bisection."""
    assert asked.max_drop is not None
    limit = whole - asked.max_drop

    def good(at: int) -> bool:
        one = found[at]
        return trial.score([widths[pick] for pick in one.picks], one.cost / total) >= limit

    low, high = -1, len(found) - 1
    if not good(high):
        ctx.warn(
            "max-drop-exceeded",
            f"mixed_precision: even the best choice ({found[high].cost / total:.3g} bits per weight) loses"
            f" more than"
            f" max_drop {asked.max_drop:g} of {trial.metric} on validation data; it is used.",
        )
        return found[high]
    while high - low > 1 and found[high].cost - found[max(low, 0)].cost > _FINE * total:
        middle = (low + high) // 2 if low >= 0 else 0
        low, high = (low, middle) if good(middle) else (middle, high)
    return found[high]
