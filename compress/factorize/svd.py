"""The best low-rank factors of a matrix in an error metric, and shared matrices with low-rank differences.

Eckart & Young 1936: of all matrices of rank r, the first r singular triples of W are nearest to it. For a
weighted error, W is scaled first and the factors are scaled back:

    W L = U S V^T,    up = U_r sqrt(S_r),    down = sqrt(S_r) V_r^T L^-1

so that |(W - up down) L|_F^2 is the sum of the dropped squared singular values, exactly. L comes from
`asvd_metric`, `fwsvd_metric` or `whitened_svd_metric`, for each layer and calibrated on samples if the method
needs them; plain SVD has none.

The eigenvectors of the smaller of W L L^T W^T and L^T W^T W L are computed, which takes a fraction of the
time and memory of a decomposition of W L. Squaring loses singular values below a hundred-millionth of the
largest; the factors are not affected, because their product is W after an orthogonal projection,
up down = U_r U_r^T W, or before one, W L V_r V_r^T L^-1. The first needs only L L^T, not L or its inverse.

Layers of a group can share one matrix, to which each adds a low-rank difference of its own:
W_l ~ W_shared + B_l A_l, where B_l A_l is the truncated singular value decomposition of W_l - W_shared
(Bae et al. 2024, Relaxed Recursive Transformers, arXiv:2410.20672): at full rank the layers are unchanged.
W_shared is initialized as a layer of the group or their mean. In each further iteration it is the mean of
W_l - B_l A_l, and the differences are computed again. Both are least squares, so the error never grows.
Biases are not shared.

Shapes: M (N where matrices are shared) = outputs, K = inputs of a layer, r = rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from smelt.calibration.samples import CalibrationSamples, load_calibration_samples
from smelt.calibration.statistics import (
    InputStatistics,
    cached_statistics,
    squared_gradients,
    warn_of_few_tokens,
)
from smelt.compress.factorize.settings import FactorizeSettings
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.models.layers import LowRankLinear, SharedLinear
from smelt.stage import Context
from smelt.training.losses import label_objective

# Relative to the largest singular value: smaller ones are lost in the squares.
_MIN_SINGULAR_VALUE = 1e-8


@dataclass(frozen=True)
class ErrorMetric:
    """The error metric of a layer; all float64.

    transform: L, [K, K], or [K] for a diagonal. inverse: its inverse. gram: L L^T, [K, K], if only that is
    known; L is its lower Cholesky factor then. input_mean: mean of the inputs, [K]: the effect of the dropped
    part on the mean of the outputs is added to the bias.
    """

    transform: Tensor | None = None
    inverse: Tensor | None = None
    input_mean: Tensor | None = None
    gram: Tensor | None = None

    def weighted_gram(self, weight: Tensor) -> Tensor:
        """Return W L L^T W^T, float64 [M, M]."""
        if self.gram is not None:
            return weight @ self.gram @ weight.T
        out = self.apply(weight)
        return out @ out.T

    def apply(self, weight: Tensor) -> Tensor:
        """Return W L, float64 [M, K]."""
        factor = torch.linalg.cholesky(self.gram) if self.gram is not None else self.transform
        if factor is None:
            return weight
        return weight @ factor if factor.dim() == 2 else weight * factor

    def undo(self, down: Tensor) -> Tensor:
        """Return `down` L^-1, float64 [r, K]."""
        if self.gram is not None:
            lower = torch.linalg.cholesky(self.gram)
            solution: Tensor = torch.linalg.solve_triangular(lower, down, upper=False, left=False)
            return solution
        if self.inverse is None:
            return down
        return down @ self.inverse if self.inverse.dim() == 2 else down * self.inverse

    def squared_error(self, off: Tensor) -> float:
        """Return |off L|_F^2 of off, [M, K]."""
        off = off.double()
        if self.gram is not None:
            return float(((off @ self.gram) * off).sum())
        return float(self.apply(off).square().sum())


@dataclass(frozen=True)
class Decomposition:
    """Singular values of W L, falling, and the singular vectors on the smaller side; float64.

    basis: U [M, M] where M <= K, else V [K, K]. The largest entry of each of its columns is positive.
    """

    singular_values: Tensor
    basis: Tensor


@torch.no_grad()
def decompose(weight: Tensor, metric: ErrorMetric) -> Decomposition:
    """Return the singular values of W L, and the singular vectors of the smaller side."""
    weight = weight.detach().double()
    if weight.shape[0] <= weight.shape[1]:
        square = metric.weighted_gram(weight)
    else:
        out = metric.apply(weight)
        square = out.T @ out
        del out
    values, vectors = torch.linalg.eigh(square)
    vectors = vectors.flip(1)
    largest = vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True))
    return Decomposition(values.flip(0).clamp(min=0).sqrt(), vectors * largest.sign())


@torch.no_grad()
def low_rank_factors(
    weight: Tensor, rank: int, metric: ErrorMetric, decomposition: Decomposition | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best factors up [M, r] and down [r, K] of `weight` [M, K], and all singular values.

    All float64; the singular values are those of W L, falling. `decomposition`: of W L, if it was computed
    before.
    """
    weight = weight.detach().double()
    factorization = decompose(weight, metric) if decomposition is None else decomposition
    sigma, basis = factorization.singular_values, factorization.basis[:, :rank]
    root = sigma[:rank].clamp(min=max(_MIN_SINGULAR_VALUE * float(sigma[0]), 1e-150)).sqrt()
    if weight.shape[0] <= weight.shape[1]:
        up, down = basis * root, (basis.T @ weight) / root.unsqueeze(1)
    else:
        up, down = (metric.apply(weight) @ basis) / root, metric.undo(root.unsqueeze(1) * basis.T)
    return up, down, sigma


