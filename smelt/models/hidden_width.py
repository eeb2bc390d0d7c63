"""Pruning of the hidden width: channels are removed from every tensor that reads, writes, norms or adds them.

A channel of the hidden states runs through all blocks, since each adds to the output of the previous one: it
is removed from all axes that are as wide as the hidden states (`hidden_axes`), or from none.

The number and width of heads, and neurons, are kept. Values that depend on the width in other models are kept
too. The family defines them: the factor of an embedding, and sines of positions, which are those of the kept
channels. So the config still has the original width, and the edit lists the kept channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from smelt.core.errors import InputError
from smelt.core.messages import with_article
from smelt.models.computed_weights import compute_weights
from smelt.models.families.registry import (
    FAMILIES,
    blocks_of,
    family_of,
    hidden_norm_names,
    is_token_embedding,
    model_attentions,
    output_modules,
)
from smelt.models.layers import LowRankConv, LowRankEmbedding, LowRankLinear

HiddenStream = Literal["hidden", "head"]


@dataclass(frozen=True)
class HiddenAxis:
    """One axis of a tensor, a parameter or a buffer of the model.

    names: all names of the tensor. dim: the axis. stream: `hidden`, or `head` for the inner states of a
    classifier's head: as wide in transformers' models, though with channels of their own. is_input: the
    tensor multiplies its input along this axis; otherwise it gives, norms
    or scales it.
    """

    names: tuple[str, ...]
    dim: int
    stream: HiddenStream
    is_input: bool = False

    @property
    def name(self) -> str:
        """Return the first of its names."""
        return self.names[0]


def hidden_axes(model: Any) -> list[HiddenAxis]:
    """Return the axes as wide as the hidden states of `model`, each once, wherever its tensor is used.

    A word embedding that is also the output layer is listed twice, with the same dim: as a table, and with
    `is_input` as an output layer.

    Args:
        model: of floats; layers may be low-rank, and may be shared.

    Raises:
        InputError: another family, or a quantized layer.
    """
    family = family_of(model)
    if family is None:
        raise InputError(
            f"{with_article(model.config.model_type)} model is not supported. Supported:"
            f" {', '.join(FAMILIES)}.",
            code="unsupported-family",
        )
    names: dict[Tensor, list[str]] = {}
    for kind in (model.named_parameters, model.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            names.setdefault(tensor, []).append(name)
    axes: dict[tuple[Tensor, int, bool], HiddenAxis] = {}
    for name, dim, stream, reads_input in _iter_axes(model):
        tensor = _tensor(model, name)
        axis = HiddenAxis(tuple(names[tensor]), dim, stream, reads_input)
        axes.setdefault((tensor, dim, reads_input), axis)
    return list(axes.values())


def _iter_axes(model: Any) -> Iterator[tuple[str, int, HiddenStream, bool]]:
    """Yield name of the tensor, dim, stream and whether it multiplies its input."""
    family: Any = family_of(model)
    config = model.config.to_dict()
    for stack in family.stacks(config):
        if stack.stream.embedding_projection:
            yield from _output_axes(model, stack.stream.embedding_projection, "hidden")
            continue
        for table in filter(None, (*stack.stream.embeddings, stack.stream.distance_embeddings)):
            yield from _table_axes(model, table)
        for name, dim in stack.stream.other_tensors:
            yield _last_conv_step(model, name), dim, "hidden", False
    # where BART's sides have embeddings of their own, a third one remains, which gets the same width
    projected = any(stack.stream.embedding_projection for stack in family.stacks(config))
    for name, _ in model.named_parameters(remove_duplicate=False):
        if not projected and is_token_embedding(family, config, name):
            yield name, 1, "hidden", False
    for block in blocks_of(model):
        for sublayer in block.parts:
            for name in sublayer.linear_layers[:-1]:
                yield from _input_axes(model, name, "hidden")
            yield from _output_axes(model, sublayer.linear_layers[-1], "hidden")
    norms = hidden_norm_names(model)
    for norm in norms:
        yield from _norm_axes(model, norm, "head" if norm in family.head_modules else "hidden")
    head = [name for name in output_modules(model) if name not in norms]
    for index, name in enumerate(head):
        yield from _input_axes(model, name, "head" if index else "hidden")
        if index < len(head) - 1:
            yield from _output_axes(model, name, "head")


def _table_axes(model: Any, name: str) -> Iterator[tuple[str, int, HiddenStream, bool]]:
    module_name = name.rpartition(".")[0]
    if isinstance(model.get_submodule(module_name), LowRankEmbedding):
        yield f"{module_name}.up.weight", 0, "hidden", False
    else:
        yield name, 1, "hidden", False


def _last_conv_step(model: Any, name: str) -> str:
    """Return the name of a tensor, for a factorized convolution in its last factor."""
    module_name, _, last = name.rpartition(".")
    module = model.get_submodule(module_name)
    return f"{module_name}.steps.{len(module.steps) - 1}.{last}" if isinstance(module, LowRankConv) else name


def _input_axes(model: Any, name: str, stream: HiddenStream) -> Iterator[tuple[str, int, HiddenStream, bool]]:
    module = model.get_submodule(name)
    factor_name = f"{name}.down" if isinstance(module, LowRankLinear) else name
    yield f"{factor_name}.weight", 1, stream, True


def _output_axes(
    model: Any, name: str, stream: HiddenStream
) -> Iterator[tuple[str, int, HiddenStream, bool]]:
    module = model.get_submodule(name)
    factor_name = f"{name}.up" if isinstance(module, LowRankLinear) else name
    yield f"{factor_name}.weight", 0, stream, False
    if model.get_submodule(factor_name).bias is not None:
        yield f"{factor_name}.bias", 0, stream, False


def _norm_axes(model: Any, norm: str, stream: HiddenStream) -> Iterator[tuple[str, int, HiddenStream, bool]]:
    for name, _ in model.get_submodule(norm).named_parameters():
        yield f"{norm}.{name}", 0, stream, False


def _tensor(model: Any, name: str) -> Tensor:
    layer, _, last = name.rpartition(".")
    module = model.get_submodule(layer)
    tensor = getattr(module, last, None)
    if not isinstance(tensor, Tensor):
        raise InputError(
            f"{layer} is {with_article(type(module).__name__)}, whose width cannot change. Prune the width of"
            " the model before it is quantized, or before matrices are shared with low_rank_delta.",
            code="unsupported-layer",
        )
    return tensor


# Attributes of layers with the length of an axis, by the axis of their weight.
_SIZES = {
    nn.Linear: ("out_features", "in_features"),
    nn.Embedding: (None, "embedding_dim"),
    nn.Conv2d: ("out_channels", None),
}


def prune_hidden_width(model: Any, keep: list[int]) -> dict[str, Any]:
    """Keep the channels `keep` of the hidden states of `model`, in place; return the edit.

    Args:
        model: of floats; layers may be low-rank, and may be shared. Works on the meta device.
        keep: rising channel indices.

    Raises:
        InputError: another family, or a quantized layer.
        ValueError: the channels do not exist.
    """
    axes = [axis for axis in hidden_axes(model) if axis.stream == "hidden"]
    width = _parameter(model, axes[0].name).shape[axes[0].dim]
    if not keep or any(type(index) is not int for index in keep) or sorted(set(keep)) != keep:
        raise ValueError("the kept channels are not in increasing order")
    if keep[0] < 0 or keep[-1] >= width:
        raise ValueError(f"the model has {width} channels, from 0 to {width - 1}")
    _init_sinusoidal(model)
    dims_by_names: dict[tuple[str, ...], set[int]] = {}
    for axis in axes:
        dims_by_names.setdefault(axis.names, set()).add(axis.dim)
    for names, dims in dims_by_names.items():
        _select_channels(model, names, dims, torch.tensor(keep))
    for module_name in {name.rpartition(".")[0] for names in dims_by_names for name in names}:
        _update_sizes(model.get_submodule(module_name))
    return {"op": "width", "module": "", "keep": keep}


@contextmanager
def temporary_hidden_width(model: Any, keep: list[int]) -> Iterator[dict[str, Any]]:
    """Reduce `model` to the channels `keep` within the context; yield the edit.

    Its tensors are restored afterwards. Args and Raises: as in `prune_hidden_width`.
    """
    axes = [axis for axis in hidden_axes(model) if axis.stream == "hidden"]
    before = {name: _parameter(model, name) for axis in axes for name in axis.names}
    edit = prune_hidden_width(model, keep)
    try:
        yield edit
    finally:
        for name, tensor in before.items():
            module_name, _, last = name.rpartition(".")
            setattr(model.get_submodule(module_name), last, tensor)
        for module_name in {name.rpartition(".")[0] for name in before}:
            _update_sizes(model.get_submodule(module_name))


def hidden_width(model: Any) -> int:
    """Return the current number of channels of the hidden states of `model`."""
    axis = next(axis for axis in hidden_axes(model) if axis.stream == "hidden")
    return int(_parameter(model, axis.name).shape[axis.dim])


def write_width_to_config(
    model: Any, before: list[dict[str, Any]], edit: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the remaining edits: none if the config alone can hold the width, which is then changed.

    It can where it has the width of a head separately and nothing else depends on the width, for a model
    whose structure is otherwise that of its config (`before` is empty).
    """
    family: Any = family_of(model)
    config = model.config.to_dict()
    attentions = [a for stack in family.stacks(config) for a in stack.attentions]
    after = family.with_hidden_size(config, hidden_width(model))
    scales = (family.embedding_scale, family.output_scale)
    is_config_enough = (
        not before and not family.position_encoding.is_sinusoidal and all(a.head_dim_key for a in attentions)
    )
    has_head_axis = any(axis.stream == "head" for axis in hidden_axes(model))
    if not is_config_enough or has_head_axis or any(scale(config) != scale(after) for scale in scales):
        return [*before, edit]

    for attention in model_attentions(model):
        width = int(getattr(model.get_submodule(attention.name), attention.head_dim_attribute))
        setattr(model.config, str(attention.head_dim_key), width)
    for key in (family.hidden_size_key, family.embedding_size_key):
        if key:
            setattr(model.config, key, after[key])
    return []


