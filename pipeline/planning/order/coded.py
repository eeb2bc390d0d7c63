"""What cannot follow a model whose checkpoint holds codes already (GPTQ, AWQ), or one that has none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from smelt.compress.behind_codes import BEHIND_QUANTIZE, IN_TRAINING, CodesBefore
from smelt.core.messages import Message, warning
from smelt.look.coded_model import CodedModel
from smelt.planning.order.targets import RUNTIMES
from smelt.planning.plan import Step
from smelt.recipe.stages import ROOT
from smelt.runtime.models.coded.said import coding_of
from smelt.runtime.schemes.registry import SCHEMES


def coded_mistakes(steps: Sequence[Step], coded: CodedModel | None) -> Iterator[tuple[str, str, str]]:
    """Yield the names of steps that need floats, or a target that runs no such codes.

    With each what to say, and a code.

    Args:
        steps: of the plan, parents first.
        coded: the codes of the untouched model; None for floats.
    """
    if coded is None:
        return
    kept = {ROOT}
    what = f"works on floats, and the weights of the model are {coded.said} codes"
    for step in steps:
        if step.parent not in kept:
            continue
        if step.stage != "distill":  # which may go on with another student
            kept.add(step.name)
        target = getattr(step.settings, "target", None)
        if getattr(step.cls, "needs_float", False):
            yield step.name, f"{step.stage} {what}; start from {coded.again}.", "already-quantized"
        elif zeros := next((n for n in IN_TRAINING if getattr(step.settings, n, None)), None):
            said = f"{zeros} {what}; leave it out, or start from {coded.again}."
            yield step.name, said, BEHIND_QUANTIZE
        elif step.stage == "onnx" and target and (codes := coded.refused_by(str(target))):
            ways = [f"give target: {' or '.join(coded.targets)}"] if coded.targets else []
            yield (
                step.name,
                f"{RUNTIMES[str(target)]} cannot run the {codes} of the model ({coded.said});"
                f" {', or '.join([*ways, f'start from {coded.again}'])}.",
                "unsupported-scheme",
            )


def codes_lost(steps: Sequence[Step], config: Mapping[str, Any]) -> Iterator[Message]:
    """Yield which steps lose what the checkpoint's tool chose with care: those that decide codes anew.

    Args:
        steps: of the plan, parents first.
        config: of the untouched model, whose codes are read.
    """
    if (coding := coding_of(config)) is None:
        return
    kept = {ROOT}
    for step in steps:
        settings: Any = step.settings
        if step.parent not in kept or settings.begins_anew:
            continue
        learned = getattr(getattr(settings, "qat", None), "scales", None) == "lsq"
        if getattr(settings, "moves_codes", False) and not learned:
            yield warning(
                "quantized-weights-lost",
                "Training recomputes the scales and rounds to nearest, so the quantized weights that"
                f" {coding.method} optimized are lost. qat: {{scales: lsq}} starts from them, and lora"
                " keeps them.",
                step=step.name,
            )
        else:
            kept.add(step.name)


@dataclass(frozen=True)
class _Coded:
    """The codes that a step leaves.

    layers: the scheme of the linear layers. used: all schemes, of which one must have scales that can be
    learned; () where nobody knows them. unsplit: code and text of what keeps the layers from being split, and
    what to do; None for nothing. split: whether they are halves. one_bit: whether they have binary inputs.
    floats: whether patterns leave some layers float. pairs: whether something of low rank stands beside the
    codes.
    """

    layers: str
    used: tuple[str, ...]
    unsplit: tuple[str, str] | None = None
    split: bool = False
    one_bit: bool = False
    floats: bool = False
    pairs: bool = False


def codes_lacking(steps: Sequence[Step], coded: CodedModel | None) -> Iterator[tuple[str, str, str]]:
    """Yield the names of steps that change codes as these cannot be, or where there are none.

    With each what to say, and a code.

    Args:
        steps: of the plan, parents first.
        coded: the codes of the untouched model; None for floats.
    """
    left = {}
    if coded is not None:
        used = tuple(coded.schemes)
        left[ROOT] = _Coded(used[0], used)
    known = {ROOT}  # what goes on from a mistake is not judged: nobody knows its codes
    for step in steps:
        settings: Any = step.settings
        if step.stage == "quantize":
            if not step.wrong:
                known.add(step.name)
                left[step.name] = _made_by(settings)
            continue
        if step.parent not in known:
            continue
        known.add(step.name)
        codes = getattr(settings, "qat", None)
        other = settings.begins_anew
        before = None if other else left.get(step.parent)
        if before is not None:
            for message, code in _misfits(settings, before):
                yield step.name, message, code
            unfit = getattr(step.cls, "unfit_for_codes", None)
            if unfit and (why := unfit(settings, _as_stages_know(before))) is not None:
                yield step.name, why, BEHIND_QUANTIZE
            left[step.name] = _behind(settings, before)
        elif codes is not None:
            yield (
                step.name,
                "codes says how a quantized model trains, and nothing is quantized before it; put `quantize`"
                " before it, or leave codes out.",
                "not-quantized",
            )


def _as_stages_know(before: _Coded) -> CodesBefore:
    """Return the codes of the linear layers as stages ask for them."""
    schemes = tuple(name for name in before.used if name in before.layers.split(" and "))
    return CodesBefore(schemes, before.pairs, before.split, before.one_bit)


def _made_by(quantize: Any) -> _Coded:
    """Return what `quantize` leaves; a graph of somebody else has other settings, and nothing trains it."""
    says = getattr(quantize, "schemes", None)
    used = says() if says is not None else ()
    mixed = getattr(quantize, "mixed_precision", None) is not None
    layers = " and ".join(used) if mixed else str(getattr(quantize, "scheme", ""))
    unsplit = None
    if getattr(quantize, "granularity", None) == "channel":
        unsplit = (
            "row-scales-not-splittable",
            "a scale for each row, and their halves one for each group; quantize with granularity: group.",
        )
    elif getattr(quantize, "correction", None) is not None:
        text = "a low-rank pair beside their codes, which cannot be split; leave low_rank_correction out."
        unsplit = ("low-rank-not-splittable", text)
    pairs = getattr(quantize, "correction", None) is not None
    return _Coded(layers, used, unsplit, floats=bool(getattr(quantize, "exclude", None)), pairs=pairs)


def _misfits(settings: Any, before: _Coded) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with how a step trains the codes that it gets, each with a code."""
    codes, halved = getattr(settings, "qat", None), [name for name, one in SCHEMES.items() if one.halves]
    if getattr(settings, "lora", None) is not None and before.split and not before.floats:
        yield (
            "lora: adapters stand beside layers of codes, and qat: weight_splitting made two of each before"
            " it, which have no place for one; leave lora out, or weight_splitting out.",
            "lora-on-split-layers",
        )
    if codes is None:
        return
    if codes.scales == "lsq" and before.used and not any(SCHEMES[name].learns for name in before.used):
        yield (
            f"qat: scales: lsq learns the scales of codes, and {' and '.join(before.used)} has none to"
            " learn; quantize with another scheme, or leave scales out.",
            "scales-not-learned",
        )
    if codes.weight_splitting and before.layers not in halved:
        yield (
            f"qat: weight_splitting makes two layers of each {' or '.join(halved)} one, and those before it"
            f" are {before.layers}; quantize with scheme: {' or '.join(halved)}, or leave weight_splitting"
            " out.",
            "unsupported-scheme",
        )
    elif codes.weight_splitting and before.unsplit:
        code, text = before.unsplit
        yield f"qat: weight_splitting: the layers before it have {text}", code
    if codes.activations == "one-bit":
        yield from _whole_inputs(_behind(settings, before).layers, before.pairs)


