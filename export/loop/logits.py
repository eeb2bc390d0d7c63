"""What is done with the logits of a step where they are many: as few passes over them as there can be.

Shapes: R = rows, V = vocabulary.
"""

from __future__ import annotations

from math import isqrt

import numpy as np

from smelt.export.loop.builder import Builder

# operators that add a bias [V] as they write their result, and which input it is
_BIAS = {"DynamicQuantizeMatMul": 4, "MatMulNBits": 5}
# From so many logits of a step on, finding the largest in blocks pays (measured: 8 rows of 8,000 take 0.7 of
# the time, 32 rows 0.3, one row 1.2; the blocks are six small operators more)
_MANY = 50_000


def add_to_logits(b: Builder, logits: str, row: str) -> str:
    """Return float32 `logits` [R, V] and `row` [V] added up, in the product that makes them where it can.

    A row of a step's rules hides words (0 or -inf), so that the order of sums does not matter.
    """
    made = {name: node for node in b.nodes for name in node.output}
    node = made.get(logits)
    while node is not None and node.op_type in {"Squeeze", "Reshape", "Add"}:
        node = made.get(node.input[0])
    place = _BIAS.get(node.op_type) if node is not None else None
    if node is None or place is None:
        return b.op("Add", logits, row)
    at = b.nodes.index(node)
    behind = b.nodes[at:]
    del b.nodes[at:]
    given = node.input[place] if len(node.input) > place else ""
    bias = b.op("Add", given, row) if given else row
    node.input.extend([""] * (place + 1 - len(node.input)))
    node.input[place] = bias
    b.nodes.extend(behind)
    return logits


def are_many(b: Builder, rows: str, vocabulary: int) -> str:
    """Return bool: whether the largest logits of int64 [1] `rows` rows are better looked for in blocks."""
    if _block(vocabulary) is None:
        return b.const(False, np.bool_)
    return b.op("Greater", b.op("Squeeze", rows, b.const([0])), b.const(_MANY // vocabulary))


def largest(b: Builder, scores: str) -> str:
    """Return int64 [R, 1]: where each row of float32 `scores` [R, V] is largest, the first of equal ones."""
    return b.op("ArgMax", scores, axis=1, keepdims=1)


def largest_in_blocks(b: Builder, scores: str, vocabulary: int) -> str:
    """As `largest`, faster where there are many.

    ONNX Runtime's ArgMax looks at one number after the other, its ReduceMax at many at a time: the largest of
    each block is found first, then the block, then the place in it.
    """
    width = _block(vocabulary)
    if width is None:
        return largest(b, scores)
    blocks = b.op("Reshape", scores, b.const([-1, vocabulary // width, width]))
    best = b.op("ArgMax", b.op("ReduceMax", blocks, b.const([2]), keepdims=0), axis=1, keepdims=1)
    inside = b.op("ArgMax", b.op("GatherND", blocks, best, batch_dims=1), axis=1, keepdims=1)
    return b.op("Add", b.op("Mul", best, b.const(width)), inside)


def _block(vocabulary: int) -> int | None:
    """Return how wide the blocks are, None where there are none of a useful size."""
    root = isqrt(vocabulary)
    sizes = [n for n in range(max(8, root // 3), 3 * root) if vocabulary % n == 0]
    return min(sizes, key=lambda n: abs(n - root), default=None)


def in_vocabulary(b: Builder, scores: str, words: str, vocabulary: int) -> str:
    """Return float32 [R, V]: the scores [R, C] of the words int64 [C], and -inf for all others."""
    from onnx import numpy_helper

    nothing = numpy_helper.from_array(np.array([-np.inf], dtype=np.float32))
    shape = b.op("Concat", b.rows(scores), b.const([vocabulary]), axis=0)
    places = b.op("Expand", words, b.op("Shape", scores))
    return b.op("ScatterElements", b.op("ConstantOfShape", shape, value=nothing), places, scores, axis=1)
