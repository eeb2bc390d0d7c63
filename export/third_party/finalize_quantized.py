"""Make graphs of ONNX Runtime's quantizers valid: node order, domains, scales of stacked matrices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smelt.runtime.third_party.graph_structure import all_nodes, node_inputs, subgraphs


def finalize_quantized(made: Path, source: Path) -> Any:
    """Return the quantized graph in `made` as a valid onnx.ModelProto.

    - The quantizers sort nodes without considering outer values that inner graphs (If, Loop, Scan) read.
    - They drop the domain of nodes that contain graphs (com.microsoft.BeamSearch).
    - A stack of matrices has one scale per column of all its matrices; MatMulInteger requires zero points and
      scales of the shape of the stack, with one row.

    Args:
        made: the output of a quantizer.
        source: its input.
    """
    from smelt.export.graph_files import read_graph

    model = read_graph(made)
    domains = {
        node.output[0]: node.domain
        for node in all_nodes(read_graph(source, values=False).graph.node)
        if subgraphs(node)
    }
    for node in all_nodes(model.graph.node):
        if subgraphs(node):
            node.domain = domains.get(node.output[0], node.domain)
    _sort_topologically(model.graph)
    _broadcast_scales(model.graph)
    return model


def _sort_topologically(graph: Any) -> None:
    """Sort nodes topologically and otherwise keep their order; also in inner graphs."""
    made = {name: at for at, node in enumerate(graph.node) for name in node.output if name}
    nodes = list(graph.node)
    before = [sorted({made[name] for name in node_inputs(node) if name in made}) for node in nodes]
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
        for body in subgraphs(node):
            _sort_topologically(body)


def _broadcast_scales(graph: Any) -> None:
    """Give the zero points and scales of stacked matrices the shape that MatMulInteger requires."""
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
                _broadcast_tensor(tensor, shape)


def _broadcast_tensor(tensor: Any, shape: Sequence[int]) -> None:
    from onnx import numpy_helper

    values = np.broadcast_to(numpy_helper.to_array(tensor), shape)
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values), tensor.name))
