"""Operations on large logits, with as few passes over them as possible.

Shapes: R = rows, V = vocabulary.
"""

from __future__ import annotations

from math import isqrt

import numpy as np

from smelt.export.generation_graph.graph_builder import GraphBuilder

# operators that add a bias [V] while writing their result, and the index of that input
_BIAS_INPUT = {"DynamicQuantizeMatMul": 4, "MatMulNBits": 5}
# Above this number of logits per step, a blocked argmax is faster (measured: 8 rows of 8,000 take 0.7 of the
# time, 32 rows 0.3, one row 1.2; the blocks add six small operators)
_MIN_BLOCKED_LOGITS = 50_000


def add_to_logits(b: GraphBuilder, logits: str, row: str) -> str:
    """Return float32 `logits` [R, V] plus `row` [V], added in the layer that computes them if possible.

    A row of a step's rules excludes tokens (0 or -inf), so the order of sums does not matter.
    """
    made = {name: node for node in b.nodes for name in node.output}
    node = made.get(logits)
    while node is not None and node.op_type in {"Squeeze", "Reshape", "Add"}:
        node = made.get(node.input[0])
    place = _BIAS_INPUT.get(node.op_type) if node is not None else None
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


def use_blocks(b: GraphBuilder, rows: str, vocabulary: int) -> str:
    """Return bool: whether a blocked argmax is faster for int64 [1] `rows` rows."""
    if _block_width(vocabulary) is None:
        return b.const(False, np.bool_)
    return b.op("Greater", b.op("Squeeze", rows, b.const([0])), b.const(_MIN_BLOCKED_LOGITS // vocabulary))


def argmax(b: GraphBuilder, scores: str) -> str:
    """Return int64 [R, 1]: the argmax of each row of float32 `scores` [R, V], the first of equal ones."""
    return b.op("ArgMax", scores, axis=1, keepdims=1)


def blocked_argmax(b: GraphBuilder, scores: str, vocabulary: int) -> str:
    """Return the same as `argmax`, faster for many scores.

    ONNX Runtime's ArgMax compares one number after the other, its ReduceMax many at a time: the maximum of
    each block is computed first, then the block, then the index in it.
    """
    width = _block_width(vocabulary)
    if width is None:
        return argmax(b, scores)
    blocks = b.op("Reshape", scores, b.const([-1, vocabulary // width, width]))
    best = b.op("ArgMax", b.op("ReduceMax", blocks, b.const([2]), keepdims=0), axis=1, keepdims=1)
    inside = b.op("ArgMax", b.op("GatherND", blocks, best, batch_dims=1), axis=1, keepdims=1)
    return b.op("Add", b.op("Mul", best, b.const(width)), inside)


def _block_width(vocabulary: int) -> int | None:
    """Return the width of the blocks, None if no useful size divides the vocabulary."""
    root = isqrt(vocabulary)
    sizes = [n for n in range(max(8, root // 3), 3 * root) if vocabulary % n == 0]
    return min(sizes, key=lambda n: abs(n - root), default=None)


def scatter_to_vocabulary(b: GraphBuilder, scores: str, words: str, vocabulary: int) -> str:
    """Return float32 [R, V]: the scores [R, C] of the tokens int64 [C], and -inf for all others."""
    from onnx import numpy_helper

    nothing = numpy_helper.from_array(np.array([-np.inf], dtype=np.float32))
    shape = b.op("Concat", b.row_count(scores), b.const([vocabulary]), axis=0)
    places = b.op("Expand", words, b.op("Shape", scores))
    return b.op("ScatterElements", b.op("ConstantOfShape", shape, value=nothing), places, scores, axis=1)
