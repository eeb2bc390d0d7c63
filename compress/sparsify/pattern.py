"""The sparsity pattern: a fraction, or n of each m weights; and what a method is called with.

Shapes: N = outputs, K = inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from smelt.core.errors import SettingError

if TYPE_CHECKING:
    from torch import Tensor

    from smelt.calibration.statistics import InputStatistics


# The weights that are compared for a fraction: the whole matrix, or each row.
ComparisonScope = Literal["matrix", "row"]


@dataclass(frozen=True)
class SparsityPattern:
    """The fraction of weights to set to zero.

    sparsity: the fraction. kept, group: `kept` of each `group` neighboring inputs in a row are kept; they
    determine `sparsity`.
    """

    sparsity: float
    kept: int | None = None
    group: int | None = None

    def fits(self, inputs: int) -> bool:
        """Return whether rows of so many inputs can be divided into groups."""
        return self.group is None or inputs % self.group == 0

    def zero_mask(self, scores: Tensor, within: ComparisonScope, zeros: Tensor | None = None) -> Tensor:
        """Return the weights to set to zero, bool [N, K]: those with the smallest scores.

        Args:
            scores: float [N, K].
            within: weights that are compared if the pattern is a fraction; the count is rounded down.
            zeros: bool [N, K], weights that are zero already and count first; all of them are in the result.
        """
        if zeros is not None:
            return self.zero_mask(scores.masked_fill(zeros, -math.inf), within) | zeros
        if self.group is not None and self.kept is not None:
            parts = scores.reshape(len(scores), -1, self.group)
            return _smallest(parts, self.group - self.kept).view_as(scores)
        if within == "row":
            return _smallest(scores, int(scores.shape[1] * self.sparsity))
        return _smallest(scores.flatten(), int(scores.numel() * self.sparsity)).view_as(scores)


def parse_pattern(text: str) -> tuple[int, int]:
    """Return n and m of the text "n:m".

    Raises:
        ValueError: the text has another form, or not 1 <= n < m.
    """
    num_kept, _, group = text.partition(":")
    if not (num_kept.isdecimal() and group.isdecimal() and 1 <= int(num_kept) < int(group)):
        raise SettingError(
            f'expected "n:m" with 1 <= n < m, such as "2:4", got {text[:40]!r}', code="wrong-pattern"
        )
    return int(num_kept), int(group)


def _smallest(scores: Tensor, count: int) -> Tensor:
    """Return the positions of the `count` smallest along the last axis, bool; ties are arbitrary."""
    import torch

    indices = scores.topk(count, dim=-1, largest=False, sorted=False).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, indices, True)


@dataclass(frozen=True)
class SparsityInput:
    """The linear layer that a method is called with.

    weight: float32 [N, K]. statistics: of its inputs; None if the method needs none. zeros: bool [N, K], the
    weights that are zero already and stay zero, which count in the pattern; None for a dense layer.
    """

    weight: Tensor
    statistics: InputStatistics | None = None
    zeros: Tensor | None = None
