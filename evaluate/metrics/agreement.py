"""How far outputs changed from the baseline's, without references: agreement, top1, relative error.

They do not measure whether a change is for the better or the worse: a step that corrects a mistake of the
baseline agrees less with it. (The `agreement` of every step in the report: `smelt.evaluate.step_agreement`.)
Of a graph's outputs, for each sample the output with the largest difference counts, so others cannot hide it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from smelt.core.errors import InputError
from smelt.data.labels import MULTI_LABEL, SINGLE_LABEL
from smelt.evaluate.metrics.metric import (
    BOOTSTRAP_SIGNATURE,
    CORRELATION_LIMITS,
    ERROR_LIMITS,
    ComparedArrays,
    ComparedOutputs,
    ComparedVectors,
    ExampleRows,
    Metric,
    Outputs,
    OutputShapes,
    Rows,
    require_graph_outputs,
)
from smelt.stage import Settings
from smelt.tasks.sentence_similarity import paired_cosines

Similarities = tuple[list[float], str, str | None]
"""The similarity of each example, -1..1; how it is computed, for the signature; its unit, if not a cosine."""


class Agreement(Metric[ComparedOutputs | ComparedVectors | ComparedArrays]):
    """Rows, K = 1: similarity with the baseline's output, -1..1."""

    samples = (ComparedOutputs, ComparedVectors, ComparedArrays)

    def example_rows(
        self, samples: ComparedOutputs | ComparedVectors | ComparedArrays, settings: Mapping[str, Any]
    ) -> ExampleRows:
        """Return the similarity of each output with the baseline's."""
        values, definition, unit = _similarities(samples)
        rows: Rows = [[value] for value in values]
        return ExampleRows(
            rows, f"{definition}|reference:{samples.key[:12]}|{BOOTSTRAP_SIGNATURE}", unit=unit
        )

    def value_limits(self, signature: str) -> tuple[float, float]:
        """Return the limits: agreement of texts and classes is no cosine and is not below 0."""
        return self.limits if "cosine" in signature else (0.0, 100.0)


def _similarities(samples: ComparedOutputs | ComparedVectors | ComparedArrays) -> Similarities:
    if isinstance(samples, ComparedOutputs):
        return _of_outputs(samples)
    if isinstance(samples, ComparedVectors):
        return paired_cosines(samples.vectors, samples.expected).tolist(), "mean cosine|x100", None
    pairs = zip(samples.outputs, samples.expected, strict=True)
    how = "lowest cosine of a row's outputs, of one number its likeness|mean|x100"
    return [_min_cosine(*pair) for pair in pairs], f"outputs:{','.join(samples.expected[0])}|{how}", None


def _of_outputs(samples: ComparedOutputs) -> Similarities:
    """Return chrF of texts, or whether classes are equal."""
    pairs = list(zip(samples.outputs, samples.expected, strict=True))
    if samples.classes:
        return [float(a == b) for a, b in pairs], "equal predictions|x100", "%"
    from sacrebleu.metrics.chrf import CHRF

    scorer = CHRF()
    scores = [scorer.sentence_score(str(a), [str(b)]).score / 100 for a, b in pairs]
    # sacrebleu's score of two empty texts is 0
    values = [1.0 if str(a) == str(b) else score for (a, b), score in zip(pairs, scores, strict=True)]
    return values, f"mean sentence chrF|{scorer.get_signature()}|x100", "chrF"


ClassAxis = Annotated[int, Field(le=-1)]


class Top1Settings(Settings):
    """Settings of `top1`."""

    axes: dict[str, ClassAxis] | None = Field(
        default=None,
        description="axis of the classes by output, from the last (-1); default: found in the graph",
    )
    tie: float = Field(
        default=1e-3,
        ge=0,
        lt=1,
        description="scores this close, as a share of the largest magnitude, are equal; 0.001: float16's"
        " precision",
    )


class Top1(Metric[ComparedArrays]):
    """Rows, K = 2: 1 where the choices of a sample are the same, then 1."""

    samples = (ComparedArrays,)

    def example_rows(self, samples: ComparedArrays, settings: Mapping[str, Any]) -> ExampleRows | None:
        """Return whether the choices of each sample are equal; None if no output has choices."""
        options, first = Top1Settings.model_validate(settings), samples.expected[0]
        class_axes = samples.class_axes if options.axes is None else options.axes
        axes = {name: axis for name, axis in class_axes.items() if name in first}
        if not axes and all(value.dtype.kind == "f" for value in first.values()):
            return None
        pairs = zip(samples.outputs, samples.expected, strict=True)
        rows: Rows = [[int(_is_top1_equal(*pair, axes, options.tie)), 1] for pair in pairs]
        definition = f"argmax of {axes}|tie:{options.tie:g}|reference:{samples.key[:12]}|ci:wilson"
        return ExampleRows(rows, f"outputs:{','.join(first)}|{definition}")

    def check_graph(self, settings: Mapping[str, Any], outputs: OutputShapes) -> None:
        """Check that the outputs with classes have these axes."""
        axes = settings.get("axes") or {}
        require_graph_outputs(self.name, "axes", axes, outputs)
        for name, axis in axes.items():
            shape = outputs[name]
            if shape is not None and len(shape) <= -axis:  # the first one is the samples'
                raise InputError(
                    f"{self.name}: the output '{name}' has {len(shape)} axes, the first of which is that of"
                    f" the samples; axis {axis} is not among the others.",
                    code="wrong-axis",
                    setting="axes",
                )


