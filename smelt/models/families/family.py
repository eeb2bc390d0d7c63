"""The description of a model family: its blocks, hidden states, positions, tokenizer and learning rate.

One file of this folder is one family; registry.py lists them. Everything here is known without torch, from a
model's config alone. The names of modules and config keys, a `Layout`, are derived from a tiny model by
tools/family_layouts.py and stored in layouts/; a family's file holds the rest. Names of modules are dotted;
those in an `Attention` and a `FeedForward` are relative to their block, those of a `Stack` to the model.

`Attention` and `FeedForward` describe the linear layers of a block. A `ResidualStream` describes the hidden
states of a stack, from the embeddings to the output layer: every block adds to the same states, so that one
of their channels affects all modules that read or write them. `RelativeBias` is the interface of a relative
position bias; a family with one provides an implementation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from smelt.data.tasks import Task, tasks_with


class RelativeBias(Protocol):
    """A bias per head and distance that is added to attention scores.

    A stack has one table for all of its blocks, so all have the same heads, until each gets its own table.
    """

    def move_table(self, old: Any, new: Any) -> None:
        """Move the table of the block `old` to `new`, which becomes the first of its stack."""

    def make_independent(self, attention: Any, heads: int, name: str) -> None:
        """Make the attention `name`, with `heads` heads, compute its own bias, not initialized."""

    def make_all_independent(self, model: Any, edits: list[dict[str, Any]]) -> None:
        """Give every attention of `model` its own bias, once; append the edits."""

    def prune_bias_heads(self, model: Any, edits: list[dict[str, Any]], name: str, stay: Any) -> None:
        """Keep the heads `stay` (int64 tensor, rising) of the own bias of the attention `name`."""

    def parameters_per_head(self, attention: Any, name: str) -> int:
        """Return the number of bias values per head of the attention `name` with its own bias."""

    def count_bias_parameters(self, model: Any) -> int:
        """Return the number of values in the biases of `model`, each once."""

    def bias_by_distance(self, attention: Any) -> tuple[Any, int] | None:
        """Return the bias by distance, float32 [H, 2 f + 1], and f, the largest distance with its own value.

        None if the attention has no table: it gets its bias as an input.
        """


@dataclass(frozen=True)
class ResidualStream:
    """The hidden states of one stack."""

    embeddings: tuple[str, ...]
    """Names of the embeddings whose sum is the input of the stack, token embedding first; each [rows,
    width], or narrower with `embedding_projection`."""
    part_norms: tuple[str, ...]
    """Norms of the parts of a block, attentions in order and then the feed-forward part, relative to the
    block."""
    pre_norm: bool
    """Whether a norm is before its part and nothing else uses its output (pre-norm). Otherwise it normalizes
    the sum of the part's input and output, which is the input of the next part (post-norm)."""
    embedding_norm: str | None = None
    """The norm of the sum of the embeddings, if there is one."""
    embedding_projection: str | None = None
    """The linear layer from the embeddings, after their norm, to the hidden states, if there is one."""
    final_norm: str | None = None
    """The norm after the last block, if there is one."""
    distance_embeddings: str | None = None
    """The table of the embeddings of distances, [rows, width], which the layers of queries and keys of all
    blocks read too (DeBERTa), if there is one."""
    distance_norm: str | None = None
    """The norm of these embeddings, if there is one."""
    other_tensors: tuple[tuple[str, int], ...] = ()
    """Other tensors of the states, each with the axis of its width (patches of an image, its first token)."""


Config = Mapping[str, Any]
Architecture = Literal["encoder", "seq2seq", "decoder"]
SEQ2SEQ_TASKS = tasks_with(architecture="encoder-decoder")
DECODER_TASKS = tasks_with(architecture="decoder")
ENCODER_TASKS = tasks_with(architecture="encoder", modality="text")
IMAGE_TASKS = tasks_with(architecture="encoder", modality="image")


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


