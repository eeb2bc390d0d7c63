"""Write a first recipe for an ONNX model, for `smelt init`."""

from __future__ import annotations

import json
import os
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from smelt.core.errors import InputError
from smelt.core.messages import escape_controls
from smelt.data.npz_arrays import NPZ_SUFFIX, SampleAxes
from smelt.data.tasks import Task, task_traits, tasks_with
from smelt.export.onnx_models.settings import INT8_WEIGHTS, RECURRENT_OPS, WEIGHT_ONLY_OPS
from smelt.models.text_rules import MODULES_FILE
from smelt.pipeline.inspect.data_files import DataInfo, inspect_data
from smelt.pipeline.inspect.model_folder import read_config
from smelt.pipeline.inspect.model_info import (
    OnnxModel,
    find_graph,
    find_tokenizer_folder,
    infer_batch_axes,
    inspect_graph,
)
from smelt.quantization.schemes.registry import DEFAULT_SCHEME, STATIC_SCHEME
from smelt.runtimes.onnx_import.graph_interface import graph_of_arrays
from smelt.runtimes.onnx_import.signature import GraphSignature
from smelt.runtimes.onnx_import.trial_run import runs_in_batches
from smelt.tasks.registry import all_specs

ROWS_SUFFIX = ".jsonl"
_BATCH_SIZES = (1, 8)  # of the latency, where the graph's is free
_WIDTH = 78
# Operators with weights that int8-static quantizes, those of int8-dynamic, also in the bodies of If, Loop and
# Scan, and those whose weights int8-weight-only stores, also there; operators that only transformers have
_STATIC_OPERATORS = ("Conv", "MatMul", "Gemm")
_DYNAMIC_OPERATORS = ("MatMul", "Gemm", "Attention", "LSTM", "EmbedLayerNormalization")
# Fraction of the weights that int8-static keeps float in any graph, above which it is not proposed: for
# Silero VAD, with 43 %, agreement is 69 and 79 %, with int8-dynamic 97 and 99 %
# (docs/measurements/own-onnx.md).
_MAX_FLOAT_SHARE = 1 / 3
_ATTENTION_OPERATORS = ("Attention", "MultiHeadAttention", "GroupQueryAttention", "EmbedLayerNormalization")


def onnx_recipe_text(
    model: str,
    data: Sequence[Path],
    task: Task | None,
    path: Path,
    base: Path,
    columns: Mapping[str, str] | None = None,
    serve: bool = False,
) -> str:
    """Return a recipe with comments for the ONNX model `model` that `smelt plan` accepts.

    Args:
        model: the file, or a folder with it.
        data: files or folders with samples, `.npz` for arrays; a single file is divided; empty: the recipe
            has placeholders.
        task: task from the user; None to infer it.
        path: the recipe's file, as in the command.
        base: the folder that paths in the recipe are relative to.
        columns: columns of text samples by role; the others are inferred.
        serve: propose int8 whose answers do not depend on the other samples of their batch.

    Raises:
        InputError: the graph is not supported, or the data is invalid.
    """
    file = find_graph(Path(model).expanduser())
    graph_info = inspect_graph(file)
    if graph_info.signature is None:
        problems = "\n  ".join(f"{problem}." for problem in graph_info.problems)
        raise InputError(f"{file}: this graph cannot be used:\n  {problems}", code="unsupported-graph")
    onnx_model = OnnxModel(
        file,
        graph_info.signature,
        graph_info.files,
        find_tokenizer_folder(file, None),
        dict(graph_info.details or {}),
    )
    inferred_task = _infer_task(onnx_model, task)
    data_info = inspect_data(data, inferred_task, columns, trains=False) if data else None
    splits = dict(data_info.splits) if data_info else {}
    axes: SampleAxes = {}
    unbatched_outputs: list[str] = []
    only_single = False
    samples_file = splits.get("test") or splits.get("train")
    if samples_file and task_traits(inferred_task).modality == "arrays" and not samples_file.is_dir():
        with graph_of_arrays(file, onnx_model.details.get("zipmaps", {})) as trial_file:
            trial_model = replace(onnx_model, file=trial_file)
            axes, unbatched_outputs = infer_batch_axes(trial_model, samples_file)
            batched_signature = onnx_model.signature.with_batch_axes(axes)
            trial_model = replace(trial_model, signature=batched_signature)
            only_single = _takes_only_single_samples(trial_model, samples_file)
    has_calls = samples_file is not None and samples_file.is_dir()
    signature = onnx_model.signature
    signature = signature.without_batch_axes if has_calls else signature.with_batch_axes(axes)
    onnx_model = replace(onnx_model, signature=signature)
    lines = [
        *_header_comments(onnx_model, path, data_info),
        f"model: {_relative_path(file, base)}",
        f"task: {inferred_task}",
    ]
    lines += [*_data_format_comments(onnx_model, inferred_task), "data:    # test is only for scoring"]
    lines += list(
        _data_lines(
            data_info,
            axes,
            NPZ_SUFFIX if task_traits(inferred_task).modality == "arrays" else ROWS_SUFFIX,
            base,
        )
    )
    calibrated = data_info is None or bool({"calibration", "validation", "train"} & set(splits))
    stages = list(_quantization_lines(onnx_model, inferred_task, calibrated, serve))
    lines += ["stages:", "  - simplify: {}    # used only if the outputs are the same", *stages]
    if has_calls:
        lines += [
            "score:    # each file is a sample; they are run one by one",
            "  latency: {batch_sizes: [1]}",
        ]
    else:
        lines += _score_lines(onnx_model.signature, inferred_task, unbatched_outputs, only_single)
    if task_traits(inferred_task).modality == "arrays":
        quantized = any("name: int8" in line for line in stages)
        lines += [
            "# Quality is agreement with the original model. Limits; the run exits with 3 if one is",
            "# exceeded:",
            f"# gates: {{agreement: {{min: 99, at: {'int8' if quantized else 'simplify'}}}}}",
        ]
    return "\n".join(lines) + "\n"


