"""How far the outputs of a graph are from those of the untouched one, on the same rows.

Shapes: n = rows. Of each row the output that is furthest off counts, so several outputs cannot hide one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError, RunError, nearest
from smelt.evaluate.quality import _BOOTSTRAP, Score, _score
from smelt.evaluate.significance import Statistics, wilson_interval

AGREEMENT, TOP1, ERROR = "agreement", "top1", "relative_error"
TENSOR_METRICS = (AGREEMENT, TOP1, ERROR)
_NAMED = 5  # rows in a warning
Outputs = Mapping[str, NDArray[Any]]


def score_outputs(
    metrics: Sequence[str], got: Sequence[Outputs], expected: Sequence[Outputs], key: str, rows: str
) -> dict[str, Score]:
    """Compare the outputs of n rows with those of a reference.

    agreement: mean cosine, times 100; of an output of one number 1 less the difference as a share of the
    larger one, of one whole number whether it is the same. top1: the share of rows, percent, in which every
    largest value along the last axis stands where it stands in the reference, and every whole number, truth
    and text is the same. relative_error: mean of the largest difference of a value, in percent of the
    reference's largest.
    An output that is not finite where the reference is, or of another shape, agrees in nothing.

    Args:
        metrics: names from TENSOR_METRICS; the result has their order.
        got: by row, the outputs by name.
        expected: likewise, of the reference.
        key: of the reference, for the signature.
        rows: a hash of what the rows hold.

    Raises:
        InputError: an unknown metric, or no rows.
    """
    for metric in metrics:
        if metric not in TENSOR_METRICS:
            known = ", ".join(TENSOR_METRICS)
            raise InputError(
                f"Unknown metric '{metric}' here; known: {known}.{nearest(metric, TENSOR_METRICS)}",
                code="unknown-metric",
            )
    if not got or len(got) != len(expected):
        raise InputError(
            f"{len(got)} rows of outputs for {len(expected)} of the reference.", code="count-mismatch"
        )
    pairs = list(zip(got, expected, strict=True))
    names = ",".join(expected[0])
    found: dict[str, Score] = {}
    for metric in metrics:
        of_row, how = _HOW[metric]
        values = [of_row(one, other) for one, other in pairs]
        said = f"outputs:{names}|{how}|reference:{key[:12]}"
        if metric == TOP1:
            hits: list[list[int | float]] = [[int(value), 1] for value in values]
            statistics = Statistics(metric=metric, signature=f"{said}|ci:wilson", examples=rows, rows=hits)
            found[metric] = _score(statistics, interval=wilson_interval(int(sum(values)), len(values)))
        else:
            means: list[list[int | float]] = [[float(value)] for value in values]
            found[metric] = _score(
                Statistics(metric=metric, signature=f"{said}|{_BOOTSTRAP}", examples=rows, rows=means)
            )
    return found


def require_numbers(
    got: Sequence[Outputs], expected: Sequence[Outputs], arrays: Mapping[str, NDArray[Any]]
) -> None:
    """Require that outputs are numbers where those of the reference are, on rows that are numbers themselves.

    Args:
        got: by row, the outputs by name.
        expected: likewise, of the reference.
        arrays: what was fed, by name; axis 0 are the rows.

    Raises:
        RunError: `non-finite-outputs`.
    """
    odd = set().union(*_not_finite(arrays).values())
    wrong = [
        at
        for at, (one, other) in enumerate(zip(got, expected, strict=True))
        if at not in odd and any(_has_nan(one[name], value) for name, value in other.items())
    ]
    if wrong:
        raise RunError(
            f"The graph's outputs are NaN for {len(wrong):,} of {len(got):,} rows where the untouched graph's"
            f" are numbers (rows {_listed(wrong)}, counted from 0). Most likely a value exceeds the range of"
            " its type: fp32 and bf16 have the widest.",
            code="non-finite-outputs",
        )


def _has_nan(got: NDArray[Any], expected: NDArray[Any]) -> bool:
    if got.dtype.kind != "f" or expected.dtype.kind not in "fiub" or got.shape != expected.shape:
        return False
    return bool((np.isnan(got) & ~np.isnan(expected.astype(np.float64))).any())


def _not_finite(arrays: Mapping[str, NDArray[Any]]) -> dict[str, list[int]]:
    """Return the rows of each array that hold values that are not finite, of arrays that have some."""
    fed = {name: array for name, array in arrays.items() if array.ndim and array.dtype.kind == "f"}
    odd = {
        n: [at for at in range(len(array)) if not np.isfinite(array[at]).all()] for n, array in fed.items()
    }
    return {name: rows for name, rows in odd.items() if rows}


def why_low(
    got: Sequence[Outputs], expected: Sequence[Outputs], arrays: Mapping[str, NDArray[Any]]
) -> str | None:
    """Name the rows that agree in nothing because they are not finite on one side alone; None for none.

    Args:
        got: by row, the outputs by name.
        expected: likewise, of the reference.
        arrays: what was fed, by name; axis 0 are the rows.
    """
    off = [at for at, (one, other) in enumerate(zip(got, expected, strict=True)) if _breaks(one, other)]
    if not off:
        return None
    found = {name: [at for at in rows if at in off] for name, rows in _not_finite(arrays).items()}
    odd = {name: rows for name, rows in found.items() if rows}
    named = ", ".join(f"{name}[{_listed(rows)}]" for name, rows in odd.items())
    why = f"; the data are not finite in {named}" if odd else ""
    rows = "1 row agrees" if len(off) == 1 else f"{len(off):,} rows agree"
    return (
        f"{AGREEMENT}: {rows} in nothing (of {len(got):,}; [{_listed(off)}], counted from 0), since NaN or"
        f" infinite values stand in one graph's outputs where the other has numbers{why}"
    )


def _breaks(got: Outputs, expected: Outputs) -> bool:
    """Say whether an output of a row is finite at other places than the reference's."""
    floats = ((got[name], other) for name, other in expected.items() if other.dtype.kind == "f")
    return any(
        one.shape == other.shape and not np.array_equal(np.isfinite(one), np.isfinite(other))
        for one, other in floats
    )


