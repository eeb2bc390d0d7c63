import numpy as np
import pytest

from smelt.runtimes.single_call_runners import predictions_from_logits

pytestmark = pytest.mark.quick


def test_predictions_are_softmax_sigmoid_or_the_number():
    from scipy.special import expit, softmax

    names = {"id2label": {"0": "a", "1": "b", "2": "c"}}
    logits = np.array([[1.0, 3.0, -2.0], [-1.0, -2.0, -3.0]], dtype=np.float32)
    single = predictions_from_logits(logits, names)
    assert [p.label for p in single] == ["b", "a"]
    np.testing.assert_allclose(
        [[*p.probabilities.values()] for p in single], softmax(logits, axis=1), rtol=1e-6
    )
    several = predictions_from_logits(logits, names | {"problem_type": "multi_label_classification"})
    assert [p.label for p in several] == [("a", "b"), ()]
    np.testing.assert_allclose([[*p.probabilities.values()] for p in several], expit(logits), rtol=1e-6)
    (number,) = predictions_from_logits(np.array([[0.25]], dtype=np.float32), {"id2label": {"0": "x"}})
    assert (number.label, number.probabilities) == (0.25, {})
