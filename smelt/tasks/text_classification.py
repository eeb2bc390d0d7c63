"""Text classification: one class, several classes or numbers for a text or a pair of texts."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any

from smelt.data.examples import nonempty_text, parse_labeled, parse_pair
from smelt.data.labels import MULTI_LABEL, REGRESSION, class_names
from smelt.data.splits import Columns, Example, Split
from smelt.tasks.classification import Classification
from smelt.tasks.spec import PackageClass

if TYPE_CHECKING:
    from smelt.tasks.samples import EncodedSample


class TextClassification(Classification):
    """Text classification."""

    name = "text-classification"
    column_roles = ("text", "text_pair", "label")
    method = "predict"
    row_example = '{"text": "...", "label": "..."}, and "text_pair" for pairs'
    graph_output = "logits"
    package = PackageClass(
        "text_classification",
        "Classifier",
        'print(Classifier()(["TEXT", ("FIRST OF A PAIR", "SECOND")]))',
    )

    def parse_row(
        self, row: Mapping[str, Any], location: str, columns: Columns, lacks_target: bool
    ) -> Example:
        """Return the sample of a row, as `TaskSpec.parse_row`."""
        text_pair = parse_pair(row, location, columns)
        text = nonempty_text(row, columns.text, location, "text")
        return parse_labeled(text, text_pair, row, location, columns, lacks_target)

    def placeholder_row(self, text: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row with the first class of the model, or numbers for regression."""
        name = next(iter((config.get("id2label") or {}).values()), "LABEL_0")
        labels: dict[str, Any] = {REGRESSION: [0.0] * len(class_names(config)), MULTI_LABEL: [name]}
        return {"text": text, "label": labels.get(str(config.get("problem_type")), name)}

    def recognizes_row(self, row: Mapping[str, Any], columns: Columns, named: Columns) -> bool:
        """Return whether the row has a class; a number with a pair of texts is a similarity."""
        label = row.get(columns.label)
        return label is not None and (row.get(columns.text_pair) is None or isinstance(label, str | list))

    def recognizes_graph(self, outputs: Set[str], config: Mapping[str, Any], is_embedder: bool) -> bool:
        """Return whether the graph returns logits of a classifier."""
        names = map(str, config.get("architectures") or ())
        return self.graph_output in outputs and any(n.endswith("ForSequenceClassification") for n in names)

    def encode(
        self, split: Split, config: Any, tokenizer: Any, limit: int, length: int | None
    ) -> tuple[list[EncodedSample], int]:
        """Return texts or pairs with their labels, as `TaskSpec.encode`."""
        from smelt.tasks.samples import EncodedSample, classifier_targets, encode_inputs

        sources, types = encode_inputs(split, tokenizer, limit, self.name)
        labels = classifier_targets(split.examples, config, split.origin)
        samples = [EncodedSample(ids, t, y) for ids, t, y in zip(sources.ids, types, labels, strict=True)]
        return samples, sources.truncated


TASK = TextClassification()
