"""Inspect a model without loading it, for `smelt init` and plans: a folder of weights, or ONNX files.

Quantized weights are detected too: those of a third-party checkpoint or of a smelt artifact. An ONNX model is
a file, or a folder in Optimum's layout; its batch axes are inferred from dimension names, array sizes and a
trial run.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.errors import InputError, combined_error, did_you_mean
from smelt.core.files import MANIFEST, load_json, resolve_path
from smelt.core.messages import with_article
from smelt.data.labels import has_classifier
from smelt.data.npz_arrays import read_npz_headers
from smelt.data.tasks import Task, TaskTraits, task_traits
from smelt.models.families.registry import FAMILIES, FAMILIES_BY_TASK
from smelt.models.quantization_config import (
    CHECKPOINT_BITS,
    INT4_DTYPE,
    count_values_by_dtype,
    parse_quantization_config,
)
from smelt.models.text_rules import MODULES_FILE, NO_LIMIT, position_limit, read_sentence_rules
from smelt.models.weight_files import has_weights
from smelt.pipeline.inspect.find_model import fetch_adapter, fetch_config_folder, local_model_folder
from smelt.pipeline.inspect.model_folder import (
    check_model_folder,
    read_config,
    unknown_family_message,
)
from smelt.pipeline.inspect.peft_adapter import is_adapter
from smelt.quantization.scheme import EXPORT_TARGETS, SchemeOptions
from smelt.quantization.schemes.registry import (
    CHECKPOINT_SCHEME,
    SCHEMES,
    default_options,
    unsupported_reason,
    unsupported_scheme_options,
)
from smelt.runtimes.onnx_import.convert_optimum import (
    DECODER_WITH_PAST_GRAPH,
    ENCODER_GRAPH,
    FIRST_DECODER_GRAPH,
    MERGED_DECODER_GRAPH,
    MODEL_GRAPH,
    required_graphs,
)
from smelt.runtimes.onnx_import.signature import GraphSignature, TensorSpec
from smelt.runtimes.onnx_import.trial_run import detect_output_axes
from smelt.tasks.registry import task_spec

if TYPE_CHECKING:
    from smelt.runtimes.onnx_import.graph_interface import InputShapes
    from smelt.runtimes.onnx_import.validate_graph import GraphValidation


@dataclass(frozen=True)
class QuantizedModelInfo:
    """Quantized weights of a model before any stage.

    description: name of the format. schemes: options by scheme, the most frequent scheme first. float_source:
    the model to start from if float weights are needed.
    """

    description: str
    schemes: Mapping[str, SchemeOptions]
    float_source: str

    def unsupported_by(self, target: str) -> str | None:
        """Return the quantized layers that `target` does not support; None if it supports all."""
        schemes = ((SCHEMES[name], options) for name, options in self.schemes.items())
        unsupported = [
            scheme.exported_as
            for scheme, scheme_options in schemes
            if unsupported_reason(scheme, target)
            or unsupported_scheme_options(scheme, scheme_options, target)
        ]
        return " and ".join(unsupported) or None

    @property
    def targets(self) -> list[str]:
        """The export targets that support these weights."""
        return [target for target in EXPORT_TARGETS if self.unsupported_by(target) is None]


def inspect_quantization(folder: Path, config: Mapping[str, Any]) -> QuantizedModelInfo | None:
    """Return the quantized weights of the model in `folder`; None for float or unreadable weights.

    config: its Hugging Face config.
    """
    try:
        quantization = parse_quantization_config(config)
    except InputError:  # reported by the checks of the model's folder
        return None
    if quantization is not None:
        checkpoint_schemes = {CHECKPOINT_SCHEME: default_options(SCHEMES[CHECKPOINT_SCHEME])}
        return QuantizedModelInfo(quantization.method, checkpoint_schemes, "the float model")
    matrices = list(_quantized_matrices(folder))
    scheme_counts = Counter(name for name, _ in matrices)
    options = dict(matrices)
    schemes = {name: options[name] for name, _ in scheme_counts.most_common()}
    float_source = "an artifact from before `quantize`"
    return QuantizedModelInfo(" and ".join(schemes), schemes, float_source) if schemes else None


def _quantized_matrices(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield scheme and options of each matrix that smelt has quantized."""
    try:
        edits = load_json(folder / "structure.json")["edits"]
        quantize_edits = [edit for edit in edits if edit["op"] == "quantize"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return  # not an artifact; an invalid file is reported when the model is loaded
    for edit in quantize_edits:
        if edit.get("scheme") in SCHEMES:
            options = {name: value for name, value in edit.items() if name not in ("op", "module", "scheme")}
            yield str(edit["scheme"]), options


# Names of safetensors' dtypes of float and quantized weights.
_DTYPE_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    INT4_DTYPE: f"{CHECKPOINT_BITS}-bit quantized weights",
}


