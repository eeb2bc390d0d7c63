"""The graph of a model with everything inside: weights, the loop over tokens, and how it searches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.export.graph_files import read_graph, tensors_of
from smelt.runtime.backends.backend import BEAMS, GREEDY
from smelt.runtime.generate.decoding import Decoding, settle
from smelt.runtime.generate.in_graph import does, feeds_of
from smelt.runtime.runner import read_files

# Protobuf's limit for one message is 2 GiB; what is left is for nodes and tokenizer
LARGEST = 2**31 - 64 * 2**20


def decoding_of(folder: Path, generation: Mapping[str, Any]) -> Decoding:
    """Return how the model in `folder` generates with the settings `generation` of a recipe.

    Raises:
        InputError: a graph with the loop inside cannot do that.
    """
    from smelt.runtime.generate.settings import Generation

    model: Any = read_files(folder)
    decoding = settle(Generation(**generation), model)
    if not does(decoding):
        raise InputError(
            "its generation draws at random, or knows bad words of several tokens; the graph that holds the"
            " loop does neither.",
            code="unsupported-generation-setting",
        )
    return decoding


def graph_for(folder: Path, decoding: Decoding | None) -> Path:
    """Return the graph in `folder` that is to be the one file.

    decoding: of models that generate; None for classifiers and vectors.

    Raises:
        InputError: there is none, or its weights are too many for one file.
    """
    name = "model" if decoding is None else (BEAMS if decoding.num_beams > 1 else GREEDY)
    path = folder / f"{name}.onnx"
    if not path.is_file():
        raise InputError(
            f"it has no {path.name}; that was left out with `generation_graph: false`, or is for {name}"
            " alone. Export it again with `- onnx: {target: ort-cpu}`.",
            code="missing-graph",
            file=path.name,
        )
    if (size := _bytes_of(path)) > LARGEST:
        raise InputError(
            f"{path.name} holds {size:,} bytes of weights, and one ONNX file holds no more than 2 GB"
            " (protobuf's limit). The form standalone keeps them beside the graph.",
            code="graph-too-large",
            file=path.name,
        )
    return path


def whole_graph(path: Path, decoding: Decoding | None, vocabulary: int) -> Any:
    """Return the graph `path` as an onnx.ModelProto with all weights inside, which searches as `decoding`.

    Args:
        path: one that `graph_for` gave.
        decoding: what the inputs that say how to search get as defaults; None where there are none.
        vocabulary: of the output layer.
    """
    from onnx import numpy_helper

    model = read_graph(path)
    for tensor in tensors_of(model.graph):  # the values are here now
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
    if decoding is not None:
        defaults = feeds_of(decoding, 1, vocabulary)
        for tensor in model.graph.initializer:
            if tensor.name in defaults:
                held = numpy_helper.to_array(tensor)
                value = defaults[tensor.name].astype(held.dtype)
                tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    return model


def _bytes_of(path: Path) -> int:
    """Return the bytes of a graph with its weights."""
    from onnx.external_data_helper import ExternalDataInfo, uses_external_data

    model = read_graph(path, values=False)
    outside = [tensor for tensor in tensors_of(model.graph) if uses_external_data(tensor)]
    return path.stat().st_size + sum(ExternalDataInfo(tensor).length or 0 for tensor in outside)
