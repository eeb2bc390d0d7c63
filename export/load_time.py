"""What a runtime computes from constants when it loads a graph, spelled out as standard operators.

Layers emit place-holders of the domain `smelt.load` (runtime/layers/emit.py) for spreading codes by a table
of their scheme, for widening scales, for turning a matrix, and for what codes stand for. The optimizers
before them, torch's and onnxsim, would store what standard operators make of constants: a file 16 times as
large for bits, a second matrix beside the first. So they see the place-holders, and these become the last
change to the graph. ONNX Runtime folds the operators once, when a session is opened, and the file stays
small.

    stored uint8 [N, G, n] -- Cast int32 -- Gather in a table [256, t] -- Reshape -- codes uint8 [N, G, t n]

What a row of a table holds, says the scheme.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from smelt.export.weights.blocked import blocked_weights, drop_unread
from smelt.runtime.layers.emit import LOAD_TIME
from smelt.runtime.layers.emit_blocks import IN_BLOCKS
from smelt.runtime.layers.emit_static import DEQUANTIZED
from smelt.runtime.schemes.registry import load_tables


def spell_out_file(path: Path) -> None:
    """Replace the place-holders of the graph in `path`, in place; weights that lie outside stay there."""
    from smelt.export.graph_files import read_graph, write_graph

    model = read_graph(path, values=False)
    if spell_out(model):
        write_graph(model, path)


def spell_out(model: Any) -> int:
    """Replace the place-holders of an onnx.ModelProto in place; return how many there were."""
    from onnx import numpy_helper

    graph, tables = model.graph, load_tables()
    shapes = {t.name: list(t.dims) for t in graph.initializer}
    nodes = []
    made: dict[tuple[str, ...], str] = {}  # a constant is widened once for all that read it
    renamed: dict[str, str] = {}
    for node in graph.node:
        if node.domain != LOAD_TIME:
            nodes.append(node)
            first = renamed.get(node.input[0], node.input[0]) if node.op_type == "BitwiseOr" else ""
            if first in shapes:  # codes of which parts are apart
                shapes[node.output[0]] = shapes[first]
            continue
        source, result = renamed.get(node.input[0], node.input[0]), node.output[0]
        first = made.setdefault((node.op_type, source, *node.input[1:]), result)
        if first != result:
            renamed[result] = first
        else:
            nodes += _spelled_out(model, node, source, shapes, tables)
    found = len(made) + len(renamed)
    if not found:
        return 0
    for word in sorted({op for op, *_ in made} & set(tables)):
        graph.initializer.append(numpy_helper.from_array(tables[word], _name(word)))
    for node in nodes:
        for place, name in enumerate(node.input):
            node.input[place] = renamed.get(name, name)
    del graph.node[:]
    graph.node.extend(nodes)
    drop_unread(graph, {name for op, *names in made if op in IN_BLOCKS for name in names})
    kept = [item for item in model.opset_import if item.domain != LOAD_TIME]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    return found


def _spelled_out(
    model: Any, node: Any, source: str, shapes: dict[str, list[int]], tables: dict[str, Any]
) -> list[Any]:
    """Return what computes a place-holder from `source`; add what it needs, and its shape if it is spread."""
    result = node.output[0]
    if node.op_type == "FloatScales":
        return [_cast(source, result)]
    if node.op_type in DEQUANTIZED:
        return [_dequantize(model.graph, node, shapes)]
    if node.op_type in IN_BLOCKS:
        return list(blocked_weights(model, node))
    if node.op_type == "Transposed":
        return [_turn(source, result)]
    width = tables[node.op_type].shape[1]
    shapes[result] = [*shapes[source][:-1], width * shapes[source][-1]]  # which may be spread again
    return _spread(model.graph, source, result, shapes[result], _name(node.op_type))


def _cast(source: str, result: str) -> Any:
    from onnx import TensorProto, helper

    return helper.make_node("Cast", [source], [result], f"{result}.cast", to=TensorProto.FLOAT)


def _turn(source: str, result: str) -> Any:
    from onnx import helper

    return helper.make_node("Transpose", [source], [result], f"{result}.turn", perm=[1, 0])


def _dequantize(graph: Any, node: Any, shapes: dict[str, list[int]]) -> Any:
    """Return the DequantizeLinear of a matrix, with its zero points, though all are 0.

    On processors without VNNI ONNX Runtime 1.31 turns such codes to uint8, where it has not fused them;
    without zero points it gives them one, and then refuses a single one beside a scale for each row.
    """
    from onnx import helper, numpy_helper

    result, axis, inputs = node.output[0], DEQUANTIZED[node.op_type], list(node.input)
    zeros = f"{result}.zeros"
    graph.initializer.append(numpy_helper.from_array(np.zeros(shapes[inputs[1]], dtype=np.int8), zeros))
    inputs.append(zeros)
    return helper.make_node("DequantizeLinear", inputs, [result], f"{result}.dequantize", axis=axis)


def _name(word: str) -> str:
    """Return the name of a table's initializer."""
    return f"smelt.{re.sub(r'(?<=[a-z])(?=[A-Z])', '_', word).lower()}"


def _spread(graph: Any, source: str, result: str, shape: list[int], table: str) -> list[Any]:
    from onnx import TensorProto, helper, numpy_helper

    indices, pairs, target = (f"{result}.{word}" for word in ("indices", "pairs", "shape"))
    graph.initializer.append(numpy_helper.from_array(np.array(shape, dtype=np.int64), target))
    return [
        helper.make_node("Cast", [source], [indices], f"{result}.cast", to=TensorProto.INT32),
        helper.make_node("Gather", [table, indices], [pairs], f"{result}.gather", axis=0),
        helper.make_node("Reshape", [pairs, target], [result], f"{result}.reshape"),
    ]
