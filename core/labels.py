"""What the labels of a classifier mean: its problem type, the names of its outputs, what one label holds.

The problem types are transformers' own (`config.problem_type`): a text has one class, any number of
classes, or a number as its label. A model's config decides; where it does not say, the data do.

A whole number is the same label however a file writes it: 1, 1.0, "1". What a label is to a model with these
outputs, `smelt.core.rows.targets` says.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from smelt.core.data import Label
from smelt.core.errors import InputError, nearest

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
SINGLE: ProblemType = "single_label_classification"
MULTI: ProblemType = "multi_label_classification"
REGRESSION: ProblemType = "regression"
# How transformers' classes of classifiers end.
CLASSIFIERS = ("ForSequenceClassification", "ForImageClassification")
# Stands between the names of several labels in one field, where a file has no lists (CSV).
SEPARATOR = "|"
# "007" is a name: whoever writes zeros before a number means its digits.
_WHOLE = re.compile(r"([+-]?(?:0|[1-9][0-9]{0,15}))(?:\.0*)?")


def class_names(config: Mapping[str, Any]) -> list[str]:
    """Return the names of a model's outputs, in their order, from its Hugging Face config as a dict.

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
            f"config.json: id2label must map the outputs 0, 1, ... to names, read {repr(names)[:80]}.",
            code="wrong-label-names",
        ) from error


def problem_type(config: Mapping[str, Any]) -> ProblemType:
    """Return what a classifier does, from its config alone; one output without a word is regression.

    Raises:
        InputError: the config's `problem_type` is no known word, or is regression with several outputs.
    """
    outputs = len(class_names(config))
    said = config.get("problem_type")
    if said is None:
        return REGRESSION if outputs == 1 else SINGLE
    if said not in get_args(ProblemType):
        known = ", ".join(get_args(ProblemType))
        hint = nearest(str(said), get_args(ProblemType))
        raise InputError(
            f"config.json: problem_type is {said!r}; known: {known}.{hint}", code="unknown-problem-type"
        )
    if said == REGRESSION and outputs > 1:
        raise InputError(
            f"config.json: problem_type is regression and the model has {outputs} outputs;"
            " smelt knows regression with one output.",
            code="too-many-outputs",
        )
    if said == SINGLE and outputs == 1:
        raise InputError(
            "config.json: problem_type is single_label_classification and the model has one output;"
            " one that tells two classes apart has two, one that gives a number is regression.",
            code="too-few-outputs",
        )
    kind: ProblemType = said
    return kind


def decide_problem(config: Mapping[str, Any] | None, labels: Iterable[Label | None]) -> ProblemType:
    """Return what a classifier does, from its config, or from the labels where that does not say it.

    Lists of labels (or names with `|` between them) are multi-label; decimal numbers are regression.

    Args:
        config: of a model with a classifier; None where the classifier is still to be made.
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
    found = {label for label in labels if not is_blank(label)}
    if any(isinstance(v, tuple) or (isinstance(v, str) and SEPARATOR in v and v not in known) for v in found):
        return MULTI
    if config is None and found and _all_numbers(found):
        return REGRESSION
    return SINGLE


def found_names(labels: Iterable[Label | None], problem: ProblemType) -> list[str]:
    """Return names for the outputs of a new classifier: those in the data, sorted; numbers by their value."""
    if problem == REGRESSION:
        return ["LABEL_0"]
    found = set(labels) if problem == SINGLE else {item for label in set(labels) for item in items_of(label)}
    numbers = {label: whole_number(label) for label in found if not is_blank(label)}
    whole = {number for number in numbers.values() if number is not None}
    if None not in numbers.values():
        return [str(number) for number in sorted(whole)]
    return sorted({str(label if number is None else number) for label, number in numbers.items()})


def spelled_alike(labels: Iterable[Label | None]) -> list[dict[str, int]]:
    """Return the labels that only case or blanks around them tell apart: groups of label -> rows."""
    counts: Counter[str] = Counter()
    for label in labels:
        whole = isinstance(label, str) and SEPARATOR not in label
        counts.update(str(item) for item in ([label] if whole else items_of(label)))
    groups: dict[str, dict[str, int]] = {}
    for name, rows in counts.items():
        if whole_number(name) is None:
            groups.setdefault(name.strip().casefold(), {})[name] = rows
    return [group for group in groups.values() if len(group) > 1]


def whole_number(label: Label | None) -> int | None:
    """Return the whole number that `label` is, also as text ("1", " 1.0"); None where it is none."""
    if isinstance(label, str):
        found = _WHOLE.fullmatch(label.strip())
        return int(found[1]) if found else None
    if isinstance(label, float):
        return int(label) if label.is_integer() else None
    return label if isinstance(label, int) else None


def is_blank(label: Label | None) -> bool:
    """Say whether `label` is text without a character that shows."""
    return isinstance(label, str) and not label.strip()


def finite_number(label: Label | None) -> float | None:
    """Return the finite number that `label` is, also as text; None where it is none."""
    try:
        value = float(label) if isinstance(label, int | float | str) else math.nan
    except (ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def items_of(label: Label | None) -> list[Label]:
    """Return the labels in one field of a multi-label row."""
    if isinstance(label, tuple):
        return list(label)
    if isinstance(label, str):
        return [item for part in label.split(SEPARATOR) if (item := part.strip())]
    return [] if label is None else [label]


def _all_numbers(labels: set[Label | None]) -> bool:
    """Say whether all labels are numbers and one is not whole; CSV files hold numbers as text."""
    whole = all(whole_number(v) is not None for v in labels)
    return not whole and all(finite_number(v) is not None for v in labels)
