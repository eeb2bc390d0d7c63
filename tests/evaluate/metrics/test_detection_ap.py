"""Average precision of detected objects, against values computed by hand by COCO's definition."""

from typing import Any

import numpy as np
import pytest

from smelt.core.errors import InputError
from smelt.evaluate.metrics.detection import DETECTION_AP
from smelt.evaluate.tensor_quality import score_outputs
from tests.support.expected_errors import raises_code

SQUARES = np.array([[0, 0, 10, 10], [20, 20, 30, 30]], np.float32)
SETTINGS: dict[str, Any] = {"boxes": "b", "scores": "s", "classes": "c"}


def objects(boxes: Any, scores: Any, classes: Any) -> dict[str, np.ndarray]:
    return {
        "b": np.asarray(boxes, np.float32).reshape(-1, 4),
        "s": np.asarray(scores, np.float32),
        "c": np.asarray(classes, np.int64),
    }


TRUE = objects(SQUARES, [0.9, 0.8], [1, 1])


def precision(
    detected: dict[str, np.ndarray], expected: Any = TRUE, inputs: Any = (), **settings: Any
) -> float:
    """Return the average precision of one sample, %."""
    options = {"detection_ap": SETTINGS | settings}
    scores = score_outputs(["detection_ap"], [detected], [expected], "0" * 64, "r", {}, inputs, options)
    return scores["detection_ap"].value


def test_equal_objects_have_full_precision() -> None:
    assert precision(TRUE) == pytest.approx(100)


def test_one_missed_object_leaves_51_of_101_recall_levels() -> None:
    assert precision(objects(SQUARES[:1], [0.9], [1])) == pytest.approx(100 * 51 / 101)


def test_false_object_between_true_ones_lowers_precision_of_second_half() -> None:
    detected = objects([SQUARES[0], [50, 50, 60, 60], SQUARES[1]], [0.9, 0.8, 0.7], [1, 1, 1])
    # precision 1 up to a recall of 0.5, then 2 of 3
    assert precision(detected) == pytest.approx(100 * (51 + 50 * 2 / 3) / 101)


def test_box_of_iou_0_8_counts_at_seven_of_ten_thresholds() -> None:
    narrow = objects([[0, 0, 8, 10], SQUARES[1]], [0.9, 0.95], [1, 1])
    # at IoU 0.50 to 0.80 both are right; at 0.85 to 0.95 only the second one, which has the larger score
    assert precision(narrow) == pytest.approx(100 * (7 + 3 * 51 / 101) / 10)


def test_other_class_has_no_precision() -> None:
    assert precision(objects(SQUARES, [0.9, 0.8], [1, 2])) == pytest.approx(100 * 51 / 101)


def test_sample_without_true_objects_counts_as_right_unless_objects_are_detected() -> None:
    unsure = objects(SQUARES, [0.4, 0.3], [1, 1])
    assert (precision(unsure, unsure), precision(TRUE, unsure)) == (100, 0)


@pytest.mark.parametrize(
    ("box_format", "boxes"),
    [("xywh", [[0, 0, 10, 10], [20, 20, 10, 10]]), ("cxcywh", [[5, 5, 10, 10], [25, 25, 10, 10]])],
)
def test_box_format_is_converted(box_format: str, boxes: list[list[int]]) -> None:
    """The true boxes of another format overlap in another way with a narrow one."""
    narrow = {"xywh": [0, 0, 8, 10], "cxcywh": [4, 5, 8, 10]}[box_format]
    true, detected = objects(boxes, [0.9, 0.8], [1, 1]), objects([narrow, boxes[1]], [0.9, 0.95], [1, 1])
    assert precision(detected, true, box_format=box_format) == pytest.approx(100 * (7 + 3 * 51 / 101) / 10)


def test_labels_of_data_replace_objects_of_original() -> None:
    padded = np.concatenate([SQUARES[:1], np.full((3, 4), -1, np.float32)])
    arrays = [{"gold": padded, "gold_classes": np.array([1, 0, 0, 0])}]
    labels = {"true_boxes": "gold", "true_classes": "gold_classes"}
    assert precision(objects(SQUARES[:1], [0.9], [1]), inputs=arrays, **labels) == pytest.approx(100)
    assert precision(objects(SQUARES[1:], [0.9], [1]), inputs=arrays, **labels) == 0
    assert DETECTION_AP.data_arrays(SETTINGS | labels) == {"gold", "gold_classes"}


def test_class_is_that_of_largest_score_without_background() -> None:
    scores = np.array([[0.1, 0.9, 0.0], [0.2, 0.1, 0.7], [0.9, 0.1, 0.0]], np.float32)
    outputs = {"b": np.concatenate([SQUARES, SQUARES[:1]]), "s": scores}
    detected = objects(SQUARES, [0.9, 0.7], [1, 2])
    settings = {"boxes": "b", "scores": "s", "background": 0}
    expected_scores = score_outputs(
        ["detection_ap"], [outputs], [outputs], "0" * 64, "r", {}, settings={"detection_ap": settings}
    )
    assert expected_scores["detection_ap"].value == pytest.approx(100)
    assert precision(detected, detected) == pytest.approx(100)


def test_sample_without_detections_has_no_precision() -> None:
    nothing = objects(np.zeros((0, 4)), [], [])
    assert (precision(nothing), precision(nothing, nothing)) == (0, 100)
    class_scores = {"b": np.zeros((0, 4), np.float32), "s": np.zeros((0, 3), np.float32)}
    options = {"detection_ap": {"boxes": "b", "scores": "s"}}
    scores = score_outputs(["detection_ap"], [class_scores], [class_scores], "0" * 64, "r", {}, (), options)
    assert scores["detection_ap"].value == 100


def test_scores_by_class_first_are_refused() -> None:
    outputs = {"b": SQUARES, "s": np.zeros((3, 2), np.float32)}
    options = {"detection_ap": {"boxes": "b", "scores": "s"}}
    with raises_code("does-not-fit-graph", InputError):
        score_outputs(["detection_ap"], [outputs], [outputs], "0" * 64, "r", {}, (), options)


def test_wrong_box_format_is_refused_and_empty_boxes_are_no_objects() -> None:
    centers = objects([[50, 50, 10, 10], [80, 80, 10, 10]], [0.9, 0.8], [1, 1])
    with raises_code("wrong-value", InputError):
        precision(centers, centers)
    flat = objects([*SQUARES, [5, 5, 5, 9]], [0.9, 0.8, 0.7], [1, 1, 1])
    assert precision(flat, flat) == pytest.approx(100)


def test_labels_without_classes_match_objects_of_any_class() -> None:
    detected = objects(SQUARES, [0.9, 0.8], [3, 5])
    assert precision(detected, inputs=[{"gold": SQUARES}], true_boxes="gold") == pytest.approx(100)


def test_more_than_hundred_objects_are_scored() -> None:
    corners = np.array([[20 * i, 0, 20 * i + 9, 9] for i in range(150)])
    many = objects(corners, np.linspace(0.9, 0.6, 150), np.ones(150))
    assert precision(many, many) == pytest.approx(100)


def test_unknown_output_is_refused() -> None:
    with raises_code("unknown-output", InputError):
        DETECTION_AP.check_graph({"boxes": "b", "scores": "x"}, {"b": (1, 4), "s": (1,)})
