"""In which float type each tensor of a model lies in its file, and which one it is written back in.

Everything is computed in float32. Reading 16-bit weights widens them, which is exact; writing them back
rounds to nearest, once a step: by 2^-11 of a weight in float16 and 2^-8 in bfloat16 at most, and not at
all where a step did not touch it. So a step leaves a checkpoint in the type that it came in, and what
was pruned is not larger than what it was pruned from.
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
from smelt.runtime.models.weight_files import find_weights, has_weights, values_in, weight_tensors

# safetensors' words; what is wider or narrower than these comes back as float32
_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16}
_WORDS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
_OLD_NORM = re.compile(r"(?<=LayerNorm\.)(gamma|beta)$")
_OF_CODES = ".matrix."  # in the names of a quantized matrix's tensors
_HALF_OF_A_PAIR = re.compile(r"(?:\.shared|(?:\.difference)?\.(?:up|down))+(\.(?:weight|bias))$")


@dataclass(frozen=True)
class StoredTypes:
    """The float type of each tensor by name, and the one that most values have (for new tensors).

    What belongs to codes does not count there: their scales have the type that the scheme wants.
    """

    names: Mapping[str, torch.dtype]
    common: torch.dtype

    def of(self, names: Iterable[str]) -> torch.dtype:
        """Return the type for a tensor that a model knows under `names`.

        A checkpoint may hold it under any of them, or without the first word (`transformer.`); what
        a layer was divided into takes that of the layer.
        """
        for name in names:
            whole = _HALF_OF_A_PAIR.sub(r"\1", name)
            for known in (name, whole, name.partition(".")[2], whole.partition(".")[2]):
                if known in self.names:
                    return self.names[known]
        return self.common


def weight_bytes(folder: Path) -> int:
    """Return the bytes that the files of weights in `folder` have."""
    return sum(path.stat().st_size for path in find_weights(folder).files)


def stored_types(folder: Path, wanted: StoredDtype = "keep") -> StoredTypes:
    """Return how the model in `folder` is stored, or, unless `wanted` is keep, that one type for all.

    Without weights in `folder` it is float32.

    Raises:
        InputError: a file of the weights is missing or damaged.
    """
    if wanted != "keep":
        return StoredTypes({}, _WORDS[wanted])
    names: dict[str, torch.dtype] = {}
    values: Counter[torch.dtype] = Counter()
    of_codes: Counter[torch.dtype] = Counter()
    for _, name, entry in weight_tensors(folder) if has_weights(folder) else ():
        if entry["dtype"] in _FLOATS:
            names[_OLD_NORM.sub(_as_now, name)] = kind = _TYPES.get(entry["dtype"], torch.float32)
            (of_codes if _OF_CODES in name else values)[kind] += values_in(entry)
    counted = values or of_codes
    return StoredTypes(names, counted.most_common(1)[0][0] if counted else torch.float32)


def _as_now(found: re.Match[str]) -> str:
    """Return what a norm's `gamma` or `beta`, in files of the first BERTs, is called now."""
    return {"gamma": "weight", "beta": "bias"}[found[0]]


def narrowed(
    tensors: Mapping[str, Tensor], types: Mapping[str, torch.dtype]
) -> tuple[dict[str, Tensor], list[Message]]:
    """Return `tensors` rounded to their `types` (others as they are), and what the user should know.

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
            f"Values beyond the range of 16 bits are stored as float32: {beyond[0]}{more}. `dtype: fp32`"
            " stores all weights so.",
            setting="dtype",
        )
    ]


def config_type(tensors: Iterable[Tensor]) -> str:
    """Return what a config says of `tensors`: the float type of most values, if it can hold all of them.

    transformers turns all weights into that type when it reads them.
    """
    floats = [t for t in tensors if t.is_floating_point()]
    values: Counter[torch.dtype] = Counter()
    for tensor in floats:
        values[tensor.dtype] += tensor.numel()
    common = values.most_common(1)[0][0] if values else torch.float32
    fits = all(bool(torch.isfinite(t.to(common)).all()) for t in floats)
    return str(common if fits else torch.float32).removeprefix("torch.")
