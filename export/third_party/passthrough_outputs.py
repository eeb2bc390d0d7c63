"""Remove outputs of a graph that are its inputs: ONNX Runtime's quantizer cannot sort a graph with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PassthroughOutputs = list[tuple[int, Any]]


def remove_passthrough_outputs(path: Path, folder: Path) -> tuple[Path, PassthroughOutputs]:
    """Return the graph in `path`, or a copy in `folder` without outputs that are inputs, and these.

    Returns:
        The file, and for each removed output its index and onnx.ValueInfoProto. If a graph has no other
        outputs, none are removed.
    """
    from smelt.export.graph_files import read_graph, write_graph

    def passed_in(model: Any) -> PassthroughOutputs:
        given = {value.name for value in model.graph.input}
        return [(at, value) for at, value in enumerate(model.graph.output) if value.name in given]

    bare = read_graph(path, values=False)
    if not passed_in(bare) or len(passed_in(bare)) == len(bare.graph.output):
        return path, []
    model = read_graph(path)
    passed = passed_in(model)
    kept = [value for value in model.graph.output if value.name not in {one.name for _, one in passed}]
    passed = [(at, _copy_value(value)) for at, value in passed]
    kept = [_copy_value(value) for value in kept]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    folder.mkdir(exist_ok=True)
    write_graph(model, folder / path.name)
    return folder / path.name, passed


def restore_passthrough_outputs(model: Any, passed: PassthroughOutputs) -> Any:
    """Return the model with the removed outputs at their original indices."""
    for at, value in passed:
        model.graph.output.insert(at, value)
    return model


def _copy_value(value: Any) -> Any:
    from onnx import ValueInfoProto

    made = ValueInfoProto()
    made.CopyFrom(value)
    return made
