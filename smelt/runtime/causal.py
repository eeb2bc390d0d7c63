"""Decoder-only language models: detection, positions, losses of tokens.

Shapes: B = batch, L = tokens of a row, S = input tokens of one call, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import RunError
from smelt.core.stage import Progress, no_progress
from smelt.families.registry import find_family
from smelt.runtime.batch import Logits, Tokens
from smelt.runtime.text.text_windows import TextWindows

# The input with the number of last tokens whose logits are needed, 0 for all; transformers.js' name
NUM_LOGITS_INPUT = "num_logits_to_keep"
# float32 logits per call; with more, rows or pieces of tokens are run one after another
_LOGITS_BYTES = 256 * 2**20


def is_causal(config: Mapping[str, Any]) -> bool:
    """Return whether `config` (config.json) is that of a decoder-only language model."""
    names = config.get("architectures") or []
    family = find_family(config)
    return (
        family is not None
        and family.architecture == "decoder"
        and any(str(n).endswith(("ForCausalLM", "LMHeadModel")) for n in names)
    )


def position_ids(mask: Tokens) -> Tokens:
    """Return position ids [B, L] that follow the attention mask, 0 for padding, as `generate` does."""
    return np.where(mask == 0, 0, mask.cumsum(axis=1) - 1).astype(np.int64)


def token_nll(runner: Any, ids: Tokens) -> NDArray[np.float32]:
    """Return the negative log-likelihood in nats of every token but the first: int64 [B, L] -> [B, L - 1].

    Logits of all tokens are never in memory at once where they are many: rows are run one by one, and a long
    row in pieces that continue on the cache. How it is split depends on the shapes only, so that every step
    of a run is scored in the same way.

    Raises:
        RunError: the model's outputs are not finite.
    """
    rows, length = ids.shape[0], ids.shape[1] - 1
    at_once = _LOGITS_BYTES // (4 * int(runner.config["vocab_size"]))
    losses = np.empty((rows, length), dtype=np.float32)
    step = max(1, at_once // length)
    for top in range(0, rows, step):
        part = slice(top, min(rows, top + step))
        count = part.stop - top
        state = runner.start(count)
        stretch = length if count > 1 else max(1, at_once)
        for begin in range(0, length, stretch):
            end = min(length, begin + stretch)
            fed = np.ascontiguousarray(ids[part, begin:end])
            logits = runner.extend(state, fed, np.ones_like(fed))
            losses[part, begin:end] = nll_from_logits(logits, ids[part, begin + 1 : end + 1])
    if not np.isfinite(losses).all():
        raise RunError(
            "the model's outputs are not finite, so perplexity is undefined: a weight is not finite,"
            " or a value exceeds the range of its type. Check the step that created the model; if"
            " it sets dtype, use fp32.",
            code="non-finite-outputs",
        )
    return losses


def nll_from_logits(logits: Logits, targets: Tokens) -> NDArray[np.float32]:
    """Return -log softmax(logits)[target]: float32 [B, S, V], int64 [B, S] -> float32 [B, S]."""
    import torch

    values = torch.from_numpy(logits)
    chosen = values.gather(2, torch.from_numpy(np.ascontiguousarray(targets))[..., None])[..., 0]
    losses: NDArray[np.float32] = (values.logsumexp(dim=2) - chosen).numpy()
    return losses


def window_nll(
    runner: Any, text: TextWindows, batch_size: int = 32, progress: Progress = no_progress
) -> list[float]:
    """Return for each window of `text` the summed loss of its scored tokens, nats.

    A batch contains windows of one length only, so nothing is padded.
    """
    groups: dict[int, list[int]] = {}
    for place, ids in enumerate(text.ids):
        groups.setdefault(len(ids), []).append(place)
    sums = [0.0] * len(text.ids)
    done = 0
    for places in groups.values():
        for at in range(0, len(places), batch_size):
            chosen = places[at : at + batch_size]
            losses = token_nll(runner, np.stack([text.ids[i] for i in chosen]))
            for i, row in zip(chosen, losses, strict=True):
                sums[i] = float(row[-text.scored_tokens[i] :].sum(dtype=np.float64))
            done += len(chosen)
            progress(done, len(sums), "windows")
    return sums
