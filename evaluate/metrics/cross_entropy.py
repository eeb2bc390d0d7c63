"""Cross-entropy of classes and of sets of labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.data.labels import MULTI_LABEL, SINGLE_LABEL
from smelt.evaluate.metrics.metric import (
    BOOTSTRAP_SIGNATURE,
    ERROR_LIMITS,
    ClassSamples,
    ExampleRows,
    LabelSetSamples,
    Metric,
    Rows,
)
from smelt.generation.backend import check_finite_outputs


class CrossEntropy(Metric[ClassSamples | LabelSetSamples]):
    """Rows, K = 1: nats."""

    samples = (ClassSamples, LabelSetSamples)

    def example_rows(
        self, samples: ClassSamples | LabelSetSamples, settings: Mapping[str, Any]
    ) -> ExampleRows:
        """Return the negative log-probability of each gold class; of label sets the mean over the labels.

        Raises:
            RunError: `non-finite-outputs`.
        """
        assert samples.logits is not None
        logits = check_finite_outputs(samples.logits).astype(np.float64)
        of_sets = isinstance(samples, LabelSetSamples)
        losses, chance = (
            _label_losses(logits, samples.gold) if of_sets else _class_losses(logits, samples.gold)
        )
        average = "labels:mean|average:mean" if of_sets else "average:mean"
        rows: Rows = [[float(loss)] for loss in losses]
        return ExampleRows(rows, f"logits:float32|{average}|{BOOTSTRAP_SIGNATURE}", chance=chance)


def _class_losses(logits: NDArray[np.float64], gold: Any) -> tuple[NDArray[np.float64], float]:
    """Return the loss of each example, and that of the frequencies of the classes."""
    from scipy.special import log_softmax
    from scipy.stats import entropy

    losses = -log_softmax(logits, axis=1)[np.arange(len(gold)), list(gold)]
    return losses, float(entropy(list(Counter(map(int, gold)).values())))


def _label_losses(logits: NDArray[np.float64], gold: Any) -> tuple[NDArray[np.float64], float]:
    """Return the mean binary loss of each example, and that of the frequencies of the labels."""
    from scipy.special import log_expit, xlogy

    losses = -np.where(gold == 1, log_expit(logits), log_expit(-logits)).mean(axis=1)
    share = gold.mean(axis=0)
    return losses, float(-(xlogy(share, share) + xlogy(1 - share, 1 - share)).mean())


CROSS_ENTROPY = CrossEntropy(
    name="cross_entropy",
    title="Cross-entropy",
    unit="nats",
    description="negative log-probability of the gold class per sample; of label sets the mean over labels",
    optional=(SINGLE_LABEL, MULTI_LABEL),
    kind="mean",
    limits=ERROR_LIMITS,
    scale=1.0,
    higher_is_better=False,
    digits=4,
)
