"""Make an encoder's graph compute only on real tokens; only attention reads the padded form.

In a batch of mixed lengths most of an encoder's time is spent on linear layers and norms, which compute each
token by itself, padding included. Here the real tokens of a batch are gathered once, before the first linear
layer or norm, and all operators that compute tokens independently run on them. Attention, pooling and graph
outputs get the padded form back by a Gather, in which padding repeats the last real token: attention masks
it, pooling weights it with 0. Results at real tokens do not change, except that int8 ranges of a whole tensor
(DynamicQuantizeLinear) no longer include padding.

    Linear, Split in three -> attention          Linear -> Gather x 3 -> attention -> Gather -> Linear
    Linear, Split in n -> Reshape -> Transpose   Linear -> Gather x n

The Gather also replaces the Split into equal parts, and the transpose that puts heads first, so that little
time is lost without padding (docs/measurements/loop.md#encoder-without-padding).

Masked self-attention becomes two FusedMatMul and a Softmax. Their Gather puts the axis of the length first,
from where FusedMatMul reads the heads without a transpose. MultiHeadAttention transposes its inputs and
copies the mask for each head, and takes up to 1.7 times as long, with the same bits as result
(docs/measurements/peers.md#attention-of-encoders).

Source: Zeng et al. 2022, Boosting Distributed Training Performance of the Unpadded BERT Model,
arXiv:2208.08124.

Shapes: B = batch, L = length, N = real tokens of the batch, W = width of a value, H = heads, d = width of a
head, n = parts of a Split.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from smelt.export.generation_graph.graph_builder import GraphBuilder
from smelt.export.graph_files import read_graph, write_graph
from smelt.export.simplify_graph import drop_unused_constants
from smelt.runtimes.graph_walk import node_inputs

# operators that multiply each token with constants: all inputs but the first are the same for all tokens
_PRODUCTS = frozenset(
    {
        "MatMul",
        "MatMulInteger",
        "DynamicQuantizeMatMul",
        "MatMulIntegerToFloat",
        "MatMulNBits",
        "MatMulBnb4",
    }
)
# operators over the last axis
_LAST_AXIS = frozenset({"LayerNormalization", "SimplifiedLayerNormalization", "Split", "Softmax"})
_REDUCTIONS = frozenset({"ReduceMean", "ReduceSum"})
# their ranges and scales are of the whole tensor
_QUANTIZERS = frozenset({"DynamicQuantizeLinear", "QuantizeLinear"})
_ELEMENTWISE_NAMES = """
    Abs Add Cast Clip DequantizeLinear Div Elu Erf Exp Gelu HardSigmoid HardSwish Identity LeakyRelu Max Min
    Mish Mul Neg Pow QuickGelu Reciprocal Relu Sigmoid Softplus Sqrt Sub Tanh
