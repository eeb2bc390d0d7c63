"""Has an export that measures operators any to choose from?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from smelt.core.errors import InputError
from smelt.plan.plan import Step
from smelt.recipe.stages import ROOT
from smelt.runtime.models.coded.said import coding_of
from smelt.runtime.schemes.registry import SCHEMES, TAKEN, defaults
from smelt.runtime.schemes.scheme import Options


def idle_tune(steps: Sequence[Step], config: Mapping[str, Any]) -> Iterator[str]:
    """Yield where `tune` has nothing to choose from, and what to do.

    Args:
        steps: of the plan, parents first.
        config: of the untouched model; empty where it is not known.
    """
    codes: dict[str, tuple[str, Mapping[str, Options]]] = {}
    try:
        if coding_of(config) is not None:
            codes[ROOT] = (ROOT, {TAKEN: defaults(SCHEMES[TAKEN])})
    except InputError:  # said of the model
        return
    for step in steps:
        settings: Any = step.settings
        if step.stage == "quantize":
            codes[step.name] = (step.name, {name: settings.options(name) for name in settings.schemes()})
        elif step.parent in codes and not getattr(getattr(settings, "student", None), "other", False):
            codes[step.name] = codes[step.parent]
        if step.stage != "onnx" or not settings.tune or "tune" in step.wrong:
            continue
        where = f"line {step.line}: {step.name}: tune"
        if step.name not in codes:
            yield (
                f"{where} chooses between operators of codes, and nothing is quantized before it: products in"
                " float have one operator. Leave tune out, or put `quantize` before it."
            )
            continue
        maker, schemes = codes[step.name]
        if all(len(SCHEMES[name].forms(options)) < 2 for name, options in schemes.items()):
            yield (
                f"{where}: codes of {' and '.join(schemes)} as '{maker}' makes them leave as one operator"
                " alone; nothing is chosen."
            )
