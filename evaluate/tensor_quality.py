"""Difference between the outputs of a graph and those of its source graph, on the same samples.

Shapes: n = samples. For each sample the output with the largest difference counts, so others cannot hide it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError, RunError, did_you_mean
from smelt.evaluate.metrics import AGREEMENT_METRIC, OUTPUT_METRICS, RELATIVE_ERROR_METRIC, TOP1_METRIC
from smelt.evaluate.quality import BOOTSTRAP_SIGNATURE, MetricScore, metric_score
from smelt.evaluate.significance import Statistics, wilson_interval

_MAX_NAMED_ROWS = 5  # samples named in a warning
Outputs = Mapping[str, NDArray[Any]]


def score_outputs(
    metrics: Sequence[str],
    got: Sequence[Outputs],
    expected: Sequence[Outputs],
    key: str,
    rows: str,
    class_axes: Mapping[str, int],
) -> dict[str, MetricScore]:
    """Compare the outputs of n samples with those of a reference.

    agreement: mean cosine, times 100; for an output of one number 1 minus the difference as a share of the
    larger one, for one integer whether it is equal. top1: the share of samples, percent, in which every
    largest score of a class has the position that it has in the reference, and every integer, boolean and
    text is equal; left out if there are no such outputs. relative_error: mean of the largest difference of a
    value, in percent of the reference's largest.
    An output that is not finite where the reference is, or has another shape, has no agreement.

    Args:
        metrics: names from OUTPUT_METRICS; the result has their order.
        got: by sample, the outputs by name.
        expected: likewise, of the reference.
        key: of the reference, for the signature.
        rows: a hash of the samples' values.
        class_axes: the axis of the classes, from the last one, by output that has scores of classes
            (`smelt.runtimes.onnx_import.class_outputs`).

    Raises:
        InputError: an unknown metric, or no samples.
    """
    for metric in metrics:
        if metric not in OUTPUT_METRICS:
            known = ", ".join(OUTPUT_METRICS)
            raise InputError(
                f"Unknown output metric '{metric}'; known: {known}.{did_you_mean(metric, OUTPUT_METRICS)}",
                code="unknown-metric",
            )
    if not got or len(got) != len(expected):
        raise InputError(
            f"Got outputs of {len(got)} samples; the reference has {len(expected)}.", code="count-mismatch"
        )
    pairs = list(zip(got, expected, strict=True))
    names = ",".join(expected[0])
    found: dict[str, MetricScore] = {}
    for metric in metrics:
        of_row, how = _METRIC_FUNCTIONS[metric]
        if metric == TOP1_METRIC:
            axes = {name: axis for name, axis in class_axes.items() if name in expected[0]}
            if not axes and all(value.dtype.kind == "f" for value in expected[0].values()):
                continue
            of_row, how = partial(_is_top1_equal, axes=axes), f"argmax of {axes}"
        values = [of_row(got_array, expected_array) for got_array, expected_array in pairs]
        signature = f"outputs:{names}|{how}|reference:{key[:12]}"
        if metric == TOP1_METRIC:
            hits: list[list[int | float]] = [[int(value), 1] for value in values]
            statistics = Statistics(
                metric=metric, signature=f"{signature}|ci:wilson", examples=rows, rows=hits
            )
            found[metric] = metric_score(statistics, interval=wilson_interval(int(sum(values)), len(values)))
        else:
            means: list[list[int | float]] = [[float(value)] for value in values]
            found[metric] = metric_score(
                Statistics(
                    metric=metric, signature=f"{signature}|{BOOTSTRAP_SIGNATURE}", examples=rows, rows=means
                )
            )
    return found


def require_finite_outputs(
    got: Sequence[Outputs], expected: Sequence[Outputs], arrays: Mapping[str, NDArray[Any]]
) -> None:
    """Require finite outputs where those of the reference are finite, on samples that are finite themselves.

    Args:
        got: by sample, the outputs by name.
        expected: likewise, of the reference.
        arrays: the inputs, by name; axis 0 is the sample.

    Raises:
        RunError: `non-finite-outputs`.
    """
    odd = set().union(*_non_finite_rows(arrays).values())
    wrong = [
        at
        for at, (outputs, reference) in enumerate(zip(got, expected, strict=True))
        if at not in odd and any(_has_new_nan(outputs[name], value) for name, value in reference.items())
    ]
    if wrong:
        raise RunError(
            f"The graph's outputs are NaN for {len(wrong):,} of {len(got):,} samples where the source graph's"
            f" are numbers (samples {_rows_text(wrong)}, counted from 0). Most likely a value exceeds the"
            " range of its type. Use fp32 or bf16.",
            code="non-finite-outputs",
        )


def _has_new_nan(got: NDArray[Any], expected: NDArray[Any]) -> bool:
    if got.dtype.kind != "f" or expected.dtype.kind not in "fiub" or got.shape != expected.shape:
        return False
    return bool((np.isnan(got) & ~np.isnan(expected.astype(np.float64))).any())


def _non_finite_rows(arrays: Mapping[str, NDArray[Any]]) -> dict[str, list[int]]:
    """Return the samples of each array that contain non-finite values, for arrays that have some."""
    float_arrays = {name: array for name, array in arrays.items() if array.ndim and array.dtype.kind == "f"}
    odd = {
        n: [at for at in range(len(array)) if not np.isfinite(array[at]).all()]
        for n, array in float_arrays.items()
    }
    return {name: rows for name, rows in odd.items() if rows}


def low_agreement_reason(
    got: Sequence[Outputs], expected: Sequence[Outputs], arrays: Mapping[str, NDArray[Any]]
) -> str | None:
    """Return the samples without agreement because only one side is finite, as text; None if there are none.

    Args:
        got: by sample, the outputs by name.
        expected: likewise, of the reference.
        arrays: the inputs, by name; axis 0 is the sample.
    """
    off = [
        at
        for at, (outputs, reference) in enumerate(zip(got, expected, strict=True))
        if _differs_in_finiteness(outputs, reference)
    ]
    if not off:
        return None
    found = {name: [at for at in rows if at in off] for name, rows in _non_finite_rows(arrays).items()}
    odd = {name: rows for name, rows in found.items() if rows}
    named = ", ".join(f"{name}[{_rows_text(rows)}]" for name, rows in odd.items())
    why = f"; the data is not finite in {named}" if odd else ""
    rows = "1 sample has" if len(off) == 1 else f"{len(off):,} samples have"
    return (
        f"{AGREEMENT_METRIC}: {rows} no agreement (of {len(got):,}; [{_rows_text(off)}], counted from 0),"
        f" because one graph's outputs are NaN or infinite where the other's are finite{why}"
    )


def _differs_in_finiteness(got: Outputs, expected: Outputs) -> bool:
    """Return whether an output of a sample is finite at other positions than the reference's."""
    floats = ((got[name], other) for name, other in expected.items() if other.dtype.kind == "f")
    return any(
        got_array.shape == expected_array.shape
        and not np.array_equal(np.isfinite(got_array), np.isfinite(expected_array))
        for got_array, expected_array in floats
    )


