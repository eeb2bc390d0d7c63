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
    removed: list[int] = []
    for code_point in _CODE_POINTS:
        character = chr(code_point)
        if character in _KEPT_CONTROLS:
            continue
        becomes = bert.normalize_str(character)
        if not becomes:
            removed.append(code_point)
        elif becomes.strip() != character:  # the operator itself adds spaces around ideographs
            table[character] = becomes if becomes.strip() else " "
    return table, "[" + "".join(f"\\x{{{a:x}}}-\\x{{{b:x}}}" for a, b in _code_point_ranges(removed)) + "]"


def normalize_text(b: GraphBuilder, text: str, table: dict[str, str], removed: str) -> str:
    """Return string [1]: the text of string [1] with each character replaced by `table`."""
    lines = "\n".join(f"{character}\t{becomes}" for character, becomes in table.items())
    any_character = string_constant(b, "(?s)(.)")
    filtered = b.op(
        "StringRegexReplace",
        text,
        string_constant(b, removed),
        string_constant(b, ""),
        domain=EXTENSIONS_DOMAIN,
    )
    characters = b.ops(
        "StringRegexSplitWithOffsets",
        filtered,
        any_character,
        any_character,
        outputs=4,
        domain=EXTENSIONS_DOMAIN,
    )[0]
    mapped = b.op("StringMapping", characters, domain=EXTENSIONS_DOMAIN, map=lines)
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
    ranges: list[tuple[int, int]] = []
    for code_point in places:
        if ranges and ranges[-1][1] == code_point - 1:
            ranges[-1] = (ranges[-1][0], code_point)
        else:
            ranges.append((code_point, code_point))
    return ranges


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
    empty_row, word_row = tokenizer.encode_batch(["", "a"], 10**6).ids
    for first in range(len(empty_row) + 1):
        if (
            word_row[:first] == empty_row[:first]
            and word_row[len(word_row) - len(empty_row) + first :] == empty_row[first:]
        ):
            return tuple(empty_row[:first]), tuple(empty_row[first:])
    raise InputError(
        "its tokenizer adds different special tokens to an empty text than to a word",
        code="unsupported-tokenizer",
    )


def pad_rows(b: GraphBuilder, flat: str, starts: str, layout: RowLayout) -> tuple[str, str]:
    """Return `input_ids` and `attention_mask`, int64 [B, L], of tokenized texts."""
    zero, one_constant = b.const(0), b.const(1)
    column = b.const([1])
    first = b.op("Unsqueeze", b.op("Slice", starts, b.const([0]), b.const([-1])), column)
    ends = b.op("Unsqueeze", b.op("Slice", starts, b.const([1]), b.const([2**31 - 1])), column)
    token_counts = b.op("Sub", ends, first)
    kept_counts = b.op("Min", token_counts, b.const(max(0, layout.max_text_tokens)))
    if layout.keep_end:
        first = b.op("Sub", ends, kept_counts)
    visible_counts = kept_counts if layout.empty_token is None else b.op("Max", kept_counts, one_constant)
    total = b.op("Add", visible_counts, b.const(len(layout.prefix_tokens) + len(layout.suffix_tokens)))
    length = b.op("Max", b.op("ReduceMax", total, keepdims=0), one_constant)
    positions = b.op("Unsqueeze", b.op("Range", zero, length, one_constant), b.const([0]))
    if layout.pad_left:
        positions = b.op("Sub", positions, b.op("Sub", length, total))
    inner = b.op("Sub", positions, b.const(len(layout.prefix_tokens)))
    tokens = b.op("Concat", flat, b.const([layout.pad]), axis=0)
    last = b.op("Sub", b.dimension(tokens, 0), one_constant)
    source_index = b.op("Min", b.op("Max", b.op("Add", first, inner), zero), last)
    ids = b.op("Gather", tokens, source_index)
    if layout.empty_token is not None:
        ids = b.op("Where", b.op("Equal", kept_counts, zero), b.const(layout.empty_token), ids)
    ids = b.op(
        "Where",
        b.op("Less", inner, visible_counts),
        ids,
        _edge_tokens(b, b.op("Sub", inner, visible_counts), layout.suffix_tokens, layout),
    )
    ids = b.op(
        "Where", b.op("Less", inner, zero), _edge_tokens(b, positions, layout.prefix_tokens, layout), ids
    )
    is_token = b.op("And", b.op("GreaterOrEqual", positions, zero), b.op("Less", positions, total))
    return b.op("Where", is_token, ids, b.const(layout.pad)), b.cast(is_token, np.int64)


