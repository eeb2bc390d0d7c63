"""What stands between texts and token ids, whoever does it.

Three do: the tokenizers library (`rust_tokenizer`), SentencePiece (`marian_tokenizer`) and transformers
(`hub_tokenizer`), which imports torch. The first two serve where an export has proved that they give what
transformers gives (`smelt.export.tokenizer.tokenizer_export`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Encoded:
    """Token ids per text, type ids where the model has them, and how many texts were cut."""

    ids: list[list[int]]
    types: list[list[int]] | None
    truncated: int


class TextTokenizer(Protocol):
    """Texts to ids and back. Safe for threads: nothing in it changes once it is made.

    reader: tokenizers, sentencepiece or transformers. prefix: what stands before every source text. lower:
    texts are lowercased first.
    model_max_length: the most tokens of a row, its special ones counted; huge where nobody says.
    The ids are None where there is no such token.
    """

    reader: str
    prefix: str
    lower: bool
    model_max_length: int
    pad_token_id: int | None
    bos_token_id: int | None
    eos_token_id: int | None

    def encode_rows(
        self, texts: Sequence[str], max_length: int, pairs: Sequence[str] | None = None
    ) -> Encoded:
        """Tokenize `texts`, each with its pair, special tokens included; cut at `max_length` tokens."""

    def decode_rows(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each row of ids, without its special tokens."""
