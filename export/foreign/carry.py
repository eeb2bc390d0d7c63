"""What goes along from graph to graph: all files that are no graph, and what is known of the model."""

from __future__ import annotations

import shutil
from pathlib import Path

from smelt.core.artifact import Artifact
from smelt.core.stage import Context

_GRAPHS = (".onnx", ".onnx_data")
_KEPT = ("foreign", "target", "dtype", "opset", "producer", "parameters", "scheme", "tokenizer", "licence")


def graphs_in(src: Artifact) -> list[Path]:
    """Return the graphs of `src` in the order in which they are called."""
    return sorted(
        (src.path / name for name in src.manifest.files if name.endswith(_GRAPHS[0])),
        key=lambda path: not path.stem.startswith("encoder"),
    )


def carry(src: Artifact, ctx: Context) -> None:
    """Copy config, tokenizer and signature of `src` into `ctx.out`, and its details."""
    for name in src.manifest.files:
        if not name.endswith(_GRAPHS):
            (ctx.out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(src.path / name, ctx.out / name)
    ctx.details.update({word: src.manifest.details[word] for word in _KEPT if word in src.manifest.details})


def copy_graphs(src: Artifact, ctx: Context) -> None:
    """Copy the graph of `src` and its weights as they are."""
    for name in src.manifest.files:
        if name.endswith(_GRAPHS):
            shutil.copyfile(src.path / name, ctx.out / name)
