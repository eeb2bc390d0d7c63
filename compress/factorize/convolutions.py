"""Factorize convolutions (Tucker-2 or CP): select them, choose ranks, and replace them.

Tucker-2: a smaller kernel between two 1 x 1 convolutions. Source: Kim et al. 2016, Compression of Deep
Convolutional Neural Networks for Fast and Low Power Mobile Applications, arXiv:1511.06530; iteration:
De Lathauwer, De Moor & Vandewalle 2000, SIAM J. Matrix Anal. 21(4) (HOOI).

CP: a sum of products of one vector for each of the kernel's four axes. The best such sum of a rank need not
exist: terms can grow without bound and cancel. So each least squares problem has a small ridge, which falls,
and the terms' sizes are spread evenly over their vectors. Source: Lebedev et al. 2015, Speeding-up
Convolutional Neural Networks Using Fine-tuned CP-Decomposition, arXiv:1412.6553; alternating least squares:
Kolda & Bader 2009, SIAM Review 51(3), figure 3.3.

VBMF chooses a rank without a given rank or tolerance: empirical variational Bayesian matrix factorization of
a matrix with noise has a global solution in closed form. Singular values above a threshold that the noise's
variance determines are kept; the variance minimizes the free energy. Source: Nakajima, Sugiyama, Babacan &
Tomioka 2013, Global Analytic Solution of Fully-observed Variational Bayesian Matrix Factorization, JMLR 14,
theorems 2 and 4 and section 5.

Shapes: K = kernel [T, S, D, E], T channels out, S in; R, Q = ranks of the channels in and out (Tucker-2);
R = rank (CP). VBMF: L <= M, sides of the matrix; a = L / M; g, its singular values; v, the variance of the
noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from smelt.compress.factorize.ranks import (
    convolution_macs,
    count_factorized_weights,
    cp_macs,
    rank_of_energy,
    tucker2_macs,
)
from smelt.compress.factorize.settings import DEFAULT_ENERGY, VBMF, FactorizeSettings
from smelt.core.errors import InputError, RunError
from smelt.models.checkpoint import count_stored_parameters
from smelt.models.edits import module_names, replace_layer
from smelt.models.layers import LowRankConv, make_conv_steps
from smelt.models.operations import MODULE_ERRORS, count_operations
from smelt.models.user_module import fixed_layers
from smelt.stage import Context

_CP_MAX_ITERATIONS = 200  # iterations
_CP_TOLERANCE = 1e-8  # of an iteration, relative to the kernel's norm
_RIDGE = 1e-6  # relative to the mean of a problem's diagonal
_AXIS_LETTERS = "tsde"


# not tensorly 0.10: its CP takes up to 2.3 times as long (64 terms of 128 x 64 x 3 x 3), its error is within
# 1 % of ours, and without a ridge its terms grow to 6 times the size; its Tucker-2 is equal, and slower
def cp_decompose(kernel: Tensor, rank: int, seed: int) -> list[Tensor]:
    """Return the vectors of the axes, float64 [T, R], [S, R], [D, R], [E, R].

    Args:
        kernel: float.
        rank: R.
        seed: of random directions, if the kernel has fewer than R.
    """
    target = kernel.double()
    generator = torch.Generator().manual_seed(seed)
    factors = [_initial_factor(target, axis, rank, generator) for axis in range(4)]
    norm, previous_error = float(target.norm()), float("inf")
    for _ in range(_CP_MAX_ITERATIONS):
        for axis in range(4):
            other_factors = [factors[other_axis] for other_axis in range(4) if other_axis != axis]
            factors[axis] = _solve(_project(target, factors, axis), other_factors)
        error = float((target - cp_kernel(factors)).norm())
        if previous_error - error <= _CP_TOLERANCE * norm:
            break
        previous_error = error
    return _balance_norms(factors)


def cp_kernel(factors: list[Tensor]) -> Tensor:
    """Return the kernel [T, S, D, E] that the vectors represent."""
    return torch.einsum("tr,sr,dr,er->tsde", *factors)


def _initial_factor(weight: Tensor, axis: int, rank: int, draw: torch.Generator) -> Tensor:
    """Return initial vectors: the leading ones of the axis, then random ones."""
    matrix = weight.transpose(0, axis).flatten(1)
    vectors = torch.linalg.svd(matrix, full_matrices=False).U[:, :rank]
    missing = rank - vectors.shape[1]
    random_vectors = torch.randn(len(matrix), missing, generator=draw, dtype=weight.dtype)
    return torch.cat([vectors, random_vectors / len(matrix) ** 0.5], dim=1)


def _project(weight: Tensor, factors: list[Tensor], axis: int) -> Tensor:
    """Return the kernel times the vectors of all other axes, [n, R]."""
    letters = [f"{letter}r" for index, letter in enumerate(_AXIS_LETTERS) if index != axis]
    other_factors = [factor for index, factor in enumerate(factors) if index != axis]
    return torch.einsum(
        f"{_AXIS_LETTERS},{','.join(letters)}->{_AXIS_LETTERS[axis]}r", weight, *other_factors
    )


def _solve(wanted: Tensor, other_factors: list[Tensor]) -> Tensor:
    """Return the vectors [n, R] of one axis that fit best with those of the other axes."""
    grams = [factor.T @ factor for factor in other_factors]
    gram = grams[0] * grams[1] * grams[2]
    ridge = _RIDGE * float(gram.diagonal().mean().clamp(min=1e-300))
    gram = gram + ridge * torch.eye(len(gram), dtype=gram.dtype)
    solution: Tensor = torch.linalg.solve(gram, wanted.T).T
    return solution


def _balance_norms(factors: list[Tensor]) -> list[Tensor]:
    """Return the same sum of products, with equal norms of the vectors in each term."""
    norms = [factor.norm(dim=0).clamp(min=1e-300) for factor in factors]
    mean_norm = (norms[0] * norms[1] * norms[2] * norms[3]) ** 0.25
    return [factor / norm * mean_norm for factor, norm in zip(factors, norms, strict=True)]


_TUCKER_MAX_ITERATIONS = 100  # iterations
_TUCKER_TOLERANCE = 1e-9  # of an iteration, relative to the kernel's squared norm


def unfold(kernel: Tensor, mode: int) -> Tensor:
    """Return the kernel as a matrix whose rows are the output (mode 0) or input channels (mode 1)."""
    return kernel.transpose(0, mode).flatten(1)


def tucker2_decompose(
    kernel: Tensor, input_rank: int | None, output_rank: int
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return U_in [S, R], the core [Q, R, D, E] and U_out [T, Q], float64.

    Args:
        kernel: float.
        input_rank: R; None if input channels are not reduced; U_in is None then.
        output_rank: Q.
    """
    target = kernel.double()
    output_factor = _leading_vectors(unfold(target, 0), output_rank)
    if input_rank is None:
        return None, torch.einsum("tsde,tq->qsde", target, output_factor), output_factor
    previous_energy, norm = -1.0, float(target.square().sum())
    input_factor = _leading_vectors(unfold(target, 1), input_rank)
    core = target
    for _ in range(_TUCKER_MAX_ITERATIONS):
        input_factor = _leading_vectors(
            unfold(torch.einsum("tsde,tq->qsde", target, output_factor), 1), input_rank
        )
        output_factor = _leading_vectors(
            unfold(torch.einsum("tsde,sr->trde", target, input_factor), 0), output_rank
        )
        core = torch.einsum("tsde,tq,sr->qrde", target, output_factor, input_factor)
        energy = float(core.square().sum())  # the factors are orthonormal, so this is the kept energy
        if energy - previous_energy <= _TUCKER_TOLERANCE * norm:
            break
        previous_energy = energy
    return input_factor, core, output_factor


