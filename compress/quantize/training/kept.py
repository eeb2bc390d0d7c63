"""The float weights behind codes, kept beside the model that was trained through them.

`latent.safetensors`: a float32 tensor [N, K] for each quantized matrix, by the first of the names that layers
with it have in the model, and the SHA-256 of the `model.safetensors` that was decided from them. Nothing but
a training reads it: it counts in no size, and no package has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from smelt.core.artifact import LATENTS
from smelt.core.errors import InputError
from smelt.core.files import sha256_of
from smelt.core.messages import Message, warning
from smelt.runtime.models.weight_files import WEIGHTS

_MODEL = "model"  # in the file's metadata: the hash of the weights that it belongs to
_ANEW = "Run the step that wrote it again with --rebuild."


def write_latents(weights: Mapping[str, Tensor], folder: Path) -> int:
    """Write float32 `weights` beside the model in `folder`, whose codes stand for them; return the bytes."""
    path = folder / LATENTS
    tensors = {name: weight.detach().float().cpu().contiguous() for name, weight in weights.items()}
    # one entry: safetensors writes several in any order, and the bytes are part of the next training's key
    save_file(tensors, path, metadata={_MODEL: sha256_of(folder / WEIGHTS)})
    return path.stat().st_size


def read_latents(
    folder: Path, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Tensor] | None, Message | None]:
    """Return the float weights that were kept beside a model, or why what is there is not taken.

    Args:
        folder: of an artifact.
        shapes: of the model's quantized matrices, (N, K), by the first name of each.

    Returns:
        The weights, float32; None where none were kept or they are not of this model. Then a warning, where
        the file is there and does not fit.

    Raises:
        InputError: the file cannot be read, or holds numbers that are not finite.
    """
    path = folder / LATENTS
    if not path.is_file():
        return None, None
    try:
        with safe_open(path, "pt") as opened:
            said = (opened.metadata() or {}).get(_MODEL)
            there = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118  (it is no dict)
            why = _unfit(said, there, folder, shapes)
            if why is not None:
                return None, why
            found = {name: opened.get_tensor(name).float() for name in there}
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path}: not a readable safetensors file: {error}. {_ANEW}", code="damaged-file", file=str(path)
        ) from error
    for name, weight in found.items():
        if not bool(torch.isfinite(weight).all()):
            raise InputError(
                f"{path}: the weights of '{name[:80]}' are not all finite numbers. {_ANEW}",
                code="non-finite-weights",
                file=str(path),
            )
    return found, None


def _unfit(
    said: str | None,
    there: Mapping[str, tuple[int, ...]],
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
) -> Message | None:
    """Return a warning where a file with these tensors is not that of the model in `folder`, else None."""
    path, left = folder / LATENTS, "so the training starts without it"
    if there != dict(shapes):
        odd = next(n for n in sorted({*there, *shapes}) if there.get(n) != shapes.get(n))
        return warning(
            "master-weights-mismatch",
            f"{path}: its float weights are not those of this model ('{odd[:80]}'), {left}",
        )
    if said != sha256_of(folder / WEIGHTS):
        return warning("master-weights-outdated", f"{path}: it belongs to another {WEIGHTS}, {left}")
    return None
