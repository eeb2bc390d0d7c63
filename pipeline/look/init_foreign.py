"""`smelt init` of an ONNX graph: a first recipe with what was seen of the graph."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from smelt.core.data import CUSTOM, SIMILARITY, Task
from smelt.core.errors import InputError
from smelt.core.rows.arrays import SUFFIX, Axes
from smelt.core.text import printable
from smelt.look.data import DataLook, look_at_data
from smelt.look.foreign import OTHER_FLOATS, ForeignModel, examined, find_graph, texts_beside
from smelt.look.init_axes import found_axes
from smelt.look.model_folder import read_config
from smelt.planning.foreign.graph import HIDDEN
from smelt.recipe.problem import has_classifier
from smelt.runtime.foreign.signature import Signature
from smelt.runtime.schemes.registry import DEFAULT, OBSERVING
from smelt.runtime.text.sentence_files import MODULES

ROWS = ".jsonl"
_WIDTH = 78
# quantized by int8-static alone; by both schemes, or int8-dynamic alone; what only transformers have
_CONVOLUTIONS = ("Conv", "ConvTranspose")
_PRODUCTS = ("MatMul", "Gemm", "Attention", "LSTM", "EmbedLayerNormalization", "FusedMatMul")
_ATTENTION = ("Attention", "MultiHeadAttention", "GroupQueryAttention", "EmbedLayerNormalization")


def graph_recipe(
    model: str,
    data: Sequence[Path],
    task: Task | None,
    path: Path,
    base: Path,
    columns: Mapping[str, str] | None = None,
) -> str:
    """Return a recipe for the ONNX graph `model`, with comments, that `smelt plan` accepts.

    Args:
        model: the file, or a folder with it.
        data: files or folders with rows, `.npz` of arrays; a file alone is divided; none: names to be filled
            in.
        task: what the user says that it is for.
        path: the recipe's file, as a command names it.
        base: the folder that paths in the recipe are relative to.
        columns: of rows of text, by role; the others are guessed.

    Raises:
        InputError: it is no graph that can be run, or the data are no arrays.
    """
    file = find_graph(Path(model).expanduser())
    found = examined(file)
    if found.signature is None:
        raise InputError(
            "\n".join(f"{file}: {problem}." for problem in found.problems), code="unsupported-graph"
        )
    seen = ForeignModel(
        file, found.signature, found.files, texts_beside(file, None), dict(found.details or {})
    )
    chosen = _task(seen, task)
    rows = look_at_data(data, chosen, columns, trains=False) if data else None
    splits = dict(rows.splits) if rows else {}
    axes: Axes = {}
    without: list[str] = []
    if rows and chosen == CUSTOM:
        axes, without = found_axes(seen, splits.get("test") or splits["train"])
    seen = replace(seen, signature=seen.signature.with_axes(axes))
    lines = [*_head(seen, path, rows), f"model: {_relative(file, base)}", f"task: {chosen}"]
    lines += [*_of_rows(seen, chosen), "data:    # a stage never gets to see test"]
    lines += list(_data(rows, axes, SUFFIX if chosen == CUSTOM else ROWS, base))
    calibrated = rows is None or bool({"calibration", "validation", "train"} & set(splits))
    stages = list(_quantization(seen, chosen, calibrated))
    lines += ["stages:", "  - simplify: {}    # kept where it computes the same", *stages]
    lines += _score(seen.signature, chosen, without)
    if chosen == CUSTOM:
        quantized = any("name: int8" in line for line in stages)
        lines += [
            "# Quality is agreement with the untouched graph. A limit that must be kept, or the",
            "# run exits with 3:",
            f"# gates: {{agreement: {{min: 99, at: {'int8' if quantized else 'simplify'}}}}}",
        ]
    return "\n".join(lines) + "\n"


def _task(seen: ForeignModel, wanted: Task | None) -> Task:
    """Return what the user says, else what inputs and outputs of a graph with a tokenizer beside it say."""
    if wanted is not None:
        return wanted
    inputs, outputs = ({value.name for value in of} for of in (seen.signature.inputs, seen.signature.outputs))
    if seen.texts is None or "input_ids" not in inputs:
        return CUSTOM
    if "logits" in outputs and has_classifier(read_config(seen.texts)[0]):
        return "text-classification"
    pooled = HIDDEN in outputs and (seen.texts / MODULES).is_file()
    return SIMILARITY if "sentence_embedding" in outputs or pooled else CUSTOM


def _of_rows(seen: ForeignModel, task: Task) -> list[str]:
    if task == SIMILARITY:
        return ['# A row of the data: {"text": "..."}, or {"text": "...", "text_b": "...", "label": 3.8}']
    if task != CUSTOM:
        return ['# A row of the data: {"text": "...", "label": "..."}, and "text_b" for pairs']
    others = {v.name: v.axis for v in seen.signature.inputs if v.axis != 0 and v.shape != ()}
    where = "".join(f"; of {name} {'none' if axis is None else axis}" for name, axis in others.items())
    return [*_comment(f"Arrays by the names of the inputs, the rows on axis 0{where}:"), *_savez(seen)]


def _head(seen: ForeignModel, path: Path, rows: DataLook | None) -> Iterator[str]:
    details, signature = seen.details, seen.signature
    made = f", written by {details['producer']}" if details.get("producer") else ""
    nodes = f"{details['nodes']:,} node{'' if details['nodes'] == 1 else 's'}"
    yield f"# smelt run {path}"
    yield "#"
    told = f"Made by `smelt init` for {seen.file.name}: {nodes} of opset {details['opset']}{made}."
    yield from _comment(told)
    for word, values in (("inputs", signature.inputs), ("outputs", signature.outputs)):
        yield from _comment(f"{word}: {'; '.join(value.described() for value in values)}")
    for note in rows.notes if rows else ():
        yield from _comment(f"Note: {note}.")
    if rows is None:
        yield "# Name your files under data, then:"
    yield f"# `smelt plan {path}` checks it; `smelt stages NAME` explains a stage."


def _comment(text: str) -> list[str]:
    text = printable(" ".join(text.split()))  # names of strangers may hold what YAML does not allow
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _savez(seen: ForeignModel) -> list[str]:
    names = ", ".join(f"{value.name}=..." for value in seen.signature.inputs)
    fits = all(value.name.isidentifier() for value in seen.signature.inputs)
    if not fits:  # names such as `input:0` are no words of Python
        names = "**{" + ", ".join(f"{value.name!r}: ..." for value in seen.signature.inputs) + "}"
    return _comment(f'numpy.savez("test.npz", {names})')


def _data(rows: DataLook | None, axes: Axes, end: str, base: Path) -> Iterator[str]:
    """Yield what stands under `data`."""
    if rows is None:
        for name in ("calibration", "test"):
            yield f"  {name}: data/{name}{end}"
        return
    for name, path in rows.splits.items():
        yield f"  {name}: {_relative(path, base)}"
    if rows.shares:
        yield f"  split: {{{', '.join(f'{name}: {share}' for name, share in rows.shares.items())}}}"
    if rows.columns:
        yield f"  columns: {{{', '.join(f'{role}: {_quoted(name)}' for role, name in rows.columns.items())}}}"
    if axes:
        said = (f"{_quoted(n)}: {'null' if axis is None else axis}" for n, axis in axes.items())
        yield f"  axes: {{{', '.join(said)}}}    # of the rows, as the arrays and a call say: check it"


def _quoted(name: str) -> str:
    """Return a name as YAML takes it, whatever is in it."""
    return json.dumps(name)


def _quantization(seen: ForeignModel, task: Task, calibrated: bool) -> Iterator[str]:
    """Yield the step that quantizes, or why there is none.

    Convolutions are quantized by int8-static alone. It costs transformers more than int8-dynamic does (a
    MiniLM 0.89 points of Spearman instead of 0.16: docs/measurements/int8-static.md).
    """
    operators, inside = seen.details.get("operators", {}), seen.details.get("inner_operators", {})
    if seen.details.get("codes") or seen.details.get("floats") in OTHER_FLOATS:
        yield "  # its weights are no float32: there is nothing to quantize"
        return
    convolutions = sum(operators.get(name, 0) for name in _CONVOLUTIONS)
    # int8-dynamic quantizes the bodies of If, Loop and Scan too
    products = sum(operators.get(name, 0) + inside.get(name, 0) for name in _PRODUCTS)
    if not convolutions and not products:
        yield "  # none of its operators is one that int8 schemes quantize"
        return
    attends = operators.get("Softmax", 0) > 1 or any(name in operators for name in _ATTENTION)
    static = convolutions and not (attends and products) and task == CUSTOM
    if static and not calibrated and not products:
        yield f"  # - quantize-onnx: {{scheme: {OBSERVING}}}    # with data: {{calibration: FILE}}"
        return
    yield f"  - quantize-onnx: {{scheme: {OBSERVING if static and calibrated else DEFAULT}}}"
    yield "    name: int8"


def _score(signature: Signature, task: Task, without: Sequence[str]) -> Iterator[str]:
    yield "score:"
    yield f"  latency: {{batch_sizes: {'[1, 8]' if signature.batch is None else f'[{signature.batch}]'}}}"
    # an output with a fixed first axis, where the batch has any size, has no part for each row
    whole = [
        value
        for value in signature.outputs
        if value.axis is None
        or value.name in without
        or (value.shape and isinstance(value.shape[value.axis], int) and signature.batch is None)
    ]
    if whole and task == CUSTOM and signature.batch is None:
        names = ", ".join(value.described() for value in whole)
        yield from (f"  {line}" for line in _comment(f"no axis of rows, so they run one by one: {names}"))
        yield "  batch_size: 1"


def _relative(path: Path, base: Path) -> str:
    return Path(os.path.relpath(path.expanduser().absolute(), base)).as_posix()
