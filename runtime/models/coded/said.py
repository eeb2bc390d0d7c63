"""What a config says of codes in its checkpoint: `quantization_config`, as GPTQ's and AWQ's tools write it.

Sources: transformers' GPTQConfig and AwqConfig (utils/quantization_config.py); the layouts of AutoGPTQ,
GPTQModel, AutoAWQ and AutoRound (whose own format is GPTQ's first layout under another name), and what
AutoRound says beside them (auto_round/schemes.py, export/utils.py: `act_bits` stands there only below 16)
and GPTQModel (`adapter`, `activation`).
Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smelt.core.errors import InputError
from smelt.runtime.schemes.registry import TAKEN

SAID = "quantization_config"
BITS = 4
_METHODS = ("gptq", "awq")
# AutoRound's own format, and the one of its packings that is read
_AUTO_ROUND, _PACKING = "auto-round", "auto_round:auto_gptq"
# AutoRound's words for whole numbers with a zero point of their own kind (auto_round/data_type/int.py)
_WHOLE_NUMBERS = ("int", f"int{BITS}", "int_sym", "int_asym", "int_sym_gptq")
_FLOAT_BITS = 16  # from here on nothing is rounded
# of AutoRound, and of GPTQModel (quantization/config.py: `rotation: hadamard | random`)
_ROTATIONS = ("rotation_config", "spinquant_config", "rotation")
# where tools say what single layers have of their own: AutoRound, GPTQModel
_OF_LAYERS = ("extra_config", "dynamic")
# what is added to a stored zero point: the first layout stores them less one
_OFFSETS = {"gptq": 1, "gptq_v2": 0}
_AGAIN = f"Take a checkpoint of that form, or start from the float model and quantize: {{scheme: {TAKEN}}}."
_HERE = f"Start from the float model and quantize: {{scheme: {TAKEN}}}."


@dataclass(frozen=True)
class Coding:
    """How codes lie in a checkpoint.

    method: gptq or awq, which says how they are packed. group: inputs that share a scale; None: all of a row.
    offset: what is added to a stored zero point. ordered: whether inputs were taken in an order of their own,
    so that only an index says which group each is in. symmetric: whether the config says that every zero
    point is in the middle.
    """

    method: str
    group: int | None
    offset: int
    ordered: bool = False
    symmetric: bool = False


def coding_of(config: Mapping[str, Any]) -> Coding | None:
    """Return how the codes of a model of this config lie; None where its weights are floats.

    Raises:
        InputError: they are of a kind or in a layout that smelt does not read.
    """
    said = config.get(SAID)
    if said is None:
        return None
    if not isinstance(said, dict):
        raise InputError(
            f"{SAID} is {str(said)[:80]}; expected an object, as transformers writes it.",
            code="wrong-value",
            setting=SAID,
        )
    method = _method(said)
    bits = said.get("bits", said.get("w_bit"))
    if bits != BITS:
        raise InputError(
            f"{SAID}: {method} codes of {_as_json(bits)} bits; smelt reads {BITS}. {_AGAIN}",
            code="unsupported-bits",
            setting=f"{SAID}.bits",
        )
    group = said.get("group_size", said.get("q_group_size"))
    if not isinstance(group, int) or isinstance(group, bool) or not (group == -1 or group > 0):
        raise InputError(
            f"{SAID}: group_size is {_as_json(group)}; expected a whole number, or -1 for rows.",
            code="wrong-value",
            setting=f"{SAID}.group_size",
        )
    form = _layout(method, said)
    _require_plain(said)
    _require_alone(said)
    orders = any(own.get("desc_act") is True for own in (said, *_layers_alike(said, group)))
    ordered = method == "gptq" and group != -1 and orders
    return Coding(
        method, None if group == -1 else group, _OFFSETS.get(form, 0), ordered, said.get("sym") is True
    )


def no_other_head(coding: Coding) -> str:
    """Say that a model of codes gets no new head."""
    return (
        f"its weights are {coding.method} codes, and the task wants another head. Start from the float model,"
        " and quantize it here."
    )


def _method(said: Mapping[str, Any]) -> str:
    """Return gptq or awq.

    Raises:
        InputError: the codes are of another method, or AutoRound packed them in another way.
    """
    method = str(said.get("quant_method", "")).lower()
    if method == _AUTO_ROUND:
        packing = str(said.get("packing_format") or _PACKING)
        if packing != _PACKING:
            raise InputError(
                f"{SAID}: packing_format is '{packing[:40]}'; smelt reads {_PACKING}, which auto-round writes"
                f" of symmetric codes; of others it reads what --format auto_gptq writes. {_AGAIN}",
                code="unsupported-packing",
                setting=f"{SAID}.packing_format",
            )
        return "gptq"
    if method not in _METHODS:
        raise InputError(
            f"{SAID}: quant_method is {_as_json(said.get('quant_method'))}; smelt reads the codes of"
            f" {', '.join(_METHODS)} and {_AUTO_ROUND} alone. {_HERE}",
            code="unsupported-method",
            setting=f"{SAID}.quant_method",
        )
    return method


def _layout(method: str, said: Mapping[str, Any]) -> str:
    """Return how the codes of `method` are packed, in its own word.

    Raises:
        InputError: it is a way that is not read.
    """
    word, known = ("checkpoint_format", tuple(_OFFSETS)) if method == "gptq" else ("version", ("gemm",))
    word = "format" if word not in said and "format" in said else word
    found = str(said.get(word) or known[0]).lower()
    if any(value is True for key, value in said.items() if key.startswith("is_marlin")):
        found = "marlin"
    if found not in known:
        raise InputError(
            f"{SAID}: {word} is '{found[:40]}', a layout of one kernel; smelt reads {' and '.join(known)}."
            f" {_AGAIN}",
            code="unsupported-packing",
            setting=f"{SAID}.{word}",
        )
    packed = str(said.get("pack_dtype") or "int32")
    if packed != "int32":
        raise InputError(
            f"{SAID}: pack_dtype is '{packed[:40]}'; smelt reads int32. {_AGAIN}",
            code="unsupported-packing",
            setting=f"{SAID}.pack_dtype",
        )
    return found


def _require_plain(said: Mapping[str, Any], where: str = "") -> None:
    """Require that codes are whole numbers, and that nothing but weights was rounded or rotated.

    Args:
        said: of all layers, or of one.
        where: which one.

    Raises:
        InputError: weights or activations are something else.
    """
    kind = said.get("data_type")
    if kind not in (None, *_WHOLE_NUMBERS):
        raise InputError(
            f"{SAID}: {where}data_type is '{str(kind)[:40]}'; smelt reads whole numbers with a zero point"
            f" (int), no floats, and no scales that are codes themselves. {_HERE}",
            code="unsupported-quantized-type",
            setting=f"{SAID}.data_type",
        )
    bits = said.get("act_bits")
    if bits is not None and not (isinstance(bits, int | float) and bits >= _FLOAT_BITS):
        kind = str(said.get("act_data_type", "int"))[:40]
        raise InputError(
            f"{SAID}: {where}act_bits is {str(bits)[:20]}: activations ({kind}) are rounded too, for which"
            " the codes were made. Layers here round them otherwise (int8 blocks), so it would be another"
            f" model. {_HERE}",
            code="quantized-activations",
            setting=f"{SAID}.act_bits",
        )
    if rotated := next((word for word in _ROTATIONS if said.get(word)), None):
        raise InputError(
            f"{SAID}: {where}{rotated}: the weights are rotated, and activations have to be while the model"
            f" runs, which nothing here does. {_HERE}",
            code="rotated-weights",
            setting=f"{SAID}.{rotated}",
        )


def _require_alone(said: Mapping[str, Any], where: str = "") -> None:
    """Require that the model computes with its codes and nothing beside them.

    Both words are GPTQModel's (quantization/config.py); what stands under its `meta` computes nothing.

    Args:
        said: of all layers, or of one.
        where: which one.

    Raises:
        InputError: an adapter belongs to it, or what some layers are fed is rounded too.
    """
    if adapter := said.get("adapter"):
        kind = adapter.get("name") if isinstance(adapter, dict) else adapter
        raise InputError(
            f"{SAID}: {where}adapter: the checkpoint holds an adapter ({_as_json(kind)}) beside its codes,"
            " which smelt does not read, and without it they are another model. If that one is meant, leave"
            f" adapter out of the config. {_HERE}",
            code="unsupported-adapter",
            setting=f"{SAID}.adapter",
        )
    if activation := said.get("activation"):
        raise InputError(
            f"{SAID}: {where}activation is {_as_json(activation)}: what layers are fed is rounded too (fp8,"
            f" NVFP4), which nothing here does, so it would be another model. {_HERE}",
            code="quantized-activations",
            setting=f"{SAID}.activation",
        )


def _as_json(value: Any) -> str:
    """Return what stands in the config, with its quotes: "4" is no number."""
    return json.dumps(value, default=str)[:40]


def _layers_alike(said: Mapping[str, Any], group: int) -> list[Mapping[str, Any]]:
    """Return what is said of single layers that have codes, once it is certain that they have codes as all.

    Layers that are left float have other tensors; so nothing has to be known of them.

    Raises:
        InputError: some have other bits, groups or types.
    """
    found: list[Mapping[str, Any]] = []
    for word in _OF_LAYERS:
        layers = said.get(word) or {}
        if not isinstance(layers, dict) or not all(isinstance(own, dict) for own in layers.values()):
            raise InputError(
                f"{SAID}: {word} is {str(layers)[:80]}; expected an object for each layer.",
                code="wrong-value",
                setting=f"{SAID}.{word}",
            )
        for name, own in layers.items():
            bits = own.get("bits")
            if name.startswith("-:") or (isinstance(bits, int) and bits >= _FLOAT_BITS):
                continue
            for key, value, usual in (("bits", bits, BITS), ("group_size", own.get("group_size"), group)):
                if value not in (None, usual):
                    raise InputError(
                        f"{SAID}: {word}: '{name[:80]}' has {key} {str(value)[:20]}, and the others have"
                        f" {usual}; smelt reads codes that are alike in all layers. {_HERE}",
                        code="mixed-quantization",
                        setting=f"{SAID}.{word}",
                    )
            _require_plain(own, f"{word}: '{name[:80]}': ")
            _require_alone(own, f"{word}: '{name[:80]}': ")
            found.append(own)
    return found
