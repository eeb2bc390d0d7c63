"""Compare the constants of a graph bit for bit with the tensors of their layers.

Exporters name constants after the tensors of the module. A changed scale, a bias of zeros or a table of
positions with a wrong offset is found here without any arithmetic, however little it would change an output.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from smelt.core.errors import ParityError


def check_constants(graph: str, model: Any, module: nn.Module, folder: Path) -> int:
    """Compare the constants of a graph with the tensors of the exported module.

    Args:
        graph: name of the graph, for the message.
        model: its onnx.ModelProto; external weights need not be loaded.
        module: the exported module.
        folder: the folder of the graph.

    Returns:
        The number of compared constants.

    Raises:
        ParityError: one has other values than its tensor, or fewer: only rows of maximum length would show
            that a table lacks its last entries.
    """
    from onnx import numpy_helper

    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    compared = 0
    for constant in model.graph.initializer:
        tensor = tensors.get(constant.name)
        if tensor is None:
            continue
        values = numpy_helper.to_array(constant, base_dir=str(folder))
        expected = tensor.detach().cpu().numpy()
        if expected.dtype == np.float32 and values.dtype.itemsize == 2:  # fp16, bf16
            expected = expected.astype(values.dtype)
        if expected.size != values.size:
            _raise_size_mismatch(graph, constant.name, list(expected.shape), list(values.shape))
        if expected.shape != values.shape or expected.dtype != values.dtype:
            continue  # an optimizer changed its layout
        compared += 1
        if not np.array_equal(expected, values):
            _raise_value_mismatch(graph, model, constant.name, int((expected != values).sum()), values.size)
    return compared


def _raise_size_mismatch(graph: str, name: str, expected: list[int], found: list[int]) -> None:
    raise ParityError(
        f"{graph}: the constant '{name}' has the shape {found}, but its tensor in the model has"
        f" {expected}: the numbers of values differ.",
        code="shape-mismatch",
        file=f"{graph}.onnx",
    )


def _raise_value_mismatch(graph: str, model: Any, name: str, differ: int, size: int) -> None:
    layer, _, word = name.rpartition(".")
    readers = [f"'{node.name}' ({node.op_type})" for node in model.graph.node if name in node.input]
    raise ParityError(
        f"{graph}: the constant '{name}' of node {', '.join(readers[:3]) or '(none)'} differs from"
        f" {word or name} of its layer{f' {layer}' if layer else ''} in {differ:,} of {size:,} values.",
        code="constant-mismatch",
        file=f"{graph}.onnx",
    )
