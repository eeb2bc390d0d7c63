import pytest

from smelt.export.tensorrt.messages import ParserError, explain, explain_log, explain_warning

# What TensorRT 11.4 said to graphs that were made to fail.
SEEN = [
    (
        ParserError("UNSUPPORTED_NODE", "false", "node_3", "DynamicQuantizeLinear"),
        "model.onnx: node 'node_3' (DynamicQuantizeLinear): activations quantized at run time",
    ),
    (
        ParserError("UNSUPPORTED_NODE", "Plugin not found, are the plugin name, version, and", "m", "X"),
        "an operator outside of the ONNX standard",
    ),
    (
        ParserError(
            "INVALID_NODE", "Non-zero zero point is not supported for asymmetric", "q", "QuantizeLinear"
        ),
        "asymmetric quantization; TensorRT wants zero point 0",
    ),
    (
        ParserError(
            "INVALID_NODE",
            "input has type Int32 but must have type FP8, FP4, Int4, Int8, or UInt8",
            "b",
            "DequantizeLinear",
        ),
        "a quantized bias",
    ),
    (
        ParserError("INTERNAL_ERROR", "IMatrixMultiplyLayer must have same input types", "d", "MatMul"),
        "two data types meet in one operator",
    ),
    (
        ParserError("MODEL_DESERIALIZE_FAILED", "", "", ""),
        "model.onnx: the file is cut off or is no ONNX file",
    ),
    (ParserError("SOMETHING_NEW", "", "n", "Op"), "node 'n' (Op): TensorRT cannot read it. [SOMETHING_NEW]"),
]


@pytest.mark.parametrize(("error", "words"), SEEN)
def test_parser_errors_name_node_reason_and_remedy(error: ParserError, words: str) -> None:
    said = explain(error, "model.onnx")
    assert words in said
    assert "false" not in said


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "Network has dynamic or shape inputs, but no optimization profile has been defined.",
            "Give them with tensorrt: {lengths",
        ),
        (
            "Dynamic input tensor input_ids is missing dimensions in profile 0",
            "an input of the graph has no entry in the optimization profile",
        ),
        ("Profile kOPT values are not self-consistent", "inputs that share a dimension got different sizes"),
        ("a line nobody has seen", "It said: a line nobody has seen"),
    ],
)
def test_build_errors_come_from_the_log(line: str, words: str) -> None:
    assert words in explain_log(["something before", line] if "nobody" not in line else [line], "model.onnx")


def test_words_of_several_lines_are_quoted_on_one() -> None:
    error = ParserError("INVALID_NODE", "Invalid Node - dense\nmust have same input types", "dense", "MatMul")
    said = explain(error, "m.onnx")
    assert said.endswith("[INVALID_NODE: Invalid Node - dense must have same input types]")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "Profile kMAX values are not self-consistent. sum: 64 != 16",
            "the largest sizes of the profile do not fit each other, so inputs of that size may fail.",
        ),
        (
            "Running layernorm after self-attention with FP16 Reduce or Pow may cause overflow.",
            "a norm is computed in fp16, where the squares of values above 256 are infinite.",
        ),
    ],
)
def test_warnings_of_the_builder_are_explained_and_quoted(line: str, words: str) -> None:
    said = explain_warning(line)
    assert said.startswith(words)
    assert said.endswith(f"[builder: {line}]")
    assert explain_warning("something else") == "something else"


def test_an_empty_log_is_told_as_such() -> None:
    assert explain_log([], "m").endswith("It said: nothing in its log")
