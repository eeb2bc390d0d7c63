"""Size of an artifact: number of parameters, bytes on disk.

Counts are read from headers and graph protos; no weights are held in memory. Peak memory is measured by
the latency workers, each of which holds one artifact only.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.generation.shortlist import ALWAYS_TENSOR, TABLE_TENSOR
from smelt.models.weight_files import value_count, weight_tensors
from smelt.quantization.schemes.registry import quantized_operators

# Integer initializers with fewer values are shapes, axes and other constants of a graph, not weights.
_MIN_WEIGHT_VALUES = 64


def artifact_size(artifact: Artifact) -> dict[str, int | None]:
    """Return `parameters` (count; None where the format does not contain it) and `size_bytes` (on disk)."""
    return {"parameters": artifact_parameters(artifact), "size_bytes": artifact.size_bytes}


def artifact_parameters(artifact: Artifact) -> int | None:
    """Return the number of parameters of the model.

    A number that the stage recorded in its details takes precedence (packed weights hide their count). Torch:
    values of the distinct tensors in the safetensors files. ONNX: values of the weight initializers,
    each distinct one once (two graphs of a translator may both contain the embedding). TensorRT: the number
    of the ONNX parent, copied to `details`; an engine does not contain it.
    """
    recorded = artifact.manifest.details.get("parameters")
    if recorded is not None or artifact.format == "tensorrt":
        return None if recorded is None else int(recorded)
    if artifact.format == "torch":
        return sum(value_count(entry) for _, _, entry in weight_tensors(artifact.path))
    return onnx_parameters(artifact.path)


def onnx_parameters(folder: Path) -> int:
    """Return the number of weight values in the folder's ONNX graphs, equal weights counted once.

    Weights are floating-point initializers of any size and integer ones of at least 64 values (quantized
    weights). Scales and zero points are not counted where they can be identified: they are inputs of
    operators that (de)quantize. A shortlist is not counted either.
    """
    import onnx

    seen: set[object] = set()
    total = 0
    for path in sorted(folder.rglob("*.onnx")):
        try:
            model = onnx.load(path, load_external_data=False)
        except Exception as error:  # protobuf raises several kinds for the same cause
            raise InputError(
                f"{path}: cannot be read as an ONNX file: {error}", code="unreadable-file", file=str(path)
            ) from error
        helpers = _scales_and_zero_points(model.graph) | {TABLE_TENSOR, ALWAYS_TENSOR}
        for tensor in model.graph.initializer:
            count = 0 if tensor.name in helpers else _weight_count(tensor)
            if count == 0:
                continue
            identity = _weight_identity(tensor, path.parent)
            if identity not in seen:
                seen.add(identity)
                total += count
    return total


# The inputs of operators that hold scales and zero points (ONNX and com.microsoft documentation), and those
# of our own schemes.
_HELPER_INPUTS = quantized_operators() | {
    "QuantizeLinear": (1, 2),
    "DequantizeLinear": (1, 2),
    "MatMulIntegerToFloat": (2, 3, 4, 5),
    "MatMulInteger": (2, 3),
    "GatherBlockQuantized": (2, 3),
    "QLinearMatMul": (1, 2, 4, 5, 6, 7),
}


def _scales_and_zero_points(graph: Any) -> set[str]:
    names: set[str] = set()
    for node in graph.node:
        places = _HELPER_INPUTS.get(node.op_type, ())
        names.update(node.input[i] for i in places if i < len(node.input))
    return names


def _weight_count(tensor: Any) -> int:
    """Return the number of weights in an initializer; 0 if it holds no weights."""
    from onnx import TensorProto

    count: int = math.prod(tensor.dims)
    if tensor.data_type in (TensorProto.STRING, TensorProto.BOOL):
        return 0
    floating = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE}
    if tensor.data_type in floating:
        return count
    return count if count >= _MIN_WEIGHT_VALUES else 0


def _weight_identity(tensor: Any, folder: Path) -> object:
    """Return a value that is equal for equal weights: type, shape, and a hash of the bytes."""
    kind = tensor.data_type, tuple(tensor.dims)
    external = {entry.key: entry.value for entry in tensor.external_data}
    if not external:
        stored = type(tensor)()
        stored.CopyFrom(tensor)
        stored.ClearField("name")
        stored.ClearField("doc_string")
        return kind, hashlib.sha256(stored.SerializeToString()).digest()
    path = folder / external["location"]
    if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
        raise InputError(
            f"{path}: the file with the graph's weights is missing. Copy it next to the graph.",
            code="missing-file",
            file=str(path),
        )
    offset = int(external.get("offset", 0))
    left = int(external.get("length", path.stat().st_size - offset))
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        stream.seek(offset)
        while left > 0 and (block := stream.read(min(left, 1 << 20))):
            digest.update(block)
            left -= len(block)
    return kind, digest.digest()
