"""What a recipe may say of how latency is measured."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from smelt.core.errors import SettingError
from smelt.core.stage import Settings

DEPLOYABLE, ALL = "deployable", "all"


class LatencySettings(Settings):
    """How latency is measured.

    batch_sizes: texts per call. threads: per process; unless given, those that are written into
    an artifact, else one, with which other work on the machine disturbs least.
    rounds: pairs of rounds; disturbed ones are repeated, up to three times as many in all. texts: how many
    test texts are used, the same for all artifacts. min_round_ms: a round repeats the texts until this
    much time has gone by. seconds: what one artifact's rounds at one batch size may take, repeated ones
    aside; where the baseline needs more, fewer texts are used. time_limit_seconds: a process that is
    silent for longer is given up. prompt_tokens, new_tokens: of language models, which continue stretches
    of the text of about so many tokens by exactly so many. max_minutes: what timing may take in all; unless
    given, in a run no longer than the stages took, at least one minute, elsewhere without end. What is
    undecided by then is told by processor time, and by the clock with a doubt. steps: which steps a run
    times: `deployable` (all that one would deploy), `all`, or names; the baseline, and what a gate on speed
    stands on, always.
    """

    batch_sizes: tuple[int, ...] = (1, 8)
    threads: int | None = Field(default=None, ge=1, le=1024)
    rounds: int = Field(default=5, ge=3, le=1000)
    texts: int = Field(default=16, ge=1, le=10_000)
    min_round_ms: float = Field(default=200.0, gt=0, le=60_000)
    seconds: float = Field(default=20.0, gt=0)
    time_limit_seconds: float = Field(default=600.0, gt=0)
    prompt_tokens: int = Field(default=32, ge=1, le=1 << 20)
    new_tokens: int = Field(default=32, ge=1, le=4096)
    max_minutes: float | None = Field(default=None, gt=0, le=100_000)
    steps: str | tuple[str, ...] = DEPLOYABLE

    @field_validator("batch_sizes")
    @classmethod
    def _positive(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if not sizes or len(set(sizes)) != len(sizes) or any(not 1 <= s <= 4096 for s in sizes):
            raise SettingError(
                f"expected different whole numbers from 1 to 4096, read {list(sizes)}", code="wrong-value"
            )
        return sizes

    def key(self) -> dict[str, Any]:
        """Return, JSON-able, what the times of an artifact depend on: not how long all of them may take."""
        return self.model_dump(mode="json", exclude={"max_minutes", "steps"})

    def named(self) -> tuple[str, ...]:
        """Return the steps that are named."""
        if isinstance(self.steps, str):
            return () if self.steps in (DEPLOYABLE, ALL) else (self.steps,)
        return self.steps

    def times(self, name: str, deployable: bool) -> bool:
        """Return whether the step `name` is timed."""
        return self.steps == ALL or (deployable if self.steps == DEPLOYABLE else name in self.named())
