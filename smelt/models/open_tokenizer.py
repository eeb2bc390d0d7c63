"""Opens a model's tokenizer with the lightest reader that is verified to be exact.

The readers' libraries are imported when a reader is created; transformers' tokenizers import torch.

Marian's tokenizer as a `TextTokenizer`: a SentencePiece model and a vocabulary, without transformers.

Source: transformers' tokenization_marian.py and tokenization_python.py (5.23). Pieces are looked up in
vocab.json, whose order is not SentencePiece's; a leading language token such as >>deu<< is one token; added
tokens are found first, longest first; the source's model also decodes texts, as there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.files import read_json_object
from smelt.models.text_rules import read_text_rules
from smelt.models.tokenizer import (
    EncodedTexts,
    TextTokenizer,
    TokenizerInfo,
    as_text_tokenizer,
    clean_up_tokenization,
    read_tokenizer_info,
)


def open_tokenizer(folder: Path) -> TextTokenizer:
    """Return the tokenizer of the model in `folder`, with the lightest reader that is verified to be exact.

    Raises:
        InputError: its files are missing or do not match.
    """
    return open_light_tokenizer(folder, read_tokenizer_info(folder)) or as_text_tokenizer(
        _load_transformers_tokenizer(folder)
    )


def open_light_tokenizer(folder: Path, details: TokenizerInfo) -> TextTokenizer | None:
    """Return the tokenizer in `folder` without transformers; None where transformers is needed."""
    if details.reader == "transformers":
        return None
    rules = read_text_rules(folder)
    if details.reader == "sentencepiece":
        return MarianTokenizer(folder, details, rules.prefix)
    from smelt.models.tokenizer import RustTokenizer

    return RustTokenizer(folder, details, rules.prefix, rules.lower)


def _load_transformers_tokenizer(folder: Path) -> Any:
    from smelt.models.checkpoint import load_tokenizer

    return load_tokenizer(folder)


SENTENCEPIECE_FILE, MARIAN_VOCAB_FILE = "source.spm", "vocab.json"
_SPACE = "▁"


class MarianTokenizer:
    """Reads `folder`/source.spm and vocab.json; `details` is the tokenizer info next to them.

    Raises:
        InputError: a file is missing or damaged.
    """

    reader = "sentencepiece"
    lower = False

    def __init__(self, folder: Path, details: TokenizerInfo, prefix: str = "") -> None:
        if details.eos is None or details.unknown is None:
            raise InputError(
                f"{folder}: tokenizing.json has no end-of-text token or no unknown token. Export the model"
                " again.",
                code="missing-special-token",
            )
        self.prefix = prefix
        self.model_max_length = details.longest
        self.pad_token_id: int | None = details.pad
        self.bos_token_id: int | None = details.bos
        self.eos_token_id: int | None = details.eos
        self._eos, self._unknown, self._facts = details.eos, details.unknown, details
        self._pieces = _open(folder / SENTENCEPIECE_FILE)
        words = read_json_object(folder / MARIAN_VOCAB_FILE) | details.added
        self._words = words
        self._names = {place: word for word, place in words.items()}
        self._ids = [words.get(self._pieces.id_to_piece(i), self._unknown) for i in range(len(self._pieces))]
        self._no_piece = self._pieces.unk_id()
        self._hidden = frozenset(details.special)
        longest_first = sorted(details.added, key=len, reverse=True)
        self._added = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def encode_batch(
        self, texts: Sequence[str], max_length: int, pairs: Sequence[str] | None = None
    ) -> EncodedTexts:
        """Tokenize `texts`, truncated to `max_length` tokens including the final one.

        Raises:
            InputError: there are pairs, which this tokenizer does not support.
        """
        if pairs is not None:
            raise InputError(
                "This model takes single texts, not pairs of texts.", code="unsupported-text-pairs"
            )
        rows = [self._encode(text) for text in texts]
        room = max(0, max_length - 1)
        truncated = sum(len(row) > room for row in rows)
        if truncated and self._facts.truncation_side == "left":
            rows = [row[len(row) - room :] if len(row) > room else row for row in rows]
        return EncodedTexts([[*row[:room], self._eos] for row in rows], None, truncated)

    def decode_batch(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each row of ids, without its special tokens."""
        texts = [self._decode(row) for row in rows]
        return [clean_up_tokenization(text) for text in texts] if self._facts.clean_up else texts

    def _encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without the final one."""
        parts = self._added.split(text)
        if len(parts) == 1:
            return self._encode_plain(text)
        added = self._facts.added
        return [
            i
            for part in parts
            if part
            for i in ([added[part]] if part in added else self._encode_plain(part))
        ]

    def _encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text without added tokens."""
        start: list[int] = []
        if text.startswith(">>") and (end := text.find("<<")) != -1:
            start, text = [self._words.get(text[: end + 2], self._unknown)], text[end + 2 :]
        places = self._pieces.encode(text)
        if self._no_piece in places:  # a token that is unknown in the source's model may be one of the target
            found = self._pieces.encode(text, out_type=str)
            return start + [self._words.get(piece, self._unknown) for piece in found]
        return start + [self._ids[place] for place in places]

    def _decode(self, row: Sequence[int]) -> str:
        pieces = [self._token_text(place) for place in row if place not in self._hidden]
        text: str = self._pieces.decode_pieces(pieces)
        return text.replace(_SPACE, " ").strip()

    def _token_text(self, place: int) -> str:
        name = self._names.get(place)
        return self._pieces.id_to_piece(place) if name is None else name


def _open(path: Path) -> Any:
    import sentencepiece

    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"{path}: the SentencePiece model cannot be read: {error}", code="damaged-tokenizer"
        ) from error