"""
_ELEMENTWISE = frozenset(_ELEMENTWISE_NAMES.split())
# The first one of these reads gathered tokens. Before it are sums of embeddings: gathering their terms takes
# longer than adding padding.
_FIRST_OPS = _PRODUCTS | _QUANTIZERS | {"LayerNormalization", "SimplifiedLayerNormalization"}
# their results at real tokens do not depend on padding
_MASK_READERS = frozenset({"MultiHeadAttention", "Shape"})
_LAST_AXIS_INDEX = 2
_HEADS_FIRST = [0, 2, 1, 3]
_MASK = "attention_mask"
_ATTENTION_INPUTS = 5  # query, key, value, bias, mask of the keys
_MASK_VALUE = -10_000.0  # MultiHeadAttention's default


def remove_padding_in_file(path: Path, split_attention: bool = True) -> int:
    """Apply `remove_padding` to the graph in `path`; external weights are not moved."""
    model = read_graph(path, values=False)
    if count := remove_padding(model, split_attention):
        write_graph(model, path)
    return count


def remove_padding(model: Any, split_attention: bool = True) -> int:
    """Gather the real tokens of an encoder's graph, in place; return how many products read them.

    Graphs without an `attention_mask` of the shape of `input_ids`, int64, 0 or 1, are not changed, nor are
    operators for which the shapes in the file do not show that they compute each token by itself.

    Args:
        model: onnx.ModelProto; external weights need not be loaded.
        split_attention: replace masked self-attention by matrix multiplications, for float32 graphs.
    """
    graph = model.graph
    shapes = _Shapes(graph)
    if not shapes.has_mask:
        return 0
    unpadded = _unpadded_nodes(graph, shapes)
    count = sum(node.op_type in _PRODUCTS for node in graph.node if node.output[0] in unpadded)
    if count:
        _Rewriter(graph, shapes, unpadded, split_attention).rewrite()
    return count


class _Shapes:
    """The shapes in a graph's file: which values have one entry per token, and which are constant."""

    def __init__(self, graph: Any) -> None:
        from onnx import TensorProto

        values = (*graph.value_info, *graph.input, *graph.output)
        self._dims = {value.name: list(value.type.tensor_type.shape.dim) for value in values}
        self._constant_dims = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant":
                self._constant_dims[node.output[0]] = list(_constant(node).shape)
        self._constants = set(self._constant_dims)
        for node in graph.node:
            if all(name in self._constants for name in node_inputs(node)):
                self._constants.update(node.output)
        types = {value.name: value.type.tensor_type.elem_type for value in graph.input}
        self._axes = [dim.dim_param for dim in self._dims.get(_MASK, ())] if _MASK in types else []
        tokens = [dim.dim_param for dim in self._dims.get("input_ids", ())] if "input_ids" in types else []
        is_int64 = types.get(_MASK) == TensorProto.INT64
        self.has_mask = is_int64 and len(self._axes) == 2 and all(self._axes) and tokens == self._axes

    def width(self, name: str) -> int:
        """Return W of a value [B, L, W]; 0 if it has another shape."""
        dims = self._dims.get(name, ())
        if len(dims) != 3 or [dim.dim_param for dim in dims[:2]] != self._axes:
            return 0
        return int(dims[2].dim_value)

    def heads(self, name: str) -> tuple[int, int] | None:
        """Return H and d of a value [B, L, H, d]; None if it has another shape."""
        dims = self._dims.get(name, ())
        if len(dims) != 4 or [dim.dim_param for dim in dims[:2]] != self._axes:
            return None
        heads, width = (int(dim.dim_value) for dim in dims[2:])
        return (heads, width) if heads and width else None

    def is_constant(self, name: str) -> bool:
        """Return whether a value does not depend on the inputs."""
        return name in self._constants

    def is_same_for_all_tokens(self, name: str) -> bool:
        """Return whether a value is one number, or a constant with one entry for each column at most."""
        if name in self._constant_dims:
            dims = self._constant_dims[name]
        elif name in self._dims:
            if any(not dim.HasField("dim_value") for dim in self._dims[name]):
                return False
            dims = [dim.dim_value for dim in self._dims[name]]
        else:
            return False
        is_row = len(dims) <= 2 and all(size == 1 for size in dims[:-1])
        return is_row and (self.is_constant(name) or all(size == 1 for size in dims))


def _constant(node: Any) -> Any:
    """Return the array of a Constant node."""
    from onnx import numpy_helper

    tensors = [numpy_helper.to_array(a.t) for a in node.attribute if a.name == "value"]
    values: list[Any] = [list(a.ints) or list(a.floats) or a.i for a in node.attribute if a.name != "value"]
    return tensors[0] if tensors else np.asarray(values[0])


def _unpadded_nodes(graph: Any, shapes: _Shapes) -> set[str]:
    """Return the outputs of the nodes that can run on the real tokens only.

    A value computed with the mask is not one of them: where pooling has multiplied with the mask, padding
    is 0 and must remain 0.
    """
    unpadded, masked = set[str](), {_MASK}
    for node in graph.node:
        starts = node.op_type in _FIRST_OPS or any(name in unpadded for name in node.input)
        if not masked.isdisjoint(node_inputs(node)):
            if node.op_type not in _MASK_READERS:
                masked.update(node.output)
        elif starts and _computes_tokens_independently(node, shapes):
            unpadded.update(name for name in node.output if shapes.width(name))
    return unpadded


