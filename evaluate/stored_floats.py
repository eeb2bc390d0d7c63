"""In which floating-point type an artifact's weights lie on disk: sizes compare only where it is the same."""

from __future__ import annotations

import math
from collections import Counter

from smelt.core.artifact import Artifact
from smelt.runtime.models.weight_files import read_header

# safetensors' words for floating numbers.
_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_GRAPHS = {"fp32": "float32", "fp16": "float16"}


def float_dtype(artifact: Artifact) -> str | None:
    """Return the type of most of its floating-point weights; None where it has none or does not tell.

    Integer codes of quantized layers are not counted, their scales are. A graph or an engine says it in
    its `facts`.
    """
    if artifact.format != "torch":
        return _GRAPHS.get(str(artifact.manifest.facts.get("dtype")))
    values: Counter[str] = Counter()
    for name in artifact.model_files:
        if name.endswith(".safetensors"):
            for tensor, entry in read_header(artifact.path / name).items():
                if tensor != "__metadata__" and entry["dtype"] in _TYPES:
                    values[_TYPES[entry["dtype"]]] += math.prod(entry["shape"])
    return max(values, key=values.__getitem__) if values else None
