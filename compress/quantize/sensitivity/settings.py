"""Settings of what the damages of layers decide: which stay float, and how many bits each gets."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from smelt.core.errors import SettingError
from smelt.core.stage import Settings
from smelt.runtime.schemes.registry import WIDTHS


class Budget(Settings):
    """How many layers `skip: auto` may leave float; without either number a tenth of them."""

    layers: int | None = Field(default=None, ge=0, description="at most so many")
    damage: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="none besides, once the others do at most this share of all damage",
    )


class Bits(Settings):
    """How many bits each layer gets, the worst the most: one of budget and max_drop."""

    budget: float | None = Field(
        default=None, gt=0, description="bits a weight on average, with scales and zero points"
    )
    max_drop: float | None = Field(
        default=None, ge=0, description="what the metric may lose on validation data, against the float model"
    )
    metric: str | None = Field(
        default=None, description="for max_drop; unless given, the first that the recipe scores"
    )
    widths: list[Literal[tuple(WIDTHS)]] = Field(  # type: ignore[valid-type]
        default=sorted(WIDTHS), min_length=2, description="what is chosen between"
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.budget is None) == (self.max_drop is None):
            raise SettingError("give one of budget and max_drop", code="settings-conflict")
        if self.metric is not None and self.max_drop is None:
            raise SettingError("metric is for max_drop; add that, or remove it", code="unused-setting")
        if len(set(self.widths)) < len(self.widths):
            raise SettingError(f"widths {self.widths} names one twice", code="duplicate-value")
        return self
