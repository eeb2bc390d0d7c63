import numpy as np
import pytest

from smelt.core.errors import ParityError
from smelt.export.parity.compare import check_parity

EXPECTED = np.array([[1.0, -1.0], [1.0, -1.0]])


def test_failed_parity_names_graph_output_difference_and_tolerance():
    other = EXPECTED + np.array([[0, 0.5], [0, 0]])
    with pytest.raises(
        ParityError, match=r"decoder: logits differs .* largest difference 0\.5 .* allowed 0\.001 \(fp32\)"
    ):
        check_parity("decoder", "logits", EXPECTED, other, "fp32")
    with pytest.raises(ParityError, match=r"mean difference 0\.125 .* allowed 0\.001 \(its fp16 weights in"):
        check_parity("decoder", "logits", EXPECTED, other, "rounded")


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused_whatever_the_tolerance(wrong):
    with pytest.raises(ParityError, match="not finite"):
        check_parity("decoder", "logits", EXPECTED, EXPECTED * wrong, "int8-dynamic")


def test_another_shape_is_refused():
    with pytest.raises(ParityError, match=r"the shape \(1, 2\), its parent gives \(2, 2\)"):
        check_parity("decoder", "logits", EXPECTED, EXPECTED[:1], "int8-dynamic")


def test_differences_are_told_when_they_are_allowed():
    found = check_parity("decoder", "logits", EXPECTED, EXPECTED + np.array([[0, 2e-4], [0, 0]]), "fp32")
    assert found == pytest.approx({"largest": 2e-4, "mean": 5e-5, "agreement": 1.0})


def test_a_sentences_vector_may_drift_further_than_logits_may():
    other = EXPECTED + 0.1
    with pytest.raises(ParityError, match=r"mean difference 0\.1 .* allowed 0\.05"):
        check_parity("model", "logits", EXPECTED, other, "int8-dynamic")
    check_parity("model", "sentence_embedding", EXPECTED, other, "int8-dynamic")
    with pytest.raises(ParityError, match=r"mean difference 0\.2 .* allowed 0\.15"):
        check_parity("model", "sentence_embedding", EXPECTED, EXPECTED + 0.2, "int8-dynamic")
    with pytest.raises(ParityError, match=r"allowed 0\.04"):
        check_parity("model", "sentence_embedding", EXPECTED, other, "int4")
    with pytest.raises(ParityError, match=r"allowed 0\.001"):
        check_parity("model", "sentence_embedding", EXPECTED, other, "fp32")
