"""What translation and summarization share: an encoder-decoder model from a source to a target text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from smelt.data.examples import nonempty_text, parse_references
from smelt.data.splits import Columns, Example, Split
from smelt.tasks.spec import PackageClass, TaskSpec

if TYPE_CHECKING:
    from smelt.tasks.samples import EncodedSample


class TextToText(TaskSpec):
    """A task from a source text to a target text."""

    column_roles = ("source", "target")
    target_roles = ("target", "references")
    row_example = '{"source": "...", "target": "..."}'
    package = PackageClass("translation", "Translator", 'print(Translator()(["TEXT", "ANOTHER"]))')

    def parse_row(
        self, row: Mapping[str, Any], location: str, columns: Columns, lacks_target: bool
    ) -> Example:
        """Return the sample of a row, as `TaskSpec.parse_row`."""
        references: tuple[str, ...] = ()
        if not lacks_target:
            references = parse_references(row, location, columns.references, columns.target, "target")
        return Example(nonempty_text(row, columns.source, location, "source"), references)

    def required_roles(self, row: Mapping[str, Any], columns: Columns) -> tuple[str, ...]:
        """Return the roles of the columns that `row` must have: a list of targets replaces one."""
        return ("source",) if columns.references in row else ("source", "target")

    def encode(
        self, split: Split, config: Any, tokenizer: Any, limit: int, length: int | None
    ) -> tuple[list[EncodedSample], int]:
        """Return a sample for each reference of each example, as `TaskSpec.encode`."""
        from smelt.tasks.samples import EncodedSample, encode_inputs, encode_targets

        sources, types = encode_inputs(split, tokenizer, limit, self.name)
        references = [reference for e in split.examples for reference in e.references]
        targets, truncated = encode_targets(references, tokenizer, limit)
        owners = [i for i, e in enumerate(split.examples) for _ in e.references]
        samples = [
            EncodedSample(sources.ids[i], types[i], ids) for i, ids in zip(owners, targets, strict=True)
        ]
        return samples, sources.truncated + truncated

    def token_rows(self, split: Split, tokenizer: Any) -> list[list[int]]:
        """Return the ids of the sources, then those of the targets, as `TaskSpec.token_rows`."""
        from smelt.models.text_rules import NO_LIMIT
        from smelt.tasks.samples import encode_targets

        targets = [reference for example in split.examples for reference in example.references]
        return super().token_rows(split, tokenizer) + encode_targets(targets, tokenizer, NO_LIMIT)[0]

    def too_long_samples(self, split: Split, tokenizer: Any, limit: int) -> set[int]:
        """Return the indices of samples with a source or a target of more than `limit` tokens."""
        targets = [(i, reference) for i, e in enumerate(split.examples) for reference in e.references]
        texts = [text for _, text in targets]
        ids = tokenizer(text_target=texts, truncation=False, verbose=False)["input_ids"] if texts else []
        long_indices = {i for (i, _), row in zip(targets, ids, strict=True) if len(row) > limit}
        return long_indices | super().too_long_samples(split, tokenizer, limit)