@dataclass(frozen=True)
class ModelInfo:
    """Properties of a model.

    folder: None for a hub id, of which only the config was read. family: the config's model_type.
    task: its task; tasks: all tasks of its family. parameters: number of weights; None if not read.
    dtype: of most weights. max_tokens: maximum length of a text. needs_classifier: whether it has no
    classifier yet. config: its Hugging Face config. languages: source and target in its tokenizer's codes, if
    its files have them. quantization: its quantized weights; None for floats.
    """

    folder: Path | None
    family: str
    task: Task
    tasks: tuple[Task, ...]
    parameters: int | None
    dtype: str | None
    max_tokens: int | None
    needs_classifier: bool
    config: Mapping[str, Any] = field(default_factory=dict)
    languages: tuple[str | None, str | None] = (None, None)
    quantization: QuantizedModelInfo | None = None

    @property
    def traits(self) -> TaskTraits:
        """The traits of its task."""
        return task_traits(self.task)


def inspect_model(model: str, task: Task | None = None, base: Path | None = None) -> ModelInfo:
    """Return the properties of `model`, a folder or a hub id; of the latter only the config is downloaded.

    An adapter on the hub is downloaded whole; of its base model only the config.

    Raises:
        InputError: the model is not supported, or not for `task`.
    """
    parent = base or Path.cwd()
    folder = local_model_folder(model, parent)
    config_folder = folder or fetch_config_folder(model, parent)
    config, problems = read_config(config_folder) if config_folder.is_dir() else ({}, [])
    if folder is None and is_adapter(config_folder):  # it has no config.json
        folder, config = fetch_adapter(model, parent)
        config_folder, problems = folder or config_folder, []
    family = str(config.get("model_type", ""))
    tasks = tuple(t for t, families in FAMILIES_BY_TASK.items() if family in families)
    if config and not tasks:
        raise combined_error(
            [unknown_family_message(family).with_prefix(f"{config_folder / 'config.json'}: ")]
        )
    chosen_task = (
        _choose_task(config, family, tasks, task, is_embedder=(config_folder / MODULES_FILE).is_file())
        if tasks
        else None
    )
    if folder is not None:
        problems, _ = check_model_folder(folder, chosen_task)
    if problems:
        raise combined_error(problems)
    if chosen_task is None:
        raise InputError(f"{model}: not a model's folder. Expected config.json in it.", code="missing-config")
    quantization = _inspect_quantization(config_folder, config)
    count, dtype = _weight_count_and_dtype(folder, quantization) if folder is not None else (None, None)
    return ModelInfo(
        folder=folder,
        family=family,
        task=chosen_task,
        tasks=tasks,
        parameters=count,
        dtype=dtype,
        max_tokens=max_tokens(folder, config, chosen_task),
        needs_classifier=task_traits(chosen_task).classifies and not has_classifier(config, chosen_task),
        config=config,
        languages=_tokenizer_languages(folder) if folder is not None else (None, None),
        quantization=quantization,
    )


def max_tokens(folder: Path | None, config: Mapping[str, Any], task: Task) -> int | None:
    """Return the maximum input length that the model and its tokenizer, or an embedder's files, allow."""
    limits = [position_limit(config)]
    if folder is not None and task_traits(task).output == "embedding":
        rules = read_sentence_rules(folder)
        limits.append(rules.max_length if rules else None)
    elif folder is not None:
        with suppress(OSError, ValueError, AttributeError, RecursionError):  # the plan reports it
            limit = load_json(folder / "tokenizer_config.json").get("model_max_length")
            limits.append(int(limit) if isinstance(limit, int | float) and limit < NO_LIMIT else None)
    return min((limit for limit in limits if limit is not None), default=None)


