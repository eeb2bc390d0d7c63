"""What the labels of a classifier mean: its problem type, the names of its outputs, rows as targets.

The problem types are transformers' own (`config.problem_type`): a text has one class, any number of
classes, or a number as its label. A model's config decides; where it does not say, the data do.

Shapes: n = rows, C = outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from smelt.core.data import Example, Label
from smelt.core.errors import InputError, nearest

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
SINGLE: ProblemType = "single_label_classification"
MULTI: ProblemType = "multi_label_classification"
REGRESSION: ProblemType = "regression"
# Stands between the names of several labels in one field, where a file has no lists (CSV).
SEPARATOR = "|"
_SHOWN = 5  # rows that are named in a message
TargetT = TypeVar("TargetT")


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
            f"config.json: id2label must map the outputs 0, 1, ... to names, read {repr(names)[:80]}."
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
        raise InputError(f"config.json: problem_type is {said!r}; known: {known}.{hint}")
    if said == REGRESSION and outputs > 1:
        raise InputError(
            f"config.json: problem_type is regression and the model has {outputs} outputs;"
            " smelt knows regression with one output."
        )
    if said == SINGLE and outputs == 1:
        raise InputError(
            "config.json: problem_type is single_label_classification and the model has one output;"
            " one that tells two classes apart has two, one that gives a number is regression."
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
    found = set(labels)
    if any(isinstance(v, tuple) or (isinstance(v, str) and SEPARATOR in v and v not in known) for v in found):
        return MULTI
    if config is None and found and _all_numbers(found):
        return REGRESSION
    return SINGLE


def _all_numbers(labels: set[Label | None]) -> bool:
    """Say whether all labels are numbers and one is not whole; CSV files hold numbers as text."""
    whole = all(isinstance(v, int) or (isinstance(v, str) and v.strip().isdecimal()) for v in labels)
    return not whole and all(_number(v) is not None for v in labels)


def found_names(labels: Iterable[Label | None], problem: ProblemType) -> list[str]:
    """Return names for the outputs of a new classifier: the names in the data, sorted, or LABEL_0, ..."""
    if problem == REGRESSION:
        return ["LABEL_0"]
    found = set(labels) if problem == SINGLE else {item for label in set(labels) for item in _items(label)}
    numbers = [v for v in found if isinstance(v, int)]
    if numbers and len(numbers) == len(found):
        return [f"LABEL_{i}" for i in range(max(numbers) + 1)]
    return sorted(str(v) for v in found)


def read_classes(examples: Sequence[Example], names: Sequence[str], origin: str = "") -> list[int]:
    """Return each row's class: a whole number below C, or one of `names`.

    Raises:
        InputError: labels that the model does not know; their rows (counted from 1) are named.
    """
    outputs = _outputs(names)
    return _read(examples, names, origin, SINGLE, lambda label: _class(label, outputs))


def read_class_sets(
    examples: Sequence[Example], names: Sequence[str], origin: str = ""
) -> list[tuple[int, ...]]:
    """Return each row's classes, rising; a row may have none. A text is split at `|`.

    Raises:
        InputError: as `read_classes`.
    """
    outputs = _outputs(names)

    def of(label: Label | None) -> tuple[int, ...] | None:
        found = [_class(item, outputs) for item in _items(label)]
        known = {index for index in found if index is not None}
        return None if None in found or label is None else tuple(sorted(known))

    return _read(examples, names, origin, MULTI, of)


def read_numbers(examples: Sequence[Example], origin: str = "") -> list[float]:
    """Return each row's number; text that reads as one is one.

    Raises:
        InputError: a label is no number, or not finite; the rows (counted from 1) are named.
    """
    return _read(examples, (), origin, REGRESSION, _number)


def check_labels(
    examples: Sequence[Example], names: Sequence[str], problem: ProblemType, origin: str = ""
) -> None:
    """Make sure that every label can be a target of a model with the outputs `names`.

    Raises:
        InputError: one cannot.
    """
    if problem == REGRESSION:
        read_numbers(examples, origin)
    elif problem == MULTI:
        read_class_sets(examples, names, origin)
    else:
        read_classes(examples, names, origin)


def _items(label: Label | None) -> list[Label]:
    """Return the labels in one field of a multi-label row."""
    if isinstance(label, tuple):
        return list(label)
    if isinstance(label, str):
        return [item for part in label.split(SEPARATOR) if (item := part.strip())]
    return [] if label is None else [label]


class _Outputs(NamedTuple):
    """Where each name stands among the outputs (the first of equal ones), and how many outputs there are."""

    places: dict[str, int]
    number: int


def _outputs(names: Sequence[str]) -> _Outputs:
    return _Outputs({name: place for place, name in reversed(list(enumerate(names)))}, len(names))


def _class(label: Label | None, outputs: _Outputs) -> int | None:
    if isinstance(label, str):
        if label in outputs.places:
            return outputs.places[label]
        # CSV files hold numbers as text
        label = int(label) if label.isascii() and label.isdecimal() else None
    return label if isinstance(label, int) and 0 <= label < outputs.number else None


def _number(label: Label | None) -> float | None:
    try:
        value = float(label) if isinstance(label, int | float | str) else math.nan
    except (ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def _read(
    examples: Sequence[Example],
    names: Sequence[str],
    origin: str,
    problem: ProblemType,
    of: Callable[[Label | None], TargetT | None],
) -> list[TargetT]:
    found = [of(example.label) for example in examples]
    wrong = [at for at, value in enumerate(found) if value is None]
    if wrong:
        raise InputError(_complaint([examples[at].label for at in wrong], wrong, names, origin, problem))
    return [value for value in found if value is not None]


def _complaint(
    labels: list[Label | None], rows: list[int], names: Sequence[str], origin: str, problem: ProblemType
) -> str:
    """Say which rows have labels that do not fit the model, what fits, and how to mend it."""
    start = f"{origin}: row" if origin else "row"
    label = labels[0]
    others = ", ".join(str(row + 1) for row in rows[1:_SHOWN])
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    also = f" Likewise row {others}{more}." if others else ""
    shown = repr(list(label) if isinstance(label, tuple) else label)[:80]
    if problem == REGRESSION:
        return f"{start} {rows[0] + 1}: the label {shown} is not a finite number (regression).{also}"
    if problem == SINGLE and isinstance(label, tuple):
        return (
            f"{start} {rows[0] + 1}: the label {shown} is a list, and the model gives one label to a text"
            f" (problem_type {SINGLE}).{also}"
        )
    outputs = _outputs(names)
    odd = [item for item in _items(label) if _class(item, outputs) is None] if problem == MULTI else [label]
    known = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    text = (
        f"{start} {rows[0] + 1}: the label {repr(odd[0] if odd else label)[:80]} is not one of the model's"
        f" {len(names)} labels: {known} or 0 to {len(names) - 1}."
        f"{nearest(str(odd[0] if odd else label), names)}{also}"
    )
    nameless = all(name == f"LABEL_{i}" for i, name in enumerate(names))
    if nameless and any(isinstance(item, str) for item in odd):
        text += (
            " The model's outputs have no names: write them in their order as id2label into its config.json,"
            " or give their numbers as labels."
        )
    return text
