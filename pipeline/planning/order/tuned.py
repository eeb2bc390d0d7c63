"""Has an export that measures operators any to choose from?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from smelt.core.messages import Message, warning
from smelt.planning.plan import Step
from smelt.recipe.stages import ROOT
from smelt.runtime.schemes.registry import SCHEMES
from smelt.runtime.schemes.scheme import Options


def idle_tune(steps: Sequence[Step], floats: bool) -> Iterator[Message]:
    """Yield where `autotune` has nothing to choose from, and what to do.

    Args:
        steps: of the plan, parents first.
        floats: whether the untouched model is known to have no codes.
    """
    codes: dict[str, tuple[str, Mapping[str, Options]]] = {}
    unknown = set() if floats else {ROOT}
    for step in steps:
        settings: Any = step.settings
        if step.stage == "quantize":
            codes[step.name] = (step.name, {name: settings.options(name) for name in settings.schemes()})
        elif not settings.begins_anew:
            unknown |= {step.name} if step.parent in unknown else set()
            codes |= {step.name: codes[step.parent]} if step.parent in codes else {}
        tunes = step.stage == "onnx" and getattr(settings, "autotune", False) and "autotune" not in step.wrong
        if not tunes or step.name in unknown:
            continue
        at: Any = {"step": step.name, "setting": "autotune", "line": step.line}
        if step.name not in codes:
            yield warning(
                "nothing-quantized",
                "autotune chooses between operators for quantized layers, but nothing is quantized before it."
                " Remove autotune, or put `quantize` before it.",
                **at,
            )
            continue
        maker, schemes = codes[step.name]
        if all(len(SCHEMES[name].forms(options)) < 2 for name, options in schemes.items()):
            yield warning(
                "nothing-to-tune",
                f"autotune: layers of {' and '.join(schemes)}, as '{maker}' quantizes them, can be exported"
                f" as"
                " one operator only; nothing is chosen.",
                **at,
            )
