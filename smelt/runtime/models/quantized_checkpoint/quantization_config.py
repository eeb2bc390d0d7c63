"""Reads `quantization_config` of a checkpoint, as GPTQ's and AWQ's tools write it.

Sources: transformers' GPTQConfig and AwqConfig (utils/quantization_config.py); the layouts of AutoGPTQ,
GPTQModel, AutoAWQ and AutoRound (whose own format is GPTQ's first layout under another name), and their
additional keys: AutoRound's (auto_round/schemes.py, export/utils.py: `act_bits` is present only below 16)
and GPTQModel's (`adapter`, `activation`).
This module does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smelt.core.errors import InputError
from smelt.runtime.schemes.registry import CHECKPOINT_SCHEME

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
    said = config.get(QUANTIZATION_CONFIG_KEY)
    if said is None:
        return None
    if not isinstance(said, dict):
        raise InputError(
            f"{QUANTIZATION_CONFIG_KEY} is {str(said)[:80]}; expected an object as written by transformers.",
            code="wrong-value",
            setting=QUANTIZATION_CONFIG_KEY,
        )
    method = _quant_method(said)
    bits = said.get("bits", said.get("w_bit"))
    if bits != CHECKPOINT_BITS:
        raise InputError(
            f"{QUANTIZATION_CONFIG_KEY}: {method} with {_as_json(bits)} bits; smelt supports"
            f" {CHECKPOINT_BITS}. {_OTHER_FORMAT_HINT}",
            code="unsupported-bits",
            setting=f"{QUANTIZATION_CONFIG_KEY}.bits",
        )
    group = said.get("group_size", said.get("q_group_size"))
    if not isinstance(group, int) or isinstance(group, bool) or not (group == -1 or group > 0):
        raise InputError(
            f"{QUANTIZATION_CONFIG_KEY}: group_size is {_as_json(group)}; expected an integer, or -1"
            " for one group per row.",
            code="wrong-value",
            setting=f"{QUANTIZATION_CONFIG_KEY}.group_size",
        )
    form = _packing_layout(method, said)
    _require_integer_weights(said)
    _require_no_extras(said)
    orders = any(own.get("desc_act") is True for own in (said, *_uniform_layer_configs(said, group)))
    ordered = method == "gptq" and group != -1 and orders
    return QuantizationConfig(
        method, None if group == -1 else group, _OFFSETS.get(form, 0), ordered, said.get("sym") is True
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
    word, known = ("checkpoint_format", tuple(_OFFSETS)) if method == "gptq" else ("version", ("gemm",))
    word = "format" if word not in config and "format" in config else word
    found = str(config.get(word) or known[0]).lower()
    if any(value is True for key, value in config.items() if key.startswith("is_marlin")):
        found = "marlin"
    if found not in known:
        raise InputError(
            f"{QUANTIZATION_CONFIG_KEY}: {word} is '{found[:40]}', a kernel-specific layout; smelt supports"
            f" {' and '.join(known)}. {_OTHER_FORMAT_HINT}",
            code="unsupported-packing",
            setting=f"{QUANTIZATION_CONFIG_KEY}.{word}",
        )
    packed = str(config.get("pack_dtype") or "int32")
    if packed != "int32":
        raise InputError(
            f"{QUANTIZATION_CONFIG_KEY}: pack_dtype is '{packed[:40]}'; smelt supports int32."
            f" {_OTHER_FORMAT_HINT}",
            code="unsupported-packing",
            setting=f"{QUANTIZATION_CONFIG_KEY}.pack_dtype",
        )
    return found


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
    if rotated := next((word for word in _ROTATIONS if config.get(word)), None):
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
    found: list[Mapping[str, Any]] = []
    for word in _PER_LAYER_KEYS:
        layers = config.get(word) or {}
        if not isinstance(layers, dict) or not all(isinstance(own, dict) for own in layers.values()):
            raise InputError(
                f"{QUANTIZATION_CONFIG_KEY}: {word} is {str(layers)[:80]}; expected one object per layer.",
                code="wrong-value",
                setting=f"{QUANTIZATION_CONFIG_KEY}.{word}",
            )
        for name, own in layers.items():
            bits = own.get("bits")
            if name.startswith("-:") or (isinstance(bits, int) and bits >= _FLOAT_BITS):
                continue
            for key, value, usual in (
                ("bits", bits, CHECKPOINT_BITS),
                ("group_size", own.get("group_size"), group),
            ):
                if value not in (None, usual):
                    raise InputError(
                        f"{QUANTIZATION_CONFIG_KEY}: {word}: '{name[:80]}' has {key}"
                        f" {str(value)[:20]}, but the other layers have {usual}; all layers must"
                        f" have the same format. {_FLOAT_MODEL_HINT}",
                        code="mixed-quantization",
                        setting=f"{QUANTIZATION_CONFIG_KEY}.{word}",
                    )
            _require_integer_weights(own, f"{word}: '{name[:80]}': ")
            _require_no_extras(own, f"{word}: '{name[:80]}': ")
            found.append(own)
    return found
