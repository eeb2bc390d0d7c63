"""Nodes that turn strings into tokens: the tokenizers of onnxruntime-extensions, as an artifact's needs them.

Each gives all tokens of a batch in one row, and where each text begins there; `dense` cuts, adds special
tokens and pads, as smelt does it (`runtime/predict.py`, `runtime/generate/prompts.py`).

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
from smelt.core.files import read_json
from smelt.export.loop.builder import Builder, Carried
from smelt.export.package.one_file.bert_letters import DOMAIN, letter_table, normalized
from smelt.runtime.text.marian_tokenizer import PIECES, WORDS
from smelt.runtime.text.rust_tokenizer import FILE as JSON
from smelt.runtime.text.tokenizer import TextTokenizer
from smelt.runtime.text.tokenizing_file import Tokenizing

# given a builder and the name of string [B], makes int64 [N] and int64 [B + 1]
Cutter = Callable[[Builder, str], tuple[str, str]]


@dataclass(frozen=True)
class Rows:
    """How tokens become rows. before, after: special tokens around a text. room: tokens of a text itself.

    pad: fills up, on the `left` or on the right. keeps_end: whether of a long text the end stays. empty: what
    stands for a text without any token; None: nothing does.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    room: int
    pad: int
    left: bool = False
    keeps_end: bool = False
    empty: int | None = None


def cutter_of(folder: Path, details: Tokenizing) -> Cutter:
    """Return what makes the nodes of the tokenizer in `folder`.

    Raises:
        InputError: onnxruntime-extensions has no operator for it; the message says what it is.
    """
    if details.reader == "transformers":
        raise InputError(
            f"its texts are read by transformers ({details.reason})", code="unsupported-tokenizer"
        )
    if details.reader == "sentencepiece":
        return _sentencepiece(folder, details)
    said = read_json(folder / JSON)
    kind = said["model"].get("type")
    if kind == "WordPiece":
        return _wordpiece(said)
    if kind == "BPE":
        return _byte_level(said)
    raise InputError(
        f"its tokenizer is a {kind} one in {JSON}, for which there is no operator that is exact",
        code="unsupported-tokenizer",
    )


def specials_of(tokenizer: TextTokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the special tokens that `tokenizer` puts before and behind a text."""
    alone, word = tokenizer.encode_rows(["", "a"], 10**6).ids
    for first in range(len(alone) + 1):
        if word[:first] == alone[:first] and word[len(word) - len(alone) + first :] == alone[first:]:
            return tuple(alone[:first]), tuple(alone[first:])
    raise InputError(
        "its tokenizer puts other special tokens around an empty text than around a word",
        code="unsupported-tokenizer",
    )


def dense(b: Builder, flat: str, starts: str, rows: Rows) -> tuple[str, str]:
    """Return `input_ids` and `attention_mask`, int64 [B, L], of texts as a `Cutter` gives them."""
    zero, one = b.const(0), b.const(1)
    column = b.const([1])
    first = b.op("Unsqueeze", b.op("Slice", starts, b.const([0]), b.const([-1])), column)
    behind = b.op("Unsqueeze", b.op("Slice", starts, b.const([1]), b.const([2**31 - 1])), column)
    found = b.op("Sub", behind, first)
    kept = b.op("Min", found, b.const(max(0, rows.room)))
    if rows.keeps_end:
        first = b.op("Sub", behind, kept)
    shown = kept if rows.empty is None else b.op("Max", kept, one)
    total = b.op("Add", shown, b.const(len(rows.before) + len(rows.after)))
    length = b.op("Max", b.op("ReduceMax", total, keepdims=0), one)
    place = b.op("Unsqueeze", b.op("Range", zero, length, one), b.const([0]))
    if rows.left:
        place = b.op("Sub", place, b.op("Sub", length, total))
    inner = b.op("Sub", place, b.const(len(rows.before)))
    tokens = b.op("Concat", flat, b.const([rows.pad]), axis=0)
    last = b.op("Sub", b.size(tokens, 0), one)
    at = b.op("Min", b.op("Max", b.op("Add", first, inner), zero), last)
    ids = b.op("Gather", tokens, at)
    if rows.empty is not None:
        ids = b.op("Where", b.op("Equal", kept, zero), b.const(rows.empty), ids)
    ids = b.op(
        "Where", b.op("Less", inner, shown), ids, _edge(b, b.op("Sub", inner, shown), rows.after, rows)
    )
    ids = b.op("Where", b.op("Less", inner, zero), _edge(b, place, rows.before, rows), ids)
    inside = b.op("And", b.op("GreaterOrEqual", place, zero), b.op("Less", place, total))
    return b.op("Where", inside, ids, b.const(rows.pad)), b.cast(inside, np.int64)


def _edge(b: Builder, place: str, tokens: tuple[int, ...], rows: Rows) -> str:
    """Return the token of `tokens` at each place; any one where there is none."""
    table = b.const([*tokens, rows.pad])
    return b.op("Gather", table, b.op("Min", b.op("Max", place, b.const(0)), b.const(len(tokens))))


def _sentencepiece(folder: Path, details: Tokenizing) -> Cutter:
    """Marian's: pieces of source.spm, looked up in vocab.json, whose numbers are others."""
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / PIECES))
    words = read_json(folder / WORDS) | details.added
    if any(word.startswith(">>") and word.endswith("<<") for word in words):
        raise InputError(
            "its texts begin with the code of a language (>>deu<<), which no operator reads",
            code="unsupported-tokenizer",
        )
    numbers = [words.get(pieces.id_to_piece(i), details.unknown) for i in range(len(pieces))]
    model = (folder / PIECES).read_bytes()

    def cut(b: Builder, texts: str) -> tuple[str, str]:
        none, zero = b.const([False], np.bool_), b.const([0])
        inputs = (texts, zero, b.const([0.0], np.float32), none, none, none)
        found, starts = b.ops("SentencepieceTokenizer", *inputs, outputs=2, domain=DOMAIN, model=model)
        return b.op("Gather", b.const(numbers), b.cast(found, np.int64)), b.cast(starts, np.int64)

    return cut


