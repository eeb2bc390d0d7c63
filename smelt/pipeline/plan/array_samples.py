"""Check the samples of a recipe of arrays against its model's signature, and complete the recipe by it.

The model is a third-party graph or a PyTorch module of the user's own.
"""

from __future__ import annotations

from collections.abc import Iterator

from smelt.core.errors import InputError
from smelt.core.files import resolve_path
from smelt.core.messages import error_message, warning
from smelt.data.npz_arrays import NO_SAMPLE_AXES, SampleAxes
from smelt.data.tasks import task_names
from smelt.evaluate.metrics.registry import (
    AGREEMENT_METRIC,
    DEFAULT_METRICS,
    TOP1_METRIC,
    find_metric,
    is_custom_metric,
)
from smelt.pipeline.inspect.model_info import OnnxModel
from smelt.pipeline.plan.check_context import CheckContext, Findings
from smelt.pipeline.recipe.recipe import ParsedRecipe
from smelt.pipeline.recipe.validation_errors import Finding, error_findings

ARRAYS_TASK = task_names(modality="arrays")
_MAX_PROBLEMS = 8  # of the samples of a split
_TEXT_KEYS = ("prefix", "source_language", "target_language")


def read_array_module(context: CheckContext, model: OnnxModel) -> Iterator[Finding]:
    """Check the samples of a PyTorch module of arrays, and complete the recipe by its signature.

    model: has the file of its weights and its signature.
    """
    names = {value.name for value in model.signature.inputs}
    for name, axis in context.recipe.data.axes.items():
        if name in names and axis != 0:
            text = f"the samples of '{name}', an input of a PyTorch module, are on axis 0. Remove it."
            yield ("data", "axes", name), error_message("wrong-axis", text)
    yield from check_arrays(context, model)
    yield from complete_array_recipe(context, model)


def complete_array_recipe(context: CheckContext, model: OnnxModel) -> Iterator[Finding]:
    """Complete a recipe of arrays by the sample axes, metrics and batch size of its model."""
    recipe = context.recipe
    yield from _set_batch_size(context, model)
    axes = model.signature.input_batch_axes
    default = None if has_calls(context) else 0
    arrays = scored_arrays(context, axes)
    more = {name: recipe.data.axes.get(name, default) for name in arrays if name not in axes}
    axes |= more
    data = recipe.data.model_copy(update={"axes": axes})
    metrics = yield from _output_metrics(recipe, model)
    score = context.recipe.score.model_copy(update={"quality": metrics})
    context.recipe = context.recipe.model_copy(
        update={"data": data, "score": score, "label_arrays": frozenset(more)}
    )


def _set_batch_size(context: CheckContext, model: OnnxModel) -> Iterator[Finding]:
    """Set the graph's fixed batch size for latency, if the recipe sets none; 1 for samples of whole calls."""
    recipe, size = context.recipe, model.signature.fixed_batch_size
    latency = recipe.score.latency
    if all(axis is None for axis in model.signature.input_batch_axes.values()):
        yield from _set_single_calls(context)
        return
    if size is None or not latency:
        return
    if "batch_sizes" in latency.model_fields_set and latency.batch_sizes != (size,):
        text = f"the graph has a fixed batch size of {size}. Set [{size}], or remove batch_sizes."
        yield ("score", "latency", "batch_sizes"), error_message("fixed-batch-size", text)
        return
    fixed_latency = latency.model_copy(update={"batch_sizes": (size,)})
    score = recipe.score.model_copy(update={"latency": fixed_latency})
    context.recipe = recipe.model_copy(update={"score": score})


def has_calls(context: CheckContext) -> bool:
    """Return whether samples are folders of `.npz` files, each the inputs of a whole call."""
    recipe = context.recipe
    return any(resolve_path(recipe.base, origin).is_dir() for origin in recipe.data.split_files().values())


