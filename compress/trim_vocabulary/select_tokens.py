"""Select the tokens to keep: those that the data use, their dependencies, and required ones; store their ids.

The vocabulary is represented independently of its file format. Configs get the new token ids.

`vocabulary.json` in a trimmed artifact holds the token ids that were kept of the original vocabulary. It maps
a student's tokens to those of a teacher that was trimmed differently or not at all. The file is copied from
stage to stage with the tokenizer's files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from smelt.core.errors import InputError, SettingError
from smelt.core.files import read_json_object, write_json
from smelt.stage import Settings, StoredDtype


@dataclass(frozen=True)
class TrimmableVocabulary:
    """The tokens of a tokenizer.

    kind: tokenizer type, for messages. ids: of every token, added ones too. required: ids that are always
    kept. dependencies: from an id to the ids that must be kept with it. write: from the folder and the new id
    of each kept id, writes the tokenizer's files and removes those that they replace.
    """

    kind: str
    ids: Mapping[str, int]
    required: frozenset[int]
    dependencies: Callable[[int], frozenset[int]]
    write: Callable[[Path, Mapping[int, int]], None]


# Keys of config.json and generation_config.json that hold a token id, or a list of them.
TOKEN_ID_KEYS = (
    "pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id", "sep_token_id", "cls_token_id",
    "mask_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id",
)  # fmt: skip
# Keys with suppressed tokens; removed tokens are dropped from their lists.
SUPPRESSED_TOKEN_KEYS = ("suppress_tokens", "begin_suppress_tokens")
PHRASE_KEYS = ("bad_words_ids", "force_words_ids")


def config_token_ids(config: Mapping[str, Any]) -> set[int]:
    """Return the token ids in `config` that must be kept."""
    ids: set[int] = set()
    for key in TOKEN_ID_KEYS:
        value = config.get(key)
        ids |= {
            token_id
            for token_id in (value if isinstance(value, list) else [value])
            if isinstance(token_id, int)
        }
    for phrase in config.get("bad_words_ids") or ():
        ids |= set(phrase) if len(phrase) == 1 else set()  # such as padding, which Marian suppresses
    return ids


def renumber_config(config: Any, new_ids: Mapping[int, int], size: int) -> None:
    """Replace the token ids in `config` (a config object of transformers) by the new ones, in place.

    An id outside of the vocabulary (ModernBERT's defaults in a small model) is not changed.

    Args:
        config: a model's or a generation config.
        new_ids: new id of each kept token.
        size: of the vocabulary before.
    """

    def renumber(value: Any) -> Any:
        return (
            new_ids[value]
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < size
            else value
        )

    for key in TOKEN_ID_KEYS:
        value = getattr(config, key, None)
        if value is not None:
            setattr(
                config,
                key,
                [renumber(token_id) for token_id in value] if isinstance(value, list) else renumber(value),
            )
    for key in SUPPRESSED_TOKEN_KEYS:
        value = getattr(config, key, None)
        if isinstance(value, list):
            setattr(config, key, [new_ids[token_id] for token_id in value if token_id in new_ids] or None)
    for key in PHRASE_KEYS:
        value = getattr(config, key, None)
        if isinstance(value, list):
            phrases = [
                [new_ids[token_id] for token_id in phrase]
                for phrase in value
                if all(token_id in new_ids for token_id in phrase)
            ]
            setattr(config, key, phrases or None)


TokenCounts = NDArray[np.int64]


def select_tokens(
    counts: TokenCounts,
    vocabulary: TrimmableVocabulary,
    required: Iterable[int],
    *,
    min_count: int = 1,
    coverage: float | None = None,
    size: int | None = None,
    multiple_of: int = 1,
) -> list[int]:
    """Return the token ids to keep, rising.

    Args:
        counts: occurrences of each id in the data, int64 [V].
        vocabulary: the vocabulary.
        required: ids to keep in addition to those that the tokenizer needs.
        min_count: keep ids with at least this many occurrences.
        coverage: instead, keep the most frequent ids with this share of all occurrences.
        size: instead, keep this many ids in all, the most frequent ones.
        multiple_of: filled up to a multiple of this with the most frequent of the others.

    Raises:
        InputError: more ids are required than `size`.
    """
    vocabulary_ids = frozenset(vocabulary.ids.values())
    kept_ids = {token_id for token_id in required if 0 <= token_id < len(counts)}
    kept_ids |= {token_id for token_id in vocabulary.required if token_id < len(counts)}
    _add_with_dependencies(kept_ids, sorted(kept_ids), vocabulary)
    order = [token_id for token_id in _ids_by_frequency(counts) if token_id in vocabulary_ids]
    if size is not None:
        if size < len(kept_ids):
            raise InputError(
                f"trim-vocabulary: size {size} is less than the {len(kept_ids)} tokens that are required:"
                " special tokens, single characters and bytes. Increase size.",
                code="size-too-small",
                setting="size",
            )
        return sorted(_fill_up(kept_ids, order, vocabulary, min(size, len(counts))))
    _add_with_dependencies(kept_ids, _wanted_ids(counts, order, min_count, coverage), vocabulary)
    return sorted(_fill_up(kept_ids, order, vocabulary, math.ceil(len(kept_ids) / multiple_of) * multiple_of))


def _ids_by_frequency(counts: TokenCounts) -> list[int]:
    """Return all ids, the most frequent first; ties by the smaller id."""
    order: list[int] = np.argsort(-counts, kind="stable").tolist()
    return order


def _wanted_ids(
    counts: TokenCounts, order: Sequence[int], min_count: int, coverage: float | None
) -> list[int]:
    if coverage is None:
        return [token_id for token_id in order if counts[token_id] >= min_count]
    sums = np.cumsum(counts[list(order)])
    total = int(sums[-1]) if len(sums) else 0
    count = int(np.searchsorted(sums, coverage * total)) + 1 if total else 0
    return [token_id for token_id in order[:count] if counts[token_id]]


def _add_with_dependencies(kept_ids: set[int], ids: Iterable[int], vocabulary: TrimmableVocabulary) -> None:
    """Add `ids` and their dependencies to `kept_ids`."""
    for token_id in ids:
        kept_ids.add(token_id)
        kept_ids |= vocabulary.dependencies(token_id)


def _fill_up(
    kept_ids: set[int], order: Sequence[int], vocabulary: TrimmableVocabulary, size: int
) -> set[int]:
    """Add the ids in `order` with their dependencies to `kept_ids`, up to `size` in all."""
    grown = True
    while len(kept_ids) < size and grown:
        grown = False
        for token_id in order:
            if token_id in kept_ids:
                continue
            new_ids = {token_id, *vocabulary.dependencies(token_id)} - kept_ids
            if len(kept_ids) + len(new_ids) <= size:
                kept_ids |= new_ids
                grown = True
    return kept_ids


VOCABULARY_FILE = "vocabulary.json"


@dataclass(frozen=True)
class KeptTokens:
    """original_size: of the vocabulary before any trimming. ids: of the kept tokens, rising."""

    original_size: int
    ids: list[int]


def read_kept_tokens(folder: Path) -> KeptTokens | None:
    """Return the kept tokens of the model in `folder`; None if it was not trimmed.

    Raises:
        InputError: the file is damaged.
    """
    path = folder / VOCABULARY_FILE
    if not path.is_file():
        return None
    data: Any = read_json_object(path)
    original_size, ids = data.get("words"), data.get("kept")
    is_valid = (
        isinstance(original_size, int)
        and isinstance(ids, list)
        and all(isinstance(token_id, int) for token_id in ids)
    )
    if not is_valid or not ids or sorted(set(ids)) != ids or not 0 <= ids[0] <= ids[-1] < original_size:
        raise InputError(
            f"{path}: this version of smelt cannot read this list of tokens. Run the stage"
            " trim-vocabulary again.",
            code="damaged-file",
            file=str(path),
        )
    return KeptTokens(original_size, ids)


def write_kept_tokens(tokens: KeptTokens, folder: Path) -> None:
    """Store `tokens` in `folder`."""
    write_json(folder / VOCABULARY_FILE, {"schema": 1, "words": tokens.original_size, "kept": tokens.ids})


def compose_kept_tokens(before: KeptTokens | None, ids: list[int], vocabulary_size: int) -> KeptTokens:
    """Return the kept tokens after keeping `ids` of `vocabulary_size` tokens, trimmed before or not."""
    return (
        KeptTokens(vocabulary_size, ids)
        if before is None
        else KeptTokens(before.original_size, [before.ids[index] for index in ids])
    )


def map_to_teacher_tokens(
    student: Path, teacher: Path, student_size: int, teacher_size: int
) -> list[int] | None:
    """Return the teacher's token id for each of the student's tokens; None if none was trimmed, or the same.

    Args:
        student: folder of a model.
        teacher: folder of another with the same tokenizer before trimming; the number of rows that models
            have for it may differ (padding).
        student_size: size of the student's vocabulary.
        teacher_size: size of the teacher's vocabulary.

    Raises:
        InputError: the vocabularies are unrelated, or the teacher lacks tokens.
    """
    student_kept, teacher_kept = read_kept_tokens(student), read_kept_tokens(teacher)
    if student_kept == teacher_kept:
        return None
    teacher_tokens = teacher_kept.ids if teacher_kept is not None else list(range(teacher_size))
    teacher_indices = {token: index for index, token in enumerate(teacher_tokens)}
    student_tokens = student_kept.ids if student_kept is not None else list(range(student_size))
    if not teacher_indices.keys() >= set(student_tokens):
        num_missing = len(set(student_tokens) - teacher_indices.keys())
        raise InputError(
            f"distill: the teacher ({teacher_size} tokens) lacks {num_missing} of the student's"
            f" {student_size} tokens. Use a teacher from a step before 'trim-vocabulary', or with"
            " the same vocabulary.",
            code="vocabulary-mismatch",
            setting="teacher",
        )
    return [teacher_indices[token] for token in student_tokens]


class TrimVocabularySettings(Settings):
    """Settings of `trim-vocabulary`: at most one of min_count, coverage and size; default min_count: 1."""

    min_count: int | None = Field(
        default=None,
        ge=1,
        description="keep tokens that occur at least this often; default 1",
    )
    coverage: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="keep the most frequent tokens, together this fraction of all occurrences",
    )
    size: int | None = Field(default=None, ge=1, description="keep this many tokens")
    multiple_of: int = Field(
        default=8, ge=1, description="the number of tokens is a multiple of this, unless size is set"
    )
    dtype: StoredDtype = "keep"

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        if sum(value is not None for value in (self.min_count, self.coverage, self.size)) > 1:
            raise SettingError("set only one of min_count, coverage and size", code="settings-conflict")
        return self