class RelativeError(Metric[ComparedArrays]):
    """Rows, K = 1: the largest difference, as a share of the reference's largest value."""

    samples = (ComparedArrays,)

    def example_rows(self, samples: ComparedArrays, settings: Mapping[str, Any]) -> ExampleRows:
        """Return the largest relative error of each sample."""
        pairs = zip(samples.outputs, samples.expected, strict=True)
        rows: Rows = [[_max_relative_error(*pair)] for pair in pairs]
        definition = f"largest difference/largest value|mean|x100|reference:{samples.key[:12]}"
        return ExampleRows(
            rows, f"outputs:{','.join(samples.expected[0])}|{definition}|{BOOTSTRAP_SIGNATURE}"
        )


def _min_cosine(got: Outputs, expected: Outputs) -> float:
    """Return the lowest similarity of an output with the reference's, -1 to 1; 1 for equal outputs."""
    return min((_array_cosine(got[name], other) for name, other in expected.items()), default=1.0)


def _array_cosine(got: NDArray[Any], expected: NDArray[Any]) -> float:
    if not _is_comparable(got, expected):
        return 1.0 if _is_equal(got, expected) else 0.0
    a, b = _finite_values(got, expected)
    if np.array_equal(a, b):
        return 1.0
    if expected.size == 1:  # the cosine of a single number would always be 1
        return 1 - _relative_distance(float(a[0]), float(b[0])) if expected.dtype.kind == "f" else 0.0
    largest_a, largest_b = float(np.abs(a).max()), float(np.abs(b).max())
    if not largest_a or not largest_b:
        return 0.0
    a, b = a / largest_a, b / largest_b  # so that no square overflows or underflows a float64
    return float(np.clip(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)), -1, 1))


def _relative_distance(a: float, b: float) -> float:
    """Return the difference of two different numbers as a share of the larger one, 0 to 2."""
    largest = max(abs(a), abs(b))
    return abs(a / largest - b / largest)


def _max_relative_error(got: Outputs, expected: Outputs) -> float:
    """Return the largest difference, as a share of the reference's largest value; 1 without agreement."""
    return max((_array_relative_error(got[name], other) for name, other in expected.items()), default=0.0)


def _array_relative_error(got: NDArray[Any], expected: NDArray[Any]) -> float:
    if not _is_comparable(got, expected):
        return 0.0 if _is_equal(got, expected) else 1.0
    a, b = _finite_values(got, expected)
    largest = float(np.abs(b).max(initial=0.0))
    off = float(np.abs(a - b).max(initial=0.0))
    return off / largest if largest > 0 else float(off > 0)


def _is_top1_equal(got: Outputs, expected: Outputs, axes: Mapping[str, int], tie: float) -> bool:
    """Return whether each output with scores of classes has the reference's argmax; others are equal."""
    return all(
        _has_same_argmax(got[name], other, axes[name], tie) if name in axes else _is_equal(got[name], other)
        for name, other in expected.items()
        if name in axes or other.dtype.kind != "f"
    )


def _has_same_argmax(got: NDArray[Any], expected: NDArray[Any], axis: int, tie: float) -> bool:
    """Return whether the class of the largest score has the reference's largest, up to a tie, everywhere."""
    if got.dtype.kind != "f" or not _is_comparable(got, expected):
        return False
    if expected.ndim < -axis:
        return True  # a single number has no argmax
    if not expected.shape[axis]:
        return True
    classes, reference = got.argmax(axis, keepdims=True), expected.astype(np.float64)
    magnitude = np.abs(reference).max(axis, keepdims=True, where=np.isfinite(reference), initial=0)
    chosen = np.take_along_axis(reference, classes, axis)
    is_largest = chosen >= reference.max(axis, keepdims=True) - tie * magnitude
    return bool((is_largest | (classes == expected.argmax(axis, keepdims=True))).all())


def _is_comparable(got: NDArray[Any], expected: NDArray[Any]) -> bool:
    """Return whether both are numbers of one shape, finite at the same positions, else equal."""
    if got.shape != expected.shape or got.dtype.kind not in "fiub" or expected.dtype.kind not in "fiub":
        return False
    got_finite, expected_finite = np.isfinite(got), np.isfinite(expected)
    return bool(
        np.array_equal(got_finite, expected_finite)
        and np.array_equal(got[~got_finite], expected[~expected_finite], equal_nan=True)
    )


def _finite_values(
    got: NDArray[Any], expected: NDArray[Any]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    finite = np.isfinite(expected)
    return got[finite].astype(np.float64).ravel(), expected[finite].astype(np.float64).ravel()


def _is_equal(got: NDArray[Any], expected: NDArray[Any]) -> bool:
    return bool(np.array_equal(got, expected))


AGREEMENT = Agreement(
    name="agreement",
    title="Agreement",
    unit="cosine",
    description="similarity to the baseline's outputs, no references needed: mean sentence chrF of texts,"
    " percent of equal classes, 100 times the mean cosine of vectors (custom: with the original graph's"
    " outputs, of one number 1 minus the relative difference)",
    tasks=("sentence-similarity", "custom"),
    optional=("translation", "summarization", "text-generation", SINGLE_LABEL, MULTI_LABEL),
    kind="mean",
    limits=CORRELATION_LIMITS,
    compares_with_baseline=True,
)
TOP1 = Top1(
    name="top1",
    title="Top-1 agreement",
    unit="%",
    description="samples whose largest scores of classes have the original graph's positions (near ties"
    " are equal), and whose integers, booleans and texts are equal",
    tasks=("custom",),
    kind="proportion",
    settings=Top1Settings,
    compares_with_baseline=True,
)
RELATIVE_ERROR = RelativeError(
    name="relative_error",
    title="Relative error",
    unit="%",
    description="mean of a sample's largest difference, of the original graph's largest value",
    tasks=("custom",),
    kind="mean",
    limits=ERROR_LIMITS,
    higher_is_better=False,
    compares_with_baseline=True,
)
