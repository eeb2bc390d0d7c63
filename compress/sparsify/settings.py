"""The sparsity pattern (a fraction, or n of each m weights), and the settings of gradual pruning in training.

`sparsify` of `finetune` and `distill` prunes single weights gradually during training.

Shapes: N = outputs, K = inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from smelt.compress.sparsify.methods.registry import GRADUAL_METHODS
from smelt.core.errors import SettingError
from smelt.core.stage import Settings

if TYPE_CHECKING:
    from torch import Tensor


# The weights that are compared for a fraction: the whole matrix, or each row.
ComparisonScope = Literal["matrix", "row"]


@dataclass(frozen=True)
class SparsityPattern:
    """The fraction of weights to set to zero.

    sparsity: the fraction. kept, group: `kept` of each `group` neighbouring inputs in a row are kept; they
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
    kept, _, group = text.partition(":")
    if not (kept.isdecimal() and group.isdecimal() and 1 <= int(kept) < int(group)):
        raise SettingError(
            f'expected "n:m" with 1 <= n < m, such as "2:4", got {text[:40]!r}', code="wrong-pattern"
        )
    return int(kept), int(group)


def _smallest(scores: Tensor, count: int) -> Tensor:
    """Return the positions of the `count` smallest along the last axis, bool; ties are arbitrary."""
    import torch

    least = scores.topk(count, dim=-1, largest=False, sorted=False).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, least, True)


class GradualSparsitySettings(Settings):
    """Sets weights of the blocks' linear layers to zero while the others train."""

    method: Literal[tuple(GRADUAL_METHODS)] = Field(  # type: ignore[valid-type]
        default="movement",
        description="; ".join(f"{name}: {known.description}" for name, known in GRADUAL_METHODS.items()),
    )
    sparsity: float = Field(default=0.5, gt=0, lt=1, description="final fraction of zeros in each layer")
    pattern: str | None = Field(
        default=None,
        description='instead of sparsity: "2:4" keeps 2 of each 4 neighbouring inputs',
    )
    targets: tuple[Literal["attention", "ffn"], ...] = Field(
        default=("attention", "ffn"),
        min_length=1,
        description="linear layers to sparsify",
    )
    start: float = Field(
        default=0.1, ge=0, lt=1, description="fraction of the updates before the first zeros"
    )
    end: float = Field(
        default=0.7, gt=0, le=1, description="fraction of the updates until sparsity is reached"
    )
    scores_learning_rate: float = Field(
        default=1e-2, gt=0, description="peak learning rate of the scores of movement and soft-movement"
    )
    threshold: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="soft-movement: weights with sigmoid(score) above this are kept",
    )
    penalty: float = Field(
        default=100.0, ge=0, description="soft-movement: weight of mean sigmoid(score) in the loss"
    )

    def to_report(self) -> dict[str, Any]:
        """Return what a report shows: only the settings that decide the zeros with this method."""
        if self.uses_threshold:
            idle = {"sparsity", "pattern"}
        else:
            idle = {"threshold", "penalty"} | ({"sparsity"} if self.pattern is not None else set())
        return {name: value for name, value in super().to_report().items() if name not in idle}

    @property
    def trains_scores(self) -> bool:
        """Whether the method trains scores."""
        return GRADUAL_METHODS[self.method].trains_scores

    @property
    def uses_threshold(self) -> bool:
        """Whether threshold and penalty decide the zeros."""
        return GRADUAL_METHODS[self.method].uses_threshold

    @field_validator("pattern")
    @classmethod
    def _reads(cls, value: str | None) -> str | None:
        if value is not None:
            parse_pattern(value)
        return value

    @model_validator(mode="after")
    def _fit(self) -> Self:
        given = self.model_fields_set
        if self.end <= self.start:
            raise SettingError(
                f"end ({self.end:g}) must be greater than start ({self.start:g})", code="end-before-start"
            )
        if self.pattern is not None and "sparsity" in given:
            raise SettingError("set either sparsity or pattern, not both", code="settings-conflict")
        soft, hard = given & {"threshold", "penalty"}, given & {"sparsity", "pattern"}
        if self.uses_threshold and hard:
            raise SettingError(
                f"{min(hard)} has no effect with {self.method}: threshold and penalty decide the zeros",
                code="unused-setting",
            )
        if not self.uses_threshold and soft:
            others = [name for name, method in GRADUAL_METHODS.items() if method.uses_threshold]
            raise SettingError(
                f"{min(soft)} has no effect with {self.method}, only with {' and '.join(others)}",
                code="unused-setting",
            )
        return self
