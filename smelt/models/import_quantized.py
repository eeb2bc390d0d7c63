"""Imports a GPTQ or AWQ checkpoint as scheme int4, with exactly its weights, scales and zero points.

A group of the checkpoint becomes one group, or several with the same scale where smelt has no group that
large; where all zero points are 8, none are stored. Activations are int8 blocks, as in every int4 layer
(accuracy level 4).

Unpacks the 4-bit layouts of GPTQ's and AWQ's tools: eight weights in an int32.

GPTQ (AutoGPTQ and GPTQModel, QuantLinear.pack): inputs K are packed together, the first in the lowest bits;
zero points are packed along the outputs, in the first layout less one.

    qweight int32 [K / 8, N]     qzeros int32 [G, N / 8]     scales float [G, N]     g_idx int32 [K]

AWQ (AutoAWQ, WQLinear_GEMM.from_linear): outputs are packed together, in the order 0 2 4 6 1 3 5 7; zero
points too.

    qweight int32 [K, N / 8]     qzeros int32 [G, N / 8]     scales float [G, N]

In both, value = (code - zero point) * scale.

Shapes: N = outputs, K = inputs, G = groups of the checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from smelt.core.errors import InputError
from smelt.core.files import read_json_object, write_json
from smelt.core.messages import Message, warning
from smelt.models.checkpoint import load_model
from smelt.models.empty_model import empty_model
from smelt.models.quantization_config import (
    PACKED_TENSORS,
    QUANTIZATION_CONFIG_KEY,
    QuantizationConfig,
    compatible_group_size,
    missing_tensor_error,
    quantized_layer_names,
    require_layer_tensors,
)
from smelt.models.structure import Edit, write_edits
from smelt.models.weight_files import WEIGHTS_CONFIG_KEY, WEIGHTS_FILE, weight_tensors
from smelt.quantization.groupwise import GROUP_SIZE, num_groups, split_into_groups
from smelt.quantization.scheme import UnpackedWeights
from smelt.quantization.schemes.registry import CHECKPOINT_SCHEME, default_options, find_scheme

_VALUES_PER_INT32 = 8
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class UnpackedInt4(NamedTuple):
    """Weights uint8 [N, K], zero points int16 [N, G] and scales [N, G] of a matrix, in the file's groups."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor


def unpack_gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor, offset: int) -> UnpackedInt4:
    """Return an unpacked GPTQ matrix; `offset` is added to the stored zero points."""
    codes = _split_nibbles(qweight).permute(0, 2, 1).reshape(-1, qweight.shape[1])
    zeros = _split_nibbles(qzeros).flatten(1).to(torch.int16) + offset
    return UnpackedInt4(codes.t(), zeros.t(), scales.t())


def unpack_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> UnpackedInt4:
    """Return an unpacked AWQ matrix."""
    codes, zeros = (_split_nibbles(packed, _AWQ_ORDER).flatten(1) for packed in (qweight, qzeros))
    return UnpackedInt4(codes.t(), zeros.t().to(torch.int16), scales.t())


def _split_nibbles(packed: Tensor, order: Sequence[int] = tuple(range(_VALUES_PER_INT32))) -> Tensor:
    """Return int32 [A, B] as uint8 [A, B, 8]; `order` is the index of each four bits."""
    parts = [(packed >> (4 * at)).bitwise_and_(15).to(torch.uint8) for at in range(_VALUES_PER_INT32)]
    return torch.stack([parts[order.index(place)] for place in range(_VALUES_PER_INT32)], dim=-1)


_MIDDLE = 8  # the zero point of symmetric 4-bit weights


