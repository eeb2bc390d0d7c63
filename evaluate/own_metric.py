"""A user's own metric: a Python function, named in a recipe by its import path `package.module:function`.

The function has the signature

    def metric(predictions: list, references: list, sources: list) -> list[float] | float

The three lists have an entry per example. Where a model writes texts, a prediction is a text, and an entry of
`references` the list of the example's references. Of a classifier both are the name of a class, with several
labels the list of their names, of a regression a number. A source is the input text; of a pair the list of
both texts; of an image its name.

A list of values, one for each example, is averaged, and gets an interval and paired tests. A single number is
a value of the whole set, without interval; its differences have a p-value of 1.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import json_hash, sha256_of, write_atomically
from smelt.evaluate.metrics import is_own_metric
from smelt.evaluate.quality import BOOTSTRAP_SIGNATURE, MetricScore, metric_score
from smelt.evaluate.significance import Statistics

_MAX_MAGNITUDE = 1e100  # of a value; variances need its square
_PROTOCOL = "function(predictions, references, sources) -> list of numbers, or a number"


@dataclass(frozen=True)
class OwnMetric:
    """An imported metric. source_hash, file: of the module; "" and None for a module without a file."""

    name: str
    function: Callable[[list[Any], list[Any], list[Any]], Any]
    source_hash: str
    file: Path | None


def load_own_metric(name: str, folder: Path) -> OwnMetric:
    """Import the function that `name` names.

    Args:
        name: `package.module:function`.
        folder: of the recipe, where modules are found before all others.

    Raises:
        InputError: `metric-not-importable`: no such module, or it raises an error when imported;
            `no-such-function`: the module has no such function, or it is not callable.
    """
    module_name, _, attribute = name.partition(":")
    with _first_on_path(folder):
        try:
            module = _import_current(module_name, folder)
        except (Exception, SystemExit) as error:  # whatever the user's module does
            raise InputError(
                f"'{name}' cannot be imported: {type(error).__name__}: {error}. A metric is named by its"
                f" import path, package.module:function; modules are found in {folder} and in installed"
                " packages.",
                code="metric-not-importable",
            ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        found = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        what = f"has no '{attribute}'" if function is None else f"has '{attribute}', which cannot be called"
        raise InputError(
            f"'{name}': {module_name} {what}. Functions in it: {', '.join(found[:20]) or 'none'}."
            f"{did_you_mean(attribute, found)}",
            code="no-such-function",
        )
    file = getattr(module, "__file__", None)
    path = Path(file) if file else None
    return OwnMetric(name, function, sha256_of(path) if path else "", path)


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with suppress(ValueError):  # the module may change the path
            sys.path.remove(str(folder))


def _import_current(name: str, folder: Path) -> Any:
    """Return the module as it is in its file now: one of `folder` that was edited is imported again."""
    importlib.invalidate_caches()
    package = name.partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None)
    # `importlib.util.find_spec` returns what is loaded, perhaps from the folder of another recipe
    spec = PathFinder.find_spec(package)
    if file and spec and spec.origin and Path(spec.origin).resolve() != Path(file).resolve():
        for loaded in [each for each in sys.modules if each == package or each.startswith(f"{package}.")]:
            del sys.modules[loaded]
    file = getattr(sys.modules.get(name), "__file__", None)
    # not any module below the folder, which may hold the environment with numpy
    if file and Path(file) in _module_files(name, folder):
        del sys.modules[name]
    return importlib.import_module(name)


def _module_files(name: str, folder: Path) -> tuple[Path, Path]:
    """Return the two files that a module of `folder` may have."""
    path = folder.absolute().joinpath(*name.split("."))
    return path.with_name(f"{path.name}.py"), path / "__init__.py"


def own_metric_files(names: Iterable[str], folder: Path) -> dict[str, Path]:
    """Return the files in `folder` that metrics are imported from, by their path relative to it.

    These are the modules of the metrics, and all others of the folder that they have imported. Installed
    packages are found from everywhere.

    Args:
        names: metrics, of which the user's own are `package.module:function`.
        folder: of the recipe.

    Raises:
        InputError: as `load_own_metric`.
    """
    own = [name for name in names if is_own_metric(name)]
    for name in own:
        load_own_metric(name, folder)
    modules = [(name, getattr(module, "__file__", None)) for name, module in sys.modules.items()]
    files = [
        Path(file) for name, file in modules if own and file and Path(file) in _module_files(name, folder)
    ]
    return {file.relative_to(folder.absolute()).as_posix(): file for file in files}


def copy_own_metrics(names: Iterable[str], folder: Path, target: Path) -> None:
    """Copy the files of `own_metric_files` into `target`, so that a recipe there finds its metrics."""
    for relative, file in own_metric_files(names, folder).items():
        copy = target / relative
        if copy.resolve() != file.resolve():
            copy.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(copy, file.read_bytes())


def score_own_metric(
    metric: OwnMetric,
    predictions: Sequence[Any],
    references: Sequence[Any],
    sources: Sequence[Any],
    places: Sequence[str],
    greater_is_better: bool = True,
) -> MetricScore:
    """Score outputs by a user's own metric.

    Args:
        metric: the function.
        predictions: n outputs, as the function expects them.
        references: n entries, likewise.
        sources: n inputs.
        places: n file names with the line of the example, for messages.
        greater_is_better: its direction.

    Raises:
        InputError: `metric-failed`: the function raises an error, with the first example that it raises one
            for alone; `wrong-metric-result`: it does not return numbers, or not one for each example;
            `metric-not-finite`: a value is NaN or infinite; `metric-too-large`: its square would be.
    """
    try:
        result = metric.function(list(predictions), list(references), list(sources))
    except (Exception, SystemExit) as error:  # whatever the user's function does
        where, cause = _failing_example(metric, predictions, references, sources, places, error)
        raise InputError(
            f"The metric '{metric.name}' failed{where}: {type(cause).__name__}: {cause}. Mend the function;"
            f" it is called as {_PROTOCOL}.",
            code="metric-failed",
        ) from error
    values = _as_numbers(metric.name, result, len(predictions))
    for value, place in zip(values, places, strict=False):
        if not math.isfinite(value):
            where = f" for {place}" if len(values) == len(places) else ""
            raise InputError(
                f"The metric '{metric.name}' returned {value}{where}. Return finite numbers.",
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
        examples=json_hash(list(references)),
        rows=[[value] for value in values],  # a number of the whole set is one observation
    )
    score = metric_score(statistics)
    return score.model_copy(update={"n": len(predictions), "higher_is_better": greater_is_better})


def _failing_example(
    metric: OwnMetric,
    predictions: Sequence[Any],
    references: Sequence[Any],
    sources: Sequence[Any],
    places: Sequence[str],
    error: BaseException,
) -> tuple[str, BaseException]:
    """Return where the function fails when called with one example, and the error that it raises there."""
    for prediction, reference, source, place in zip(predictions, references, sources, places, strict=True):
        try:
            metric.function([prediction], [reference], [source])
        except (Exception, SystemExit) as found:
            return f" at {place} (output {repr(prediction)[:80]})", found
    return " on all examples together, but on none of them alone", error


def _as_numbers(name: str, result: Any, count: int) -> list[float]:
    """Return the result of a metric as numbers: one for each example, or one.

    Raises:
        InputError: `wrong-metric-result`.
    """
    if hasattr(result, "tolist"):  # an array or a tensor
        result = result.tolist()
    found = list(result) if isinstance(result, list | tuple) else [result]
    numbers = [value.item() if hasattr(value, "item") else value for value in found]
    wrong = next((value for value in numbers if not isinstance(value, int | float)), None)
    if wrong is not None or not numbers:
        got = repr(result) if wrong is None else repr(wrong)
        raise InputError(
            f"The metric '{name}' returned {got[:80]}, which is not a number. Expected {_PROTOCOL}.",
            code="wrong-metric-result",
        )
    if isinstance(result, list | tuple) and len(numbers) != count:
        raise InputError(
            f"The metric '{name}' returned {len(numbers)} values for {count} examples. Return one for each,"
            " or a single number.",
            code="wrong-metric-result",
        )
    return [_as_float(value) for value in numbers]


def _as_float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer beyond 1.8e308
        return math.copysign(math.inf, value > 0 or -1)
