"""Every axis of a model that is as wide as its hidden states, for those who make these narrower.

A channel of the hidden states runs through all blocks, since each adds to what the one before it gave: it
goes from all axes that are given here, or from none. What a model of another width computes differently
besides (the scale of the embedding, sines) says the family.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from smelt.core.errors import InputError
from smelt.core.text import article
from smelt.families.norms import norm_feeds
from smelt.families.registry import FAMILIES, family_of
from smelt.families.walk import blocks_of, head_of, is_word_table
from smelt.runtime.layers.low_rank import LowRankEmbedding, LowRankLinear
from smelt.runtime.layers.low_rank_conv import LowRankConv

States = Literal["hidden", "head"]


@dataclass(frozen=True)
class Axis:
    """One axis of a tensor, a parameter or a buffer of the model.

    names: of the tensor, all that it has. dim: which of its axes. stream: `hidden`, or `head` for what a
    classifier's head makes of them and hands on inside of itself: as wide in transformers' models, though of
    channels of its own. reads: the tensor multiplies what comes in along this axis; otherwise it gives, norms
    or scales it.
    """

    names: tuple[str, ...]
    dim: int
    stream: States
    reads: bool = False

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]


def hidden_axes(model: Any) -> list[Axis]:
    """Return the axes as wide as the hidden states of `model`, each once, wherever its tensor stands.

    A word embedding that is the output layer too is there twice, with the same dim: as a table, and with
    `reads` as an output layer.

    Args:
        model: of floats; layers may be low-rank pairs, and may be shared.

    Raises:
        InputError: another family, or a quantized layer.
    """
    family = family_of(model)
    if family is None:
        raise InputError(
            f"the layers of {article(model.config.model_type)} model are not known. Known:"
            f" {', '.join(FAMILIES)}.",
            code="unsupported-family",
        )
    names: dict[Tensor, list[str]] = {}
    for kind in (model.named_parameters, model.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            names.setdefault(tensor, []).append(name)
    found: dict[tuple[Tensor, int, bool], Axis] = {}
    for name, dim, stream, reads in _axes(model):
        tensor = _tensor(model, name)
        axis = Axis(tuple(names[tensor]), dim, stream, reads)
        found.setdefault((tensor, dim, reads), axis)
    return list(found.values())


def _axes(model: Any) -> Iterator[tuple[str, int, States, bool]]:
    """Yield name of the tensor, dim, stream and whether it reads."""
    family: Any = family_of(model)
    config = model.config.to_dict()
    for stack in family.stacks(config):
        for table in stack.stream.tables:
            yield from _of_table(model, table)
        for name, dim in stack.stream.beside:
            yield _in_last(model, name), dim, "hidden", False
    # where BART's sides have embeddings of their own, a third one stays, which is made as wide as they are
    for name, _ in model.named_parameters(remove_duplicate=False):
        if is_word_table(family, config, name):
            yield name, 1, "hidden", False
    for block in blocks_of(model):
        for part in block.parts:
            for name in part.products[:-1]:
                yield from _in(model, name, "hidden")
            yield from _out(model, part.products[-1], "hidden")
    of_heads = {norm for block in blocks_of(model) for a in block.attentions for norm in a.norms or ()}
    norms = [feed.norm for feed in norm_feeds(model) if feed.norm not in of_heads]
    for norm in norms:
        yield from _vectors(model, norm, "head" if norm in family.head else "hidden")
    head = [name for name in head_of(model) if name not in norms]
    for place, name in enumerate(head):
        yield from _in(model, name, "head" if place else "hidden")
        if place < len(head) - 1:
            yield from _out(model, name, "head")


def _of_table(model: Any, name: str) -> Iterator[tuple[str, int, States, bool]]:
    owner = name.rpartition(".")[0]
    if isinstance(model.get_submodule(owner), LowRankEmbedding):
        yield f"{owner}.up.weight", 0, "hidden", False
    else:
        yield name, 1, "hidden", False


def _in_last(model: Any, name: str) -> str:
    """Return the name of a tensor, of a convolution that was divided in the last of its steps."""
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    return f"{owner}.steps.{len(module.steps) - 1}.{last}" if isinstance(module, LowRankConv) else name


def _in(model: Any, name: str, stream: States) -> Iterator[tuple[str, int, States, bool]]:
    module = model.get_submodule(name)
    half = f"{name}.down" if isinstance(module, LowRankLinear) else name
    yield f"{half}.weight", 1, stream, True


def _out(model: Any, name: str, stream: States) -> Iterator[tuple[str, int, States, bool]]:
    module = model.get_submodule(name)
    half = f"{name}.up" if isinstance(module, LowRankLinear) else name
    yield f"{half}.weight", 0, stream, False
    if model.get_submodule(half).bias is not None:
        yield f"{half}.bias", 0, stream, False


def _vectors(model: Any, norm: str, stream: States) -> Iterator[tuple[str, int, States, bool]]:
    for name, _ in model.get_submodule(norm).named_parameters():
        yield f"{norm}.{name}", 0, stream, False


def _tensor(model: Any, name: str) -> Tensor:
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    tensor = getattr(module, last, None)
    if not isinstance(tensor, Tensor):
        raise InputError(
            f"{owner} is {article(type(module).__name__)}, whose width cannot change. Make the model narrower"
            " before it is quantized, or shares matrices with differences.",
            code="unsupported-layer",
        )
    return tensor
