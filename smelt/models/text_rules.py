"""Rules by which a model's texts become inputs and vectors: prefix, languages, template, pooling.

Prefix, languages and prompt template are part of the artifact, in `text.json`, which every stage copies with
the tokenizer's files; `load_tokenizer` applies them, so that training, scoring, timing and `smelt predict`
are consistent. A forced first token belongs to the generation config, where `generate` of transformers reads
it too.

Pooling and normalization of a sentence embedder are in the files of sentence-transformers. `modules.json`
lists the steps: Transformer, Pooling, optionally Normalize. The folder of Pooling has its kind;
`sentence_bert_config.json` the maximum number of tokens, in one of several places. A setting of these files
that smelt does not know is refused, since the vectors may depend on it. Both forms of Pooling are read: a
word (sentence-transformers 6) and flags (before). smelt writes flags, which all versions read.

Source: github.com/huggingface/sentence-transformers 6.2, base/modules and sentence_transformer/modules.

The maximum number of tokens of a model comes from its position table and its tokenizer's setting. Only an
existing table limits a text: a family with relative positions has none.

Running text for language models is joined, tokenized once and cut into windows of equal length. A window of
m + 1 tokens is m inputs and the m tokens that follow them. The next window begins `stride` tokens later and
scores only tokens that no window before it has predicted; so every token but the first of the whole text is
predicted exactly once, each with at least `length - stride` tokens before it (except in the first window).
Where the tokenizer adds a first token (BOS) before a text, every window begins with it: models that were
trained so (Llama, Gemma) are much worse without it. It takes one of the window's positions. The text and
bytes of each token come from the tokenizer's own offsets. Source: Hugging Face, "Perplexity of fixed-length
models"; unlike there, adjacent windows lose no token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import load_json, write_json
from smelt.core.messages import with_count
from smelt.data.splits import Split, Windows
from smelt.models.families.config_keys import config_value, set_config_value
from smelt.models.families.family import PositionEncoding
from smelt.models.families.registry import find_family
from smelt.models.prompt_template import PromptTemplate, open_prompt_template

TEXT_RULES_FILE = "text.json"


class TextRules(BaseModel):
    """prefix: added before every source text. The languages are codes of the tokenizer.

    lower: texts are lowercased, whatever the tokenizer does. prompt_template: of a model that answers
    prompts: "chat", or a text with `{prompt}`; None: texts are not prompts. special_tokens: for a chat
    template, the tokenizer's special tokens by name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    prefix: str = ""
    source_language: str | None = None
    target_language: str | None = None
    lower: bool = False
    prompt_template: str | None = None
    special_tokens: dict[str, str] = Field(default_factory=dict)

    def cache_key(self) -> dict[str, Any]:
        """Return the fields of a key; without newer ones where they have their defaults.

        The special tokens follow from the tokenizer's files.
        """
        unset = {n for n in ("lower", "prompt_template") if not getattr(self, n)}
        return self.model_dump(exclude={"special_tokens", *unset})


def read_text_rules(folder: Path) -> TextRules:
    """Return the rules stored in `folder`; no rules where there is no text.json.

    Raises:
        InputError: the file is damaged.
    """
    path = folder / TEXT_RULES_FILE
    if not path.is_file():
        return TextRules()
    try:
        return TextRules.model_validate(load_json(path))
    except (OSError, ValueError, ValidationError) as error:
        raise InputError(
            f"{path}: this version of smelt cannot read these text rules: {error}", code="damaged-file"
        ) from error


def apply_text_rules(tokenizer: Any, rules: TextRules) -> None:
    """Set up `tokenizer` (of transformers) for `rules`; `tokenizer_prefix` returns the prefix.

    Raises:
        InputError: a language that the tokenizer does not have.
    """
    tokenizer.smelt_prefix, tokenizer.smelt_lower = rules.prefix, rules.lower
    for attribute, language in (("src_lang", rules.source_language), ("tgt_lang", rules.target_language)):
        if language is not None:
            language_token_id(tokenizer, language)
            setattr(tokenizer, attribute, language)


def tokenizer_prefix(tokenizer: Any) -> str:
    """Return the prefix of every source text of this tokenizer's model."""
    return str(getattr(tokenizer, "smelt_prefix", ""))


def read_prompt_template(folder: Path) -> PromptTemplate | None:
    """Return the prompt template of the model in `folder`; None for a model that does not answer prompts.

    Raises:
        InputError: a file is damaged, or the chat template is missing (`no-chat-template`).
    """
    rules = read_text_rules(folder)
    if rules.prompt_template is None:
        return None
    return open_prompt_template(folder, rules.prompt_template, rules.special_tokens)


