"""External data of a graph: whether it may be read, and is complete."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

_KEYS = ("location", "offset", "length")


class GraphFileError(ValueError):
    """A file of a graph cannot be used; the message is why, as the end of a sentence.

    Args:
        message: what is wrong.
        code: a slug that names the kind of problem.
    """

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class ExternalLocation(NamedTuple):
    """File and position of a tensor's bytes."""

    file: Path
    offset: int
    length: int


def is_external(tensor: Any) -> bool:
    """Return whether the values of an onnx.TensorProto are in another file."""
    return int(tensor.data_location) == 1  # TensorProto.EXTERNAL


def external_data_fields(tensor: Any) -> Mapping[str, str]:
    """Return the external data fields of a tensor; of duplicate keys the last."""
    return {entry.key: entry.value for entry in tensor.external_data if entry.key in _KEYS}


def resolve_external_data(tensor: Any, graph: Path, expected: int) -> ExternalLocation:
    """Return the location of the `expected` bytes of a tensor of the graph in the file `graph`.

    Raises:
        GraphFileError: the location leaves the folder, is not a file, or has another size.
    """
    said = external_data_fields(tensor)
    name = said.get("location", "")
    file = _sibling_file(name, graph)
    offset, length = _integer_field(said, "offset", 0), _integer_field(said, "length", expected)
    if length != expected:
        raise GraphFileError(
            f"its shape needs {expected:,} bytes, but {length:,} are declared in {name}",
            code="external-data-wrong-length",
        )
    size = file.stat().st_size
    if offset + length > size:
        raise GraphFileError(
            f"{name} has {size:,} bytes, but this tensor ends at {offset + length:,}: the file is truncated",
            code="external-data-truncated",
        )
    return ExternalLocation(file, offset, length)


def _sibling_file(name: str, graph: Path) -> Path:
    """Return the file `name` next to the graph.

    A link may lead to the folder of the graph's own file, as in the cache of a hub, and nowhere else.
    """
    parts = PurePosixPath(name.replace("\\", "/")).parts
    absolute = PurePosixPath(name).is_absolute() or bool(PureWindowsPath(name).drive)
    if not parts or ".." in parts or absolute or "\0" in name:
        raise GraphFileError(
            f"its values are declared in {name!r}, which is not a file name in the folder",
            code="external-data-outside-folder",
        )
    file = graph.parent / name
    if not os.path.lexists(file):
        raise GraphFileError(
            f"its values are in {name}, which is missing from the graph's folder",
            code="external-data-missing",
        )
    real = Path(os.path.realpath(file))
    homes = (Path(os.path.realpath(graph.parent)), Path(os.path.realpath(graph)).parent)
    if not any(real.is_relative_to(home) for home in homes):
        raise GraphFileError(
            f"its values are declared in {name}, a link that leads out of the folder",
            code="external-data-link-outside-folder",
        )
    if not real.is_file():
        raise GraphFileError(
            f"its values are declared in {name}, which is not a file", code="external-data-not-a-file"
        )
    return real


def _integer_field(fields: Mapping[str, str], key: str, default: int) -> int:
    text = fields.get(key)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise GraphFileError(
            f"its {key} in {fields.get('location')} is {text[:40]!r}, which is not a number of bytes",
            code="external-data-not-a-number",
        )
    return int(text)


def existing_external_files(names: Iterator[str], graph: Path) -> list[Path]:
    """Return the existing ones of the files `names` next to the graph."""
    return [graph.parent / name for name in dict.fromkeys(names) if (graph.parent / name).is_file()]
