"""The description of a model family: its blocks, hidden states, positions, tokenizer and learning rate.

One file of this folder is one family; registry.py lists them. Everything here is known without torch, from a
model's config alone. Names of modules are dotted; those in an `Attention` and a `FeedForward` are relative to
their block, those of a `Stack` to the model.

`Attention` and `FeedForward` describe the linear layers of a block. A `ResidualStream` describes the hidden
states of a stack, from the embeddings to the output layer: every block adds to the same states, so that one
of their channels affects all modules that read or write them. `RelativeBias` is the interface of a relative
position bias; a family with one provides an implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from smelt.data.splits import Task


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
    """The hidden states of one stack.

    embeddings: the embeddings whose sum is the input of the stack, token embedding first, by the names of
    their tensors in the model, [rows, width]. embedding_norm: the norm of their sum, if there is one.
    part_norms: the norms of the parts of a block, attentions in order and then the feed-forward part, with
    names relative to the block. pre_norm: a norm is before its part and nothing else uses its output
    (pre-norm); otherwise it normalizes the sum of the part's input and output, which is the input of the
    next part (post-norm). final_norm: the norm after the last block, if there is one. other_tensors: other
    tensors of the states, each with the axis of their width (patches of an image, its first token).
    """

    embeddings: tuple[str, ...]
    part_norms: tuple[str, ...]
    pre_norm: bool
    embedding_norm: str | None = None
    final_norm: str | None = None
    other_tensors: tuple[tuple[str, int], ...] = ()


Config = Mapping[str, Any]
Architecture = Literal["encoder", "seq2seq", "decoder"]
SEQ2SEQ_TASKS: tuple[Task, ...] = ("translation", "summarization")


@dataclass(frozen=True)
class Attention:
    """One attention of a block: its linear layers and the attributes with its numbers of heads.

    name: the module that computes it; the block itself is "". query, key, value, out: its linear layers; the
    same name three times if one linear layer computes all, as `packed` defines: "equal" thirds (GPT-2), or
    "grouped", with the rows of query, key and value heads (Phi-3). cross: cross-attention.
    heads_attribute: the attribute with the number of heads; None if the rows of `key` define it, because
    several queries share a key (Llama). all_head_size_attribute: the attribute with heads times width, if
    there is one. head_dim_attribute: the attribute with the width of a head. kv_heads_attribute: the
    attribute with the number of key heads of a "grouped" linear layer.
    setting, kv_heads_key, head_dim_key: the config keys for heads, key heads and the width of a head,
    one number for all attentions with the key. Without kv_heads_key there are as many as heads;
    without head_dim_key, or a value, the width is the model's width divided by the heads.
    fixed_heads_reason: why heads cannot be removed, None if they can. scale_attribute: the attribute with the
    factor of the scores, or of the queries; "width" if it is the inverse root of the width; None if
    they are not scaled (T5).
    relative_bias: a bias per head and distance is added to the scores; "handed_on" if a stack's
    first block computes it and each returns it for the next, "given" if the model computes it.
    rotary: queries and keys are rotated by their positions. qk_norms: the norms of each head's queries and
    keys, if any (Qwen3). uses_attention_interface: it calls the function in transformers' AttentionInterface
    with queries, keys, values, mask and scale, so that a registered function gets the scores before the
    softmax; otherwise they are computed inside its forward.
    """

    name: str
    query: str
    key: str
    value: str
    out: str
    heads_attribute: str | None
    head_dim_attribute: str
    heads_key: str
    kv_heads_key: str | None = None
    head_dim_key: str | None = None
    all_head_size_attribute: str | None = None
    cross: bool = False
    packed: Literal["equal", "grouped"] | None = None
    kv_heads_attribute: str | None = None
    fixed_heads_reason: str | None = None
    scale_attribute: str | None = "scaling"
    relative_bias: Literal["handed_on", "given"] | None = None
    rotary: bool = False
    qk_norms: tuple[str, str] | None = None
    uses_attention_interface: bool = True

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
        )


@dataclass(frozen=True)
class FeedForward:
    """The feed-forward part of a block: a neuron owns a row of `up` (and of `gate`) and a column of `down`.

    intermediate_size_key: the config key for the width of all parts of this kind; activation: the config key
    for the activation function, as named in transformers' ACT2FN. gate: a second linear layer of the input,
    whose output multiplies the first; the same name as `up` if one linear layer computes both, the gate's
    rows first or last by `gate_first`. activated_layer: which of the two the function is applied to.
    """

    name: str
    up: str
    down: str
    intermediate_size_key: str
    activation_key: str
    gate: str | None = None
    gate_first: bool = True
    activated_layer: Literal["up", "gate"] = "gate"

    @property
    def input_layers(self) -> tuple[str, ...]:
        """The linear layers with a row for each neuron."""
        return (self.up,) if self.gate in (None, self.up) else (self.up, str(self.gate))

    @property
    def linear_layers(self) -> tuple[str, ...]:
        """Its linear layers, each once; the last is `down`."""
        return (*self.input_layers, self.down)

    def with_prefix(self, block: str) -> FeedForward:
        """Return the part with its full names in a model, below `block`."""
        gate = None if self.gate is None else _join_path(block, self.gate)
        name, up, down = (_join_path(block, n) for n in (self.name, self.up, self.down))
        return replace(self, name=name, up=up, down=down, gate=gate)


STACK_NAMES = ("encoder_layers", "decoder_layers", "layers")


@dataclass(frozen=True)
class Stack:
    """Consecutive blocks of the same layout.

    name: layers, encoder_layers or decoder_layers, as in settings. num_layers_key: the config key for their
    number. module_path: the list of blocks in the model of the family's tasks. stream: their hidden states.
    causal: no token attends to a later one, except in cross-attention. per_layer_keys: the config keys whose
    value, if set, is a list with an entry for each block; all others apply to all blocks.
    """

    name: str
    num_layers_key: str
    module_path: str
    attentions: tuple[Attention, ...]
    feed_forward: FeedForward
    stream: ResidualStream
    causal: bool = False
    per_layer_keys: tuple[str, ...] = ()
    num_layers_fallback_key: str | None = None  # an alternative config key

    def num_layers(self, config: Config) -> int | None:
        """Return the number of blocks in `config`, None if it has none."""
        number = config.get(self.num_layers_key) or config.get(
            self.num_layers_fallback_key or self.num_layers_key
        )
        return number if isinstance(number, int) else None


@dataclass(frozen=True)
class RmsNormForm:
    """The form of a family's root-mean-square norms.

    epsilon_attribute: the attribute with the epsilon. adds_one_to_weight: they multiply by 1 + weight.
    """

    epsilon_attribute: str = "variance_epsilon"
    adds_one_to_weight: bool = False


@dataclass(frozen=True)
class PositionEncoding:
    """How a model encodes the positions of tokens.

    max_positions_key: the config key for the rows of its table of positions; None without a table, so that
    text length is not limited. offset_by_pad_id: the first token has position pad_token_id + 1, so that many
    rows belong to no token. is_sinusoidal: the table has sines, which the model computes for its width; they
    are not stored, so that a model of another width has other ones.
    """

    max_positions_key: str | None = "max_position_embeddings"
    offset_by_pad_id: bool = False
    is_sinusoidal: bool = False


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of a tokenizer of the family.

    accepts_fast: a tokenizer.json (or BERT's vocab.txt) is enough. slow_files: the alternative set of files.
    """

    slow_files: tuple[str, ...] = ()
    accepts_fast: bool = True


