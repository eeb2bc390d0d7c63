"""Find and inspect the ONNX model of a recipe: a file, or a folder in Optimum's layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import resolve_path
from smelt.runtime.models.weight_files import has_weights
from smelt.runtime.third_party.generators.optimum_layout import (
    DECODER_WITH_PAST_GRAPH,
    ENCODER_GRAPH,
    FIRST_DECODER_GRAPH,
    MERGED_DECODER_GRAPH,
    MODEL_GRAPH,
    required_graphs,
)

if TYPE_CHECKING:
    from smelt.runtime.third_party.signature import GraphSignature
    from smelt.runtime.third_party.validate_graph import GraphValidation

ONNX_SUFFIX = ".onnx"
NON_FLOAT32_DTYPES = (
    "float16",
    "bfloat16",
    "float64",
)  # weights that the quantizers, which need float32, do not support
_ONNX_FOLDER = "onnx"  # folder of the graphs in transformers.js and newer exports
_GENERATION_GRAPHS = (ENCODER_GRAPH, FIRST_DECODER_GRAPH, DECODER_WITH_PAST_GRAPH, MERGED_DECODER_GRAPH)


@dataclass(frozen=True)
class ThirdPartyModel:
    """A third-party ONNX model: one graph, or the graphs of a generative model.

    file: the graph; of several the last one, which outputs logits. weight_files: names of external data
    files.
    tokenizer_folder: folder with config.json and the tokenizer; None for the task `custom`. details: opset,
    nodes, parameters, producer. graphs: graphs of a generative model by name, without `.onnx`.
    """

    file: Path
    signature: GraphSignature
    weight_files: tuple[str, ...] = ()
    tokenizer_folder: Path | None = None
    details: dict[str, Any] = field(default_factory=dict)
    graphs: dict[str, Path] = field(default_factory=dict)


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
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise InputError(
            f"{path}: no such file. Expected an ONNX model.{did_you_mean(path.name, beside)}",
            code="missing-file",
            file=str(path),
        )
    found = _onnx_files(path)
    parts = [graph.name for graph in found if graph.stem in _GENERATION_GRAPHS]
    if parts:
        raise InputError(
            f"{path}: {', '.join(parts)} are generation graphs. Set task: translation or summarization, or"
            f" use a single graph: model: {path.name}/{found[0].name} with task: custom.",
            code="generator-graphs",
            file=str(path),
        )
    named = [graph for graph in found if graph.name == f"model{ONNX_SUFFIX}"]
    if not named and len(found) > 1:
        names = ", ".join(graph.relative_to(path).as_posix() for graph in found[:6])
        raise InputError(
            f"{path}: several graphs: {names}. Choose one, such as model: {path.name}/{found[0].name}.",
            code="several-graphs",
            file=str(path),
        )
    return (named or found)[0]


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
    found = {graph.stem: graph for graph in _onnx_files(path)}
    parts = required_graphs(found)
    if isinstance(parts, str):
        raise InputError(f"{path}: {parts}.", code="incomplete-generator", file=str(path))
    return {name: found[name] for name in parts[1]}


def inspect_graph(path: Path) -> GraphValidation:
    """Validate the graph in the file `path` in a separate process."""
    from smelt.runtime.third_party.validate_graph import validate_graph

    return validate_graph(path)


def find_tokenizer_folder(graph: Path, tokenizer: Path | None) -> Path | None:
    """Return the folder with config and tokenizer: `tokenizer` if given, else the graph's folder; or None."""
    if tokenizer is not None:
        return tokenizer
    places: Sequence[Path] = (
        graph.parent,
        *([graph.parent.parent] if graph.parent.name == _ONNX_FOLDER else []),
    )
    return next((place for place in places if (place / "config.json").is_file()), None)


def _onnx_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{ONNX_SUFFIX}")) or sorted((folder / _ONNX_FOLDER).glob(f"*{ONNX_SUFFIX}"))
