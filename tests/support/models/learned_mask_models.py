"""Models whose heads, neurons and hidden channels have masks that are learned, many of them half open."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from smelt.compress.prune.learned_masks import LearnedMasks
from smelt.compress.prune.settings import LearnedMasksSettings
from smelt.models.checkpoint import load_model
from smelt.models.edits import Edit
from tests.support.models import every_family

MASK_TARGETS = ("heads", "ffn", "width")


def masks_of_model(source: Path, **settings: Any) -> tuple[LearnedMasks, Any, list[Edit]]:
    """Return the masks of the model in `source`, the model, and its edits."""
    model, edits = load_model(source)
    masks = LearnedMasks(model, LearnedMasksSettings(**{"targets": MASK_TARGETS} | settings), edits)
    torch.manual_seed(0)
    with torch.no_grad():
        for log_alpha in [*masks.units.values(), *masks.parts.values(), masks.hidden.log_alpha]:
            log_alpha.copy_(torch.randn(len(log_alpha)) * 1.5)  # many between 0 and 1
    return masks, model, edits


def masks_of_family(family: str, **settings: Any) -> tuple[LearnedMasks, Any, list[Edit]]:
    """Return the same of a model of two layers of `family`."""
    return masks_of_model(every_family.model_with_layers(family, 2), **settings)


def open_channels(masks: LearnedMasks, channels: Sequence[int]) -> None:
    """Let the mask be 1 at these channels, and 0 at all others, to the last bit."""
    with torch.no_grad():
        masks.hidden.log_alpha.fill_(-50.0)
        masks.hidden.log_alpha[channels] = 50.0
