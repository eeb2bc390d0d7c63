"""What a model generates with: settings of the recipe (`score.generation`) and the model, and its shortlist.

The model's are those of `generation_config.json`, or of `config.json` where that is missing, as
transformers reads them. The kind of search (`num_beams`, `do_sample`) is never taken from the model.

A shortlist: the tokens that are allowed in a text, by the tokens of its source.
It is part of the artifact, in `shortlist.safetensors`, which every stage copies with the tokenizer's
files. The model itself is complete: the runner excludes all other tokens of a row, so that training, scores
and every runtime are consistent, and a row's result does not depend on its batch. The graph with the
generation loop also multiplies only with the rows of the output layer that some source of the batch needs.

Source: Jean et al. 2015, On Using Very Large Target Vocabulary for Neural Machine Translation,
arXiv:1412.2007 (section 3.3); L'Hostis et al. 2016, arXiv:1610.00072.

Shapes: B = batch, L = source length, S = tokens of the source vocabulary, V = tokens of the output layer,
n = candidates of a source token, k = tokens that are always allowed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from smelt.core.errors import InputError, SettingError
from smelt.generation.backend import Batch, Tokens
from smelt.generation.speech_prompt import speech_start_tokens
from smelt.models.families.registry import reads_audio
from smelt.models.text_rules import SHORTLIST_FILE, position_table_size
from smelt.stage import Settings

TokenId = Annotated[int, Field(ge=0)]
_OF_BEAMS = ("length_penalty", "early_stopping")
_OF_SAMPLING = ("temperature", "top_k", "top_p", "seed")
SEARCH_SETTINGS = ("num_beams", "do_sample", *_OF_BEAMS, *_OF_SAMPLING)


class GenerationSettings(Settings):
    """How texts are generated, with the names of a Hugging Face generation config.

    Missing settings are taken from the model's own generation config.
    """

    num_beams: int = Field(default=1, ge=1, le=64, description="number of beams; 1: greedy search")
    max_new_tokens: int | None = Field(
        default=None, ge=1, le=4096, description="longest output in tokens; default: the model's, else 128"
    )
    min_new_tokens: int | None = Field(default=None, ge=0, le=4096, description="shortest output in tokens")
    min_length: int | None = Field(
        default=None, ge=0, le=4096, description="as min_new_tokens, counting the start token or the prompt"
    )
    length_penalty: float | None = Field(
        default=None, ge=-10, le=10, description="beams: scores are divided by length to this power"
    )
    early_stopping: bool | Literal["never"] | None = Field(
        default=None, description="beams: when a search ends"
    )
    no_repeat_ngram_size: int | None = Field(
        default=None, ge=0, le=4096, description="n-grams of this size occur once"
    )
    repetition_penalty: float | None = Field(
        default=None, gt=0, le=100, description="divides logits of generated tokens"
    )
    bad_words_ids: tuple[Annotated[tuple[TokenId, ...], Field(min_length=1)], ...] | None = Field(
        default=None, description="sequences that are not generated"
    )
    forced_bos_token_id: TokenId | None = Field(default=None, description="first token")
    forced_eos_token_id: TokenId | None = Field(default=None, description="last token at the limit")
    suppress_tokens: tuple[TokenId, ...] | None = Field(default=None, description="never generated")
    begin_suppress_tokens: tuple[TokenId, ...] | None = Field(default=None, description="not generated first")
    language: str | None = Field(
        default=None, description="speech recognition: of the audio, as en or English; default: the model's"
    )
    do_sample: bool = Field(default=False, description="draw each token")
    temperature: float | None = Field(default=None, gt=0, le=100, description="sampling: of the softmax")
    top_k: int | None = Field(default=None, ge=0, description="sampling: number of candidates; 0: all")
    top_p: float | None = Field(
        default=None, gt=0, le=1, description="sampling: total probability of candidates"
    )
    seed: int | None = Field(default=None, ge=0, le=2**32 - 1, description="sampling")

    @model_validator(mode="after")
    def _check_used_settings(self) -> Self:
        if self.do_sample and self.num_beams > 1:
            raise SettingError(
                f"do_sample: true requires num_beams: 1, got {self.num_beams}",
                code="settings-conflict",
            )
        if self.min_length is not None and self.min_new_tokens is not None:
            raise SettingError("set either min_new_tokens or min_length, not both", code="settings-conflict")
        for name in _OF_BEAMS:
            if self.num_beams == 1 and getattr(self, name) is not None:
                raise SettingError(f"{name} has no effect with num_beams: 1", code="unused-setting")
        for name in _OF_SAMPLING:
            if not self.do_sample and getattr(self, name) is not None:
                raise SettingError(f"{name} has no effect without do_sample: true", code="unused-setting")
        return self

    def summary(self) -> str:
        """Return the kind of search and the maximum output length as text."""
        kind = "sampled" if self.do_sample else f"beam {self.num_beams}" if self.num_beams > 1 else "greedy"
        if self.max_new_tokens is None:
            return f"{kind}, up to the model's longest output"
        return f"{kind}, at most {self.max_new_tokens} new tokens"


# New tokens where neither the recipe nor the model has a limit.
MAX_NEW_TOKENS = 128

# Settings of a generation config that would change the outputs and that smelt does not support, each with the
# values that mean "off", next to null; the second list applies to sampling only.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "exponential_decay_length_penalty": (),
    "sequence_bias": (),
    "guidance_scale": (1.0,),
    "watermarking_config": (),
    "token_healing": (False,),
    "stop_strings": (),
    "max_time": (),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "force_words_ids": (),
    "constraints": (),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
}
_UNSUPPORTED_IN_SAMPLING: dict[str, tuple[Any, ...]] = {
    "min_p": (0.0,),
    "top_h": (),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
}


class HasModelConfig(Protocol):
    """A model's `folder` and its two config files, as dicts. A `Runner` is one."""

    folder: Any
    config: dict[str, Any]
    generation_config: dict[str, Any]