def _whole_inputs(scheme: str, pairs: bool) -> Iterator[tuple[str, str]]:
    """Yield why layers of codes cannot have binary inputs, and what to do; each with a code.

    pairs: whether a low-rank pair is beside the codes.
    """
    known = [name for name, one in SCHEMES.items() if one.binary_inputs]
    if scheme not in known:
        yield (
            f"qat: activations: one-bit is for layers of scheme {' or '.join(known)}, and those before it"
            f" are {scheme}; quantize with scheme: {' or '.join(known)}, or leave activations out.",
            "unsupported-scheme",
        )
    elif pairs:
        yield (
            "qat: activations: one-bit: the layers before it have a low-rank pair beside their codes, which"
            " is fed what they are; leave low_rank_correction or lora out before it.",
            "low-rank-beside-binary-inputs",
        )


def _behind(settings: Any, before: _Coded) -> _Coded:
    """Return what a step leaves of the codes that it gets."""
    codes = getattr(settings, "qat", None)
    if getattr(settings, "lora", None) is not None:
        text = "adapters beside their codes, which cannot be split; leave lora out before it."
        beside = ("adapters-not-splittable", text)
        unsplit = before.unsplit if before.floats else before.unsplit or beside
        return replace(before, unsplit=unsplit, pairs=True)
    if codes is not None and codes.activations == "one-bit":
        before = replace(before, one_bit=True)
    if codes is not None and codes.weight_splitting and before.layers in SCHEMES and not before.unsplit:
        halves = SCHEMES[before.layers].halves
        used = tuple(halves if name == before.layers else name for name in before.used)
        return replace(before, layers=halves, used=used, split=True) if halves else before
    return before
