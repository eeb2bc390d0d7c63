"""Groups of tensors that share heads or neurons, their removal, and the number of units kept per layer.

The model's family (`smelt.models.families`) defines the groups. Units are removed with their rows and
columns, and recorded in the edits. Either every layer keeps the same fraction, or the units of all layers
compete (`allocate_globally`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from smelt.compress.model_input import AFTER_QUANTIZE
from smelt.compress.prune.settings import PruneSettings
from smelt.core.errors import InputError
from smelt.core.messages import Message, warning, with_article
from smelt.models.edits import Edit, is_masked, mark_masked, record_kept_indices, replace_layer
from smelt.models.families.config_keys import set_config_value
from smelt.models.families.layout import Attention, FeedForward
from smelt.models.families.registry import FAMILIES, blocks_of, family_of, model_attentions
from smelt.models.families.relative_bias import RelativeBias
from smelt.models.hidden_width import hidden_width
from smelt.models.layers import LowRankConv, LowRankLinear, SharedLinear, conv_end_names


class ChannelUnits(Protocol):
    """Channels that are pruned together; C of them."""

    @property
    def name(self) -> str:
        """Their name in the details of the step."""

    def count(self, model: nn.Module) -> int:
        """Return C."""

    def filter_norms(self, model: nn.Module) -> Tensor:
        """Return the L1 norm of the filters of each channel, float64 [C]."""

    def add_gate(self, model: nn.Module, gate: Tensor) -> list[RemovableHandle]:
        """Multiply the channels by `gate`, float [C]; return the hooks."""


@dataclass(frozen=True)
class ChannelGroup:
    """The channels between two convolutions: `first` outputs, `norm` normalizes and `second` reads them.

    All three are dotted names in the model. name: the module that holds `first` and `norm`.
    """

    name: str
    first: str
    norm: str
    second: str

    def count(self, model: nn.Module) -> int:
        """Return the number of channels."""
        return find_convolution(model, conv_end_names(model, self.first)[1]).out_channels

    def filter_norms(self, model: nn.Module) -> Tensor:
        """Return the L1 norm of the filter of each channel, float64 [C]."""
        return whole_kernel(model.get_submodule(self.first)).double().abs().flatten(1).sum(dim=1)

    def add_gate(self, model: nn.Module, gate: Tensor) -> list[RemovableHandle]:
        """Multiply the channels by `gate`, float [C], after their norm; return the hooks."""
        norm = model.get_submodule(self.norm)
        return [norm.register_forward_hook(lambda module, inputs, output: output * gate[:, None, None])]


def whole_kernel(module: nn.Module) -> Tensor:
    """Return the kernel of a convolution, or the product of a factorized one's, float [T, S, D, D]."""
    if not isinstance(module, LowRankConv):
        return module.get_parameter("weight").detach()
    first_step, *following = (step for step in module.steps if isinstance(step, nn.Conv2d))
    kernel = first_step.weight.detach()
    for step in following:
        weight, is_depthwise = step.weight.detach(), step.groups != 1
        # in each direction one of the two has a single tap
        equation = "oij,oskl->osikjl" if is_depthwise else "ocij,cskl->osikjl"
        merged: Tensor = torch.einsum(equation, weight[:, 0] if is_depthwise else weight, kernel)
        kernel = merged.flatten(4, 5).flatten(2, 3)
    return kernel


def find_convolution(model: nn.Module, path: str) -> nn.Conv2d:
    """Return the convolution with the name `path`."""
    convolution = model.get_submodule(path)
    assert isinstance(convolution, nn.Conv2d)
    return convolution


