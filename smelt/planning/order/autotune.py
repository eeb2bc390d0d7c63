"""Warn about exports with `autotune` that have no operators to choose from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from smelt.core.messages import Message, warning
from smelt.planning.plan import PlanStep
from smelt.recipe.stages import MODEL_STEP
from smelt.runtime.schemes.registry import SCHEMES
from smelt.runtime.schemes.scheme import SchemeOptions


def idle_autotune_warnings(steps: Sequence[PlanStep], has_float_weights: bool) -> Iterator[Message]:
    """Yield a warning for each step whose `autotune` has nothing to choose from.

    Args:
        steps: steps of the plan, parents first.
        has_float_weights: whether the original model is known to have no quantized weights.
    """
    codes: dict[str, tuple[str, Mapping[str, SchemeOptions]]] = {}
    unknown = set() if has_float_weights else {MODEL_STEP}
    for step in steps:
        settings: Any = step.settings
        if step.stage == "quantize":
            codes[step.name] = (
                step.name,
                {name: settings.scheme_options(name) for name in settings.used_schemes()},
            )
        elif not settings.replaces_model:
            unknown |= {step.name} if step.parent in unknown else set()
            codes |= {step.name: codes[step.parent]} if step.parent in codes else {}
        tunes = (
            step.stage == "onnx"
            and getattr(settings, "autotune", False)
            and "autotune" not in step.invalid_settings
        )
        if not tunes or step.name in unknown:
            continue
        at: Any = {"step": step.name, "setting": "autotune", "line": step.line}
        if step.name not in codes:
            yield warning(
                "nothing-quantized",
                "autotune selects operators for quantized layers, but no earlier step quantizes the model."
                " Remove autotune, or put `quantize` before it.",
                **at,
            )
            continue
        maker, schemes = codes[step.name]
        if all(len(SCHEMES[name].operator_variants(options)) < 2 for name, options in schemes.items()):
            yield warning(
                "nothing-to-tune",
                f"autotune has no effect: layers quantized with {' and '.join(schemes)} by '{maker}' can be"
                " exported as one operator only. Remove autotune.",
                **at,
            )
