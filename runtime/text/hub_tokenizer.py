"""A tokenizer of transformers as a `TextTokenizer`: the reference that the light ones are compared with."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from smelt.runtime.text.rules import prefix_of
from smelt.runtime.text.tokenizer import Encoded, TextTokenizer


class HubTokenizer:
    """Wraps `inner`, a tokenizer of transformers.

    One thread at a time may use it: a call of a fast one sets how to cut in the tokenizer itself, and while
    another thread tokenizes that fails ("Already borrowed"); slow ones keep their mode in attributes.
    """

    reader = "transformers"

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.prefix = prefix_of(inner)
        self.lower = bool(getattr(inner, "smelt_lower", False))
        self.model_max_length = int(inner.model_max_length)
        self.pad_token_id: int | None = inner.pad_token_id
        self.bos_token_id: int | None = inner.bos_token_id
        self.eos_token_id: int | None = inner.eos_token_id
        self._lock = threading.Lock()

    def encode_rows(
        self, texts: Sequence[str], max_length: int, pairs: Sequence[str] | None = None
    ) -> Encoded:
        """Tokenize `texts`, each with its pair, special tokens included; cut at `max_length` tokens."""
        if not texts:
            return Encoded([], None, 0)
        both = [list(texts)] if pairs is None else [list(texts), list(pairs)]
        with self._lock:
            full = self.inner(*both, truncation=False, verbose=False)
            truncated = sum(len(ids) > max_length for ids in full["input_ids"])
            if truncated:
                full = self.inner(*both, truncation=True, max_length=max_length, verbose=False)
        return Encoded(full["input_ids"], full.get("token_type_ids"), truncated)

    def decode_rows(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each row of ids, without its special tokens."""
        if not rows:
            return []
        with self._lock:
            texts: list[str] = self.inner.batch_decode([list(row) for row in rows], skip_special_tokens=True)
        return texts


def text_tokenizer(tokenizer: Any) -> TextTokenizer:
    """Return `tokenizer`, where it is one of transformers as a `TextTokenizer`."""
    if hasattr(tokenizer, "encode_rows"):
        found: TextTokenizer = tokenizer
        return found
    return HubTokenizer(tokenizer)
