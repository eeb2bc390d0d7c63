"""Graphs for TensorRT of tiny models of several families, in float32 and in float16."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import exports
from exports import ROWS, context

__all__ = ["GRAPHS", "ROWS", "context", "copy", "exported", "planned"]

GRAPHS = {"marian": 2, "t5": 2, "roberta": 1, "embedder": 1, "gpt2": 1, "llama": 1}
"""Families, and how many graphs each leaves as."""


def exported(family: str) -> Path:
    """Return a folder with the fp32 graphs of a family, its config and tokenizer; read only."""
    return exports.exported(family, "fp32", "tensorrt").folder


def copy(family: str, out: Path, half: bool = False) -> Path:
    """Copy the graphs and all else to the new folder `out`; with `half` in fp16, as `dtype: fp16` does."""
    import onnx

    from smelt.export.precision.narrow import narrow

    shutil.copytree(exported(family), out)
    for path in sorted(out.glob("*.onnx")) if half else ():
        model = onnx.load(path)
        narrow(model, path.stem)
        onnx.save(model, path)
    return out


def planned(family: str, folder: Path) -> dict[Path, Any]:
    """Return the graphs that passed the preflight, with the shapes to build each for."""
    from smelt.export.tensorrt.stage import TensorrtSettings, dimension_ranges, plan_graphs

    ctx = context(folder, exports.FAMILIES[family][1])
    ranges, limit = dimension_ranges(folder, TensorrtSettings(max_batch_size=4, max_new_tokens=12), ctx)
    shapes = plan_graphs(folder, ranges, limit, ctx.warnings)
    assert ctx.warnings == []
    return shapes
