"""Write a tokenizer that an exported model can use without torch and transformers.

The tokenizer is written as `tokenizer.json`, with everything that transformers sets while loading, and opened
again without transformers. Both tokenizers are compared on samples of the data, on edge-case texts and on
random ids; if they differ, transformers tokenizes the artifact's texts, and the report gives the reason.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from smelt.core.files import load_json
from smelt.data.splits import Example, Split
from smelt.models.checkpoint import load_tokenizer
from smelt.models.text_rules import NO_LIMIT
from smelt.models.tokenizer import TOKENIZER_FILE as JSON
from smelt.models.tokenizer import (
    HubTokenizer,
    TextTokenizer,
    TokenizerInfo,
    open_light_tokenizer,
    write_tokenizer_info,
)
from smelt.stage import Context

COMPARED_ROWS = 256  # compared samples of the data
_TRUNCATED_LENGTH = 8  # tokens, so that short texts are truncated too
_MAX_SAMPLE_CHARACTERS = 300  # characters; transformers keeps the truncated part
_BPE_FLAG = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"


@dataclass(frozen=True)
class TokenizerSample:
    """Texts (and pairs of texts) on which two tokenizers have to agree, and ids for decoding."""

    texts: list[str]
    pairs: list[tuple[str, str]]
    rows: list[list[int]]


def export_tokenizer(hub: Any, src: Path, out: Path, data: Mapping[str, Split]) -> TokenizerInfo:
    """Make `out`, which has a copy of the tokenizer's files, readable without transformers if possible.

    Args:
        hub: the tokenizer of transformers, loaded from `src`.
        src: the folder of the parent.
        out: the folder of the exported model; gets `tokenizing.json`.
        data: splits of the data, which are compared.
    """
    from smelt.models.empty_model import silence_transformers

    details = read_tokenizer_facts(hub)
    if details.reader == "tokenizers":
        write_backend_tokenizer(hub, out / JSON)
    if details.reader != "transformers":
        with silence_transformers():  # transformers warns about spaces for every BPE tokenizer
            difference = compare_tokenizers(hub, out, details, make_tokenizer_sample(hub, data))
        if difference is not None:
            details = TokenizerInfo(reader="transformers", reason=difference.text)
            _restore_file(src / JSON, out / JSON)
    write_tokenizer_info(out, details)
    return details


def read_tokenizer_facts(hub: Any) -> TokenizerInfo:
    """Return which library can tokenize for `hub`'s model, and settings that are not in its files."""
    common = {
        "longest": min(int(hub.model_max_length), NO_LIMIT),
        "pad": hub.pad_token_id,
        "bos": hub.bos_token_id,
        "eos": hub.eos_token_id,
        "mask": hub.mask_token_id,
        "truncation_side": hub.truncation_side,
        "clean_up": bool(hub.clean_up_tokenization_spaces),
    }
    if hub.is_fast:
        keeps_spaces = (
            type(hub.backend_tokenizer.model).__name__ == "BPE" and getattr(hub, _BPE_FLAG, True) is False
        )
        clean = common["clean_up"] and not keeps_spaces
        types = "token_type_ids" in hub.model_input_names
        return TokenizerInfo(reader="tokenizers", types=types, **(common | {"clean_up": clean}))
    if type(hub).__name__ != "MarianTokenizer":
        return _transformers_only(f"{type(hub).__name__} is implemented in Python only")
    tokens = hub.added_tokens_decoder
    if hub.separate_vocabs or hub.sp_model_kwargs or hub.split_special_tokens:
        return _transformers_only(
            "a Marian tokenizer with separate_vocabs, sp_model_kwargs or split_special_tokens"
        )
    if any(token.lstrip or token.rstrip or token.single_word for token in tokens.values()):
        return _transformers_only("an added token strips spaces around it")
    return TokenizerInfo(
        reader="sentencepiece",
        added={str(token): token_id for token_id, token in tokens.items()},
        special=sorted(set(hub.all_special_ids)),
        unknown=hub.unk_token_id,
        **common,
    )


def _transformers_only(reason: str) -> TokenizerInfo:
    return TokenizerInfo(reader="transformers", reason=reason)


