"""What cannot follow a model whose checkpoint holds codes already (GPTQ, AWQ), or one that has none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from smelt.core.errors import InputError
from smelt.plan.plan import Step
from smelt.recipe.stages import ROOT
from smelt.runtime.models.coded.said import coding_of
from smelt.runtime.schemes.registry import SCHEMES, TAKEN, defaults, targets_of, unfit


def coded_mistakes(steps: Sequence[Step], config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names of steps that need floats, or a target that runs no such codes, and what to say.

    Args:
        steps: of the plan, parents first.
        config: of the untouched model.
    """
    try:
        coding = coding_of(config)
    except InputError:  # said of the model
        return
    if coding is None:
        return
    coded = {ROOT}
    taken = SCHEMES[TAKEN]
    fit = [target for target in targets_of([taken]) if not unfit(taken, defaults(taken), target)]
    for step in steps:
        if step.parent not in coded:
            continue
        if step.stage != "distill":  # which may go on with another student
            coded.add(step.name)
        target = getattr(step.settings, "target", None)
        if getattr(step.cls, "needs_float", False):
            yield (
                step.name,
                f"{step.stage} works on floats, and the weights of the model are {coding.method} codes; start"
                " from the model that these were made of.",
            )
        elif step.stage == "onnx" and target and str(target) not in fit:
            yield (
                step.name,
                f"{target} cannot run the {taken.leaves_as} of the model ({coding.method});"
                f" give target: {' or '.join(fit)}, or start from the model that"
                " these were made of.",
            )


def codes_lacking(steps: Sequence[Step], config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names of steps that say how codes train where there are none, and what to say.

    Args:
        steps: of the plan, parents first.
        config: of the untouched model.
    """
    try:
        coded = set[str]() if coding_of(config) is None else {ROOT}
    except InputError:  # said of the model
        return
    schemes = {ROOT: TAKEN}
    # of those that were used one must have scales that can be learned
    learned: dict[str, tuple[str, ...]] = {ROOT: (TAKEN,)}
    whole: dict[str, str] = {}
    for step in steps:
        schemes[step.name] = str(getattr(step.settings, "scheme", schemes.get(step.parent, "")))
        own: Any = step.settings
        # a graph of somebody else is quantized by other settings, and nothing trains it
        says = getattr(own, "schemes", None)
        used = says() if says is not None else learned.get(step.parent, ())
        learned[step.name] = used
        codes = getattr(step.settings, "codes", None)
        other = getattr(getattr(step.settings, "student", None), "other", False)
        learns = not used or any(SCHEMES[name].learns for name in used)
        if codes is not None and codes.scales == "lsq" and step.parent in coded and not (learns or other):
            yield (
                step.name,
                f"codes: scales: lsq learns the scales of codes, and {' and '.join(used)} has none to"
                " learn; quantize with another scheme, or leave scales out.",
            )
        whole[step.name] = _unsplit(own) if step.stage == "quantize" else whole.get(step.parent, "")
        if codes is not None and codes.split and step.parent in coded:
            before, known = schemes[step.name], [name for name, one in SCHEMES.items() if one.halves]
            if before not in known:
                yield (
                    step.name,
                    f"codes: split makes two layers of each {' or '.join(known)} one, and those before it are"
                    f" {before}; quantize with scheme: {' or '.join(known)}, or leave split out.",
                )
            elif whole[step.name]:
                yield step.name, f"codes: split: the layers before it have {whole[step.name]}"
            else:
                schemes[step.name] = SCHEMES[before].halves
        if step.stage == "quantize" or (step.parent in coded and not other):
            coded.add(step.name)
        elif codes is not None:
            yield (
                step.name,
                "codes says how a quantized model trains, and nothing is quantized before it; put `quantize`"
                " before it, or leave codes out.",
            )


def _unsplit(quantize: Any) -> str:
    """Return what keeps the codes that `quantize` makes from being split, and what to do; "" if nothing."""
    if getattr(quantize, "granularity", None) == "row":
        return "a scale for each row, and their halves one for each group; quantize with granularity: group."
    if getattr(quantize, "low_rank", None) is not None:
        return "a low-rank pair beside their codes, which cannot be split; leave low_rank out."
    return ""
