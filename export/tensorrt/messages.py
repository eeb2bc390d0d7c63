"""From what TensorRT's parser and builder say to what is wrong and what to do.

The parser answers with a code, an operator and a description that is often an assertion's text or
even just `false`; the builder answers with lines in the log. Seen with TensorRT 11.4.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from smelt.core.messages import Message, warning

_ANY = "*"
_REEXPORT = "Export again with onnx: {target: tensorrt}."
_QUANTIZED = "TensorRT takes int8 as QuantizeLinear/DequantizeLinear pairs only. " + _REEXPORT

_INTEGER, _FOREIGN = "tensorrt-integer-operator", "tensorrt-foreign-operator"


class Meaning(NamedTuple):
    """code: of the kind of mistake. text: what is wrong and what to do."""

    code: str
    text: str


# (code, operator) -> what it means; the operator `*` stands for all others.
_BY_CODE: dict[tuple[str, str], Meaning] = {
    ("UNSUPPORTED_NODE", "DynamicQuantizeLinear"): Meaning(
        "tensorrt-dynamic-quantization", "activations quantized at run time. " + _QUANTIZED
    ),
    ("UNSUPPORTED_NODE", "MatMulInteger"): Meaning(
        _INTEGER, "an integer product in ONNX Runtime's form. " + _QUANTIZED
    ),
    ("UNSUPPORTED_NODE", "ConvInteger"): Meaning(
        _INTEGER, "an integer convolution in ONNX Runtime's form. " + _QUANTIZED
    ),
    ("UNSUPPORTED_NODE", "QLinearMatMul"): Meaning(
        _INTEGER, "a quantized operator (QOperator format). " + _QUANTIZED
    ),
    ("UNSUPPORTED_NODE", "QLinearConv"): Meaning(
        _INTEGER, "a quantized operator (QOperator format). " + _QUANTIZED
    ),
    ("UNSUPPORTED_NODE", "MatMulNBits"): Meaning(
        _FOREIGN, "4-bit weights in ONNX Runtime's form. " + _REEXPORT
    ),
    ("UNSUPPORTED_NODE", "DynamicQuantizeMatMul"): Meaning(
        _FOREIGN, "an operator of ONNX Runtime. " + _QUANTIZED
    ),
    ("UNSUPPORTED_NODE", _ANY): Meaning(
        "tensorrt-missing-operator", "TensorRT has no such operator. " + _REEXPORT
    ),
    ("UNSUPPORTED_NODE_ATTR", _ANY): Meaning(
        "tensorrt-attribute", "TensorRT does not take this operator with these attributes."
    ),
    ("UNSUPPORTED_NODE_INPUT", _ANY): Meaning(
        "tensorrt-input", "TensorRT does not take this operator with these inputs."
    ),
    ("UNSUPPORTED_NODE_DATATYPE", _ANY): Meaning(
        "tensorrt-refused-type",
        "TensorRT does not take this operator with this data type."
        " Precision is decided at export: onnx: {target: tensorrt, dtype: fp32 or fp16}.",
    ),
    ("UNSUPPORTED_NODE_DYNAMIC", _ANY): Meaning(
        "tensorrt-dynamic-shape", "TensorRT does not take this operator with a dynamic shape."
    ),
    ("UNSUPPORTED_NODE_SHAPE", _ANY): Meaning(
        "tensorrt-shape", "TensorRT does not take this operator with this shape."
    ),
    ("MODEL_DESERIALIZE_FAILED", _ANY): Meaning(
        "damaged-file", "the file is cut off or is no ONNX file. Run again with --rebuild."
    ),
    ("INVALID_GRAPH", _ANY): Meaning("invalid-graph", "the graph is not valid ONNX."),
    ("REFIT_FAILED", _ANY): Meaning("tensorrt-refit-failed", "weights could not be replaced in the engine."),
}
_NOT_READ = Meaning("tensorrt-parser-failed", "TensorRT cannot read it.")
# part of a description or a log line -> what it means; the first that fits wins
_BY_TEXT: tuple[tuple[str, Meaning], ...] = (
    (
        "Non-zero zero point",
        Meaning("tensorrt-zero-point", "asymmetric quantization; TensorRT wants zero point 0. " + _REEXPORT),
    ),
    (
        "has type Int32 but must have type",
        Meaning(
            "tensorrt-quantized-bias",
            "a quantized bias; TensorRT quantizes weights and activations only. " + _REEXPORT,
        ),
    ),
    (
        "must have same input types",
        Meaning(
            "tensorrt-mixed-types",
            "two data types meet in one operator; a Cast is missing. Precision is decided at export: "
            + _REEXPORT,
        ),
    ),
    ("Plugin not found", Meaning(_FOREIGN, "an operator outside of the ONNX standard. " + _REEXPORT)),
    (
        "no optimization profile has been defined",
        Meaning(
            "tensorrt-no-profile",
            "the graph has dynamic inputs, but no lengths are known. Give them with tensorrt:"
            " {lengths: ...}.",
        ),
    ),
    (
        "is missing dimensions in profile",
        Meaning(
            "tensorrt-profile-missing-input",
            "an input of the graph has no entry in the optimization profile.",
        ),
    ),
    (
        "values are not self-consistent",
        Meaning(
            "tensorrt-profile-conflict",
            "inputs that share a dimension got different sizes in the profile.",
        ),
    ),
    (
        "Cuda failure",
        Meaning(
            "cuda-failed", "CUDA failed; see whether nvidia-smi answers and whether the driver is new enough."
        ),
    ),
    (
        "out of memory",
        Meaning(
            "out-of-memory",
            "the GPU's memory is full. Lower tensorrt: {workspace_mib: ...} or max_batch_size.",
        ),
    ),
    (
        "insufficient workspace",
        Meaning(
            "tensorrt-small-workspace", "no kernel fits the workspace. Raise tensorrt: {workspace_mib: ...}."
        ),
    ),
    (
        "Could not find any implementation",
        Meaning("tensorrt-no-kernel", "no kernel computes this node on this GPU within the workspace."),
    ),
)


# part of a warning -> what it means; the engine is built all the same
_WARNINGS: tuple[tuple[str, Meaning], ...] = (
    (
        "kMAX values are not self-consistent",
        Meaning(
            "tensorrt-profile-conflict",
            "the largest sizes of the profile do not fit each other, so inputs of that size may fail. Lower"
            " tensorrt: {lengths: ...} or max_new_tokens.",
        ),
    ),
    (
        "layernorm after self-attention with FP16",
        Meaning(
            "tensorrt-norm-in-half",
            "a norm is computed in fp16, where the squares of values above 256 are infinite. Compare its"
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


def explain(error: ParserError, graph: str) -> Message:
    """Return the error of the graph's file as a message that says which node, why, and what to do."""
    place = f"node '{error.node}' ({error.operator}): " if error.node or error.operator else ""
    meaning = (
        _from_text(error.description)
        or _BY_CODE.get((error.code, error.operator))
        or _BY_CODE.get((error.code, _ANY))
        or _NOT_READ
    )
    return _refused(meaning.code, f"{place}{meaning.text}{_quote(error.code, error.description)}", graph)


