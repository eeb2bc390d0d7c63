"""What the labels of a classifier mean: its problem type, the names of its outputs, rows as targets.

The problem types are transformers' own (`config.problem_type`): a text has one class, any number of
classes, or a number as its label. A model's config decides; where it does not say, the data do.

A whole number is the same label however a file writes it: 1, 1.0, "1". Where one of the model's names is a
whole number too, numbers are names; otherwise they are places of outputs, from 0.

Shapes: n = rows, C = outputs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from smelt.core.data import Example, Label
from smelt.core.errors import InputError, nearest

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
SINGLE: ProblemType = "single_label_classification"
MULTI: ProblemType = "multi_label_classification"
REGRESSION: ProblemType = "regression"
# How transformers' classes of classifiers end.
CLASSIFIERS = ("ForSequenceClassification", "ForImageClassification")
# Stands between the names of several labels in one field, where a file has no lists (CSV).
SEPARATOR = "|"
_SHOWN = 5  # rows that are named in a message
# "007" is a name: whoever writes zeros before a number means its digits.
_WHOLE = re.compile(r"([+-]?(?:0|[1-9][0-9]{0,15}))(?:\.0*)?")
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
    found = {label for label in labels if not _is_blank(label)}
    if any(isinstance(v, tuple) or (isinstance(v, str) and SEPARATOR in v and v not in known) for v in found):
        return MULTI
    if config is None and found and _all_numbers(found):
        return REGRESSION
    return SINGLE


def whole_number(label: Label | None) -> int | None:
    """Return the whole number that `label` is, also as text ("1", " 1.0"); None where it is none."""
    if isinstance(label, str):
        found = _WHOLE.fullmatch(label.strip())
        return int(found[1]) if found else None
    if isinstance(label, float):
        return int(label) if label.is_integer() else None
    return label if isinstance(label, int) else None


def _is_blank(label: Label | None) -> bool:
    return isinstance(label, str) and not label.strip()


def _all_numbers(labels: set[Label | None]) -> bool:
    """Say whether all labels are numbers and one is not whole; CSV files hold numbers as text."""
    whole = all(whole_number(v) is not None for v in labels)
    return not whole and all(_number(v) is not None for v in labels)


def found_names(labels: Iterable[Label | None], problem: ProblemType) -> list[str]:
    """Return names for the outputs of a new classifier: those in the data, sorted; numbers by their value."""
    if problem == REGRESSION:
        return ["LABEL_0"]
    found = set(labels) if problem == SINGLE else {item for label in set(labels) for item in items_of(label)}
    numbers = {label: whole_number(label) for label in found if not _is_blank(label)}
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


def items_of(label: Label | None) -> list[Label]:
    """Return the labels in one field of a multi-label row."""
    if isinstance(label, tuple):
        return list(label)
    if isinstance(label, str):
        return [item for part in label.split(SEPARATOR) if (item := part.strip())]
    return [] if label is None else [label]


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
        complaint = _complaint(examples[wrong[0]].label, names, problem)
        raise InputError(f"{_place(examples, wrong, origin)}: {complaint}{_others(examples, wrong)}")
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


def _complaint(label: Label | None, names: Sequence[str], problem: ProblemType) -> str:
    """Say why `label` does not fit the model, what fits, and how to mend it."""
    shown = repr(list(label) if isinstance(label, tuple) else label)[:80]
    if _is_blank(label):
        return "the label is empty. Fill it in, or remove the row."
    if problem == REGRESSION:
        return f"the label {shown} is not a finite number (regression)."
    if problem == SINGLE and isinstance(label, tuple):
        return (
            f"the label {shown} is a list, and the model gives one label to a text (problem_type {SINGLE})."
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
    return text