@torch.no_grad()
def low_rank_layer(
    layer: nn.Linear,
    rank: int,
    metric: ErrorMetric,
    decomposition: Decomposition | None = None,
    judged: ErrorMetric | None = None,
) -> tuple[LowRankLinear, float]:
    """Return the best factors of `layer` with `rank` in `metric`, in eval mode, and their relative error.

    The bias is kept in `up`. If the metric has the mean of the inputs, (W - up down) mean is added to it.
    The error is |(W - up down) L|_F / |W L|_F, with L of the metric `judged` if it is given.
    """
    weight = layer.weight.detach().double()
    up, down, sigma = low_rank_factors(weight, rank, metric, decomposition)
    rows, columns = weight.shape
    pair = LowRankLinear(columns, rows, rank, bias=layer.bias is not None)
    pair.up.weight.copy_(up)
    pair.down.weight.copy_(down)
    if layer.bias is not None:
        bias = layer.bias.double()
        if metric.input_mean is not None:
            bias = bias + (weight - up @ down) @ metric.input_mean
        pair.up.bias.copy_(bias)
    squares = sigma.square()
    error, total = float(squares[rank:].sum()), float(squares.sum())
    if judged is not None:
        error, total = judged.squared_error(weight - up @ down), judged.squared_error(weight)
    return pair.eval(), math.sqrt(error / max(total, 1e-300))


# Lower bound, relative to the mean: without it, tiny inputs and inputs without a gradient have no weight.
_MIN_SCALE = 1e-4


def asvd_metric(magnitude: Tensor, alpha: float) -> ErrorMetric:
    """Return the metric of weights times the power `alpha` of the inputs' mean magnitudes, float64 [K].

    ASVD (activation-aware SVD), Yuan et al. 2023, arXiv:2312.05821: W S = U S' V^T with the diagonal
    S_j = (mean |X_j|)^alpha over a layer's inputs X, alpha 0.5. Unlike `whitened_svd_metric`, it does not use
    correlations between inputs.
    """
    floor = _MIN_SCALE * float(magnitude.mean()) or 1.0
    scale = magnitude.clamp(min=floor) ** alpha
    return ErrorMetric(transform=scale, inverse=1 / scale)


def fwsvd_metric(information: Tensor) -> ErrorMetric:
    """Return the metric that scales weights by the Fisher information of their input.

    FWSVD (Fisher-weighted SVD), Hsu et al. 2022, arXiv:2207.00112: the empirical Fisher information of a
    weight is its mean squared gradient; that of a row is the sum over its weights, so that the weighted
    problem has a closed form. The paper multiplies from the left, Z = X W + b: a row of its W belongs to one
    input, which is a column here. So W D = U S V^T with D_j = sqrt(sum_i F_ij).

    Args:
        information: mean squared gradients, float64 [M, K].
    """
    inputs = information.sum(dim=0).sqrt()
    floor = _MIN_SCALE * float(inputs.mean()) or 1.0
    scale = inputs.clamp(min=floor)
    return ErrorMetric(transform=scale, inverse=1 / scale)


