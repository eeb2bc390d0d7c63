"""A graph that somebody else exported, as the first artifact of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.artifact import Artifact, Manifest
from smelt.core.data import Split
from smelt.core.files import hash_of, sha256_of

if TYPE_CHECKING:
    from smelt.execute.steps import Workshop
    from smelt.look.foreign import ForeignModel

# Raised whenever the same files would be taken in another way.
_VERSION = 1


def begin_with_graph(
    shop: Workshop, model: ForeignModel, data: Mapping[str, Split], fresh: bool
) -> tuple[Artifact, bool]:
    """Bring the graph of `model` into the store; return it and whether it was there already.

    Raises:
        InputError: it cannot be run on the first rows, or its files changed since they were looked at.
    """
    files = [model.file, *(model.file.parent / name for name in model.files)]
    said: dict[str, Any] = {
        "stage": "model",
        "version": _VERSION,
        "graph": [sha256_of(path) for path in files],
        "task": shop.task,
    }
    key = hash_of(said)

    def make(space: Path) -> Artifact:
        out = space / "out"
        out.mkdir()
        _take(model, data["test"], out)
        manifest = Manifest(
            key=key,
            format="onnx",
            task=shop.task,
            stage="model",
            settings={},
            seed=shop.seed,
            parent=None,
            versions=dict(shop.versions),
            facts={"foreign": True, "target": "ort-cpu", **model.facts},
        )
        return shop.store.commit(out, manifest, replace=fresh)

    return shop.obtain("model", key, fresh, make)


def _take(model: ForeignModel, rows: Split, out: Path) -> None:
    """Copy the graph into `out` and run it there on the first rows."""
    from smelt.runtime.foreign.signature import write_signature
    from smelt.runtime.foreign.take import take_graph
    from smelt.runtime.foreign.trial import try_graph

    graph = take_graph(model.file, out, outside=bool(model.files))
    write_signature(out, model.signature)
    assert rows.arrays is not None
    size = model.signature.batch or 1
    try_graph(graph, model.signature.feeds(rows.arrays, 0, size), str(model.file))
