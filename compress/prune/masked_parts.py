"""Parts of a model with masks (for units, whole parts or hidden width), and the distribution of masks.

Trainable masks z in [0, 1] have a hard concrete distribution, with point masses at 0 and 1 (Louizos et al.
2018, arXiv:1712.01312, section 2.2); log alpha is trained; u is uniform, beta 2/3, gamma -0.1, zeta 1.1:

    s = sigmoid((log u - log(1 - u) + log alpha) / beta)        z = clamp(s (zeta - gamma) + gamma, 0, 1)
    P(z > 0) = sigmoid(log alpha - beta log(-gamma / zeta))

Shapes: D = channels of the hidden states.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.drop_layers.drop_parts import LayerPart, layer_parts
from smelt.compress.drop_layers.settings import check_part_kinds
from smelt.compress.model_input import AFTER_QUANTIZE, TRAINING_BEFORE_QUANTIZE
from smelt.compress.prune.costs import UnitGroup
from smelt.compress.prune.importances.scores import distance_norms, hidden_norms
from smelt.compress.prune.settings import LearnedMasksSettings
from smelt.compress.prune.units import (
    find_groups,
    linear_with_inputs,
    linear_with_outputs,
)
from smelt.core.errors import InputError
from smelt.core.messages import with_article
from smelt.models.edits import Edit
from smelt.models.families.registry import blocks_of, family_of
from smelt.models.hidden_width import (
    HiddenAxis,
    hidden_axes,
    hidden_width,
    prune_hidden_width,
    temporary_hidden_width,
    write_width_to_config,
)
from smelt.models.layers import LowRankLinear, SharedLinear


@dataclass(frozen=True)
class MaskedPart:
    """An attention or a feed-forward part with masks, or only with those of the hidden width.

    linear_layers: the dotted names of its layers; the units are the inputs of the last one, whose outputs are
    added to the hidden states. units: the units with masks; None without. positions: its positions in blocks
    (several if blocks share its layers) if the whole part has a mask; else empty. count, cost: the number of
    units, and the parameters of each; without unit masks, 1 and the parameters of all.
    """

    linear_layers: tuple[str, ...]
    units: UnitGroup | None
    positions: tuple[LayerPart, ...]
    count: int
    unit_parameters: float

    @property
    def output_layer(self) -> str:
        """The linear layer whose output is added to the hidden states."""
        return self.linear_layers[-1]


def find_masked_parts(model: Any, settings: LearnedMasksSettings) -> list[MaskedPart]:
    """Return the parts of `model` with masks: attentions, feed-forward parts, then parts without unit masks.

    With masks of the hidden width that is every part, since all become narrower.

    Raises:
        InputError: the model's family is unknown, it has no part that the settings name, or it is quantized.
    """
    attentions, blocks = find_groups(model, stage="learned_masks", setting="learned_masks")
    groups: list[UnitGroup] = [*(attentions if "heads" in settings.targets else [])]
    groups += blocks if "ffn" in settings.targets else []
    for error in check_part_kinds(settings.parts, model.config.to_dict(), "learned_masks.parts"):
        raise InputError(f"learned_masks: parts: {error.message}", code=error.code, setting=error.setting)
    parts_by_modules: dict[tuple[nn.Module, ...], list[LayerPart]] = {}
    for part in layer_parts(model) if settings.parts else ():
        if part.kind in settings.parts:
            parts_by_modules.setdefault(_modules(model, part.structure.linear_layers), []).append(part)
    all_parts = _layers_of_all_parts(model) if "width" in settings.targets else {}
    if not groups and not parts_by_modules and not all_parts:
        kind, target = with_article(model.config.model_type), [*settings.targets, *settings.parts][0]
        raise InputError(
            f"learned_masks: {kind} model has no {target} that can be removed.",
            code="nothing-to-remove",
            setting="learned_masks",
        )
    layer_names = [g.structure.linear_layers for g in groups] + [
        p[0].structure.linear_layers for p in parts_by_modules.values()
    ]
    for names in [*layer_names, *all_parts.values()]:
        _require_float(model, names)
    masked_parts = []
    for group in groups:
        positions = parts_by_modules.pop(_modules(model, group.structure.linear_layers), [])
        count = group.count(model)
        masked_parts.append(
            MaskedPart(
                group.structure.linear_layers,
                group,
                tuple(positions),
                count,
                count_unit_parameters(model, group),
            )
        )
    for parts in parts_by_modules.values():
        names = parts[0].structure.linear_layers
        masked_parts.append(MaskedPart(names, None, tuple(parts), 1, _count_part_parameters(model, names)))
    masked_modules = {_modules(model, masked.linear_layers) for masked in masked_parts}
    maskless = [names for modules, names in all_parts.items() if modules not in masked_modules]
    return masked_parts + [
        MaskedPart(names, None, (), 1, _count_part_parameters(model, names)) for names in maskless
    ]


def _layers_of_all_parts(model: Any) -> dict[tuple[nn.Module, ...], tuple[str, ...]]:
    """Return the linear layers of each attention and feed-forward part; shared layers appear once."""
    layers: dict[tuple[nn.Module, ...], tuple[str, ...]] = {}
    for part in (part for block in blocks_of(model) for part in block.parts):
        layers.setdefault(_modules(model, part.linear_layers), part.linear_layers)
    return layers


def count_unit_parameters(model: Any, group: UnitGroup) -> float:
    """Return the number of parameters of one unit of `group`: rows with biases, and columns."""
    count = group.count(model)
    row_indices = group.row_indices(model, torch.arange(count))
    row_parameters = sum(
        len(indices) * (layer.in_features + (layer.bias is not None))
        for name, indices in row_indices.items()
        for layer in [linear_with_outputs(model, name)]
    )
    return (
        row_parameters + linear_with_inputs(model, group.structure.linear_layers[-1]).weight.numel()
    ) / count


def _count_part_parameters(model: Any, products: Sequence[str]) -> float:
    """Return the number of parameters of all units of a part."""
    *input_names, output_name = products
    input_layers = [linear_with_outputs(model, name) for name in input_names]
    row_parameters = sum(
        layer.out_features * (layer.in_features + (layer.bias is not None)) for layer in input_layers
    )
    return float(row_parameters + linear_with_inputs(model, output_name).weight.numel())


def _modules(model: nn.Module, names: Sequence[str]) -> tuple[nn.Module, ...]:
    return tuple(model.get_submodule(name) for name in names)


def _require_float(model: Any, products: Sequence[str]) -> None:
    for name in products:
        module = model.get_submodule(name)
        if isinstance(module, SharedLinear):
            raise InputError(
                f"learned_masks: '{name}' shares its matrix with other layers and has its own low-rank delta,"
                " so its units cannot be removed. Put the step before 'share-weights', or share without"
                " low_rank_delta.",
                code="shared-weights",
                setting="learned_masks",
            )
        for layer in (module.down, module.up) if isinstance(module, LowRankLinear) else (module,):
            if type(layer) is not nn.Linear:
                raise InputError(
                    f"learned_masks: '{name}' is a {type(layer).__name__}, whose weights are quantized;"
                    f" {TRAINING_BEFORE_QUANTIZE['learned_masks'].replace('WORD', 'finetune')}",
                    code=AFTER_QUANTIZE,
                )


_BETA, _GAMMA, _ZETA = 2 / 3, -0.1, 1.1
INITIAL_LOG_ALPHA = 3.0  # a mask is then 1 in four of five samples, and 0 in one of a hundred


def sample_mask(log_alpha: Tensor) -> Tensor:
    """Return sampled hard concrete masks, with the dtype of `log_alpha` and a gradient."""
    u = torch.rand_like(log_alpha).clamp(1e-6, 1 - 1e-6)
    s = ((u.log() - (1 - u).log() + log_alpha) / _BETA).sigmoid()
    return (s * (_ZETA - _GAMMA) + _GAMMA).clamp(0, 1)


def open_probability(log_alpha: Tensor) -> Tensor:
    """Return the probability that a mask is not 0."""
    return (log_alpha - _BETA * math.log(-_GAMMA / _ZETA)).sigmoid()


def deterministic_mask(log_alpha: Tensor) -> Tensor:
    """Return deterministic masks, clamp(sigmoid(log alpha) (zeta - gamma) + gamma, 0, 1)."""
    return (log_alpha.sigmoid() * (_ZETA - _GAMMA) + _GAMMA).clamp(0, 1)


def most_open(log_alpha: Tensor, multiple_of: int = 1) -> Tensor:
    """Return the indices of the masks with the largest log alpha, as many as are expected to be open.

    int64, ascending, on the CPU; their number is a multiple of `multiple_of`, at least one multiple, at most
    all.
    """
    log_alpha = log_alpha.detach().cpu()
    num_open = math.floor(float(open_probability(log_alpha).sum()) / multiple_of + 0.5) * multiple_of
    count = min(len(log_alpha), max(multiple_of, num_open))
    indices: Tensor = log_alpha.topk(count).indices.sort().values
    return indices


def deterministic_mask_at(log_alpha: Tensor, kept_indices: Tensor) -> Tensor:
    """Return deterministic masks that are 0 outside the indices `kept_indices`."""
    soft, kept_indices = deterministic_mask(log_alpha), kept_indices.to(log_alpha.device)
    return torch.zeros_like(soft).index_copy(0, kept_indices, soft[kept_indices])


class HiddenWidthMask:
    """The mask of a model's hidden width during training: one per channel, shared by encoder and decoder.

    A channel runs through all blocks, so its mask z is the same everywhere. It multiplies the outputs of
    embeddings, of each attention and feed-forward part, and of each norm. Norms only use the open channels
    (z > 0), so that a model without the closed ones computes the same:

        y = (x - mean of open x) / sqrt(var of open x + eps) * w + b        0 where z = 0; then times z

    In a tied embedding and output layer, z also multiplies the layer's inputs. Sinusoidal positions, which
    are not stored, are 0 where z is 0, and unchanged elsewhere.

    Sources: CoFi, Xia et al. 2022, arXiv:2204.00408, modeling_bert.py; for pre-norm models Sheared LLaMA, Xia
    et al. 2023, arXiv:2310.06694, composer_llama.py.

    Args:
        model: float; changed when the mask is folded or cut.
        round_to: the kept channels are a multiple of it.

    Raises:
        InputError: the model's family is unknown, or it has quantized layers.
    """

    def __init__(self, model: Any, round_to: int) -> None:
        self.model, self.round_to, self.width = model, round_to, hidden_width(model)
        self.home = nn.ParameterDict({"width": nn.Parameter(torch.full((self.width,), INITIAL_LOG_ALPHA))})
        self._set(torch.ones(self.width))

    @property
    def log_alpha(self) -> nn.Parameter:
        """The log alpha of each channel, float [D]."""
        parameter: nn.Parameter = self.home["width"]
        return parameter

    def expected_keep_ratio(self) -> Tensor:
        """Return the expected fraction of kept channels, a scalar with a gradient."""
        return open_probability(self.log_alpha).mean()

    @torch.no_grad()
    def kept_channels(self) -> Tensor:
        """Return the kept channels, int64, ascending; their number is the expected one."""
        return most_open(self.log_alpha, self.round_to)

    @torch.no_grad()
    def final_mask(self) -> Tensor:
        """Return the final, deterministic mask, float [D]."""
        return deterministic_mask_at(self.log_alpha, self.kept_channels())

    @contextlib.contextmanager
    def masked_training(self) -> Iterator[None]:
        """Mask the model in this context, with a new sample for each forward pass in training."""
        model = self.model
        self._set(self.final_mask())
        handles: list[Any] = [model.register_forward_pre_hook(self._sample)]
        handles += [m.register_forward_hook(partial(self._mask_output, True)) for m in self._producers()]
        handles += [
            m.register_forward_hook(partial(self._mask_output, False)) for m in self._sinusoidal_tables()
        ]
        handles += [m.register_forward_pre_hook(self._mask_input) for m in self._tied_outputs()]
        # their tables are read without a call of a module
        handles += [m.register_forward_pre_hook(self._mask_input) for m in distance_norms(model)]
        for norm in hidden_norms(model):
            handles += [
                norm.register_forward_pre_hook(self._select_open),
                norm.register_forward_hook(self._norm_output),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def fold_into_weights(self) -> None:
        """Multiply the mask into the weights whose outputs it multiplies."""
        family: Any = family_of(self.model)
        plus_one = set(hidden_norms(self.model)) if family.rms_norm.adds_one_to_weight else set()
        values = self.final_mask()
        for axis, tensor in self._producing_tensors():
            shape = [-1 if dim == axis.dim else 1 for dim in range(tensor.dim())]
            mask = values.to(tensor).view(shape)
            if self.model.get_submodule(axis.name.rpartition(".")[0]) in plus_one:
                tensor.mul_(mask).add_(mask - 1)
            else:
                tensor.mul_(mask)

    @contextlib.contextmanager
    def as_stored(self, edits: list[Edit]) -> Iterator[None]:
        """Narrow the model in this context to its stored width, and record it in `edits`."""
        saved = [(tensor, tensor.detach().clone()) for _, tensor in self._producing_tensors()]
        self.fold_into_weights()
        try:
            with temporary_hidden_width(self.model, self.kept_channels().tolist()) as edit:
                edits.append(edit)
                try:
                    yield
                finally:
                    edits.pop()
        finally:
            for tensor, values in saved:
                tensor.data.copy_(values)

    def cut(self, edits: list[Edit]) -> dict[str, int]:
        """Remove the closed channels in place; append the edit, and return the details."""
        channels = self.kept_channels().tolist()
        if len(channels) < self.width:
            edits[:] = write_width_to_config(self.model, edits, prune_hidden_width(self.model, channels))
        return {"width_before": self.width, "width_after": len(channels)}

    def _sample(self, model: nn.Module, _: Any) -> None:
        self._set(sample_mask(self.log_alpha) if model.training else self.final_mask())

    def _set(self, mask: Tensor) -> None:
        self._mask = mask
        self._open = mask.detach() > 0
        # the norm then only uses open channels
        self._grow = (self.width / self._open.sum().clamp(min=1)).sqrt()

    def _mask_output(self, soft: bool, _: nn.Module, __: Any, states: Tensor) -> Tensor:
        return states * (self._mask if soft else self._open).to(states.dtype)

    def _mask_input(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0] * self._mask.to(inputs[0].dtype), *inputs[1:])

    def _select_open(self, norm: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = inputs[0]  # 0 in closed channels
        if isinstance(norm, nn.LayerNorm):
            mean = x.float().sum(dim=-1, keepdim=True) / self._open.sum().clamp(min=1)
            x = (x - mean.to(x.dtype)) * self._open.to(x.dtype)
        return (x * self._grow, *inputs[1:])

    def _norm_output(self, norm: nn.Module, _: Any, states: Tensor) -> Tensor:
        bias = getattr(norm, "bias", None)
        scaled = states / self._grow if bias is None else (states - bias) / self._grow + bias
        return scaled * self._mask.to(scaled.dtype)

    def _producers(self) -> Iterable[nn.Module]:
        """Return the modules that output hidden states: embeddings, other tensors' owners, output layers."""
        names = [p.linear_layers[-1] for block in blocks_of(self.model) for p in block.parts]
        sines = set(self._sinusoidal_tables())
        for stack in self._stacks():
            projection = stack.stream.embedding_projection
            tables = [table.rpartition(".")[0] for table in stack.stream.embeddings]
            names += [projection] if projection else tables
            if stack.stream.other_tensors:
                names.append(_owner_module([name for name, _ in stack.stream.other_tensors]))
        modules = dict.fromkeys(self.model.get_submodule(name) for name in names)
        return [module for module in modules if module not in sines]

    def _sinusoidal_tables(self) -> Iterable[nn.Module]:
        family: Any = family_of(self.model)
        tables = [table for stack in self._stacks() for table in stack.stream.embeddings[1:]]
        owners = [self.model.get_submodule(table.rpartition(".")[0]) for table in tables]
        return dict.fromkeys(owners) if family.position_encoding.is_sinusoidal else {}

    def _tied_outputs(self) -> Iterable[nn.Module]:
        """Return the linear layers that read hidden states with a tied embedding matrix."""
        giving = {(axis.names, axis.dim) for axis, _ in self._producing_tensors()}
        names = [
            name
            for axis in hidden_axes(self.model)
            if axis.is_input and (axis.names, axis.dim) in giving
            for name in axis.names
        ]
        owners = dict.fromkeys(self.model.get_submodule(name.rpartition(".")[0]) for name in names)
        return [module for module in owners if isinstance(module, nn.Linear)]

    def _producing_tensors(self) -> list[tuple[HiddenAxis, Tensor]]:
        """Return the tensors that output, normalize or add to hidden states, without unstored sinusoids."""
        sines = {id(t) for m in self._sinusoidal_tables() for t in (*m.parameters(), *m.buffers())}
        tensors = []
        for axis in hidden_axes(self.model):
            owner, _, attribute = axis.name.rpartition(".")
            tensor: Tensor = getattr(self.model.get_submodule(owner), attribute)
            if axis.stream == "hidden" and not axis.is_input and id(tensor) not in sines:
                tensors.append((axis, tensor))
        return tensors

    def _stacks(self) -> Any:
        family: Any = family_of(self.model)
        return family.stacks(self.model.config.to_dict())


def _owner_module(names: list[str]) -> str:
    """Return the innermost module that contains all these tensors."""
    owners = [name.split(".")[:-1] for name in names]
    common = [parts[0] for parts in zip(*owners, strict=False) if len(set(parts)) == 1]
    return ".".join(common)
