"""How texts are generated, as a recipe says it."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from smelt.core.errors import SettingError
from smelt.core.stage import Settings

Token = Annotated[int, Field(ge=0)]
_OF_BEAMS = ("length_penalty", "early_stopping")
_OF_SAMPLING = ("temperature", "top_k", "top_p", "seed")


class Generation(Settings):
    """How texts are generated; the names are those of a Hugging Face generation config.

    beams: 1 is greedy search. do_sample: draw each token instead. What is not given comes from the
    model's own generation config; without one, at most 128 new tokens. Tokens are numbers of the
    model's vocabulary.
    """

    beams: int = Field(default=1, ge=1, le=64)
    max_new_tokens: int | None = Field(default=None, ge=1, le=4096)
    min_new_tokens: int | None = Field(default=None, ge=0, le=4096)
    min_length: int | None = Field(default=None, ge=0, le=4096)
    length_penalty: float | None = Field(default=None, ge=-10, le=10)
    early_stopping: bool | Literal["never"] | None = None
    no_repeat_ngram_size: int | None = Field(default=None, ge=0, le=4096)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    bad_words_ids: tuple[Annotated[tuple[Token, ...], Field(min_length=1)], ...] | None = None
    forced_bos_token_id: Token | None = None
    forced_eos_token_id: Token | None = None
    suppress_tokens: tuple[Token, ...] | None = None
    begin_suppress_tokens: tuple[Token, ...] | None = None
    do_sample: bool = False
    temperature: float | None = Field(default=None, gt=0, le=100)
    top_k: int | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=0, le=2**32 - 1)

    @model_validator(mode="after")
    def _means_something(self) -> Self:
        if self.do_sample and self.beams > 1:
            raise SettingError(
                f"do_sample draws one text; it does not go with beams: {self.beams}", code="settings-conflict"
            )
        if self.min_length is not None and self.min_new_tokens is not None:
            raise SettingError("give min_new_tokens or min_length, not both", code="settings-conflict")
        for name in _OF_BEAMS:
            if self.beams == 1 and getattr(self, name) is not None:
                raise SettingError(f"{name} means nothing without beams above 1", code="unused-setting")
        for name in _OF_SAMPLING:
            if not self.do_sample and getattr(self, name) is not None:
                raise SettingError(f"{name} means nothing without do_sample: true", code="unused-setting")
        return self

    def summary(self) -> str:
        """Return the kind of search and the longest output in a few words."""
        kind = "sampled" if self.do_sample else f"beam {self.beams}" if self.beams > 1 else "greedy"
        if self.max_new_tokens is None:
            return f"{kind}, to the model's longest output"
        return f"{kind}, at most {self.max_new_tokens} new tokens"