# Added to all eigenvalues, relative to their mean, so that rare directions keep some weight.
_RIDGE_RATIO = 0.1


def whitened_svd_metric(second_moment: Tensor, sums: Tensor, tokens: int, *, bias: bool) -> ErrorMetric:
    """Return the metric of a layer's output error.

    SVD-LLM (whitened SVD), Wang et al. 2024, arXiv:2403.07378: with C = X X^T of a layer's inputs and
    L L^T = C, the squared error |(W - W') X|_F^2 is |(W - W') L|_F^2, so dropping the smallest singular
    values of W L is optimal, and their squares are the error. The ridge makes C regular, so that L can be its
    Cholesky factor; for a layer with no more outputs than inputs, C itself is enough. The bias of a layer can
    compensate the mean: then C is the covariance, and the bias takes the mean output of the dropped part.

    Args:
        second_moment: X X^T, float64 [K, K], summed over tokens.
        sums: of the inputs, float64 [K].
        tokens: number of tokens.
        bias: whether the layer has one.
    """
    mean = sums / tokens
    covariance = second_moment / tokens  # new memory, which is changed below
    if bias:
        covariance = covariance - torch.outer(mean, mean)
    ridge = _RIDGE_RATIO * max(0.0, float(covariance.diagonal().mean())) or 1.0
    covariance.diagonal().add_(ridge)
    return ErrorMetric(gram=covariance, input_mean=mean if bias else None)


# Memory for cached singular vectors.
DECOMPOSITION_CACHE_BYTES = 2**30


@dataclass(frozen=True)
class LayerMetrics:
    """Calibration results of each layer, by name.

    inputs: input statistics; information: mean squared gradients, [M, K]; each if the method needs it.
    rows: calibration samples; None if the method uses none.
    """

    settings: FactorizeSettings
    rows: CalibrationSamples | None = None
    inputs: Mapping[str, InputStatistics] = field(default_factory=dict)
    information: Mapping[str, Tensor] = field(default_factory=dict)
    _known: dict[str, Decomposition] = field(default_factory=dict)

    @property
    def uncalibrated(self) -> list[str]:
        """The layers that no sample reaches."""
        return [name for name, statistics in self.inputs.items() if not statistics.tokens]

    def metric_of(self, name: str, layer: nn.Linear) -> ErrorMetric:
        """Return the metric of the layer `name`."""
        if name in self.information:
            return fwsvd_metric(self.information[name].double())
        if name not in self.inputs:
            return ErrorMetric()
        statistics = self.inputs[name]
        if self.settings.method == "asvd":
            return asvd_metric(statistics.magnitudes / statistics.tokens, self.settings.asvd_alpha)
        assert statistics.second_moment is not None
        return whitened_svd_metric(
            statistics.second_moment, statistics.sums, statistics.tokens, bias=layer.bias is not None
        )

    def judged_metric_of(self, name: str, layer: nn.Linear) -> ErrorMetric | None:
        """Return the metric by the samples held back from calibration; None if there are none.

        The bias of the layer compensates the mean of the calibration samples, not theirs.
        """
        statistics = self.inputs.get(name)
        if statistics is None or statistics.judged is statistics:
            return None
        judged = statistics.judged
        moment = judged.second_moment
        if layer.bias is not None:
            moment = judged.centered_second_moment(statistics.mean)
        assert moment is not None
        return whitened_svd_metric(moment, judged.sums, judged.tokens, bias=False)

    def decompose(self, name: str, layer: nn.Linear) -> Decomposition:
        """Return the singular values and vectors of the layer `name`, whose weights must not change.

        They are cached up to a memory limit.
        """
        if name in self._known:
            return self._known[name]
        decomposition = decompose(layer.weight, self.metric_of(name, layer))
        cached_bytes = sum(metric.basis.nbytes for metric in self._known.values())
        if cached_bytes + decomposition.basis.nbytes <= DECOMPOSITION_CACHE_BYTES:
            self._known[name] = decomposition
        return decomposition


