"""Texts by rule, from the words of a tokenizer's own vocabulary: what people write in its languages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from smelt.runtime.text.tokenizer import TextTokenizer

_MARKS = ("<", "[", ">>", "\ufffd", "\x00")  # a special token may be spelled so
_BETWEEN = (" ",) * 24 + (", ", ", ", ". ", ". ", "; ", ": ", " - ", "-", "/", " & ", "  ", "\n")
_ENDS = (".",) * 6 + ("", "", "", "!", "?", "...", '"', ")", " ", "\n", "…", "%")
_OTHERS = (
    "don't", "it's", "we've", "I'm", "O'Neill", "café", "naïve", "Äpfel", "straße", "Ærø", "Łódź", "señor",
    "1", "42", "1,234.56", "2024-05-17", "3rd", "50%", "€20", "$5", "#tag", "@name", "a.b@c.org", "C++",
    "x=y", "http://a.org/b?c=1", "“quoted”", "„so“", "it’s", "(see", "below)", "‘x’", "—", "–", "½", "№", "™",
)  # fmt: skip

# what a model's vocabulary knows of other scripts is among its words already
SCRIPTS = (
    "привет, мир", "γειά σου", "你好 世界", "日本語 です", "한국어 문장", "नमस्ते दुनिया", "שלום עולם",
    "مرحبا بالعالم", "สวัสดี", "Tiếng Việt", "🙂 👍🏽",
)  # fmt: skip


def words_of(tokenizer: TextTokenizer, size: int) -> list[str]:
    """Return what the tokens 0 .. `size` - 1 read as, without special ones and parts of letters."""
    found = (text.replace("##", "").strip() for text in tokenizer.decode_rows([[i] for i in range(size)]))
    return sorted({text for text in found if text and not any(mark in text for mark in _MARKS)})


def made_up_texts(words: Sequence[str], count: int, seed: int = 0) -> list[str]:
    """Return `count` different texts of 1 to 30 words, of `words`, numbers, signs and accents."""
    random = np.random.default_rng(seed)
    texts: dict[str, None] = {}
    while len(texts) < count:
        texts[_text(words, random)] = None
    return list(texts)


def _text(words: Sequence[str], random: np.random.Generator) -> str:
    parts = [" "] if random.random() < 0.02 else []
    for _ in range(int(random.integers(1, 31))):
        chosen = _OTHERS if random.random() < 0.06 or not words else words
        parts += [_cased(chosen[int(random.integers(len(chosen)))], random.random())]
        parts += [_BETWEEN[int(random.integers(len(_BETWEEN)))]]
    return "".join(parts[:-1]) + _ENDS[int(random.integers(len(_ENDS)))]


def _cased(word: str, drawn: float) -> str:
    return word.upper() if drawn < 0.05 else word.capitalize() if drawn < 0.2 else word
