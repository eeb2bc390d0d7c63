"""What the rules look at: a graph with its constants and types, read once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from smelt.core.errors import RunError
from smelt.core.messages import Message

STANDARD = ("", "ai.onnx")
_FLOATS = frozenset({"float", "float16", "bfloat16", "double"})
REEXPORT = "Export again with onnx: {target: tensorrt}."
Severity = Literal["error", "warning"]


class Problem(NamedTuple):
    """One finding. An error stops the build, a warning goes into the report.

    place: a node, a constant, an input, or nothing where it is of the whole graph. reason: what is wrong.
    mend: what to do. rule: the name of what found it. graph: the file's name.
    """

    severity: Severity
    reason: str
    place: str = ""
    mend: str = ""
    rule: str = ""
    graph: str = ""

    @property
    def text(self) -> str:
        """The finding as one line: file, place, reason, mend."""
        return str(self.as_message())

    def as_message(self) -> Message:
        """Return the finding as data, for a report."""
        place = f"{self.place}: " if self.place else ""
        return Message(
            code=f"tensorrt-{self.rule}",
            severity=self.severity,
            message=f"{place}{self.reason}{' ' if self.mend else ''}{self.mend}",
            file=self.graph or None,
        )


class Found(NamedTuple):
    """What a rule says: where, why, what to do."""

    place: str
    reason: str
    mend: str = REEXPORT


@dataclass
class Graph:
    """An ONNX model as the rules see it.

    model: the ModelProto; of external weights only those are read that a rule asks for. path: its file.
    nodes: all, also those inside If, Loop and Scan. constants: name -> TensorProto, of initializers and
    Constant nodes. types: name -> element type, inferred where the file does not say; 0 or absent where it
    cannot be known. makers: name -> the node that gives it.
    """

    model: Any
    path: Path
    nodes: list[Any] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    types: dict[str, int] = field(default_factory=dict)
    makers: dict[str, Any] = field(default_factory=dict)

    def of(self, *operators: str) -> Iterator[Any]:
        """Yield the standard nodes of these operators; all of them where none is named."""
        for node in self.nodes:
            if node.domain in STANDARD and (not operators or node.op_type in operators):
                yield node

    def kind(self, name: str) -> int:
        """Return the element type of a value, 0 where it is not known."""
        return self.types.get(name, 0)

    def values(self, name: str) -> Any:
        """Return a constant as a numpy array, or None where `name` is none.

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
        except Exception as error:  # onnx and numpy raise many kinds, all meaning the same
            raise RunError(
                f"{self.path.name}: the constant '{name}' cannot be read: {error}",
                code="damaged-weights",
                file=self.path.name,
            ) from error

    @cached_property
    def not_finite(self) -> list[tuple[str, str, Any]]:
        """Name, type and values (float32) of each constant that holds infinite or undefined numbers."""
        import numpy as np

        found = []
        for name, tensor in self.constants.items():
            if word(tensor.data_type) in _FLOATS:
                with np.errstate(over="ignore"):  # a double that is too large is one of those looked for
                    values = self.values(name).astype(np.float32)
                if not np.isfinite(values).all():
                    found.append((name, word(tensor.data_type), values))
        return found

    @cached_property
    def codes(self) -> frozenset[str]:
        """Names of what is quantized codes or their zero points."""
        pairs = self.of("QuantizeLinear", "DequantizeLinear")
        return frozenset(name for node in pairs for name in (node.input[0], *node.input[2:]))


def read(model: Any, path: Path) -> Graph:
    """Collect nodes, constants and types of a model.

    Raises:
        RunError: the types of its values cannot be inferred.
    """
    nodes = list(nodes_of(model.graph))
    return Graph(model, path, nodes, _constants(model, nodes), _types(model), _makers(nodes))


def nodes_of(graph: Any) -> Iterator[Any]:
    """Yield the nodes of a graph and of the graphs inside its If, Loop and Scan nodes."""
    for node in graph.node:
        yield node
        for inner in _graphs_in(node):
            yield from nodes_of(inner)


def attribute(node: Any, name: str) -> Any:
    """Return the value of a node's attribute, or None where it has none of that name."""
    from onnx import helper

    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), None)


def given(node: Any, place: int) -> str:
    """Return the name of an input of a node; empty where it is left out."""
    return str(node.input[place]) if len(node.input) > place else ""


def word(kind: int) -> str:
    """Return the name of an element type: float, float16, int8."""
    from onnx import TensorProto

    known = TensorProto.DataType.values()
    return str(TensorProto.DataType.Name(kind)).lower() if kind in known else f"type {kind}"


def at(node: Any) -> str:
    """Return how a node is named in a finding."""
    return f"node '{node.name}' ({node.op_type})"


def _graphs_in(node: Any) -> Iterator[Any]:
    for entry in node.attribute:
        if entry.HasField("g"):
            yield entry.g


def _constants(model: Any, nodes: Iterable[Any]) -> dict[str, Any]:
    found = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in nodes:
        for inner in _graphs_in(node):
            found |= {tensor.name: tensor for tensor in inner.initializer}
        if node.op_type == "Constant":
            found.update((node.output[0], entry.t) for entry in node.attribute if entry.name == "value")
    return found


def _makers(nodes: Iterable[Any]) -> dict[str, Any]:
    return {name: node for node in nodes for name in node.output if name}


def _types(model: Any) -> dict[str, int]:
    """Return the element type of every value, inferred where the file does not say."""
    import onnx

    try:
        # without values: only types are of interest
        inferred = onnx.shape_inference.infer_shapes(model, check_type=False, strict_mode=False)
    except Exception as error:  # inference is a help, not a requirement
        raise RunError(f"the types of the graph cannot be inferred: {error}", code="invalid-graph") from error
    graph = inferred.graph
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        types.setdefault(value.name, value.type.tensor_type.elem_type)
    return types
