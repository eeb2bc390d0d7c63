"""Scheme additive: groups of eight weights as sums of codebook vectors, the format of AQLM.

    w = scale of the row * sum over m of codebooks[m][code m]

Babenko & Lempitsky 2014, Additive Quantization for Extreme Vector Compression, and for weights Egiazarian et
al. 2024, Extreme Compression of Large Language Models via Additive Quantization, arXiv:2401.06118, and its
published code (Vahe1994/AQLM: src/aq.py, src/kmeans.py, src/utils.py `_dequantize_weight`), with groups along
the inputs (`out_group_size` 1) and one scale per output (`scale_nbits` 0): the norm of the row. M codebooks
of 2^B vectors take M B / 8 bits per weight, and the codebooks of a matrix 16 bits per number, which is most
of the file of a small matrix.

Here codebooks are found by residual k-means on the weights alone, and codes by beam search for the least
squared error of each group; compress/quantize/aqlm.py fits both to calibration samples. The published code
starts k-means from random weights; so does this, with a fixed seed.

A file has packed codes, and codebooks and scales in float16. So has a graph, in which Gather, ReduceSum and
Mul compute the weights once, when a session is opened: it has the memory and speed of float weights.

Shapes: N = outputs (rows), K = inputs (columns), G = ceil(K / 8) groups, M = codebooks, B = bits of a code,
P = groups of several rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.core.messages import Message, warning
from smelt.quantization import groupwise as parts
from smelt.quantization.scheme import (
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
from smelt.quantization.schemes.affine import Int4

if TYPE_CHECKING:
    from torch import Tensor

NUM_CODEBOOKS = SchemeOption("num_codebooks", 2, (1, 2, 3, 4), "vectors that are added for a group")
CODE_BITS = SchemeOption("nbits_per_codebook", 8, (4, 8), "a codebook has 2^bits vectors")
GROUP = 8  # AQLM's in_group_size
BEAM_SIZE = 8
_PLACEHOLDER = "SumOfCodebooks"
_NIBBLES = "CodesOfNibbles"
_MAX_ITERATIONS = 100  # of k-means
_POINTS_PER_CENTROID = 256  # that k-means uses at most
_AT_ONCE = 2**25  # numbers in memory
_WHY = "its weights are looked up in codebooks when a graph is loaded, which was tried with {} only"


class Additive(Scheme):
    """codes: uint8 [N, ceil(G M B / 8)]; codebooks: float32 [M, 2^B, 8]; scales: float32 [N, 1]."""

    name: ClassVar[str] = "additive"
    summary: ClassVar[str] = "groups of 8 weights as sums of codebook vectors (AQLM), one scale per row"
    recommended_for: ClassVar[str] = "2 bits, in large matrices; no speed-up"
    source: ClassVar[str] = "Egiazarian et al. 2024, AQLM, arXiv:2401.06118 (additive codebooks)"
    option_specs: ClassVar[tuple[SchemeOption, ...]] = (NUM_CODEBOOKS, CODE_BITS)
    own_method: ClassVar[str] = "aqlm"
    supports_embeddings: ClassVar[bool] = False
    embedding_scheme: ClassVar[str] = Int4.name
    learnable_scales: ClassVar[bool] = False
    supports_clipping: ClassVar[bool] = False
    represents_zero: ClassVar[bool] = False
    supports_shortlist: ClassVar[bool] = False
    unsupported_targets: ClassVar[Mapping[str, str]] = {
        target: _WHY.format("ort-cpu") for target in ("ort-cuda", "tensorrt", "openvino")
    }
    exported_as: ClassVar[str] = f"{name} weights"
    operators: ClassVar[tuple[str, ...]] = ("MatMul",)
    # activations are not rounded, so graphs must meet float32's tolerance
    tolerance: ClassVar[float] = 0.0
    embedding_tolerance: ClassVar[float] = 0.0

    def group_size(self, width: int, options: SchemeOptions) -> int:
        """Return 8."""
        return GROUP

    def compute_qparams(self, groups: Tensor, width: int, options: SchemeOptions) -> QuantParams:
        """Return the norms of the rows [N, 1], and codebooks by residual k-means [M, 2^B, 8]; all float16."""
        import torch

        scales = groups.flatten(1).norm(dim=1, keepdim=True).half().float()
        points = (groups * parts.safe_reciprocal(scales)[..., None]).flatten(0, 1)
        generator, size = torch.Generator().manual_seed(0), 2 ** int(options[CODE_BITS.name])
        order = torch.randperm(len(points), generator=generator)[: _POINTS_PER_CENTROID * size]
        residuals, codebooks = points[order.to(points.device)], []
        for _ in range(int(options[NUM_CODEBOOKS.name])):
            book = _fit_centroids(residuals, size, generator).half().float()
            codebooks.append(book)
            residuals = residuals - book[_nearest(residuals, book)]
        return {"scales": scales, "codebooks": torch.stack(codebooks)}

    def quantize(self, groups: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return the codes, uint8 [N, G, M], by beam search for the least squared error of each group."""
        import torch

        steps = groups * parts.safe_reciprocal(grid["scales"])[..., None]
        books = grid["codebooks"]
        at_once = max(1, _AT_ONCE // (BEAM_SIZE * books.shape[1]))
        codes = [_beam_search(chunk, books) for chunk in steps.flatten(0, 1).split(at_once)]
        return torch.cat(codes).reshape(*groups.shape[:2], -1)

    def dequantize(self, codes: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return the sums of the vectors, times the scale, float32 [N, G, 8]."""
        return sum_of_vectors(codes, grid["codebooks"]) * grid["scales"][..., None]

    def stored_tensors(self, rows: int, width: int, options: SchemeOptions) -> dict[str, StoredTensor]:
        """Return the specs of packed codes, codebooks and scales."""
        bits, count = int(options[CODE_BITS.name]), int(options[NUM_CODEBOOKS.name])
        code_bytes = -(-parts.num_groups(width, GROUP) * count * bits // 8)
        books = (count, 2**bits, GROUP)
        return {
            "codes": StoredTensor((rows, code_bytes), "uint8"),
            "codebooks": StoredTensor(books, "float32", file_dtype="float16", per_row=False),
            "scales": StoredTensor((rows, 1), "float32", file_dtype="float16"),
        }

    def pack(self, decided: UnpackedWeights, options: SchemeOptions) -> dict[str, Tensor]:
        """Return the tensors of `stored_tensors`."""
        return {
            "codes": parts.pack_codes(decided.q_weight.flatten(1), int(options[CODE_BITS.name])),
            "codebooks": decided.qparams["codebooks"].half().float(),
            "scales": decided.qparams["scales"].half().float(),
        }

    def unpack(self, matrix: PackedMatrix) -> UnpackedWeights:
        """Return the codes as uint8 [N, G, M]."""
        bits, count = int(matrix.options[CODE_BITS.name]), int(matrix.options[NUM_CODEBOOKS.name])
        groups = parts.num_groups(matrix.width, GROUP)
        codes = parts.unpack_codes(matrix.tensor("codes"), bits)[:, : groups * count]
        grid = {"scales": matrix.tensor("scales"), "codebooks": matrix.tensor("codebooks")}
        return UnpackedWeights(codes.unflatten(1, (groups, count)), grid)

    def storage_warnings(self, matrices: Sequence[PackedMatrix]) -> list[Message]:
        """Return a warning if the codebooks take more bytes than codes and scales."""
        code_bytes = codebook_bytes = 0
        for matrix in matrices:
            specs = self.stored_tensors(len(matrix.tensor("codes")), matrix.width, matrix.options).values()
            code_bytes += sum(spec.size_bytes for spec in specs if spec.per_row)
            codebook_bytes += sum(spec.size_bytes for spec in specs if not spec.per_row)
        if codebook_bytes <= code_bytes:
            return []
        setting, advice = "scheme", "Use another scheme."
        count = max(int(matrix.options[NUM_CODEBOOKS.name]) for matrix in matrices)
        if any(matrix.options[CODE_BITS.name] == 8 for matrix in matrices):
            setting, advice = CODE_BITS.name, f"Set {CODE_BITS.name}: 4, or use another scheme."
        elif count > 1:
            setting = NUM_CODEBOOKS.name
            advice = f"Decrease {setting} (now {count}), or use another scheme."
        return [
            warning(
                "large-codebooks",
                f"The codebooks take {codebook_bytes:,} bytes, more than the codes and scales"
                f" ({code_bytes:,} bytes), because the matrices are small. {advice}",
                setting=setting,
            )
        ]

    def linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by the values."""
        from torch.nn import functional as F

        return F.linear(x, matrix.dequantized(), bias)

    def quantizes_activations(self, options: SchemeOptions) -> bool:
        """Return False: they stay float32."""
        return False

    def export_constants(self, matrix: PackedMatrix, use: MatrixUse) -> dict[str, Tensor]:
        """Return codebooks [M 2^B, 8] and scales in float16, as in a file."""
        return {
            "vectors": matrix.tensor("codebooks").detach().flatten(0, 1).half(),
            parts.FLOAT16_SCALES: matrix.tensor("scales").detach().half(),
        }

    def emit_linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit a matrix multiplication with a placeholder of the weights, [8 G, N]."""
        import torch
        from torch.nn import functional as F

        from smelt.quantization import emit

        count, bits = int(matrix.options[NUM_CODEBOOKS.name]), int(matrix.options[CODE_BITS.name])
        groups, codes = parts.num_groups(matrix.width, GROUP), matrix.tensor("codes")
        if bits == 4:
            codes = emit.expand_by_table(_NIBBLES, codes, 2)
        if codes.shape[1] > groups * count:
            codes = codes[:, : groups * count]
        columns: Tensor = torch.onnx.ops.symbolic(
            f"{emit.LOAD_TIME_DOMAIN}::{_PLACEHOLDER}",
            [codes, matrix.tensor("vectors"), matrix.tensor(parts.FLOAT16_SCALES)],
            {"codebooks": count},
            dtype=torch.float32,
            shape=(groups * GROUP, codes.shape[0]),
            version=1,
        )
        if groups * GROUP != matrix.width:  # the last group is padded
            x = F.pad(x, (0, groups * GROUP - matrix.width))
        out = torch.matmul(x, columns)
        return out if bias is None else out + bias

    def unpacking_tables(self) -> dict[str, Any]:
        """Return for each byte its two codes of 4 bits, the low one first, uint8 [256, 2]."""
        import numpy as np

        all_bytes = np.arange(256, dtype=np.uint8)
        return {_NIBBLES: np.stack([all_bytes & 15, all_bytes >> 4], axis=1)}

    def placeholder_expansions(self) -> Mapping[str, Any]:
        """Return the expansions of nibbles and of the weights."""
        return {**super().placeholder_expansions(), _PLACEHOLDER: _expand_weights}

    def owns_operator(self, node: Any, graph: QuantizedGraph) -> bool:
        """Return whether a node multiplies by weights of `_expand_weights`."""
        if node.op_type not in ("MatMul", "Gemm"):
            return False
        made_by: list[str] = []
        maker = graph.maker(node.input[1])
        while maker is not None and len(made_by) < len(_WEIGHT_OPS):
            made_by.append(maker.op_type)
            maker = graph.maker(maker.input[0])
        return tuple(made_by) == _WEIGHT_OPS

    def float_activation_nodes(self, node: Any) -> list[Any]:
        """Return the operator itself: its activations are not quantized."""
        return [node]


def sum_of_vectors(codes: Tensor, codebooks: Tensor) -> Tensor:
    """Return the sum of a vector of each codebook, float32 [..., 8], for codes [..., M]; differentiable."""
    from torch.nn import functional as F

    total = F.embedding(codes[..., 0].int(), codebooks[0])
    for index in range(1, len(codebooks)):
        total = total + F.embedding(codes[..., index].int(), codebooks[index])
    return total


def _beam_search(points: Tensor, codebooks: Tensor) -> Tensor:
    """Return the codes, uint8 [P, M], of sums of vectors near `points`, float32 [P, 8].

    The beam holds the sums of the first codebooks with the least errors; then each code is chosen again with
    the others fixed.
    """
    import torch

    residuals, codes = points[:, None], codebooks.new_zeros(len(points), 1, 0, dtype=torch.int64)
    for book in codebooks:
        errors = residuals.square().sum(dim=-1, keepdim=True) - 2 * residuals @ book.T
        errors = (errors + book.square().sum(dim=-1)).flatten(1)
        best = errors.topk(min(BEAM_SIZE, errors.shape[1]), largest=False).indices
        parents, chosen = best // len(book), best % len(book)
        residuals = residuals.gather(1, parents[..., None].expand(-1, -1, GROUP)) - book[chosen]
        parent_codes = codes.gather(1, parents[..., None].expand(-1, -1, codes.shape[2]))
        codes = torch.cat([parent_codes, chosen[..., None]], dim=2)
    best_codes, residual = codes[:, 0], residuals[:, 0]
    for index, book in enumerate(codebooks):
        without = residual + book[best_codes[:, index]]
        best_codes[:, index] = _nearest(without, book)
        residual = without - book[best_codes[:, index]]
    return best_codes.byte()


def _nearest(points: Tensor, centers: Tensor) -> Tensor:
    """Return the index of the nearest of `centers` [C, 8] for each of `points` [P, 8], int64 [P]."""
    import torch

    norms = centers.square().sum(dim=1) / 2
    at_once = max(1, _AT_ONCE // len(centers))
    return torch.cat(
        [torch.addmm(norms, p, centers.T, alpha=-1).argmin(dim=1) for p in points.split(at_once)]
    )


def _fit_centroids(points: Tensor, count: int, generator: Any) -> Tensor:
    """Return the centers of k-means, float32 [count, 8]; zeros where there are fewer points."""
    import torch

    centers = points.new_zeros(count, GROUP)
    start = torch.randperm(len(points), generator=generator)[:count].to(points.device)
    centers[: len(start)] = points[start]
    previous = None
    for _ in range(_MAX_ITERATIONS):
        nearest = _nearest(points, centers)
        if previous is not None and nearest.equal(previous):
            break
        sizes = torch.bincount(nearest, minlength=count)[:, None]
        sums = torch.zeros_like(centers).index_add_(0, nearest, points)
        centers = (sums / sizes.clamp(min=1)).where(sizes > 0, centers)
        previous = nearest
    return centers


# of the weights in a graph, the last first
_WEIGHT_OPS = ("Transpose", "Mul", "Reshape", "ReduceSum", "Gather")


def _expand_weights(graph: QuantizedGraph, node: Any) -> list[Any]:
    """Return the nodes that compute weights, float32 [8 G, N], from codes [N, G M], vectors and scales."""
    import numpy as np
    from onnx import TensorProto, helper

    (codes, vectors, scales), result = node.input, node.output[0]
    count = next(attribute.i for attribute in node.attribute if attribute.name == "codebooks")
    rows, size = graph.shapes[scales][0], graph.shapes[vectors][0] // count
    constants = {
        "codes_shape": np.array([rows, -1, count], dtype=np.int64),
        "offsets": np.arange(count, dtype=np.int32) * size,  # of the codebooks in `vectors`
        "axis": np.array([2], dtype=np.int64),
        "shape": np.array([rows, -1], dtype=np.int64),
    }
    for suffix, value in constants.items():
        graph.add_constant(f"{result}.{suffix}", value)
    steps: list[tuple[str, list[str], str, dict[str, Any]]] = [
        ("Cast", [codes], "codes_int", {"to": TensorProto.INT32}),
        ("Reshape", [f"{result}.codes_int", f"{result}.codes_shape"], "codes", {}),
        ("Add", [f"{result}.codes", f"{result}.offsets"], "indices", {}),
        ("Cast", [vectors], "vectors", {"to": TensorProto.FLOAT}),
        ("Gather", [f"{result}.vectors", f"{result}.indices"], "gathered", {"axis": 0}),
        ("ReduceSum", [f"{result}.gathered", f"{result}.axis"], "sums", {"keepdims": 0}),
        ("Reshape", [f"{result}.sums", f"{result}.shape"], "rows", {}),
        ("Cast", [scales], "scales", {"to": TensorProto.FLOAT}),
        ("Mul", [f"{result}.rows", f"{result}.scales"], "scaled", {}),
        ("Transpose", [f"{result}.scaled"], "", {"perm": [1, 0]}),
    ]
    return [
        helper.make_node(op, inputs, [f"{result}.{out}" if out else result], f"{result}.{op}.{out}", **more)
        for op, inputs, out, more in steps
    ]
