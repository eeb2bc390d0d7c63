"""The float type of each tensor in a model's file, and the one that it is saved in.

Everything is computed in float32. Reading 16-bit weights widens them, which is exact; saving them
rounds to nearest, once per step: by at most 2^-11 of a weight in float16 and 2^-8 in bfloat16, and not at
all where a step did not change it. So a step keeps the type of a checkpoint, and a pruned model
is not larger than the original.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from smelt.core.messages import Message, warning
from smelt.core.stage import StoredDtype
from smelt.models.weight_files import find_weights, has_weights, value_count, weight_tensors

# safetensors' names; wider or narrower types are read as float32
_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16}
_WORDS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
_OLD_NORM = re.compile(r"(?<=LayerNorm\.)(gamma|beta)$")
_OF_CODES = ".matrix."  # in the names of a quantized matrix's tensors
_LOW_RANK_SUFFIX = re.compile(r"(?:\.shared|(?:\.difference)?\.(?:up|down))+(\.(?:weight|bias))$")


@dataclass(frozen=True)
class StoredDtypes:
    """The float type of each tensor by name, and the one that most values have (for new tensors).

    Tensors of quantized weights do not count there: their scales have the type of the scheme.
    """

    by_name: Mapping[str, torch.dtype]
    default: torch.dtype

    def dtype_for(self, names: Iterable[str]) -> torch.dtype:
        """Return the type for a tensor with the names `names` in a model.

        A checkpoint may have it under any of them, or without the first part (`transformer.`); the factors of
        a layer have the type of the layer.
        """
        for name in names:
            whole = _LOW_RANK_SUFFIX.sub(r"\1", name)
            for known in (name, whole, name.partition(".")[2], whole.partition(".")[2]):
                if known in self.by_name:
                    return self.by_name[known]
        return self.default


def weight_files_size(folder: Path) -> int:
    """Return the total size of the weight files in `folder`, bytes."""
    return sum(path.stat().st_size for path in find_weights(folder).files)


def stored_dtypes(folder: Path, wanted: StoredDtype = "keep") -> StoredDtypes:
    """Return the storage types of the model in `folder`, or, unless `wanted` is keep, that one type for all.

    Without weights in `folder` it is float32.

    Raises:
        InputError: a file of the weights is missing or damaged.
    """
    if wanted != "keep":
        return StoredDtypes({}, _WORDS[wanted])
    names: dict[str, torch.dtype] = {}
    values: Counter[torch.dtype] = Counter()
    of_codes: Counter[torch.dtype] = Counter()
    for _, name, entry in weight_tensors(folder) if has_weights(folder) else ():
        if entry["dtype"] in _FLOATS:
            names[_OLD_NORM.sub(_current_norm_name, name)] = kind = _TYPES.get(entry["dtype"], torch.float32)
            (of_codes if _OF_CODES in name else values)[kind] += value_count(entry)
    counted = values or of_codes
    return StoredDtypes(names, counted.most_common(1)[0][0] if counted else torch.float32)


def _current_norm_name(found: re.Match[str]) -> str:
    """Return the current name of a norm's `gamma` or `beta`, in files of the first BERTs."""
    return {"gamma": "weight", "beta": "bias"}[found[0]]


def cast_to_stored(
    tensors: Mapping[str, Tensor], types: Mapping[str, torch.dtype]
) -> tuple[dict[str, Tensor], list[Message]]:
    """Return `tensors` rounded to their `types` (others unchanged), and warnings.

    A tensor with a value beyond its type's range stays float32.
    """
    out, beyond = {}, []
    for name, tensor in tensors.items():
        out[name] = tensor.to(types.get(name, tensor.dtype))
        if not bool(torch.isfinite(out[name]).all()) and bool(torch.isfinite(tensor).all()):
            beyond.append(f"{name} (up to {float(tensor.abs().max()):,.6g})")
            out[name] = tensor
    if not beyond:
        return out, []
    more = f" and {len(beyond) - 1} more" if len(beyond) > 1 else ""
    return out, [
        warning(
            "beyond-16-bits",
            "Tensors with values outside the range of 16-bit floats are stored as float32:"
            f" {beyond[0]}{more}. Set `dtype: fp32` to store all weights as float32.",
            setting="dtype",
        )
    ]


def config_dtype(tensors: Iterable[Tensor]) -> str:
    """Return the dtype of a config for `tensors`: the float type of most values, if it can hold all of them.

    transformers converts all weights to that type at loading.
    """
    floats = [t for t in tensors if t.is_floating_point()]
    values: Counter[torch.dtype] = Counter()
    for tensor in floats:
        values[tensor.dtype] += tensor.numel()
    common = values.most_common(1)[0][0] if values else torch.float32
    fits = all(bool(torch.isfinite(t.to(common)).all()) for t in floats)
    return str(common if fits else torch.float32).removeprefix("torch.")
