"""Which cells of a table (families by schemes, say) the tests take: all of them only where it is asked for.

SMELT_MATRIX=all make test
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

Row = TypeVar("Row")
Column = TypeVar("Column")


def is_full_matrix() -> bool:
    """Return whether all cells of all tables are asked for."""
    return os.environ.get("SMELT_MATRIX") == "all"


def matrix_cells(
    rows: Sequence[Row], columns: Sequence[Column], full: Callable[[Row], bool] = lambda row: False
) -> list[tuple[Row, Column]]:
    """Return pairs of a row and a column; without SMELT_MATRIX=all, each row and each column at least once.

    Args:
        rows: for example families.
        columns: for example schemes.
        full: rows that are taken with every column all the same.
    """
    both = [(row, column) for row in rows for column in columns]
    if is_full_matrix():
        return both
    cells, num_cells = [], max(len(rows), len(columns))
    diagonal = {(i % len(rows), i % len(columns)) for i in range(num_cells)}
    for index, (row, column) in enumerate(both):
        if full(row) or divmod(index, len(columns)) in diagonal:
            cells.append((row, column))
    return cells