def tucker2_kernel(input_factor: Tensor | None, core: Tensor, output_factor: Tensor) -> Tensor:
    """Return the kernel [T, S, D, E] that the three factors represent."""
    kernel = torch.einsum("qrde,tq->trde", core, output_factor)
    return kernel if input_factor is None else torch.einsum("trde,sr->tsde", kernel, input_factor)


def _leading_vectors(matrix: Tensor, rank: int) -> Tensor:
    """Return the first `rank` left singular vectors of [n, m], [n, rank]."""
    vectors: Tensor = torch.linalg.svd(matrix, full_matrices=False).U[:, :rank]
    if vectors.shape[1] < rank:  # fewer columns than the rank: further directions are arbitrary
        vectors = torch.linalg.qr(torch.cat([vectors, torch.eye(len(matrix), dtype=matrix.dtype)], 1)).Q
    return vectors[:, :rank]


# theorem 4: the threshold's zero is close to this times the root of a, for every a
_TAU_ZERO = 2.5129


@dataclass(frozen=True)
class VbmfRank:
    """rank: number of singular values above `threshold`. variance: of the noise."""

    rank: int
    variance: float
    threshold: float


def vbmf(values: NDArray[np.float64], rows: int, columns: int) -> VbmfRank:
    """Return the rank of a matrix by its singular values, with noise of unknown variance.

    Args:
        values: all singular values, falling, float64 [min(rows, columns)].
        rows: of the matrix.
        columns: of the matrix.
    """
    from scipy.optimize import minimize_scalar

    short, long = sorted((rows, columns))
    alpha = short / long
    squares = np.square(values[:short])
    if not squares.sum() > 0:
        return VbmfRank(0, 0.0, 0.0)
    limit = _threshold(alpha)
    # section 5: at least the values beyond the largest rank that can be distinguished from noise are noise
    max_rank = min(short - 1, max(0, math.ceil(short / (1 + alpha)) - 1))
    upper = float(squares.sum()) / (short * long)
    noise_squares = squares[max_rank:]
    lower = max(float(noise_squares[0]) / (long * limit), float(noise_squares.mean()) / long, upper * 1e-12)
    if lower < upper:
        optimum = minimize_scalar(
            lambda log: free_energy(math.exp(log), squares, long, alpha),
            bounds=(math.log(lower), math.log(upper)), method="bounded", options={"xatol": 1e-10},
        )  # fmt: skip
        variance = math.exp(float(optimum.x))
    else:
        variance = upper
    threshold = math.sqrt(long * variance * limit)
    return VbmfRank(int((np.sqrt(squares) > threshold).sum()), variance, threshold)


