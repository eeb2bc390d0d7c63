"""Which units of a model can be pruned, known from its config alone (no torch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smelt.core.errors import InputError
from smelt.core.text import article
from smelt.families.registry import blockless, find_family
from smelt.runtime.text.limits import position_limit


def check_units(what: Sequence[str], config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Compare the kinds of units that `prune` takes away with those that a model can lose.

    Args:
        what: heads, ffn.
        config: the Hugging Face config of the model that the step gets, as a dict.

    Returns:
        (setting, what is wrong with it) for each mistake.
    """
    if (lack := blockless(config)) is not None:
        return [("", f"{lack}, which it cuts in. Its convolutions become smaller with factorize.")]
    reason = _fixed_heads(config)
    return [("what", f"{reason} Say what: [ffn].")] if reason and set(what) == {"heads"} else []


def check_length(length: int | None, config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Compare the tokens of a text that a budget is for with those that a model has places for.

    Args:
        length: tokens; None where the model's own limit decides.
        config: as in `check_units`.

    Returns:
        (setting, what is wrong with it), or nothing.
    """
    places = position_limit(config)
    if length is None or places is None or length <= places:
        return []
    return [("budget.length", f"{length:,} tokens, and the model has places for {places:,}.")]


def heads_that_stay(what: Sequence[str], config: Mapping[str, Any]) -> list[str]:
    """Return what to tell of heads that were to go and cannot; what and config as in `check_units`.

    Raises:
        InputError: nothing but heads was to go.
    """
    for _, message in check_units(what, config):
        raise InputError(f"prune: {message}")
    reason = _fixed_heads(config)
    return [f"prune: {reason} They stay."] if reason and "heads" in what else []


def _fixed_heads(config: Mapping[str, Any]) -> str:
    """Say why the heads of a model of this Hugging Face config cannot go; empty where they can."""
    family = find_family(config)
    attentions = [a for stack in family.stacks(config) for a in stack.attentions] if family else []
    reasons = sorted({a.fixed_heads for a in attentions if a.fixed_heads})
    if not reasons:
        return ""
    return f"the heads of {article(config['model_type'])} model cannot be taken away: {'; '.join(reasons)}."
