"""The interface of quantization schemes: how weights are quantized, stored, computed in torch and exported.

A scheme is one class in `smelt/quantization/schemes` and one line in its registry.py. No other code contains
its name: the stage `quantize`, its settings and help, quantization-aware training, checkpoints, the exporter,
its verification and the plan query the registry.

Files of schemes import no torch at module level, because `smelt plan` and `smelt stages` import them.

Shapes: N = outputs (rows of a matrix), K = inputs (columns), g = inputs of a row that share a scale,
G = ceil(K / g), the last group padded with zeros.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from smelt.core.messages import Message

if TYPE_CHECKING:
    from torch import Tensor


OptionValue: TypeAlias = int | bool | str
SchemeOptions: TypeAlias = Mapping[str, OptionValue]
# The quantization parameters, by the names of their tensors: `scales` [N, G] and others of the
# scheme (zero points, a table). Each broadcasts over the rows and has its groups in axis 1.
QuantParams: TypeAlias = Mapping[str, "Tensor"]
MatrixUse: TypeAlias = Literal["product", "lookup"]
# The targets of the stage `onnx`.
EXPORT_TARGETS = ("ort-cpu", "ort-cuda", "tensorrt", "openvino", "ort-tensorrt")
# Targets that cannot run quantized convolutions, and why.
CONV_UNSUPPORTED_TARGETS = {
    "tensorrt": "inputs of quantized convolutions are uint8, which TensorRT does not support"
}
# The first opset with Attention, RotaryEmbedding and RMSNormalization, and targets with kernels of them
FUSED_OPSET, FUSED_TARGETS = 23, ("ort-cuda", "tensorrt")
# The domain in which NVIDIA's Model Optimizer writes quantization, and TensorRT reads it.
NVIDIA_DOMAIN = "trt"
# Targets that run the graphs of another one; its unsupported schemes are also theirs.
GRAPH_TARGETS = {"ort-tensorrt": "tensorrt"}


def graph_target(target: str) -> str:
    """Return the target whose graphs `target` runs."""
    return GRAPH_TARGETS.get(target, target)


@dataclass(frozen=True)
class SchemeOption:
    """A setting of a scheme, with the same name in recipes, in `structure.json` and in `options`.

    Schemes may share an option (same description), with other values and another default.

    description: without the names of the schemes, which the help adds before it.
    expected: text in place of a list of the allowed values.
    rejection: text about a value that only other schemes allow.
    own_only: whether a value for linear layers of another scheme is not for embeddings of this one, because
        the option means something else there.
    """

    name: str
    default: OptionValue
    allowed: tuple[OptionValue, ...]
    description: str
    expected: str = ""
    rejection: str = ""
    own_only: bool = False

    def allows(self, value: object) -> bool:
        """Return whether `value` is one of the allowed ones; True is not 1."""
        return any(value == allowed and type(value) is type(allowed) for allowed in self.allowed)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a matrix, with torch's names of types.

    dtype: in memory, where floats are float32, because transformers takes the type of a model's first float
        parameter for its own.
    file_dtype: in files; empty where it is the same.
    per_row: axis 0 is the row of the matrix, and a row's part depends on that row only. Other tensors
        must be equal in matrices that are concatenated.
    calibrated: measured on samples (`Scheme.activation_tensors`) instead of computed from the weights
        (`Scheme.pack`); it belongs to the whole matrix.
    """

    shape: tuple[int, ...]
    dtype: str
    file_dtype: str = ""
    per_row: bool = True
    calibrated: bool = False

    @property
    def size_bytes(self) -> int:
        """The bytes in a file."""
        bits_match = re.search(r"\d+", self.file_dtype or self.dtype)  # all names but bool contain the bits
        return math.prod(self.shape) * (int(bits_match[0]) // 8 if bits_match else 1)


class UnpackedWeights(NamedTuple):
    """Unpacked weights of a matrix: codes [N, G, g], one per element, and their quantization parameters."""

    q_weight: Tensor
    qparams: QuantParams


class PackedMatrix(Protocol):
    """A stored matrix, as its scheme accesses it (`smelt/quantization/layers.py`)."""

    @property
    def options(self) -> SchemeOptions:
        """Return the scheme's options."""

    @property
    def width(self) -> int:
        """Return K."""

    @property
    def variant(self) -> str:
        """Return the selected one of the scheme's `operator_variants`; empty for the first."""

    def has(self, name: str) -> bool:
        """Return whether there is a tensor `name`, stored or in the graph's form."""

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, stored or in the graph's form."""

    def cached(self, key: str, make: Callable[[], Tensor]) -> Tensor:
        """Return the result of `make`, computed once for the same memory of the stored tensors."""

    def dequantized(self) -> Tensor:
        """Return the dequantized values, float32 [N, K], computed once."""


class Scheme(Protocol):
    """A quantization scheme for the weights of a matrix. Methods with a body here are optional.

    name: in recipes.
    bits: of a weight, for schemes that differ in it only, so that layers of one model may have different ones
        (mixed precision); 0 in all others.
    summary: weights, scales and activations in a sentence without a full stop, for the help.
    source: the paper or reference code.
    recommended_for: its use cases, in a few words, for the table of schemes.
    option_specs: its options, in the order of the help.
    supports_embeddings: whether embeddings, and an output layer tied to them, can be quantized.
    quantizes_tables: whether embeddings and output layer are quantized unless set in the recipe.
    embedding_scheme: the scheme of embeddings and output layer unless set in the recipe; empty for this one.
    requires_training: whether the quality is low without quantization-aware training.
    learnable_scales: whether its scales can be learned (`code_range`).
    supports_clipping: whether the quantization parameters follow from the range of a group, so that it can be
        clipped; false where the values are fitted to all weights.
    represents_zero: whether it can represent 0 exactly with any parameters, so that weights can be set to it.
    own_method: the method of `quantize` that fits codebooks of a whole matrix to samples; every other one but
        `rtn` rounds on the grid of a group, and does not support the scheme. Its weights cannot be quantized
        again by a later step. Empty: each group has a grid.
    split_scheme: the scheme for the two summands of a split matrix of this one; empty if unknown.
    requires_calibration: whether it needs the range of activations, calibrated on samples.
    per_tensor_activations: whether all activations of a layer are quantized with one scale, so that a channel
        of large values reduces the precision of the others.
    has_float_activations: whether quantized activations are floats, which keep their relative precision: no
        range is clipped unless the recipe asks for it.
    supports_conv: whether it quantizes convolutions too, with a scale for each output channel.
    packages: additional packages that it needs in torch: names in the package index, with
        the oldest supported release.
    supports_shortlist: whether rows of an output layer can be gathered in a graph, so that a shortlist
        restricts it.
    unsupported_targets: by export target: why it cannot run the scheme, continuing "cannot run it: "; also
        used for targets that run the graphs of that one.
    required_options: by export target that supports some of its options only: the supported values, by
    option. supported_dtypes: by export target: dtypes of a graph, in addition to fp32, in which its scales
        keep their precision.
    min_opset: by export target: the oldest opset with its operators.
    exported_as: its layers in a graph, after "TensorRT cannot run the ".
    operators: the op types of its quantized operators in a graph; the input after the activations holds the
        weights. Empty where no target runs it. A scheme of standard operators also defines `owns_operator`.
    tolerance: mean error of the output of a graph that rounds activations, in
        standard deviations of the output. Two runtimes that sum in another order round some activations
        differently, so that it is a measured number; exact parts are compared exactly.
    embedding_tolerance: the same for a sentence embedding, in which every number counts equally.
    max_graph_error: for a scheme of ONNX Runtime's quantizers, the largest root mean square difference
        between a third-party graph's output and the float graph's, in standard deviations of the output. At 1
        a graph is no better than the mean of its outputs.
    """

    name: ClassVar[str]
    bits: ClassVar[int] = 0
    summary: ClassVar[str]
    source: ClassVar[str]
    recommended_for: ClassVar[str] = ""
    option_specs: ClassVar[tuple[SchemeOption, ...]] = ()
    supports_embeddings: ClassVar[bool] = True
    quantizes_tables: ClassVar[bool] = True
    embedding_scheme: ClassVar[str] = ""
    requires_training: ClassVar[bool] = False
    learnable_scales: ClassVar[bool] = True
    supports_clipping: ClassVar[bool] = True
    represents_zero: ClassVar[bool] = True
    own_method: ClassVar[str] = ""
    split_scheme: ClassVar[str] = ""
    requires_calibration: ClassVar[bool] = False
    per_tensor_activations: ClassVar[bool] = False
    has_float_activations: ClassVar[bool] = False
    supports_conv: ClassVar[bool] = False
    packages: ClassVar[Mapping[str, str]] = {}
    supports_shortlist: ClassVar[bool] = True
    unsupported_targets: ClassVar[Mapping[str, str]]
    required_options: ClassVar[Mapping[str, Mapping[str, tuple[OptionValue, ...]]]] = {}
    supported_dtypes: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    min_opset: ClassVar[Mapping[str, int]] = {}
    exported_as: ClassVar[str]
    operators: ClassVar[tuple[str, ...]]
    tolerance: ClassVar[float]
    embedding_tolerance: ClassVar[float]
    max_graph_error: ClassVar[float] = 0.0

    # Quantization. Round to nearest is compute_qparams, then quantize; other methods search the parameters,
    # or process column by column and correct the remaining ones, with the same three steps.

    def group_size(self, width: int, options: SchemeOptions) -> int:
        """Return g for a matrix of K = `width` inputs."""

    def is_per_tensor(self, options: SchemeOptions) -> bool:
        """Return whether all weights of a matrix share one scale, so that rows are not independent."""
        return False

    def compute_qparams(self, groups: Tensor, width: int, options: SchemeOptions) -> QuantParams:
        """Return the quantization parameters that fit `groups` best without data.

        Args:
            groups: float32 [N, G, g].
            width: how many of the G * g inputs are weights; those after them are padding of the last group.
            options: the scheme's.
        """

    def quantize(self, groups: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return the codes [N, G, g] whose values are nearest to float32 `groups`."""

    def dequantize(self, codes: Tensor, grid: QuantParams, options: SchemeOptions) -> Tensor:
        """Return the values of `codes` [N, G, g], float32 [N, G, g]."""

    def code_range(
        self, grid: QuantParams, options: SchemeOptions
    ) -> tuple[Tensor | float, Tensor | float] | None:
        """Return the minimum and the maximum value in units of scales, in a shape that broadcasts over codes.

        None where values are not integer multiples of a scale with both ends: its scales cannot be learned
        then.
        """
        return None

    # Storage.

    def stored_tensors(self, rows: int, width: int, options: SchemeOptions) -> dict[str, StoredTensor]:
        """Return the specs of the tensors of a matrix [N, K].

        One is called `codes`; HQQ and learned scales need a float one called `scales`.
        """

    def pack(self, decided: UnpackedWeights, options: SchemeOptions) -> dict[str, Tensor]:
        """Return the tensors of `stored_tensors`, in their types in memory."""

    def unpack(self, matrix: PackedMatrix) -> UnpackedWeights:
        """Return the unpacked codes, and their quantization parameters."""

    def stored_qparams(self, grid: QuantParams, options: SchemeOptions) -> QuantParams:
        """Return the parameters of a whole matrix as `unpack` returns them after `pack`."""
        return grid

    def checkpoint_args(self, options: SchemeOptions) -> Mapping[str, Any] | None:
        """Return the grid of the weights as other programs describe it in a checkpoint.

        Keys and values are those of compressed-tensors' QuantizationScheme: `format`, `weights`, and
        `input_activations` where the activations are quantized too. The parameters `scales` [N, G] and, if
        there are any, `zeros` [N, G] (unsigned) of `unpack` are those of the grid.

        None where such a checkpoint has no form for it: the values are not integers times a scale.
        """
        return None

    def checkpoint_tensors(self, siblings: Sequence[PackedMatrix]) -> list[dict[str, Tensor]]:
        """Return the scales of matrices in such a checkpoint, by compressed-tensors' names.

        Args:
            siblings: the matrices of one part of a model, which servers may multiply as one.
        """
        return [{"weight_scale": self.unpack(matrix).qparams["scales"]} for matrix in siblings]

    def storage_warnings(self, matrices: Sequence[PackedMatrix]) -> list[Message]:
        """Return warnings about the stored sizes of a model's matrices of this scheme."""
        return []

    def calibrates_activations(self, options: SchemeOptions) -> bool:
        """Return whether a layer with these options needs the range of its activations."""
        return self.requires_calibration

    def activation_tensors(self, low: float, high: float, options: SchemeOptions) -> dict[str, Tensor]:
        """Return the calibrated tensors of `stored_tensors`, for activations from `low` to `high`."""
        return {}

    # Computation in torch, equal to the runtime's.

    def linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + bias, float32 [..., N], for float32 `x` [..., K]."""

    def lookup(self, matrix: PackedMatrix, ids: Tensor) -> Tensor:
        """Return rows of the matrix, float32 [..., K], for int64 `ids` [...]."""
        from torch.nn import functional as F

        return F.embedding(ids, matrix.dequantized())

    def quantizes_activations(self, options: SchemeOptions) -> bool:
        """Return whether the runtime quantizes the activations of a layer."""
        return True

    def simulates_activations(self, options: SchemeOptions) -> bool:
        """Return whether activations have fewer bits than an operator, so that floats are rounded instead."""
        return False

    def has_symmetric_activations(self, options: SchemeOptions) -> bool:
        """Return whether quantized activations have no zero points, where their ranges are calibrated."""
        return True

    def exact_activations(self, matrix: PackedMatrix) -> tuple[float, float]:
        """Return two activations, at most 0 and at least 0, that are represented exactly, each next to 0."""
        return -1.0, 1.0

    def fake_quantize_activations(self, matrix: PackedMatrix, x: Tensor) -> Tensor:
        """Return the activations for training, for float `x`; `x` itself where they are not quantized."""
        return x

    def static_activation_range(self, matrix: PackedMatrix) -> tuple[Tensor, float, float] | None:
        """Return the scale of activations, and their minimum and maximum in steps, where these are static."""
        return None

    # Export.

    def export_constants(self, matrix: PackedMatrix, use: MatrixUse) -> dict[str, Tensor]:
        """Return the constants of `emit_linear` or `emit_lookup`, by their names in the graph."""
        return {}

    def target_constants(self, target: str, matrix: PackedMatrix, use: MatrixUse) -> dict[str, Tensor]:
        """Return additional constants of the graphs of `target`, by their names in the graph."""
        return {}

    def emit_linear(self, matrix: PackedMatrix, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit `linear` with the operators that `target` runs fastest."""

    def emit_lookup(self, matrix: PackedMatrix, ids: Tensor, target: str) -> Tensor:
        """Emit `lookup`."""
        return self.lookup(matrix, ids)

    def operator_variants(self, options: SchemeOptions) -> tuple[str, ...]:
        """Return the alternative operators of a layer in ONNX Runtime on the CPU; () for one only.

        The first one is used unless another was measured to be faster (`export/autotune.py`). The weights are
        the same numbers in all, rounded activations may differ. `linear` and the export use
        `PackedMatrix.variant`.
        """
        return ()

    def variant_node(self, matrix: PackedMatrix, x: str, y: str) -> tuple[Any, dict[str, Tensor]]:
        """Return the layer without a bias as an ONNX node, in the variant of `matrix`, and its constants.

        It equals the result of `emit_linear`, for timing; not called for a scheme without
        `operator_variants`.
        """
        return None, {}

    def owns_operator(self, node: Any, graph: QuantizedGraph) -> bool:
        """Return whether a node of a graph is a quantized operator of this scheme.

        By default every node of its `operators`. A scheme of standard operators looks at the node's inputs: a
        MatMul is its operator if a DequantizeLinear of its type of weights computes the second one.
        """
        return node.op_type in self.operators

    def float_activation_nodes(self, node: Any) -> list[Any]:
        """Return nodes that compute `node`, which the scheme owns, with float activations."""

    def unpacking_tables(self) -> dict[str, Any]:
        """Return the tables of `emit.expand_by_table`: uint8 [256, n] by word."""
        return {}

    def placeholder_expansions(self) -> Mapping[str, Expansion]:
        """Return the expansions of its placeholders in a graph, by op type: those of `unpacking_tables`."""
        return {
            name: partial(expand_by_table, table=table) for name, table in self.unpacking_tables().items()
        }


# Returns the nodes that replace a placeholder; its constants are added to the graph.
Expansion = Callable[["QuantizedGraph", Any], list[Any]]


class QuantizedGraph:
    """An onnx.GraphProto with its constants and nodes by the names of their values.

    shapes: of the constants, and of the results of expanded placeholders.
    """

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.shapes: dict[str, list[int]] = {t.name: list(t.dims) for t in graph.initializer}
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self._makers = {name: node for node in graph.node for name in node.output}

    def constant(self, name: str) -> Any:
        """Return the onnx.TensorProto `name`; None if it is no constant."""
        return self._constants.get(name)

    def maker(self, name: str) -> Any:
        """Return the node that computes the value `name`; None if no node does."""
        return self._makers.get(name)

    def add_constant(self, name: str, value: NDArray[Any]) -> None:
        """Add a constant, once for its name."""
        from onnx import numpy_helper

        if name not in self._constants:
            self.add_tensor(numpy_helper.from_array(value, name))

    def reinterpret_constant(self, source: str, name: str, kind: int, shape: tuple[int, ...]) -> None:
        """Add the bytes of the constant `source`, which may be external, with another type and shape.

        kind: of onnx.TensorProto.DataType.
        """
        copy = type(self._constants[source])()
        copy.CopyFrom(self._constants[source])
        copy.name, copy.data_type = name, kind
        del copy.dims[:]
        copy.dims.extend(shape)
        self.add_tensor(copy)

    def add_tensor(self, tensor: Any) -> None:
        """Add a constant, an onnx.TensorProto."""
        self.graph.initializer.append(tensor)
        self._constants[tensor.name] = self.graph.initializer[-1]


def expand_by_table(graph: QuantizedGraph, node: Any, table: NDArray[np.uint8]) -> list[Any]:
    """Return the nodes that replace each byte of a constant by a row of `table`, uint8 [256, n]."""
    from onnx import TensorProto, helper

    source, result, width = node.input[0], node.output[0], table.shape[1]
    name = f"smelt.{re.sub(r'(?<=[a-z])(?=[A-Z])', '_', node.op_type).lower()}"
    graph.add_constant(name, table)
    shape = [*graph.shapes[source][:-1], width * graph.shapes[source][-1]]
    graph.shapes[result] = shape  # it may be expanded again
    indices, expanded, target = (f"{result}.{suffix}" for suffix in ("indices", "pairs", "shape"))
    graph.add_constant(target, np.array(shape, dtype=np.int64))
    return [
        helper.make_node("Cast", [source], [indices], f"{result}.cast", to=TensorProto.INT32),
        helper.make_node("Gather", [name, indices], [expanded], f"{result}.gather", axis=0),
        helper.make_node("Reshape", [expanded, target], [result], f"{result}.reshape"),
    ]
