"""Custom: arrays in, arrays out, of any meaning, for third-party ONNX graphs and PyTorch modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from smelt.data.splits import Example, Split
from smelt.tasks.spec import TaskSpec

if TYPE_CHECKING:
    from smelt.generation.config import GenerationSettings
    from smelt.tasks.samples import EncodedSample


class Custom(TaskSpec):
    """Arrays of any meaning."""

    name = "custom"
    method = "run"
    command_input = "--data FILE.npz"
    call = "arrays to arrays"
    call_includes = "nothing else is"
    sample_noun = "sample"
    rate_unit = "rows/s"

    def placeholder_row(self, text: str, config: Mapping[str, Any]) -> None:
        """Return None: arrays cannot be written as text."""

    def encode(
        self, split: Split, config: Any, tokenizer: Any, limit: int, length: int | None
    ) -> tuple[list[EncodedSample], int]:
        """Return the inputs of each sample, as `TaskSpec.encode`; `tokenizer` is the model's signature."""
        from smelt.tasks.samples import ArraySample

        assert split.arrays is not None
        rows = [tokenizer.make_feeds(split.arrays, index, index + 1) for index in range(len(split))]
        return [ArraySample([], None, 0, arrays=row) for row in rows], 0

    def count_truncated(
        self, runner: Any, examples: Sequence[Example], generation: GenerationSettings
    ) -> int:
        """Return 0: arrays have no tokens."""
        return 0


TASK = Custom()
