"""Tokenizer of tokenizer.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers


class Tokenizer:
    """Encode and decode texts with the settings of infer.json; `cut` counts truncated texts."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.settings, self.cut = settings, 0
        self.inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        if settings["limit"] is not None:
            self.inner.enable_truncation(settings["limit"], direction=settings["truncation_side"])

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text` with the model's prefix and special tokens."""
        text = self.settings["prefix"] + text
        encoding = self.inner.encode(text.lower() if self.settings["lower"] else text)
        self.cut += bool(encoding.overflowing)
        return list(encoding.ids)

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids` without special tokens."""
        text: str = self.inner.decode(ids, skip_special_tokens=True)
        for old, new in self.settings["replace"]:  # spaces before punctuation
            text = text.replace(old, new)
        return text
