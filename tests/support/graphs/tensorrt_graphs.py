"""Graphs for TensorRT of tiny models of several families, in float32 and in float16."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from smelt.models.families.registry import FAMILIES as REGISTERED
from tests.support.graphs import graph_exports
from tests.support.graphs.graph_exports import ROWS, make_context

__all__ = [
    "COMMON_FAMILIES", "CONVOLUTIONAL", "GRAPH_COUNTS", "ROWS", "copy_graphs", "exported_folder",
    "graphs_with_shapes", "make_context",
]  # fmt: skip

GRAPH_COUNTS = {
    name: 2 if name in REGISTERED and REGISTERED[name].architecture == "seq2seq" else 1
    for name in graph_exports.FAMILIES
}
"""Families, and how many graphs each leaves as."""
CONVOLUTIONAL = {name for name, family in REGISTERED.items() if not family.stacks({})}
"""Those of convolutions, whose int8 has uint8 activations, and which have no blocks to quantize."""
COMMON_FAMILIES = ("marian", "t5", "roberta", "embedder", "gpt2", "llama")
"""Those that are taken without SMELT_MATRIX=all: one of each kind, and two where what is fed differs."""


def exported_folder(family: str) -> Path:
    """Return a folder with the fp32 graphs of a family, its config and tokenizer; read only."""
    return graph_exports.exported_graphs(family, "fp32", "tensorrt").folder


def copy_graphs(family: str, out: Path, half: bool = False) -> Path:
    """Copy the graphs and all else to the new folder `out`; with `half` in fp16, as `dtype: fp16` does."""
    import onnx

    from smelt.export.convert_to_half import convert_to_half

    shutil.copytree(exported_folder(family), out)
    for path in sorted(out.glob("*.onnx")) if half else ():
        model = onnx.load(path)
        convert_to_half(model, path.stem)
        onnx.save(model, path)
    return out


def graphs_with_shapes(family: str, folder: Path, **more: Any) -> dict[Path, Any]:
    """Return the graphs that passed the preflight, with the shapes to build each for; more: settings."""
    from smelt.export.settings import TensorrtSettings
    from smelt.export.tensorrt.profiles import profile_ranges
    from smelt.export.tensorrt.stage import plan_graphs

    ctx = make_context(folder, graph_exports.FAMILIES[family][1])
    settings = TensorrtSettings.model_validate({"max_batch_size": 4, "max_new_tokens": 12} | more)
    profiles, limit = profile_ranges(folder, settings, ctx)
    shapes = plan_graphs(folder, profiles, limit, ctx.warnings)
    # `copy` narrows the norms too, which no export does
    assert [warning for warning in ctx.warnings if warning.code != "tensorrt-norm-in-half"] == []
    return shapes
