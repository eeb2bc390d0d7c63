"""A graph that somebody else wrote, copied as the `model.onnx` of an artifact.

A graph with all weights inside is copied byte by byte. Weights that lie in other files, under whatever names,
are gathered in `model.onnx_data`, as the graphs that smelt writes have them.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.runtime.classifier import MODEL
from smelt.runtime.foreign.outside import Place, is_outside, place_of
from smelt.runtime.foreign.tensors import BITS, tensors_of

NAME = f"{MODEL}.onnx"
_BLOCK = 1 << 20
_PAGE = 4096  # a runtime maps the file into memory


def take_graph(source: Path, out: Path, outside: bool) -> Path:
    """Copy the graph in the file `source` into the folder `out`; return the copy.

    outside: whether weights of it lie in other files.

    Raises:
        InputError: they are not there any more.
    """
    target = out / NAME
    if not outside:
        shutil.copyfile(source, target)
        return target
    import onnx

    return write_gathered(onnx.ModelProto.FromString(source.read_bytes()), source, target)


def write_gathered(model: Any, source: Path, target: Path) -> Path:
    """Write an onnx.ModelProto, whose weights may lie beside the file `source`, as `target`; return that.

    What lies outside is gathered in the file `NAME.onnx_data` beside it.

    Raises:
        InputError: weights are not there any more.
    """
    try:
        if any(is_outside(tensor) for tensor in tensors_of(model)):
            _gather(model, source, target.with_name(f"{target.name}_data"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{source}: its weights cannot be copied: {error}.", code="unreadable-file"
        ) from error
    target.write_bytes(model.SerializeToString())
    return target


def _gather(model: Any, source: Path, data: Path) -> None:
    """Copy what lies outside of `model` into the file `data`, each stretch once, and say so in `model`."""
    from onnx import TensorProto

    moved: dict[Place, int] = {}
    with data.open("wb") as target:
        for tensor in tensors_of(model):
            if not is_outside(tensor):
                continue
            bits = BITS[TensorProto.DataType.Name(tensor.data_type)]
            place = place_of(tensor, source, -(-math.prod(tensor.dims) * bits // 8))
            if place not in moved:
                target.write(b"\0" * (-target.tell() % _PAGE))
                moved[place] = target.tell()
                _copy(place, target)
            del tensor.external_data[:]
            for key, value in (("location", data.name), ("offset", moved[place]), ("length", place.length)):
                tensor.external_data.add(key=key, value=str(value))


def _copy(place: Place, target: Any) -> None:
    left = place.length
    with place.file.open("rb") as stream:
        stream.seek(place.offset)
        while left:
            block = stream.read(min(left, _BLOCK))
            if not block:
                raise ValueError(f"{place.file} is cut short")
            target.write(block)
            left -= len(block)
