"""Sampling a token: temperature, top-k, nucleus (top-p), and the draw.

The filters are those of transformers' TemperatureLogitsWarper, TopKLogitsWarper and TopPLogitsWarper, in
that order. Nucleus: Holtzman et al. 2020, The Curious Case of Neural Text Degeneration,
arXiv:1904.09751.

Shapes: R = rows, V = vocabulary.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import RunError
from smelt.runtime.batch import Logits, Tokens


def filter_logits(scores: Logits, temperature: float, top_k: int, top_p: float) -> None:
    """Filter float32 `scores` [R, V] in place; excluded tokens get -inf.

    Args:
        scores: unnormalized log-probabilities; -inf for forbidden tokens.
        temperature: divisor of the scores.
        top_k: number of most likely tokens that are kept (with ties of the last one); 0 keeps all.
        top_p: the most likely tokens with at least this total probability are kept; 1 keeps all.
    """
    if temperature != 1.0:
        scores /= temperature
    if 0 < top_k < scores.shape[1]:
        last = np.partition(scores, -top_k, axis=1)[:, -top_k, None]
        scores[scores < last] = -np.inf
    if top_p < 1.0:
        _filter_top_p(scores, top_p)


def _filter_top_p(scores: Logits, top_p: float) -> None:
    # after top-k almost everything is excluded: sort only the columns that some row still has
    columns = np.flatnonzero(np.isfinite(scores).any(axis=0))
    kept = scores[:, columns]
    order = np.argsort(kept, axis=1, kind="stable")
    below = np.cumsum(_probabilities(np.take_along_axis(kept, order, axis=1)), axis=1)
    out = below <= 1 - top_p
    out[:, -1] = False  # the most likely token is always kept
    rows, places = np.nonzero(out)
    kept[rows, order[rows, places]] = -np.inf
    scores[:, columns] = kept


def sample_tokens(scores: Logits, random: np.random.Generator) -> Tokens:
    """Draw one token per row with the probabilities of `scores` [R, V].

    Every row takes one number from `random`, so that a row's draws do not depend on the others.

    Returns:
        int64 [R].

    Raises:
        RunError: a row has no allowed token.
    """
    columns = np.flatnonzero(np.isfinite(scores).any(axis=0))
    if not columns.size:
        raise RunError(
            "The generation settings forbid every possible next token. Allow at least one.",
            code="no-allowed-token",
        )
    sums = np.cumsum(_probabilities(scores[:, columns]), axis=1)
    wanted = random.random((scores.shape[0], 1)) * sums[:, -1:]
    # the first token whose cumulative sum exceeds the drawn number; a token without probability never does
    places = (sums <= wanted).sum(axis=1)
    chosen: Tokens = columns[places].astype(np.int64)
    return chosen


def _probabilities(scores: Logits) -> NDArray[np.float64]:
    exps = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    probabilities: NDArray[np.float64] = exps / exps.sum(axis=1, keepdims=True)
    return probabilities
