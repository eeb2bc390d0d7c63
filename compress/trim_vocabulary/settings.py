"""The settings of `trim-vocabulary`."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from smelt.core.errors import SettingError
from smelt.core.stage import Settings, StoredDtype


class TrimVocabularySettings(Settings):
    """Settings of `trim-vocabulary`: at most one of min_count, coverage and size; default min_count: 1."""

    min_count: int | None = Field(
        default=None,
        ge=1,
        description="keep tokens that occur at least this often; default 1",
    )
    coverage: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="keep the most frequent tokens, together this fraction of all occurrences",
    )
    size: int | None = Field(default=None, ge=1, description="keep this many tokens")
    multiple_of: int = Field(
        default=8, ge=1, description="the number of tokens is a multiple of this, unless size is set"
    )
    dtype: StoredDtype = "keep"

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(value is not None for value in (self.min_count, self.coverage, self.size)) > 1:
            raise SettingError("set only one of min_count, coverage and size", code="settings-conflict")
        return self
