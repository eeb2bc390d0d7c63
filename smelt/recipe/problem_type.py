"""Determine the problem type of a classifier, and check that metrics and labels fit it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from smelt.core.data import Split
from smelt.core.errors import InputError, did_you_mean
from smelt.core.labels import (
    CLASSIFIER_SUFFIXES,
    MULTI_LABEL,
    REGRESSION,
    SINGLE_LABEL,
    ProblemType,
    class_names,
    infer_label_names,
    infer_problem_type,
    is_blank_label,
    label_as_int,
    split_labels,
)
from smelt.core.messages import Message, error_message
from smelt.core.readers.label_targets import check_labels
from smelt.core.text import with_count
from smelt.core.unlabelled import UNLABELLED

_MAX_SHOWN = 5  # labels that a message names
# Metrics of each problem type; the first one is the main metric.
METRICS_BY_PROBLEM: dict[ProblemType, tuple[str, ...]] = {
    SINGLE_LABEL: ("accuracy", "f1"),
    MULTI_LABEL: ("f1_micro", "f1_macro", "subset_accuracy"),
    REGRESSION: ("pearson", "spearman", "mse"),
}
# Sentence embeddings: agreement with the baseline's vectors needs no scores, correlation does.
AGREEMENT_METRIC = "agreement"
CORRELATION_METRICS = ("spearman", "pearson")
EMBEDDING_METRICS = (*CORRELATION_METRICS, AGREEMENT_METRIC)
# Outputs of an ONNX model compared with those of the original.
OUTPUT_METRICS = (AGREEMENT_METRIC, "top1", "relative_error")
CLASSIFIER_METRICS = tuple(metric for metrics in METRICS_BY_PROBLEM.values() for metric in metrics)


def has_classifier(config: Mapping[str, Any]) -> bool:
    """Return whether a Hugging Face config has a classifier; an encoder without one gets a new one."""
    return any(str(name).endswith(CLASSIFIER_SUFFIXES) for name in config.get("architectures") or [])


def _labelled_splits(data: Mapping[str, Split]) -> dict[str, Split]:
    """Return the splits whose samples have labels."""
    return {name: split for name, split in data.items() if name != UNLABELLED}


def resolve_problem_type(config: Mapping[str, Any], data: Mapping[str, Split]) -> ProblemType:
    """Return the problem type from the model's config, or inferred from the labels of the data.

    Raises:
        InputError: the config's `problem_type` is not supported.
    """
    labels = (e.label for split in _labelled_splits(data).values() for e in split.examples)
    return infer_problem_type(config if has_classifier(config) else None, labels)


def new_class_names(data: Mapping[str, Split], problem: ProblemType) -> list[str]:
    """Return the class names of a new classifier for `data`: the labels of train.

    Without training samples, the labels of all splits.
    """
    learned = {"train": data["train"]} if "train" in data else _labelled_splits(data)
    return infer_label_names((e.label for split in learned.values() for e in split.examples), problem)


def _unseen_labels_text(split: Split, name: str, names: Sequence[str], problem: ProblemType) -> str:
    """Return a message about labels of `split` that train does not have; empty if there are none."""
    known = set(names)
    rows: dict[str, list[int]] = {}
    for at, example in enumerate(split.examples):
        for item in [example.label] if problem == SINGLE_LABEL else split_labels(example.label):
            number = label_as_int(item)
            label = str(item if number is None else number)
            if label not in known and not is_blank_label(item):
                rows.setdefault(label, []).append(example.line or example.row or at + 1)
    if not rows:
        return ""
    place = "line" if split.examples[0].line else "row"
    shown = [
        f"{repr(label)[:80]} ({with_count(len(at), 'sample')}, {place} {at[0]})" for label, at in rows.items()
    ]
    more = f" and {len(shown) - _MAX_SHOWN} more" if len(shown) > _MAX_SHOWN else ""
    labels = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return (
        f"{split.origin}: labels that train does not have: {', '.join(shown[:_MAX_SHOWN])}{more}. A new"
        f" classifier learns only the labels of train: {labels}. Use the same labels in '{name}', add"
        " training samples, or remove these samples."
    )


def label_mistakes(
    config: Mapping[str, Any], data: Mapping[str, Split], problem: ProblemType
) -> list[tuple[str, Message]]:
    """Return (split, mistake) for labels that do not fit the model.

    An encoder without a classifier gets one for the labels of the data, so only their type can be wrong.
    """
    names = class_names(config) if has_classifier(config) else new_class_names(data, problem)
    found = []
    if not has_classifier(config) and "train" in data and problem != REGRESSION:
        splits = {name: split for name, split in _labelled_splits(data).items() if name != "train"}
        strange = {name: _unseen_labels_text(split, name, names, problem) for name, split in splits.items()}
        found = [(name, error_message("unknown-label", text)) for name, text in strange.items() if text]
        if found:
            return found
    if problem == SINGLE_LABEL and len(names) < 2:
        text = "all samples have the same label. A classifier needs at least two labels."
        return [("train" if "train" in data else "test", error_message("one-label", text))]
    for name, split in _labelled_splits(data).items():
        try:
            check_labels(split.examples, names, problem, split.origin)
        except InputError as error:
            found.append((name, error.as_message()))
    return found


def metric_mistakes(metrics: Sequence[str], problem: ProblemType) -> list[tuple[int, Message]]:
    """Return (index, mistake) for the metrics that do not fit the problem type."""
    fitting = METRICS_BY_PROBLEM[problem]
    return [(at, unfit_metric(metric, problem)) for at, metric in enumerate(metrics) if metric not in fitting]


def gate_mistakes(
    gates: Iterable[str], metrics: Sequence[str], problem: ProblemType
) -> list[tuple[str, Message]]:
    """Return (gate, mistake) for the gates on metrics that do not fit the problem type."""
    return [(g, unfit_metric(g, problem)) for g in gates if g in CLASSIFIER_METRICS and g not in metrics]


def unfit_metric(metric: str, problem: ProblemType) -> Message:
    """Return the mistake that `metric` does not fit `problem`."""
    owner = next((p for p, metrics in METRICS_BY_PROBLEM.items() if metric in metrics), None)
    what = f"'{metric[:60]}' is a metric for {owner}" if owner else f"'{metric[:60]}' is not a metric"
    fitting = METRICS_BY_PROBLEM[problem]
    return error_message(
        "does-not-fit-labels" if owner else "unknown-metric",
        f"{what}; the model and data are {problem}. Available metrics: {', '.join(fitting)}."
        f"{did_you_mean(metric, fitting)}",
    )
