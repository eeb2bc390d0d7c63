"""Files of a model with token ids: its tokenizer and its shortlist."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from smelt.compress.trim_vocabulary.config_tokens import config_token_ids
from smelt.compress.trim_vocabulary.marian_vocabulary import SENTENCEPIECE_FILES, open_marian_vocabulary
from smelt.compress.trim_vocabulary.select_tokens import TokenCounts, select_tokens
from smelt.compress.trim_vocabulary.settings import TrimVocabularySettings
from smelt.compress.trim_vocabulary.tokenizer_json import TOKENIZER_FILE, open_json_vocabulary
from smelt.compress.trim_vocabulary.vocabulary import TrimmableVocabulary
from smelt.core.errors import InputError
from smelt.core.files import read_json_object


def open_vocabulary(folder: Path, config: Any) -> TrimmableVocabulary:
    """Return the vocabulary of the tokenizer in `folder`, of the model with this config.

    Raises:
        InputError: the tokenizer cannot be trimmed, or has more tokens than the model.
    """
    words = _open_tokenizer_vocabulary(folder)
    most = max(words.ids.values())
    if most >= config.vocab_size:
        raise InputError(
            f"trim-vocabulary: the tokenizer in {folder} has a token with id {most}, but the model has"
            f" {config.vocab_size} tokens. Use the tokenizer that belongs to the model.",
            code="vocabulary-mismatch",
        )
    return words


def _open_tokenizer_vocabulary(folder: Path) -> TrimmableVocabulary:
    from smelt.runtime.models.checkpoint import load_tokenizer

    if all((folder / name).is_file() for name in SENTENCEPIECE_FILES):
        return open_marian_vocabulary(folder)
    if (folder / TOKENIZER_FILE).is_file():
        return open_json_vocabulary(read_json_object(folder / TOKENIZER_FILE), f"{folder / TOKENIZER_FILE}")
    tokenizer = load_tokenizer(folder)  # made of older files (vocab.txt, merges.txt, spiece.model)
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None:
        raise InputError(
            f"trim-vocabulary: {folder} contains a {type(tokenizer).__name__}, which cannot be"
            " trimmed. Supported: tokenizers with a tokenizer.json (WordPiece, BPE, Unigram), and"
            " Marian's two SentencePiece models. Remove the stage.",
            code="unsupported-tokenizer",
        )
    return open_json_vocabulary(json.loads(inner.to_str()), f"{folder}")


def select_kept_tokens(
    counts: TokenCounts,
    vocabulary: TrimmableVocabulary,
    model: Any,
    tokenizer: Any,
    settings: TrimVocabularySettings,
) -> list[int]:
    """Return the ids to keep, rising: those of `select_tokens`, of configs and of the tokenizer."""
    must = set(tokenizer.all_special_ids) | config_token_ids(model.config.to_dict())
    if model.can_generate():
        must |= config_token_ids(model.generation_config.to_dict())
    return select_tokens(
        counts,
        vocabulary,
        must,
        min_count=settings.min_count or 1,
        coverage=settings.coverage,
        size=settings.size,
        multiple_of=settings.multiple_of,
    )


def trim_shortlist(folder: Path, new_ids: Mapping[int, int], kept: list[int], size: int) -> None:
    """Reduce the shortlist in `folder`, if there is one, to the kept tokens.

    A removed candidate of a source token is replaced by a token that is always allowed.
    """
    from smelt.runtime.generate.shortlist import make_shortlist, read_shortlist, write_shortlist

    shortlist = read_shortlist(folder, {"vocab_size": size})
    if shortlist is None:
        return
    always = np.array([new_ids[at] for at in shortlist.always.tolist() if at in new_ids], dtype=np.int64)
    numbers = np.full(size, always[0], dtype=np.int64)
    numbers[kept] = np.arange(len(kept))
    write_shortlist(make_shortlist(numbers[shortlist.table[kept]], always, len(kept)), folder)
