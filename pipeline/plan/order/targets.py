"""Does the runtime of a step run what the steps above it left?"""

from __future__ import annotations

from typing import Any

from smelt.core.artifact import Format
from smelt.plan.order.draft import Draft, refused
from smelt.recipe.errors import Mistakes
from smelt.recipe.stages import ROOT
from smelt.runtime.schemes.registry import DEFAULT, OBSERVING, SCHEMES, schemes_for
from smelt.runtime.schemes.scheme import TARGETS

_RUNTIMES = {
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
    target = draft.target
    if draft.entry.word == "onnx" and target is not None and quantized:
        runtime = _RUNTIMES.get(target, target)
        codes = refused(quantized, target)
        if codes:
            fit = " or ".join(name for name in TARGETS if refused(quantized, name) is None)
            others = " or ".join(schemes_for(target))
            mend = f"target: {fit}" if fit else f"quantize with {others}" if others else ""
            mistakes.add(
                (*draft.entry.path, "target"),
                f"{runtime} cannot run the {codes} of '{quantized.name}'; give"
                f" `from: {quantized.parent or ROOT}`{f', or {mend}' if mend else ''}.",
            )
    made_for = parent.target if parent else None
    if draft.entry.word == "tensorrt" and made_for not in (None, "tensorrt"):
        assert parent is not None
        if begins_as == "onnx":
            mistakes.add(
                draft.entry.path,
                f"tensorrt reads symmetric int8, and '{parent.name}' is for {made_for}; give"
                f" `{parent.entry.word}: {{scheme: {OBSERVING}, target: tensorrt}}`.",
            )
            return
        mistakes.add(
            draft.entry.path,
            f"tensorrt reads graphs with target tensorrt, but '{parent.name}' has target {made_for};"
            " add `- onnx: {target: tensorrt}` before it, or give `from:` such a step.",
        )


def check_listed(draft: Draft, quantized: Draft | None, mistakes: Mistakes) -> None:
    """A graph of the whole search takes only some rows of the output layer, which not all codes allow."""
    settings: Any = quantized.settings if quantized else None
    wanted: Any = draft.settings
    if settings is None or wanted is None or not wanted.loop or draft.target != "ort-cpu":
        return
    scheme = SCHEMES.get(getattr(settings, "table_scheme", ""))
    if quantized is not None and scheme is not None and settings.head and not scheme.by_word:
        mistakes.add(
            draft.entry.path,
            f"a shortlist cannot restrict an output layer of {scheme.name} codes; give"
            f" '{quantized.name}' `vocabulary: {DEFAULT}`, or this step `loop: false`.",
        )
