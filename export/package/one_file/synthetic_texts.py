"""Generate texts from the tokens of a tokenizer's vocabulary, similar to real texts in its languages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from smelt.runtime.text.tokenizer import TextTokenizer

_SPECIAL_MARKS = ("<", "[", ">>", "\ufffd", "\x00")  # a special token may be spelled like this
_SEPARATORS = (" ",) * 24 + (", ", ", ", ". ", ". ", "; ", ": ", " - ", "-", "/", " & ", "  ", "\n")
_ENDINGS = (".",) * 6 + ("", "", "", "!", "?", "...", '"', ")", " ", "\n", "…", "%")
_EXTRA_WORDS = (
    "don't", "it's", "we've", "I'm", "O'Neill", "café", "naïve", "Äpfel", "straße", "Ærø", "Łódź", "señor",
    "1", "42", "1,234.56", "2024-05-17", "3rd", "50%", "€20", "$5", "#tag", "@name", "a.b@c.org", "C++",
    "x=y", "http://a.org/b?c=1", "“quoted”", "„so“", "it’s", "(see", "below)", "‘x’", "—", "–", "½", "№", "™",
)  # fmt: skip

# other scripts of the vocabulary are among its tokens already
SCRIPT_SAMPLES = (
    "привет, мир", "γειά σου", "你好 世界", "日本語 です", "한국어 문장", "नमस्ते दुनिया", "שלום עולם",
    "مرحبا بالعالم", "สวัสดี", "Tiếng Việt", "🙂 👍🏽",
)  # fmt: skip


def vocabulary_words(tokenizer: TextTokenizer, size: int) -> list[str]:
    """Return the texts of the tokens 0 .. `size` - 1, without special ones and incomplete characters."""
    found = (text.replace("##", "").strip() for text in tokenizer.decode_batch([[i] for i in range(size)]))
    return sorted({text for text in found if text and not any(mark in text for mark in _SPECIAL_MARKS)})


def synthetic_texts(words: Sequence[str], count: int, seed: int = 0) -> list[str]:
    """Return `count` different texts of 1 to 30 words, made of `words`, numbers, punctuation and accents."""
    random = np.random.default_rng(seed)
    texts: dict[str, None] = {}
    while len(texts) < count:
        texts[_random_text(words, random)] = None
    return list(texts)


def _random_text(words: Sequence[str], random: np.random.Generator) -> str:
    parts = [" "] if random.random() < 0.02 else []
    for _ in range(int(random.integers(1, 31))):
        chosen = _EXTRA_WORDS if random.random() < 0.06 or not words else words
        parts += [_random_case(chosen[int(random.integers(len(chosen)))], random.random())]
        parts += [_SEPARATORS[int(random.integers(len(_SEPARATORS)))]]
    return "".join(parts[:-1]) + _ENDINGS[int(random.integers(len(_ENDINGS)))]


def _random_case(word: str, drawn: float) -> str:
    return word.upper() if drawn < 0.05 else word.capitalize() if drawn < 0.2 else word
