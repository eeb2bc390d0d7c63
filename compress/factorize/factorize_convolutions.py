"""Factorize convolutions: select them, choose ranks, and replace them.

Names: T, S = channels out and in of a convolution.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from smelt.compress.factorize.kernels.cp import cp_decompose
from smelt.compress.factorize.kernels.cp import cp_kernel as cp_product
from smelt.compress.factorize.kernels.tucker import tucker2_decompose, unfold
from smelt.compress.factorize.kernels.tucker import tucker2_kernel as tucker_product
from smelt.compress.factorize.kernels.vbmf import vbmf
from smelt.compress.factorize.macs import (
    convolution_macs,
    count_factorized_weights,
    count_macs,
    cp_macs,
    tucker2_macs,
)
from smelt.compress.factorize.ranks import rank_of_energy
from smelt.compress.factorize.settings import DEFAULT_ENERGY, VBMF, FactorizeSettings
from smelt.compress.float_model import count_stored_parameters
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.runtime.images.image_processor import DEFAULT_IMAGE_SIZE, ImageProcessor
from smelt.runtime.layers.low_rank_conv import LowRankConv, make_conv_steps
from smelt.runtime.models.structure import module_names, replace_layer

_COLOUR_CHANNELS = 3

ConvolutionRanks = tuple[int, ...]


def factorize_convolutions(
    model: Any, edits: list[Any], processor: ImageProcessor, settings: FactorizeSettings, ctx: Context
) -> None:
    """Factorize the convolutions of `model` that gain by it; report in `ctx.details`.

    Args:
        model: changed in place.
        edits: its edits; the new ones are appended.
        processor: defines the image size for counting operations.
        settings: method, ranks, patterns and optimize_for.
        ctx: seed, progress; collects details and warnings.

    Raises:
        InputError: the patterns select no convolution.
    """
    layers = dict(convolution_candidates(model, settings))
    if not layers and (thin := sum(isinstance(module, LowRankConv) for module in model.modules())):
        ctx.warn(
            "already-factorized",
            f"No convolution is factorized: include {settings.include} and exclude {settings.exclude}"
            f" select only convolutions that are already factorized ({thin} in the model). Change"
            " the patterns, or remove the step.",
        )
        return
    if not layers:
        raise InputError(
            f"factorize: include {settings.include} and exclude {settings.exclude} select no"
            " convolution. Change the patterns.",
            code="no-layer-selected",
        )
    size = processor.shape or (DEFAULT_IMAGE_SIZE, DEFAULT_IMAGE_SIZE)
    ctx.details["flops_before"] = count_macs(model, size)
    ctx.details["parameters_before"] = count_stored_parameters(model)
    ranks: dict[str, list[int]] = {}
    errors: dict[str, float] = {}
    alone: dict[str, str] = {}
    for at, (name, conv) in enumerate(layers.items(), start=1):
        chosen = convolution_ranks(conv, settings)
        if (reason := _no_gain_reason(conv, chosen, settings)) is not None:
            alone[name] = reason
            continue
        new, error = factorize_convolution(conv, settings.method, chosen, ctx.seed)
        edit = {"op": "low_rank_conv", "module": name, "kind": settings.method, "ranks": list(chosen)}
        replace_layer(model, edits, name, new, edit)
        ranks[name], errors[name] = list(chosen), round(error, 4)
        ctx.progress(at, len(layers), name)
    ctx.details.update(ranks=ranks, relative_error=errors, left_alone=alone)
    ctx.details["flops_after"] = count_macs(model, size)
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
    for module, names in module_names(model).items():
        if not isinstance(module, nn.Conv2d) or id(module) in parts or isinstance(module.padding, str):
            continue
        if module.groups != 1 or module.padding_mode != "zeros":
            continue
        wanted = any(fnmatchcase(n, pattern) for n in names for pattern in settings.include)
        if wanted and not any(fnmatchcase(n, pattern) for n in names for pattern in settings.exclude):
            yield names[0], module


def convolution_ranks(conv: nn.Conv2d, settings: FactorizeSettings) -> ConvolutionRanks:
    """Return the ranks of `conv` by the settings.

    Tucker-2 has one for input and one for output channels. A layer with colour inputs, or a 1 x 1 kernel,
    has only that of the output channels: three channels cannot be reduced with gain, and a matrix has one
    rank. CP has one, at least the larger of the two.
    """
    if settings.method == "cp":
        return (_cp_rank(conv, settings),)
    single = conv.in_channels <= _COLOUR_CHANNELS or max(conv.kernel_size) == 1
    if settings.keep_ratio is not None:
        return _ranks_for_ratio(conv, settings.keep_ratio, single)
    out, into = (_channel_rank(conv, mode, settings) for mode in (0, 1))
    return (out,) if single else (into, out)


def _cp_rank(conv: nn.Conv2d, settings: FactorizeSettings) -> int:
    if settings.keep_ratio is not None:
        return max(1, int(settings.keep_ratio * convolution_macs(conv) / cp_macs(conv, 1)))
    if isinstance(settings.rank, int):
        return min(settings.rank, _exact_rank(conv))
    return max(_channel_rank(conv, mode, settings) for mode in (0, 1))


def _exact_rank(conv: nn.Conv2d) -> int:
    """Return a rank for which CP is exact."""
    high, wide = conv.kernel_size
    return min(conv.in_channels, conv.out_channels) * high * wide


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
    best: ConvolutionRanks = (1,) if single else (1, 1)
    whole = convolution_macs(conv)
    for out in range(1, conv.out_channels + 1):
        into = None if single else max(1, round(out * conv.in_channels / conv.out_channels))
        if tucker2_macs(conv, into, out) > ratio * whole:
            break
        best = (out,) if into is None else (into, out)
    return best


_SAVED_QUANTITY = {"latency": "operations", "size": "weights"}


def _no_gain_reason(conv: nn.Conv2d, ranks: ConvolutionRanks, settings: FactorizeSettings) -> str | None:
    """Return why factors of these ranks save nothing, or None if they save."""
    if settings.optimize_for == "latency":
        whole = convolution_macs(conv)
        inner = ranks[0] if len(ranks) == 2 else None
        thin = cp_macs(conv, ranks[0]) if settings.method == "cp" else tucker2_macs(conv, inner, ranks[-1])
    else:
        whole, thin = conv.weight.numel(), count_factorized_weights(conv, settings.method, ranks)
    if thin < whole:
        return None
    said = " and ".join(map(str, ranks))
    kernel = " x ".join(map(str, conv.weight.shape))
    return f"rank {said} of {kernel} saves no {_SAVED_QUANTITY[settings.optimize_for]}: {thin:,} of {whole:,}"


def factorize_convolution(
    conv: nn.Conv2d, method: str, ranks: Sequence[int], seed: int
) -> tuple[LowRankConv, float]:
    """Return what takes the place of `conv`, and the norm of its kernel's error over that of the kernel."""
    new = LowRankConv(make_conv_steps(method, conv, ranks))
    kernel = conv.weight.detach().double()
    if method == "cp":
        out, into, down, across = cp_decompose(kernel, ranks[0], seed)
        whole = cp_product([out, into, down, across])
        tensors = [into.T[:, :, None, None], down.T[:, None, :, None], across.T[:, None, None, :]]
        tensors.append(out[:, :, None, None])
    else:
        inner = ranks[0] if len(ranks) == 2 else None
        before, core, out = tucker2_decompose(kernel, inner, ranks[-1])
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
