"""From what TensorRT's parser and builder say to what is wrong and what to do.

The parser answers with a code, an operator and a description that is often an assertion's text or
even just `false`; the builder answers with lines in the log. Seen with TensorRT 11.4.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_ANY = "*"
_REEXPORT = "Export again with onnx: {target: tensorrt}."
_QUANTIZED = "TensorRT takes int8 as QuantizeLinear/DequantizeLinear pairs only. " + _REEXPORT

# (code, operator) -> what is wrong and what to do; the operator `*` stands for all others.
_BY_CODE: dict[tuple[str, str], str] = {
    ("UNSUPPORTED_NODE", "DynamicQuantizeLinear"): "activations quantized at run time. " + _QUANTIZED,
    ("UNSUPPORTED_NODE", "MatMulInteger"): "an integer product in ONNX Runtime's form. " + _QUANTIZED,
    ("UNSUPPORTED_NODE", "ConvInteger"): "an integer convolution in ONNX Runtime's form. " + _QUANTIZED,
    ("UNSUPPORTED_NODE", "QLinearMatMul"): "a quantized operator (QOperator format). " + _QUANTIZED,
    ("UNSUPPORTED_NODE", "QLinearConv"): "a quantized operator (QOperator format). " + _QUANTIZED,
    ("UNSUPPORTED_NODE", "MatMulNBits"): "4-bit weights in ONNX Runtime's form. " + _REEXPORT,
    ("UNSUPPORTED_NODE", "DynamicQuantizeMatMul"): "an operator of ONNX Runtime. " + _QUANTIZED,
    ("UNSUPPORTED_NODE", _ANY): "TensorRT has no such operator. " + _REEXPORT,
    ("UNSUPPORTED_NODE_ATTR", _ANY): "TensorRT does not take this operator with these attributes.",
    ("UNSUPPORTED_NODE_INPUT", _ANY): "TensorRT does not take this operator with these inputs.",
    ("UNSUPPORTED_NODE_DATATYPE", _ANY): "TensorRT does not take this operator with this data type."
    " Precision is decided at export: onnx: {target: tensorrt, dtype: fp32 or fp16}.",
    ("UNSUPPORTED_NODE_DYNAMIC", _ANY): "TensorRT does not take this operator with a dynamic shape.",
    ("UNSUPPORTED_NODE_SHAPE", _ANY): "TensorRT does not take this operator with this shape.",
    (
        "MODEL_DESERIALIZE_FAILED",
        _ANY,
    ): "the file is cut off or is no ONNX file. Run again with --fresh.",
    ("INVALID_GRAPH", _ANY): "the graph is not valid ONNX.",
    ("REFIT_FAILED", _ANY): "weights could not be replaced in the engine.",
}
# part of a description or a log line -> what is wrong and what to do; the first that fits wins
_BY_TEXT: tuple[tuple[str, str], ...] = (
    ("Non-zero zero point", "asymmetric quantization; TensorRT wants zero point 0. " + _REEXPORT),
    (
        "has type Int32 but must have type",
        "a quantized bias; TensorRT quantizes weights and activations only. " + _REEXPORT,
    ),
    (
        "must have same input types",
        "two data types meet in one operator; a Cast is missing. Precision is decided at export: "
        + _REEXPORT,
    ),
    ("Plugin not found", "an operator outside of the ONNX standard. " + _REEXPORT),
    (
        "no optimization profile has been defined",
        "the graph has dynamic inputs, but no lengths are known. Give them with tensorrt: {lengths: ...}.",
    ),
    ("is missing dimensions in profile", "an input of the graph has no entry in the optimization profile."),
    ("values are not self-consistent", "inputs that share a dimension got different sizes in the profile."),
    (
        "Cuda failure",
        "CUDA failed; see whether nvidia-smi answers and whether the driver is new enough.",
    ),
    ("out of memory", "the GPU's memory is full. Lower tensorrt: {workspace_mib: ...} or max_batch_size."),
    (
        "insufficient workspace",
        "no kernel fits the workspace. Raise tensorrt: {workspace_mib: ...}.",
    ),
    ("Could not find any implementation", "no kernel computes this node on this GPU within the workspace."),
)


# part of a warning -> what it means; the engine is built all the same
_WARNINGS: tuple[tuple[str, str], ...] = (
    (
        "kMAX values are not self-consistent",
        "the largest sizes of the profile do not fit each other, so inputs of that size may fail. Lower"
        " tensorrt: {lengths: ...} or max_new_tokens.",
    ),
    (
        "layernorm after self-attention with FP16",
        "a norm is computed in fp16, where the squares of values above 256 are infinite. Compare its scores"
        " with those of dtype: fp32.",
    ),
)


@dataclass(frozen=True)
class ParserError:
    """One error of TensorRT's ONNX parser, as read from its `IParserError`."""

    code: str
    description: str
    node: str
    operator: str


def explain(error: ParserError, graph: str) -> str:
    """Return a sentence that says which node, why, and what to do."""
    place = f"{graph}: node '{error.node}' ({error.operator})" if error.node or error.operator else graph
    reason = _from_text(error.description)
    if reason is None:
        specific = _BY_CODE.get((error.code, error.operator))
        reason = specific or _BY_CODE.get((error.code, _ANY)) or "TensorRT cannot read it."
    return f"{place}: {reason}{_quote(error.code, error.description)}"


def explain_log(lines: Iterable[str], graph: str) -> str:
    """Return what the log's errors mean; the lines themselves where nothing is known about them."""
    kept = list(dict.fromkeys(line for line in lines if line))
    for line in kept:
        reason = _from_text(line)
        if reason is not None:
            return f"{graph}: {reason}{_quote('builder', line)}"
    said = " / ".join(kept[:3]) or "nothing in its log"
    return f"{graph}: TensorRT could not build an engine. It said: {said}"


def explain_warning(line: str) -> str:
    """Return what a warning of the builder means; the line itself where nothing is known about it."""
    reason = next((reason for part, reason in _WARNINGS if part in line), None)
    return line if reason is None else f"{reason}{_quote('builder', line)}"


def _from_text(text: str) -> str | None:
    lowered = text.lower()
    return next((reason for part, reason in _BY_TEXT if part.lower() in lowered), None)


def _quote(code: str, text: str) -> str:
    """Return TensorRT's own words, for searching; `false` and nothing say nothing."""
    text = " ".join(text.split())
    return f" [{code}]" if text in ("", "false") else f" [{code}: {text[:200]}]"
