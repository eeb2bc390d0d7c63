"""Restrict the output layer to the shortlist of the source tokens of a batch.

Before the loop, the table gives the tokens that may occur in any row of the batch. The matrix rows of these
tokens are gathered once; a step multiplies only with them, and tokens of other sentences are excluded.

    words   = the table's entries for all tokens of the batch, and the always allowed tokens   int64 [C]
    hidden  = 0 if the row's own source has the token in its list, else -inf                   float32 [B, C]
    logits  = x W[words]^T + bias[words] + hidden                                              float32 [R, C]

Integer matrix multiplications remain integer: ONNX Runtime multiplies with gathered weights as with constant
ones, with the same bits. MatMulNBits requires constants, so its gathered weights become float32.

Shapes: B = sentences, R = rows, L = source length, S = source vocabulary, V = target vocabulary,
n = candidates per source token, C = remaining tokens, K = inputs of the layer, g = group, G = groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from smelt.core.errors import RunError
from smelt.export.generation_graph.graph_builder import GraphBuilder, GraphConstants, GraphLevel
from smelt.generation.shortlist import ALWAYS_TENSOR, SHORTLIST_FILE, TABLE_TENSOR

# operators that compute logits, and their inputs with a vocabulary axis, with that axis
_VOCABULARY_AXES: dict[str, dict[int, int]] = {
    "Gemm": {1: 0, 2: 0},  # the matrix as stored in torch; of another, the axis is 1
    "MatMul": {1: 1},
    "MatMulNBits": {1: 0, 2: 0, 3: 0, 5: 0},
    "DynamicQuantizeMatMul": {1: 1, 2: 0, 3: 0, 4: 0},
    "MatMulIntegerToFloat": {1: 1, 3: 0, 6: 0},
}
_PREFIX = "head."
_TINY = 1e-30


@dataclass(frozen=True)
class ShortlistTokens:
    """token_ids: int64 [C], ascending. excluded: float32 [B, C]. Names in the outermost graph."""

    token_ids: str
    excluded: str


def gather_shortlist(b: GraphBuilder, folder: Path, vocabulary: int) -> ShortlistTokens:
    """Append nodes that find the shortlist of a batch with the table in `folder`; V is `vocabulary`."""
    from onnx import numpy_helper

    b.initializers += [_external_tensor(folder, TABLE_TENSOR), _external_tensor(folder, ALWAYS_TENSOR)]
    zero = b.op("Slice", ALWAYS_TENSOR, b.const([0]), b.const([1]))
    brought = b.cast(b.op("Gather", TABLE_TENSOR, "input_ids", axis=0), np.int64)  # [B, L, n]
    padded = b.op("Unsqueeze", b.op("Equal", "attention_mask", b.const(0)), b.const([2]))
    batch = b.row_count("input_ids")
    wide = b.op(
        "Unsqueeze", b.op("Mul", b.dimension("input_ids", 1), b.dimension(TABLE_TENSOR, 1)), b.const([0])
    )
    flat = b.op("Concat", batch, wide, axis=0)
    brought = b.op("Reshape", b.op("Where", padded, zero, brought), flat)  # [B, L * n]
    each = b.op("Expand", ALWAYS_TENSOR, b.op("Concat", batch, b.row_count(ALWAYS_TENSOR), axis=0))
    own = b.op("Concat", brought, each, axis=1)
    # a forced token need not be on any list
    forced = b.op("Where", b.op("Less", "forced_tokens", b.const(0)), zero, "forced_tokens")
    asked = b.op("Concat", b.op("Reshape", own, b.const([-1])), forced, axis=0)

    def filled(shape: str, value: Any) -> str:
        return b.op("ConstantOfShape", shape, value=numpy_helper.from_array(np.array([value])))

    all_words = b.const([vocabulary])
    true = b.op("Expand", b.const(True, np.bool_), b.op("Shape", asked))
    seen = b.op("ScatterElements", filled(all_words, False), asked, true, axis=0)
    words = b.op("Squeeze", b.op("NonZero", seen), b.const([0]))
    count = b.op("Range", b.const(0), b.dimension(words, 0), b.const(1))
    place = b.op("ScatterElements", filled(all_words, np.int64(0)), words, count, axis=0)
    none = filled(b.op("Concat", batch, b.row_count(words), axis=0), np.float32(-np.inf))
    open_ = b.op("Expand", b.const(0, np.float32), b.op("Shape", own))
    hidden = b.op("ScatterElements", none, b.op("Gather", place, own, axis=0), open_, axis=1)
    return ShortlistTokens(words, hidden)


def _external_tensor(folder: Path, name: str) -> Any:
    """Return a tensor of the shortlist's own file as external data."""
    from onnx import TensorProto, helper
    from onnx.external_data_helper import set_external_data

    from smelt.models.weight_files import read_header

    path = folder / SHORTLIST_FILE
    entry = read_header(path)[name]
    kind = {"U16": TensorProto.UINT16, "I32": TensorProto.INT32, "I64": TensorProto.INT64}[entry["dtype"]]
    begin, end = entry["data_offsets"]
    with path.open("rb") as stream:
        first = 8 + int.from_bytes(stream.read(8), "little")
        if end - begin < 1024:  # onnx reads small tensors where it infers shapes
            stream.seek(first + begin)
            return helper.make_tensor(name, kind, entry["shape"], stream.read(end - begin), raw=True)
    tensor = TensorProto(name=name, data_type=kind, dims=entry["shape"], raw_data=b"0")
    set_external_data(tensor, SHORTLIST_FILE, offset=first + begin, length=end - begin)
    tensor.ClearField("raw_data")
    return tensor


