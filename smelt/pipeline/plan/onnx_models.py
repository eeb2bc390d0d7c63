"""Check a recipe that starts from an ONNX model, one graph or those of a generative model, with its data.

A graph is opened in a separate process with limits of memory and time (`smelt.runtimes.onnx_import`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.errors import InputError
from smelt.core.files import resolve_path
from smelt.core.messages import Message, error_message, warning
from smelt.data.splits import CUSTOM_TASK, SENTENCE_SIMILARITY, TEXT_TO_TEXT_TASKS, Task
from smelt.evaluate.metrics.registry import AGREEMENT_METRIC, DEFAULT_METRICS, TOP1_METRIC
from smelt.models.families.registry import FAMILIES, FAMILIES_BY_TASK
from smelt.models.text_rules import MODULES_FILE, POOLINGS
from smelt.pipeline.inspect.model_folder import check_tokenizer_files, read_config, unknown_family_message
from smelt.pipeline.inspect.model_info import (
    NON_FLOAT32_DTYPES,
    OnnxModel,
    find_generation_graphs,
    find_graph,
    find_tokenizer_folder,
    inspect_graph,
    is_onnx,
)
from smelt.pipeline.recipe.model_and_data import has_classifier
from smelt.pipeline.recipe.recipe import ParsedRecipe
from smelt.pipeline.recipe.validation_errors import RecipeErrors, has_error
from smelt.runtimes.onnx_import.convert_optimum import MODEL_GRAPH, layout_problems

if TYPE_CHECKING:
    from smelt.pipeline.plan.plan import PlanStep
    from smelt.pipeline.recipe.yaml_file import KeyPath
    from smelt.runtimes.onnx_import.signature import GraphSignature


GENERATIVE_TASKS = (*TEXT_TO_TEXT_TASKS, "language-modeling")


def check_generation_graphs(recipe: ParsedRecipe, path: Path, errors: RecipeErrors) -> OnnxModel | None:
    """Check the graphs in `path` with config and tokenizer; return the model, None if there are errors."""
    try:
        parts = find_generation_graphs(path)
    except InputError as error:
        errors.add_error(("model",), error)
        return None
    looked = {name: inspect_graph(file) for name, file in parts.items()}
    wrong = [f"{parts[name]}: {problem}" for name, found in looked.items() for problem in found.problems]
    for name, found in looked.items():
        if found.signature is not None:
            wrong += [f"{parts[name]}: {problem}" for problem in layout_problems(name, found.signature)]
    for problem in wrong:
        errors.add(("model",), f"{problem}.", code="unsupported-graph")
    last = next(reversed(parts))
    named = None if recipe.tokenizer is None else resolve_path(recipe.base, recipe.tokenizer)
    folder = _check_tokenizer_folder(recipe, parts, named, errors)
    signature = looked[last].signature
    if wrong or folder is None or signature is None:
        return None
    files = tuple(dict.fromkeys(name for found in looked.values() for name in found.files))
    details: dict[str, Any] = dict(looked[last].details or {})
    details["nodes"] = sum(int((found.details or {}).get("nodes", 0)) for found in looked.values())
    return OnnxModel(parts[last], signature, files, folder, details, parts)


def check_generation_engines(
    model: OnnxModel | None,
    steps: Sequence[PlanStep],
    setting_paths: Mapping[str, KeyPath],
    errors: RecipeErrors,
) -> None:
    """Add an error for steps that build engines of third-party generation graphs, which is unsupported."""
    for step in steps if model is not None and model.graphs else ():
        if step.stage_class.produces == "tensorrt":
            errors.add(
                setting_paths[step.name],
                "cannot build an engine from generation graphs of another exporter. Start from the folder"
                " with weights, and put onnx: {target: tensorrt} before this step.",
                code="unsupported-graph",
            )


def _check_tokenizer_folder(
    recipe: ParsedRecipe, graphs: dict[str, Path], named: Path | None, errors: RecipeErrors
) -> Path | None:
    """Return the folder with config and tokenizer; None, with errors added, if they do not fit."""
    place: tuple[str, ...] = ("model",) if recipe.tokenizer is None else ("tokenizer",)
    graph = next(iter(graphs.values()))
    folder = find_tokenizer_folder(graph, named)
    if folder is None:
        errors.add(
            place,
            f"{graph.parent}: no config.json. Set tokenizer: FOLDER, the folder with config.json and the"
            " tokenizer of the exported model.",
            code="missing-config",
        )
        return None
    config, problems = read_config(folder)
    kind = str(config.get("model_type", ""))
    families = FAMILIES_BY_TASK[recipe.task]
    if config and kind not in families:
        problems.append(unknown_family_message(kind, recipe.task).with_prefix(f"{folder / 'config.json'}: "))
    else:
        problems += check_tokenizer_files(folder, kind)
    reads = bool(config.get("is_encoder_decoder"))
    if config and not problems and reads == (MODEL_GRAPH in graphs):
        have = "only a decoder" if MODEL_GRAPH in graphs else "an encoder and a decoder"
        problems.append(
            error_message(
                "config-differs-from-graph",
                f"{folder / 'config.json'}: is_encoder_decoder is {str(reads).lower()}, but the graphs are"
                f" {have}. Use the config of the exported model.",
            )
        )
    for problem in problems:
        errors.add_message(place, problem)
    return None if problems else folder


# Output of the graph for each task.
_TASK_OUTPUTS: dict[Task, str] = {"text-classification": "logits", SENTENCE_SIMILARITY: "sentence_embedding"}
HIDDEN_STATES_OUTPUT = "last_hidden_state"  # pooled to an embedder's vectors
_MAX_NAMED_NODES = 3  # nodes in a warning
_TEXT_KEYS = ("prefix", "source_language", "target_language")


def check_onnx_model(
    recipe: ParsedRecipe, errors: RecipeErrors, bad: set[str], warnings: list[Message]
) -> OnnxModel | None:
    """Check and return the ONNX model that `recipe` starts from; None if it does not, or if it is invalid.

    Args:
        recipe: the parsed recipe.
        errors: receives the errors.
        bad: dotted paths of parts that are known to be invalid.
        warnings: receives the warnings.
    """
    if has_error(bad, "model"):
        return None
    if not is_onnx(recipe.model, recipe.base):
        _check_onnx_only_keys(recipe, errors, bad)
        return None
    path = resolve_path(recipe.base, str(recipe.model))
    if recipe.task in GENERATIVE_TASKS and not has_error(bad, "task"):
        return check_generation_graphs(recipe, path, errors)
    return _check_single_graph(recipe, path, errors, bad, warnings)


def _check_single_graph(
    recipe: ParsedRecipe, path: Path, errors: RecipeErrors, bad: set[str], warnings: list[Message]
) -> OnnxModel | None:
    """Check and return the single graph at `path` (a file or a folder); as `check_onnx_model`."""
    try:
        file = find_graph(path)
    except InputError as error:
        errors.add_error(("model",), error)
        return None
    found = inspect_graph(file)
    for problem in found.problems:
        errors.add(("model",), f"{file}: {problem}.", code="unsupported-graph")
    if found.signature is None or has_error(bad, "task"):
        return None
    model = OnnxModel(file, found.signature, found.files, details=dict(found.details or {}))
    if random := model.details.get("random"):
        more = f" and {len(random) - _MAX_NAMED_NODES} more" if len(random) > _MAX_NAMED_NODES else ""
        warnings.append(
            warning(
                "random-outputs",
                f"{file.name} generates random numbers ({', '.join(random[:_MAX_NAMED_NODES])}{more}), so"
                " outputs and scores differ between runs. Export it in inference mode (model.eval()).",
            )
        )
    if recipe.task == CUSTOM_TASK:
        known = _with_batch_axes(recipe, model, errors, bad)
        if known is not None:
            _check_arrays(recipe, known, errors, bad, warnings)
        return known
    if recipe.data.axes and not has_error(bad, "data.axes"):
        errors.add(
            ("data", "axes"),
            f"only for arrays (task: {CUSTOM_TASK}); the task is {recipe.task}. Remove it.",
            code="does-not-fit-task",
        )
    folder = _check_texts(recipe, model, errors)
    return None if folder is None else replace(model, tokenizer_folder=folder)


def _with_batch_axes(
    recipe: ParsedRecipe, model: OnnxModel, errors: RecipeErrors, bad: set[str]
) -> OnnxModel | None:
    """Return the model with its batch axes; None, with errors, if they are wrong or ambiguous."""
    if has_error(bad, "data.axes"):
        return None
    given = recipe.data.axes
    wrong = list(model.signature.invalid_axes(given))
    for problem in wrong:
        errors.add(("data", "axes"), problem, code="wrong-axis")
    signature = model.signature if wrong else model.signature.with_batch_axes(given)
    unclear = [] if wrong else list(signature.ambiguous_axes(given))
    for problem in unclear:
        errors.add(("data",), problem, code="unclear-axes")
    if wrong or unclear:
        bad.add("data.axes")  # the samples cannot be checked further
        return None
    return replace(model, signature=signature)


def check_float_weights(
    model: OnnxModel | None,
    steps: Sequence[PlanStep],
    setting_paths: Mapping[str, KeyPath],
    errors: RecipeErrors,
) -> None:
    """Add an error for steps that need float32 weights if the graph has quantized or float16 ones."""
    details = model.details if model is not None else {}
    codes, floats = details.get("codes"), details.get("floats")
    if codes:
        weights = f"{codes:,} weight{'s' * (codes > 1)} of 8 bits or fewer"
        why = f"this file is already quantized ({weights}). Start from the float32 file"
    elif floats in NON_FLOAT32_DTYPES:
        why = f"the weights of this file are {floats}. Start from a float32 file"
    else:
        return
    for step in steps:
        if getattr(step.stage_class, "needs_float", False):
            text = f"{why}, or remove this step; the other stages accept the file as it is."
            errors.add(setting_paths[step.name], text, code="already-narrow")


def apply_graph_batch_size(
    recipe: ParsedRecipe, model: OnnxModel | None, errors: RecipeErrors
) -> ParsedRecipe:
    """Return `recipe` with the graph's fixed batch size for latency, if the recipe sets none."""
    latency = recipe.score.latency
    size = model.signature.fixed_batch_size if model is not None and recipe.task == CUSTOM_TASK else None
    if size is None or not latency:
        return recipe
    if "batch_sizes" in latency.model_fields_set and latency.batch_sizes != (size,):
        errors.add(
            ("score", "latency", "batch_sizes"),
            f"the graph has a fixed batch size of {size}. Set [{size}], or remove batch_sizes.",
            code="fixed-batch-size",
        )
        return recipe
    chosen = latency.model_copy(update={"batch_sizes": (size,)})
    return recipe.model_copy(update={"score": recipe.score.model_copy(update={"latency": chosen})})


