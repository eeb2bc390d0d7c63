"""What is decided before layers become codes: which of them do, ranges, codes, and pairs beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from smelt.compress.calibration.rows import CalibrationRows, calibration_rows
from smelt.compress.quantize.coding import Coder, Fit, nearest_on, plain_fit
from smelt.compress.quantize.planned import Planned, require_weights
from smelt.compress.quantize.sensitivity.settings import MaxExcluded
from smelt.compress.quantize.settings import AUTO, QuantizeSettings
from smelt.core.artifact import Artifact
from smelt.core.stage import Context
from smelt.core.text import count
from smelt.runtime.models.stored_dtype import stored_types
from smelt.runtime.schemes.registry import SCHEMES, bits_per_weight
from smelt.runtime.schemes.scheme import Codes

if TYPE_CHECKING:
    from smelt.compress.quantize.low_rank import Joint
    from smelt.compress.quantize.observed import Seen

_FEW_TOKENS = 32  # fewer tell of no layer
_FEW_IMAGES, _ENOUGH_IMAGES = 4, 32  # each has many patches, or places
_DAMAGE = "the damage of each layer was"
_WEIGHED = "what pairs beside codes are nearest in was"
# by what is measured: what it tells apart
_TOLD = {_DAMAGE: "layers", _WEIGHED: "inputs"}


@dataclass
class Decided:
    """The layers to quantize, and what was decided of them, by `Planned.weight`.

    ranges: of their activations. codes: that are not nearest. pairs: with the codes that they stand beside.
    edits: of what the model got for its codes. between: by the name of a module, what states it reads, which
    are rounded before it.
    """

    layers: list[Planned]
    ranges: dict[int, float] = field(default_factory=dict)
    codes: dict[int, Codes] = field(default_factory=dict)
    pairs: dict[int, Joint] = field(default_factory=dict)
    edits: list[dict[str, Any]] = field(default_factory=list)
    between: dict[str, Seen] = field(default_factory=dict)


def decide(
    model: Any, layers: list[Planned], src: Artifact, settings: QuantizeSettings, ctx: Context
) -> Decided:
    """Look at rows where `settings` ask for it, and decide what they do not leave to rounding.

    Where codes were decided on rows, the weights of `model` are what they stand for, or nearly.
    """
    if settings.reads_rows and layers:
        return _look(model, layers, src, settings, ctx)
    found = Decided(layers)
    if settings.correction is not None:
        found.pairs = _pairs(model, found, None, src, settings, ctx)
    return found


def _look(
    model: Any, layers: list[Planned], src: Artifact, settings: QuantizeSettings, ctx: Context
) -> Decided:
    """Run `model` over real rows."""
    require_weights(layers)
    rows = calibration_rows(model, src, settings.calibration_samples, ctx, "quantize")
    ctx.details["calibration"] = {"origin": rows.origin, "rows": rows.rows, "tokens": rows.tokens}
    if settings.weighs:
        _warn_of_few(rows, _WEIGHED, "calibration_samples", ctx)
    found = Decided(layers)
    if (
        settings.mixed_precision is not None
    ):  # first, since scales and ends of ranges are searched for the widths
        _widths(model, found, rows, src, settings, ctx)
    _fold(model, found, rows, src, settings, ctx)
    if settings.observes:
        _observe(model, found, rows, settings, ctx)
    if AUTO in settings.exclude or settings.observes or settings.smoothquant_alpha is not None:
        _measure(model, found, rows, settings, ctx)
    if settings.makes_up:
        from smelt.compress.quantize.methods.gptq import gptq

        fit = fit_of(settings)
        found.codes, found.pairs = gptq(model, found.layers, rows, fit, ctx, settings.correction)
        ctx.warnings[:] = dict.fromkeys(ctx.warnings)  # both methods say what rows lack
    elif settings.correction is not None:
        found.pairs = _pairs(model, found, rows, src, settings, ctx)
    return found


def _fold(
    model: Any,
    found: Decided,
    rows: CalibrationRows,
    src: Artifact,
    settings: QuantizeSettings,
    ctx: Context,
) -> None:
    """Move scales of channels between what feeds the layers and their columns."""
    from smelt.compress.quantize.observed import ENOUGH_TOKENS

    enough = _ENOUGH_IMAGES if "pixel_values" in rows.batches[0] else ENOUGH_TOKENS
    if (settings.observes or settings.smoothquant_alpha is not None) and rows.tokens < enough:
        ctx.warn("few-calibration-tokens", _too_few(rows, settings))
    kind = stored_types(src.path).of
    if settings.smoothquant_alpha is not None:
        from smelt.compress.quantize.smooth import smooth

        smooth(model, found.layers, rows, settings.smoothquant_alpha, kind, ctx)
    if settings.scales_inputs:
        from smelt.compress.quantize.methods.awq import awq

        cut = settings.clip == "awq"
        found.layers, found.edits, found.codes = awq(model, found.layers, rows, cut, kind, ctx)


def _observe(
    model: Any, found: Decided, rows: CalibrationRows, settings: QuantizeSettings, ctx: Context
) -> None:
    """Find the ranges of activations; what no row reaches stays float."""
    from torch import nn

    from smelt.compress.quantize.convolutions import observe_convolutions
    from smelt.compress.quantize.observed import ranges_of

    plain = [layer for layer in found.layers if not isinstance(layer.module, nn.Conv2d)]
    ranges = ranges_of(model, plain, rows, settings, ctx)
    found.layers, found.ranges, found.between = observe_convolutions(
        model, found.layers, ranges, rows, settings, ctx
    )
    unseen = [layer.name for layer in found.layers if layer.observes and layer.weight not in found.ranges]
    if unseen:
        ctx.warn(
            "uncalibrated-layers",
            f"No calibration sample reaches {', '.join(unseen)}; these layers stay float.",
        )
        found.layers = [layer for layer in found.layers if layer.name not in unseen]


def _widths(
    model: Any,
    found: Decided,
    rows: CalibrationRows,
    src: Artifact,
    settings: QuantizeSettings,
    ctx: Context,
) -> None:
    """Give each layer its bits."""
    from smelt.compress.quantize.sensitivity.mixed import choose_widths

    few, plain = rows.some(settings.sensitivity_samples), coders(settings, {})
    _warn_of_few(few, _DAMAGE, "sensitivity_samples and calibration_samples", ctx)
    found.layers = choose_widths(model, found.layers, few, src, settings, plain, ctx)


def _measure(
    model: Any, found: Decided, rows: CalibrationRows, settings: QuantizeSettings, ctx: Context
) -> None:
    """Find the damage of each layer, and which of them stay float for it."""
    from smelt.compress.quantize.sensitivity.damage import damages, sensitive

    if not settings.sensitivity_samples:
        return
    few = rows.some(settings.sensitivity_samples)
    _warn_of_few(few, _DAMAGE, "sensitivity_samples and calibration_samples", ctx)
    harm = damages(model, found.layers, found.ranges, few, ctx)
    ctx.details["sensitivity"] = {name: float(f"{value:.3g}") for name, value in harm.items()}
    ctx.details["sensitivity_samples"] = few.rows
    stay = sensitive(harm, settings.max_excluded or MaxExcluded()) if AUTO in settings.exclude else []
    found.layers = [layer for layer in found.layers if layer.name not in stay]


def _pairs(
    model: Any,
    found: Decided,
    rows: CalibrationRows | None,
    src: Artifact,
    settings: QuantizeSettings,
    ctx: Context,
) -> dict[int, Joint]:
    """Return codes and pairs of the layers that get one, by `Planned.weight`."""
    from smelt.compress.quantize.low_rank import pairs_beside

    coder = partial(nearest_on, fit_of(settings))
    return pairs_beside(model, found.layers, settings, coder, rows, src, ctx)


def tell_of_pairs(found: Decided, src: Artifact, settings: QuantizeSettings, ctx: Context) -> None:
    """Say in the details and warnings what stands beside the codes."""
    from smelt.compress.quantize.low_rank import facts_of_pairs, pairs_that_save_nothing

    assert settings.correction is not None
    ctx.details["low_rank_correction"] = facts_of_pairs(found.layers, found.pairs, settings.correction.rank)
    stored = 8 * stored_types(src.path).common.itemsize
    coded = bits_per_weight(SCHEMES[settings.scheme], settings.options(settings.scheme))
    ctx.warnings.extend(pairs_that_save_nothing(found.layers, found.pairs, coded, stored))


def fit_of(settings: QuantizeSettings) -> Fit:
    """Return what finds the grids of groups."""
    from smelt.compress.quantize.methods.clip import percentile_grid, searched_grid
    from smelt.compress.quantize.methods.hqq import half_quadratic_grid

    if settings.method == "hqq":
        return half_quadratic_grid
    if settings.clip == "percentile":
        return partial(percentile_grid, settings.calibration_percentile)
    return searched_grid if settings.clip == "mse" else plain_fit


def coders(settings: QuantizeSettings, codes: Mapping[int, Codes]) -> Callable[[Planned], Coder]:
    """Return what gives each layer its coder: what was decided on rows, else the nearest on its grid."""
    fit = fit_of(settings)

    def coder_of(layer: Planned) -> Coder:
        decided = codes.get(layer.weight)
        return partial(nearest_on, fit) if decided is None else lambda weight, scheme, options: decided

    return coder_of


def _warn_of_few(rows: CalibrationRows, what: str, which: str, ctx: Context) -> None:
    """Warn where `what` is measured on next to nothing; `which` settings ask for more."""
    if rows.tokens < (_FEW_IMAGES if "pixel_values" in rows.batches[0] else _FEW_TOKENS):
        ctx.warn(
            "few-sensitivity-tokens" if what == _DAMAGE else "few-calibration-tokens",
            f"{what} measured on {count(rows.tokens, 'token')} of {rows.origin}, too few to compare"
            f" {_TOLD[what]}. Increase {which}, or add data: {{calibration: FILE}}.",
        )


def _too_few(rows: CalibrationRows, settings: QuantizeSettings) -> str:
    """Return what to say of rows with too few tokens."""
    from smelt.compress.quantize.observed import ENOUGH_TOKENS

    what, why = "activation ranges", "larger values in other texts will be clipped"
    if not settings.observes:
        what, why = "largest activations of each channel", "other texts may have larger ones"
    return (
        f"Only {count(rows.tokens, 'calibration token')} ({count(rows.rows, 'sample')} of {rows.origin}) for"
        f" the {what}; {why}. Use {ENOUGH_TOKENS:,} tokens or more: increase calibration_samples, or add"
        " data: {calibration: FILE}."
    )
