"""The schemes int8-dynamic and int8-static: int8 weights per output channel or tensor, 8-bit activations.

Weights: symmetric, scale = amax / 127 of a row, or of the whole matrix; value = code * scale. Integer
products are summed in int32, then y = (scale of activations * weight scale) * sum + bias.

A single scale of a matrix is also stored once per row, so that concatenated matrices (queries, keys and
values) can keep theirs. It is exported to ONNX Runtime as one number where all are equal.

The same weights can be exported to MatMulNBits. 128 is added to the codes, because the operator needs
unsigned ones, and the scale of a row is repeated for each of its blocks: the weights stay the same numbers,
bit for bit. Activations become int8 block by block (`smelt.quantization.groupwise`), not by one range for the
tensor of the whole batch.

Activations of int8-dynamic are uint8, quantized at run time as ONNX's DynamicQuantizeLinear (opset 11)
defines it: asymmetric, one scale and zero point for the tensor of a whole batch:

    scale = (max(0, max x) - min(0, min x)) / 255
    zero  = clamp(round(0 - min(0, min x) / scale), 0, 255)
    x_q   = clamp(round(x / scale) + zero, 0, 255)                       round half to even

A layer may be exported to the other form, if that was measured to be faster.

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

Convolutions (`smelt/quantization/layers.py`) are matrices with a row per output channel.

Shapes: N = outputs (rows), K = inputs (columns), g = inputs of a block, G = ceil(K / g).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from smelt.quantization import groupwise
from smelt.quantization.scheme import (
    MatrixUse,
    OptionValue,
    PackedMatrix,
    QuantParams,
    Scheme,
    SchemeOption,
    SchemeOptions,
    StoredTensor,
    UnpackedWeights,
)

if TYPE_CHECKING:
    from torch import Tensor


BLOCK_VARIANT = "MatMulNBits"
_ZERO_POINT = 128
# the largest is the fastest: docs/measurements/int8-groupwise.md
_SIZES = (128, 64, 32)
# the operator's accuracy level that multiplies int8 blocks
_ACCURACY_LEVEL = 4


def block_size(width: int) -> int:
    """Return g for K = `width` inputs: the largest block that divides them, else the smallest one."""
    return next((size for size in _SIZES if size <= width), _SIZES[-1])


def block_constants(matrix: PackedMatrix, use: MatrixUse) -> dict[str, Tensor]:
    """Return `blocks`, uint8 [N, G, g], and `block_scales`, float32 [N, G]; for lookups scales as [N, 1]."""
    q_weight, size = matrix.tensor("codes").detach(), block_size(matrix.width)
    blocks = groupwise.split_into_groups(q_weight.short(), size).add(_ZERO_POINT).byte()
    scales = matrix.tensor("scales").detach()[:, None]
    if use == "lookup":
        return {"blocks": blocks, "lookup": scales.clone()}
    return {"blocks": blocks, "block_scales": scales.repeat(1, blocks.shape[1])}


def block_linear(matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return the operator's result, float32 [..., N]."""
    from torch.nn import functional as F

    return F.linear(groupwise.fake_quantize_blocks(x, block_size(matrix.width)), matrix.dequantized(), bias)


