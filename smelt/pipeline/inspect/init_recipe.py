"""Write a first recipe for a model, its data and this machine, for `smelt init`."""

from __future__ import annotations

import itertools
import math
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from smelt.core.errors import InputError
from smelt.core.files import write_atomically
from smelt.core.messages import with_article
from smelt.data.images import read_image_rows
from smelt.data.labels import infer_problem_type
from smelt.data.read_rows import read_file_rows
from smelt.data.splits import Columns, Label, SplitName, column_options
from smelt.data.tasks import Task
from smelt.evaluate.metrics.registry import METRICS_BY_PROBLEM
from smelt.models.families.limits import no_blocks_reason
from smelt.models.families.registry import FAMILIES
from smelt.pipeline.inspect.data_files import DataInfo, inspect_data
from smelt.pipeline.inspect.find_model import local_path
from smelt.pipeline.inspect.init_module import ModuleOptions, module_recipe_text
from smelt.pipeline.inspect.init_onnx import onnx_recipe_text
from smelt.pipeline.inspect.init_stages import (
    MIN_SHORTLIST_ROWS,
    MachineInfo,
    gated_step,
    propose_steps,
    quantized_model_notes,
    quantized_model_steps,
    step_lines,
    training_time_text,
)
from smelt.pipeline.inspect.model_info import ModelInfo, inspect_model, is_onnx
from smelt.pipeline.recipe.yaml_file import parse_yaml, yaml_scalar
from smelt.tasks.registry import task_spec

_PLACEHOLDERS = {s: Path(f"data/{s}.jsonl") for s in ("train", "validation", "test")}
# Samples that are read to determine the type of the labels.
_LABEL_SAMPLE_ROWS = 2000
_MIN_COUNT_IN_MILLIONS = 100_000  # parameters; smaller numbers are written in full


@dataclass(frozen=True)
class InitOptions:
    """Options of `smelt init`.

    columns: by role. languages: source and target of multilingual models. fast: propose stronger compression
    with longer training. serve: propose int8 whose answers do not depend on the others of their batch.
    """

    task: Task | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    languages: tuple[str | None, str | None] = (None, None)
    fast: bool = False
    serve: bool = False


def _export_machine(machine: MachineInfo, model_info: ModelInfo) -> MachineInfo:
    """Return the machine with the runtimes that models of this kind are exported for."""
    is_audio = model_info.traits.modality == "audio"
    return replace(machine, gpu=False, tensorrt=False, openvino=False) if is_audio else machine


def inspect_machine() -> MachineInfo:
    """Return CPU cores, GPU and runtimes of this machine, without importing torch, TensorRT or OpenVINO."""
    from importlib.util import find_spec

    from smelt.evaluate.environment import physical_cores
    from smelt.pipeline.inspect.machine import has_cuda
    from smelt.runtimes.ort_tensorrt_provider import missing_requirement

    tensorrt = any(find_spec(name) for name in ("tensorrt", "tensorrt_rtx"))
    provider = has_cuda() and missing_requirement() is None
    return MachineInfo(physical_cores(), has_cuda(), tensorrt, find_spec("openvino") is not None, provider)


def init_recipe(
    model: str,
    data: Sequence[Path] = (),
    out: str | None = None,
    task: Task | None = None,
    force: bool = False,
    options: InitOptions | None = None,
) -> tuple[str, Path | None]:
    """Write a recipe for `model` that `smelt plan` accepts; return its text and its path.

    Args:
        model: a folder, a hub id or an ONNX model.
        data: files or folders with the splits; empty: the recipe has placeholders.
        out: the recipe's file (default: NAME.yaml in the current folder), or `-` to write no file and return
            None as path.
        task: task, if the model's family supports several.
        force: overwrite an existing file.
        options: further options.

    Raises:
        InputError: the model is not supported, the data is invalid, or the file exists.
    """
    options = options or InitOptions(task)
    if is_onnx(model, Path.cwd()):
        return _init_onnx_recipe(model, data, out, task or options.task, force, options)
    model_info = inspect_model(model, task or options.task)
    if data and (task or options.task) is None:
        model_info = inspect_model(model, _task_of_data(data, model_info, options.columns))
    model_info = replace(model_info, languages=_required_languages(model_info, options))
    data_info = inspect_data(data, model_info.task, options.columns) if data else None
    if model_info.needs_classifier and data_info and "train" not in data_info.splits:
        raise InputError(
            f"{model}: the model has no classifier, and there are no training samples to train one. Add a"
            " file with training samples (--data).",
            code="missing-data",
        )
    path = _out_path(out, f"{_model_name(model)}.yaml", force)
    base = (path.parent if path is not None else Path()).resolve()
    text = recipe_text(
        model,
        model_info,
        data_info,
        inspect_machine(),
        base,
        path or Path("RECIPE.yaml"),
        options.fast,
        options.serve,
    )
    if data_info:
        _require_valid_plan(text, base / (path or Path("RECIPE.yaml")).name)
    if path is not None:
        write_atomically(path, text)
    return text, path


