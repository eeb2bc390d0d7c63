"""Difference between the outputs of a graph and those of its source graph, on the same samples.

Shapes: n = samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import RunError
from smelt.data.npz_arrays import SampleAxes, arrays_of_equal_length, read_npz_headers
from smelt.evaluate.metrics.metric import ComparedArrays, MetricSettingValues, Outputs
from smelt.evaluate.metrics.registry import AGREEMENT_METRIC, find_metric, is_custom_metric, metrics_of
from smelt.evaluate.quality import MetricScore, check_inputs, score_metrics

_MAX_NAMED_ROWS = 5  # samples named in a warning


def score_outputs(
    metrics: Sequence[str],
    got: Sequence[Outputs],
    expected: Sequence[Outputs],
    key: str,
    rows: str,
    class_axes: Mapping[str, int],
    inputs: Sequence[Outputs] = (),
    settings: MetricSettingValues | None = None,
) -> dict[str, MetricScore]:
    """Compare the outputs of n samples with those of a reference.

    An output that is not finite where the reference is, or has another shape, has no agreement.

    Args:
        metrics: names of metrics of arrays; the result has their order.
        got: by sample, the outputs by name.
        expected: likewise, of the reference.
        key: of the reference, for the signature.
        rows: a hash of the samples' values.
        class_axes: the axis of the classes, from the last one, by output that has scores of classes
            (`smelt.runtimes.onnx_import.class_outputs`).
        inputs: by sample, the arrays of the data by name; for metrics that read some.
        settings: by metric.

    Raises:
        InputError: an unknown metric, or no samples.
    """
    check_inputs(metrics, metrics_of(ComparedArrays), len(got), len(expected))
    samples = ComparedArrays(rows, got, expected, class_axes, key, inputs)
    return score_metrics(metrics, samples, settings=settings)


def metric_arrays(
    metrics: Sequence[str], settings: MetricSettingValues, files: Iterable[Path], axes: SampleAxes
) -> frozenset[str]:
    """Return the arrays of `.npz` files that metrics read.

    A user's function may read all that every file has, with as many samples as the arrays in `axes`.

    Args:
        metrics: names of metrics, or of a user's functions.
        settings: by metric.
        files: with the scored samples.
        axes: of the graph's inputs, and of other arrays where they are known.

    Raises:
        InputError: a file cannot be read; only where there is a user's function.
    """
    names = {name for m in metrics for name in find_metric(m).data_arrays(settings.get(m, {}))}
    if any(map(is_custom_metric, metrics)):
        arrays_by_file = [arrays_of_equal_length(read_npz_headers(file), axes) for file in files]
        names |= set.intersection(*arrays_by_file) if arrays_by_file else set()
    return frozenset(names)


def require_finite_outputs(
    got: Sequence[Outputs], expected: Sequence[Outputs], inputs: Sequence[Outputs]
) -> None:
    """Require finite outputs where those of the reference are finite, on samples that are finite themselves.

    Args:
        got: by sample, the outputs by name.
        expected: likewise, of the reference.
        inputs: by sample, its own arrays by name.

    Raises:
        RunError: `non-finite-outputs`.
    """
    non_finite_rows = set().union(*_non_finite_rows(inputs).values())
    wrong = [
        row_index
        for row_index, (outputs, reference) in enumerate(zip(got, expected, strict=True))
        if row_index not in non_finite_rows
        and any(_has_new_nan(outputs[name], value) for name, value in reference.items())
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


def _non_finite_rows(inputs: Sequence[Outputs]) -> dict[str, list[int]]:
    """Return the samples of each array that contain non-finite values, for arrays that have some."""
    rows_by_name: dict[str, list[int]] = {}
    for index, arrays in enumerate(inputs):
        for name, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                rows_by_name.setdefault(name, []).append(index)
    return rows_by_name


def low_agreement_reason(
    got: Sequence[Outputs], expected: Sequence[Outputs], inputs: Sequence[Outputs]
) -> str | None:
    """Return the samples without agreement because only one side is finite, as text; None if there are none.

    Args:
        got: by sample, the outputs by name.
        expected: likewise, of the reference.
        inputs: by sample, its own arrays by name.
    """
    off = [
        row_index
        for row_index, (outputs, reference) in enumerate(zip(got, expected, strict=True))
        if _differs_in_finiteness(outputs, reference)
    ]
    if not off:
        return None
    rows_by_name = {
        name: [row_index for row_index in rows if row_index in off]
        for name, rows in _non_finite_rows(inputs).items()
    }
    non_finite = {name: rows for name, rows in rows_by_name.items() if rows}
    location_text = ", ".join(f"{name}[{_rows_text(rows)}]" for name, rows in non_finite.items())
    cause_text = f"; the data is not finite in {location_text}" if non_finite else ""
    rows = "1 sample has" if len(off) == 1 else f"{len(off):,} samples have"
    return (
        f"{AGREEMENT_METRIC}: {rows} no agreement (of {len(got):,}; [{_rows_text(off)}], counted from 0),"
        f" because one graph's outputs are NaN or infinite where the other's are finite{cause_text}"
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
    row_text = ", ".join(map(str, rows[:_MAX_NAMED_ROWS]))
    return row_text + (f" and {len(rows) - _MAX_NAMED_ROWS:,} more" if len(rows) > _MAX_NAMED_ROWS else "")
