"""int8 weights per output channel or tensor, and the scheme int8-dynamic; int8-static is in `int8_static.py`.

Symmetric weights: scale = amax / 127 of a row, or of the whole matrix; value = code * scale. Integer
products are summed in int32, then y = (scale of activations * weight scale) * sum + bias.

Asymmetric weights use all 256 codes for the range of a row or matrix, extended to 0, as
onnxruntime.quantization computes it (`quant_utils.py: compute_scale_zp`, in float64):

    scale = (max(0, max w) - min(0, min w)) / 255
    zero  = clamp(round(-128 - min(0, min w) / scale), -128, 127)
    code  = clamp(round(w / scale) + zero, -128, 127);  value = (code - zero) * scale

They are int8 in files and graphs. While they are computed, codes and zero points are 128 more, from 0 to 255,
as those of `affine.py`, so that every method works on them.

A single scale or zero point of a matrix is also stored once per row, so that concatenated matrices (queries,
keys and values) can keep theirs. It is exported to ONNX Runtime as one number where all are equal.

The same weights can be exported to MatMulNBits. 128 is added to codes and zero points, because the operator
needs unsigned ones, and those of a row are repeated for each of its blocks: the weights stay the same
numbers, bit for bit. Activations become int8 block by block (`smelt.quantization.groupwise`), not by one
range for the tensor of the whole batch.

Activations of int8-dynamic are uint8, quantized at run time as ONNX's DynamicQuantizeLinear (opset 11)
defines it: asymmetric, one scale and zero point for the tensor of a whole batch:

    scale = (max(0, max x) - min(0, min x)) / 255
    zero  = clamp(round(0 - min(0, min x) / scale), 0, 255)
    x_q   = clamp(round(x / scale) + zero, 0, 255)                       round half to even

A layer may be exported to the other form, if that was measured to be faster.

Convolutions (`smelt/quantization/layers.py`) are matrices with a row per output channel.

Shapes: N = outputs (rows), K = inputs (columns), g = inputs of a block, G = ceil(K / g).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from smelt.quantization import groupwise
from smelt.quantization.scheme import (
    MatrixUse,
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
_OFFSET = 128  # from int8 to uint8
# the largest is the fastest: docs/measurements/int8-groupwise.md
_SIZES = (128, 64, 32)
# the operator's accuracy level that multiplies int8 blocks
_ACCURACY_LEVEL = 4


def block_size(width: int) -> int:
    """Return g for K = `width` inputs: the largest block that divides them, else the smallest one."""
    return next((size for size in _SIZES if size <= width), _SIZES[-1])


def block_constants(matrix: PackedMatrix, use: MatrixUse) -> dict[str, Tensor]:
    """Return `blocks`, uint8 [N, G, g], `block_scales`, float32 [N, G], and `block_zeros`, uint8 [N, G].

    Symmetric matrices have no zero points. For lookups scales and zero points are [N, 1]. The scale of a row
    of zeros is 0: the operator sums products with the middle 128 in float, and with scale 1
    (`compute_qparams`) the rounding of these sums would be its result.
    """
    q_weight, size = matrix.tensor("codes").detach(), block_size(matrix.width)
    blocks = groupwise.split_into_groups(q_weight.short(), size).add(_OFFSET).byte()
    per_row = {"scales": matrix.tensor("scales").detach()[:, None]}
    if matrix.has(ZEROS):
        per_row[ZEROS] = _to_unsigned(matrix.tensor(ZEROS).detach())[:, None]
    if use == "lookup":
        return {"blocks": blocks} | {_LOOKUP_NAMES[name]: t.clone() for name, t in per_row.items()}
    zero = matrix.tensor(ZEROS).detach()[:, None] if matrix.has(ZEROS) else 0
    is_zero_row = (q_weight == zero).all(dim=1, keepdim=True)
    per_row["scales"] = per_row["scales"].masked_fill(is_zero_row, 0.0)
    return {"blocks": blocks} | {f"block_{name}": t.repeat(1, blocks.shape[1]) for name, t in per_row.items()}


def block_linear(matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return the operator's result, float32 [..., N]."""
    from torch.nn import functional as F

    return F.linear(groupwise.fake_quantize_blocks(x, block_size(matrix.width)), matrix.dequantized(), bias)


