"""The floating-point type of an artifact's weights on disk: sizes are comparable only for equal types."""

from __future__ import annotations

from collections import Counter
from typing import Any

from smelt.core.artifact import Artifact
from smelt.runtime.models.weight_files import read_header, value_count

# safetensors' names of the floating-point types.
_FLOAT_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_QUANTIZED_SUFFIX = ".codes"
_GRAPH_DTYPES = {"fp32": "float32", "fp16": "float16"}


def float_dtype(artifact: Artifact) -> str | None:
    """Return the type of most of the unquantized weights; None where there are none or it is not known.

    The scales of quantized weights are not counted: they belong to the quantized weights, whatever type the
    model was stored in. A graph or an engine has the type in its `details`.
    """
    if artifact.format != "torch":
        return _GRAPH_DTYPES.get(str(artifact.manifest.details.get("dtype")))
    entries: dict[str, Any] = {}
    for name in artifact.model_files:
        if name.endswith(".safetensors"):
            entries |= read_header(artifact.path / name)
    # a quantized matrix is a module of its own: the tensors next to `codes` are scales and zero points
    matrices = {name.removesuffix(_QUANTIZED_SUFFIX) for name in entries if name.endswith(_QUANTIZED_SUFFIX)}
    values: Counter[str] = Counter()
    for name, entry in entries.items():
        if (
            name != "__metadata__"
            and entry["dtype"] in _FLOAT_TYPES
            and name.rpartition(".")[0] not in matrices
        ):
            values[_FLOAT_TYPES[entry["dtype"]]] += value_count(entry)
    return max(values, key=values.__getitem__) if values else None