def import_quantized(
    src: Path, out: Path, coding: QuantizationConfig, extra_files: list[Path]
) -> list[Message]:
    """Write the model of `src` into `out`, its quantized weights unchanged; return warnings.

    Args:
        src: the checkpoint.
        out: a folder.
        coding: its quantization config.
        extra_files: the files of `src` that are copied unchanged.

    Raises:
        InputError: tensors are missing, do not match the config, or cannot be represented in int4.
    """
    for path in extra_files:
        shutil.copyfile(path, out / path.name)
    config = read_json_object(src / "config.json")
    gone = (QUANTIZATION_CONFIG_KEY, WEIGHTS_CONFIG_KEY)  # the weights are in one file, under its usual name
    write_json(out / "config.json", {name: value for name, value in config.items() if name not in gone})
    model, _ = empty_model(out)
    tensors = _CheckpointTensors(src)
    coded = dict.fromkeys(quantized_layer_names(src, tensors.places, coding))
    stored: dict[str, Tensor] = {}
    edits: list[Edit] = []
    for name in coded:
        place = _layer_name(model, name, src)
        found, options = _packed_tensors(tensors, name, model.get_submodule(place), coding)
        stored |= {f"{place}.matrix.{part}": tensor for part, tensor in found.items()}
        edits.append({"op": "quantize", "module": place, "scheme": CHECKPOINT_SCHEME, **options})
    parts = {f"{name}.{part}" for name in coded for part in PACKED_TENSORS}
    for name in tensors.places.keys() - parts:
        if not _is_zero_bias(model, name, coded, tensors):
            stored[name] = tensors.read(name)
    save_file(dict(sorted(stored.items())), out / WEIGHTS_FILE, metadata={"format": "pt"})
    write_edits(out, edits)
    try:
        load_model(out)  # verifies all tensors
    except InputError as error:
        raise InputError(str(error).replace(str(out), str(src)), code=error.code) from error
    return [
        warning(
            "already-quantized",
            f"The model is already quantized by {coding.method}: {len(coded)} layers are imported as scheme"
            f" {CHECKPOINT_SCHEME}. The baseline is this model, not the one before quantization.",
        )
    ]


class _CheckpointTensors:
    """The tensors of a checkpoint, read one at a time."""

    def __init__(self, src: Path) -> None:
        self.src = src
        found = list(weight_tensors(src))
        self.places = {name: path for path, name, _ in found}
        self.entries = {name: entry for _, name, entry in found}

    def read(self, name: str) -> Tensor:
        """Return a tensor in its own type.

        Raises:
            InputError: it is missing, or its file is damaged.
        """
        if name not in self.places:
            raise missing_tensor_error(self.src, name)
        try:
            with safe_open(self.places[name], framework="pt") as file:
                found: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"{self.places[name]}: not a readable safetensors file: {error}", code="damaged-weights"
            ) from error
        return found


def _layer_name(model: Any, name: str, src: Path) -> str:
    """Return the dotted name of the linear layer with the name `name` in the file."""
    for place in (name, f"{model.base_model_prefix}.{name}"):
        try:
            module = model.get_submodule(place)
        except AttributeError:
            continue
        if isinstance(module, nn.Linear):
            return place
    raise InputError(
        f"{src}: '{name}.qweight' belongs to a layer that a {type(model).__name__} does not have.",
        code="unknown-layer",
    )


def _is_zero_bias(model: Any, name: str, coded: Mapping[str, None], tensors: _CheckpointTensors) -> bool:
    """Return whether a tensor is the zero bias that some tools store for layers without a bias."""
    layer = name.removesuffix(".bias")
    if layer == name or layer not in coded:
        return False
    module = model.get_submodule(_layer_name(model, layer, tensors.src))
    return module.bias is None and not bool(tensors.read(name).any())


