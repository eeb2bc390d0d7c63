"""Nodes that tokenize strings with the tokenizers of onnxruntime-extensions, and decode tokens to strings.

Each tokenizer operator returns all tokens of a batch in one row, and the offset of each text; `pad_rows`
truncates, adds special tokens and pads as smelt does (`smelt/runtimes/predict_texts.py`,
`smelt/generation/prompt_batches.py`).

Before BertTokenizer, nodes normalize the characters of a text as BERT does: the operator lowercases only
Latin-1, and does not strip accents of Hangul and others. So each character is looked up in a table that is
computed with the tokenizers library.

Decoding looks up the text of each token in a table, so a tokenizer's rules for whole texts are not covered;
the comparison with the tokenizer itself decides (`text_graph.py`).

Shapes: B = texts, N = tokens of all of them, L = tokens of the longest row; T = tokens of the longest output.
Source: onnxruntime-extensions 0.15, docs/custom_ops.md, operators/tokenizer/.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from smelt.core.errors import InputError
from smelt.core.files import read_json_object
from smelt.export.generation_graph.graph_builder import GraphBuilder, LoopCarried
from smelt.models.tokenizer import MARIAN_VOCAB_FILE, SENTENCEPIECE_FILE, TextTokenizer, TokenizerInfo
from smelt.models.tokenizer import TOKENIZER_FILE as JSON

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
    encoded: Any = [text.encode() for text in texts]  # the type stubs of onnx only have numbers
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


# called with a builder and the name of string [B]; returns int64 [N] and int64 [B + 1]
TokenizerNodes = Callable[[GraphBuilder, str], tuple[str, str]]


@dataclass(frozen=True)
class RowLayout:
    """How tokens become rows.

    prefix_tokens, suffix_tokens: special tokens around a text. max_text_tokens: tokens of a text itself.
    pad: padding token, on the left if `pad_left`. keep_end: whether a long text is truncated at its start.
    empty_token: replaces a text without tokens; None: not replaced.
    """

    prefix_tokens: tuple[int, ...]
    suffix_tokens: tuple[int, ...]
    max_text_tokens: int
    pad: int
    pad_left: bool = False
    keep_end: bool = False
    empty_token: int | None = None


def tokenizer_nodes(folder: Path, details: TokenizerInfo) -> TokenizerNodes:
    """Return the nodes of the tokenizer in `folder`.

    Raises:
        InputError: onnxruntime-extensions has no operator for it; the message names it.
    """
    if details.reader == "transformers":
        raise InputError(f"its tokenizer needs transformers ({details.reason})", code="unsupported-tokenizer")
    if details.reader == "sentencepiece":
        return _sentencepiece_nodes(folder, details)
    content = read_json_object(folder / JSON)
    kind = content["model"].get("type")
    if kind == "WordPiece":
        return _wordpiece_nodes(content)
    if kind == "BPE":
        return _byte_level_nodes(content)
    raise InputError(
        f"its tokenizer is of type {kind} in {JSON}, which no operator computes exactly",
        code="unsupported-tokenizer",
    )


def special_tokens_around(tokenizer: TextTokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the special tokens that `tokenizer` adds before and after a text."""
    alone, word = tokenizer.encode_batch(["", "a"], 10**6).ids
    for first in range(len(alone) + 1):
        if word[:first] == alone[:first] and word[len(word) - len(alone) + first :] == alone[first:]:
            return tuple(alone[:first]), tuple(alone[first:])
    raise InputError(
        "its tokenizer adds different special tokens to an empty text than to a word",
        code="unsupported-tokenizer",
    )