@dataclass(frozen=True)
class TokenizerSpec:
    """How to make a tokenizer of the family: its special tokens and supported models.

    special_tokens: in the order of their ids. token_roles: pad, unk, ... to token. single_template,
    pair_template: templates of the tokenizers library for one and two texts. uses_token_types: whether the
    second text has token type 1. allowed_models: of the tokenizers library. sentencepiece: it consists of
    SentencePiece models (Marian's); other fields are unused then.
    """

    special_tokens: tuple[str, ...] = ()
    token_roles: Mapping[str, str] = field(default_factory=dict)
    single_template: str = "$A"
    pair_template: str = "$A $B"
    uses_token_types: bool = False
    allowed_models: tuple[str, ...] = ("bpe", "unigram", "wordpiece")
    allowed_models_reason: str = ""
    sentencepiece: bool = False


@dataclass(frozen=True)
class PublishedLearningRate:
    """A published learning rate of AdamW for training all weights of a pretrained model.

    peak: after the warm-up. hidden_size: the width of the model that it was published for; None if
    a family has no single width.
    """

    peak: float
    hidden_size: int | None


@dataclass(frozen=True)
class Family:
    """A model family.

    name: the config's model_type. tasks: supported tasks, the most usual first.
    input_kind: token ids of texts or pixels of images. A family without `stacks` has no blocks of
    attention and feed-forward parts, but convolutions.
    renamed_tensors: pairs of a pattern and its replacement, tried in order, for the names of tensors in older
    checkpoints.
    conv_and_norm: the names of a convolution and the batch norm that alone uses its output, in any module
    with both. conv_chain: the name of a sequence of such pairs, each with the output of the one before as
    its only use; the last output is added to the input. conv_shortcut: the module next to a chain that
    computes the other summand, by such a pair or unchanged.
    stacks: from a config. embedding_suffixes: possible suffixes of the token embedding, [vocabulary, width];
    width: the config key for that width.
    embedding_scale, output_scale: from a config, the factors of the token embedding, and of the hidden states
    before the output layer; both may depend on the width.
    learning_rate: the default learning rate.
    head_modules: the modules between the last hidden states and the outputs, in order, by their names in the
    model; each gets the output of the one before. logits_bias: a buffer that is added to the outputs.
    float32_suffixes: suffixes of linear layers that are float32 in a 16-bit model.
    unused_tensors: patterns of tensors in checkpoints that the model does not use; other_heads: those of
    heads that a checkpoint was trained with before, if it becomes a classifier with a new one, or a sentence
    embedder with none.
    token_types: "pairs" if token types distinguish two texts, "zero" if the model has such a
    table and uses one row of it, None if it has none.
    decoder_start: the first token of the decoder; forces_end: checkpoints force the last token to be the end;
    suppresses_pad: they suppress padding; holds_pad_row: padding's embedding is frozen in training.
    language_selection: "codes" if the tokenizer has language codes, "prefix" if a word before the text names
    the target language. example_languages: a source and a target in the notation of such a tokenizer.
    transposed_suffixes: suffixes of linear layers whose weights are stored transposed (GPT-2).
    relative_bias: returns the implementation of `relative_bias` of its attentions (imports torch).
    rms_norm: the form of its root-mean-square norms, if any.
    window: from a config and the index of a block, the number of visible tokens (of a decoder: the last ones
    and itself; of an encoder: to each side); None for all.
    first_layer_reason: why a student needs the first block, None if it does not.
    unsupported_config: from a config, the settings that smelt does not support.
    """

    name: str
    architecture: Architecture
    tasks: tuple[Task, ...]
    stacks: Callable[[Config], tuple[Stack, ...]]
    embedding_suffixes: tuple[str, ...]
    hidden_size_key: str
    learning_rate: PublishedLearningRate
    head_modules: tuple[str, ...]
    input_kind: Literal["texts", "images"] = "texts"
    renamed_tensors: tuple[tuple[str, str], ...] = ()
    conv_and_norm: tuple[str, str] | None = None
    conv_chain: str | None = None
    conv_shortcut: str = ""
    logits_bias: str | None = None
    embedding_scale: Callable[[Config], float] = lambda config: 1.0
    output_scale: Callable[[Config], float] = lambda config: 1.0
    float32_suffixes: tuple[str, ...] = ()
    position_encoding: PositionEncoding = PositionEncoding()
    tokenizer_files: TokenizerFiles = TokenizerFiles()
    tokenizer_spec: TokenizerSpec | None = None
    unused_tensors: tuple[str, ...] = ()
    other_head_tensors: tuple[str, ...] = ()
    token_types: Literal["pairs", "zero"] | None = None
    decoder_start: Literal["pad", "eos"] = "pad"
    forces_eos: bool = False
    suppresses_pad: bool = False
    freezes_pad_row: bool = False
    language_selection: Literal["codes", "prefix"] | None = None
    example_languages: tuple[str, str] = ("en_XX", "de_DE")
    transposed_suffixes: tuple[str, ...] = ()
    relative_bias: Callable[[], RelativeBias] | None = None
    rms_norm: RmsNormForm = RmsNormForm()
    window: Callable[[Config, int], int | None] = lambda config, number: None
    first_layer_reason: str | None = None
    unsupported_config: Callable[[Config], list[str]] = lambda config: []

    def stack(self, config: Config, name: str) -> Stack | None:
        """Return the stack with this `name` in settings, None if there is none."""
        return next((s for s in self.stacks(config) if s.name == name), None)


def _join_path(block: str, name: str) -> str:
    return f"{block}.{name}" if name else block
