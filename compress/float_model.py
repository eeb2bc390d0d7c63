"""The model that a stage changes: its weights are floats, and its size is what its file holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smelt.compress.behind_codes import BEHIND_QUANTIZE
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from smelt.runtime.models.structure import Edit

_LEFT = "smelt_places_left"


def load_float(src: Artifact, stage: str) -> tuple[Any, list[Edit]]:
    """Return the model of `src` (float32, CPU, eval mode) and its edits.

    Raises:
        InputError: the model is quantized; its integer codes have no gradient and no spectrum.
    """
    from smelt.runtime.models.checkpoint import load_model
    from smelt.runtime.models.structure import read_edits

    if any(edit.get("op") == "quantize" for edit in read_edits(src.path)):
        raise InputError(
            f"{stage}: the model that it gets is quantized, and integer weights cannot be changed any more."
            f" Put '{stage}' before 'quantize' in the recipe.",
            code=BEHIND_QUANTIZE,
        )
    return load_model(src.path)


def note_cut(old: nn.Module, new: nn.Module, places: Tensor, dim: int) -> None:
    """Note that `new` has the `places` alone of the rows (dim 0) or columns (dim 1) of the Linear `old`."""
    left = list(places_left(old))
    before = left[dim]
    left[dim] = places if before is None else before[places]
    setattr(new, _LEFT, tuple(left))


def places_left(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """Return which rows and columns are left of the layer that was read, int64, rising; None: all are."""
    found: tuple[Tensor | None, Tensor | None] = getattr(module, _LEFT, (None, None))
    return found


def stored_parameters(model: Any) -> int:
    """Return how many values of `model` its file holds; fixed position tables are not stored."""
    fixed = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return sum(p.numel() for n, p in model.named_parameters() if n not in fixed)
