"""Check that the target runtime of a step supports the output of the steps before it."""

from __future__ import annotations

from typing import Any, cast

from smelt.core.artifact import Format
from smelt.planning.order.step_draft import (
    StepDraft,
    lost_precision,
    quantization_schemes,
    supported_bit_widths,
    unsupported_layers,
    unsupported_options,
)
from smelt.recipe.mistakes import Mistakes
from smelt.recipe.stages import MODEL_STEP
from smelt.runtime.schemes.registry import DEFAULT_SCHEME, SCHEMES, STATIC_SCHEME, schemes_for_target
from smelt.runtime.schemes.scheme import EXPORT_TARGETS

# names of the targets of `onnx` in messages
RUNTIME_NAMES = {
    "ort-cpu": "ONNX Runtime",
    "ort-cuda": "ONNX Runtime on CUDA",
    "tensorrt": "TensorRT",
    "openvino": "OpenVINO",
    "ort-tensorrt": "TensorRT in ONNX Runtime",
    "ort-tensorrt-rtx": "TensorRT for RTX in ONNX Runtime",
}


def check_target(
    draft: StepDraft,
    parent: StepDraft | None,
    quantized: StepDraft | None,
    start_format: Format,
    mistakes: Mistakes,
) -> None:
    """Check that a step's target supports the quantized weights, and that `tensorrt` gets its own graphs.

    Args:
        draft: the step.
        parent: its parent step; None for the original model.
        quantized: the nearest earlier step that quantized the model.
        start_format: the format of the original model.
        mistakes: receives the mistakes.
    """
    if draft.entry.stage == "onnx" and draft.target is not None and quantized:
        _check_quantization(draft, draft.target, quantized, mistakes)
    made_for = parent.target if parent else None
    if draft.entry.stage == "tensorrt" and made_for not in (None, "tensorrt"):
        assert parent is not None
        if start_format == "onnx":
            mistakes.add(
                draft.entry.path,
                f"tensorrt needs symmetric int8, but '{parent.name}' has target {made_for}. Use"
                f" `{parent.entry.stage}: {{scheme: {STATIC_SCHEME}, target: tensorrt}}`.",
                code="unsupported-scheme",
            )
            return
        mistakes.add(
            draft.entry.path,
            f"tensorrt needs a graph with target tensorrt, but '{parent.name}' has target {made_for}."
            " Add `- onnx: {target: tensorrt}` before it, or set `from:` to such a step.",
            code="wrong-target",
        )


def _check_quantization(draft: StepDraft, target: str, quantized: StepDraft, mistakes: Mistakes) -> None:
    """Add a mistake if a target does not support the schemes of `quantized`, their options or the dtype."""
    runtime, back = RUNTIME_NAMES[target], f"`from: {quantized.parent or MODEL_STEP}`"
    if codes := unsupported_layers(quantized, target):
        fit = " or ".join(name for name in EXPORT_TARGETS if unsupported_layers(quantized, name) is None)
        ways = [f"target: {fit}"] if fit else []
        ways += _supported_width_settings(quantized, target) + _supported_scheme_settings(quantized, target)
        mistakes.add(
            (*draft.entry.path, "target"),
            f"{runtime} cannot run the {codes} of '{quantized.name}'. Use {', or '.join([back, *ways])}.",
            code="unsupported-scheme",
        )
    elif wanted := unsupported_options(quantized, target):
        mistakes.add(
            (*draft.entry.path, "target"),
            f"{runtime} supports only {wanted}. Set these options in '{quantized.name}', or use {back}.",
            code="unsupported-options",
        )
    elif "dtype" not in draft.invalid_settings and (kept := lost_precision(quantized, draft.settings)):
        mistakes.add(
            (*draft.entry.path, "dtype"),
            f"the scales of '{quantized.name}' would lose precision in this dtype. Set dtype: {kept}.",
            code="low-precision-scales",
        )


def _supported_width_settings(quantized: StepDraft, target: str) -> list[str]:
    """Return the settings with which `target` supports a mixed-precision step; empty if there are none."""
    runs = supported_bit_widths(quantized, target)
    if len(runs) < 2:
        return []
    budget = cast(Any, quantized.settings).mixed_precision.target_bits
    least, most = min(runs.values()), max(runs.values())
    beside = (
        "" if budget is None or least <= budget < most else f" and target_bits between {least:g} and {most:g}"
    )
    return [f"'{quantized.name}' `mixed_precision: {{bit_widths: {[*runs]}}}`{beside}"]


def _supported_scheme_settings(quantized: StepDraft, target: str) -> list[str]:
    """Return the settings with schemes that `target` supports; empty if there are none.

    If it supports the scheme of the linear layers, only embedding schemes are returned.
    """
    settings: Any = quantized.settings
    others = schemes_for_target(target)
    if not others or quantization_schemes(quantized) is None:
        return []
    if settings.mixed_precision is not None:
        return [f"quantize with {' or '.join(others)} in place of mixed_precision"]
    if settings.scheme in others:
        tables = [name for name in others if SCHEMES[name].supports_embeddings]
        return [f"'{quantized.name}' `embedding_scheme: {' or '.join(tables)}`"]
    named = settings.embedding_scheme is not None and settings.embedding_scheme not in others
    return [f"quantize with {' or '.join(others)}{', without `embedding_scheme`' if named else ''}"]


def check_shortlist_scheme(draft: StepDraft, quantized: StepDraft | None, mistakes: Mistakes) -> None:
    """Check that the output layer's scheme allows a shortlist, which reads only some rows of the matrix."""
    wanted: Any = draft.settings
    if quantized is None or wanted is None or not wanted.generation_graph or draft.target != "ort-cpu":
        return
    settings: Any = quantized.settings
    if quantization_schemes(quantized) is None or not settings.output_layer:
        return
    scheme = SCHEMES[settings.resolved_embedding_scheme]
    if not scheme.supports_shortlist:
        mistakes.add(
            draft.entry.path,
            f"a shortlist does not support an output layer quantized with {scheme.name}. Set in"
            f" '{quantized.name}' `embedding_scheme: {DEFAULT_SCHEME}`, or in this step `generation_graph:"
            " false`.",
            code="unsupported-scheme",
        )
