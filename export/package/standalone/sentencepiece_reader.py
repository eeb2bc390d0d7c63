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
        self.names = {place: word for word, place in self.words.items()}
        longest_first = sorted(self.added, key=len, reverse=True)
        self.split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text` with the model's prefix and the end token."""
        parts = [part for part in self.split.split(self.settings["prefix"] + text) if part]
        row = [i for p in parts for i in ([self.added[p]] if p in self.added else self.plain(p))]
        room = len(row) if self.settings["limit"] is None else max(0, self.settings["limit"] - 1)
        self.cut += len(row) > room
        kept = row[max(0, len(row) - room) :] if self.settings["truncation_side"] == "left" else row[:room]
        return [*kept, self.settings["eos"]]

    def plain(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens; a first word such as >>deu<< is one token."""
        first = []
        if text.startswith(">>") and (end := text.find("<<")) != -1:
            first, text = [text[: end + 2]], text[end + 2 :]
        pieces = first + self.pieces.encode(text, out_type=str)
        return [self.words.get(piece, self.settings["unknown"]) for piece in pieces]

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids` without special tokens."""
        shown = [i for i in ids if i not in self.settings["special"]]
        names = [self.names[i] if i in self.names else self.pieces.id_to_piece(i) for i in shown]
        text: str = self.pieces.decode_pieces(names).replace("\u2581", " ").strip()
        for found, wanted in self.settings["replace"]:  # spaces before punctuation
            text = text.replace(found, wanted)
        return text
