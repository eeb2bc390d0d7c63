"""A `tokenizer.json` as a `TextTokenizer`, read by the tokenizers library only.

The processing that transformers adds to that library's result, truncation by side and removal of spaces, is
equivalent here (tokenization_utils_tokenizers.py, 5.23).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.runtime.text.tokenizer import EncodedTexts
from smelt.runtime.text.tokenizer_info import TokenizerInfo

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
