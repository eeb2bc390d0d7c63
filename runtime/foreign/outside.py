"""Weights of a graph that lie in files beside it: may they be read, and is all of them there?"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

_KEYS = ("location", "offset", "length")


class Place(NamedTuple):
    """Where the bytes of a tensor lie."""

    file: Path
    offset: int
    length: int


def is_outside(tensor: Any) -> bool:
    """Say whether the values of an onnx.TensorProto lie in another file."""
    return int(tensor.data_location) == 1  # TensorProto.EXTERNAL


def location_of(tensor: Any) -> Mapping[str, str]:
    """Return what a tensor says of its place; of a key that stands there twice the last."""
    return {entry.key: entry.value for entry in tensor.external_data if entry.key in _KEYS}


def place_of(tensor: Any, graph: Path, expected: int) -> Place:
    """Return where the `expected` bytes of a tensor of the graph in the file `graph` lie.

    Raises:
        ValueError: the place leaves the folder, is no file, or holds something else; says what.
    """
    said = location_of(tensor)
    name = said.get("location", "")
    file = _inside(name, graph)
    offset, length = _whole(said, "offset", 0), _whole(said, "length", expected)
    if length != expected:
        raise ValueError(f"its shape needs {expected:,} bytes, and {length:,} are said to lie in {name}")
    size = file.stat().st_size
    if offset + length > size:
        raise ValueError(
            f"{name} has {size:,} bytes, and this tensor ends at {offset + length:,}: it is cut short"
        )
    return Place(file, offset, length)


def _inside(name: str, graph: Path) -> Path:
    """Return the file `name` beside the graph.

    A link may lead to where the graph's own file lies, as in the cache of a hub, and nowhere else.
    """
    parts = PurePosixPath(name.replace("\\", "/")).parts
    absolute = PurePosixPath(name).is_absolute() or bool(PureWindowsPath(name).drive)
    if not parts or ".." in parts or absolute or "\0" in name:
        raise ValueError(f"its values are said to lie in {name!r}, which is no name of a file in the folder")
    file = graph.parent / name
    if not os.path.lexists(file):
        raise ValueError(f"its values should lie in {name}, and there is no such file beside the graph")
    real = Path(os.path.realpath(file))
    homes = (Path(os.path.realpath(graph.parent)), Path(os.path.realpath(graph)).parent)
    if not any(real.is_relative_to(home) for home in homes):
        raise ValueError(f"its values are said to lie in {name}, a link that leads out of the folder")
    if not real.is_file():
        raise ValueError(f"its values should lie in {name}, which is no file")
    return real


def _whole(said: Mapping[str, str], key: str, default: int) -> int:
    text = said.get(key)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise ValueError(f"its {key} in {said.get('location')} is {text[:40]!r}, which is no number of bytes")
    return int(text)


def outside_files(names: Iterator[str], graph: Path) -> list[Path]:
    """Return the files `names` beside the graph that are there."""
    return [graph.parent / name for name in dict.fromkeys(names) if (graph.parent / name).is_file()]
