"""The layout of a family: the names of modules and config keys, as a tiny model shows them.

tools/family_layouts.py derives layouts, and they are stored in layouts/. Names of modules are dotted; those
in an `Attention` and a `FeedForward` are relative to their block, those of a `Stack` to the model.

`Attention` and `FeedForward` describe the linear layers of a block. A `ResidualStream` describes the hidden
states of a stack, from the embeddings to the output layer: every block adds to the same states, so that one
of their channels affects all modules that read or write them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from smelt.models.families.config_keys import config_value

Config = Mapping[str, Any]


@dataclass(frozen=True)
class ResidualStream:
    """The hidden states of one stack."""

    embeddings: tuple[str, ...]
    """Names of the embeddings whose sum is the input of the stack, token embedding first; each [rows,
    width], or narrower with `embedding_projection`."""
    part_norms: tuple[str, ...]
    """Norms of the parts of a block, attentions in order and then the feed-forward part, relative to the
    block; parallel parts may have the same norm (Phi)."""
    pre_norm: bool
    """Whether a norm is before its part and nothing else uses its output (pre-norm). Otherwise it normalizes
    the sum of the part's input and output, which is the input of the next part (post-norm)."""
    embedding_norm: str | None = None
    """The norm of the sum of the embeddings, if there is one."""
    embedding_projection: str | None = None
    """The linear layer from the embeddings, after their norm, to the hidden states, if there is one."""
    output_norms: tuple[str, ...] = ()
    """Norms of the parts' outputs before the sum, in the same order, if there are some (Gemma 3)."""
    final_norm: str | None = None
    """The norm after the last block, if there is one."""
    distance_embeddings: str | None = None
    """The table of the embeddings of distances, [rows, width], which the layers of queries and keys of all
    blocks read too (DeBERTa), if there is one."""
    distance_norm: str | None = None
    """The norm of these embeddings, if there is one."""
    other_tensors: tuple[tuple[str, int], ...] = ()
    """Other tensors of the states, each with the axis of its width (patches of an image, its first token)."""
    part_scales: tuple[str, ...] = ()
    """Tensors [width] that multiply the outputs of the parts of a block before the sums, in the order of
    `part_norms`, relative to the block (LayerScale of DINOv2), if there are any."""


@dataclass(frozen=True)
class Attention:
    """One attention of a block: its linear layers and the attributes with its numbers of heads."""

    name: str
    """The module that computes it. The export replaces its whole forward: it computes the projections inside
    of the module, the scores, `out` if that is inside, and `residual_norm`. Any other computation there would
    be missing from the graph."""
    query: str
    """The linear layer of the queries; the same name as `key` and `value` if one layer computes all
    (`packed`)."""
    key: str
    value: str
    out: str
    heads_attribute: str | None
    """The attribute with the number of heads; None if the rows of `key` define it, because several queries
    share a key (Llama)."""
    head_dim_attribute: str
    """The attribute with the width of a head."""
    heads_key: str
    """The config key for the number of heads, one number for all attentions with the key."""
    kv_heads_key: str | None = None
    """The config key for the number of key heads; None if there are as many as heads."""
    head_dim_key: str | None = None
    """The config key for the width of a head; without it, or without a value, it is the model's width divided
    by the heads."""
    all_head_size_attribute: str | None = None
    """The attribute with heads times width, if there is one."""
    cross: bool = False
    """Whether it is cross-attention."""
    packed: Literal["equal", "grouped", "per_head"] | None = None
    """How one layer computes query, key and value: in "equal" thirds (GPT-2), "grouped", with the rows of
    query, key and value heads (Phi-3), or "per_head", with the three of a head together (GPT-NeoX)."""
    kv_heads_attribute: str | None = None
    """The attribute with the number of key heads of a "grouped" layer."""
    fixed_heads_reason: str | None = None
    """Why heads cannot be removed, as text for users; None if they can."""
    scale_attribute: str | None = "scaling"
    """The attribute with the factor of the scores, or of the queries; "width" if it is the inverse root of
    the width; None if they are not scaled (T5)."""
    relative_bias: Literal["handed_on", "given", "projected"] | None = None
    """A bias per head and distance is added to the scores: "handed_on" if a stack's first block computes it
    and each returns it for the next, "given" if the model computes it. "projected" if it is the products of
    queries and keys with embeddings of distances, which the layers of keys and queries project
    (`distance_rows`); the factor of all three products is the inverse root of three times the width."""
    rotary: bool = False
    """Whether queries and keys are rotated by their positions."""
    rotary_attribute: str | None = None
    """The attribute that says whether this module rotates them; None if all do (SmolLM3)."""
    qk_norms: tuple[str, str] | None = None
    """The norms of each head's queries and keys, if any (Qwen3)."""
    residual_norm: str | None = None
    """The norm of the sum of its input and its output, if the module itself computes the sum (ALBERT)."""
    uses_attention_interface: bool = True
    """Whether it calls the function in transformers' AttentionInterface with queries, keys, values, mask and
    scale, so that a registered function gets the scores before the softmax. Otherwise they are computed
    inside its forward."""

    @property
    def linear_layers(self) -> tuple[str, ...]:
        """Its linear layers, each once; the last is `out`."""
        return tuple(dict.fromkeys((self.query, self.key, self.value, self.out)))

    def with_prefix(self, block: str) -> Attention:
        """Return the attention with its full names in a model, below `block`."""
        norms = (
            None
            if self.qk_norms is None
            else (_join_path(block, self.qk_norms[0]), _join_path(block, self.qk_norms[1]))
        )
        return replace(
            self,
            name=_join_path(block, self.name),
            query=_join_path(block, self.query),
            key=_join_path(block, self.key),
            value=_join_path(block, self.value),
            out=_join_path(block, self.out),
            qk_norms=norms,
            residual_norm=self.residual_norm and _join_path(block, self.residual_norm),
        )