def _edge_tokens(b: GraphBuilder, position: str, tokens: tuple[int, ...], layout: RowLayout) -> str:
    """Return the special token at each position; an arbitrary one where there is none."""
    table = b.const([*tokens, layout.pad])
    return b.op("Gather", table, b.op("Min", b.op("Max", position, b.const(0)), b.const(len(tokens))))


def _sentencepiece_nodes(folder: Path, details: TokenizerInfo) -> TokenizerNodes:
    """Tokenize as Marian: pieces of source.spm, mapped to the ids of vocab.json."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / SENTENCEPIECE_FILE))
    token_ids = read_json_object(folder / MARIAN_VOCAB_FILE) | details.added
    if any(token.startswith(">>") and token.endswith("<<") for token in token_ids):
        raise InputError(
            "its texts begin with a language code (>>deu<<), which no operator supports",
            code="unsupported-tokenizer",
        )
    id_by_piece = [token_ids.get(processor.id_to_piece(i), details.unknown) for i in range(len(processor))]
    model = (folder / SENTENCEPIECE_FILE).read_bytes()

    def add_nodes(b: GraphBuilder, texts: str) -> tuple[str, str]:
        none, zero = b.const([False], np.bool_), b.const([0])
        inputs = (texts, zero, b.const([0.0], np.float32), none, none, none)
        piece_ids, starts = b.ops(
            "SentencepieceTokenizer", *inputs, outputs=2, domain=EXTENSIONS_DOMAIN, model=model
        )
        return b.op("Gather", b.const(id_by_piece), b.cast(piece_ids, np.int64)), b.cast(starts, np.int64)

    return add_nodes


def _wordpiece_nodes(content: dict[str, Any]) -> TokenizerNodes:
    """Tokenize as BERT, text by text, because the operator accepts only a text or a pair."""
    normal, model = content.get("normalizer") or {}, content["model"]
    cuts = (content.get("pre_tokenizer") or {}).get("type")
    if normal.get("type") != "BertNormalizer" or cuts != "BertPreTokenizer" or not normal["clean_text"]:
        raise InputError(
            "its WordPiece tokenizer does not normalize texts as BERT does", code="unsupported-tokenizer"
        )
    table, removed_characters = normalization_table(normal)
    vocabulary = sorted(model["vocab"], key=model["vocab"].get)
    if [model["vocab"][vocabulary_token] for vocabulary_token in vocabulary] != list(range(len(vocabulary))):
        raise InputError("the ids of its vocabulary have gaps", code="vocabulary-gaps")
    settings = {
        "vocab_file": "\n".join(vocabulary),
        "do_lower_case": 0,
        "strip_accents": 0,
        "tokenize_chinese_chars": int(normal["handle_chinese_chars"]),
        "unk_token": model["unk_token"],
        "suffix_indicator": model["continuing_subword_prefix"],
    }
    # the operator always adds two special tokens around a text; they are removed
    settings |= {
        "cls_token": vocabulary[0],
        "sep_token": vocabulary[0],
        "pad_token": vocabulary[0],
        "mask_token": vocabulary[0],
    }

    def add_nodes(b: GraphBuilder, texts: str) -> tuple[str, str]:
        def step(inside: GraphBuilder, number: str, carried: list[str]) -> tuple[str, list[str]]:
            text = inside.op("Unsqueeze", inside.op("Gather", texts, number), inside.const([0]))
            text = normalize_text(inside, text, table, removed_characters)
            token_ids = inside.ops("BertTokenizer", text, outputs=3, domain=EXTENSIONS_DOMAIN, **settings)[0]
            tokens = inside.op("Slice", token_ids, inside.const([1]), inside.const([-1]))
            flat = inside.op("Concat", carried[0], tokens, axis=0)
            ends = inside.op("Concat", carried[1], inside.row_count(flat), axis=0)
            return inside.const(True, np.bool_), [flat, ends]

        nothing = b.const(np.zeros(0, dtype=np.int64))
        loop_values = (
            LoopCarried("tokens", nothing, np.int64, (None,)),
            LoopCarried("ends", b.const([0]), np.int64, (None,)),
        )
        flat, ends = b.loop("texts", b.dimension(texts, 0), loop_values, step)
        return flat, ends

    return add_nodes


def _byte_level_nodes(content: dict[str, Any]) -> TokenizerNodes:
    """Tokenize with byte-level BPE and GPT-2's pre-tokenizer."""
    cuts, model = content.get("pre_tokenizer") or {}, content["model"]
    is_standard = cuts.get("type") == "ByteLevel" and cuts.get("use_regex", True)
    if (
        not is_standard
        or cuts.get("add_prefix_space")
        or content.get("normalizer")
        or model.get("ignore_merges")
    ):
        raise InputError(
            "its BPE tokenizer does not split texts into words as GPT-2's does", code="unsupported-tokenizer"
        )
    merges = "\n".join(pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
    settings = {"vocab": json.dumps(model["vocab"]), "merges": merges}

    def add_nodes(b: GraphBuilder, texts: str) -> tuple[str, str]:
        token_ids, mask = b.ops("GPT2Tokenizer", texts, outputs=2, domain=EXTENSIONS_DOMAIN, **settings)
        lengths = b.op("ReduceSum", mask, b.const([1]), keepdims=0)
        starts = b.op("Concat", b.const([0]), b.op("CumSum", lengths, b.const(0)), axis=0)
        flat_ids = b.op("Reshape", token_ids, b.const([-1]))
        unpadded_ids = b.op(
            "Compress", flat_ids, b.cast(b.op("Reshape", mask, b.const([-1])), np.bool_), axis=0
        )
        return unpadded_ids, starts

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
        token_ids = read_json_object(folder / MARIAN_VOCAB_FILE) | details.added
        text_by_id = {i: token_text.replace(_SPACE_MARK, " ").encode() for token_text, i in token_ids.items()}
        return _make_token_texts(text_by_id, set(details.special), size, strip=True)
    content = read_json_object(folder / JSON)
    if (content.get("decoder") or {}).get("type") != "ByteLevel":
        raise InputError("its tokenizer does not use a byte-level decoder", code="unsupported-tokenizer")
    alphabet = _byte_level_alphabet()
    text_by_id = {
        i: bytes(alphabet[c] for c in w if c in alphabet) for w, i in content["model"]["vocab"].items()
    }
    text_by_id |= {token["id"]: token["content"].encode() for token in content["added_tokens"]}
    return _make_token_texts(
        text_by_id, {token["id"] for token in content["added_tokens"] if token["special"]}, size, strip=False
    )


def detokenize(b: GraphBuilder, tokens: str, surfaces: TokenTexts, eos: list[int]) -> str:
    """Return string [B]: the text of each row of int64 [B, T] up to its end token."""
    import onnx

    table, values = b.new_name("surfaces"), cast("Any", surfaces.table)  # onnx type stubs allow only numbers
    tensor = onnx.helper.make_tensor(table, onnx.TensorProto.STRING, [len(values)], values)
    b.initializers.append(tensor)
    ends = b.op("Equal", b.op("Unsqueeze", tokens, b.const([2])), b.const(eos or [-1]))
    num_ended = b.op("CumSum", b.cast(b.any_of(ends, [2]), np.int64), b.const(1), exclusive=1)
    nothing = surfaces.table.index(b"")
    visible_tokens = b.op("Where", b.op("Greater", num_ended, b.const(0)), b.const(nothing), tokens)
    parts = b.op("Gather", table, visible_tokens)
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


def _make_token_texts(token_bytes: dict[int, bytes], hidden: set[int], size: int, strip: bool) -> TokenTexts:
    table = [b"" if i in hidden else token_bytes.get(i, b"") for i in range(size)]
    return TokenTexts((*table, b""), strip)  # the last one is not a token


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    remaining = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(remaining)}
