"""Checks that weights match a config: no tensor is ignored, and none is initialized at random."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.families.registry import FAMILIES
from smelt.runtime.models.weights.unused_tensors import is_unused_tensor


def require_no_unexpected(
    family: str, unexpected: Iterable[str], folder: Path, new_head: bool = False, embeds: bool = False
) -> None:
    """Require that no needed tensor is ignored because the model has no parameter for it.

    Args:
        family: the config's model_type.
        unexpected: names of the tensors.
        folder: of the tensors, for the message.
        new_head: the model gets another head than the checkpoint was trained with.
        embeds: the model is a sentence embedder.

    Raises:
        InputError: a tensor is not one of those that models can ignore.
    """
    lost = sorted(name for name in unexpected if not is_unused_tensor(family, name, new_head, embeds))
    if lost:
        more = f" and {len(lost) - 5:,} more" if len(lost) > 5 else ""
        names = ", ".join(name[:120] for name in lost[:5])
        raise InputError(
            f"{folder}: the config has no parameters for the tensors {names}{more}. The files belong"
            " to another model, or contain parts that smelt does not support.",
            code="unknown-tensor",
        )


def require_no_missing(missing: Iterable[str], folder: Path) -> None:
    """Require that no weight is `missing`; transformers would initialize it at random.

    Raises:
        InputError: one is.
    """
    names = sorted(missing)
    if names:
        more = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
        raise InputError(
            f"{folder}: missing weights: {', '.join(names[:5])}{more}. Copy or download the model again.",
            code="missing-tensor",
        )


def require_base_weights(family: str, info: Mapping[str, Any], folder: Path, new_head: bool = False) -> None:
    """Require that all but the head of a model was read from a checkpoint with another or no head.

    Args:
        family: the config's model_type.
        info: the result of `from_pretrained(..., output_loading_info=True)`.
        folder: the checkpoint, for the message.
        new_head: the model gets another head than the checkpoint was trained with.

    Raises:
        InputError: a tensor has no parameter, is missing, or has another shape.
    """
    require_no_unexpected(family, info["unexpected_keys"], folder, new_head)
    require_no_missing((n for n in info["missing_keys"] if not _is_head_tensor(family, n)), folder)
    for name, found, place in sorted(info["mismatched_keys"], key=lambda odd: str(odd[0])):
        if not (new_head and _is_head_tensor(family, name)):
            raise InputError(
                f"{folder}: the weights do not match the config: the tensor '{name}' is {list(found)}, but"
                f" the model expects {list(place)}.",
                code="shape-mismatch",
            )


def _is_head_tensor(family: str, name: str) -> bool:
    """Return whether a tensor belongs to the head of a family's models."""
    known = FAMILIES.get(family)
    return known is not None and (
        name == known.logits_bias or name.startswith(tuple(f"{module}." for module in known.head_modules))
    )
