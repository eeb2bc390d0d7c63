"""SparseGPT: set weights to zero column by column and compensate the error in the columns to the right.

Shapes: N = outputs, K = inputs.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Generator, Tensor

from smelt.compress.calibration.inverse_hessian import inverse_cholesky
from smelt.compress.calibration.statistics import InputStatistics
from smelt.compress.sparsify.method import RequiredStatistics
from smelt.compress.sparsify.pattern import SparsityPattern

_BLOCK_COLUMNS = 128  # per mask


class SparseGpt:
    """Processes the columns from left to right, as the published code does (sparsegpt.py).

    Frantar & Alistarh 2023, SparseGPT, arXiv:2301.00774. With H = 2 X X^T / tokens (an input that is always 0
    has 1 on the diagonal and loses its weights; 1 % of the mean diagonal is added) and U the upper Cholesky
    factor of its inverse, the importance of a weight is w^2 / U_jj^2. In blocks of 128 columns the least
    important weights are chosen, over all rows (n of m: inside each group, when it is reached); then for each
    column the error of the removed weights, divided by U_jj, is compensated in the columns to its right along
    U's row.
    """

    name: ClassVar[str] = "sparsegpt"
    source: ClassVar[str] = "sparsegpt: Frantar & Alistarh 2023, arXiv:2301.00774"
    statistics: ClassVar[RequiredStatistics] = "moments"

    def __call__(
        self, weight: Tensor, found: InputStatistics | None, pattern: SparsityPattern, draw: Generator
    ) -> Tensor:
        """Return the weight with zeros and with compensated kept weights."""
        assert found is not None
        assert found.second_moment is not None
        dead = found.second_moment.diagonal() == 0
        factor = inverse_cholesky(found)[0].to(weight)
        new = weight.clone()
        new[:, dead] = 0.0
        at_once = max(1, _BLOCK_COLUMNS // (pattern.group or 1)) * (pattern.group or 1)  # whole groups
        for start in range(0, new.shape[1], at_once):
            end = min(start + at_once, new.shape[1])
            errors = _sparsify_columns(new[:, start:end], factor[start:end, start:end], pattern)
            new[:, end:] -= errors @ factor[start:end, end:]
        return new


def _sparsify_columns(columns: Tensor, factor: Tensor, pattern: SparsityPattern) -> Tensor:
    """Sparsify some columns, float [N, C], in place; return the errors [N, C] to compensate."""
    weighing = factor.diagonal().square()
    errors = torch.zeros_like(columns)
    gone = torch.zeros_like(columns, dtype=torch.bool)
    if pattern.group is None:
        gone = pattern.zero_mask(columns.square() / weighing, "matrix")
    for at in range(columns.shape[1]):
        if pattern.group is not None and at % pattern.group == 0:
            part = slice(at, at + pattern.group)
            gone[:, part] = pattern.zero_mask(columns[:, part].square() / weighing[part], "row")
        lost = columns[:, at].where(gone[:, at], torch.zeros(()))
        errors[:, at] = lost / factor[at, at]
        columns[:, at:] -= errors[:, at : at + 1] * factor[at, at:]
        columns[:, at].masked_fill_(gone[:, at], 0.0)  # exactly zero, without rounding errors
    return errors
