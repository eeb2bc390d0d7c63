"""SparseGPT: each weight that goes is made up for by those to the right of it.

Shapes: N = outputs, K = inputs.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Generator, Tensor

from smelt.compress.calibration.inverse import inverse_factor
from smelt.compress.calibration.statistics import InputStatistics
from smelt.compress.sparsify.method import Looks
from smelt.compress.sparsify.pattern import Pattern

_COLUMNS = 128  # that are masked at once


class SparseGpt:
    """Goes through the columns from left to right, as the published code does (sparsegpt.py).

    Frantar & Alistarh 2023, SparseGPT, arXiv:2301.00774. With H = 2 X X^T / tokens (an input that is always 0
    has 1 on the diagonal and loses its weights; 1 % of the mean diagonal is added) and U the upper Cholesky
    factor of its inverse, a weight matters by w^2 / U_jj^2. In blocks of 128 columns those of the least are
    chosen, over all rows (n of m: inside each group, when it is reached); then for each column the error of
    what went, divided by U_jj, is taken off the columns to its right along U's row.
    """

    name: ClassVar[str] = "sparsegpt"
    source: ClassVar[str] = "sparsegpt: Frantar & Alistarh 2023, arXiv:2301.00774"
    looks: ClassVar[Looks] = "moments"

    def __call__(
        self, weight: Tensor, found: InputStatistics | None, pattern: Pattern, draw: Generator
    ) -> Tensor:
        """Return the weight with zeros, and what stays changed to make up for them."""
        assert found is not None
        assert found.second is not None
        dead = found.second.diagonal() == 0
        factor = inverse_factor(found)[0].to(weight)
        new = weight.clone()
        new[:, dead] = 0.0
        at_once = max(1, _COLUMNS // (pattern.group or 1)) * (pattern.group or 1)  # whole groups
        for start in range(0, new.shape[1], at_once):
            end = min(start + at_once, new.shape[1])
            errors = _block(new[:, start:end], factor[start:end, start:end], pattern)
            new[:, end:] -= errors @ factor[start:end, end:]
        return new


def _block(columns: Tensor, factor: Tensor, pattern: Pattern) -> Tensor:
    """Sparsify some columns, float [N, C], in place; return the errors [N, C] that are to be made up for."""
    weighing = factor.diagonal().square()
    errors = torch.zeros_like(columns)
    gone = torch.zeros_like(columns, dtype=torch.bool)
    if pattern.group is None:
        gone = pattern.gone(columns.square() / weighing, "matrix")
    for at in range(columns.shape[1]):
        if pattern.group is not None and at % pattern.group == 0:
            part = slice(at, at + pattern.group)
            gone[:, part] = pattern.gone(columns[:, part].square() / weighing[part], "row")
        lost = columns[:, at].where(gone[:, at], torch.zeros(()))
        errors[:, at] = lost / factor[at, at]
        columns[:, at:] -= errors[:, at : at + 1] * factor[at, at:]
        columns[:, at].masked_fill_(gone[:, at], 0.0)  # and not what rounding left of it
    return errors