def free_energy(variance: float, squares: NDArray[np.float64], long: int, alpha: float) -> float:
    """Return the free energy of a variance, up to a constant and a factor.

    Args:
        variance: of the noise.
        squares: of all singular values.
        long: M.
        alpha: L / M.
    """
    x = squares / (long * variance)
    signal = x[x > _threshold(alpha)]
    noise = x[x <= _threshold(alpha)]
    tau = _tau(signal, alpha)
    of_noise = float(noise.sum() - np.log(np.maximum(noise, 1e-300)).sum())
    of_kept = float(
        (signal - tau).sum() + np.log((tau + 1) / signal).sum() + alpha * np.log(tau / alpha + 1).sum()
    )
    return of_noise + of_kept


def _threshold(alpha: float) -> float:
    """Return the threshold of g^2 / (M v): theorem 4."""
    zero = _TAU_ZERO * math.sqrt(alpha)
    return (1 + zero) * (1 + alpha / zero)


def _tau(x: NDArray[np.float64], alpha: float) -> NDArray[np.float64]:
    """Return the larger root t of x = (1 + t) (1 + a / t)."""
    middle = x - (1 + alpha)
    root: NDArray[np.float64] = 0.5 * (middle + np.sqrt(np.square(middle) - 4 * alpha))
    return root


_COLOR_CHANNELS = 3

ConvolutionRanks = tuple[int, ...]


def _report_operations(detail: str, model: Any, size: tuple[int, int], ctx: Context) -> None:
    """Report the operations of `model`, unless its forward is a user's that cannot be run without values."""
    try:
        ctx.details[detail] = count_operations(model, size)
    except RunError as error:
        if error.code not in MODULE_ERRORS:
            raise


