"""Preprocessing of a model's texts before tokenizing: a prefix, languages.

The rules are part of the artifact, in `text.json`, which every stage copies with the tokenizer's files;
`load_tokenizer` applies them, so that training, scoring, timing and `smelt predict` are consistent. A
forced first token belongs to the generation config, where `generate` of transformers reads it too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import load_json

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
