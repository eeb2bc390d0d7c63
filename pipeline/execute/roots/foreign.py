"""A graph that somebody else exported, as the first artifact of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.artifact import MANIFEST, Artifact, Manifest
from smelt.core.data import CUSTOM, Split
from smelt.core.files import hash_of, read_json, sha256_of, write_json
from smelt.core.labels import SINGLE
from smelt.core.messages import Message, warning

if TYPE_CHECKING:
    from smelt.execute.head import Head
    from smelt.execute.steps import Workshop
    from smelt.look.foreign import ForeignModel
    from smelt.runtime.foreign.signature import Signature

# Raised whenever the same files would be taken in another way.
_VERSION = 5
_DECODING = "generation_config.json"


def begin_with_graph(
    shop: Workshop, model: ForeignModel, data: Mapping[str, Split], fresh: bool, head: Head | None = None
) -> tuple[Artifact, bool]:
    """Bring the graph of `model` into the store; return it and whether it was there already.

    head: of a graph that reads texts, what the task adds to it.

    Raises:
        InputError: it cannot be run on the first rows, or its files changed since they were looked at.
    """
    graphs = list(model.parts.values()) or [model.file]
    files = [*graphs, *(model.file.parent / name for name in model.files)]
    said: dict[str, Any] = {
        "stage": "model",
        "version": _VERSION,
        "graph": [sha256_of(path) for path in files],
        "task": shop.task,
    }
    axes = {value.name: value.axis for value in (*model.signature.inputs, *model.signature.outputs)}
    if shop.task == CUSTOM:
        said["axes"] = axes
    if head is not None:
        labels = head.labels and head.labels[0]
        said |= {"texts": _hashes(model), "problem_type": labels, "seed": shop.seed, **head.key}
    key = hash_of(said)

    def make(space: Path) -> Artifact:
        from smelt.runtime.foreign.take import NAME
        from smelt.runtime.foreign.vectors import make_vectors

        out = space / "out"
        out.mkdir()
        details: dict[str, Any] = {"foreign": True, "target": "ort-cpu", **model.details}
        notes: list[Message] = []
        if model.parts:
            _take_parts(model, out)
            details["parameters"] = _parameters_in(out)
        else:
            notes += _take(model, data["test"], out)
        if head is not None and head.sentences is not None:
            make_vectors(out / NAME, head.sentences)
        notes += [] if head is None else _take_texts(model, head, data, out, details)
        manifest = Manifest(
            key=key,
            format="onnx",
            task=shop.task,
            stage="model",
            settings={},
            seed=shop.seed,
            parent=None,
            versions=dict(shop.versions),
            details=details,
            warnings=notes,
        )
        return shop.store.commit(out, manifest, replace=fresh)

    return shop.obtain("model", key, fresh, make)


def _take(model: ForeignModel, rows: Split, out: Path) -> list[Message]:
    """Copy the graph into `out` and run it on the first rows; return what is doubtful of its outputs."""
    from smelt.export.foreign.apart import batch_warnings
    from smelt.runtime.foreign.signature import write_signature
    from smelt.runtime.foreign.take import take_graph
    from smelt.runtime.foreign.trial import try_graph

    graph = take_graph(model.file, out, outside=bool(model.files))
    size = model.signature.batch or 1
    if rows.arrays is None:
        try_graph(graph, _of_ones(model.signature, size), str(model.file))
        return []
    write_signature(out, model.signature)
    try_graph(graph, model.signature.feeds(rows.arrays.filled(size), 0, size), str(model.file))
    return batch_warnings(graph, model.signature, rows.arrays, model.details)


def _take_parts(model: ForeignModel, out: Path) -> None:
    """Write the graphs of a model that generates into `out`, and how it decodes."""
    import shutil

    from smelt.runtime.foreign.generators.take import take_generator

    assert model.texts is not None
    take_generator(model.parts, read_json(model.texts / "config.json"), out)
    if (model.texts / _DECODING).is_file():
        shutil.copyfile(model.texts / _DECODING, out / _DECODING)


def _parameters_in(out: Path) -> int:
    """Return how many numbers the graphs in `out` hold, each graph its own, as the bytes of its file do."""
    import onnx

    from smelt.runtime.foreign.tensors import parameters

    graphs = sorted(out.glob("*.onnx"))
    return sum(parameters(onnx.load(str(path), load_external_data=False)) for path in graphs)


def _of_ones(signature: Signature, rows: int) -> dict[str, Any]:
    """Return ids that every vocabulary has; what is wrong with a graph rarely depends on them."""
    import numpy as np

    found = {}
    for value in signature.inputs:
        rest = [size if isinstance(size, int) else 8 for size in (value.shape or (rows, 8))[1:]]
        found[value.name] = np.ones([rows, *rest], value.dtype)
    return found


def _hashes(model: ForeignModel) -> dict[str, str]:
    """Return what decides how texts are read."""
    assert model.texts is not None
    read = (".json", ".txt", ".model", ".spm")
    files = (path for path in sorted(model.texts.iterdir()) if path.suffix in read and path.name != MANIFEST)
    return {path.name: sha256_of(path) for path in files}


def _take_texts(
    model: ForeignModel, head: Head, data: Mapping[str, Split], out: Path, details: dict[str, Any]
) -> list[Message]:
    """Copy config and tokenizer into `out`, made so that all after it reads texts as the task wants."""
    import shutil

    from smelt.export.tokenizer.tokenizer_export import export_tokenizer
    from smelt.runtime.models.checkpoint import copy_tokenizer, load_tokenizer
    from smelt.runtime.models.import_model import make_embedder
    from smelt.runtime.text.write_rules import write_text_rules

    assert model.texts is not None
    shutil.copyfile(model.texts / "config.json", out / "config.json")
    copy_tokenizer(model.texts, out)
    problem = head.labels[0] if head.labels else None
    config = read_json(out / "config.json")
    if problem not in (None, SINGLE) and config.get("problem_type") is None:
        write_json(out / "config.json", config | {"problem_type": problem})
    if head.sentences is not None:
        make_embedder(out, head.sentences)
    write_text_rules(out, head.rules)
    found = export_tokenizer(load_tokenizer(model.texts), model.texts, out, data)
    details["tokenizer"] = found.reader
    slow = f"texts are read by transformers, which takes seconds to import: {found.reason}"
    return [warning("slow-tokenizer", slow)] if found.reason else []
