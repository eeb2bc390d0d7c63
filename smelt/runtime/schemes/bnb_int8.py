"""Scheme bnb-int8: LLM.int8 of bitsandbytes, int8 matrix multiplication with a float one for outliers.

Dettmers et al. 2022, LLM.int8(), arXiv:2208.07339. Weights: one scale per row, value = code * absmax / 127.
Activations, rounded to float16 first: a column in which any row of the batch reaches 6 is an outlier; it is
multiplied unquantized with the dequantized weights. The rest becomes int8 with one scale per row.

On the CPU bitsandbytes computes all of that (integer products where the processor has AVX-512, else in
float32). No runtime that smelt exports to has an operator for it.

Shapes: N = outputs (rows), K = inputs (columns).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.core.errors import InputError
from smelt.runtime.schemes.common import import_bitsandbytes
from smelt.runtime.schemes.common.int8_per_channel import Int8PerChannel
from smelt.runtime.schemes.scheme import (
    EXPORT_TARGETS,
    PackedMatrix,
    QuantParams,
    SchemeOptions,
    graph_target,
)

if TYPE_CHECKING:
    from torch import Tensor

OUTLIER_THRESHOLD = 6.0
# as in bitsandbytes: 1 / 127 in float32
_STEP = 0.007874015718698502
_WHY = "it has no operator that splits activations into int8 rows and float outliers"


class BnbInt8(Int8PerChannel):
    """codes: int8 [N, K]; scales: float32 [N], the largest magnitude of each row."""

    name: ClassVar[str] = "bnb-int8"
    summary: ClassVar[str] = "int8 weights of bitsandbytes (LLM.int8), activation outliers stay float"
    recommended_for: ClassVar[str] = "models served by torch; comparisons"
    source: ClassVar[str] = "Dettmers et al. 2022, LLM.int8(), arXiv:2208.07339 (bitsandbytes, Linear8bitLt)"
    learnable_scales: ClassVar[bool] = False
    packages: ClassVar[Mapping[str, str]] = import_bitsandbytes.BITSANDBYTES_PACKAGES
    unsupported_targets: ClassVar[Mapping[str, str]] = {
        graph_target(target): _WHY for target in EXPORT_TARGETS
    }
    exported_as: ClassVar[str] = f"{name} matrix multiplications"
    operators: ClassVar[Mapping[str, tuple[int, ...]]] = {}
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

    def dequantize(self, codes: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return code * scale / 127."""
        return codes.float() * grid["scales"][..., None] * _STEP

    def linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """Let bitsandbytes find outliers, round and multiply."""
        import torch

        functional, codes = import_bitsandbytes.import_bitsandbytes().functional, matrix.tensor("codes")
        rows = x.detach().reshape(-1, matrix.width).float()
        rounded, scales, outliers = functional.int8_vectorwise_quant(rows.half(), threshold=OUTLIER_THRESHOLD)
        out, _ = torch.ops.bitsandbytes.int8_mixed_scaled_mm(
            rows, rounded, codes, scales, matrix.tensor("scales"), outliers, bias
        )
        product: Tensor = out.reshape(*x.shape[:-1], codes.shape[0])
        return product

    def lookup(self, matrix: PackedMatrix, ids: Tensor) -> Tensor:
        """Return some rows; a row of zeros stays zero."""
        from torch.nn import functional as F

        scales = F.embedding(ids, matrix.tensor("scales")[:, None])
        return F.embedding(ids, matrix.tensor("codes")).float() * scales * _STEP

    def emit_linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Raise an error: no target supports the scheme."""
        raise InputError(
            f"scheme {self.name} cannot be exported for {target}: {_WHY}.", code="unsupported-target"
        )

    def float_activation_nodes(self, node: Any) -> list[Any]:
        """Raise an error: no node belongs to this scheme."""
        raise InputError(f"scheme {self.name} has no operator '{node.op_type}'.", code="unsupported-operator")
