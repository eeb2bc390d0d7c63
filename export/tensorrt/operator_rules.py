"""Rules on operators, opsets and attributes.

Tested with the parser of TensorRT for RTX 1.7 through the bindings of 11.4 (tests/export/tensorrt).

Rules on explicit quantization: QuantizeLinear, DequantizeLinear and the quantized values before them.

The table of rules, each with what TensorRT does with such a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal, NamedTuple

from smelt.export.tensorrt import value_rules
from smelt.export.tensorrt import value_rules as type_rules
from smelt.export.tensorrt.value_rules import (
    NVIDIA_OPS,
    QDQ_OPS,
    TENSORRT_REEXPORT_HINT,
    CheckedGraph,
    ProblemSeverity,
    RuleFinding,
    TensorrtProblem,
    input_name,
    node_attribute,
    node_location,
    type_name,
)
from smelt.quantization.scheme import NVIDIA_DOMAIN
from smelt.runtimes.graph_walk import normalized_domain
from smelt.runtimes.onnx_import.validate_graph import ONNX_DOMAINS

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
_CLASSICAL_DOMAIN = "ai.onnx.ml"
_CLASSICAL_HINT = "Run this graph with ONNX Runtime."
_RESIZE_MODES = frozenset(
    {"half_pixel", "pytorch_half_pixel", "tf_half_pixel_for_nn", "asymmetric", "align_corners"}
)


def unsupported_opset(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find opsets outside 9 to 25; the parser accepts others and reads them as one that it supports."""
    for entry in graph.model.opset_import:
        if not normalized_domain(entry.domain) and entry.version not in SUPPORTED_OPSETS:
            yield RuleFinding(
                f"opset {entry.version}",
                f"TensorRT 11 supports {SUPPORTED_OPSETS[0]} to {SUPPORTED_OPSETS[-1]}, and accepts others"
                " silently.",
                f"Export again with onnx: {{target: tensorrt, opset: {SUPPORTED_OPSETS[-1] - 4}}}.",
            )