def _infer_task(onnx_model: OnnxModel, wanted: Task | None) -> Task:
    """Return the user's task, else the one inferred from inputs, outputs and the tokenizer's folder."""
    if wanted is not None:
        return wanted
    (arrays,) = tasks_with(modality="arrays")
    inputs, outputs = (
        {value.name for value in graph_values}
        for graph_values in (onnx_model.signature.inputs, onnx_model.signature.outputs)
    )
    folder = onnx_model.tokenizer_folder
    if folder is None or "input_ids" not in inputs:
        return arrays
    config, is_embedder = read_config(folder)[0], (folder / MODULES_FILE).is_file()
    matches = (s.name for s in all_specs() if s.recognizes_graph(outputs, config, is_embedder))
    return next(matches, arrays)


def _data_format_comments(onnx_model: OnnxModel, task: Task) -> list[str]:
    if task_traits(task).output == "embedding":
        return ['# Sample format: {"text": "..."}, or {"text": "...", "text_pair": "...", "label": 3.8}']
    if task_traits(task).modality != "arrays":
        return ['# Sample format: {"text": "...", "label": "..."}, and "text_pair" for pairs']
    unusual_axes = {v.name: v.axis for v in onnx_model.signature.inputs if v.axis != 0 and v.shape != ()}
    axes_text = "".join(
        f", of {name} {'none' if axis is None else axis}" for name, axis in unusual_axes.items()
    )
    return [
        *_comment_lines(f"One array per input, by name; the batch axis is 0{axes_text}:"),
        *_savez_example(onnx_model),
    ]


def _header_comments(onnx_model: OnnxModel, path: Path, data: DataInfo | None) -> Iterator[str]:
    details, signature = onnx_model.details, onnx_model.signature
    producer = f", produced by {details['producer']}" if details.get("producer") else ""
    nodes = f"{details['nodes']:,} node{'' if details['nodes'] == 1 else 's'}"
    yield f"# smelt run {path}"
    yield "#"
    yield from _comment_lines(
        f"Created by `smelt init` for {onnx_model.file.name}: {nodes} of opset {details['opset']}{producer}."
    )
    for title, values in (("inputs", signature.inputs), ("outputs", signature.outputs)):
        yield from _comment_lines(f"{title}: {'; '.join(value.describe() for value in values)}")
    for message in data.notes if data else ():
        yield from _comment_lines(f"Note: {message}.")
    if data is None:
        yield "# Set your files under data, then:"
    yield f"# `smelt plan {path}` checks it; `smelt stages NAME` describes a stage."


def _comment_lines(text: str) -> list[str]:
    text = escape_controls(" ".join(text.split()))  # names in a file may contain invalid YAML characters
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _savez_example(onnx_model: OnnxModel) -> list[str]:
    names = ", ".join(f"{value.name}=..." for value in onnx_model.signature.inputs)
    fits = all(value.name.isidentifier() for value in onnx_model.signature.inputs)
    if not fits:  # names such as `input:0` are not Python identifiers
        names = "**{" + ", ".join(f"{value.name!r}: ..." for value in onnx_model.signature.inputs) + "}"
    return _comment_lines(f'numpy.savez("test.npz", {names})')


