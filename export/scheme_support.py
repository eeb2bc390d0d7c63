"""Whether a target runs the quantized layers of a model, and how exactly, before it is traced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smelt.core.errors import InputError
from smelt.export.settings import OnnxSettings
from smelt.quantization.schemes.registry import (
    SCHEMES,
    SCHEMES_BY_BITS,
    schemes_for_target,
    supported_dtypes,
    supported_targets,
    unsupported_reason,
    unsupported_scheme_options,
)

if TYPE_CHECKING:
    from smelt.quantization.scheme import Scheme


def file_dtype(settings: OnnxSettings) -> str:
    """Return the precision of the file; for bf16 OpenVINO converts a float32 file itself."""
    return "fp32" if settings.target == "openvino" else settings.dtype


def tolerance_kind(model: Any, settings: OnnxSettings) -> str:
    """Return the tolerance for the files: that of the least exact scheme, or that of their dtype.

    Raises:
        InputError: the target cannot run the model's quantized layers.
    """
    from smelt.export.parity.references import INT8_CONVOLUTIONS
    from smelt.quantization.layers import QuantizedConv2d, QuantizedLinear, layer_scheme

    used_schemes = {layer_scheme(m) for m in model.modules()}
    schemes = [s for name, s in SCHEMES.items() if name in used_schemes]
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

    for matrix in (module.matrix for module in model.modules() if is_quantized(module)):
        if required_options := unsupported_scheme_options(matrix.scheme, matrix.options, target):
            raise InputError(
                f"onnx: target {target} runs scheme {matrix.scheme.name} only with "
                f"{' and '.join(required_options)},"
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
    graph_dtype, allowed_dtypes = file_dtype(settings), supported_dtypes(schemes, settings.target)
    if graph_dtype not in allowed_dtypes:
        raise InputError(
            f"onnx: dtype {graph_dtype} is not supported for target {settings.target} with"
            f" {' and '.join(s.name for s in schemes)} weights, because scales would lose precision. Set"
            f" dtype: {' or '.join(allowed_dtypes)}; the quantized weights do not change.",
            code="unsupported-dtype",
            setting="dtype",
        )


def _require_target(schemes: list[Scheme], target: str) -> None:
    """Require that the target can run all of `schemes`.

    Raises:
        InputError: it cannot.
    """
    refused = {
        scheme.name: reason
        for scheme in schemes
        if (reason := unsupported_reason(scheme, target)) is not None
    }
    if refused:
        targets = supported_targets(schemes)
        names, reason = " and ".join(sorted(refused)), next(iter(refused.values()))
        reason = f"onnx: target {target} cannot run a model quantized with scheme {names}: {reason}"
        suggestions = ["Branch before the quantize step with `from: NAME`"]
        suggestions += [f"set target: {' or '.join(targets)}"] if targets else []
        suggestions += (
            [f"quantize with {' or '.join(schemes_of_target)}"]
            if (schemes_of_target := schemes_for_target(target))
            else []
        )
        runs = sorted(
            width for width, scheme in SCHEMES_BY_BITS.items() if not unsupported_reason(scheme, target)
        )
        mixed = sum(scheme.bits > 0 for scheme in schemes) > 1 and len(runs) > 1
        suggestions += [f"mixed precision with `mixed_precision: {{bit_widths: {runs}}}`"] if mixed else []
        targets_text = f"; only {' and '.join(targets)} can" if targets else ""
        raise InputError(
            f"{reason}{targets_text}. {', or '.join(suggestions)}.",
            code="unsupported-scheme",
            setting="target",
        )
