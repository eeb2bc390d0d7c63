"""Calibrate the scales of int8 caches: the largest keys and values on samples of the data.

The float32 graph itself is run, one sample at a time, without padding. Keys are cached after rotary
positions, which rotate pairs of numbers of a head by an angle that grows with the position: samples of a few
hundred tokens do not cover slowly rotating pairs. So a rotated pair counts by its length, which does not
depend on the position.

Shapes: K = key-value heads, S = tokens of a row, d = width of a head.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.data import Split
from smelt.core.errors import InputError, RunError
from smelt.runtime.backends.backend import PAST_PREFIX, PRESENT_PREFIX
from smelt.runtime.batch import Tokens
from smelt.runtime.causal import NUM_LOGITS_INPUT

Float32Array = NDArray[np.float32]
# of the calibration texts: rows, and tokens of the longest
CACHE_CALIBRATION_ROWS, CACHE_CALIBRATION_LENGTH = 32, 256
_MAX_CODE = 127
_CHARACTERS_PER_TOKEN = 16  # characters of text per wanted token: more than tokens have


def cache_calibration_split(data: Mapping[str, Split]) -> str:
    """Return the name of the split for calibration: calibration if it exists, otherwise train.

    Raises:
        InputError: neither exists.
    """
    found = next((name for name in ("calibration", "train") if name in data and len(data[name])), None)
    if found is None:
        raise InputError(
            "onnx: kv_cache: int8 needs calibration or train data for its scales. Add data:"
            " {calibration: FILE}, or set kv_cache: float.",
            code="no-calibration-data",
        )
    return found


def cache_calibration_rows(split: Split, tokenizer: Any, limit: int) -> list[Tokens]:
    """Return up to `ROWS` rows of token ids, int64 [S] with S <= `LENGTH`, spread over `split`.

    Args:
        split: samples of running text.
        tokenizer: of transformers.
        limit: the model's maximum number of tokens.

    Raises:
        InputError: the text has no token.
    """
    examples = split.examples
    said = split.windows.separator if split.windows is not None else None
    most = min(CACHE_CALIBRATION_LENGTH, limit)
    found = []
    for place in dict.fromkeys(
        np.linspace(0, len(examples) - 1, CACHE_CALIBRATION_ROWS).astype(int).tolist()
    ):
        text = examples[place].text
        for other in examples[place + 1 :]:
            if len(text) >= most * _CHARACTERS_PER_TOKEN:
                break
            text += ("\n\n" if said is None else said) + other.text
        ids = tokenizer(text[: most * _CHARACTERS_PER_TOKEN], verbose=False)["input_ids"][:most]
        if ids:
            found.append(np.asarray(ids, dtype=np.int64))
    if not found:
        raise InputError(
            f"{split.origin}: onnx: kv_cache: int8: the samples contain no tokens to calibrate scales on."
            f" Use another file.",
            code="empty-text",
        )
    return found


def max_cache_magnitudes(
    session: Any, rows: Sequence[Tokens], rotated: Collection[str], name: str
) -> dict[str, Float32Array]:
    """Run a decoder's float32 graph on `rows`; return the largest magnitudes [K, d] of each of its caches.

    Args:
        session: of ONNX Runtime, for the graph.
        rows: token ids, int64 [S].
        rotated: outputs whose two halves of a head are rotated into each other: both numbers of a pair get
            the largest length of the pair.
        name: of the split, for the message.

    Raises:
        RunError: a value is not finite.
    """
    outputs = [one.name for one in session.get_outputs() if one.name.startswith(PRESENT_PREFIX)]
    caches = [one for one in session.get_inputs() if one.name.startswith(PAST_PREFIX)]
    empty = {one.name: np.zeros((1, one.shape[1], 0, one.shape[3]), np.float32) for one in caches}
    found: dict[str, Float32Array] = {}
    for ids in rows:
        feeds = {"input_ids": ids[None], "attention_mask": np.ones((1, len(ids)), np.int64), **empty}
        feeds |= {"position_ids": np.arange(len(ids))[None], NUM_LOGITS_INPUT: np.array(1, np.int64)}
        for output, kept in zip(outputs, session.run(outputs, feeds), strict=True):
            values = np.abs(kept[0])  # [K, S, d]
            if output in rotated:
                length = np.hypot(*np.split(values, 2, axis=2))
                values = np.concatenate([length, length], axis=2)
            largest = values.max(axis=1)
            if not np.isfinite(largest).all():
                raise RunError(
                    f"onnx: kv_cache: int8: {output} contains NaN or infinite values on the {name}"
                    " samples, so it has no scale. Check the model's weights, or set kv_cache: float to"
                    " export the model anyway.",
                    code="non-finite-outputs",
                )
            found[output] = np.maximum(found.get(output, largest), largest)
    return found


def cache_scales(largest: Float32Array) -> Float32Array:
    """Return the scales float32 [K, 1, d] of a cache whose magnitudes were at most `largest` [K, d].

    A channel that was always 0 gets the largest scale of the cache, or 1 / 127 if all were: its values on
    other texts are then coarse, but not clipped to 0.
    """
    scales = (largest / np.float32(_MAX_CODE)).astype(np.float32)
    told = scales >= np.finfo(np.float32).tiny  # smaller values cannot be divisors
    instead = scales[told].max(initial=0.0) or 1.0 / _MAX_CODE
    return np.where(told, scales, np.float32(instead))[:, None]
