"""The constants of a graph, bit for bit: what carries the name of a layer's tensor is that tensor.

Exporters name constants after the tensors of the module. A changed scale, a bias of zeros, a table of
positions that begins one place too far are found here without any arithmetic, however little they would
change an output.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from smelt.core.errors import ParityError


def check_constants(graph: str, model: Any, module: nn.Module, folder: Path) -> int:
    """Compare the constants of a graph with the tensors of the module that it was made from.

    Args:
        graph: name of the graph, for the message.
        model: its onnx.ModelProto; weights that lie outside need not be read.
        module: what was exported.
        folder: where the graph lies.

    Returns:
        How many were compared.

    Raises:
        ParityError: one has other values than its tensor, or fewer: a table that lacks its last places is
            missed only by rows as long as it.
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
            _raise_size(graph, constant.name, list(expected.shape), list(values.shape))
        if expected.shape != values.shape or expected.dtype != values.dtype:
            continue  # an optimizer gave it another form
        compared += 1
        if not np.array_equal(expected, values):
            _raise(graph, model, constant.name, int((expected != values).sum()), values.size)
    return compared


def _raise_size(graph: str, name: str, expected: list[int], found: list[int]) -> None:
    raise ParityError(
        f"{graph}: the constant '{name}' is {found}, its tensor {expected}: they hold different"
        " numbers of values.",
        code="shape-mismatch",
        file=f"{graph}.onnx",
    )


def _raise(graph: str, model: Any, name: str, differ: int, size: int) -> None:
    layer, _, word = name.rpartition(".")
    readers = [f"'{node.name}' ({node.op_type})" for node in model.graph.node if name in node.input]
    raise ParityError(
        f"{graph}: the constant '{name}' of node {', '.join(readers[:3]) or '(none)'} is not {word or name}"
        f" of its layer{f' {layer}' if layer else ''}: {differ:,} of {size:,} values differ.",
        code="constant-mismatch",
        file=f"{graph}.onnx",
    )
