"""Nodes that turn tokens back into strings: a table of what each token adds to a text, joined.

The surface of a token is looked up, so what a tokenizer does to whole texts is no part of it; the comparison
with the tokenizer itself decides (`compare.py`).

Shapes: B = texts, T = tokens of the longest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from smelt.core.errors import InputError
from smelt.core.files import read_json
from smelt.export.loop.builder import Builder
from smelt.export.package.one_file.bert_letters import DOMAIN, strings
from smelt.runtime.text.marian_tokenizer import WORDS
from smelt.runtime.text.rust_tokenizer import FILE as JSON
from smelt.runtime.text.tokenizing_file import Tokenizing

_BLANK = "▁"
# what UTF-8 may hold, which a dot is not: RE2 takes halves of surrogates and what lies behind the last letter
_LETTER = r"[\x{0}-\x{d7ff}\x{e000}-\x{10fffe}]"


@dataclass(frozen=True)
class Surfaces:
    """What each token adds to a text, as bytes; special ones add nothing. strip: blanks at both ends go."""

    table: tuple[bytes, ...]
    strip: bool


def surfaces_of(folder: Path, details: Tokenizing, size: int) -> Surfaces:
    """Return the surfaces of `size` tokens, those of the model's output layer.

    Raises:
        InputError: the tokens of this tokenizer do not just follow one another.
    """
    if details.clean_up:
        raise InputError("its tokenizer cleans up blanks before punctuation", code="unsupported-tokenizer")
    if details.reader == "sentencepiece":
        words = read_json(folder / WORDS) | details.added
        found = {i: word.replace(_BLANK, " ").encode() for word, i in words.items()}
        return _filled(found, set(details.special), size, strip=True)
    said = read_json(folder / JSON)
    if (said.get("decoder") or {}).get("type") != "ByteLevel":
        raise InputError("its tokenizer does not put texts together from bytes", code="unsupported-tokenizer")
    letters = _letters()
    found = {i: bytes(letters[c] for c in w if c in letters) for w, i in said["model"]["vocab"].items()}
    found |= {one["id"]: one["content"].encode() for one in said["added_tokens"]}
    return _filled(found, {one["id"] for one in said["added_tokens"] if one["special"]}, size, strip=False)


def joined(b: Builder, tokens: str, surfaces: Surfaces, eos: list[int]) -> str:
    """Return string [B], the text of each row of int64 [B, T] up to the token that ends it."""
    import onnx

    table, values = b.name("surfaces"), cast(Any, surfaces.table)  # the stubs of onnx know numbers alone
    tensor = onnx.helper.make_tensor(table, onnx.TensorProto.STRING, [len(values)], values)
    b.initializers.append(tensor)
    ends = b.op("Equal", b.op("Unsqueeze", tokens, b.const([2])), b.const(eos or [-1]))
    over = b.op("CumSum", b.cast(b.any_of(ends, [2]), np.int64), b.const(1), exclusive=1)
    nothing = surfaces.table.index(b"")
    shown = b.op("Where", b.op("Greater", over, b.const(0)), b.const(nothing), tokens)
    parts = b.op("Gather", table, shown)
    text = b.op("StringJoin", parts, strings(b, ""), b.const([1]), domain=DOMAIN)
    if surfaces.strip:  # StringStrip leaves a text of blanks alone as it is
        return replaced(b, text, "^ +| +$", "")
    # A model may leave a letter broken. \C is a byte, which is found where no whole letter is (RE2);
    # U+FDD0 and U+FDD1 are no letters, so that no text has them.
    text = replaced(b, text, rf"({_LETTER})|\C", "\ufdd0\\1\ufdd1")
    text = replaced(b, text, "\ufdd0\ufdd1", "\ufdd0\ufffd\ufdd1")
    return replaced(b, text, "[\ufdd0\ufdd1]", "")


def replaced(b: Builder, text: str, pattern: str, by: str) -> str:
    """Return string [B] with all that `pattern` (RE2) finds replaced."""
    return b.op("StringRegexReplace", text, strings(b, pattern), strings(b, by), domain=DOMAIN)


def _filled(found: dict[int, bytes], hidden: set[int], size: int, strip: bool) -> Surfaces:
    table = [b"" if i in hidden else found.get(i, b"") for i in range(size)]
    return Surfaces((*table, b""), strip)  # the last one is no token


def _letters() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for (GPT-2's `bytes_to_unicode`)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
