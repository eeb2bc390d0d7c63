"""SparseGPT: columns from left to right, as the published code does (sparsegpt.py).

Frantar & Alistarh 2023, SparseGPT, arXiv:2301.00774. With H = 2 X X^T / tokens (an input that is always 0
has 1 on the diagonal and loses its weights; 1 % of the mean diagonal is added) and U the upper Cholesky
factor of its inverse, the importance of a weight is w^2 / U_jj^2. In blocks of 128 columns the least
important weights are chosen, over all rows (n of m: inside each group, when it is reached); then for each
column the error of the removed weights, divided by U_jj, is compensated in the columns to its right along
U's row. Zeros of before are removed weights too: what they would get as compensation is passed on.

Shapes: N = outputs, K = inputs, C = columns of a block.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from smelt.calibration.statistics import inverse_cholesky
from smelt.compress.sparsify.pattern import SparsityInput, SparsityPattern

_BLOCK_COLUMNS = 128  # per mask


def sparsify_layer(layer: SparsityInput, pattern: SparsityPattern, draw: Generator) -> Tensor:
    """Return the weight with zeros and with compensated kept weights, float32 [N, K]."""
    assert layer.statistics is not None
    assert layer.statistics.second_moment is not None
    dead = layer.statistics.second_moment.diagonal() == 0
    factor = inverse_cholesky(layer.statistics)[0].to(layer.weight)
    sparse = layer.weight.clone()
    sparse[:, dead] = 0.0
    block_size = max(1, _BLOCK_COLUMNS // (pattern.group or 1)) * (pattern.group or 1)  # whole groups
    for start in range(0, sparse.shape[1], block_size):
        end = min(start + block_size, sparse.shape[1])
        zeros = None if layer.zeros is None else layer.zeros[:, start:end]
        errors = _sparsify_columns(sparse[:, start:end], factor[start:end, start:end], pattern, zeros)
        sparse[:, end:] -= errors @ factor[start:end, end:]
    return sparse


def _sparsify_columns(
    columns: Tensor, factor: Tensor, pattern: SparsityPattern, zeros: Tensor | None
) -> Tensor:
    """Sparsify some columns, float [N, C], in place; return the errors [N, C] to compensate."""
    weighing = factor.diagonal().square()
    errors = torch.zeros_like(columns)
    removed = torch.zeros_like(columns, dtype=torch.bool)
    if pattern.group is None:
        removed = pattern.zero_mask(columns.square() / weighing, "matrix", zeros)
    for column in range(columns.shape[1]):
        if pattern.group is not None and column % pattern.group == 0:
            group = slice(column, column + pattern.group)
            zeros_of_group = None if zeros is None else zeros[:, group]
            removed[:, group] = pattern.zero_mask(
                columns[:, group].square() / weighing[group], "row", zeros_of_group
            )
        removed_weights = columns[:, column].where(removed[:, column], torch.zeros(()))
        errors[:, column] = removed_weights / factor[column, column]
        columns[:, column:] -= errors[:, column : column + 1] * factor[column, column:]
        columns[:, column].masked_fill_(removed[:, column], 0.0)  # exactly zero, without rounding errors
    return errors
