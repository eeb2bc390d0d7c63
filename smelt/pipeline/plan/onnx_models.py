"""Check a recipe that starts from an ONNX model, one graph or those of a generative model, with its data.

A graph is opened in a separate process with limits of memory and time (`smelt.runtimes.onnx_import`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.errors import InputError
from smelt.core.files import resolve_path
from smelt.core.messages import Message, error_message, info, warning
from smelt.data.labels import has_classifier
from smelt.data.tasks import Task, task_traits, tasks_with
from smelt.models.families.registry import FAMILIES, FAMILIES_BY_TASK
from smelt.models.text_rules import MODULES_FILE, POOLINGS
from smelt.pipeline.inspect.model_folder import check_tokenizer_files, read_config, unknown_family_message
from smelt.pipeline.inspect.model_info import (
    OnnxModel,
    find_generation_graphs,
    find_graph,
    find_tokenizer_folder,
    inspect_graph,
    is_onnx,
)
from smelt.pipeline.plan.array_samples import (
    ARRAYS_TASK,
    check_arrays,
    check_mixed_samples,
    complete_array_recipe,
    has_calls,
    scored_arrays,
)
from smelt.pipeline.plan.check_context import CheckContext, Findings, skip_if_invalid
from smelt.pipeline.recipe.recipe import ParsedRecipe
from smelt.pipeline.recipe.stages import MODEL_STEP
from smelt.pipeline.recipe.validation_errors import Finding, error_findings
from smelt.runtimes.onnx_import.convert_optimum import MODEL_GRAPH, layout_problems
from smelt.tasks.registry import all_specs, task_spec
from smelt.tasks.sentence_similarity import HIDDEN_STATES_OUTPUT

if TYPE_CHECKING:
    from smelt.runtimes.onnx_import.signature import GraphSignature


GENERATIVE_TASKS = tasks_with(generates=True)


def _read_generation_graphs(recipe: ParsedRecipe, path: Path) -> Findings[OnnxModel | None]:
    """Check the graphs in `path` with config and tokenizer; return the model, None if there are errors."""
    try:
        graph_files = find_generation_graphs(path)
    except InputError as error:
        yield from error_findings(("model",), error)
        return None
    graph_infos = {name: inspect_graph(file) for name, file in graph_files.items()}
    problems = [
        f"{graph_files[name]}: {problem}"
        for name, graph_info in graph_infos.items()
        for problem in graph_info.problems
    ]
    for name, graph_info in graph_infos.items():
        if graph_info.signature is not None:
            problems += [
                f"{graph_files[name]}: {problem}" for problem in layout_problems(name, graph_info.signature)
            ]
    for problem in problems:
        yield ("model",), error_message("unsupported-graph", f"{problem}.")
    main_graph = next(reversed(graph_files))
    tokenizer_path = None if recipe.tokenizer is None else resolve_path(recipe.base, recipe.tokenizer)
    folder = yield from _read_tokenizer_folder(recipe, graph_files, tokenizer_path)
    signature = graph_infos[main_graph].signature
    if problems or folder is None or signature is None:
        return None
    files = tuple(dict.fromkeys(name for graph_info in graph_infos.values() for name in graph_info.files))
    details: dict[str, Any] = dict(graph_infos[main_graph].details or {})
    details["nodes"] = sum(
        int((graph_info.details or {}).get("nodes", 0)) for graph_info in graph_infos.values()
    )
    return OnnxModel(graph_files[main_graph], signature, files, folder, details, graph_files)


def check_generation_engines(context: CheckContext) -> Iterator[Finding]:
    """Check that no step builds engines of third-party generation graphs, which is unsupported."""
    model = context.onnx_model
    for step in context.steps if model is not None and model.graphs else ():
        if step.stage_class.produces == "tensorrt":
            text = (
                "cannot build an engine from generation graphs of another exporter. Start from the folder"
                " with weights, and put onnx: {target: tensorrt} before this step."
            )
            yield context.setting_path(step.name), error_message("unsupported-graph", text)


def _read_tokenizer_folder(
    recipe: ParsedRecipe, graphs: dict[str, Path], named: Path | None
) -> Findings[Path | None]:
    """Return the folder with config and tokenizer; None if they do not fit."""
    setting_path: tuple[str, ...] = ("model",) if recipe.tokenizer is None else ("tokenizer",)
    graph = next(iter(graphs.values()))
    folder = find_tokenizer_folder(graph, named)
    if folder is None:
        text = (
            f"{graph.parent}: no config.json. Set tokenizer: FOLDER, the folder with config.json and the"
            " tokenizer of the exported model."
        )
        yield setting_path, error_message("missing-config", text)
        return None
    config, problems = read_config(folder)
    kind = str(config.get("model_type", ""))
    families = FAMILIES_BY_TASK[recipe.task]
    if config and kind not in families:
        problems.append(unknown_family_message(kind, recipe.task).with_prefix(f"{folder / 'config.json'}: "))
    else:
        problems += check_tokenizer_files(folder, kind)
    seq2seq = bool(config.get("is_encoder_decoder"))
    if config and not problems and seq2seq == (MODEL_GRAPH in graphs):
        have = "only a decoder" if MODEL_GRAPH in graphs else "an encoder and a decoder"
        problems.append(
            error_message(
                "config-differs-from-graph",
                f"{folder / 'config.json'}: is_encoder_decoder is {str(seq2seq).lower()}, but the graphs are"
                f" {have}. Use the config of the exported model.",
            )
        )
    for problem in problems:
        yield setting_path, problem
    return None if problems else folder


_MAX_NAMED_NODES = 3  # nodes in a warning
_MAX_NAMED_CLASSES = 10


@skip_if_invalid("model")
def read_onnx_model(context: CheckContext) -> Iterator[Finding]:
    """Read the ONNX model that the recipe starts from, if it does, and complete the recipe by it.

    For the task `custom` these are each input's batch axis, the metrics of the outputs, and for latency the
    graph's fixed batch size.
    """
    recipe = context.recipe
    if not is_onnx(recipe.model, recipe.base):
        yield from _onnx_only_keys(context)
        return
    path = resolve_path(recipe.base, str(recipe.model))
    if recipe.traits.generates and not context.is_invalid("task"):
        if recipe.shapes and not context.is_invalid("shapes"):
            text = "only for models of a single graph. Remove it."
            yield ("shapes",), error_message("does-not-fit-task", text)
        model = yield from _read_generation_graphs(recipe, path)
    else:
        model = yield from _read_single_graph(context, path)
    if model is None:
        return
    context.onnx_model, context.model_folder = model, model.tokenizer_folder
    if recipe.traits.modality == "arrays":
        yield from complete_array_recipe(context, model)


def _read_single_graph(context: CheckContext, path: Path) -> Findings[OnnxModel | None]:
    """Return the single graph at `path` (a file or a folder); None if it is invalid."""
    recipe = context.recipe
    try:
        file = find_graph(path)
    except InputError as error:
        yield from error_findings(("model",), error)
        return None
    graph_info = inspect_graph(file, {} if context.is_invalid("shapes") else recipe.shapes)
    for problem in graph_info.problems:
        if problem.code in ("unknown-input", "wrong-shape"):
            yield ("shapes",), error_message(problem.code, f"{file}: {problem}.")
        else:
            yield (
                ("model",),
                error_message("unsupported-graph", f"{file}: this graph cannot be used: {problem}."),
            )
    if graph_info.signature is None or context.is_invalid("task"):
        return None
    model = OnnxModel(
        file,
        graph_info.signature,
        graph_info.files,
        details=dict(graph_info.details or {}),
        shapes=recipe.shapes,
    )
    for output, classes in model.details.get("zipmaps", {}).items():
        names = [str(label) for label in classes[:_MAX_NAMED_CLASSES]]
        others = ", ..." * (len(classes) > _MAX_NAMED_CLASSES)
        text = (
            f"the output '{output}' of {file.name} is a dictionary for each sample (ZipMap), replaced by"
            f" its values, [samples, {len(classes)}], in the order {', '.join(names)}{others}."
        )
        yield (), info("zipmap-replaced", text)
    if random := model.details.get("random"):
        others = f" and {len(random) - _MAX_NAMED_NODES} more" if len(random) > _MAX_NAMED_NODES else ""
        text = (
            f"{file.name} generates random numbers ({', '.join(random[:_MAX_NAMED_NODES])}{others}), so"
            " outputs and scores differ between runs. Export it in inference mode (model.eval())."
        )
        yield (), warning("random-outputs", text)
    if recipe.traits.modality == "arrays":
        yield from check_mixed_samples(context)
        batched_model = yield from _with_batch_axes(context, model)
        if batched_model is not None:
            yield from check_arrays(context, batched_model)
        return batched_model
    if recipe.data.axes and not context.is_invalid("data.axes"):
        text = f"only for arrays (task: {ARRAYS_TASK}); the task is {recipe.task}. Remove it."
        yield ("data", "axes"), error_message("does-not-fit-task", text)
    folder = yield from _check_texts(recipe, model)
    return None if folder is None else replace(model, tokenizer_folder=folder)


def _with_batch_axes(context: CheckContext, model: OnnxModel) -> Findings[OnnxModel | None]:
    """Return the model with its batch axes; None if they are wrong or ambiguous."""
    if context.is_invalid("data.axes"):
        return None
    if has_calls(context):
        if context.recipe.data.axes:
            text = "not used where each file of a folder is a sample. Remove it."
            yield ("data", "axes"), error_message("settings-conflict", text)
        return replace(model, signature=model.signature.without_batch_axes)
    graph_names = {value.name for value in (*model.signature.inputs, *model.signature.outputs)}
    metric_arrays = scored_arrays(context) - graph_names
    recipe_axes = {name: axis for name, axis in context.recipe.data.axes.items() if name not in metric_arrays}
    invalid_axes = list(model.signature.invalid_axes(recipe_axes))
    for problem in invalid_axes:
        yield ("data", "axes"), error_message("wrong-axis", problem)
    signature = model.signature if invalid_axes else model.signature.with_batch_axes(recipe_axes)
    ambiguous_axes = [] if invalid_axes else list(signature.ambiguous_axes(recipe_axes))
    for problem in ambiguous_axes:
        yield ("data",), error_message("unclear-axes", problem)
    if invalid_axes or ambiguous_axes:
        context.invalid_paths.add("data.axes")  # the samples cannot be checked further
        return None
    return replace(model, signature=signature)


def check_float_weights(context: CheckContext) -> Iterator[Finding]:
    """Check that no step needs float weights if the graph has quantized ones, or wider ones than it has."""
    model = context.onnx_model
    details = model.details if model is not None else {}
    num_quantized, float_dtype = details.get("codes"), details.get("floats")
    if num_quantized:
        weights = f"{num_quantized:,} weight{'s' * (num_quantized > 1)} of 8 bits or fewer"
        left = details.get("float_matrices")
        problem = f"this file is already quantized ({weights}{f'; {left}' if left else ''})."
    elif float_dtype in ("float16", "bfloat16"):
        problem = f"the weights of this file are {float_dtype} already."
    else:
        return
    for step in context.steps:
        if step.stage_class.needs_float if num_quantized else step.stage_class.needs_float32:
            text = f"{problem} Remove this step, or start from the float32 file."
            yield context.setting_path(step.name), error_message("already-narrow", text)


def check_graph_settings(context: CheckContext) -> Iterator[Finding]:
    """Check that settings of the steps after the original model fit its graph, such as names of nodes."""
    model = context.onnx_model
    # pooling is added to the graphs of embedders, and generation graphs are converted
    if model is None or model.graphs or context.recipe.traits.output == "embedding":
        return
    for step in context.steps:
        if step.parent == MODEL_STEP:
            errors = step.stage_class.check_graph(step.settings, model.file)
            yield from context.setting_findings(step, errors)


def _onnx_only_keys(context: CheckContext) -> Iterator[Finding]:
    """Yield errors for keys that are only for ONNX models."""
    recipe = context.recipe
    if recipe.module is None and recipe.traits.modality == "arrays" and not context.is_invalid("task"):
        text = f"'{ARRAYS_TASK}' needs an .onnx file as model; {recipe.model!s} is not one."
        yield (
            ("task",),
            error_message(
                "needs-onnx-model",
                f"{text} Choose another task, or a PyTorch module (model: {{module: ...}}).",
            ),
        )
    if recipe.tokenizer is not None and not context.is_invalid("tokenizer"):
        text = "only for .onnx models; other models have their own tokenizer. Remove it."
        yield ("tokenizer",), error_message("needs-onnx-model", text)
    of_arrays = recipe.traits.modality == "arrays"
    if recipe.data.axes and not of_arrays and not context.is_invalid("data.axes"):
        text = f"only for ONNX models with task: {ARRAYS_TASK}. Remove it."
        yield ("data", "axes"), error_message("needs-onnx-model", text)
    if recipe.shapes and not context.is_invalid("shapes"):
        yield ("shapes",), error_message("needs-onnx-model", "only for .onnx models. Remove it.")


def _check_texts(recipe: ParsedRecipe, model: OnnxModel) -> Findings[Path | None]:
    """Check that the graph fits the task; return the folder with config and tokenizer, None for errors."""
    if task_spec(recipe.task).graph_output is None:
        graph_tasks = (spec.name for spec in all_specs() if spec.graph_output is not None)
        text = (
            f"ONNX models support {', '.join((*graph_tasks, *GENERATIVE_TASKS, ARRAYS_TASK))}. For"
            f" {recipe.task} start from"
            f" the folder of weights that the graph was exported from, or set task: {ARRAYS_TASK}."
        )
        yield ("task",), error_message("unsupported-task", text)
        return None
    for problem in _task_mismatches(model.signature, recipe.task):
        yield ("model",), problem.with_prefix(f"{model.file}: ")
    folder = graph_tokenizer_folder(recipe, model.file)
    setting_path: tuple[str, ...] = ("model",) if recipe.tokenizer is None else ("tokenizer",)
    if folder is None:
        text = (
            f"{model.file}: no config.json next to it. Set tokenizer: FOLDER, the folder with config.json and"
            " the tokenizer of the exported model."
        )
        yield setting_path, error_message("missing-config", text)
        return None
    config, problems = read_config(folder)
    kind = str(config.get("model_type", ""))
    problems += check_tokenizer_files(folder, kind) if kind in FAMILIES else _missing_tokenizer(folder)
    if config and recipe.traits.output == "labels" and not has_classifier(config, recipe.task):
        problems.append(
            error_message(
                "unsupported-architecture",
                f"{folder / 'config.json'}: 'architectures' has no ...ForSequenceClassification, so the"
                " classes are unknown. Use the config of the exported model.",
            )
        )
    for problem in problems:
        yield setting_path, problem
    if recipe.traits.output == "embedding" and not problems:
        yield from _check_pooling(recipe, model.signature, folder)
    return None if problems else folder


def _check_pooling(recipe: ParsedRecipe, signature: GraphSignature, folder: Path) -> Iterator[Finding]:
    """Check that the pooling is defined if the graph outputs only hidden states."""
    pooled = any(value.name == task_spec(recipe.task).graph_output for value in signature.outputs)
    if not pooled and recipe.embedding.pooling is None and not (folder / MODULES_FILE).is_file():
        text = (
            f"the graph outputs {HIDDEN_STATES_OUTPUT}, and there is no {MODULES_FILE} that defines the"
            f" pooling. Set embedding: {{pooling: {' | '.join(POOLINGS)}}}."
        )
        yield ("model",), error_message("missing-pooling", text)


def _task_mismatches(signature: GraphSignature, task: Task) -> Iterator[Message]:
    """Yield errors if inputs or outputs of a graph do not fit a text model for `task`."""
    inputs, outputs = ([v.name for v in values] for values in (signature.inputs, signature.outputs))
    missing_inputs = {"input_ids", "attention_mask"} - set(inputs)
    unknown_inputs = set(inputs) - {"input_ids", "attention_mask", "token_type_ids"}
    if missing_inputs or unknown_inputs:
        yield error_message(
            "wrong-graph-inputs",
            f"its inputs are {', '.join(inputs)}; a graph for {task} needs input_ids, attention_mask and"
            f" optionally token_type_ids. Export it with these names, or set task: {ARRAYS_TASK}.",
        )
    expected = {
        str(task_spec(task).graph_output),
        *([HIDDEN_STATES_OUTPUT] if task_traits(task).output == "embedding" else []),
    }
    if not expected & set(outputs):
        yield error_message(
            "wrong-graph-outputs",
            f"its outputs are {', '.join(outputs)}; a graph for {task} needs {' or '.join(sorted(expected))}."
            f" Export it with this name, or set task: {ARRAYS_TASK}.",
        )


def _missing_tokenizer(folder: Path) -> list[Message]:
    if (folder / "tokenizer.json").is_file():
        return []
    return [error_message("missing-tokenizer", f"{folder}: no tokenizer. Expected tokenizer.json.")]


def graph_tokenizer_folder(recipe: ParsedRecipe, file: Path) -> Path | None:
    """Return the folder with config.json and the tokenizer of the graph in `file`; None if not found."""
    tokenizer_path = None if recipe.tokenizer is None else resolve_path(recipe.base, recipe.tokenizer)
    return find_tokenizer_folder(file, tokenizer_path)
