"""Labels of a classifier: its problem type, the names of its outputs, and the targets of samples.

The problem types are those of transformers (`config.problem_type`): a sample has one class, any number of
classes, or one or several numbers. The model's config decides; if it has no problem type, the data decide.

Labels are mapped to the outputs of a model as classes, sets of classes, or numbers. An integer is the same
label in any notation: 1, 1.0, "1". If one of the model's names is an integer too, numbers are names;
otherwise they are indices of outputs, from 0.

Shapes: n = samples, C = outputs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from smelt.core.errors import InputError, did_you_mean
from smelt.core.messages import with_count
from smelt.data.splits import Example, Label
from smelt.data.tasks import TASK_TRAITS, Task, tasks_with

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
SINGLE_LABEL: ProblemType = "single_label_classification"
MULTI_LABEL: ProblemType = "multi_label_classification"
REGRESSION: ProblemType = "regression"
# Suffixes of transformers' classifier classes.
CLASSIFIER_SUFFIXES = tuple(
    str(TASK_TRAITS[task].auto_class).removeprefix("AutoModel") for task in tasks_with(classifies=True)
)
# Those of encoders with any head of classes: for a sample, or for each of its tokens.
HEAD_SUFFIXES = tuple(
    suffix
    for task in tasks_with(architecture="encoder")
    if (suffix := str(TASK_TRAITS[task].auto_class).removeprefix("AutoModel"))
)
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
        InputError: the config's `problem_type` is unknown, or needs several outputs.
    """
    outputs = len(class_names(config))
    declared = config.get("problem_type")
    if declared is None:
        return REGRESSION if outputs == 1 else SINGLE_LABEL
    if declared not in get_args(ProblemType):
        known_types = ", ".join(get_args(ProblemType))
        hint = did_you_mean(str(declared), get_args(ProblemType))
        raise InputError(
            f"config.json: problem_type is {declared!r}; known: {known_types}.{hint}",
            code="unknown-problem-type",
        )
    if declared == SINGLE_LABEL and outputs == 1:
        raise InputError(
            "config.json: problem_type is single_label_classification, but the model has one output."
            " Use two outputs for two classes, or problem_type: regression for a number.",
            code="too-few-outputs",
        )
    kind: ProblemType = declared
    return kind


def infer_problem_type(config: Mapping[str, Any] | None, labels: Iterable[Label | None]) -> ProblemType:
    """Return the problem type of a classifier from its config, or from the labels if it has none.

    Lists of labels (or names separated by `|`) are multi-label; decimal numbers, and lists of numbers one of
    which is decimal, are regression.

    Args:
        config: of a model with a classifier; None if the classifier is still to be made.
        labels: all labels of the data.

    Raises:
        InputError: see `problem_type`.
    """
    names: frozenset[str] = frozenset()
    if config is not None:
        declared = problem_type(config)
        if config.get("problem_type") or declared == REGRESSION:
            return declared
        names = frozenset(class_names(config))
    label_set = {label for label in labels if not is_blank_label(label)}
    if any(
        isinstance(v, tuple) or (isinstance(v, str) and LABEL_SEPARATOR in v and v not in names)
        for v in label_set
    ):
        items = {item for label in label_set for item in split_labels(label)}
        return REGRESSION if config is None and _are_decimals(items) else MULTI_LABEL
    if config is None and label_set and _are_decimals(label_set):
        return REGRESSION
    return SINGLE_LABEL


def infer_label_names(labels: Iterable[Label | None], problem: ProblemType) -> list[str]:
    """Return names for the outputs of a new classifier: the labels of the data, sorted; numbers by value.

    Of regression: LABEL_0 and so on, as many as the first label has numbers.
    """
    if problem == REGRESSION:
        return [f"LABEL_{index}" for index in range(len(split_labels(next(iter(labels), 0.0))))]
    label_set = (
        set(labels)
        if problem == SINGLE_LABEL
        else {item for label in set(labels) for item in split_labels(label)}
    )
    numbers = {label: label_as_int(label) for label in label_set if not is_blank_label(label)}
    integers = {number for number in numbers.values() if number is not None}
    if None not in numbers.values():
        return [str(number) for number in sorted(integers)]
    return sorted({str(label if number is None else number) for label, number in numbers.items()})


def similar_labels(labels: Iterable[Label | None]) -> list[dict[str, int]]:
    """Return groups of labels that differ only in case or surrounding spaces: label -> count."""
    counts: Counter[str] = Counter()
    for label in labels:
        is_single = isinstance(label, str) and LABEL_SEPARATOR not in label
        counts.update(str(item) for item in ([label] if is_single else split_labels(label)))
    groups: dict[str, dict[str, int]] = {}
    for name, count in counts.items():
        if label_as_int(name) is None:
            groups.setdefault(name.strip().casefold(), {})[name] = count
    return [group for group in groups.values() if len(group) > 1]