def check_mixed_samples(context: CheckContext) -> Iterator[Finding]:
    """Yield the splits that are a file where others are folders, whose files are single samples."""
    recipe = context.recipe
    for name, origin in recipe.data.split_files().items() if has_calls(context) else ():
        path = resolve_path(recipe.base, origin)
        if path.is_file() and not context.is_invalid(f"data.{name}"):
            text = (
                f"{origin} is a file, but other splits are folders in which each file is a sample. Write its"
                " samples as files of a folder."
            )
            yield ("data", name), error_message("mixed-samples", text)


def _set_single_calls(context: CheckContext) -> Iterator[Finding]:
    """Set batch sizes of 1, for samples that are whole calls."""
    score, latency = context.recipe.score, context.recipe.score.latency
    text = "each sample is the input of a whole call. Set 1, or remove it."
    if "batch_size" in score.model_fields_set and score.batch_size != 1:
        yield ("score", "batch_size"), error_message("fixed-batch-size", text)
    if latency and "batch_sizes" in latency.model_fields_set and latency.batch_sizes != (1,):
        yield ("score", "latency", "batch_sizes"), error_message("fixed-batch-size", text)
    changes = {"latency": latency.model_copy(update={"batch_sizes": (1,)})} if latency else {}
    score = score.model_copy(update={"batch_size": 1, **changes})
    context.recipe = context.recipe.model_copy(update={"score": score})


def scored_arrays(context: CheckContext, axes: SampleAxes = NO_SAMPLE_AXES) -> frozenset[str]:
    """Return the arrays of the scored samples that metrics read.

    A user's function may read any that have as many samples as the graph's inputs, or an axis in the recipe.

    Args:
        context: of the plan.
        axes: of the graph's inputs; if there are none, lengths are not compared.
    """
    from smelt.data.npz_arrays import call_files
    from smelt.evaluate.tensor_quality import metric_arrays

    recipe = context.recipe
    if context.is_invalid("score.quality"):
        return frozenset()
    metrics, settings = recipe.score.quality, recipe.metric_settings
    paths = [resolve_path(recipe.base, origin) for origin in _scored_sources(context)]
    try:
        files = [file for path in paths for file in call_files(path)]
        return metric_arrays(metrics, settings, files, {**recipe.data.axes, **axes})
    except (InputError, OSError, RuntimeError, ValueError):  # reported by _check_arrays
        return metric_arrays(metrics, settings, (), {})


def _scored_sources(context: CheckContext) -> set[str]:
    """Return the files and folders of samples that are scored, also those taken from `train`."""
    sources = context.recipe.data.split_sources()
    return {sources[name] for name in ("test", "validation") if name in sources}


def _output_metrics(recipe: ParsedRecipe, model: OnnxModel) -> Findings[tuple[str, ...]]:
    """Return the metrics of a graph's outputs.

    `top1` is the first one of a graph of class scores alone, and none of a graph without any.
    """
    metrics = recipe.score.quality
    outputs = model.signature.output_shapes
    for index, metric in enumerate(metrics):
        settings = recipe.metric_settings.get(metric, {})
        try:
            find_metric(metric).check_graph(settings, outputs)
        except InputError as error:
            setting = () if error.setting is None else (metric, error.setting)
            yield ("score", "quality", index, *setting), error_message(error.code, str(error))
        else:
            if metric == TOP1_METRIC and settings.get("axes"):
                return metrics
    classes = model.details.get("class_outputs") or {}
    floats = {value.name for value in model.signature.outputs if value.dtype.startswith("float")}
    default = metrics == DEFAULT_METRICS[recipe.task]
    if TOP1_METRIC in metrics and not classes and len(floats) == len(model.signature.outputs):
        if not default or TOP1_METRIC in recipe.gates:
            path = ("gates", TOP1_METRIC) if TOP1_METRIC in recipe.gates else ("score", "quality")
            text = (
                f"{TOP1_METRIC} compares decisions, but no output of the graph has scores of classes (a"
                " Softmax or a linear layer at its end), integers or texts. Remove it, or use"
                f" {AGREEMENT_METRIC}."
            )
            yield path, error_message("does-not-fit-model", text)
        return tuple(metric for metric in metrics if metric != TOP1_METRIC)
    if default and classes and floats <= {*classes}:
        return (TOP1_METRIC, *(metric for metric in metrics if metric != TOP1_METRIC))
    return metrics


