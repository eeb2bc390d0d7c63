"""What a quantization scheme answers: how weights are coded, stored, computed in torch and exported.

A scheme is one class in one file of this folder and one line in registry.py. Nobody else knows it by name:
the stage `quantize`, its settings and help, training through codes, checkpoints, the exporter, its parity
check, the plan and the footprint ask the registry.

Files of schemes import no torch at module level, because `smelt plan` and `smelt stages` read them.

Shapes: N = outputs (rows of a matrix), K = inputs (columns), g = inputs of a row that share a scale,
G = ceil(K / g), the last group filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Value: TypeAlias = int | bool | str
Options: TypeAlias = Mapping[str, Value]
# What turns codes into values, under the names of the tensors that hold it: `scales` [N, G] and whatever
# else the scheme keeps (zero points, a table). Each broadcasts over the rows and has its groups in axis 1.
Grid: TypeAlias = Mapping[str, "Tensor"]
Use: TypeAlias = Literal["product", "lookup"]
# The targets of the stage `onnx`.
TARGETS = ("ort-cpu", "ort-cuda", "tensorrt", "openvino", "ort-tensorrt", "ort-tensorrt-rtx")
# Those that run the graphs of another one, in another way; what a scheme refuses is said of that one.
# Targets that cannot run convolutions of codes, and why.
REFUSED_CONVOLUTIONS = {
    "tensorrt": "TensorRT takes codes whose zero is 0, and what convolutions read has others"
}
GRAPHS_OF = {"ort-tensorrt": "tensorrt", "ort-tensorrt-rtx": "tensorrt"}


def graphs_for(target: str) -> str:
    """Return the target whose graphs `target` runs."""
    return GRAPHS_OF.get(target, target)


@dataclass(frozen=True)
class Option:
    """A setting of a scheme, by the same name in recipes, in `structure.json` and in `options`.

    Schemes may share an option (same description), with other values and another default.

    description: without the names of the schemes, which the help puts before it.
    expected: what to say in place of a list of the allowed values.
    others: what to say of a value that only other schemes allow.
    """

    name: str
    default: Value
    allowed: tuple[Value, ...]
    description: str
    expected: str = ""
    others: str = ""

    def allows(self, value: object) -> bool:
        """Say whether `value` is one of the allowed ones; true is no 1."""
        return any(value == one and type(value) is type(one) for one in self.allowed)


@dataclass(frozen=True)
class Stored:
    """One tensor of a matrix, by torch's names of types.

    dtype: in memory, where floats are float32, because transformers takes the type of a model's first float
        parameter for its own.
    filed: in files; empty where it is the same.
    packs: how many values lie in an element.
    by_row: axis 0 are the rows of the matrix, and a row's part depends on that row alone. Tensors that
        are not by row must be equal in matrices that become one product.
    measured: found on rows of data (`Scheme.ranged`) instead of decided from the weights (`Scheme.pack`); it
        belongs to the matrix as a whole.
    """

    shape: tuple[int, ...]
    dtype: str
    filed: str = ""
    packs: int = 1
    by_row: bool = True
    measured: bool = False


class Codes(NamedTuple):
    """What was decided for a matrix: codes [N, G, g], one an element, and their grid."""

    codes: Tensor
    grid: Grid


class Coded(Protocol):
    """A stored matrix, as its scheme sees it (`runtime/layers/quantized.py`)."""

    @property
    def options(self) -> Options:
        """What the scheme was told."""

    @property
    def width(self) -> int:
        """K."""

    @property
    def form(self) -> str:
        """Which of the scheme's `forms` was chosen; empty for the first."""

    def has(self, name: str) -> bool:
        """Say whether there is a tensor `name`, stored or in the graph's form."""

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, stored or in the graph's form."""

    def once(self, word: str, make: Callable[[], Tensor]) -> Tensor:
        """Return what `make` gives, computed once for the same memory of the stored tensors."""

    def values(self) -> Tensor:
        """Return what the codes stand for, float32 [N, K], computed once."""


