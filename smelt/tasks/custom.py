"""Custom: arrays in, arrays out, of any meaning, for third-party ONNX graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from smelt.data.splits import Example
from smelt.tasks.spec import TaskSpec

if TYPE_CHECKING:
    from smelt.generation.config import GenerationSettings


class Custom(TaskSpec):
    """Arrays of any meaning."""

    name = "custom"
    method = "run"
    command_input = "--data FILE.npz"
    call = "arrays to arrays"
    call_includes = "nothing else is"
    sample_noun = "samples"
    rate_unit = "rows/s"

    def placeholder_row(self, text: str, config: Mapping[str, Any]) -> None:
        """Return None: arrays cannot be written as text."""

    def count_truncated(
        self, runner: Any, examples: Sequence[Example], generation: GenerationSettings
    ) -> int:
        """Return 0: arrays have no tokens."""
        return 0


TASK = Custom()