def factorize_convolutions(
    model: Any, edits: list[Any], size: tuple[int, int], settings: FactorizeSettings, ctx: Context
) -> None:
    """Factorize the convolutions of `model` that gain by it; report in `ctx.details`.

    Args:
        model: changed in place.
        edits: its edits; the new ones are appended.
        size: height and width of its images, for counting operations; not used for arrays.
        settings: method, ranks, patterns and optimize_for.
        ctx: seed, progress; collects details and warnings.

    Raises:
        InputError: the patterns select no convolution.
    """
    layers = dict(convolution_candidates(model, settings))
    if not layers and (num_factorized := sum(isinstance(module, LowRankConv) for module in model.modules())):
        ctx.warn(
            "already-factorized",
            f"No convolution is factorized: include {settings.include} and exclude {settings.exclude}"
            f" select only convolutions that are already factorized ({num_factorized} in the model). Change"
            " the patterns, or remove the step.",
        )
        return
    if not layers:
        raise InputError(
            f"factorize: include {settings.include} and exclude {settings.exclude} select no"
            " convolution. Change the patterns.",
            code="no-layer-selected",
        )
    _report_operations("flops_before", model, size, ctx)
    ctx.details["parameters_before"] = count_stored_parameters(model)
    ranks: dict[str, list[int]] = {}
    errors: dict[str, float] = {}
    kept_reasons: dict[str, str] = {}
    for index, (name, conv) in enumerate(layers.items(), start=1):
        chosen_ranks = convolution_ranks(conv, settings)
        if (reason := _no_gain_reason(conv, chosen_ranks, settings)) is not None:
            kept_reasons[name] = reason
            continue
        replacement, error = factorize_convolution(conv, settings.method, chosen_ranks, ctx.seed)
        edit = {"op": "low_rank_conv", "module": name, "kind": settings.method, "ranks": list(chosen_ranks)}
        replace_layer(model, edits, name, replacement, edit)
        ranks[name], errors[name] = list(chosen_ranks), round(error, 4)
        ctx.progress(index, len(layers), name)
    ctx.details.update(ranks=ranks, relative_error=errors, left_alone=kept_reasons)
    _report_operations("flops_after", model, size, ctx)
    ctx.details["parameters_after"] = count_stored_parameters(model)
    if not ranks:
        ctx.warn(
            "no-rank-saves",
            f"None of the {len(layers)} convolutions is factorized: no rank saves"
            f" {_SAVED_QUANTITY[settings.optimize_for]} with these settings. Lower energy, rank or"
            " keep_ratio.",
        )


def convolution_candidates(model: Any, settings: FactorizeSettings) -> Iterator[tuple[str, nn.Conv2d]]:
    """Yield the convolutions that the patterns select, by their first names; no factorized ones."""
    parts = {id(step) for m in model.modules() if isinstance(m, LowRankConv) for step in m.steps}
    fixed = fixed_layers(model)
    for module, names in module_names(model).items():
        if not isinstance(module, nn.Conv2d) or id(module) in parts or isinstance(module.padding, str):
            continue
        if module in fixed or module.groups != 1 or module.padding_mode != "zeros":
            continue
        included = any(fnmatchcase(n, pattern) for n in names for pattern in settings.include)
        if included and not any(fnmatchcase(n, pattern) for n in names for pattern in settings.exclude):
            yield names[0], module


def convolution_ranks(conv: nn.Conv2d, settings: FactorizeSettings) -> ConvolutionRanks:
    """Return the ranks of `conv` by the settings.

    Tucker-2 has one for input and one for output channels. A layer with color inputs, or a 1 x 1 kernel,
    has only that of the output channels: three channels cannot be reduced with gain, and a matrix has one
    rank. CP has one, at least the larger of the two.
    """
    if settings.method == "cp":
        return (_cp_rank(conv, settings),)
    one_sided = conv.in_channels <= _COLOR_CHANNELS or max(conv.kernel_size) == 1
    if settings.keep_ratio is not None:
        return _ranks_for_ratio(conv, settings.keep_ratio, one_sided)
    output_rank, input_rank = (_channel_rank(conv, mode, settings) for mode in (0, 1))
    return (output_rank,) if one_sided else (input_rank, output_rank)


def _cp_rank(conv: nn.Conv2d, settings: FactorizeSettings) -> int:
    if settings.keep_ratio is not None:
        return max(1, int(settings.keep_ratio * convolution_macs(conv) / cp_macs(conv, 1)))
    if isinstance(settings.rank, int):
        return min(settings.rank, _exact_rank(conv))
    return max(_channel_rank(conv, mode, settings) for mode in (0, 1))