def _computes_tokens_independently(node: Any, shapes: _Shapes) -> bool:
    """Return whether a node computes [B, L, W] token by token from values [B, L, W] and common ones."""
    if not node.input or not node.output or not shapes.width(node.output[0]):
        return False
    input_names = [name for name in node.input if name]
    kind = node.op_type
    if kind in _PRODUCTS:
        others_are_common = all(
            shapes.is_constant(name) or shapes.is_same_for_all_tokens(name) for name in input_names[1:]
        )
        return bool(shapes.width(node.input[0])) and others_are_common
    if kind in _LAST_AXIS:
        default = 0 if kind == "Split" else -1
        axis = next((a.i for a in node.attribute if a.name == "axis"), default)
        is_last = axis in (-1, _LAST_AXIS_INDEX)
        return is_last and bool(shapes.width(node.input[0])) and _others_are_constant(node, shapes)
    if kind in _REDUCTIONS:
        return _reduces_last_axis(node, shapes)
    if kind not in _ELEMENTWISE | _QUANTIZERS:
        return False
    return any(shapes.width(name) for name in input_names) and all(
        shapes.width(name) or shapes.is_same_for_all_tokens(name) for name in input_names
    )


def _others_are_constant(node: Any, shapes: _Shapes) -> bool:
    return all(shapes.is_constant(name) for name in node.input[1:] if name)


def _reduces_last_axis(node: Any, shapes: _Shapes) -> bool:
    """Return whether a reduction keeps [B, L, 1]: its output has one entry per token."""
    return shapes.width(node.output[0]) == 1 and _others_are_constant(node, shapes)


