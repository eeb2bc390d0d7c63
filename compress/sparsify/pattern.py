"""Which weights of a matrix become zero, given how much each matters: a fraction, or n of each m.

Shapes: N = outputs, K = inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from smelt.core.errors import SettingError

if TYPE_CHECKING:
    from torch import Tensor

# Among which weights a fraction is taken: the whole matrix, or each row of it.
Within = Literal["matrix", "row"]


@dataclass(frozen=True)
class Pattern:
    """How many weights become zero.

    sparsity: a fraction of them. kept, group: of each `group` inputs in a row of the matrix `kept` stay;
    where there is a group, `sparsity` follows from it.
    """

    sparsity: float
    kept: int | None = None
    group: int | None = None

    def fits(self, inputs: int) -> bool:
        """Say whether rows of so many inputs can be divided so."""
        return self.group is None or inputs % self.group == 0

    def gone(self, scores: Tensor, within: Within) -> Tensor:
        """Return which weights become zero, bool [N, K]: those of the least scores.

        Args:
            scores: float [N, K].
            within: what is compared, where the pattern is a fraction; the count is rounded down.
        """
        if self.group is not None and self.kept is not None:
            parts = scores.reshape(len(scores), -1, self.group)
            return _least(parts, self.group - self.kept).view_as(scores)
        if within == "row":
            return _least(scores, int(scores.shape[1] * self.sparsity))
        return _least(scores.flatten(), int(scores.numel() * self.sparsity)).view_as(scores)


def read_pattern(text: str) -> tuple[int, int]:
    """Return n and m of "n:m".

    Raises:
        ValueError: it is no such text, or not 1 <= n < m.
    """
    kept, _, group = text.partition(":")
    if not (kept.isdecimal() and group.isdecimal() and 1 <= int(kept) < int(group)):
        raise SettingError(
            f'expected "n:m" with 1 <= n < m, as "2:4", read {text[:40]!r}', code="wrong-pattern"
        )
    return int(kept), int(group)


def _least(scores: Tensor, count: int) -> Tensor:
    """Return where the `count` least of the last axis are, bool; of equal ones any."""
    import torch

    least = scores.topk(count, dim=-1, largest=False, sorted=False).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, least, True)
