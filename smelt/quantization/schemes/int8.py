"""The schemes int8-dynamic and int8-static: int8 weights per output channel or tensor, 8-bit activations.

Weights: `smelt/quantization/int8.py`.

Activations of int8-dynamic are uint8, quantized at run time: asymmetric, one scale and zero point for the
tensor of the whole batch, as in the ONNX operator DynamicQuantizeLinear (opset 11,
`smelt/quantization/layers.py`). A layer may be exported to another form, which rounds activations block by
block (`emit_block_linear` of `smelt/quantization/int8.py`), if that was measured to be faster.

Activations of int8-static are int8 with a calibrated range: symmetric, one scale for all inputs of a layer,
stored with it:

    scale = range / 127        x_q = clamp(round(x / scale), -128, 127)        round half to even

as in the ONNX operator QuantizeLinear. The range is calibrated on samples (`smelt/calibration`).
Integer products are summed in int32, then y = (scale * weight scale) * sum + bias. So a row of the output
depends only on its input row.

In ONNX Runtime the same computation is fast in one form only: codes with 128 added (uint8, zero point 128) in
MatMulIntegerToFloat. All other runtimes read QuantizeLinear and DequantizeLinear around a plain MatMul.

Convolutions (`smelt/quantization/matrix.py`) are matrices with a row per output channel. Their inputs
are mostly never negative (after ReLU): their codes are then 0 to 255, with range / 255.

Shapes: N = outputs (rows), K = inputs (columns).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.quantization import groupwise, int8
from smelt.quantization.int8 import (
    GRANULARITY,
    SHARED_SCALE,
    Int8PerChannel,
    float_linear_nodes,
    output_scales,
    transposed_weight,
)
from smelt.quantization.scheme import MatrixUse, PackedMatrix, SchemeOption, SchemeOptions, StoredTensor

if TYPE_CHECKING:
    from torch import Tensor


_FORM = "DynamicQuantizeMatMul"
_WHY = "it computes the ranges of activations at run time"
# OpenVINO 2026.4 loads DynamicQuantizeMatMul, but multiplies float32 activations, or int8 ones with ranges of
# groups of inputs: no faster, or different from the scored model
_OPENVINO = "it computes one range for the activations of a batch at run time"


class Int8Dynamic(Int8PerChannel):
    """codes: int8 [N, K]; scales: float32 [N], as the runtime multiplies by them."""

    name: ClassVar[str] = "int8-dynamic"
    summary: ClassVar[str] = (
        "int8 weights per output channel or tensor; activations become uint8 at run time, one scale for the"
        " tensor of the whole batch"
    )
    recommended_for: ClassVar[str] = "a CPU, for one text and for many"
    source: ClassVar[str] = "ONNX operator DynamicQuantizeLinear-11 (github.com/onnx/onnx, docs/Operators.md)"
    option_specs: ClassVar[tuple[SchemeOption, ...]] = (GRANULARITY,)
    per_tensor_activations: ClassVar[bool] = True
    unsupported_targets: ClassVar[Mapping[str, str]] = {
        "ort-cuda": _WHY,
        "tensorrt": _WHY,
        "openvino": _OPENVINO,
    }
    exported_as: ClassVar[str] = "dynamic int8"
    operators: ClassVar[Mapping[str, tuple[int, ...]]] = {_FORM: (2, 3)} | groupwise.MATMUL_NBITS
    # 0.010 was measured on a 4 + 3 layer Marian, where int8 is 0.017 off its fp32 parent; 0.068 on the
    # vectors of all-MiniLM-L6-v2, 6 layers, where it is 0.092 off
    tolerance: ClassVar[float] = 0.05
    embedding_tolerance: ClassVar[float] = 0.15
    max_graph_error: ClassVar[float] = 0.3  # 2 to 3 times MiniLM's (docs/measurements/own-onnx.md)

    def linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply quantized weights and activations, or in blocks."""
        if matrix.variant == int8.BLOCK_VARIANT:
            return int8.block_linear(matrix, x, bias)
        import torch

        from smelt.quantization.int8 import dynamic_scale_zero_point, int8_matmul

        codes = matrix.tensor("codes")
        rows = x.detach().reshape(-1, matrix.width)
        scale, zero = dynamic_scale_zero_point(rows)
        # torch multiplies int8 by int8: subtract 128 from the codes, and correct the zero point
        shifted = rows.div(scale).round_().add_(zero - 128).clamp_(-128, 127).to(torch.int8)
        sums = int8_matmul(shifted, codes)
        row_sums = matrix.cached("row_sums", lambda: codes.sum(dim=1, dtype=torch.int32))
        sums = torch.add(sums, row_sums, alpha=128 - zero)
        out = sums.float().mul_(matrix.tensor("scales") * scale)
        out = out if bias is None else out + bias
        return out.reshape(*x.shape[:-1], codes.shape[0])

    def fake_quantize_activations(self, matrix: PackedMatrix, x: Tensor) -> Tensor:
        """Return quantized and dequantized activations; their range contains all, so none is clipped."""
        from smelt.quantization.int8 import fake_quantize_dynamic

        return fake_quantize_dynamic(x)

    def emit_linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit DynamicQuantizeMatMul, or MatMulNBits if selected."""
        from smelt.quantization import emit

        if matrix.variant == int8.BLOCK_VARIANT:
            return int8.emit_block_linear(matrix, x, bias)
        return emit.dynamic_quantize_matmul(x, transposed_weight(matrix), output_scales(matrix), bias)

    def export_constants(self, matrix: PackedMatrix, use: MatrixUse) -> dict[str, Tensor]:
        """Return the codes in the selected form."""
        if matrix.variant == int8.BLOCK_VARIANT:
            return int8.block_constants(matrix, use)
        return super().export_constants(matrix, use)

    def emit_lookup(self, matrix: PackedMatrix, ids: Tensor, target: str) -> Tensor:
        """Emit a lookup in the codes, or in the blocks of a layer with that form."""
        if matrix.variant == int8.BLOCK_VARIANT:
            return int8.emit_block_lookup(matrix, ids)
        return super().emit_lookup(matrix, ids, target)

    def operator_variants(self, options: SchemeOptions) -> tuple[str, ...]:
        """Return the operator of one range per batch, and that of blocks."""
        return (_FORM, int8.BLOCK_VARIANT)

    def variant_node(self, matrix: PackedMatrix, x: str, y: str) -> tuple[Any, dict[str, Tensor]]:
        """Return the operator of the selected form."""
        from onnx import helper

        tensors = {f"{y}.{name}": tensor for name, tensor in self.export_constants(matrix, "product").items()}
        layout: dict[str, Any] = {}
        if matrix.variant == int8.BLOCK_VARIANT:
            rows, _, size = tensors[f"{y}.blocks"].shape
            layout = {"K": matrix.width, "N": rows, "bits": 8, "block_size": size, "accuracy_level": 4}
        elif f"{y}.{SHARED_SCALE}" not in tensors:
            tensors[f"{y}.scales"] = matrix.tensor("scales")
        name = matrix.variant or _FORM
        node = helper.make_node(name, [x, *tensors], [y], domain="com.microsoft", **layout)
        return node, tensors

    def float_activation_nodes(self, node: Any) -> list[Any]:
        """Return nodes with float32 activations: for blocks the same operator, else standard nodes."""
        if node.op_type in groupwise.MATMUL_NBITS:
            return groupwise.nbits_float_activation_nodes(node)
        return float_linear_nodes(node, *[*node.input, *[""] * 5][:5])


INPUT_SCALE = "input_scale"
# The target whose runtime has one operator for the whole layer.
_FUSED = "ort-cpu"


class Int8Static(Int8PerChannel):
    """codes: int8 [N, K]; scales: float32 [N]; input_scale: float32 scalar, 1 for embeddings only."""

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
    option_specs: ClassVar[tuple[SchemeOption, ...]] = (GRANULARITY,)
    requires_calibration: ClassVar[bool] = True
    per_tensor_activations: ClassVar[bool] = True
    supports_conv: ClassVar[bool] = True
    unsupported_targets: ClassVar[Mapping[str, str]] = {
        "ort-cuda": "ONNX Runtime has these operators on the CPU only"
    }
    exported_as: ClassVar[str] = "static int8"
    operators: ClassVar[Mapping[str, tuple[int, ...]]] = {"MatMulIntegerToFloat": (2, 3, 4, 5)}
    tolerance: ClassVar[float] = 0.05
    embedding_tolerance: ClassVar[float] = 0.15
    max_graph_error: ClassVar[float] = 0.5  # 2 to 3 times MiniLM's (docs/measurements/own-onnx.md)

    def stored_tensors(self, rows: int, width: int, options: SchemeOptions) -> dict[str, StoredTensor]:
        """Return the specs of codes, scales, and the scale of the activations."""
        return super().stored_tensors(rows, width, options) | {
            INPUT_SCALE: StoredTensor((), "float32", calibrated=True)
        }

    def activation_tensors(self, largest: float) -> dict[str, Tensor]:
        """Return the scale that maps `largest` to 127."""
        import torch

        scale = torch.tensor(largest, dtype=torch.float32) / 127
        return {INPUT_SCALE: scale if scale > 0 else torch.ones(())}

    def exact_activation(self, matrix: PackedMatrix) -> float:
        """Return the end of the range."""
        return float(matrix.tensor(INPUT_SCALE) * 127)

    def linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply quantized weights and activations."""
        import torch

        from smelt.quantization.int8 import int8_matmul

        codes, scale = matrix.tensor("codes"), matrix.tensor(INPUT_SCALE)
        rows = x.detach().reshape(-1, matrix.width)
        sums = int8_matmul(rows.div(scale).round_().clamp_(-128, 127).to(torch.int8), codes)
        out = sums.float().mul_(matrix.tensor("scales") * scale)
        out = out if bias is None else out + bias
        return out.reshape(*x.shape[:-1], codes.shape[0])

    def fake_quantize_activations(self, matrix: PackedMatrix, x: Tensor) -> Tensor:
        """Return activations after quantizing and dequantizing; values outside of the range are clipped."""
        scale = matrix.tensor(INPUT_SCALE).to(x.device)
        return (x.float().div(scale).round_().clamp_(-128, 127) * scale).to(x.dtype)

    def static_activation_range(self, matrix: PackedMatrix) -> tuple[Tensor, float, float] | None:
        """Return the stored scale, -128 and 127."""
        return matrix.tensor(INPUT_SCALE), -128.0, 127.0

    def emit_linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit QuantizeLinear and MatMulIntegerToFloat, or MatMul between explicit Q/DQ pairs."""
        from smelt.quantization import emit

        scale = matrix.tensor(INPUT_SCALE)
        if target == _FUSED:
            return emit.integer_linear(x, scale, transposed_weight(matrix), output_scales(matrix), bias)
        scales = matrix.tensor("scales")  # one per row for every granularity: no kernel is faster with one
        return emit.qdq_linear(x, scale, matrix.tensor("columns"), scales, bias)

    def emit_lookup(self, matrix: PackedMatrix, ids: Tensor, target: str) -> Tensor:
        """Emit Gather, Cast and Mul; or Gather in a table that is dequantized like weights."""
        from torch.nn import functional as F

        from smelt.quantization import emit

        if target == _FUSED:
            return super().emit_lookup(matrix, ids, target)
        return F.embedding(ids, emit.dequantize_rows(matrix.tensor("codes"), matrix.tensor("scales")))

    def float_activation_nodes(self, node: Any) -> list[Any]:
        """Return nodes with float32 activations; `node` has them in place of the quantized ones."""
        x, codes, _, scales, _, zero, bias = [*node.input, *[""] * 7][:7]
        return float_linear_nodes(node, x, codes, scales, zero, bias)
