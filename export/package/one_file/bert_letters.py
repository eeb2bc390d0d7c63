"""What BERT does to the letters of a text before it is cut, as nodes.

The operator BertTokenizer turns no letters but Latin-1's into small ones, and takes no accents off Hangul and
others. So each letter is looked up in a table that the tokenizers library itself fills.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from smelt.export.loop.builder import Builder

DOMAIN = "ai.onnx.contrib"
# Planes without assigned letters are left out; what is private is removed by BERT, and is awkward anyway
_LETTERS = (*range(0x21, 0xD800), *range(0xE000, 0x20000), *range(0xE0000, 0xE01F0))
# the operator's own signs between entries, and what it takes itself
_LEFT = "\t\n\r"


def letter_table(normal: dict[str, Any]) -> tuple[dict[str, str], str]:
    """Return what letters become, and a pattern (RE2) of those that go; others stay what they are.

    Args:
        normal: the normalizer of a tokenizer.json, of type BertNormalizer.
    """
    from tokenizers import normalizers

    names = ("clean_text", "handle_chinese_chars", "strip_accents", "lowercase")
    bert = normalizers.BertNormalizer(**{name: normal[name] for name in names})
    table: dict[str, str] = {}
    gone: list[int] = []
    for place in _LETTERS:
        letter = chr(place)
        if letter in _LEFT:
            continue
        becomes = bert.normalize_str(letter)
        if not becomes:
            gone.append(place)
        elif becomes.strip() != letter:  # blanks around an ideograph are the operator's work
            table[letter] = becomes if becomes.strip() else " "
    return table, "[" + "".join(f"\\x{{{a:x}}}-\\x{{{b:x}}}" for a, b in _ranges(gone)) + "]"


def normalized(b: Builder, text: str, table: dict[str, str], gone: str) -> str:
    """Return string [1], the text of string [1] with each letter as `table` has it."""
    lines = "\n".join(f"{letter}\t{becomes}" for letter, becomes in table.items())
    each = strings(b, "(?s)(.)")
    kept = b.op("StringRegexReplace", text, strings(b, gone), strings(b, ""), domain=DOMAIN)
    letters = b.ops("StringRegexSplitWithOffsets", kept, each, each, outputs=4, domain=DOMAIN)[0]
    mapped = b.op("StringMapping", letters, domain=DOMAIN, map=lines)
    return b.op("StringJoin", mapped, strings(b, ""), b.const([0], np.int64), domain=DOMAIN)


def strings(b: Builder, *texts: str) -> str:
    """Return the name of a constant, string [n], of the outermost graph or of the one that `b` makes."""
    from onnx import TensorProto, helper

    name = b.name("words")
    encoded: Any = [text.encode() for text in texts]  # the stubs of onnx know numbers alone
    b.initializers.append(helper.make_tensor(name, TensorProto.STRING, [len(texts)], encoded))
    return name


def _ranges(places: Iterable[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for place in places:
        if found and found[-1][1] == place - 1:
            found[-1] = (found[-1][0], place)
        else:
            found.append((place, place))
    return found
