"""The description of a model family: its layout, positions, tokenizer and learning rate.

One file of this folder is one family; registry.py lists them. Everything here is known without torch, from a
model's config alone. A family's file holds what its `Layout` does not show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from smelt.data.tasks import Task, tasks_with
from smelt.models.families.config_keys import config_value
from smelt.models.families.layout import Config, Layout, Stack, read_layout
from smelt.models.families.relative_bias import RelativeBias

Architecture = Literal["encoder", "seq2seq", "decoder"]
SEQ2SEQ_TASKS = tasks_with(architecture="encoder-decoder", modality="text")
SPEECH_TASKS = tasks_with(architecture="encoder-decoder", modality="audio")
DECODER_TASKS = tasks_with(architecture="decoder")
IMAGE_TEXT_TASKS = tasks_with(architecture="encoder", modality="image-and-text")
ENCODER_TASKS = tasks_with(architecture="encoder", modality="text")
IMAGE_TASKS = tasks_with(architecture="encoder", modality="image")
MODULE_PREFIX = "network"
"""The name of a user's module in the model that calls it."""


@dataclass(frozen=True)
class Tower:
    """One of the models of a family with several, for one kind of input."""

    stack: str
    """The name of its stack."""
    module: str
    """The name of its module in the model."""
    config_key: str
    """The config key of its config."""
    model_type: str
    """The model_type of its config."""
    class_name: str
    """The class of transformers that it has alone."""
    input_kind: Literal["texts", "images"]
    example: Config = field(default_factory=dict)
    """Config keys of the tiny model that shows its layout."""
    pads_to_limit: bool = False
    """Whether texts are padded to the model's limit, as in training: the embedding is that of the last
    token."""


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
    byte_class: str | None = None
    """The class in tokenizer_config.json of a tokenizer of bytes, which has no other file (ByT5)."""


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
    shared_config_keys: tuple[str, ...] = ()
    """Config keys of a block's sizes that other parts of the model have too, so that pruned blocks need edits
    (SigLIP's pooling)."""
    input_kind: Literal["texts", "images", "images-and-texts", "audio", "arrays"] = "texts"
    """Token ids of texts, pixels of images, both (in two `towers`), spectrograms, or arrays by name."""
    towers: tuple[Tower, ...] = ()
    """Its separate models of one input each, whose outputs are compared."""
    embedding_width_key: str | None = None
    """The config key for the dimension of embeddings; None: the width of the hidden states."""
    is_user_module: bool = False
    """Whether the models are PyTorch modules of the user's own, of any architecture, without a layout."""
    renamed_tensors: tuple[tuple[str, str], ...] = ()
    """Pairs of a pattern and its replacement, tried in order, for tensor names in older checkpoints."""
    published_tensors: tuple[tuple[str, str], ...] = ()
    """Such pairs from the model's tensor names to those in transformers' files, where these differ."""
    convs_and_norms: tuple[tuple[str, str], ...] = ()
    """Pairs of the names of a convolution and the batch norm that alone uses its output, in any module with
    both; those of a `conv_chain` first."""
    conv_chain: str | None = None
    """The name of a sequence of such pairs, each with the output of the one before as its only use; the last
    output is added to the input."""
    has_linear_blocks: bool = False
    """Whether most weights of a network without stacks are those of linear layers (ConvNeXt)."""
    has_dense_kernels: bool = True
    """Whether kernels above 1 x 1 can be factorized; otherwise they are depthwise (MobileNetV2)."""
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
        if self.tasks[0] in (*SEQ2SEQ_TASKS, *SPEECH_TASKS):
            return "seq2seq"
        return "decoder" if self.tasks[0] in DECODER_TASKS else "encoder"

    @property
    def embedding_suffixes(self) -> tuple[str, ...]:
        """Possible suffixes of the token embedding, [vocabulary, width]."""
        if self.input_kind == "audio":
            return ("decoder.embed_tokens.weight",)
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
    def head_input_vectors(self) -> int:
        """See `Layout`."""
        return self.layouts[""].head_input_vectors

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
        size = config_value(config, self.hidden_size_key)
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
