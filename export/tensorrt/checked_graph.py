"""The graph that the rules check, with its constants and types, read once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from smelt.core.errors import RunError
from smelt.core.messages import Message
from smelt.runtimes.graph_walk import normalized_domain

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
        place = f"{self.location}: " if self.location else ""
        return Message(
            code=f"tensorrt-{self.rule}",
            severity=self.severity,
            message=f"{place}{self.reason}{' ' if self.hint else ''}{self.hint}",
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
            if not normalized_domain(node.domain) and (not operators or node.op_type in operators):
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

        found = []
        for name, tensor in self.constants.items():
            if type_name(tensor.data_type) in _FLOATS:
                with np.errstate(over="ignore"):  # a double that is too large is counted as infinite
                    values = self.constant_value(name).astype(np.float32)
                if not np.isfinite(values).all():
                    found.append((name, type_name(tensor.data_type), values))
        return found

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
    return CheckedGraph(model, path, nodes, _constants(model, nodes), _types(model), _producers(nodes))


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


def input_name(node: Any, place: int) -> str:
    """Return the name of an input of a node; empty if it is omitted."""
    return str(node.input[place]) if len(node.input) > place else ""


def type_name(kind: int) -> str:
    """Return the name of an element type: float, float16, int8."""
    from onnx import TensorProto

    known = TensorProto.DataType.values()
    return str(TensorProto.DataType.Name(kind)).lower() if kind in known else f"type {kind}"


def node_location(node: Any) -> str:
    """Return the name of a node in a finding."""
    return f"node '{node.name}' ({node.op_type})"


def _subgraphs(node: Any) -> Iterator[Any]:
    for entry in node.attribute:
        if entry.HasField("g"):
            yield entry.g


def _constants(model: Any, nodes: Iterable[Any]) -> dict[str, Any]:
    found = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in nodes:
        for inner in _subgraphs(node):
            found |= {tensor.name: tensor for tensor in inner.initializer}
        if node.op_type == "Constant":
            found.update((node.output[0], entry.t) for entry in node.attribute if entry.name == "value")
    return found


def _producers(nodes: Iterable[Any]) -> dict[str, Any]:
    return {name: node for node in nodes for name in node.output if name}


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
