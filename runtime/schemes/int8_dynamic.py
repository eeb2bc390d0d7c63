"""Scheme int8-dynamic: int8 weights per output channel, uint8 activations found while running.

Weights: symmetric, scale = amax / 127 of a row; value = code * scale. Activations: asymmetric, one scale and
zero point for the tensor of the whole batch, as the ONNX operator DynamicQuantizeLinear (opset 11) defines
it (parts/integers.py). Products are summed in int32, then y = (scale * weight scale) * sum + bias.

Shapes: N = outputs (rows), K = inputs (columns).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.runtime.schemes.scheme import Coded, Codes, Grid, Options, Scheme, Stored, Use

if TYPE_CHECKING:
    from torch import Tensor

_WHY = "it finds the ranges of activations while running"
# OpenVINO 2026.4 loads DynamicQuantizeMatMul, but multiplies float32 activations, or int8 ones with ranges of
# groups of inputs: no faster, or another model than the one that was scored
_OPENVINO = "it finds one range for the activations of a batch while running"


class Int8Dynamic(Scheme):
    """codes: int8 [N, K]; scales: float32 [N], as the runtime multiplies by them."""

    name: ClassVar[str] = "int8-dynamic"
    summary: ClassVar[str] = (
        "int8 weights per output channel; activations become uint8 while running, one scale for the tensor of"
        " the whole batch"
    )
    source: ClassVar[str] = "ONNX operator DynamicQuantizeLinear-11 (github.com/onnx/onnx, docs/Operators.md)"
    refused: ClassVar[Mapping[str, str]] = {"ort-cuda": _WHY, "tensorrt": _WHY, "openvino": _OPENVINO}
    leaves_as: ClassVar[str] = "dynamic int8"
    operators: ClassVar[Mapping[str, tuple[int, ...]]] = {"DynamicQuantizeMatMul": (2, 3)}
    # 0.010 was measured on a 4 + 3 layer Marian, where int8 is 0.017 off its fp32 parent; 0.068 on the
    # vectors of all-MiniLM-L6-v2, 6 layers, where it is 0.092 off
    drift: ClassVar[float] = 0.05
    vector_drift: ClassVar[float] = 0.15

    def group(self, width: int, options: Options) -> int:
        """Return K: a row has one scale."""
        return width

    def fit(self, groups: Tensor, width: int, options: Options) -> Grid:
        """Let the largest magnitude of a row be 127; rows of zeros get scale 1."""
        amax = groups.abs().amax(dim=-1)
        return {"scales": (amax / 127).where(amax > 0, 1.0)}

    def nearest(self, groups: Tensor, grid: Grid, options: Options) -> Tensor:
        """Return codes from -127 to 127, int8."""
        return (groups / grid["scales"][..., None]).round_().clamp_(-127, 127).char()

    def values(self, codes: Tensor, grid: Grid, options: Options) -> Tensor:
        """Return code * scale."""
        return codes.float() * grid["scales"][..., None]

    def storage(self, rows: int, width: int, options: Options) -> dict[str, Stored]:
        """Return a byte for each weight and a scale for each row."""
        return {"codes": Stored((rows, width), "int8"), "scales": Stored((rows,), "float32")}

    def pack(self, decided: Codes, options: Options) -> dict[str, Tensor]:
        """Return codes and scales without the axis of the groups."""
        return {"codes": decided.codes.flatten(1), "scales": decided.grid["scales"][:, 0]}

    def unpack(self, matrix: Coded) -> Codes:
        """Return the row as one group."""
        return Codes(matrix.tensor("codes")[:, None], {"scales": matrix.tensor("scales")[:, None]})

    def product(self, matrix: Coded, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply codes with codes."""
        import torch

        from smelt.runtime.schemes.parts.integers import activation_range, int8_product

        codes = matrix.tensor("codes")
        rows = x.detach().reshape(-1, matrix.width)
        scale, zero = activation_range(rows)
        # torch multiplies int8 by int8: take 128 off the codes, give it back with the zero point
        shifted = rows.div(scale).round_().add_(zero - 128).clamp_(-128, 127).to(torch.int8)
        sums = int8_product(shifted, codes)
        row_sums = matrix.once("row_sums", lambda: codes.sum(dim=1, dtype=torch.int32))
        sums = torch.add(sums, row_sums, alpha=128 - zero)
        out = sums.float().mul_(matrix.tensor("scales") * scale)
        out = out if bias is None else out + bias
        return out.reshape(*x.shape[:-1], codes.shape[0])

    def lookup(self, matrix: Coded, ids: Tensor) -> Tensor:
        """Look up rows of codes and their scales; a row of zeros stays one."""
        return self._rows(matrix, ids, matrix.tensor("codes"))

    def _rows(self, matrix: Coded, ids: Tensor, codes: Tensor) -> Tensor:
        from torch.nn import functional as F

        scales = matrix.tensor("lookup") if matrix.has("lookup") else matrix.tensor("scales")[:, None]
        return F.embedding(ids, codes).float() * F.embedding(ids, scales)

    def seen_in_training(self, x: Tensor) -> Tensor:
        """Return what is left of activations; their range holds every value, so none is cut off."""
        from smelt.runtime.schemes.parts.integers import left_of_activations

        return left_of_activations(x)

    def graph_tensors(self, matrix: Coded, use: Use) -> dict[str, Tensor]:
        """Return the codes as [K, N], as matrix products of ONNX want them; for lookups scales as [N, 1].

        So the scales that a lookup reads have a name of their own in the graph.
        """
        if use == "product":
            return {"columns": matrix.tensor("codes").detach().t().contiguous()}
        return {"lookup": matrix.tensor("scales").detach()[:, None].clone()}

    def emit_product(self, matrix: Coded, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit DynamicQuantizeMatMul."""
        from smelt.runtime.layers import emit

        return emit.dynamic_quantize_matmul(x, matrix.tensor("columns"), matrix.tensor("scales"), bias)

    def emit_lookup(self, matrix: Coded, ids: Tensor, target: str) -> Tensor:
        """Emit Gather, Cast and Mul.

        Where the head of the same graph holds the transposed matrix, it is stored once. Rows are looked up
        in what the runtime makes of it, since a row of a column's matrix lies all over the memory (an eighth
        of a step of a small Marian).
        """
        from smelt.runtime.layers import emit

        if not matrix.has("columns"):
            return self.lookup(matrix, ids)
        return self._rows(matrix, ids, emit.transposed(matrix.tensor("columns")))

    def exact_nodes(self, node: Any) -> list[Any]:
        """Return standard nodes: (codes - zero point) * scales, MatMul, Add."""
        from onnx import TensorProto, helper

        x, codes, scales, zero, bias = [*node.input, *[""] * 5][:5]
        at, out = f"{node.name}.exact", node.output[0]
        made = [helper.make_node("Cast", [codes], [f"{at}.codes"], to=TensorProto.FLOAT)]
        weight = f"{at}.codes"
        if zero:
            made.append(helper.make_node("Cast", [zero], [f"{at}.zero"], to=TensorProto.FLOAT))
            made.append(helper.make_node("Sub", [weight, f"{at}.zero"], [f"{at}.shifted"]))
            weight = f"{at}.shifted"
        made.append(helper.make_node("Mul", [weight, scales], [f"{at}.weight"]))
        product = f"{at}.product" if bias else out
        made.append(helper.make_node("MatMul", [x, f"{at}.weight"], [product]))
        if bias:
            made.append(helper.make_node("Add", [product, bias], [out]))
        made[-1].name = node.name  # under which messages speak of it
        return made
