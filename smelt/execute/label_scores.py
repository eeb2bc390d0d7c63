"""Score a classifier and format its predictions, by problem type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from smelt.core.data import Split
from smelt.core.labels import LABEL_SEPARATOR, MULTI_LABEL, REGRESSION, class_names, problem_type
from smelt.core.readers.label_targets import class_targets, multi_label_targets, regression_targets

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from smelt.runtime.class_predictions import ClassPrediction


def score_classifier(
    metrics: Sequence[str], config: Mapping[str, Any], logits: NDArray[np.float32], split: Split
) -> tuple[dict[str, Any], list[Any]]:
    """Score a classifier's logits, float32 [n, C], on the samples of `split`.

    Returns:
        Scores by metric, and the prediction per sample: a class name, a list of names, or a number.

    Raises:
        InputError: a label is not a class of the model, or a metric does not fit the problem type.
    """
    from smelt.evaluate.label_quality import score_label_sets, score_regression
    from smelt.evaluate.quality import score_labels

    names, problem = class_names(config), problem_type(config)
    if problem == REGRESSION:
        numbers = [float(row[0]) for row in logits]
        return score_regression(metrics, numbers, regression_targets(split.examples, split.origin)), numbers
    if problem == MULTI_LABEL:
        found = [[int(i) for i in row.nonzero()[0]] for row in logits > 0]  # a probability above 0.5
        gold = multi_label_targets(split.examples, names, split.origin)
        scores = score_label_sets(metrics, found, gold, len(names))
        return scores, [[names[i] for i in row] for row in found]
    predicted = [int(row.argmax()) for row in logits]
    wanted = class_targets(split.examples, names, split.origin)
    return score_labels(metrics, predicted, wanted), [names[i] for i in predicted]


# Escapes control characters in class names.
_CONTROL_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}


def prediction_text(found: ClassPrediction) -> str:
    """Return the output line of `smelt predict` for a prediction.

    Single label: name, tab, probability. Multiple labels: the names above 0.5 joined by `|` (as in CSV data),
    tab, their probabilities joined by `|`; both are empty if there is none. Regression: the number.
    """
    if isinstance(found.label, float):
        return f"{found.label:.4f}"
    names = [found.label] if isinstance(found.label, str) else list(found.label)
    chances = (f"{found.probabilities[name]:.3f}" for name in names)
    return (
        LABEL_SEPARATOR.join(name.translate(_CONTROL_ESCAPES) for name in names)
        + "\t"
        + LABEL_SEPARATOR.join(chances)
    )