def _packed_tensors(
    tensors: _CheckpointTensors, name: str, linear: nn.Linear, coding: QuantizationConfig
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of the layer `name` as its scheme stores them, and the scheme's options."""
    taken = _read_layer(tensors, name, linear, coding)
    scheme, width = find_scheme(CHECKPOINT_SCHEME), linear.in_features
    group = min(coding.group_size or width, width)
    size = compatible_group_size(tensors.src, name, coding, width)
    count = num_groups(width, size)
    zeros, scales = (
        part.repeat_interleave(-(-group // size), dim=1)[:, :count] for part in (taken.zeros, taken.scales)
    )
    symmetric = bool((zeros == _MIDDLE).all())
    options = default_options(scheme) | {GROUP_SIZE.name: size, "symmetric": symmetric}
    codes = split_into_groups(taken.codes.contiguous(), size)
    if pad := count * size - width:  # the padding of the last group is zero
        codes[:, -1, -pad:] = zeros[:, -1:].to(codes.dtype)
    grid = {"scales": scales.contiguous().float()}
    grid |= {} if symmetric else {"zeros": zeros.to(torch.uint8)}
    packed = scheme.pack(UnpackedWeights(codes, grid), options)
    types = scheme.stored_tensors(linear.out_features, width, options)
    stored = {
        part: tensor.to(getattr(torch, types[part].file_dtype or types[part].dtype)).contiguous()
        for part, tensor in packed.items()
    }
    return stored, dict(options)


def _read_layer(
    tensors: _CheckpointTensors, name: str, linear: nn.Linear, coding: QuantizationConfig
) -> UnpackedInt4:
    """Return the tensors of a layer, checked for values that cannot be imported."""
    rows, width = linear.out_features, linear.in_features
    require_layer_tensors(tensors.src, name, tensors.entries, coding, width, rows)
    qweight, qzeros, scales = (tensors.read(f"{name}.{part}") for part in PACKED_TENSORS[:3])
    if coding.act_order or f"{name}.g_idx" in tensors.places:
        _require_contiguous_groups(tensors, name, width, min(coding.group_size or width, width))
    found = (
        unpack_gptq(qweight, qzeros, scales, coding.zero_point_offset)
        if coding.method == "gptq"
        else unpack_awq(qweight, qzeros, scales)
    )
    if int(found.zeros.max()) > 15:
        raise InputError(
            f"{tensors.src}: '{name}.qzeros' has a zero point of 16, which 4 bits cannot represent."
            " The checkpoint was read as 'gptq'. Either it is 'gptq_v2' (checkpoint_format), or"
            " it has a zero point of 0, which 'gptq' cannot store. Save it again as gptq_v2.",
            code="zero-point-out-of-range",
        )
    odd = int(found.zeros.min()) if coding.symmetric and coding.method == "gptq" else _MIDDLE
    if abs(odd - _MIDDLE) == 1 and bool((found.zeros == odd).all()):
        raise InputError(
            f"{tensors.src}: '{name}.qzeros': {QUANTIZATION_CONFIG_KEY} has sym: true, so every zero point"
            f" must be {_MIDDLE}, but these are {odd}. Probably checkpoint_format is 'gptq' where the file is"
            " 'gptq_v2', or the reverse. Set the format that its tool wrote.",
            code="wrong-checkpoint-format",
        )
    exact = scales.to(torch.float16)
    if not bool(exact.isfinite().all()) or not exact.to(scales.dtype).equal(scales):
        raise InputError(
            f"{tensors.src}: '{name}.scales' ({scales.dtype}) has values that float16 cannot represent"
            " exactly, or that are not finite, so it cannot be imported. Start from the float model.",
            code="inexact-scales",
        )
    return found


def _require_contiguous_groups(tensors: _CheckpointTensors, name: str, width: int, group: int) -> None:
    """Reject groups whose inputs are not contiguous."""
    index = tensors.read(f"{name}.g_idx").long()
    if not index.equal(torch.arange(width) // group):
        raise InputError(
            f"{tensors.src}: '{name}.g_idx': the inputs of a group are not contiguous (desc_act, act-order),"
            " which no fast operator supports. Use a checkpoint with desc_act: false, or start from the"
            f" float model: quantize: {{scheme: {CHECKPOINT_SCHEME}, method: gptq}}.",
            code="unsupported-group-order",
        )
