"""Attention of beam search: the beams of a sentence are queries of one attention.

Cross-attention: keys and values of a sentence are not repeated for its beams.

Self-attention: a sentence has one cache with the keys and values of all its beams, in the order in which they
were computed. Each beam sees only those of its own text; a bias excludes the others. So when beams change
places, a small table is reordered, and the caches, which are copied otherwise, are not. When sentences are
removed from the batch, so are keys that no beam reads any more.

    table = the bias of a step, each beam's own new key included                float32 [B, 1, N, T]
    next  = rows of `table`, those of the parents, and the next step's new keys float32 [B, 1, N, T + N]

Attention then multiplies N times as many keys, which takes less time than copying the caches for up to
`MAX_JOINT_BEAMS` beams (docs/measurements/loop.md#one-cache-for-all-beams).

Shapes: B = sentences, N = beams (1 in the first step), R = B N rows, T = cached keys of a sentence,
H = heads, d = width of a head, W = H d.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from smelt.export.generation_graph.graph_builder import GraphBuilder
from smelt.runtimes.graph_walk import node_inputs

MAX_JOINT_BEAMS = 6
"""The largest number of beams for which one cache for all beams is faster."""

_ATTENTION = "MultiHeadAttention"
# inputs of MultiHeadAttention
_QUERY, _KEY, _VALUE, _BIAS, _MASK, _ADDED, _PAST_KEY, _PAST_VALUE = range(8)


@dataclass(frozen=True)
class SentenceState:
    """What a step of beam search reads of each sentence, of all its beams.

    step: int64 scalar, the number of the step. logits_shape: int64 [3], [B, -1, C] of its logits. values:
    names; of `StepModel.sentence_state`.
    """

    step: str
    logits_shape: str
    values: Sequence[str]


def cached_lengths(decoder: Any, caches: Collection[str]) -> list[str] | None:
    """Return the values of a step's graph that are the number of cached keys, int64 [1].

    None if the graph reads its caches in another way than by attention without mask and bias, so that a
    cache cannot hold the keys of several beams.

    Args:
        decoder: onnx.GraphProto of one step.
        caches: names of its inputs with keys and values.
    """
    lengths = []
    outputs = {output.name for output in decoder.output}
    for node in decoder.node:
        read = [index for index, name in enumerate(node.input) if name in caches]
        if not read and not node_inputs(node) & set(caches):
            continue
        bounds = {attribute.name: attribute.i for attribute in node.attribute}
        if node.op_type == "Shape" and (bounds.get("start"), bounds.get("end")) == (2, 3):
            lengths.append(node.output[0])
        elif not (
            node.op_type == _ATTENTION
            and read == [_PAST_KEY, _PAST_VALUE]
            and not any(node.input[_BIAS:_PAST_KEY])
            and not bounds.get("unidirectional")
            and set(node.output[1:]) <= outputs
        ):
            return None
    return lengths


def first_table(b: GraphBuilder, batch: str) -> str:
    """Return the table of the first step, float32 [B, 1, 1, 1]; `batch`: int64 [1], B."""
    from onnx import numpy_helper

    zero = numpy_helper.from_array(np.zeros(1, np.float32))
    return b.op("ConstantOfShape", b.op("Concat", batch, b.const([1, 1, 1]), axis=0), value=zero)


def own_keys(b: GraphBuilder, batch: str, num_beams: str) -> str:
    """Return float32 [B, 1, N, N]: 0 where a new key is the beam's own, else -inf.

    Args:
        b: a graph around the steps.
        batch: int64 [1], B.
        num_beams: int64 [1], N of all steps but the first.
    """
    index = b.op("Range", b.const(0), b.op("Squeeze", num_beams, b.const([0])), b.const(1))
    is_own = b.op("Equal", b.op("Unsqueeze", index, b.const([0])), b.op("Unsqueeze", index, b.const([1])))
    table = b.op("Where", is_own, b.const(0, np.float32), b.const(-np.inf, np.float32))
    return b.op("Expand", table, b.op("Concat", batch, b.const([1]), num_beams, num_beams, axis=0))


def next_table(b: GraphBuilder, table: str, parents: str, own_table: str) -> str:
    """Return the next step's table [B, 1, N, T + N], of `table` [B, 1, N, T] and `own_keys`.

    `parents`: int64 [B, N].
    """
    places = b.op("Unsqueeze", parents, b.const([1, 3]))
    return b.op("Concat", b.op("GatherND", table, places, batch_dims=2), own_table, axis=3)


def keep_read_keys(
    b: GraphBuilder, table: str, caches: Sequence[str], heads: Sequence[int], sentences: str
) -> list[str]:
    """Return table and caches of some sentences, without keys that no beam reads any more.

    A sentence whose beams read fewer keys than those of another keeps some more.

    Args:
        b: a graph around the steps.
        table: [B, 1, N, T + N], of the next step.
        caches: [B, H, T, d].
        heads: H of each cache.
        sentences: int64 [n], their indices.
    """
    length, axis = b.op("Shape", caches[0], start=2, end=3), b.const([2])
    all_rows = b.op("Gather", b.op("Squeeze", table, b.const([1])), sentences, axis=0)
    rows = b.op("Slice", all_rows, b.const([0]), length, axis)
    new = b.op("Slice", all_rows, length, b.const([2**31]), axis)
    best = b.op("ReduceMax", rows, b.const([1]), keepdims=0)
    is_read = b.cast(b.op("Equal", best, b.const(0, np.float32)), np.int64)
    # a maximum of no sentences does not exist
    counts = b.op("Concat", b.op("ReduceSum", is_read, b.const([1]), keepdims=0), b.const([0]), axis=0)
    most = b.op("ReduceMax", counts, b.const([0]), keepdims=1)
    _, index = b.ops("TopK", best, most, outputs=2, axis=1)  # of equal ones the first
    beams = b.op("Concat", b.op("Shape", rows, start=0, end=2), b.const([1]), axis=0)
    by_beam = b.op("Expand", b.op("Unsqueeze", index, b.const([1])), beams)
    places: dict[int, str] = {}
    kept_caches = []
    for cache, count in zip(caches, heads, strict=True):
        if count not in places:
            places[count] = _places(b, sentences, index, count, b.op("Squeeze", length, b.const([0])))
        keys = b.op("Reshape", cache, b.op("Concat", b.const([-1]), b.op("Shape", cache, start=3), axis=0))
        kept_caches.append(b.op("Gather", keys, places[count], axis=0))
    kept_table = b.op("Concat", b.op("GatherElements", rows, by_beam, axis=2), new, axis=2)
    return [b.op("Unsqueeze", kept_table, b.const([1])), *kept_caches]


def _places(b: GraphBuilder, sentences: str, index: str, heads: int, length: str) -> str:
    """Return int64 [n, H, k]: the places in [B H T] of the keys int64 [n, k] of n `sentences`."""
    first_head = b.op("Mul", b.op("Unsqueeze", sentences, b.const([1, 2])), b.const(heads))
    head = b.op("Add", first_head, b.const(np.arange(heads)[None, :, None]))
    return b.op("Add", b.op("Mul", head, length), b.op("Unsqueeze", index, b.const([1])))


class BeamQueries:
    """Make the rows of one sentence queries of one attention, in the nodes of a step.

    A query [R, 1, W] becomes [B, N, W]; rows of beams are consecutive.
    """

    def __init__(self, outer: GraphBuilder, inside: GraphBuilder, batch: str) -> None:
        """`inside`: the graph of the step; `outer`: one around it, with B as `batch`, int64 [1]."""
        self._outer, self._inside, self._batch = outer, inside, batch
        self._shapes: dict[int, str] = {}

    def share_keys(self, widths: Mapping[str, int]) -> None:
        """Do so for attention over keys of a sentence; `widths`: W by the name of the keys."""
        self._rewrite(widths, _KEY, "")

    def share_caches(self, widths: Mapping[str, int], bias: str) -> None:
        """Do so for attention with cached keys; `widths`: W by their names; `bias`: [B, 1, N, T]."""
        self._rewrite(widths, _PAST_KEY, bias)

    def _rewrite(self, widths: Mapping[str, int], keys: int, bias: str) -> None:
        """Change the attention nodes whose input `keys` is in `widths`."""
        inside = self._inside
        original_nodes = list(inside.nodes)
        inside.nodes.clear()
        splits = {node.output[0]: node for node in original_nodes if node.op_type == "Split"}
        readers = _readers(original_nodes)
        for node in original_nodes:
            width = widths.get(node.input[keys]) if _is_attention(node, keys) else None
            if width is None:
                inside.nodes.append(node)
                continue
            inputs = node.input[: _VALUE + 1] if bias else node.input[: _QUERY + 1]
            split = splits.get(node.input[_QUERY])
            if (
                split is not None
                and list(split.output) == list(inputs)
                and not any(len(readers[name]) > 1 for name in inputs)
            ):
                position = inside.nodes.index(split)
                split.input[0] = self._reshape(split.input[0], self._shape(3 * width), position)
            else:
                for index, name in enumerate(inputs):
                    node.input[index] = self._reshape(name, self._shape(width))
            if bias:
                node.input[_ADDED] = bias
            out, node.output[0] = node.output[0], inside.new_name("attended")
            rows = self._outer.const([-1, 1, width])
            inside.nodes.append(node)
            self._reshape(node.output[0], rows, result=out)

    def _shape(self, width: int) -> str:
        """Return int64 [3]: [B, -1, width]."""
        if width not in self._shapes:
            sizes = self._outer.const([-1, width])
            self._shapes[width] = self._outer.op("Concat", self._batch, sizes, axis=0)
        return self._shapes[width]

    def _reshape(self, name: str, shape: str, position: int | None = None, result: str = "") -> str:
        from onnx import helper

        nodes, result = self._inside.nodes, result or self._inside.new_name("queries")
        nodes.insert(
            len(nodes) if position is None else position, helper.make_node("Reshape", [name, shape], [result])
        )
        return result

    def merge_reshapes(self) -> None:
        """Let each Reshape read what the one before it read; remove those that nothing reads then."""
        from onnx import numpy_helper

        nodes = self._inside.nodes
        shapes = {tensor.name: numpy_helper.to_array(tensor) for tensor in self._inside.initializers
                  if len(tensor.dims) == 1 and not tensor.external_data}  # fmt: skip
        # 0 stands for the size before
        absolute = {name for name, shape in shapes.items() if shape.all()} | set(self._shapes.values())
        reshapes = {node.output[0]: node for node in nodes if node.op_type == "Reshape"}
        merged = set()
        for node in reshapes.values():
            while node.input[1] in absolute and node.input[0] in reshapes:
                merged.add(node.input[0])
                node.input[0] = reshapes[node.input[0]].input[0]
        readers = _readers(nodes)
        for name in merged:
            if not readers[name]:
                nodes.remove(reshapes[name])


def _is_attention(node: Any, keys: int) -> bool:
    return node.op_type == _ATTENTION and len(node.input) > keys


def _readers(nodes: Sequence[Any]) -> dict[str, list[Any]]:
    """Return the nodes that read a value, by its name."""
    readers: dict[str, list[Any]] = defaultdict(list)
    for node in nodes:
        for name in node_inputs(node):
            readers[name].append(node)
    return readers
