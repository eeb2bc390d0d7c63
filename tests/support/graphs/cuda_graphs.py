"""Graphs of tiny models for ort-cuda in all dtypes, from one trace of each model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.graphs import graph_exports
from tests.support.models import tiny
from tests.support.shared_folders import make_once

DTYPES = ("fp32", "fp16", "bf16")


def cuda_graphs(family: str, cache_length: int | None = None) -> dict[str, Path]:
    """Return the folder of graphs in each of DTYPES of `graph_exports.FAMILIES[family]`; read only."""
    name = f"cuda-graphs-{family}{'' if cache_length is None else f'-{cache_length}'}"
    folder = make_once(name, lambda new: _export(family, new, cache_length))
    return {dtype: folder / dtype for dtype in DTYPES}


def _export(family: str, folder: Path, cache_length: int | None) -> None:
    """Export in fp16; keep a copy of the graphs before the conversion, and one in bf16."""
    from smelt.export import half_graphs
    from smelt.export.onnx_stage import Onnx
    from smelt.export.settings import OnnxSettings
    from smelt.stage import Context

    make, task = graph_exports.FAMILIES[family]
    source = make(folder / "model")
    graph_exports.randomize_biases(source)  # zeros would be removed from a graph
    convert = half_graphs.convert_graphs_to_half

    def convert_copies(
        graphs: Any, homes: Any, target: Any, dtype: str, references: Any, ctx: Context
    ) -> dict[str, set[str]]:
        bf16 = graph_exports.make_context(folder / "bf16", task)
        for out in (folder / "fp32", bf16.out):
            shutil.copytree(ctx.out, out, dirs_exist_ok=True)
        convert(graphs, homes, target, "bf16", (), bf16)
        return convert(graphs, homes, target, dtype, references, ctx)

    ctx = graph_exports.make_context(folder / "fp16", task)
    # the opset of bf16
    settings = OnnxSettings(
        target="ort-cuda", dtype="fp16", opset=22, generation_graph=False, cache_length=cache_length
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(half_graphs, "convert_graphs_to_half", convert_copies)
        Onnx()(tiny.as_artifact(source, task), settings, ctx)
