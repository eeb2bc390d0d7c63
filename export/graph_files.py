"""Read and write ONNX graphs, with weights inline or in an external data file, and store weights only once.

A protobuf holds at most 2 GB. Above `MAX_INLINE_BYTES` the weights of `NAME.onnx` are in one file,
`NAME.onnx_data`, the name that Optimum and transformers.js use; runtimes find it next to the graph. All code
that rewrites a graph calls `write_graph`, which also removes a data file that the graph no longer uses.

`deduplicate_matrices` merges equal matrices of a graph. Layers that share a weight [N, K] have one tensor in
torch; for each of them torch's optimizer computes the transpose [K, N], which ONNX multiplies with, again and
stores it each time.

`share_weights` moves the weights of several graphs to one file. A translation model's encoder, decoder and
generation graph have the same matrices. Graphs that refer to one file share them on disk, and ONNX Runtime
maps the file instead of reading it.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smelt.runtimes.graph_walk import external_locations, iter_initializers

# of weights, in one file with the graph; above it they are external
MAX_INLINE_BYTES = 1_500_000_000
# smaller tensors are always inline: shapes and axes, which shape inference and preflights read
MIN_EXTERNAL_BYTES = 1024
# Runtimes map the data file into memory; the ONNX documentation requires whole pages there.
_LARGE, _PAGE, _LINE = 1 << 20, 4096, 64


def external_data_path(path: Path) -> Path:
    """Return the path of the external weights of the graph `path`."""
    return path.with_name(f"{path.name}_data")


def has_external_data(model: Any) -> bool:
    """Return whether an onnx.ModelProto, as it was read, has external weights."""
    return bool(external_data_names(model))


def external_data_names(model: Any) -> set[str]:
    """Return the names of the external data files of an onnx.ModelProto, as it was read."""
    return external_locations(model)


def link_external_data(model: Any, source: Path, folder: Path) -> None:
    """Hard-link the external data files of `model` from the folder `source` into `folder`.

    Files that exist are kept. They are copied if the file system does not support hard links.
    """
    for name in sorted(external_data_names(model)):
        target = folder / name
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / name, target)
        except OSError:
            shutil.copyfile(source / name, target)


def read_graph(path: Path, values: bool = True) -> Any:
    """Read the graph in `path` as an onnx.ModelProto; without `values`, external weights are not loaded.

    Raises:
        RunError: the file or its data file is damaged.
    """
    import onnx

    from smelt.core.errors import RunError

    try:
        return onnx.load(path, load_external_data=values)
    except Exception as error:  # protobuf and onnx raise several classes for the same error
        raise RunError(
            f"{path}: not an ONNX file that can be read: {error}", code="damaged-file", file=str(path)
        ) from error


def graph_bytes(path: Path) -> int:
    """Return the bytes of the graph `path` and of its external data file."""
    return sum(file.stat().st_size for file in (path, external_data_path(path)) if file.is_file())


def inline_weight_bytes(model: Any) -> int:
    """Return the bytes of the inline weights of an onnx.ModelProto."""
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer)


def write_graph(model: Any, path: Path) -> None:
    """Write an onnx.ModelProto to `path` and replace an existing file.

    Weights that are moved to the data file are removed from `model`, which then holds only their offsets. A
    model that was read without values keeps its data file.
    """
    import onnx

    if has_external_data(model):
        onnx.save(model, path)
        return
    external_data_path(path).unlink(missing_ok=True)  # onnx would append to it
    if inline_weight_bytes(model) > MAX_INLINE_BYTES:
        _mark_external(model, external_data_path(path).name)
    onnx.save(model, path)


def set_input_defaults(path: Path, values: Mapping[str, int]) -> None:
    """Make int64 scalar inputs of the graph `path` optional, with these default values."""
    import numpy as np
    from onnx import numpy_helper

    model = read_graph(path, values=False)
    constants = [numpy_helper.from_array(np.array(v, dtype=np.int64), name) for name, v in values.items()]
    model.graph.initializer.extend(constants)
    write_graph(model, path)


def _mark_external(model: Any, location: str) -> None:
    """Assign the large tensors of `model` to the file `location`, each at an aligned offset."""
    from onnx.external_data_helper import set_external_data

    end = 0
    for tensor in model.graph.initializer:
        size = len(tensor.raw_data)
        if size >= MIN_EXTERNAL_BYTES:
            begin = aligned_offset(end, size)
            set_external_data(tensor, location, offset=begin, length=size)
            end = begin + size


def aligned_offset(end: int, size: int) -> int:
    """Return the offset of a tensor of `size` bytes in a data file that ends at `end`."""
    boundary = _PAGE if size >= _LARGE else _LINE
    return -(-end // boundary) * boundary


_PROBE_ELEMENTS = 256  # bytes that distinguish most matrices


def deduplicate_matrices(model: Any) -> int:
    """Merge equal matrices of an onnx.ModelProto, in place; return the number of removed copies.

    Vectors and attributes of nodes are not changed.
    """
    # not onnx_ir 1.1's DeduplicateInitializersPass: it also merges vectors, such as biases that happen to be
    # zero and change in a refit, takes 7 times as long (0.068 s for 48 MB) and copies every weight
    graph = model.graph
    boundary_names = {value.name for value in (*graph.input, *graph.output)}
    tensors_by_probe: dict[tuple[Any, ...], list[Any]] = {}
    renamed: dict[str, str] = {}
    for tensor in graph.initializer:
        if len(tensor.dims) < 2 or tensor.name in boundary_names:
            continue
        values = tensor.raw_data  # a copy, which protobuf creates at each access
        if not values:
            continue
        probe = (tensor.data_type, *tensor.dims, values[:_PROBE_ELEMENTS], values[-_PROBE_ELEMENTS:])
        candidates = tensors_by_probe.setdefault(probe, [])
        duplicate = next((first for first in candidates if first.raw_data == values), None)
        if duplicate is None:
            candidates.append(tensor)
        else:
            renamed[tensor.name] = duplicate.name
    if renamed:
        for node in graph.node:
            for index, name in enumerate(node.input):
                node.input[index] = renamed.get(name, name)
        for index in reversed(range(len(graph.initializer))):
            if graph.initializer[index].name in renamed:
                del graph.initializer[index]
    return len(renamed)


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
    temporary = folder / f"{name}.part"
    try:
        models, size = _gather_weights(paths, temporary, name, weights or folder)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    for path in paths:
        external_data_path(path).unlink(missing_ok=True)
    temporary.replace(folder / name)
    for path, model in zip(paths, models, strict=True):
        onnx.save(model, path)
    return size


def _gather_weights(paths: Sequence[Path], merged: Path, name: str, weights: Path) -> tuple[list[Any], int]:
    """Write all weights to `merged`; return the graphs, which refer to them as `name`, and its bytes."""
    offsets: dict[bytes, int] = {}
    models = []
    with merged.open("wb") as out:
        for path in paths:
            models.append(model := read_graph(path, values=False))
            for tensor in iter_initializers(model.graph):
                _move_tensor(tensor, weights, out, offsets, name)
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
        mapped = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    begin = info.offset or 0
    return mapped[begin : begin + info.length] if info.length else mapped[begin:]
