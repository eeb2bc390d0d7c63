"""Storage of master weights: the float weights of a model after quantization-aware training.

`latent.safetensors`: a float32 tensor [N, K] for each quantized matrix, by the first name of a layer with it
in the model, and the SHA-256 of the `model.safetensors` that was quantized from them. Only training reads it:
it is not counted in sizes and not part of packages.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from smelt.core.artifact import MASTER_WEIGHTS_FILE
from smelt.core.errors import InputError
from smelt.core.files import sha256_of
from smelt.core.messages import Message, warning
from smelt.models.weight_files import WEIGHTS_FILE

_MODEL_HASH_KEY = "model"  # in the file's metadata: the hash of the weights that it belongs to
_REBUILD_HINT = "Run the step that wrote this file again with --rebuild."


def write_master_weights(weights: Mapping[str, Tensor], folder: Path) -> int:
    """Write the float32 master `weights` of the quantized model in `folder`; return the number of bytes."""
    path = folder / MASTER_WEIGHTS_FILE
    tensors = {name: weight.detach().float().cpu().contiguous() for name, weight in weights.items()}
    # one entry: safetensors writes several in any order, and the bytes are part of the next training's key
    save_file(tensors, path, metadata={_MODEL_HASH_KEY: sha256_of(folder / WEIGHTS_FILE)})
    return path.stat().st_size


def read_master_weights(
    folder: Path, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Tensor] | None, Message | None]:
    """Return the stored master weights of a model, and a warning if they do not match it.

    Args:
        folder: folder of the artifact.
        shapes: shapes (N, K) of the model's quantized matrices, by the first name of each.

    Returns:
        The weights, float32, or None if none are stored or they belong to another model; and a warning if the
        file exists and does not match, else None.

    Raises:
        InputError: the file cannot be read, or holds values that are not finite.
    """
    path = folder / MASTER_WEIGHTS_FILE
    if not path.is_file():
        return None, None
    try:
        with safe_open(path, "pt") as opened:
            model_hash = (opened.metadata() or {}).get(_MODEL_HASH_KEY)
            stored_shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118  (it is no dict)
            why = _mismatch_warning(model_hash, stored_shapes, folder, shapes)
            if why is not None:
                return None, why
            found = {name: opened.get_tensor(name).float() for name in stored_shapes}
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path}: not a readable safetensors file: {error}. {_REBUILD_HINT}",
            code="damaged-file",
            file=str(path),
        ) from error
    for name, weight in found.items():
        if not bool(torch.isfinite(weight).all()):
            raise InputError(
                f"{path}: the weights of '{name[:80]}' are not all finite numbers. {_REBUILD_HINT}",
                code="non-finite-weights",
                file=str(path),
            )
    return found, None


def _mismatch_warning(
    model_hash: str | None,
    stored_shapes: Mapping[str, tuple[int, ...]],
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
) -> Message | None:
    """Return a warning if the file does not belong to the model in `folder`, else None."""
    path, left = folder / MASTER_WEIGHTS_FILE, f"so they are not used. {_REBUILD_HINT}"
    if stored_shapes != dict(shapes):
        odd = next(n for n in sorted({*stored_shapes, *shapes}) if stored_shapes.get(n) != shapes.get(n))
        return warning(
            "master-weights-mismatch",
            f"{path}: the master weights do not match this model ('{odd[:80]}'), {left}",
        )
    if model_hash != sha256_of(folder / WEIGHTS_FILE):
        return warning(
            "master-weights-outdated",
            f"{path}: these master weights belong to another {WEIGHTS_FILE}, {left}",
        )
    return None
