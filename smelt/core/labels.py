"""Labels of a classifier: its problem type, the names of its outputs, the labels of a sample.

The problem types are those of transformers (`config.problem_type`): a sample has one class, any number of
classes, or a number. The model's config decides; if it has no problem type, the data decide.

An integer is the same label in any notation: 1, 1.0, "1". `smelt.core.readers.label_targets` maps labels to
the outputs of a model.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from smelt.core.data import Label
from smelt.core.errors import InputError, did_you_mean

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
SINGLE_LABEL: ProblemType = "single_label_classification"
MULTI_LABEL: ProblemType = "multi_label_classification"
REGRESSION: ProblemType = "regression"
# Suffixes of transformers' classifier classes.
CLASSIFIER_SUFFIXES = ("ForSequenceClassification", "ForImageClassification")
# Separates the names of several labels in one field, in files without lists (CSV).
LABEL_SEPARATOR = "|"
# "007" is a name: leading zeros are significant.
_INTEGER_PATTERN = re.compile(r"([+-]?(?:0|[1-9][0-9]{0,15}))(?:\.0*)?")


def class_names(config: Mapping[str, Any]) -> list[str]:
    """Return the names of a model's outputs, in order, from its Hugging Face config as a dict.

    Raises:
        InputError: `id2label` does not map 0, 1, ... to names.
    """
    names = config.get("id2label") or {}
    try:
        count = len(names) or int(config.get("num_labels") or 2)
        by_output = {int(output): str(name) for output, name in names.items()}
        return [by_output[i] if names else f"LABEL_{i}" for i in range(count)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"config.json: id2label must map the outputs 0, 1, ... to names, got {repr(names)[:80]}.",
            code="wrong-label-names",
        ) from error


def problem_type(config: Mapping[str, Any]) -> ProblemType:
    """Return the problem type of a classifier from its config; one output without a type is regression.

    Raises:
        InputError: the config's `problem_type` is unknown, or is regression with several outputs.
    """
    outputs = len(class_names(config))
    said = config.get("problem_type")
    if said is None:
        return REGRESSION if outputs == 1 else SINGLE_LABEL
    if said not in get_args(ProblemType):
        known = ", ".join(get_args(ProblemType))
        hint = did_you_mean(str(said), get_args(ProblemType))
        raise InputError(
            f"config.json: problem_type is {said!r}; known: {known}.{hint}", code="unknown-problem-type"
        )
    if said == REGRESSION and outputs > 1:
        raise InputError(
            f"config.json: problem_type is regression, but the model has {outputs} outputs. Regression"
            " is supported only with one output.",
            code="too-many-outputs",
        )
    if said == SINGLE_LABEL and outputs == 1:
        raise InputError(
            "config.json: problem_type is single_label_classification, but the model has one output."
            " Use two outputs for two classes, or problem_type: regression for a number.",
            code="too-few-outputs",
        )
    kind: ProblemType = said
    return kind


def infer_problem_type(config: Mapping[str, Any] | None, labels: Iterable[Label | None]) -> ProblemType:
    """Return the problem type of a classifier from its config, or from the labels if it has none.

    Lists of labels (or names separated by `|`) are multi-label; decimal numbers are regression.

    Args:
        config: of a model with a classifier; None if the classifier is still to be made.
        labels: all labels of the data.

    Raises:
        InputError: see `problem_type`.
    """
    known: frozenset[str] = frozenset()
    if config is not None:
        said = problem_type(config)
        if config.get("problem_type") or said == REGRESSION:
            return said
        known = frozenset(class_names(config))
    found = {label for label in labels if not is_blank_label(label)}
    if any(
        isinstance(v, tuple) or (isinstance(v, str) and LABEL_SEPARATOR in v and v not in known)
        for v in found
    ):
        return MULTI_LABEL
    if config is None and found and _are_decimals(found):
        return REGRESSION
    return SINGLE_LABEL


def infer_label_names(labels: Iterable[Label | None], problem: ProblemType) -> list[str]:
    """Return names for the outputs of a new classifier: the labels of the data, sorted; numbers by value."""
    if problem == REGRESSION:
        return ["LABEL_0"]
    found = (
        set(labels)
        if problem == SINGLE_LABEL
        else {item for label in set(labels) for item in split_labels(label)}
    )
    numbers = {label: label_as_int(label) for label in found if not is_blank_label(label)}
    whole = {number for number in numbers.values() if number is not None}
    if None not in numbers.values():
        return [str(number) for number in sorted(whole)]
    return sorted({str(label if number is None else number) for label, number in numbers.items()})


def similar_labels(labels: Iterable[Label | None]) -> list[dict[str, int]]:
    """Return groups of labels that differ only in case or surrounding spaces: label -> count."""
    counts: Counter[str] = Counter()
    for label in labels:
        whole = isinstance(label, str) and LABEL_SEPARATOR not in label
        counts.update(str(item) for item in ([label] if whole else split_labels(label)))
    groups: dict[str, dict[str, int]] = {}
    for name, rows in counts.items():
        if label_as_int(name) is None:
            groups.setdefault(name.strip().casefold(), {})[name] = rows
    return [group for group in groups.values() if len(group) > 1]


def label_as_int(label: Label | None) -> int | None:
    """Return `label` as an integer, also from text ("1", " 1.0"); None if it is none."""
    if isinstance(label, str):
        found = _INTEGER_PATTERN.fullmatch(label.strip())
        return int(found[1]) if found else None
    if isinstance(label, float):
        return int(label) if label.is_integer() else None
    return label if isinstance(label, int) else None


def is_blank_label(label: Label | None) -> bool:
    """Return whether `label` is text without visible characters."""
    return isinstance(label, str) and not label.strip()


def label_as_float(label: Label | None) -> float | None:
    """Return `label` as a finite number, also from text; None if it is none."""
    try:
        value = float(label) if isinstance(label, int | float | str) else math.nan
    except (ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def split_labels(label: Label | None) -> list[Label]:
    """Return the labels in one field of a multi-label sample."""
    if isinstance(label, tuple):
        return list(label)
    if isinstance(label, str):
        return [item for part in label.split(LABEL_SEPARATOR) if (item := part.strip())]
    return [] if label is None else [label]


def _are_decimals(labels: set[Label | None]) -> bool:
    """Return whether all labels are numbers and one is not an integer; CSV has numbers as text."""
    whole = all(label_as_int(v) is not None for v in labels)
    return not whole and all(label_as_float(v) is not None for v in labels)
