"""A transformers tokenizer as a `TextTokenizer`: the reference of the light ones."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from smelt.runtime.text.text_preprocessing import tokenizer_prefix
from smelt.runtime.text.tokenizer import EncodedTexts, TextTokenizer


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
