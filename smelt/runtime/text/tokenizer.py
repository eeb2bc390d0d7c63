"""The interface between texts and token ids.

Three classes implement it: the tokenizers library (`rust_tokenizer`), SentencePiece (`marian_tokenizer`) and
transformers (`hub_tokenizer`), which imports torch. The first two are used where an export has verified that
they equal transformers (`smelt.export.tokenizer.export_tokenizer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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