def apply_graph_signature(
    recipe: ParsedRecipe, model: OnnxModel | None, errors: RecipeErrors
) -> ParsedRecipe:
    """Return `recipe` with each input's batch axis and the metrics of the outputs, for the task `custom`."""
    if model is None or recipe.task != CUSTOM_TASK:
        return recipe
    data = recipe.data.model_copy(update={"axes": model.signature.input_batch_axes})
    score = recipe.score.model_copy(update={"quality": _output_metrics(recipe, model, errors)})
    return recipe.model_copy(update={"data": data, "score": score})


def _output_metrics(recipe: ParsedRecipe, model: OnnxModel, errors: RecipeErrors) -> tuple[str, ...]:
    """Return the metrics of a graph's outputs.

    `top1` is the first one of a graph of class scores alone, and none of a graph without any.
    """
    metrics = recipe.score.quality
    classes = model.details.get("class_outputs") or {}
    floats = {value.name for value in model.signature.outputs if value.dtype.startswith("float")}
    default = metrics == DEFAULT_METRICS[CUSTOM_TASK]
    if TOP1_METRIC in metrics and not classes and len(floats) == len(model.signature.outputs):
        if not default or TOP1_METRIC in recipe.gates:
            errors.add(
                ("gates", TOP1_METRIC) if TOP1_METRIC in recipe.gates else ("score", "quality"),
                f"{TOP1_METRIC} compares decisions, but no output of the graph has scores of classes (a"
                " Softmax or a linear layer at its end), integers or texts. Remove it, or use"
                f" {AGREEMENT_METRIC}.",
                code="does-not-fit-model",
            )
        return tuple(metric for metric in metrics if metric != TOP1_METRIC)
    if default and classes and floats <= {*classes}:
        return (TOP1_METRIC, *(metric for metric in metrics if metric != TOP1_METRIC))
    return metrics


