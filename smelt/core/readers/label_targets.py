"""Map the labels of samples to targets of a classifier: classes, sets of classes, numbers.

An integer is the same label in any notation: 1, 1.0, "1". If one of the model's names is an integer too,
numbers are names; otherwise they are indices of outputs, from 0.

Shapes: n = samples, C = outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from smelt.core.data import Example, Label
from smelt.core.errors import InputError, did_you_mean
from smelt.core.labels import (
    MULTI_LABEL,
    REGRESSION,
    SINGLE_LABEL,
    ProblemType,
    is_blank_label,
    label_as_float,
    label_as_int,
    split_labels,
)

_MAX_LISTED = 5  # rows that are named in a message
TargetT = TypeVar("TargetT")


def class_targets(examples: Sequence[Example], names: Sequence[str], origin: str = "") -> list[int]:
    """Return the class of each sample: the index of one of `names`, or an integer below C.

    Raises:
        InputError: labels that the model does not have; their lines are named.
    """
    outputs = _output_index(names)
    return _convert_labels(examples, names, origin, SINGLE_LABEL, lambda label: _class_index(label, outputs))


def multi_label_targets(
    examples: Sequence[Example], names: Sequence[str], origin: str = ""
) -> list[tuple[int, ...]]:
    """Return the classes of each sample, rising; a sample may have none. A text is split at `|`.

    Raises:
        InputError: as `class_targets`.
    """
    outputs = _output_index(names)

    def of(label: Label | None) -> tuple[int, ...] | None:
        found = [_class_index(item, outputs) for item in split_labels(label)]
        known = {index for index in found if index is not None}
        return None if None in found or label is None else tuple(sorted(known))

    return _convert_labels(examples, names, origin, MULTI_LABEL, of)


def regression_targets(examples: Sequence[Example], origin: str = "") -> list[float]:
    """Return the number of each sample, also from text.

    Raises:
        InputError: a label is not a finite number; their lines are named.
    """
    return _convert_labels(examples, (), origin, REGRESSION, label_as_float)


def check_labels(
    examples: Sequence[Example], names: Sequence[str], problem: ProblemType, origin: str = ""
) -> None:
    """Require that every label can be a target of a model with the outputs `names`.

    Raises:
        InputError: a label cannot.
    """
    if problem == REGRESSION:
        regression_targets(examples, origin)
    elif problem == MULTI_LABEL:
        multi_label_targets(examples, names, origin)
    else:
        class_targets(examples, names, origin)


class _OutputIndex(NamedTuple):
    """The index of each name among the outputs (the first of equal ones), and the number of outputs.

    by_number: indices of the names that are integers. If there are any, every number is a name.
    """

    by_name: dict[str, int]
    by_number: dict[int, int]
    total: int


def _output_index(names: Sequence[str]) -> _OutputIndex:
    places = {name: place for place, name in reversed(list(enumerate(names)))}
    numbers = {whole: place for name, place in places.items() if (whole := label_as_int(name)) is not None}
    return _OutputIndex(places, numbers, len(names))


def _class_index(label: Label | None, outputs: _OutputIndex) -> int | None:
    if isinstance(label, str) and label in outputs.by_name:
        return outputs.by_name[label]
    number = label_as_int(label)
    if number is None or outputs.by_number:
        return None if number is None else outputs.by_number.get(number)
    return number if 0 <= number < outputs.total else None


def _convert_labels(
    examples: Sequence[Example],
    names: Sequence[str],
    origin: str,
    problem: ProblemType,
    of: Callable[[Label | None], TargetT | None],
) -> list[TargetT]:
    found = [of(example.label) for example in examples]
    wrong = [at for at, value in enumerate(found) if value is None]
    if wrong:
        code, complaint = _label_error(examples[wrong[0]].label, names, problem)
        place = _first_location(examples, wrong, origin)
        raise InputError(f"{place}: {complaint}{_other_locations(examples, wrong)}", code=code).with_location(
            place
        )
    return [value for value in found if value is not None]


def _first_location(examples: Sequence[Example], wrong: list[int], origin: str) -> str:
    """Return the position of the first wrong sample: its line, or its number if lines are ambiguous."""
    word, numbers = _line_numbers(examples, wrong[:1])
    if word == "line" and origin:
        return f"{origin}:{numbers[0]}"
    return f"{origin}: {word} {numbers[0]}" if origin else f"{word} {numbers[0]}"


def _other_locations(examples: Sequence[Example], wrong: list[int]) -> str:
    """Return a sentence with the positions of the other wrong samples, "" if there are none."""
    word, numbers = _line_numbers(examples, wrong[1:_MAX_LISTED])
    more = f" and {len(wrong) - _MAX_LISTED} more" if len(wrong) > _MAX_LISTED else ""
    return f" Also {word} {', '.join(map(str, numbers))}{more}." if numbers else ""


def _line_numbers(examples: Sequence[Example], places: Sequence[int]) -> tuple[str, list[int]]:
    """Return the lines of the samples at `places`, or their numbers in the file if they have no lines.

    A split may have only some samples of the file, so their indices are not their numbers.
    """
    lines = [example.line for example in examples]
    if None not in lines:
        return "line", [line for at in places if (line := lines[at]) is not None]
    return "row", [examples[at].row or at + 1 for at in places]


def _label_error(label: Label | None, names: Sequence[str], problem: ProblemType) -> tuple[str, str]:
    """Return code and text of the error for `label`: what is wrong, valid labels, and the fix."""
    shown = repr(list(label) if isinstance(label, tuple) else label)[:80]
    if is_blank_label(label):
        return "empty-label", "the label is empty. Fill it in, or remove the row."
    if problem == REGRESSION:
        return "non-finite-label", f"the label {shown} is not a finite number (regression)."
    if problem == SINGLE_LABEL and isinstance(label, tuple):
        return (
            "several-labels",
            f"the label {shown} is a list, but the model has one label per text (problem_type"
            f" {SINGLE_LABEL}).",
        )
    outputs = _output_index(names)
    odd = (
        [item for item in split_labels(label) if _class_index(item, outputs) is None]
        if problem == MULTI_LABEL
        else [label]
    )
    known = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    places = "" if outputs.by_number else f" or 0 to {len(names) - 1}"
    text = (
        f"the label {repr(odd[0] if odd else label)[:80]} is not one of the model's {len(names)} labels:"
        f" {known}{places}.{did_you_mean(str(odd[0] if odd else label), names)}"
    )
    if outputs.by_number and any(label_as_int(item) is not None for item in odd):
        text += " The labels are numbers, so a number in the data is a name, not the index of an output."
    nameless = all(name == f"LABEL_{i}" for i, name in enumerate(names))
    if nameless and any(isinstance(item, str) for item in odd):
        text += (
            " The model's outputs have no names: add them in order as id2label to its config.json,"
            " or use indices as labels."
        )
    return "unknown-label", text