def check_arrays(context: CheckContext, model: OnnxModel) -> Iterator[Finding]:
    """Check the arrays of every split against the graph's inputs, by their headers."""
    recipe, data = context.recipe, context.recipe.data
    if recipe.tokenizer is not None:
        text = f"not used for task: {ARRAYS_TASK}. Remove it."
        yield ("tokenizer",), error_message("does-not-fit-task", text)
    for name in _TEXT_KEYS:
        if getattr(data, name) is not None:
            text = f"only for text data; task: {ARRAYS_TASK} uses arrays. Remove it."
            yield ("data", name), error_message("does-not-fit-task", text)
    if "columns" in data.model_fields_set:
        text = "only for text data; arrays are matched to inputs by name. Remove it."
        yield ("data", "columns"), error_message("does-not-fit-task", text)
    for name, origin in data.split_files().items():
        if context.is_invalid(f"data.{name}"):
            continue
        is_scored = origin in _scored_sources(context)
        metric_arrays = scored_arrays(context, model.signature.input_batch_axes) if is_scored else frozenset()
        try:
            names, problems = _read_headers(context, model, name, metric_arrays)
        except InputError as error:
            yield from error_findings(("data", name), error)
            continue
        except (OSError, RuntimeError, ValueError) as error:
            yield ("data", name), error_message("unreadable-file", f"the file cannot be read: {error}")
            continue
        for problem in problems[:_MAX_PROBLEMS]:
            yield ("data", name), error_message("does-not-fit-graph", problem)
        if len(problems) > _MAX_PROBLEMS:
            text = f"{origin}: {len(problems) - _MAX_PROBLEMS:,} more arrays that do not match."
            yield ("data", name), error_message("does-not-fit-graph", text)
        if problems:
            context.invalid_paths.add(f"data.{name}")  # its samples cannot be checked further
        unknown_arrays = model.signature.unknown_inputs([key for key in names if key not in metric_arrays])
        if unknown_arrays:
            hint = (
                " Your function reads arrays with as many samples as the inputs, and those in data.axes."
                if is_scored and any(map(is_custom_metric, recipe.score.quality))
                else ""
            )
            text = (
                f"{origin}: arrays that are not inputs of the graph are ignored: {', '.join(unknown_arrays)}."
            )
            yield (), warning("unread-arrays", text + hint)


def _read_headers(
    context: CheckContext, model: OnnxModel, split: str, metric_arrays: frozenset[str]
) -> tuple[list[str], list[str]]:
    """Return the names of the arrays of a split, and why they do not match the graph and the metrics.

    Raises:
        InputError: a file cannot be read, or its arrays have different numbers of samples.
    """
    from smelt.data.npz_arrays import are_calls, call_files, count_array_samples, read_npz_headers

    data, signature = context.recipe.data, model.signature
    origin = data.split_files()[split]
    path = resolve_path(context.recipe.base, origin)
    has_calls = are_calls(path, signature.input_batch_axes)
    names: dict[str, None] = {}
    problems: list[str] = []
    for file in call_files(path, split) if has_calls else [path]:
        shapes = read_npz_headers(file, split)
        names |= dict.fromkeys(shapes)
        label = origin if file == path else f"{origin}/{file.name}"
        hint = " `shapes` sets this: resize the samples, or remove it." if context.recipe.shapes else ""
        problems += [f"{label}: {problem}{hint}" for problem in signature.shape_problems(shapes)]
        missing = sorted(metric_arrays - {*shapes})
        problems += [
            f"{label}: no array '{key}', which a metric reads. Add it, or correct its name in the metric."
            for key in missing
        ]
        if not problems and not has_calls:
            axes = {key: data.axes.get(key, 0) for key in metric_arrays} | signature.input_batch_axes
            read_shapes = {key: shape for key, shape in shapes.items() if key in axes}
            count_array_samples(read_shapes, path, axes, by_name=signature.shared_batch_inputs)
    return [*names], problems
