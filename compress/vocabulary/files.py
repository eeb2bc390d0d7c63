"""The files of a model that speak of tokens: its tokenizer and its shortlist."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from smelt.compress.vocabulary.choose import Counts, chosen
from smelt.compress.vocabulary.marian_files import MODELS, words_of_marian
from smelt.compress.vocabulary.numbers import named_tokens
from smelt.compress.vocabulary.settings import TrimVocabularySettings
from smelt.compress.vocabulary.tokenizer_json import FILE, words_of_json
from smelt.compress.vocabulary.words import Words
from smelt.core.errors import InputError
from smelt.core.files import read_json


def open_words(folder: Path, config: Any) -> Words:
    """Return the words of the tokenizer in `folder`, of the model with this config.

    Raises:
        InputError: a kind of tokenizer that cannot be trimmed, or one that has more tokens than the model.
    """
    words = _words(folder)
    most = max(words.ids.values())
    if most >= config.vocab_size:
        raise InputError(
            f"trim-vocabulary: the tokenizer in {folder} has a token of the number {most}, and the model"
            f" {config.vocab_size} words.",
            code="vocabulary-mismatch",
        )
    return words


def _words(folder: Path) -> Words:
    from smelt.runtime.models.checkpoint import load_tokenizer

    if all((folder / name).is_file() for name in MODELS):
        return words_of_marian(folder)
    if (folder / FILE).is_file():
        return words_of_json(read_json(folder / FILE), f"{folder / FILE}")
    tokenizer = load_tokenizer(folder)  # made of older files (vocab.txt, merges.txt, spiece.model)
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None:
        raise InputError(
            f"trim-vocabulary: {folder} holds a {type(tokenizer).__name__}, which is none of the tokenizers"
            " library. Those that can be trimmed: what a tokenizer.json can hold (WordPiece, BPE, Unigram),"
            " and Marian's pair of SentencePiece models.",
            code="unsupported-tokenizer",
        )
    return words_of_json(json.loads(inner.to_str()), f"{folder}")


def numbers_that_stay(
    counts: Counts, words: Words, model: Any, tokenizer: Any, settings: TrimVocabularySettings
) -> list[int]:
    """Return the ids that stay, rising: see `chosen`; what configs and tokenizer name stays too."""
    must = set(tokenizer.all_special_ids) | named_tokens(model.config.to_dict())
    if model.can_generate():
        must |= named_tokens(model.generation_config.to_dict())
    return chosen(
        counts,
        words,
        must,
        min_count=settings.min_count or 1,
        coverage=settings.coverage,
        size=settings.size,
        round_to=settings.multiple_of,
    )


def trim_shortlist(folder: Path, new: Mapping[int, int], kept: list[int], size: int) -> None:
    """Give the shortlist in `folder`, if there is one, the words that stayed.

    A word that a source word brought and that is gone is replaced by one that is always there.
    """
    from smelt.runtime.generate.shortlist import make_shortlist, read_shortlist, write_shortlist

    shortlist = read_shortlist(folder, {"vocab_size": size})
    if shortlist is None:
        return
    always = np.array([new[at] for at in shortlist.always.tolist() if at in new], dtype=np.int64)
    numbers = np.full(size, always[0], dtype=np.int64)
    numbers[kept] = np.arange(len(kept))
    write_shortlist(make_shortlist(numbers[shortlist.table[kept]], always, len(kept)), folder)