class GenerationConfig(BaseModel):
    """`GenerationSettings` with every value set. Token numbers are ids of the vocabulary.

    start: the decoder's first token, None for a decoder-only model. start_tokens: those that follow it before
    the first new one: language and task of a Whisper. pad: fills a row after the end of its
    text. positions: the model's maximum length, None where it has no position table.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    num_beams: int = 1
    do_sample: bool = False
    seed: int = 0
    temperature: float = Field(default=1.0, gt=0)
    top_k: int = Field(default=50, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_new_tokens: int | None = Field(default=None, ge=1)
    max_length: int | None = Field(default=None, ge=1)
    min_new_tokens: int | None = Field(default=None, ge=0)
    min_length: int = Field(default=0, ge=0)
    length_penalty: float = Field(default=1.0, ge=-10, le=10)
    early_stopping: bool | Literal["never"] = False
    no_repeat_ngram_size: int = Field(default=0, ge=0)
    repetition_penalty: float = Field(default=1.0, gt=0)
    bad_words_ids: list[list[int]] = Field(default_factory=list)
    forced_bos_token_id: int | None = None
    forced_eos_token_id: list[int] = Field(default_factory=list)
    suppress_tokens: list[int] = Field(default_factory=list)
    begin_suppress_tokens: list[int] = Field(default_factory=list)
    renormalize_logits: bool = False
    remove_invalid_values: bool = False
    start: int | None = None
    start_tokens: list[int] = Field(default_factory=list)
    eos: list[int] = Field(default_factory=list)
    pad: int = 0
    positions: int | None = None

    @property
    def decoder_prompt(self) -> list[int]:
        """The tokens of the decoder before the first new one; empty for a decoder-only model."""
        return [] if self.start is None else [self.start, *self.start_tokens]

    def requested_new_tokens(self, prompt_length: int) -> int:
        """Return the requested number of new tokens, whether or not the model has positions for them."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if self.max_length is not None and self.max_length > prompt_length:
            return self.max_length - prompt_length
        return MAX_NEW_TOKENS

    def max_total_length(self, prompt_length: int) -> int:
        """Return the maximum number of tokens of a text, including its prompt."""
        most = prompt_length + self.requested_new_tokens(prompt_length)
        # the last token is never an input, so it needs no position of its own
        return most if self.positions is None else max(prompt_length + 1, min(most, self.positions + 1))

    def hit_length_limit(self, new: Sequence[int]) -> bool:
        """Return whether the output `new` ended because of the length limit.

        new: the tokens of an encoder-decoder model after its prompt. Where the last token is forced to
        be the end (`forced_eos_token_id`), an output of full length counts as limited.
        """
        has_max_length = len(new) >= self.max_new_after_start
        return has_max_length and (bool(self.forced_eos_token_id) or new[-1] not in self.eos)

    @property
    def max_new_after_start(self) -> int:
        """The maximum number of new tokens of an encoder-decoder model."""
        return self.max_total_length(len(self.decoder_prompt)) - len(self.decoder_prompt)

    def min_total_length(self, prompt_length: int) -> int:
        """Return the length, including its prompt, below which a text may not end."""
        return self.min_length if self.min_new_tokens is None else prompt_length + self.min_new_tokens

    def prompt_limits(self, prompt_length: int) -> tuple[int, int, bool]:
        """Return the limits that depend on a prompt's length: most and fewest new tokens, a forced first one.

        A batch has one length, that of its longest prompt, so only prompts with equal limits may share one.
        """
        min_new_tokens = max(0, self.min_total_length(prompt_length) - prompt_length)
        forces_first = self.forced_bos_token_id is not None and prompt_length == 1
        return self.max_total_length(prompt_length) - prompt_length, min_new_tokens, forces_first

    def describe(self) -> str:
        """Return the effective settings, for the signature of a score."""
        if self.num_beams > 1:
            early = str(self.early_stopping).lower()
            parts = [
                f"gen:beam {self.num_beams}",
                f"length_penalty:{self.length_penalty:g}",
                f"early_stopping:{early}",
            ]
        elif self.do_sample:
            parts = [f"gen:sample seed {self.seed}", f"temperature:{self.temperature:g}"]
            parts += [f"top_k:{self.top_k}", f"top_p:{self.top_p:g}"]
        else:
            parts = ["gen:greedy"]
        if self.max_new_tokens is None and self.max_length is not None:
            parts.append(f"max_length:{self.max_length}")
        else:
            parts.append(f"max_new_tokens:{self.max_new_tokens or MAX_NEW_TOKENS}")
        other_settings = {
            "min_new_tokens": self.min_new_tokens,
            "min_length": self.min_length if self.min_new_tokens is None else 0,
            "no_repeat_ngram_size": self.no_repeat_ngram_size,
            "repetition_penalty": 0 if self.repetition_penalty == 1 else self.repetition_penalty,
            "bad_words": len(self.bad_words_ids),
            "suppressed": len(self.suppress_tokens) + len(self.begin_suppress_tokens),
        }
        parts += [f"{name}:{value:g}" for name, value in other_settings.items() if value]
        forced_tokens = {
            "forced_bos": self.forced_bos_token_id,
            "forced_eos": self.forced_eos_token_id or None,
            "start_tokens": self.start_tokens or None,
        }
        parts += [f"{name}:{value}" for name, value in forced_tokens.items() if value is not None]
        return "|".join(parts)


