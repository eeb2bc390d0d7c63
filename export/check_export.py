"""Check, before tracing, the runtime, memory, quantization schemes and opset of an ONNX export."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.core.system import require_memory

if TYPE_CHECKING:
    from smelt.export.onnx_settings import OnnxSettings
    from smelt.quantization.scheme import Scheme


def require_runtime(settings: OnnxSettings, ctx: Context) -> None:
    """Require OpenVINO if it is the target; warn if it has no bf16 on this processor.

    Raises:
        MissingDependencyError: it is not installed.
    """
    if settings.target != "openvino":
        return
    from smelt.runtimes.openvino_backend import has_bf16, import_openvino

    import_openvino()
    if settings.dtype == "bf16" and not has_bf16():
        ctx.warn(
            "no-bf16",
            "This processor has no bf16, so OpenVINO used another precision. Parity, scores and latency may"
            " differ on a processor with bf16.",
        )


def require_export_memory(model: Any, settings: OnnxSettings) -> None:
    """Require enough memory for the copies of the weights that an export makes.

    Raises:
        RunError: there is not enough memory.
    """
    weights = {t.data_ptr(): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}
    # the exported graph holds them once more; converting and simplifying hold two graphs at a time
    copies = 2 if settings.simplify or file_dtype(settings) != "fp32" else 1
    require_memory(
        copies * sum(weights.values()),
        "onnx: exporting",
        "Set simplify: false, make the model smaller first, or use a machine with more memory.",
    )


def tolerance_kind(model: Any, settings: OnnxSettings) -> str:
    """Return the tolerance for the files: that of the least exact scheme, or that of their dtype.

    Raises:
        InputError: the target cannot run the model's quantized layers.
    """
    from smelt.export.parity.torch_reference import INT8_CONVOLUTIONS
    from smelt.quantization.layers import QuantizedLinear, layer_scheme
    from smelt.quantization.matrix import QuantizedConv2d
    from smelt.quantization.schemes.registry import SCHEMES

    found = {layer_scheme(m) for m in model.modules()}
    schemes = [s for name, s in SCHEMES.items() if name in found]
    _require_target(schemes, settings.target)
    _require_scheme_options(model, settings.target)
    _require_precision(schemes, settings)
    products = [m.matrix for m in model.modules() if isinstance(m, QuantizedLinear)]
    if any(isinstance(m, QuantizedConv2d) for m in model.modules()):
        return INT8_CONVOLUTIONS
    rounded = {m.scheme.name for m in products if m.scheme.quantizes_activations(m.options)}
    names = [name for name in reversed(SCHEMES) if name in rounded]
    return max(names, key=lambda name: SCHEMES[name].tolerance, default=file_dtype(settings))


def _require_scheme_options(model: Any, target: str) -> None:
    """Require that the target supports the scheme options of all quantized matrices.

    Raises:
        InputError: it does not.
    """
    from smelt.quantization.layers import is_quantized
    from smelt.quantization.schemes.registry import unsupported_scheme_options

    for matrix in (module.matrix for module in model.modules() if is_quantized(module)):
        if wanted := unsupported_scheme_options(matrix.scheme, matrix.options, target):
            raise InputError(
                f"onnx: target {target} runs scheme {matrix.scheme.name} only with {' and '.join(wanted)},"
                f" and layers of this model were quantized with {dict(matrix.options)}. Quantize with these"
                " options, or set another target.",
                code="unsupported-scheme-options",
                setting="target",
            )


def _require_precision(schemes: list[Scheme], settings: OnnxSettings) -> None:
    """Require a file precision that holds all digits of the scales.

    Raises:
        InputError: the precision does not.
    """
    from smelt.quantization.schemes.registry import supported_dtypes

    filed, fit = file_dtype(settings), supported_dtypes(schemes, settings.target)
    if filed not in fit:
        raise InputError(
            f"onnx: dtype {filed} is not supported for target {settings.target} with"
            f" {' and '.join(s.name for s in schemes)} weights, because scales would lose precision. Set"
            f" dtype: {' or '.join(fit)}; the quantized weights do not change.",
            code="unsupported-dtype",
            setting="dtype",
        )


BF16_OPSET = 22


def required_opset(settings: OnnxSettings, model: Any) -> int:
    """Return the opset of the settings, or a newer one if quantized operators or bf16 need it.

    Conv, Sin and Cos support bfloat16 from opset 22 on (https://onnx.ai/onnx/operators/onnx__Conv.html).
    """
    from smelt.quantization.layers import layer_scheme
    from smelt.quantization.schemes.registry import SCHEMES

    found = {layer_scheme(module) for module in model.modules()}
    names = [name for name in SCHEMES if name in found]
    of_dtype = BF16_OPSET if file_dtype(settings) == "bf16" else 0
    return max(
        [settings.opset, of_dtype, *(SCHEMES[n].min_opset.get(settings.graph_target, 0) for n in names)]
    )


def file_dtype(settings: OnnxSettings) -> str:
    """Return the precision of the file; for bf16 OpenVINO converts a float32 file itself."""
    return "fp32" if settings.target == "openvino" else settings.dtype


def _require_target(schemes: list[Scheme], target: str) -> None:
    """Require that the target can run all of `schemes`.

    Raises:
        InputError: it cannot.
    """
    from smelt.quantization.schemes.registry import (
        SCHEMES_BY_BITS,
        schemes_for_target,
        supported_targets,
        unsupported_reason,
    )

    refused = {
        scheme.name: why for scheme in schemes if (why := unsupported_reason(scheme, target)) is not None
    }
    if refused:
        fit = supported_targets(schemes)
        names, why = " and ".join(sorted(refused)), next(iter(refused.values()))
        why = f"onnx: target {target} cannot run a model quantized with scheme {names}: {why}"
        ways = ["Branch before the quantize step with `from: NAME`"]
        ways += [f"set target: {' or '.join(fit)}"] if fit else []
        ways += (
            [f"quantize with {' or '.join(schemes_of_target)}"]
            if (schemes_of_target := schemes_for_target(target))
            else []
        )
        runs = sorted(
            width for width, scheme in SCHEMES_BY_BITS.items() if not unsupported_reason(scheme, target)
        )
        mixed = sum(scheme.bits > 0 for scheme in schemes) > 1 and len(runs) > 1
        ways += [f"mixed precision with `mixed_precision: {{bit_widths: {runs}}}`"] if mixed else []
        alone = f"; only {' and '.join(fit)} can" if fit else ""
        raise InputError(f"{why}{alone}. {', or '.join(ways)}.", code="unsupported-scheme", setting="target")
