"""The scheme fp8: weights and activations as 8-bit floats (E4M3), for TensorRT.

E4M3 has a sign, 4 bits of exponent and 3 of mantissa, and values up to 448 (`torch.float8_e4m3fn`). Weights
have one scale per output channel or tensor, activations one per layer, calibrated on samples:

    scale = max |x| / 448, rounded up to 8 significant bits
    code  = E4M3 of clamp(x / scale, -448, 448), round half to even;  value = code * scale

As ONNX's QuantizeLinear defines it for FLOAT8E4M3FN (opset 19, `saturate`) and NVIDIA's TensorRT
documentation, "Quantization Schemes", "castToFp8". TensorRT requires scales in the type of the graph; rounded
to 8 bits they are the same numbers in float32, float16 and bfloat16. Codes have 4 significant bits, so a
scale that is 0.8 % larger than necessary costs nothing.

Runtimes multiply the codes and sum the products in float32; in torch, and in ONNX Runtime on the CPU, the
dequantized values are multiplied in float32, which differs in the order of sums only.

Shapes: N = outputs (rows), K = inputs (columns).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.quantization.scheme import (
    Expansion,
    MatrixUse,
    PackedMatrix,
    QuantizedGraph,
    QuantParams,
    SchemeOption,
    SchemeOptions,
    StoredTensor,
)
from smelt.quantization.schemes.int8 import GRANULARITY, SHARED_SCALE, Int8PerChannel
from smelt.quantization.schemes.int8_static import INPUT_SCALE

if TYPE_CHECKING:
    from torch import Tensor


E4M3_MAX = 448.0
_NEGATIVE_ZERO = 0x80
_SIGNIFICANT_BITS = 8  # of bfloat16
_SMALLEST_HALF = 2.0**-24  # the distance of the smallest float16 numbers
_FLOATS = (
    "it would dequantize both sides of each matrix multiplication and multiply floats, which saves no time"
)
# placeholders of the weights in a graph, by the axis of their scales
_PLACEHOLDERS = {"Float8Rows": 0, "Float8Columns": 1}


def round_scale_up(scales: Tensor) -> Tensor:
    """Return positive float32 `scales` rounded up to numbers of float16 and bfloat16; 1 for zeros."""
    import torch

    exponents = torch.frexp(scales).exponent - _SIGNIFICANT_BITS
    steps = torch.ldexp(torch.ones_like(scales), exponents).clamp_(min=_SMALLEST_HALF)
    return ((scales / steps).ceil_() * steps).where(scales > 0, 1.0)


def to_e4m3(x: Tensor) -> Tensor:
    """Return the nearest E4M3 numbers, float8_e4m3fn; those beyond 448 become 448."""
    import torch

    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


class Fp8(Int8PerChannel):
    """codes: the bytes of E4M3, uint8 [N, K]; scales: float32 [N]; input_scale: float32 scalar.

    Each scale is a number of float16 and of bfloat16. Negative zero (code 128) is read, and never chosen.
    """

    name: ClassVar[str] = "fp8"
    summary: ClassVar[str] = (
        "8-bit float weights (E4M3) per output channel or tensor; activations too, with a range that is"
        " calibrated on samples"
    )
    recommended_for: ClassVar[str] = "TensorRT on GPUs since Ada and Hopper"
    source: ClassVar[str] = (
        "Micikevicius et al. 2022, FP8 Formats for Deep Learning, arXiv:2209.05433; ONNX operator"
        " QuantizeLinear-19"
    )
    option_specs: ClassVar[tuple[SchemeOption, ...]] = (GRANULARITY,)
    requires_calibration: ClassVar[bool] = True
    has_float_activations: ClassVar[bool] = True
    learnable_scales: ClassVar[bool] = False
    unsupported_targets: ClassVar[Mapping[str, str]] = {
        "ort-cpu": _FLOATS,
        "ort-cuda": _FLOATS,
        "openvino": _FLOATS,
        # its networks are weakly typed, where each type needs an option
        "ort-tensorrt": "ONNX Runtime 1.31 has no option to enable FP8 in TensorRT 10",
    }
    supported_dtypes: ClassVar[Mapping[str, tuple[str, ...]]] = {"tensorrt": ("fp16", "bf16")}
    min_opset: ClassVar[Mapping[str, int]] = {"tensorrt": 21}  # QuantizeLinear without a zero point
    exported_as: ClassVar[str] = f"{name} weights (float8)"
    operators: ClassVar[tuple[str, ...]] = ()
    # at most 0.0005 was measured in float32, 0.17 in float16, on a tiny BERT whose logits are nearly equal
    tolerance: ClassVar[float] = 0.1
    embedding_tolerance: ClassVar[float] = 0.1

    def compute_qparams(self, groups: Tensor, width: int, options: SchemeOptions) -> QuantParams:
        """Return scales of the largest magnitude of a row, or of all; 1 for zeros."""
        amax = groups.abs().amax(dim=-1)
        amax = amax.max().expand_as(amax) if self.is_per_tensor(options) else amax
        return {"scales": round_scale_up(amax / E4M3_MAX)}

    def quantize(self, groups: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return the bytes of the nearest numbers, uint8."""
        import torch

        codes = to_e4m3(groups / grid["scales"][..., None]).view(torch.uint8)
        return codes.masked_fill(codes == _NEGATIVE_ZERO, 0)

    def dequantize(self, codes: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return number * scale."""
        import torch

        return codes.view(torch.float8_e4m3fn).float() * grid["scales"][..., None]

    def code_range(
        self, grid: QuantParams, options: SchemeOptions
    ) -> tuple[Tensor | float, Tensor | float] | None:
        """Return None: values are no whole multiples of a scale."""
        return None

    def checkpoint_args(self, options: SchemeOptions) -> Mapping[str, Any] | None:
        """Return None: the codes are floats, not the integers of int8."""
        return None

    def stored_tensors(self, rows: int, width: int, options: SchemeOptions) -> dict[str, StoredTensor]:
        """Return the specs of a byte per weight, a scale per row, and the scale of the activations."""
        return {
            "codes": StoredTensor((rows, width), "uint8"),
            "scales": StoredTensor((rows,), "float32"),
            INPUT_SCALE: StoredTensor((), "float32", calibrated=True),
        }

    def activation_tensors(self, low: float, high: float, options: SchemeOptions) -> dict[str, Tensor]:
        """Return the scale of the range."""
        import torch

        return {INPUT_SCALE: round_scale_up(torch.tensor(max(-low, high, 0.0)) / E4M3_MAX)}

    def exact_activations(self, matrix: PackedMatrix) -> tuple[float, float]:
        """Return the ends of the range."""
        end = float(matrix.tensor(INPUT_SCALE) * E4M3_MAX)
        return -end, end

    def linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply the values of quantized weights and activations."""
        from torch.nn import functional as F

        return F.linear(self.fake_quantize_activations(matrix, x), matrix.dequantized(), bias)

    def lookup(self, matrix: PackedMatrix, ids: Tensor) -> Tensor:
        """Look up rows of codes, and their scales; a row of zeros stays zero."""
        import torch
        from torch.nn import functional as F

        numbers = F.embedding(ids, matrix.tensor("codes")).view(torch.float8_e4m3fn).float()
        return numbers * F.embedding(ids, matrix.tensor("scales")[:, None])

    def fake_quantize_activations(self, matrix: PackedMatrix, x: Tensor) -> Tensor:
        """Return activations after quantizing and dequantizing; values outside of the range are clipped."""
        scale = matrix.tensor(INPUT_SCALE).to(x.device)
        return (to_e4m3(x.float() / scale).float() * scale).to(x.dtype)

    def export_constants(self, matrix: PackedMatrix, use: MatrixUse) -> dict[str, Tensor]:
        """Return the codes as [K, N], as ONNX multiplies them, and a scale that is common to all rows."""
        return {} if use == "lookup" else super().export_constants(matrix, use)

    def emit_linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit MatMul between QuantizeLinear and DequantizeLinear; a bias stays float."""
        import torch

        scales = matrix.tensor(SHARED_SCALE if matrix.has(SHARED_SCALE) else "scales")
        weights = _emit_values("Float8Columns", matrix.tensor("columns"), scales)
        out = torch.matmul(_emit_rounding(x, matrix.tensor(INPUT_SCALE)), weights)
        return out if bias is None else out + bias

    def emit_lookup(self, matrix: PackedMatrix, ids: Tensor, target: str) -> Tensor:
        """Emit Gather in a table that is dequantized like weights."""
        from torch.nn import functional as F

        table = _emit_values("Float8Rows", matrix.tensor("codes"), matrix.tensor("scales"))
        return F.embedding(ids, table)

    def float_activation_nodes(self, node: Any) -> list[Any]:
        """Return the node itself: it multiplies floats, and the pairs around it are bypassed."""
        return [node]

    def placeholder_expansions(self) -> Mapping[str, Expansion]:
        """Return the DequantizeLinear of a matrix, for both axes of scales."""
        return dict.fromkeys(_PLACEHOLDERS, _dequantize)


def _emit_rounding(x: Tensor, scale: Tensor) -> Tensor:
    """Emit QuantizeLinear to E4M3 and DequantizeLinear, of any shape; scale: float32 scalar."""
    import torch
    from onnx import TensorProto

    codes = torch.onnx.ops.symbolic(
        "QuantizeLinear",
        [x, scale],
        {"output_dtype": int(TensorProto.FLOAT8E4M3FN)},
        dtype=torch.float8_e4m3fn,
        shape=tuple(x.shape),
        version=21,
    )
    out: Tensor = torch.onnx.ops.symbolic(
        "DequantizeLinear", [codes, scale], dtype=torch.float32, shape=tuple(x.shape), version=21
    )
    return out


def _emit_values(name: str, codes: Tensor, scales: Tensor) -> Tensor:
    """Emit the placeholder `name` for the values of constant `codes`, [K, N] or [N, K]: float32."""
    import torch

    from smelt.quantization.emit import LOAD_TIME_DOMAIN

    out: Tensor = torch.onnx.ops.symbolic(
        f"{LOAD_TIME_DOMAIN}::{name}",
        [codes, scales],
        dtype=torch.float32,
        shape=tuple(codes.shape),
        version=1,
    )
    return out


def _dequantize(graph: QuantizedGraph, node: Any) -> list[Any]:
    """Return the DequantizeLinear of a matrix of E4M3 numbers."""
    from onnx import TensorProto, helper

    (codes, scales), result = node.input, node.output[0]
    name = f"{result}.codes"
    graph.reinterpret_constant(codes, name, TensorProto.FLOAT8E4M3FN, tuple(graph.shapes[codes]))
    axis: dict[str, Any] = {"axis": _PLACEHOLDERS[node.op_type]} if graph.shapes[scales] else {}
    return [helper.make_node("DequantizeLinear", [name, scales], [result], f"{result}.dequantize", **axis)]
