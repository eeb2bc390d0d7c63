"""Copy the files that are not graphs, and the details of the model, from one artifact to the next."""

from __future__ import annotations

import shutil
from pathlib import Path

from smelt.core.artifact import Artifact
from smelt.core.stage import Context

_GRAPH_SUFFIXES = (".onnx", ".onnx_data")
_COPIED_DETAILS = (
    "foreign",
    "target",
    "dtype",
    "opset",
    "producer",
    "parameters",
    "scheme",
    "tokenizer",
    "licence",
)


def ordered_graphs(src: Artifact) -> list[Path]:
    """Return the graphs of `src` in the order in which they are called."""
    return sorted(
        (src.path / name for name in src.manifest.files if name.endswith(_GRAPH_SUFFIXES[0])),
        key=lambda path: not path.stem.startswith("encoder"),
    )


def copy_model_files(src: Artifact, ctx: Context) -> None:
    """Copy config, tokenizer and signature of `src` into `ctx.out`, and its details."""
    for name in src.manifest.files:
        if not name.endswith(_GRAPH_SUFFIXES):
            (ctx.out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(src.path / name, ctx.out / name)
    ctx.details.update(
        {word: src.manifest.details[word] for word in _COPIED_DETAILS if word in src.manifest.details}
    )


def copy_graphs(src: Artifact, ctx: Context) -> None:
    """Copy the graph of `src` and its weights without changes."""
    for name in src.manifest.files:
        if name.endswith(_GRAPH_SUFFIXES):
            shutil.copyfile(src.path / name, ctx.out / name)
