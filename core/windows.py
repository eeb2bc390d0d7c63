"""How running text becomes the windows that a language model sees."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from smelt.core.errors import SettingError


class Windows(BaseModel):
    """How running text is cut for a language model: rows are joined, tokenized, cut in windows.

    length: tokens that the model sees at once; not given: 1024, or the model's limit where that is less.
    stride: how far the next window begins after the last one, when text is scored; not given: the length.
    A smaller one gives every token more context and takes more time. Every token is predicted once.
    separator: stands between two rows; not given: a line's end for plain text, an empty line otherwise.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    length: int | None = Field(default=None, ge=2)
    stride: int | None = Field(default=None, ge=1)
    separator: str | None = None

    @model_validator(mode="after")
    def _fits(self) -> Windows:
        if self.length is not None and self.stride is not None and self.stride > self.length:
            raise SettingError(
                f"stride {self.stride} would leave out text between windows of {self.length}",
                code="settings-conflict",
            )
        return self
