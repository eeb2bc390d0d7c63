"""Nodes that tokenize strings with the tokenizers of onnxruntime-extensions.

Each operator returns all tokens of a batch in one row, and the offset of each text; `pad_rows` truncates,
adds special tokens and pads as smelt does (`runtime/predict_texts.py`, `runtime/generate/prompt_batches.py`).

Shapes: B = texts, N = tokens of all of them, L = tokens of the longest row.
Source: onnxruntime-extensions 0.15, docs/custom_ops.md, operators/tokenizer/.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from smelt.core.errors import InputError
from smelt.core.files import read_json_object
from smelt.export.generation_graph.graph_builder import GraphBuilder, LoopCarried
from smelt.export.package.one_file.bert_normalizer import (
    EXTENSIONS_DOMAIN,
    normalization_table,
    normalize_text,
)
from smelt.runtime.text.marian_tokenizer import MARIAN_VOCAB_FILE, SENTENCEPIECE_FILE
from smelt.runtime.text.rust_tokenizer import TOKENIZER_FILE as JSON
from smelt.runtime.text.tokenizer import TextTokenizer
from smelt.runtime.text.tokenizer_info import TokenizerInfo

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
    said = read_json_object(folder / JSON)
    kind = said["model"].get("type")
    if kind == "WordPiece":
        return _wordpiece_nodes(said)
    if kind == "BPE":
        return _byte_level_nodes(said)
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
    behind = b.op("Unsqueeze", b.op("Slice", starts, b.const([1]), b.const([2**31 - 1])), column)
    found = b.op("Sub", behind, first)
    kept = b.op("Min", found, b.const(max(0, rows.max_text_tokens)))
    if rows.keep_end:
        first = b.op("Sub", behind, kept)
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

    def cut(b: GraphBuilder, texts: str) -> tuple[str, str]:
        none, zero = b.const([False], np.bool_), b.const([0])
        inputs = (texts, zero, b.const([0.0], np.float32), none, none, none)
        found, starts = b.ops(
            "SentencepieceTokenizer", *inputs, outputs=2, domain=EXTENSIONS_DOMAIN, model=model
        )
        return b.op("Gather", b.const(numbers), b.cast(found, np.int64)), b.cast(starts, np.int64)

    return cut


def _wordpiece_nodes(said: dict[str, Any]) -> TokenizerNodes:
    """Tokenize as BERT, text by text, because the operator accepts only a text or a pair."""
    normal, model = said.get("normalizer") or {}, said["model"]
    cuts = (said.get("pre_tokenizer") or {}).get("type")
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

    def cut(b: GraphBuilder, texts: str) -> tuple[str, str]:
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

    return cut


def _byte_level_nodes(said: dict[str, Any]) -> TokenizerNodes:
    """Tokenize with byte-level BPE and GPT-2's pre-tokenizer."""
    cuts, model = said.get("pre_tokenizer") or {}, said["model"]
    usual = cuts.get("type") == "ByteLevel" and cuts.get("use_regex", True)
    if not usual or cuts.get("add_prefix_space") or said.get("normalizer") or model.get("ignore_merges"):
        raise InputError(
            "its BPE tokenizer does not split texts into words as GPT-2's does", code="unsupported-tokenizer"
        )
    merges = "\n".join(pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
    settings = {"vocab": json.dumps(model["vocab"]), "merges": merges}

    def cut(b: GraphBuilder, texts: str) -> tuple[str, str]:
        found, mask = b.ops("GPT2Tokenizer", texts, outputs=2, domain=EXTENSIONS_DOMAIN, **settings)
        lengths = b.op("ReduceSum", mask, b.const([1]), keepdims=0)
        starts = b.op("Concat", b.const([0]), b.op("CumSum", lengths, b.const(0)), axis=0)
        whole = b.op("Reshape", found, b.const([-1]))
        kept = b.op("Compress", whole, b.cast(b.op("Reshape", mask, b.const([-1])), np.bool_), axis=0)
        return kept, starts

    return cut
