import numpy as np
import pytest

from smelt.core.errors import ParityError
from smelt.export.parity.references import check_output
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick

EXPECTED = np.array([[1.0, -1.0], [1.0, -1.0]])


def test_failed_parity_names_graph_output_difference_and_tolerance():
    other = EXPECTED + np.array([[0, 0.5], [0, 0]])
    with raises_code("parity-failed", ParityError) as excinfo:
        check_output("decoder", "logits", EXPECTED, other, "fp32")
    assert excinfo.value.file == "decoder.onnx"
    assert "logits" in str(excinfo.value)
    assert "0.5 " in str(excinfo.value)
    assert "0.001 (fp32)" in str(excinfo.value)
    with raises_code("parity-failed", ParityError) as excinfo:
        check_output("decoder", "logits", EXPECTED, other, "rounded")
    assert "0.125 " in str(excinfo.value)
    assert "0.001 " in str(excinfo.value)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_non_finite_values_are_rejected_at_any_tolerance(wrong):
    with raises_code("non-finite-outputs", ParityError):
        check_output("decoder", "logits", EXPECTED, EXPECTED * wrong, "int8-dynamic")


def test_different_shape_is_rejected():
    with raises_code("shape-mismatch", ParityError) as excinfo:
        check_output("decoder", "logits", EXPECTED, EXPECTED[:1], "int8-dynamic")
    assert "(1, 2)" in str(excinfo.value)
    assert "(2, 2)" in str(excinfo.value)


def test_allowed_differences_are_returned():
    differences = check_output(
        "decoder", "logits", EXPECTED, EXPECTED + np.array([[0, 2e-4], [0, 0]]), "fp32"
    )
    assert differences == pytest.approx({"largest": 2e-4, "mean": 5e-5, "agreement": 1.0})


def test_embedding_tolerance_is_larger_than_logits_tolerance():
    other = EXPECTED + 0.1
    with raises_code("parity-failed", ParityError) as excinfo:
        check_output("model", "logits", EXPECTED, other, "int8-dynamic")
    assert "0.1 " in str(excinfo.value)
    assert " 0.05 " in str(excinfo.value)
    check_output("model", "sentence_embedding", EXPECTED, other, "int8-dynamic")
    with raises_code("parity-failed", ParityError) as excinfo:
        check_output("model", "sentence_embedding", EXPECTED, EXPECTED + 0.2, "int8-dynamic")
    assert "0.2 " in str(excinfo.value)
    assert " 0.15 " in str(excinfo.value)
    with raises_code("parity-failed", ParityError) as excinfo:
        check_output("model", "sentence_embedding", EXPECTED, other, "int4")
    assert " 0.04 " in str(excinfo.value)
    with raises_code("parity-failed", ParityError) as excinfo:
        check_output("model", "sentence_embedding", EXPECTED, other, "fp32")
    assert " 0.001 " in str(excinfo.value)
