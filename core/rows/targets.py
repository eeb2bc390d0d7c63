"""The labels of rows as targets of a classifier: classes, sets of classes, numbers.

A whole number is the same label however a file writes it: 1, 1.0, "1". Where one of the model's names is a
whole number too, numbers are names; otherwise they are places of outputs, from 0.

Shapes: n = rows, C = outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from smelt.core.data import Example, Label
from smelt.core.errors import InputError, nearest
from smelt.core.labels import (
    MULTI,
    REGRESSION,
    SINGLE,
    ProblemType,
    finite_number,
    is_blank,
    items_of,
    whole_number,
)

_SHOWN = 5  # rows that are named in a message
TargetT = TypeVar("TargetT")


def read_classes(examples: Sequence[Example], names: Sequence[str], origin: str = "") -> list[int]:
    """Return each row's class: the place of one of `names`, or a whole number below C.

    Raises:
        InputError: labels that the model does not know; their lines are named.
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
        found = [_class(item, outputs) for item in items_of(label)]
        known = {index for index in found if index is not None}
        return None if None in found or label is None else tuple(sorted(known))

    return _read(examples, names, origin, MULTI, of)


def read_numbers(examples: Sequence[Example], origin: str = "") -> list[float]:
    """Return each row's number; text that reads as one is one.

    Raises:
        InputError: a label is no number, or not finite; their lines are named.
    """
    return _read(examples, (), origin, REGRESSION, finite_number)


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


class _Outputs(NamedTuple):
    """Where each name stands among the outputs (the first of equal ones), and how many outputs there are.

    numbers: places of the names that are whole numbers. Where there are any, every number is a name.
    """

    places: dict[str, int]
    numbers: dict[int, int]
    total: int


def _outputs(names: Sequence[str]) -> _Outputs:
    places = {name: place for place, name in reversed(list(enumerate(names)))}
    numbers = {whole: place for name, place in places.items() if (whole := whole_number(name)) is not None}
    return _Outputs(places, numbers, len(names))


def _class(label: Label | None, outputs: _Outputs) -> int | None:
    if isinstance(label, str) and label in outputs.places:
        return outputs.places[label]
    number = whole_number(label)
    if number is None or outputs.numbers:
        return None if number is None else outputs.numbers.get(number)
    return number if 0 <= number < outputs.total else None


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
        code, complaint = _complaint(examples[wrong[0]].label, names, problem)
        place = _place(examples, wrong, origin)
        raise InputError(f"{place}: {complaint}{_others(examples, wrong)}", code=code).at(place)
    return [value for value in found if value is not None]


def _place(examples: Sequence[Example], wrong: list[int], origin: str) -> str:
    """Return where the first wrong row stands: its line, or its number where lines do not tell rows apart."""
    word, numbers = _numbers(examples, wrong[:1])
    if word == "line" and origin:
        return f"{origin}:{numbers[0]}"
    return f"{origin}: {word} {numbers[0]}" if origin else f"{word} {numbers[0]}"


def _others(examples: Sequence[Example], wrong: list[int]) -> str:
    """Return the sentence that says where the other wrong rows stand; nothing where there are none."""
    word, numbers = _numbers(examples, wrong[1:_SHOWN])
    more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return f" Likewise {word} {', '.join(map(str, numbers))}{more}." if numbers else ""


def _numbers(examples: Sequence[Example], places: Sequence[int]) -> tuple[str, list[int]]:
    """Return the lines of the rows at `places`, or their numbers in the file where a row has no line.

    The rows of a split are some of the file's, so their places in it are not their numbers.
    """
    lines = [example.line for example in examples]
    if None not in lines:
        return "line", [line for at in places if (line := lines[at]) is not None]
    return "row", [examples[at].row or at + 1 for at in places]


def _complaint(label: Label | None, names: Sequence[str], problem: ProblemType) -> tuple[str, str]:
    """Return code and text of why `label` does not fit the model, what fits, and how to mend it."""
    shown = repr(list(label) if isinstance(label, tuple) else label)[:80]
    if is_blank(label):
        return "empty-label", "the label is empty. Fill it in, or remove the row."
    if problem == REGRESSION:
        return "non-finite-label", f"the label {shown} is not a finite number (regression)."
    if problem == SINGLE and isinstance(label, tuple):
        return (
            "several-labels",
            f"the label {shown} is a list, and the model gives one label to a text (problem_type {SINGLE}).",
        )
    outputs = _outputs(names)
    odd = [item for item in items_of(label) if _class(item, outputs) is None] if problem == MULTI else [label]
    known = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    places = "" if outputs.numbers else f" or 0 to {len(names) - 1}"
    text = (
        f"the label {repr(odd[0] if odd else label)[:80]} is not one of the model's {len(names)} labels:"
        f" {known}{places}.{nearest(str(odd[0] if odd else label), names)}"
    )
    if outputs.numbers and any(whole_number(item) is not None for item in odd):
        text += " Its labels are numbers, so a number in the data is a name and not the place of an output."
    nameless = all(name == f"LABEL_{i}" for i, name in enumerate(names))
    if nameless and any(isinstance(item, str) for item in odd):
        text += (
            " The model's outputs have no names: write them in their order as id2label into its config.json,"
            " or give their numbers as labels."
        )
    return "unknown-label", text
