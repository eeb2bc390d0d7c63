"""Where a low-rank pair is faster than the matrix that it stands for: a rule, derived from measurements.

What a product costs on a CPU grows with its weights, and each product costs something besides: its inputs are
coded, its kernel is set up. A pair has fewer weights and one product more (whether it stands alone or its
first half is packed with others of the same input). Measured in ONNX Runtime's int8
(DynamicQuantizeMatMul), one product more costs as long as reading 100,000 weights where there is one row of
activations, as in each step of a decoder, and as multiplying with 5,000 where there are those of a whole
text; thin matrices take up to a tenth longer for the same weights. Measured: docs/measurements/techniques.md.

In float32 a pair pays earlier. The rule knows neither the scheme that may follow nor the machine: so the same
recipe makes the same model everywhere, and what is chosen is not slower in int8.
"""

from __future__ import annotations

from typing import Any

from smelt.families.walk import blocks_of
from smelt.runtime.layers.shared import SharedLinear

# What one product more costs, in weights
STEP = 100_000
TEXT = 5_000
# A pair's weights count as this much less than their number
THIN = 0.9


def largest_rank(rows: int, columns: int, many: bool) -> float:
    """Return below which rank a pair is predicted to be faster than its matrix [rows, columns].

    Args:
        rows: outputs of the layer.
        columns: its inputs.
        many: whether it gets the tokens of a whole text at once, instead of one a step.
    """
    return max(0.0, THIN * rows * columns - (TEXT if many else STEP)) / (rows + columns)


def reading_texts(model: Any) -> set[str]:
    """Return the names of the products of `model` that get the tokens of a whole text at once.

    They are those of its encoder, and the keys and values of cross-attention, which are computed once for a
    text. A decoder's get one token a step, most of the time; a head behind the blocks, one a text or a step.
    """
    found: set[str] = set()
    divided = {n for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, SharedLinear)}
    for block in blocks_of(model):
        for attention in block.attentions:
            if attention.cross:
                found |= {attention.key, attention.value}
            elif not block.stack.causal:
                found |= set(attention.products)
        feed = block.feed_forward
        if feed is not None and not block.stack.causal:
            found |= set(feed.products)
    return found | {f"{name}.shared" for name in found & divided}