def emit_block_linear(matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
    """Emit MatMulNBits with 8 bits."""
    from smelt.quantization import emit

    blocks = matrix.tensor("blocks")
    layout = emit.NBitsLayout(matrix.width, blocks.shape[0], 8, blocks.shape[2])
    zeros = matrix.tensor("block_zeros") if matrix.has("block_zeros") else None
    return emit.matmul_nbits(x, blocks, matrix.tensor("block_scales"), zeros, bias, layout, _ACCURACY_LEVEL)


def emit_block_lookup(matrix: PackedMatrix, ids: Tensor) -> Tensor:
    """Emit a lookup in the blocks: output layer and embedding share a constant; zero rows stay zero."""
    flat = ids.flatten()
    zeros: Tensor | float = float(_OFFSET)
    if matrix.has("lookup_zeros"):
        zeros = matrix.tensor("lookup_zeros").index_select(0, flat).float()[..., None]
    values = matrix.tensor("blocks").index_select(0, flat).float() - zeros
    scaled = values.flatten(1)[:, : matrix.width] * matrix.tensor("lookup").index_select(0, flat)
    return scaled.reshape(*ids.shape, matrix.width)


GRANULARITY_DESCRIPTION = "the weights that share a scale"
_TENSOR = "tensor"
GRANULARITY = SchemeOption(
    "granularity", "channel", ("channel", _TENSOR), GRANULARITY_DESCRIPTION, own_only=True
)
SYMMETRIC = replace(groupwise.SYMMETRIC, allowed=(True, False), own_only=True)
# the zero points of asymmetric weights among the stored tensors, and in a graph, one for all
ZEROS, SHARED_ZERO = "zeros", "zero"
# the name in a graph of the scale of a whole matrix
SHARED_SCALE = "scale"
_LOOKUP_NAMES = {"scales": "lookup", ZEROS: "lookup_zeros"}


class Int8PerChannel(Scheme):
    """codes: int8 [N, K]; scales: float32 [N], as the runtime multiplies by them; zeros: int8 [N] or none."""

    def group_size(self, width: int, options: SchemeOptions) -> int:
        """Return K: a row has one scale."""
        return width

    def is_per_tensor(self, options: SchemeOptions) -> bool:
        """Return whether the granularity is the tensor."""
        return options.get(GRANULARITY.name) == _TENSOR  # bnb-int8 has no such option

    def is_symmetric(self, options: SchemeOptions) -> bool:
        """Return whether the weights have no zero points."""
        return bool(options.get(SYMMETRIC.name, True))

    def compute_qparams(self, groups: Tensor, width: int, options: SchemeOptions) -> QuantParams:
        """Return scales of the range of a row, or of all, and zero points unless symmetric; 1 for zeros."""
        if not self.is_symmetric(options):
            return self._asymmetric_qparams(groups, options)
        amax = groups.abs().amax(dim=-1)
        amax = amax.max().expand_as(amax) if self.is_per_tensor(options) else amax
        return {"scales": (amax / 127).where(amax > 0, 1.0)}

    def _asymmetric_qparams(self, groups: Tensor, options: SchemeOptions) -> QuantParams:
        low = groups.amin(dim=-1).clamp_(max=0).double()
        high = groups.amax(dim=-1).clamp_(min=0).double()
        if self.is_per_tensor(options):
            low, high = low.min().expand_as(low), high.max().expand_as(high)
        scales = (high - low) / 255
        is_valid = scales >= float(np.finfo(np.float32).tiny)  # else only zeros, or float32 underflow
        zeros = (-low / scales).where(is_valid, float(_OFFSET)).round_().clamp_(0, 255)
        return {"scales": scales.where(is_valid, 1.0).float(), ZEROS: zeros.byte()}

    def quantize(self, groups: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return codes from -127 to 127, int8; asymmetric: from 0 to 255, uint8."""
        steps = (groups / grid["scales"][..., None]).round_()
        if ZEROS in grid:
            return steps.add_(grid[ZEROS][..., None]).clamp_(0, 255).byte()
        return steps.clamp_(-127, 127).char()

    def dequantize(self, codes: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return code * scale, or (code - zero) * scale."""
        values = codes.float()
        values = values - grid[ZEROS].float()[..., None] if ZEROS in grid else values
        return values * grid["scales"][..., None]

    def code_range(
        self, grid: QuantParams, options: SchemeOptions
    ) -> tuple[Tensor | float, Tensor | float] | None:
        """Return -127 and 127, or 0 and 255 minus the zero points."""
        if ZEROS not in grid:
            return -127.0, 127.0
        zeros = grid[ZEROS].float()[..., None]
        return 0.0 - zeros, 255.0 - zeros

    def stored_tensors(self, rows: int, width: int, options: SchemeOptions) -> dict[str, StoredTensor]:
        """Return the specs of a byte per weight, a scale per row, and a zero point unless symmetric."""
        specs = {"codes": StoredTensor((rows, width), "int8"), "scales": StoredTensor((rows,), "float32")}
        return specs if self.is_symmetric(options) else specs | {ZEROS: StoredTensor((rows,), "int8")}

    def pack(self, decided: UnpackedWeights, options: SchemeOptions) -> dict[str, Tensor]:
        """Return codes, scales and zero points without the axis of the groups."""
        codes, grid = decided.q_weight.flatten(1), decided.qparams
        tensors = {"codes": codes, "scales": grid["scales"][:, 0]}
        if ZEROS not in grid:
            return tensors
        return tensors | {"codes": _to_signed(codes), ZEROS: _to_signed(grid[ZEROS][:, 0])}

    def unpack(self, matrix: PackedMatrix) -> UnpackedWeights:
        """Return the row as one group; asymmetric codes and zero points as uint8."""
        codes, grid = matrix.tensor("codes")[:, None], {"scales": matrix.tensor("scales")[:, None]}
        if not matrix.has(ZEROS):
            return UnpackedWeights(codes, grid)
        return UnpackedWeights(
            _to_unsigned(codes), grid | {ZEROS: _to_unsigned(matrix.tensor(ZEROS)[:, None])}
        )

    def checkpoint_args(self, options: SchemeOptions) -> Mapping[str, Any] | None:
        """Return a scale per row, with activations in int8 by token; None with zero points.

        vLLM's kernels (W8A8) compute so, and none has zero points of weights.
        """
        if not self.is_symmetric(options):
            return None
        args = {"num_bits": 8, "type": "int", "symmetric": True}
        return {
            "format": "int-quantized",
            "weights": args | {"strategy": "channel"},
            "input_activations": args | {"strategy": "token", "dynamic": True},
        }

    def lookup(self, matrix: PackedMatrix, ids: Tensor) -> Tensor:
        """Look up quantized rows, their scales and zero points; a row of zeros stays zero."""
        return lookup_dequantized(matrix, ids, matrix.tensor("codes"))

    def export_constants(self, matrix: PackedMatrix, use: MatrixUse) -> dict[str, Tensor]:
        """Return the codes as [K, N], as ONNX matrix multiplications need them; for lookups scales as [N, 1].

        So the scales of a lookup have a name of their own in the graph, as have its zero points. A scale or
        zero point common to all rows is a scalar.
        """
        per_row = {"scales": matrix.tensor("scales").detach()}
        if matrix.has(ZEROS):
            per_row[ZEROS] = matrix.tensor(ZEROS).detach()
        is_per_tensor = self.is_per_tensor(matrix.options)
        shared = {name: is_per_tensor and bool(t.eq(t[0]).all()) for name, t in per_row.items()}
        if use == "lookup":
            return {
                _LOOKUP_NAMES[name]: tensor[0].clone() if shared[name] else tensor[:, None].clone()
                for name, tensor in per_row.items()
            }
        constants = {"columns": matrix.tensor("codes").detach().t().contiguous()}
        names = {"scales": SHARED_SCALE, ZEROS: SHARED_ZERO}
        return constants | {names[n]: tensor[0].clone() for n, tensor in per_row.items() if shared[n]}


def _to_signed(values: Tensor) -> Tensor:
    """Return uint8 `values` less 128, int8."""
    return (values.short() - _OFFSET).char()


def _to_unsigned(values: Tensor) -> Tensor:
    """Return int8 `values` plus 128, uint8."""
    return (values.short() + _OFFSET).byte()


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


def output_zeros(matrix: PackedMatrix) -> Tensor | None:
    """Return the weights' zero points in a graph for ONNX Runtime's CPU: int8 [N], or one for all, [].

    None if symmetric.
    """
    if not matrix.has(ZEROS):
        return None
    return matrix.tensor(SHARED_ZERO if matrix.has(SHARED_ZERO) else ZEROS)


def lookup_dequantized(matrix: PackedMatrix, ids: Tensor, codes: Tensor) -> Tensor:
    """Return the dequantized rows of `codes`, int8 [N, K]: float32 [..., K]."""
    from torch.nn import functional as F

    def per_row(in_graph: str, stored: str) -> Tensor:
        table = matrix.tensor(in_graph) if matrix.has(in_graph) else matrix.tensor(stored)[:, None]
        return F.embedding(ids, table) if table.dim() else table

    values = F.embedding(ids, codes).float()
    if matrix.has(ZEROS):
        values = values - per_row("lookup_zeros", ZEROS).float()
    return values * per_row("lookup", "scales")


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

    # with one column torch 2.13 returns unset memory; on CUDA it refuses 16 rows or fewer, and odd widths
    if not x.is_cuda and is_int8_matmul_exact() and x.shape[1] > 1:
        return torch._int_mm(x, codes.t())
    sums = torch.zeros(x.shape[0], codes.shape[0], dtype=torch.int32, device=x.device)
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
    """codes: int8 [N, K]; scales: float32 [N], as the runtime multiplies by them; zeros: int8 [N] or none."""

    name: ClassVar[str] = "int8-dynamic"
    summary: ClassVar[str] = (
        "int8 weights per output channel or tensor; activations become uint8 at run time, one scale for the"
        " tensor of the whole batch"
    )
    recommended_for: ClassVar[str] = "a CPU, for one text and for many"
    source: ClassVar[str] = "ONNX operator DynamicQuantizeLinear-11 (github.com/onnx/onnx, docs/Operators.md)"
    option_specs: ClassVar[tuple[SchemeOption, ...]] = (GRANULARITY, SYMMETRIC)
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
        if matrix.has(ZEROS):
            input_sums = q_input.sum(dim=1, dtype=torch.int32) + (128 - zero) * matrix.width
            sums -= torch.outer(input_sums, matrix.tensor(ZEROS).int())
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
        weights = emit.WeightGrid(transposed_weight(matrix), output_scales(matrix), output_zeros(matrix))
        return emit.dynamic_quantize_matmul(x, weights, bias)

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
        else:
            scale = SHARED_SCALE if f"{y}.{SHARED_SCALE}" in tensors else "scales"
            tensors = {
                f"{y}.columns": tensors[f"{y}.columns"],
                f"{y}.{scale}": tensors.get(f"{y}.{scale}", matrix.tensor("scales")),
            }
            if matrix.has(ZEROS):
                tensors[f"{y}.{ZEROS}"] = matrix.tensor(ZEROS)
        name = matrix.variant or _FORM
        node = helper.make_node(name, [x, *tensors], [y], domain="com.microsoft", **layout)
        return node, tensors

    def float_activation_nodes(self, node: Any) -> list[Any]:
        """Return nodes with float32 activations: for blocks the same operator, else standard nodes."""
        if node.op_type == groupwise.MATMUL_NBITS:
            return groupwise.nbits_float_activation_nodes(node)
        return float_linear_nodes(node, *[*node.input, *[""] * 5][:5])
