"""Nodes that decode tokens to strings with a table of the text of each token.

The text of a token is looked up, so a tokenizer's rules for whole texts are not covered; the comparison with
the tokenizer itself decides (`verify_tokenizer.py`).

Shapes: B = texts, T = tokens of the longest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from smelt.core.errors import InputError
from smelt.core.files import read_json_object
from smelt.export.generation_graph.graph_builder import GraphBuilder
from smelt.export.package.one_file.bert_normalizer import EXTENSIONS_DOMAIN, string_constant
from smelt.runtime.text.marian_tokenizer import MARIAN_VOCAB_FILE
from smelt.runtime.text.rust_tokenizer import TOKENIZER_FILE as JSON
from smelt.runtime.text.tokenizer_info import TokenizerInfo

_SPACE_MARK = "▁"
# all of UTF-8, which a dot is not: RE2 matches halves of surrogates and code points above the last one
_CHARACTER_PATTERN = r"[\x{0}-\x{d7ff}\x{e000}-\x{10fffe}]"


@dataclass(frozen=True)
class TokenTexts:
    """The text of each token, as bytes; special tokens are empty. strip: spaces at both ends are removed."""

    table: tuple[bytes, ...]
    strip: bool


def token_texts(folder: Path, details: TokenizerInfo, size: int) -> TokenTexts:
    """Return the texts of `size` tokens, the size of the model's output layer.

    Raises:
        InputError: this tokenizer does not simply concatenate tokens.
    """
    if details.clean_up:
        raise InputError("its tokenizer removes spaces before punctuation", code="unsupported-tokenizer")
    if details.reader == "sentencepiece":
        words = read_json_object(folder / MARIAN_VOCAB_FILE) | details.added
        found = {i: word.replace(_SPACE_MARK, " ").encode() for word, i in words.items()}
        return _make_token_texts(found, set(details.special), size, strip=True)
    said = read_json_object(folder / JSON)
    if (said.get("decoder") or {}).get("type") != "ByteLevel":
        raise InputError("its tokenizer does not use a byte-level decoder", code="unsupported-tokenizer")
    letters = _byte_level_alphabet()
    found = {i: bytes(letters[c] for c in w if c in letters) for w, i in said["model"]["vocab"].items()}
    found |= {one["id"]: one["content"].encode() for one in said["added_tokens"]}
    return _make_token_texts(
        found, {one["id"] for one in said["added_tokens"] if one["special"]}, size, strip=False
    )


def detokenize(b: GraphBuilder, tokens: str, surfaces: TokenTexts, eos: list[int]) -> str:
    """Return string [B]: the text of each row of int64 [B, T] up to its end token."""
    import onnx

    table, values = b.new_name("surfaces"), cast(Any, surfaces.table)  # onnx type stubs allow only numbers
    tensor = onnx.helper.make_tensor(table, onnx.TensorProto.STRING, [len(values)], values)
    b.initializers.append(tensor)
    ends = b.op("Equal", b.op("Unsqueeze", tokens, b.const([2])), b.const(eos or [-1]))
    over = b.op("CumSum", b.cast(b.any_of(ends, [2]), np.int64), b.const(1), exclusive=1)
    nothing = surfaces.table.index(b"")
    shown = b.op("Where", b.op("Greater", over, b.const(0)), b.const(nothing), tokens)
    parts = b.op("Gather", table, shown)
    text = b.op("StringJoin", parts, string_constant(b, ""), b.const([1]), domain=EXTENSIONS_DOMAIN)
    if surfaces.strip:  # StringStrip does not change a text of spaces only
        return regex_replace(b, text, "^ +| +$", "")
    # A model may output an incomplete character. \C is a byte, which is found where no whole character is
    # (RE2); U+FDD0 and U+FDD1 are noncharacters, so that no text has them.
    text = regex_replace(b, text, rf"({_CHARACTER_PATTERN})|\C", "\ufdd0\\1\ufdd1")
    text = regex_replace(b, text, "\ufdd0\ufdd1", "\ufdd0\ufffd\ufdd1")
    return regex_replace(b, text, "[\ufdd0\ufdd1]", "")


def regex_replace(b: GraphBuilder, text: str, pattern: str, by: str) -> str:
    """Return string [B] with all matches of `pattern` (RE2) replaced."""
    return b.op(
        "StringRegexReplace",
        text,
        string_constant(b, pattern),
        string_constant(b, by),
        domain=EXTENSIONS_DOMAIN,
    )


def _make_token_texts(found: dict[int, bytes], hidden: set[int], size: int, strip: bool) -> TokenTexts:
    table = [b"" if i in hidden else found.get(i, b"") for i in range(size)]
    return TokenTexts((*table, b""), strip)  # the last one is not a token


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary (GPT-2's `bytes_to_unicode`)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
