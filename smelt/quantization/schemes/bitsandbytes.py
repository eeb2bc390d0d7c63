"""Schemes bnb-int8 and bnb-nf4: LLM.int8 and 4-bit NormalFloat, as bitsandbytes computes them.

bitsandbytes is imported at the first multiplication of one of its schemes, because it takes seconds.

Shapes: N = outputs (rows), K = inputs (columns); of bnb-nf4 g = 64, G = ceil(K / g).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.core.errors import InputError, MissingDependencyError
from smelt.core.system import require_package
from smelt.quantization import groupwise as parts
from smelt.quantization.scheme import (
    EXPORT_TARGETS,
    MatrixUse,
    PackedMatrix,
    QuantParams,
    Scheme,
    SchemeOption,
    SchemeOptions,
    StoredTensor,
    UnpackedWeights,
    graph_target,
)
from smelt.quantization.schemes.int8 import Int8PerChannel

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor


# The oldest release that computes on the CPU what the newest does (0.48, 0.49 and 0.50 were tested).
BITSANDBYTES_PACKAGES = {"bitsandbytes": "0.48"}


@cache
def import_bitsandbytes() -> Any:
    """Return the module.

    Raises:
        MissingDependencyError: it is not installed, too old, or does not load.
    """
    for package, min_version in BITSANDBYTES_PACKAGES.items():
        require_package(package, min_version, "matrix multiplications of bitsandbytes schemes")
    try:
        with silence_bitsandbytes(), _without_kernel_download():
            import bitsandbytes
    except (ImportError, OSError, RuntimeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise MissingDependencyError(
            f"bitsandbytes is installed but cannot be loaded: {first}. Run `python -m bitsandbytes` for"
            " details.",
            code="broken-installation",
        ) from error
    return bitsandbytes


@contextmanager
def silence_bitsandbytes() -> Iterator[None]:
    """Suppress bitsandbytes' log messages during its import, also by peft.

    On processors that multiply bf16 it reports at each import that the package `kernels` is missing, which it
    needs for an unused layout.
    """
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def _without_kernel_download() -> Iterator[None]:
    """Hide `kernels` while bitsandbytes is imported: it would download compiled code from a hub."""
    was_absent = "kernels" not in sys.modules
    if was_absent:
        sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if was_absent:
            del sys.modules["kernels"]


OUTLIER_THRESHOLD = 6.0
# as in bitsandbytes: 1 / 127 in float32
_STEP = 0.007874015718698502
_INT8_NOT_EXPORTED = "it has no operator that splits activations into int8 rows and float outliers"


class BnbInt8(Int8PerChannel):
    """codes: int8 [N, K]; scales: float32 [N], the largest magnitude of each row.

    LLM.int8 of bitsandbytes: int8 matrix multiplication with a float one for outliers (Dettmers et al. 2022,
    LLM.int8(), arXiv:2208.07339). Weights: one scale per row, value = code * absmax / 127. Activations,
    rounded to float16 first: a column in which any row of the batch reaches 6 is an outlier; it is multiplied
    unquantized with the dequantized weights. The rest becomes int8 with one scale per row.

    On the CPU bitsandbytes computes all of that (integer products where the processor has AVX-512, else in
    float32). No runtime that smelt exports to has an operator for it.
    """

    name: ClassVar[str] = "bnb-int8"
    summary: ClassVar[str] = "int8 weights of bitsandbytes (LLM.int8), activation outliers stay float"
    recommended_for: ClassVar[str] = "models served by torch; comparisons"
    source: ClassVar[str] = "Dettmers et al. 2022, LLM.int8(), arXiv:2208.07339 (bitsandbytes, Linear8bitLt)"
    learnable_scales: ClassVar[bool] = False
    quantizes_tables: ClassVar[bool] = False  # as transformers' BitsAndBytesConfig
    packages: ClassVar[Mapping[str, str]] = BITSANDBYTES_PACKAGES
    unsupported_targets: ClassVar[Mapping[str, str]] = {
        graph_target(target): _INT8_NOT_EXPORTED for target in EXPORT_TARGETS
    }
    exported_as: ClassVar[str] = f"{name} matrix multiplications"
    operators: ClassVar[tuple[str, ...]] = ()
    # it is not exported
    tolerance: ClassVar[float] = 0.0
    embedding_tolerance: ClassVar[float] = 0.0

    def compute_qparams(self, groups: Tensor, width: int, options: SchemeOptions) -> QuantParams:
        """Return the largest magnitude of each row."""
        return {"scales": groups.abs().amax(dim=-1)}

    def quantize(self, groups: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return codes from -127 to 127, int8; a row of zeros has zeros."""
        scales = grid["scales"]
        steps = (127.0 / scales).where(scales != 0, 0.0)
        return (groups * steps[..., None]).round_().clamp_(-127, 127).char()

    def code_range(
        self, grid: QuantParams, options: SchemeOptions
    ) -> tuple[Tensor | float, Tensor | float] | None:
        """Return None: scales are computed from the weights by bitsandbytes."""
        return None

    def checkpoint_args(self, options: SchemeOptions) -> Mapping[str, Any] | None:
        """Return None: other programs divide by 127 before they multiply, which differs in the last bit."""
        return None

    def dequantize(self, codes: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return code * scale / 127."""
        return codes.float() * grid["scales"][..., None] * _STEP

    def linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """Let bitsandbytes find outliers, round and multiply."""
        import torch

        functional, q_weight = import_bitsandbytes().functional, matrix.tensor("codes")
        x_rows = x.detach().reshape(-1, matrix.width).float()
        rounded, scales, outliers = functional.int8_vectorwise_quant(
            x_rows.half(), threshold=OUTLIER_THRESHOLD
        )
        out, _ = torch.ops.bitsandbytes.int8_mixed_scaled_mm(
            x_rows, rounded, q_weight, scales, matrix.tensor("scales"), outliers, bias
        )
        result: Tensor = out.reshape(*x.shape[:-1], q_weight.shape[0])
        return result

    def lookup(self, matrix: PackedMatrix, ids: Tensor) -> Tensor:
        """Return some rows; a row of zeros stays zero."""
        from torch.nn import functional as F

        scales = F.embedding(ids, matrix.tensor("scales")[:, None])
        return F.embedding(ids, matrix.tensor("codes")).float() * scales * _STEP

    def emit_linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Raise an error: no target supports the scheme."""
        raise InputError(
            f"scheme {self.name} cannot be exported for {target}: {_INT8_NOT_EXPORTED}.",
            code="unsupported-target",
        )

    def float_activation_nodes(self, node: Any) -> list[Any]:
        """Raise an error: no node belongs to this scheme."""
        raise InputError(f"scheme {self.name} has no operator '{node.op_type}'.", code="unsupported-operator")


NF4_BLOCK_SIZE = 64
NF4_QUANT_TYPE = "nf4"
NF4_TABLE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_SCALES_PER_BLOCK = 256  # of double quantization, as in bitsandbytes
DOUBLE_QUANT = SchemeOption(
    "use_double_quant", False, (False, True), "true: the scales are quantized too, to 8 bits"
)
_DOUBLE_QUANT_TENSORS = ("scale_codes", "scale_absmax", "scale_offset")
_NF4_NOT_EXPORTED = "it multiplies packed NF4 codes (MatMulBnb4)"


class BnbNf4(Scheme):
    """codes: uint8 [N, G, g / 2]; scales: float32 [N, G], or with double quantization as below.

    4-bit NormalFloat codes of bitsandbytes, one float32 scale for each 64 inputs of a row: value =
    table[code] * scale, scale = the largest magnitude of the block. The table has the quantiles of a normal
    distribution between -1 and 1, zero among them (Dettmers et al. 2023, QLoRA, arXiv:2305.14314, section 3
    and appendix E). Codes are the nearest entries of it; a midpoint belongs to the lower one, as in
    bitsandbytes. Two codes are packed into a byte, the first in the high bits.

    Double quantization (`use_double_quant`; QLoRA, section 3), after the codes are chosen: the mean of all
    scales of the matrix, `scale_offset` float32 [1], is subtracted; 256 of the rest, in memory order, share
    a scale of their own, `scale_absmax` float32 [ceil(N G / 256)], and each is the nearest entry of
    bitsandbytes' 8-bit table, `scale_codes` uint8 [N, G]: 4.127 bits per weight instead of 4.5. A graph holds
    the float32 scales that these stand for.

    bitsandbytes divides a matrix into blocks in memory order, here each row begins a block. Both are equal
    where the inputs are a multiple of 64; elsewhere the last block of a row is padded with zeros. In torch
    bitsandbytes multiplies; in a graph ONNX Runtime's MatMulBnb4 does. Both dequantize to float32 and
    multiply float32 activations.
    """

    name: ClassVar[str] = "bnb-nf4"
    summary: ClassVar[str] = "4-bit NormalFloat weights of bitsandbytes, one scale per 64 inputs"
    recommended_for: ClassVar[str] = "less memory while adapters are trained; no speed-up"
    source: ClassVar[str] = "Dettmers et al. 2023, QLoRA, arXiv:2305.14314 (bitsandbytes, Linear4bit)"
    learnable_scales: ClassVar[bool] = False
    quantizes_tables: ClassVar[bool] = False  # as transformers' BitsAndBytesConfig
    packages: ClassVar[Mapping[str, str]] = BITSANDBYTES_PACKAGES
    option_specs: ClassVar[tuple[SchemeOption, ...]] = (DOUBLE_QUANT,)
    supports_shortlist: ClassVar[bool] = False
    unsupported_targets: ClassVar[Mapping[str, str]] = {
        "tensorrt": _NF4_NOT_EXPORTED,
        "openvino": _NF4_NOT_EXPORTED,
    }
    # a float16 absmax is 0.0005 off at most, an NF4 code several percent
    supported_dtypes: ClassVar[Mapping[str, tuple[str, ...]]] = {parts.CUDA_TARGET: ("fp16",)}
    exported_as: ClassVar[str] = f"{name} weights (MatMulBnb4)"
    operators: ClassVar[tuple[str, ...]] = ("MatMulBnb4",)
    # activations are not rounded, so graphs must meet float32's tolerance
    tolerance: ClassVar[float] = 0.0
    embedding_tolerance: ClassVar[float] = 0.0

    def group_size(self, width: int, options: SchemeOptions) -> int:
        """Return g."""
        return NF4_BLOCK_SIZE

    def compute_qparams(self, groups: Tensor, width: int, options: SchemeOptions) -> QuantParams:
        """Return the largest magnitudes."""
        return {"scales": groups.abs().amax(dim=-1)}

    def quantize(self, groups: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return the indices of the nearest entries of the table, uint8."""
        import torch

        table = _table(groups.device)
        scaled = (groups * parts.safe_reciprocal(grid["scales"])[..., None]).clamp_(-1, 1)
        return torch.bucketize(scaled, (table[1:] + table[:-1]) / 2, out_int32=True).byte()

    def dequantize(self, codes: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return table[code] * scale."""
        return _table(codes.device)[codes.int()] * grid["scales"][..., None]

    def stored_tensors(self, rows: int, width: int, options: SchemeOptions) -> dict[str, StoredTensor]:
        """Return the specs of two codes per byte, and scales."""
        count = parts.num_groups(width, NF4_BLOCK_SIZE)
        codes = {"codes": StoredTensor((rows, count, NF4_BLOCK_SIZE // 2), "uint8")}
        if not options[DOUBLE_QUANT.name]:
            return codes | {"scales": StoredTensor((rows, count), "float32")}
        blocks = -(-rows * count // _SCALES_PER_BLOCK)
        shapes = zip(("uint8", "float32", "float32"), ((rows, count), (blocks,), (1,)), strict=True)
        tensors = (StoredTensor(shape, dtype, per_row=False) for dtype, shape in shapes)
        return codes | dict(zip(_DOUBLE_QUANT_TENSORS, tensors, strict=True))

    def pack(self, decided: UnpackedWeights, options: SchemeOptions) -> dict[str, Tensor]:
        """Return the tensors of `stored_tensors`."""
        codes = {"codes": parts.pack_nibbles(decided.q_weight, high_first=True)}
        scales = decided.qparams["scales"].float()
        return codes | (_quantize_scales(scales) if options[DOUBLE_QUANT.name] else {"scales": scales})

    def stored_qparams(self, grid: QuantParams, options: SchemeOptions) -> QuantParams:
        """Return the scales, with double quantization those that it stands for."""
        if not options[DOUBLE_QUANT.name]:
            return grid
        return {"scales": _dequantize_scales(**_quantize_scales(grid["scales"].float()))}

    def unpack(self, matrix: PackedMatrix) -> UnpackedWeights:
        """Return the codes as uint8."""
        q_weight = parts.unpack_nibbles(matrix.tensor("codes"), high_first=True)
        return UnpackedWeights(q_weight, {"scales": _scales(matrix)})

    def linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """Let bitsandbytes multiply; its float weights exist during one multiplication only."""
        import torch

        library, scales = import_bitsandbytes(), _scales(matrix)
        out_features, count = scales.shape
        state = library.functional.QuantState(
            absmax=scales.flatten(),
            shape=torch.Size((out_features, count * NF4_BLOCK_SIZE)),
            code=_table(x.device),
            blocksize=NF4_BLOCK_SIZE,
            quant_type=NF4_QUANT_TYPE,
            dtype=torch.float32,
        )
        q_weight = matrix.tensor("codes").reshape(-1, 1)
        out: Tensor = library.matmul_4bit(_pad_to_blocks(x, count), q_weight, state, bias=bias)
        return out

    def lookup(self, matrix: PackedMatrix, ids: Tensor) -> Tensor:
        """Return some rows, with operators that can be exported; a row of zeros stays zero."""
        import torch

        count = parts.num_groups(matrix.width, NF4_BLOCK_SIZE)
        row_ids = ids.flatten()[:, None]

        def rows(name: str, width: int) -> Tensor:
            flat = matrix.tensor(name) if matrix.has(name) else self.export_constants(matrix, "product")[name]
            indices = row_ids * width + torch.arange(width, device=row_ids.device)
            return flat.index_select(0, indices.flatten())

        q_weight = parts.unpack_nibbles_float(
            rows("flat", count * NF4_BLOCK_SIZE // 2), high_first=True
        ).int()
        table = matrix.tensor("table") if matrix.has("table") else _table(q_weight.device)
        scales = rows("flat_scales", count).reshape(-1, count, 1)
        values = table.index_select(0, q_weight).reshape(-1, count, NF4_BLOCK_SIZE) * scales
        looked_up = values.flatten(1)[:, : matrix.width]
        return looked_up.reshape(*ids.shape, matrix.width)

    def quantizes_activations(self, options: SchemeOptions) -> bool:
        """Return False: they stay float32."""
        return False

    def export_constants(self, matrix: PackedMatrix, use: MatrixUse) -> dict[str, Tensor]:
        """Return codes and scales in one dimension, as the operator requires; for lookups also the table."""
        flat = {
            "flat": matrix.tensor("codes").detach().flatten(),
            "flat_scales": _scales(matrix).detach().flatten(),
        }
        return flat | ({"table": _table(flat["flat"].device).clone()} if use == "lookup" else {})

    def emit_linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit MatMulBnb4, which processes blocks of 64 row by row."""
        from smelt.quantization import emit

        out_features, count = matrix.tensor("codes").shape[:2]
        layout = emit.NBitsLayout(count * NF4_BLOCK_SIZE, out_features, 4, NF4_BLOCK_SIZE)
        q_weight, scales = matrix.tensor("flat"), matrix.tensor("flat_scales")
        return emit.matmul_bnb4(_pad_to_blocks(x, count), q_weight, scales, bias, layout)

    def float_activation_nodes(self, node: Any) -> list[Any]:
        """Return the operator itself: its activations are not quantized."""
        return [node]


def _scales(matrix: PackedMatrix) -> Tensor:
    """Return the scales, float32 [N, G]: stored, or those that double quantization stands for."""
    if matrix.has("scales"):
        return matrix.tensor("scales")
    return _dequantize_scales(**{name: matrix.tensor(name) for name in _DOUBLE_QUANT_TENSORS})


def _quantize_scales(scales: Tensor) -> dict[str, Tensor]:
    """Return the tensors of `_DOUBLE_QUANT_TENSORS` for float32 scales [N, G]."""
    offset = scales.mean()
    codes, state = import_bitsandbytes().functional.quantize_blockwise(
        scales - offset, blocksize=_SCALES_PER_BLOCK
    )
    return dict(zip(_DOUBLE_QUANT_TENSORS, (codes, state.absmax, offset.reshape(1)), strict=True))


def _dequantize_scales(scale_codes: Tensor, scale_absmax: Tensor, scale_offset: Tensor) -> Tensor:
    """Return the scales that these tensors stand for, float32 [N, G]."""
    from torch.nn import functional as F

    steps = _scale_table(scale_codes.device)[scale_codes.int()].flatten()
    padded = F.pad(steps, (0, -len(steps) % _SCALES_PER_BLOCK)).unflatten(0, (-1, _SCALES_PER_BLOCK))
    scaled = (padded * scale_absmax[:, None]).flatten()[: len(steps)]
    scales: Tensor = (scaled + scale_offset).view(scale_codes.shape)
    return scales


@cache
def _scale_table(device: torch.device) -> Tensor:
    """Return bitsandbytes' 8-bit values between -1 and 1, float32 [256]."""
    import torch

    with torch.inference_mode(False):
        table: Tensor = import_bitsandbytes().functional.create_dynamic_map().to(device)
    return table


def _pad_to_blocks(x: Tensor, count: int) -> Tensor:
    """Return `x` [..., K] padded with zeros to `count` blocks."""
    from torch.nn import functional as F

    padding = count * NF4_BLOCK_SIZE - x.shape[-1]
    return F.pad(x, (0, padding)) if padding else x


@cache
def _table(device: torch.device) -> Tensor:
    """Return the table, float32 [16]."""
    import torch

    with torch.inference_mode(False):
        return torch.tensor(NF4_TABLE, device=device)
