"""What a model is given for the time of its training, and gets back afterwards."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from smelt.core.errors import InputError
from smelt.families.registry import family_of
from smelt.runtime.backends.device import bf16_gain
from smelt.runtime.models.structure import keeps_zeros

_WORTH = 1.3  # below, the loss of digits buys too little


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Let torch use `count` threads meanwhile (None: as it is)."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pick_precision(wanted: str, device: torch.device) -> str:
    """Return fp32 or bf16; `auto` is bf16 on a GPU that has it and on a CPU that gains from it (1.3 times).

    Raises:
        InputError: bf16 is asked for on a processor that cannot do it.
    """
    if wanted == "fp32" or device.type not in {"cpu", "cuda"}:
        return wanted if wanted != "auto" else "fp32"
    if device.type == "cuda":
        return (
            "bf16" if wanted == "bf16" or torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
        )
    # torch has no public question for this; without native products there is nothing to try
    native = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    gain = bf16_gain() if native or wanted == "bf16" else 0.0
    if wanted == "bf16" and not gain:
        raise InputError(
            "precision: bf16 products end this processor's process; set precision: fp32 (or auto).",
            code="no-bf16",
            setting="precision",
        )
    return "bf16" if wanted == "bf16" or gain >= _WORTH else "fp32"


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return the context in which products run in bf16, or one that changes nothing."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


@contextlib.contextmanager
def denormals_as_zero() -> Iterator[None]:
    """Let the processor take denormal numbers (below 1.2e-38 in float32) for zero meanwhile.

    Sharp attention makes them, and it computes many times slower with them. The setting is one of each
    thread, inherited from the thread that started it, so it has to come before torch's first product.
    A run takes it also where all training is done already, so that one that goes on computes the same.
    """
    before = sys.float_info.min / 2 == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


@contextlib.contextmanager
def training_state(model: Any, dropout: float | None, device: torch.device) -> Iterator[None]:
    """Prepare `model` for training; leave it as it was: float32, CPU, eval mode, its own dropout."""
    with contextlib.ExitStack() as undo:
        attention = model.config._attn_implementation
        if device.type == "cpu":
            # scaled_dot_product_attention's backward is slow on CPUs
            model.set_attn_implementation("eager")
        undo.callback(model.set_attn_implementation, attention)
        for module in model.modules() if dropout is not None else ():
            _override_dropout(module, float(dropout or 0.0), undo)
        fixed = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        for name, parameter in model.named_parameters():
            if name in fixed:  # position tables that no file holds would be lost if they were trained
                undo.callback(parameter.requires_grad_, parameter.requires_grad)
                parameter.requires_grad_(False)
        for handle in [*_hold_pad_rows(model), *_hold_zeros(model)]:
            undo.callback(handle.remove)
        try:
            yield
        finally:
            model.zero_grad(set_to_none=True)
            model.to("cpu")
            model.eval()


def _override_dropout(module: nn.Module, value: float, undo: contextlib.ExitStack) -> None:
    """Let `module` drop with probability `value` wherever it drops anything.

    The families keep the rate in a layer (BERT, GPT-2) or as a number beside the product that it belongs to
    (`dropout`, `attention_dropout`, `activation_dropout` in Marian and Llama); a few have both.
    """
    names = ["p"] if isinstance(module, nn.Dropout) else [n for n in vars(module) if _is_rate(module, n)]
    if not value and "layerdrop" in vars(module):  # whole layers that are left out are dropped too
        names.append("layerdrop")
    for name in names:
        undo.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, value)


def _is_rate(module: nn.Module, name: str) -> bool:
    number = isinstance(vars(module)[name], int | float) and not isinstance(vars(module)[name], bool)
    return number and (name == "dropout" or name.endswith("_dropout"))


def _hold_zeros(model: nn.Module) -> list[Any]:
    """Keep the zeros of masked layers: without a gradient, neither AdamW nor its weight decay moves a 0."""

    def within(mask: Tensor, gradient: Tensor) -> Tensor:
        return gradient * mask.to(gradient.device)

    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and keeps_zeros(m)]
    weights = {id(layer.weight): layer.weight for layer in layers if layer.weight.requires_grad}
    return [weight.register_hook(partial(within, weight.detach() != 0)) for weight in weights.values()]


def _hold_pad_rows(model: Any) -> list[Any]:
    """Keep the embedding of padding where it is, in families that say so: their decoder starts from it."""
    family = family_of(model)
    if family is None or not family.holds_pad_row:
        return []
    rows = {
        id(m.weight): (m.weight, m.padding_idx)
        for m in model.modules()
        if isinstance(m, nn.Embedding) and m.padding_idx is not None and m.weight.requires_grad
    }

    def without(row: int, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[row] = 0
        return gradient

    return [weight.register_hook(partial(without, row)) for weight, row in rows.values()]
