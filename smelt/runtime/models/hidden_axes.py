"""Every axis of a model that is as wide as its hidden states, for width pruning.

A channel of the hidden states runs through all blocks, since each adds to the output of the previous one: it
is removed from all axes listed here, or from none. Other values that depend on the width (the scale of the
embedding, sines) are defined by the family.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from smelt.core.errors import InputError
from smelt.core.text import with_article
from smelt.families.model_blocks import blocks_of, is_token_embedding, output_modules
from smelt.families.norm_consumers import norm_consumers
from smelt.families.registry import FAMILIES, family_of
from smelt.runtime.layers.low_rank_conv import LowRankConv
from smelt.runtime.layers.low_rank_linear import LowRankEmbedding, LowRankLinear

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
    found: dict[tuple[Tensor, int, bool], HiddenAxis] = {}
    for name, dim, stream, reads in _iter_axes(model):
        tensor = _tensor(model, name)
        axis = HiddenAxis(tuple(names[tensor]), dim, stream, reads)
        found.setdefault((tensor, dim, reads), axis)
    return list(found.values())


def _iter_axes(model: Any) -> Iterator[tuple[str, int, HiddenStream, bool]]:
    """Yield name of the tensor, dim, stream and whether it multiplies its input."""
    family: Any = family_of(model)
    config = model.config.to_dict()
    for stack in family.stacks(config):
        for table in stack.stream.embeddings:
            yield from _table_axes(model, table)
        for name, dim in stack.stream.other_tensors:
            yield _last_conv_step(model, name), dim, "hidden", False
    # where BART's sides have embeddings of their own, a third one remains, which gets the same width
    for name, _ in model.named_parameters(remove_duplicate=False):
        if is_token_embedding(family, config, name):
            yield name, 1, "hidden", False
    for block in blocks_of(model):
        for part in block.parts:
            for name in part.linear_layers[:-1]:
                yield from _input_axes(model, name, "hidden")
            yield from _output_axes(model, part.linear_layers[-1], "hidden")
    of_heads = {norm for block in blocks_of(model) for a in block.attentions for norm in a.qk_norms or ()}
    norms = [feed.norm for feed in norm_consumers(model) if feed.norm not in of_heads]
    for norm in norms:
        yield from _norm_axes(model, norm, "head" if norm in family.head_modules else "hidden")
    head = [name for name in output_modules(model) if name not in norms]
    for place, name in enumerate(head):
        yield from _input_axes(model, name, "head" if place else "hidden")
        if place < len(head) - 1:
            yield from _output_axes(model, name, "head")


def _table_axes(model: Any, name: str) -> Iterator[tuple[str, int, HiddenStream, bool]]:
    owner = name.rpartition(".")[0]
    if isinstance(model.get_submodule(owner), LowRankEmbedding):
        yield f"{owner}.up.weight", 0, "hidden", False
    else:
        yield name, 1, "hidden", False


def _last_conv_step(model: Any, name: str) -> str:
    """Return the name of a tensor, for a factorized convolution in its last factor."""
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    return f"{owner}.steps.{len(module.steps) - 1}.{last}" if isinstance(module, LowRankConv) else name


def _input_axes(model: Any, name: str, stream: HiddenStream) -> Iterator[tuple[str, int, HiddenStream, bool]]:
    module = model.get_submodule(name)
    half = f"{name}.down" if isinstance(module, LowRankLinear) else name
    yield f"{half}.weight", 1, stream, True


def _output_axes(
    model: Any, name: str, stream: HiddenStream
) -> Iterator[tuple[str, int, HiddenStream, bool]]:
    module = model.get_submodule(name)
    half = f"{name}.up" if isinstance(module, LowRankLinear) else name
    yield f"{half}.weight", 0, stream, False
    if model.get_submodule(half).bias is not None:
        yield f"{half}.bias", 0, stream, False


def _norm_axes(model: Any, norm: str, stream: HiddenStream) -> Iterator[tuple[str, int, HiddenStream, bool]]:
    for name, _ in model.get_submodule(norm).named_parameters():
        yield f"{norm}.{name}", 0, stream, False


def _tensor(model: Any, name: str) -> Tensor:
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    tensor = getattr(module, last, None)
    if not isinstance(tensor, Tensor):
        raise InputError(
            f"{owner} is {with_article(type(module).__name__)}, whose width cannot change. Prune the width of"
            " the model before it is quantized, or before matrices are shared with low_rank_delta.",
            code="unsupported-layer",
        )
    return tensor
