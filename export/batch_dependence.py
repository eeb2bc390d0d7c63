"""Whether answers of a graph depend on the other samples of their batch, by its structure.

`DynamicQuantizeLinear` and ONNX Runtime's operators that contain it compute one range of int8 activations for
a whole tensor, so for all samples of a call. `QuantizeLinear` does if its scale is computed in the graph.
MatMulNBits computes ranges within a row; a constant scale depends on no sample. All else in an exported graph
computes each sample by itself, up to the rounding of float32. A graph with a fixed batch size of 1 is called
once per sample, so the caller counts it as independent.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any

from smelt.export.graph_files import read_graph
from smelt.runtimes.graph_walk import subgraphs

# DynamicQuantizeLinear, DynamicQuantizeMatMul, DynamicQuantizeLSTM
DYNAMIC_QUANTIZE_PREFIX = "DynamicQuantize"
# the key of `details` of a step
DEPENDS_ON_BATCH = "depends_on_batch"
_SCALE_INPUT = 1  # of QuantizeLinear


def graphs_depend_on_batch(paths: Iterable[Path]) -> bool:
    """Return whether a graph of these files computes ranges over the samples of a batch."""
    return any(depends_on_batch(read_graph(path, values=False)) for path in paths)


def depends_on_batch(model: Any) -> bool:
    """Return whether `model`, an onnx.ModelProto, computes int8 ranges over the samples of a batch."""
    bodies = (function.node for function in model.functions)
    return _has_batch_range(model.graph.node, _initializers(model.graph)) or any(
        _has_batch_range(nodes, frozenset()) for nodes in bodies
    )


def _has_batch_range(nodes: Iterable[Any], constants: Set[str]) -> bool:
    """Return whether one of `nodes` or of their subgraphs computes such a range.

    constants: names of values that are the same in every call, of this graph and of those around it.
    """
    known = set(constants)
    for node in nodes:
        if node.op_type.startswith(DYNAMIC_QUANTIZE_PREFIX):
            return True
        if node.op_type == "QuantizeLinear" and node.input[_SCALE_INPUT] not in known:
            return True
        inner_graphs = subgraphs(node)
        if any(_has_batch_range(graph.node, known | _initializers(graph)) for graph in inner_graphs):
            return True
        if not inner_graphs and all(name in known for name in node.input if name):
            known.update(node.output)
    return False


def _initializers(graph: Any) -> frozenset[str]:
    """Return the names of the initializers that no caller can replace."""
    return frozenset(tensor.name for tensor in graph.initializer) - {value.name for value in graph.input}
