"""Which units of a model can be pruned, known from its config alone (no torch)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from smelt.compress.prune.settings import PruneSettings
from smelt.core.data import SIMILARITY, Task
from smelt.core.errors import InputError
from smelt.core.messages import Message, mistake, warning
from smelt.core.text import article
from smelt.families.registry import FAMILIES, blockless, find_family
from smelt.runtime.text.limits import position_limit

# Why a sentence embedder keeps its width.
OF_VECTORS = (
    "the vectors of a sentence embedder are its hidden states, and narrower ones cannot be compared with"
    " those that are stored. Set targets: [heads, ffn]."
)


def check_units(what: Sequence[str], config: Mapping[str, Any]) -> list[Message]:
    """Compare the kinds of units that `prune` takes away with those that a model can lose.

    Args:
        what: heads, ffn, width, channels.
        config: the Hugging Face config of the model that the step gets, as a dict.

    Returns:
        Each mistake, with its setting.
    """
    family = find_family(config)
    if "channels" in what:
        if family is None or family.chain is not None:
            return []
        kind = article(family.name)
        text = f"{kind} model has no chains of convolutions. Set targets: [heads, ffn]."
        return [mistake("does-not-fit-model", text, setting="targets")]
    if (lack := blockless(config)) is not None:
        text = f"{lack}. Of its convolutions channels can go: set targets: [channels]."
        return [mistake("does-not-fit-model", text, setting="targets")]
    if "width" in what:
        return []
    reason = _fixed_heads(config)
    if not reason or set(what) != {"heads"}:
        return []
    return [mistake("fixed-heads", f"{reason} Set targets: [ffn].", setting="targets")]


def check_length(length: int | None, config: Mapping[str, Any]) -> list[Message]:
    """Compare the tokens of a text that a budget is for with those that a model has places for.

    Args:
        length: tokens; None where the model's own limit decides.
        config: as in `check_units`.

    Returns:
        What is wrong, with its setting, or nothing.
    """
    places = position_limit(config)
    if length is None or places is None or length <= places:
        return []
    return [
        mistake(
            "longer-than-model",
            f"{length:,} tokens, and the model has places for {places:,}.",
            setting="budget.sequence_length",
        )
    ]


def channels_kept(count: int, settings: PruneSettings) -> int:
    """Return how many of `count` channels stay, as of neurons: a multiple of `multiple_of`, at least one."""
    wanted = count * settings.ratio("width") / settings.multiple_of
    return min(count, max(1, math.floor(wanted + 0.5)) * settings.multiple_of)


def narrower(settings: PruneSettings, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of a model behind a cut of its hidden width, as later steps should expect it."""
    family = find_family(config)
    width = config.get(family.width) if family is not None and "width" in settings.targets else None
    if family is None or not isinstance(width, int):
        return config
    return {**config, family.width: channels_kept(width, settings)}


def width_is_fixed(config: Mapping[str, Any], task: Task) -> Message | None:
    """Return why the hidden states of a model of this config cannot become narrower, None where they can."""
    family = find_family(config)
    if (lack := blockless(config)) is not None:
        return mistake("does-not-fit-model", f"{lack}, whose width it could change.", setting="targets")
    if family is None:
        kind = str(config.get("model_type"))
        return mistake(
            "unsupported-family",
            f"the layers of {article(kind)} model are not known. Known: {', '.join(FAMILIES)}.",
        )
    return mistake("fixed-width", OF_VECTORS, setting="targets") if task == SIMILARITY else None


def heads_that_stay(what: Sequence[str], config: Mapping[str, Any]) -> list[Message]:
    """Return what to tell of heads that were to go and cannot; what and config as in `check_units`.

    Raises:
        InputError: nothing but heads was to go.
    """
    for one in check_units(what, config):
        raise InputError(f"prune: {one.message}", code=one.code, setting=one.setting)
    reason = _fixed_heads(config)
    return [warning("heads-kept", f"{reason} They are kept.")] if reason and "heads" in what else []


def _fixed_heads(config: Mapping[str, Any]) -> str:
    """Say why the heads of a model of this Hugging Face config cannot go; empty where they can."""
    family = find_family(config)
    attentions = [a for stack in family.stacks(config) for a in stack.attentions] if family else []
    reasons = sorted({a.fixed_heads for a in attentions if a.fixed_heads})
    if not reasons:
        return ""
    return f"the heads of {article(config['model_type'])} model cannot be taken away: {'; '.join(reasons)}."