def _listed(rows: Sequence[int]) -> str:
    shown = ", ".join(map(str, rows[:_NAMED]))
    return shown + (f" and {len(rows) - _NAMED:,} more" if len(rows) > _NAMED else "")


def _cosine(got: Outputs, expected: Outputs) -> float:
    """Return the lowest likeness of an output with the reference's, -1 to 1; equal ones have 1."""
    return min((_cosine_of(got[name], other) for name, other in expected.items()), default=1.0)


def _cosine_of(got: NDArray[Any], expected: NDArray[Any]) -> float:
    if not _comparable(got, expected):
        return 1.0 if _same(got, expected) else 0.0
    a, b = _finite(got, expected)
    if np.array_equal(a, b):
        return 1.0
    if expected.size == 1:  # a number alone points nowhere, so its cosine would be 1 whatever it is
        return 1 - _share_off(float(a[0]), float(b[0])) if expected.dtype.kind == "f" else 0.0
    one, other = float(np.abs(a).max()), float(np.abs(b).max())
    if not one or not other:
        return 0.0
    a, b = a / one, b / other  # so that no square is more, or less, than a float64 holds
    return float(np.clip(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)), -1, 1))


def _share_off(one: float, other: float) -> float:
    """Return how far two different numbers are apart, as a share of the larger one, 0 to 2."""
    largest = max(abs(one), abs(other))
    return abs(one / largest - other / largest)


def _error(got: Outputs, expected: Outputs) -> float:
    """Return the largest difference, as a share of the reference's largest value; 1 where nothing agrees."""
    return max((_error_of(got[name], other) for name, other in expected.items()), default=0.0)


def _error_of(got: NDArray[Any], expected: NDArray[Any]) -> float:
    if not _comparable(got, expected):
        return 0.0 if _same(got, expected) else 1.0
    a, b = _finite(got, expected)
    largest = float(np.abs(b).max(initial=0.0))
    off = float(np.abs(a - b).max(initial=0.0))
    return off / largest if largest > 0 else float(off > 0)


def _top1(got: Outputs, expected: Outputs) -> bool:
    """Say whether each output chooses what the reference's chooses."""
    return all(_chooses(got[name], other) for name, other in expected.items())


def _chooses(got: NDArray[Any], expected: NDArray[Any]) -> bool:
    if expected.dtype.kind != "f":
        return _same(got, expected)
    if got.dtype.kind != "f" or not _comparable(got, expected):
        return False
    if not expected.ndim or expected.shape[-1] < 2:
        return True  # one number chooses nothing
    return bool(np.array_equal(got.argmax(-1), expected.argmax(-1)))


def _comparable(got: NDArray[Any], expected: NDArray[Any]) -> bool:
    """Say whether both are numbers of one shape, finite at the same places, else the same."""
    if got.shape != expected.shape or got.dtype.kind not in "fiub" or expected.dtype.kind not in "fiub":
        return False
    one, other = np.isfinite(got), np.isfinite(expected)
    return bool(np.array_equal(one, other) and np.array_equal(got[~one], expected[~other], equal_nan=True))


def _finite(got: NDArray[Any], expected: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    there = np.isfinite(expected)
    return got[there].astype(np.float64).ravel(), expected[there].astype(np.float64).ravel()


def _same(got: NDArray[Any], expected: NDArray[Any]) -> bool:
    return bool(np.array_equal(got, expected))


_HOW: dict[str, tuple[Callable[[Outputs, Outputs], float], str]] = {
    AGREEMENT: (_cosine, "lowest cosine of a row's outputs, of one number its likeness|mean|x100"),
    TOP1: (_top1, "argmax of the last axis"),
    ERROR: (_error, "largest difference/largest value|mean|x100"),
}