def pad_rows(b: GraphBuilder, flat: str, starts: str, rows: RowLayout) -> tuple[str, str]:
    """Return `input_ids` and `attention_mask`, int64 [B, L], of tokenized texts."""
    zero, one = b.const(0), b.const(1)
    column = b.const([1])
    first = b.op("Unsqueeze", b.op("Slice", starts, b.const([0]), b.const([-1])), column)
    ends = b.op("Unsqueeze", b.op("Slice", starts, b.const([1]), b.const([2**31 - 1])), column)
    found = b.op("Sub", ends, first)
    kept = b.op("Min", found, b.const(max(0, rows.max_text_tokens)))
    if rows.keep_end:
        first = b.op("Sub", ends, kept)
    shown = kept if rows.empty_token is None else b.op("Max", kept, one)
    total = b.op("Add", shown, b.const(len(rows.prefix_tokens) + len(rows.suffix_tokens)))
    length = b.op("Max", b.op("ReduceMax", total, keepdims=0), one)
    place = b.op("Unsqueeze", b.op("Range", zero, length, one), b.const([0]))
    if rows.pad_left:
        place = b.op("Sub", place, b.op("Sub", length, total))
    inner = b.op("Sub", place, b.const(len(rows.prefix_tokens)))
    tokens = b.op("Concat", flat, b.const([rows.pad]), axis=0)
    last = b.op("Sub", b.dimension(tokens, 0), one)
    at = b.op("Min", b.op("Max", b.op("Add", first, inner), zero), last)
    ids = b.op("Gather", tokens, at)
    if rows.empty_token is not None:
        ids = b.op("Where", b.op("Equal", kept, zero), b.const(rows.empty_token), ids)
    ids = b.op(
        "Where",
        b.op("Less", inner, shown),
        ids,
        _edge_tokens(b, b.op("Sub", inner, shown), rows.suffix_tokens, rows),
    )
    ids = b.op("Where", b.op("Less", inner, zero), _edge_tokens(b, place, rows.prefix_tokens, rows), ids)
    inside = b.op("And", b.op("GreaterOrEqual", place, zero), b.op("Less", place, total))
    return b.op("Where", inside, ids, b.const(rows.pad)), b.cast(inside, np.int64)


def _edge_tokens(b: GraphBuilder, place: str, tokens: tuple[int, ...], rows: RowLayout) -> str:
    """Return the special token at each position; an arbitrary one where there is none."""
    table = b.const([*tokens, rows.pad])
    return b.op("Gather", table, b.op("Min", b.op("Max", place, b.const(0)), b.const(len(tokens))))


def _sentencepiece_nodes(folder: Path, details: TokenizerInfo) -> TokenizerNodes:
    """Tokenize as Marian: pieces of source.spm, mapped to the ids of vocab.json."""
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / SENTENCEPIECE_FILE))
    words = read_json_object(folder / MARIAN_VOCAB_FILE) | details.added
    if any(word.startswith(">>") and word.endswith("<<") for word in words):
        raise InputError(
            "its texts begin with a language code (>>deu<<), which no operator supports",
            code="unsupported-tokenizer",
        )
    numbers = [words.get(pieces.id_to_piece(i), details.unknown) for i in range(len(pieces))]
    model = (folder / SENTENCEPIECE_FILE).read_bytes()

    def add_nodes(b: GraphBuilder, texts: str) -> tuple[str, str]:
        none, zero = b.const([False], np.bool_), b.const([0])
        inputs = (texts, zero, b.const([0.0], np.float32), none, none, none)
        found, starts = b.ops(
            "SentencepieceTokenizer", *inputs, outputs=2, domain=EXTENSIONS_DOMAIN, model=model
        )
        return b.op("Gather", b.const(numbers), b.cast(found, np.int64)), b.cast(starts, np.int64)

    return add_nodes


