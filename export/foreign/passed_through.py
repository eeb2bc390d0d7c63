"""Outputs of a graph that are its inputs: ONNX Runtime's quantizer finds no order for a graph with such."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Passed = list[tuple[int, Any]]


def take_out(path: Path, folder: Path) -> tuple[Path, Passed]:
    """Return the graph in `path`, or a copy in `folder` without the outputs that are inputs; and these.

    Returns:
        The file; of each output that was taken out its place and its onnx.ValueInfoProto. None are taken out
        of a graph that has no others.
    """
    from smelt.export.graph_files import read_graph, write_graph

    def passed_in(model: Any) -> Passed:
        given = {value.name for value in model.graph.input}
        return [(at, value) for at, value in enumerate(model.graph.output) if value.name in given]

    bare = read_graph(path, values=False)
    if not passed_in(bare) or len(passed_in(bare)) == len(bare.graph.output):
        return path, []
    model = read_graph(path)
    passed = passed_in(model)
    kept = [value for value in model.graph.output if value.name not in {one.name for _, one in passed}]
    passed = [(at, _copied(value)) for at, value in passed]
    kept = [_copied(value) for value in kept]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    folder.mkdir(exist_ok=True)
    write_graph(model, folder / path.name)
    return folder / path.name, passed


def put_back(model: Any, passed: Passed) -> Any:
    """Return the model with the outputs that were taken out, where they were."""
    for at, value in passed:
        model.graph.output.insert(at, value)
    return model


def _copied(value: Any) -> Any:
    from onnx import ValueInfoProto

    made = ValueInfoProto()
    made.CopyFrom(value)
    return made
