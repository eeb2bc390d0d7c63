"""Rules by which a model's texts become inputs and vectors: prefix, languages, pooling, normalization.

Prefix and languages are part of the artifact, in `text.json`, which every stage copies with the tokenizer's
files; `load_tokenizer` applies them, so that training, scoring, timing and `smelt predict` are consistent. A
forced first token belongs to the generation config, where `generate` of transformers reads it too.

Pooling and normalization of a sentence embedder are in the files of sentence-transformers. `modules.json`
lists the steps: Transformer, Pooling, optionally Normalize. The folder of Pooling has its kind;
`sentence_bert_config.json` the maximum number of tokens. Both forms of Pooling are read: a word
(sentence-transformers 6) and flags (before). smelt writes flags, which all versions read.

Source: github.com/huggingface/sentence-transformers 6.2, base/modules and sentence_transformer/modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import load_json, write_json

TEXT_RULES_FILE = "text.json"


class TextRules(BaseModel):
    """prefix: added before every source text. The languages are codes of the tokenizer.

    lower: texts are lowercased, whatever the tokenizer does.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    prefix: str = ""
    source_language: str | None = None
    target_language: str | None = None
    lower: bool = False

    def cache_key(self) -> dict[str, Any]:
        """Return the fields of a key; without `lower` where it is false, as in earlier versions."""
        return self.model_dump(exclude=None if self.lower else {"lower"})


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


def language_token_id(tokenizer: Any, language: str) -> int:
    """Return the id of the token of `language`, which a multilingual decoder begins with.

    Raises:
        InputError: the tokenizer has no languages, or not this one.
    """
    known: dict[str, int] = {}
    for table in ("lang_code_to_id", "lang_code_to_token"):
        for code, value in (getattr(tokenizer, table, None) or {}).items():
            known[code] = value if isinstance(value, int) else tokenizer.convert_tokens_to_ids(value)
    for code in getattr(tokenizer, "extra_special_tokens", None) or ():  # NLLB has no table of its own
        known.setdefault(str(code), tokenizer.convert_tokens_to_ids(str(code)))
    if language not in known:
        shown = ", ".join(sorted(known)[:8]) + (", ..." if len(known) > 8 else "")
        raise InputError(
            f"{language!r} is not a language of the model's tokenizer. Its languages:"
            f" {shown or 'none'}.{did_you_mean(language, known)}",
            code="unknown-language",
        )
    return known[language]


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
    settings = _transformer_settings(folder)
    try:
        return SentenceRules(
            pooling=_read_pooling(folder / str(modules[1].get("path") or "") / "config.json"),
            normalize=normalize,
            max_length=settings.get("max_seq_length"),
            lower=bool(settings.get("do_lower_case", False)),
        )
    except ValueError as error:  # pydantic's own is one
        max_length = settings.get("max_seq_length")
        raise InputError(
            f"{folder / SENTENCE_CONFIG_FILE}: max_seq_length must be an integer above 0,"
            f" got {max_length!r}.",
            code="wrong-value",
            setting="max_seq_length",
        ) from error


def write_sentence_rules(folder: Path, rules: SentenceRules, width: int) -> None:
    """Write `rules` to the model's `folder`; `width` is the dimension of a vector."""
    parts = [("Transformer", ""), ("Pooling", POOLING_FOLDER)]
    parts += [("Normalize", "2_Normalize")] if rules.normalize else []
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{name}"}
        for at, (name, path) in enumerate(parts)
    ]
    flags = {flag: kind == rules.pooling for flag, kind in _FLAGS.items()}
    (folder / POOLING_FOLDER).mkdir(exist_ok=True)
    write_json(folder / MODULES_FILE, modules)
    write_json(folder / POOLING_FOLDER / "config.json", {"word_embedding_dimension": width, **flags})
    write_json(
        folder / SENTENCE_CONFIG_FILE, {"max_seq_length": rules.max_length, "do_lower_case": rules.lower}
    )


def default_prompt(folder: Path) -> str:
    """Return the prompt that sentence-transformers adds before every text of the model in `folder`.

    Raises:
        InputError: its file is damaged.
    """
    path = folder / PROMPTS_FILE
    settings = _read(path, dict) if path.is_file() else {}
    prompts = settings.get("prompts")
    found = prompts.get(settings.get("default_prompt_name")) if isinstance(prompts, dict) else None
    return found if isinstance(found, str) else ""


def _name(path: Path, module: Any) -> str:
    if not isinstance(module, dict) or not isinstance(module.get("type"), str):
        raise InputError(
            f"{path}: expected a list of modules, each with a type, got {repr(module)[:80]}.",
            code="missing-module-type",
        )
    return str(module["type"].rpartition(".")[2])


def _transformer_settings(folder: Path) -> Mapping[str, Any]:
    """Return the settings of the Transformer's own file; older ones are named after the family."""
    paths = [folder / SENTENCE_CONFIG_FILE, *sorted(folder.glob("sentence_*_config.json"))]
    found: Mapping[str, Any] = next((_read(path, dict) for path in paths if path.is_file()), {})
    return found


def _read_pooling(path: Path) -> Pooling:
    config = _read(path, dict)
    mode = config.get("pooling_mode")
    kinds = [mode] if isinstance(mode, str) else list(mode or ())
    kinds = kinds or [kind for flag, kind in _FLAGS.items() if config.get(flag)] or ["mean"]
    known = ", ".join(POOLINGS)
    if len(kinds) > 1:
        raise InputError(
            f"{path}: several pooling modes ({', '.join(map(str, kinds))}), whose vectors are"
            f" concatenated; smelt supports only one of {known}. {_SAVE_AGAIN_HINT}",
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
        f"{path}: pooling '{kinds[0]}' is not supported; supported: {known}. {_SAVE_AGAIN_HINT}",
        code="unsupported-pooling",
    )


def _read(path: Path, kind: type) -> Any:
    try:
        value = load_json(path)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {error}", code="damaged-file") from error
    if not isinstance(value, kind):
        what = "a list" if kind is list else "an object"
        raise InputError(f"{path}: expected {what} in JSON, got {repr(value)[:80]}.", code="wrong-json-type")
    return value
