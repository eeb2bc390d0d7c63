"""A GPTQ or AWQ checkpoint becomes a model of scheme int4: the very codes, scales and zero points.

A group of the checkpoint becomes one group, or several with the same scale where smelt knows no group as
large; where all zero points are 8, none are stored. Activations are int8 blocks, as in every int4 layer
(accuracy level 4).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from smelt.core.errors import InputError
from smelt.core.files import read_json, write_json
from smelt.core.messages import Message, warning
from smelt.runtime.models.checkpoint import load_model
from smelt.runtime.models.coded.headers import PARTS, coded_layers, missing, own_group, require_parts
from smelt.runtime.models.coded.said import SAID, Coding
from smelt.runtime.models.coded.unpack import Taken, unpack_awq, unpack_gptq
from smelt.runtime.models.making.empty_model import empty_model
from smelt.runtime.models.structure import Edit, write_edits
from smelt.runtime.models.weight_files import NAMED, WEIGHTS, weight_tensors
from smelt.runtime.schemes.parts.groups import GROUP_SIZE, group_count, groups_of
from smelt.runtime.schemes.registry import TAKEN, defaults, find
from smelt.runtime.schemes.scheme import Codes

_MIDDLE = 8  # the zero point of symmetric 4-bit codes


def take_codes(src: Path, out: Path, coding: Coding, beside: list[Path]) -> list[Message]:
    """Write the model of `src` into `out`, its codes as they are; return what the user should know.

    Args:
        src: the checkpoint.
        out: a folder.
        coding: how its codes lie.
        beside: the files of `src` that go along as they are.

    Raises:
        InputError: tensors are missing, do not fit the config, or mean what int4 cannot hold.
    """
    for path in beside:
        shutil.copyfile(path, out / path.name)
    config = read_json(src / "config.json")
    gone = (SAID, NAMED)  # the weights lie in one file, under its usual name
    write_json(out / "config.json", {name: value for name, value in config.items() if name not in gone})
    model, _ = empty_model(out)
    tensors = _Tensors(src)
    coded = dict.fromkeys(coded_layers(src, tensors.places, coding))
    stored: dict[str, Tensor] = {}
    edits: list[Edit] = []
    for name in coded:
        place = _place(model, name, src)
        found, options = _matrix(tensors, name, model.get_submodule(place), coding)
        stored |= {f"{place}.matrix.{part}": tensor for part, tensor in found.items()}
        edits.append({"op": "quantize", "module": place, "scheme": TAKEN, **options})
    parts = {f"{name}.{part}" for name in coded for part in PARTS}
    for name in tensors.places.keys() - parts:
        if not _is_no_bias(model, name, coded, tensors):
            stored[name] = tensors.read(name)
    save_file(dict(sorted(stored.items())), out / WEIGHTS, metadata={"format": "pt"})
    write_edits(out, edits)
    try:
        load_model(out)  # everything has its place
    except InputError as error:
        raise InputError(str(error).replace(str(out), str(src)), code=error.code) from error
    return [
        warning(
            "already-quantized",
            f"The model is quantized by {coding.method} already: {len(coded)} layers are read as scheme"
            f" {TAKEN}. The baseline is this model, not the one before quantization.",
        )
    ]


class _Tensors:
    """The tensors of a checkpoint, read one by one."""

    def __init__(self, src: Path) -> None:
        self.src = src
        found = list(weight_tensors(src))
        self.places = {name: path for path, name, _ in found}
        self.entries = {name: entry for _, name, entry in found}

    def read(self, name: str) -> Tensor:
        """Return a tensor in its own type.

        Raises:
            InputError: there is none, or its file is damaged.
        """
        if name not in self.places:
            raise missing(self.src, name)
        try:
            with safe_open(self.places[name], framework="pt") as file:
                found: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"{self.places[name]}: not a readable safetensors file: {error}", code="damaged-weights"
            ) from error
        return found


def _place(model: Any, name: str, src: Path) -> str:
    """Return the dotted name of the linear layer that the file calls `name`."""
    for place in (name, f"{model.base_model_prefix}.{name}"):
        try:
            module = model.get_submodule(place)
        except AttributeError:
            continue
        if isinstance(module, nn.Linear):
            return place
    raise InputError(
        f"{src}: '{name}.qweight' is the codes of a layer that a {type(model).__name__} does not have.",
        code="unknown-layer",
    )


def _is_no_bias(model: Any, name: str, coded: Mapping[str, None], tensors: _Tensors) -> bool:
    """Say whether a tensor is the bias of zeros that some tools store for layers that have none."""
    layer = name.removesuffix(".bias")
    if layer == name or layer not in coded:
        return False
    module = model.get_submodule(_place(model, layer, tensors.src))
    return module.bias is None and not bool(tensors.read(name).any())


def _matrix(
    tensors: _Tensors, name: str, linear: nn.Linear, coding: Coding
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of the layer `name` as its scheme stores them, and the scheme's options."""
    taken = _taken(tensors, name, linear, coding)
    scheme, width = find(TAKEN), linear.in_features
    group = min(coding.group or width, width)
    size = own_group(tensors.src, name, coding, width)
    count = group_count(width, size)
    zeros, scales = (
        part.repeat_interleave(-(-group // size), dim=1)[:, :count] for part in (taken.zeros, taken.scales)
    )
    symmetric = bool((zeros == _MIDDLE).all())
    options = defaults(scheme) | {GROUP_SIZE.name: size, "symmetric": symmetric}
    codes = groups_of(taken.codes.contiguous(), size)
    if pad := count * size - width:  # what fills the last group up means zero
        codes[:, -1, -pad:] = zeros[:, -1:].to(codes.dtype)
    grid = {"scales": scales.contiguous().float()}
    grid |= {} if symmetric else {"zeros": zeros.to(torch.uint8)}
    packed = scheme.pack(Codes(codes, grid), options)
    types = scheme.storage(linear.out_features, width, options)
    stored = {
        part: tensor.to(getattr(torch, types[part].filed or types[part].dtype)).contiguous()
        for part, tensor in packed.items()
    }
    return stored, dict(options)


def _taken(tensors: _Tensors, name: str, linear: nn.Linear, coding: Coding) -> Taken:
    """Return what the file holds of a layer, looked at for what cannot be taken over."""
    rows, width = linear.out_features, linear.in_features
    require_parts(tensors.src, name, tensors.entries, coding, width, rows)
    qweight, qzeros, scales = (tensors.read(f"{name}.{part}") for part in PARTS[:3])
    if coding.ordered or f"{name}.g_idx" in tensors.places:
        _require_order(tensors, name, width, min(coding.group or width, width))
    found = (
        unpack_gptq(qweight, qzeros, scales, coding.offset)
        if coding.method == "gptq"
        else unpack_awq(qweight, qzeros, scales)
    )
    if int(found.zeros.max()) > 15:
        raise InputError(
            f"{tensors.src}: '{name}.qzeros' says a zero point of 16, which 4 bits do not hold: written as"
            " 'gptq', and perhaps meant as 'gptq_v2' (checkpoint_format), or a zero point of 0 that the first"
            " layout cannot store. Save it again as gptq_v2.",
            code="zero-point-out-of-range",
        )
    odd = int(found.zeros.min()) if coding.symmetric and coding.method == "gptq" else _MIDDLE
    if abs(odd - _MIDDLE) == 1 and bool((found.zeros == odd).all()):
        raise InputError(
            f"{tensors.src}: '{name}.qzeros': {SAID} says sym: true, so that every zero point is {_MIDDLE},"
            f" and these are {odd}: checkpoint_format is 'gptq' where the file is 'gptq_v2', or the reverse."
            " Name the one that its tool wrote.",
            code="wrong-checkpoint-format",
        )
    exact = scales.to(torch.float16)
    if not bool(exact.isfinite().all()) or not exact.to(scales.dtype).equal(scales):
        raise InputError(
            f"{tensors.src}: '{name}.scales' ({scales.dtype}) has values that float16 does not hold exactly,"
            " or that are not finite; codes are taken over as they are or not at all. Start from the float"
            " model.",
            code="inexact-scales",
        )
    return found


def _require_order(tensors: _Tensors, name: str, width: int, group: int) -> None:
    """Refuse groups whose inputs are not neighbours."""
    index = tensors.read(f"{name}.g_idx").long()
    if not index.equal(torch.arange(width) // group):
        raise InputError(
            f"{tensors.src}: '{name}.g_idx': the inputs of a group are not neighbours (desc_act, act-order),"
            " and no operator here takes such an index fast. Take a checkpoint with desc_act: false, or start"
            f" from the float model: quantize: {{scheme: {TAKEN}, method: gptq}}.",
            code="unsupported-group-order",
        )
