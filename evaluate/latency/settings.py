"""The settings of `score.latency`, and timing prompts for language models.

Prompts are pieces of running text with about the same number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from smelt.core.errors import InputError, SettingError
from smelt.models.text_rules import NO_LIMIT
from smelt.stage import Settings

DEPLOYABLE_STEPS, ALL_STEPS = "deployable", "all"


class LatencySettings(Settings):
    """How latency is measured."""

    batch_sizes: tuple[int, ...] = Field(default=(1, 8), description="samples per call")
    threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="threads per process; default: the artifact's, else 1",
    )
    rounds: int = Field(
        default=5,
        ge=3,
        le=1000,
        description="pairs of rounds; disturbed rounds are repeated, up to three times this number in total",
    )
    texts: int = Field(
        default=16, ge=1, le=10_000, description="number of test samples, the same for all artifacts"
    )
    min_round_ms: float = Field(default=200.0, gt=0, le=60_000, description="minimum duration of a round")
    seconds: float = Field(
        default=20.0,
        gt=0,
        description="time limit per artifact and batch size; with a slow baseline fewer samples are used",
    )
    process_timeout_seconds: float = Field(
        default=600.0, gt=0, description="a process that reports nothing for this time is stopped"
    )
    prompt_tokens: int = Field(default=32, ge=1, le=1 << 20, description="language models: prompt length")
    new_tokens: int = Field(
        default=32, ge=1, le=4096, description="language models: tokens generated per call"
    )
    time_limit_minutes: float | None = Field(
        default=None,
        gt=0,
        le=100_000,
        description="time limit for all measurements; default: the time of all stages, at least 1",
    )
    baseline: Literal["eager", "compiled"] = Field(
        default="eager",
        description="compiled: the baseline, if it is a torch model that calls no decoder, is timed as"
        " torch.compile makes it; a C++ compiler is required",
    )
    steps: str | tuple[str, ...] = Field(
        default=DEPLOYABLE_STEPS,
        description="deployable, all, or names of steps; baseline and steps with a speed gate are"
        " always measured",
    )

    @field_validator("batch_sizes")
    @classmethod
    def _check_batch_sizes(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if not sizes or len(set(sizes)) != len(sizes) or any(not 1 <= s <= 4096 for s in sizes):
            raise SettingError(
                f"expected distinct integers from 1 to 4096, got {list(sizes)}", code="wrong-value"
            )
        return sizes

    def cache_key(self) -> dict[str, Any]:
        """Return, JSON-able, the settings that an artifact's times depend on (not the time limit)."""
        return self.model_dump(mode="json", exclude={"time_limit_minutes", "steps"})

    def named_steps(self) -> tuple[str, ...]:
        """Return the names of the listed steps."""
        if isinstance(self.steps, str):
            return () if self.steps in (DEPLOYABLE_STEPS, ALL_STEPS) else (self.steps,)
        return self.steps

    def is_timed(self, name: str, deployable: bool) -> bool:
        """Return whether the step `name` is timed."""
        return self.steps == ALL_STEPS or (
            deployable if self.steps == DEPLOYABLE_STEPS else name in self.named_steps()
        )


_CHARS_PER_TOKEN = 8  # upper estimate: the tokenizer's count then cuts the rest


def prompt_texts(texts: Sequence[str], tokens: int) -> list[str]:
    """Join samples of running text and cut them, at spaces, in pieces of at least `tokens` tokens.

    Raises:
        InputError: there is only white space.
    """
    words = " ".join(texts).split()
    prompts: list[str] = []
    current_words: list[str] = []
    num_characters = 0
    for token in words:
        current_words.append(token)
        num_characters += len(token) + 1
        if num_characters >= _CHARS_PER_TOKEN * tokens:
            prompts.append(" ".join(current_words))
            current_words, num_characters = [], 0
    if not prompts and not current_words:
        raise InputError(
            "Latency: the test samples contain no text for prompts. Check the test data.", code="empty-data"
        )
    return prompts or [" ".join(current_words)]


def truncate_prompts(texts: Sequence[str], runner: Any, lengths: tuple[int, int]) -> tuple[list[str], int]:
    """Return each text cut to a number of tokens, in whole words, and the number of tokens to generate.

    Args:
        texts: as `prompt_texts` returns them.
        runner: of a language model; its tokenizer counts.
        lengths: tokens of a prompt, and tokens to generate; fewer where the model has fewer positions.
    """
    tokenizer, limit = runner.text.tokenizer, runner.text.max_input_length
    max_prompt_tokens = max(1, min(lengths[0], limit // 2))
    prompts = [_truncate_words(text.split(), tokenizer, max_prompt_tokens) for text in texts]
    return prompts, max(1, min(lengths[1], limit - max_prompt_tokens))


def _truncate_words(words: Sequence[str], tokenizer: Any, max_tokens: int) -> str:
    """Return the most of `words`, at least one, that make at most `max_tokens` tokens; found by bisection."""
    low, high = 1, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        [ids] = tokenizer.encode_batch([" ".join(words[:middle])], NO_LIMIT).ids
        if len(ids) <= max_tokens:
            low = middle
        else:
            high = middle - 1
    return " ".join(words[:low])
