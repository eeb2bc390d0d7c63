"""Rules on operators, opsets and attributes.

Tested with the parser of TensorRT for RTX 1.7 through the bindings of 11.4 (tests/export/tensorrt).
"""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

from smelt.export.tensorrt.rules.checked_graph import (
    STANDARD_DOMAINS,
    CheckedGraph,
    RuleFinding,
    input_name,
    node_attribute,
    node_location,
)
from smelt.runtimes.third_party.graph_structure import ONNX_DOMAINS

SUPPORTED_OPSETS = range(9, 26)
_QDQ_HINT = "TensorRT supports int8 only as QuantizeLinear/DequantizeLinear pairs."
_INTEGER_OPS = frozenset(
    {"DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "QLinearMatMul", "QLinearConv"}
)
# Standard operators missing from the parser (`OnnxParser.supports_operator`), in addition to _INTEGER.
UNSUPPORTED_OPS = frozenset({
    "AffineGrid", "Bernoulli", "BitCast", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor",
    "CenterCropPad", "Col2Im", "Compress", "ConcatFromSequence", "CumProd", "DFT", "DeformConv", "Det",
    "ImageDecoder", "MaxRoiPool", "MaxUnpool", "MelWeightMatrix", "Multinomial", "NegativeLogLikelihoodLoss",
    "Optional", "OptionalGetElement", "OptionalHasElement", "RegexFullMatch", "SequenceAt",
    "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap",
    "SoftmaxCrossEntropyLoss", "SplitToSequence", "StringConcat", "StringNormalizer", "StringSplit", "SwiGLU",
    "TfIdfVectorizer", "Unique",
})  # fmt: skip
_MAX_TOP_K = 3840
_RESIZE_MODES = frozenset(
    {"half_pixel", "pytorch_half_pixel", "tf_half_pixel_for_nn", "asymmetric", "align_corners"}
)


def unsupported_opset(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find opsets outside 9 to 25; the parser accepts others and reads them as one that it supports."""
    for entry in graph.model.opset_import:
        if entry.domain in STANDARD_DOMAINS and entry.version not in SUPPORTED_OPSETS:
            yield RuleFinding(
                f"opset {entry.version}",
                f"TensorRT 11 supports {SUPPORTED_OPSETS[0]} to {SUPPORTED_OPSETS[-1]}, and accepts others"
                " silently.",
                f"Export again with onnx: {{target: tensorrt, opset: {SUPPORTED_OPSETS[-1] - 4}}}.",
            )


def cycles(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find cycles, in which no order of the nodes computes the graph."""
    nodes = list(graph.model.graph.node)
    makers = {name: at for at, node in enumerate(nodes) for name in node.output if name}
    waits = {at: {makers[name] for name in node.input if name in makers} for at, node in enumerate(nodes)}
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:
        first = nodes[error.args[1][0]]
        yield RuleFinding(node_location(first), "it is part of a cycle.", "Export the model again.")


def no_outputs(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find a graph without outputs; the parser silently accepts an empty file."""
    if not graph.model.graph.output:
        yield RuleFinding(
            "the graph", "it has no outputs.", "Copy the file again, or export the model again."
        )


def foreign_operators(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find operators outside of the standard: ONNX Runtime's, custom ones, plugins."""
    for node in graph.nodes:
        if node.domain in STANDARD_DOMAINS or _has_standard_name(node):
            continue
        name = f"{node.domain}::{node.op_type}"
        # NVIDIA's plugins are among them: they exist if the plugin library is loaded
        kind = "a custom operator"
        if node.domain in ONNX_DOMAINS:
            kind = (
                "an operator of ONNX for classical models" if node.domain.endswith(".ml") else "experimental"
            )
        elif node.domain == "com.microsoft":
            kind = "an operator of another runtime"
        yield RuleFinding(f"node '{node.name}'", f"{name} is {kind}, which TensorRT does not support.")


def foreign_namesakes(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find third-party operators with the name of a standard one: the parser checks only the name."""
    for node in graph.nodes:
        if node.domain not in STANDARD_DOMAINS and _has_standard_name(node):
            name = f"{node.domain}::{node.op_type}"
            yield RuleFinding(
                f"node '{node.name}'",
                f"{name} is not the standard {node.op_type}, but TensorRT silently reads it as such.",
            )


def _has_standard_name(node: Any) -> bool:
    from onnx import defs

    return bool(defs.has(node.op_type)) and node.op_type not in UNSUPPORTED_OPS | _INTEGER_OPS


def integer_operators(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find quantized matrix multiplications of ONNX Runtime, dynamic or in the QOperator format."""
    for node in graph.nodes_of_type(*_INTEGER_OPS):
        yield RuleFinding(f"node '{node.name}'", f"{node.op_type}; {_QDQ_HINT}")


def missing_operators(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find standard operators that TensorRT's parser does not support."""
    for node in graph.nodes_of_type(*UNSUPPORTED_OPS):
        yield RuleFinding(
            node_location(node),
            "TensorRT has no such operator.",
            "Replace it, or compute it outside of the graph.",
        )


def training_mode(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find Dropout and BatchNormalization nodes in training mode."""
    for node in graph.nodes_of_type("Dropout", "BatchNormalization"):
        value = graph.constant_value(input_name(node, 2)) if node.op_type == "Dropout" else None
        if node_attribute(node, "training_mode") or (value is not None and value.any()):
            yield RuleFinding(
                node_location(node), "it is in training mode.", "Export the model in eval mode."
            )


def unsupported_attributes(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find variants of an operator that TensorRT does not compute."""
    for node in graph.nodes_of_type("Resize"):
        mode = (node_attribute(node, "coordinate_transformation_mode") or b"half_pixel").decode()
        if node_attribute(node, "antialias"):
            yield RuleFinding(
                node_location(node),
                "antialias: 1 is not supported by TensorRT.",
                "Set antialias: 0.",
            )
        if mode not in _RESIZE_MODES:
            known = ", ".join(sorted(_RESIZE_MODES))
            yield RuleFinding(
                node_location(node),
                f"the mode {mode} is not supported; TensorRT supports {known}.",
                "Use one of these.",
            )
    for node in graph.nodes_of_type("MaxPool"):
        if len(node.output) > 1 and node.output[1]:
            yield RuleFinding(
                node_location(node),
                "it outputs indices, which TensorRT does not support.",
                "Use its first output only.",
            )
    for node in graph.nodes_of_type("Conv", "ConvTranspose"):
        weight = graph.constants.get(input_name(node, 1))
        if weight is not None and len(weight.dims) > 5:
            spaces = len(weight.dims) - 2
            yield RuleFinding(
                node_location(node), f"it has {spaces} spatial axes; TensorRT supports 1 to 3.", "Split it."
            )
    for node in graph.nodes_of_type("TopK"):
        most = graph.constant_value(input_name(node, 1))
        if most is not None and most.size and int(most.max()) > _MAX_TOP_K:
            yield RuleFinding(node_location(node), f"K is {int(most.max())}; TensorRT supports at most"
            f" {_MAX_TOP_K}.",
                        "Lower K, or compute it outside of the graph.")  # fmt: skip


def random_seeds(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find seeds, which TensorRT ignores."""
    drawing = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
    for node in graph.nodes_of_type(*drawing):
        if node_attribute(node, "seed") is not None:
            yield RuleFinding(node_location(node), "TensorRT ignores its seed: each run draws different"
            " numbers.",
                        "Draw the numbers outside of the graph and make them an input.")  # fmt: skip


def data_dependent_shapes(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find operators whose output size depends on the data."""
    for node in graph.nodes_of_type("NonZero", "NonMaxSuppression"):
        yield RuleFinding(
            node_location(node),
            "the size of its output depends on the data; smelt's runner rejects such outputs.",
            "Run the engine with an IOutputAllocator, or pad to a fixed size in the graph.",
        )
