"""Mean average precision of sets of labels (mAP), as scikit-learn's average_precision_score.

Shapes: n = examples, R = resamples, C = labels, T = different scores of a label.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np

from smelt.data.labels import MULTI_LABEL
from smelt.evaluate.metrics.metric import (
    BOOTSTRAP_SIGNATURE,
    Array,
    ExampleRows,
    LabelSetSamples,
    Metric,
    safe_ratio,
)
from smelt.generation.backend import check_finite_outputs


class AveragePrecision(Metric[LabelSetSamples]):
    """Rows, K = 2 C: the logit of each label, then 0 or 1 by label as in the gold set.

    No threshold: a label's examples are ordered by its logit, those with equal ones together.
    """

    samples = (LabelSetSamples,)

    def example_rows(self, samples: LabelSetSamples, settings: Mapping[str, Any]) -> ExampleRows:
        """Return logits and gold labels of each example; chance: of equal logits.

        Raises:
            RunError: `non-finite-outputs`.
        """
        assert samples.logits is not None
        logits = check_finite_outputs(samples.logits).astype(np.float64)
        rows = np.concatenate([logits, samples.gold], axis=1)
        equal = np.concatenate([np.zeros_like(logits), samples.gold], axis=1)
        chance = float(self.value(equal, np.ones((1, len(rows))))[0])
        signature = (
            f"average:macro|labels:present|{BOOTSTRAP_SIGNATURE}|formula:version:scikit-learn"
            f" {version('scikit-learn')}"
        )
        return ExampleRows(rows.tolist(), signature, chance=chance)

    def value(self, rows: Array, weights: Array) -> Array:
        """Return the mean over the labels that a resample contains, 0 without any: [R]."""
        scores, gold = np.split(rows, 2, axis=1)
        present = weights @ gold
        by_label = [_label_precision(scores[:, i], gold[:, i], weights) for i in range(gold.shape[1])]
        total = np.where(present > 0, np.stack(by_label, axis=1), 0.0).sum(axis=1)
        return np.asarray(total / np.maximum(1, (present > 0).sum(axis=1)))


def _label_precision(scores: Array, gold: Array, weights: Array) -> Array:
    """Return the average precision of one label in percent: [n], [n], [R, n] -> [R], 0 where it is absent."""
    order = np.argsort(-scores, kind="stable")
    ends = np.flatnonzero(np.diff(scores[order], append=np.nan))  # the last example of each score, [T]
    hits = np.cumsum(weights[:, order] * gold[order], axis=1)[:, ends]
    precision = safe_ratio(hits, np.cumsum(weights[:, order], axis=1)[:, ends])
    new_hits = np.diff(hits, axis=1, prepend=0)
    return np.asarray(safe_ratio((new_hits * precision).sum(axis=1) / 100, hits[:, -1]))


MEAN_AVERAGE_PRECISION = AveragePrecision(
    name="map",
    title="mAP",
    unit="mAP",
    description="mean over the labels that occur of the average precision, from logits, without a threshold",
    optional=(MULTI_LABEL,),
    libraries=("scikit-learn",),
)
