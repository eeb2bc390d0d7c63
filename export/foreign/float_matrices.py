"""The matrices of a quantized graph that are still float: how many, how large, and who reads them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

_BYTES = {1: 4, 10: 2, 11: 8, 16: 2}  # by their number in onnx.TensorProto: float, float16, double, bfloat16
_SHARE = 0.01  # of the bytes of all weights: smaller ones are no gain
_NAMED = 3


def float_matrices(models: Sequence[Any]) -> str | None:
    """Return the end of a warning about float matrices, the largest first; None where there are none.

    Args:
        models: onnx.ModelProto, without or with the values of their weights.
    """
    from smelt.runtime.foreign.structure import all_nodes, label
    from smelt.runtime.foreign.tensors import tensors_of

    readers: dict[str, str] = {}
    sizes: dict[str, int] = {}
    total = 0
    for model in models:
        for node in all_nodes(model.graph.node):
            for name in node.input:
                readers.setdefault(name, label(node))
        for tensor in tensors_of(model):
            size = math.prod(tensor.dims) * _BYTES.get(tensor.data_type, 1)
            total += size
            if tensor.data_type in _BYTES and sum(length > 1 for length in tensor.dims) > 1:
                sizes[tensor.name] = sizes.get(tensor.name, 0) + size
    large = {name: size for name, size in sizes.items() if size >= _SHARE * total and name in readers}
    if not large:
        return None
    worst = sorted(large, key=lambda name: -large[name])
    told = ", ".join(
        f"'{name[:80]}' of {readers[name]} ({_megabytes(large[name])})" for name in worst[:_NAMED]
    )
    more = f" and {len(worst) - _NAMED:,} more" if len(worst) > _NAMED else ""
    what = "1 matrix is" if len(large) == 1 else f"{len(large):,} matrices are"
    return f"{what} still float, {_megabytes(sum(large.values()))}: {told}{more}"


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.3g} MB"
