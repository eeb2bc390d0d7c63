"""Return the options of ONNX Runtime's TensorRT provider, with their names and spelling.

Source: ONNX Runtime's documentation, "TensorRT Execution Provider"; its parser requires `True` and `False`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.errors import RunError
from smelt.export.tensorrt.build_engine import ProfileShapes, profile_shapes
from smelt.export.tensorrt.preflight import check_profile, load_graph
from smelt.export.tensorrt.profile_ranges import profile_ranges
from smelt.export.tensorrt.settings import ProviderSettings
from smelt.runtimes.ort_tensorrt_backend import ProviderOptions, format_shapes, write_provider_options

if TYPE_CHECKING:
    from smelt.core.stage import Context

_QDQ_OPS = frozenset({"QuantizeLinear", "DequantizeLinear"})


def export_provider_options(
    dtype: str, settings: ProviderSettings, source: Path, ctx: Context
) -> dict[str, Any]:
    """Write `provider.json` next to the finished graphs in `ctx.out`; return the sizes for the manifest.

    Args:
        dtype: of the graphs.
        settings: of their engines.
        source: the folder of the model, with config and tokenizer.
        ctx: with the data that lengths are computed from.

    Raises:
        InputError: there are no data to compute lengths from, and no lengths are set.
        RunError: the sizes do not fit a graph.
    """
    from smelt.runtimes.tensorrt_engine import graph_hash

    [ranges], limit = profile_ranges(source, settings.as_tensorrt_settings(), ctx, "onnx: {engine: {%s}}")
    options: dict[str, ProviderOptions] = {}
    for path in sorted(ctx.out.glob("*.onnx")):
        model = load_graph(path)
        shapes = profile_shapes(model, ranges, path.name)
        wrong = [p.as_message() for p in check_profile(model, shapes, limit) if p.severity == "error"]
        if wrong:
            text = f"{path.name}: TensorRT in ONNX Runtime does not support these sizes:\n  " + "\n  ".join(
                map(str, wrong)
            )
            raise RunError(text, code="does-not-fit-model", file=path.name, found=wrong)
        coded = any(node.op_type in _QDQ_OPS for node in model.graph.node)
        options[path.stem] = ProviderOptions(
            graph_hash(path), tensorrt_options(settings, dtype, coded, shapes)
        )
    write_provider_options(ctx.out, options)
    return {name: [r.min, r.opt, r.max] for name, r in ranges.items()}


def tensorrt_options(
    settings: ProviderSettings, dtype: str, quantized: bool, shapes: ProfileShapes
) -> dict[str, str]:
    """Return the options of TensorRT's provider for one graph.

    The provider builds weakly typed networks: a precision is used only if an option allows it, and norms in
    float32 have an option of their own.

    Args:
        settings: of the engines.
        dtype: fp32, fp16 or bf16, of the graph.
        quantized: whether the graph has QuantizeLinear and DequantizeLinear.
        shapes: min, opt and max shape by input.
    """
    return {
        "trt_fp16_enable": _bool_option(dtype == "fp16"),
        "trt_bf16_enable": _bool_option(dtype == "bf16"),
        "trt_int8_enable": _bool_option(quantized),
        "trt_layer_norm_fp32_fallback": _bool_option(dtype == "fp16"),
        "trt_max_workspace_size": str(settings.workspace_mib << 20),
        "trt_builder_optimization_level": str(settings.optimization_level),
        "trt_timing_cache_enable": _bool_option(settings.timing_cache),
        "trt_engine_hw_compatible": _bool_option(settings.hardware_compatibility == "ampere+"),
        "trt_context_memory_sharing_enable": _bool_option(settings.context_memory == "shared"),
        **{
            f"trt_profile_{end}_shapes": format_shapes({name: sizes[at] for name, sizes in shapes.items()})
            for at, end in enumerate(("min", "opt", "max"))
        },
    }


def _bool_option(on: bool) -> str:
    return "True" if on else "False"
