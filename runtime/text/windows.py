"""Running text for language models: joined, tokenized once, cut in windows of equal length.

A window of m + 1 tokens is m inputs and the m tokens that follow them. The next window begins `stride`
tokens later and counts only what no window before it has predicted; so every token but the first of the
whole text is predicted exactly once, each with at least `length - stride` tokens before it (but in the
first window). Where the tokenizer puts a first token (BOS) before a text, every window begins with it: models
that were trained so (Llama, Gemma) lose much without it. It takes one of the window's places. Where text
and bytes belong to which token comes from the tokenizer's own offsets.
Source: Hugging Face, "Perplexity of fixed-length models"; unlike there, windows that touch lose no token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from smelt.core.data import Split
from smelt.core.errors import InputError
from smelt.core.text import count
from smelt.core.windows import Windows
from smelt.runtime.batch import Tokens

LENGTH = 1024  # tokens, where neither the recipe nor the model asks for less


@dataclass(frozen=True)
class TextWindows:
    """ids: int64 [m + 1] per window. counted: how many of its last tokens count. bytes: those tokens' text.

    length, stride: what the windows were cut with, tokens. begins: the token that each window begins with,
    None where the tokenizer puts none before a text. signature: the same in words.
    """

    ids: list[Tokens]
    counted: list[int]
    bytes: list[int]
    length: int
    stride: int
    begins: int | None = None

    @property
    def signature(self) -> str:
        """Say how the text was cut, as part of a score's signature."""
        bos = "" if self.begins is None else "|bos:each window"
        return f"window:{self.length}|stride:{self.stride}{bos}"


def window_length(windows: Windows | None, limit: int) -> int:
    """Return the tokens that a model with `limit` positions sees at once.

    Raises:
        InputError: the setting is longer than the model's limit.
    """
    wanted = windows.length if windows is not None else None
    if wanted is not None and wanted > limit:
        raise InputError(
            f"data: windows: length {wanted} is longer than the {limit} tokens that the model takes;"
            f" set length: {limit} or less.",
            code="window-too-long",
            setting="data.windows.length",
        )
    return wanted or min(LENGTH, limit)


def joined(split: Split) -> str:
    """Return the text of all rows as one."""
    separator = split.windows.separator if split.windows is not None else None
    return ("\n\n" if separator is None else separator).join(e.text for e in split.examples)


def cut_windows(
    split: Split, tokenizer: Any, limit: int, *, length: int | None = None, strided: bool = True
) -> TextWindows:
    """Tokenize the text of `split` as one and cut it.

    Args:
        split: rows of running text.
        tokenizer: a fast one; of its special tokens only the first is put before each window.
        limit: positions that the model has.
        length: instead of the split's own.
        strided: False: windows only touch, as for training.

    Raises:
        InputError: less than two tokens, a length above the limit, or a slow tokenizer.
    """
    if not tokenizer.is_fast:
        raise InputError(
            f"{split.origin}: the tokenizer does not tell which text a token is; language models need a fast"
            " one (tokenizer.json).",
            code="slow-tokenizer",
        )
    size = min(limit, length) if length is not None else window_length(split.windows, limit)
    stride = size
    if strided and split.windows is not None and split.windows.stride is not None:
        stride = min(split.windows.stride, size)
    text = joined(split)
    coded = tokenizer(text, return_offsets_mapping=True, verbose=False)
    ids = np.asarray(coded["input_ids"], dtype=np.int64)
    if len(ids) < 2:
        raise InputError(
            f"{split.origin}: its text is {count(len(ids), 'token')} long; at least 2 are needed.",
            code="too-few-tokens",
        )
    ends = _byte_ends(text, [end for _, end in coded["offset_mapping"]])
    begins = tokenizer.bos_token_id
    begins = None if begins is None or ids[0] != begins or size < 2 else int(begins)
    lead = ids[:0] if begins is None else ids[:1]
    places, begin, done = [], 0, 0  # (begin, last token, tokens before the first that counts)
    while True:
        reach = size - len(lead) if begin else size  # the first window has the token already
        last = min(begin + reach, len(ids) - 1)
        if last > done:
            places.append((begin, last, done))
        done = max(done, last)
        if last == len(ids) - 1:
            break
        begin += min(stride, reach)
    return TextWindows(
        ids=[
            np.concatenate([lead if begin else lead[:0], ids[begin : last + 1]]) for begin, last, _ in places
        ],
        counted=[last - before for _, last, before in places],
        bytes=[int(ends[last] - ends[before]) for _, last, before in places],
        length=size,
        stride=stride,
        begins=begins,
    )


def _byte_ends(text: str, ends: list[int]) -> Tokens:
    """Return for each token how many UTF-8 bytes of `text` lie before its end, never falling."""
    encoded = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)
    sizes = 1 + (encoded >= 0x80).astype(np.int64) + (encoded >= 0x800) + (encoded >= 0x10000)
    before = np.concatenate([[0], np.cumsum(sizes)])
    # special tokens have the offset (0, 0)
    return np.asarray(before[np.maximum.accumulate(np.asarray(ends, dtype=np.int64))], dtype=np.int64)
