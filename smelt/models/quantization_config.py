"""Read `quantization_config` of a GPTQ or AWQ checkpoint, and check the headers of its files against it.

This module does not import torch, so that `smelt plan` rejects what a run could not import. Layouts, for a
layer of K inputs and N outputs in G groups (see `smelt.models.int4_packing`):

    GPTQ    qweight [K / 8, N]     qzeros [G, N / 8]     scales [G, N]     g_idx [K], where there is one
    AWQ     qweight [K, N / 8]     qzeros [G, N / 8]     scales [G, N]

Sources: transformers' GPTQConfig and AwqConfig (utils/quantization_config.py); the layouts of AutoGPTQ,
GPTQModel, AutoAWQ and AutoRound (whose own format is GPTQ's first layout under another name), and their
additional keys: AutoRound's (auto_round/schemes.py, export/utils.py: `act_bits` is present only below 16)
and GPTQModel's (`adapter`, `activation`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.models.weight_files import value_count, weight_tensors
from smelt.quantization.groupwise import GROUP_SIZE, num_groups
from smelt.quantization.schemes.registry import CHECKPOINT_SCHEME

QUANTIZATION_CONFIG_KEY = "quantization_config"
CHECKPOINT_BITS = 4
_METHODS = ("gptq", "awq")
# AutoRound's own format, and the supported one of its packings
_AUTO_ROUND, _PACKING = "auto-round", "auto_round:auto_gptq"
# AutoRound's names of integers with a zero point (auto_round/data_type/int.py)
_WHOLE_NUMBERS = ("int", f"int{CHECKPOINT_BITS}", "int_sym", "int_asym", "int_sym_gptq")
_FLOAT_BITS = 16  # from here on nothing is quantized
# of AutoRound, and of GPTQModel (quantization/config.py: `rotation: hadamard | random`)
_ROTATIONS = ("rotation_config", "spinquant_config", "rotation")
# keys of settings for single layers: AutoRound, GPTQModel
_PER_LAYER_KEYS = ("extra_config", "dynamic")
# the offset of a stored zero point: the first layout stores them less one
_OFFSETS = {"gptq": 1, "gptq_v2": 0}
_OTHER_FORMAT_HINT = (
    "Use a checkpoint of that format, or start from the float model and quantize: {scheme:"
    f" {CHECKPOINT_SCHEME}}}."
)
_FLOAT_MODEL_HINT = f"Start from the float model and quantize: {{scheme: {CHECKPOINT_SCHEME}}}."


@dataclass(frozen=True)
class QuantizationConfig:
    """The format of the quantized weights of a checkpoint.

    method: gptq or awq, which defines the packing. group_size: inputs that share a scale; None: all of a row.
    zero_point_offset: added to a stored zero point. act_order: whether inputs were quantized in another
    order, so that an index defines the group of each. symmetric: whether the config declares every zero
    point to be in the middle.
    """

    method: str
    group_size: int | None
    zero_point_offset: int
    act_order: bool = False
    symmetric: bool = False


def parse_quantization_config(config: Mapping[str, Any]) -> QuantizationConfig | None:
    """Return the format of the quantized weights of a model with this config; None for float weights.

    Raises:
        InputError: their kind or layout is not supported.
    """
    section = config.get(QUANTIZATION_CONFIG_KEY)
    if section is None:
        return None
    if not isinstance(section, dict):
        raise InputError(
            f"{QUANTIZATION_CONFIG_KEY} is {str(section)[:80]}; expected an object as written by"
            " transformers.",
            code="wrong-value",
            setting=QUANTIZATION_CONFIG_KEY,
        )
    method = _quant_method(section)
    bits = section.get("bits", section.get("w_bit"))
    if bits != CHECKPOINT_BITS:
        raise InputError(
            f"{QUANTIZATION_CONFIG_KEY}: {method} with {_as_json(bits)} bits; smelt supports"
            f" {CHECKPOINT_BITS}. {_OTHER_FORMAT_HINT}",
            code="unsupported-bits",
            setting=f"{QUANTIZATION_CONFIG_KEY}.bits",
        )
    group = section.get("group_size", section.get("q_group_size"))
    if not isinstance(group, int) or isinstance(group, bool) or not (group == -1 or group > 0):
        raise InputError(
            f"{QUANTIZATION_CONFIG_KEY}: group_size is {_as_json(group)}; expected an integer, or -1"
            " for one group per row.",
            code="wrong-value",
            setting=f"{QUANTIZATION_CONFIG_KEY}.group_size",
        )
    layout = _packing_layout(method, section)
    _require_integer_weights(section)
    _require_no_extras(section)
    orders = any(
        layer_section.get("desc_act") is True
        for layer_section in (section, *_uniform_layer_configs(section, group))
    )
    ordered = method == "gptq" and group != -1 and orders
    return QuantizationConfig(
        method, None if group == -1 else group, _OFFSETS.get(layout, 0), ordered, section.get("sym") is True
    )


def new_head_message(config: QuantizationConfig) -> str:
    """Return the error text for a quantized model that would need a new head."""
    return (
        f"its weights are {config.method}-quantized, and the task needs another head. Start from the float"
        " model, and quantize it in the recipe."
    )


def _quant_method(config: Mapping[str, Any]) -> str:
    """Return gptq or awq.

    Raises:
        InputError: the method or AutoRound's packing is not supported.
    """
    method = str(config.get("quant_method", "")).lower()
    if method == _AUTO_ROUND:
        packing = str(config.get("packing_format") or _PACKING)
        if packing != _PACKING:
            raise InputError(
                f"{QUANTIZATION_CONFIG_KEY}: packing_format is '{packing[:40]}'; smelt supports {_PACKING},"
                " which auto-round writes for symmetric weights; otherwise use --format auto_gptq."
                f" {_OTHER_FORMAT_HINT}",
                code="unsupported-packing",
                setting=f"{QUANTIZATION_CONFIG_KEY}.packing_format",
            )
        return "gptq"
    if method not in _METHODS:
        raise InputError(
            f"{QUANTIZATION_CONFIG_KEY}: quant_method is {_as_json(config.get('quant_method'))}; smelt"
            f" supports {', '.join(_METHODS)} and {_AUTO_ROUND} only. {_FLOAT_MODEL_HINT}",
            code="unsupported-method",
            setting=f"{QUANTIZATION_CONFIG_KEY}.quant_method",
        )
    return method


def _packing_layout(method: str, config: Mapping[str, Any]) -> str:
    """Return the packing of the weights of `method`, by its own name.

    Raises:
        InputError: the packing is not supported.
    """
    field, known_layouts = (
        ("checkpoint_format", tuple(_OFFSETS)) if method == "gptq" else ("version", ("gemm",))
    )
    field = "format" if field not in config and "format" in config else field
    layout = str(config.get(field) or known_layouts[0]).lower()
    if any(value is True for key, value in config.items() if key.startswith("is_marlin")):
        layout = "marlin"
    if layout not in known_layouts:
        raise InputError(
            f"{QUANTIZATION_CONFIG_KEY}: {field} is '{layout[:40]}', a kernel-specific layout; smelt supports"
            f" {' and '.join(known_layouts)}. {_OTHER_FORMAT_HINT}",
            code="unsupported-packing",
            setting=f"{QUANTIZATION_CONFIG_KEY}.{field}",
        )
    packed = str(config.get("pack_dtype") or "int32")
    if packed != "int32":
        raise InputError(
            f"{QUANTIZATION_CONFIG_KEY}: pack_dtype is '{packed[:40]}'; smelt supports int32."
            f" {_OTHER_FORMAT_HINT}",
            code="unsupported-packing",
            setting=f"{QUANTIZATION_CONFIG_KEY}.pack_dtype",
        )
    return layout


def _require_integer_weights(config: Mapping[str, Any], where: str = "") -> None:
    """Require integer weights, and that nothing but weights was quantized or rotated.

    Args:
        config: of all layers, or of one.
        where: the layer.

    Raises:
        InputError: weights or activations have another format.
    """
    kind = config.get("data_type")
    if kind not in (None, *_WHOLE_NUMBERS):
        raise InputError(
            f"{QUANTIZATION_CONFIG_KEY}: {where}data_type is '{str(kind)[:40]}'; smelt supports only"
            f" integers with a zero point (int), not floats or quantized scales. {_FLOAT_MODEL_HINT}",
            code="unsupported-quantized-type",
            setting=f"{QUANTIZATION_CONFIG_KEY}.data_type",
        )
    bits = config.get("act_bits")
    if bits is not None and not (isinstance(bits, int | float) and bits >= _FLOAT_BITS):
        kind = str(config.get("act_data_type", "int"))[:40]
        raise InputError(
            f"{QUANTIZATION_CONFIG_KEY}: {where}act_bits is {str(bits)[:20]}: the weights were"
            f" quantized for quantized activations ({kind}). smelt quantizes activations"
            f" differently (int8 blocks), so the results would differ. {_FLOAT_MODEL_HINT}",
            code="quantized-activations",
            setting=f"{QUANTIZATION_CONFIG_KEY}.act_bits",
        )
    if rotated := next((rotation for rotation in _ROTATIONS if config.get(rotation)), None):
        raise InputError(
            f"{QUANTIZATION_CONFIG_KEY}: {where}{rotated}: the weights are rotated, which requires rotating"
            f" activations at run time; this is not supported. {_FLOAT_MODEL_HINT}",
            code="rotated-weights",
            setting=f"{QUANTIZATION_CONFIG_KEY}.{rotated}",
        )


def _require_no_extras(config: Mapping[str, Any], where: str = "") -> None:
    """Require that the model computes with its quantized weights only.

    Both keys are GPTQModel's (quantization/config.py); the content of its `meta` has no effect.

    Args:
        config: of all layers, or of one.
        where: the layer.

    Raises:
        InputError: the model has an adapter, or quantizes the inputs of some layers.
    """
    if adapter := config.get("adapter"):
        kind = adapter.get("name") if isinstance(adapter, dict) else adapter
        raise InputError(
            f"{QUANTIZATION_CONFIG_KEY}: {where}adapter: the checkpoint has an adapter"
            f" ({_as_json(kind)}), which smelt does not support. Without the adapter the outputs"
            " differ. To import the model without it, remove adapter from the config."
            f" {_FLOAT_MODEL_HINT}",
            code="unsupported-adapter",
            setting=f"{QUANTIZATION_CONFIG_KEY}.adapter",
        )
    if activation := config.get("activation"):
        raise InputError(
            f"{QUANTIZATION_CONFIG_KEY}: {where}activation is {_as_json(activation)}: the activations"
            f" are also quantized (fp8, NVFP4), which is not supported. {_FLOAT_MODEL_HINT}",
            code="quantized-activations",
            setting=f"{QUANTIZATION_CONFIG_KEY}.activation",
        )


def _as_json(value: Any) -> str:
    """Return the value as in the config, with its quotes: "4" is not a number."""
    return json.dumps(value, default=str)[:40]


def _uniform_layer_configs(config: Mapping[str, Any], group: int) -> list[Mapping[str, Any]]:
    """Return the settings of single quantized layers, after checking that they match those of all layers.

    Layers that are not quantized have other tensors; so their settings are not needed.

    Raises:
        InputError: some have other bits, groups or types.
    """
    layer_configs: list[Mapping[str, Any]] = []
    for option in _PER_LAYER_KEYS:
        layers = config.get(option) or {}
        if not isinstance(layers, dict) or not all(
            isinstance(layer_config, dict) for layer_config in layers.values()
        ):
            raise InputError(
                f"{QUANTIZATION_CONFIG_KEY}: {option} is {str(layers)[:80]}; expected one object per layer.",
                code="wrong-value",
                setting=f"{QUANTIZATION_CONFIG_KEY}.{option}",
            )
        for name, layer_config in layers.items():
            bits = layer_config.get("bits")
            if name.startswith("-:") or (isinstance(bits, int) and bits >= _FLOAT_BITS):
                continue
            for key, value, shared_value in (
                ("bits", bits, CHECKPOINT_BITS),
                ("group_size", layer_config.get("group_size"), group),
            ):
                if value not in (None, shared_value):
                    raise InputError(
                        f"{QUANTIZATION_CONFIG_KEY}: {option}: '{name[:80]}' has {key}"
                        f" {str(value)[:20]}, but the other layers have {shared_value}; all layers must"
                        f" have the same format. {_FLOAT_MODEL_HINT}",
                        code="mixed-quantization",
                        setting=f"{QUANTIZATION_CONFIG_KEY}.{option}",
                    )
            _require_integer_weights(layer_config, f"{option}: '{name[:80]}': ")
            _require_no_extras(layer_config, f"{option}: '{name[:80]}': ")
            layer_configs.append(layer_config)
    return layer_configs


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
        is_gptq = coding.method == "gptq"
        width, out_features = (
            (qweight[0] * _VALUES_PER_INT32, qweight[1])
            if is_gptq
            else (qweight[0], qweight[1] * _VALUES_PER_INT32)
        )
        require_layer_tensors(src, name, entries, coding, width, out_features)
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
    layer_names = [name.removesuffix(".qweight") for name in names if name.endswith(".qweight")]
    if not layer_names:
        raise InputError(
            f"{src}: config.json declares {coding.method} weights, but no tensor is quantized (NAME.qweight)."
            f" Copy the whole checkpoint, or remove {QUANTIZATION_CONFIG_KEY} from its config if its weights"
            " are floats.",
            code="not-quantized",
        )
    return layer_names


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
    expected_tensors = {
        "qweight": (_INT32, packed),
        "qzeros": (_INT32, [count, rows // _VALUES_PER_INT32]),
        "scales": (_FLOATS, [count, rows]),
        "g_idx": (_INDEX, [width]),
    }
    for suffix, (types, shape) in expected_tensors.items():
        entry = entries.get(f"{name}.{suffix}")
        if entry is None and suffix == "g_idx" and not coding.act_order:
            continue
        if entry is None:
            raise missing_tensor_error(src, f"{name}.{suffix}")
        if entry["shape"] != shape or entry["dtype"] not in types:
            kind = "floats" if types is _FLOATS else _TYPES[types[0]]
            raise InputError(
                f"{src}: the tensor '{name}.{suffix}' is {_describe_entry(entry)}; in 4-bit {coding.method} a"
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
    quantized_layers = {name.removesuffix(".qweight") for name in entries if name.endswith(".qweight")}
    counts: dict[str, int] = {}
    for name, entry in entries.items():
        layer, _, suffix = name.rpartition(".")
        kind, values_per_item = str(entry["dtype"]), 1
        if layer in quantized_layers and suffix in PACKED_TENSORS:
            kind, values_per_item = INT4_DTYPE, _VALUES_PER_INT32 * (suffix == "qweight")
        counts[kind] = counts.get(kind, 0) + values_per_item * value_count(entry)
    return counts


def _describe_entry(entry: Mapping[str, Any]) -> str:
    return f"{_TYPES.get(entry['dtype'], entry['dtype'])} {entry['shape']}"
