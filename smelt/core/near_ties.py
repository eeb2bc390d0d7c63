"""Choices among candidates that rounding errors do not change: of nearly equal ones, the first.

Processors add in different orders, so an error that is computed twice differs by about a millionth. Where the
smallest error is chosen, a near-tie would be decided by that difference, and the same recipe would give other
models on other processors. `NEAR_TIE` is far above such differences and far below what changes a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NEAR_TIE = 1e-5  # relative difference of errors that are considered equal


def is_better(error: Any, best: Any) -> Any:
    """Return whether `error` is smaller than `best` by more than a near-tie.

    Args:
        error: a number, an array or a tensor.
        best: that of an earlier candidate; may be infinite.

    Returns:
        bool, for each element.
    """
    return error + NEAR_TIE * abs(error) < best


def first_within_tolerance(errors: Sequence[Any]) -> int:
    """Return the index of the first of `errors`, numbers, that is as small as the smallest or nearly so."""
    smallest = min(errors)
    return next((index for index, error in enumerate(errors) if not is_better(smallest, error)), 0)


def round_significant(value: float, digits: int = 3) -> float:
    """Return `value` with so many significant digits, for scores that are sorted or added to be compared."""
    return float(f"{value:.{digits}g}")
