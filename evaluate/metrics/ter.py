"""TER, translation edit rate (Snover et al. 2006), as sacrebleu computes it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from smelt.evaluate.metrics.metric import Array, Rows, TextSamples
from smelt.evaluate.metrics.sacrebleu_metric import SACREBLEU_LIBRARIES, SacrebleuMetric


class Ter(SacrebleuMetric):
    """Rows, K = 2: edits to the nearest reference, mean length of the references in words."""

    def scorer(self, samples: TextSamples, settings: Mapping[str, Any]) -> Any:
        """Return sacrebleu's TER."""
        from sacrebleu.metrics import ter

        return ter.TER()

    def segment_statistics(self, scorer: Any, prediction: str, references: Sequence[str]) -> list[float]:
        """Return the edits and the mean length of the references."""
        score = scorer.sentence_score(prediction, references)
        return [score.num_edits, score.ref_length]

    def value(self, rows: Array, weights: Array) -> Array:
        """Return 100 times edits / length, 100 for edits of empty references: [R]."""
        return _combine(weights @ rows)

    def example_values(self, rows: Array) -> Array:
        """Return sacrebleu's sentence TER."""
        return _combine(rows)

    def chance_level(self, rows: Rows) -> float:
        """Return the value of empty texts: every word of the references is inserted."""
        return 100.0


def _combine(sums: Array) -> Array:
    edits, length = sums.T
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(length > 0, 100 * (edits / length), np.where(edits > 0, 100.0, 0.0))


TER = Ter(
    name="ter",
    title="TER",
    unit="TER",
    description="sacrebleu's, edits per 100 words of the references; lowercased, words split at spaces",
    optional=("translation", "summarization", "text-generation"),
    kind="sum",
    limits=(0.0, math.inf),
    higher_is_better=False,
    libraries=SACREBLEU_LIBRARIES,
)
