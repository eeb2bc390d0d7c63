"""The graph that the rules check, read once; and the rules on values, inputs, sizes and element types.

Values: overflow, inputs that became constants, too many axes. Types: which are supported, where, and in which
combinations. TensorRT's networks are strongly typed: values are converted only by a Cast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from smelt.core.errors import RunError
from smelt.core.messages import Message
from smelt.quantization.scheme import NVIDIA_DOMAIN
from smelt.runtimes.graph_walk import normalized_domain

QDQ_OPS = ("QuantizeLinear", "DequantizeLinear")
# the operators that TensorRT's parser knows in `NVIDIA_DOMAIN`; the first two as in ONNX
NVIDIA_OPS = frozenset({
    *QDQ_OPS, "TRT_FP8QuantizeLinear", "TRT_FP8DequantizeLinear", "TRT_INT4QuantizeLinear",
    "TRT_INT4DequantizeLinear", "TRT_MXFP8QuantizeLinear", "TRT_MXFP8DequantizeLinear",
    "TRT_MXFP8DynamicQuantize", "TRT_FP4DynamicQuantize",
})  # fmt: skip
_FLOATS = frozenset({"float", "float16", "bfloat16", "double"})
TENSORRT_REEXPORT_HINT = "Export again with onnx: {target: tensorrt}."
ProblemSeverity = Literal["error", "warning"]


class TensorrtProblem(NamedTuple):
    """One finding. An error stops the build, a warning is added to the report.

    location: a node, a constant, an input, or empty for the whole graph. reason: the cause. hint: what to do.
    rule: the name of the rule. graph: the file's name.
    """

    severity: ProblemSeverity
    reason: str
    location: str = ""
    hint: str = ""
    rule: str = ""
    graph: str = ""

    @property
    def text(self) -> str:
        """The finding as one line: file, location, reason, hint."""
        return str(self.as_message())

    def as_message(self) -> Message:
        """Return the finding as a message for the report."""
        location_text = f"{self.location}: " if self.location else ""
        return Message(
            code=f"tensorrt-{self.rule}",
            severity=self.severity,
            message=f"{location_text}{self.reason}{' ' if self.hint else ''}{self.hint}",
            file=self.graph or None,
        )


class RuleFinding(NamedTuple):
    """The result of a rule: location, reason, hint."""

    location: str
    reason: str
    hint: str = TENSORRT_REEXPORT_HINT


@dataclass
class CheckedGraph:
    """An ONNX model as the rules see it.

    model: the ModelProto; external weights are read only when a rule needs them. path: its file.
    nodes: all, including those inside If, Loop and Scan. constants: name -> TensorProto, of initializers and
    Constant nodes. types: name -> element type, inferred if the file does not declare it; 0 or absent if
    unknown. producers: name -> the node that computes it.
    """

    model: Any
    path: Path
    nodes: list[Any] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    types: dict[str, int] = field(default_factory=dict)
    producers: dict[str, Any] = field(default_factory=dict)

    def nodes_of_type(self, *operators: str) -> Iterator[Any]:
        """Yield the standard nodes of these operators; of all operators if none is named."""
        for node in self.nodes:
            is_standard = not normalized_domain(node.domain) or (
                node.domain == NVIDIA_DOMAIN and node.op_type in QDQ_OPS
            )
            if is_standard and (not operators or node.op_type in operators):
                yield node

    def element_type(self, name: str) -> int:
        """Return the element type of a value, 0 if unknown."""
        return self.types.get(name, 0)

    def constant_value(self, name: str) -> Any:
        """Return a constant as a numpy array, or None if `name` is not a constant.

        Raises:
            RunError: its values do not fit its shape, or cannot be read.
        """
        from onnx import external_data_helper, numpy_helper

        tensor = self.constants.get(name)
        if tensor is None:
            return None
        try:
            if tensor.external_data and not tensor.HasField("raw_data"):
                external_data_helper.load_external_data_for_tensor(tensor, str(self.path.parent))
            return numpy_helper.to_array(tensor)
        except Exception as error:  # onnx and numpy raise many classes for the same error
            raise RunError(
                f"{self.path.name}: the constant '{name}' cannot be read: {error}",
                code="damaged-weights",
                file=self.path.name,
            ) from error

    @cached_property
    def non_finite_constants(self) -> list[tuple[str, str, Any]]:
        """Name, type and values (float32) of each constant with infinite or NaN values."""
        import numpy as np

        non_finite = []
        for name, tensor in self.constants.items():
            if type_name(tensor.data_type) in _FLOATS:
                with np.errstate(over="ignore"):  # a double that is too large is counted as infinite
                    values = self.constant_value(name).astype(np.float32)
                if not np.isfinite(values).all():
                    non_finite.append((name, type_name(tensor.data_type), values))
        return non_finite

    @cached_property
    def readers(self) -> dict[str, list[Any]]:
        """The nodes that read each value."""
        readers: dict[str, list[Any]] = {}
        for node in self.nodes:
            for name in node.input:
                readers.setdefault(name, []).append(node)
        return readers

    @cached_property
    def quantized_values(self) -> frozenset[str]:
        """Names of quantized values and their zero points."""
        pairs = self.nodes_of_type("QuantizeLinear", "DequantizeLinear")
        return frozenset(name for node in pairs for name in (node.input[0], *node.input[2:]))


def read_checked_graph(model: Any, path: Path) -> CheckedGraph:
    """Collect nodes, constants and types of a model.

    Raises:
        RunError: the types of its values cannot be inferred.
    """
    nodes = list(iter_nodes(model.graph))
    return CheckedGraph(
        model,
        path,
        nodes,
        _constants(model, nodes),
        _types(model),
        {name: node for node in nodes for name in node.output if name},
    )


def iter_nodes(graph: Any) -> Iterator[Any]:
    """Yield the nodes of a graph and of the graphs inside its If, Loop and Scan nodes."""
    for node in graph.node:
        yield node
        for inner in _subgraphs(node):
            yield from iter_nodes(inner)


def node_attribute(node: Any, name: str) -> Any:
    """Return the value of a node's attribute, or None if it has no attribute of that name."""
    from onnx import helper

    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), None)