def init_module_recipe(
    options: ModuleOptions, data: Sequence[Path] = (), out: str | None = None, force: bool = False
) -> tuple[str, Path | None]:
    """Write a recipe for a PyTorch module; arguments and result as of `init_recipe`.

    Raises:
        InputError: the module or the data is invalid, or the file exists.
    """
    path = _out_path(out, f"{options.module.rpartition(':')[2]}.yaml", force)
    base = (path.parent if path is not None else Path()).resolve()
    file = path or Path("RECIPE.yaml")
    text = module_recipe_text(
        options,
        data,
        file,
        lambda each: _recipe_path(each, base),
        lambda text: _require_valid_plan(text, base / file.name),
    )
    if path is not None:
        write_atomically(path, text)
    return text, path


def _out_path(out: str | None, name: str, force: bool) -> Path | None:
    """Return the recipe's file, `name` without `out`; None if it is printed.

    Raises:
        InputError: `file-exists`.
    """
    path = None if out == "-" else Path(out or name)
    if path is not None and path.exists() and not force:
        raise InputError(
            f"{path}: the file exists. Choose another with --out, or overwrite it with --force.",
            code="file-exists",
            file=str(path),
        )
    return path


def _task_of_data(data: Sequence[Path], model_info: ModelInfo, columns: Mapping[str, str]) -> Task:
    """Return the task that the first sample shows, if the model supports it; else the model's own."""
    for spec in (task_spec(task) for task in model_info.tasks if task != model_info.task):
        try:
            data_info = inspect_data(data, spec.name, columns)
            row = next((row for _, row in read_file_rows(next(iter(data_info.splits.values())))), {})
        except InputError:
            continue  # data of another task; errors are reported for the chosen one
        if spec.recognizes_row(row, Columns(**data_info.columns), Columns(**columns)):
            return spec.name
    return model_info.task


def _init_onnx_recipe(
    model: str, data: Sequence[Path], out: str | None, task: Task | None, force: bool, options: InitOptions
) -> tuple[str, Path | None]:
    """As `init_recipe`, for an ONNX model."""
    path = _out_path(out, f"{Path(_model_name(model)).stem}.yaml", force)
    base = (path.parent if path is not None else Path()).resolve()
    text = onnx_recipe_text(
        model, data, task, path or Path("RECIPE.yaml"), base, options.columns, options.serve
    )
    if data:
        _require_valid_plan(text, base / (path or Path("RECIPE.yaml")).name)
    if path is not None:
        write_atomically(path, text)
    return text, path


def _required_languages(model_info: ModelInfo, options: InitOptions) -> tuple[str | None, str | None]:
    """Return source and target language for the recipe; (None, None) if the model is not multilingual.

    Raises:
        InputError: a multilingual model without languages, or languages for another model.
    """
    family = FAMILIES[model_info.family]
    if family.language_selection != "codes":
        if any(options.languages):
            raise InputError(
                f"--source-language, --target-language: {with_article(model_info.family)} model has no"
                " language setting. Remove them.",
                code="does-not-fit-model",
            )
        return None, None
    source, target = (
        option or model_language
        for option, model_language in zip(options.languages, model_info.languages, strict=True)
    )
    if source is None or target is None:
        raise InputError(
            f"{with_article(model_info.family)} model needs a source and a target language, as"
            " codes of its tokenizer, such as"
            f" --source-language {family.example_languages[0]}"
            f" --target-language {family.example_languages[1]}.",
            code="missing-languages",
        )
    return source, target


