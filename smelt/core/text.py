"""Make untrusted text safe to show.

Data, model folders and artifacts may come from anywhere. Their texts are shown in messages and reports,
where control characters could move a terminal's cursor or hide text, and Unicode's direction controls could
reverse the order of text ("Trojan Source", Boucher & Anderson 2021, arXiv:2111.00169). Letters of every
script are unchanged, including right-to-left ones.
"""

from __future__ import annotations

import re
import unicodedata

_KEPT_CONTROLS = frozenset("\n\t")
# Controls (Cc), halves of surrogate pairs (Cs), and format characters (Cf) that change direction; joiners,
# which Persian and emoji need, are kept.
_BIDI_CONTROLS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
# Words that start with a vowel sound; in spelled-out names (mpnet, m2m_100, xlm), that of the letter.
_TAKES_AN = re.compile(r"[aeio]|u[lmp]|un(?!i|et)|[fhlmnrx](?![aeiouhlr])[\w]|[mnx]l", re.IGNORECASE)


def escape_controls(text: str) -> str:
    r"""Return `text` with control and direction characters as escapes such as \x1b; not newline and tab."""
    if text.isprintable():
        return text
    return "".join(_escape(c) if _is_unsafe(c) else c for c in text)


def find_lone_surrogate(text: str) -> str | None:
    """Return the first unpaired surrogate in `text`, which tokenizers cannot process; else None."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return None


def _is_unsafe(character: str) -> bool:
    if character in _KEPT_CONTROLS:
        return False
    return character in _BIDI_CONTROLS or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def with_article(word: object) -> str:
    """Return `word` with its article, by pronunciation: "an onnx", "an mpnet", "a roberta"."""
    return f"an {word}" if _TAKES_AN.match(str(word)) else f"a {word}"


def with_count(number: int, word: str) -> str:
    """Return "1 text", "2 texts"."""
    return f"{number:,} {word}{'s' * (number != 1)}"
