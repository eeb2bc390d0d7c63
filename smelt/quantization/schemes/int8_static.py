"""The scheme int8-static: int8 weights as those of int8-dynamic, and activations with a calibrated range.

Activations of int8-static are int8 with a range that is calibrated on samples (`smelt/calibration`): one
scale and zero point for all inputs of a layer, stored with it, as onnxruntime.quantization computes them
(`quant_utils.py: compute_scale_zp`), rounded half to even as in the ONNX operator QuantizeLinear:

    scale = (max(0, high) - min(0, low)) / 255
    zero  = clamp(round(-128 - min(0, low) / scale), -128, 127)
    x_q   = clamp(round(x / scale) + zero, -128, 127)

A symmetric range has zero = 0 and scale = max(-low, high) / 127. Integer products are summed in int32, then
y = (scale * weight scale) * (sum - zero * sum of the row's weights) + bias. So a row of the output depends
only on its input row.

In ONNX Runtime the same computation is fast in one form only: codes with 128 added (uint8) in
MatMulIntegerToFloat. All other runtimes read QuantizeLinear and DequantizeLinear around a plain MatMul.

Asymmetric weights subtract zero_w * sum of (x_q - zero) from the sum, zero_w that of the row.

Shapes: N = outputs (rows), K = inputs (columns).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from smelt.quantization.scheme import (
    MatrixUse,
    OptionValue,
    PackedMatrix,
    SchemeOption,
    SchemeOptions,
    StoredTensor,
)
from smelt.quantization.schemes.int8 import (
    GRANULARITY,
    SYMMETRIC,
    ZEROS,
    Int8PerChannel,
    float_linear_nodes,
    int8_matmul,
    output_scales,
    output_zeros,
    transposed_weight,
)

if TYPE_CHECKING:
    from torch import Tensor


INPUT_SCALE, INPUT_ZERO_POINT = "input_scale", "input_zero_point"
ACTIVATIONS_SYMMETRIC = SchemeOption(
    "activations_symmetric",
    False,
    (True, False),
    "true: activations have no zero points, as TensorRT requires",
)


def input_zero_point(matrix: PackedMatrix) -> int:
    """Return the zero point of int8 activations; 0 if symmetric."""
    return int(matrix.tensor(INPUT_ZERO_POINT)) if matrix.has(INPUT_ZERO_POINT) else 0


def activation_qparams(low: float, high: float, symmetric: bool) -> tuple[float, int]:
    """Return the scale, a float32 number, and the int8 zero point of activations from `low` to `high`."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = float(np.float32(max(-low, high)) / 127 if symmetric else np.float32((high - low) / 255))
    if not scale > 0:  # only zeros, or float32 underflow
        return 1.0, 0
    return scale, 0 if symmetric else int(np.clip(np.rint(-128 - low / scale), -128, 127))


def quantize_activations(matrix: PackedMatrix, x: Tensor) -> Tensor:
    """Return float `x` in steps of the scale after int8 quantization, on any device: codes - zero point."""
    steps = x.div(matrix.tensor(INPUT_SCALE).to(x.device)).round_()
    if not matrix.has(INPUT_ZERO_POINT):
        return steps.clamp_(-128, 127)
    zero = matrix.tensor(INPUT_ZERO_POINT).to(x.device, x.dtype)
    return steps.clamp_(-128 - zero, 127 - zero)


def unsigned_zero_point(zero: int) -> Tensor:
    """Return the zero point of uint8 codes, uint8 scalar, for that of int8 codes, which are 128 less."""
    import torch

    return torch.tensor(128 + zero, dtype=torch.uint8)


# The target whose runtime has one operator for the whole layer.
_FUSED = "ort-cpu"
# The targets whose kernels multiply uint8 with int8 weights: on x86 without AVX-VNNI-INT8, 128 would be added
# to activations of int8 in the inner loop.
_UNSIGNED = (_FUSED, "openvino")