def _data_lines(data: DataInfo | None, axes: SampleAxes, end: str, base: Path) -> Iterator[str]:
    """Yield the lines under `data`."""
    if data is None:
        for name in ("calibration", "test"):
            yield f"  {name}: data/{name}{end}"
        return
    for name, path in data.splits.items():
        yield f"  {name}: {_relative_path(path, base)}"
    if data.fractions:
        yield f"  split: {{{', '.join(f'{name}: {share}' for name, share in data.fractions.items())}}}"
    if data.columns:
        columns = ", ".join(f"{role}: {_yaml_quoted(name)}" for role, name in data.columns.items())
        yield f"  columns: {{{columns}}}"
    if axes:
        entries = (f"{_yaml_quoted(n)}: {'null' if axis is None else axis}" for n, axis in axes.items())
        yield f"  axes: {{{', '.join(entries)}}}    # batch axes, inferred from the data: check them"


def _yaml_quoted(name: str) -> str:
    """Return a name as a quoted YAML string."""
    return json.dumps(name)


def _quantization_lines(onnx_model: OnnxModel, task: Task, calibrated: bool, serve: bool) -> Iterator[str]:
    """Yield the quantization steps, or a comment why there is none.

    Only int8-static quantizes convolutions. For transformers it loses more quality than int8-dynamic (MiniLM
    0.89 points of Spearman instead of 0.16: docs/measurements/int8-static.md), and it keeps recurrent layers
    and the bodies of If, Loop and Scan float (`_MAX_FLOAT_SHARE`). Where the proposed scheme quantizes less
    than half of the weights, int8-weight-only is proposed too, which also stores convolutions in bodies, GRU
    and RNN in int8. To serve, int8-dynamic is not proposed, whose ranges are those of a batch.
    """
    details = onnx_model.details
    if details.get("codes"):
        yield "  # no quantization: its weights have 8 bits or fewer"
        return
    outer, inner = (Counter(details.get(name, {})) for name in ("weights", "inner_weights"))
    total = sum((outer + inner)[name] for name in {*WEIGHT_ONLY_OPS, *_DYNAMIC_OPERATORS})
    if not total:
        yield "  # no quantization: no operator with constant weights that int8 schemes support"
        return
    products = sum((outer + inner)[name] for name in _DYNAMIC_OPERATORS)
    always_float = sum(outer[name] for name in RECURRENT_OPS) + sum(inner[name] for name in WEIGHT_ONLY_OPS)
    operators = details.get("operators", {})
    attends = operators.get("Softmax", 0) > 1 or any(name in operators for name in _ATTENTION_OPERATORS)
    static = outer["Conv"] and not (attends and products) and task_traits(task).modality == "arrays"
    static = static and always_float <= _MAX_FLOAT_SHARE * total
    if static and not calibrated and not products:
        yield f"  # - quantize-onnx: {{scheme: {STATIC_SCHEME}}}    # with data: {{calibration: FILE}}"
        return
    is_static = (static or serve) and calibrated
    covered = sum(outer[name] for name in _STATIC_OPERATORS) if is_static else 0 if serve else products
    if covered:
        yield f"  - quantize-onnx: {{scheme: {STATIC_SCHEME if is_static else DEFAULT_SCHEME}}}"
        yield "    name: int8"
    if 2 * covered < total:
        yield f"  - quantize-onnx: {{scheme: {INT8_WEIGHTS}}}    # for its size, not its speed"
        yield from ["    name: int8-weights", "    from: simplify"] if covered else ["    name: int8"]


def _takes_only_single_samples(onnx_model: OnnxModel, file: Path) -> bool:
    """Return whether the graph runs on one sample and not on several, as with a state of batch size 1."""
    signature = onnx_model.signature
    if signature.fixed_batch_size is not None:
        return False
    runs = (runs_in_batches(onnx_model.file, signature, file, size) for size in (_BATCH_SIZES[-1], 1))
    return not next(runs) and next(runs)


def _score_lines(
    signature: GraphSignature, task: Task, without: Sequence[str], only_single: bool
) -> Iterator[str]:
    yield "score:"
    sizes: Sequence[int] = (
        _BATCH_SIZES if signature.fixed_batch_size is None else [signature.fixed_batch_size]
    )
    yield f"  latency: {{batch_sizes: {[1] if only_single else list(sizes)}}}"
    if only_single:
        yield f"  # batch size 1: the graph failed on {_BATCH_SIZES[-1]} samples in one call"
        yield "  batch_size: 1"
        return
    # an output with a fixed first axis, in a graph with dynamic batch size, has no batch axis
    unbatched_outputs = [
        value
        for value in signature.outputs
        if value.axis is None
        or value.name in without
        or (value.shape and isinstance(value.shape[value.axis], int) and signature.fixed_batch_size is None)
    ]
    if unbatched_outputs and task_traits(task).modality == "arrays" and signature.fixed_batch_size is None:
        names = ", ".join(value.describe() for value in unbatched_outputs)
        yield from (
            f"  {line}" for line in _comment_lines(f"batch size 1, as these have no batch axis: {names}")
        )
        yield "  batch_size: 1"


def _relative_path(path: Path, base: Path) -> str:
    return Path(os.path.relpath(path.expanduser().absolute(), base)).as_posix()
