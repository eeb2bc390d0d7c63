"""Build a graph that contains everything: weights, the generation loop, and the generation settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.export.graph_files import iter_initializers, read_graph
from smelt.runtime.backends.backend import BEAM_SEARCH_GRAPH, GREEDY_GRAPH
from smelt.runtime.generate.generation_config import GenerationConfig, resolve_generation
from smelt.runtime.generate.graph_generation import generation_feeds, graph_supports
from smelt.runtime.runner import read_model_files

# Protobuf's limit for one message is 2 GiB; the rest is for nodes and tokenizer
MAX_GRAPH_BYTES = 2**31 - 64 * 2**20


def generation_config_of(folder: Path, generation: Mapping[str, Any]) -> GenerationConfig:
    """Return the generation config of the model in `folder` with the settings `generation` of a recipe.

    Raises:
        InputError: a generation graph does not support it.
    """
    from smelt.runtime.generate.settings import GenerationSettings

    model: Any = read_model_files(folder)
    decoding = resolve_generation(GenerationSettings(**generation), model)
    if not graph_supports(decoding):
        raise InputError(
            "its generation settings use sampling or bad_words_ids of several tokens; the generation graph"
            " supports neither.",
            code="unsupported-generation-setting",
        )
    return decoding


def select_graph(folder: Path, decoding: GenerationConfig | None) -> Path:
    """Return the graph in `folder` for the package.

    decoding: of models that generate; None for classifiers and embedders.

    Raises:
        InputError: there is none, or its weights are too large for one file.
    """
    name = "model" if decoding is None else (BEAM_SEARCH_GRAPH if decoding.num_beams > 1 else GREEDY_GRAPH)
    path = folder / f"{name}.onnx"
    if not path.is_file():
        raise InputError(
            f"it has no {path.name}: the graph '{name}' is exported only for target ort-cpu, and not with"
            " `generation_graph: false`. Export it again with `- onnx: {target: ort-cpu}`.",
            code="missing-graph",
            file=path.name,
        )
    if (size := _graph_bytes(path)) > MAX_GRAPH_BYTES:
        raise InputError(
            f"{path.name} has {size:,} bytes of weights, and one ONNX file holds at most 2 GB (protobuf's"
            " limit). Use --format standalone, which stores weights next to the graph.",
            code="graph-too-large",
            file=path.name,
        )
    return path


def self_contained_graph(path: Path, decoding: GenerationConfig | None, vocabulary: int) -> Any:
    """Return the graph `path` as an onnx.ModelProto with all weights inside, which generates as `decoding`.

    Args:
        path: a path that `select_graph` returned.
        decoding: defaults of the generation inputs; None if there are none.
        vocabulary: size of the output layer.
    """
    from onnx import numpy_helper

    model = read_graph(path)
    for tensor in iter_initializers(model.graph):  # the values are inline now
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
    if decoding is not None:
        defaults = generation_feeds(decoding, 1, vocabulary)
        for tensor in model.graph.initializer:
            if tensor.name in defaults:
                held = numpy_helper.to_array(tensor)
                value = defaults[tensor.name].astype(held.dtype)
                tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    return model


def _graph_bytes(path: Path) -> int:
    """Return the bytes of a graph with its weights."""
    from onnx.external_data_helper import ExternalDataInfo, uses_external_data

    model = read_graph(path, values=False)
    outside = [tensor for tensor in iter_initializers(model.graph) if uses_external_data(tensor)]
    return path.stat().st_size + sum(ExternalDataInfo(tensor).length or 0 for tensor in outside)
