"""What kind of classification a recipe's model and data mean, and whether metrics and labels fit it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from smelt.core.data import Split
from smelt.core.errors import InputError, nearest
from smelt.core.labels import (
    CLASSIFIERS,
    MULTI,
    REGRESSION,
    SINGLE,
    ProblemType,
    class_names,
    decide_problem,
    found_names,
    is_blank,
    items_of,
    whole_number,
)
from smelt.core.messages import Message, mistake
from smelt.core.rows.targets import check_labels
from smelt.core.text import count
from smelt.core.unlabelled import UNLABELLED

_SHOWN = 5  # labels that a message names
# The metrics of each problem type; the first one leads the report.
METRICS_OF: dict[ProblemType, tuple[str, ...]] = {
    SINGLE: ("accuracy", "f1"),
    MULTI: ("f1_micro", "f1_macro", "subset_accuracy"),
    REGRESSION: ("pearson", "spearman", "mse"),
}
# Of vectors: with the scores of pairs, and with the baseline's vectors, which needs no scores.
AGREEMENT = "agreement"
SCORE_METRICS = ("spearman", "pearson")
VECTOR_METRICS = (*SCORE_METRICS, AGREEMENT)
# Of the outputs of a graph, with those of the untouched one.
TENSOR_METRICS = (AGREEMENT, "top1", "relative_error")
LABEL_METRICS = tuple(metric for metrics in METRICS_OF.values() for metric in metrics)


def has_classifier(config: Mapping[str, Any]) -> bool:
    """Say whether a Hugging Face config is of a model with a classifier; a bare encoder gets a new one."""
    return any(str(name).endswith(CLASSIFIERS) for name in config.get("architectures") or [])


def _labelled(data: Mapping[str, Split]) -> dict[str, Split]:
    """Return the splits whose rows have labels."""
    return {name: split for name, split in data.items() if name != UNLABELLED}


def problem_of(config: Mapping[str, Any], data: Mapping[str, Split]) -> ProblemType:
    """Return the problem type that the model's config says, or else the labels of the data show.

    Raises:
        InputError: the config's `problem_type` is not one that smelt knows.
    """
    labels = (e.label for split in _labelled(data).values() for e in split.examples)
    return decide_problem(config if has_classifier(config) else None, labels)


def new_names(data: Mapping[str, Split], problem: ProblemType) -> list[str]:
    """Return the names of the outputs that a new classifier for `data` has: the labels of train.

    Without training rows, those of all splits.
    """
    learned = {"train": data["train"]} if "train" in data else _labelled(data)
    return found_names((e.label for split in learned.values() for e in split.examples), problem)


def _unlearned(split: Split, name: str, names: Sequence[str], problem: ProblemType) -> str:
    """Return what is wrong where rows of `split` have labels that no training row has; nothing for none."""
    known = set(names)
    rows: dict[str, list[int]] = {}
    for at, example in enumerate(split.examples):
        for item in [example.label] if problem == SINGLE else items_of(example.label):
            number = whole_number(item)
            label = str(item if number is None else number)
            if label not in known and not is_blank(item):
                rows.setdefault(label, []).append(example.line or example.row or at + 1)
    if not rows:
        return ""
    place = "line" if split.examples[0].line else "row"
    shown = [f"{repr(label)[:80]} ({count(len(at), 'row')}, {place} {at[0]})" for label, at in rows.items()]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    labels = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return (
        f"{split.origin}: no row of train has the label {', '.join(shown[:_SHOWN])}{more}. A new classifier"
        f" learns the labels of train: {labels}. Use the same labels in '{name}', add training rows, or"
        " remove these rows."
    )


def label_mistakes(
    config: Mapping[str, Any], data: Mapping[str, Split], problem: ProblemType
) -> list[tuple[str, Message]]:
    """Return (name of the split, what is wrong) where labels do not fit the model.

    A bare encoder gets a new classifier for the labels that there are, so only their kind can be wrong.
    """
    names = class_names(config) if has_classifier(config) else new_names(data, problem)
    found = []
    if not has_classifier(config) and "train" in data and problem != REGRESSION:
        splits = {name: split for name, split in _labelled(data).items() if name != "train"}
        strange = {name: _unlearned(split, name, names, problem) for name, split in splits.items()}
        found = [(name, mistake("unknown-label", text)) for name, text in strange.items() if text]
        if found:
            return found
    if problem == SINGLE and len(names) < 2:
        text = "all rows have the same label; a classifier needs two."
        return [("train" if "train" in data else "test", mistake("one-label", text))]
    for name, split in _labelled(data).items():
        try:
            check_labels(split.examples, names, problem, split.origin)
        except InputError as error:
            found.append((name, error.as_message()))
    return found


def metric_mistakes(metrics: Sequence[str], problem: ProblemType) -> list[tuple[int, Message]]:
    """Return (place, what is wrong) for the metrics that do not fit the problem type."""
    fitting = METRICS_OF[problem]
    return [(at, unfit(metric, problem)) for at, metric in enumerate(metrics) if metric not in fitting]


def gate_mistakes(
    gates: Iterable[str], metrics: Sequence[str], problem: ProblemType
) -> list[tuple[str, Message]]:
    """Return (gate, what is wrong) for the gates on metrics that this problem type has not."""
    return [(g, unfit(g, problem)) for g in gates if g in LABEL_METRICS and g not in metrics]


def unfit(metric: str, problem: ProblemType) -> Message:
    """Return the mistake that `metric` does not fit `problem`."""
    owner = next((p for p, metrics in METRICS_OF.items() if metric in metrics), None)
    what = f"'{metric[:60]}' is for {owner}" if owner else f"'{metric[:60]}' is no metric"
    fitting = METRICS_OF[problem]
    return mistake(
        "does-not-fit-labels" if owner else "unknown-metric",
        f"{what}, and the model and the data are {problem}. Known for that: {', '.join(fitting)}."
        f"{nearest(metric, fitting)}",
    )
