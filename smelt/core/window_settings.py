"""Settings for cutting running text into windows for a language model."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from smelt.core.errors import SettingError


class Windows(BaseModel):
    """How running text is cut into windows for a language model: samples are joined, tokenized and cut."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    length: int | None = Field(
        default=None, ge=2, description="tokens per window; default: 1024, or the model's limit if smaller"
    )
    stride: int | None = Field(
        default=None,
        ge=1,
        description="tokens between the starts of two windows when scoring; smaller: more context,"
        " slower; default: length",
    )
    separator: str | None = Field(
        default=None,
        description="text between two samples; default: a line break for plain text, else an empty line",
    )

    @model_validator(mode="after")
    def _fits(self) -> Windows:
        if self.length is not None and self.stride is not None and self.stride > self.length:
            raise SettingError(
                f"stride {self.stride} is larger than length {self.length}, so text between two"
                " windows would be skipped; set stride to at most length",
                code="settings-conflict",
            )
        return self