def _check_onnx_only_keys(recipe: ParsedRecipe, errors: RecipeErrors, bad: set[str]) -> None:
    """Add an error for keys that are only for ONNX models."""
    if recipe.task == CUSTOM_TASK and not has_error(bad, "task"):
        errors.add(
            ("task",),
            f"'{CUSTOM_TASK}' needs an .onnx file as model; {recipe.model!s} is not one. Choose another"
            " task.",
            code="needs-onnx-model",
        )
    if recipe.tokenizer is not None and not has_error(bad, "tokenizer"):
        errors.add(
            ("tokenizer",),
            "only for .onnx models; other models have their own tokenizer. Remove it.",
            code="needs-onnx-model",
        )
    if recipe.data.axes and not has_error(bad, "data.axes"):
        errors.add(
            ("data", "axes"),
            f"only for ONNX models with task: {CUSTOM_TASK}. Remove it.",
            code="needs-onnx-model",
        )


def _check_arrays(
    recipe: ParsedRecipe, model: OnnxModel, errors: RecipeErrors, bad: set[str], warnings: list[Message]
) -> None:
    """Check the arrays of every split against the graph's inputs, by their headers."""
    from smelt.data.npz_arrays import count_array_samples, read_npz_headers

    data = recipe.data
    if recipe.tokenizer is not None:
        errors.add(
            ("tokenizer",),
            f"not used for task: {CUSTOM_TASK}. Remove it.",
            code="does-not-fit-task",
        )
    for name in _TEXT_KEYS:
        if getattr(data, name) is not None:
            errors.add(
                ("data", name),
                f"only for text data; task: {CUSTOM_TASK} uses arrays. Remove it.",
                code="does-not-fit-task",
            )
    if "columns" in data.model_fields_set:
        errors.add(
            ("data", "columns"),
            "only for text data; arrays are matched to inputs by name. Remove it.",
            code="does-not-fit-task",
        )
    for name, origin in data.split_files().items():
        if has_error(bad, f"data.{name}"):
            continue
        try:
            path = resolve_path(recipe.base, origin)
            shapes = read_npz_headers(path, name)
            problems = [f"{origin}: {problem}" for problem in model.signature.shape_problems(shapes)]
            if not problems:
                axes = model.signature.input_batch_axes
                taken = {key: shape for key, shape in shapes.items() if key in axes}
                count_array_samples(taken, path, axes, by_name=model.signature.shared_batch_inputs)
        except InputError as error:
            errors.add_error(("data", name), error)
            continue
        except (OSError, RuntimeError, ValueError) as error:
            errors.add(("data", name), str(error), code="unreadable-file")
            continue
        for problem in problems:
            errors.add(("data", name), problem, code="does-not-fit-graph")
        if problems:
            bad.add(f"data.{name}")  # its samples cannot be checked further
        unread = model.signature.unknown_inputs(list(shapes))
        if unread:
            warnings.append(
                warning(
                    "unread-arrays",
                    f"{origin}: arrays that are not inputs of the graph are ignored: {', '.join(unread)}.",
                )
            )