MODULE_PREFIX = "network"
"""The name of a user's module in the model that calls it."""
STACK_NAMES = ("encoder_layers", "decoder_layers", "layers")


@dataclass(frozen=True)
class Stack:
    """Consecutive blocks of the same layout."""

    name: str
    """layers, encoder_layers or decoder_layers, as in settings."""
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
        number = config.get(self.num_layers_key) or config.get(
            self.num_layers_fallback_key or self.num_layers_key
        )
        return number if isinstance(number, int) else None

    def modules(self, model: Any) -> list[Any]:
        """Return the blocks of `model` in the order of their calls; a repeated one has several entries."""
        modules = list(model.get_submodule(self.module_path))
        return modules * int(getattr(model.config, self.num_layers_key)) if self.repeats_block else modules


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


@dataclass(frozen=True)
class LayoutVariant:
    """Another layout of a family, which its config selects."""

    name: str
    applies: Callable[[Config], bool]
    """Whether a config selects it."""
    example: Config
    """Config keys of a tiny model that has it."""


@dataclass(frozen=True)
class RmsNormForm:
    """The form of a family's root-mean-square norms."""

    epsilon_attribute: str = "variance_epsilon"
    adds_one_to_weight: bool = False
    """Whether they multiply by 1 + weight."""


@dataclass(frozen=True)
class PositionEncoding:
    """How a model encodes the positions of tokens."""

    max_positions_key: str | None = "max_position_embeddings"
    """The config key for the rows of the table of positions; None without a table, so that text length is not
    limited."""
    offset_by_pad_id: bool = False
    """Whether the first token has position pad_token_id + 1, so that as many rows belong to no token."""
    is_sinusoidal: bool = False
    """Whether the table has sines, which the model computes for its width. They are not stored, so a model of
    another width has other ones."""


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of a tokenizer of the family."""

    slow_files: tuple[str, ...] = ()
    """The alternative set of files."""
    accepts_fast: bool = True
    """Whether a tokenizer.json (or BERT's vocab.txt) is enough."""


@dataclass(frozen=True)
class TokenizerSpec:
    """How to make a tokenizer of the family: its special tokens and supported models."""

    special_tokens: tuple[str, ...] = ()
    """In the order of their ids."""
    token_roles: Mapping[str, str] = field(default_factory=dict)
    """The role (pad, unk, ...) of each token."""
    single_template: str = "$A"
    """Template of the tokenizers library for one text."""
    pair_template: str = "$A $B"
    """Template for two texts."""
    uses_token_types: bool = False
    """Whether the second text has token type 1."""
    allowed_models: tuple[str, ...] = ("bpe", "unigram", "wordpiece")
    """Models of the tokenizers library."""
    allowed_models_reason: str = ""
    """Why others are refused, as text for users."""
    sentencepiece: bool = False
    """Whether the tokenizer consists of SentencePiece models (Marian's); other fields are unused then."""


@dataclass(frozen=True)
class PublishedLearningRate:
    """A published learning rate of AdamW for training all weights of a pretrained model."""

    peak: float
    """After the warm-up."""
    hidden_size: int | None
    """The width of the model that it was published for; None if a family has no single width."""


@dataclass(frozen=True)
class Family:
    """A model family: what a tiny model does not show. One without stacks has convolutions."""

    name: str
    """The config's model_type."""
    tasks: tuple[Task, ...]
    """Supported tasks, the most usual first."""
    learning_rate: PublishedLearningRate
    """The default learning rate is derived from it."""
    layout_variants: tuple[LayoutVariant, ...] = ()
    layout_config: Config = field(default_factory=dict)
    """Config keys of the tiny model that shows the layout, where transformers' defaults are unsupported."""
    width_keys: tuple[str, ...] = ()
    """Other config keys that must equal the width of the hidden states."""
    attention_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its attentions that the layout cannot show."""
    num_layers_fallback_key: str | None = None
    """The config key for the number of blocks of a stack whose own key has no value."""
    input_kind: Literal["texts", "images", "arrays"] = "texts"
    """Token ids of texts, pixels of images, or arrays by name."""
    is_user_module: bool = False
    """Whether the models are PyTorch modules of the user's own, of any architecture, without a layout."""
    renamed_tensors: tuple[tuple[str, str], ...] = ()
    """Pairs of a pattern and its replacement, tried in order, for tensor names in older checkpoints."""
    published_tensors: tuple[tuple[str, str], ...] = ()
    """Such pairs from the model's tensor names to those in transformers' files, where these differ."""
    conv_and_norm: tuple[str, str] | None = None
    """The names of a convolution and the batch norm that alone uses its output, in any module with both."""
    conv_chain: str | None = None
    """The name of a sequence of such pairs, each with the output of the one before as its only use; the last
    output is added to the input."""
    conv_shortcut: str = ""
    """The module next to a chain that computes the other summand, by such a pair or unchanged."""
    embedding_scale: Callable[[Config], float] = lambda config: 1.0
    """From a config, the factor of the token embedding; it may depend on the width."""
    output_scale: Callable[[Config], float] = lambda config: 1.0
    """From a config, the factor of the hidden states before the output layer."""
    residual_scale: Callable[[Config], float] = lambda config: 1.0
    """From a config, the factor of each part's output in the sum of the hidden states (Granite)."""
    logits_divisor: Callable[[Config], float] = lambda config: 1.0
    """From a config, what the results of a decoder's output layer are divided by (Granite)."""
    ties_output: Callable[[Config], bool] = lambda config: bool(config.get("tie_word_embeddings", True))
    """From a config, whether the token embedding is the output layer."""
    position_encoding: PositionEncoding = PositionEncoding()
    tokenizer_files: TokenizerFiles = TokenizerFiles()
    tokenizer_spec: TokenizerSpec | None = None
    """None if smelt cannot train a tokenizer for the family."""
    unused_tensors: tuple[str, ...] = ()
    """Patterns of tensors in checkpoints that the model does not use."""
    other_head_tensors: tuple[str, ...] = ()
    """Patterns of tensors of heads that a checkpoint was trained with before, if it becomes a classifier with
    a new head, or a sentence embedder with none."""
    token_types: Literal["pairs", "zero"] | None = None
    """Either "pairs" if token types distinguish two texts, "zero" if the model has such a table and uses one
    row of it, None if it has none."""
    decoder_start: Literal["pad", "eos"] = "pad"
    """The first token of the decoder."""
    forces_eos: bool = False
    """Whether checkpoints force the last token to be the end."""
    suppresses_pad: bool = False
    """Whether checkpoints suppress padding."""
    freezes_pad_row: bool = False
    """Whether padding's embedding is frozen in training."""
    language_selection: Literal["codes", "prefix"] | None = None
    """Either "codes" if the tokenizer has language codes, "prefix" if a word before the text names the target
    language."""
    example_languages: tuple[str, str] = ("en_XX", "de_DE")
    """A source and a target in the notation of such a tokenizer."""
    relative_bias: Callable[[], RelativeBias] | None = None
    """Returns the implementation of `relative_bias` of its attentions (imports torch)."""
    distance_rows: Callable[[Config], Any] | None = None
    """From a config, for each distance from -f to f the row of the embeddings of distances, int64 tensor
    [2 f + 1]; larger distances have the rows of the ends (imports torch)."""
    rotary_fraction: Callable[[Config], float] = lambda config: 1.0
    """From a config, the part of a head's channels that rotary positions rotate, the first ones."""
    rms_norm: RmsNormForm = RmsNormForm()
    """The form of its root-mean-square norms, if any."""
    experts_per_token_key: str = "num_experts_per_tok"
    """The config key for the number of experts that a router selects, if it has experts."""
    window: Callable[[Config, int], int | None] = lambda config, number: None
    """From a config and the index of a block, the number of visible tokens (of a decoder: the last ones and
    itself; of an encoder: to each side); None for all."""
    separates_packed_sequences: bool = True
    """Whether transformers' decoder masks attention between packed sequences (by restarting position_ids)."""
    first_layer_reason: str | None = None
    """Why a student needs the first block, as text for users; None if it does not."""
    unsupported_config: Callable[[Config], list[str]] = lambda config: []
    """From a config, the settings that smelt does not support."""

    @cached_property
    def layouts(self) -> Mapping[str, Layout]:
        """Its layouts by the name of the variant, "" for the usual one."""
        if self.is_user_module:
            return {"": Layout((), "", ())}
        layouts = {}
        for variant in ("", *(variant.name for variant in self.layout_variants)):
            layout = read_layout(f"{self.name}-{variant}" if variant else self.name)
            stacks = tuple(
                replace(
                    stack,
                    attentions=tuple(replace(a, **self.attention_fields) for a in stack.attentions),
                    num_layers_fallback_key=self.num_layers_fallback_key,
                )
                for stack in layout.stacks
            )
            layouts[variant] = replace(layout, stacks=stacks)
        return layouts

    def stacks(self, config: Config) -> tuple[Stack, ...]:
        """Return the stacks of a model of this config."""
        variant = next((variant.name for variant in self.layout_variants if variant.applies(config)), "")
        return self.layouts[variant].stacks

    @property
    def architecture(self) -> Architecture:
        """What its blocks form, by its tasks."""
        if self.tasks[0] in SEQ2SEQ_TASKS:
            return "seq2seq"
        return "decoder" if self.tasks[0] in DECODER_TASKS else "encoder"

    @property
    def embedding_suffixes(self) -> tuple[str, ...]:
        """Possible suffixes of the token embedding, [vocabulary, width]."""
        if self.architecture == "seq2seq":
            return ("shared.weight", "encoder.embed_tokens.weight")
        tables = [stack.stream.embeddings[0] for stack in self.layouts[""].stacks if stack.stream.embeddings]
        return tuple(".".join(table.split(".")[-2:]) for table in tables)

    @property
    def hidden_size_key(self) -> str:
        """See `Layout`."""
        return self.layouts[""].hidden_size_key

    @property
    def embedding_size_key(self) -> str | None:
        """See `Layout`."""
        return self.layouts[""].embedding_size_key

    @property
    def head_modules(self) -> tuple[str, ...]:
        """See `Layout`."""
        return self.layouts[""].head_modules

    @property
    def logits_bias(self) -> str | None:
        """See `Layout`."""
        return self.layouts[""].logits_bias

    @property
    def transposed_suffixes(self) -> tuple[str, ...]:
        """See `Layout`."""
        return self.layouts[""].transposed_suffixes

    def hidden_size(self, config: Config) -> int | None:
        """Return the width of the hidden states, None without a single one in `config`."""
        size = config.get(self.hidden_size_key)
        return size if isinstance(size, int) else None

    def embedding_size(self, config: Config) -> int | None:
        """Return the width of the token embedding, None without one in `config`."""
        size = config.get(self.embedding_size_key) if self.embedding_size_key else None
        return (
            size
            if isinstance(size, int) and size > 0
            else self.layouts[""].default_embedding_size or self.hidden_size(config)
        )

    def with_hidden_size(self, config: Config, size: int) -> dict[str, Any]:
        """Return `config` with another width of the hidden states, and of the embeddings if it is theirs."""
        projected = any(stack.stream.embedding_projection for stack in self.stacks(config))
        keys = {self.hidden_size_key, self.hidden_size_key if projected else self.embedding_size_key}
        keys |= {key for key in self.width_keys if key in config}
        return {**config, **{key: size for key in keys if key}}

    def stack(self, config: Config, name: str) -> Stack | None:
        """Return the stack with this `name` in settings, None if there is none."""
        return next((s for s in self.stacks(config) if s.name == name), None)


def _join_path(block: str, name: str) -> str:
    return f"{block}.{name}" if name else block
