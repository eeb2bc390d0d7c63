"""Within tolerance, against numpy.allclose."""

import numpy as np
import pytest

from smelt.core.errors import InputError
from smelt.evaluate.metrics.allclose import ALLCLOSE
from smelt.evaluate.tensor_quality import score_outputs
from tests.support.expected_errors import raises_code

EXPECTED = {"a": np.array([1.0, -100.0]), "n": np.array(3)}


def score(samples: list[dict[str, np.ndarray]], **settings: object) -> float:
    """Return the score of these outputs against `EXPECTED`, %."""
    scores = score_outputs(
        ["allclose"], samples, [EXPECTED] * len(samples), "0" * 64, "r", {}, settings={"allclose": settings}
    )
    return scores["allclose"].value


def test_share_of_close_samples_equals_numpy() -> None:
    random = np.random.default_rng(0)
    values = [EXPECTED["a"] * (1 + random.normal(size=2) / 50) for _ in range(50)]
    close = [np.allclose(value, EXPECTED["a"], rtol=0.02, atol=0.001) for value in values]
    assert 0 < sum(close) < 50
    samples = [{"a": value, "n": np.array(3)} for value in values]
    assert score(samples, rtol=0.02) == pytest.approx(100 * np.mean(close))


def test_output_has_tolerance_of_its_own() -> None:
    samples = [{"a": np.array([1.0, -99.0]), "n": np.array(3)}]
    assert (score(samples, rtol=1e-3), score(samples, rtol=1e-3, outputs={"a": {"atol": 2}})) == (0, 100)


@pytest.mark.parametrize("change", [
    {"n": np.array(4)}, {"a": np.array([1.0])}, {"a": np.array([1.0, np.nan])},
    {"a": np.array([1.0, -np.inf])},
])  # fmt: skip
def test_other_integers_shapes_and_infinite_values_are_not_close(change: dict[str, np.ndarray]) -> None:
    assert score([EXPECTED | change, EXPECTED], rtol=1e-2) == 50


def test_output_without_tolerance_is_not_compared_and_others_have_common_one() -> None:
    samples = [{"a": np.array([1.0, -99.0]), "n": np.array(4)}]
    assert score(samples, rtol=0.02, outputs={"n": None}) == 100
    assert score(samples, rtol=0.02, outputs={"n": None, "a": {"atol": 0.1}}) == 100  # rtol is the common one
    assert score(samples, rtol=0.001, outputs={"n": None, "a": {"atol": 0.1}}) == 0


def test_tolerance_of_unknown_output_is_refused() -> None:
    settings = {"outputs": {"b": {"rtol": 0.1}}}
    ALLCLOSE.check_graph({"outputs": {"a": {}}}, {"a": (1,)})
    with raises_code("unknown-output", InputError):
        ALLCLOSE.check_graph(settings, {"a": (1,)})