def cycles(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find cycles, in which no order of the nodes computes the graph."""
    nodes = list(graph.model.graph.node)
    producers = {name: node_index for node_index, node in enumerate(nodes) for name in node.output if name}
    waits = {
        node_index: {producers[name] for name in node.input if name in producers}
        for node_index, node in enumerate(nodes)
    }
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
        if not normalized_domain(node.domain) or _has_standard_name(node) or _is_nvidia_op(node):
            continue
        name = f"{node.domain}::{node.op_type}"
        # NVIDIA's plugins are among them: they exist if the plugin library is loaded
        kind = "a custom operator"
        if node.domain in ONNX_DOMAINS:
            kind = (
                "an operator of ONNX for classical models"
                if node.domain == _CLASSICAL_DOMAIN
                else "experimental"
            )
        elif node.domain == "com.microsoft":
            kind = "an operator of another runtime"
        yield RuleFinding(f"node '{node.name}'", f"{name} is {kind}, which TensorRT does not support.")


def foreign_namesakes(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find third-party operators with the name of a standard one: the parser checks only the name."""
    for node in graph.nodes:
        if normalized_domain(node.domain) and _has_standard_name(node) and not _is_nvidia_op(node):
            name = f"{node.domain}::{node.op_type}"
            yield RuleFinding(
                f"node '{node.name}'",
                f"{name} is not the standard {node.op_type}, but TensorRT silently reads it as such.",
            )


def _is_nvidia_op(node: Any) -> bool:
    return node.domain == NVIDIA_DOMAIN and node.op_type in NVIDIA_OPS


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
            supported_modes = ", ".join(sorted(_RESIZE_MODES))
            yield RuleFinding(
                node_location(node),
                f"the mode {mode} is not supported; TensorRT supports {supported_modes}.",
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
        top_k = graph.constant_value(input_name(node, 1))
        if top_k is not None and top_k.size and int(top_k.max()) > _MAX_TOP_K:
            yield RuleFinding(node_location(node), f"K is {int(top_k.max())}; TensorRT supports at most"
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


# names in onnx.TensorProto
_SUPPORTED_TYPES = ("INT8", "UINT8", "INT4", "FLOAT8E4M3FN", "FLOAT4E2M1")
# NVIDIA's TensorRT documentation, "Quantization Schemes"
_BLOCK_SIZES = (64, 128)


def quantized_types(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find quantized types that TensorRT does not support; an int32 one is a quantized bias.

    For uint8 see `unsigned_types`.
    """
    from onnx import TensorProto

    fits = [TensorProto.DataType.Value(name) for name in _SUPPORTED_TYPES]
    for node in graph.nodes_of_type(*QDQ_OPS):
        kind = _quantized_type(node, graph)
        if kind and type_name(kind) == "int32":
            yield RuleFinding(
                node_location(node),
                "a quantized bias (int32); TensorRT supports quantized weights and activations only.",
            )
        elif kind and kind not in fits:
            yield RuleFinding(
                node_location(node), f"quantized values of type {type_name(kind)}; TensorRT requires int8."
            )


def unsigned_types(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find uint8 values with zero point 0: TensorRT reads them as int8, and values above 127 are clipped."""
    for node in graph.nodes_of_type(*QDQ_OPS):
        if type_name(_quantized_type(node, graph)) == "uint8":
            yield RuleFinding(
                node_location(node), "uint8 values; TensorRT requires int8 and reads them as int8."
            )


def zero_points(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find zero points other than 0: asymmetric quantization."""
    for node in graph.nodes_of_type(*QDQ_OPS):
        zero = graph.constant_value(input_name(node, 2))
        if zero is not None and zero.astype("float64").any():
            yield RuleFinding(
                node_location(node),
                "a zero point other than 0 (asymmetric); TensorRT requires symmetric quantization.",
            )


def non_positive_scales(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find scales that are not positive."""
    for node in graph.nodes_of_type(*QDQ_OPS):
        scale = graph.constant_value(input_name(node, 1))
        if scale is not None and not (scale.astype("float64") > 0).all():
            yield RuleFinding(node_location(node), "a scale that is not positive.")


def unsupported_blocks(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find blocks along an axis before the last two, or that do not fill their axis."""
    for node in graph.nodes_of_type("DequantizeLinear"):
        if not (layout := _block_layout(node, graph)):
            continue
        axis, count, sizes = layout
        if axis < len(sizes) - 2:
            yield RuleFinding(
                node_location(node),
                f"blocks along axis {axis} of {len(sizes)}; TensorRT supports the last two.",
                "Move that axis to the end before quantizing.",
            )
        elif count < 1 or sizes[axis] % count:
            yield RuleFinding(
                node_location(node),
                f"{count} scales along an axis of {sizes[axis]}; TensorRT requires whole blocks.",
                "Pad the axis with zeros to a multiple of the block size.",
            )


def undocumented_blocks(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find blocks that TensorRT for RTX builds, but TensorRT's documentation does not list."""
    from onnx import TensorProto

    for node in graph.nodes_of_type("DequantizeLinear"):
        kind, layout = _quantized_type(node, graph), _block_layout(node, graph)
        if kind == TensorProto.INT8 and layout:
            yield RuleFinding(
                node_location(node),
                "int8 values with one scale per block; TensorRT documents blocks only for 4-bit values.",
                "Use one scale per output, or 4-bit weights.",
            )
        elif kind == TensorProto.INT4 and input_name(node, 0) not in graph.constants:
            yield RuleFinding(
                node_location(node),
                "4-bit activations; TensorRT documents 4-bit values only for weights.",
                "Keep activations in float, or use int8.",
            )
        elif kind == TensorProto.INT4 and _block_size(layout) not in _BLOCK_SIZES:
            block_text = f"in blocks of {_block_size(layout)}" if layout else "without blocks"
            yield RuleFinding(
                node_location(node),
                f"4-bit values {block_text}; TensorRT documents blocks of 64 and of 128.",
                "Quantize with group_size: 64 or 128.",
            )


def constants_without_scale(graph: CheckedGraph) -> Iterator[RuleFinding]:
    """Find int8 and int4 constants with readers other than DequantizeLinear."""
    from onnx import TensorProto

    for node in graph.nodes_of_type():
        if node.op_type in QDQ_OPS:
            continue
        for name in node.input:
            tensor = graph.constants.get(name)
            quantized_types = (TensorProto.INT8, TensorProto.INT4)
            if tensor is not None and tensor.data_type in quantized_types and len(tensor.dims):
                yield RuleFinding(
                    node_location(node),
                    f"it reads the {type_name(tensor.data_type)} constant '{name}'; TensorRT supports such"
                    " constants only as inputs of DequantizeLinear.",
                    "Dequantize it first, or store it as int32.",
                )


def _quantized_type(node: Any, graph: CheckedGraph) -> int:
    """Return the quantized type of a pair; of QuantizeLinear that of its zero point or `output_dtype`."""
    from onnx import TensorProto

    if node.op_type == "DequantizeLinear":
        return graph.element_type(input_name(node, 0))
    if zero := input_name(node, 2):
        return graph.element_type(zero)
    return int(node_attribute(node, "output_dtype") or TensorProto.UINT8)


def _block_layout(node: Any, graph: CheckedGraph) -> tuple[int, int, list[int]] | None:
    """Return axis, number of blocks and sizes of a constant with one scale per block."""
    codes, scales = (graph.constants.get(input_name(node, input_index)) for input_index in (0, 1))
    if codes is None or scales is None or not len(codes.dims) == len(scales.dims) > 1:
        return None
    axis = node_attribute(node, "axis")
    axis = (1 if axis is None else axis) % len(codes.dims)
    return axis, scales.dims[axis], list(codes.dims)


def _block_size(layout: tuple[int, int, list[int]] | None) -> int:
    """Return the length of a block, 0 if there are none."""
    if layout is None or not layout[1]:
        return 0
    axis, count, sizes = layout
    return sizes[axis] // count


RuleOutcome = Literal["rejected", "built wrong", "built otherwise"]


class TensorrtRule(NamedTuple):
    """A name, what TensorRT does with such a graph, and the function that finds the locations."""

    name: str
    outcome: RuleOutcome
    check: Callable[[CheckedGraph], Iterator[RuleFinding]]

    @property
    def severity(self) -> ProblemSeverity:
        """An error if nothing can be built or the engine computes something else, otherwise a warning."""
        return "warning" if self.outcome == "built otherwise" else "error"


RULES: tuple[TensorrtRule, ...] = (
    TensorrtRule("opset", "built wrong", unsupported_opset),
    TensorrtRule("circle", "rejected", cycles),
    TensorrtRule("no-output", "built wrong", no_outputs),
    TensorrtRule("foreign-operator", "rejected", foreign_operators),
    TensorrtRule("foreign-namesake", "built wrong", foreign_namesakes),
    TensorrtRule("integer-operator", "rejected", integer_operators),
    TensorrtRule("missing-operator", "rejected", missing_operators),
    TensorrtRule("training-mode", "rejected", training_mode),
    TensorrtRule("attribute", "rejected", unsupported_attributes),
    TensorrtRule("missing-type", "rejected", type_rules.unsupported_types),
    TensorrtRule("mixed-types", "rejected", type_rules.mixed_types),
    TensorrtRule("refused-type", "rejected", type_rules.unsupported_op_types),
    TensorrtRule("uint8-inside", "rejected", type_rules.internal_uint8),
    TensorrtRule("cast-to-float8", "rejected", type_rules.casts_to_float8),
    TensorrtRule("codes", "rejected", quantized_types),
    TensorrtRule("unsigned-codes", "built wrong", unsigned_types),
    TensorrtRule("zero-point", "rejected", zero_points),
    TensorrtRule("scale", "rejected", non_positive_scales),
    TensorrtRule("blocks", "rejected", unsupported_blocks),
    TensorrtRule("codes-without-scale", "rejected", constants_without_scale),
    TensorrtRule("axes", "rejected", value_rules.too_many_axes),
    TensorrtRule("infinite", "built wrong", value_rules.non_finite_values),
    TensorrtRule("mask", "built otherwise", value_rules.mask_constants),
    TensorrtRule("overflowing-cast", "built otherwise", value_rules.overflowing_casts),
    TensorrtRule("norm-in-half", "built otherwise", value_rules.norms_in_fp16),
    TensorrtRule("double", "built otherwise", type_rules.double_types),
    TensorrtRule("default-input", "built otherwise", value_rules.default_inputs),
    TensorrtRule("other-blocks", "built otherwise", undocumented_blocks),
    TensorrtRule("seed", "built otherwise", random_seeds),
    TensorrtRule("size-from-data", "built otherwise", data_dependent_shapes),
    TensorrtRule("unnamed-size", "built otherwise", value_rules.unnamed_sizes),
)
OUTCOMES: dict[str, RuleOutcome] = {rule.name: rule.outcome for rule in RULES}


def run_rules(graph: CheckedGraph) -> Iterator[TensorrtProblem]:
    """Yield the findings of all rules in a graph, in the order of the table.

    smelt's exporter makes no graphs of classical models, so no hint on these names it.
    """
    is_classical = any(node.domain == _CLASSICAL_DOMAIN for node in graph.nodes)
    for rule in RULES:
        for finding in rule.check(graph):
            hint = finding.hint
            if is_classical and TENSORRT_REEXPORT_HINT in hint:
                hint = hint.replace(TENSORRT_REEXPORT_HINT, "").strip() or _CLASSICAL_HINT
            yield TensorrtProblem(
                rule.severity, finding.reason, finding.location, hint, rule.name, graph.path.name
            )