def _wordpiece_nodes(content: dict[str, Any]) -> TokenizerNodes:
    """Tokenize as BERT, text by text, because the operator accepts only a text or a pair."""
    normal, model = content.get("normalizer") or {}, content["model"]
    cuts = (content.get("pre_tokenizer") or {}).get("type")
    if normal.get("type") != "BertNormalizer" or cuts != "BertPreTokenizer" or not normal["clean_text"]:
        raise InputError(
            "its WordPiece tokenizer does not normalize texts as BERT does", code="unsupported-tokenizer"
        )
    table, gone = normalization_table(normal)
    words = sorted(model["vocab"], key=model["vocab"].get)
    if [model["vocab"][word] for word in words] != list(range(len(words))):
        raise InputError("the ids of its vocabulary have gaps", code="vocabulary-gaps")
    settings = {
        "vocab_file": "\n".join(words),
        "do_lower_case": 0,
        "strip_accents": 0,
        "tokenize_chinese_chars": int(normal["handle_chinese_chars"]),
        "unk_token": model["unk_token"],
        "suffix_indicator": model["continuing_subword_prefix"],
    }
    # the operator always adds two special tokens around a text; they are removed
    settings |= {"cls_token": words[0], "sep_token": words[0], "pad_token": words[0], "mask_token": words[0]}

    def add_nodes(b: GraphBuilder, texts: str) -> tuple[str, str]:
        def step(inside: GraphBuilder, number: str, carried: list[str]) -> tuple[str, list[str]]:
            text = inside.op("Unsqueeze", inside.op("Gather", texts, number), inside.const([0]))
            text = normalize_text(inside, text, table, gone)
            found = inside.ops("BertTokenizer", text, outputs=3, domain=EXTENSIONS_DOMAIN, **settings)[0]
            tokens = inside.op("Slice", found, inside.const([1]), inside.const([-1]))
            flat = inside.op("Concat", carried[0], tokens, axis=0)
            ends = inside.op("Concat", carried[1], inside.row_count(flat), axis=0)
            return inside.const(True, np.bool_), [flat, ends]

        nothing = b.const(np.zeros(0, dtype=np.int64))
        carried = (
            LoopCarried("tokens", nothing, np.int64, (None,)),
            LoopCarried("ends", b.const([0]), np.int64, (None,)),
        )
        flat, ends = b.loop("texts", b.dimension(texts, 0), carried, step)
        return flat, ends

    return add_nodes


def _byte_level_nodes(content: dict[str, Any]) -> TokenizerNodes:
    """Tokenize with byte-level BPE and GPT-2's pre-tokenizer."""
    cuts, model = content.get("pre_tokenizer") or {}, content["model"]
    usual = cuts.get("type") == "ByteLevel" and cuts.get("use_regex", True)
    if not usual or cuts.get("add_prefix_space") or content.get("normalizer") or model.get("ignore_merges"):
        raise InputError(
            "its BPE tokenizer does not split texts into words as GPT-2's does", code="unsupported-tokenizer"
        )
    merges = "\n".join(pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
    settings = {"vocab": json.dumps(model["vocab"]), "merges": merges}

    def add_nodes(b: GraphBuilder, texts: str) -> tuple[str, str]:
        found, mask = b.ops("GPT2Tokenizer", texts, outputs=2, domain=EXTENSIONS_DOMAIN, **settings)
        lengths = b.op("ReduceSum", mask, b.const([1]), keepdims=0)
        starts = b.op("Concat", b.const([0]), b.op("CumSum", lengths, b.const(0)), axis=0)
        whole = b.op("Reshape", found, b.const([-1]))
        kept = b.op("Compress", whole, b.cast(b.op("Reshape", mask, b.const([-1])), np.bool_), axis=0)
        return kept, starts

    return add_nodes


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
    content = read_json_object(folder / JSON)
    if (content.get("decoder") or {}).get("type") != "ByteLevel":
        raise InputError("its tokenizer does not use a byte-level decoder", code="unsupported-tokenizer")
    letters = _byte_level_alphabet()
    found = {i: bytes(letters[c] for c in w if c in letters) for w, i in content["model"]["vocab"].items()}
    found |= {token["id"]: token["content"].encode() for token in content["added_tokens"]}
    return _make_token_texts(
        found, {token["id"] for token in content["added_tokens"] if token["special"]}, size, strip=False
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
    remaining = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(remaining)}