def input_name(node: Any, index: int) -> str:
    """Return the name of an input of a node; empty if it is omitted."""
    return str(node.input[index]) if len(node.input) > index else ""


def type_name(kind: int) -> str:
    """Return the name of an element type: float, float16, int8."""
    from onnx import TensorProto

    known_types = TensorProto.DataType.values()
    return str(TensorProto.DataType.Name(kind)).lower() if kind in known_types else f"type {kind}"


def node_location(node: Any) -> str:
    """Return the name of a node in a finding."""
    return f"node '{node.name}' ({node.op_type})"


def _subgraphs(node: Any) -> Iterator[Any]:
    for entry in node.attribute:
        if entry.HasField("g"):
            yield entry.g


def _constants(model: Any, nodes: Iterable[Any]) -> dict[str, Any]:
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in nodes:
        for inner in _subgraphs(node):
            constants |= {tensor.name: tensor for tensor in inner.initializer}
        if node.op_type == "Constant":
            constants.update((node.output[0], entry.t) for entry in node.attribute if entry.name == "value")
    return constants


def _types(model: Any) -> dict[str, int]:
    """Return the element type of every value, inferred if the file does not declare it."""
    import onnx

    try:
        # without values: only types are needed
        inferred = onnx.shape_inference.infer_shapes(model, check_type=False, strict_mode=False)
    except Exception as error:  # inference is a help, not a requirement
        raise RunError(f"cannot infer the types of the graph: {error}", code="invalid-graph") from error
    graph = inferred.graph
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        types.setdefault(value.name, value.type.tensor_type.elem_type)
    return types


_FP16_MAX = 65504.0
_MAX_AXES = 8
_FP16_HINT = "Weights above 65504 do not fit into fp16: export with dtype: fp32."


