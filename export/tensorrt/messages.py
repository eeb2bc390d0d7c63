"""Explain messages of TensorRT's parser and builder, and suggest what to do.

The parser reports a code, an operator and a description that is often the text of an assertion or just
`false`; the builder writes lines to the log. Observed with TensorRT 11.4.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from smelt.core.messages import Message, warning

_ANY_OPERATOR = "*"
_REEXPORT_HINT = "Export again with onnx: {target: tensorrt}."
_QDQ_HINT = "TensorRT supports int8 only as QuantizeLinear/DequantizeLinear pairs. " + _REEXPORT_HINT

_INTEGER_CODE, _FOREIGN_CODE = "tensorrt-integer-operator", "tensorrt-foreign-operator"


class Explanation(NamedTuple):
    """code: of the kind of error. text: the cause and what to do."""

    code: str
    text: str


# (code, operator) -> explanation; the operator `*` matches all others.
_BY_CODE: dict[tuple[str, str], Explanation] = {
    ("UNSUPPORTED_NODE", "DynamicQuantizeLinear"): Explanation(
        "tensorrt-dynamic-quantization", "activations are quantized at run time. " + _QDQ_HINT
    ),
    ("UNSUPPORTED_NODE", "MatMulInteger"): Explanation(
        _INTEGER_CODE, "an integer matrix multiplication of ONNX Runtime. " + _QDQ_HINT
    ),
    ("UNSUPPORTED_NODE", "ConvInteger"): Explanation(
        _INTEGER_CODE, "an integer convolution of ONNX Runtime. " + _QDQ_HINT
    ),
    ("UNSUPPORTED_NODE", "QLinearMatMul"): Explanation(
        _INTEGER_CODE, "a quantized operator (QOperator format). " + _QDQ_HINT
    ),
    ("UNSUPPORTED_NODE", "QLinearConv"): Explanation(
        _INTEGER_CODE, "a quantized operator (QOperator format). " + _QDQ_HINT
    ),
    ("UNSUPPORTED_NODE", "MatMulNBits"): Explanation(
        _FOREIGN_CODE, "4-bit weights in ONNX Runtime's format. " + _REEXPORT_HINT
    ),
    ("UNSUPPORTED_NODE", "DynamicQuantizeMatMul"): Explanation(
        _FOREIGN_CODE, "an operator of ONNX Runtime only. " + _QDQ_HINT
    ),
    ("UNSUPPORTED_NODE", _ANY_OPERATOR): Explanation(
        "tensorrt-missing-operator", "TensorRT has no such operator. " + _REEXPORT_HINT
    ),
    ("UNSUPPORTED_NODE_ATTR", _ANY_OPERATOR): Explanation(
        "tensorrt-attribute", "TensorRT does not support this operator with these attributes."
    ),
    ("UNSUPPORTED_NODE_INPUT", _ANY_OPERATOR): Explanation(
        "tensorrt-input", "TensorRT does not support this operator with these inputs."
    ),
    ("UNSUPPORTED_NODE_DATATYPE", _ANY_OPERATOR): Explanation(
        "tensorrt-refused-type",
        "TensorRT does not support this operator with this data type."
        " Precision is decided at export: onnx: {target: tensorrt, dtype: fp32 or fp16}.",
    ),
    ("UNSUPPORTED_NODE_DYNAMIC", _ANY_OPERATOR): Explanation(
        "tensorrt-dynamic-shape", "TensorRT does not support this operator with a dynamic shape."
    ),
    ("UNSUPPORTED_NODE_SHAPE", _ANY_OPERATOR): Explanation(
        "tensorrt-shape", "TensorRT does not support this operator with this shape."
    ),
    ("MODEL_DESERIALIZE_FAILED", _ANY_OPERATOR): Explanation(
        "damaged-file", "the file is truncated or not an ONNX file. Run again with --rebuild."
    ),
    ("INVALID_GRAPH", _ANY_OPERATOR): Explanation("invalid-graph", "the graph is not valid ONNX."),
    ("REFIT_FAILED", _ANY_OPERATOR): Explanation(
        "tensorrt-refit-failed", "weights could not be replaced in the engine."
    ),
}
_PARSER_FAILED = Explanation("tensorrt-parser-failed", "TensorRT cannot parse it.")
# part of a description or a log line -> explanation; the first match is used
_BY_TEXT: tuple[tuple[str, Explanation], ...] = (
    (
        "Non-zero zero point",
        Explanation(
            "tensorrt-zero-point",
            "asymmetric quantization; TensorRT requires zero point 0. " + _REEXPORT_HINT,
        ),
    ),
    (
        "has type Int32 but must have type",
        Explanation(
            "tensorrt-quantized-bias",
            "a quantized bias; TensorRT supports quantized weights and activations only. " + _REEXPORT_HINT,
        ),
    ),
    (
        "must have same input types",
        Explanation(
            "tensorrt-mixed-types",
            "two data types meet in one operator; a Cast is missing. Precision is decided at export: "
            + _REEXPORT_HINT,
        ),
    ),
    (
        "Plugin not found",
        Explanation(_FOREIGN_CODE, "an operator that is not in the ONNX standard. " + _REEXPORT_HINT),
    ),
    (
        "no optimization profile has been defined",
        Explanation(
            "tensorrt-no-profile",
            "the graph has dynamic inputs, but their lengths are not known. Set tensorrt: {lengths: ...}.",
        ),
    ),
    (
        "is missing dimensions in profile",
        Explanation(
            "tensorrt-profile-missing-input",
            "an input of the graph has no entry in the optimization profile.",
        ),
    ),
    (
        "values are not self-consistent",
        Explanation(
            "tensorrt-profile-conflict",
            "inputs that share a dimension have different sizes in the profile.",
        ),
    ),
    (
        "Cuda failure",
        Explanation(
            "cuda-failed", "CUDA failed. Check that nvidia-smi works and that the driver is new enough."
        ),
    ),
    (
        "out of memory",
        Explanation(
            "out-of-memory",
            "out of GPU memory. Lower tensorrt: {workspace_mib: ...} or max_batch_size.",
        ),
    ),
    (
        "insufficient workspace",
        Explanation(
            "tensorrt-small-workspace",
            "no kernel fits into the workspace. Raise tensorrt: {workspace_mib: ...}.",
        ),
    ),
    (
        "Could not find any implementation",
        Explanation("tensorrt-no-kernel", "no kernel computes this node on this GPU within the workspace."),
    ),
)


# part of a warning -> explanation; the engine is built nevertheless
_WARNINGS: tuple[tuple[str, Explanation], ...] = (
    (
        "kMAX values are not self-consistent",
        Explanation(
            "tensorrt-profile-conflict",
            "the largest sizes of the profile do not match, so inputs of that size may fail. Lower"
            " tensorrt: {lengths: ...} or max_new_tokens.",
        ),
    ),
    (
        "layernorm after self-attention with FP16",
        Explanation(
            "tensorrt-norm-in-half",
            "a norm is computed in fp16, where the squares of values above 256 are infinite. Compare the"
            " scores with those of dtype: fp32.",
        ),
    ),
)


@dataclass(frozen=True)
class ParserError:
    """One error of TensorRT's ONNX parser, as read from its `IParserError`."""

    code: str
    description: str
    node: str
    operator: str


