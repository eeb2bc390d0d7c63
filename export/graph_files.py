"""ONNX graphs as files: weights inside, or beside the graph where they are too many for one protobuf.

Protobuf holds no more than 2 GB. Above `LARGEST_INLINE` the weights of `NAME.onnx` lie in one file,
`NAME.onnx_data`, as Optimum and transformers.js name it; a runtime finds it beside the graph. Whoever
rewrites a graph goes through `write_graph`, which leaves no data file behind that the graph no longer reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# of weights, in one file with the graph; above it they lie beside it
LARGEST_INLINE = 1_500_000_000
# what is smaller stays in the graph: shapes and axes, which shape inference and preflights read
LEAST_OUTSIDE = 1024
# Runtimes map the data file into memory; the ONNX documentation asks for whole pages there.
_LARGE, _PAGE, _LINE = 1 << 20, 4096, 64


def data_file(path: Path) -> Path:
    """Return where the weights of the graph `path` lie if they lie outside."""
    return path.with_name(f"{path.name}_data")


def has_data_file(model: Any) -> bool:
    """Say whether weights of an onnx.ModelProto, as it was read, lie outside of it."""
    return bool(data_names(model))


def data_names(model: Any) -> set[str]:
    """Return the names of the files in which weights of an onnx.ModelProto lie, as it was read."""
    from onnx.external_data_helper import ExternalDataInfo, uses_external_data

    outside = [tensor for tensor in model.graph.initializer if uses_external_data(tensor)]
    return {ExternalDataInfo(tensor).location for tensor in outside}


def read_graph(path: Path, values: bool = True) -> Any:
    """Read the graph in `path` as an onnx.ModelProto; without `values`, weights that lie outside stay there.

    Raises:
        RunError: it is damaged, or its data file is.
    """
    import onnx

    from smelt.core.errors import RunError

    try:
        return onnx.load(path, load_external_data=values)
    except Exception as error:  # protobuf and onnx raise several kinds, all meaning the same
        raise RunError(
            f"{path}: not an ONNX file that can be read: {error}", code="damaged-file", file=str(path)
        ) from error


def tensors_of(graph: Any) -> Iterator[Any]:
    """Yield the initializers of a graph and of the graphs in its nodes."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from tensors_of(attribute.g)


def weight_bytes(model: Any) -> int:
    """Return the bytes of the weights that an onnx.ModelProto holds itself."""
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer)


def write_graph(model: Any, path: Path) -> None:
    """Write an onnx.ModelProto to `path`, in place of what was there.

    Where the weights go into the data file they leave `model`, which then only says where they are. A model
    that was read without values keeps its data file.
    """
    import onnx

    if has_data_file(model):
        onnx.save(model, path)
        return
    data_file(path).unlink(missing_ok=True)  # onnx would append to it
    if weight_bytes(model) > LARGEST_INLINE:
        _put_outside(model, data_file(path).name)
    onnx.save(model, path)


def give_defaults(path: Path, values: Mapping[str, int]) -> None:
    """Let int64 scalar inputs of the graph `path` be left out; they then have these values."""
    import numpy as np
    from onnx import numpy_helper

    model = read_graph(path, values=False)
    constants = [numpy_helper.from_array(np.array(v, dtype=np.int64), name) for name, v in values.items()]
    model.graph.initializer.extend(constants)
    write_graph(model, path)


def _put_outside(model: Any, location: str) -> None:
    """Mark the large tensors of `model` for the file `location`, each at an aligned place."""
    from onnx.external_data_helper import set_external_data

    end = 0
    for tensor in model.graph.initializer:
        size = len(tensor.raw_data)
        if size >= LEAST_OUTSIDE:
            begin = aligned(end, size)
            set_external_data(tensor, location, offset=begin, length=size)
            end = begin + size


def aligned(end: int, size: int) -> int:
    """Return where a tensor of `size` bytes begins in a data file that ends at `end`."""
    boundary = _PAGE if size >= _LARGE else _LINE
    return -(-end // boundary) * boundary
