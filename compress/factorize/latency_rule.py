"""The rank below which low-rank factors are faster than the original matrix: a rule from measurements.

The time of a linear layer on a CPU grows with its weights, and each layer has a fixed overhead: its inputs
are quantized, its kernel is set up. Two factors have fewer weights and one linear layer more (alone, or with
the first factor packed with others of the same input). Measured in ONNX Runtime's int8
(DynamicQuantizeMatMul), one more linear layer takes as long as reading 100,000 weights with one row of
activations, as in each step of a decoder, and as multiplying with 5,000 with the rows of a whole text; thin
matrices take up to a tenth longer for the same weights. Measured: docs/measurements/techniques.md.

In float32 factors gain earlier. The rule depends neither on a later scheme nor on the machine: so the same
recipe makes the same model everywhere, and the result is not slower in int8.
"""

from __future__ import annotations

from typing import Any

from smelt.families.model_blocks import blocks_of
from smelt.runtime.layers.shared_linear import SharedLinear

# Overhead of one more linear layer, in weights
DECODING_OVERHEAD_WEIGHTS = 100_000
SEQUENCE_OVERHEAD_WEIGHTS = 5_000
# Effective weights of the original matrix, as a fraction, since thin matrices are slower
LOW_RANK_EFFICIENCY = 0.9


def faster_below_rank(rows: int, columns: int, full_sequence: bool) -> float:
    """Return the rank below which factors are predicted to be faster than the matrix [rows, columns].

    Args:
        rows: outputs of the layer.
        columns: its inputs.
        full_sequence: whether it gets the tokens of a whole text at once instead of one per step.
    """
    return max(
        0.0,
        LOW_RANK_EFFICIENCY * rows * columns
        - (SEQUENCE_OVERHEAD_WEIGHTS if full_sequence else DECODING_OVERHEAD_WEIGHTS),
    ) / (rows + columns)


def full_sequence_layers(model: Any) -> set[str]:
    """Return the names of the linear layers of `model` that get the tokens of a whole text at once.

    They are those of the encoder, and the keys and values of cross-attention, computed once per text. Linear
    layers of a decoder mostly get one token per step; an output layer gets one per text or step.
    """
    found: set[str] = set()
    divided = {n for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, SharedLinear)}
    for block in blocks_of(model):
        for attention in block.attentions:
            if attention.cross:
                found |= {attention.key, attention.value}
            elif not block.stack.causal:
                found |= set(attention.linear_layers)
        feed = block.feed_forward
        if feed is not None and not block.stack.causal:
            found |= set(feed.linear_layers)
    return found | {f"{name}.shared" for name in found & divided}
