"""Expand the placeholder operators of a graph into standard ONNX operators.

Layers emit placeholders of the domain `smelt.load` (runtime/layers/emit.py) to unpack quantized weights with
a table of their scheme, to widen scales, to transpose a matrix and to dequantize. If these were standard
operators from the start, torch's optimizer and onnxsim would fold them and store the result: a file 16 times
as large for 1-bit weights, or a second copy of a matrix. So the optimizers see placeholders, and expanding
them is the last change to the graph. ONNX Runtime folds the operators when a session is opened, and the file
remains small.

    stored uint8 [N, G, n] -- Cast int32 -- Gather of a table [256, t] -- Reshape -- codes uint8 [N, G, t n]

The scheme defines the content of the table.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from smelt.export.weights.blocked_weights import drop_unused_constants, expand_blocked_weights
from smelt.runtime.layers.emit import LOAD_TIME_DOMAIN
from smelt.runtime.layers.emit_blockwise import BLOCK_OPS
from smelt.runtime.layers.emit_static import DEQUANTIZE_OPS
from smelt.runtime.schemes.registry import all_unpacking_tables


def expand_placeholders_in_file(path: Path) -> None:
    """Replace the placeholders of the graph in `path`, in place; external weights are not moved."""
    from smelt.export.graph_files import read_graph, write_graph

    model = read_graph(path, values=False)
    if expand_placeholders(model):
        write_graph(model, path)


def expand_placeholders(model: Any) -> int:
    """Replace the placeholders of an onnx.ModelProto in place; return their number."""
    from onnx import numpy_helper

    graph, tables = model.graph, all_unpacking_tables()
    shapes = {t.name: list(t.dims) for t in graph.initializer}
    nodes = []
    made: dict[tuple[str, ...], str] = {}  # a constant is widened once for all its readers
    renamed: dict[str, str] = {}
    for node in graph.node:
        if node.domain != LOAD_TIME_DOMAIN:
            nodes.append(node)
            first = renamed.get(node.input[0], node.input[0]) if node.op_type == "BitwiseOr" else ""
            if first in shapes:  # the packed parts are separate
                shapes[node.output[0]] = shapes[first]
            continue
        source, result = renamed.get(node.input[0], node.input[0]), node.output[0]
        first = made.setdefault((node.op_type, source, *node.input[1:]), result)
        if first != result:
            renamed[result] = first
        else:
            nodes += _expand_node(model, node, source, shapes, tables)
    found = len(made) + len(renamed)
    if not found:
        return 0
    for word in sorted({op for op, *_ in made} & set(tables)):
        graph.initializer.append(numpy_helper.from_array(tables[word], _table_name(word)))
    for node in nodes:
        for place, name in enumerate(node.input):
            node.input[place] = renamed.get(name, name)
    del graph.node[:]
    graph.node.extend(nodes)
    drop_unused_constants(graph, {name for op, *names in made if op in BLOCK_OPS for name in names})
    kept = [item for item in model.opset_import if item.domain != LOAD_TIME_DOMAIN]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    return found


def _expand_node(
    model: Any, node: Any, source: str, shapes: dict[str, list[int]], tables: dict[str, Any]
) -> list[Any]:
    """Return the nodes that compute a placeholder from `source`; record the shape if it is unpacked."""
    result = node.output[0]
    if node.op_type == "FloatScales":
        return [_cast(source, result)]
    if node.op_type in DEQUANTIZE_OPS:
        return [_dequantize(model.graph, node, shapes)]
    if node.op_type in BLOCK_OPS:
        return list(expand_blocked_weights(model, node))
    if node.op_type == "Transposed":
        return [_transpose(source, result)]
    width = tables[node.op_type].shape[1]
    shapes[result] = [*shapes[source][:-1], width * shapes[source][-1]]  # it may be unpacked again
    return _lookup(model.graph, source, result, shapes[result], _table_name(node.op_type))


def _cast(source: str, result: str) -> Any:
    from onnx import TensorProto, helper

    return helper.make_node("Cast", [source], [result], f"{result}.cast", to=TensorProto.FLOAT)


def _transpose(source: str, result: str) -> Any:
    from onnx import helper

    return helper.make_node("Transpose", [source], [result], f"{result}.turn", perm=[1, 0])


def _dequantize(graph: Any, node: Any, shapes: dict[str, list[int]]) -> Any:
    """Return the DequantizeLinear of a matrix, with explicit zero points although all are 0.

    On processors without VNNI ONNX Runtime 1.31 converts unfused int8 weights to uint8. Without zero points
    it adds a single one, and then rejects a single zero point with one scale per row.
    """
    from onnx import helper, numpy_helper

    result, axis, inputs = node.output[0], DEQUANTIZE_OPS[node.op_type], list(node.input)
    zeros = f"{result}.zeros"
    graph.initializer.append(numpy_helper.from_array(np.zeros(shapes[inputs[1]], dtype=np.int8), zeros))
    inputs.append(zeros)
    return helper.make_node("DequantizeLinear", inputs, [result], f"{result}.dequantize", axis=axis)


def _table_name(word: str) -> str:
    """Return the name of a table's initializer."""
    return f"smelt.{re.sub(r'(?<=[a-z])(?=[A-Z])', '_', word).lower()}"


def _lookup(graph: Any, source: str, result: str, shape: list[int], table: str) -> list[Any]:
    from onnx import TensorProto, helper, numpy_helper

    indices, pairs, target = (f"{result}.{word}" for word in ("indices", "pairs", "shape"))
    graph.initializer.append(numpy_helper.from_array(np.array(shape, dtype=np.int64), target))
    return [
        helper.make_node("Cast", [source], [indices], f"{result}.cast", to=TensorProto.INT32),
        helper.make_node("Gather", [table, indices], [pairs], f"{result}.gather", axis=0),
        helper.make_node("Reshape", [pairs, target], [result], f"{result}.reshape"),
    ]
