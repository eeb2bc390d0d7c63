"""Copy the nodes of one step into the generation graph, each to the outermost possible level."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smelt.core.errors import RunError
from smelt.export.generation_graph.graph_builder import GraphBuilder


@dataclass
class GraphLevel:
    """A builder, and the names of the step's values in it. Each level is nested in the previous one."""

    builder: GraphBuilder
    names: dict[str, str] = field(default_factory=dict)


class GraphConstants:
    """The constants of an onnx.GraphProto, and values computed only from them; without the names `told`."""

    def __init__(self, graph: Any, told: Collection[str] = ()) -> None:
        self._tensors = {tensor.name: tensor for tensor in graph.initializer if tensor.name not in told}
        self._made: dict[str, Any] = {}  # nodes that read only constants, by output
        for node in graph.node:
            if all(name in self for name in node.input if name) and not set(node.output) & set(told):
                self._made |= dict.fromkeys(node.output, node)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors or name in self._made

    def copy_to(self, name: str, level: GraphLevel, prefix: str) -> str:
        """Copy a constant, or the nodes that compute it from constants, to a level; return its name there."""
        import onnx

        if name in level.names:
            return level.names[name]
        if name in self._tensors:
            tensor = onnx.TensorProto()
            tensor.CopyFrom(self._tensors[name])
            tensor.name = level.names[name] = prefix + name
            level.builder.initializers.append(tensor)
            return tensor.name
        node = self._made[name]
        for read in filter(None, node.input):
            self.copy_to(read, level, prefix)
        _copy_node(node, level, level.names, prefix)
        return level.names[name]

    def is_scalar(self, name: str) -> bool:
        """Return whether a constant is stored as one number without axes."""
        return name in self._tensors and not self._tensors[name].dims

    def transpose_of(self, name: str) -> str | None:
        """Return the name of a matrix's transpose if there is one; the matrix may be computed from it."""
        maker = self._made.get(name)
        if maker is not None and maker.op_type == "Transpose":
            return str(maker.input[0])
        found = (n for n in self._made.values() if n.op_type == "Transpose" and n.input[0] == name)
        return next((node.output[0] for node in found), None)


def hoist_nodes(graph: Any, levels: Sequence[GraphLevel], prefix: str) -> None:
    """Copy the nodes of an onnx.GraphProto, each to the first level at which all its inputs exist.

    So values that depend only on the source are computed once per batch. Constants, and values computed only
    from them, are placed where they are read, if necessary several times: ONNX Runtime packs no constant that
    is read two levels further inside (measured: a decoding step took twice as long). Names get `prefix`; the
    levels' `names` are updated with the new name of each value; existing values are not added again.

    Raises:
        RunError: a node contains a graph.
    """
    told = names_at(levels)  # includes values that would have a default
    constants = GraphConstants(graph, told)
    for node in graph.node:
        if any(attribute.HasField("g") for attribute in node.attribute):
            raise RunError(
                f"{graph.name}: node '{node.name}' contains a subgraph, which the generation loop does not"
                " support. Set generation_graph: false.",
                code="unsupported-graph",
            )
        if all(name in constants or name in told for name in node.output if name):
            continue
        read = [name for name in node.input if name]
        needed = {name for name in read if name not in constants}
        depth = next(at for at in range(len(levels)) if names_at(levels[: at + 1]).keys() >= needed)
        for name in read:
            if name not in needed:
                constants.copy_to(name, levels[depth], f"{prefix}{depth}.")
        _copy_node(node, levels[depth], names_at(levels[: depth + 1]), prefix)


def _copy_node(node: Any, level: GraphLevel, known: Mapping[str, str], prefix: str) -> None:
    import onnx

    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name = prefix + node.name if node.name else ""  # ONNX allows empty node names
    del copy.input[:], copy.output[:]
    copy.input.extend(known[name] if name else "" for name in node.input)
    copy.output.extend(prefix + name if name else "" for name in node.output)
    level.names |= {name: prefix + name for name in node.output if name}
    level.builder.nodes.append(copy)


def names_at(levels: Sequence[GraphLevel]) -> dict[str, str]:
    """Return the names of the step's values at the last of `levels`."""
    return {name: called for level in levels for name, called in level.names.items()}
