"""AQLM: fit codebooks and codes of the scheme `additive` to the outputs of layers and blocks.

Egiazarian et al. 2024, Extreme Compression of Large Language Models via Additive Quantization,
arXiv:2401.06118, section 3, and its published code (Vahe1994/AQLM: aq_engine.py, src/beam_search_xtx.py,
src/finetune.py). For the weights W of a layer, its calibration inputs X and H = X X^T / tokens, the error

    tr((W - Q) H (W - Q)^T)

of the sums Q of scaled codebook vectors is minimized from residual k-means, in turns: Adam moves codebooks
and scales (100 updates at 1e-4, beta 0 and 0.95, amsgrad), then beam search chooses the codes of each row,
group by group and codebook by codebook, with the errors of all other groups. Turns end when one gains less
than 1 %, or after five; the best one counts. Then the codebooks and scales of all layers of a block are tuned
together, codes fixed, to the output of the float block on its own inputs.

Differences from the published code: it tunes norms and biases of a block, too, and stops when samples held
back do not improve; here the iteration with the least loss counts, if it is better on samples held back. It
shuffles the groups of the beam search; here they are in order. Codebooks and scales end as float16.

Shapes: N = outputs, K = inputs, G = ceil(K / 8) groups, M = codebooks, C = vectors of a codebook, S = beam.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.calibration.sequential import ModelPart, RunningBlock
from smelt.calibration.statistics import InputStatistics
from smelt.compress.quantize.block_tuning import BlockLoss, BlockTuner, moved, require_finite
from smelt.compress.quantize.plan_layers import PlannedLayer, dequantize_codes, round_to_nearest
from smelt.quantization.scheme import UnpackedWeights
from smelt.quantization.schemes.additive import GROUP, sum_of_vectors
from smelt.quantization.schemes.registry import find_scheme

BEAM_SIZE = 4
_MAX_TURNS, _MIN_GAIN, _UPDATES = 5, 0.01, 100
_LEARNING_RATE, _BETAS = 1e-4, (0.0, 0.95)
_ROWS_NUMBERS = 2**25  # numbers of a beam search in memory


class AdditiveWeights(nn.Module):
    """Weights as sums of codebook vectors: codes, uint8 [N, G, M]; codebooks [M, C, 8] and scales [N, 1]."""

    def __init__(self, start: UnpackedWeights, width: int) -> None:
        super().__init__()
        self.codes, self._width = start.q_weight, width
        self.codebooks = nn.Parameter(start.qparams["codebooks"].clone())
        self.scales = nn.Parameter(start.qparams["scales"].clone())

    def forward(self) -> Tensor:
        """Return the weights, float32 [N, K]."""
        sums = sum_of_vectors(self.codes, self.codebooks).flatten(1)
        return (sums * self.scales)[:, : self._width]

    @torch.no_grad()
    def unpacked(self) -> UnpackedWeights:
        """Return the codes, and codebooks and scales as float16 values."""
        grid = {"scales": self.scales, "codebooks": self.codebooks}
        return UnpackedWeights(self.codes, {name: value.half().float() for name, value in grid.items()})


class _Beam(NamedTuple):
    """Hypotheses of each row: codes [N, S, G, M], (W - Q) H [N, S, 8 G], losses [N, S]."""

    codes: Tensor
    products: Tensor
    losses: Tensor


@torch.no_grad()
def beam_search(weight: Tensor, start: UnpackedWeights, moment: Tensor, beam_size: int = BEAM_SIZE) -> Tensor:
    """Return codes, uint8 [N, G, M], with a small error tr((W - Q) H (W - Q)^T); never worse than `start`.

    Each code is chosen once, for the least error with all other codes of a hypothesis; the best hypotheses of
    each row are kept.

    Args:
        weight: W, float32 [N, K].
        start: the codes to begin with, their codebooks and scales.
        moment: H, float32 [K, K], symmetric and positive semidefinite.
        beam_size: hypotheses of each row.
    """
    padding = -weight.shape[1] % GROUP
    weight, moment = F.pad(weight, (0, padding)), F.pad(moment, (0, padding, 0, padding))
    codebooks = start.qparams["codebooks"]
    numbers = beam_size * (weight.shape[1] + beam_size * codebooks.shape[1])
    at_once = max(1, _ROWS_NUMBERS // numbers)
    parts = zip(
        weight.split(at_once),
        start.q_weight.split(at_once),
        start.qparams["scales"].split(at_once),
        strict=True,
    )
    return torch.cat([_search_rows(*part, codebooks, moment, beam_size) for part in parts])


def _search_rows(
    weight: Tensor, codes: Tensor, scales: Tensor, codebooks: Tensor, moment: Tensor, beam_size: int
) -> Tensor:
    errors = (weight - sum_of_vectors(codes, codebooks).flatten(1) * scales)[:, None]
    products = errors @ moment
    beam = _Beam(codes[:, None].clone(), products, (errors * products).sum(dim=-1))
    for group in range(codes.shape[1]):
        for index, book in enumerate(codebooks):
            beam = _choose_code(beam, scales, book, moment, (group, index), beam_size)
    return beam.codes[:, 0]


def _choose_code(
    beam: _Beam, scales: Tensor, book: Tensor, moment: Tensor, position: tuple[int, int], beam_size: int
) -> _Beam:
    """Return the hypotheses after every vector of `book` was tried at `position` (group, codebook).

    With v the scaled vector at the position and E the error without it, the error of another vector c is
    E H E - 2 s c (H E) + s^2 c H c, of the group's part of H E and its block of H.
    """
    group, index = position
    inputs = slice(group * GROUP, (group + 1) * GROUP)
    block, rows = moment[inputs, inputs], torch.arange(len(scales), device=scales.device)[:, None]
    old = book[beam.codes[:, :, group, index].long()] * scales[..., None]
    old_products = old @ block
    products = beam.products[:, :, inputs] + old_products
    base = beam.losses + (old * (2 * beam.products[:, :, inputs] + old_products)).sum(dim=-1)
    norms = ((book @ block) * book).sum(dim=1)
    losses = base[..., None] - 2 * scales[..., None] * (products @ book.T)
    losses = (losses + scales[..., None].square() * norms).flatten(1)
    best = losses.topk(min(beam_size, losses.shape[1]), largest=False)
    parents, chosen = best.indices // len(book), best.indices % len(book)
    change = old[rows, parents] - book[chosen] * scales[..., None]
    codes = beam.codes[rows, parents]
    codes[:, :, group, index] = chosen.to(codes.dtype)
    return _Beam(codes, beam.products[rows, parents] + change @ moment[inputs], best.values)


def fit_layer(weight: Tensor, moment: Tensor, start: UnpackedWeights) -> UnpackedWeights:
    """Return codes, codebooks and scales fitted to the outputs of a layer.

    Args:
        weight: W, float32 [N, K].
        moment: H, float32 [K, K].
        start: from residual k-means.
    """
    weights = AdditiveWeights(start, weight.shape[1])
    optimizer = _adam(weights)
    best, least, previous = start, math.inf, math.inf
    for turn in range(_MAX_TURNS + 1):
        candidate = weights.unpacked()
        error = _output_error(AdditiveWeights(candidate, weight.shape[1])().detach() - weight, moment)
        if error < least:
            best, least = candidate, error
        if turn == _MAX_TURNS or not error < (1 - _MIN_GAIN) * previous:
            break
        previous = error
        for _ in range(_UPDATES):
            optimizer.zero_grad()
            values = weights()
            values.backward(2 * (values.detach() - weight) @ moment)
            optimizer.step()
        weights.codes = beam_search(weight, weights.unpacked(), moment)
    return best


def _adam(weights: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(weights.parameters(), lr=_LEARNING_RATE, betas=_BETAS, amsgrad=True)


def _output_error(off: Tensor, moment: Tensor) -> float:
    return float(((off @ moment) * off).sum())


def tune_block(weights: nn.ModuleList, loss_of: BlockLoss, iterations: int) -> list[float]:
    """Tune codebooks and scales of a block's layers; leave them at the least loss; return all losses."""
    optimizer = _adam(weights)
    best, losses = [parameter.detach().clone() for parameter in weights.parameters()], list[float]()
    for _ in range(iterations):
        values = [layer() for layer in weights]
        loss, gradients = loss_of([value.detach() for value in values])
        if not losses or loss < min(losses):
            best = [parameter.detach().clone() for parameter in weights.parameters()]
        losses.append(loss)
        optimizer.zero_grad()
        torch.autograd.backward(values, gradients)
        optimizer.step()
    with torch.no_grad():
        for parameter, value in zip(weights.parameters(), best, strict=True):
            parameter.copy_(value)
    return losses


