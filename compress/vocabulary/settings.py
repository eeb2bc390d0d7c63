"""The settings of `vocabulary`."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from smelt.core.errors import SettingError
from smelt.core.stage import Settings, StoredDtype


class VocabularySettings(Settings):
    """Settings of `vocabulary`. At most one of min_count, coverage and size; none means min_count: 1."""

    min_count: int | None = Field(
        default=None,
        ge=1,
        description="tokens that come so often in the training rows stay; 1 if nothing is said",
    )
    coverage: float | None = Field(
        default=None, gt=0, le=1, description="the most frequent tokens stay, this share of all that come"
    )
    size: int | None = Field(
        default=None, ge=1, description="so many tokens stay, the most frequent ones and those that must"
    )
    round_to: int = Field(
        default=8, ge=1, description="tokens that stay are a multiple of this, without size"
    )
    dtype: StoredDtype = "keep"

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(value is not None for value in (self.min_count, self.coverage, self.size)) > 1:
            raise SettingError("give one of min_count, coverage and size", code="settings-conflict")
        return self