def _choose_task(
    config: Mapping[str, Any], family: str, tasks: tuple[Task, ...], requested: Task | None, is_embedder: bool
) -> Task:
    """Return the requested task, else the one in the model's files, else the family's default.

    is_embedder: whether the folder was written by sentence-transformers.
    """
    if requested is not None:
        if requested not in tasks:
            raise InputError(
                f"--task {requested}: not supported by {with_article(family)} model. Use"
                f" {' or '.join(tasks)}.",
                code="unsupported-task",
            )
        return requested
    if recognized := [task for task in tasks if task_spec(task).recognizes_model(config, is_embedder)]:
        return recognized[0]
    params = config.get("task_specific_params")
    matching_tasks = {
        t for t in tasks for param in (params if isinstance(params, dict) else ()) if param.startswith(t)
    }
    if len(matching_tasks) == 1:
        return matching_tasks.pop()
    return FAMILIES[family].tasks[0]


def _tokenizer_languages(folder: Path) -> tuple[str | None, str | None]:
    """Return the languages in the tokenizer's config (mBART's `src_lang` and `tgt_lang`)."""
    try:
        config = load_json(folder / "tokenizer_config.json")
        codes = [config.get(name) for name in ("src_lang", "tgt_lang")]
    except (OSError, ValueError, AttributeError, RecursionError):
        return None, None
    source, target = (name if isinstance(name, str) else None for name in codes)
    return source, target


def _inspect_quantization(folder: Path, config: Mapping[str, Any]) -> QuantizedModelInfo | None:
    """Return the quantized weights of the model; None for floats.

    Raises:
        InputError: the quantization format is not supported.
    """
    try:
        parse_quantization_config(config)
    except InputError as error:
        raise InputError(f"{folder / 'config.json'}: {error}", code=error.code) from error
    return inspect_quantization(folder, config)


