"""Scores and printed answers of a classifier, by its problem type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from smelt.core.data import Split
from smelt.core.labels import MULTI, REGRESSION, SEPARATOR, class_names, problem_type
from smelt.core.rows.targets import read_class_sets, read_classes, read_numbers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from smelt.runtime.class_predictions import Prediction


def score_classifier(
    metrics: Sequence[str], config: Mapping[str, Any], logits: NDArray[np.float32], split: Split
) -> tuple[dict[str, Any], list[Any]]:
    """Score a classifier's logits, float32 [n, C], on the rows of `split`.

    Returns:
        Scores by metric, and per row what was predicted: a name, a list of names, or a number.

    Raises:
        InputError: a label that the model does not know, or a metric that does not fit its problem type.
    """
    from smelt.evaluate.label_quality import score_label_sets, score_numbers
    from smelt.evaluate.quality import score_labels

    names, problem = class_names(config), problem_type(config)
    if problem == REGRESSION:
        numbers = [float(row[0]) for row in logits]
        return score_numbers(metrics, numbers, read_numbers(split.examples, split.origin)), numbers
    if problem == MULTI:
        found = [[int(i) for i in row.nonzero()[0]] for row in logits > 0]  # a probability above 0.5
        gold = read_class_sets(split.examples, names, split.origin)
        scores = score_label_sets(metrics, found, gold, len(names))
        return scores, [[names[i] for i in row] for row in found]
    predicted = [int(row.argmax()) for row in logits]
    wanted = read_classes(split.examples, names, split.origin)
    return score_labels(metrics, predicted, wanted), [names[i] for i in predicted]


# No name of a label moves a terminal's cursor or ends a line.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}


def answer(found: Prediction) -> str:
    """Return what `smelt predict` prints for a prediction.

    One label a text: the name, a tab, its probability. Several: the names above 0.5 joined by `|` (as
    CSV data hold them), a tab, their probabilities joined by `|`; both are empty where no name is.
    Regression: the number.
    """
    if isinstance(found.label, float):
        return f"{found.label:.4f}"
    names = [found.label] if isinstance(found.label, str) else list(found.label)
    chances = (f"{found.probabilities[name]:.3f}" for name in names)
    return SEPARATOR.join(name.translate(_CONTROLS) for name in names) + "\t" + SEPARATOR.join(chances)