class Aqlm(BlockTuner):
    """State of an AQLM run.

    All layers of a block are fitted to their inputs before the block changes, then tuned together.
    """

    error_details: ClassVar[tuple[str, ...]] = ("aqlm_layer_error", "aqlm_block_error")
    fallback: ClassVar[str] = "the codebooks of these layers are fitted to their weights alone"

    def _tune_part(self, layers: Sequence[PlannedLayer], part: ModelPart) -> None:
        modules = {layer.name: [layer.module] for layer in layers}
        context = part.collect_own(modules) if isinstance(part, RunningBlock) else part.collect(modules)
        fitted = list[tuple[PlannedLayer, UnpackedWeights]]()
        with context as statistics:
            for layer in layers:
                codes = self._fit(layer, statistics.pop(layer.name))
                fitted += [(layer, codes)] if codes is not None else []
        if fitted and isinstance(part, RunningBlock):
            fitted = self._tune(fitted, part)
        for layer, codes in fitted:
            self._set_weight(layer, codes)

    def _fit(self, layer: PlannedLayer, statistics: InputStatistics) -> UnpackedWeights | None:
        """Return the codes fitted to the inputs of one layer; None if no sample reaches it."""
        if not statistics.tokens:
            self._unreached.append(layer.name)
            return None
        assert statistics.second_moment is not None
        weight = layer.module.weight.detach().float().cpu()
        moment = (statistics.second_moment / statistics.tokens).float()
        require_finite(layer.name, bool(moment.isfinite().all()), "the layer's inputs")
        scheme = find_scheme(layer.scheme)
        start = round_to_nearest(weight, scheme, layer.options)
        codes = fit_layer(weight, moment, start)
        judged = statistics.judged.second_moment
        assert judged is not None
        error, start_error = (
            _output_error(dequantize_codes(c, scheme, layer.options, weight) - weight, judged.float())
            for c in (codes, start)
        )
        self._errors["aqlm_layer_error"][layer.name] = error / start_error if start_error > 0 else 1.0
        self._token_counts.append((statistics.tokens, weight.shape[1]))
        return codes

    def _tune(
        self, fitted: Sequence[tuple[PlannedLayer, UnpackedWeights]], part: RunningBlock
    ) -> list[tuple[PlannedLayer, UnpackedWeights]]:
        """Tune the layers of a block together; return the result if samples held back gain by it."""
        device = fitted[0][0].module.weight.device
        weights = [
            AdditiveWeights(moved(codes, device), layer.module.weight.shape[1]) for layer, codes in fitted
        ]
        names = [f"{layer.name}.weight" for layer, _ in fitted]
        start = [layer().detach() for layer in weights]
        loss = BlockLoss(part, dict(zip(names, start, strict=True)), self._generator)
        losses = tune_block(nn.ModuleList(weights), loss, self._iterations)
        error = loss.on_other_samples([layer().detach() for layer in weights])
        path = part.block.module_path
        require_finite(path, math.isfinite(sum(losses) + error), "outputs")
        self._errors["aqlm_block_error"][path] = min(error, 1.0)
        if error >= 1:
            return list(fitted)
        return [(layer, tuned.unpacked()) for (layer, _), tuned in zip(fitted, weights, strict=True)]