def resolve_generation(generation: GenerationSettings, model: HasModelConfig) -> GenerationConfig:
    """Return `generation` completed by the settings of `model`, for example a runner.

    Raises:
        InputError: the generation config is malformed or has settings that smelt does not support, a token is
            outside of the vocabulary, or there is no start token.
    """
    explicit = {name: value for name, value in generation.model_dump().items() if value is not None}
    model_settings = model.generation_config or model.config
    _refuse_unsupported(model_settings, generation.do_sample)
    unused_settings = {"num_beams", "do_sample", "seed"}  # and settings that this search ignores
    unused_settings |= set() if generation.do_sample else {"temperature", "top_k", "top_p"}
    unused_settings |= (
        set() if generation.num_beams > 1 else {"length_penalty", "early_stopping", "renormalize_logits"}
    )
    defaults = {
        n: model_settings[n]
        for n in GenerationConfig.model_fields
        if n not in unused_settings and model_settings.get(n) is not None
    }
    for new_tokens_key, length_key in (("min_new_tokens", "min_length"), ("max_new_tokens", "max_length")):
        if explicit.get(new_tokens_key) is not None or explicit.get(length_key) is not None:
            defaults = {
                name: value for name, value in defaults.items() if name not in (new_tokens_key, length_key)
            }
    language = explicit.pop("language", None)
    values = defaults | explicit | _special_tokens(model)
    if reads_audio(model.config):
        values["start_tokens"] = speech_start_tokens(model_settings, model.config, language)
    elif language is not None:
        raise InputError(
            f"{model.folder}: language is a setting of models that read audio. Remove it.",
            code="unused-setting",
            setting="language",
        )
    values["forced_eos_token_id"] = _as_list(values.get("forced_eos_token_id"))
    values["positions"] = _max_positions(generation, model, values["start"] is not None)
    try:
        decoding = GenerationConfig.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, e['loc']))} is {e['input']!r}: {e['msg']}" for e in error.errors()
        )
        raise InputError(f"{model.folder}/generation_config.json: {problems}.", code="wrong-value") from error
    _check_token_ids(decoding, model)
    return decoding


