"""The settings of gradual pruning in training.

`sparsify` of `finetune` and `distill` prunes single weights gradually during training.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from smelt.compress.sparsify.methods.registry import GRADUAL_METHODS
from smelt.compress.sparsify.pattern import parse_pattern
from smelt.core.errors import SettingError
from smelt.stage import Settings


class GradualSparsitySettings(Settings):
    """Sets weights of the blocks' linear layers to zero while the others train."""

    method: Literal[tuple(GRADUAL_METHODS)] = Field(  # type: ignore[valid-type]
        default="movement",
        description="; ".join(f"{name}: {known.description}" for name, known in GRADUAL_METHODS.items()),
    )
    sparsity: float = Field(default=0.5, gt=0, lt=1, description="final fraction of zeros in each layer")
    pattern: str | None = Field(
        default=None,
        description='instead of sparsity: "2:4" keeps 2 of each 4 neighboring inputs',
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
            unused = {"sparsity", "pattern"}
        else:
            unused = {"threshold", "penalty"} | ({"sparsity"} if self.pattern is not None else set())
        return {name: value for name, value in super().to_report().items() if name not in unused}

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
    def _check_pattern(cls, value: str | None) -> str | None:
        if value is not None:
            parse_pattern(value)
        return value

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        set_fields = self.model_fields_set
        if self.end <= self.start:
            raise SettingError(
                f"end ({self.end:g}) must be greater than start ({self.start:g})", code="end-before-start"
            )
        if self.pattern is not None and "sparsity" in set_fields:
            raise SettingError("set either sparsity or pattern, not both", code="settings-conflict")
        soft, hard = set_fields & {"threshold", "penalty"}, set_fields & {"sparsity", "pattern"}
        if self.uses_threshold and hard:
            raise SettingError(
                f"{min(hard)} has no effect with {self.method}: threshold and penalty decide the zeros",
                code="unused-setting",
            )
        if not self.uses_threshold and soft:
            threshold_methods = [name for name, method in GRADUAL_METHODS.items() if method.uses_threshold]
            raise SettingError(
                f"{min(soft)} has no effect with {self.method}, only with {' and '.join(threshold_methods)}",
                code="unused-setting",
            )
        return self
