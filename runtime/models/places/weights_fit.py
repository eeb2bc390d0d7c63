"""Weights and config belong together: no tensor is lost, and none is drawn at random in its place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.families.registry import FAMILIES
from smelt.runtime.models.places.unread_tensors import is_unread


def require_all_read(
    family: str, unexpected: Iterable[str], folder: Path, new_head: bool = False, embeds: bool = False
) -> None:
    """Require that nothing is lost with the tensors that a model has no place for.

    Args:
        family: the config's model_type.
        unexpected: names of the tensors.
        folder: where they are, for the message.
        new_head: the model gets another head than the checkpoint was trained with.
        embeds: it is a sentence embedder.

    Raises:
        InputError: one of them is none of those that checkpoints are known to hold for nothing.
    """
    lost = sorted(name for name in unexpected if not is_unread(family, name, new_head, embeds))
    if lost:
        more = f" and {len(lost) - 5:,} more" if len(lost) > 5 else ""
        names = ", ".join(name[:120] for name in lost[:5])
        raise InputError(
            f"{folder}: the config has no place for the tensors {names}{more}. They would be lost: the files"
            " are of another model, or of one with parts that smelt does not know.",
            code="unknown-tensor",
        )


def require_all_there(missing: Iterable[str], folder: Path) -> None:
    """Require that no weight is `missing`; transformers would draw it at random.

    Raises:
        InputError: one is.
    """
    names = sorted(missing)
    if names:
        more = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
        raise InputError(f"{folder}: the weights lack {', '.join(names[:5])}{more}.", code="missing-tensor")


def require_body(family: str, info: Mapping[str, Any], folder: Path, new_head: bool = False) -> None:
    """Require that all but the head of a model was read from a checkpoint of another or no head.

    Args:
        family: the config's model_type.
        info: what `from_pretrained(..., output_loading_info=True)` tells.
        folder: the checkpoint, for the message.
        new_head: the model gets another head than the checkpoint was trained with.

    Raises:
        InputError: a tensor has no place, is missing, or has another shape than its place.
    """
    require_all_read(family, info["unexpected_keys"], folder, new_head)
    require_all_there((n for n in info["missing_keys"] if not _is_of_head(family, n)), folder)
    for name, found, place in sorted(info["mismatched_keys"], key=lambda odd: str(odd[0])):
        if not (new_head and _is_of_head(family, name)):
            raise InputError(
                f"{folder}: the weights do not fit the config: the tensor '{name}' is {list(found)}, and its"
                f" place is {list(place)}.",
                code="shape-mismatch",
            )


def _is_of_head(family: str, name: str) -> bool:
    """Say whether a tensor is of what a family's models have behind their last hidden states."""
    known = FAMILIES.get(family)
    return known is not None and (
        name == known.logits_bias or name.startswith(tuple(f"{module}." for module in known.head))
    )
