"""The settings of `score.generation`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from smelt.core.errors import SettingError
from smelt.core.stage import Settings

TokenId = Annotated[int, Field(ge=0)]
_OF_BEAMS = ("length_penalty", "early_stopping")
_OF_SAMPLING = ("temperature", "top_k", "top_p", "seed")


class GenerationSettings(Settings):
    """How texts are generated, with the names of a Hugging Face generation config.

    Missing settings are taken from the model's own generation config.
    """

    num_beams: int = Field(default=1, ge=1, le=64, description="number of beams; 1: greedy search")
    max_new_tokens: int | None = Field(
        default=None, ge=1, le=4096, description="longest output in tokens; default: the model's, else 128"
    )
    min_new_tokens: int | None = Field(default=None, ge=0, le=4096, description="shortest output in tokens")
    min_length: int | None = Field(
        default=None, ge=0, le=4096, description="as min_new_tokens, counting the start token or the prompt"
    )
    length_penalty: float | None = Field(
        default=None, ge=-10, le=10, description="beams: scores are divided by length to this power"
    )
    early_stopping: bool | Literal["never"] | None = Field(
        default=None, description="beams: when a search ends"
    )
    no_repeat_ngram_size: int | None = Field(
        default=None, ge=0, le=4096, description="n-grams of this size occur once"
    )
    repetition_penalty: float | None = Field(
        default=None, gt=0, le=100, description="divides logits of generated tokens"
    )
    bad_words_ids: tuple[Annotated[tuple[TokenId, ...], Field(min_length=1)], ...] | None = Field(
        default=None, description="sequences that are not generated"
    )
    forced_bos_token_id: TokenId | None = Field(default=None, description="first token")
    forced_eos_token_id: TokenId | None = Field(default=None, description="last token at the limit")
    suppress_tokens: tuple[TokenId, ...] | None = Field(default=None, description="never generated")
    begin_suppress_tokens: tuple[TokenId, ...] | None = Field(default=None, description="not generated first")
    do_sample: bool = Field(default=False, description="draw each token")
    temperature: float | None = Field(default=None, gt=0, le=100, description="sampling: of the softmax")
    top_k: int | None = Field(default=None, ge=0, description="sampling: number of candidates; 0: all")
    top_p: float | None = Field(
        default=None, gt=0, le=1, description="sampling: total probability of candidates"
    )
    seed: int | None = Field(default=None, ge=0, le=2**32 - 1, description="sampling")

    @model_validator(mode="after")
    def _check_used_settings(self) -> Self:
        if self.do_sample and self.num_beams > 1:
            raise SettingError(
                f"do_sample: true requires num_beams: 1, got {self.num_beams}",
                code="settings-conflict",
            )
        if self.min_length is not None and self.min_new_tokens is not None:
            raise SettingError("set either min_new_tokens or min_length, not both", code="settings-conflict")
        for name in _OF_BEAMS:
            if self.num_beams == 1 and getattr(self, name) is not None:
                raise SettingError(f"{name} has no effect with num_beams: 1", code="unused-setting")
        for name in _OF_SAMPLING:
            if not self.do_sample and getattr(self, name) is not None:
                raise SettingError(f"{name} has no effect without do_sample: true", code="unused-setting")
        return self

    def summary(self) -> str:
        """Return the kind of search and the maximum output length as text."""
        kind = "sampled" if self.do_sample else f"beam {self.num_beams}" if self.num_beams > 1 else "greedy"
        if self.max_new_tokens is None:
            return f"{kind}, up to the model's longest output"
        return f"{kind}, at most {self.max_new_tokens} new tokens"
