"""From a float32 graph to a float16 or bfloat16 one, in which chosen nodes stay float32.

Precision lives in the file: TensorRT 11 takes it as it is, and two types into one operator are a parse
error there. So every value has one type, and a Cast stands wherever a node of one precision reads what one
of the other gives. `logits` and the vectors of texts leave as float32. The graph is converted instead of the
torch model because transformers' encoder layers branch on the data in float16, which cannot be traced.
"""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from smelt.core.errors import RunError
from smelt.export.precision.types import (
    given_types,
    graphs_of,
    is_control,
    key_of,
    opsets_of,
    slots_of,
    value_types,
)
from smelt.runtime.batch import ENCODED
from smelt.runtime.foreign.structure import all_nodes, inner_graphs

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
        wide: nodes that stay float32, each by the name of its first output, those of inner graphs too. No
            two values have one name.
        outside: inputs and outputs of the graph that stay float32, beside `ENCODED`.

    Raises:
        RunError: a weight or constant that a narrow node reads lies outside what `dtype` can hold.
    """
    _Narrowing(model, name, dtype, wide, {*outside, *ENCODED}).convert()


class _Narrowing:
    """One conversion. types: of each floating value, as it will be. inner: new names of outputs.

    casts: of the graph at hand and of those around it, whose values it sees. depth: how many are around it.
    """

    def __init__(
        self, model: Any, name: str, dtype: str, wide: Collection[str], outside: Collection[str]
    ) -> None:
        self.model, self.name, self.dtype, self.wide, self.outside = model, name, dtype, set(wide), outside
        self.kind = onnx_type(dtype)
        self.opsets = opsets_of(model)
        self.types: dict[str, int] = {}
        self.inner: dict[str, str] = {}
        self.casts: ChainMap[tuple[str, int], str] = ChainMap()
        self.nodes: list[Any] = []
        self.taken: set[str] = set()
        for graph in graphs_of(model.graph):
            self.taken.update(value.name for value in (*graph.input, *graph.initializer))
            self.taken.update(name for node in graph.node for name in node.output)
        self.depth = self.made = 0

    def convert(self) -> None:
        from onnx import TensorProto

        graph = self.model.graph
        self.types = value_types(self.model)
        self.floats = {name for name, kind in self.types.items() if kind == TensorProto.FLOAT}
        for node in all_nodes(graph.node):
            if inner_graphs(node) and not is_control(node):
                self.wide |= {key_of(one) for body in inner_graphs(node) for one in all_nodes(body.node)}
        defaults = {tensor.name for tensor in graph.initializer}
        for value in [*graph.input, *graph.output]:
            stays = value.name in self.outside or value.name in defaults
            if value.type.tensor_type.elem_type == TensorProto.FLOAT and not stays:
                value.type.tensor_type.elem_type = self.kind
        ends = {v.name: v.type.tensor_type.elem_type for v in graph.output if v.name in self.floats}
        self.types.update(
            (v.name, v.type.tensor_type.elem_type) for v in graph.input if v.name in self.floats
        )
        self._convert_weights()
        self._convert_graph(graph, ends)

    def _convert_weights(self) -> None:
        """Convert what no node reads as float32; what is read as both is cast for the narrow ones."""
        from onnx import TensorProto

        readers: dict[str, set[int | None]] = defaultdict(set)
        for graph in graphs_of(self.model.graph):
            for node in graph.node:
                for name, kind in zip(node.input, self._wanted(node), strict=True):
                    readers[name].add(kind)
            for value in (
                *graph.input,
                *graph.output,
            ):  # an input that may be left out, a weight that is given
                readers[value.name].add(TensorProto.FLOAT)
        for graph in graphs_of(self.model.graph):
            for tensor in graph.initializer:
                if tensor.data_type == TensorProto.FLOAT:
                    if TensorProto.FLOAT not in readers[tensor.name]:
                        self._convert_tensor(tensor)
                    self.types[tensor.name] = tensor.data_type

    def _convert_graph(self, graph: Any, ends: Mapping[str, int]) -> None:
        """Convert the nodes of a graph, which is to give `ends` of these types."""
        around, self.nodes = self.nodes, []
        self.casts = self.casts.new_child()
        for node in list(graph.node):
            self._convert_node(node, ends)
        self.casts = self.casts.parents
        made, self.nodes = self.nodes, around
        del graph.node[:]
        graph.node.extend(made)
        del graph.value_info[:]

    def _is_wide(self, node: Any) -> bool:
        """Say whether a node stays float32: what holds graphs does, and what gives or reads sequences."""
        slots = slots_of(node, self.opsets)
        sequences = slots is not None and not slots.tensors
        return key_of(node) in self.wide or sequences or bool(inner_graphs(node))

    def _wanted(self, node: Any) -> list[int | None]:
        """Return the type in which each input is read where it is a float; None of any."""
        from onnx import TensorProto

        if node.op_type == "Cast":
            return [None]
        slots = slots_of(node, self.opsets)
        if self._is_wide(node) or slots is None:
            return [TensorProto.FLOAT if self._is_wide(node) else self.kind] * len(node.input)
        return [self.kind if slot.takes(self.kind) else TensorProto.FLOAT for slot in slots.inputs]

    def _given(self, node: Any) -> dict[str, int]:
        """Return the types of the floats that a node gives, once what it reads is converted."""
        from onnx import TensorProto

        floats = [name for name in node.output if name in self.floats]
        slots = slots_of(node, self.opsets)
        if not floats or self._is_wide(node) or slots is None:
            return dict.fromkeys(floats, TensorProto.FLOAT if self._is_wide(node) else self.kind)
        found = given_types(node, slots, self.types, self.opsets)
        return {name: found.get(name, TensorProto.FLOAT) for name in floats}

    def _convert_node(self, node: Any, ends: Mapping[str, int]) -> None:
        from onnx import TensorProto, helper

        for place, (name, kind) in enumerate(zip(node.input, self._wanted(node), strict=True)):
            node.input[place] = self._read(name, kind)
        for body in inner_graphs(node):
            self.depth += 1
            self._convert_graph(
                body, {v.name: TensorProto.FLOAT for v in body.output if v.name in self.floats}
            )
            self.depth -= 1
        if not self._is_wide(node):
            self._convert_attributes(node)
        given = self._given(node)
        self.types.update(given)
        self.nodes.append(node)
        for place, name in enumerate(node.output):
            if name in given and ends.get(name, given[name]) != given[name]:
                self.inner[name] = node.output[place] = inner = self._fresh(f"{name}_inner")
                self.types[inner] = given[name]
                self.nodes.append(helper.make_node("Cast", [inner], [name], f"{name}.cast", to=ends[name]))

    def _convert_attributes(self, node: Any) -> None:
        """Narrow the numbers of a constant, and what a Cast to float32 gives."""
        from onnx import TensorProto, numpy_helper

        for attribute in node.attribute:
            if attribute.HasField("t"):
                self._convert_tensor(attribute.t)
            elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
                numbers = attribute.f if attribute.name == "value_float" else list(attribute.floats)
                tensor = numpy_helper.from_array(np.asarray(numbers, np.float32), key_of(node))
                self._convert_tensor(tensor)
                attribute.Clear()
                attribute.name, attribute.type = "value", attribute.TENSOR
                attribute.t.CopyFrom(tensor)
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = self.kind

    def _read(self, name: str, kind: int | None) -> str:
        """Return what a node reads for `name`, of the type `kind`; behind a new Cast where it has another."""
        from onnx import helper

        source = self.inner.get(name, name)
        if kind is None or name not in self.floats or self.types[name] == kind:
            return source
        if (name, kind) not in self.casts:
            word = helper.tensor_dtype_to_string(kind).rpartition(".")[2].lower()
            # names in one graph may not be those of a graph around it, whose Cast may come later
            self.made += self.depth > 0
            made = self._fresh(f"{name}.{word}" + (f".{self.made}" if self.depth else ""))
            self.casts[name, kind] = made
            self.types[made] = kind
            self.nodes.append(helper.make_node("Cast", [source], [made], f"{made}.cast", to=kind))
        return self.casts[name, kind]

    def _fresh(self, name: str) -> str:
        """Return `name`, or one like it where a value of the graph has it already."""
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name

    def _convert_tensor(self, tensor: Any) -> None:
        from onnx import TensorProto, numpy_helper

        if tensor.data_type != TensorProto.FLOAT:
            return
        values = numpy_helper.to_array(tensor)
        narrowed = _halved(values, self.dtype)
        if not bool(narrowed.isfinite().all()):
            raise RunError(
                f"{self.name}: '{tensor.name}' holds {float(np.abs(values).max()):.4g}, which"
                f" {_WORDS[self.dtype]} cannot (at most 65504). Export with dtype: fp32.",
                code="beyond-16-bits",
            )
        # in place: protobuf copies no tensor above 2 GB
        tensor.ClearField("float_data")
        tensor.data_type, tensor.raw_data = self.kind, _bytes(narrowed)


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
    from onnx import TensorProto

    kind = TensorProto.FLOAT if kind is None else kind
    return {name for name, found in value_types(model).items() if found == kind}