def explain_log(lines: Iterable[str], graph: str) -> Message:
    """Return what the log's errors mean; the lines themselves where nothing is known about them."""
    kept = list(dict.fromkeys(line for line in lines if line))
    for line in kept:
        meaning = _from_text(line)
        if meaning is not None:
            return _refused(meaning.code, f"{meaning.text}{_quote('builder', line)}", graph)
    said = " / ".join(kept[:3]) or "nothing in its log"
    text = f"TensorRT could not build an engine. It said: {said}"
    return _refused("tensorrt-build-failed", text, graph)


def explain_warning(line: str) -> Message:
    """Return what a warning of the builder means; the line itself where nothing is known about it."""
    meaning = next((meaning for part, meaning in _WARNINGS if part in line), None)
    if meaning is None:
        return warning("tensorrt-warning", line)
    return warning(meaning.code, f"{meaning.text}{_quote('builder', line)}")


def _refused(code: str, text: str, graph: str) -> Message:
    return Message(code=code, severity="error", message=text, file=graph)


def _from_text(text: str) -> Meaning | None:
    lowered = text.lower()
    return next((meaning for part, meaning in _BY_TEXT if part.lower() in lowered), None)


def _quote(code: str, text: str) -> str:
    """Return TensorRT's own words, for searching; `false` and nothing say nothing."""
    text = " ".join(text.split())
    return f" [{code}]" if text in ("", "false") else f" [{code}: {text[:200]}]"