def _weight_count_and_dtype(folder: Path, coded: QuantizedModelInfo | None) -> tuple[int | None, str]:
    """Return the number of weights and the dtype of most of them; for an artifact, from its manifest."""
    if coded is not None and (folder / MANIFEST).is_file():
        try:
            details = load_json(folder / MANIFEST)["details"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            details = {}
        num_parameters = details.get("parameters") if isinstance(details, dict) else None
        return num_parameters if isinstance(num_parameters, int) else None, coded.description
    counts = count_values_by_dtype(folder)
    main_dtype = max(counts, key=counts.__getitem__, default="F32")
    return sum(counts.values()), _DTYPE_NAMES.get(main_dtype, main_dtype)


ONNX_SUFFIX = ".onnx"
_ONNX_FOLDER = "onnx"  # folder of the graphs in transformers.js and newer exports
_GENERATION_GRAPHS = (ENCODER_GRAPH, FIRST_DECODER_GRAPH, DECODER_WITH_PAST_GRAPH, MERGED_DECODER_GRAPH)


@dataclass(frozen=True)
class OnnxModel:
    """A third-party ONNX model: one graph, or the graphs of a generative model.

    file: the graph; of several the last one, which outputs logits. weight_files: names of external data
    files.
    tokenizer_folder: folder with config.json and the tokenizer; None for the task `custom`. details: opset,
    nodes, parameters, producer. graphs: graphs of a generative model by name, without `.onnx`. shapes: new
    ones of inputs.
    """

    file: Path
    signature: GraphSignature
    weight_files: tuple[str, ...] = ()
    tokenizer_folder: Path | None = None
    details: dict[str, Any] = field(default_factory=dict)
    graphs: dict[str, Path] = field(default_factory=dict)
    shapes: InputShapes = field(default_factory=dict)


def is_onnx(model: object, base: Path) -> bool:
    """Return whether the `model` of a recipe, relative to `base`, is an ONNX file or a folder of them."""
    if not isinstance(model, str) or not model.strip() or "\0" in model:
        return False
    path = resolve_path(base, model)
    try:
        if path.suffix == ONNX_SUFFIX and not path.is_dir():
            return True
        return path.is_dir() and bool(_onnx_files(path)) and not has_weights(path)
    except OSError:
        return False


def find_graph(path: Path) -> Path:
    """Return the graph at `path`, a file or a folder.

    Raises:
        InputError: there is none, or several, or they are generation graphs.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        file_names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise InputError(
            f"{path}: no such file. Expected an ONNX model.{did_you_mean(path.name, file_names)}",
            code="missing-file",
            file=str(path),
        )
    graphs = _onnx_files(path)
    members = [graph.name for graph in graphs if graph.stem in _GENERATION_GRAPHS]
    if members:
        raise InputError(
            f"{path}: {', '.join(members)} are generation graphs. Set task: translation or summarization, or"
            f" use a single graph: model: {path.name}/{graphs[0].name} with task: custom.",
            code="generator-graphs",
            file=str(path),
        )
    model_graphs = [graph for graph in graphs if graph.name == f"model{ONNX_SUFFIX}"]
    if not model_graphs and len(graphs) > 1:
        names = ", ".join(graph.relative_to(path).as_posix() for graph in graphs[:6])
        raise InputError(
            f"{path}: several graphs: {names}. Choose one, such as model: {path.name}/{graphs[0].name}.",
            code="several-graphs",
            file=str(path),
        )
    return (model_graphs or graphs)[0]


def find_generation_graphs(path: Path) -> dict[str, Path]:
    """Return the graphs of the generative model in the folder `path`, by name without `.onnx`.

    Raises:
        InputError: no such folder, or graphs are missing; the message lists them.
    """
    if path.is_file():
        if path.stem in _GENERATION_GRAPHS:
            raise InputError(
                f"{path}: one of several generation graphs. Set their folder as the model: {path.parent}.",
                code="part-of-generator",
                file=str(path),
            )
        return {MODEL_GRAPH: path}
    if not path.is_dir():
        find_graph(path)  # raises the error
    graphs = {graph.stem: graph for graph in _onnx_files(path)}
    required = required_graphs(graphs)
    if isinstance(required, str):
        raise InputError(f"{path}: {required}.", code="incomplete-generator", file=str(path))
    return {name: graphs[name] for name in required[1]}


def inspect_graph(path: Path, shapes: InputShapes | None = None) -> GraphValidation:
    """Validate the graph in the file `path` in a separate process; shapes: of inputs that get another one."""
    from smelt.runtimes.onnx_import.validate_graph import validate_graph

    return validate_graph(path, shapes)


def find_tokenizer_folder(graph: Path, tokenizer: Path | None) -> Path | None:
    """Return the folder with config and tokenizer: `tokenizer` if given, else the graph's folder; or None."""
    if tokenizer is not None:
        return tokenizer
    folders: Sequence[Path] = (
        graph.parent,
        *([graph.parent.parent] if graph.parent.name == _ONNX_FOLDER else []),
    )
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def _onnx_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{ONNX_SUFFIX}")) or sorted((folder / _ONNX_FOLDER).glob(f"*{ONNX_SUFFIX}"))


BatchAxes = dict[str, int | None]
_MAX_AXIS_TRIALS = 8  # trial runs if several axes have the length of the batch


def infer_batch_axes(onnx_model: OnnxModel, file: Path) -> tuple[BatchAxes, list[str]]:
    """Return the axes that a recipe must set for the arrays in `file`, and the outputs without batch axis.

    Raises:
        InputError: an output of a graph with a fixed batch size above 1 has no batch axis (`unclear-rows`).
    """
    signature = onnx_model.signature
    shapes = read_npz_headers(file)
    sizes = {value.name: shapes[value.name].shape for value in signature.inputs if value.name in shapes}
    choices = _candidate_axes(signature, sizes)
    likely_axes: BatchAxes = {name: axes[0] for name, axes in choices.items()}
    is_open = _is_ambiguous(signature, likely_axes) or any(len(axes) > 1 for axes in choices.values())
    if onnx_model.details.get("random") or not is_open:  # random outputs do not depend on the inputs
        return _axes_to_write(signature, likely_axes), []
    inputs, outputs = _try_axes(onnx_model, file, choices) or (likely_axes, {})
    batched_signature = signature.with_batch_axes(inputs)
    _require_batch_outputs(onnx_model.file, batched_signature, outputs)
    defaults = {value.name: value.axis for value in batched_signature.outputs}
    changed: BatchAxes = {
        name: axes[0] for name, axes in outputs.items() if axes and defaults.get(name) not in axes
    }
    unbatched_outputs = [name for name, axes in outputs.items() if axes is None]
    return _axes_to_write(signature, inputs) | changed, unbatched_outputs


def _axes_to_write(signature: GraphSignature, axes: BatchAxes) -> BatchAxes:
    """Return the input axes that differ from the defaults; all axes if that would be ambiguous."""
    changed = {name: axis for name, axis in axes.items() if axis != signature.input_batch_axes[name]}
    return axes if list(signature.with_batch_axes(changed).ambiguous_axes(changed)) else changed


def _candidate_axes(
    signature: GraphSignature, sizes: Mapping[str, Sequence[int]]
) -> dict[str, list[int | None]]:
    """Return the possible batch axes of each input, most likely first."""
    axes = signature.input_batch_axes
    counts = [d[axis] for name, d in sizes.items() if (axis := axes[name]) is not None and axis < len(d)]
    # a length that differs from the graph's is the number of samples, of a batch size that was fixed
    other_lengths = [
        length
        for value in signature.inputs
        for length, size in zip(sizes.get(value.name, ()), value.shape or (), strict=False)
        if isinstance(size, int) and length != size
    ]
    common = set.intersection(*map(set, sizes.values())) if sizes else set()
    # else the most frequent length of the default axes
    num_rows = max(
        common or counts,
        key=lambda c: (other_lengths.count(c), counts.count(c), sum(c in d for d in sizes.values()), c > 1),
        default=0,
    )
    names = {value.name: _batch_name(value) for value in signature.inputs}
    candidates: dict[str, list[int | None]] = {}
    for value in signature.inputs:
        dims = sizes.get(value.name)
        if not dims:
            continue
        declared_axis, shape = axes[value.name], value.shape or ()
        axis_candidates: list[int | None] = [axis for axis, size in enumerate(dims) if size == num_rows]
        if declared_axis in axis_candidates and names[value.name]:
            axis_candidates = [declared_axis]  # the dimension's name defines it
        # inputs that share the name of the batch dimension must have a batch axis
        one_name = names[value.name] and list(names.values()).count(names[value.name]) > 1
        fixed_axes = {axis for axis, size in enumerate(shape) if isinstance(size, int)}
        ordered = sorted(axis_candidates, key=lambda axis: (axis in fixed_axes, axis != declared_axis, axis))
        candidates[value.name] = ordered or [declared_axis if one_name else None]
    return candidates


def _batch_name(value: TensorSpec) -> str | None:
    """Return the name of the batch dimension; None if it has none."""
    size = value.shape[value.axis] if value.shape and value.axis is not None else None
    return size if isinstance(size, str) else None


def _is_ambiguous(signature: GraphSignature, inputs: BatchAxes) -> bool:
    """Return whether dimension names do not determine the batch axis of some output."""
    batched_signature = signature.with_batch_axes(inputs)
    batch_names = {_batch_name(value) for value in batched_signature.inputs} - {None}
    return any(_batch_name(value) not in batch_names for value in batched_signature.outputs)


def _try_axes(
    onnx_model: OnnxModel, file: Path, choices: Mapping[str, list[int | None]]
) -> tuple[BatchAxes, dict[str, list[int] | None]] | None:
    """Return input axes for which all outputs have a batch axis, and the output axes.

    If there are none, return the most likely axes with which the graph runs; None if it never runs.
    """
    first_pair = None
    for axes in itertools.islice(itertools.product(*choices.values()), _MAX_AXIS_TRIALS):
        inputs: BatchAxes = dict(zip(choices, axes, strict=True))
        outputs = detect_output_axes(onnx_model.file, onnx_model.signature, file, inputs)
        if outputs is None:
            continue
        with_rows = [output_axes for output_axes in outputs.values() if output_axes is not None]
        if with_rows and all(with_rows):
            return inputs, outputs
        first_pair = first_pair or (inputs, outputs)
    return first_pair


def _require_batch_outputs(
    file: Path, known: GraphSignature, outputs: Mapping[str, list[int] | None]
) -> None:
    """Require that all outputs have a batch axis if the graph has a fixed batch size above 1.

    Raises:
        InputError: some have not (`unclear-rows`).
    """
    unbatched = [name for name, axes in outputs.items() if axes is None]
    if unbatched and known.fixed_batch_size not in (None, 1):
        names = ", ".join(f"'{name}'" for name in unbatched)
        raise InputError(
            f"{file}: the graph has a fixed batch size of {known.fixed_batch_size}, but the output {names}"
            " has no batch"
            " axis. Export the graph with a dynamic batch size or with 1, or without this output.",
            code="unclear-rows",
        )