def language_token_id(tokenizer: Any, language: str) -> int:
    """Return the id of the token of `language`, which a multilingual decoder begins with.

    Raises:
        InputError: the tokenizer has no languages, or not this one.
    """
    language_ids: dict[str, int] = {}
    for table in ("lang_code_to_id", "lang_code_to_token"):
        for code, value in (getattr(tokenizer, table, None) or {}).items():
            language_ids[code] = value if isinstance(value, int) else tokenizer.convert_tokens_to_ids(value)
    for code in getattr(tokenizer, "extra_special_tokens", None) or ():  # NLLB has no table of its own
        language_ids.setdefault(str(code), tokenizer.convert_tokens_to_ids(str(code)))
    if language not in language_ids:
        languages = ", ".join(sorted(language_ids)[:8]) + (", ..." if len(language_ids) > 8 else "")
        raise InputError(
            f"{language!r} is not a language of the model's tokenizer. Its languages:"
            f" {languages or 'none'}.{did_you_mean(language, language_ids)}",
            code="unknown-language",
        )
    return language_ids[language]


SHORTLIST_FILE = "shortlist.safetensors"  # see smelt/generation/config.py
MODULES_FILE = "modules.json"
SENTENCE_CONFIG_FILE = "sentence_bert_config.json"
POOLING_FOLDER = "1_Pooling"
PROMPTS_FILE = "config_sentence_transformers.json"
# the files of `write_sentence_rules`, relative to the folder
SENTENCE_FILES = (MODULES_FILE, SENTENCE_CONFIG_FILE, f"{POOLING_FOLDER}/config.json")

Pooling = Literal["mean", "cls", "max"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_POOLING_KEYS = {*_FLAGS, "pooling_mode", "include_prompt", "embedding_dimension", "word_embedding_dimension"}
_SAVE_AGAIN_HINT = "Save the model with a supported structure, or use another model."


class SentenceRules(BaseModel):
    """pooling: mean over the tokens of a text, cls: its first token, max: the largest value of all tokens.

    normalize: vectors have the length 1. max_length: maximum number of tokens of a text; None: the model's
    limit. lower: texts are lowercased first.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    pooling: Pooling = "mean"
    normalize: bool = True
    max_length: int | None = Field(default=None, ge=1)
    lower: bool = False


def read_sentence_rules(folder: Path) -> SentenceRules | None:
    """Return the sentence rules of the model in `folder`; None where it has no modules.json.

    Raises:
        InputError: a file is damaged, or has unsupported settings.
    """
    path = folder / MODULES_FILE
    if not path.is_file():
        return None
    modules = _read(path, list)
    names = [_name(path, module) for module in modules]
    normalize = names[2:] == ["Normalize"]
    if names[:2] != ["Transformer", "Pooling"] or (len(names) > 2 and not normalize):
        raise InputError(
            f"{path}: the modules are {', '.join(names) or 'none'}; smelt supports Transformer, Pooling and"
            f" optionally Normalize. {_SAVE_AGAIN_HINT}",
            code="unsupported-modules",
        )
    if modules[0].get("path"):
        raise InputError(
            f"{path}: the Transformer is in the folder '{modules[0]['path']}', which is the layout of"
            " old versions of sentence-transformers. Save the model again with a current version:"
            " SentenceTransformer(FOLDER).save(NEW).",
            code="outdated-modules",
        )
    path, settings = _transformer_settings(folder)
    _require_known_settings(path, settings)
    setting, max_length = _sentence_limit(settings)
    try:
        return SentenceRules(
            pooling=_read_pooling(folder / str(modules[1].get("path") or "") / "config.json"),
            normalize=normalize,
            max_length=max_length,
            lower=bool(settings.get("do_lower_case", False)),
        )
    except ValidationError as error:
        raise InputError(
            f"{path}: {setting} must be an integer above 0, got {max_length!r}.",
            code="wrong-value",
            setting=setting,
        ) from error


def write_sentence_rules(folder: Path, rules: SentenceRules, width: int) -> None:
    """Write `rules` to the model's `folder`; `width` is the dimension of a vector."""
    parts = [("Transformer", ""), ("Pooling", POOLING_FOLDER)]
    parts += [("Normalize", "2_Normalize")] if rules.normalize else []
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (name, path) in enumerate(parts)
    ]
    flags = {flag: kind == rules.pooling for flag, kind in _FLAGS.items()}
    (folder / POOLING_FOLDER).mkdir(exist_ok=True)
    write_json(folder / MODULES_FILE, modules)
    write_json(folder / POOLING_FOLDER / "config.json", {"word_embedding_dimension": width, **flags})
    write_json(
        folder / SENTENCE_CONFIG_FILE, {"max_seq_length": rules.max_length, "do_lower_case": rules.lower}
    )


