"""The scheme nvfp4: weights and activations as 4-bit floats (E2M1) in blocks of 16, for TensorRT.

Two levels of scales: one number of E4M3 per block, and one float for the tensor:

    value        = e2m1 * e4m3 * global scale       e2m1: 0, 0.5, 1, 1.5, 2, 3, 4 or 6, with a sign
    global scale = max |tensor| / (6 * 448), rounded up to a power of two
    e4m3         = E4M3 of max |block| / (6 * global scale)

Values are rounded to the nearest, ties to the even code; those beyond 6 become 6. NVIDIA's formula has a
float32 in place of the power of two (TensorRT's documentation, "Quantization Schemes" and "DynamicQuantize";
Model Optimizer's NVFP4QTensor; compressed-tensors' `generate_gparam` stores its inverse). E4M3 has the same
3 bits of fraction at every power, so that a power of two loses nothing, and it has advantages: all values
have 6 significant bits, exact in float16 and bfloat16; and layers can get one global scale without rounding
again, which servers that fuse queries, keys and values require.

Weights are quantized once. Scales of the blocks of activations are computed at run time (`DynamicQuantize`);
their global scale is calibrated, because TensorRT requires a constant, and blocks beyond it are clipped.

Shapes: N = outputs (rows), K = inputs (columns), g = 16, G = ceil(K / g).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.quantization import groupwise as parts
from smelt.quantization.scheme import (
    NVIDIA_DOMAIN,
    Expansion,
    MatrixUse,
    PackedMatrix,
    QuantizedGraph,
    QuantParams,
    Scheme,
    SchemeOption,
    SchemeOptions,
    StoredTensor,
    UnpackedWeights,
)
from smelt.quantization.schemes.float4 import E2M1_MAX, e2m1_codes, e2m1_values
from smelt.quantization.schemes.fp8 import E4M3_MAX, to_e4m3
from smelt.quantization.schemes.int8_static import INPUT_SCALE

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_SIZE = 16
# TensorRT's operator, as Model Optimizer writes it
DYNAMIC_QUANTIZE = "TRT_FP4DynamicQuantize"
_FLOAT4_BITS, _WEIGHTS_ALONE = 4, 16
_FRACTION_STEPS = 16.0  # numbers of four significant bits, as E4M3's, in a power of two
_MIN_BLOCK_SCALE = 2.0**-9  # of E4M3
_MIN_GLOBAL_SCALE = 2.0**-24  # of float16
_BLOCK_SCALES, _GLOBAL_SCALE = "block_scales", "global_scale"
_COLUMNS, _COLUMN_SCALES, _ROW_SCALES = "columns", "column_scales", "row_scales"
_NO_KERNELS = "no operator of it reads 4-bit floats (E2M1)"
# placeholders in a graph: of weights, by the axis of their blocks; of activations
_WEIGHT_PLACEHOLDERS = {"NvFloat4Columns": 0, "NvFloat4Rows": 1}
_ROUNDING_PLACEHOLDER = "NvFloat4Rounding"


def power_of_two_above(x: Tensor) -> Tensor:
    """Return the least powers of two that are at least `x`, float32; at least 2^-24."""
    import torch

    mantissa, exponent = torch.frexp(x)
    powers = torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).int())
    return powers.clamp(min=_MIN_GLOBAL_SCALE)


def fake_quantize_float4(x: Tensor, global_scale: Tensor) -> Tensor:
    """Return float32 `x` [..., K] after quantizing and dequantizing each block of 16 values.

    A block whose scale is less than half of E4M3's least number becomes zeros.
    """
    from torch.nn import functional as F

    width = x.shape[-1]
    blocks = F.pad(x, (0, -width % BLOCK_SIZE)).unflatten(-1, (-1, BLOCK_SIZE))
    amax = blocks.abs().amax(dim=-1, keepdim=True)
    scales = to_e4m3(amax / E2M1_MAX / global_scale).float() * global_scale
    values = e2m1_values(e2m1_codes(blocks / scales.where(scales > 0, 1.0))) * scales
    out: Tensor = values.flatten(-2)[..., :width]
    return out


class Nvfp4(Scheme):
    """codes: uint8 [N, G, 8]; block_scales: float32 [N, G], of E4M3; global_scale: float32 scalar.

    With activation_bits 4 also input_scale: float32 scalar, the global scale of the activations. The grid of
    the weights has `scales` [N, G], of four significant bits; those below 2^-15 of the largest are rounded
    again when they are stored.
    """

    name: ClassVar[str] = "nvfp4"
    summary: ClassVar[str] = (
        "4-bit float weights and activations (E2M1), one 8-bit float scale per 16 inputs and one scale per"
        " tensor; that of activations is calibrated on samples"
    )
    recommended_for: ClassVar[str] = "TensorRT and vLLM on GPUs since Blackwell"
    source: ClassVar[str] = (
        "NVIDIA TensorRT documentation, Quantization Schemes (NVFP4); Alvarez et al. 2025, Introducing NVFP4"
    )
    option_specs: ClassVar[tuple[SchemeOption, ...]] = (
        replace(
            parts.GROUP_SIZE,
            default=BLOCK_SIZE,
            allowed=(BLOCK_SIZE,),
            rejection=f"{name} has groups of {BLOCK_SIZE} weights, as its format says",
        ),
        replace(parts.ACTIVATION_BITS, default=_FLOAT4_BITS, allowed=(_FLOAT4_BITS, _WEIGHTS_ALONE)),
    )
    quantizes_tables: ClassVar[bool] = False  # as Model Optimizer and llm-compressor
    requires_calibration: ClassVar[bool] = True
    has_float_activations: ClassVar[bool] = True
    learnable_scales: ClassVar[bool] = False
    unsupported_targets: ClassVar[Mapping[str, str]] = {
        "ort-cpu": _NO_KERNELS,
        "ort-cuda": _NO_KERNELS,
        "openvino": _NO_KERNELS,
        "ort-tensorrt": "ONNX Runtime 1.31 has no option to enable FP4 in TensorRT 10",
    }
    supported_dtypes: ClassVar[Mapping[str, tuple[str, ...]]] = {"tensorrt": ("fp16", "bf16")}
    min_opset: ClassVar[Mapping[str, int]] = {"tensorrt": 23}  # FLOAT4E2M1
    exported_as: ClassVar[str] = f"{name} weights (float4)"
    operators: ClassVar[tuple[str, ...]] = ()
    # at most 4e-7 was measured in float32 on tiny models of eight families; in float16 and bfloat16, where
    # other digits decide between two of 16 numbers, 0.05 to 0.26, and 1.1 on a BERT of nearly equal logits
    tolerance: ClassVar[float] = 0.5
    embedding_tolerance: ClassVar[float] = 0.3

    def group_size(self, width: int, options: SchemeOptions) -> int:
        """Return 16."""
        return BLOCK_SIZE

    def compute_qparams(self, groups: Tensor, width: int, options: SchemeOptions) -> QuantParams:
        """Return a sixth of the largest magnitudes, of four significant bits as E4M3's; 0 for zeros."""
        import torch

        mantissa, exponent = torch.frexp(groups.abs().amax(dim=-1) / E2M1_MAX)
        return {"scales": torch.ldexp((mantissa * _FRACTION_STEPS).round_() / _FRACTION_STEPS, exponent)}

    def quantize(self, groups: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return codes, uint8: the nearest magnitude, ties to the even code, and 8 more if negative."""
        scales = grid["scales"]
        return e2m1_codes(groups / scales.where(scales != 0, 1.0)[..., None])

    def dequantize(self, codes: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return value * scale."""
        return e2m1_values(codes) * grid["scales"][..., None]

    def stored_tensors(self, rows: int, width: int, options: SchemeOptions) -> dict[str, StoredTensor]:
        """Return the specs of two codes per byte, and of the scales of blocks, weights and activations."""
        count = parts.num_groups(width, BLOCK_SIZE)
        specs = {
            "codes": StoredTensor((rows, count, BLOCK_SIZE // 2), "uint8"),
            _BLOCK_SCALES: StoredTensor((rows, count), "float32", file_dtype="float8_e4m3fn"),
            _GLOBAL_SCALE: StoredTensor((), "float32", per_row=False),
        }
        calibrated = {INPUT_SCALE: StoredTensor((), "float32", calibrated=True)}
        return specs | (calibrated if self.quantizes_activations(options) else {})

    def _stored_scales(self, grid: QuantParams) -> tuple[Tensor, Tensor]:
        """Return the scales of the blocks, numbers of E4M3, and of the tensor, for the scales of a grid."""
        scales = grid["scales"]
        global_scale = power_of_two_above(scales.max() / E4M3_MAX)
        return to_e4m3(scales / global_scale).float().clamp_(min=_MIN_BLOCK_SCALE), global_scale

    def stored_qparams(self, grid: QuantParams, options: SchemeOptions) -> QuantParams:
        """Return the products of both scales."""
        block_scales, global_scale = self._stored_scales(grid)
        return {"scales": block_scales * global_scale}

    def pack(self, decided: UnpackedWeights, options: SchemeOptions) -> dict[str, Tensor]:
        """Return the tensors of `stored_tensors`; blocks whose scale changes are rounded again."""
        codes, grid = decided
        block_scales, global_scale = self._stored_scales(grid)
        stored = {"scales": block_scales * global_scale}
        rounded = self.quantize(self.dequantize(codes, grid, options), stored, options)
        codes = codes.where((stored["scales"] == grid["scales"])[..., None], rounded)
        return {
            "codes": parts.pack_nibbles(codes),
            _BLOCK_SCALES: block_scales,
            _GLOBAL_SCALE: global_scale,
        }

    def unpack(self, matrix: PackedMatrix) -> UnpackedWeights:
        """Return the codes as uint8, and the products of both scales."""
        scales = matrix.tensor(_BLOCK_SCALES) * matrix.tensor(_GLOBAL_SCALE)
        return UnpackedWeights(parts.unpack_nibbles(matrix.tensor("codes")), {"scales": scales})

    def checkpoint_args(self, options: SchemeOptions) -> Mapping[str, Any]:
        """Return blocks of weights, and of activations unless they stay float, as vLLM computes them."""
        args = {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": "tensor_group",
            "group_size": BLOCK_SIZE,
            "scale_dtype": "torch.float8_e4m3fn",
            "zp_dtype": "torch.float8_e4m3fn",
        }
        inputs = {"input_activations": args | {"dynamic": "local", "observer": "static_minmax"}}
        has_inputs = self.quantizes_activations(options)
        return {"format": "nvfp4-pack-quantized", "weights": args, **(inputs if has_inputs else {})}

    def checkpoint_tensors(self, siblings: Sequence[PackedMatrix]) -> list[dict[str, Tensor]]:
        """Return the scales of blocks, and the inverse of one global scale for all `siblings`.

        vLLM multiplies queries, keys and values, and other layers of one input, as one matrix with one global
        scale. A matrix whose block scales E4M3 cannot hold at that scale keeps its own.
        """
        import torch

        common = torch.stack([matrix.tensor(_GLOBAL_SCALE) for matrix in siblings]).max()
        tensors = []
        for matrix in siblings:
            matrix_scale, block_scales = matrix.tensor(_GLOBAL_SCALE), matrix.tensor(_BLOCK_SCALES)
            rescaled = block_scales * (matrix_scale / common)
            is_exact = bool(to_e4m3(rescaled).float().equal(rescaled))
            scales, global_scale = (rescaled, common) if is_exact else (block_scales, matrix_scale)
            entry = {"weight_scale": scales, "weight_global_scale": 1 / global_scale.reshape(1)}
            if matrix.has(INPUT_SCALE):
                entry["input_global_scale"] = 1 / matrix.tensor(INPUT_SCALE).reshape(1)
            tensors.append(entry)
        return tensors

    def quantizes_activations(self, options: SchemeOptions) -> bool:
        """Return whether activations have 4 bits."""
        return options[parts.ACTIVATION_BITS.name] == _FLOAT4_BITS

    def calibrates_activations(self, options: SchemeOptions) -> bool:
        """Return whether activations have 4 bits."""
        return self.quantizes_activations(options)

    def activation_tensors(self, low: float, high: float, options: SchemeOptions) -> dict[str, Tensor]:
        """Return the global scale of the range, 2^-24 or more."""
        import torch

        if not self.quantizes_activations(options):
            return {}
        largest = torch.tensor(max(-low, high, 0.0), dtype=torch.float32)
        return {INPUT_SCALE: power_of_two_above(largest / (E2M1_MAX * E4M3_MAX))}

    def exact_activations(self, matrix: PackedMatrix) -> tuple[float, float]:
        """Return the ends of the range."""
        if not matrix.has(INPUT_SCALE):
            return -1.0, 1.0
        end = float(matrix.tensor(INPUT_SCALE)) * E2M1_MAX * E4M3_MAX
        return -end, end

    def linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply the values of quantized weights and activations."""
        from torch.nn import functional as F

        return F.linear(self.fake_quantize_activations(matrix, x), matrix.dequantized(), bias)

    def fake_quantize_activations(self, matrix: PackedMatrix, x: Tensor) -> Tensor:
        """Return activations after quantizing and dequantizing their blocks, in the type of `x`."""
        if not matrix.has(INPUT_SCALE):
            return x
        return fake_quantize_float4(x.float(), matrix.tensor(INPUT_SCALE).to(x.device)).to(x.dtype)

    def export_constants(self, matrix: PackedMatrix, use: MatrixUse) -> dict[str, Tensor]:
        """Return codes and scales as TensorRT reads them: [G g, N] and [G, N]; for lookups scales [N, G].

        Codes are flattened, two per byte, the first one in the lowest bits; scales are the bytes of E4M3.
        """
        import torch

        scales = to_e4m3(matrix.tensor(_BLOCK_SCALES).detach()).view(torch.uint8)
        if use == "lookup":
            return {_ROW_SCALES: scales}
        codes = parts.unpack_nibbles(matrix.tensor("codes").detach()).flatten(1).t()
        return {
            _COLUMNS: parts.pack_nibbles(codes.flatten()),
            _COLUMN_SCALES: scales.t().contiguous(),
        }

    def emit_linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit MatMul with DequantizeLinear of the weights, after TRT_FP4DynamicQuantize of activations."""
        import torch
        from torch.nn import functional as F

        scales = matrix.tensor(_COLUMN_SCALES)
        shape = (scales.shape[0] * BLOCK_SIZE, scales.shape[1])
        constants = [matrix.tensor(_COLUMNS), scales, matrix.tensor(_GLOBAL_SCALE)]
        weights = _emit_placeholder("NvFloat4Columns", constants, shape)
        if shape[0] != x.shape[-1]:  # the last block is padded
            x = F.pad(x, (0, shape[0] - x.shape[-1]))
        if matrix.has(INPUT_SCALE):
            # TensorRT quantizes tensors of two or three axes
            flat = x.flatten(0, -3) if x.dim() > 3 else x
            rounded = _emit_placeholder(
                _ROUNDING_PLACEHOLDER, [flat, matrix.tensor(INPUT_SCALE)], tuple(flat.shape)
            )
            x = rounded.reshape(x.shape) if x.dim() > 3 else rounded
        out = torch.matmul(x, weights)
        return out if bias is None else out + bias

    def emit_lookup(self, matrix: PackedMatrix, ids: Tensor, target: str) -> Tensor:
        """Emit Gather in a table that is dequantized like weights."""
        from torch.nn import functional as F

        scales = matrix.tensor(_ROW_SCALES)
        constants = [matrix.tensor("codes"), scales, matrix.tensor(_GLOBAL_SCALE)]
        table = _emit_placeholder("NvFloat4Rows", constants, (scales.shape[0], scales.shape[1] * BLOCK_SIZE))
        return F.embedding(ids, table)[..., : matrix.width]

    def float_activation_nodes(self, node: Any) -> list[Any]:
        """Return the node itself: it multiplies floats, and the quantization before it is bypassed."""
        return [node]

    def placeholder_expansions(self) -> Mapping[str, Expansion]:
        """Return the two DequantizeLinear of weights, and the quantization of activations."""
        return dict.fromkeys(_WEIGHT_PLACEHOLDERS, _dequantize) | {_ROUNDING_PLACEHOLDER: _round_activations}


def _emit_placeholder(name: str, inputs: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Emit the placeholder `name` for float32 values."""
    import torch

    from smelt.quantization.emit import LOAD_TIME_DOMAIN

    out: Tensor = torch.onnx.ops.symbolic(
        f"{LOAD_TIME_DOMAIN}::{name}", inputs, dtype=torch.float32, shape=shape, version=1
    )
    return out


def _dequantize(graph: QuantizedGraph, node: Any) -> list[Any]:
    """Return the nodes that dequantize the scales of the blocks, and then the codes."""
    from onnx import TensorProto, helper

    (codes, scales, global_scale), result = node.input, node.output[0]
    axis = _WEIGHT_PLACEHOLDERS[node.op_type]
    # parity checks find a layer by the names of its constants
    names = [f"{codes}.float4", f"{scales}.float8", f"{result}.scales"]
    shape = list(graph.shapes[scales])
    graph.reinterpret_constant(scales, names[1], TensorProto.FLOAT8E4M3FN, tuple(shape))
    shape[axis] *= BLOCK_SIZE
    graph.reinterpret_constant(codes, names[0], TensorProto.FLOAT4E2M1, tuple(shape))
    blocks: dict[str, Any] = {"axis": axis, "block_size": BLOCK_SIZE}
    return [
        helper.make_node("DequantizeLinear", [names[1], global_scale], [names[2]], f"{names[2]}.dequantize"),
        helper.make_node(
            "DequantizeLinear", [names[0], names[2]], [result], f"{result}.dequantize", **blocks
        ),
    ]


def _round_activations(graph: QuantizedGraph, node: Any) -> list[Any]:
    """Return TensorRT's operator, and the nodes that dequantize its scales and values."""
    from onnx import TensorProto, helper

    (x, global_scale), result = node.input, node.output[0]
    codes, block_scales, scales = (f"{result}.{suffix}" for suffix in ("codes", "block_scales", "scales"))
    blocks: dict[str, Any] = {"axis": -1, "block_size": BLOCK_SIZE}
    return [
        helper.make_node(
            DYNAMIC_QUANTIZE, [x, global_scale], [codes, block_scales], f"{result}.quantize",
            domain=NVIDIA_DOMAIN, scale_type=TensorProto.FLOAT8E4M3FN, **blocks,
        ),
        helper.make_node("DequantizeLinear", [block_scales, global_scale], [scales], f"{scales}.dequantize"),
        helper.make_node("DequantizeLinear", [codes, scales], [result], f"{result}.dequantize", **blocks),
    ]  # fmt: skip