class _Rewriter:
    """The nodes of the new graph, and its values that exist in both forms.

    A value [B, L, W] without padding is [N, W] and has the suffix `.tokens`. With two axes ONNX Runtime fuses
    a linear layer with its bias and activation (Gemm), which with three it does not.
    """

    def __init__(self, graph: Any, shapes: _Shapes, unpadded: set[str], split_attention: bool) -> None:
        self._graph, self._shapes, self._unpadded = graph, shapes, unpadded
        self._split_attention = split_attention
        self._builder = GraphBuilder(first="unpad.")
        self._readers: dict[str, list[Any]] = defaultdict(list)
        for node in graph.node:
            for name in node_inputs(node):
                self._readers[name].append(node)
        self._outputs = {output.name for output in graph.output}
        self._padded = {value.name for value in graph.input}  # values that exist as [B, L, W]
        self._tokens: dict[str, str] = {}  # values that exist as [N, W], with their names
        self._parts: dict[str, tuple[str, int, int]] = {}  # output of a removed Split: source, index, parts
        self._parts_as_rows: dict[tuple[str, int], str] = {}
        self._indices: dict[tuple[int, int, int], str] = {}
        self._scaled: dict[tuple[int, bool], str] = {}
        self._removed: set[str] = set()
        self._length_first: dict[tuple[int, int], str] = {}
        self._biases: dict[float, str] = {}
        # the mask in the type that MultiHeadAttention reads
        casts = (node for node in graph.node if node.op_type == "Cast" and node.input[0] == _MASK)
        self._cast_masks = {node.output[0] for node in casts}

    def rewrite(self) -> None:
        """Replace the graph's nodes."""
        self._add_indices()
        for node in self._graph.node:
            name = node.output[0]
            if self._split_attention and self._is_masked_self_attention(node):
                self._append_attention(node)
            elif name not in self._unpadded:
                for input_name in sorted(node_inputs(node)):
                    self._restore_padding(input_name)
                if name not in self._removed:
                    self._builder.nodes.append(node)
                    self._padded.update(node.output)
            elif not self._is_gathered_split(node):
                self._append_unpadded(node)
        for name in self._outputs:
            self._restore_padding(name)
        del self._graph.node[:]
        self._graph.node.extend(self._builder.nodes)
        drop_unused_constants(self._graph, {tensor.name for tensor in self._graph.initializer})
        self._drop_unused_shapes()

    def _add_indices(self) -> None:
        """Append the places of real tokens, int64 [N, 2], and each place's token, int64 [B, L].

        The first token of a text is always real: without tokens there would be no row to repeat.
        """
        b = self._builder
        one, axis = b.const([1]), b.const([1])
        first = b.op("Max", b.op("Slice", _MASK, b.const([0]), one, axis), one)
        others = b.op("Slice", _MASK, one, b.const([2**31]), axis)
        mask = b.op("Concat", first, others, axis=1)
        self._places = b.op("Transpose", b.op("NonZero", mask), perm=[1, 0])
        numbers = b.op("CumSum", b.op("Reshape", mask, b.const([-1])), b.const(0))
        self._token_of_place = b.op(
            "Reshape", b.op("Sub", numbers, b.const(1)), b.op("Shape", _MASK), allowzero=1
        )

    def _append_unpadded(self, node: Any) -> None:
        """Append a node that reads and computes real tokens only."""
        for index, name in enumerate(node.input):
            if name and self._shapes.width(name):
                node.input[index] = self._real_tokens(name)
        for attribute in node.attribute:
            if attribute.name == "axis" and node.op_type in _LAST_AXIS:
                attribute.i = -1
        if node.op_type in _REDUCTIONS:
            node.input[1] = self._builder.const([-1])
        for index, name in enumerate(node.output):
            if name in self._unpadded:
                node.output[index] = self._tokens[name] = f"{name}.tokens"
        self._builder.nodes.append(node)
        for name in self._outputs & self._tokens.keys():
            # what follows an output reads it alone, as formats that split the graph there need
            self._restore_padding(name)
            del self._tokens[name]

    def _real_tokens(self, name: str) -> str:
        """Return the name of a value [N, W], gathered if it exists only with padding."""
        if name not in self._tokens:
            self._tokens[name] = self._builder.op("GatherND", name, self._places)
        return self._tokens[name]

    def _is_gathered_split(self, node: Any) -> bool:
        """Return whether a Split into equal parts is not needed, because each part is gathered itself."""
        widths = {self._shapes.width(name) for name in node.output}
        if node.op_type != "Split" or len(widths) > 1:
            return False
        readers = (reader for name in node.output for reader in self._readers[name])
        if any(reader.output[0] in self._unpadded for reader in readers):
            return False
        source = self._real_tokens(node.input[0])
        for index, name in enumerate(node.output):
            self._parts[name] = source, index, len(node.output)
        return True

    def _restore_padding(self, name: str) -> None:
        """Create the value [B, L, W], or with heads first [B, H, L, d], if it does not exist."""
        if name in self._padded or (name not in self._tokens and name not in self._parts):
            return
        from onnx import helper

        self._padded.add(name)
        source, part, parts = self._parts.get(name) or (self._tokens[name], 0, 1)
        width, result, heads = self._shapes.width(name), name, 0
        if (transposed := self._transposed_heads(name)) is not None:
            result, heads, width = transposed
        rows = self._rows(source, width) if width * parts * max(1, heads) != width else source
        index = self._index(parts, part, heads)
        self._builder.nodes.append(
            helper.make_node("Gather", [rows, index], [result], f"{result}.padded", axis=0)
        )

    def _rows(self, source: str, width: int) -> str:
        """Return a value [N, W] as rows of `width`."""
        key = (source, width)
        if key not in self._parts_as_rows:
            b = self._builder
            self._parts_as_rows[key] = b.op("Reshape", source, b.const([-1, width]))
        return self._parts_as_rows[key]

    def _index(self, parts: int, part: int, heads: int) -> str:
        """Return the row of each place: int64 [B, L], or with heads [B, H, L], of one of `parts` parts."""
        key = (parts, part, heads)
        if key not in self._indices:
            b, first = self._builder, self._first_rows(parts, heads)
            offset = np.arange(part * heads, (part + 1) * heads).reshape(1, heads, 1) if heads else part
            self._indices[key] = b.op("Add", first, b.const(offset)) if heads or part else first
        return self._indices[key]

    def _first_rows(self, parts: int, heads: int) -> str:
        """Return the first row of each place's token: int64 [B, L], or with heads [B, 1, L]."""
        factor = parts * max(1, heads)
        if (factor, bool(heads)) not in self._scaled:
            b, rows = self._builder, self._token_of_place
            rows = b.op("Mul", rows, b.const(factor)) if factor > 1 else rows
            self._scaled[(factor, bool(heads))] = b.op("Unsqueeze", rows, b.const([1])) if heads else rows
        return self._scaled[(factor, bool(heads))]

    def _transposed_heads(self, name: str) -> tuple[str, int, int] | None:
        """Return the value [B, H, L, d] that a Reshape and a Transpose make of `name`, H and d.

        None if the value has another reader.
        """
        reshape = self._only_reader(name)
        shape = None if reshape is None else self._shapes.heads(reshape.output[0])
        if reshape is None or reshape.op_type != "Reshape" or shape is None:
            return None
        transpose = self._only_reader(reshape.output[0])
        if transpose is None or transpose.op_type != "Transpose":
            return None
        if next((list(a.ints) for a in transpose.attribute if a.name == "perm"), []) != _HEADS_FIRST:
            return None
        self._removed |= {reshape.output[0], transpose.output[0]}
        self._padded.add(transpose.output[0])
        return transpose.output[0], *shape

    def _is_masked_self_attention(self, node: Any) -> bool:
        """Return whether a node is attention of [B, L, W] under the mask, all known as real tokens."""
        if node.op_type != "MultiHeadAttention" or len(node.input) != _ATTENTION_INPUTS or node.input[3]:
            return False
        return (
            node.input[4] in self._cast_masks
            and all(name in self._tokens or name in self._parts for name in node.input[:3])
            and all(self._shapes.width(name) for name in (*node.input[:3], node.output[0]))
            and {a.name for a in node.attribute} <= {"num_heads", "scale", "mask_filter_value"}
        )

    def _append_attention(self, node: Any) -> None:
        """Append softmax(scale q k^T + bias) v; the bias of padding is MultiHeadAttention's."""
        b, name = self._builder, node.output[0]
        attributes = {a.name: a.i or a.f for a in node.attribute}
        heads = int(attributes["num_heads"])
        query, key, value = (self._heads_of(part, heads) for part in node.input[:3])
        width = self._shapes.width(node.input[0]) // heads
        scores = b.op(
            "FusedMatMul",
            query,
            key,
            domain="com.microsoft",
            transBatchA=1,
            transBatchB=1,
            transB=1,
            alpha=attributes.get("scale") or width**-0.5,
        )
        masked = b.op("Add", scores, self._bias(attributes.get("mask_filter_value", _MASK_VALUE)))
        weights = b.op("Softmax", masked, axis=-1)
        context = b.op("FusedMatMul", weights, value, domain="com.microsoft", transBatchB=1)
        tokens = b.op("GatherND", b.op("Transpose", context, perm=_HEADS_FIRST), self._places)
        self._tokens[name] = b.op("Reshape", tokens, b.const([-1, self._shapes.width(name)]))

    def _heads_of(self, name: str, heads: int) -> str:
        """Return a value as [L, B, H, d]."""
        b, width = self._builder, self._shapes.width(name)
        source, part, parts = self._parts.get(name) or (self._tokens[name], 0, 1)
        if (parts, part) not in self._length_first:
            self._length_first[parts, part] = b.op("Transpose", self._index(parts, part, 0), perm=[1, 0])
        rows = self._rows(source, width) if parts > 1 else source
        gathered = b.op("Gather", rows, self._length_first[parts, part], axis=0)
        return b.op("Reshape", gathered, b.const([0, 0, heads, width // heads]))

    def _bias(self, value: float) -> str:
        """Return what is added to scores: float32 [B, 1, 1, L], 0 or at padding `value`."""
        from onnx import TensorProto

        if value not in self._biases:
            b = self._builder
            padding = b.op("Sub", b.op("Cast", _MASK, to=TensorProto.FLOAT), b.const(1, np.float32))
            scaled = b.op("Mul", padding, b.const(-value, np.float32))
            self._biases[value] = b.op("Unsqueeze", scaled, b.const([1, 2]))
        return self._biases[value]

    def _only_reader(self, name: str) -> Any | None:
        readers = self._readers[name]
        return readers[0] if len(readers) == 1 and name not in self._outputs else None

    def _drop_unused_shapes(self) -> None:
        """Remove shapes of values that do not exist any more."""
        names = {name for node in self._graph.node for name in node.output}
        remaining = [value for value in self._graph.value_info if value.name in names]
        del self._graph.value_info[:]
        self._graph.value_info.extend(remaining)