def is_sentence_model(model: Any) -> bool:
    """Return whether `model` is of `sentence_class`."""
    return hasattr(model, "sentence_rules")


def default_prompt(folder: Path) -> str:
    """Return the prompt that sentence-transformers adds before every text of the model in `folder`.

    Raises:
        InputError: its file is damaged.
    """
    path = folder / PROMPTS_FILE
    settings = _read(path, dict) if path.is_file() else {}
    prompts = settings.get("prompts")
    prompt = prompts.get(settings.get("default_prompt_name")) if isinstance(prompts, dict) else None
    return prompt if isinstance(prompt, str) else ""


def _name(path: Path, module: Any) -> str:
    if not isinstance(module, dict) or not isinstance(module.get("type"), str):
        raise InputError(
            f"{path}: expected a list of modules, each with a type, got {repr(module)[:80]}.",
            code="missing-module-type",
        )
    return str(module["type"].rpartition(".")[2])


def _transformer_settings(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the Transformer's own file and its settings; older files are named after the family."""
    paths = [folder / SENTENCE_CONFIG_FILE, *sorted(folder.glob("sentence_*_config.json"))]
    path = next((path for path in paths if path.is_file()), None)
    return (folder / SENTENCE_CONFIG_FILE, {}) if path is None else (path, _read(path, dict))


# Settings of the Transformer's file and of its parts: the values with which the vectors are those that smelt
# computes; None: any value. Settings without a value (null) are not used by sentence-transformers either.
_ANY: tuple[Any, ...] | None = None
_LOADING = dict.fromkeys(("trust_remote_code", "use_fast", "use_safetensors", "cache_dir", "revision"), _ANY)
_MODEL_SETTINGS = _LOADING | dict.fromkeys(
    ("dtype", "torch_dtype", "attn_implementation", "device_map", "add_pooling_layer"), _ANY
)
_TOKENIZER_SETTINGS = _LOADING | {"model_max_length": _ANY, "padding_side": _ANY}
_CALL_SETTINGS = {
    "max_length": _ANY,
    "truncation": (True, "longest_first", "only_first"),
    "add_special_tokens": (True,),
    **dict.fromkeys(("padding", "padding_side", "pad_to_multiple_of", "return_tensors"), _ANY),
    **dict.fromkeys(("return_attention_mask", "return_token_type_ids"), _ANY),
}
_TEXT_MODALITY = {"method": ("forward",), "method_output_name": ("last_hidden_state",)}
_SETTINGS: Mapping[str, Mapping[str, tuple[Any, ...] | None]] = {
    "": {
        **dict.fromkeys(("max_seq_length", "do_lower_case", "unpad_inputs"), _ANY),
        **dict.fromkeys(("processing_kwargs", "modality_config"), _ANY),
        **dict.fromkeys(("tokenizer_args", "processor_kwargs", "model_args", "model_kwargs"), _ANY),
        **dict.fromkeys(("config_args", "config_kwargs"), _ANY),
        "transformer_task": ("feature-extraction",),
        "module_output_name": ("token_embeddings",),
    },
    # of encodings other than of texts
    "processing_kwargs": dict.fromkeys(("common", "text", "audio", "image", "video", "chat_template"), _ANY),
    "processing_kwargs.common": _CALL_SETTINGS,
    "processing_kwargs.text": _CALL_SETTINGS,
    "tokenizer_args": _TOKENIZER_SETTINGS,
    "processor_kwargs": _TOKENIZER_SETTINGS,
    "model_args": _MODEL_SETTINGS,
    "model_kwargs": _MODEL_SETTINGS,
    "config_args": _LOADING,
    "config_kwargs": _LOADING,
    "modality_config": dict.fromkeys(("text", "image", "audio", "video"), _ANY),
    "modality_config.text": _TEXT_MODALITY,
}


def _part(settings: Mapping[str, Any], name: str) -> Any:
    """Return the part of `settings` at a dotted name; empty where there is none."""
    section: Any = settings
    for key in filter(None, name.split(".")):
        section = (section.get(key) if isinstance(section, dict) else None) or {}
    return section


def _require_known_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Require that no setting changes the vectors in a way that smelt does not compute.

    Raises:
        InputError: `unsupported-setting`, `wrong-json-type`.
    """
    for name, known_keys in _SETTINGS.items():
        section = _part(settings, name)
        if not isinstance(section, dict):
            raise InputError(
                f"{path}: {name}: expected an object, got {repr(section)[:80]}.", code="wrong-json-type"
            )
        for key, value in section.items():
            values = known_keys.get(key, ())
            if value is None or values is None or value in values:
                continue
            full_name = f"{name}.{key}".lstrip(".")
            accepted = f"supported: {', '.join(map(repr, values))}" if values else "the key is not supported"
            raise InputError(
                f"{path}: {full_name}: {repr(value)[:80]}; {accepted}. Remove it if the vectors do not depend"
                " on it, or use another model.",
                code="unsupported-setting",
                setting=full_name,
            )


def _sentence_limit(settings: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the setting with the maximum number of tokens, and its value; None where there is none.

    A call's `max_length` overrides the tokenizer's `model_max_length`, and that `max_seq_length`.
    """
    for name, key in (
        ("processing_kwargs.text", "max_length"),
        ("processing_kwargs.common", "max_length"),
        ("tokenizer_args", "model_max_length"),
        ("processor_kwargs", "model_max_length"),
        ("", "max_seq_length"),
    ):
        value = _part(settings, name).get(key)
        if value is not None:
            unlimited = isinstance(value, int | float) and value >= NO_LIMIT
            return f"{name}.{key}".lstrip("."), None if unlimited else value
    return "max_seq_length", None


def _read_pooling(path: Path) -> Pooling:
    config = _read(path, dict)
    invalid = [key for key, value in config.items() if value and key not in _POOLING_KEYS]
    if invalid:
        raise InputError(
            f"{path}: {invalid[0]}: {repr(config[invalid[0]])[:80]} is not supported. {_SAVE_AGAIN_HINT}",
            code="unsupported-setting",
            setting=invalid[0],
        )
    mode = config.get("pooling_mode")
    kinds = [mode] if isinstance(mode, str) else list(mode or ())
    kinds = kinds or [kind for flag, kind in _FLAGS.items() if config.get(flag)] or ["mean"]
    known_poolings = ", ".join(POOLINGS)
    if len(kinds) > 1:
        raise InputError(
            f"{path}: several pooling modes ({', '.join(map(str, kinds))}), whose vectors are"
            f" concatenated; smelt supports only one of {known_poolings}. {_SAVE_AGAIN_HINT}",
            code="several-poolings",
        )
    if config.get("include_prompt") is False:
        raise InputError(
            f"{path}: include_prompt: false (pooling without the prompt) is not supported.",
            code="unsupported-prompt-pooling",
        )
    for kind in POOLINGS:
        if kind == kinds[0]:
            return kind
    raise InputError(
        f"{path}: pooling '{kinds[0]}' is not supported; supported: {known_poolings}. {_SAVE_AGAIN_HINT}",
        code="unsupported-pooling",
    )


def _read(path: Path, kind: type) -> Any:
    try:
        value = load_json(path)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {error}", code="damaged-file") from error
    if not isinstance(value, kind):
        expected_type = "a list" if kind is list else "an object"
        raise InputError(
            f"{path}: expected {expected_type} in JSON, got {repr(value)[:80]}.", code="wrong-json-type"
        )
    return value


NO_LIMIT = 10**9


def position_table_size(config: Mapping[str, Any]) -> int | None:
    """Return the number of rows of the position table; None without a table."""
    key = _family_positions(config).max_positions_key
    num_positions = None if key is None else config_value(config, key)
    return num_positions if isinstance(num_positions, int) and num_positions > 0 else None


def position_offset(config: Mapping[str, Any]) -> int:
    """Return the number of rows of the position table that no token uses."""
    return int(config.get("pad_token_id") or 0) + 1 if _family_positions(config).offset_by_pad_id else 0


def _family_positions(config: Mapping[str, Any]) -> PositionEncoding:
    family = find_family(config)
    return PositionEncoding() if family is None else family.position_encoding


def position_limit(config: Mapping[str, Any]) -> int | None:
    """Return the number of tokens of the position table; None where the model has none."""
    num_positions = position_table_size(config)
    return None if num_positions is None else num_positions - position_offset(config)


def lower_position_limit(config: dict[str, Any], max_positions: int) -> None:
    """Set the maximum number of tokens of a text in `config`, under its family's key, to `max_positions`."""
    key = _family_positions(config).max_positions_key
    if key is not None:
        limit = min(position_limit(config) or max_positions, max_positions)
        set_config_value(config, key, limit + position_offset(config))


def max_input_length(tokenizer: Any, config: Mapping[str, Any]) -> int:
    """Return the maximum number of tokens that tokenizer and position table both allow."""
    return int(min(tokenizer.model_max_length, position_limit(config) or NO_LIMIT))


DEFAULT_WINDOW_LENGTH = 1024  # tokens, where neither the recipe nor the model has a lower limit


@dataclass(frozen=True)
class TextWindows:
    """ids: int64 [m + 1] per window. scored_tokens: its scored last tokens. scored_bytes: their UTF-8 bytes.

    length, stride: of the windows, tokens. bos_token_id: the first token of each window,
    None where the tokenizer adds none before a text. signature: the same as text.
    """

    ids: list[NDArray[np.int64]]
    scored_tokens: list[int]
    scored_bytes: list[int]
    length: int
    stride: int
    bos_token_id: int | None = None

    @property
    def signature(self) -> str:
        """Return the windows' settings as part of a score's signature."""
        bos = "" if self.bos_token_id is None else "|bos:each window"
        return f"window:{self.length}|stride:{self.stride}{bos}"


def window_length(windows: Windows | None, limit: int) -> int:
    """Return the tokens per window of a model with `limit` positions.

    Raises:
        InputError: the setting is longer than the model's limit.
    """
    length = windows.length if windows is not None else None
    if length is not None and length > limit:
        raise InputError(
            f"data: windows: length {length} is longer than the model's limit of {limit} tokens; set length:"
            f" {limit} or less.",
            code="window-too-long",
            setting="data.windows.length",
        )
    return length or min(DEFAULT_WINDOW_LENGTH, limit)


def join_texts(split: Split) -> str:
    """Return the joined text of all samples."""
    separator = split.windows.separator if split.windows is not None else None
    return ("\n\n" if separator is None else separator).join(e.text for e in split.examples)


def cut_windows(
    split: Split, tokenizer: Any, limit: int, *, length: int | None = None, strided: bool = True
) -> TextWindows:
    """Tokenize the joined text of `split` and cut it.

    Args:
        split: samples of running text.
        tokenizer: a fast one; of its special tokens only the first is added before each window.
        limit: positions of the model.
        length: overrides the split's own.
        strided: False: windows do not overlap, as in training.

    Raises:
        InputError: less than two tokens, a length above the limit, or a slow tokenizer.
    """
    if not tokenizer.is_fast:
        raise InputError(
            f"{split.origin}: this tokenizer does not return token offsets. Language models need a"
            " fast tokenizer (tokenizer.json).",
            code="slow-tokenizer",
        )
    size = min(limit, length) if length is not None else window_length(split.windows, limit)
    stride = size
    if strided and split.windows is not None and split.windows.stride is not None:
        stride = min(split.windows.stride, size)
    text = join_texts(split)
    encoding = tokenizer(text, return_offsets_mapping=True, verbose=False)
    ids = np.asarray(encoding["input_ids"], dtype=np.int64)
    if len(ids) < 2:
        raise InputError(
            f"{split.origin}: the text has {with_count(len(ids), 'token')}; at least 2 tokens are needed.",
            code="too-few-tokens",
        )
    byte_ends = _utf8_offsets(text, [end for _, end in encoding["offset_mapping"]])
    bos_token_id = tokenizer.bos_token_id
    bos_token_id = None if bos_token_id is None or ids[0] != bos_token_id or size < 2 else int(bos_token_id)
    leading_ids = ids[:0] if bos_token_id is None else ids[:1]
    spans, begin, num_scored = [], 0, 0  # (begin, last token, tokens before the first scored one)
    while True:
        window_tokens = size - len(leading_ids) if begin else size  # the first window has the token already
        last = min(begin + window_tokens, len(ids) - 1)
        if last > num_scored:
            spans.append((begin, last, num_scored))
        num_scored = max(num_scored, last)
        if last == len(ids) - 1:
            break
        begin += min(stride, window_tokens)
    return TextWindows(
        ids=[
            np.concatenate([leading_ids if begin else leading_ids[:0], ids[begin : last + 1]])
            for begin, last, _ in spans
        ],
        scored_tokens=[last - before for _, last, before in spans],
        scored_bytes=[int(byte_ends[last] - byte_ends[before]) for _, last, before in spans],
        length=size,
        stride=stride,
        bos_token_id=bos_token_id,
    )


def _utf8_offsets(text: str, ends: list[int]) -> NDArray[np.int64]:
    """Return for each token how many UTF-8 bytes of `text` are before its end, never falling."""
    encoded = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)
    sizes = 1 + (encoded >= 0x80).astype(np.int64) + (encoded >= 0x800) + (encoded >= 0x10000)
    before = np.concatenate([[0], np.cumsum(sizes)])
    # special tokens have the offset (0, 0)
    return np.asarray(before[np.maximum.accumulate(np.asarray(ends, dtype=np.int64))], dtype=np.int64)