@dataclass(frozen=True)
class AttentionGroup:
    """One attention: its heads own rows of query, key, value and columns of out.

    aliases: the modules of later attentions that share the same linear layers.
    """

    structure: Attention
    aliases: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The dotted name of its module."""
        return self.structure.name

    @property
    def modules(self) -> tuple[str, ...]:
        """All modules that have these heads."""
        return (self.name, *self.aliases)

    def count(self, model: nn.Module) -> int:
        """Return the number of units: heads, or key heads with all the queries that share them."""
        module: Any = model.get_submodule(self.name)
        if self.structure.heads_attribute is None:
            key_rows = linear_with_outputs(model, self.structure.key).out_features // (
                3 if self.structure.packed else 1
            )
            return key_rows // int(getattr(module, self.structure.head_dim_attribute))
        return int(getattr(module, self.structure.heads_attribute))

    def head_dim(self, model: nn.Module) -> int:
        """Return the columns of `out` that one unit owns."""
        return linear_with_inputs(model, self.structure.out).in_features // self.count(model)

    def value_weight(self, model: nn.Module) -> Tensor:
        """Return the weight of the value projection, float [units * width, inputs]."""
        weight = whole_weight(model, self.structure.value)
        if self.structure.packed == "per_head":
            values: Tensor = weight.unflatten(0, (self.count(model), 3, -1))[:, 2].flatten(0, 1)
            return values
        return weight.chunk(3)[2] if self.structure.packed else weight

    def row_indices(self, model: nn.Module, stay: Tensor) -> dict[str, Tensor]:
        """Return the rows of the units `stay` (int64, ascending) by linear layer; GPT-2 has a packed one."""
        count, by_layer = self.count(model), {}
        parts = 3 if self.structure.packed == "equal" else 1
        for name in self.structure.linear_layers[:-1]:
            width = linear_with_outputs(model, name).out_features // (count * parts)
            unit_rows = (stay.unsqueeze(1) * width + torch.arange(width)).flatten()
            by_layer[name] = torch.cat(
                [unit_rows + part_index * count * width for part_index in range(parts)]
            )
        return by_layer


@dataclass(frozen=True)
class FeedForwardGroup:
    """One feed-forward block: a neuron owns a row of each of its inputs and a column of `down`."""

    structure: FeedForward

    @property
    def name(self) -> str:
        """The dotted name of its module."""
        return self.structure.name

    def count(self, model: nn.Module) -> int:
        """Return the number of neurons."""
        return linear_with_inputs(model, self.structure.down).in_features

    def row_indices(self, model: nn.Module, stay: Tensor) -> dict[str, Tensor]:
        """Return the rows of the neurons `stay` (int64, ascending) by linear layer; two if packed."""
        count = self.count(model)
        parts = 2 if self.structure.gate == self.structure.up else 1
        return {
            n: torch.cat([stay + part_index * count for part_index in range(parts)])
            for n in self.structure.input_layers
        }


def find_groups(
    model: Any, *, stage: str = "prune", setting: str | None = None
) -> tuple[list[AttentionGroup], list[FeedForwardGroup]]:
    """Return the attentions and feed-forward blocks of a model that can be pruned, in order.

    A block that is used several times in a stack, and linear layers that several blocks share, appear once.
    Attentions whose heads cannot be removed are left out. stage, setting: for errors.

    Raises:
        InputError: the model's family is unknown.
    """
    if family_of(model) is None:
        raise InputError(
            f"{stage}: {with_article(model.config.model_type)} model is not supported. Supported:"
            f" {', '.join(FAMILIES)}.",
            code="unsupported-family",
            setting=setting,
        )
    blocks = blocks_of(model)
    attentions: dict[tuple[nn.Module, ...], list[Attention]] = {}
    feeds: dict[tuple[nn.Module, ...], FeedForward] = {}
    for block in blocks:
        for parts in block.attentions:
            if not parts.fixed_heads_reason:
                attentions.setdefault(_modules(model, parts.linear_layers), []).append(parts)
        for feed_forward in block.feed_forwards:
            feeds.setdefault(_modules(model, feed_forward.linear_layers), feed_forward)
    groups = [AttentionGroup(first, tuple(a.name for a in also)) for first, *also in attentions.values()]
    return groups, [FeedForwardGroup(parts) for parts in feeds.values()]


def count_units(model: Any, with_width: bool) -> dict[str, int]:
    """Return the number of layers, the hidden width, and the numbers of heads and neurons of all layers.

    Heads that cannot be removed are not counted, and shared ones once. The width needs a float model.
    """
    attentions, blocks = find_groups(model)
    return {
        "layers": sum(len(block.call_indices) for block in blocks_of(model)),
        **({"width": hidden_width(model)} if with_width else {}),
        "heads": sum(group.count(model) for group in attentions),
        "neurons": sum(block.count(model) for block in blocks),
    }


def _modules(model: nn.Module, names: tuple[str, ...]) -> tuple[nn.Module, ...]:
    return tuple(model.get_submodule(name) for name in names)


def linear_with_outputs(model: nn.Module, name: str) -> nn.Linear:
    """Return the Linear whose rows are the outputs of `name`: itself, or `up` of a factorized layer."""
    return _find_half(model.get_submodule(name), "up", name)


def linear_with_inputs(model: nn.Module, name: str) -> nn.Linear:
    """Return the Linear whose columns are the inputs of `name`: itself, or `down` of a factorized layer."""
    return _find_half(model.get_submodule(name), "down", name)


def whole_weight(model: nn.Module, name: str) -> Tensor:
    """Return the matrix of `name`, float [outputs, inputs]; of a factorized layer the product."""
    module = model.get_submodule(name)
    if isinstance(module, LowRankLinear):
        return module.up.weight.detach() @ module.down.weight.detach()
    return linear_with_outputs(model, name).weight.detach()


def half_path(model: nn.Module, name: str, half: str) -> str:
    """Return the dotted name of the Linear to cut: `name`, or `name.half` of a factorized layer."""
    return f"{name}.{half}" if isinstance(model.get_submodule(name), LowRankLinear) else name


def _find_half(module: nn.Module, half: str, name: str) -> nn.Linear:
    layer = getattr(module, half) if isinstance(module, LowRankLinear) else module
    if isinstance(layer, SharedLinear):
        raise InputError(
            f"{name} shares its matrix with other layers and has its own low-rank delta, so its units cannot"
            " be removed. Put the step before 'share-weights', or share without low_rank_delta.",
            code="shared-weights",
        )
    if not isinstance(layer, nn.Linear):
        raise InputError(
            f"{name} is {with_article(type(layer).__name__)}, which cannot be pruned. Put the step before"
            " 'quantize'.",
            code=AFTER_QUANTIZE,
        )
    return layer


def cut_heads(model: Any, edits: list[Edit], group: AttentionGroup, kept_heads: Tensor) -> Tensor:
    """Keep the heads `kept_heads` (int64, ascending) of an attention; return the kept inputs of `out`."""
    width = group.head_dim(model)
    bias = _relative_bias(model) if group.structure.relative_bias else None
    if bias is not None:
        bias.make_all_independent(model, edits)
    columns = (kept_heads.unsqueeze(1) * width + torch.arange(width)).flatten()
    for name, indices in group.row_indices(model, kept_heads).items():
        _cut_linear(model, edits, name, indices, dim=0)
    _cut_linear(model, edits, group.structure.out, columns, dim=1)
    values = {group.structure.heads_attribute: len(kept_heads)} if group.structure.heads_attribute else {}
    values |= (
        {group.structure.all_head_size_attribute: len(columns)}
        if group.structure.all_head_size_attribute
        else {}
    )
    for name in group.modules:
        for attribute, value in values.items():
            setattr(model.get_submodule(name), attribute, value)
            edits.append({"op": "set", "module": name, "attribute": attribute, "value": value})
        if bias is not None:
            bias.prune_bias_heads(model, edits, name, kept_heads)
    return columns


def cut_neurons(model: Any, edits: list[Edit], block: FeedForwardGroup, kept_neurons: Tensor) -> Tensor:
    """Keep `kept_neurons` (int64, ascending) of a feed-forward part; return the kept inputs of `down`."""
    for name, indices in block.row_indices(model, kept_neurons).items():
        _cut_linear(model, edits, name, indices, dim=0)
    _cut_linear(model, edits, block.structure.down, kept_neurons, dim=1)
    return kept_neurons


def update_config(model: Any, edits: list[Edit]) -> list[Edit]:
    """Write common widths and numbers of heads to the config; return the edits that it does not replace."""
    attentions, blocks = find_groups(model)
    family = family_of(model)
    shared_keys = family.shared_config_keys if family else ()
    for setting in {b.structure.intermediate_size_key for b in blocks if not b.structure.size_is_ratio}:
        kind = [block for block in blocks if block.structure.intermediate_size_key == setting]
        widths = {block.count(model) for block in kind}
        if len(widths) > 1 or setting in shared_keys:
            continue
        set_config_value(model.config, setting, widths.pop())
        edits = _without_linear_edits(
            edits,
            {name for block in kind for name in block.structure.input_layers},
            {block.structure.down for block in kind},
        )
    for setting in {attention.heads_key for attention in model_attentions(model)}:
        same_key = [group for group in attentions if group.structure.heads_key == setting]
        edits = _write_heads_to_config(model, edits, setting, same_key)
    return edits


def _write_heads_to_config(
    model: Any, edits: list[Edit], heads_key: str, groups: list[AttentionGroup]
) -> list[Edit]:
    """Write the number of heads of `groups` to the config; return the edits that it does not replace.

    All edits remain where transformers' config of the family cannot hold the number: the attentions differ,
    the width of a head follows from the number, or a model of this config would be refused.
    """
    modules = {name for group in groups for name in group.modules}
    structures = [a for a in model_attentions(model) if a.heads_key == heads_key]
    counts = {group.count(model) for group in groups}
    if len(counts) != 1 or any(
        a.name not in modules or a.head_dim_key is None or a.relative_bias for a in structures
    ):
        return edits
    structure, units = groups[0].structure, counts.pop()
    head_dim = int(getattr(model.get_submodule(structure.name), structure.head_dim_attribute))
    values = {
        heads_key: linear_with_inputs(model, structure.out).in_features // head_dim,
        str(structure.head_dim_key): head_dim,
    }
    if structure.kv_heads_key:
        values[structure.kv_heads_key] = units
    attributes = {structure.heads_attribute, structure.all_head_size_attribute}
    remaining = _without_linear_edits(
        [
            e
            for e in edits
            if not (e["op"] == "set" and e["module"] in modules and e["attribute"] in attributes)
        ],
        {name for group in groups for name in group.structure.linear_layers[:-1]},
        {group.structure.out for group in groups},
    )
    try:
        type(model.config)(**model.config.to_dict() | values)
    except StrictDataclassError:  # Llama's hidden size must be a multiple of the number of heads
        return edits
    if len(remaining) < len(edits):
        for key, value in values.items():
            setattr(model.config, key, value)
    return remaining


def _without_linear_edits(edits: list[Edit], cut_outputs: set[str], cut_inputs: set[str]) -> list[Edit]:
    """Return `edits` without the sizes of these layers, whole or factorized, which lost outputs or inputs."""
    names = {n for name in cut_outputs for n in (name, f"{name}.up")}
    names |= {n for name in cut_inputs for n in (name, f"{name}.down")}
    return [e for e in edits if not (e["op"] == "linear" and e["module"] in names)]


def _relative_bias(model: Any) -> RelativeBias | None:
    family = family_of(model)
    return family.relative_bias() if family and family.relative_bias else None


def _cut_linear(model: Any, edits: list[Edit], name: str, indices: Tensor, dim: int) -> None:
    """Keep `indices` of the rows (dim 0, with biases) or columns (dim 1) of a linear or factorized layer."""
    old = linear_with_outputs(model, name) if dim == 0 else linear_with_inputs(model, name)
    device_indices = indices.to(old.weight.device)
    weight = old.weight.detach().index_select(dim, device_indices)
    new = nn.Linear(weight.shape[1], weight.shape[0], bias=old.bias is not None)
    new.weight = nn.Parameter(weight.clone())
    if old.bias is not None:
        bias = old.bias.detach()
        new.bias = nn.Parameter((bias.index_select(0, device_indices) if dim == 0 else bias).clone())
    if is_masked(old):
        mark_masked(new)
    record_kept_indices(old, new, indices, dim)
    path = half_path(model, name, "up" if dim == 0 else "down")
    sizes = {"in_features": new.in_features, "out_features": new.out_features}
    replace_layer(model, edits, path, new, {"op": "linear", "module": path, **sizes})


def count_kept_heads(count: int, settings: PruneSettings) -> int:
    """Return how many of `count` heads are kept: the nearest number, at least one."""
    return max(1, _round_half_up(count * settings.keep_ratio_of("heads")))


def count_kept_neurons(count: int, settings: PruneSettings) -> int:
    """Return how many of `count` neurons are kept: the nearest multiple of `multiple_of`, at least one."""
    target = count * settings.keep_ratio_of("ffn")
    return min(count, max(1, _round_half_up(target / settings.multiple_of)) * settings.multiple_of)


def _round_half_up(wanted: float) -> int:
    """Return the nearest whole number; a half is rounded up."""
    return math.floor(wanted + 0.5)


def rounding_warnings(
    model: Any, attentions: list[AttentionGroup], blocks: list[FeedForwardGroup], settings: PruneSettings
) -> list[Message]:
    """Return warnings about layers that keep all units, or twice as many as keep_ratio requests."""
    sizes = {
        "heads": [(n := g.count(model), count_kept_heads(n, settings)) for g in attentions],
        "ffn": [(n := b.count(model), count_kept_neurons(n, settings)) for b in blocks],
    }
    messages = []
    for kind, counts in sizes.items():
        if kind not in settings.targets:
            continue
        ratio = settings.keep_ratio_of(kind)
        unchanged = sorted({count for count, num_kept in counts if num_kept == count})
        unit = {"heads": "heads", "ffn": "neurons"}[kind]
        step = 1 if kind == "heads" else settings.multiple_of
        at_minimum = [count for count, num_kept in counts if 2 * count * ratio <= num_kept < count]
        if at_minimum:
            messages.append(
                warning(
                    "minimum-kept",
                    f"keep_ratio {ratio:g} of {' or '.join(map(str, sorted(set(at_minimum))))} {unit} is"
                    f" less than {step}, the minimum of a layer; the minimum is kept in"
                    f" {len(at_minimum)} of {len(counts)} layers.",
                    setting="keep_ratio",
                )
            )
        if ratio == 1 or not unchanged:
            continue
        text = " or ".join(map(str, unchanged))
        largest = max(unchanged)
        hint = (
            f" keep_ratio: {{{kind}: {(largest - step) / largest:.3g}}} removes {step} of {largest}."
            if largest > step
            else ""
        )
        messages.append(
            warning(
                "nothing-to-remove",
                f"keep_ratio {ratio:g} of {text} {unit}, rounded to a multiple of {step}, keeps all of them:"
                f" nothing is removed in {sum(num_kept == count for count, num_kept in counts)} of "
                f"{len(counts)}"
                f" layers.{hint}",
                setting="keep_ratio",
            )
        )
    return messages


def allocate_globally(scores: Mapping[str, Tensor], keep_ratio: float, multiple_of: int) -> dict[str, int]:
    """Return the number of units kept per layer when the lowest scores of all layers are removed.

    Units are removed in steps of `multiple_of`: the units of a layer are ordered by score, and each step has
    the mean score of its units. The first step of each layer is always kept.

    Args:
        scores: float [units] by layer, comparable between layers.
        keep_ratio: the kept fraction of the units of all layers, rounded to the nearest step.
        multiple_of: 1 for heads; the kept neurons are a multiple of it.
    """
    counts = dict.fromkeys(scores, 0)
    pieces: list[tuple[float, str, int]] = []
    for name, layer_scores in scores.items():
        ordered = layer_scores.sort(descending=True).values.split(multiple_of)
        counts[name] = len(ordered[0])
        pieces += [(float(chunk.mean()), name, len(chunk)) for chunk in ordered[1:]]
    target = keep_ratio * sum(map(len, scores.values()))
    # the scores of a layer's pieces descend, so a piece is never taken before a better one of its layer
    for _, name, size in sorted(pieces, key=lambda piece: -piece[0]):
        if sum(counts.values()) + size / 2 > target:
            break
        counts[name] += size
    return counts
