"""What ONNX Runtime's quantizers wrote, made valid: nodes in order, domains, scales of stacks of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smelt.runtime.foreign.structure import all_nodes, inner_graphs, reads


def finished(made: Path, source: Path) -> Any:
    """Return the quantized graph in `made` as an onnx.ModelProto that ONNX calls valid.

    - The quantizers sort nodes without a look at what inner graphs (If, Loop, Scan) read from outside.
    - They forget the domain of nodes that hold graphs (com.microsoft.BeamSearch).
    - A stack of matrices has one scale for each column of all of its matrices; MatMulInteger takes zero
      points and scales of the shape of the stack, with one row.

    Args:
        made: what a quantizer wrote.
        source: what it read.
    """
    from smelt.export.graph_files import read_graph

    model = read_graph(made)
    domains = {
        node.output[0]: node.domain
        for node in all_nodes(read_graph(source, values=False).graph.node)
        if inner_graphs(node)
    }
    for node in all_nodes(model.graph.node):
        if inner_graphs(node):
            node.domain = domains.get(node.output[0], node.domain)
    _sort(model.graph)
    _spread_scales(model.graph)
    return model


def _sort(graph: Any) -> None:
    """Put each node after those that it reads from, else in the order that they have; in inner graphs too."""
    made = {name: at for at, node in enumerate(graph.node) for name in node.output if name}
    nodes = list(graph.node)
    before = [sorted({made[name] for name in reads(node) if name in made}) for node in nodes]
    done: set[int] = set()
    order: list[int] = []
    for first in range(len(nodes)):
        waiting = [first]
        while waiting:
            at = waiting[-1]
            open_ends = [source for source in before[at] if source not in done]
            if at in done or not open_ends:
                waiting.pop()
                if at not in done:
                    done.add(at)
                    order.append(at)
            else:
                waiting += open_ends[::-1]
    if order != sorted(order):
        del graph.node[:]
        graph.node.extend([nodes[at] for at in order])
    for node in graph.node:
        for body in inner_graphs(node):
            _sort(body)


def _spread_scales(graph: Any) -> None:
    """Give the zero points and scales of stacks of matrices the shape that MatMulInteger takes."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in all_nodes(graph.node):
        if node.op_type != "MatMulInteger" or len(node.input) < 4:
            continue
        matrix, zero = tensors.get(node.input[1]), tensors.get(node.input[3])
        if matrix is None or zero is None or len(matrix.dims) < 3 or len(zero.dims) != 1:
            continue
        scale = tensors.get(f"{node.input[3].removesuffix('_zero_point')}_scale")
        shape = [*matrix.dims[:-2], 1, matrix.dims[-1]]
        for tensor in (zero, scale):
            if tensor is not None and list(tensor.dims) == [shape[-1]]:
                _broadcast(tensor, shape)


def _broadcast(tensor: Any, shape: Sequence[int]) -> None:
    from onnx import numpy_helper

    values = np.broadcast_to(numpy_helper.to_array(tensor), shape)
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values), tensor.name))
