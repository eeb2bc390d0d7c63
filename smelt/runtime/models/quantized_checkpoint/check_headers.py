"""Checks the headers of a quantized checkpoint: whether they match its config, and how many values they have.

Read without torch, so that `smelt plan` rejects what a run could not import. The layouts are those of
unpack_int4.py: a layer of K inputs and N outputs in G groups has

    GPTQ    qweight [K / 8, N]     qzeros [G, N / 8]     scales [G, N]     g_idx [K], where there is one
    AWQ     qweight [K, N / 8]     qzeros [G, N / 8]     scales [G, N]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.runtime.models.quantized_checkpoint.quantization_config import (
    QUANTIZATION_CONFIG_KEY,
    QuantizationConfig,
)
from smelt.runtime.models.weight_files import value_count, weight_tensors
from smelt.runtime.schemes.common.groupwise import GROUP_SIZE, num_groups
from smelt.runtime.schemes.registry import CHECKPOINT_SCHEME

PACKED_TENSORS = ("qweight", "qzeros", "scales", "g_idx")
INT4_DTYPE = "I4"  # the type of quantized weights, in addition to safetensors' own
_VALUES_PER_INT32 = 8
# safetensors' names of types, and their usual names
_TYPES = {"I32": "int32", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32"}
_INT32, _INDEX, _FLOATS = ("I32",), ("I32", "I64"), ("F16", "BF16", "F32", "F64")

HeaderEntries = Mapping[str, Mapping[str, Any]]


def require_quantized_tensors(src: Path, coding: QuantizationConfig) -> None:
    """Require that the headers of the checkpoint `src` have the quantized tensors of its config.

    Raises:
        InputError: no tensor is quantized, or those of a layer do not match each other or the groups.
    """
    entries = {name: entry for _, name, entry in weight_tensors(src)}
    for name in quantized_layer_names(src, entries, coding):
        qweight = entries[f"{name}.qweight"]["shape"]
        if len(qweight) != 2:
            raise InputError(
                f"{src}: the tensor '{name}.qweight' is {_describe_entry(entries[f'{name}.qweight'])};"
                f" quantized weights of a layer must be int32 with two dimensions ({coding.method}).",
                code="shape-mismatch",
            )
        along = coding.method == "gptq"
        width, rows = (
            (qweight[0] * _VALUES_PER_INT32, qweight[1])
            if along
            else (qweight[0], qweight[1] * _VALUES_PER_INT32)
        )
        require_layer_tensors(src, name, entries, coding, width, rows)
        compatible_group_size(src, name, coding, width)


def undeclared_quantized_layer(src: Path) -> str | None:
    """Return the name of a layer in `src` with quantized tensors, for a config without quantization."""
    names = {name for _, name, _ in weight_tensors(src)}
    layers = (name.removesuffix(".qweight") for name in names if name.endswith(".qweight"))
    return min((name for name in layers if {f"{name}.qzeros", f"{name}.scales"} <= names), default=None)


def quantized_layer_names(src: Path, names: Iterable[str], coding: QuantizationConfig) -> list[str]:
    """Return the quantized layers among the tensors `names`.

    Raises:
        InputError: there are none.
    """
    found = [name.removesuffix(".qweight") for name in names if name.endswith(".qweight")]
    if not found:
        raise InputError(
            f"{src}: config.json declares {coding.method} weights, but no tensor is quantized (NAME.qweight)."
            f" Copy the whole checkpoint, or remove {QUANTIZATION_CONFIG_KEY} from its config if its weights"
            " are floats.",
            code="not-quantized",
        )
    return found


def require_layer_tensors(
    src: Path, name: str, entries: HeaderEntries, coding: QuantizationConfig, width: int, rows: int
) -> None:
    """Require that the tensors of a layer exist with the types and shapes of the config.

    Args:
        src: the checkpoint.
        name: of the layer, as in its tensors.
        entries: of the headers, by tensor.
        coding: the quantization config.
        width: inputs of the layer.
        rows: its outputs.

    Raises:
        InputError: one is missing, or has another type or shape.
    """
    count = num_groups(width, min(coding.group_size or width, width)) if width else 0
    packed = (
        [width // _VALUES_PER_INT32, rows] if coding.method == "gptq" else [width, rows // _VALUES_PER_INT32]
    )
    wanted = {
        "qweight": (_INT32, packed),
        "qzeros": (_INT32, [count, rows // _VALUES_PER_INT32]),
        "scales": (_FLOATS, [count, rows]),
        "g_idx": (_INDEX, [width]),
    }
    for part, (types, shape) in wanted.items():
        entry = entries.get(f"{name}.{part}")
        if entry is None and part == "g_idx" and not coding.act_order:
            continue
        if entry is None:
            raise missing_tensor_error(src, f"{name}.{part}")
        if entry["shape"] != shape or entry["dtype"] not in types:
            kind = "floats" if types is _FLOATS else _TYPES[types[0]]
            raise InputError(
                f"{src}: the tensor '{name}.{part}' is {_describe_entry(entry)}; in 4-bit {coding.method} a"
                f" layer of {width} inputs and {rows} outputs, in groups of"
                f" {coding.group_size or 'whole rows'}, has {kind} {shape}. Check quant_method, bits and"
                f" group_size of {QUANTIZATION_CONFIG_KEY}, and the sizes in config.json.",
                code="shape-mismatch",
            )


def compatible_group_size(src: Path, name: str, coding: QuantizationConfig, width: int) -> int:
    """Return the group size with which a layer of `width` inputs is imported: a divisor of the checkpoint's.

    Raises:
        InputError: there is none.
    """
    group = min(coding.group_size or width, width)
    allowed = [size for size in sorted(GROUP_SIZE.allowed, reverse=True) if isinstance(size, int)]
    size = next((s for s in allowed if group % s == 0 or group >= width), None)
    if size is None:
        raise InputError(
            f"{src}: '{name}' has groups of {group} inputs; {CHECKPOINT_SCHEME} has groups of"
            f" {', '.join(map(str, reversed(allowed)))}, and the group size of a checkpoint must"
            " be a multiple of one of these. Quantize the float model with another group_size.",
            code="unsupported-group-size",
        )
    return size


def missing_tensor_error(src: Path, tensor: str) -> InputError:
    """Return the error about a tensor that a quantized layer lacks."""
    return InputError(
        f"{src}: the tensor '{tensor}' of a quantized layer is missing. Copy the whole checkpoint.",
        code="missing-tensor",
    )


def count_values_by_dtype(src: Path) -> dict[str, int]:
    """Return the number of weights in `src`, quantized ones counted individually, by safetensors' types.

    Zero points, scales and indices are not counted. Quantized weights have the type
    `I4`.
    """
    entries = {name: entry for _, name, entry in weight_tensors(src)}
    coded = {name.removesuffix(".qweight") for name in entries if name.endswith(".qweight")}
    found: dict[str, int] = {}
    for name, entry in entries.items():
        layer, _, part = name.rpartition(".")
        kind, each = str(entry["dtype"]), 1
        if layer in coded and part in PACKED_TENSORS:
            kind, each = INT4_DTYPE, _VALUES_PER_INT32 * (part == "qweight")
        found[kind] = found.get(kind, 0) + each * value_count(entry)
    return found


def _describe_entry(entry: Mapping[str, Any]) -> str:
    return f"{_TYPES.get(entry['dtype'], entry['dtype'])} {entry['shape']}"
