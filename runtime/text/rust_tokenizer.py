"""A `tokenizer.json` as a `TextTokenizer`, read by the tokenizers library alone.

What transformers adds to that library's result, cutting by side and cleaning up blanks, is done here as it
does it (tokenization_utils_tokenizers.py, 5.23).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.runtime.text.tokenizer import Encoded
from smelt.runtime.text.tokenizing_file import Tokenizing

FILE = "tokenizer.json"
# `clean_up_tokenization` of transformers (tokenization_utils_base.py): what is replaced, in this order.
CLEAN = [
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"),
    (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
]  # fmt: skip


class RustTokenizer:
    """Reads `folder`/tokenizer.json; `details` is what stands beside it.

    Raises:
        InputError: the file is missing or damaged.
    """

    reader = "tokenizers"

    def __init__(self, folder: Path, details: Tokenizing, prefix: str = "", lower: bool = False) -> None:
        self.prefix, self.lower = prefix, lower
        self.model_max_length = details.longest
        self.pad_token_id: int | None = details.pad
        self.bos_token_id: int | None = details.bos
        self.eos_token_id: int | None = details.eos
        self._facts = details
        self._path = folder / FILE
        self._inner = _open(self._path)

    def encode_rows(
        self, texts: Sequence[str], max_length: int, pairs: Sequence[str] | None = None
    ) -> Encoded:
        """Tokenize `texts`, each with its pair, special tokens included; cut at `max_length` tokens."""
        ids, types, truncated = [], [], 0
        left = self._facts.truncation_side == "left"
        seconds: Sequence[str | None] = [None] * len(texts) if pairs is None else pairs
        for text, pair in zip(texts, seconds, strict=True):
            try:
                found = self._inner.encode(text, pair)
            except Exception as error:  # a bare one from Rust: the unknown token is no word of the vocabulary
                raise InputError(
                    f"{self._path}: the tokenizer cannot read {text[:60]!r}: {error}", code="tokenizer-failed"
                ) from error
            row, kinds = found.ids, found.type_ids if self._facts.types else []
            if len(row) > max_length:
                truncated += 1
                kept = kept_places(found.sequence_ids, max_length, left)
                row, kinds = [row[at] for at in kept], [kinds[at] for at in kept if kinds]
            ids.append(row)
            types.append(kinds)
        return Encoded(ids, types if self._facts.types else None, truncated)

    def decode_rows(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each row of ids, without its special tokens."""
        texts = [self._inner.decode(row, skip_special_tokens=True) for row in rows]
        return [cleaned(text) for text in texts] if self._facts.clean_up else texts


def kept_places(owners: Sequence[int | None], max_length: int, left: bool) -> list[int]:
    """Return which tokens of a row stay: all special ones, and of the texts what has room.

    The longer text of a pair is cut first, as the tokenizers library does it (utils/truncation.rs,
    LongestFirst). That itself would also keep what it cuts off, of two long texts each part beside each.

    Args:
        owners: for each token 0 or 1, the text that it belongs to, or None for a special one.
        max_length: tokens that may stay.
        left: whether texts are cut at their beginning.
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


def cleaned(text: str) -> str:
    """Return `text` without the blanks that WordPiece leaves before punctuation."""
    for found, wanted in CLEAN:
        text = text.replace(found, wanted)
    return text


def _open(path: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        inner = Tokenizer.from_file(str(path))
    except Exception as error:  # bare Exceptions from Rust, all meaning: cannot be read
        raise InputError(
            f"{path}: the tokenizer cannot be read: {error}", code="damaged-tokenizer"
        ) from error
    inner.no_truncation()
    inner.no_padding()
    return inner
