"""`factorize` on convolutions: which of them, which ranks, and what takes their place.

Names: T, S = channels out and in of a convolution.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from smelt.compress.factorize.kernels.cp import cp
from smelt.compress.factorize.kernels.cp import product as cp_product
from smelt.compress.factorize.kernels.tucker import product as tucker_product
from smelt.compress.factorize.kernels.tucker import tucker, unfolded
from smelt.compress.factorize.kernels.vbmf import vbmf
from smelt.compress.factorize.operations import of_cp, of_tucker, of_whole, operations_of, weights_of
from smelt.compress.factorize.ranks import rank_of_energy
from smelt.compress.factorize.settings import DEFAULT_ENERGY, VBMF, FactorizeSettings
from smelt.compress.float_model import stored_parameters
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.runtime.images.processor import USUAL_SIDE, ImageProcessor
from smelt.runtime.layers.low_rank_conv import LowRankConv, steps_of
from smelt.runtime.models.structure import names_of, replace_layer

_COLOURS = 3

Ranks = tuple[int, ...]


def factorize_convolutions(
    model: Any, edits: list[Any], processor: ImageProcessor, settings: FactorizeSettings, ctx: Context
) -> None:
    """Replace convolutions of `model` that gain by thinner ones; write the result to `ctx.details`.

    Args:
        model: changed in place.
        edits: its structure, which is added to.
        processor: whose images operations are counted on.
        settings: method, ranks, patterns and aim.
        ctx: seed, progress; gets details and warnings.

    Raises:
        InputError: the patterns choose no convolution.
    """
    layers = dict(candidates(model, settings))
    if not layers and (thin := sum(isinstance(module, LowRankConv) for module in model.modules())):
        ctx.warn(
            "already-factorized",
            f"No convolution is factorized: include {settings.include} and exclude {settings.exclude} select"
            f" only convolutions that are factorized already ({thin} in the model).",
        )
        return
    if not layers:
        raise InputError(
            f"factorize: include {settings.include}, exclude {settings.exclude} choose no convolution.",
            code="no-layer-selected",
        )
    size = processor.shape or (USUAL_SIDE, USUAL_SIDE)
    ctx.details["flops_before"] = operations_of(model, size)
    ctx.details["parameters_before"] = stored_parameters(model)
    ranks: dict[str, list[int]] = {}
    errors: dict[str, float] = {}
    alone: dict[str, str] = {}
    for at, (name, conv) in enumerate(layers.items(), start=1):
        chosen = ranks_of(conv, settings)
        if (reason := _gains_nothing(conv, chosen, settings)) is not None:
            alone[name] = reason
            continue
        new, error = thinner(conv, settings.method, chosen, ctx.seed)
        edit = {"op": "low_rank_conv", "module": name, "kind": settings.method, "ranks": list(chosen)}
        replace_layer(model, edits, name, new, edit)
        ranks[name], errors[name] = list(chosen), round(error, 4)
        ctx.progress(at, len(layers), name)
    ctx.details.update(ranks=ranks, relative_error=errors, left_alone=alone)
    ctx.details["flops_after"] = operations_of(model, size)
    ctx.details["parameters_after"] = stored_parameters(model)
    if not ranks:
        ctx.warn(
            "no-rank-saves",
            f"None of the {len(layers)} convolutions is factorized: no rank saves"
            f" {_SAVED[settings.optimize_for]} with"
            " these settings. Lower energy, rank or keep_ratio.",
        )


def candidates(model: Any, settings: FactorizeSettings) -> Iterator[tuple[str, nn.Conv2d]]:
    """Yield the convolutions that the patterns choose, by their first names; parts of a pair are none."""
    parts = {id(step) for m in model.modules() if isinstance(m, LowRankConv) for step in m.steps}
    for module, names in names_of(model).items():
        if not isinstance(module, nn.Conv2d) or id(module) in parts or isinstance(module.padding, str):
            continue
        if module.groups != 1 or module.padding_mode != "zeros":
            continue
        wanted = any(fnmatchcase(n, pattern) for n in names for pattern in settings.include)
        if wanted and not any(fnmatchcase(n, pattern) for n in names for pattern in settings.exclude):
            yield names[0], module


def ranks_of(conv: nn.Conv2d, settings: FactorizeSettings) -> Ranks:
    """Return the ranks of `conv` as the settings ask for them.

    Tucker-2 has one for the channels in and one for those out. A layer that reads colours, and one of 1 x 1
    taps, have that of the channels out alone: there is nothing to gain in three channels, and a matrix has
    one rank. CP has one, which is at least the larger of the two.
    """
    if settings.method == "cp":
        return (_cp_rank(conv, settings),)
    single = conv.in_channels <= _COLOURS or max(conv.kernel_size) == 1
    if settings.keep_ratio is not None:
        return _of_ratio(conv, settings.keep_ratio, single)
    out, into = (_rank(conv, mode, settings) for mode in (0, 1))
    return (out,) if single else (into, out)


def _cp_rank(conv: nn.Conv2d, settings: FactorizeSettings) -> int:
    if settings.keep_ratio is not None:
        return max(1, int(settings.keep_ratio * of_whole(conv) / of_cp(conv, 1)))
    if isinstance(settings.rank, int):
        return min(settings.rank, _most(conv))
    return max(_rank(conv, mode, settings) for mode in (0, 1))


def _most(conv: nn.Conv2d) -> int:
    """Return a rank at which CP is exact."""
    high, wide = conv.kernel_size
    return min(conv.in_channels, conv.out_channels) * high * wide


def _rank(conv: nn.Conv2d, mode: int, settings: FactorizeSettings) -> int:
    """Return the rank of the channels out (mode 0) or in (mode 1)."""
    matrix = unfolded(conv.weight.detach().double(), mode)
    if isinstance(settings.rank, int):
        return min(settings.rank, len(matrix))
    values = torch.linalg.svdvals(matrix)
    if settings.rank == VBMF:
        return max(1, vbmf(values.numpy(), *matrix.shape).rank)
    return rank_of_energy(values, settings.energy or DEFAULT_ENERGY)


def _of_ratio(conv: nn.Conv2d, ratio: float, single: bool) -> Ranks:
    """Return the largest ranks, each the same part of its channels, that leave `ratio` of the operations."""
    best: Ranks = (1,) if single else (1, 1)
    whole = of_whole(conv)
    for out in range(1, conv.out_channels + 1):
        into = None if single else max(1, round(out * conv.in_channels / conv.out_channels))
        if of_tucker(conv, into, out) > ratio * whole:
            break
        best = (out,) if into is None else (into, out)
    return best


_SAVED = {"latency": "operations", "size": "weights"}


def _gains_nothing(conv: nn.Conv2d, ranks: Ranks, settings: FactorizeSettings) -> str | None:
    """Say why thinner convolutions of these ranks are no gain; None where they are one."""
    if settings.optimize_for == "latency":
        whole = of_whole(conv)
        inner = ranks[0] if len(ranks) == 2 else None
        thin = of_cp(conv, ranks[0]) if settings.method == "cp" else of_tucker(conv, inner, ranks[-1])
    else:
        whole, thin = conv.weight.numel(), weights_of(conv, settings.method, ranks)
    if thin < whole:
        return None
    said = " and ".join(map(str, ranks))
    kernel = " x ".join(map(str, conv.weight.shape))
    return f"rank {said} of {kernel} saves no {_SAVED[settings.optimize_for]}: {thin:,} of {whole:,}"


def thinner(conv: nn.Conv2d, method: str, ranks: Sequence[int], seed: int) -> tuple[LowRankConv, float]:
    """Return what takes the place of `conv`, and the norm of its kernel's error over that of the kernel."""
    new = LowRankConv(steps_of(method, conv, ranks))
    kernel = conv.weight.detach().double()
    if method == "cp":
        out, into, down, across = cp(kernel, ranks[0], seed)
        whole = cp_product([out, into, down, across])
        tensors = [into.T[:, :, None, None], down.T[:, None, :, None], across.T[:, None, None, :]]
        tensors.append(out[:, :, None, None])
    else:
        inner = ranks[0] if len(ranks) == 2 else None
        before, core, out = tucker(kernel, inner, ranks[-1])
        whole = tucker_product(before, core, out)
        tensors = [core, out[:, :, None, None]]
        tensors = tensors if before is None else [before.T[:, :, None, None], *tensors]
    with torch.no_grad():
        for step, tensor in zip(new.steps, tensors, strict=True):
            step.weight.copy_(tensor)  # type: ignore[operator]
        if conv.bias is not None:
            new.steps[-1].bias.copy_(conv.bias)  # type: ignore[operator]
    norm = float(kernel.norm())
    return new.eval(), float((whole - kernel).norm()) / norm if norm else 0.0
