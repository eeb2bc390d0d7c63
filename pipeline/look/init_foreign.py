"""`smelt init` of an ONNX graph: a first recipe with what was seen of the graph."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from smelt.core.data import TENSORS, Task
from smelt.core.errors import InputError
from smelt.core.rows.arrays import SUFFIX
from smelt.look.foreign import ForeignModel, examined, find_graph

_PLACEHOLDERS = {"calibration": Path("data/calibration.npz"), "test": Path("data/test.npz")}
_WIDTH = 78


def graph_recipe(model: str, data: Sequence[Path], task: Task | None, path: Path, base: Path) -> str:
    """Return a recipe for the ONNX graph `model`, with comments, that `smelt plan` accepts.

    Args:
        model: the file, or a folder with it.
        data: `.npz` files of rows; none: names to be filled in.
        task: what the user says that it is for.
        path: the recipe's file, as a command names it.
        base: the folder that paths in the recipe are relative to.

    Raises:
        InputError: it is no graph that can be run, or the data are no arrays.
    """
    if task not in (None, TENSORS):
        raise InputError(f"--task {task}: an ONNX file is for {TENSORS} in this version.")
    file = find_graph(Path(model).expanduser())
    found = examined(file)
    if found.signature is None:
        raise InputError("\n".join(f"{file}: {problem}." for problem in found.problems))
    seen = ForeignModel(file, found.signature, found.files, facts=dict(found.facts or {}))
    splits = _splits(data)
    lines = [*_head(seen, path, bool(splits)), f"model: {_relative(file, base)}", f"task: {TENSORS}"]
    lines += ["# Arrays by the names of the inputs, a row per place of axis 0:", *_savez(seen)]
    lines += ["data:    # a stage never gets to see test"]
    for name, place in (splits or _PLACEHOLDERS).items():
        lines.append(f"  {name}: {_relative(place, base) if splits else place.as_posix()}")
    lines += _stages("calibration" in (splits or _PLACEHOLDERS))
    lines += [
        "# Quality is agreement with the untouched graph. A limit that must be kept, or the",
        "# run exits with 3:",
        "# gates: {agreement: {min: 99}, speedup: {min: 1.2, at: int8}}",
    ]
    return "\n".join(lines) + "\n"


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
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _savez(seen: ForeignModel) -> list[str]:
    names = ", ".join(f"{value.name}=..." for value in seen.signature.inputs)
    fits = all(value.name.isidentifier() for value in seen.signature.inputs)
    if not fits:  # names such as `input:0` are no words of Python
        names = "**{" + ", ".join(f"{value.name!r}: ..." for value in seen.signature.inputs) + "}"
    return _comment(f'numpy.savez("test.npz", {names})')


def _stages(calibrated: bool) -> list[str]:
    return ["stages: []", "score:", "  latency: {batch_sizes: [1, 8]}"]


def _splits(data: Sequence[Path]) -> Mapping[str, Path]:
    """Return which file is which split, by its name."""
    found: dict[str, Path] = {}
    for path in data:
        if not path.is_file() or path.suffix != SUFFIX:
            raise InputError(f"{path}: expected an {SUFFIX} file of the graph's inputs (--data).")
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
