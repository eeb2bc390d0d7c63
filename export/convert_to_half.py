"""Convert a float32 graph to float16 or bfloat16, with chosen nodes in float32.

The file defines the precision: TensorRT 11 uses it unchanged, and rejects operators with two input types. So
every value has one type, and a Cast is inserted wherever a node of one precision reads an output of the
other. `logits` and sentence vectors are float32. The graph is converted instead of the torch model because
transformers' encoder layers branch on the data in float16, which cannot be traced.
"""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from smelt.core.errors import RunError
from smelt.export.value_types import (
    is_control_flow,
    node_key,
    node_types,
    output_types,
    value_types,
)
from smelt.generation.backend import ENCODER_OUTPUTS
from smelt.runtimes.graph_walk import all_nodes, iter_graphs, opset_versions, subgraphs

# names of precisions in messages
_WORDS = {"fp16": "float16", "bf16": "bfloat16"}


def convert_to_half(
    model: Any,
    name: str,
    dtype: str = "fp16",
    fp32_nodes: Collection[str] = frozenset(),
    fp32_io: Collection[str] = frozenset(),
) -> None:
    """Convert the onnx.ModelProto `model` in place.

    Args:
        model: in float32, its weights inside.
        name: the graph's, for messages.
        dtype: fp16 or bf16.
        fp32_nodes: nodes that remain float32, each by the name of its first output, including inner graphs.
            Value names must be unique.
        fp32_io: inputs and outputs of the graph that remain float32, in addition to `ENCODER_OUTPUTS`.

    Raises:
        RunError: a weight or constant of a half-precision node exceeds the range of `dtype`.
    """
    _HalfConversion(model, name, dtype, fp32_nodes, {*fp32_io, *ENCODER_OUTPUTS}).convert()


