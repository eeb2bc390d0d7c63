"""Rules on which operators there are, in which opset, with which attributes.

Tried with the parser of TensorRT for RTX 1.7 through the bindings of 11.4 (tests/export/tensorrt).
"""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

from smelt.export.tensorrt.rules.graph import STANDARD, Found, Graph, at, attribute, given
from smelt.runtime.foreign.structure import OF_ONNX

OPSETS = range(9, 26)
_PAIRS = "TensorRT takes int8 as QuantizeLinear/DequantizeLinear pairs only."
_INTEGER = frozenset(
    {"DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "QLinearMatMul", "QLinearConv"}
)
# Standard operators that the parser says it does not have (`OnnxParser.supports_operator`), besides _INTEGER.
MISSING = frozenset({
    "AffineGrid", "Bernoulli", "BitCast", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor",
    "CenterCropPad", "Col2Im", "Compress", "ConcatFromSequence", "CumProd", "DFT", "DeformConv", "Det",
    "ImageDecoder", "MaxRoiPool", "MaxUnpool", "MelWeightMatrix", "Multinomial", "NegativeLogLikelihoodLoss",
    "Optional", "OptionalGetElement", "OptionalHasElement", "RegexFullMatch", "SequenceAt",
    "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap",
    "SoftmaxCrossEntropyLoss", "SplitToSequence", "StringConcat", "StringNormalizer", "StringSplit", "SwiGLU",
    "TfIdfVectorizer", "Unique",
})  # fmt: skip
_MOST_OF_TOP_K = 3840
_RESIZE_MODES = frozenset(
    {"half_pixel", "pytorch_half_pixel", "tf_half_pixel_for_nn", "asymmetric", "align_corners"}
)


def opset(graph: Graph) -> Iterator[Found]:
    """Only opsets 9 to 25 are known; the parser lets others pass and reads them as what it knows."""
    for entry in graph.model.opset_import:
        if entry.domain in STANDARD and entry.version not in OPSETS:
            yield Found(
                f"opset {entry.version}",
                f"TensorRT 11 takes {OPSETS[0]} to {OPSETS[-1]}, and lets others pass without a word.",
                f"Export again with onnx: {{target: tensorrt, opset: {OPSETS[-1] - 4}}}.",
            )


def circles(graph: Graph) -> Iterator[Found]:
    """Nodes that wait for each other, so that no order of the graph computes them."""
    nodes = list(graph.model.graph.node)
    makers = {name: at for at, node in enumerate(nodes) for name in node.output if name}
    waits = {at: {makers[name] for name in node.input if name in makers} for at, node in enumerate(nodes)}
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:
        first = nodes[error.args[1][0]]
        yield Found(at(first), "it waits for a node that waits for it.", "Export the model again.")


def nothing_to_give(graph: Graph) -> Iterator[Found]:
    """A graph without outputs; the parser takes an empty file without a word."""
    if not graph.model.graph.output:
        yield Found("the graph", "it has no outputs.", "Copy the file again, or export the model again.")


def foreign_operators(graph: Graph) -> Iterator[Found]:
    """Operators outside of the standard: ONNX Runtime's, custom ones, plugins."""
    for node in graph.nodes:
        if node.domain in STANDARD or _has_a_namesake(node):
            continue
        name = f"{node.domain}::{node.op_type}"
        # NVIDIA's plugins are among them: they are there where the plugin library is loaded
        kind = "a custom operator"
        if node.domain in OF_ONNX:
            kind = (
                "an operator of ONNX for classical models" if node.domain.endswith(".ml") else "experimental"
            )
        elif node.domain == "com.microsoft":
            kind = "an operator of another runtime"
        yield Found(f"node '{node.name}'", f"{name} is {kind}, which TensorRT does not have.")


def foreign_namesakes(graph: Graph) -> Iterator[Found]:
    """Foreign operators that are called like a standard one: the parser looks at the name alone."""
    for node in graph.nodes:
        if node.domain not in STANDARD and _has_a_namesake(node):
            name = f"{node.domain}::{node.op_type}"
            yield Found(
                f"node '{node.name}'", f"{name} is not the standard {node.op_type}, as which TensorRT reads"
                " it without a word.",
            )  # fmt: skip


def _has_a_namesake(node: Any) -> bool:
    from onnx import defs

    return bool(defs.has(node.op_type)) and node.op_type not in MISSING | _INTEGER


def integer_operators(graph: Graph) -> Iterator[Found]:
    """Quantized products as ONNX Runtime writes them, dynamic or in the QOperator format."""
    for node in graph.of(*_INTEGER):
        yield Found(f"node '{node.name}'", f"{node.op_type}; {_PAIRS}")


def missing_operators(graph: Graph) -> Iterator[Found]:
    """Standard operators that TensorRT's parser does not have."""
    for node in graph.of(*MISSING):
        yield Found(
            at(node), "TensorRT has no such operator.", "Replace it, or compute it outside of the graph."
        )


def training_mode(graph: Graph) -> Iterator[Found]:
    """Dropout and BatchNormalization that compute as in training."""
    for node in graph.of("Dropout", "BatchNormalization"):
        told = graph.values(given(node, 2)) if node.op_type == "Dropout" else None
        if attribute(node, "training_mode") or (told is not None and told.any()):
            yield Found(at(node), "it computes as in training.", "Export the model in eval mode.")


def attributes(graph: Graph) -> Iterator[Found]:
    """Forms of an operator that TensorRT does not compute."""
    for node in graph.of("Resize"):
        mode = (attribute(node, "coordinate_transformation_mode") or b"half_pixel").decode()
        if attribute(node, "antialias"):
            yield Found(at(node), "it smooths (antialias: 1), which TensorRT does not.", "Give antialias: 0.")
        if mode not in _RESIZE_MODES:
            known = ", ".join(sorted(_RESIZE_MODES))
            yield Found(at(node), f"the mode {mode}; TensorRT knows {known}.", "Take one of these.")
    for node in graph.of("MaxPool"):
        if len(node.output) > 1 and node.output[1]:
            yield Found(at(node), "it gives indices, which TensorRT does not.", "Use its first output only.")
    for node in graph.of("Conv", "ConvTranspose"):
        weight = graph.constants.get(given(node, 1))
        if weight is not None and len(weight.dims) > 5:
            spaces = len(weight.dims) - 2
            yield Found(at(node), f"it runs over {spaces} axes; TensorRT takes 1 to 3.", "Split it.")
    for node in graph.of("TopK"):
        most = graph.values(given(node, 1))
        if most is not None and most.size and int(most.max()) > _MOST_OF_TOP_K:
            yield Found(at(node), f"K is {int(most.max())}; TensorRT takes at most {_MOST_OF_TOP_K}.",
                        "Lower K, or take it outside of the graph.")  # fmt: skip


def random_seeds(graph: Graph) -> Iterator[Found]:
    """Seeds, which TensorRT ignores."""
    drawing = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
    for node in graph.of(*drawing):
        if attribute(node, "seed") is not None:
            yield Found(at(node), "TensorRT ignores its seed: each run draws other numbers.",
                        "Draw outside of the graph and feed the numbers.")  # fmt: skip


def sizes_from_data(graph: Graph) -> Iterator[Found]:
    """Operators whose output is as long as the data say."""
    for node in graph.of("NonZero", "NonMaxSuppression"):
        yield Found(
            at(node), "the size of its output depends on the data; smelt's runner refuses such outputs.",
            "Whoever runs the engine needs an IOutputAllocator, or pads to a fixed size in the graph.",
        )  # fmt: skip