def _max_positions(generation: GenerationSettings, model: HasModelConfig, decodes: bool) -> int | None:
    """Return the maximum number of input tokens of a text: the model's positions or its engines' size.

    decodes: whether the text is a decoder's, next to an encoder; for a decoder-only model the runner has
    already lowered the positions of the config.

    Raises:
        InputError: `engine-limit`: more new tokens are requested than the engines were built for.
    """
    table = position_table_size(model.config)
    built: int | None = getattr(getattr(model, "backend", None), "max_total_tokens", None)
    if built is None:
        return table
    if generation.max_new_tokens is not None and generation.max_new_tokens > built:
        raise InputError(
            f"max_new_tokens: {generation.max_new_tokens} is more than the {built} that the engines or caches"
            f" of {model.folder} have room for. Use {built} or fewer, or rebuild them with tensorrt:"
            f" {{max_new_tokens: {generation.max_new_tokens}}}, or a larger onnx: {{cache_length}}.",
            code="engine-limit",
            setting="max_new_tokens",
        )
    if not decodes:
        return table
    return built if table is None else min(table, built)


def _refuse_unsupported(model_config: dict[str, Any], do_sample: bool) -> None:
    for name, allowed_values in (_UNSUPPORTED | (_UNSUPPORTED_IN_SAMPLING if do_sample else {})).items():
        if model_config.get(name) not in (None, [], {}, *allowed_values):
            raise InputError(
                f"generation_config.json: {name} is {repr(model_config[name])[:80]}, which smelt's "
                "generation does not"
                f" support; set it to {json.dumps(allowed_values[0]) if allowed_values else 'null'}.",
                code="unsupported-generation-setting",
            )


def _special_tokens(model: HasModelConfig) -> dict[str, Any]:
    """Return the tokens that begin, end and pad a text."""

    def get(name: str) -> Any:
        value = model.generation_config.get(name)
        return model.config.get(name) if value is None else value

    start = None
    if model.config.get("is_encoder_decoder"):
        start = get("decoder_start_token_id")
        start = get("bos_token_id") if start is None else start
        if start is None:
            raise InputError(
                "config.json: no decoder_start_token_id, so the decoder has no first token. Set it in"
                " config.json.",
                code="missing-special-token",
            )
    eos = _as_list(get("eos_token_id"))
    pad = get("pad_token_id")
    return {"start": start, "eos": eos, "pad": (eos or [0])[0] if pad is None else pad}


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [] if value is None else [value]


