"""Move the weights of several graphs to one file, in which shared weights are stored once.

A translation model's encoder, decoder and generation graph have the same matrices. Graphs that refer to one
file share them on disk, and ONNX Runtime maps the file instead of reading it.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smelt.export.graph_files import (
    MIN_EXTERNAL_BYTES,
    aligned_offset,
    external_data_path,
    iter_initializers,
    read_graph,
)

SHARED_WEIGHTS_FILE = "model.onnx_data"


def share_weights(paths: Sequence[Path], name: str = SHARED_WEIGHTS_FILE, weights: Path | None = None) -> int:
    """Move the weights of the graphs `paths`, in one folder, to its file `name`; return its bytes.

    The graphs are written again and their own data files are removed. `weights`: the folder of external
    weights; None: that of the graphs.

    Raises:
        RunError: a graph cannot be read.
    """
    import onnx

    folder = paths[0].parent
    made = folder / f"{name}.part"
    try:
        models, size = _gather_weights(paths, made, name, weights or folder)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
    for path in paths:
        external_data_path(path).unlink(missing_ok=True)
    made.replace(folder / name)
    for path, model in zip(paths, models, strict=True):
        onnx.save(model, path)
    return size


def _gather_weights(paths: Sequence[Path], made: Path, name: str, weights: Path) -> tuple[list[Any], int]:
    """Write the weights of all graphs to `made`; return the graphs, which refer to `name`, and its bytes."""
    places: dict[bytes, int] = {}
    models = []
    with made.open("wb") as out:
        for path in paths:
            models.append(model := read_graph(path, values=False))
            for tensor in iter_initializers(model.graph):
                _move_tensor(tensor, weights, out, places, name)
        return models, out.tell()


def _move_tensor(tensor: Any, folder: Path, out: Any, places: dict[bytes, int], name: str) -> None:
    """Write the values of `tensor` to `out` unless they are there already; refer to their offset in `name`.

    `folder`: of its values, if they are external.
    """
    from onnx.external_data_helper import set_external_data

    values = _tensor_bytes(tensor, folder)
    if len(values) < MIN_EXTERNAL_BYTES:
        return
    key = hashlib.sha256(values).digest()
    if key not in places:
        begin = aligned_offset(out.tell(), len(values))
        out.write(b"\0" * (begin - out.tell()))
        out.write(values)
        places[key] = begin
    size = len(values)
    tensor.raw_data = b"0"  # set_external_data requires raw data
    set_external_data(tensor, name, offset=places[key], length=size)
    tensor.ClearField("raw_data")


def _tensor_bytes(tensor: Any, folder: Path) -> Any:
    """Return the bytes of a tensor; external ones are memory-mapped."""
    from onnx.external_data_helper import ExternalDataInfo, uses_external_data

    if not uses_external_data(tensor):
        return tensor.raw_data
    info = ExternalDataInfo(tensor)
    with (folder / info.location).open("rb") as stream:
        whole = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    begin = info.offset or 0
    return whole[begin : begin + info.length] if info.length else whole[begin:]
