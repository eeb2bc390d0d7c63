"""Tokenizer of Marian: SentencePiece, and a vocabulary with its own ids."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import sentencepiece


class Tokenizer:
    """Encode and decode texts with the settings of infer.json; `cut` counts truncated texts."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.settings, self.cut = settings, 0
        self.added: dict[str, int] = settings["added"]
        self.pieces: Any = sentencepiece.SentencePieceProcessor(model_file=str(folder / "source.spm"))
        self.words = json.loads((folder / "vocab.json").read_text(encoding="utf-8")) | self.added
        self.names = {token_id: token for token, token_id in self.words.items()}
        longest_first = sorted(self.added, key=len, reverse=True)
        self.split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text` with the model's prefix and the end token."""
        parts = [part for part in self.split.split(self.settings["prefix"] + text) if part]
        row = [i for p in parts for i in ([self.added[p]] if p in self.added else self.plain(p))]
        max_tokens = len(row) if self.settings["limit"] is None else max(0, self.settings["limit"] - 1)
        self.cut += len(row) > max_tokens
        truncated = (
            row[max(0, len(row) - max_tokens) :]
            if self.settings["truncation_side"] == "left"
            else row[:max_tokens]
        )
        return [*truncated, self.settings["eos"]]

    def plain(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens; a first word such as >>deu<< is one token."""
        first = []
        if text.startswith(">>") and (end := text.find("<<")) != -1:
            first, text = [text[: end + 2]], text[end + 2 :]
        subwords = first + self.pieces.encode(text, out_type=str)
        return [self.words.get(subword, self.settings["unknown"]) for subword in subwords]

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids` without special tokens."""
        visible_ids = [i for i in ids if i not in self.settings["special"]]
        names = [self.names[i] if i in self.names else self.pieces.id_to_piece(i) for i in visible_ids]
        text: str = self.pieces.decode_pieces(names).replace("\u2581", " ").strip()
        for old, new in self.settings["replace"]:  # spaces before punctuation
            text = text.replace(old, new)
        return text