class ShortlistHead:
    """The output layer of a decoder's graph, for the shortlist of the batch only.

    rest: the onnx.GraphProto without it. states: the name of the layer's input, float32 [R, K].
    """

    def __init__(self, graph: Any) -> None:
        """Find the output layer in an onnx.GraphProto of one step.

        Raises:
            RunError: an unsupported operator computes its logits.
        """
        self._constants = GraphConstants(graph)
        producers: dict[str, Any] = {name: node for node in graph.node for name in node.output}
        last = producers.get("logits")
        node: Any = last
        self._shift = ""
        if node is not None and node.op_type == "Add":  # a bias after the matrix multiplication
            node, self._shift = producers.get(node.input[0]), node.input[1]
        if node is None or node.op_type not in _VOCABULARY_AXES:
            kind = "nothing" if node is None else node.op_type
            raise RunError(
                f"{graph.name}: a shortlist cannot restrict the output layer: {kind} computes its logits;"
                f" supported: {', '.join(_VOCABULARY_AXES)}. Set generation_graph: false.",
                code="unsupported-graph",
            )
        self._product: Any = node
        self.states: str = node.input[0]
        self.rest = _remove_nodes(graph, {id(node), id(last)})

    def gather_weights(self, root: GraphLevel, words: str) -> None:
        """Append to the outermost graph nodes that gather the layer's matrix rows of `words`."""
        node, axes = self._product, dict(_VOCABULARY_AXES[self._product.op_type])
        if node.op_type == "Gemm" and not _attributes(node).get("transB"):
            axes[1] = 1
        self._inputs = {
            at: self._gather_constant(root, name, words, axes.get(at))
            for at, name in enumerate(node.input)
            if name and at and name in self._constants
        }
        if node.op_type == "MatMulNBits":
            self._inputs[1] = self._dequantize(root.builder)
        self._bias = self._gather_constant(root, self._shift, words, 0) if self._shift else ""

    def shortlist_logits(self, b: GraphBuilder, states: str) -> str:
        """Append to a step's graph the logits float32 [R, C] of float32 `states` [R, K]."""
        node = self._product
        if node.op_type == "MatMulNBits":
            bias = [self._inputs[5]] if 5 in self._inputs else []
            logits = b.op(
                "Gemm", _rounded_activations(b, states, _attributes(node)), self._inputs[1], *bias, transB=1
            )
        else:
            inputs = [states, *(self._inputs.get(at, node.input[at]) for at in range(1, len(node.input)))]
            logits = b.op(node.op_type, *inputs, domain=node.domain, **_attributes(node))
        return b.op("Add", logits, self._bias) if self._bias else logits

    def _gather_constant(self, root: GraphLevel, name: str, words: str, axis: int | None) -> str:
        """Return a constant; if it has a vocabulary axis, only the entries of `words`."""
        b = root.builder
        if axis != 1:
            known = self._constants.copy_to(name, root, _PREFIX)
            return (
                known
                if axis is None or self._constants.is_scalar(name)
                else b.op("Gather", known, words, axis=0)
            )
        # gathering whole rows is many times as fast as gathering scattered elements
        turned = self._constants.transpose_of(name)
        if turned is not None:
            rows = self._constants.copy_to(turned, root, _PREFIX)
        else:
            rows = b.op("Transpose", self._constants.copy_to(name, root, _PREFIX), perm=[1, 0])
        return b.op("Transpose", b.op("Gather", rows, words, axis=0), perm=[1, 0])

    def _dequantize(self, b: GraphBuilder) -> str:
        """Return the dequantized gathered weights of a MatMulNBits, float32 [C, K]."""
        asked = _attributes(self._product)
        bits, size = asked["bits"], asked["block_size"]
        codes = _unpack_bits(b, self._inputs[1], bits, size)  # [C, G, g]
        if 3 in self._inputs:
            packed = b.op("Unsqueeze", self._inputs[3], b.const([1]))
            zeros = _unpack_bits(b, packed, bits, b.op("Shape", codes, start=1, end=2))  # [C, 1, G]
            zeros = b.op("Transpose", zeros, perm=[0, 2, 1])
        else:
            zeros = b.const(2 ** (bits - 1), np.float32)
        scales = b.op("Unsqueeze", self._inputs[2], b.const([2]))
        values = b.op("Mul", b.op("Sub", codes, zeros), scales)
        rows = b.op("Reshape", values, b.op("Concat", b.row_count(codes), b.const([-1]), axis=0))
        return b.op("Slice", rows, b.const([0]), b.const([asked["K"]]), b.const([1]))


