import numpy as np
import pytest

from smelt.core.errors import ParityError
from smelt.export.parity.references import check_output
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick

EXPECTED = np.array([[1.0, -1.0], [1.0, -1.0]])


def test_failed_parity_names_graph_output_difference_and_tolerance():
    other = EXPECTED + np.array([[0, 0.5], [0, 0]])
    with raises_code("parity-failed", ParityError) as caught:
        check_output("decoder", "logits", EXPECTED, other, "fp32")
    assert caught.value.file == "decoder.onnx"
    assert "logits" in str(caught.value)
    assert "0.5 " in str(caught.value)
    assert "0.001 (fp32)" in str(caught.value)
    with raises_code("parity-failed", ParityError) as caught:
        check_output("decoder", "logits", EXPECTED, other, "rounded")
    assert "0.125 " in str(caught.value)
    assert "0.001 " in str(caught.value)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused_whatever_the_tolerance(wrong):
    with raises_code("non-finite-outputs", ParityError):
        check_output("decoder", "logits", EXPECTED, EXPECTED * wrong, "int8-dynamic")


def test_another_shape_is_refused():
    with raises_code("shape-mismatch", ParityError) as caught:
        check_output("decoder", "logits", EXPECTED, EXPECTED[:1], "int8-dynamic")
    assert "(1, 2)" in str(caught.value)
    assert "(2, 2)" in str(caught.value)


def test_differences_are_told_when_they_are_allowed():
    found = check_output("decoder", "logits", EXPECTED, EXPECTED + np.array([[0, 2e-4], [0, 0]]), "fp32")
    assert found == pytest.approx({"largest": 2e-4, "mean": 5e-5, "agreement": 1.0})


def test_a_sentences_vector_may_drift_further_than_logits_may():
    other = EXPECTED + 0.1
    with raises_code("parity-failed", ParityError) as caught:
        check_output("model", "logits", EXPECTED, other, "int8-dynamic")
    assert "0.1 " in str(caught.value)
    assert " 0.05 " in str(caught.value)
    check_output("model", "sentence_embedding", EXPECTED, other, "int8-dynamic")
    with raises_code("parity-failed", ParityError) as caught:
        check_output("model", "sentence_embedding", EXPECTED, EXPECTED + 0.2, "int8-dynamic")
    assert "0.2 " in str(caught.value)
    assert " 0.15 " in str(caught.value)
    with raises_code("parity-failed", ParityError) as caught:
        check_output("model", "sentence_embedding", EXPECTED, other, "int4")
    assert " 0.04 " in str(caught.value)
    with raises_code("parity-failed", ParityError) as caught:
        check_output("model", "sentence_embedding", EXPECTED, other, "fp32")
    assert " 0.001 " in str(caught.value)
