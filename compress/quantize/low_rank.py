"""A low-rank pair beside the codes of a layer: W ~ Q + A B, where codes and pair divide the work.

For fixed codes Q the pair that is nearest to what they leave, W - Q, is that of its singular value
decomposition; for a fixed pair the codes are those of W - A B. They are found in turn:

    Q_t = q(W - A_{t-1} B_{t-1}),    A_t B_t = SVD_r(W - Q_t)

From A B = 0 this is LoftQ (Li et al. 2023, arXiv:2310.08659, algorithm 1), and one round of it LQER (Zhang et
al. 2024, arXiv:2402.02446, equations 8 and 9). From A B = SVD_r(W) the largest directions leave the weights
before these are coded (SVDQuant, Li et al. 2024, arXiv:2411.05007, equation 5). Rounding to a grid that
follows the weights is no projection, so that a round may lose: the best of them is kept.

What the pair is nearest in: the weights; the weights, each input's times its mean magnitude (LQER's S,
equations 11 to 13); the outputs, by the second moment of the inputs (QERA, Zhang et al. 2024,
arXiv:2410.06040, theorem 1, with the ridge of `whitened.py`).

Shapes: N = outputs, K = inputs of a layer, r = rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smelt.compress.calibration.kept import kept_statistics
from smelt.compress.calibration.rows import CalibrationRows
from smelt.compress.calibration.statistics import InputStatistics, collected
from smelt.compress.factorize.asvd import activation_aware
from smelt.compress.factorize.svd import Metric, factors
from smelt.compress.factorize.whitened import whitened
from smelt.compress.quantize.coding import Coder
from smelt.compress.quantize.planned import Planned, output_layer
from smelt.compress.quantize.settings import LowRankCorrection, QuantizeSettings
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.messages import Message, warning
from smelt.core.stage import Context
from smelt.runtime.schemes.registry import find
from smelt.runtime.schemes.scheme import Codes, Options, Scheme

_NAMED = 3  # layers that a warning names


@dataclass(frozen=True)
class Joint:
    """Codes and the pair beside them.

    up: float32 [N, r]; down: float32 [r, K]. left: by round, which part of the squared error of the codes
    alone is left, in what it is measured in; the smallest is that of this pair.
    """

    codes: Codes
    up: Tensor
    down: Tensor
    left: tuple[float, ...]

    @property
    def product(self) -> Tensor:
        """A B, float32 [N, K]."""
        return self.up @ self.down


@torch.no_grad()
def joint(
    weight: Tensor,
    decide: Callable[[Tensor], Codes],
    values: Callable[[Codes], Tensor],
    settings: LowRankCorrection,
    metric: Metric,
) -> Joint:
    """Return codes and a pair for `weight`, float32 [N, K].

    Args:
        weight: left as it is.
        decide: codes for weights, float32 [N, K].
        values: what codes stand for, float32 [N, K].
        settings: rank (at most the smaller side is taken), rounds, and what comes first.
        metric: what errors are measured in.
    """
    rank = min(settings.rank, *weight.shape)
    alone = decide(weight)
    whole = metric.error_of(weight - values(alone))
    codes, found = alone, []
    best: tuple[float, Codes, Tensor, Tensor] | None = None
    if settings.init == "svd":
        up, down = _pair(weight, rank, metric)
        codes = decide(weight - up @ down)
    for turn in range(settings.iterations):
        if turn:
            codes = decide(weight - up @ down)
        left = weight - values(codes)
        up, down = _pair(left, rank, metric)
        error = metric.error_of(left - up @ down)
        found.append(error / whole if whole else 0.0)
        if best is None or error < best[0]:
            best = error, codes, up, down
    assert best is not None
    return Joint(best[1], best[2], best[3], tuple(found))


def _pair(weight: Tensor, rank: int, metric: Metric) -> tuple[Tensor, Tensor]:
    up, down, _ = factors(weight, rank, metric)
    return up.float(), down.float()


def metric_of(settings: LowRankCorrection, seen: InputStatistics | None) -> Metric:
    """Return in what the pair of a layer is nearest; the weights, where nothing was seen of its inputs.

    Raises:
        InputError: its inputs are not finite.
    """
    if settings.objective == "weights" or seen is None or not seen.tokens:
        return Metric()
    if not bool(seen.squares.isfinite().all()):
        raise InputError(
            "its inputs are not finite. The training before it has probably diverged.",
            code="non-finite-activations",
        )
    if settings.objective == "inputs":
        return activation_aware(seen.magnitudes / seen.tokens, 1.0)
    assert seen.second is not None
    return whitened(seen.second, seen.sums, seen.tokens, bias=False)


def with_pairs(model: Any, layers: Sequence[Planned]) -> list[Planned]:
    """Return those of `layers` that get a pair: products, each weight once, not the output layer.

    A matrix that is looked up too gets none: what the pair makes good would be missing there.
    """
    head = output_layer(model)
    tables = {layer.weight for layer in layers if not layer.product}
    found: dict[int, Planned] = {}
    for layer in layers:
        if layer.product and layer.module is not head and layer.weight not in tables:
            found.setdefault(layer.weight, layer)
    return list(found.values())


def pairs_beside(
    model: Any,
    layers: Sequence[Planned],
    settings: QuantizeSettings,
    coder: Coder,
    rows: CalibrationRows | None,
    src: Artifact,
    ctx: Context,
) -> dict[int, Joint]:
    """Decide codes and pairs of the products among `layers`; `model` stays as it is.

    Args:
        model: float32, in eval mode, on the CPU.
        layers: of it, as planned.
        settings: with `low_rank_correction`.
        coder: decides codes.
        rows: what the model reads; None where nothing is looked at.
        src: which the model was read from.
        ctx: its progress is told.

    Returns:
        By `Planned.weight`.

    Raises:
        InputError: what a layer is fed is not finite.
    """
    wanted, low_rank = with_pairs(model, layers), settings.correction
    assert low_rank is not None
    made: dict[int, Joint] = {}
    with ExitStack() as stack:
        seen: Mapping[str, InputStatistics] = {}
        if settings.weighs and rows is not None and wanted:
            single = {layer.name: [layer.module] for layer in wanted}
            second = low_rank.objective == "outputs"
            if settings.smoothquant_alpha is None:
                kept = kept_statistics(model, rows, single, ctx, of=src.key, second=second)
            else:  # it is not the model that was stored any more
                kept = collected(model, rows, single, ctx, second=second)
            seen = stack.enter_context(kept)
        for at, layer in enumerate(wanted, start=1):
            made[layer.weight] = _joint_of(layer, low_rank, coder, seen.get(layer.name))
            ctx.progress(at, len(wanted), f"pair beside {layer.name}")
    return made


def _joint_of(
    layer: Planned, low_rank: LowRankCorrection, coder: Coder, seen: InputStatistics | None
) -> Joint:
    scheme, weight = find(layer.scheme), layer.module.weight.detach().float().cpu()
    try:
        metric = metric_of(low_rank, seen)
    except InputError as error:
        raise InputError(f"quantize: {layer.name}: {error}", code=error.code) from error
    return joint(
        weight,
        lambda left: coder(left, scheme, layer.options),
        lambda codes: values_of(codes, scheme, layer.options, weight),
        low_rank,
        metric,
    )


def values_of(codes: Codes, scheme: Scheme, options: Options, weight: Tensor) -> Tensor:
    """Return what `codes` of a matrix like `weight` [N, K] stand for, float32 [N, K]."""
    return scheme.values(codes.codes, codes.grid, options).flatten(1)[:, : weight.shape[1]]


def facts_of_pairs(layers: Sequence[Planned], made: Mapping[int, Joint], rank: int) -> dict[str, Any]:
    """Return what the report tells of pairs: how many weights they have, and what errors they leave."""
    names = {layer.weight: layer.name for layer in reversed(layers)}
    return {
        "rank": rank,
        "layers": len(made),
        "weights": sum(pair.up.numel() + pair.down.numel() for pair in made.values()),
        "error_left": {names[w]: [float(f"{part:.3g}") for part in pair.left] for w, pair in made.items()},
    }


def pairs_that_save_nothing(
    layers: Sequence[Planned], made: Mapping[int, Joint], coded_bits: float, stored_bits: int
) -> list[Message]:
    """Return a warning where a pair in its stored type takes what coding its layer saves.

    Args:
        layers: as planned.
        made: their pairs.
        coded_bits: of a weight.
        stored_bits: of a float weight in the file.
    """
    names = {layer.weight: layer.name for layer in reversed(layers)}
    vain = []
    for weight, pair in made.items():
        rows, columns = len(pair.up), pair.down.shape[1]
        thin = pair.up.numel() + pair.down.numel()
        if thin * stored_bits >= rows * columns * (stored_bits - coded_bits):
            vain.append(names[weight])
    if not vain:
        return []
    return [
        warning(
            "no-size-reduction",
            f"low_rank_correction: the correction of {len(vain)} of {len(made)} layers needs as many bytes as"
            f" quantization saves ({', '.join(vain[:_NAMED])}{', ...' if len(vain) > _NAMED else ''}). Lower"
            " the rank, or keep these layers float with exclude.",
            setting="low_rank_correction",
        )
    ]
