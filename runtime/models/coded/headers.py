"""What the headers of a checkpoint say of its codes: whether they fit its config, and how many there are.

Read without torch, so that `smelt plan` refuses what a run could not take. The layouts are those of
unpack.py: a layer of K inputs and N outputs in G groups has

    GPTQ    qweight [K / 8, N]     qzeros [G, N / 8]     scales [G, N]     g_idx [K], where there is one
    AWQ     qweight [K, N / 8]     qzeros [G, N / 8]     scales [G, N]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.runtime.models.coded.said import SAID, Coding
from smelt.runtime.models.weight_files import values_in, weight_tensors
from smelt.runtime.schemes.parts.groups import GROUP_SIZE, group_count
from smelt.runtime.schemes.registry import TAKEN

PARTS = ("qweight", "qzeros", "scales", "g_idx")
CODES = "I4"  # the type of codes, beside safetensors' own
_IN_ONE = 8
# safetensors' words for types, as they are called elsewhere
_TYPES = {"I32": "int32", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32"}
_INT32, _INDEX, _FLOATS = ("I32",), ("I32", "I64"), ("F16", "BF16", "F32", "F64")

Entries = Mapping[str, Mapping[str, Any]]


def require_codes(src: Path, coding: Coding) -> None:
    """Require that the headers of the checkpoint `src` hold codes as its config says.

    Raises:
        InputError: no tensor holds codes, or those of a layer do not fit each other or the groups.
    """
    entries = {name: entry for _, name, entry in weight_tensors(src)}
    for name in coded_layers(src, entries, coding):
        qweight = entries[f"{name}.qweight"]["shape"]
        if len(qweight) != 2:
            raise InputError(
                f"{src}: the tensor '{name}.qweight' is {_told(entries[f'{name}.qweight'])}; the codes of a"
                f" layer are int32 of two dimensions ({coding.method}).",
                code="shape-mismatch",
            )
        along = coding.method == "gptq"
        width, rows = (qweight[0] * _IN_ONE, qweight[1]) if along else (qweight[0], qweight[1] * _IN_ONE)
        require_parts(src, name, entries, coding, width, rows)
        own_group(src, name, coding, width)


def unsaid_codes(src: Path) -> str | None:
    """Return the name of a layer whose tensors in `src` are codes, where no config speaks of any."""
    names = {name for _, name, _ in weight_tensors(src)}
    layers = (name.removesuffix(".qweight") for name in names if name.endswith(".qweight"))
    return min((name for name in layers if {f"{name}.qzeros", f"{name}.scales"} <= names), default=None)


def coded_layers(src: Path, names: Iterable[str], coding: Coding) -> list[str]:
    """Return the layers of the tensors `names` whose weights are codes.

    Raises:
        InputError: there are none.
    """
    found = [name.removesuffix(".qweight") for name in names if name.endswith(".qweight")]
    if not found:
        raise InputError(
            f"{src}: config.json speaks of {coding.method} codes, and no tensor holds any (NAME.qweight)."
            f" Take the whole checkpoint, or leave {SAID} out of its config, if its weights are floats.",
            code="not-quantized",
        )
    return found


def require_parts(src: Path, name: str, entries: Entries, coding: Coding, width: int, rows: int) -> None:
    """Require that the tensors of a layer are there and have the types and shapes that the config asks for.

    Args:
        src: the checkpoint.
        name: of the layer, as its tensors are called.
        entries: of the headers, by tensor.
        coding: how codes lie.
        width: inputs of the layer.
        rows: its outputs.

    Raises:
        InputError: one is missing, or of another type or shape.
    """
    count = group_count(width, min(coding.group or width, width)) if width else 0
    packed = [width // _IN_ONE, rows] if coding.method == "gptq" else [width, rows // _IN_ONE]
    wanted = {
        "qweight": (_INT32, packed),
        "qzeros": (_INT32, [count, rows // _IN_ONE]),
        "scales": (_FLOATS, [count, rows]),
        "g_idx": (_INDEX, [width]),
    }
    for part, (types, shape) in wanted.items():
        entry = entries.get(f"{name}.{part}")
        if entry is None and part == "g_idx" and not coding.ordered:
            continue
        if entry is None:
            raise missing(src, f"{name}.{part}")
        if entry["shape"] != shape or entry["dtype"] not in types:
            kind = "floats" if types is _FLOATS else _TYPES[types[0]]
            raise InputError(
                f"{src}: the tensor '{name}.{part}' is {_told(entry)}; 4-bit {coding.method} codes of a layer"
                f" of {width} inputs and {rows} outputs, in groups of {coding.group or 'whole rows'}, have"
                f" {kind} {shape}. Are quant_method, bits and group_size of {SAID}, and the sizes of"
                " config.json, those of these weights?",
                code="shape-mismatch",
            )


def own_group(src: Path, name: str, coding: Coding, width: int) -> int:
    """Return the group size in which a layer of `width` inputs takes its codes over: a divisor of theirs.

    Raises:
        InputError: there is none.
    """
    group = min(coding.group or width, width)
    allowed = [size for size in sorted(GROUP_SIZE.allowed, reverse=True) if isinstance(size, int)]
    size = next((s for s in allowed if group % s == 0 or group >= width), None)
    if size is None:
        raise InputError(
            f"{src}: '{name}': groups of {group} inputs; {TAKEN} has groups of"
            f" {', '.join(map(str, reversed(allowed)))}, and a group of a checkpoint must be some of these"
            " together. Quantize the float model with another group_size.",
            code="unsupported-group-size",
        )
    return size


def missing(src: Path, tensor: str) -> InputError:
    """Return what to tell of a tensor that a layer of codes lacks."""
    return InputError(
        f"{src}: the tensor '{tensor}' is missing, which says what its codes mean.", code="missing-tensor"
    )


def values_by_type(src: Path) -> dict[str, int]:
    """Return how many values the weights of `src` hold, codes counted one by one, by safetensors' types.

    What says what codes mean (zero points, scales, an index) is no value of the model. Codes have the type
    `I4`.
    """
    entries = {name: entry for _, name, entry in weight_tensors(src)}
    coded = {name.removesuffix(".qweight") for name in entries if name.endswith(".qweight")}
    found: dict[str, int] = {}
    for name, entry in entries.items():
        layer, _, part = name.rpartition(".")
        kind, each = str(entry["dtype"]), 1
        if layer in coded and part in PARTS:
            kind, each = CODES, _IN_ONE * (part == "qweight")
        found[kind] = found.get(kind, 0) + each * values_in(entry)
    return found


def _told(entry: Mapping[str, Any]) -> str:
    return f"{_TYPES.get(entry['dtype'], entry['dtype'])} {entry['shape']}"
