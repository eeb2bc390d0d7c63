"""An ONNX file, or a folder with one as Optimum lays it out, as the model of a recipe: what it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.errors import InputError, nearest
from smelt.core.files import placed
from smelt.runtime.foreign.generators.layout import ENCODER, FIRST, MERGED, MODEL, NEXT, parts_of
from smelt.runtime.models.weight_files import has_weights

if TYPE_CHECKING:
    from smelt.runtime.foreign.examine import Examined
    from smelt.runtime.foreign.signature import Signature

SUFFIX = ".onnx"
OTHER_FLOATS = ("float16", "bfloat16", "float64")  # weights that the quantizers, made for float32, leave
_INSIDE = "onnx"  # where transformers.js and newer exports have the graphs
_GENERATES = (ENCODER, FIRST, NEXT, MERGED)


@dataclass(frozen=True)
class ForeignModel:
    """A graph that somebody else exported, or the graphs of a model that generates.

    file: the graph; of several the last one, which gives logits. files: those beside it that hold weights, by
    their names. texts: the folder with config.json and the tokenizer; None for a graph of arrays. details:
    opset, nodes, parameters, producer. parts: of a model that generates, its graphs by name, without `.onnx`.
    """

    file: Path
    signature: Signature
    files: tuple[str, ...] = ()
    texts: Path | None = None
    details: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Path] = field(default_factory=dict)


def is_onnx(model: object, base: Path) -> bool:
    """Say whether the `model` of a recipe, relative to `base`, is an ONNX file or a folder of such."""
    if not isinstance(model, str) or not model.strip() or "\0" in model:
        return False
    path = placed(base, model)
    try:
        if path.suffix == SUFFIX and not path.is_dir():
            return True
        return path.is_dir() and bool(_graphs(path)) and not has_weights(path)
    except OSError:
        return False


def find_graph(path: Path) -> Path:
    """Return the graph that `path`, a file or a folder, means.

    Raises:
        InputError: there is none, several, or graphs that generate text.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise InputError(
            f"{path}: no such file; expected an ONNX model.{nearest(path.name, beside)}",
            code="missing-file",
            file=str(path),
        )
    found = _graphs(path)
    parts = [graph.name for graph in found if graph.stem in _GENERATES]
    if parts:
        raise InputError(
            f"{path}: {', '.join(parts)}: graphs that generate text. Give task: translation or summarization,"
            f" or name one graph alone, as model: {path.name}/{found[0].name} with task: custom.",
            code="generator-graphs",
            file=str(path),
        )
    named = [graph for graph in found if graph.name == f"model{SUFFIX}"]
    if not named and len(found) > 1:
        names = ", ".join(graph.relative_to(path).as_posix() for graph in found[:6])
        raise InputError(
            f"{path}: which of {names}? Name the file: model: {path.name}/{found[0].name}.",
            code="several-graphs",
            file=str(path),
        )
    return (named or found)[0]


def find_parts(path: Path) -> dict[str, Path]:
    """Return the graphs of the model that generates in the folder `path`, by name without `.onnx`.

    Raises:
        InputError: there is no folder, or its graphs make no whole; says what is missing.
    """
    if path.is_file():
        if path.stem in _GENERATES:
            raise InputError(
                f"{path}: one of several graphs that generate text. Name their folder: model: {path.parent}.",
                code="part-of-generator",
                file=str(path),
            )
        return {MODEL: path}
    if not path.is_dir():
        find_graph(path)  # says what is there instead
    found = {graph.stem: graph for graph in _graphs(path)}
    parts = parts_of(found)
    if isinstance(parts, str):
        raise InputError(f"{path}: {parts}.", code="incomplete-generator", file=str(path))
    return {name: found[name] for name in parts[1]}


def examined(path: Path) -> Examined:
    """Look at the graph in the file `path`, in a process of its own."""
    from smelt.runtime.foreign.examine import examine

    return examine(path)


def texts_beside(graph: Path, tokenizer: Path | None) -> Path | None:
    """Return the folder with config and tokenizer: the one that is named, else where the graph lies."""
    if tokenizer is not None:
        return tokenizer
    places: Sequence[Path] = (graph.parent, *([graph.parent.parent] if graph.parent.name == _INSIDE else []))
    return next((place for place in places if (place / "config.json").is_file()), None)


def _graphs(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}")) or sorted((folder / _INSIDE).glob(f"*{SUFFIX}"))
