"""Accuracy of choices by their likelihood, as lm-evaluation-harness scores multiple choice."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from smelt.core.errors import InputError
from smelt.data.splits import Split
from smelt.evaluate.metrics.metric import ChoiceSamples, ExampleRows, Metric, Rows


class ChoiceAccuracy(Metric[ChoiceSamples]):
    """Rows, K = 2: the most likely choice, the right choice."""

    samples = (ChoiceSamples,)
    normalized_by = "no"

    def example_rows(self, samples: ChoiceSamples, settings: Mapping[str, Any]) -> ExampleRows:
        """Return the most likely choice of each example; chance: of a random choice."""
        rows: Rows = []
        for losses, texts, answer in zip(samples.losses, samples.choices, samples.answers, strict=True):
            per_size = np.divide(losses, [self._size(text) for text in texts])
            rows.append([int(np.argmin(per_size)), int(answer)])
        chance_accuracy = 100 * float(
            np.mean([1 / len(answer_choices) for answer_choices in samples.choices])
        )
        signature = f"choices:log-likelihood|normalized:{self.normalized_by}|ci:wilson"
        return ExampleRows(rows, signature, chance=chance_accuracy)

    def _size(self, text: str) -> int:
        return 1

    def check(self, settings: Mapping[str, Any], base: Path, splits: Mapping[str, Split]) -> None:
        """Check that the test samples have choices."""
        if "test" in splits and not splits["test"].has_choices:
            raise InputError(
                f"'{self.name}' scores choices, and the samples of {splits['test'].origin} have none. Add a"
                " list of texts 'choices' and the right one as 'answer', or remove the metric.",
                code="missing-choices",
            )


class NormalizedChoiceAccuracy(ChoiceAccuracy):
    """The log-likelihood is divided by the characters of the choice, without space around it."""

    normalized_by = "characters"

    def _size(self, text: str) -> int:
        return len(text.strip())


ACC = ChoiceAccuracy(
    name="acc",
    title="Choice accuracy",
    unit="%",
    description="samples whose right choice is the most likely one",
    optional=("text-generation",),
    kind="proportion",
)
ACC_NORM = NormalizedChoiceAccuracy(
    name="acc_norm",
    title="Choice accuracy, by length",
    unit="%",
    description="samples whose right choice is the most likely one per character",
    optional=("text-generation",),
    kind="proportion",
)
