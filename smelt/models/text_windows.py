"""Running text for language models: joined, tokenized once, cut into windows of equal length.

A window of m + 1 tokens is m inputs and the m tokens that follow them. The next window begins `stride`
tokens later and scores only tokens that no window before it has predicted; so every token but the first of
the whole text is predicted exactly once, each with at least `length - stride` tokens before it (except in the
first window). Where the tokenizer adds a first token (BOS) before a text, every window begins with it: models
that were trained so (Llama, Gemma) are much worse without it. It takes one of the window's positions. The
text and bytes of each token come from the tokenizer's own offsets.
Source: Hugging Face, "Perplexity of fixed-length models"; unlike there, adjacent windows lose no token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from smelt.core.errors import InputError
from smelt.core.text import with_count
from smelt.data.batch import Tokens
from smelt.data.splits import Split, Windows

DEFAULT_WINDOW_LENGTH = 1024  # tokens, where neither the recipe nor the model has a lower limit


@dataclass(frozen=True)
class TextWindows:
    """ids: int64 [m + 1] per window. scored_tokens: its scored last tokens. scored_bytes: their UTF-8 bytes.

    length, stride: of the windows, tokens. bos_token_id: the first token of each window,
    None where the tokenizer adds none before a text. signature: the same as text.
    """

    ids: list[Tokens]
    scored_tokens: list[int]
    scored_bytes: list[int]
    length: int
    stride: int
    bos_token_id: int | None = None

    @property
    def signature(self) -> str:
        """Return the windows' settings as part of a score's signature."""
        bos = "" if self.bos_token_id is None else "|bos:each window"
        return f"window:{self.length}|stride:{self.stride}{bos}"


def window_length(windows: Windows | None, limit: int) -> int:
    """Return the tokens per window of a model with `limit` positions.

    Raises:
        InputError: the setting is longer than the model's limit.
    """
    wanted = windows.length if windows is not None else None
    if wanted is not None and wanted > limit:
        raise InputError(
            f"data: windows: length {wanted} is longer than the model's limit of {limit} tokens; set length:"
            f" {limit} or less.",
            code="window-too-long",
            setting="data.windows.length",
        )
    return wanted or min(DEFAULT_WINDOW_LENGTH, limit)


def join_texts(split: Split) -> str:
    """Return the joined text of all samples."""
    separator = split.windows.separator if split.windows is not None else None
    return ("\n\n" if separator is None else separator).join(e.text for e in split.examples)


def cut_windows(
    split: Split, tokenizer: Any, limit: int, *, length: int | None = None, strided: bool = True
) -> TextWindows:
    """Tokenize the joined text of `split` and cut it.

    Args:
        split: samples of running text.
        tokenizer: a fast one; of its special tokens only the first is added before each window.
        limit: positions of the model.
        length: overrides the split's own.
        strided: False: windows do not overlap, as in training.

    Raises:
        InputError: less than two tokens, a length above the limit, or a slow tokenizer.
    """
    if not tokenizer.is_fast:
        raise InputError(
            f"{split.origin}: this tokenizer does not return token offsets. Language models need a"
            " fast tokenizer (tokenizer.json).",
            code="slow-tokenizer",
        )
    size = min(limit, length) if length is not None else window_length(split.windows, limit)
    stride = size
    if strided and split.windows is not None and split.windows.stride is not None:
        stride = min(split.windows.stride, size)
    text = join_texts(split)
    coded = tokenizer(text, return_offsets_mapping=True, verbose=False)
    ids = np.asarray(coded["input_ids"], dtype=np.int64)
    if len(ids) < 2:
        raise InputError(
            f"{split.origin}: the text has {with_count(len(ids), 'token')}; at least 2 tokens are needed.",
            code="too-few-tokens",
        )
    ends = _utf8_offsets(text, [end for _, end in coded["offset_mapping"]])
    begins = tokenizer.bos_token_id
    begins = None if begins is None or ids[0] != begins or size < 2 else int(begins)
    lead = ids[:0] if begins is None else ids[:1]
    places, begin, done = [], 0, 0  # (begin, last token, tokens before the first scored one)
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
        scored_tokens=[last - before for _, last, before in places],
        scored_bytes=[int(ends[last] - ends[before]) for _, last, before in places],
        length=size,
        stride=stride,
        bos_token_id=begins,
    )


def _utf8_offsets(text: str, ends: list[int]) -> Tokens:
    """Return for each token how many UTF-8 bytes of `text` are before its end, never falling."""
    encoded = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)
    sizes = 1 + (encoded >= 0x80).astype(np.int64) + (encoded >= 0x800) + (encoded >= 0x10000)
    before = np.concatenate([[0], np.cumsum(sizes)])
    # special tokens have the offset (0, 0)
    return np.asarray(before[np.maximum.accumulate(np.asarray(ends, dtype=np.int64))], dtype=np.int64)
