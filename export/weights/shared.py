"""One file of weights for several graphs: what two of them hold lies there once.

A translator's encoder, its decoder and the graph of its whole generation hold the same matrices. Graphs that
name places of one file share them on disk, and ONNX Runtime maps the file instead of reading it.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smelt.export.graph_files import LEAST_OUTSIDE, aligned, data_file, read_graph, tensors_of

SHARED = "model.onnx_data"


def share_weights(paths: Sequence[Path], name: str = SHARED, weights: Path | None = None) -> int:
    """Move the weights of the graphs `paths`, of one folder, into its file `name`; return its bytes.

    The graphs are written anew; data files of their own are gone after it. `weights`: the folder in which
    what the graphs do not hold themselves lies now; None: beside them.

    Raises:
        RunError: a graph cannot be read.
    """
    import onnx

    folder = paths[0].parent
    made = folder / f"{name}.part"
    try:
        models, size = _gathered(paths, made, name, weights or folder)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
    for path in paths:
        data_file(path).unlink(missing_ok=True)
    made.replace(folder / name)
    for path, model in zip(paths, models, strict=True):
        onnx.save(model, path)
    return size


def _gathered(paths: Sequence[Path], made: Path, name: str, weights: Path) -> tuple[list[Any], int]:
    """Write the weights of all graphs to `made`; return the graphs, which name `name`, its bytes."""
    places: dict[bytes, int] = {}
    models = []
    with made.open("wb") as out:
        for path in paths:
            models.append(model := read_graph(path, values=False))
            for tensor in tensors_of(model.graph):
                _move(tensor, weights, out, places, name)
        return models, out.tell()


def _move(tensor: Any, folder: Path, out: Any, places: dict[bytes, int], name: str) -> None:
    """Write the values of `tensor` to `out`, where they are not there yet; let it name their place in `name`.

    `folder`: where its values are, if it does not hold them.
    """
    from onnx.external_data_helper import set_external_data

    values = _values(tensor, folder)
    if len(values) < LEAST_OUTSIDE:
        return
    key = hashlib.sha256(values).digest()
    if key not in places:
        begin = aligned(out.tell(), len(values))
        out.write(b"\0" * (begin - out.tell()))
        out.write(values)
        places[key] = begin
    size = len(values)
    tensor.raw_data = b"0"  # set_external_data wants to see some
    set_external_data(tensor, name, offset=places[key], length=size)
    tensor.ClearField("raw_data")


def _values(tensor: Any, folder: Path) -> Any:
    """Return the bytes of a tensor; those that lie outside are looked at, not read."""
    from onnx.external_data_helper import ExternalDataInfo, uses_external_data

    if not uses_external_data(tensor):
        return tensor.raw_data
    info = ExternalDataInfo(tensor)
    with (folder / info.location).open("rb") as stream:
        whole = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    begin = info.offset or 0
    return whole[begin : begin + info.length] if info.length else whole[begin:]
