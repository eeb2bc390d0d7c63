"""Average precision of detected objects, by pycocotools, against labels or the original graph's objects."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from smelt.core.errors import InputError, MissingDependencyError, SettingError
from smelt.data.splits import Split
from smelt.evaluate.metrics.metric import (
    BOOTSTRAP_SIGNATURE,
    ComparedArrays,
    ExampleRows,
    Metric,
    Outputs,
    OutputShapes,
    Rows,
    require_graph_outputs,
)
from smelt.stage import Settings

BoxFormat = Literal["xyxy", "xywh", "cxcywh"]


class DetectionSettings(Settings):
    """Settings of `detection_ap`."""

    boxes: str = Field(description="output with the boxes, [objects, 4] for each sample")
    scores: str = Field(description="output with their scores, [objects], or [objects, classes]")
    classes: str | None = Field(
        default=None, description="output with their classes, [objects]; default: the largest score's"
    )
    background: int | None = Field(default=None, ge=0, description="class that is no object")
    box_format: BoxFormat = Field(default="xyxy", description="corners, corner and size, or center and size")
    min_score: float = Field(
        default=0.5, description="the original's objects of at least this score are the true ones"
    )
    true_boxes: str | None = Field(
        default=None, description="array of the data with the true boxes instead; rows of -1 are none"
    )
    true_classes: str | None = Field(
        default=None, description="array of the data with their classes; default: boxes of any class match"
    )

    @model_validator(mode="after")
    def _check_labels(self) -> Self:
        if self.true_classes is not None and self.true_boxes is None:
            raise SettingError("true_classes needs true_boxes", code="missing-setting")
        return self


class Objects(NamedTuple):
    """N objects of a sample: boxes [N, 4] as corner and size, scores [N], classes [N]."""

    boxes: NDArray[np.float64]
    scores: NDArray[np.float64]
    classes: NDArray[np.int64]

    def where(self, mask: NDArray[np.bool_]) -> Objects:
        """Return the objects of `mask`."""
        return Objects(self.boxes[mask], self.scores[mask], self.classes[mask])


class DetectionPrecision(Metric[ComparedArrays]):
    """Rows, K = 1: average precision of a sample, 0..1."""

    samples = (ComparedArrays,)

    def example_rows(self, samples: ComparedArrays, settings: Mapping[str, Any]) -> ExampleRows:
        """Return COCO's AP at IoU 0.50 to 0.95 of each sample alone, by pycocotools.

        A sample without true objects has 1 if no object of `min_score` is detected, else 0.
        """
        options = DetectionSettings.model_validate(settings)
        detected = [_detected_objects(outputs, options) for outputs in samples.outputs]
        if options.true_boxes is None:
            true = [_detected_objects(outputs, options) for outputs in samples.expected]
            true = [objects.where(objects.scores >= options.min_score) for objects in true]
        else:
            true = [_labeled_objects(arrays, options) for arrays in samples.inputs]
        if options.true_boxes is not None and options.true_classes is None:
            detected = [objects._replace(classes=np.zeros_like(objects.classes)) for objects in detected]
        true = _without_empty_boxes(true, options)
        pairs = zip(detected, true, strict=True)
        rows: Rows = [[_average_precision(*pair, options.min_score)] for pair in pairs]
        definition = f"AP@[.5:.95] of each sample|mean|x100|{options.model_dump_json(exclude_defaults=True)}"
        reference = samples.key[:12] if options.true_boxes is None else "labels"
        return ExampleRows(
            rows,
            f"{definition}|reference:{reference}|version:{version('pycocotools')}|{BOOTSTRAP_SIGNATURE}",
        )

    def check(self, settings: Mapping[str, Any], base: Path, splits: Mapping[str, Split]) -> None:
        """Check that pycocotools is installed."""
        if find_spec("pycocotools") is None:
            raise MissingDependencyError(
                f"{self.name} needs pycocotools. Install it: `pip install pycocotools`.",
                code="missing-package",
            )

    def check_graph(self, settings: Mapping[str, Any], outputs: OutputShapes) -> None:
        """Check that the outputs exist."""
        for setting in ("boxes", "scores", "classes"):
            if name := settings.get(setting):
                require_graph_outputs(self.name, setting, [name], outputs)

    def data_arrays(self, settings: Mapping[str, Any]) -> frozenset[str]:
        """Return the arrays of the data with the true boxes and classes."""
        return frozenset(settings[key] for key in ("true_boxes", "true_classes") if settings.get(key))


def _detected_objects(outputs: Outputs, options: DetectionSettings) -> Objects:
    """Return the objects of a sample.

    Raises:
        InputError: `does-not-fit-graph`: the outputs have different numbers of objects.
    """
    boxes = outputs[options.boxes].reshape(-1, 4).astype(np.float64)
    scores = _by_object(outputs, options.scores, len(boxes)).astype(np.float64)
    scores = scores.reshape(len(boxes), scores.size // max(1, len(boxes)) or 1)
    if options.classes is not None:
        classes, scores = (
            _by_object(outputs, options.classes, len(boxes)).astype(np.int64).ravel(),
            scores[:, :1],
        )
    else:
        classes = scores.argmax(1)
    objects = Objects(_as_corner_and_size(boxes, options.box_format), scores.max(1, initial=-np.inf), classes)
    return objects if options.background is None else objects.where(classes != options.background)


def _by_object(outputs: Outputs, name: str, count: int) -> NDArray[Any]:
    """Return an output whose first axis is that of the objects, after a batch axis of one sample."""
    value = outputs[name]
    values = value[0] if value.ndim > 1 and value.shape[0] == 1 != count else value
    if len(values) != count:
        raise InputError(
            f"detection_ap: the output '{name}' is {list(value.shape)} for {count} boxes of a sample; the"
            " first axis must be that of the objects. Score the graph with a function of your own.",
            code="does-not-fit-graph",
        )
    return values


def _without_empty_boxes(samples: list[Objects], options: DetectionSettings) -> list[Objects]:
    """Return the true objects with an area.

    Raises:
        InputError: `wrong-value`: most have a negative width or height.
    """
    sizes = np.concatenate([objects.boxes[:, 2:] for objects in samples] or [np.zeros((0, 2))])
    if (sizes < 0).any(1).sum() > len(sizes) / 2:
        raise InputError(
            f"detection_ap: most boxes have a negative width or height as {options.box_format}. Set"
            " box_format to xyxy, xywh or cxcywh.",
            code="wrong-value",
            setting="box_format",
        )
    return [objects.where(np.all(objects.boxes[:, 2:] > 0, axis=1)) for objects in samples]


def _labeled_objects(arrays: Outputs, options: DetectionSettings) -> Objects:
    assert options.true_boxes is not None
    boxes = arrays[options.true_boxes].reshape(-1, 4).astype(np.float64)
    is_object = ~(boxes == -1).all(1)
    if options.true_classes is None:
        classes = np.zeros(len(boxes), np.int64)
    else:
        classes = arrays[options.true_classes].astype(np.int64).ravel()
    objects = Objects(_as_corner_and_size(boxes, options.box_format), np.ones(len(boxes)), classes)
    return objects.where(is_object)


def _as_corner_and_size(boxes: NDArray[np.float64], box_format: BoxFormat) -> NDArray[np.float64]:
    first, second = boxes[:, :2], boxes[:, 2:]
    if box_format == "xyxy":
        return np.hstack([first, second - first])
    return boxes if box_format == "xywh" else np.hstack([first - second / 2, second])


def _average_precision(detected: Objects, true: Objects, min_score: float) -> float:
    if not len(true.boxes):
        return float(not (detected.scores >= min_score).any())
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        evaluation = COCOeval(_coco_dataset(true), _coco_dataset(detected), "bbox")
        evaluation.params.imgIds, evaluation.params.catIds = [1], sorted({*true.classes.tolist()})
        evaluation.params.areaRng = [[0, float("inf")]]
        evaluation.params.maxDets = [max(100, len(true.boxes))]
        evaluation.evaluate()
        evaluation.accumulate()
    return float(evaluation.eval["precision"].mean())


def _coco_dataset(objects: Objects) -> Any:
    """Return the objects as a data set of one image, of which identifiers begin at 1."""
    from pycocotools.coco import COCO

    dataset = COCO()
    dataset.dataset = {
        "images": [{"id": 1}],
        "categories": [{"id": category} for category in sorted({*objects.classes.tolist()})],
        "annotations": [
            {
                "id": number,
                "image_id": 1,
                "category_id": category,
                "bbox": box,
                "area": box[2] * box[3],
                "iscrowd": 0,
                "score": score,
            }
            for number, (box, score, category) in enumerate(
                zip(objects.boxes.tolist(), objects.scores.tolist(), objects.classes.tolist(), strict=True), 1
            )
        ],
    }
    dataset.createIndex()
    return dataset


DETECTION_AP = DetectionPrecision(
    name="detection_ap",
    title="Detection AP",
    unit="%",
    description="mean over samples of COCO's average precision (IoU 0.50 to 0.95) of the detected objects,"
    " against the original graph's or those of the data; by pycocotools",
    optional=("custom",),
    kind="mean",
    libraries=("pycocotools",),
    settings=DetectionSettings,
    compares_with_baseline=True,
)
