"""Agreement of outputs, against numbers that are computed by hand."""

import re

import numpy as np
import pytest

from smelt.core.errors import InputError, RunError
from smelt.evaluate.metrics.agreement import TOP1
from smelt.evaluate.tensor_quality import low_agreement_reason, require_finite_outputs, score_outputs
from tests.support.expected_errors import raises_code


def scores(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """Score outputs whose axis 0 are rows."""
    sample_rows = [[{k: v[i] for k, v in side.items()} for i in range(2)] for side in (got, expected)]
    output_scores = score_outputs(
        ["agreement", "top1", "relative_error"], *sample_rows, key="0" * 64, rows="r", class_axes={"a": -1}
    )
    return {name: score.value for name, score in output_scores.items()}


def test_non_finite_outputs_agree_with_themselves() -> None:
    outputs = {"a": np.array([[1.0, np.inf], [np.nan, 0.0]]), "n": np.array([3, 4])}
    assert scores(outputs, outputs) == {"agreement": 100, "top1": 100, "relative_error": 0}


def test_scores_equal_hand_computed_values() -> None:
    expected = {"a": np.array([[3.0, 4.0], [1.0, 0.0]])}
    actual = {"a": np.array([[4.0, 3.0], [1.0, 0.0]])}
    # the cosine of (3, 4) and (4, 3) is 24/25; they differ by 1 of 4 and choose another place
    assert scores(actual, expected) == pytest.approx({"agreement": 98, "top1": 50, "relative_error": 12.5})


def test_worst_output_determines_score() -> None:
    expected = {"a": np.array([[3.0, 4.0], [1.0, 0.0]]), "b": np.array([[1.0], [1.0]])}
    actual = {"a": expected["a"], "b": np.array([[-1.0], [1.0]])}
    assert scores(actual, expected) == pytest.approx({"agreement": 0, "top1": 100, "relative_error": 100})


@pytest.mark.parametrize(
    "got",
    [
        {"a": np.array([[np.nan, 4.0], [np.inf, 0.0]])},  # not finite where the reference is
        {"a": np.array([[3.0, 4.0, 0.0], [1.0, 0.0, 0.0]])},  # of another shape
    ],
)
def test_incomparable_outputs_have_zero_agreement(got: dict[str, np.ndarray]) -> None:
    expected = {"a": np.array([[3.0, 4.0], [1.0, 0.0]])}
    assert scores(got, expected) == {"agreement": 0, "top1": 0, "relative_error": 100}


def test_integers_and_strings_must_be_equal() -> None:
    expected = {"n": np.array([3, 4]), "t": np.array(["a", "b"])}
    assert scores({**expected, "n": np.array([3, 5])}, expected)["top1"] == 50
    assert scores({**expected, "t": np.array(["a", "c"])}, expected)["top1"] == 50


def test_scalar_agreement_uses_relative_size() -> None:
    expected = {"price": np.array([[100.0], [-2.0]])}
    assert scores({"price": np.array([[110.0], [-1.0]])}, expected) == pytest.approx(
        {"agreement": (100 * 100 / 110 + 50) / 2, "relative_error": 30}
    )
    assert scores({"price": np.array([[0.0], [2.0]])}, expected)["agreement"] == -50
    label = {"label": np.array([3, 4])}
    assert scores({"label": np.array([3, 5])}, label)["agreement"] == 50


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_agreement_of_huge_values_does_not_overflow(size: float) -> None:
    expected = {"a": size * np.array([[3.0, 4.0], [1.0, 0.0]])}
    actual = {"a": size * np.array([[4.0, 3.0], [1.0, 0.0]])}
    assert scores(actual, expected)["agreement"] == pytest.approx(98)


def test_unknown_metrics_and_missing_samples_are_rejected() -> None:
    with raises_code("unknown-metric", InputError) as excinfo:
        score_outputs(["agrement"], [{}], [{}], "k", "r", {})
    assert "'agreement'?" in str(excinfo.value)
    with raises_code("empty-data", InputError):
        score_outputs(["agreement"], [], [], "k", "r", {})


def test_one_sided_non_finite_samples_are_reported_with_inputs() -> None:
    expected = [{"a": np.array([1.0, 2.0])} for _ in range(4)]
    actual = [{"a": np.array([np.nan if row_index in (1, 3) else 1.0, 2.0])} for row_index in range(4)]
    inputs = [{"x": np.array([value])} for value in (0.0, np.inf, np.nan, 0.0)]
    reason = low_agreement_reason(actual, expected, inputs)
    assert re.findall(r"[\d\[\], ]*\d\]?", reason)[:3] == [" 2", " 4", " [1, 3]"]
    assert "x[1]" in reason
    assert low_agreement_reason(actual, actual, inputs) is None  # not finite on both sides


def test_only_first_non_finite_samples_are_listed() -> None:
    nan_outputs, finite_outputs = [{"a": np.array([np.nan])}] * 9, [{"a": np.array([1.0])}] * 9
    assert "[0, 1, 2, 3, 4 and 4 more]" in str(low_agreement_reason(nan_outputs, finite_outputs, []))


def test_new_nan_outputs_are_not_scored():
    """Of fed rows that are numbers; infinities, which masks leave, are values like others."""
    inputs = [{"x": np.array([value])} for value in (0.0, np.nan, 0.0, 0.0)]
    valid_outputs = [{"a": np.array([1.0, np.nan, -np.inf])}] * 4
    excused_outputs = [*valid_outputs[:1], {"a": np.array([np.nan, np.nan, 0.0])}, *valid_outputs[2:]]
    require_finite_outputs(valid_outputs, valid_outputs, inputs)
    require_finite_outputs(excused_outputs, valid_outputs, inputs)  # the row that was fed is no number
    require_finite_outputs([{"a": np.array([np.inf, np.nan, 0.0])}] * 4, valid_outputs, inputs)
    require_finite_outputs(
        [{"a": np.array([np.nan])}] * 4, valid_outputs, inputs
    )  # of another shape: it agrees in nothing
    invalid_outputs = [*valid_outputs[:2], {"a": np.array([np.nan, np.nan, -np.inf])}, *valid_outputs[3:]]
    with raises_code("non-finite-outputs", RunError):
        require_finite_outputs(invalid_outputs, valid_outputs, inputs)


def test_top1_uses_class_axis_of_each_output() -> None:
    """The argmax along the width of a heat map is no decision; a segmentation chooses along its channels."""
    expected = {"map": np.zeros((2, 3, 4, 4)), "y": np.array([[3.0, 4.0], [1.0, 0.0]])}
    expected["map"][:, 0] = 0.25
    expected["map"][0, 1, 2, 3] = expected["map"][1, 0, 0, 0] = 1
    actual = {"map": expected["map"].copy(), "y": expected["y"]}
    actual["map"][0, 1, 2, 0] = 1.5  # another column, and the same channel; a new one in the other sample
    actual["map"][1, 2, 1, 1] = 0.5
    sample_rows = [[{k: v[i] for k, v in side.items()} for i in range(2)] for side in (actual, expected)]

    def top1(**class_axes: int) -> float | None:
        score = score_outputs(["top1"], *sample_rows, key="0" * 64, rows="r", class_axes=class_axes).get(
            "top1"
        )
        return None if score is None else score.value

    assert (top1(y=-1), top1(map=-3), top1()) == (100, 0, None)


@pytest.mark.parametrize(("second_score", "expected"), [(9.991, 100), (9.98, 0), (-10.0, 0)])
def test_near_tie_is_no_changed_decision(second_score: float, expected: float) -> None:
    """A difference below float16's precision, 0.001 of the largest magnitude."""
    original, swapped = np.array([10.0, second_score]), np.array([1.0, 2.0])
    score = score_outputs(["top1"], [{"y": swapped}], [{"y": original}], "0" * 64, "r", {"y": -1})
    assert score["top1"].value == expected
    strict = score_outputs(
        ["top1"], [{"y": swapped}], [{"y": original}], "0" * 64, "r", {"y": -1}, settings={"top1": {"tie": 0}}
    )
    assert strict["top1"].value == 0


def test_top1_uses_class_axis_of_user() -> None:
    original, changed = {"a": np.eye(3), "b": np.eye(3)}, {"a": np.eye(3)[::-1], "b": np.eye(3)}
    settings = {"top1": {"axes": {"b": -2}}}
    score = score_outputs(["top1"], [changed], [original], "0" * 64, "r", {"a": -1}, settings=settings)
    assert score["top1"].value == 100


def test_empty_class_axis_has_no_decision() -> None:
    empty = [{"y": np.zeros((3, 0))}]
    assert score_outputs(["top1"], empty, empty, "0" * 64, "r", {"y": -1})["top1"].value == 100


def test_class_axis_that_output_lacks_is_refused() -> None:
    TOP1.check_graph({"axes": {"a": -1}}, {"a": ("batch", 5), "b": None})
    with raises_code("wrong-axis", InputError):
        TOP1.check_graph({"axes": {"a": -2}}, {"a": ("batch", 5), "b": None})
    with raises_code("unknown-output", InputError):
        TOP1.check_graph({"axes": {"c": -1}}, {"a": ("batch", 5), "b": None})