def _check_texts(recipe: ParsedRecipe, model: OnnxModel, errors: RecipeErrors) -> Path | None:
    """Check that the graph fits the task; return the folder with config and tokenizer, None for errors."""
    if recipe.task not in _TASK_OUTPUTS:
        errors.add(
            ("task",),
            f"ONNX models support {', '.join((*_TASK_OUTPUTS, *GENERATIVE_TASKS, CUSTOM_TASK))}. For"
            f" {recipe.task} start from"
            f" the folder of weights that the graph was exported from, or set task: {CUSTOM_TASK}.",
            code="unsupported-task",
        )
        return None
    for problem in _task_mismatches(model.signature, recipe.task):
        errors.add_message(("model",), problem.with_prefix(f"{model.file}: "))
    folder = graph_tokenizer_folder(recipe, model.file)
    place: tuple[str, ...] = ("model",) if recipe.tokenizer is None else ("tokenizer",)
    if folder is None:
        errors.add(
            place,
            f"{model.file}: no config.json next to it. Set tokenizer: FOLDER, the folder with config.json and"
            " the tokenizer of the exported model.",
            code="missing-config",
        )
        return None
    config, problems = read_config(folder)
    kind = str(config.get("model_type", ""))
    problems += check_tokenizer_files(folder, kind) if kind in FAMILIES else _missing_tokenizer(folder)
    if config and recipe.task == "text-classification" and not has_classifier(config):
        problems.append(
            error_message(
                "unsupported-architecture",
                f"{folder / 'config.json'}: 'architectures' has no ...ForSequenceClassification, so the"
                " classes are unknown. Use the config of the exported model.",
            )
        )
    for problem in problems:
        errors.add_message(place, problem)
    if recipe.task == SENTENCE_SIMILARITY and not problems:
        _require_pooling(recipe, model.signature, folder, errors)
    return None if problems else folder


