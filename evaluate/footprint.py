"""How large an artifact is: numbers in the model, bytes on disk.

Counts come from headers and graph protos; no weights are held in memory. Peak memory is measured by
the latency workers, each of which holds one artifact only.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.runtime.generate.shortlist import ALWAYS, TABLE
from smelt.runtime.models.weight_files import values_in, weight_tensors
from smelt.runtime.schemes.registry import operators

# Integer initializers with fewer values are shapes, axes and other constants of a graph, not weights.
_FEWEST_WEIGHTS = 64


def footprint(artifact: Artifact) -> dict[str, int | None]:
    """Return `parameters` (count; None where the format does not tell) and `size_bytes` (on disk)."""
    return {"parameters": parameters(artifact), "size_bytes": artifact.size_bytes}


def parameters(artifact: Artifact) -> int | None:
    """Return how many numbers the model holds.

    A number that the stage recorded in its details wins (packed codes hide how many they are). Torch:
    values of the distinct tensors in the safetensors files. ONNX: values of the weight initializers,
    each distinct one once (two graphs of a translator may both carry the embedding). TensorRT: what
    the ONNX parent had, handed on in `details`; an engine does not tell.
    """
    recorded = artifact.manifest.details.get("parameters")
    if recorded is not None or artifact.format == "tensorrt":
        return None if recorded is None else int(recorded)
    if artifact.format == "torch":
        return sum(values_in(entry) for _, _, entry in weight_tensors(artifact.path))
    return onnx_parameters(artifact.path)


def onnx_parameters(folder: Path) -> int:
    """Return the number of values of the weights in the folder's ONNX graphs, equal ones counted once.

    Weights are floating initializers of any size and integer ones of at least 64 values (codes);
    scales and zero points belong to the codes and so are not counted where they can be told apart:
    they feed the operators that (de)quantize. A shortlist is none of them either.
    """
    import onnx

    seen: set[object] = set()
    total = 0
    for path in sorted(folder.rglob("*.onnx")):
        try:
            model = onnx.load(path, load_external_data=False)
        except Exception as error:  # protobuf raises several kinds, all meaning the same
            raise InputError(
                f"{path}: not an ONNX file that can be read: {error}", code="unreadable-file", file=str(path)
            ) from error
        helpers = _scales_and_zero_points(model.graph) | {TABLE, ALWAYS}
        for tensor in model.graph.initializer:
            count = 0 if tensor.name in helpers else _values(tensor)
            if count == 0:
                continue
            identity = _identity(tensor, path.parent)
            if identity not in seen:
                seen.add(identity)
                total += count
    return total


# Which inputs of which operators hold scales and zero points (ONNX and com.microsoft documentation), besides
# those of our own schemes.
_HELPER_INPUTS = operators() | {
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


def _values(tensor: Any) -> int:
    """Return how many weights an initializer holds; 0 for what is no weight."""
    from onnx import TensorProto

    count: int = math.prod(tensor.dims)
    if tensor.data_type in (TensorProto.STRING, TensorProto.BOOL):
        return 0
    floating = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE}
    if tensor.data_type in floating:
        return count
    return count if count >= _FEWEST_WEIGHTS else 0


def _identity(tensor: Any, folder: Path) -> object:
    """Return what is equal for equal weights: type, shape, and a hash of the bytes."""
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
            f"{path}: the graph's weights should lie in this file, but it is not there.",
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