@dataclass(frozen=True)
class FeedForward:
    """The feed-forward part of a block: a neuron owns a row of `up` (and `gate`) and a column of `down`."""

    name: str
    """The module that computes it; "" if it is the block itself."""
    up: str
    down: str
    intermediate_size_key: str
    """The config key for the width of all parts of this kind."""
    activation_key: str
    """The config key for the activation function, as named in transformers' ACT2FN."""
    gate: str | None = None
    """A second linear layer of the input, whose output multiplies the first; the same name as `up` if one
    layer computes both."""
    gate_first: bool = True
    """Whether the gate's rows are first, if one layer computes both."""
    activated_layer: Literal["up", "gate"] = "gate"
    """Which of the two outputs the activation function is applied to."""
    size_is_ratio: bool = False
    """Whether `intermediate_size_key` is a multiple of the hidden width (DINOv2's `mlp_ratio`)."""
    experts: str | None = None
    """The list of experts, of which a router selects some for each token; None without. `up`, `gate` and
    `down` are then those of each expert, with `*` for its index."""
    router: str | None = None
    """The module that selects experts from the same input, if there are any."""
    num_experts_key: str | None = None
    """The config key for the number of experts, if there are any."""

    @property
    def input_layers(self) -> tuple[str, ...]:
        """The linear layers with a row for each neuron."""
        return (self.up,) if self.gate in (None, self.up) else (self.up, str(self.gate))

    @property
    def linear_layers(self) -> tuple[str, ...]:
        """Its linear layers, each once; the last is `down`."""
        return (*self.input_layers, self.down)

    def neurons(self, config: Config, hidden_size: int) -> int | None:
        """Return the number of neurons in `config`, None if it has none; of states of `hidden_size`."""
        size = config_value(config, self.intermediate_size_key)
        factor = hidden_size if self.size_is_ratio else 1
        return int(size * factor) if isinstance(size, int | float) else None

    @property
    def output_module(self) -> str:
        """The module whose output is that of the part: `down`, or of experts the one that adds them."""
        return self.down if self.experts is None else self.name

    def expert(self, index: int) -> FeedForward:
        """Return the expert `index` as a part of its own; without experts, the part itself."""
        if self.experts is None:
            return self
        up, down, gate = (name and name.replace("*", str(index)) for name in (self.up, self.down, self.gate))
        name = f"{self.experts}.{index}"
        return replace(self, name=name, up=str(up), down=str(down), gate=gate, experts=None, router=None)

    def with_prefix(self, block: str) -> FeedForward:
        """Return the part with its full names in a model, below `block`."""
        gate = None if self.gate is None else _join_path(block, self.gate)
        name, up_name, down_name = (_join_path(block, n) for n in (self.name, self.up, self.down))
        experts, router = (n and _join_path(block, n) for n in (self.experts, self.router))
        return replace(self, name=name, up=up_name, down=down_name, gate=gate, experts=experts, router=router)


