"""The samples of a split, encoded by their task."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

from smelt.core.messages import with_count
from smelt.data.splits import Split
from smelt.models.text_rules import max_input_length
from smelt.stage import Context
from smelt.tasks.registry import task_spec
from smelt.tasks.samples import EncodedSample


@dataclass(frozen=True)
class EncodedSplit(Split):
    """Running text that was encoded before: one example for each window, and the windows."""

    encoded: tuple[EncodedSample, ...] = ()

    def select(self, places: Iterable[int]) -> Self:
        """Return the windows at `places`."""
        indices = list(places)
        selected = replace(self, examples=tuple(self.examples[i] for i in indices))
        return replace(selected, encoded=tuple(self.encoded[i] for i in indices))


def encode_split(
    split: Split,
    config: Any,
    tokenizer: Any,
    ctx: Context,
    *,
    max_length: int | None = None,
    split_name: str = "train",
) -> list[EncodedSample]:
    """Return the tokenized samples of `split`, as the task encodes them (`TaskSpec.encode`).

    Texts longer than the model's limit (or `max_length` tokens) are truncated and counted in a warning. For
    an image model `tokenizer` is its image processor (see `load_processor`). The samples of an `EncodedSplit`
    are returned as they are.

    Raises:
        InputError: a label that is not in the model's config.
    """
    if isinstance(split, EncodedSplit):
        return list(split.encoded)
    limit = 0
    if ctx.traits.has_tokenizer:
        limit = min(max_length or 10**9, max_input_length(tokenizer, config.to_dict()))
    samples, truncated = task_spec(ctx.task).encode(split, config, tokenizer, limit, max_length)
    if truncated:
        ctx.warn(
            "truncated-texts",
            f"{split_name}: {with_count(truncated, 'text')} of {len(split)} samples"
            f" {'was' if truncated == 1 else 'were'} truncated to {limit} tokens.",
        )
    return samples
