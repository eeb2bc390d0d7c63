"""What the onnx stage asks before it traces a model: runtime, memory, codes that the target runs, opset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smelt.core.errors import InputError
from smelt.core.memory import require_memory
from smelt.core.stage import Context

if TYPE_CHECKING:
    from smelt.export.stage.settings import OnnxSettings
    from smelt.runtime.schemes.scheme import Scheme


def require_runtime(settings: OnnxSettings, ctx: Context) -> None:
    """Look for OpenVINO before any work, where it is the target; warn where it has no bf16 here.

    Raises:
        MissingDependencyError: it is not installed.
    """
    if settings.target != "openvino":
        return
    from smelt.runtime.backends.openvino_module import has_bf16, import_openvino

    import_openvino()
    if settings.dtype == "bf16" and not has_bf16():
        ctx.warn(
            "no-bf16",
            "This processor has no bf16, so OpenVINO uses another precision here: parity, scores and latency"
            " may differ on a processor that has it.",
        )


def require_room(model: Any, settings: OnnxSettings) -> None:
    """Refuse an export whose copies of the weights, beside the model, do not fit.

    Raises:
        RunError: they do not fit.
    """
    weights = {t.data_ptr(): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}
    # the exported graph holds them once more; converting and simplifying hold two graphs at a time
    copies = 2 if settings.simplify or precision_in_file(settings) != "fp32" else 1
    require_memory(
        copies * sum(weights.values()),
        "onnx: exporting",
        "Give simplify: false, make the model smaller first, or take a machine with more memory.",
    )


def kind_of(model: Any, settings: OnnxSettings) -> str:
    """Return which tolerance holds for the files: of the scheme that is least exact, or of their dtype.

    Raises:
        InputError: the target cannot run the model's quantized layers.
    """
    from smelt.export.parity.compare import INT8_CONVOLUTIONS
    from smelt.runtime.layers.quantized import QuantizedLinear, scheme_of
    from smelt.runtime.layers.quantized_conv import QuantizedConv2d
    from smelt.runtime.schemes.registry import SCHEMES

    found = {scheme_of(m) for m in model.modules()}
    schemes = [s for name, s in SCHEMES.items() if name in found]
    _require_target(schemes, settings.target)
    _require_options(model, settings.target)
    _require_precision(schemes, settings)
    products = [m.matrix for m in model.modules() if isinstance(m, QuantizedLinear)]
    if any(isinstance(m, QuantizedConv2d) for m in model.modules()):
        return INT8_CONVOLUTIONS
    rounded = {m.scheme.name for m in products if m.scheme.rounds_activations(m.options)}
    names = [name for name in reversed(SCHEMES) if name in rounded]
    return max(names, key=lambda name: SCHEMES[name].drift, default=precision_in_file(settings))


def _require_options(model: Any, target: str) -> None:
    """Refuse to export matrices for a target that runs their scheme with other options alone.

    Raises:
        InputError: there is one.
    """
    from smelt.runtime.layers.quantized import is_quantized
    from smelt.runtime.schemes.registry import unfit

    for matrix in (module.matrix for module in model.modules() if is_quantized(module)):
        if wanted := unfit(matrix.scheme, matrix.options, target):
            raise InputError(
                f"onnx: target {target} runs scheme {matrix.scheme.name} with {' and '.join(wanted)} alone,"
                f" and layers of this model were quantized with {dict(matrix.options)}. Quantize again so, or"
                " set another target.",
                code="unsupported-scheme-options",
                setting="target",
            )


def _require_precision(schemes: list[Scheme], settings: OnnxSettings) -> None:
    """Refuse a precision of the file in which scales lose digits.

    Raises:
        InputError: it is one.
    """
    from smelt.runtime.schemes.registry import precisions_of

    filed, fit = precision_in_file(settings), precisions_of(schemes, settings.target)
    if filed not in fit:
        raise InputError(
            f"onnx: dtype {filed} of a model that was quantized with {' and '.join(s.name for s in schemes)}"
            f" is not there for target {settings.target}: scales would lose digits. Set dtype:"
            f" {' or '.join(fit)}; the codes stay as they are.",
            code="unsupported-dtype",
            setting="dtype",
        )


BF16_OPSET = 22


def opset_of(settings: OnnxSettings, model: Any) -> int:
    """Return the opset of the settings, or a newer one that the quantized weights' operators or bf16 need.

    Conv, Sin and Cos take bfloat16 from opset 22 on (https://onnx.ai/onnx/operators/onnx__Conv.html).
    """
    from smelt.runtime.layers.quantized import scheme_of
    from smelt.runtime.schemes.registry import SCHEMES

    found = {scheme_of(module) for module in model.modules()}
    names = [name for name in SCHEMES if name in found]
    of_dtype = BF16_OPSET if precision_in_file(settings) == "bf16" else 0
    return max(
        [settings.opset, of_dtype, *(SCHEMES[n].oldest_opset.get(settings.graphs_of, 0) for n in names)]
    )


def precision_in_file(settings: OnnxSettings) -> str:
    """Return the precision of the file; OpenVINO makes its bf16 of float32."""
    return "fp32" if settings.target == "openvino" else settings.dtype


def _require_target(schemes: list[Scheme], target: str) -> None:
    """Refuse to export for a target that cannot run all of `schemes`.

    Raises:
        InputError: it cannot.
    """
    from smelt.runtime.schemes.registry import WIDTHS, refusal, schemes_for, targets_of

    refused = {scheme.name: why for scheme in schemes if (why := refusal(scheme, target)) is not None}
    if refused:
        fit = targets_of(schemes)
        names, why = " and ".join(sorted(refused)), next(iter(refused.values()))
        why = f"onnx: target {target} cannot run a model that was quantized with scheme {names}: {why}"
        ways = ["Branch off before the quantize step with `from: NAME`"]
        ways += [f"set target: {' or '.join(fit)}"] if fit else []
        ways += [f"quantize with {' or '.join(others)}"] if (others := schemes_for(target)) else []
        runs = sorted(width for width, scheme in WIDTHS.items() if not refusal(scheme, target))
        mixed = sum(scheme.bits > 0 for scheme in schemes) > 1 and len(runs) > 1
        ways += [f"mixed precision with `mixed_precision: {{bit_widths: {runs}}}`"] if mixed else []
        alone = f", which only {' and '.join(fit)} does" if fit else ""
        raise InputError(f"{why}{alone}. {', or '.join(ways)}.", code="unsupported-scheme", setting="target")
