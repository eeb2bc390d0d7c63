"""What an engine consists of: layers, precisions, fused attention.

Two sources. The network that the parser made of a graph has the precision of every layer and the operators
that it fuses itself (ATTENTION, from ONNX's Attention); it is known wherever an engine is built. The engine
inspector lists the kernels that the builder chose; it needs the GPU that the engine was built for.

Source: NVIDIA's TensorRT documentation, "Engine Inspector" and "Migrating IEngineInspector Usage from
TensorRT 10.x to 11.x". Kernels of fused attention are called `_gemm_mha_v2` and `_gemv_mha_v1`
(github.com/NVIDIA/TensorRT, issues). The inspector was never run by smelt.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

# descriptions of types by the inspector: of TensorRT 10 and 11 without an execution context (`Half`), and of
# its formats (`Row major linear FP16 format`)
_TYPE_WORDS = {
    "fp32": ("float", "fp32"),
    "fp16": ("half", "fp16"),
    "bf16": ("bfloat16", "bf16"),
    "fp8": ("fp8",),
    "fp4": ("fp4",),
    "int8": ("int8",),
    "int4": ("int4",),
    "int32": ("int32",),
    "int64": ("int64",),
    "bool": ("bool",),
}
# of `tensorrt.DataType`
_NETWORK_TYPES = {"FLOAT": "fp32", "HALF": "fp16", "E8M0": "e8m0"}
_FUSED_ATTENTION = re.compile(r"_mha(_|\b)|fmha")


def summarize_network(network: Any) -> dict[str, Any]:
    """Return the summary of an `INetworkDefinition`.

    Returns:
        layers: without constants; precisions: how many values each type has, constants included;
        fused_attention: operators of attention; cache_updates: caches that are written in place.
    """
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    outputs = [layer.get_output(index) for layer in layers for index in range(layer.num_outputs)]
    kinds = [str(layer.type.name) for layer in layers]
    names = [output.dtype.name for output in outputs if output is not None]
    precisions = Counter(_NETWORK_TYPES.get(name, name.lower()) for name in names)
    return {
        "layers": len(kinds) - kinds.count("CONSTANT"),
        "precisions": dict(sorted(precisions.items())),
        "fused_attention": kinds.count("ATTENTION_OUTPUT"),
        "cache_updates": kinds.count("KV_CACHE_UPDATE"),
    }


def inspect_engine(trt: Any, plan: bytes, logger: Any) -> dict[str, Any] | None:
    """Return the summary of an engine's kernels, None where it cannot be opened or has no information.

    It must be built with `ProfilingVerbosity.DETAILED`.
    """
    engine = trt.Runtime(logger).deserialize_cuda_engine(plan)
    if engine is None:
        return None
    inspector = engine.create_engine_inspector()
    return summarize_layers(inspector.get_engine_information(trt.LayerInformationFormat.JSON))


def summarize_layers(text: str) -> dict[str, Any] | None:
    """Return the summary of the inspector's JSON; None for text that is no JSON, or names only.

    Returns:
        layers: their number; precisions: how many layers have an output of each type; fused_attention: layers
        whose kernel computes a whole attention.
    """
    try:
        layers = json.loads(text)["Layers"]
        detailed = [layer for layer in layers if isinstance(layer, dict)]
    except (ValueError, KeyError, TypeError):  # names of layers with quotes are not escaped by all versions
        return None
    if not detailed:
        return None
    precisions: Counter[str] = Counter()
    for layer in detailed:
        types = {_type_name(str(output.get("Format/Datatype", ""))) for output in layer.get("Outputs", ())}
        precisions.update(types)
    kernels = (f"{layer.get('Name', '')} {layer.get('TacticName', '')}" for layer in detailed)
    return {
        "layers": len(detailed),
        "precisions": dict(sorted(precisions.items())),
        "fused_attention": sum(bool(_FUSED_ATTENTION.search(kernel)) for kernel in kernels),
    }


def _type_name(description: str) -> str:
    """Return the name of a type in the inspector's description, or the description."""
    words = set(re.findall(r"[a-z0-9]+", description.lower()))
    return next((name for name, known in _TYPE_WORDS.items() if words & set(known)), description)