def _require_pooling(
    recipe: ParsedRecipe, signature: GraphSignature, folder: Path, errors: RecipeErrors
) -> None:
    """Add an error if the graph outputs only hidden states and the pooling is not defined."""
    pooled = any(value.name == _TASK_OUTPUTS[SENTENCE_SIMILARITY] for value in signature.outputs)
    if not pooled and recipe.embedding.pooling is None and not (folder / MODULES_FILE).is_file():
        errors.add(
            ("model",),
            f"the graph outputs {HIDDEN_STATES_OUTPUT}, and there is no {MODULES_FILE} that defines the"
            f" pooling. Set embedding: {{pooling: {' | '.join(POOLINGS)}}}.",
            code="missing-pooling",
        )


def _task_mismatches(signature: GraphSignature, task: Task) -> Iterator[Message]:
    """Yield errors if inputs or outputs of a graph do not fit a text model for `task`."""
    inputs, outputs = ([v.name for v in values] for values in (signature.inputs, signature.outputs))
    lacking = {"input_ids", "attention_mask"} - set(inputs)
    strange = set(inputs) - {"input_ids", "attention_mask", "token_type_ids"}
    if lacking or strange:
        yield error_message(
            "wrong-graph-inputs",
            f"its inputs are {', '.join(inputs)}; a graph for {task} needs input_ids, attention_mask and"
            f" optionally token_type_ids. Export it with these names, or set task: {CUSTOM_TASK}.",
        )
    given = {_TASK_OUTPUTS[task], *([HIDDEN_STATES_OUTPUT] if task == SENTENCE_SIMILARITY else [])}
    if not given & set(outputs):
        yield error_message(
            "wrong-graph-outputs",
            f"its outputs are {', '.join(outputs)}; a graph for {task} needs {' or '.join(sorted(given))}."
            f" Export it with this name, or set task: {CUSTOM_TASK}.",
        )


def _missing_tokenizer(folder: Path) -> list[Message]:
    if (folder / "tokenizer.json").is_file():
        return []
    return [error_message("missing-tokenizer", f"{folder}: no tokenizer. Expected tokenizer.json.")]


def graph_tokenizer_folder(recipe: ParsedRecipe, file: Path) -> Path | None:
    """Return the folder with config.json and the tokenizer of the graph in `file`; None if not found."""
    named = None if recipe.tokenizer is None else resolve_path(recipe.base, recipe.tokenizer)
    return find_tokenizer_folder(file, named)
