"""What schemes with int8 weights and one scale per output channel, or one for all, share.

Weights: symmetric, scale = amax / 127 of a row, or of the whole matrix; value = code * scale. Products of
codes are summed in int32, then y = (scale of activations * weight scale) * sum + bias.

One scale for a matrix is stored for each of its rows all the same, so that matrices which become one product
(queries, keys and values) can keep theirs. It leaves for ONNX Runtime as one number where all are equal.

Shapes: N = outputs (rows), K = inputs (columns).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smelt.runtime.schemes.scheme import Coded, Codes, Grid, Option, Options, Scheme, Stored, Use

if TYPE_CHECKING:
    from torch import Tensor

SHARED = "what shares a scale"
_TENSOR = "tensor"
GRANULARITY = Option("granularity", "channel", ("channel", _TENSOR), SHARED)
# the name in a graph of the scale that a whole matrix has
ONE = "scale"


class RowCodes(Scheme):
    """codes: int8 [N, K]; scales: float32 [N], as the runtime multiplies by them."""

    def group(self, width: int, options: Options) -> int:
        """Return K: a row has one scale."""
        return width

    def whole(self, options: Options) -> bool:
        """Say whether the granularity is the tensor."""
        return options.get(GRANULARITY.name) == _TENSOR  # bnb-int8 has no such option

    def fit(self, groups: Tensor, width: int, options: Options) -> Grid:
        """Let the largest magnitude of a row, or of all, be 127; where all is zero the scale is 1."""
        amax = groups.abs().amax(dim=-1)
        amax = amax.max().expand_as(amax) if self.whole(options) else amax
        return {"scales": (amax / 127).where(amax > 0, 1.0)}

    def nearest(self, groups: Tensor, grid: Grid, options: Options) -> Tensor:
        """Return codes from -127 to 127, int8."""
        return (groups / grid["scales"][..., None]).round_().clamp_(-127, 127).char()

    def values(self, codes: Tensor, grid: Grid, options: Options) -> Tensor:
        """Return code * scale."""
        return codes.float() * grid["scales"][..., None]

    def ends(self, grid: Grid, options: Options) -> tuple[Tensor | float, Tensor | float] | None:
        """Return -127 and 127."""
        return -127.0, 127.0

    def storage(self, rows: int, width: int, options: Options) -> dict[str, Stored]:
        """Return a byte for each weight and a scale for each row."""
        return {"codes": Stored((rows, width), "int8"), "scales": Stored((rows,), "float32")}

    def pack(self, decided: Codes, options: Options) -> dict[str, Tensor]:
        """Return codes and scales without the axis of the groups."""
        return {"codes": decided.codes.flatten(1), "scales": decided.grid["scales"][:, 0]}

    def unpack(self, matrix: Coded) -> Codes:
        """Return the row as one group."""
        return Codes(matrix.tensor("codes")[:, None], {"scales": matrix.tensor("scales")[:, None]})

    def lookup(self, matrix: Coded, ids: Tensor) -> Tensor:
        """Look up rows of codes and their scales; a row of zeros stays one."""
        return looked_up(matrix, ids, matrix.tensor("codes"))

    def graph_tensors(self, matrix: Coded, use: Use) -> dict[str, Tensor]:
        """Return the codes as [K, N], as matrix products of ONNX want them; for lookups scales as [N, 1].

        So the scales that a lookup reads have a name of their own in the graph. One that all rows have is a
        scalar.
        """
        scales = matrix.tensor("scales").detach()
        alike = self.whole(matrix.options) and bool(scales.eq(scales[0]).all())
        if use == "lookup":
            return {"lookup": scales[0].clone() if alike else scales[:, None].clone()}
        found = {"columns": matrix.tensor("codes").detach().t().contiguous()}
        return found | {ONE: scales[0].clone()} if alike else found


def columns_of(matrix: Coded) -> Tensor:
    """Return the codes as int8 [K, N], as a graph for ONNX Runtime's CPU multiplies with them.

    Where an embedding looks its rows up in the same matrix they are what the runtime makes of the rows when
    it loads the graph, so that all graphs of a model store one matrix. It is the rows that are stored: the
    runtime packs the columns of a product anyway and drops what it packed, while a row of a column's matrix
    lies all over the memory (a lookup of 160 rows takes 1 ms instead of 13 us).
    """
    from smelt.runtime.layers import emit

    return emit.transposed(matrix.tensor("codes")) if matrix.has("lookup") else matrix.tensor("columns")


def scales_of(matrix: Coded) -> Tensor:
    """Return the scales of a product in a graph for ONNX Runtime's CPU: float32 [N], or one for all, []."""
    return matrix.tensor(ONE if matrix.has(ONE) else "scales")


def looked_up(matrix: Coded, ids: Tensor, codes: Tensor) -> Tensor:
    """Return rows of `codes`, int8 [N, K], times their scales, float32 [..., K]."""
    from torch.nn import functional as F

    scales = matrix.tensor("lookup") if matrix.has("lookup") else matrix.tensor("scales")[:, None]
    return F.embedding(ids, codes).float() * (F.embedding(ids, scales) if scales.dim() else scales)


def exact_product(node: Any, x: str, codes: str, scales: str, zero: str = "", bias: str = "") -> list[Any]:
    """Return standard nodes with float32 activations: (codes - zero point) * scales, MatMul, Add.

    Args:
        node: which they stand for.
        x: the name of its activations, float32 [..., K].
        codes: of its weights, int8 [K, N].
        scales: float32 [N], or [] of all.
        zero: of the weights' zero points; empty where they are 0.
        bias: float32 [N]; empty where there is none.
    """
    from onnx import TensorProto, helper

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
