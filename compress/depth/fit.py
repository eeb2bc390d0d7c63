"""How many layers of each stack stay, known from a model's config alone (no torch)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from smelt.core.errors import nearest
from smelt.core.messages import Message, mistake
from smelt.core.text import article
from smelt.families.family import Family
from smelt.families.registry import blockless, find_family

# What settings call the stacks of layers, of which each family has one or two.
STACKS = ("encoder_layers", "decoder_layers", "layers")
_DEFAULT_KEEP = 0.5


def layers_kept(settings: Any, stacks: Mapping[str, int]) -> dict[str, int | list[int]]:
    """Return by stack how many layers stay, or which.

    Args:
        settings: a `DropLayersSettings`. A stack that it names gets what is said there; the others
        `keep_ratio` of their
            layers, the nearest whole number (a half counts up), at least one. Where stacks are named and
            `keep_ratio` is not, the others stay whole.
        stacks: the stacks of the model and how many layers each has.
    """
    keep = fraction_kept(settings)
    found: dict[str, int | list[int]] = {}
    for name, count in stacks.items():
        said = getattr(settings, name)
        found[name] = max(1, math.floor(keep * count + 0.5)) if said is None else said
    return found


def fraction_kept(settings: Any) -> float:
    """Return the fraction of layers that stays in stacks that the settings do not name."""
    if settings.keep_ratio is not None:
        return float(settings.keep_ratio)
    return 1.0 if any(getattr(settings, name) is not None for name in STACKS) else _DEFAULT_KEEP


def check_depth(settings: Any, config: Mapping[str, Any]) -> tuple[list[Message], dict[str, Any]]:
    """Compare the layers that are to stay with those of a model.

    Args:
        settings: a `DropLayersSettings`.
        config: the Hugging Face config of the model that the step gets, as a dict.

    Returns:
        Each mistake with its setting, and the config of the result.
    """
    family, after = find_family(config), dict(config)
    mistakes: list[Message] = []
    if family is None:
        return [], after
    if (lack := blockless(config)) is not None:
        return [mistake("does-not-fit-model", f"{lack}, of which it takes some away.")], after
    if settings.parts:
        return check_parts(settings, config), after
    stacks = {stack.name: stack for stack in family.stacks(config)}
    kind = config.get("model_type")
    for name in STACKS:
        if getattr(settings, name) is not None and name not in stacks:
            there = " and ".join(stacks)
            mistakes.append(
                mistake(
                    "unknown-stack",
                    f"a {kind} model has no such stack; it has {there}.{nearest(name, stacks)}",
                    setting=name,
                )
            )
    counts = {name: count for name, stack in stacks.items() if (count := stack.count(config)) is not None}
    for name, choice in layers_kept(settings, counts).items():
        wrong = _wrong(family, settings, choice, counts[name])
        if wrong:
            setting = name if getattr(settings, name) is not None else "importance"
            mistakes.append(mistake(wrong.code, wrong.message, setting=setting))
        after[stacks[name].setting] = choice if isinstance(choice, int) else len(choice)
    return mistakes, after


def check_parts(settings: Any, config: Mapping[str, Any]) -> list[Message]:
    """Return what is wrong, with its setting, where layers of a model of this config have no such parts."""
    family = find_family(config)
    if family is None:
        return []
    stacks = {stack.name: stack for stack in family.stacks(config)}
    kind = config.get("model_type")
    found = check_kinds(settings.parts, config, "targets")
    for name in STACKS:
        said = getattr(settings, name)
        if said is None:
            continue
        if name not in stacks:
            there = " and ".join(stacks)
            found.append(
                mistake(
                    "unknown-stack",
                    f"{article(str(kind))} model has no such stack; it has {there}.{nearest(name, stacks)}",
                    setting=name,
                )
            )
            continue
        count = stacks[name].count(config)
        kinds = [part for part in settings.parts if part != "cross-attention" or name == "decoder_layers"]
        wrong = None if count is None else _wrong_parts(said, count, len(kinds))
        if wrong:
            found.append(mistake(wrong.code, wrong.message, setting=name))
    return found


def check_kinds(kinds: Sequence[str], config: Mapping[str, Any], setting: str) -> list[Message]:
    """Return what is wrong where layers of a model of this config have no parts of some of these kinds.

    setting: names the kinds.
    """
    family = find_family(config)
    if family is None or family.kind == "seq2seq" or "cross-attention" not in kinds:
        return []
    return [
        mistake(
            "unknown-part",
            f"{article(str(config.get('model_type')))} model has no cross-attention; it has attention and"
            " ffn.",
            setting=setting,
        )
    ]


def _wrong_parts(said: int | list[int], layers: int, kinds: int) -> Message | None:
    """Return what is wrong with the parts that are to stay in a stack of so many whole layers, else None."""
    if not kinds:  # an encoder attends to nothing but itself
        return mistake("unknown-part", "its layers have no cross-attention; remove it.")
    if isinstance(said, list):
        return None if _rising(said, layers) else _not_rising(said, layers)
    if said > kinds * layers:
        return mistake("more-than-model-has", f"{said} parts cannot stay of {kinds * layers}.")
    if said < kinds:
        return mistake("too-few-kept", f"{said}: one of each kind stays, which makes {kinds}.")
    return None


def _rising(numbers: list[int], below: int) -> bool:
    return sorted(set(numbers)) == numbers and all(0 <= number < below for number in numbers)


def _not_rising(numbers: list[int], below: int) -> Message:
    return mistake("wrong-layer-numbers", f"expected rising numbers from 0 to {below - 1}, read {numbers}.")


def _wrong(family: Family, settings: Any, choice: int | list[int], there: int) -> Message | None:
    """Return what is wrong with the layers of one stack, None where nothing is."""
    if isinstance(choice, int):
        if choice > there:
            return mistake("more-than-model-has", f"{choice} layers cannot stay of {there}.")
        gone = settings.importance == "last" and choice < there
    else:
        if not _rising(choice, there):
            return _not_rising(choice, there)
        gone = 0 not in choice
    if gone and family.first_stays is not None:
        return mistake(
            "first-layer-required",
            f"the first layer of a {family.name} model cannot go: {family.first_stays}.",
        )
    return None
