"""How large keys and values become on rows of data, and the scales of their int8 codes.

The float32 graph itself is run, one row at a time, so that no padding is looked at. A key is kept as it is
behind its rotation, which turns two numbers of a head into each other as the place goes on: rows of a few
hundred tokens show little of what a slowly turning pair will hold further on. So a rotated pair counts by its
length, which no place changes.

Shapes: K = key-value heads, S = tokens of a row, d = width of a head.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.data import Split
from smelt.core.errors import InputError, RunError
from smelt.runtime.backends.backend import PAST, PRESENT
from smelt.runtime.batch import Tokens
from smelt.runtime.causal import KEEP

Floats = NDArray[np.float32]
# of texts that are looked at: rows, and tokens of the longest
ROWS, LENGTH = 32, 256
_CODES = 127
_CHARACTERS = 16  # of text for each wanted token: more than tokens have


def calibration_split(data: Mapping[str, Split]) -> str:
    """Return the name of the rows that are looked at: those for calibration if there are any.

    Raises:
        InputError: there are neither these nor rows to train on.
    """
    found = next((name for name in ("calibration", "train") if name in data and len(data[name])), None)
    if found is None:
        raise InputError(
            "onnx: kv_cache: int8 needs calibration or train data, on which the scales are found; name a file"
            " with data: {calibration: FILE}, or set kv_cache: float.",
            code="no-calibration-data",
        )
    return found


def calibration_rows(split: Split, tokenizer: Any, limit: int) -> list[Tokens]:
    """Return up to `ROWS` rows of token ids, int64 [S] with S <= `LENGTH`, begun all over `split`.

    Args:
        split: rows of running text.
        tokenizer: of transformers.
        limit: tokens that the model takes.

    Raises:
        InputError: the text has no token.
    """
    examples = split.examples
    said = split.windows.separator if split.windows is not None else None
    most = min(LENGTH, limit)
    found = []
    for place in dict.fromkeys(np.linspace(0, len(examples) - 1, ROWS).astype(int).tolist()):
        text = examples[place].text
        for other in examples[place + 1 :]:
            if len(text) >= most * _CHARACTERS:
                break
            text += ("\n\n" if said is None else said) + other.text
        ids = tokenizer(text[: most * _CHARACTERS], verbose=False)["input_ids"][:most]
        if ids:
            found.append(np.asarray(ids, dtype=np.int64))
    if not found:
        raise InputError(
            f"{split.origin}: onnx: kv_cache: int8: its text has no token to find scales on.",
            code="empty-text",
        )
    return found


def largest_magnitudes(
    session: Any, rows: Sequence[Tokens], rotated: Collection[str], name: str
) -> dict[str, Floats]:
    """Run a decoder's float32 graph on `rows`; return of each of its caches the largest magnitudes [K, d].

    Args:
        session: of ONNX Runtime, over the graph.
        rows: token ids, int64 [S].
        rotated: outputs whose two halves of a head are rotated into each other: there the largest length of a
            pair stands at both of its numbers.
        name: of the rows, for the message.

    Raises:
        RunError: a value is not finite.
    """
    outputs = [one.name for one in session.get_outputs() if one.name.startswith(PRESENT)]
    caches = [one for one in session.get_inputs() if one.name.startswith(PAST)]
    empty = {one.name: np.zeros((1, one.shape[1], 0, one.shape[3]), np.float32) for one in caches}
    found: dict[str, Floats] = {}
    for ids in rows:
        feeds = {"input_ids": ids[None], "attention_mask": np.ones((1, len(ids)), np.int64), **empty}
        feeds |= {"position_ids": np.arange(len(ids))[None], KEEP: np.array(1, np.int64)}
        for output, kept in zip(outputs, session.run(outputs, feeds), strict=True):
            values = np.abs(kept[0])  # [K, S, d]
            if output in rotated:
                length = np.hypot(*np.split(values, 2, axis=2))
                values = np.concatenate([length, length], axis=2)
            largest = values.max(axis=1)
            if not np.isfinite(largest).all():
                raise RunError(
                    f"onnx: kv_cache: int8: {output} holds values that are not finite on the {name} rows, so"
                    " that there is no scale for it. Look for what is wrong in the model's weights; kv_cache:"
                    " float exports it as it is.",
                    code="non-finite-outputs",
                )
            found[output] = np.maximum(found.get(output, largest), largest)
    return found


def scales_of(largest: Floats) -> Floats:
    """Return the scales float32 [K, 1, d] of a cache whose magnitudes were at most `largest` [K, d].

    A channel that was always 0 gets the largest scale of the cache, 1 / 127 where all were: what it holds on
    other texts is then coarse, and not cut off at nothing.
    """
    scales = (largest / np.float32(_CODES)).astype(np.float32)
    told = scales >= np.finfo(np.float32).tiny  # what is smaller cannot be divided by
    instead = scales[told].max(initial=0.0) or 1.0 / _CODES
    return np.where(told, scales, np.float32(instead))[:, None]