# not onnxruntime.transformers.float16 (1.31): it has no bfloat16, clips weights beyond float16 without an
# error, and where a float32 node computes an output, two of its Casts have one name, which no session opens
class _HalfConversion:
    """One conversion. types: the new type of each floating value. inner: new names of outputs.

    constants: weights and outputs of Constant. casts: of the current graph and of those around it, whose
    values it can read. depth: their number.
    """

    def __init__(
        self, model: Any, name: str, dtype: str, wide: Collection[str], outside: Collection[str]
    ) -> None:
        self.model, self.name, self.dtype, self.wide, self.outside = model, name, dtype, set(wide), outside
        self.kind = onnx_type(dtype)
        self.opsets = opset_versions(model)
        self.types: dict[str, int] = {}
        self.inner: dict[str, str] = {}
        self.casts: ChainMap[tuple[str, int], str] = ChainMap()
        self.nodes: list[Any] = []
        self.taken: set[str] = set()
        self.constants: set[str] = set()
        for graph in iter_graphs(model.graph):
            self.taken.update(value.name for value in (*graph.input, *graph.initializer))
            self.taken.update(name for node in graph.node for name in node.output)
            self.constants.update(tensor.name for tensor in graph.initializer)
            self.constants.update(node.output[0] for node in graph.node if node.op_type == "Constant")
        self.depth = self.made = 0

    def convert(self) -> None:
        from onnx import TensorProto

        graph = self.model.graph
        self.types = value_types(self.model)
        self.floats = {name for name, kind in self.types.items() if kind == TensorProto.FLOAT}
        for node in all_nodes(graph.node):
            if subgraphs(node) and not is_control_flow(node):
                self.wide |= {node_key(inner) for body in subgraphs(node) for inner in all_nodes(body.node)}
            if node.op_type == "Cast" and node.input[0] in self.constants and not _casts_to_float(node):
                self.wide.add(node.input[0])  # a Constant, which is converted as a node
        defaults = {tensor.name for tensor in graph.initializer}
        for value in [*graph.input, *graph.output]:
            keeps_float = value.name in self.outside or value.name in defaults
            if value.type.tensor_type.elem_type == TensorProto.FLOAT and not keeps_float:
                value.type.tensor_type.elem_type = self.kind
        ends = {v.name: v.type.tensor_type.elem_type for v in graph.output if v.name in self.floats}
        self.types.update(
            (v.name, v.type.tensor_type.elem_type) for v in graph.input if v.name in self.floats
        )
        self._convert_weights()
        self._convert_graph(graph, ends)

    def _convert_weights(self) -> None:
        """Convert the weights that no node reads as float32; weights read as both are cast."""
        from onnx import TensorProto

        readers: dict[str, set[int | None]] = defaultdict(set)
        for graph in iter_graphs(self.model.graph):
            for node in graph.node:
                for name, kind in zip(node.input, self._input_types(node), strict=True):
                    readers[name].add(kind)
            for value in (
                *graph.input,
                *graph.output,
            ):  # an optional input with a weight as its default
                readers[value.name].add(TensorProto.FLOAT)
        for graph in iter_graphs(self.model.graph):
            for tensor in graph.initializer:
                if tensor.data_type == TensorProto.FLOAT:
                    if TensorProto.FLOAT not in readers[tensor.name]:
                        self._convert_tensor(tensor)
                    self.types[tensor.name] = tensor.data_type

    def _convert_graph(self, graph: Any, ends: Mapping[str, int]) -> None:
        """Convert the nodes of a graph whose outputs `ends` have the given types."""
        outer_nodes, self.nodes = self.nodes, []
        self.casts = self.casts.new_child()
        for node in list(graph.node):
            self._convert_node(node, ends)
        self.casts = self.casts.parents
        nodes, self.nodes = self.nodes, outer_nodes
        del graph.node[:]
        graph.node.extend(nodes)
        for value in graph.value_info:  # without shapes ONNX Runtime fuses less
            if value.name in self.floats:
                value.type.tensor_type.elem_type = self.types[value.name]

    def _stays_fp32(self, node: Any) -> bool:
        """Return whether a node remains float32: nodes with inner graphs, and nodes with sequences, do."""
        slots = node_types(node, self.opsets)
        sequences = slots is not None and not slots.all_tensors
        return node_key(node) in self.wide or sequences or bool(subgraphs(node))

    def _input_types(self, node: Any) -> list[int | None]:
        """Return the required type of each float input; None if any is allowed."""
        from onnx import TensorProto

        if node.op_type == "Cast":
            # an integer, Boolean or double of a constant must not change; those of other values follow them
            is_constant = node.input[0] in self.constants and not _casts_to_float(node)
            return [TensorProto.FLOAT if is_constant else None]
        slots = node_types(node, self.opsets)
        if self._stays_fp32(node) or slots is None:
            return [TensorProto.FLOAT if self._stays_fp32(node) else self.kind] * len(node.input)
        return [self.kind if slot.accepts(self.kind) else TensorProto.FLOAT for slot in slots.inputs]

    def _output_types(self, node: Any) -> dict[str, int]:
        """Return the types of the float outputs of a node, after its inputs are converted."""
        from onnx import TensorProto

        floats = [name for name in node.output if name in self.floats]
        slots = node_types(node, self.opsets)
        if not floats or self._stays_fp32(node) or slots is None:
            return dict.fromkeys(floats, TensorProto.FLOAT if self._stays_fp32(node) else self.kind)
        type_by_output = output_types(node, slots, self.types, self.opsets)
        return {name: type_by_output.get(name, TensorProto.FLOAT) for name in floats}

    def _convert_node(self, node: Any, ends: Mapping[str, int]) -> None:
        from onnx import TensorProto, helper

        for index, (name, kind) in enumerate(zip(node.input, self._input_types(node), strict=True)):
            node.input[index] = self._cast_input(name, kind)
        for body in subgraphs(node):
            self.depth += 1
            self._convert_graph(
                body, {v.name: TensorProto.FLOAT for v in body.output if v.name in self.floats}
            )
            self.depth -= 1
        if not self._stays_fp32(node):
            self._convert_attributes(node)
        output_kinds = self._output_types(node)
        self.types.update(output_kinds)
        self.nodes.append(node)
        for index, name in enumerate(node.output):
            if name in output_kinds and ends.get(name, output_kinds[name]) != output_kinds[name]:
                self.inner[name] = node.output[index] = inner = self._unused_name(f"{name}_inner")
                self.types[inner] = output_kinds[name]
                self.nodes.append(helper.make_node("Cast", [inner], [name], f"{name}.cast", to=ends[name]))

    def _convert_attributes(self, node: Any) -> None:
        """Convert the values of a constant, and the target type of a Cast to float32."""
        from onnx import TensorProto, numpy_helper

        for attribute in node.attribute:
            if attribute.HasField("t"):
                self._convert_tensor(attribute.t)
            elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
                floats = attribute.f if attribute.name == "value_float" else list(attribute.floats)
                tensor = numpy_helper.from_array(np.asarray(floats, np.float32), node_key(node))
                self._convert_tensor(tensor)
                attribute.Clear()
                attribute.name, attribute.type = "value", attribute.TENSOR
                attribute.t.CopyFrom(tensor)
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = self.kind

    def _cast_input(self, name: str, kind: int | None) -> str:
        """Return the name of input `name` in the type `kind`, after a new Cast if necessary."""
        from onnx import helper

        source = self.inner.get(name, name)
        if kind is None or name not in self.floats or self.types[name] == kind:
            return source
        if (name, kind) not in self.casts:
            dtype_name = helper.tensor_dtype_to_string(kind).rpartition(".")[2].lower()
            # names in one graph may not be those of an outer graph, whose Cast may come later
            self.made += self.depth > 0
            cast_name = self._unused_name(f"{name}.{dtype_name}" + (f".{self.made}" if self.depth else ""))
            self.casts[name, kind] = cast_name
            self.types[cast_name] = kind
            self.nodes.append(helper.make_node("Cast", [source], [cast_name], f"{cast_name}.cast", to=kind))
        return self.casts[name, kind]

    def _unused_name(self, name: str) -> str:
        """Return `name`, or a similar unused name if a value of the graph has it already."""
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name

    def _convert_tensor(self, tensor: Any) -> None:
        from onnx import TensorProto, numpy_helper

        if tensor.data_type != TensorProto.FLOAT:
            return
        values = numpy_helper.to_array(tensor)
        narrowed = _to_half(values, self.dtype)
        if not bool(narrowed.isfinite().all()):
            raise RunError(
                f"{self.name}: '{tensor.name}' contains {float(np.abs(values).max()):.4g}, which exceeds the"
                f" range of {_WORDS[self.dtype]} (65504). Export with dtype: fp32.",
                code="beyond-16-bits",
            )
        # in place: protobuf cannot copy tensors above 2 GB
        tensor.ClearField("float_data")
        tensor.data_type, tensor.raw_data = self.kind, _raw_bytes(narrowed)


def _casts_to_float(node: Any) -> bool:
    """Return whether a Cast returns a type that is float32 or narrower, so its input may be narrower too."""
    from onnx import TensorProto

    narrow = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
    return any(attribute.name == "to" and attribute.i in narrow for attribute in node.attribute)


def onnx_type(dtype: str) -> int:
    """Return ONNX's number of the value type of a fp16 or bf16 graph."""
    from onnx import TensorProto

    return int({"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}[dtype])


def _to_half(values: Any, dtype: str) -> Any:
    """Return a float32 array as a tensor of float16 or bfloat16; values beyond its range become infinite."""
    import torch

    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    return torch.from_numpy(np.array(values)).to(kind)


def _raw_bytes(narrowed: Any) -> bytes:
    import torch

    raw: bytes = narrowed.view(torch.int16).numpy().astype("<i2").tobytes()
    return raw
