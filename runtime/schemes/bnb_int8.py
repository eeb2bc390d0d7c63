"""Scheme bnb-int8: LLM.int8 of bitsandbytes, int8 products of rows beside a float product of outliers.

Dettmers et al. 2022, LLM.int8(), arXiv:2208.07339. Weights: one scale a row, value = code * absmax / 127.
Activations, rounded to float16 first: a column in which any row of the batch reaches 6 is an outlier; it is
multiplied as it is with the values of its weights. What is left becomes int8 with one scale a row.

On the CPU bitsandbytes computes all of that (integer products where the processor has AVX-512, else in
float32). No runtime that smelt exports to has an operator for it.

Shapes: N = outputs (rows), K = inputs (columns).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.core.errors import InputError
from smelt.runtime.schemes.parts import bits_and_bytes
from smelt.runtime.schemes.parts.rows import RowCodes
from smelt.runtime.schemes.scheme import TARGETS, Coded, Grid, Options, graphs_for

if TYPE_CHECKING:
    from torch import Tensor

OUTLIER = 6.0
# as bitsandbytes has it: 1 / 127 in float32
_STEP = 0.007874015718698502
_WHY = "no operator of it splits activations into int8 rows and float outliers"


class BnbInt8(RowCodes):
    """codes: int8 [N, K]; scales: float32 [N], the largest magnitude of each row."""

    name: ClassVar[str] = "bnb-int8"
    summary: ClassVar[str] = "int8 weights of bitsandbytes (LLM.int8), outliers of activations stay float"
    pays: ClassVar[str] = "models that torch serves; to compare with"
    source: ClassVar[str] = "Dettmers et al. 2022, LLM.int8(), arXiv:2208.07339 (bitsandbytes, Linear8bitLt)"
    learns: ClassVar[bool] = False
    packages: ClassVar[Mapping[str, str]] = bits_and_bytes.PACKAGES
    refused: ClassVar[Mapping[str, str]] = {graphs_for(target): _WHY for target in TARGETS}
    leaves_as: ClassVar[str] = f"{name} products"
    operators: ClassVar[Mapping[str, tuple[int, ...]]] = {}
    # it makes no graph
    drift: ClassVar[float] = 0.0
    vector_drift: ClassVar[float] = 0.0

    def fit(self, groups: Tensor, width: int, options: Options) -> Grid:
        """Return the largest magnitude of each row."""
        return {"scales": groups.abs().amax(dim=-1)}

    def nearest(self, groups: Tensor, grid: Grid, options: Options) -> Tensor:
        """Return codes from -127 to 127, int8; a row of zeros has zeros."""
        scales = grid["scales"]
        steps = (127.0 / scales).where(scales != 0, 0.0)
        return (groups * steps[..., None]).round_().clamp_(-127, 127).char()

    def ends(self, grid: Grid, options: Options) -> tuple[Tensor | float, Tensor | float] | None:
        """Return None: scales are what bitsandbytes makes of the weights."""
        return None

    def values(self, codes: Tensor, grid: Grid, options: Options) -> Tensor:
        """Return code * scale / 127."""
        return codes.float() * grid["scales"][..., None] * _STEP

    def product(self, matrix: Coded, x: Tensor, bias: Tensor | None) -> Tensor:
        """Let bitsandbytes find outliers, round and multiply."""
        import torch

        functional, codes = bits_and_bytes.library().functional, matrix.tensor("codes")
        rows = x.detach().reshape(-1, matrix.width).float()
        rounded, scales, outliers = functional.int8_vectorwise_quant(rows.half(), threshold=OUTLIER)
        out, _ = torch.ops.bitsandbytes.int8_mixed_scaled_mm(
            rows, rounded, codes, scales, matrix.tensor("scales"), outliers, bias
        )
        product: Tensor = out.reshape(*x.shape[:-1], codes.shape[0])
        return product

    def lookup(self, matrix: Coded, ids: Tensor) -> Tensor:
        """Return some rows; a row of zeros stays one."""
        from torch.nn import functional as F

        scales = F.embedding(ids, matrix.tensor("scales")[:, None])
        return F.embedding(ids, matrix.tensor("codes")).float() * scales * _STEP

    def emit_product(self, matrix: Coded, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Refuse."""
        raise InputError(
            f"scheme {self.name} cannot be exported for {target}: {_WHY}.", code="unsupported-target"
        )

    def exact_nodes(self, node: Any) -> list[Any]:
        """Refuse: no node is of this scheme."""
        raise InputError(f"scheme {self.name} makes no node '{node.op_type}'.", code="unsupported-operator")