def explain_parser_error(error: ParserError, graph: str) -> Message:
    """Return a message for a parser error: the node, the cause and what to do."""
    place = f"node '{error.node}' ({error.operator}): " if error.node or error.operator else ""
    meaning = (
        _explanation_for_text(error.description)
        or _BY_CODE.get((error.code, error.operator))
        or _BY_CODE.get((error.code, _ANY_OPERATOR))
        or _PARSER_FAILED
    )
    return _rejection_message(
        meaning.code, f"{place}{meaning.text}{_quote(error.code, error.description)}", graph
    )


def explain_log(lines: Iterable[str], graph: str) -> Message:
    """Return the explanation of the log's errors, or the lines themselves if none is known."""
    kept = list(dict.fromkeys(line for line in lines if line))
    for line in kept:
        meaning = _explanation_for_text(line)
        if meaning is not None:
            return _rejection_message(meaning.code, f"{meaning.text}{_quote('builder', line)}", graph)
    log = " / ".join(kept[:3]) or "(empty log)"
    text = f"TensorRT could not build an engine. Its log: {log}"
    return _rejection_message("tensorrt-build-failed", text, graph)


def explain_warning(line: str) -> Message:
    """Return the explanation of a builder warning, or the line itself if none is known."""
    meaning = next((meaning for part, meaning in _WARNINGS if part in line), None)
    if meaning is None:
        return warning("tensorrt-warning", line)
    return warning(meaning.code, f"{meaning.text}{_quote('builder', line)}")


def _rejection_message(code: str, text: str, graph: str) -> Message:
    return Message(code=code, severity="error", message=text, file=graph)


def _explanation_for_text(text: str) -> Explanation | None:
    lowered = text.lower()
    return next((meaning for part, meaning in _BY_TEXT if part.lower() in lowered), None)


def _quote(code: str, text: str) -> str:
    """Return TensorRT's own text, as a search term; empty for `false` and for no text."""
    text = " ".join(text.split())
    return f" [{code}]" if text in ("", "false") else f" [{code}: {text[:200]}]"