def _check_token_ids(decoding: GenerationConfig, model: HasModelConfig) -> None:
    size = model.config.get("decoder_vocab_size") or model.config.get("vocab_size")
    if size is None:
        return
    lists = {
        "bad_words_ids": [token for banned_ids in decoding.bad_words_ids for token in banned_ids],
        "suppress_tokens": decoding.suppress_tokens,
        "begin_suppress_tokens": decoding.begin_suppress_tokens,
        "forced_eos_token_id": decoding.forced_eos_token_id,
        "forced_bos_token_id": _as_list(decoding.forced_bos_token_id),
        "eos_token_id": decoding.eos,
        "start_tokens": decoding.start_tokens,
    }
    for name, tokens in lists.items():
        invalid = [token for token in tokens if not 0 <= token < size]
        if invalid:
            raise InputError(
                f"{model.folder}: {name} is token {invalid[0]}; the model's vocabulary has the tokens 0 to"
                f" {size - 1}.",
                code="token-outside-vocabulary",
            )


# the tensors in SHORTLIST_FILE
TABLE_TENSOR, ALWAYS_TENSOR = "shortlist.table", "shortlist.always"
_SMALL = 2**16


@dataclass(frozen=True)
class Shortlist:
    """table: uint16 or int32 [S, n], padded by repetition. always: int64 [k], rising, two or more."""

    table: NDArray[Any]
    always: Tokens

    def allowed_tokens(self, batch: Batch, vocabulary: int) -> NDArray[np.bool_]:
        """Return bool [B, V]: which tokens are allowed in each row of the batch."""
        allowed_mask = np.zeros((len(batch.input_ids), vocabulary), dtype=bool)
        allowed_mask[:, self.always] = True
        row_indices, columns = np.nonzero(batch.attention_mask)
        candidates = self.table[batch.input_ids[row_indices, columns]]  # [tokens, n]
        allowed_mask[row_indices[:, None], candidates] = True
        return allowed_mask


def vocabulary_sizes(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return S and V of a model with this config (config.json)."""
    source = int(config["vocab_size"])
    return source, int(config.get("decoder_vocab_size") or source)


def make_shortlist(table: NDArray[Any], always: Tokens, vocabulary: int) -> Shortlist:
    """Return a shortlist whose table has the smallest type that holds every token; V is `vocabulary`."""
    kind = np.uint16 if vocabulary <= _SMALL else np.int32
    return Shortlist(np.ascontiguousarray(table, dtype=kind), np.unique(always).astype(np.int64))


def write_shortlist(shortlist: Shortlist, folder: Path) -> None:
    """Store `shortlist` in `folder`."""
    from safetensors.numpy import save_file

    save_file({TABLE_TENSOR: shortlist.table, ALWAYS_TENSOR: shortlist.always}, folder / SHORTLIST_FILE)


def read_shortlist(folder: Path, config: Mapping[str, Any]) -> Shortlist | None:
    """Return the shortlist in `folder`, None where there is none; `config` is the model's.

    Raises:
        InputError: it is damaged, or belongs to another model.
    """
    path = folder / SHORTLIST_FILE
    if not path.is_file():
        return None
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tensors = load_file(path)
        table, always = tensors[TABLE_TENSOR], tensors[ALWAYS_TENSOR]
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise InputError(
            f"{path}: this version of smelt cannot read this shortlist: {type(error).__name__}: {error}.",
            code="damaged-file",
        ) from error
    source, vocabulary = vocabulary_sizes(config)
    is_valid = table.ndim == 2 and len(table) == source and table.dtype in (np.uint16, np.int32)
    is_valid = is_valid and always.dtype == np.int64 and always.ndim == 1 and len(always) > 1
    token_lists = [token_ids for token_ids in (table, always) if token_ids.size]
    if not is_valid or not all(
        token_ids.min() >= 0 and token_ids.max() < vocabulary for token_ids in token_lists
    ):
        raise InputError(
            f"{path}: this shortlist has {table.dtype} {list(table.shape)} and {always.dtype}"
            f" {list(always.shape)}, which does not fit a model with {source} source and {vocabulary} target"
            " tokens. It belongs to another model, or is damaged; run the stage 'shortlist' again.",
            code="does-not-fit-model",
        )
    return Shortlist(table, always)
