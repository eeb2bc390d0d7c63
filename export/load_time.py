"""What a runtime computes from constants when it loads a graph, spelled out as standard operators.

Layers emit place-holders of the domain `smelt.load` (runtime/layers/emit.py) for widening bits and scales,
and for turning a matrix. The optimizers before them, torch's and onnxsim, would store what standard operators
make of constants: a file 16 times as large for bits, a second matrix beside the first. So they see the
place-holders, and these become the last change to the graph. ONNX Runtime folds the operators once, when a
session is opened, and the file stays small.

    bits uint8 [N, G, n] -- Cast int32 -- Gather in a table [256, 2] -- Reshape -- codes uint8 [N, G, 2 n]

A byte of the table's row b holds four 2-bit codes, the first in the lowest bits: 1 (that is -1) for a
bit of b that is 0, and 3 (that is +1) for one that is 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.runtime.layers.emit import LOAD_TIME

_TABLE = "smelt.two_bit_codes"


def two_bit_table() -> NDArray[np.uint8]:
    """Return for each byte of eight bits the two bytes of its eight 2-bit codes, uint8 [256, 2]."""
    bits = np.arange(256, dtype=np.uint8)[:, None] >> np.arange(8, dtype=np.uint8) & 1
    codes = np.where(bits == 1, 3, 1).astype(np.uint8).reshape(256, 2, 4)
    shifted: NDArray[np.uint8] = codes << np.array([0, 2, 4, 6], dtype=np.uint8)
    table: NDArray[np.uint8] = np.bitwise_or.reduce(shifted, axis=2)
    return table


def spell_out_file(path: Path) -> None:
    """Replace the place-holders of the graph in `path`, in place; weights that lie outside stay there."""
    from smelt.export.graph_files import read_graph, write_graph

    model = read_graph(path, values=False)
    if spell_out(model):
        write_graph(model, path)


def spell_out(model: Any) -> int:
    """Replace the place-holders of an onnx.ModelProto in place; return how many there were."""
    from onnx import numpy_helper

    graph = model.graph
    shapes = {t.name: list(t.dims) for t in graph.initializer}
    nodes = []
    made: dict[tuple[str, str], str] = {}  # a constant is widened once for all that read it
    renamed: dict[str, str] = {}
    for node in graph.node:
        if node.domain != LOAD_TIME:
            nodes.append(node)
            continue
        source, result = node.input[0], node.output[0]
        first = made.setdefault((node.op_type, source), result)
        if first != result:
            renamed[result] = first
        elif node.op_type == "FloatScales":
            nodes.append(_cast(source, result))
        elif node.op_type == "Transposed":
            nodes.append(_turn(source, result))
        else:
            nodes += _widen(graph, source, result, shapes[source])
    found = len(made) + len(renamed)
    if not found:
        return 0
    if any(op == "TwoBitCodes" for op, _ in made):
        graph.initializer.append(numpy_helper.from_array(two_bit_table(), _TABLE))
    for node in nodes:
        for place, name in enumerate(node.input):
            node.input[place] = renamed.get(name, name)
    del graph.node[:]
    graph.node.extend(nodes)
    kept = [item for item in model.opset_import if item.domain != LOAD_TIME]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    return found


def _cast(source: str, result: str) -> Any:
    from onnx import TensorProto, helper

    return helper.make_node("Cast", [source], [result], f"{result}.cast", to=TensorProto.FLOAT)


def _turn(source: str, result: str) -> Any:
    from onnx import helper

    return helper.make_node("Transpose", [source], [result], f"{result}.turn", perm=[1, 0])


def _widen(graph: Any, source: str, result: str, shape: list[int]) -> list[Any]:
    from onnx import TensorProto, helper, numpy_helper

    indices, pairs, target = (f"{result}.{word}" for word in ("indices", "pairs", "shape"))
    wide = np.array([*shape[:-1], 2 * shape[-1]], dtype=np.int64)
    graph.initializer.append(numpy_helper.from_array(wide, target))
    return [
        helper.make_node("Cast", [source], [indices], f"{result}.cast", to=TensorProto.INT32),
        helper.make_node("Gather", [_TABLE, indices], [pairs], f"{result}.gather", axis=0),
        helper.make_node("Reshape", [pairs, target], [result], f"{result}.reshape"),
    ]
