"""What cannot follow a model whose checkpoint holds codes already (GPTQ, AWQ), or one that has none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from smelt.core.errors import InputError
from smelt.plan.plan import Step
from smelt.recipe.stages import ROOT
from smelt.runtime.models.coded.said import coding_of
from smelt.runtime.schemes.registry import SCHEMES, TAKEN, targets_of
from smelt.runtime.schemes.scheme import graphs_for


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
        elif step.stage == "onnx" and target and graphs_for(str(target)) in SCHEMES[TAKEN].refused:
            yield (
                step.name,
                f"{target} cannot run the {SCHEMES[TAKEN].leaves_as} of the model ({coding.method});"
                f" give target: {' or '.join(targets_of([SCHEMES[TAKEN]]))}, or start from the model that"
                " these were made of.",
            )


@dataclass(frozen=True)
class _Codes:
    """What is known of a model's codes before any work.

    there: whether it has some. scheme: of its layers. used: schemes of all its matrices. unsplit: what keeps
    its layers from being split, and what to do. halved: whether they were.
    """

    there: bool = False
    scheme: str = ""
    used: tuple[str, ...] = ()
    unsplit: str = ""
    halved: bool = False


def codes_lacking(steps: Sequence[Step], config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names of steps that train codes in a way that these cannot, and what to say.

    Args:
        steps: of the plan, parents first.
        config: of the untouched model.
    """
    try:
        there = coding_of(config) is not None
    except InputError:  # said of the model
        return
    known = {ROOT: _Codes(there, TAKEN, (TAKEN,))}
    for step in steps:
        before = known.get(step.parent, _Codes())
        other = getattr(getattr(step.settings, "student", None), "other", False)
        if step.stage == "quantize":
            known[step.name] = _quantized(step.settings)
            continue
        known[step.name] = _Codes() if other else before
        codes = getattr(step.settings, "codes", None)
        if codes is not None and (other or not before.there):
            yield (
                step.name,
                "codes says how a quantized model trains, and nothing is quantized before it; put `quantize`"
                " before it, or leave codes out.",
            )
        elif before.there and not other:
            if message := _untrainable(step.settings, before):
                yield step.name, message
            else:
                known[step.name] = _trained(step.settings, before)


def _quantized(settings: Any) -> _Codes:
    """Return what `quantize` leaves; a graph of somebody else has other settings, and nothing trains it."""
    says = getattr(settings, "schemes", None)
    scheme = str(getattr(settings, "scheme", ""))
    return _Codes(True, scheme, says() if says is not None else (), _unsplit(settings))


def _untrainable(settings: Any, before: _Codes) -> str:
    """Return why a training cannot work on the codes before it, and what to do; "" where it can."""
    codes, adapts = getattr(settings, "codes", None), getattr(settings, "lora", None) is not None
    learns = not before.used or any(SCHEMES[name].learns for name in before.used)
    if codes is not None and codes.scales == "lsq" and not learns:
        return (
            f"codes: scales: lsq learns the scales of codes, and {' and '.join(before.used)} has none to"
            " learn; quantize with another scheme, or leave scales out."
        )
    if codes is not None and codes.split:
        known = " or ".join(name for name, one in SCHEMES.items() if one.halves)
        if not SCHEMES[before.scheme].halves:
            return (
                f"codes: split makes two layers of each {known} one, and those before it are"
                f" {before.scheme}; quantize with scheme: {known}, or leave split out."
            )
        if before.unsplit:
            return f"codes: split: the layers before it have {before.unsplit}"
    if adapts and before.halved:
        return (
            "lora: layers of which codes: split made two have no place for an adapter; leave lora out, which"
            " trains all weights."
        )
    return ""


def _trained(settings: Any, before: _Codes) -> _Codes:
    """Return what a training leaves of the codes before it."""
    codes = getattr(settings, "codes", None)
    if codes is not None and codes.split:
        return replace(before, scheme=SCHEMES[before.scheme].halves, halved=True)
    if getattr(settings, "lora", None) is not None:
        return replace(before, unsplit="adapters beside their codes; leave lora out before it.")
    return before


def _unsplit(quantize: Any) -> str:
    """Return what keeps the codes that `quantize` makes from being split, and what to do; "" if nothing."""
    if getattr(quantize, "granularity", None) == "row":
        return "a scale for each row, and their halves one for each group; quantize with granularity: group."
    if getattr(quantize, "low_rank", None) is not None:
        return "a low-rank pair beside their codes, which cannot be split; leave low_rank out."
    return ""
