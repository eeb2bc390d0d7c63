"""From a float32 graph to a float16 or bfloat16 one, in which chosen nodes stay float32.

Precision lives in the file: TensorRT 11 takes it as it is, and two types into one operator are a parse
error there. So every value has one type, and a Cast stands wherever a node of one precision reads what one
of the other gives. `logits` and the vectors of texts leave as float32. The graph is converted instead of the
torch model because transformers' encoder layers branch on the data in float16, which cannot be traced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

import numpy as np

from smelt.core.errors import RunError
from smelt.runtime.batch import ENCODED

# what the precisions of a file are called in messages
_WORDS = {"fp16": "float16", "bf16": "bfloat16"}


def narrow(
    model: Any,
    name: str,
    dtype: str = "fp16",
    wide: Collection[str] = frozenset(),
    outside: Collection[str] = frozenset(),
) -> None:
    """Convert the onnx.ModelProto `model` in place.

    Args:
        model: in float32, its weights inside.
        name: the graph's, for messages.
        dtype: fp16 or bf16.
        wide: nodes that stay float32, each by the name of its first output.
        outside: inputs and outputs of the graph that stay float32, beside `ENCODED`.

    Raises:
        RunError: a weight or constant that a narrow node reads lies outside what `dtype` can hold.
    """
    _Narrowing(model, name, dtype, wide, {*outside, *ENCODED}).convert()


class _Narrowing:
    """One conversion. types: of each floating value, as it will be. inner: new names of outputs."""

    def __init__(
        self, model: Any, name: str, dtype: str, wide: Collection[str], outside: Collection[str]
    ) -> None:
        self.model, self.name, self.dtype, self.wide, self.outside = model, name, dtype, wide, outside
        self.kind = onnx_type(dtype)
        self.types: dict[str, int] = {}
        self.inner: dict[str, str] = {}
        self.casts: dict[tuple[str, int], str] = {}
        self.nodes: list[Any] = []

    def convert(self) -> None:
        from onnx import TensorProto

        graph, floats = self.model.graph, float_values(self.model)
        for value in [*graph.input, *graph.output]:
            if value.type.tensor_type.elem_type == TensorProto.FLOAT and value.name not in self.outside:
                value.type.tensor_type.elem_type = self.kind
        self.types = {
            value.name: value.type.tensor_type.elem_type for value in graph.input if value.name in floats
        }
        self._convert_weights()
        ends = {o.name: o.type.tensor_type.elem_type for o in graph.output if o.name in floats}
        for node in list(graph.node):
            self._convert_node(node, floats, ends)
        del graph.node[:]
        graph.node.extend(self.nodes)
        del graph.value_info[:]

    def _convert_weights(self) -> None:
        """Convert what no float32 node reads; what both kinds read is cast for the narrow ones."""
        from onnx import TensorProto

        readers: dict[str, set[bool]] = defaultdict(set)
        for node in self.model.graph.node:
            for name in node.input:
                readers[name].add(_key(node) in self.wide)
        for tensor in self.model.graph.initializer:
            if tensor.data_type == TensorProto.FLOAT:
                if True not in readers[tensor.name]:
                    self._convert_tensor(tensor)
                self.types[tensor.name] = tensor.data_type

    def _convert_node(self, node: Any, floats: set[str], ends: dict[str, int]) -> None:
        from onnx import TensorProto, helper

        kind = TensorProto.FLOAT if _key(node) in self.wide else self.kind
        for place, name in enumerate(node.input):
            node.input[place] = self._read(name, kind if node.op_type != "Cast" else None)
        if kind == self.kind:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    self._convert_tensor(attribute.t)
                if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                    attribute.i = self.kind
        self.nodes.append(node)
        for place, name in enumerate(node.output):
            if name not in floats:
                continue
            self.types[name] = kind
            if ends.get(name, kind) != kind:
                self.inner[name] = node.output[place] = f"{name}_inner"
                self.nodes.append(
                    helper.make_node("Cast", [f"{name}_inner"], [name], f"{name}.cast", to=ends[name])
                )

    def _read(self, name: str, kind: int | None) -> str:
        """Return what a node reads for `name`, of the type `kind`; behind a new Cast where it has another."""
        from onnx import helper

        source = self.inner.get(name, name)
        if kind is None or self.types.get(name, kind) == kind:
            return source
        if (name, kind) not in self.casts:
            word = helper.tensor_dtype_to_string(kind).rpartition(".")[2].lower()
            self.casts[name, kind] = made = f"{name}.{word}"
            self.nodes.append(helper.make_node("Cast", [source], [made], f"{made}.cast", to=kind))
        return self.casts[name, kind]

    def _convert_tensor(self, tensor: Any) -> None:
        from onnx import TensorProto, numpy_helper

        if tensor.data_type != TensorProto.FLOAT:
            return
        values = numpy_helper.to_array(tensor)
        narrowed = _halved(values, self.dtype)
        if not bool(narrowed.isfinite().all()):
            raise RunError(
                f"{self.name}: '{tensor.name}' holds {float(np.abs(values).max()):.4g}, which"
                f" {_WORDS[self.dtype]} cannot (at most 65504). Export with dtype: fp32."
            )
        # in place: protobuf copies no tensor above 2 GB
        tensor.ClearField("float_data")
        tensor.data_type, tensor.raw_data = self.kind, _bytes(narrowed)


def _key(node: Any) -> str:
    return str(node.output[0])


def onnx_type(dtype: str) -> int:
    """Return ONNX's number of the type that values of a fp16 or bf16 graph have."""
    from onnx import TensorProto

    return int({"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}[dtype])


def _halved(values: Any, dtype: str) -> Any:
    """Return a float32 array as a tensor of float16 or bfloat16; what is beyond it becomes infinite."""
    import torch

    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    return torch.from_numpy(np.array(values)).to(kind)


def _bytes(narrowed: Any) -> bytes:
    import torch

    found: bytes = narrowed.view(torch.int16).numpy().astype("<i2").tobytes()
    return found


def float_values(model: Any, kind: int | None = None) -> set[str]:
    """Return the names of all values of a type, float32 by default: inputs, weights, what nodes give."""
    import onnx
    from onnx import TensorProto, helper

    kind = TensorProto.FLOAT if kind is None else kind
    # a copy without weights, which may be more than one protobuf holds; types do not depend on them
    graph = model.graph
    weights = [helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in graph.initializer]
    there = {value.name for value in graph.input}
    inputs = [*graph.input, *(value for value in weights if value.name not in there)]
    light = helper.make_graph(graph.node, "types", inputs, graph.output, value_info=graph.value_info)
    bare = helper.make_model(light, opset_imports=model.opset_import, ir_version=model.ir_version)
    inferred = onnx.shape_inference.infer_shapes(bare).graph
    known = (*inferred.input, *inferred.value_info, *inferred.output)
    return {value.name for value in known if value.type.tensor_type.elem_type == kind}
