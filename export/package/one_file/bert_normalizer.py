"""Normalize the characters of a text as BERT does before tokenizing, as nodes.

The operator BertTokenizer lowercases only Latin-1, and does not strip accents of Hangul and others. So each
character is looked up in a table that is computed with the tokenizers library.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from smelt.export.generation_graph.graph_builder import GraphBuilder

EXTENSIONS_DOMAIN = "ai.onnx.contrib"
# Planes without assigned characters are left out; BERT removes private ones, which are edge cases
_CODE_POINTS = (*range(0x21, 0xD800), *range(0xE000, 0x20000), *range(0xE0000, 0xE01F0))
# the operator's own separators, and characters that it removes itself
_KEPT_CONTROLS = "\t\n\r"


def normalization_table(normal: dict[str, Any]) -> tuple[dict[str, str], str]:
    """Return a map of replaced characters, and a pattern (RE2) of removed ones; others do not change.

    Args:
        normal: the normalizer of a tokenizer.json, of type BertNormalizer.
    """
    from tokenizers import normalizers

    names = ("clean_text", "handle_chinese_chars", "strip_accents", "lowercase")
    bert = normalizers.BertNormalizer(**{name: normal[name] for name in names})
    table: dict[str, str] = {}
    gone: list[int] = []
    for place in _CODE_POINTS:
        letter = chr(place)
        if letter in _KEPT_CONTROLS:
            continue
        becomes = bert.normalize_str(letter)
        if not becomes:
            gone.append(place)
        elif becomes.strip() != letter:  # the operator itself adds spaces around ideographs
            table[letter] = becomes if becomes.strip() else " "
    return table, "[" + "".join(f"\\x{{{a:x}}}-\\x{{{b:x}}}" for a, b in _code_point_ranges(gone)) + "]"


def normalize_text(b: GraphBuilder, text: str, table: dict[str, str], gone: str) -> str:
    """Return string [1]: the text of string [1] with each character replaced by `table`."""
    lines = "\n".join(f"{letter}\t{becomes}" for letter, becomes in table.items())
    each = string_constant(b, "(?s)(.)")
    kept = b.op(
        "StringRegexReplace", text, string_constant(b, gone), string_constant(b, ""), domain=EXTENSIONS_DOMAIN
    )
    letters = b.ops("StringRegexSplitWithOffsets", kept, each, each, outputs=4, domain=EXTENSIONS_DOMAIN)[0]
    mapped = b.op("StringMapping", letters, domain=EXTENSIONS_DOMAIN, map=lines)
    return b.op(
        "StringJoin", mapped, string_constant(b, ""), b.const([0], np.int64), domain=EXTENSIONS_DOMAIN
    )


def string_constant(b: GraphBuilder, *texts: str) -> str:
    """Return the name of a constant, string [n], of the outermost graph or of the one that `b` builds."""
    from onnx import TensorProto, helper

    name = b.new_name("words")
    encoded: Any = [text.encode() for text in texts]  # the type stubs of onnx only know numbers
    b.initializers.append(helper.make_tensor(name, TensorProto.STRING, [len(texts)], encoded))
    return name


def _code_point_ranges(places: Iterable[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for place in places:
        if found and found[-1][1] == place - 1:
            found[-1] = (found[-1][0], place)
        else:
            found.append((place, place))
    return found
