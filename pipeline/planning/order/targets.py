"""Does the runtime of a step run what the steps above it left?"""

from __future__ import annotations

from typing import Any, cast

from smelt.core.artifact import Format
from smelt.planning.order.draft import Draft, lossy, refused, schemes_of, unfit_options, widths_for
from smelt.recipe.errors import Mistakes
from smelt.recipe.stages import ROOT
from smelt.runtime.schemes.registry import DEFAULT, OBSERVING, SCHEMES, schemes_for
from smelt.runtime.schemes.scheme import TARGETS

# what the targets of `onnx` are called in sentences
RUNTIMES = {
    "ort-cpu": "ONNX Runtime",
    "ort-cuda": "ONNX Runtime on CUDA",
    "tensorrt": "TensorRT",
    "openvino": "OpenVINO",
    "ort-tensorrt": "TensorRT in ONNX Runtime",
    "ort-tensorrt-rtx": "TensorRT for RTX in ONNX Runtime",
}


def check_target(
    draft: Draft, parent: Draft | None, quantized: Draft | None, begins_as: Format, mistakes: Mistakes
) -> None:
    """TensorRT reads only graphs that were made for it, and not every target runs every scheme.

    Args:
        draft: the step.
        parent: what it goes on from; None for the untouched model.
        quantized: the nearest step above it that left codes.
        begins_as: the format of the untouched model.
        mistakes: gets what is wrong.
    """
    if draft.entry.word == "onnx" and draft.target is not None and quantized:
        _check_codes(draft, draft.target, quantized, mistakes)
    made_for = parent.target if parent else None
    if draft.entry.word == "tensorrt" and made_for not in (None, "tensorrt"):
        assert parent is not None
        if begins_as == "onnx":
            mistakes.add(
                draft.entry.path,
                f"tensorrt reads symmetric int8, and '{parent.name}' is for {made_for}; give"
                f" `{parent.entry.word}: {{scheme: {OBSERVING}, target: tensorrt}}`.",
                code="unsupported-scheme",
            )
            return
        mistakes.add(
            draft.entry.path,
            f"tensorrt reads graphs with target tensorrt, but '{parent.name}' has target {made_for};"
            " add `- onnx: {target: tensorrt}` before it, or give `from:` such a step.",
            code="wrong-target",
        )


def _check_codes(draft: Draft, target: str, quantized: Draft, mistakes: Mistakes) -> None:
    """Say where a target does not run the codes of `quantized`, their options, or such a file of them."""
    runtime, back = RUNTIMES[target], f"`from: {quantized.parent or ROOT}`"
    if codes := refused(quantized, target):
        fit = " or ".join(name for name in TARGETS if refused(quantized, name) is None)
        ways = [f"target: {fit}"] if fit else []
        ways += _other_widths(quantized, target) + _other_schemes(quantized, target)
        mistakes.add(
            (*draft.entry.path, "target"),
            f"{runtime} cannot run the {codes} of '{quantized.name}'; give {', or '.join([back, *ways])}.",
            code="unsupported-scheme",
        )
    elif wanted := unfit_options(quantized, target):
        mistakes.add(
            (*draft.entry.path, "target"),
            f"{runtime} runs {wanted} alone; quantize so in '{quantized.name}', or give {back}.",
            code="unsupported-options",
        )
    elif "dtype" not in draft.wrong and (kept := lossy(quantized, draft.settings)):
        mistakes.add(
            (*draft.entry.path, "dtype"),
            f"the scales of '{quantized.name}' would lose digits; give dtype: {kept}.",
            code="low-precision-scales",
        )


def _other_widths(quantized: Draft, target: str) -> list[str]:
    """Return what to write so that `target` runs a step of mixed precision; nothing if nothing does."""
    runs = widths_for(quantized, target)
    if len(runs) < 2:
        return []
    budget = cast(Any, quantized.settings).mixed_precision.target_bits
    least, most = min(runs.values()), max(runs.values())
    beside = (
        "" if budget is None or least <= budget < most else f" and a budget between {least:g} and {most:g}"
    )
    return [f"'{quantized.name}' `mixed_precision: {{bit_widths: {[*runs]}}}`{beside}"]


def _other_schemes(quantized: Draft, target: str) -> list[str]:
    """Return the schemes that `target` runs, as what to write; nothing if there are none.

    Where it runs the linear layers as they are, those of the vocabulary alone.
    """
    settings: Any = quantized.settings
    others = schemes_for(target)
    if not others or schemes_of(quantized) is None:
        return []
    if settings.mixed_precision is not None:
        return [f"quantize with {' or '.join(others)} in place of mixed_precision"]
    if settings.scheme in others:
        tables = [name for name in others if SCHEMES[name].tables]
        return [f"'{quantized.name}' `embedding_scheme: {' or '.join(tables)}`"]
    named = settings.embedding_scheme is not None and settings.embedding_scheme not in others
    return [f"quantize with {' or '.join(others)}{', without `embedding_scheme`' if named else ''}"]


def check_listed(draft: Draft, quantized: Draft | None, mistakes: Mistakes) -> None:
    """A graph of the whole search takes only some rows of the output layer, which not all codes allow."""
    wanted: Any = draft.settings
    if quantized is None or wanted is None or not wanted.generation_graph or draft.target != "ort-cpu":
        return
    settings: Any = quantized.settings
    if schemes_of(quantized) is None or not settings.output_layer:
        return
    scheme = SCHEMES[settings.table_scheme]
    if not scheme.by_word:
        mistakes.add(
            draft.entry.path,
            f"a shortlist cannot restrict an output layer of {scheme.name} codes; give"
            f" '{quantized.name}' `embedding_scheme: {DEFAULT}`, or this step `generation_graph: false`.",
            code="unsupported-scheme",
        )