def _exact_rank(conv: nn.Conv2d) -> int:
    """Return a rank for which CP is exact."""
    height, width = conv.kernel_size
    return min(conv.in_channels, conv.out_channels) * height * width


def _channel_rank(conv: nn.Conv2d, mode: int, settings: FactorizeSettings) -> int:
    """Return the rank of the output (mode 0) or input channels (mode 1)."""
    matrix = unfold(conv.weight.detach().double(), mode)
    if isinstance(settings.rank, int):
        return min(settings.rank, len(matrix))
    values = torch.linalg.svdvals(matrix)
    if settings.rank == VBMF:
        return max(1, vbmf(values.numpy(), *matrix.shape).rank)
    return rank_of_energy(values, settings.energy or DEFAULT_ENERGY)


def _ranks_for_ratio(conv: nn.Conv2d, ratio: float, single: bool) -> ConvolutionRanks:
    """Return the largest ranks, each the same fraction of its channels, within `ratio` of the operations."""
    best_ranks: ConvolutionRanks = (1,) if single else (1, 1)
    original_macs = convolution_macs(conv)
    for output_rank in range(1, conv.out_channels + 1):
        input_rank = None if single else max(1, round(output_rank * conv.in_channels / conv.out_channels))
        if tucker2_macs(conv, input_rank, output_rank) > ratio * original_macs:
            break
        best_ranks = (output_rank,) if input_rank is None else (input_rank, output_rank)
    return best_ranks


_SAVED_QUANTITY = {"latency": "operations", "size": "weights"}


def _no_gain_reason(conv: nn.Conv2d, ranks: ConvolutionRanks, settings: FactorizeSettings) -> str | None:
    """Return why factors of these ranks save nothing, or None if they save."""
    if settings.optimize_for == "latency":
        full = convolution_macs(conv)
        inner = ranks[0] if len(ranks) == 2 else None
        cost = cp_macs(conv, ranks[0]) if settings.method == "cp" else tucker2_macs(conv, inner, ranks[-1])
    else:
        full, cost = conv.weight.numel(), count_factorized_weights(conv, settings.method, ranks)
    if cost < full:
        return None
    rank = " and ".join(map(str, ranks))
    kernel = " x ".join(map(str, conv.weight.shape))
    return f"rank {rank} of {kernel} saves no {_SAVED_QUANTITY[settings.optimize_for]}: {cost:,} of {full:,}"


def factorize_convolution(
    conv: nn.Conv2d, method: str, ranks: Sequence[int], seed: int
) -> tuple[LowRankConv, float]:
    """Return what takes the place of `conv`, and the norm of its kernel's error over that of the kernel."""
    replacement = LowRankConv(make_conv_steps(method, conv, ranks))
    kernel = conv.weight.detach().double()
    if method == "cp":
        output_factor, input_vectors, row_vectors, column_vectors = cp_decompose(kernel, ranks[0], seed)
        approximation = cp_kernel([output_factor, input_vectors, row_vectors, column_vectors])
        tensors = [
            input_vectors.T[:, :, None, None],
            row_vectors.T[:, None, :, None],
            column_vectors.T[:, None, None, :],
        ]
        tensors.append(output_factor[:, :, None, None])
    else:
        inner = ranks[0] if len(ranks) == 2 else None
        input_factor, core, output_factor = tucker2_decompose(kernel, inner, ranks[-1])
        approximation = tucker2_kernel(input_factor, core, output_factor)
        tensors = [core, output_factor[:, :, None, None]]
        tensors = tensors if input_factor is None else [input_factor.T[:, :, None, None], *tensors]
    with torch.no_grad():
        for step, tensor in zip(replacement.steps, tensors, strict=True):
            step.weight.copy_(tensor)  # type: ignore[operator]
        if conv.bias is not None:
            replacement.steps[-1].bias.copy_(conv.bias)  # type: ignore[operator]
    norm = float(kernel.norm())
    return replacement.eval(), float((approximation - kernel).norm()) / norm if norm else 0.0
