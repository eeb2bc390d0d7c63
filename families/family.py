"""What a family of models says of itself. One file of this folder is one family; registry.py lists them.

Everything here is known without torch, from a model's config alone. Names of modules are dotted; those in an
`Attention` and a `FeedForward` are relative to their block, those of a `Stack` to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from smelt.core.data import Task
from smelt.families.relative_bias import RelativeBias
from smelt.families.stream import Stream

Config = Mapping[str, Any]
Kind = Literal["encoder", "seq2seq", "decoder"]
TEXT_TO_TEXT: tuple[Task, ...] = ("translation", "summarization")


@dataclass(frozen=True)
class Attention:
    """One attention of a block: what multiplies what, and where the numbers of its heads stand.

    name: the module that computes it; the block itself is "". query, key, value, out: its products; the same
    name three times where one product makes all, as `packed` says: "equal" thirds (GPT-2), or "grouped", as
    many rows as there are query, key and value heads (Phi-3). cross: it looks at the encoder.
    heads: the attribute that counts its heads; None where the rows of `key` do, because several queries share
    a key (Llama). size: the attribute that holds heads times width, where there is one. width: the attribute
    with the width of a head. key_heads: the attribute that counts the keys of a "grouped" product.
    setting, key_setting, width_setting: the config's words for its heads, its keys and the width of a head,
    one number for all attentions that name the word. Without a word for keys, there are as many as heads;
    without one for the width, or a number, it is the model's width divided by the heads.
    fixed_heads: why heads cannot be taken away, None where they can. scale: the attribute that scores, or
    the queries before, are multiplied with; "width" where it is the inverse root of the width; None where
    they are not scaled (T5).
    relative: a bias per head and distance is added to the scores; "handed_on" where a stack's
    first block computes it and each returns it for the next, "given" where the model computes it.
    rotary: queries and keys are rotated by their places. norms: of each head's queries and keys, where they
    are normed (Qwen3). interface: it calls the function that transformers' AttentionInterface holds, with
    queries, keys, values, mask and scale, so that one registered there sees the scores before their softmax;
    without it they are made inside of its forward.
    """

    name: str
    query: str
    key: str
    value: str
    out: str
    heads: str | None
    width: str
    setting: str
    key_setting: str | None = None
    width_setting: str | None = None
    size: str | None = None
    cross: bool = False
    packed: Literal["equal", "grouped"] | None = None
    key_heads: str | None = None
    fixed_heads: str | None = None
    scale: str | None = "scaling"
    relative: Literal["handed_on", "given"] | None = None
    rotary: bool = False
    norms: tuple[str, str] | None = None
    interface: bool = True

    @property
    def products(self) -> tuple[str, ...]:
        """Its products, each once; the last is `out`."""
        return tuple(dict.fromkeys((self.query, self.key, self.value, self.out)))

    def under(self, block: str) -> Attention:
        """Return the same with the names that it has in a model, below `block`."""
        norms = None if self.norms is None else (_below(block, self.norms[0]), _below(block, self.norms[1]))
        return replace(
            self,
            name=_below(block, self.name),
            query=_below(block, self.query),
            key=_below(block, self.key),
            value=_below(block, self.value),
            out=_below(block, self.out),
            norms=norms,
        )


@dataclass(frozen=True)
class FeedForward:
    """The feed-forward part of a block: a neuron owns a row of `up` (and of `gate`) and a column of `down`.

    setting: the config's word for the width of all parts of this kind; activation: that for the function in
    the middle, as transformers' ACT2FN calls it. gate: a second product of the input, which the first is
    multiplied with; the same name as `up` where one product makes both, the gate's rows first or last as
    `gate_first` says. activated: which of the two goes through the function.
    """

    name: str
    up: str
    down: str
    setting: str
    activation: str
    gate: str | None = None
    gate_first: bool = True
    activated: Literal["up", "gate"] = "gate"

    @property
    def inputs(self) -> tuple[str, ...]:
        """The products whose rows the neurons own."""
        return (self.up,) if self.gate in (None, self.up) else (self.up, str(self.gate))

    @property
    def products(self) -> tuple[str, ...]:
        """Its products, each once; the last is `down`."""
        return (*self.inputs, self.down)

    def under(self, block: str) -> FeedForward:
        """Return the same with the names that it has in a model, below `block`."""
        gate = None if self.gate is None else _below(block, self.gate)
        name, up, down = (_below(block, n) for n in (self.name, self.up, self.down))
        return replace(self, name=name, up=up, down=down, gate=gate)


@dataclass(frozen=True)
class Stack:
    """Blocks of one make, one behind the other.

    name: layers, encoder_layers or decoder_layers, as settings call it. setting: the config's word for how
    many there are; count: how many a config says, None where it does not. place: the list of blocks in the
    model that the family's tasks use. stream: the hidden states that they hand on. causal: no token sees a
    later one in the attentions that are not cross. by_layer: the config's words whose value, where there is
    one, is a list with an entry for each block; all others say one thing for all blocks.
    """

    name: str
    setting: str
    place: str
    attentions: tuple[Attention, ...]
    feed_forward: FeedForward
    stream: Stream
    causal: bool = False
    by_layer: tuple[str, ...] = ()
    setting_else: str | None = None  # the word that a config may say it with instead

    def count(self, config: Config) -> int | None:
        """Return how many blocks `config` says that there are, None where it says no number."""
        said = config.get(self.setting) or config.get(self.setting_else or self.setting)
        return said if isinstance(said, int) else None


@dataclass(frozen=True)
class RmsNorm:
    """How a family's root-mean-square norms are written.

    epsilon: the attribute that holds it. plus_one: they multiply with 1 + weight.
    """

    epsilon: str = "variance_epsilon"
    plus_one: bool = False


@dataclass(frozen=True)
class Positions:
    """How a model knows the places of tokens.

    table: the config's word for the rows of its table of positions; None where there is no table, so that
    nothing limits the length of a text. after_pad: the first token has the place pad_token_id + 1, so that so
    many rows belong to no token. computed: the table is sines, which the model draws up for its width; no
    file holds them, so that a model of another width has others.
    """

    table: str | None = "max_position_embeddings"
    after_pad: bool = False
    computed: bool = False


@dataclass(frozen=True)
class TokenizerFiles:
    """What a tokenizer of the family is stored in.

    fast: a tokenizer.json (or BERT's vocab.txt) is enough. slow: the files that do as well, all together.
    """

    slow: tuple[str, ...] = ()
    fast: bool = True


@dataclass(frozen=True)
class TokenizerForm:
    """How a tokenizer of the family is made: what stands around a text, and of which kind it can be.

    specials: in the order of their ids. roles: pad, unk, ... to token. single, pair: templates of the
    tokenizers library for one and two texts. types: whether the second text has token type 1. kinds: of
    pieces. sentencepiece: it is made of SentencePiece models (Marian's), and the rest says nothing.
    """

    specials: tuple[str, ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict)
    single: str = "$A"
    pair: str = "$A $B"
    types: bool = False
    kinds: tuple[str, ...] = ("bpe", "unigram", "wordpiece")
    why_kinds: str = ""
    sentencepiece: bool = False


@dataclass(frozen=True)
class Rate:
    """A learning rate of AdamW that was published for training all weights of a trained model further.

    highest: after the warm-up. width: of the hidden states of the model that it was published for; None where
    a family has no one width.
    """

    highest: float
    width: int | None


@dataclass(frozen=True)
class Family:
    """A family of models.

    name: the config's model_type. tasks: what it is for, what most of its models are for first.
    reads: what goes in, token ids of texts or pixels of images. A family without `stacks` has no blocks of
    attention and feed-forward parts, but convolutions.
    renamed: pairs of a pattern and what takes its place, tried in order, for the names of tensors in older
    checkpoints.
    normed: what a convolution and the batch norm that alone reads it are called, wherever a module has both.
    chain: what a row of such pairs is called, of which each reads what the one before it alone gives; what
    its last one gives is added to what came in. beside: what stands beside a chain, in the same module: it
    gives what is added, by such a pair or untouched.
    stacks: from a config. embedding: how the name of its word embedding may end, [vocabulary, width]; width:
    the config's word for that width.
    embedding_scale, output_scale: from a config, what the rows of the word embedding are multiplied with, and
    the hidden states before the output layer; both may depend on the width.
    rate: how fast its models learn, where nobody says otherwise.
    head: the modules between the last hidden states and the outputs, in order, by their names in the model;
    each reads what the one before it gives. logits_bias: a buffer that is added to the outputs.
    keeps_float32: how the names of linear layers end that stay float32 in a model of 16 bits.
    unread: patterns of tensors that checkpoints hold and the model does not read; other_heads: those of heads
    that a checkpoint was trained with before, where it becomes a classifier with a new one, or a sentence
    embedder with none.
    token_types: "pairs" where two texts are told apart by token types, "zero" where the model has such a
    table and reads one row of it, None where it has none.
    starts_with: what its decoder begins with; forces_end: checkpoints force the last token to be the end;
    bars_pad: they forbid padding as a word; holds_pad_row: padding's embedding stays where it is in training.
    languages: "codes" where the tokenizer knows languages, "prefix" where a word before the text names the
    target language. codes: a source and a target as such a tokenizer writes them.
    turned: how the names of linear layers end whose weights lie turned around in the file (GPT-2).
    relative_bias: gives what knows the bias of its `relative` attentions (imports torch).
    rms_norm: how its root-mean-square norms are written, where it has any.
    window: from a config and the number of a block, how many tokens it sees (a decoder's: the last ones and
    itself; an encoder's: so many to each side); None for all.
    first_stays: why a student cannot do without the first block, None where it can.
    refuses: from a config, what of it smelt cannot follow.
    """

    name: str
    kind: Kind
    tasks: tuple[Task, ...]
    stacks: Callable[[Config], tuple[Stack, ...]]
    embedding: tuple[str, ...]
    width: str
    rate: Rate
    head: tuple[str, ...]
    reads: Literal["texts", "images"] = "texts"
    renamed: tuple[tuple[str, str], ...] = ()
    normed: tuple[str, str] | None = None
    chain: str | None = None
    beside: str = ""
    logits_bias: str | None = None
    embedding_scale: Callable[[Config], float] = lambda config: 1.0
    output_scale: Callable[[Config], float] = lambda config: 1.0
    keeps_float32: tuple[str, ...] = ()
    positions: Positions = Positions()
    tokenizer: TokenizerFiles = TokenizerFiles()
    new_tokenizer: TokenizerForm | None = None
    unread: tuple[str, ...] = ()
    other_heads: tuple[str, ...] = ()
    token_types: Literal["pairs", "zero"] | None = None
    starts_with: Literal["pad", "eos"] = "pad"
    forces_end: bool = False
    bars_pad: bool = False
    holds_pad_row: bool = False
    languages: Literal["codes", "prefix"] | None = None
    codes: tuple[str, str] = ("en_XX", "de_DE")
    turned: tuple[str, ...] = ()
    relative_bias: Callable[[], RelativeBias] | None = None
    rms_norm: RmsNorm = RmsNorm()
    window: Callable[[Config, int], int | None] = lambda config, number: None
    first_stays: str | None = None
    refuses: Callable[[Config], list[str]] = lambda config: []

    def stack(self, config: Config, name: str) -> Stack | None:
        """Return the stack that settings call `name`, None where there is none."""
        return next((s for s in self.stacks(config) if s.name == name), None)


def _below(block: str, name: str) -> str:
    return f"{block}.{name}" if name else block
