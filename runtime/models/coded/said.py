"""What a config says of codes in its checkpoint: `quantization_config`, as GPTQ's and AWQ's tools write it.

Sources: transformers' GPTQConfig and AwqConfig (utils/quantization_config.py); the layouts of AutoGPTQ,
GPTQModel, AutoAWQ and AutoRound (whose own format is GPTQ's first layout under another name). Nothing here
imports torch.
"""

from __future__ import annotations

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
# what is added to a stored zero point: the first layout stores them less one
_OFFSETS = {"gptq": 1, "gptq_v2": 0}
_AGAIN = f"Take a checkpoint of that form, or start from the float model and quantize: {{scheme: {TAKEN}}}."


@dataclass(frozen=True)
class Coding:
    """How codes lie in a checkpoint.

    method: gptq or awq, which says how they are packed. group: inputs that share a scale; None: all of a row.
    offset: what is added to a stored zero point. ordered: whether inputs were taken in an order of their own,
    so that only an index says which group each is in.
    """

    method: str
    group: int | None
    offset: int
    ordered: bool = False


def coding_of(config: Mapping[str, Any]) -> Coding | None:
    """Return how the codes of a model of this config lie; None where its weights are floats.

    Raises:
        InputError: they are of a kind or in a layout that smelt does not read.
    """
    said = config.get(SAID)
    if said is None:
        return None
    if not isinstance(said, dict):
        raise InputError(f"{SAID} is {str(said)[:80]}; expected an object, as transformers writes it.")
    method = _method(said)
    bits = said.get("bits", said.get("w_bit"))
    if bits != BITS:
        raise InputError(f"{SAID}: {method} codes of {str(bits)[:20]} bits; smelt reads {BITS}. {_AGAIN}")
    group = said.get("group_size", said.get("q_group_size"))
    if not isinstance(group, int) or isinstance(group, bool) or not (group == -1 or group > 0):
        raise InputError(f"{SAID}: group_size is {str(group)[:40]}; expected a whole number, or -1 for rows.")
    _require_layout(method, said)
    form = str(said.get("checkpoint_format", "gptq")).lower() if method == "gptq" else "gptq_v2"
    ordered = method == "gptq" and said.get("desc_act") is True and group != -1
    return Coding(method, None if group == -1 else group, _OFFSETS[form], ordered)


def _method(said: Mapping[str, Any]) -> str:
    """Return gptq or awq.

    Raises:
        InputError: the codes are of another method, or AutoRound packed them in another way.
    """
    method = str(said.get("quant_method", "")).lower()
    if method == _AUTO_ROUND:
        packing = str(said.get("packing_format", _PACKING))
        if packing != _PACKING:
            raise InputError(f"{SAID}: packing_format is '{packing[:40]}'; smelt reads {_PACKING}. {_AGAIN}")
        return "gptq"
    if method not in _METHODS:
        raise InputError(
            f"{SAID}: quant_method is '{method[:40]}'; smelt reads the codes of {', '.join(_METHODS)} and"
            f" {_AUTO_ROUND} alone. Start from the float model, and quantize it here."
        )
    return method


def _require_layout(method: str, said: Mapping[str, Any]) -> None:
    """Refuse other ways to pack the codes of `method`.

    Raises:
        InputError: it is another one.
    """
    word, known = ("checkpoint_format", tuple(_OFFSETS)) if method == "gptq" else ("version", ("gemm",))
    found = str(said.get(word, known[0])).lower()
    if any(value is True for key, value in said.items() if key.startswith("is_marlin")):
        found = "marlin"
    if found not in known:
        raise InputError(
            f"{SAID}: {word} is '{found[:40]}', a layout of one kernel; smelt reads {' and '.join(known)}."
            f" {_AGAIN}"
        )
    packed = str(said.get("pack_dtype", "int32"))
    if packed != "int32":
        raise InputError(f"{SAID}: pack_dtype is '{packed[:40]}'; smelt reads int32. {_AGAIN}")
