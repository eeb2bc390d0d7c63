"""Rotations of a model: the parameters that they multiply, and random matrices to start from.

A linear layer of rotated inputs x Q computes the same with the weight W Q, and one with the weight Q^T W has
rotated outputs. So a rotation of the hidden states (R1 of QuaRot and SpinQuant) is folded into the embeddings
and into all layers that read or write the states; nothing is computed for it at run time. The weights of the
norms between them are first moved into the layers that read the norms: without weights RMSNorm(x Q) is
RMSNorm(x) Q, and LayerNorm(x Q) is LayerNorm(x) Q if Q maps the vector of ones to itself, so that means are
kept. A rotation of the values of a head (R2) is folded into the value and output layers of attention.

Source: QuaRot, Ashkboos et al. 2024, arXiv:2404.00456, section 4; SpinQuant, Liu et al. 2024,
arXiv:2405.16406, section 3.1.

Shapes: D = channels of the hidden states, d = channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.linalg import hadamard, helmert
from scipy.stats import ortho_group
from torch import Tensor, nn

from smelt.compress.prune.reconstruct import bias_owner
from smelt.compress.quantize.scale_targets import NormGroup, norm_group, norm_weight_offset
from smelt.core.errors import InputError
from smelt.models.families.registry import (
    family_of,
    hidden_norm_names,
    model_attentions,
    norm_consumers,
    shared_inputs,
)
from smelt.models.hidden_width import hidden_axes
from smelt.models.layers import LowRankLinear, SharedLinear
from smelt.quantization.layers import is_embedding_table


@dataclass(frozen=True)
class RotatedAxis:
    """An axis of a parameter whose channels, from `start` on, are multiplied by a rotation in groups."""

    parameter: str
    dim: int
    start: int = 0

    def rotate(self, tensor: Tensor, matrix: Tensor) -> Tensor:
        """Return `tensor` with each group of channels of the axis multiplied by `matrix`.

        Args:
            tensor: any shape; its axis has a multiple of the channels of `matrix` after `start`.
            matrix: [channels, channels], of the same dtype.
        """
        channels = tensor.movedim(self.dim, -1)
        groups = channels[..., self.start :].unflatten(-1, (-1, len(matrix))) @ matrix
        rotated = torch.cat([channels[..., : self.start], groups.flatten(-2)], dim=-1)
        return rotated.movedim(-1, self.dim)


@dataclass
class Rotation:
    """A rotation, and the axes that it multiplies.

    matrix: orthogonal, float64 [c, c]; rotated channels are x `matrix`. keeps_mean: whether it has to map the
    vector of ones to itself.
    """

    matrix: Tensor
    keeps_mean: bool = False
    axes: list[RotatedAxis] = field(default_factory=list)


def hidden_rotation(model: Any, matrix: Tensor, keeps_mean: bool) -> Rotation:
    """Return the rotation of the hidden states of `model`, whose norms have no weights.

    Args:
        model: of floats.
        matrix: float64 [D, D].
        keeps_mean: see `Rotation`.
    """
    norm_weights = {f"{norm}.weight" for norm in hidden_norm_names(model)}
    axes = {(axis.name, axis.dim) for axis in hidden_axes(model) if axis.stream == "hidden"}
    rotated = [RotatedAxis(*axis) for axis in sorted(axes) if axis[0] not in norm_weights]
    return Rotation(matrix, keeps_mean, rotated)


def head_rotations(model: Any, rng: np.random.Generator) -> list[Rotation]:
    """Return the rotations of the values of attentions, at first by one random Hadamard matrix per width.

    Attentions that share their weights share a rotation; queries that share a value head read it rotated
    alike. Attentions with layers of another type have none.
    """
    producers = {feed.consumers[0]: feed for feed in shared_inputs(model)}
    names = {parameter: name for name, parameter in model.named_parameters()}
    matrices: dict[int, Tensor] = {}
    rotations: dict[Tensor, Rotation] = {}
    for attention in model_attentions(model):
        feed = producers[attention.out]
        if feed.producer is None:
            continue
        value, out = model.get_submodule(feed.producer), model.get_submodule(attention.out)
        if not (isinstance(value, nn.Linear | LowRankLinear) and isinstance(out, nn.Linear | LowRankLinear)):
            continue
        width = int(getattr(model.get_submodule(attention.name), attention.head_dim_attribute))
        if width not in matrices:
            matrices[width] = random_hadamard(width, rng)
        rows: Any = value.up if isinstance(value, LowRankLinear) else value
        columns: Any = out.down if isinstance(out, LowRankLinear) else out
        rotation = rotations.setdefault(rows.weight, Rotation(matrices[width]))
        if not rotation.axes:
            rotation.axes.append(RotatedAxis(names[columns.weight], 1))
            parameters = [tensor for tensor in (rows.weight, rows.bias) if tensor is not None]
            rotation.axes += [RotatedAxis(names[tensor], 0, feed.start) for tensor in parameters]
    return list(rotations.values())


@torch.no_grad()
def apply_rotations(model: Any, rotations: Sequence[Rotation]) -> None:
    """Multiply the parameters of `model` by `rotations`, in float64, in place."""
    for rotation in rotations:
        for axis in rotation.axes:
            parameter = model.get_parameter(axis.parameter)
            parameter.copy_(axis.rotate(parameter.double(), rotation.matrix))


def norm_groups(model: Any) -> list[NormGroup]:
    """Return the norms of the hidden states with the layers that read them."""
    hidden_norms = set(hidden_norm_names(model))
    return [norm_group(model, norm) for norm in norm_consumers(model) if norm.norm in hidden_norms]


def shared_layers_reason(model: Any, groups: list[NormGroup]) -> str | None:
    """Return why no weights can be moved from norms into their readers; None if they can."""
    owner: dict[Tensor, str] = {}
    for group in groups:
        for layer in group.linear_layers:
            if owner.setdefault(layer.weight, group.norm) != group.norm:
                return f"the norms {owner[layer.weight]} and {group.norm} share a layer that reads them"
    has_differences = any(isinstance(module, SharedLinear) for module in model.modules())
    return "layers share a matrix and add differences (low_rank_delta)" if has_differences else None


def fold_norms(model: Any, groups: list[NormGroup]) -> None:
    """Move the weights and biases of norms into the linear layers that read them, in place.

    A bias stays in the norm, divided by the norm's weight, if a layer that reads the norm has no bias. An
    output layer that is also the token embedding is separated from it.

    Raises:
        InputError: such a bias belongs to a weight of 0.
    """
    offset = norm_weight_offset(model)
    _untie_readers(model, groups)
    with torch.no_grad():
        for group in groups:
            norm: Any = model.get_submodule(group.norm)
            scale, bias = norm.weight + offset, getattr(norm, "bias", None)
            owners = [bias_owner(consumer) for consumer in group.consumers]
            if bias is not None and group.consumers and all(owner.bias is not None for owner in owners):
                for consumer, owner in zip(group.consumers, owners, strict=True):
                    owner.bias.copy_(consumer(bias))
                bias.zero_()
            elif bias is not None:
                if bool(((scale == 0) & (bias != 0)).any()):
                    raise InputError(
                        f"rotate: {group.norm} has channels with weight 0 and a bias, which"
                        " cannot be moved into the layers that read it. Set targets: [heads].",
                        code="zero-norm-weight",
                        setting="targets",
                    )
                bias.copy_((bias / scale).where(scale != 0, bias))
            for layer in group.linear_layers:
                layer.weight.mul_(scale)
            norm.weight.fill_(1 - offset)


def _untie_readers(model: Any, groups: list[NormGroup]) -> None:
    """Give linear layers that share their weight with an embedding a copy of it."""
    tables = {module.weight for module in model.modules() if is_embedding_table(module)}
    tied_layers = [layer for group in groups for layer in group.linear_layers if layer.weight in tables]
    if not tied_layers:
        return
    for layer in tied_layers:
        layer.weight = nn.Parameter(layer.weight.detach().clone(), layer.weight.requires_grad)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    model.all_tied_weights_keys = {
        target: source
        for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items()
        if parameters[target] is parameters[source]
    }
    family: Any = family_of(model)
    # a factor of the output layer depends on this key; different weights in a file are not tied in any case
    if family.output_scale(model.config.to_dict()) == 1:
        model.config.tie_word_embeddings = False


def random_hadamard(size: int, rng: np.random.Generator) -> Tensor:
    """Return a random Hadamard matrix, orthogonal, float64 [size, size].

    It is diag(s) (H x R): random signs s, the Kronecker product of the Hadamard matrix H of the largest power
    of two that divides `size`, and a random orthogonal matrix R of the odd rest, which is 1 for a power of
    two: then all entries are +-1 / sqrt(size). (QuaRot has tables of Hadamard matrices of 12, 20, 28, ...
    instead of R.)
    """
    power = size & -size
    matrix = np.kron(hadamard(power) / math.sqrt(power), ortho_group.rvs(size // power, random_state=rng))
    return torch.from_numpy(rng.choice((-1.0, 1.0), size)[:, None] * matrix)


def random_rotation_with_mean(size: int, rng: np.random.Generator) -> Tensor:
    """Return a random orthogonal matrix that maps the vector of ones to itself, float64 [size, size].

    It is uniformly distributed among them: a random orthogonal matrix in the space without a mean, which the
    rows of Helmert's matrix but the first span.
    """
    basis = helmert(size)
    rotation = basis.T @ ortho_group.rvs(size - 1, random_state=rng) @ basis
    return torch.from_numpy(np.asarray(rotation) + 1 / size)
