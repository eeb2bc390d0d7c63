"""Scheme int8-dynamic: int8 weights per output channel, uint8 activations found while running.

Weights: parts/rows.py. Activations: asymmetric, one scale and zero point for the tensor of the whole batch,
as the ONNX operator DynamicQuantizeLinear (opset 11) defines it (parts/integers.py).

Shapes: N = outputs (rows), K = inputs (columns).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.runtime.schemes.parts.rows import RowCodes, exact_product
from smelt.runtime.schemes.scheme import Coded

if TYPE_CHECKING:
    from torch import Tensor

_WHY = "it finds the ranges of activations while running"
# OpenVINO 2026.4 loads DynamicQuantizeMatMul, but multiplies float32 activations, or int8 ones with ranges of
# groups of inputs: no faster, or another model than the one that was scored
_OPENVINO = "it finds one range for the activations of a batch while running"


class Int8Dynamic(RowCodes):
    """codes: int8 [N, K]; scales: float32 [N], as the runtime multiplies by them."""

    name: ClassVar[str] = "int8-dynamic"
    summary: ClassVar[str] = (
        "int8 weights per output channel; activations become uint8 while running, one scale for the tensor of"
        " the whole batch"
    )
    source: ClassVar[str] = "ONNX operator DynamicQuantizeLinear-11 (github.com/onnx/onnx, docs/Operators.md)"
    refused: ClassVar[Mapping[str, str]] = {"ort-cuda": _WHY, "tensorrt": _WHY, "openvino": _OPENVINO}
    leaves_as: ClassVar[str] = "dynamic int8"
    operators: ClassVar[Mapping[str, tuple[int, ...]]] = {"DynamicQuantizeMatMul": (2, 3)}
    # 0.010 was measured on a 4 + 3 layer Marian, where int8 is 0.017 off its fp32 parent; 0.068 on the
    # vectors of all-MiniLM-L6-v2, 6 layers, where it is 0.092 off
    drift: ClassVar[float] = 0.05
    vector_drift: ClassVar[float] = 0.15

    def product(self, matrix: Coded, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply codes with codes."""
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
        """Emit DynamicQuantizeMatMul."""
        from smelt.runtime.layers import emit

        return emit.dynamic_quantize_matmul(x, matrix.tensor("columns"), matrix.tensor("scales"), bias)

    def exact_nodes(self, node: Any) -> list[Any]:
        """Return the product with float32 activations in standard nodes."""
        return exact_product(node, *[*node.input, *[""] * 5][:5])