STACK_NAMES = ("encoder_layers", "decoder_layers", "layers", "text_layers", "vision_layers")


@dataclass(frozen=True)
class Stack:
    """Consecutive blocks of the same layout."""

    name: str
    """layers, encoder_layers, decoder_layers, text_layers or vision_layers, as in settings."""
    num_layers_key: str
    """The config key for the number of blocks."""
    module_path: str
    """The list of blocks in the model of the family's tasks."""
    attentions: tuple[Attention, ...]
    feed_forward: FeedForward
    stream: ResidualStream
    """The hidden states of the blocks."""
    causal: bool = False
    """Whether no token attends to a later one, except in cross-attention."""
    per_layer_keys: tuple[str, ...] = ()
    """Config keys whose value, if set, is a list with an entry for each block; others apply to all blocks."""
    num_layers_fallback_key: str | None = None
    """Another config key for the number of blocks."""
    repeats_block: bool = False
    """Whether the list has one module, which is called once for each block (ALBERT)."""

    def num_layers(self, config: Config) -> int | None:
        """Return the number of blocks in `config`, None if it has none."""
        number = config_value(config, self.num_layers_key) or config.get(
            self.num_layers_fallback_key or self.num_layers_key
        )
        return number if isinstance(number, int) else None

    def modules(self, model: Any) -> list[Any]:
        """Return the blocks of `model` in the order of their calls; a repeated one has several entries."""
        modules = list(model.get_submodule(self.module_path))
        num_calls = config_value(model.config.to_dict(), self.num_layers_key)
        return modules * int(num_calls) if self.repeats_block else modules


@dataclass(frozen=True)
class Layout:
    """What a tiny model shows of a family: the names of its modules, and the config keys of its sizes."""

    stacks: tuple[Stack, ...]
    """Empty if it has convolutions instead of attention and feed-forward parts."""
    hidden_size_key: str
    """The config key for the width of the hidden states; "" without blocks, where a model has several."""
    head_modules: tuple[str, ...]
    """The modules between the last hidden states and the outputs, in order, by their names in the model; each
    gets the output of the one before."""
    embedding_size_key: str | None = None
    """The config key for the width of the token embedding, if it may differ."""
    default_embedding_size: int | None = None
    """The width that a config without this key means; None: that of the hidden states."""
    head_input_vectors: int = 1
    """How many vectors of hidden states the head reads as one (DINOv2: first token, mean of others)."""
    logits_bias: str | None = None
    """A buffer that is added to the outputs."""
    transposed_suffixes: tuple[str, ...] = ()
    """Suffixes of linear layers whose weights are stored transposed (GPT-2)."""


LAYOUT_FOLDER = Path(__file__).parent / "layouts"


def read_layout(name: str) -> Layout:
    """Return the stored layout `name`."""
    data: dict[str, Any] = _lists_to_tuples(json.loads((LAYOUT_FOLDER / f"{name}.json").read_text()))
    stacks = tuple(
        Stack(
            **stack
            | {
                "attentions": tuple(Attention(**attention) for attention in stack["attentions"]),
                "feed_forward": FeedForward(**stack["feed_forward"]),
                "stream": ResidualStream(**stack["stream"]),
            }
        )
        for stack in data["stacks"]
    )
    return Layout(**data | {"stacks": stacks})


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """Return `layout` as stored, without fields that have their default."""
    return {
        **_without_defaults(layout),
        "stacks": [
            _without_defaults(stack)
            | {
                "attentions": [_without_defaults(attention) for attention in stack.attentions],
                "feed_forward": _without_defaults(stack.feed_forward),
                "stream": _without_defaults(stack.stream),
            }
            for stack in layout.stacks
        ],
    }


def _without_defaults(part: Any) -> dict[str, Any]:
    return {f.name: value for f in fields(part) if (value := getattr(part, f.name)) != f.default}


def _lists_to_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_lists_to_tuples, value))
    if isinstance(value, dict):
        return {key: _lists_to_tuples(item) for key, item in value.items()}
    return value


def _join_path(block: str, name: str) -> str:
    return f"{block}.{name}" if name else block
