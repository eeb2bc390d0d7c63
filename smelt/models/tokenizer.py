"""The interface between texts and token ids.

Three classes implement it: the tokenizers library (`rust_tokenizer`), SentencePiece (`marian_tokenizer`) and
transformers (`hub_tokenizer`), which imports torch. The first two are used where an export has verified that
they equal transformers (`smelt.export.tokenizer`).

The tokenizer reader of an exported model, and properties that its own files do not have.

The onnx stage writes `tokenizing.json` next to the tokenizer's files, once it has compared the light reader
with transformers' own tokenizer (`smelt.export.tokenizer`). An artifact without it is read
by transformers.

A `tokenizer.json` as a `TextTokenizer`, read by the tokenizers library only.

The processing that transformers adds to that library's result, truncation by side and removal of spaces, is
equivalent here (tokenization_utils_tokenizers.py, 5.23).

A transformers tokenizer as a `TextTokenizer`: the reference of the light ones.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from smelt.core.errors import InputError
from smelt.core.files import load_json, write_json
from smelt.models.length_limits import NO_LIMIT
from smelt.models.text_rules import tokenizer_prefix


@dataclass(frozen=True)
class EncodedTexts:
    """Token ids per text, type ids where the model has them, and the number of truncated texts."""

    ids: list[list[int]]
    types: list[list[int]] | None
    truncated: int


class TextTokenizer(Protocol):
    """Texts to ids and back. Thread-safe: it does not change after its creation.

    reader: tokenizers, sentencepiece or transformers. prefix: added before every source text. lower:
    texts are lowercased first.
    model_max_length: maximum number of tokens of a row, with special tokens; huge where unknown.
    The ids are None where there is no such token.
    """

    reader: str
    prefix: str
    lower: bool
    model_max_length: int
    pad_token_id: int | None
    bos_token_id: int | None
    eos_token_id: int | None

    def encode_batch(
        self, texts: Sequence[str], max_length: int, pairs: Sequence[str] | None = None
    ) -> EncodedTexts:
        """Tokenize `texts`, each with its pair, with special tokens; truncated to `max_length` tokens."""

    def decode_batch(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each row of ids, without its special tokens."""


TOKENIZER_INFO_FILE = "tokenizing.json"
TokenizerReader = Literal["tokenizers", "sentencepiece", "transformers"]


class TokenizerInfo(BaseModel):
    """reader: the library. reason: why transformers is needed.

    longest: maximum number of tokens of a row. pad, bos, eos: ids. types: whether rows have token types.
    clean_up: whether spaces before punctuation are removed. For sentencepiece only: added: tokens that are
    never split into pieces, with their ids; special: ids that are not shown; unknown: the id of unknown
    tokens.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    reader: TokenizerReader
    reason: str = ""
    longest: int = NO_LIMIT
    pad: int | None = None
    bos: int | None = None
    eos: int | None = None
    types: bool = False
    truncation_side: Literal["left", "right"] = "right"
    clean_up: bool = False
    added: dict[str, int] = Field(default_factory=dict)
    special: list[int] = Field(default_factory=list)
    unknown: int | None = None


def read_tokenizer_info(folder: Path) -> TokenizerInfo:
    """Return the tokenizer info in `folder`; that of transformers where there is none.

    Raises:
        InputError: the file is damaged.
    """
    path = folder / TOKENIZER_INFO_FILE
    if not path.is_file():
        return TokenizerInfo(
            reader="transformers", reason=f"there is no {TOKENIZER_INFO_FILE} in this folder"
        )
    try:
        return TokenizerInfo.model_validate(load_json(path))
    except (OSError, ValueError, ValidationError) as error:
        raise InputError(
            f"{path}: this version of smelt cannot read this file: {error}", code="damaged-file"
        ) from error


def write_tokenizer_info(folder: Path, details: TokenizerInfo) -> None:
    """Write `details` to `folder`."""
    write_json(folder / TOKENIZER_INFO_FILE, details.model_dump(exclude_defaults=True))


TOKENIZER_FILE = "tokenizer.json"
# `clean_up_tokenization` of transformers (tokenization_utils_base.py): the replacements, in order.
CLEANUP_REPLACEMENTS = [
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"),
    (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
]  # fmt: skip


class RustTokenizer:
    """Reads `folder`/tokenizer.json; `details` is the tokenizer info next to it.

    Raises:
        InputError: the file is missing or damaged.
    """

    reader = "tokenizers"

    def __init__(self, folder: Path, details: TokenizerInfo, prefix: str = "", lower: bool = False) -> None:
        self.prefix, self.lower = prefix, lower
        self.model_max_length = details.longest
        self.pad_token_id: int | None = details.pad
        self.bos_token_id: int | None = details.bos
        self.eos_token_id: int | None = details.eos
        self._facts = details
        self._path = folder / TOKENIZER_FILE
        self._inner = _open(self._path)

    def encode_batch(
        self, texts: Sequence[str], max_length: int, pairs: Sequence[str] | None = None
    ) -> EncodedTexts:
        """Tokenize `texts`, each with its pair, with special tokens; truncated to `max_length` tokens."""
        ids, types, truncated = [], [], 0
        left = self._facts.truncation_side == "left"
        seconds: Sequence[str | None] = [None] * len(texts) if pairs is None else pairs
        for text, pair in zip(texts, seconds, strict=True):
            try:
                found = self._inner.encode(text, pair)
            except Exception as error:  # a bare one from Rust: the unknown token is not in the vocabulary
                raise InputError(
                    f"{self._path}: cannot tokenize {text[:60]!r}: {error}",
                    code="tokenizer-failed",
                ) from error
            row, kinds = found.ids, found.type_ids if self._facts.types else []
            if len(row) > max_length:
                truncated += 1
                kept = indices_after_truncation(found.sequence_ids, max_length, left)
                row, kinds = [row[at] for at in kept], [kinds[at] for at in kept if kinds]
            ids.append(row)
            types.append(kinds)
        return EncodedTexts(ids, types if self._facts.types else None, truncated)

    def decode_batch(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each row of ids, without its special tokens."""
        texts = [self._inner.decode(row, skip_special_tokens=True) for row in rows]
        return [clean_up_tokenization(text) for text in texts] if self._facts.clean_up else texts