def _require_valid_plan(text: str, path: Path) -> None:
    """Require that the recipe `text`, as the file `path`, has a valid plan.

    Raises:
        InputError: it has not, for example because of invalid samples or unknown labels.
    """
    from smelt.pipeline.plan.load_plan import make_plan

    try:
        with column_options():
            make_plan(parse_yaml(text, path.name), path)
    except InputError as error:
        raise InputError(
            f"No recipe was written, because it would not be valid:\n{error}",
            code=error.code,
            messages=error.messages,
        ) from error


def recipe_text(
    model: str,
    model_info: ModelInfo,
    data: DataInfo | None,
    machine: MachineInfo,
    base: Path,
    path: Path,
    fast: bool = False,
    serve: bool = False,
) -> str:
    """Return the recipe as YAML with comments. base: the folder that its paths are relative to."""
    splits = data.splits if data else _PLACEHOLDERS
    train = "train" in splits
    decides = (
        model_info.traits.architecture == "encoder-decoder"
        if fast
        else model_info.traits.modality == "text" and model_info.traits.classifies
    )
    num_rows = _count_training_rows(data) if data and train and decides else MIN_SHORTLIST_ROWS
    selection_metric = (
        _main_metric(model_info, data) if "validation" in {*splits, *(data.fractions if data else ())} else ""
    )
    candidates = (
        quantized_model_steps(model_info, machine, train)
        if model_info.quantization
        else propose_steps(
            model_info,
            _export_machine(machine, model_info),
            train,
            fast,
            num_rows,
            selection_metric,
            "calibration" in splits,
            serve,
        )
    )
    steps = list(candidates)
    comments = [
        *(quantized_model_notes(model_info.quantization, fast) if model_info.quantization else ()),
        *(data.notes if data else ()),
    ]
    if data and not machine.gpu and (effort := training_time_text(model_info, data, steps)):
        comments.append(effort)
    model_path = Path(model).expanduser()
    # not model_info.folder: of an adapter, that is the merged model in the cache
    path_text = model_path.as_posix() if model_path.is_absolute() else _relative_path(model_path, base)
    model_name = path_text if local_path(model, Path.cwd()) else model
    header = _header_comments(model, model_info, machine, path, comments, named_files=data is not None)
    lines = [*header, f"model: {yaml_scalar(model_name)}"]
    if len(model_info.tasks) > 1:
        other_tasks = ", ".join(t for t in model_info.tasks if t != model_info.task)
        lines += _comment_lines(f"Other tasks of this family: {other_tasks}")
    lines += [
        f"task: {model_info.task}",
        *_comment_lines(f"Sample format: {task_spec(model_info.task).row_example}"),
        "data:    # test is only for scoring",
    ]
    for name in (n for n in get_args(SplitName) if n in splits):
        file = splits[name]
        lines.append(f"  {name}: {yaml_scalar(_recipe_path(file, base) if data else file.as_posix())}")
    if data and data.fractions:
        fractions_text = ", ".join(f"{name}: {share}" for name, share in data.fractions.items())
        lines.append(f"  split: {{{fractions_text}}}    # taken from train at random")
    if data and data.columns:
        named_columns = ", ".join(f"{role}: {yaml_scalar(name)}" for role, name in data.columns.items())
        lines.append(f"  columns: {{{named_columns}}}    # inferred from the first sample")
    if all(model_info.languages):
        source, target = map(yaml_scalar, map(str, model_info.languages))
        lines += [f"  source_language: {source}", f"  target_language: {target}"]
    lines += ["stages:", *(line for step in steps for line in step_lines(step))]
    lines += _score_lines(model_info)
    if model_info.needs_classifier:
        lines += ["baseline: tuned    # the head is untrained before this step"]
    metric, last = (
        _main_metric(model_info, data),
        "onnx-fp32" if no_blocks_reason(model_info.config) else "onnx-int8",
    )
    last = gated_step(model_info, train) if model_info.quantization else last
    lines += [
        "# Limits; the run exits with 3 if one is exceeded:",
        f"# gates: {{{metric}: {{max_degradation: 1}}, speedup: {{min: 1.5, at: {last}}}}}",
    ]
    return "\n".join(lines) + "\n"


