"""Drawing a token: temperature, the k most likely, the nucleus, and a draw from what is left.

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


def narrow(scores: Logits, temperature: float, top_k: int, top_p: float) -> None:
    """Filter float32 `scores` [R, V] in place; what is left out becomes -inf.

    Args:
        scores: unnormalized log-probabilities; -inf where a token may not come.
        temperature: what they are divided by.
        top_k: how many of the most likely stay (ties with the last one too); 0 keeps all.
        top_p: the most likely stay that together have at least this probability; 1 keeps all.
    """
    if temperature != 1.0:
        scores /= temperature
    if 0 < top_k < scores.shape[1]:
        last = np.partition(scores, -top_k, axis=1)[:, -top_k, None]
        scores[scores < last] = -np.inf
    if top_p < 1.0:
        _keep_nucleus(scores, top_p)


def _keep_nucleus(scores: Logits, top_p: float) -> None:
    # after top-k almost everything is out: sort only the columns that some row still has
    columns = np.flatnonzero(np.isfinite(scores).any(axis=0))
    kept = scores[:, columns]
    order = np.argsort(kept, axis=1, kind="stable")
    below = np.cumsum(_probabilities(np.take_along_axis(kept, order, axis=1)), axis=1)
    out = below <= 1 - top_p
    out[:, -1] = False  # the most likely token stays, whatever it has
    rows, places = np.nonzero(out)
    kept[rows, order[rows, places]] = -np.inf
    scores[:, columns] = kept


def draw(scores: Logits, random: np.random.Generator) -> Tokens:
    """Draw one token per row with the probabilities that `scores` [R, V] stand for.

    Every row takes one number from `random`, so that a row's draws do not depend on the others.

    Returns:
        int64 [R].

    Raises:
        RunError: no row has a token that may come.
    """
    columns = np.flatnonzero(np.isfinite(scores).any(axis=0))
    if not columns.size:
        raise RunError(
            "No token may come next: the generation settings forbid all of them.", code="no-allowed-token"
        )
    sums = np.cumsum(_probabilities(scores[:, columns]), axis=1)
    wanted = random.random((scores.shape[0], 1)) * sums[:, -1:]
    # the first token whose sum is above the wanted one; a token without probability never is
    places = (sums <= wanted).sum(axis=1)
    chosen: Tokens = columns[places].astype(np.int64)
    return chosen


def _probabilities(scores: Logits) -> NDArray[np.float64]:
    exps = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    probabilities: NDArray[np.float64] = exps / exps.sum(axis=1, keepdims=True)
    return probabilities
