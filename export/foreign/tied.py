"""Matrices that several nodes read, before ONNX Runtime's quantizer turns them for one of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path


def with_own_matrices(path: Path, folder: Path) -> Path:
    """Return the graph in `path`, or a copy in `folder` in which each Gemm has its matrix alone.

    The quantizer makes MatMul of Gemm, and transposes the matrix in its place: an embedding that is the
    output layer too would be read by its columns from then on (onnxruntime 1.31,
    quantization/onnx_model.py, replace_gemm_with_matmul).
    """
    from smelt.export.graph_files import read_graph, write_graph

    bare = read_graph(path, values=False).graph
    weights = {tensor.name for tensor in bare.initializer}
    readers = Counter(name for node in bare.node for name in node.input)
    shared = [
        n for n in bare.node if n.op_type == "Gemm" and n.input[1] in weights and readers[n.input[1]] > 1
    ]
    if not shared:
        return path
    model = read_graph(path)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for number, node in enumerate(n for n in model.graph.node if n.op_type == "Gemm"):
        name = node.input[1]
        if name in tensors and readers[name] > 1:
            new = model.graph.initializer.add()
            new.CopyFrom(tensors[name])
            new.name = node.input[1] = f"{name}.of_gemm{number}"
    write_graph(model, folder / path.name)
    return folder / path.name
