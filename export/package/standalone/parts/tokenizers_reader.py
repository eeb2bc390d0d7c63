"""Tokenizer of tokenizer.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers


class Tokenizer:
    """Encode and decode texts with the settings of infer.json; `cut` counts truncated texts."""

    def __init__(self, folder: Path, said: dict[str, Any]) -> None:
        self.said, self.cut = said, 0
        self.inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        if said["limit"] is not None:
            self.inner.enable_truncation(said["limit"], direction=said["truncation_side"])

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text` with the model's prefix and special tokens."""
        text = self.said["prefix"] + text
        found = self.inner.encode(text.lower() if self.said["lower"] else text)
        self.cut += bool(found.overflowing)
        return list(found.ids)

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids` without special tokens."""
        text: str = self.inner.decode(ids, skip_special_tokens=True)
        for found, wanted in self.said["replace"]:  # spaces before punctuation
            text = text.replace(found, wanted)
        return text
