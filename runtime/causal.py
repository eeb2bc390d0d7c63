"""Decoder-only language models: which they are, positions, losses of tokens.

Shapes: B = batch, L = tokens of a row, S = tokens fed at once, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import RunError
from smelt.core.stage import Progress, silent
from smelt.families.registry import find_family
from smelt.runtime.batch import Logits, Tokens
from smelt.runtime.text.windows import TextWindows

# The input that says of how many of the last tokens logits are wanted, 0 for all; transformers.js' word
KEEP = "num_logits_to_keep"
# float32 logits that one call may give; more, and rows or stretches of tokens are fed one after another
_LOGITS_BYTES = 256 * 2**20


def is_causal(config: Mapping[str, Any]) -> bool:
    """Say whether `config` (config.json) is a decoder-only language model's."""
    names = config.get("architectures") or []
    family = find_family(config)
    return (
        family is not None
        and family.kind == "decoder"
        and any(str(n).endswith(("ForCausalLM", "LMHeadModel")) for n in names)
    )


def positions(mask: Tokens) -> Tokens:
    """Return position ids [B, L] that follow the attention mask, 0 where nothing is, as `generate` does."""
    return np.where(mask == 0, 0, mask.cumsum(axis=1) - 1).astype(np.int64)


def token_losses(runner: Any, ids: Tokens) -> NDArray[np.float32]:
    """Return the negative log-likelihood in nats of every token but the first: int64 [B, L] -> [B, L - 1].

    Logits of all tokens are never held at once where they are many: rows go one by one, and a long row in
    stretches that continue on the cache. How it is split depends on the shapes alone, so that every step
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
            losses[part, begin:end] = losses_of(logits, ids[part, begin + 1 : end + 1])
    if not np.isfinite(losses).all():
        raise RunError(
            "the model's outputs are not finite, so there is no perplexity: a weight is no number, or what is"
            " computed goes beyond the range of its type. Look at the step that made it; where that has a"
            " dtype, fp32 has the widest range.",
            code="non-finite-outputs",
        )
    return losses


def losses_of(logits: Logits, targets: Tokens) -> NDArray[np.float32]:
    """Return -log softmax(logits)[target]: float32 [B, S, V], int64 [B, S] -> float32 [B, S]."""
    import torch

    values = torch.from_numpy(logits)
    chosen = values.gather(2, torch.from_numpy(np.ascontiguousarray(targets))[..., None])[..., 0]
    losses: NDArray[np.float32] = (values.logsumexp(dim=2) - chosen).numpy()
    return losses


def window_losses(
    runner: Any, text: TextWindows, batch_size: int = 32, progress: Progress = silent
) -> list[float]:
    """Return for each window of `text` the summed loss of its counted tokens, nats.

    Only windows of one length share a batch, so nothing is padded.
    """
    groups: dict[int, list[int]] = {}
    for place, ids in enumerate(text.ids):
        groups.setdefault(len(ids), []).append(place)
    sums = [0.0] * len(text.ids)
    done = 0
    for places in groups.values():
        for at in range(0, len(places), batch_size):
            chosen = places[at : at + batch_size]
            losses = token_losses(runner, np.stack([text.ids[i] for i in chosen]))
            for i, row in zip(chosen, losses, strict=True):
                sums[i] = float(row[-text.counted[i] :].sum(dtype=np.float64))
            done += len(chosen)
            progress(done, len(sums), "windows")
    return sums
