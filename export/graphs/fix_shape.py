"""Give the inputs of graphs to export fixed sizes (`onnx: {batch_size: 1, sequence_length: 128}`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from smelt.export.graphs.attention import GraphSpec
from smelt.runtimes.fixed_shapes import FixedShape


def fix_shapes(graphs: Sequence[GraphSpec], shape: FixedShape) -> list[GraphSpec]:
    """Return graphs of one pass whose inputs have the fixed sizes of `shape`; other sizes stay dynamic."""
    return [_fix_shape(graph, shape) for graph in graphs] if shape else list(graphs)


def _fix_shape(graph: GraphSpec, shape: FixedShape) -> GraphSpec:
    sizes = {"batch": shape.batch_size, "length": shape.sequence_length}
    inputs = []
    for example, axes in zip(graph.inputs, graph.dynamic_axes, strict=True):
        dims = [sizes.get(axes.get(axis, "")) or size for axis, size in enumerate(example.shape)]
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randn(dims, generator=generator) if example.is_floating_point() else None
        inputs.append(example.new_ones(dims) if pixels is None else pixels)
    dynamic_axes = tuple(
        {axis: name for axis, name in axes.items() if not sizes.get(name)} or None
        for axes in graph.dynamic_axes
    )
    return replace(graph, inputs=tuple(inputs), dynamic_axes=dynamic_axes)
