"""Perplexity, bits per byte and accuracy of masked tokens, of windows of running text or of responses.

Bits per byte does not depend on the tokenizer, so it compares models of different vocabularies. Intervals and
tests resample whole windows, because the tokens of one window depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from smelt.evaluate.metrics.metric import (
    BOOTSTRAP_SEED,
    BOOTSTRAP_SIGNATURE,
    ERROR_LIMITS,
    RESAMPLES,
    Array,
    ExampleRows,
    LossSamples,
    MaskedSamples,
    Metric,
    ResponseSamples,
    Rows,
    WindowSamples,
    safe_ratio,
)

_PERPLEXITY_LIMITS = (1.0, math.inf)
_WINDOW_BOOTSTRAP = f"ci:t, bootstrap over windows|bs:{RESAMPLES}|seed:{BOOTSTRAP_SEED}"


def effective_windows(tokens: Array) -> float:
    """Return how many windows of one length are as good as those with these numbers of tokens."""
    return max(2.0, float(tokens.sum() ** 2 / np.square(tokens).sum()))


class LossMetric(Metric[LossSamples]):
    """Rows, K = 3: nats, tokens, bytes."""

    def example_rows(self, samples: LossSamples, settings: Mapping[str, Any]) -> ExampleRows:
        """Return the loss of each example; chance: of a uniform model."""
        rows: Rows = [list(row) for row in zip(samples.losses, samples.tokens, samples.sizes, strict=True)]
        uniform_value = self._uniform_value(samples, samples.vocabulary) if samples.vocabulary else None
        return ExampleRows(rows, f"{samples.settings}|{BOOTSTRAP_SIGNATURE}", chance=uniform_value)

    def _uniform_value(self, samples: LossSamples, vocabulary: int) -> float:
        return float(vocabulary)

    def value(self, rows: Array, weights: Array) -> Array:
        """Return exp(sum of losses / tokens): [R]."""
        sums = weights @ rows
        # beyond 700 nats a float64 would be infinite, which a report cannot contain
        return np.asarray(np.exp(np.minimum(700.0, sums[:, 0] / sums[:, 1])))

    def effective_examples(self, rows: Array) -> float:
        """Return Kish's effective sample size (1965): an example weighs as many as it has tokens."""
        return effective_windows(rows[:, 1])


class ResponsePerplexity(LossMetric):
    """Perplexity of reference responses, given their prompts."""

    samples = (ResponseSamples,)


class Perplexity(LossMetric):
    """Perplexity of running text."""

    samples = (WindowSamples,)
    n_unit = "token"

    def example_rows(self, samples: LossSamples, settings: Mapping[str, Any]) -> ExampleRows:
        """Return the loss of each window; n counts tokens."""
        rows: Rows = [
            [float(loss), int(tokens), int(size)]
            for loss, tokens, size in zip(samples.losses, samples.tokens, samples.sizes, strict=True)
        ]
        signature = f"{samples.settings}|{_WINDOW_BOOTSTRAP}"
        uniform_value = self._uniform_value(samples, samples.vocabulary) if samples.vocabulary else None
        return ExampleRows(rows, signature, chance=uniform_value, count=sum(samples.tokens))


class MaskedAccuracy(Metric[MaskedSamples]):
    """Rows, K = 2: masked tokens that were predicted, masked tokens."""

    samples = (MaskedSamples,)
    n_unit = "token"

    def example_rows(self, samples: MaskedSamples, settings: Mapping[str, Any]) -> ExampleRows:
        """Return the counts of each window; n counts tokens."""
        rows: Rows = [list(row) for row in zip(samples.correct, samples.tokens, strict=True)]
        return ExampleRows(rows, f"{samples.settings}|{_WINDOW_BOOTSTRAP}", count=sum(samples.tokens))

    def value(self, rows: Array, weights: Array) -> Array:
        """Return the percentage of masked tokens that were predicted: [R]."""
        sums = weights @ rows
        return safe_ratio(sums[:, 0], sums[:, 1])

    def effective_examples(self, rows: Array) -> float:
        """Return Kish's effective sample size, as for perplexity."""
        return effective_windows(rows[:, 1])


class BitsPerByte(Perplexity):
    """Sum of losses / ln 2 / bytes of UTF-8."""

    def _uniform_value(self, samples: LossSamples, vocabulary: int) -> float:
        return sum(samples.tokens) * math.log2(vocabulary) / max(1, sum(samples.sizes))

    def value(self, rows: Array, weights: Array) -> Array:
        """Return bits per byte: [R]."""
        sums = weights @ rows
        return np.asarray(sums[:, 0] / np.log(2) / np.maximum(1, sums[:, 2]))


PERPLEXITY = Perplexity(
    name="perplexity",
    title="Perplexity",
    unit="perplexity",
    description="exp of the mean loss per token; of a masked language model, per masked token",
    tasks=("language-modeling", "masked-language-modeling"),
    limits=_PERPLEXITY_LIMITS,
    higher_is_better=False,
)
BITS_PER_BYTE = BitsPerByte(
    name="bits_per_byte",
    title="Bits per byte",
    unit="bits/byte",
    description="summed loss / (ln 2 × bytes)",
    tasks=("language-modeling",),
    limits=ERROR_LIMITS,
    higher_is_better=False,
    digits=4,
)
RESPONSE_PERPLEXITY = ResponsePerplexity(
    name="response_perplexity",
    title="Response perplexity",
    unit="perplexity",
    description="exp of the mean loss per token of the first reference and its end, given the prompt",
    tasks=("text-generation",),
    limits=_PERPLEXITY_LIMITS,
    higher_is_better=False,
)
MASKED_ACCURACY = MaskedAccuracy(
    name="masked_accuracy",
    title="Masked-token accuracy",
    unit="%",
    description="percentage of the masked tokens that the model finds most likely",
    tasks=("masked-language-modeling",),
)