def _unpack_bits(b: GraphBuilder, packed: str, bits: int, most: int | str) -> str:
    """Unpack uint8 [C, G, n], the first value in the lowest bits, to float32 [C, G, most]."""
    parts = []
    for shift in range(0, 8, bits):
        moved = b.op("BitShift", packed, b.const(shift, np.uint8), direction="RIGHT") if shift else packed
        parts.append(b.op("BitwiseAnd", moved, b.const(2**bits - 1, np.uint8)))
    both = b.op("Concat", *(b.op("Unsqueeze", part, b.const([3])) for part in parts), axis=3)
    flat = b.op("Reshape", both, b.const([0, 0, -1]))
    end = b.const([most]) if isinstance(most, int) else most
    return b.cast(b.op("Slice", flat, b.const([0]), end, b.const([2])), np.float32)


def _rounded_activations(b: GraphBuilder, states: str, asked: Mapping[str, Any]) -> str:
    """Return float32 [R, K] rounded as a MatMulNBits with these attributes rounds its input.

    At accuracy level 4 blocks of g are rounded to int8 (`smelt/quantization/groupwise.py`).
    """
    if asked.get("accuracy_level", 0) != 4:
        return states
    width, size = asked["K"], asked["block_size"]
    odd = -width % size
    padded = b.op("Pad", states, b.const([0, 0, 0, odd])) if odd else states
    blocks = b.op("Reshape", padded, b.const([0, -1, size]))
    largest = b.op("ReduceMax", b.op("Abs", blocks), b.const([2]), keepdims=1)
    # a block of zeros is not changed
    scales = b.op("Max", b.op("Mul", largest, b.const(1 / 127, np.float32)), b.const(_TINY, np.float32))
    codes = b.op("Round", b.op("Mul", blocks, b.op("Reciprocal", scales)))
    left = b.op("Reshape", b.op("Mul", codes, scales), b.const([0, -1]))
    return b.op("Slice", left, b.const([0]), b.const([width]), b.const([1])) if odd else left


def _attributes(node: Any) -> dict[str, Any]:
    from onnx import helper

    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _remove_nodes(graph: Any, nodes: set[int]) -> Any:
    """Return a copy of a graph without the nodes whose `id` is in `nodes`."""
    import onnx

    kept = [node for node in graph.node if id(node) not in nodes]
    copy = onnx.GraphProto(name=graph.name, input=graph.input, initializer=graph.initializer)
    copy.node.extend(kept)
    return copy