def _count_training_rows(data: DataInfo) -> int:
    """Return the number of training samples after splitting, counted up to `MIN_SHORTLIST_ROWS`."""
    train_fraction = 1 - sum(data.fractions.values())
    num_rows = sum(
        1
        for _ in itertools.islice(
            read_file_rows(data.splits["train"]), math.ceil(MIN_SHORTLIST_ROWS / train_fraction)
        )
    )
    return int(num_rows * train_fraction)


def _main_metric(model_info: ModelInfo, data: DataInfo | None) -> str:
    """Return the main metric of the report; for a classifier it depends on the first labels in the data."""
    if metric := task_spec(model_info.task).main_metric:
        return metric
    labels: list[Label] = []
    if data:
        column = data.columns.get("label", Columns().label)
        path, columns = next(iter(data.splits.values())), Columns()
        samples = (
            read_image_rows(path, columns.image, column)
            if model_info.traits.reads_images
            else read_file_rows(path)
        )
        for _, row in itertools.islice(samples, _LABEL_SAMPLE_ROWS):
            value = row.get(column)
            if isinstance(value, int | float | str):
                labels.append(value)
            elif isinstance(value, list):
                labels.append(tuple(map(str, value)))
    config = None if model_info.needs_classifier or not model_info.config else model_info.config
    return METRICS_BY_PROBLEM[infer_problem_type(config, labels)][0]


def _header_comments(
    model: str,
    model_info: ModelInfo,
    machine: MachineInfo,
    path: Path,
    notes_on_inputs: Sequence[str],
    named_files: bool,
) -> Iterator[str]:
    """Yield the comments at the top of the recipe: model, machine and notes.

    notes_on_inputs: notes on model and data. named_files: whether the user passed data files.
    """
    count = model_info.parameters or 0
    number = f"{count / 1e6:,.1f}M" if count >= _MIN_COUNT_IN_MILLIONS else f"{count:,}"
    size = f", {number} parameters in {model_info.dtype}" if count else ""
    limit = f", texts of at most {model_info.max_tokens:,} tokens" if model_info.max_tokens else ""
    yield f"# smelt run {path}"
    yield "#"
    comments = [
        f"Created by `smelt init` for {_model_name(model)}: {model_info.family}{size}{limit}; on"
        f" {_machine_text(machine)}."
    ]
    comments += [f"Note: {comment}." for comment in notes_on_inputs]
    if not named_files:
        comments += ["Set your files under data, then:"]
    for comment in comments:
        yield from _comment_lines(comment)
    yield f"# `smelt plan {path}` checks it; add `--limit 64` to a run for a quick test;"
    yield "# `smelt stages NAME` describes a stage and its settings."


def _comment_lines(text: str) -> list[str]:
    return textwrap.wrap(text, 78, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _machine_text(machine: MachineInfo) -> str:
    """Return the description of the machine."""
    cores = f"{machine.cores} core{'' if machine.cores == 1 else 's'}"
    gpu = " and an NVIDIA GPU" if machine.gpu else " without an NVIDIA GPU"
    available = (("TensorRT", machine.tensorrt), ("OpenVINO", machine.openvino))
    runtimes = " and ".join(name for name, is_available in available if is_available)
    return f"{cores}{gpu}, with {runtimes}" if runtimes else f"{cores}{gpu}"


def _score_lines(model_info: ModelInfo) -> Iterator[str]:
    yield "score:"
    if metrics := task_spec(model_info.task).suggested_metrics:
        yield f"  quality: [{', '.join(metrics)}]"
    if model_info.traits.output == "text":
        yield "  generation: {max_new_tokens: 128}"
    yield "  latency: {batch_sizes: [1, 8]}"


def _model_name(model: str) -> str:
    return Path(os.path.abspath(model)).name if Path(model).exists() else model.rstrip("/").split("/")[-1]


def _relative_path(path: Path, base: Path) -> str:
    # not resolved: a run's artifacts are links into the store, where names are only keys
    return Path(os.path.relpath(path.expanduser().absolute(), base)).as_posix()


def _recipe_path(path: Path, base: Path) -> str:
    """Return the path relative to `base`; absolute paths are kept."""
    path = path.expanduser()
    return path.as_posix() if path.is_absolute() else _relative_path(path, base)