def write_backend_tokenizer(hub: Any, path: Path) -> None:
    """Write the tokenizer of transformers as `path`; an equivalent file is not changed."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(hub.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    present = load_json(path) if path.is_file() else None
    if present != json.loads(backend.to_str()):
        backend.save(str(path))


def _restore_file(src: Path, out: Path) -> None:
    out.unlink(missing_ok=True)
    if src.is_file():
        shutil.copyfile(src, out)


def make_tokenizer_sample(hub: Any, data: Mapping[str, Split]) -> TokenizerSample:
    """Return samples of `data`, edge cases, texts with special tokens inside, and random ids."""
    splits = (data[name].examples for name in ("calibration", "validation", "train") if name in data)
    examples: Sequence[Example] = next(splits, ())[:COMPARED_ROWS]
    texts = [text for e in examples for text in (e.text, *e.references)]
    special_tokens = [str(token) for token in hub.all_special_tokens][:12]
    awkward = (
        EDGE_CASE_TEXTS
        + special_tokens
        + [f"a{m}b {m} c" for m in special_tokens]
        + [m.upper() for m in special_tokens]
    )
    pairs = [(e.text, e.text_pair) for e in examples if e.text_pair is not None]
    pairs += list(zip(awkward, reversed(awkward), strict=True))
    random = np.random.default_rng(0)
    token_rows = random.integers(0, len(hub), (64, 12)).tolist()
    return TokenizerSample(texts + awkward, pairs, token_rows)


class TokenizerDifference(NamedTuple):
    """A difference of two tokenizers. kind: ids, types, pairs, words or texts. text: the message."""

    kind: str
    text: str


def compare_tokenizers(
    hub: Any, out: Path, details: TokenizerInfo, sample: TokenizerSample
) -> TokenizerDifference | None:
    """Return the first difference between the tokenizer of `details` and transformers', or None.

    Transformers' tokenizer loaded from `out` has to agree as well, because its files may have been rewritten.
    """
    reference = HubTokenizer(hub)
    light = open_light_tokenizer(out, details)
    assert light is not None
    for other, name in ((HubTokenizer(load_tokenizer(out)), "the exported tokenizer"), (light, light.reader)):
        difference = _first_difference(reference, other, sample, details.reader == "tokenizers")
        if difference is not None:
            return difference._replace(text=f"{name} differs from transformers' tokenizer: {difference.text}")
    return None


def _first_difference(
    one: TextTokenizer, other: TextTokenizer, sample: TokenizerSample, paired: bool
) -> TokenizerDifference | None:
    token_rows = list(sample.rows)
    for length, max_characters in ((NO_LIMIT, NO_LIMIT), (_TRUNCATED_LENGTH, _MAX_SAMPLE_CHARACTERS)):
        texts = [text for text in sample.texts if len(text) <= max_characters]
        expected, actual = one.encode_batch(texts, length), other.encode_batch(texts, length)
        token_rows += expected.ids if length == NO_LIMIT else []
        for text, a, b in zip(texts, expected.ids, actual.ids, strict=True):
            if a != b:
                return TokenizerDifference("ids", f"ids of {text[:40]!r}")
        if (expected.types, expected.truncated) != (actual.types, actual.truncated):
            return TokenizerDifference("types", "token types, or which texts are truncated")
        if paired:
            pairs = [pair for pair in sample.pairs if max(map(len, pair)) <= max_characters]
            first_texts, seconds = [a for a, _ in pairs], [b for _, b in pairs]
            if one.encode_batch(first_texts, length, seconds) != other.encode_batch(
                first_texts, length, seconds
            ):
                return TokenizerDifference("pairs", "pairs of texts")
        if paired and length == NO_LIMIT:
            words = [text.split() or [""] for text in texts]
            for inputs in ((words,), (first_texts, seconds)):
                if _token_origins(one, *inputs) != _token_origins(other, *inputs):
                    return TokenizerDifference("words", "the words or characters of tokens")
    for row, expected_text, actual_text in zip(
        token_rows, one.decode_batch(token_rows), other.decode_batch(token_rows), strict=True
    ):
        if expected_text != actual_text:
            return TokenizerDifference("texts", f"the text of the ids {row[:8]}")
    return None


def _token_origins(tokenizer: TextTokenizer, texts: Any, pairs: Any = None) -> list[tuple[Any, ...]]:
    """Return ids, words, texts and characters of the tokens of each text."""
    encodings = tokenizer.encodings(texts, pairs)
    return [(e.ids, e.word_ids, e.sequence_ids, e.offsets) for e in encodings]


def add_tokenizer(folder: Path, ctx: Context) -> None:
    """Write a tokenizer that works without transformers, if it is exact."""
    tokenizer_info = export_tokenizer(load_tokenizer(folder), folder, ctx.out, ctx.data)
    ctx.details["tokenizer"] = tokenizer_info.reader
    if tokenizer_info.reason:
        ctx.warn(
            "slow-tokenizer",
            f"Texts are tokenized by transformers, which takes seconds to import: {tokenizer_info.reason}",
        )


# Texts on which two tokenizers are likely to differ.
EDGE_CASE_TEXTS = [
    "",
    " ",
    "   ",
    "\t\n",
    "\u00a0",  # no-break space
    "\u200b\u2003\u3000",  # spaces of no width, of an em, of an ideograph
    "\x00\x07\x1b[0m",  # controls
    "\ufeffbyte order mark",
    "\ufffd\ufdd0",  # the replacement character, and one that is none
    "a\u0301e\u0308 \u00e1\u00eb \u1e9e\u0130\ufb01\u2460",  # marks alone and composed, compatibility forms
    "\u4f60\u597d \u3053\u3093\u306b\u3061\u306f \uc548\ub155",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea\u2764\ufe0f",  # emoji
    "two  blanks   and\nlines\r\n and a tab\there ",
    " leading",
    "trailing ",
    "UPPER lower MiXeD",
    "don't , it 's , we 've ; isn't it ? yes ! ' quoted ' .",
    "http://a.b/c?d=e&f#g 1,234.56 \u20ac%",
    "_" * 40,
    "<",
    "</s",
    "<</s>>",
    "[CLS",
    ">>deu<< text",
    ">>",
    ">>unfinished",
    "\u2581meta \u2581",  # SentencePiece's own mark of a blank
    "\u0120byte \u010a",  # byte-level BPE's
    "word " * 200,
    "x" * 400,
    "\u00e9" * 150,
]
