"""Imports a third-party graph as the `model.onnx` of an artifact.

A graph without external weights is copied byte by byte. External weights, under any file names,
are collected in `model.onnx_data`, as in smelt's own graphs.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.runtime.classifier import MODEL_GRAPH
from smelt.runtime.third_party.external_data import ExternalLocation, is_external, resolve_external_data
from smelt.runtime.third_party.tensors import BITS_BY_TYPE, iter_model_tensors

GRAPH_FILE = f"{MODEL_GRAPH}.onnx"
_BLOCK = 1 << 20
_PAGE = 4096  # a runtime maps the file into memory


def import_graph(source: Path, out: Path, outside: bool) -> Path:
    """Copy the graph in the file `source` into the folder `out`; return the copy.

    outside: whether it has external weights.

    Raises:
        InputError: they no longer exist.
    """
    target = out / GRAPH_FILE
    if not outside:
        shutil.copyfile(source, target)
        return target
    import onnx

    return write_with_external_data(onnx.ModelProto.FromString(source.read_bytes()), source, target)


def write_with_external_data(model: Any, source: Path, target: Path) -> Path:
    """Write an onnx.ModelProto, whose weights may be external to the file `source`, as `target`; return that.

    External weights are collected in the file `NAME.onnx_data` next to it.

    Raises:
        InputError: weights no longer exist.
    """
    try:
        if any(is_external(tensor) for tensor in iter_model_tensors(model)):
            _copy_external_data(model, source, target.with_name(f"{target.name}_data"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{source}: its weights cannot be copied: {error}.", code="unreadable-file"
        ) from error
    target.write_bytes(model.SerializeToString())
    return target


def _copy_external_data(model: Any, source: Path, data: Path) -> None:
    """Copy external data of `model` into the file `data`, each part once, and update `model`."""
    from onnx import TensorProto

    moved: dict[ExternalLocation, int] = {}
    with data.open("wb") as target:
        for tensor in iter_model_tensors(model):
            if not is_external(tensor):
                continue
            bits = BITS_BY_TYPE[TensorProto.DataType.Name(tensor.data_type)]
            place = resolve_external_data(tensor, source, -(-math.prod(tensor.dims) * bits // 8))
            if place not in moved:
                target.write(b"\0" * (-target.tell() % _PAGE))
                moved[place] = target.tell()
                _copy_bytes(place, target)
            del tensor.external_data[:]
            for key, value in (("location", data.name), ("offset", moved[place]), ("length", place.length)):
                tensor.external_data.add(key=key, value=str(value))


def _copy_bytes(place: ExternalLocation, target: Any) -> None:
    left = place.length
    with place.file.open("rb") as stream:
        stream.seek(place.offset)
        while left:
            block = stream.read(min(left, _BLOCK))
            if not block:
                raise ValueError(f"{place.file} is truncated")
            target.write(block)
            left -= len(block)
