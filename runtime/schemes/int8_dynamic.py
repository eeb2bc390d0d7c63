"""Scheme int8-dynamic: int8 weights per output channel or tensor, uint8 activations found while running.

Weights: parts/rows.py. Activations: asymmetric, one scale and zero point for the tensor of the whole batch,
as the ONNX operator DynamicQuantizeLinear (opset 11) defines it (parts/integers.py). A product may leave in
another form, which rounds activations block by block (parts/blocks.py), where that was measured to be faster.

Shapes: N = outputs (rows), K = inputs (columns).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.runtime.schemes.parts import blocks, groups
from smelt.runtime.schemes.parts.rows import GRANULARITY, ONE, RowCodes, columns_of, exact_product, scales_of
from smelt.runtime.schemes.scheme import Coded, Option, Options, Use

if TYPE_CHECKING:
    from torch import Tensor

_FORM = "DynamicQuantizeMatMul"
_WHY = "it finds the ranges of activations while running"
# OpenVINO 2026.4 loads DynamicQuantizeMatMul, but multiplies float32 activations, or int8 ones with ranges of
# groups of inputs: no faster, or another model than the one that was scored
_OPENVINO = "it finds one range for the activations of a batch while running"


class Int8Dynamic(RowCodes):
    """codes: int8 [N, K]; scales: float32 [N], as the runtime multiplies by them."""

    name: ClassVar[str] = "int8-dynamic"
    summary: ClassVar[str] = (
        "int8 weights per output channel or tensor; activations become uint8 while running, one scale for the"
        " tensor of the whole batch"
    )
    pays: ClassVar[str] = "a CPU, for one text and for many"
    source: ClassVar[str] = "ONNX operator DynamicQuantizeLinear-11 (github.com/onnx/onnx, docs/Operators.md)"
    settings: ClassVar[tuple[Option, ...]] = (GRANULARITY,)
    one_scale: ClassVar[bool] = True
    refused: ClassVar[Mapping[str, str]] = {"ort-cuda": _WHY, "tensorrt": _WHY, "openvino": _OPENVINO}
    leaves_as: ClassVar[str] = "dynamic int8"
    operators: ClassVar[Mapping[str, tuple[int, ...]]] = {_FORM: (2, 3)} | groups.OPERATORS
    # 0.010 was measured on a 4 + 3 layer Marian, where int8 is 0.017 off its fp32 parent; 0.068 on the
    # vectors of all-MiniLM-L6-v2, 6 layers, where it is 0.092 off
    drift: ClassVar[float] = 0.05
    vector_drift: ClassVar[float] = 0.15
    graph_error: ClassVar[float] = 0.3  # 2 to 3 times MiniLM's (docs/measurements/own-onnx.md)

    def product(self, matrix: Coded, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply codes with codes, or in blocks."""
        if matrix.form == blocks.FORM:
            return blocks.product(matrix, x, bias)
        import torch

        from smelt.runtime.schemes.parts.integers import activation_range, int8_product

        codes = matrix.tensor("codes")
        rows = x.detach().reshape(-1, matrix.width)
        scale, zero = activation_range(rows)
        # torch multiplies int8 by int8: take 128 off the codes, give it back with the zero point
        shifted = rows.div(scale).round_().add_(zero - 128).clamp_(-128, 127).to(torch.int8)
        sums = int8_product(shifted, codes)
        row_sums = matrix.once("row_sums", lambda: codes.sum(dim=1, dtype=torch.int32))
        sums = torch.add(sums, row_sums, alpha=128 - zero)
        out = sums.float().mul_(matrix.tensor("scales") * scale)
        out = out if bias is None else out + bias
        return out.reshape(*x.shape[:-1], codes.shape[0])

    def seen_in_training(self, matrix: Coded, x: Tensor) -> Tensor:
        """Return what is left of activations; their range holds every value, so none is cut off."""
        from smelt.runtime.schemes.parts.integers import left_of_activations

        return left_of_activations(x)

    def emit_product(self, matrix: Coded, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit DynamicQuantizeMatMul, or MatMulNBits where that was chosen."""
        from smelt.runtime.layers import emit

        if matrix.form == blocks.FORM:
            return blocks.emit_product(matrix, x, bias)
        return emit.dynamic_quantize_matmul(x, columns_of(matrix), scales_of(matrix), bias)

    def graph_tensors(self, matrix: Coded, use: Use) -> dict[str, Tensor]:
        """Return the codes as the form wants them."""
        if matrix.form == blocks.FORM:
            return blocks.graph_tensors(matrix, use)
        return super().graph_tensors(matrix, use)

    def emit_lookup(self, matrix: Coded, ids: Tensor, target: str) -> Tensor:
        """Emit a lookup in the codes, or in the blocks of a product that has that form."""
        if matrix.form == blocks.FORM:
            return blocks.emit_lookup(matrix, ids)
        return super().emit_lookup(matrix, ids, target)

    def forms(self, options: Options) -> tuple[str, ...]:
        """Return the operator of one range for a batch, and that of blocks."""
        return (_FORM, blocks.FORM)

    def form_node(self, matrix: Coded, x: str, y: str) -> tuple[Any, dict[str, Tensor]]:
        """Return the operator of the form."""
        from onnx import helper

        tensors = {f"{y}.{name}": tensor for name, tensor in self.graph_tensors(matrix, "product").items()}
        layout: dict[str, Any] = {}
        if matrix.form == blocks.FORM:
            rows, _, size = tensors[f"{y}.blocks"].shape
            layout = {"K": matrix.width, "N": rows, "bits": 8, "block_size": size, "accuracy_level": 4}
        elif f"{y}.{ONE}" not in tensors:
            tensors[f"{y}.scales"] = matrix.tensor("scales")
        name = matrix.form or _FORM
        node = helper.make_node(name, [x, *tensors], [y], domain="com.microsoft", **layout)
        return node, tensors

    def exact_nodes(self, node: Any) -> list[Any]:
        """Return the product with float32 activations: of blocks the same operator, else standard nodes."""
        if node.op_type in groups.OPERATORS:
            return groups.exact_nodes(node)
        return exact_product(node, *[*node.input, *[""] * 5][:5])