class Scheme(Protocol):
    """One way to code the weights of a matrix. Methods that have a body here need not be written.

    name: the word in recipes.
    bits: of a code, where schemes differ in nothing else, so that layers of one model may have different ones
        (mixed precision); 0 in all others.
    summary: weights, scales and activations in a sentence without a full stop, for the help.
    source: the paper or reference code that it follows.
    pays: where it gains something, in a few words, for the table of schemes.
    settings: its options, in the order of the help.
    tables: whether embeddings, and the head that may be one matrix with them, can be coded.
    vocabulary: the scheme of embeddings and head unless the recipe names one; empty for this one.
    trained: whether the weights say little until they were trained through their codes.
    learns: whether its scales can be learned (`ends`).
    ranges: whether a grid follows from where the weights of a group end, so that ends can be cut off
        (`clip`); false where its values are fitted to all of them.
    zero: whether its codes can stand for 0 exactly, whatever the grid, so that weights can be set to it.
    halves: the scheme in which a matrix of this one is the sum of two, where that is known; empty elsewhere.
    binary_inputs: whether a training may make what its linear layers are fed one of two values.
    observes: whether its products need the range of their activations, found on rows of data.
    one_scale: whether all activations of a product become codes with one scale, so that a channel of large
        ones costs the others their precision.
    convolutions: whether it codes convolutions too, with a scale for each channel out.
    row_by_row: whether a product in ONNX Runtime gives a row the same, bit for bit, whatever else is in its
        batch.
    packages: what its products in torch need besides what smelt depends on: names in the package index, with
        the oldest release that does.
    by_word: whether rows of an output layer can be gathered in a graph, so that a shortlist restricts it.
    refused: by target of export: why it cannot run the scheme, continuing "cannot run it: "; also said of
        those that run the graphs of that one.
    runs_only: by target of export that runs some of its options alone: the values that it runs, by option.
    dtypes: by target of export: precisions of a graph, beside fp32, in which its scales keep their digits.
    oldest_opset: by target of export: the oldest one whose operators its products leave as.
    leaves_as: what its products in a graph are called, after "TensorRT cannot run the ".
    operators: its quantized operators in a graph, with the places of the inputs that hold scales and zero
        points. The input that comes after the activations holds the codes. None where no target runs it.
    drift: how far the output of a graph whose products round activations may be off in the mean, in
        standard deviations of the output. Two runtimes that sum in another order round some activations to
        other codes, so that it is a measured number; what is exact is compared exactly beside it.
    vector_drift: the same of a sentence's vector, in which every number counts as much as any other.
    graph_error: of a scheme that ONNX Runtime's quantizers write, the largest root mean square difference of
        a third-party graph's output from the float graph's, in standard deviations of the output. At 1 a
        graph is no better than the mean of its outputs.
    """

    name: ClassVar[str]
    bits: ClassVar[int] = 0
    summary: ClassVar[str]
    source: ClassVar[str]
    pays: ClassVar[str] = ""
    settings: ClassVar[tuple[Option, ...]] = ()
    tables: ClassVar[bool] = True
    vocabulary: ClassVar[str] = ""
    trained: ClassVar[bool] = False
    learns: ClassVar[bool] = True
    ranges: ClassVar[bool] = True
    zero: ClassVar[bool] = True
    halves: ClassVar[str] = ""
    binary_inputs: ClassVar[bool] = False
    observes: ClassVar[bool] = False
    one_scale: ClassVar[bool] = False
    convolutions: ClassVar[bool] = False
    row_by_row: ClassVar[bool] = False
    packages: ClassVar[Mapping[str, str]] = {}
    by_word: ClassVar[bool] = True
    refused: ClassVar[Mapping[str, str]]
    runs_only: ClassVar[Mapping[str, Mapping[str, tuple[Value, ...]]]] = {}
    dtypes: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    oldest_opset: ClassVar[Mapping[str, int]] = {}
    leaves_as: ClassVar[str]
    operators: ClassVar[Mapping[str, tuple[int, ...]]]
    drift: ClassVar[float]
    vector_drift: ClassVar[float]
    graph_error: ClassVar[float] = 0.0

    # How codes are decided. Round to nearest is fit, then nearest; other methods search the grid, or go
    # through the columns and correct those to come, with the same three steps.

    def group(self, width: int, options: Options) -> int:
        """Return g for a matrix of K = `width` inputs."""

    def whole(self, options: Options) -> bool:
        """Say whether all weights of a matrix share one scale, so that no row is decided alone."""
        return False

    def fit(self, groups: Tensor, width: int, options: Options) -> Grid:
        """Return the grid on which `groups` lie best without a look at data.

        Args:
            groups: float32 [N, G, g].
            width: how many of the G * g inputs are weights; those after them fill the last group up.
            options: the scheme's.
        """

    def nearest(self, groups: Tensor, grid: Grid, options: Options) -> Tensor:
        """Return the codes [N, G, g] whose values come nearest to float32 `groups`."""

    def values(self, codes: Tensor, grid: Grid, options: Options) -> Tensor:
        """Return what `codes` [N, G, g] stand for, float32 [N, G, g]."""

    def ends(self, grid: Grid, options: Options) -> tuple[Tensor | float, Tensor | float] | None:
        """Return the least and the greatest value on `grid` in scales, as they broadcast over codes.

        None where values are no whole multiples of a scale with both ends: its scales cannot be learned then.
        """
        return None

    # How it is stored.

    def storage(self, rows: int, width: int, options: Options) -> dict[str, Stored]:
        """Return the tensors of a matrix [N, K]; one is called `codes`."""

    def pack(self, decided: Codes, options: Options) -> dict[str, Tensor]:
        """Return the tensors of `storage`, in their types in memory."""

    def unpack(self, matrix: Coded) -> Codes:
        """Return the codes one by one, and their grid."""

    def ranged(self, largest: float) -> dict[str, Tensor]:
        """Return the tensors of `storage` that are measured, for activations from -`largest` to `largest`."""
        return {}

    # What it computes in torch: what the runtime will compute.

    def product(self, matrix: Coded, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + bias, float32 [..., N], for float32 `x` [..., K]."""

    def lookup(self, matrix: Coded, ids: Tensor) -> Tensor:
        """Return rows of the matrix, float32 [..., K], for int64 `ids` [...]."""
        from torch.nn import functional as F

        return F.embedding(ids, matrix.values())

    def rounds_activations(self, options: Options) -> bool:
        """Say whether the runtime turns the activations of a product into codes."""
        return True

    def held_exactly(self, matrix: Coded) -> float:
        """Return an activation that a product holds exactly, beside 0 and the negative of it."""
        return 1.0

    def seen_in_training(self, matrix: Coded, x: Tensor) -> Tensor:
        """Return the activations that a layer trains on, for float `x`; `x` itself where they stay whole."""
        return x

    def fixed_range(self, matrix: Coded) -> tuple[Tensor, float, float] | None:
        """Return the scale of activations, their least and their greatest code, where these are fixed."""
        return None

    # How it leaves.

    def graph_tensors(self, matrix: Coded, use: Use) -> dict[str, Tensor]:
        """Return the constants that `emit_product` or `emit_lookup` want, by their names in the graph."""
        return {}

    def tensors_for(self, target: str, matrix: Coded, use: Use) -> dict[str, Tensor]:
        """Return the constants that the graphs of `target` want besides, by their names in the graph."""
        return {}

    def emit_product(self, matrix: Coded, x: Tensor, bias: Tensor | None, target: str) -> Tensor:
        """Emit the product, as `product`, by the operators that `target` runs fastest."""

    def emit_lookup(self, matrix: Coded, ids: Tensor, target: str) -> Tensor:
        """Emit the lookup, as `lookup`."""
        return self.lookup(matrix, ids)

    def forms(self, options: Options) -> tuple[str, ...]:
        """Return the operators as which a product can leave for ONNX Runtime on the CPU; () for one alone.

        It is the first one unless another was measured to be faster (`export/tune`). The weights are the same
        numbers in all, rounded activations may differ. `product` and what leaves look at `Coded.form`.
        """
        return ()

    def form_node(self, matrix: Coded, x: str, y: str) -> tuple[Any, dict[str, Tensor]]:
        """Return the product without a bias as an ONNX node, in the form of `matrix`, and its constants.

        It is what `emit_product` leaves as, to be timed alone; nobody asks a scheme that has no `forms`.
        """
        return None, {}

    def exact_nodes(self, node: Any) -> list[Any]:
        """Return nodes that compute what `node`, one of `operators`, would with whole activations."""

    def load_tables(self) -> dict[str, Any]:
        """Return the tables that `emit.spread` speaks of: uint8 [256, n] by word."""
        return {}
