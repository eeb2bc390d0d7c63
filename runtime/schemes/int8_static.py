"""Scheme int8-static: int8 weights per channel or tensor, int8 activations with a range found beforehand.

Weights: parts/rows.py. Activations: symmetric, one scale for all inputs of a product, stored with the codes:

    scale = range / 127        x_q = clamp(round(x / scale), -128, 127)        round half to even

as the ONNX operator QuantizeLinear defines it. The range is found on rows of data (`compress/calibration`).
Products are summed in int32, then y = (scale * weight scale) * sum + bias. So a row of a product depends on
nothing but itself.

In ONNX Runtime the same numbers are fast in one form only: codes with 128 added (uint8, zero point 128) in
MatMulIntegerToFloat. Everybody else reads QuantizeLinear and DequantizeLinear around a plain MatMul.

Convolutions (`runtime/layers/quantized_conv.py`) are matrices of a row for each channel out. What they read
is mostly never negative there (behind ReLU): its codes are 0 to 255 then, with range / 255.

Shapes: N = outputs (rows), K = inputs (columns).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.runtime.schemes.parts.rows import GRANULARITY, RowCodes, columns_of, exact_product, scales_of
from smelt.runtime.schemes.scheme import Coded, Option, Options, Stored

if TYPE_CHECKING:
    from torch import Tensor

INPUT_SCALE = "input_scale"
# The target whose runtime has an operator for all of a product.
_FUSED = "ort-cpu"


class Int8Static(RowCodes):
    """codes: int8 [N, K]; scales: float32 [N]; input_scale: float32 scalar, 1 where nothing is multiplied."""

    name: ClassVar[str] = "int8-static"
    summary: ClassVar[str] = (
        "int8 weights per output channel or tensor; activations become int8 with a range that was found on"
        " rows of data"
    )
    pays: ClassVar[str] = (
        "a CPU, for one text and for many; OpenVINO, TensorRT; no result depends on its batch"
    )
    source: ClassVar[str] = (
        "ONNX operator QuantizeLinear-13 (github.com/onnx/onnx, docs/Operators.md); Jacob et al. 2018,"
        " arXiv:1712.05877"
    )
    settings: ClassVar[tuple[Option, ...]] = (GRANULARITY,)
    observes: ClassVar[bool] = True
    one_scale: ClassVar[bool] = True
    convolutions: ClassVar[bool] = True
    row_by_row: ClassVar[bool] = True
    refused: ClassVar[Mapping[str, str]] = {"ort-cuda": "ONNX Runtime multiplies such codes on the CPU only"}
    leaves_as: ClassVar[str] = "static int8"
    operators: ClassVar[Mapping[str, tuple[int, ...]]] = {"MatMulIntegerToFloat": (2, 3, 4, 5)}
    drift: ClassVar[float] = 0.05
    vector_drift: ClassVar[float] = 0.15
    graph_error: ClassVar[float] = 0.5  # 2 to 3 times MiniLM's (docs/measurements/own-onnx.md)

    def storage(self, rows: int, width: int, options: Options) -> dict[str, Stored]:
        """Return codes, scales, and the scale of the activations."""
        return super().storage(rows, width, options) | {INPUT_SCALE: Stored((), "float32", measured=True)}

    def ranged(self, largest: float) -> dict[str, Tensor]:
        """Let `largest` be 127."""
        import torch

        scale = torch.tensor(largest, dtype=torch.float32) / 127
        return {INPUT_SCALE: scale if scale > 0 else torch.ones(())}

    def held_exactly(self, matrix: Coded) -> float:
        """Return the end of the range."""
        return float(matrix.tensor(INPUT_SCALE) * 127)

    def product(self, matrix: Coded, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply codes with codes."""
        import torch

        from smelt.runtime.schemes.parts.integers import int8_product

        codes, scale = matrix.tensor("codes"), matrix.tensor(INPUT_SCALE)
        rows = x.detach().reshape(-1, matrix.width)
        sums = int8_product(rows.div(scale).round_().clamp_(-128, 127).to(torch.int8), codes)
        out = sums.float().mul_(matrix.tensor("scales") * scale)
        out = out if bias is None else out + bias
        return out.reshape(*x.shape[:-1], codes.shape[0])

    def seen_in_training(self, matrix: Coded, x: Tensor) -> Tensor:
        """Return what is left of activations; what lies outside of the range is cut off."""
        scale = matrix.tensor(INPUT_SCALE).to(x.device)
        return (x.float().div(scale).round_().clamp_(-128, 127) * scale).to(x.dtype)

    def fixed_range(self, matrix: Coded) -> tuple[Tensor, float, float] | None:
        """Return the stored scale, -128 and 127."""
        return matrix.tensor(INPUT_SCALE), -128.0, 127.0

    def emit_product(self, matrix: Coded, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit QuantizeLinear and MatMulIntegerToFloat, or MatMul between explicit Q/DQ pairs."""
        from smelt.runtime.layers import emit_static

        scale = matrix.tensor(INPUT_SCALE)
        if target == _FUSED:
            return emit_static.integer_product(x, scale, columns_of(matrix), scales_of(matrix), bias)
        scales = matrix.tensor("scales")  # as many as rows, whatever the granularity: no kernel asks
        return emit_static.explicit_product(x, scale, matrix.tensor("columns"), scales, bias)

    def emit_lookup(self, matrix: Coded, ids: Tensor, target: str) -> Tensor:
        """Emit Gather, Cast and Mul; or Gather in a table that is dequantized as weights are."""
        from torch.nn import functional as F

        from smelt.runtime.layers import emit_static

        if target == _FUSED:
            return super().emit_lookup(matrix, ids, target)
        return F.embedding(ids, emit_static.dequantized_rows(matrix.tensor("codes"), matrix.tensor("scales")))

    def exact_nodes(self, node: Any) -> list[Any]:
        """Return the product with float32 activations; `node` reads them where their codes were."""
        x, codes, _, scales, _, zero, bias = [*node.input, *[""] * 7][:7]
        return exact_product(node, x, codes, scales, zero, bias)
