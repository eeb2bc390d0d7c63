"""The settings of zeros that come step by step in a training: `sparsify` of `finetune` and `distill`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from smelt.compress.sparsify.pattern import read_pattern
from smelt.core.errors import SettingError
from smelt.core.stage import Settings


class SparsitySettings(Settings):
    """Weights of the blocks' linear layers that become zero while the others train."""

    method: Literal["movement", "soft-movement", "magnitude"] = Field(
        default="movement",
        description="movement: those go that training drives towards zero; soft-movement: those whose score"
        " falls below a threshold; magnitude: the smallest",
    )
    sparsity: float = Field(
        default=0.5, gt=0, lt=1, description="fraction of each layer that is zero at last"
    )
    pattern: str | None = Field(
        default=None, description='"n:m" instead of sparsity: of each m neighbouring inputs n stay, as "2:4"'
    )
    what: tuple[Literal["attention", "ffn"], ...] = Field(
        default=("attention", "ffn"), min_length=1, description="products of attention, feed-forward products"
    )
    start: float = Field(default=0.1, ge=0, lt=1, description="part of the updates before the first zero")
    end: float = Field(
        default=0.7, gt=0, le=1, description="part of the updates after which all zeros are there"
    )
    scores_learning_rate: float = Field(
        default=1e-2, gt=0, description="highest learning rate of the scores of movement and soft-movement"
    )
    threshold: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="soft-movement: what sigmoid(score) of a weight that stays is above",
    )
    penalty: float = Field(
        default=100.0, ge=0, description="soft-movement: weight of the mean of sigmoid(score) in the loss"
    )

    @property
    def learns(self) -> bool:
        """Whether it trains scores of its own."""
        return self.method != "magnitude"

    @field_validator("pattern")
    @classmethod
    def _reads(cls, value: str | None) -> str | None:
        if value is not None:
            read_pattern(value)
        return value

    @model_validator(mode="after")
    def _fit(self) -> Self:
        given = self.model_fields_set
        if self.end <= self.start:
            raise SettingError(
                f"end ({self.end:g}) must come after start ({self.start:g})", code="end-before-start"
            )
        if self.pattern is not None and "sparsity" in given:
            raise SettingError("give one of sparsity and pattern, not both", code="settings-conflict")
        soft, hard = given & {"threshold", "penalty"}, given & {"sparsity", "pattern"}
        if self.method == "soft-movement" and hard:
            raise SettingError(
                f"{hard.pop()} means nothing under soft-movement: threshold and penalty make the zeros",
                code="unused-setting",
            )
        if self.method != "soft-movement" and soft:
            raise SettingError(
                f"{soft.pop()} means nothing under {self.method}, only under soft-movement",
                code="unused-setting",
            )
        return self
