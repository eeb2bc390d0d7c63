"""Name the matrices of a quantized graph that are still float."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from smelt.runtimes.graph_walk import all_nodes, content_key, iter_initializers, node_label

# Bytes of a float by its number in onnx.TensorProto: float, float16, double, bfloat16.
_BYTES_BY_TYPE = {1: 4, 10: 2, 11: 8, 16: 2}
# The first inputs of these operators, up to the last weight; biases and scales after them are matrices too.
_NUM_WEIGHTED = {
    **dict.fromkeys(("LSTM", "GRU", "RNN", "DynamicQuantizeLSTM"), 3),
    **dict.fromkeys(("MatMulNBits", "DequantizeLinear", "QuantizeLinear"), 1),
}
_MIN_FLOAT_SHARE = 0.01  # fraction of the bytes of all weights, below which a float matrix is not reported
_MAX_NAMED = 3


def float_matrices_message(models: Sequence[Any]) -> str | None:
    """Return the end of a warning about float matrices, the largest first; None if there are none.

    Args:
        models: onnx.ModelProto, with or without the values of their weights.
    """
    readers: dict[tuple[int, str], str] = {}
    matrices: list[tuple[tuple[int, str], int, Any]] = []
    total = 0
    for number, model in enumerate(models):
        tensors = [(tensor.name, tensor) for tensor in iter_initializers(model.graph)]
        for node in all_nodes(model.graph.node):
            tensors += [(node.output[0], a.t) for a in node.attribute if node.op_type == "Constant"]
            for name in node.input[: _NUM_WEIGHTED.get(node.op_type)]:
                readers.setdefault((number, name), node_label(node))
        for name, tensor in tensors:
            size = math.prod(tensor.dims) * _BYTES_BY_TYPE.get(tensor.data_type, 1)
            total += size
            if tensor.data_type in _BYTES_BY_TYPE and sum(length > 1 for length in tensor.dims) > 1:
                matrices.append(((number, name), size, tensor))
    by_content: dict[bytes, tuple[tuple[int, str], int]] = {}  # a shared matrix is stored once
    for key, size, tensor in matrices:
        if size >= _MIN_FLOAT_SHARE * total and key in readers:
            by_content.setdefault(content_key(tensor), (key, size))
    large = dict(by_content.values())
    if not large:
        return None
    worst = sorted(large, key=lambda key: -large[key])
    listed = ", ".join(
        f"'{key[1][:80]}' of {readers[key]} ({_megabytes(large[key])})" for key in worst[:_MAX_NAMED]
    )
    more = f" and {len(worst) - _MAX_NAMED:,} more" if len(worst) > _MAX_NAMED else ""
    what = "1 matrix is" if len(large) == 1 else f"{len(large):,} matrices are"
    return f"{what} still float, {_megabytes(sum(large.values()))}: {listed}{more}"


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.3g} MB"