def _parameter(model: Any, name: str) -> Tensor:
    module_name, _, last = name.rpartition(".")
    parameter: Tensor = getattr(model.get_submodule(module_name), last)
    return parameter


def _select_channels(model: Any, names: tuple[str, ...], dims: set[int], keep: Tensor) -> None:
    """Keep some indices of some axes of the tensor with these names; set the result under all of them."""
    old = _parameter(model, names[0])
    new = old.detach()
    for dim in dims:
        new = new.index_select(dim, keep.to(new.device))
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, old.requires_grad)
    for name in names:
        module_name, _, last = name.rpartition(".")
        setattr(model.get_submodule(module_name), last, new)


def _init_sinusoidal(model: Any) -> None:
    """Compute tables of sines that are in no file, in their current width, if they are on the meta device."""
    family: Any = family_of(model)
    if not family.position_encoding.is_sinusoidal:
        return
    for stack in family.stacks(model.config.to_dict()):
        for name in stack.stream.embeddings[1:]:
            module = model.get_submodule(name.rpartition(".")[0])
            if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
                compute_weights(model, module)


def _update_sizes(module: nn.Module) -> None:
    weight = getattr(module, "weight", None)
    if weight is None:
        return
    if isinstance(module, nn.LayerNorm):
        module.normalized_shape = tuple(weight.shape)
    for kind, attributes in _SIZES.items():
        if isinstance(module, kind):
            for dim, attribute in enumerate(attributes):
                if attribute is not None:
                    setattr(module, attribute, weight.shape[dim])
