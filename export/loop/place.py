"""The nodes of one step, put into the graph of all steps: each as far outside as what it reads allows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smelt.core.errors import RunError
from smelt.export.loop.builder import Builder


@dataclass
class Level:
    """A builder, and what the step's values are called there. Each of several lies in the one before."""

    builder: Builder
    names: dict[str, str] = field(default_factory=dict)


class Constants:
    """The constants of an onnx.GraphProto, and what is computed from them alone; without the names `told`."""

    def __init__(self, graph: Any, told: Collection[str] = ()) -> None:
        self._tensors = {tensor.name: tensor for tensor in graph.initializer if tensor.name not in told}
        self._made: dict[str, Any] = {}  # nodes that read constants alone, by what they make
        for node in graph.node:
            if all(name in self for name in node.input if name) and not set(node.output) & set(told):
                self._made |= dict.fromkeys(node.output, node)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors or name in self._made

    def bring(self, name: str, level: Level, prefix: str) -> str:
        """Bring a constant, or the nodes that make it of constants, to a level; return its name there."""
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
            self.bring(read, level, prefix)
        _copy(node, level, level.names, prefix)
        return level.names[name]

    def scalar(self, name: str) -> bool:
        """Say whether a constant is stored as one number without axes."""
        return name in self._tensors and not self._tensors[name].dims

    def turned(self, name: str) -> str | None:
        """Return the name of the transpose of a matrix, which may be what it is made of, if there is one."""
        maker = self._made.get(name)
        if maker is not None and maker.op_type == "Transpose":
            return str(maker.input[0])
        found = (n for n in self._made.values() if n.op_type == "Transpose" and n.input[0] == name)
        return next((node.output[0] for node in found), None)


def place(graph: Any, levels: Sequence[Level], prefix: str) -> None:
    """Copy the nodes of an onnx.GraphProto, each to the first level at which all that it reads is there.

    So what depends on the source is computed once a batch. Constants, and what is computed from them alone,
    lie where they are read, several times if need be: ONNX Runtime packs no constant that a graph two levels
    further in reads (measured: a decoding step took twice as long). Names get `prefix`; the levels' `names`
    then say what each of the graph's values is called; what they know already is not made again.

    Raises:
        RunError: a node holds a graph of its own.
    """
    told = known_at(levels)  # among it what would have a default
    constants = Constants(graph, told)
    for node in graph.node:
        if any(attribute.HasField("g") for attribute in node.attribute):
            raise RunError(
                f"{graph.name}: node '{node.name}' holds a graph, which cannot go into the loop.",
                code="unsupported-graph",
            )
        if all(name in constants or name in told for name in node.output if name):
            continue
        read = [name for name in node.input if name]
        needed = {name for name in read if name not in constants}
        depth = next(at for at in range(len(levels)) if known_at(levels[: at + 1]).keys() >= needed)
        for name in read:
            if name not in needed:
                constants.bring(name, levels[depth], f"{prefix}{depth}.")
        _copy(node, levels[depth], known_at(levels[: depth + 1]), prefix)


def _copy(node: Any, level: Level, known: Mapping[str, str], prefix: str) -> None:
    import onnx

    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name = prefix + node.name if node.name else ""  # which need not be one of its own
    del copy.input[:], copy.output[:]
    copy.input.extend(known[name] if name else "" for name in node.input)
    copy.output.extend(prefix + name if name else "" for name in node.output)
    level.names |= {name: prefix + name for name in node.output if name}
    level.builder.nodes.append(copy)


def known_at(levels: Sequence[Level]) -> dict[str, str]:
    """Return what the step's values are called at the last of `levels`."""
    return {name: called for level in levels for name, called in level.names.items()}
