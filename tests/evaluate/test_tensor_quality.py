"""Agreement of outputs, against numbers that are computed by hand."""

import re

import numpy as np
import pytest

from smelt.core.errors import InputError, RunError
from smelt.evaluate.metrics.metric import ComparedArrays
from smelt.evaluate.metrics.registry import metrics_of
from smelt.evaluate.tensor_quality import low_agreement_reason, require_finite_outputs, score_outputs
from tests.support.expected_errors import raises_code


def scores(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """Score outputs whose axis 0 are rows."""
    rows = [[{k: v[i] for k, v in side.items()} for i in range(2)] for side in (got, expected)]
    found = score_outputs(metrics_of(ComparedArrays), *rows, key="0" * 64, rows="r", class_axes={"a": -1})
    return {name: score.value for name, score in found.items()}


def test_the_untouched_graph_agrees_with_itself_also_where_it_is_not_finite() -> None:
    same = {"a": np.array([[1.0, np.inf], [np.nan, 0.0]]), "n": np.array([3, 4])}
    assert scores(same, same) == {"agreement": 100, "top1": 100, "relative_error": 0}


def test_numbers_by_hand() -> None:
    expected = {"a": np.array([[3.0, 4.0], [1.0, 0.0]])}
    got = {"a": np.array([[4.0, 3.0], [1.0, 0.0]])}
    # the cosine of (3, 4) and (4, 3) is 24/25; they differ by 1 of 4 and choose another place
    assert scores(got, expected) == pytest.approx({"agreement": 98, "top1": 50, "relative_error": 12.5})


def test_of_several_outputs_the_one_that_is_furthest_off_counts() -> None:
    expected = {"a": np.array([[3.0, 4.0], [1.0, 0.0]]), "b": np.array([[1.0], [1.0]])}
    got = {"a": expected["a"], "b": np.array([[-1.0], [1.0]])}
    assert scores(got, expected) == pytest.approx({"agreement": 0, "top1": 100, "relative_error": 100})


@pytest.mark.parametrize(
    "got",
    [
        {"a": np.array([[np.nan, 4.0], [np.inf, 0.0]])},  # not finite where the reference is
        {"a": np.array([[3.0, 4.0, 0.0], [1.0, 0.0, 0.0]])},  # of another shape
    ],
)
def test_what_cannot_be_compared_agrees_in_nothing(got: dict[str, np.ndarray]) -> None:
    expected = {"a": np.array([[3.0, 4.0], [1.0, 0.0]])}
    assert scores(got, expected) == {"agreement": 0, "top1": 0, "relative_error": 100}


def test_whole_numbers_and_texts_have_to_be_the_same() -> None:
    expected = {"n": np.array([3, 4]), "t": np.array(["a", "b"])}
    assert scores({**expected, "n": np.array([3, 5])}, expected)["top1"] == 50
    assert scores({**expected, "t": np.array(["a", "c"])}, expected)["top1"] == 50


def test_a_number_alone_agrees_by_its_size_and_not_by_its_sign() -> None:
    expected = {"price": np.array([[100.0], [-2.0]])}
    assert scores({"price": np.array([[110.0], [-1.0]])}, expected) == pytest.approx(
        {"agreement": (100 * 100 / 110 + 50) / 2, "relative_error": 30}
    )
    assert scores({"price": np.array([[0.0], [2.0]])}, expected)["agreement"] == -50
    label = {"label": np.array([3, 4])}
    assert scores({"label": np.array([3, 5])}, label)["agreement"] == 50


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_sizes_whose_squares_no_float_holds_agree_as_others_do(size: float) -> None:
    expected = {"a": size * np.array([[3.0, 4.0], [1.0, 0.0]])}
    got = {"a": size * np.array([[4.0, 3.0], [1.0, 0.0]])}
    assert scores(got, expected)["agreement"] == pytest.approx(98)


def test_unknown_metrics_and_missing_rows_are_refused() -> None:
    with raises_code("unknown-metric", InputError) as caught:
        score_outputs(["agrement"], [{}], [{}], "k", "r", {})
    assert "'agreement'?" in str(caught.value)
    with raises_code("empty-data", InputError):
        score_outputs(["agreement"], [], [], "k", "r", {})


def test_rows_that_are_finite_on_one_side_alone_are_named_with_what_was_fed() -> None:
    expected = [{"a": np.array([1.0, 2.0])} for _ in range(4)]
    got = [{"a": np.array([np.nan if at in (1, 3) else 1.0, 2.0])} for at in range(4)]
    fed = {"x": np.array([[0.0], [np.inf], [np.nan], [0.0]]), "scale": np.array(np.nan)}
    reason = low_agreement_reason(got, expected, fed)
    assert re.findall(r"[\d\[\], ]*\d\]?", reason)[:3] == [" 2", " 4", " [1, 3]"]
    assert "x[1]" in reason
    assert low_agreement_reason(got, got, fed) is None  # not finite on both sides


def test_of_many_such_rows_the_first_are_named() -> None:
    bad, good = [{"a": np.array([np.nan])}] * 9, [{"a": np.array([1.0])}] * 9
    assert "[0, 1, 2, 3, 4 and 4 more]" in str(low_agreement_reason(bad, good, {}))


def test_nan_where_the_reference_has_numbers_is_no_score():
    """Of fed rows that are numbers; infinities, which masks leave, are values like others."""
    fed = {"x": np.array([[0.0], [np.nan], [0.0], [0.0]])}
    good = [{"a": np.array([1.0, np.nan, -np.inf])}] * 4
    odd = [*good[:1], {"a": np.array([np.nan, np.nan, 0.0])}, *good[2:]]
    require_finite_outputs(good, good, fed)
    require_finite_outputs(odd, good, fed)  # the row that was fed is no number
    require_finite_outputs([{"a": np.array([np.inf, np.nan, 0.0])}] * 4, good, fed)
    require_finite_outputs(
        [{"a": np.array([np.nan])}] * 4, good, fed
    )  # of another shape: it agrees in nothing
    bad = [*good[:2], {"a": np.array([np.nan, np.nan, -np.inf])}, *good[3:]]
    with raises_code("non-finite-outputs", RunError):
        require_finite_outputs(bad, good, fed)


def test_top1_is_of_outputs_with_class_scores_along_their_axis() -> None:
    """The argmax along the width of a heat map is no decision; a segmentation chooses along its channels."""
    expected = {"map": np.zeros((2, 3, 4, 4)), "y": np.array([[3.0, 4.0], [1.0, 0.0]])}
    expected["map"][0, 1, 2, 3] = expected["map"][1, 0, 0, 0] = 1
    got = {"map": expected["map"].copy(), "y": expected["y"]}
    got["map"][0, 1, 2, 0] = 1.5  # another column, and the same channel; a new one in the other sample
    got["map"][1, 2, 1, 1] = 0.5
    rows = [[{k: v[i] for k, v in side.items()} for i in range(2)] for side in (got, expected)]

    def top1(**class_axes: int) -> float | None:
        score = score_outputs(["top1"], *rows, key="0" * 64, rows="r", class_axes=class_axes).get("top1")
        return None if score is None else score.value

    assert (top1(y=-1), top1(map=-3), top1()) == (100, 0, None)
