import pytest

from smelt.export.tensorrt.build_engine import ParserError, explain_log, explain_parser_error, explain_warning

pytestmark = pytest.mark.quick

# What TensorRT 11.4 said to graphs that were made to fail.
SEEN = [
    (ParserError("UNSUPPORTED_NODE", "false", "node_3", "DynamicQuantizeLinear"),
     "tensorrt-dynamic-quantization"),
    (ParserError("UNSUPPORTED_NODE", "Plugin not found, are the plugin name, version, and", "m", "X"),
     "tensorrt-foreign-operator"),
    (ParserError("INVALID_NODE", "Non-zero zero point is not supported for asymmetric", "q",
     "QuantizeLinear"), "tensorrt-zero-point"),
    (ParserError("INVALID_NODE", "input has type Int32 but must have type FP8, FP4, Int4, Int8, or UInt8",
     "b", "DequantizeLinear"), "tensorrt-quantized-bias"),
    (ParserError("INTERNAL_ERROR", "IMatrixMultiplyLayer must have same input types", "d", "MatMul"),
     "tensorrt-mixed-types"),
    (ParserError("MODEL_DESERIALIZE_FAILED", "", "", ""), "damaged-file"),
    (ParserError("SOMETHING_NEW", "", "n", "Op"), "tensorrt-parser-failed"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "code"), SEEN)
def test_parser_errors_name_graph_node_and_reason(error: ParserError, code: str) -> None:
    message = explain_parser_error(error, "model.onnx")
    assert (message.code, message.severity, message.file) == (code, "error", "model.onnx")
    assert message.message.startswith(f"node '{error.node}' ({error.operator}): ") is bool(error.node)
    assert f" [{error.code}" in message.message
    assert "false" not in message.message


@pytest.mark.parametrize(("line", "code"), [
    ("Network has dynamic or shape inputs, but no optimization profile has been defined.",
     "tensorrt-no-profile"),
    ("Dynamic input tensor input_ids is missing dimensions in profile 0", "tensorrt-profile-missing-input"),
    ("Profile kOPT values are not self-consistent", "tensorrt-profile-conflict"),
    ("a line nobody has seen", "tensorrt-build-failed"),
])  # fmt: skip
def test_build_errors_are_read_from_the_log(line: str, code: str) -> None:
    message = explain_log(["something before", line], "model.onnx")
    assert (message.code, message.severity, message.file) == (code, "error", "model.onnx")
    assert line in message.message


def test_multiline_messages_are_quoted_on_one_line() -> None:
    error = ParserError("INVALID_NODE", "Invalid Node - dense\nmust have same input types", "dense", "MatMul")
    message = explain_parser_error(error, "m.onnx")
    assert message.message.endswith("[INVALID_NODE: Invalid Node - dense must have same input types]")


@pytest.mark.parametrize(("line", "code"), [
    ("Profile kMAX values are not self-consistent. sum: 64 != 16", "tensorrt-profile-conflict"),
    ("Running layernorm after self-attention with FP16 Reduce or Pow may cause overflow.",
     "tensorrt-norm-in-half"),
])  # fmt: skip
def test_builder_warnings_are_explained_and_quoted(line: str, code: str) -> None:
    message = explain_warning(line)
    assert (message.code, message.severity) == (code, "warning")
    assert message.message.endswith(f" [builder: {line}]")
    unexplained = explain_warning("something else")
    assert (unexplained.code, "something else" in unexplained.message) == ("tensorrt-warning", True)


def test_empty_log_raises_error() -> None:
    assert explain_log([], "m").code == "tensorrt-build-failed"
