"""Loading of unquantized models, kept indices of pruned layers, and stored parameter counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smelt.compress.quantized_input import AFTER_QUANTIZE
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from smelt.runtime.models.structure import Edit

_KEPT_INDICES_ATTRIBUTE = "smelt_places_left"


def load_float_model(src: Artifact, stage: str) -> tuple[Any, list[Edit]]:
    """Return the model of `src` (float32, CPU, eval mode) and its edits.

    Raises:
        InputError: the model is quantized; its integer weights have no gradient and no spectrum.
    """
    from smelt.runtime.models.checkpoint import load_model
    from smelt.runtime.models.structure import read_edits

    if any(edit.get("op") == "quantize" for edit in read_edits(src.path)):
        raise InputError(
            f"{stage}: the input model is quantized, and integer weights cannot be changed."
            f" Put '{stage}' before 'quantize' in the recipe.",
            code=AFTER_QUANTIZE,
        )
    return load_model(src.path)


def record_kept_indices(old: nn.Module, new: nn.Module, indices: Tensor, dim: int) -> None:
    """Record that `new` has only the `indices` of the rows (dim 0) or columns (dim 1) of the Linear `old`."""
    left = list(kept_indices(old))
    before = left[dim]
    left[dim] = indices if before is None else before[indices]
    setattr(new, _KEPT_INDICES_ATTRIBUTE, tuple(left))


def kept_indices(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """Return the rows and columns kept of the original layer, int64, ascending; None where all are kept."""
    found: tuple[Tensor | None, Tensor | None] = getattr(module, _KEPT_INDICES_ATTRIBUTE, (None, None))
    return found


def count_stored_parameters(model: Any) -> int:
    """Return the number of stored parameters of `model`; fixed position tables are not stored."""
    fixed = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return sum(p.numel() for n, p in model.named_parameters() if n not in fixed)