def emit_block_linear(matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
    """Emit MatMulNBits with 8 bits."""
    from smelt.quantization import emit

    blocks = matrix.tensor("blocks")
    layout = emit.NBitsLayout(matrix.width, blocks.shape[0], 8, blocks.shape[2])
    return emit.matmul_nbits(x, blocks, matrix.tensor("block_scales"), None, bias, layout, _ACCURACY_LEVEL)


def emit_block_lookup(matrix: PackedMatrix, ids: Tensor) -> Tensor:
    """Emit a lookup in the blocks: output layer and embedding share a constant; zero rows stay zero."""
    flat = ids.flatten()
    values = matrix.tensor("blocks").index_select(0, flat).float() - float(_ZERO_POINT)
    scaled = values.flatten(1)[:, : matrix.width] * matrix.tensor("lookup").index_select(0, flat)
    return scaled.reshape(*ids.shape, matrix.width)


GRANULARITY_DESCRIPTION = "the weights that share a scale"
_TENSOR = "tensor"
GRANULARITY = SchemeOption("granularity", "channel", ("channel", _TENSOR), GRANULARITY_DESCRIPTION)
# the name in a graph of the scale of a whole matrix
SHARED_SCALE = "scale"


class Int8PerChannel(Scheme):
    """codes: int8 [N, K]; scales: float32 [N], as the runtime multiplies by them."""

    def group_size(self, width: int, options: SchemeOptions) -> int:
        """Return K: a row has one scale."""
        return width

    def is_per_tensor(self, options: SchemeOptions) -> bool:
        """Return whether the granularity is the tensor."""
        return options.get(GRANULARITY.name) == _TENSOR  # bnb-int8 has no such option

    def compute_qparams(self, groups: Tensor, width: int, options: SchemeOptions) -> QuantParams:
        """Return scales that map the largest magnitude of a row, or of all, to 127; 1 for zeros."""
        amax = groups.abs().amax(dim=-1)
        amax = amax.max().expand_as(amax) if self.is_per_tensor(options) else amax
        return {"scales": (amax / 127).where(amax > 0, 1.0)}

    def quantize(self, groups: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return codes from -127 to 127, int8."""
        return (groups / grid["scales"][..., None]).round_().clamp_(-127, 127).char()

    def dequantize(self, codes: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return code * scale."""
        return codes.float() * grid["scales"][..., None]

    def code_range(
        self, grid: QuantParams, options: SchemeOptions
    ) -> tuple[Tensor | float, Tensor | float] | None:
        """Return -127 and 127."""
        return -127.0, 127.0

    def stored_tensors(self, rows: int, width: int, options: SchemeOptions) -> dict[str, StoredTensor]:
        """Return the specs of a byte per weight and a scale per row."""
        return {"codes": StoredTensor((rows, width), "int8"), "scales": StoredTensor((rows,), "float32")}

    def pack(self, decided: UnpackedWeights, options: SchemeOptions) -> dict[str, Tensor]:
        """Return codes and scales without the axis of the groups."""
        return {"codes": decided.q_weight.flatten(1), "scales": decided.qparams["scales"][:, 0]}

    def unpack(self, matrix: PackedMatrix) -> UnpackedWeights:
        """Return the row as one group."""
        return UnpackedWeights(matrix.tensor("codes")[:, None], {"scales": matrix.tensor("scales")[:, None]})

    def lookup(self, matrix: PackedMatrix, ids: Tensor) -> Tensor:
        """Look up quantized rows and their scales; a row of zeros stays zero."""
        return lookup_dequantized(matrix, ids, matrix.tensor("codes"))

    def export_constants(self, matrix: PackedMatrix, use: MatrixUse) -> dict[str, Tensor]:
        """Return the codes as [K, N], as ONNX matrix multiplications need them; for lookups scales as [N, 1].

        So the scales of a lookup have a name of their own in the graph. A scale common to all rows is a
        scalar.
        """
        scales = matrix.tensor("scales").detach()
        same_scales = self.is_per_tensor(matrix.options) and bool(scales.eq(scales[0]).all())
        if use == "lookup":
            return {"lookup": scales[0].clone() if same_scales else scales[:, None].clone()}
        constants = {"columns": matrix.tensor("codes").detach().t().contiguous()}
        return constants | {SHARED_SCALE: scales[0].clone()} if same_scales else constants


def transposed_weight(matrix: PackedMatrix) -> Tensor:
    """Return the codes as int8 [K, N], as multiplied by a graph for ONNX Runtime's CPU.

    Where an embedding looks up its rows in the same matrix, the runtime transposes the rows when
    it loads the graph, so that all graphs of a model store one matrix. The rows are stored, because the
    runtime packs the columns of a multiplication anyway and drops the original, while a row of a transposed
    matrix is spread over the memory (a lookup of 160 rows takes 1 ms instead of 13 us).
    """
    from smelt.quantization import emit

    return (
        emit.transpose_at_load(matrix.tensor("codes")) if matrix.has("lookup") else matrix.tensor("columns")
    )


def output_scales(matrix: PackedMatrix) -> Tensor:
    """Return the output scales in a graph for ONNX Runtime's CPU: float32 [N], or one for all, []."""
    return matrix.tensor(SHARED_SCALE if matrix.has(SHARED_SCALE) else "scales")


def lookup_dequantized(matrix: PackedMatrix, ids: Tensor, codes: Tensor) -> Tensor:
    """Return rows of `codes`, int8 [N, K], times their scales, float32 [..., K]."""
    from torch.nn import functional as F

    scales = matrix.tensor("lookup") if matrix.has("lookup") else matrix.tensor("scales")[:, None]
    return F.embedding(ids, codes).float() * (F.embedding(ids, scales) if scales.dim() else scales)


def float_linear_nodes(
    node: Any, x: str, codes: str, scales: str, zero: str = "", bias: str = ""
) -> list[Any]:
    """Return standard nodes with float32 activations: (codes - zero point) * scales, MatMul, Add.

    Args:
        node: the node to replace.
        x: the name of its activations, float32 [..., K].
        codes: of its weights, int8 [K, N].
        scales: float32 [N], or [] for all.
        zero: of the weights' zero points; empty where they are 0.
        bias: float32 [N]; empty without a bias.
    """
    from onnx import TensorProto, helper

    prefix, out = f"{node.name}.exact", node.output[0]
    nodes = [helper.make_node("Cast", [codes], [f"{prefix}.codes"], to=TensorProto.FLOAT)]
    weight = f"{prefix}.codes"
    if zero:
        nodes.append(helper.make_node("Cast", [zero], [f"{prefix}.zero"], to=TensorProto.FLOAT))
        nodes.append(helper.make_node("Sub", [weight, f"{prefix}.zero"], [f"{prefix}.shifted"]))
        weight = f"{prefix}.shifted"
    nodes.append(helper.make_node("Mul", [weight, scales], [f"{prefix}.weight"]))
    matmul_output = f"{prefix}.product" if bias else out
    nodes.append(helper.make_node("MatMul", [x, f"{prefix}.weight"], [matmul_output]))
    if bias:
        nodes.append(helper.make_node("Add", [matmul_output, bias], [out]))
    nodes[-1].name = node.name  # the name in messages
    return nodes


# products of two int8 numbers that float32 adds up without rounding: 1024 * 128 * 128 is 2^24
_EXACT_TERMS = 1024


def int8_matmul(x: Tensor, codes: Tensor) -> Tensor:
    """Return x W^T exactly, int32 [rows, N], for int8 x [rows, K] and codes W [N, K]."""
    import torch
    from torch.nn import functional as F

    if is_int8_matmul_exact() and x.shape[1] > 1:  # with one column torch 2.13 returns unset memory
        return torch._int_mm(x, codes.t())
    sums = torch.zeros(x.shape[0], codes.shape[0], dtype=torch.int32)
    for start in range(0, x.shape[1], _EXACT_TERMS):
        columns = slice(start, start + _EXACT_TERMS)
        sums += F.linear(x[:, columns].float(), codes[:, columns].float()).to(torch.int32)
    return sums


@cache
def is_int8_matmul_exact() -> bool:
    """Return whether torch sums int8 products in 32 bits on this machine.

    On x86 processors without VNNI instructions its library adds pairs of them in 16 bits first, where large
    ones overflow: for random codes 99 % of the sums were wrong.
    """
    import torch

    is_exact = True
    for num_rows in (1, 32):  # single rows use other kernels
        ones = torch.full((num_rows, 64), 127, dtype=torch.int8)
        sums = torch._int_mm(ones, torch.full((64, 32), 127, dtype=torch.int8))
        is_exact = is_exact and bool((sums == 64 * 127 * 127).all())
    return is_exact


def dynamic_scale_zero_point(x: Tensor) -> tuple[float, int]:
    """Return the scale (a float32 number) and the zero point of DynamicQuantizeLinear for `x`."""
    import torch

    low, high = (np.float32(t.item()) for t in torch.aminmax(x))
    low, high = min(low, np.float32(0)), max(high, np.float32(0))
    scale = (high - low) / np.float32(255) or np.float32(1)
    return float(scale), int(np.clip(np.rint(-low / scale), 0, 255))


def fake_quantize_dynamic(x: Tensor) -> Tensor:
    """Return float `x` after DynamicQuantizeLinear and dequantizing, on any device, in the type of `x`."""
    import torch

    x_float = x.float()
    low, high = x_float.amin().clamp(max=0), x_float.amax().clamp(min=0)
    scale = torch.where(high > low, (high - low) / 255, 1.0)
    zero = torch.round(-low / scale).clamp_(0, 255)
    q_input = torch.round(x_float / scale).add_(zero).clamp_(0, 255)
    return ((q_input - zero) * scale).to(x.dtype)


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
    operators: ClassVar[tuple[str, ...]] = (_FORM, groupwise.MATMUL_NBITS)
    # 0.010 was measured on a 4 + 3 layer Marian, where int8 is 0.017 off its fp32 parent; 0.068 on the
    # vectors of all-MiniLM-L6-v2, 6 layers, where it is 0.092 off
    tolerance: ClassVar[float] = 0.05
    embedding_tolerance: ClassVar[float] = 0.15
    max_graph_error: ClassVar[float] = 0.3  # 2 to 3 times MiniLM's (docs/measurements/own-onnx.md)

    def linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply quantized weights and activations, or in blocks."""
        if matrix.variant == BLOCK_VARIANT:
            return block_linear(matrix, x, bias)
        import torch

        q_weight = matrix.tensor("codes")
        x_rows = x.detach().reshape(-1, matrix.width)
        scale, zero = dynamic_scale_zero_point(x_rows)
        # torch multiplies int8 by int8: subtract 128 from the codes, and correct the zero point
        q_input = x_rows.div(scale).round_().add_(zero - 128).clamp_(-128, 127).to(torch.int8)
        sums = int8_matmul(q_input, q_weight)
        row_sums = matrix.cached("row_sums", lambda: q_weight.sum(dim=1, dtype=torch.int32))
        sums = torch.add(sums, row_sums, alpha=128 - zero)
        out = sums.float().mul_(matrix.tensor("scales") * scale)
        out = out if bias is None else out + bias
        return out.reshape(*x.shape[:-1], q_weight.shape[0])

    def fake_quantize_activations(self, matrix: PackedMatrix, x: Tensor) -> Tensor:
        """Return quantized and dequantized activations; their range contains all, so none is clipped."""
        return fake_quantize_dynamic(x)

    def emit_linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit DynamicQuantizeMatMul, or MatMulNBits if selected."""
        from smelt.quantization import emit

        if matrix.variant == BLOCK_VARIANT:
            return emit_block_linear(matrix, x, bias)
        return emit.dynamic_quantize_matmul(x, transposed_weight(matrix), output_scales(matrix), bias)

    def export_constants(self, matrix: PackedMatrix, use: MatrixUse) -> dict[str, Tensor]:
        """Return the codes in the selected form."""
        if matrix.variant == BLOCK_VARIANT:
            return block_constants(matrix, use)
        return super().export_constants(matrix, use)

    def emit_lookup(self, matrix: PackedMatrix, ids: Tensor, target: str) -> Tensor:
        """Emit a lookup in the codes, or in the blocks of a layer with that form."""
        if matrix.variant == BLOCK_VARIANT:
            return emit_block_lookup(matrix, ids)
        return super().emit_lookup(matrix, ids, target)

    def operator_variants(self, options: SchemeOptions) -> tuple[str, ...]:
        """Return the operator of one range per batch, and that of blocks."""
        return (_FORM, BLOCK_VARIANT)

    def variant_node(self, matrix: PackedMatrix, x: str, y: str) -> tuple[Any, dict[str, Tensor]]:
        """Return the operator of the selected form."""
        from onnx import helper

        tensors = {f"{y}.{name}": tensor for name, tensor in self.export_constants(matrix, "product").items()}
        layout: dict[str, Any] = {}
        if matrix.variant == BLOCK_VARIANT:
            out_features, _, size = tensors[f"{y}.blocks"].shape
            layout = {
                "K": matrix.width,
                "N": out_features,
                "bits": 8,
                "block_size": size,
                "accuracy_level": 4,
            }
        elif f"{y}.{SHARED_SCALE}" not in tensors:
            tensors[f"{y}.scales"] = matrix.tensor("scales")
        name = matrix.variant or _FORM
        node = helper.make_node(name, [x, *tensors], [y], domain="com.microsoft", **layout)
        return node, tensors

    def float_activation_nodes(self, node: Any) -> list[Any]:
        """Return nodes with float32 activations: for blocks the same operator, else standard nodes."""
        if node.op_type == groupwise.MATMUL_NBITS:
            return groupwise.nbits_float_activation_nodes(node)
        return float_linear_nodes(node, *[*node.input, *[""] * 5][:5])


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

    return torch.tensor(_ZERO_POINT + zero, dtype=torch.uint8)


# The target whose runtime has one operator for the whole layer.
_FUSED = "ort-cpu"


class Int8Static(Int8PerChannel):
    """codes: int8 [N, K]; scales: float32 [N]; input_scale: float32 scalar, 1 for embeddings only.

    input_zero_point: int8 scalar, unless symmetric.
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
    option_specs: ClassVar[tuple[SchemeOption, ...]] = (GRANULARITY, ACTIVATIONS_SYMMETRIC)
    requires_calibration: ClassVar[bool] = True
    per_tensor_activations: ClassVar[bool] = True
    supports_conv: ClassVar[bool] = True
    unsupported_targets: ClassVar[Mapping[str, str]] = {
        "ort-cuda": "ONNX Runtime has these operators on the CPU only"
    }
    required_options: ClassVar[Mapping[str, Mapping[str, tuple[OptionValue, ...]]]] = {
        "tensorrt": {ACTIVATIONS_SYMMETRIC.name: (True,)}
    }
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
        if target == _FUSED:
            return {"zero_point": unsigned_zero_point(zero)}
        return {"zero_point": torch.tensor(zero, dtype=torch.int8)}

    def emit_linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit QuantizeLinear and MatMulIntegerToFloat, or MatMul between explicit Q/DQ pairs."""
        from smelt.quantization import emit

        activations = emit.ActivationGrid(matrix.tensor(INPUT_SCALE), matrix.tensor("zero_point"))
        if target == _FUSED:
            return emit.integer_linear(x, activations, transposed_weight(matrix), output_scales(matrix), bias)
        scales = matrix.tensor("scales")  # one per row for every granularity: no kernel is faster with one
        return emit.qdq_linear(x, activations, matrix.tensor("columns"), scales, bias)

    def emit_lookup(self, matrix: PackedMatrix, ids: Tensor, target: str) -> Tensor:
        """Emit Gather, Cast and Mul; or Gather in a table that is dequantized like weights."""
        from torch.nn import functional as F

        from smelt.quantization import emit

        if target == _FUSED:
            return super().emit_lookup(matrix, ids, target)
        return F.embedding(ids, emit.dequantize_rows(matrix.tensor("codes"), matrix.tensor("scales")))

    def float_activation_nodes(self, node: Any) -> list[Any]:
        """Return nodes with float32 activations; `node` has them in place of the quantized ones."""
        x, q_weight, _, scales, _, zero, bias = [*node.input, *[""] * 7][:7]
        return float_linear_nodes(node, x, q_weight, scales, zero, bias)