def label_as_int(label: Label | None) -> int | None:
    """Return `label` as an integer, also from text ("1", " 1.0"); None if it is none."""
    if isinstance(label, str):
        match = _INTEGER_PATTERN.fullmatch(label.strip())
        return int(match[1]) if match else None
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
        return [item for field in label.split(LABEL_SEPARATOR) if (item := field.strip())]
    return [] if label is None else [label]


def _are_decimals(labels: Collection[Label | None]) -> bool:
    """Return whether all labels are numbers and one is not an integer; CSV has numbers as text."""
    all_integers = all(label_as_int(v) is not None for v in labels)
    return not all_integers and all(label_as_float(v) is not None for v in labels)


_MAX_LISTED = 5  # rows that are named in a message
TargetT = TypeVar("TargetT")


# The label of a sample without one in a training that mixes both kinds, and its class; no file has it.
NO_LABEL, NO_CLASS = "\0no label", -1


def class_targets(examples: Sequence[Example], names: Sequence[str], origin: str = "") -> list[int]:
    """Return the class of each sample: the index of one of `names`, or an integer below C; -1 for `NO_LABEL`.

    Raises:
        InputError: labels that the model does not have; their lines are named.
    """
    outputs = _output_index(names)

    def class_index(label: Label | None) -> int | None:
        return NO_CLASS if label == NO_LABEL else _class_index(label, outputs)

    return _convert_labels(examples, names, origin, SINGLE_LABEL, class_index)


def multi_label_targets(
    examples: Sequence[Example], names: Sequence[str], origin: str = ""
) -> list[tuple[int, ...]]:
    """Return the classes of each sample, rising; a sample may have none. A text is split at `|`.

    The only class of `NO_LABEL` is -1.

    Raises:
        InputError: as `class_targets`.
    """
    outputs = _output_index(names)

    def class_indices(label: Label | None) -> tuple[int, ...] | None:
        if label == NO_LABEL:
            return (NO_CLASS,)
        indices = [_class_index(item, outputs) for item in split_labels(label)]
        valid_indices = {index for index in indices if index is not None}
        return None if None in indices or label is None else tuple(sorted(valid_indices))

    return _convert_labels(examples, names, origin, MULTI_LABEL, class_indices)


def regression_targets(
    examples: Sequence[Example], names: Sequence[str], origin: str = ""
) -> list[tuple[float, ...]]:
    """Return the numbers of each sample, one for each output; also from text, which is split at `|`.

    Those of `NO_LABEL` are NaN.

    Raises:
        InputError: a label has another number of values (`label-count`), or one that is not a finite number
            (`non-finite-label`); their lines are named.
    """

    def numbers(label: Label | None) -> tuple[float, ...] | None:
        if label == NO_LABEL:
            return (math.nan,) * len(names)
        values = [label_as_float(item) for item in split_labels(label)]
        finite_values = tuple(value for value in values if value is not None)
        return finite_values if len(finite_values) == len(values) == len(names) else None

    return _convert_labels(examples, names, origin, REGRESSION, numbers)


def check_labels(
    examples: Sequence[Example], names: Sequence[str], problem: ProblemType, origin: str = ""
) -> None:
    """Require that every label can be a target of a model with the outputs `names`.

    Raises:
        InputError: a label cannot.
    """
    if problem == REGRESSION:
        regression_targets(examples, names, origin)
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
    indices = {name: index for index, name in reversed(list(enumerate(names)))}
    numbers = {
        integer: index for name, index in indices.items() if (integer := label_as_int(name)) is not None
    }
    return _OutputIndex(indices, numbers, len(names))


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
    targets = [of(example.label) for example in examples]
    invalid_indices = [index for index, value in enumerate(targets) if value is None]
    if invalid_indices:
        code, error_text = _label_error(examples[invalid_indices[0]].label, names, problem)
        location = _first_location(examples, invalid_indices, origin)
        raise InputError(
            f"{location}: {error_text}{_other_locations(examples, invalid_indices)}", code=code
        ).with_location(location)
    return [value for value in targets if value is not None]


def _first_location(examples: Sequence[Example], wrong: list[int], origin: str) -> str:
    """Return the position of the first wrong sample: its line, or its number if lines are ambiguous."""
    unit, numbers = _line_numbers(examples, wrong[:1])
    if unit == "line" and origin:
        return f"{origin}:{numbers[0]}"
    return f"{origin}: {unit} {numbers[0]}" if origin else f"{unit} {numbers[0]}"


