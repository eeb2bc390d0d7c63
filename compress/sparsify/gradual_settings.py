"""Gradual pruning of single weights during training: `sparsify` of `finetune` and `distill`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from smelt.compress.sparsify.pattern import parse_pattern
from smelt.core.errors import SettingError
from smelt.core.stage import Settings


class GradualSparsitySettings(Settings):
    """Sets weights of the blocks' linear layers to zero while the others train."""

    method: Literal["movement", "soft-movement", "magnitude"] = Field(
        default="movement",
        description="movement: removes weights that move to zero; soft-movement: weights with a low"
        " score; magnitude: the smallest weights",
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

    @property
    def trains_scores(self) -> bool:
        """Whether the method trains scores."""
        return self.method != "magnitude"

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
        if self.method == "soft-movement" and hard:
            raise SettingError(
                f"{hard.pop()} has no effect with soft-movement: threshold and penalty decide the zeros",
                code="unused-setting",
            )
        if self.method != "soft-movement" and soft:
            raise SettingError(
                f"{soft.pop()} has no effect with {self.method}, only with soft-movement",
                code="unused-setting",
            )
        return self
