"""Create small inputs for any exported graph that show differences between two graphs.

Tokens differ, and rows have different lengths and are padded as runners pad them: with rows of one length, a
graph without its mask would pass.

Shapes: B = batch, L = tokens of the longest row, P = past length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

EXAMPLE_LENGTHS = (12, 8, 5)  # of the rows
OTHER_EXAMPLE_LENGTHS = (
    9,
    6,
)  # of another batch: a fixed number of rows or tokens fits at most one of the two
_PAST_LENGTH = 7  # tokens in the cache of a decoder
_NUMPY_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}

Feeds = dict[str, NDArray[Any]]


def example_feeds(
    session: Any, tokens: NDArray[np.int64] | None, lengths: Sequence[int] = EXAMPLE_LENGTHS
) -> list[Feeds]:
    """Return inputs for calls of `session`.

    A language model gets a padded prompt, once with all logits and once with those of the last token, and one
    token with a cache; other graphs get one batch.

    Args:
        session: of ONNX Runtime.
        tokens: int64 [n], n >= 1, real tokens of the model's vocabulary to choose from; None for a graph of
            images, whose pixels are random.
        lengths: of the rows, in tokens; the number of images is the same.
    """
    if tokens is None:
        return [_feeds(session, {}, {"batch": len(lengths)})]
    names = {i.name for i in session.get_inputs()}
    length, rows = max(lengths), len(lengths)
    ids = np.resize(tokens, (rows, length)).astype(np.int64)
    mask = (np.arange(length) < np.array(lengths)[:, None]).astype(np.int64)
    values: Feeds = {"input_ids": ids, "attention_mask": mask, "encoder_attention_mask": mask}
    # the second half of a row is another text
    values["token_type_ids"] = (np.arange(length) * 2 >= np.array(lengths)[:, None]).astype(np.int64) * mask
    values["num_logits_to_keep"] = np.array(0, dtype=np.int64)
    sizes = {"batch": rows, "length": length, "encoder_length": length, "past_length": _PAST_LENGTH}
    if "encoder_attention_mask" in names:
        values["input_ids"] = ids[:, :1]
    if "position_ids" not in names:
        return [_feeds(session, values, sizes)]
    values["attention_mask"] = mask = mask[:, ::-1].copy()
    values["position_ids"] = places = np.where(mask == 0, 0, mask.cumsum(axis=1) - 1)
    prompt = _feeds(session, values, sizes | {"past_sequence_length": 0})
    last = {name: value[:, -1:] for name, value in (("input_ids", ids), ("position_ids", places))}
    step = _feeds(session, values | last, sizes | {"past_sequence_length": length - 1})
    if "num_logits_to_keep" not in names:
        return [prompt, step]
    return [prompt, prompt | {"num_logits_to_keep": np.array(1, dtype=np.int64)}, step]


def without_padding(name: str, output: NDArray[Any], feeds: Feeds) -> NDArray[Any]:
    """Return the part of an output that belongs to text.

    The outputs of a language model at padding are meaningless: all keys are masked there, so that only
    rounding decides the attention.
    """
    if "position_ids" not in feeds:
        return output
    text = feeds["attention_mask"] == 1
    if name == "logits":
        kept: NDArray[Any] = output[text[:, -output.shape[1] :]]
        return kept
    caches: NDArray[Any] = np.moveaxis(output, 1, 2)[text]  # [B, K, T, d]
    return caches


def _feeds(session: Any, values: Feeds, sizes: dict[str, int]) -> Feeds:
    """Return the `values` that are inputs of the session, and random caches."""
    numbers = np.random.default_rng(0)
    feeds: Feeds = {}
    for item in session.get_inputs():
        kind = _NUMPY_DTYPES.get(item.type)
        if kind is None:
            feeds[item.name] = np.asarray(values[item.name], order="C")
        else:
            shape = [size if isinstance(size, int) else sizes[size] for size in item.shape]
            feeds[item.name] = numbers.normal(size=shape).astype(kind)
    return feeds
