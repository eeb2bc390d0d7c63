"""What classification of texts and of images share: labels, and predictions of classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.messages import CONTROL_ESCAPES
from smelt.data.label_thresholds import label_thresholds
from smelt.data.labels import LABEL_SEPARATOR, MULTI_LABEL, class_names, problem_type
from smelt.data.splits import Example
from smelt.tasks.spec import TaskSpec

if TYPE_CHECKING:
    from smelt.generation.config import GenerationSettings
    from smelt.generation.prompt_batches import OnTruncate
    from smelt.runtimes.single_call_runners import ClassPrediction


class Classification(TaskSpec):
    """A task whose samples have labels: a class, several classes or a number."""

    target_roles = ("label",)

    def package_settings(self, config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Return the names of the classes, their thresholds, and the problem type."""
        problem = problem_type(config)
        thresholds = {"thresholds": label_thresholds(config)} if problem == MULTI_LABEL else {}
        return {"labels": class_names(config), "problem": problem, **thresholds}

    def run(
        self,
        runner: Any,
        examples: Sequence[Example],
        generation: GenerationSettings,
        batch_size: int,
        on_truncate: OnTruncate | None = None,
    ) -> Sequence[Any]:
        """Return the prediction for each example, as `TaskSpec.run`."""
        from smelt.runtimes.predict_texts import class_logits
        from smelt.runtimes.single_call_runners import predictions_from_logits

        logits = class_logits(runner, examples, batch_size, on_truncate=on_truncate)
        return predictions_from_logits(logits, runner.config)

    def result_line(self, result: ClassPrediction) -> str:
        """Return a prediction as a line of text, as `prediction_text`."""
        return prediction_text(result)

    def result_fields(self, result: ClassPrediction) -> dict[str, Any]:
        """Return label and probabilities."""
        return {"label": result.label, "probabilities": dict(result.probabilities)}


def prediction_text(prediction: ClassPrediction) -> str:
    """Return the output line of `smelt predict` for a prediction.

    Single label: name, tab, probability. Multiple labels: the names above their thresholds joined by `|`
    (as in CSV data), tab, their probabilities joined by `|`; `-`, tab, `-` if there is none. Regression: the
    number, or the numbers joined by `|`.
    """
    label: Any = prediction.label
    items = list(label) if isinstance(label, tuple) else [label]
    if not prediction.probabilities:
        return LABEL_SEPARATOR.join(f"{number:.4f}" for number in items)
    names: list[str] = items
    if not names:
        return "-\t-"
    chances = (f"{prediction.probabilities[name]:.3f}" for name in names)
    return (
        LABEL_SEPARATOR.join(name.translate(CONTROL_ESCAPES) for name in names)
        + "\t"
        + LABEL_SEPARATOR.join(chances)
    )
