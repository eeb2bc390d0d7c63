"""The number of a model's weights and multiply-accumulates, and whether all weights are finite.

Weights are counted from the headers. A single NaN makes all outputs NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.files import read_json_object
from smelt.models.edits import read_edits
from smelt.models.empty_model import empty_model
from smelt.models.families.registry import FAMILIES
from smelt.models.text_rules import MODULES_FILE
from smelt.models.weight_files import is_unused_tensor, value_count, weight_tensors
from smelt.quantization.matrix import QuantizedMatrix


def count_parameters(folder: Path) -> int:
    """Return the number of weights of the model in `folder`, without reading them.

    A quantized matrix counts as outputs times inputs: scales, zero points and padding
    of groups do not count, so that quantizing does not change the count. Unused tensors (masks and
    positions of old checkpoints) do not count either.

    Raises:
        InputError: the model is quantized, and config and edits do not define a model.
    """
    matrices = _quantized_matrices(folder)
    parts = tuple(f"{name}." for name in matrices)
    family, embeds = (
        str(read_json_object(folder / "config.json").get("model_type")),
        (folder / MODULES_FILE).is_file(),
    )
    floats = sum(
        value_count(entry)
        for _, name, entry in weight_tensors(folder)
        if not name.startswith(parts) and not is_unused_tensor(family, name, embeds=embeds)
    )
    distinct = {id(matrix): matrix for matrix in matrices.values()}
    return floats + sum(len(matrix.codes) * matrix.width for matrix in distinct.values())


def _quantized_matrices(folder: Path) -> dict[str, QuantizedMatrix]:
    """Return the quantized matrices by all of their names; shared ones have several."""
    if not any(edit.get("op") == "quantize" for edit in read_edits(folder)):
        return {}
    modules = empty_model(folder)[0].named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if isinstance(module, QuantizedMatrix)}


_STRETCH = 2**22  # numbers


def require_finite_weights(folder: Path, new_head: bool = False, embeds: bool = False) -> None:
    """Require that the model in `folder` has no weight that is NaN or infinite.

    One tensor is in memory at a time. Unused tensors may have any value, and values added to logits may be
    -inf, which excludes a token.

    Args:
        folder: of the model.
        new_head: it gets another head than it was trained with, which is not read.
        embeds: it becomes a sentence embedder, which uses no head and no pooler.

    Raises:
        InputError: a weight is not finite; file and tensor are named.
    """
    odd = list(_non_finite_tensors(folder, new_head, embeds))
    if odd:
        path, name, found = odd[0]
        more = f", and so do {len(odd) - 1:,} others" if len(odd) > 1 else ""
        raise InputError(
            f"{path}: the tensor '{name}' contains {found}{more}. Copy or download the model again; if"
            " training produced these values, use an earlier checkpoint.",
            code="non-finite-weights",
        )


def _non_finite_tensors(folder: Path, new_head: bool, embeds: bool) -> Iterator[tuple[Path, str, str]]:
    """Yield file and name of each non-finite tensor, and the number of NaN and infinite values."""
    import torch
    from safetensors import safe_open

    family = str(read_json_object(folder / "config.json").get("model_type"))
    added = FAMILIES[family].logits_bias if family in FAMILIES else None
    for path, name, _ in weight_tensors(folder):
        if is_unused_tensor(family, name, new_head, embeds):
            continue
        with safe_open(path, framework="pt") as file:
            tensor = file.get_tensor(name)
        if not tensor.is_floating_point():
            continue
        # in pieces, because the masks of finite numbers take more memory than the numbers
        parts = tensor.reshape(-1).split(_STRETCH)
        if all(bool(part.float().isfinite().all()) for part in parts):
            continue
        nan = sum(int(part.float().isnan().sum()) for part in parts)
        inf = torch.isposinf if name == added else torch.isinf
        infinite = sum(int(inf(part.float()).sum()) for part in parts)
        counts = [f"{nan:,} NaN"] * bool(nan) + [f"{infinite:,} inf"] * bool(infinite)
        if counts:
            yield path, name, f"{' and '.join(counts)} among {tensor.numel():,} numbers"


def count_macs(model: Any, size: tuple[int, int]) -> int:
    """Return the multiply-accumulates of convolutions and linear layers for one image of `size` (h, w).

    Half of what torch's FlopCounterMode counts; norms and activations are in neither.

    Args:
        model: in eval mode, on the CPU.
        size: output size of its image processor.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    counter: Any = FlopCounterMode(display=False)
    with counter:
        model(pixel_values=torch.zeros(1, 3, *size))
    return int(counter.get_total_flops()) // 2
