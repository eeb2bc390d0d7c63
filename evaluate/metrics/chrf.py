"""chrF (Popovic 2015), as sacrebleu computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from smelt.evaluate.metrics.metric import Array, TextSamples
from smelt.evaluate.metrics.sacrebleu_metric import SACREBLEU_LIBRARIES, SacrebleuMetric


class Chrf(SacrebleuMetric):
    """Rows, K = 18: for 6 orders the counts of character n-grams in prediction, reference and both."""

    def scorer(self, samples: TextSamples, settings: Mapping[str, Any]) -> Any:
        """Return sacrebleu's chrF2."""
        from sacrebleu.metrics.chrf import CHRF

        return CHRF()

    def segment_statistics(self, scorer: Any, prediction: str, references: Sequence[str]) -> list[float]:
        """Return the counts of each order for the reference with the highest sentence chrF2."""
        from sacrebleu.metrics.helpers import extract_all_char_ngrams

        best_reference = references[0]
        if len(references) > 1:
            best_reference = max(references, key=lambda text: scorer.sentence_score(prediction, [text]).score)
        # sacrebleu's chrF score has no counts, unlike those of BLEU and TER
        predicted, expected = (
            extract_all_char_ngrams(text, scorer.char_order) for text in (prediction, best_reference)
        )
        return [
            count
            for ours, theirs in zip(predicted, expected, strict=True)
            # an order that the reference does not have is not counted in the prediction either
            for count in (ours.total() if theirs else 0, theirs.total(), (ours & theirs).total())
        ]

    def value(self, rows: Array, weights: Array) -> Array:
        """Return corpus chrF2."""
        return _combine(weights @ rows)

    def example_values(self, rows: Array) -> Array:
        """Return sacrebleu's sentence chrF2."""
        return _combine(rows)


def _combine(sums: Array) -> Array:
    """Return chrF2 of summed statistics, [R, 18] -> [R]: orders that neither side has do not count."""
    predicted, reference, num_matches = (sums[:, i::3] for i in range(3))
    present = (predicted > 0) & (reference > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        orders = np.maximum(present.sum(1), 1)
        precision = np.where(present, num_matches / predicted, 0.0).sum(1) / orders
        recall = np.where(present, num_matches / reference, 0.0).sum(1) / orders
        score = 100 * 5 * precision * recall / (4 * precision + recall)
    return np.where(precision + recall > 0, score, 0.0)


CHRF = Chrf(
    name="chrf",
    title="chrF",
    unit="chrF",
    description="sacrebleu's chrF2, F of character n-grams",
    tasks=("translation",),
    optional=("summarization", "text-generation"),
    kind="sum",
    libraries=SACREBLEU_LIBRARIES,
)
