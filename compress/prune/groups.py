"""Which tensors share a head or a neuron, in each family of models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smelt.core.errors import InputError
from smelt.runtime.layers.low_rank import LowRankLinear


@dataclass(frozen=True)
class AttentionGroup:
    """One attention: its heads own rows of query, key, value and columns of out.

    All fields are dotted module names, except `heads`, the attribute of `name` that counts them (None: the
    rows of key do, as in Llama, where a key is shared by several queries and goes with them), and `size`,
    the attribute that holds heads times head dimension, where there is one. relative: a bias per head and
    distance is added to its scores (T5), so that all attentions of a stack have the same heads until each
    gets a bias of its own.
    """

    name: str
    query: str
    key: str
    value: str
    out: str
    heads: str | None
    size: str | None
    relative: bool = False

    def count(self, model: nn.Module) -> int:
        """Return the number of units that can go: heads, or keys with all the queries that share them."""
        module: Any = model.get_submodule(self.name)
        if self.heads is None:
            return rows_of(model, self.key).out_features // int(module.head_dim)
        return int(getattr(module, self.heads))

    def head_dim(self, model: nn.Module) -> int:
        """Return the columns of `out` that one unit owns."""
        return columns_of(model, self.out).in_features // self.count(model)

    def value_rows(self, model: nn.Module) -> Tensor:
        """Return the weight of the value product, float [units * width, inputs]."""
        weight = whole_weight(model, self.value)
        return weight.chunk(3)[2] if self.query == self.value else weight

    def row_places(self, model: nn.Module, stay: Tensor) -> dict[str, Tensor]:
        """Return by product which rows the units `stay` (int64, rising) own; GPT-2 has one product of all."""
        count, found = self.count(model), {}
        for name in dict.fromkeys((self.query, self.key, self.value)):
            parts = 3 if self.query == self.value else 1
            width = rows_of(model, name).out_features // (count * parts)
            places = (stay.unsqueeze(1) * width + torch.arange(width)).flatten()
            found[name] = torch.cat([places + part * count * width for part in range(parts)])
        return found


@dataclass(frozen=True)
class FeedForwardGroup:
    """One feed-forward block: a neuron owns a row of `first` and a column of `second`.

    `setting` is the config's word for the width of all blocks of this kind. gate: a second product of the
    input, which the first is multiplied with (T5 v1.1); the neuron owns a row of it too.
    """

    name: str
    first: str
    second: str
    setting: str
    gate: str | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """The products whose rows the neurons own."""
        return (self.first,) if self.gate is None else (self.first, self.gate)

    def count(self, model: nn.Module) -> int:
        """Return the number of neurons."""
        return rows_of(model, self.first).out_features


def find_groups(model: Any) -> tuple[list[AttentionGroup], list[FeedForwardGroup]]:
    """Return the attentions and feed-forward blocks of a model that can be pruned, in order.

    Raises:
        InputError: another family.
    """
    kind = model.config.model_type
    if kind in ("marian", "bart", "mbart"):
        return list(_marian_attentions(model)), list(_marian_blocks(model))
    if kind == "t5":
        return list(_t5_attentions(model)), list(_t5_blocks(model))
    if kind in ("bert", "roberta"):
        return list(_bert_attentions(model)), list(_bert_blocks(model))
    if kind == "distilbert":
        return list(_distilbert_attentions(model)), list(_distilbert_blocks(model))
    if kind in ("gpt2", "llama", "qwen2"):
        from smelt.compress.prune.causal_groups import causal_groups

        return causal_groups(model)
    raise InputError(
        f"prune: the layers of a {kind} model are not known."
        " Known: marian, bart, mbart, t5, bert, roberta, distilbert, gpt2, llama, qwen2."
    )


def rows_of(model: nn.Module, name: str) -> nn.Linear:
    """Return the Linear whose rows are the outputs of `name`: itself, or the `up` half of a pair."""
    return _half(model.get_submodule(name), "up", name)


def columns_of(model: nn.Module, name: str) -> nn.Linear:
    """Return the Linear whose columns are the inputs of `name`: itself, or the `down` half of a pair."""
    return _half(model.get_submodule(name), "down", name)


def whole_weight(model: nn.Module, name: str) -> Tensor:
    """Return the matrix that `name` multiplies by, float [outputs, inputs]; of a pair the product."""
    module = model.get_submodule(name)
    if isinstance(module, LowRankLinear):
        return module.up.weight.detach() @ module.down.weight.detach()
    return rows_of(model, name).weight.detach()


def path_of(model: nn.Module, name: str, half: str) -> str:
    """Return the dotted name of the Linear to cut: `name`, or `name.half` of a pair."""
    return f"{name}.{half}" if isinstance(model.get_submodule(name), LowRankLinear) else name


def _half(module: nn.Module, half: str, name: str) -> nn.Linear:
    found = getattr(module, half) if isinstance(module, LowRankLinear) else module
    if not isinstance(found, nn.Linear):
        raise InputError(
            f"prune: {name} is a {type(found).__name__}, which cannot be cut. Prune before quantizing."
        )
    return found


def _marian_attentions(model: Any) -> Iterator[AttentionGroup]:
    for side, names in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "encoder_attn"])):
        for i in range(len(model.get_submodule(f"model.{side}.layers"))):
            for name in names:
                at = f"model.{side}.layers.{i}.{name}"
                yield AttentionGroup(
                    at, f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj", f"{at}.out_proj", "num_heads", None
                )


def _marian_blocks(model: Any) -> Iterator[FeedForwardGroup]:
    for side in ("encoder", "decoder"):
        for i in range(len(model.get_submodule(f"model.{side}.layers"))):
            at = f"model.{side}.layers.{i}"
            yield FeedForwardGroup(at, f"{at}.fc1", f"{at}.fc2", f"{side}_ffn_dim")


def _t5_attentions(model: Any) -> Iterator[AttentionGroup]:
    for side, names in (
        ("encoder", ["layer.0.SelfAttention"]),
        ("decoder", ["layer.0.SelfAttention", "layer.1.EncDecAttention"]),
    ):
        for i in range(len(model.get_submodule(f"{side}.block"))):
            for name in names:
                at = f"{side}.block.{i}.{name}"
                yield AttentionGroup(
                    at, f"{at}.q", f"{at}.k", f"{at}.v", f"{at}.o", "n_heads", None, relative=True
                )


def _t5_blocks(model: Any) -> Iterator[FeedForwardGroup]:
    for side in ("encoder", "decoder"):
        for i, block in enumerate(model.get_submodule(f"{side}.block")):
            at = f"{side}.block.{i}.layer.{len(block.layer) - 1}.DenseReluDense"
            if model.config.is_gated_act:
                yield FeedForwardGroup(at, f"{at}.wi_0", f"{at}.wo", "d_ff", gate=f"{at}.wi_1")
            else:
                yield FeedForwardGroup(at, f"{at}.wi", f"{at}.wo", "d_ff")


def _bert_attentions(model: Any) -> Iterator[AttentionGroup]:
    layers = f"{model.base_model_prefix}.encoder.layer"
    for i in range(len(model.get_submodule(layers))):
        at = f"{layers}.{i}.attention"
        yield AttentionGroup(
            f"{at}.self",
            f"{at}.self.query",
            f"{at}.self.key",
            f"{at}.self.value",
            f"{at}.output.dense",
            "num_attention_heads",
            "all_head_size",
        )


def _bert_blocks(model: Any) -> Iterator[FeedForwardGroup]:
    layers = f"{model.base_model_prefix}.encoder.layer"
    for i in range(len(model.get_submodule(layers))):
        at = f"{layers}.{i}"
        yield FeedForwardGroup(at, f"{at}.intermediate.dense", f"{at}.output.dense", "intermediate_size")


def _distilbert_attentions(model: Any) -> Iterator[AttentionGroup]:
    for i in range(len(model.get_submodule("distilbert.transformer.layer"))):
        at = f"distilbert.transformer.layer.{i}.attention"
        yield AttentionGroup(
            at, f"{at}.q_lin", f"{at}.k_lin", f"{at}.v_lin", f"{at}.out_lin", "n_heads", None
        )


def _distilbert_blocks(model: Any) -> Iterator[FeedForwardGroup]:
    for i in range(len(model.get_submodule("distilbert.transformer.layer"))):
        at = f"distilbert.transformer.layer.{i}.ffn"
        yield FeedForwardGroup(at, f"{at}.lin1", f"{at}.lin2", "hidden_dim")