def indices_after_truncation(owners: Sequence[int | None], max_length: int, left: bool) -> list[int]:
    """Return which tokens of a row are kept: all special ones, and as many of the texts as fit.

    The longer text of a pair is truncated first, as in the tokenizers library (utils/truncation.rs,
    LongestFirst). The library itself would also keep all removed parts, in combinations for two long texts.

    Args:
        owners: for each token 0 or 1, the index of its text, or None for a special one.
        max_length: number of tokens that may be kept.
        left: whether texts are truncated at their beginning.
    """
    places: list[list[int]] = [[], []]
    special = 0
    for place, owner in enumerate(owners):
        if owner is None:
            special += 1
        else:
            places[owner].append(place)
    room = max(0, max_length - special)
    short, long = sorted(map(len, places))
    long = max(short, room - short)
    if short + long > room:
        short = room // 2
        long = short + room % 2
    first, second = (long, short) if len(places[0]) > len(places[1]) else (short, long)
    out = set()
    for found, count in ((places[0], first), (places[1], second)):
        out.update(found[: len(found) - count] if left else found[count:])
    return [place for place in range(len(owners)) if place not in out]


def clean_up_tokenization(text: str) -> str:
    """Return `text` without the spaces that WordPiece leaves before punctuation."""
    for found, wanted in CLEANUP_REPLACEMENTS:
        text = text.replace(found, wanted)
    return text


def _open(path: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        inner = Tokenizer.from_file(str(path))
    except Exception as error:  # bare Exceptions from Rust: the file cannot be read
        raise InputError(
            f"{path}: the tokenizer cannot be read: {error}", code="damaged-tokenizer"
        ) from error
    inner.no_truncation()
    inner.no_padding()
    return inner


class HubTokenizer:
    """Wraps `inner`, a transformers tokenizer.

    Only one thread at a time may use it: a call of a fast one sets the truncation in the tokenizer itself,
    which fails while another thread tokenizes ("Already borrowed"); slow ones keep their mode in attributes.
    """

    reader = "transformers"

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.prefix = tokenizer_prefix(inner)
        self.lower = bool(getattr(inner, "smelt_lower", False))
        self.model_max_length = int(inner.model_max_length)
        self.pad_token_id: int | None = inner.pad_token_id
        self.bos_token_id: int | None = inner.bos_token_id
        self.eos_token_id: int | None = inner.eos_token_id
        self._lock = threading.Lock()

    def encode_batch(
        self, texts: Sequence[str], max_length: int, pairs: Sequence[str] | None = None
    ) -> EncodedTexts:
        """Tokenize `texts`, each with its pair, with special tokens; truncated to `max_length` tokens."""
        if not texts:
            return EncodedTexts([], None, 0)
        both = [list(texts)] if pairs is None else [list(texts), list(pairs)]
        with self._lock:
            full = self.inner(*both, truncation=False, verbose=False)
            truncated = sum(len(ids) > max_length for ids in full["input_ids"])
            if truncated:
                full = self.inner(*both, truncation=True, max_length=max_length, verbose=False)
        return EncodedTexts(full["input_ids"], full.get("token_type_ids"), truncated)

    def decode_batch(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each row of ids, without its special tokens."""
        if not rows:
            return []
        with self._lock:
            texts: list[str] = self.inner.batch_decode([list(row) for row in rows], skip_special_tokens=True)
        return texts


def as_text_tokenizer(tokenizer: Any) -> TextTokenizer:
    """Return `tokenizer`, as a `TextTokenizer` if it is one of transformers."""
    if hasattr(tokenizer, "encode_batch"):
        found: TextTokenizer = tokenizer
        return found
    return HubTokenizer(tokenizer)
