"""A user's custom metric: a Python function, named in a recipe by its import path `package.module:function`.

The function has the signature

    def metric(predictions: list, references: list, sources: list) -> list[float] | float

The three lists have an entry per example. Where a model writes texts, a prediction is a text, and an entry of
`references` the list of the example's references. Of a classifier both are the name of a class, with several
labels the list of their names, of a regression a number. A source is the input text; of a pair the list of
both texts; of an image its name. Of a third-party graph all three are dictionaries of numpy arrays, without
the axis of the samples: its outputs, those of the original graph, and all arrays of the data file.

A list of values, one for each example, is averaged, and gets an interval and paired tests. A single number is
a value of the whole set, without interval; its differences have a p-value of 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import json_hash, sha256_of
from smelt.core.user_code import first_on_path, import_current, user_code_files
from smelt.evaluate.metrics.metric import BOOTSTRAP_SIGNATURE
from smelt.evaluate.quality import MetricScore, metric_score
from smelt.evaluate.significance import Statistics

_MAX_MAGNITUDE = 1e100  # of a value; variances need its square
_PROTOCOL = "function(predictions, references, sources) -> list of numbers, or a number"


@dataclass(frozen=True)
class CustomMetric:
    """An imported metric.

    source_hash: of its module and all modules of the recipe's folder that this imports. file: of its module.
    "" and None for a module without a file.
    """

    name: str
    function: Callable[[list[Any], list[Any], list[Any]], Any]
    source_hash: str
    file: Path | None


def load_custom_metric(name: str, folder: Path) -> CustomMetric:
    """Import the function that `name` names.

    Args:
        name: `package.module:function`.
        folder: of the recipe, where modules are found before all others.

    Raises:
        InputError: `metric-not-importable`: no such module, or it raises an error when imported;
            `no-such-function`: the module has no such function, or it is not callable.
    """
    module_name, _, attribute = name.partition(":")
    with first_on_path(folder):
        try:
            module = import_current(module_name, folder)
        except (Exception, SystemExit) as error:  # whatever the user's module does
            raise InputError(
                f"'{name}' cannot be imported: {type(error).__name__}: {error}. A metric is named by its"
                f" import path, package.module:function; modules are found in {folder} and in installed"
                " packages.",
                code="metric-not-importable",
            ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        functions = [
            key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
        ]
        problem_text = (
            f"has no '{attribute}'" if function is None else f"has '{attribute}', which cannot be called"
        )
        raise InputError(
            f"'{name}': {module_name} {problem_text}. Functions in it: {', '.join(functions[:20]) or 'none'}."
            f"{did_you_mean(attribute, functions)}",
            code="no-such-function",
        )
    file = getattr(module, "__file__", None)
    path = Path(file) if file else None

    def call(*values: Any) -> Any:
        with first_on_path(folder):  # for imports in the function
            return function(*values)

    files = user_code_files([name], folder) or ({path.name: path} if path else {})
    source_hash = (
        json_hash({relative: sha256_of(source_path) for relative, source_path in files.items()})
        if files
        else ""
    )
    return CustomMetric(name, call, source_hash, path)


def score_custom_metric(
    metric: CustomMetric,
    predictions: Sequence[Any],
    references: Sequence[Any],
    sources: Sequence[Any],
    places: Sequence[str],
    greater_is_better: bool = True,
    examples: str | None = None,
) -> MetricScore:
    """Score outputs by a user's custom metric.

    Args:
        metric: the function.
        predictions: n outputs, as the function expects them.
        references: n entries, likewise.
        sources: n inputs.
        places: n file names with the line of the example, for messages.
        greater_is_better: its direction.
        examples: a hash of the examples; default: of the references.

    Raises:
        InputError: `metric-failed`: the function raises an error, with the first example that it raises one
            for alone; `wrong-metric-result`: it does not return numbers, or not one for each example;
            `metric-not-finite`: a value is NaN or infinite; `metric-too-large`: its square would be.
    """
    try:
        result = metric.function(list(predictions), list(references), list(sources))
    except (Exception, SystemExit) as error:  # whatever the user's function does
        location_text, cause = _failing_example(metric, predictions, references, sources, places, error)
        raise InputError(
            f"The metric '{metric.name}' failed{location_text}: {type(cause).__name__}: {cause}. Mend "
            "the function;"
            f" it is called as {_PROTOCOL}.",
            code="metric-failed",
        ) from error
    values = _as_numbers(metric.name, result, len(predictions))
    for value, example_location in zip(values, places, strict=False):
        if not math.isfinite(value):
            location_text = f" for {example_location}" if len(values) == len(places) else ""
            raise InputError(
                f"The metric '{metric.name}' returned {value}{location_text}. Return finite numbers.",
                code="metric-not-finite",
            )
        if abs(value) > _MAX_MAGNITUDE:
            raise InputError(
                f"The metric '{metric.name}' returned {value}. Return numbers up to {_MAX_MAGNITUDE:g}: the"
                " variance of larger ones is infinite.",
                code="metric-too-large",
            )
    per_example = len(values) == len(predictions) and not isinstance(result, int | float)
    kind = f"average:mean|{BOOTSTRAP_SIGNATURE}" if per_example else "of the whole set"
    statistics = Statistics(
        metric=metric.name,
        signature=f"function:{metric.name}|source:{metric.source_hash[:12]}|{kind}",
        examples=json_hash(list(references)) if examples is None else examples,
        rows=[[value] for value in values],  # a number of the whole set is one observation
    )
    score = metric_score(statistics)
    return score.model_copy(update={"n": len(predictions), "higher_is_better": greater_is_better})


def _failing_example(
    metric: CustomMetric,
    predictions: Sequence[Any],
    references: Sequence[Any],
    sources: Sequence[Any],
    places: Sequence[str],
    error: BaseException,
) -> tuple[str, BaseException]:
    """Return where the function fails when called with one example, and the error that it raises there."""
    for prediction, reference, source, location in zip(predictions, references, sources, places, strict=True):
        try:
            metric.function([prediction], [reference], [source])
        except (Exception, SystemExit) as failure:
            return f" at {location} (output {repr(prediction)[:80]})", failure
    return " on all examples together, but on none of them alone", error


def _as_numbers(name: str, result: Any, count: int) -> list[float]:
    """Return the result of a metric as numbers: one for each example, or one.

    Raises:
        InputError: `wrong-metric-result`.
    """
    if hasattr(result, "tolist"):  # an array or a tensor
        result = result.tolist()
    items = list(result) if isinstance(result, list | tuple) else [result]
    converted = [value.item() if hasattr(value, "item") else value for value in items]
    wrong = next((value for value in converted if not isinstance(value, int | float)), None)
    if wrong is not None or not converted:
        value_text = repr(result) if wrong is None else repr(wrong)
        raise InputError(
            f"The metric '{name}' returned {value_text[:80]}, which is not a number. Expected {_PROTOCOL}.",
            code="wrong-metric-result",
        )
    if isinstance(result, list | tuple) and len(converted) != count:
        raise InputError(
            f"The metric '{name}' returned {len(converted)} values for {count} examples. Return one for each,"
            " or a single number.",
            code="wrong-metric-result",
        )
    return [_as_float(value) for value in converted]


def _as_float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer beyond 1.8e308
        return math.copysign(math.inf, value > 0 or -1)