def missing_external_data(model: Any, path: Path) -> Iterator[RuleFinding]:
    """Find external weights that are missing, or outside of the file's folder."""
    folder = path.parent.resolve()
    for tensor in model.graph.initializer:
        for entry in (e for e in tensor.external_data if e.key == "location"):
            file = path.parent / entry.value
            name = f"the weights of '{tensor.name}'"
            if not (folder / entry.value).resolve().is_relative_to(folder):
                yield RuleFinding(
                    name,
                    f"their location {entry.value} is outside of the graph's folder.",
                    "Save the model again with its weights next to it.",
                )
                return
            if not file.is_file():
                yield RuleFinding(name, f"the file {file} is missing.", "Copy that file too.")
                return


def non_finite_values(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find constants that overflowed in half precision; TensorRT builds them silently."""
    for name, kind, values in graph.non_finite_constants:
        if not _is_mask(values):
            import numpy as np

            count = int((~np.isfinite(values)).sum())
            yield RuleFinding(
                f"the constant '{name}' ({kind})",
                f"it contains {count} infinite or NaN values; TensorRT would build it silently.",
                _FP16_HINT,
            )


def mask_constants(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find constants of 0 and -inf, which may be intended masks, unless they are only compared."""
    for name, kind, values in graph.non_finite_constants:
        if _is_mask(values) and not _is_only_compared(name, graph):
            yield RuleFinding(
                f"the constant '{name}' ({kind})",
                "it is a mask with -inf; a fully masked row gives NaN.",
                "",
            )


def _is_mask(values: Any) -> bool:
    import numpy as np

    return bool(np.isin(values, (0.0, -np.inf)).all())


# they select one of the values that they compare, so that -inf excludes a value and is no operand of a sum
_SELECTING_OPS = frozenset({
    "ArgMax", "ArgMin", "Clip", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "MaxPool", "Min",
    "ReduceMax", "ReduceMin", "TopK",
})  # fmt: skip
_MOVING_OPS = frozenset({
    "Cast", "Concat", "Constant", "Expand", "Flatten", "Gather", "Identity", "Reshape", "ScatterElements",
    "ScatterND", "Slice", "Squeeze", "Transpose", "Unsqueeze", "Where",
})  # fmt: skip


def _is_only_compared(name: str, graph: CheckedGraph) -> bool:
    """Return whether a constant reaches only operators that select the largest or smallest value."""
    outputs = {value.name for value in graph.model.graph.output}
    pending, seen = [name], set[str]()
    while pending:
        value = pending.pop()
        readers = graph.readers.get(value, [])
        if value in outputs or not readers:  # read outside of its graph
            return False
        seen.add(value)
        for node in readers:
            if normalized_domain(node.domain) or node.op_type not in _SELECTING_OPS | _MOVING_OPS:
                return False
            if node.op_type in _MOVING_OPS:
                pending += [output for output in node.output if output not in seen]
    return True


def overflowing_casts(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find constants that a Cast to float16 makes infinite: usually the -3.4e38 of a mask."""
    from onnx import TensorProto

    for node in graph.nodes_of_type("Cast"):
        if node_attribute(node, "to") != TensorProto.FLOAT16 or input_name(node, 0) not in graph.constants:
            continue
        values = graph.constant_value(node.input[0]).astype("float64")
        if values.size and abs(values).max() > _FP16_MAX:
            yield RuleFinding(
                node_location(node),
                f"the constant '{node.input[0]}' contains {values.flat[abs(values).argmax()]:.3g},"
                " which is infinite in float16.",
                "Use -65504 or a smaller magnitude, or keep the sum in float32.",
            )


def norms_in_fp16(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find a mean of squares in float16: infinite for values above 256. TensorRT warns and builds it."""
    from onnx import TensorProto

    for node in graph.nodes_of_type("ReduceMean"):
        producer = graph.producers.get(input_name(node, 0))
        if producer is None or graph.element_type(node.input[0]) != TensorProto.FLOAT16:
            continue
        squares = producer.op_type == "Mul" and len(set(producer.input)) == 1
        if producer.op_type == "Pow" or squares:
            yield RuleFinding(
                node_location(node),
                "the mean of squares of a norm in float16 overflows: the square of 256 is infinite.",
                "Export again with onnx: {target: tensorrt}, which keeps norms in float32.",
            )


def default_inputs(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find inputs with a default: TensorRT makes the default a constant and removes the input."""
    for value in graph.model.graph.input:
        if value.name in {tensor.name for tensor in graph.model.graph.initializer}:
            yield RuleFinding(
                f"the input '{value.name}'",
                "it has a default; TensorRT makes it a constant, and the engine has no such input.",
                "Remove the default if the input is needed. " + TENSORRT_REEXPORT_HINT,
            )


def unnamed_sizes(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find dynamic sizes without a name, for which no profile can be made."""
    for value in graph.model.graph.input:
        kind = value.type.tensor_type
        if value.name in graph.constants:
            continue
        unnamed_axes = [
            axis for axis, d in enumerate(kind.shape.dim) if not (d.dim_param or d.HasField("dim_value"))
        ]
        if unnamed_axes or not kind.HasField("shape"):
            problem_text = f"the sizes at {unnamed_axes} have no name" if unnamed_axes else "it has no shape"
            yield RuleFinding(
                f"the input '{value.name}'",
                f"{problem_text}, so no lengths can be set for them.",
                "Name dynamic axes at export, or fix their sizes.",
            )


def too_many_axes(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find tensors with more than 8 axes."""
    hint = "Merge some of its axes."
    for name, tensor in graph.constants.items():
        if len(tensor.dims) > _MAX_AXES:
            yield RuleFinding(
                f"the constant '{name}'", f"{len(tensor.dims)} axes; TensorRT supports at most 8.", hint
            )
    for value in graph.model.graph.input:
        if len(value.type.tensor_type.shape.dim) > _MAX_AXES:
            count = len(value.type.tensor_type.shape.dim)
            yield RuleFinding(
                f"the input '{value.name}'", f"{count} axes; TensorRT supports at most 8.", hint
            )
    for node in graph.nodes_of_type("Reshape"):
        shape = graph.constant_value(input_name(node, 1))
        if shape is not None and shape.size > _MAX_AXES:
            yield RuleFinding(node_location(node), f"{shape.size} axes; TensorRT supports at most 8.", hint)


_UNSUPPORTED_TYPES = frozenset({
    "int16", "uint16", "uint32", "uint64", "string", "complex64", "complex128", "uint4", "int2", "uint2",
    "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz",
})  # fmt: skip
# Operators whose numeric tensors must all have one type, and which inputs those are (None: all).
_SAME_TYPE_INPUTS: dict[str, tuple[int, ...] | None] = {
    "MatMul": None, "Gemm": None, "Conv": None, "Add": None, "Sub": None, "Mul": None, "Div": None,
    "Max": None, "Min": None, "Concat": None, "Where": (1, 2), "LayerNormalization": None, "PRelu": None,
    "Equal": None, "Less": None, "Greater": None, "Einsum": None,
}  # fmt: skip
# Types that the parser rejects although the ONNX standard allows them: operator -> types of its first input.
_UNSUPPORTED_OP_TYPES: dict[str, tuple[str, ...]] = {
    "MatMul": ("int32", "int64"), "Gemm": ("int32", "int64"), "Einsum": ("int32", "int64"),
    "ReduceL2": ("int32", "int64"), "ReduceMax": ("bool",), "ReduceMin": ("bool",), "Relu": ("int32",),
}  # fmt: skip
_CAST_HINT = "TensorRT's networks are strongly typed: add a Cast, or export again with one dtype."


def unsupported_types(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find element types that TensorRT does not support, in inputs, constants, casts and quantized values."""
    for location, kind in _declared_types(graph):
        if kind and (type_name(kind) in _UNSUPPORTED_TYPES or type_name(kind).startswith("type ")):
            yield RuleFinding(location, f"the type {type_name(kind)}, which TensorRT does not support.",
                        "Cast to float, int32 or int64 before the graph, or in the model.")  # fmt: skip


def _declared_types(graph: CheckedGraph) -> Iterator[tuple[str, int]]:
    for value in graph.model.graph.input:
        if value.name not in graph.constants:
            yield f"the input '{value.name}'", value.type.tensor_type.elem_type
    for name, tensor in graph.constants.items():
        if name not in graph.quantized_values:  # covered by the rules on quantization
            yield f"the constant '{name}'", tensor.data_type
    for node in graph.nodes_of_type("Cast"):
        yield node_location(node), int(node_attribute(node, "to") or 0)


def mixed_types(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find operators whose inputs have two types."""
    for node in graph.nodes_of_type(*_SAME_TYPE_INPUTS):
        input_indices = _SAME_TYPE_INPUTS[node.op_type] or range(len(node.input))
        typed_inputs = [
            (node.input[i], _type_as_read(graph.element_type(node.input[i])))
            for i in input_indices
            if i < len(node.input)
        ]
        name_by_type = {kind: name for name, kind in typed_inputs if name and kind}
        if len(name_by_type) > 1:
            types_text = " and ".join(f"{type_name(kind)} ('{name}')" for kind, name in name_by_type.items())
            yield RuleFinding(node_location(node), f"inputs of different types: {types_text}.", _CAST_HINT)


def _type_as_read(kind: int) -> int:
    """Return the type as which TensorRT reads a value: double is read as float."""
    from onnx import TensorProto

    return int(TensorProto.FLOAT) if kind == TensorProto.DOUBLE else kind


def unsupported_op_types(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find operators on types that ONNX allows and TensorRT does not: integer matrices, maximum of bools."""
    for node in graph.nodes_of_type(*_UNSUPPORTED_OP_TYPES):
        kind = graph.element_type(input_name(node, 0))
        if kind and type_name(kind) in _UNSUPPORTED_OP_TYPES[node.op_type]:
            yield RuleFinding(
                node_location(node),
                f"TensorRT does not support it in {type_name(kind)}.",
                "Cast the input to float.",
            )


def internal_uint8(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find uint8 between operators; TensorRT supports it only as an input or output of the network."""
    from onnx import TensorProto

    outputs = {value.name for value in graph.model.graph.output}
    for node in graph.nodes_of_type():
        uint8_outputs = [
            n for n in node.output if graph.element_type(n) == TensorProto.UINT8 and n not in outputs
        ]
        if uint8_outputs and node.op_type not in ("QuantizeLinear", "DynamicQuantizeLinear", "Constant"):
            yield RuleFinding(node_location(node), "it outputs uint8 to other operators; TensorRT supports"
            " uint8 only at the network's"
                        " inputs and outputs.", "Cast to int32 instead.")  # fmt: skip
        uint8_inputs = [
            n for n in _input_names(graph) if n in node.input and graph.element_type(n) == TensorProto.UINT8
        ]
        if uint8_inputs and node.op_type not in ("Cast", "DequantizeLinear", "Identity"):
            yield RuleFinding(
                node_location(node),
                f"it computes with the input '{uint8_inputs[0]}' in uint8.",
                "Cast the input first.",
            )


def _input_names(graph: CheckedGraph) -> list[str]:
    return [value.name for value in graph.model.graph.input if value.name not in graph.constants]


def casts_to_float8(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find a Cast to float8; in TensorRT only QuantizeLinear produces float8."""
    for node in graph.nodes_of_type("Cast"):
        if type_name(int(node_attribute(node, "to") or 0)).startswith("float8e4m3fn"):
            yield RuleFinding(
                node_location(node),
                "in TensorRT only QuantizeLinear produces float8.",
                "Quantize with a scale.",
            )


def double_types(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find double values, which TensorRT silently reads as float."""
    from onnx import TensorProto

    hint = "Export in float, or compute outside of the graph what needs the precision."
    for value in (*graph.model.graph.input, *graph.model.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.DOUBLE:
            yield RuleFinding(f"'{value.name}'", "double; TensorRT computes and binds it as float.", hint)
    for name, tensor in graph.constants.items():
        if tensor.data_type == TensorProto.DOUBLE:
            yield RuleFinding(f"the constant '{name}'", "double; TensorRT rounds it to float.", hint)
    for node in graph.nodes_of_type("Cast"):
        if node_attribute(node, "to") == TensorProto.DOUBLE:
            yield RuleFinding(node_location(node), "a cast to double; TensorRT continues in float.", hint)
