"""Degenerate outputs of generating models: repetition, no end, and one output for all inputs.

A score above chance does not exclude them: "to the the the" shares words with most references.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

# From this share of the outputs on they are called degenerate.
_DEGENERATE_SHARE = 0.25
_MIN_OUTPUTS = 5
# A repetition is a unit of up to so many words, or characters, that follows itself so often and is at least
# half of the text.
_MAX_UNIT, _MIN_WORD_REPEATS, _MIN_CHARACTER_REPEATS = 8, 3, 8


class OutputCounts(BaseModel):
    """How many of the `n` outputs of a step are degenerate.

    repetitive: they consist of a repetition, unlike their references. not_ended: they reached the limit of
    new tokens. same: they equal the most frequent output, which is none of their references.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    n: int = Field(ge=1)
    repetitive: int = Field(ge=0)
    not_ended: int = Field(ge=0)
    same: int = Field(ge=0)

    @property
    def is_degenerate(self) -> bool:
        """Whether a quarter of the outputs or more are of one of the three kinds."""
        worst = max(self.repetitive, self.not_ended, self.same)
        return self.n >= _MIN_OUTPUTS and worst >= _DEGENERATE_SHARE * self.n

    def text(self) -> str:
        """Return the counts as text, without those that are 0."""
        count_by_kind = {
            "repeat themselves": self.repetitive,
            "did not end within the limit": self.not_ended,
            "are the same text": self.same,
        }
        parts = [f"{count:,} {kind}" for kind, count in count_by_kind.items() if count]
        return f"of {self.n:,} outputs {', '.join(parts) or 'none is degenerate'}"


def count_degenerate(
    outputs: Sequence[str], references: Sequence[Sequence[str]], not_ended: int
) -> OutputCounts:
    """Count the degenerate outputs.

    Args:
        outputs: n texts.
        references: for each output its references; may be empty.
        not_ended: how many outputs reached the limit of new tokens.
    """
    pairs = list(zip(outputs, references, strict=True))
    [(frequent, _)] = Counter(outputs).most_common(1)
    num_identical = sum(output == frequent and frequent not in texts for output, texts in pairs)
    return OutputCounts(
        n=len(outputs),
        repetitive=sum(is_repetitive(o) and not any(map(is_repetitive, texts)) for o, texts in pairs),
        not_ended=not_ended,
        same=num_identical if num_identical > 1 else 0,
    )


def is_repetitive(text: str) -> bool:
    """Return whether at least half of a text is one unit that follows itself.

    The unit is 1 to 8 words, at least three times (`to the the the`), or as many characters, at least eight
    times (`!!!!!!!!`).
    """
    tokens = text.lower().split()
    return _repeats(tokens, _MIN_WORD_REPEATS) or _repeats(list("".join(tokens)), _MIN_CHARACTER_REPEATS)


def _repeats(items: Sequence[str], least: int) -> bool:
    for unit in range(1, _MAX_UNIT + 1):
        longest = length = 0
        for previous, current in zip(items, items[unit:], strict=False):
            length = length + 1 if previous == current else 0
            longest = max(longest, length)
        span = longest + unit
        if span >= least * unit and 2 * span >= len(items):
            return True
    return False
