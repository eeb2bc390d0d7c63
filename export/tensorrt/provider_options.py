"""The options of ONNX Runtime's providers of TensorRT, by the names and in the spelling that they take.

Sources: ONNX Runtime's documentation, "TensorRT Execution Provider", with its parser, which wants `True` and
`False`; `tensorrt_rtx_provider_options.h` of the plug-in 0.5, which wants `1` and `0`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.errors import RunError
from smelt.export.tensorrt.preflight import check_profile, load_graph
from smelt.export.tensorrt.profile import Shapes, shapes_of
from smelt.export.tensorrt.provider_settings import ProviderSettings
from smelt.export.tensorrt.ranges import profile_ranges
from smelt.runtime.backends.ort_tensorrt.provider import PROVIDERS, RTX
from smelt.runtime.backends.ort_tensorrt.told import Told, shapes_as_text, write_told

if TYPE_CHECKING:
    from smelt.core.stage import Context

_CODES = frozenset({"QuantizeLinear", "DequantizeLinear"})
_ENDS = ("min", "opt", "max")


def write_provider(
    target: str, dtype: str, settings: ProviderSettings, source: Path, ctx: Context
) -> dict[str, Any]:
    """Write `provider.json` beside the finished graphs in `ctx.out`; return the sizes for the manifest.

    Args:
        target: ort-tensorrt or ort-tensorrt-rtx.
        dtype: of the graphs.
        settings: of their engines.
        source: the folder of the model, with config and tokenizer.
        ctx: with the data that lengths are taken from.

    Raises:
        InputError: there is no data to take lengths from, and none are given.
        RunError: the sizes do not fit a graph.
    """
    from smelt.runtime.backends.tensorrt_sidecar import hash_of_graph

    [ranges], limit = profile_ranges(source, settings.as_engine(), ctx, "onnx: {engine: {%s}}")
    provider = PROVIDERS[target]
    told: dict[str, Told] = {}
    for path in sorted(ctx.out.glob("*.onnx")):
        model = load_graph(path)
        shapes = shapes_of(model, ranges, path.name)
        wrong = [p.as_message() for p in check_profile(model, shapes, limit) if p.severity == "error"]
        if wrong:
            text = f"{path.name}: {provider.title} cannot take these sizes:\n  " + "\n  ".join(
                map(str, wrong)
            )
            raise RunError(text, code="does-not-fit-model", file=path.name, found=wrong)
        coded = any(node.op_type in _CODES for node in model.graph.node)
        make = rtx_options if provider is RTX else tensorrt_options
        told[path.stem] = Told(hash_of_graph(path), make(settings, dtype, coded, shapes))
    write_told(ctx.out, provider.name, told)
    return {name: [r.min, r.opt, r.max] for name, r in ranges.items()}


def tensorrt_options(settings: ProviderSettings, dtype: str, coded: bool, shapes: Shapes) -> dict[str, str]:
    """Return the options of TensorRT's provider for one graph.

    It builds weakly typed networks: a precision is used only where an option allows it, and norms in float32
    have an option of their own.

    Args:
        settings: of the engines.
        dtype: fp32, fp16 or bf16, of the graph.
        coded: whether the graph has QuantizeLinear and DequantizeLinear.
        shapes: by input the smallest, usual and largest.
    """
    return {
        "trt_fp16_enable": _flag(dtype == "fp16"),
        "trt_bf16_enable": _flag(dtype == "bf16"),
        "trt_int8_enable": _flag(coded),
        "trt_layer_norm_fp32_fallback": _flag(dtype == "fp16"),
        "trt_max_workspace_size": str(settings.workspace_mib << 20),
        "trt_builder_optimization_level": str(settings.optimization_level),
        "trt_timing_cache_enable": _flag(settings.timing_cache),
        "trt_engine_hw_compatible": _flag(settings.hardware_compatibility == "ampere+"),
        "trt_context_memory_sharing_enable": _flag(settings.context_memory == "shared"),
        **_profile("trt", shapes),
    }


def rtx_options(settings: ProviderSettings, dtype: str, coded: bool, shapes: Shapes) -> dict[str, str]:
    """Return the options of TensorRT for RTX; its networks are strongly typed, so dtypes are the graph's."""
    return {"nv_max_workspace_size": str(settings.workspace_mib << 20), **_profile("nv", shapes)}


def _profile(prefix: str, shapes: Shapes) -> dict[str, str]:
    ends: list[Mapping[str, tuple[int, ...]]] = [
        {name: sizes[at] for name, sizes in shapes.items()} for at in range(len(_ENDS))
    ]
    return {f"{prefix}_profile_{end}_shapes": shapes_as_text(of) for end, of in zip(_ENDS, ends, strict=True)}


def _flag(on: bool) -> str:
    return "True" if on else "False"