@contextmanager
def collect_metrics(
    model: Any, layers: Mapping[str, nn.Linear], src: Artifact, settings: FactorizeSettings, ctx: Context
) -> Iterator[LayerMetrics]:
    """Yield the metrics after calibrating on samples; second moments on disk are removed with the context.

    Raises:
        InputError: there are no samples, or the inputs of a layer are not finite.
    """
    if not settings.needs_calibration:
        yield LayerMetrics(settings)
        return
    fisher = settings.method == "fwsvd"
    # gradients need single samples; elsewhere padding is ignored
    samples = load_calibration_samples(
        model,
        src,
        settings.calibration_samples,
        ctx,
        "factorize",
        labels=fisher,
        padded=not fisher,
        held_back=settings.method == "whitened-svd",
    )
    ctx.details["calibration"] = samples.details
    if fisher:
        weights = {name: layer.weight for name, layer in layers.items()}
        information = squared_gradients(model, samples, weights, label_objective(), ctx)
        yield LayerMetrics(settings, samples, information=information)
    elif settings.method == "svd":
        yield LayerMetrics(settings, samples)
    else:
        second_moments = settings.method == "whitened-svd"
        modules = {name: [layer] for name, layer in layers.items()}
        with cached_statistics(
            model, samples, modules, ctx, artifact_key=src.key, second=second_moments
        ) as inputs:
            require_finite_inputs(inputs, samples)
            warn_of_few_tokens(token_counts(inputs), samples, ctx)
            yield LayerMetrics(settings, samples, inputs=inputs)


def require_finite_inputs(inputs: Mapping[str, InputStatistics], samples: CalibrationSamples) -> None:
    """Require finite inputs.

    Raises:
        InputError: the inputs of a layer are not finite.
    """
    for name, statistics in inputs.items():
        if statistics.tokens and not bool(statistics.squares.isfinite().all()):
            raise InputError(
                f"factorize: {name}: the layer's inputs on samples of {samples.origin} are not finite."
                " The training before this step has probably diverged; lower its learning_rate.",
                code="non-finite-activations",
            )


def token_counts(inputs: Mapping[str, InputStatistics]) -> list[tuple[int, int]]:
    """Return the tokens and inputs of each layer whose second moment is used."""
    return [(each.tokens, each.width) for each in inputs.values() if each.second_moment is not None]


LowRankPair = tuple[Tensor, Tensor]


@torch.no_grad()
def decompose_shared(
    weights: Sequence[Tensor], start: Tensor, rank: int, iterations: int
) -> tuple[Tensor, list[LowRankPair], list[float]]:
    """Return the shared matrix of `weights`, each [N, K], their factors ([N, r], [r, K]), and the error.

    All float64. The error is the squared error of all weights relative to their squared distance from their
    mean, after each iteration; 0 if all are equal.

    Args:
        weights: of the group.
        start: initial shared matrix.
        rank: at most N and K.
        iterations: number of iterations.
    """
    exact = torch.stack([weight.detach().double() for weight in weights])
    variance = float((exact - exact.mean(dim=0)).square().sum())
    shared, errors = start.detach().double(), []
    corrections = torch.zeros_like(exact)
    for iteration in range(iterations):
        if iteration:
            shared = (exact - corrections).mean(dim=0)
        pairs = [low_rank_factors(weight - shared, rank, ErrorMetric())[:2] for weight in exact]
        corrections = torch.stack([up @ down for up, down in pairs])
        squared_error = float((exact - shared - corrections).square().sum())
        errors.append(squared_error / variance if variance else 0.0)
    return shared, pairs, errors


def make_shared_layers(
    layers: Sequence[nn.Linear], start: Tensor, rank: int, iterations: int
) -> tuple[list[SharedLinear], float]:
    """Return replacements of `layers` that share a module, in their order and mode, and the error.

    Args:
        layers: of one size, all with a bias or none.
        start: initial shared matrix, [N, K].
        rank: of the differences; limited by the smaller side of a layer.
        iterations: see `decompose_shared`.
    """
    template = layers[0]
    shared, pairs, errors = decompose_shared(
        [m.weight for m in layers], start, min(rank, *start.shape), iterations
    )
    replacements: list[SharedLinear] = []
    for layer, (up, down) in zip(layers, pairs, strict=True):
        replacement = SharedLinear(
            template.in_features, template.out_features, len(down), template.bias is not None
        )
        replacement.difference.up.weight.data, replacement.difference.down.weight.data = (
            up.float(),
            down.float(),
        )
        if layer.bias is not None:
            replacement.difference.up.bias.data = layer.bias.detach().clone()
        if replacements:
            replacement.shared = replacements[0].shared
        else:
            replacement.shared.weight = nn.Parameter(shared.float())
        replacements.append(replacement.train(layer.training))
    return replacements, errors[-1]
