"""In which floating-point type an artifact's weights lie on disk: sizes compare only where it is the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

from smelt.core.artifact import Artifact
from smelt.runtime.models.weight_files import read_header, values_in

# safetensors' words for floating numbers.
_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CODES = ".codes"
_GRAPHS = {"fp32": "float32", "fp16": "float16"}


def float_dtype(artifact: Artifact) -> str | None:
    """Return the type of most of the weights that are no codes; None where none is left or it does not tell.

    The scales of codes are not counted: they come with the codes, whatever the model was stored in. A graph
    or an engine says it in its `details`.
    """
    if artifact.format != "torch":
        return _GRAPHS.get(str(artifact.manifest.details.get("dtype")))
    entries: dict[str, Any] = {}
    for name in artifact.model_files:
        if name.endswith(".safetensors"):
            entries |= read_header(artifact.path / name)
    # a matrix of codes is a module of its own: what lies beside `codes` is its grid
    matrices = {name.removesuffix(_CODES) for name in entries if name.endswith(_CODES)}
    values: Counter[str] = Counter()
    for name, entry in entries.items():
        if name != "__metadata__" and entry["dtype"] in _TYPES and name.rpartition(".")[0] not in matrices:
            values[_TYPES[entry["dtype"]]] += values_in(entry)
    return max(values, key=values.__getitem__) if values else None