def _wordpiece(said: dict[str, Any]) -> Cutter:
    """BERT's, text by text, since the operator takes no more than a text or a pair."""
    normal, model = said.get("normalizer") or {}, said["model"]
    cuts = (said.get("pre_tokenizer") or {}).get("type")
    if normal.get("type") != "BertNormalizer" or cuts != "BertPreTokenizer" or not normal["clean_text"]:
        raise InputError(
            "its WordPiece tokenizer does not prepare texts as BERT does", code="unsupported-tokenizer"
        )
    table, gone = letter_table(normal)
    words = sorted(model["vocab"], key=model["vocab"].get)
    if [model["vocab"][word] for word in words] != list(range(len(words))):
        raise InputError("the numbers of its vocabulary have gaps", code="vocabulary-gaps")
    settings = {
        "vocab_file": "\n".join(words),
        "do_lower_case": 0,
        "strip_accents": 0,
        "tokenize_chinese_chars": int(normal["handle_chinese_chars"]),
        "unk_token": model["unk_token"],
        "suffix_indicator": model["continuing_subword_prefix"],
    }
    # the operator puts two tokens around a text, whatever these are; they are taken off again
    settings |= {"cls_token": words[0], "sep_token": words[0], "pad_token": words[0], "mask_token": words[0]}

    def cut(b: Builder, texts: str) -> tuple[str, str]:
        def step(inside: Builder, number: str, carried: list[str]) -> tuple[str, list[str]]:
            text = inside.op("Unsqueeze", inside.op("Gather", texts, number), inside.const([0]))
            text = normalized(inside, text, table, gone)
            found = inside.ops("BertTokenizer", text, outputs=3, domain=DOMAIN, **settings)[0]
            tokens = inside.op("Slice", found, inside.const([1]), inside.const([-1]))
            flat = inside.op("Concat", carried[0], tokens, axis=0)
            ends = inside.op("Concat", carried[1], inside.rows(flat), axis=0)
            return inside.const(True, np.bool_), [flat, ends]

        nothing = b.const(np.zeros(0, dtype=np.int64))
        carried = (
            Carried("tokens", nothing, np.int64, (None,)),
            Carried("ends", b.const([0]), np.int64, (None,)),
        )
        flat, ends = b.loop("texts", b.size(texts, 0), carried, step)
        return flat, ends

    return cut


def _byte_level(said: dict[str, Any]) -> Cutter:
    """GPT-2's bytes as letters, merged; its own way to cut into words."""
    cuts, model = said.get("pre_tokenizer") or {}, said["model"]
    usual = cuts.get("type") == "ByteLevel" and cuts.get("use_regex", True)
    if not usual or cuts.get("add_prefix_space") or said.get("normalizer") or model.get("ignore_merges"):
        raise InputError(
            "its BPE tokenizer does not cut texts into words as GPT-2's does", code="unsupported-tokenizer"
        )
    merges = "\n".join(pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
    settings = {"vocab": json.dumps(model["vocab"]), "merges": merges}

    def cut(b: Builder, texts: str) -> tuple[str, str]:
        found, mask = b.ops("GPT2Tokenizer", texts, outputs=2, domain=DOMAIN, **settings)
        lengths = b.op("ReduceSum", mask, b.const([1]), keepdims=0)
        starts = b.op("Concat", b.const([0]), b.op("CumSum", lengths, b.const(0)), axis=0)
        whole = b.op("Reshape", found, b.const([-1]))
        kept = b.op("Compress", whole, b.cast(b.op("Reshape", mask, b.const([-1])), np.bool_), axis=0)
        return kept, starts

    return cut
