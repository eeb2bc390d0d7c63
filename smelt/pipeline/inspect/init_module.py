"""Write a first recipe for a PyTorch module of the user's own, for `smelt init --module`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from smelt.core.errors import InputError
from smelt.data.images import ARCHIVE_SUFFIX, read_image_rows
from smelt.data.read_rows import read_file_rows
from smelt.data.splits import Columns
from smelt.data.tasks import Task, task_traits, tasks_with
from smelt.pipeline.inspect.data_files import DataInfo, inspect_data
from smelt.pipeline.recipe.yaml_file import yaml_scalar
from smelt.quantization.schemes.registry import DEFAULT_SCHEME, STATIC_SCHEME

_LABEL_ROWS = 2000  # that are read to list the labels
_MAX_LABELS = 100
_PLACEHOLDERS = ("train", "validation", "test")
# Codes of a plan in which a scheme of quantization finds no layer.
_NO_LAYERS = ("only-output-layer", "does-not-fit-model")


@dataclass(frozen=True)
class ModuleOptions:
    """The options of `smelt init` for a module; paths are relative to the current folder.

    module: package.module:function. weights: its state_dict. image_size, processor: of a classifier of
    images; tokenizer: of texts; a module of arrays has none of the three. columns: of samples, by role.
    """

    module: str
    weights: Path
    image_size: int | None = None
    processor: Path | None = None
    tokenizer: Path | None = None
    columns: Mapping[str, str] = field(default_factory=dict)

    @property
    def task(self) -> Task:
        """The task of a module with these options."""
        modality = "arrays" if self.image_size is None and self.processor is None else "image"
        if self.tokenizer is not None:
            return tasks_with(samples="texts", output="labels")[0]
        return tasks_with(modality=modality)[0]


def module_recipe_text(
    options: ModuleOptions,
    data: Sequence[Path],
    path: Path,
    relative: Callable[[Path], str],
    require_valid: Callable[[str], None],
) -> str:
    """Return the recipe as YAML with comments.

    Args:
        options: of the module.
        data: files or folders with samples; without any the recipe has placeholders and is not checked.
        path: the recipe's file, as in the command.
        relative: returns a path relative to the recipe's folder.
        require_valid: raises InputError if a recipe is invalid.

    Raises:
        InputError: the data or the module is invalid.
    """
    info = _data_info(options, data) if data else None
    splits = {*(info.splits if info else _PLACEHOLDERS), *(info.fractions if info else ())}
    calibrated = bool(splits & {"calibration", "train"})
    is_text = task_traits(options.task).modality == "text"
    first = DEFAULT_SCHEME if is_text or not calibrated else STATIC_SCHEME
    head = [*_model_lines(options, info, path, relative), *_data_lines(options.task, info, relative)]
    for scheme in (first, None):
        text = "\n".join([*head, *_stage_lines(scheme), ""])
        if not data:
            return text
        try:
            require_valid(text)
        except InputError as error:
            if scheme is None or error.code not in _NO_LAYERS:
                raise
        else:
            return text
    raise AssertionError("the last recipe is returned or raises")


def _data_info(options: ModuleOptions, data: Sequence[Path]) -> DataInfo:
    """Return the splits of `data`.

    Raises:
        InputError: `missing-setting`: no option says that the module reads images or texts, and no file has
            arrays; as `inspect_data`.
    """
    try:
        return inspect_data(data, options.task, options.columns)
    except InputError as error:
        reads_arrays = task_traits(options.task).modality == "arrays"
        has_arrays = any(p.suffix == ARCHIVE_SUFFIX or any(p.glob(f"**/*{ARCHIVE_SUFFIX}")) for p in data)
        if not reads_arrays or has_arrays or error.code not in ("missing-data", "wrong-format"):
            raise
        raise InputError(
            f"--data {', '.join(map(str, data))}: no {ARCHIVE_SUFFIX} files, which a module of arrays reads."
            " For a module that classifies images add --image-size or --processor; for one that classifies"
            " texts add --tokenizer.",
            code="missing-setting",
        ) from error


def _model_lines(
    options: ModuleOptions, info: DataInfo | None, path: Path, relative: Callable[[Path], str]
) -> Iterator[str]:
    yield f"# smelt run {path}"
    yield "#"
    yield f"# Created by `smelt init` for the PyTorch module {options.module}, whose code is run."
    yield "# Its file is in the folder of this recipe: docs/how-to/pytorch-modules.md"
    for note in info.notes if info else ():
        yield f"# Note: {note}."
    yield "model:"
    yield f"  module: {options.module}"
    yield f"  weights: {yaml_scalar(relative(options.weights))}"
    if options.image_size is not None:
        yield f"  image_size: {options.image_size}    # normalized with mean and deviation 0.5"
    for name in ("processor", "tokenizer"):
        if (value := getattr(options, name)) is not None:
            yield f"  {name}: {yaml_scalar(relative(value))}"
    if labels := _labels(options.task, info):
        yield f"  labels: [{', '.join(map(yaml_scalar, labels))}]    # check that outputs have this order"


def _data_lines(task: Task, info: DataInfo | None, relative: Callable[[Path], str]) -> Iterator[str]:
    yield f"task: {task}"
    yield "data:    # test is only for scoring"
    suffix = {"text": ".jsonl", "arrays": ".npz"}.get(task_traits(task).modality, "")
    for name in _PLACEHOLDERS if info is None else ():
        yield f"  {name}: data/{name}{suffix}"
    for name, file in info.splits.items() if info else ():
        yield f"  {name}: {yaml_scalar(relative(file))}"
    if info and info.fractions:
        fractions = ", ".join(f"{name}: {share}" for name, share in info.fractions.items())
        yield f"  split: {{{fractions}}}    # taken from train at random"
    if info and info.columns:
        columns = ", ".join(f"{role}: {yaml_scalar(name)}" for role, name in info.columns.items())
        yield f"  columns: {{{columns}}}    # inferred from the first sample"


def _labels(task: Task, info: DataInfo | None) -> list[str]:
    """Return the names of the classes in the data, sorted; none of numbers, or for arrays."""
    if info is None or not task_traits(task).classifies:
        return []
    path = info.splits.get("train") or next(iter(info.splits.values()))
    column = info.columns.get("label", Columns().label)
    is_image = task_traits(task).modality == "image"
    rows = read_image_rows(path, Columns().image, column) if is_image else read_file_rows(path)
    labels = {row.get(column) for _, row in itertools.islice(rows, _LABEL_ROWS)}
    names = sorted(label for label in labels if isinstance(label, str) and not label.isdecimal())
    return names if len(names) == len(labels) <= _MAX_LABELS else []


def _stage_lines(scheme: str | None) -> Iterator[str]:
    yield "stages:"
    if scheme is not None:
        yield f"  - quantize: {{scheme: {scheme}}}"
        yield "  - onnx: {}"
        yield "    name: onnx-int8"
    yield "  - onnx: {}"
    if scheme is not None:
        yield "    from: model"
    yield "    name: onnx-fp32"
    yield "# distill recovers what pruning or factorization loses: docs/how-to/pytorch-modules.md#stages"
    yield "score:"
    yield "  latency: {batch_sizes: [1, 8]}"
