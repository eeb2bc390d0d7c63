"""Text of strangers, made safe to show.

Data, model folders and artifacts come from anywhere. What they hold is shown in messages and reports,
where control characters could move a terminal's cursor or hide what is before them, and Unicode's
direction controls could turn the order of what is read ("Trojan Source", Boucher & Anderson 2021,
arXiv:2111.00169). Letters of every script stay as they are, right-to-left ones too.
"""

from __future__ import annotations

import re
import unicodedata

_KEPT = frozenset("\n\t")
# Controls (Cc), halves of surrogate pairs (Cs), and of the format characters (Cf) those that turn
# directions; joiners, which Persian and emoji need, stay.
_DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
# What begins with a vowel's sound; names that are spelled out (mpnet, m2m_100, xlm) have their letter's.
_AN = re.compile(r"[aeio]|u[lmp]|un(?!i|et)|[fhlmnrx](?![aeiouhlr])[\w]|[mnx]l", re.IGNORECASE)


def printable(text: str) -> str:
    r"""Return `text` with control and direction characters as escapes such as \x1b; newline and tab stay."""
    if text.isprintable():
        return text
    return "".join(_escape(c) if _is_unsafe(c) else c for c in text)


def half_character(text: str) -> str | None:
    """Return the first half of a surrogate pair that stands alone in `text`, which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return None


def _is_unsafe(character: str) -> bool:
    if character in _KEPT:
        return False
    return character in _DIRECTIONS or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def article(word: object) -> str:
    """Return `word` behind "a" or "an", as it is spoken: "an onnx", "an mpnet", "a roberta"."""
    return f"an {word}" if _AN.match(str(word)) else f"a {word}"


def count(number: int, word: str) -> str:
    """Return "1 text", "2 texts"."""
    return f"{number:,} {word}{'s' * (number != 1)}"
