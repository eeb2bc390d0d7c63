"""`smelt init` of an ONNX graph: a first recipe with what was seen of the graph."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from smelt.core.data import SIMILARITY, TENSORS, Task
from smelt.core.errors import InputError
from smelt.core.rows.arrays import SUFFIX
from smelt.core.text import printable
from smelt.look.foreign import ForeignModel, examined, find_graph, texts_beside
from smelt.look.model_folder import read_config
from smelt.recipe.problem import has_classifier
from smelt.runtime.schemes.registry import DEFAULT, OBSERVING

ROWS = ".jsonl"
_WIDTH = 78


def graph_recipe(model: str, data: Sequence[Path], task: Task | None, path: Path, base: Path) -> str:
    """Return a recipe for the ONNX graph `model`, with comments, that `smelt plan` accepts.

    Args:
        model: the file, or a folder with it.
        data: files of rows, `.npz` of arrays; none: names to be filled in.
        task: what the user says that it is for.
        path: the recipe's file, as a command names it.
        base: the folder that paths in the recipe are relative to.

    Raises:
        InputError: it is no graph that can be run, or the data are no arrays.
    """
    file = find_graph(Path(model).expanduser())
    found = examined(file)
    if found.signature is None:
        raise InputError("\n".join(f"{file}: {problem}." for problem in found.problems))
    seen = ForeignModel(file, found.signature, found.files, texts_beside(file, None), dict(found.facts or {}))
    chosen = _task(seen, task)
    splits = _splits(data, SUFFIX if chosen == TENSORS else ROWS)
    end = SUFFIX if chosen == TENSORS else ROWS
    lines = [*_head(seen, path, bool(splits)), f"model: {_relative(file, base)}", f"task: {chosen}"]
    lines += _of_rows(seen, chosen)
    lines += ["data:    # a stage never gets to see test"]
    for name in splits or ("calibration", "test"):
        lines.append(f"  {name}: {_relative(splits[name], base) if splits else f'data/{name}{end}'}")
    calibrated = not splits or bool({"calibration", "validation", "train"} & set(splits))
    narrow = bool(seen.facts.get("codes")) or seen.facts.get("floats") in ("float16", "bfloat16")
    lines += _stages(calibrated, seen.signature.batch, narrow)
    if chosen == TENSORS:
        lines += [
            "# Quality is agreement with the untouched graph. A limit that must be kept, or the",
            "# run exits with 3:",
            f"# gates: {{agreement: {{min: 99, at: {'simplify' if narrow else 'int8'}}}}}",
        ]
    return "\n".join(lines) + "\n"


def _task(seen: ForeignModel, wanted: Task | None) -> Task:
    """Return what the user says, else what inputs and outputs of a graph with a tokenizer beside it say."""
    if wanted is not None:
        return wanted
    inputs, outputs = ({value.name for value in of} for of in (seen.signature.inputs, seen.signature.outputs))
    if seen.texts is None or "input_ids" not in inputs:
        return TENSORS
    if "logits" in outputs and has_classifier(read_config(seen.texts)[0]):
        return "text-classification"
    return SIMILARITY if "sentence_embedding" in outputs else TENSORS


def _of_rows(seen: ForeignModel, task: Task) -> list[str]:
    if task != TENSORS:
        return ['# A row of the data: {"text": "...", "label": "..."}, and "text_b" for pairs']
    return ["# Arrays by the names of the inputs, a row per place of axis 0:", *_savez(seen)]


def _head(seen: ForeignModel, path: Path, data: bool) -> Iterator[str]:
    facts, signature = seen.facts, seen.signature
    made = f", written by {facts['producer']}" if facts.get("producer") else ""
    nodes = f"{facts['nodes']:,} node{'' if facts['nodes'] == 1 else 's'}"
    yield f"# smelt run {path}"
    yield "#"
    told = f"Made by `smelt init` for {seen.file.name}: {nodes} of opset {facts['opset']}{made}."
    yield from _comment(told)
    for word, values in (("inputs", signature.inputs), ("outputs", signature.outputs)):
        yield from _comment(f"{word}: {'; '.join(value.described() for value in values)}")
    if not data:
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


def _stages(calibrated: bool, batch: int | None, narrow: bool) -> list[str]:
    """Return stages and scoring; what has codes or halves for weights is not quantized again."""
    scheme = OBSERVING if calibrated else DEFAULT
    sizes = "[1, 8]" if batch is None else f"[{batch}]"
    return [
        "stages:",
        "  - simplify: {}    # kept where it computes the same",
        *([] if narrow else [f"  - quantize-graph: {{scheme: {scheme}}}", "    name: int8"]),
        *(["  # its weights are no float32: there is nothing to quantize"] if narrow else []),
        "score:",
        f"  latency: {{batch_sizes: {sizes}}}",
    ]


def _splits(data: Sequence[Path], end: str) -> Mapping[str, Path]:
    """Return which file is which split, by its name."""
    found: dict[str, Path] = {}
    for path in data:
        if not path.is_file() or (end == SUFFIX and path.suffix != SUFFIX):
            raise InputError(f"{path}: expected a file, {end} of the graph's inputs (--data).")
        name = next(
            (word for word in ("calibration", "validation", "train") if word[:5] in path.name), "test"
        )
        if name in found:
            raise InputError(
                f"{path}: {found[name]} is for {name} too. Put calibration into one of their names."
            )
        found[name] = path
    if found and "test" not in found:
        raise InputError("there is no file for test (--data).")
    return found


def _relative(path: Path, base: Path) -> str:
    return Path(os.path.relpath(path.expanduser().absolute(), base)).as_posix()
