"""The loss that training minimizes, as a metric of every task in which a sample has one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from smelt.data.labels import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from smelt.evaluate.metrics.cross_entropy import CROSS_ENTROPY
from smelt.evaluate.metrics.metric import (
    BOOTSTRAP_SIGNATURE,
    ERROR_LIMITS,
    Array,
    ClassSamples,
    ExampleRows,
    LabelSetSamples,
    LossSamples,
    Metric,
    NumberSamples,
    ResponseSamples,
    Rows,
    WindowSamples,
)
from smelt.evaluate.metrics.perplexity import effective_windows
from smelt.evaluate.metrics.regression import MSE


class Loss(Metric[LossSamples | ClassSamples | LabelSetSamples | NumberSamples]):
    """Rows, K = 2: summed loss, number of its terms (tokens of a text, else 1)."""

    samples = (WindowSamples, ResponseSamples, ClassSamples, LabelSetSamples, NumberSamples)

    def example_rows(
        self,
        samples: LossSamples | ClassSamples | LabelSetSamples | NumberSamples,
        settings: Mapping[str, Any],
    ) -> ExampleRows:
        """Return the loss of each example; chance: of a uniform model, or as `cross_entropy` and `mse`.

        Raises:
            RunError: `non-finite-outputs`.
        """
        if isinstance(samples, LossSamples):
            rows: Rows = [[float(a), int(b)] for a, b in zip(samples.losses, samples.tokens, strict=True)]
            chance = math.log(samples.vocabulary) if samples.vocabulary else None
            return ExampleRows(rows, f"{samples.settings}|{BOOTSTRAP_SIGNATURE}", chance=chance)
        if isinstance(samples, NumberSamples):
            scored = MSE.example_rows(samples, {})
            losses = MSE.example_values(np.asarray(scored.rows)).tolist()
            chance = MSE.chance_level(scored.rows)
        else:
            scored = CROSS_ENTROPY.example_rows(samples, {})
            losses, chance = [loss for (loss,) in scored.rows], scored.chance
        return ExampleRows([[loss, 1] for loss in losses], scored.signature, chance=chance)

    def value(self, rows: Array, weights: Array) -> Array:
        """Return the sum of losses / number of terms: [R]."""
        sums = weights @ rows
        return np.asarray(sums[:, 0] / np.maximum(1, sums[:, 1]))

    def example_values(self, rows: Array) -> Array:
        """Return the mean loss of each example."""
        return self.value(rows, np.eye(len(rows)))

    def effective_examples(self, rows: Array) -> float:
        """Return Kish's effective sample size, as for perplexity."""
        return effective_windows(rows[:, 1])


LOSS = Loss(
    name="loss",
    title="Loss",
    unit="loss",
    description=(
        "nats per token of the first reference and its end, or of running text, or per masked token; of"
        " classifiers cross-entropy; of numbers the squared error"
    ),
    optional=(
        "translation",
        "summarization",
        "text-generation",
        "language-modeling",
        "masked-language-modeling",
        SINGLE_LABEL,
        MULTI_LABEL,
        REGRESSION,
    ),
    kind="sum",
    limits=ERROR_LIMITS,
    scale=1.0,
    higher_is_better=False,
    digits=4,
)
