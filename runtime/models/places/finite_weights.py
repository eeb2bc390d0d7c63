"""Are the weights of a model numbers? One NaN among them makes NaN of all that it computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from smelt.core.errors import InputError
from smelt.core.files import read_json
from smelt.families.registry import FAMILIES
from smelt.runtime.models.places.unread_tensors import is_unread
from smelt.runtime.models.weight_files import weight_tensors

_STRETCH = 2**22  # numbers


def require_finite_weights(folder: Path, new_head: bool = False, embeds: bool = False) -> None:
    """Require that the model in `folder` has no weight that is NaN or infinite.

    One tensor is held at a time. What no model reads may hold anything, and what is added to logits may be
    -inf, which says that a token is never given.

    Args:
        folder: of the model.
        new_head: it gets another head than it was trained with, which is not read.
        embeds: it becomes a sentence embedder, which reads no head and no pooler.

    Raises:
        InputError: one has; file and tensor are named.
    """
    odd = list(_not_finite(folder, new_head, embeds))
    if odd:
        path, name, found = odd[0]
        more = f", and so do {len(odd) - 1:,} others" if len(odd) > 1 else ""
        raise InputError(
            f"{path}: the tensor '{name}' holds {found}{more}. No layer computes with such weights. Copy or"
            " download the model again; if it was trained to them, take a checkpoint from before.",
            code="non-finite-weights",
        )


def _not_finite(folder: Path, new_head: bool, embeds: bool) -> Iterator[tuple[Path, str, str]]:
    """Yield file and name of each tensor that is not finite, and how many of its values are what."""
    import torch
    from safetensors import safe_open

    family = str(read_json(folder / "config.json").get("model_type"))
    added = FAMILIES[family].logits_bias if family in FAMILIES else None
    for path, name, _ in weight_tensors(folder):
        if is_unread(family, name, new_head, embeds):
            continue
        with safe_open(path, framework="pt") as file:
            tensor = file.get_tensor(name)
        if not tensor.is_floating_point():
            continue
        # in stretches, because what says of each number whether it is one takes more than the numbers
        parts = tensor.reshape(-1).split(_STRETCH)
        if all(bool(part.float().isfinite().all()) for part in parts):
            continue
        nan = sum(int(part.float().isnan().sum()) for part in parts)
        inf = torch.isposinf if name == added else torch.isinf
        infinite = sum(int(inf(part.float()).sum()) for part in parts)
        counts = [f"{nan:,} NaN"] * bool(nan) + [f"{infinite:,} inf"] * bool(infinite)
        if counts:
            yield path, name, f"{' and '.join(counts)} among {tensor.numel():,} numbers"
