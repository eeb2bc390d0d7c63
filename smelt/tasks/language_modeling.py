"""Language modeling: the probability of each token of running text, which is cut into windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.data.examples import text_of_column
from smelt.data.splits import Columns, Example, Split
from smelt.data.tasks import Task
from smelt.tasks.spec import PackageClass, TaskSpec

if TYPE_CHECKING:
    from smelt.generation.config import GenerationSettings
    from smelt.tasks.samples import EncodedSample


class LanguageModeling(TaskSpec):
    """Language modeling."""

    name: ClassVar[Task] = "language-modeling"
    row_example = '{"text": "..."}, or a .txt file'
    suggested_metrics = ("perplexity", "bits_per_byte")
    main_metric = "perplexity"
    hub_tag = "text-generation"
    package = PackageClass("language_modeling", "Writer", 'print(Writer()(["TEXT", "ANOTHER"]))')

    def parse_row(
        self, row: Mapping[str, Any], location: str, columns: Columns, lacks_target: bool
    ) -> Example:
        """Return the sample of a row, as `TaskSpec.parse_row`."""
        return Example(text_of_column(row, columns.text, location, "text"))

    def encode(
        self, split: Split, config: Any, tokenizer: Any, limit: int, length: int | None
    ) -> tuple[list[EncodedSample], int]:
        """Return the windows of the text that all samples are, as `TaskSpec.encode`."""
        from smelt.models.text_rules import cut_windows
        from smelt.tasks.samples import EncodedSample

        text = cut_windows(split, tokenizer, limit, length=length, strided=False)
        return [EncodedSample(ids.tolist(), None, None) for ids in text.ids], 0

    def count_truncated(
        self, runner: Any, examples: Sequence[Example], generation: GenerationSettings
    ) -> int:
        """Return 0: text is cut into windows."""
        return 0


TASK = LanguageModeling()