def _rows_text(rows: Sequence[int]) -> str:
    shown = ", ".join(map(str, rows[:_MAX_NAMED_ROWS]))
    return shown + (f" and {len(rows) - _MAX_NAMED_ROWS:,} more" if len(rows) > _MAX_NAMED_ROWS else "")


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


def _is_top1_equal(got: Outputs, expected: Outputs, axes: Mapping[str, int]) -> bool:
    """Return whether each output with scores of classes has the reference's argmax; others are equal."""
    return all(
        _has_same_argmax(got[name], other, axes[name]) if name in axes else _is_equal(got[name], other)
        for name, other in expected.items()
        if name in axes or other.dtype.kind != "f"
    )


def _has_same_argmax(got: NDArray[Any], expected: NDArray[Any], axis: int) -> bool:
    if got.dtype.kind != "f" or not _is_comparable(got, expected):
        return False
    if expected.ndim < -axis:
        return True  # a single number has no argmax
    return bool(np.array_equal(got.argmax(axis), expected.argmax(axis)))


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


_METRIC_FUNCTIONS: dict[str, tuple[Callable[[Outputs, Outputs], float], str]] = {
    AGREEMENT_METRIC: (_min_cosine, "lowest cosine of a row's outputs, of one number its likeness|mean|x100"),
    TOP1_METRIC: (partial(_is_top1_equal, axes={}), "argmax"),
    RELATIVE_ERROR_METRIC: (_max_relative_error, "largest difference/largest value|mean|x100"),
}