class Int8Static(Int8PerChannel):
    """codes: int8 [N, K]; scales: float32 [N]; input_scale: float32 scalar, 1 for embeddings only.

    zeros: int8 [N], unless `symmetric`. input_zero_point: int8 scalar, unless `activations_symmetric`.
    """

    name: ClassVar[str] = "int8-static"
    summary: ClassVar[str] = (
        "int8 weights per output channel or tensor; activations become int8 with a range that is calibrated"
        " on samples"
    )
    recommended_for: ClassVar[str] = (
        "a CPU, for one text and for many; OpenVINO, TensorRT; no result depends on its batch"
    )
    source: ClassVar[str] = (
        "ONNX operator QuantizeLinear-13 (github.com/onnx/onnx, docs/Operators.md); Jacob et al. 2018,"
        " arXiv:1712.05877"
    )
    option_specs: ClassVar[tuple[SchemeOption, ...]] = (GRANULARITY, SYMMETRIC, ACTIVATIONS_SYMMETRIC)
    requires_calibration: ClassVar[bool] = True
    per_tensor_activations: ClassVar[bool] = True
    supports_conv: ClassVar[bool] = True
    unsupported_targets: ClassVar[Mapping[str, str]] = {
        "ort-cuda": "ONNX Runtime multiplies int8 with scales on the CPU only; on CUDA it would dequantize"
        " both sides of each matrix multiplication and multiply floats, which saves no time"
    }
    required_options: ClassVar[Mapping[str, Mapping[str, tuple[OptionValue, ...]]]] = {
        "tensorrt": {SYMMETRIC.name: (True,), ACTIVATIONS_SYMMETRIC.name: (True,)}
    }
    # float16 rounds scales by less than a thousandth, as it rounds weights; bfloat16 by up to a 256th
    supported_dtypes: ClassVar[Mapping[str, tuple[str, ...]]] = {"tensorrt": ("fp16",)}
    exported_as: ClassVar[str] = "static int8"
    operators: ClassVar[tuple[str, ...]] = ("MatMulIntegerToFloat",)
    tolerance: ClassVar[float] = 0.05
    embedding_tolerance: ClassVar[float] = 0.15
    max_graph_error: ClassVar[float] = 0.5  # 2 to 3 times MiniLM's (docs/measurements/own-onnx.md)

    def stored_tensors(self, rows: int, width: int, options: SchemeOptions) -> dict[str, StoredTensor]:
        """Return the specs of codes, scales, and the scale and zero point of the activations."""
        specs = {INPUT_SCALE: StoredTensor((), "float32", calibrated=True)}
        if not self.has_symmetric_activations(options):
            specs[INPUT_ZERO_POINT] = StoredTensor((), "int8", calibrated=True)
        return super().stored_tensors(rows, width, options) | specs

    def activation_tensors(self, low: float, high: float, options: SchemeOptions) -> dict[str, Tensor]:
        """Return the scale and zero point of the range."""
        import torch

        symmetric = self.has_symmetric_activations(options)
        scale, zero = activation_qparams(low, high, symmetric)
        tensors = {INPUT_SCALE: torch.tensor(scale)}
        return tensors if symmetric else tensors | {INPUT_ZERO_POINT: torch.tensor(zero, dtype=torch.int8)}

    def has_symmetric_activations(self, options: SchemeOptions) -> bool:
        """Return whether activations have no zero points."""
        return bool(options[ACTIVATIONS_SYMMETRIC.name])

    def exact_activations(self, matrix: PackedMatrix) -> tuple[float, float]:
        """Return the ends of the range."""
        scale, low, high = self.static_activation_range(matrix)
        return float(scale * low), float(scale * high)

    def linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply quantized weights and activations."""
        import torch

        q_weight, scale = matrix.tensor("codes"), matrix.tensor(INPUT_SCALE)
        zero = input_zero_point(matrix)
        x_rows = x.detach().reshape(-1, matrix.width)
        q_input = x_rows.div(scale).round_().add_(zero).clamp_(-128, 127).to(torch.int8)
        sums = int8_matmul(q_input, q_weight)
        if zero:
            row_sums = matrix.cached("row_sums", lambda: q_weight.sum(dim=1, dtype=torch.int32))
            sums = torch.sub(sums, row_sums, alpha=zero)
        if matrix.has(ZEROS):
            input_sums = q_input.sum(dim=1, dtype=torch.int32) - zero * matrix.width
            sums = sums - torch.outer(input_sums, matrix.tensor(ZEROS).int())
        out = sums.float().mul_(matrix.tensor("scales") * scale)
        out = out if bias is None else out + bias
        return out.reshape(*x.shape[:-1], q_weight.shape[0])

    def fake_quantize_activations(self, matrix: PackedMatrix, x: Tensor) -> Tensor:
        """Return activations after quantizing and dequantizing; values outside of the range are clipped."""
        scale = matrix.tensor(INPUT_SCALE).to(x.device)
        return (quantize_activations(matrix, x.float()) * scale).to(x.dtype)

    def static_activation_range(self, matrix: PackedMatrix) -> tuple[Tensor, float, float]:
        """Return the stored scale, and -128 and 127 minus the zero point."""
        zero = input_zero_point(matrix)
        return matrix.tensor(INPUT_SCALE), -128.0 - zero, 127.0 - zero

    def target_constants(self, target: str, matrix: PackedMatrix, use: MatrixUse) -> dict[str, Tensor]:
        """Return the zero point of activations in the type of `target`."""
        import torch

        if use == "lookup":
            return {}
        zero = input_zero_point(matrix)
        if target in _UNSIGNED:
            return {"zero_point": unsigned_zero_point(zero)}
        return {"zero_point": torch.tensor(zero, dtype=torch.int8)}

    def emit_linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit QuantizeLinear and MatMulIntegerToFloat, or MatMul between explicit Q/DQ pairs."""
        from smelt.quantization import emit

        activations = emit.ActivationGrid(matrix.tensor(INPUT_SCALE), matrix.tensor("zero_point"))
        if target == _FUSED:
            weights = emit.WeightGrid(transposed_weight(matrix), output_scales(matrix), output_zeros(matrix))
            return emit.integer_linear(x, activations, weights, bias)
        # one scale per row for every granularity: no kernel is faster with one
        zeros = matrix.tensor(ZEROS) if matrix.has(ZEROS) else None
        weights = emit.WeightGrid(matrix.tensor("columns"), matrix.tensor("scales"), zeros)
        return emit.qdq_linear(x, activations, weights, bias)

    def emit_lookup(self, matrix: PackedMatrix, ids: Tensor, target: str) -> Tensor:
        """Emit Gather, Cast and Mul; or Gather in a table that is dequantized like weights."""
        from torch.nn import functional as F

        from smelt.quantization import emit

        if target == _FUSED:
            return super().emit_lookup(matrix, ids, target)
        zeros = matrix.tensor(ZEROS) if matrix.has(ZEROS) else None
        weights = emit.WeightGrid(matrix.tensor("codes"), matrix.tensor("scales"), zeros)
        return F.embedding(ids, emit.dequantize_rows(weights))

    def float_activation_nodes(self, node: Any) -> list[Any]:
        """Return nodes with float32 activations; `node` has them in place of the quantized ones."""
        x, q_weight, _, scales, _, zero, bias = [*node.input, *[""] * 7][:7]
        return float_linear_nodes(node, x, q_weight, scales, zero, bias)
