"""Does the exported graph compute what its parent computes? Asked on real inputs, answered or raised.

Shapes: B = batch, L = source length, V = vocabulary, C = classes, steps = tokens fed to the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.data import Split
from smelt.core.errors import ParityError
from smelt.runtime.runner import Batch, Tokens

Array = NDArray[np.floating[Any]]
ROWS, LENGTH, STEPS = 8, 48, 8


@dataclass(frozen=True)
class Tolerance:
    """How far an output may be off, relative to the standard deviation of the parent's output.

    The largest difference decides for fp32. In fp16 and int8 single values may be far off, so there
    the mean decides. In int8 a code that rounds the other way moves everything after it: equal
    formulas in two runtimes drift apart up to the noise of quantization itself (0.010 was measured on
    a 4 + 3 layer Marian, where int8 is 0.017 off its fp32 parent); a wrong operator gives about 1.
    The weight-only schemes (int4, binary) turn activations into int8 block by block, where the same
    happens: 0.006 to 0.018 was measured on four families. With accuracy_level 0 they compute in float32.
    """

    largest: float | None
    mean: float


TOLERANCES = {
    "fp32": Tolerance(largest=2e-3, mean=2e-4),
    "fp16": Tolerance(largest=None, mean=0.01),
    "int8": Tolerance(largest=None, mean=0.05),
    "int4": Tolerance(largest=None, mean=0.04),
    "binary": Tolerance(largest=None, mean=0.04),
}


def parity_batch(
    data: Mapping[str, Split], tokenizer: Any, vocabulary: int, limit: int
) -> tuple[Batch, bool]:
    """Return a batch of the first rows of the data, of different lengths, and whether it is real.

    Without data that a stage may see, token ids are spread over the vocabulary instead.
    """
    from smelt.runtime.predict import encode_texts, pack

    split = next((data[n] for n in ("calibration", "validation", "train") if n in data), None)
    if split is not None:
        rows = split.examples[:ROWS]
        pairs = [e.text_pair for e in rows]
        encoded = encode_texts([e.text for e in rows], tokenizer, min(LENGTH, limit), pairs)
        return pack(encoded, range(len(rows)), tokenizer.pad_token_id), True
    ids = np.linspace(0, vocabulary - 1, ROWS * 12).astype(np.int64).reshape(ROWS, 12)
    mask = np.ones_like(ids)
    mask[0, 7:] = 0
    return Batch(ids, mask), False


def causal_batch(
    data: Mapping[str, Split], tokenizer: Any, vocabulary: int, limit: int
) -> tuple[Batch, bool]:
    """Return prompts of different lengths, padded on the left, and whether they come from the data."""
    from smelt.runtime.prompts import pack_left, pad_of
    from smelt.runtime.windows import joined

    most = max(1, min(LENGTH, limit - STEPS))
    split = next((data[n] for n in ("calibration", "validation", "train") if n in data), None)
    ids: list[int] = []
    if split is not None:
        text = joined(Split(split.origin, split.examples[: 50 * ROWS], split.windows))
        ids = tokenizer(text[: 20 * ROWS * most], verbose=False)["input_ids"]
    real = len(ids) >= 2 * ROWS
    if not real:
        ids = np.linspace(0, vocabulary - 1, ROWS * most).astype(np.int64).tolist()
    size = min(most, len(ids) // ROWS)
    prompts = [ids[row * size : (row + 1) * size][: max(1, size * (row + 1) // ROWS)] for row in range(ROWS)]
    return pack_left(prompts, pad_of(tokenizer)), real


@dataclass(frozen=True)
class Reference:
    """What the parent computes for a batch; `tokens` int64 [steps, B] is what its decoder was fed."""

    batch: Batch
    logits: Array
    tokens: Tokens | None


def reference_of(runner: Any, batch: Batch, start: int | Tokens | None) -> Reference:
    """Run the parent: class logits [B, C], or greedy steps from `start` (or int64 [B]): [steps, B, V]."""
    if start is None:
        return Reference(batch, runner.forward(batch).copy(), None)
    state = runner.encode(batch)
    tokens = [np.full(batch.input_ids.shape[0], start, dtype=np.int64)]
    logits = []
    for _ in range(STEPS):
        logits.append(runner.decode_step(state, tokens[-1]).copy())
        tokens.append(logits[-1].argmax(axis=-1))
    return Reference(batch, np.stack(logits), np.stack(tokens[:-1]))


def logits_for(runner: Any, reference: Reference) -> Array:
    """Run `runner` on the reference's batch and tokens; shapes as in `Reference`."""
    if reference.tokens is None:
        return np.asarray(runner.forward(reference.batch))
    state = runner.encode(reference.batch)
    return np.stack([runner.decode_step(state, tokens) for tokens in reference.tokens])


def check_parity(graph: str, output: str, expected: Array, got: Array, kind: str) -> dict[str, float]:
    """Compare one output; return the measured differences, relative to the spread of `expected`.

    Args:
        graph: name of the graph, for the message.
        output: name of its output, for the message.
        expected: what the parent computes.
        got: what the graph computes, same shape.
        kind: a word of TOLERANCES.

    Raises:
        ParityError: a shape or a value differs by more than the tolerance, or is not finite.
    """
    if expected.shape != got.shape:
        raise ParityError(f"{graph}: {output} has the shape {got.shape}, its parent gives {expected.shape}.")
    if not np.isfinite(got).all():
        raise ParityError(f"{graph}: {output} holds values that are not finite; try dtype: fp32.")
    spread = float(np.std(expected, dtype=np.float64)) or 1.0
    off = np.abs(expected.astype(np.float64) - got) / spread
    found = {"largest": float(off.max()), "mean": float(off.mean())}
    tolerance = TOLERANCES[kind]
    for name, limit in (("largest", tolerance.largest), ("mean", tolerance.mean)):
        if limit is not None and found[name] > limit:
            raise ParityError(
                f"{graph}: {output} differs from its parent's: {name} difference {found[name]:.3g}"
                f" of the output's standard deviation, allowed {limit:g} ({kind})."
            )
    return {**found, "agreement": float((expected.argmax(-1) == got.argmax(-1)).mean())}
