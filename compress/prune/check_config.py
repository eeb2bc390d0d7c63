"""Checks of `prune` settings against a model's config, without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from smelt.compress.prune.settings import PruneSettings
from smelt.core.data import SENTENCE_SIMILARITY, Task
from smelt.core.errors import InputError
from smelt.core.messages import Message, error_message, warning
from smelt.core.text import with_article
from smelt.families.registry import FAMILIES, find_family, no_blocks_reason
from smelt.runtime.text.length_limits import position_limit

# Why a sentence embedder keeps its width.
EMBEDDER_WIDTH_ERROR = (
    "the embeddings of a sentence embedder are its hidden states, and narrower embeddings cannot be compared"
    " with stored ones. Set targets: [heads, ffn]."
)


def check_units(targets: Sequence[str], config: Mapping[str, Any]) -> list[Message]:
    """Return errors about targets that cannot be removed from a model of this config.

    Args:
        targets: heads, ffn, width, channels.
        config: the Hugging Face config of the input model, as a dict.

    Returns:
        One message per error, with its setting.
    """
    family = find_family(config)
    if "channels" in targets:
        if family is None or family.conv_chain is not None:
            return []
        kind = with_article(family.name)
        text = f"{kind} model has no chains of convolutions. Set targets: [heads, ffn]."
        return [error_message("does-not-fit-model", text, setting="targets")]
    if (lack := no_blocks_reason(config)) is not None:
        text = f"{lack}. Prune the channels of its convolutions: set targets: [channels]."
        return [error_message("does-not-fit-model", text, setting="targets")]
    if "width" in targets:
        return []
    reason = _fixed_heads_reason(config)
    if not reason or set(targets) != {"heads"}:
        return []
    return [error_message("fixed-heads", f"{reason} Set targets: [ffn].", setting="targets")]


def check_length(length: int | None, config: Mapping[str, Any]) -> list[Message]:
    """Return an error if a budget's sequence length exceeds the model's position limit.

    Args:
        length: tokens; None to use the model's own limit.
        config: as in `check_units`.

    Returns:
        The error with its setting, or an empty list.
    """
    places = position_limit(config)
    if length is None or places is None or length <= places:
        return []
    return [
        error_message(
            "longer-than-model",
            f"{length:,} tokens exceed the model's {places:,} positions. Lower sequence_length.",
            setting="budget.sequence_length",
        )
    ]


def count_kept_channels(count: int, settings: PruneSettings) -> int:
    """Return how many of `count` channels are kept: the nearest multiple of `multiple_of`, at least one."""
    wanted = count * settings.keep_ratio_of("width") / settings.multiple_of
    return min(count, max(1, math.floor(wanted + 0.5)) * settings.multiple_of)


def narrowed_config(settings: PruneSettings, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the model after its hidden width is pruned, for the checks of later steps."""
    family = find_family(config)
    width = config.get(family.hidden_size_key) if family is not None and "width" in settings.targets else None
    if family is None or not isinstance(width, int):
        return config
    return {**config, family.hidden_size_key: count_kept_channels(width, settings)}


def fixed_width_error(config: Mapping[str, Any], task: Task) -> Message | None:
    """Return why the hidden width of a model of this config cannot be pruned; None where it can."""
    family = find_family(config)
    if (lack := no_blocks_reason(config)) is not None:
        return error_message(
            "does-not-fit-model", f"{lack}, so it has no hidden width to prune.", setting="targets"
        )
    if family is None:
        kind = str(config.get("model_type"))
        return error_message(
            "unsupported-family",
            f"{with_article(kind)} model is not supported. Supported: {', '.join(FAMILIES)}.",
        )
    return (
        error_message("fixed-width", EMBEDDER_WIDTH_ERROR, setting="targets")
        if task == SENTENCE_SIMILARITY
        else None
    )


def fixed_heads_warnings(targets: Sequence[str], config: Mapping[str, Any]) -> list[Message]:
    """Return warnings about heads that cannot be removed; arguments as in `check_units`.

    Raises:
        InputError: heads are the only target.
    """
    for one in check_units(targets, config):
        raise InputError(f"prune: {one.message}", code=one.code, setting=one.setting)
    reason = _fixed_heads_reason(config)
    return [warning("heads-kept", f"{reason} The heads are kept.")] if reason and "heads" in targets else []


def _fixed_heads_reason(config: Mapping[str, Any]) -> str:
    """Return why the heads of a model of this Hugging Face config cannot be removed; empty where they can."""
    family = find_family(config)
    attentions = [a for stack in family.stacks(config) for a in stack.attentions] if family else []
    reasons = sorted({a.fixed_heads_reason for a in attentions if a.fixed_heads_reason})
    if not reasons:
        return ""
    return f"the heads of {with_article(config['model_type'])} model cannot be removed: {'; '.join(reasons)}."