def _other_locations(examples: Sequence[Example], wrong: list[int]) -> str:
    """Return a sentence with the positions of the other wrong samples, "" if there are none."""
    unit, numbers = _line_numbers(examples, wrong)
    others = list(dict.fromkeys(numbers))[1:]  # a line may have several wrong tags
    omitted = f" and {len(others) - _MAX_LISTED + 1} more" if len(others) >= _MAX_LISTED else ""
    return f" Also {unit} {', '.join(map(str, others[: _MAX_LISTED - 1]))}{omitted}." if others else ""


def _line_numbers(examples: Sequence[Example], places: Sequence[int]) -> tuple[str, list[int]]:
    """Return the lines of the samples at `places`, or their numbers in the file if they have no lines.

    A split may have only some samples of the file, so their indices are not their numbers.
    """
    lines = [example.line for example in examples]
    if None not in lines:
        return "line", [line for index in places if (line := lines[index]) is not None]
    return "row", [examples[index].row or index + 1 for index in places]


def _label_error(label: Label | None, names: Sequence[str], problem: ProblemType) -> tuple[str, str]:
    """Return code and text of the error for `label`: what is wrong, valid labels, and the fix."""
    label_text = repr(list(label) if isinstance(label, tuple) else label)[:80]
    if is_blank_label(label):
        return "empty-label", "the label is empty. Fill it in, or remove the row."
    if problem == REGRESSION:
        values = split_labels(label)
        if len(values) != len(names) and all(label_as_float(value) is not None for value in values):
            text = f"the label {label_text} has {with_count(len(values), 'number')}, but the model has"
            return "label-count", f"{text} {with_count(len(names), 'output')} (regression)."
        return "non-finite-label", f"the label {label_text} is not a finite number (regression)."
    if problem == SINGLE_LABEL and isinstance(label, tuple):
        return (
            "several-labels",
            f"the label {label_text} is a list, but the model has one label per text (problem_type"
            f" {SINGLE_LABEL}).",
        )
    outputs = _output_index(names)
    extra = (
        [item for item in split_labels(label) if _class_index(item, outputs) is None]
        if problem == MULTI_LABEL
        else [label]
    )
    known_names = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    index_range = "" if outputs.by_number else f" or 0 to {len(names) - 1}"
    text = (
        f"the label {repr(extra[0] if extra else label)[:80]} is not one of the model's {len(names)} labels:"
        f" {known_names}{index_range}.{did_you_mean(str(extra[0] if extra else label), names)}"
    )
    if outputs.by_number and any(label_as_int(item) is not None for item in extra):
        text += " The labels are numbers, so a number in the data is a name, not the index of an output."
    has_default_names = all(name == f"LABEL_{i}" for i, name in enumerate(names))
    if has_default_names and any(isinstance(item, str) for item in extra):
        text += (
            " The model's outputs have no names: add them in order as id2label to its config.json,"
            " or use indices as labels."
        )
    return "unknown-label", text


def parse_score(value: Any, location: str, column: str) -> float | None:
    """Return `value` as a number, None if it is empty.

    Raises:
        InputError: it is not a number.
    """
    if value is None or value == "":
        return None
    try:
        score = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        raise InputError(
            f"{location}: column '{column}' must be a number, the similarity of the two texts, got"
            f" {repr(value)[:80]}. Leave it empty in files without scores.",
            code="wrong-column-type",
        )
    return score


def require_all_or_none(present: Iterable[bool], lines: Iterable[int], column: str, description: str) -> None:
    """Require that all rows have a value in `column`, or none of them.

    Args:
        present: whether each row has a value.
        lines: the line of each row.
        column: the name of the column.
        description: of the value, for the message.

    Raises:
        InputError: only some rows have a value; the first of each kind are named.
    """
    first_line: dict[bool, int] = {}
    for has, line in zip(present, lines, strict=True):
        first_line.setdefault(has, line)
    if len(first_line) == 2:
        raise InputError(
            f"row {first_line[True]} has a {description} (column '{column}'), but row {first_line[False]} has"
            " none. Set it in all rows of a file, or in none.",
            code="partly-missing-column",
        )


def has_classifier(config: Mapping[str, Any], task: Task | None = None) -> bool:
    """Return whether a Hugging Face config has a classifier; an encoder without one gets a new one.

    task: only its kind of classifier counts, of samples or of words; None: any.
    """
    suffixes = (
        CLASSIFIER_SUFFIXES if task is None else str(TASK_TRAITS[task].auto_class).removeprefix("AutoModel")
    )
    return any(str(name).endswith(suffixes) for name in config.get("architectures") or [])
