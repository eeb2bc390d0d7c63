"""Prepare a model for training, restore it afterwards, and check the memory before a training starts.

Every trained weight has a gradient in float32 and the state of its optimizer, such as AdamW's two moments
(Loshchilov & Hutter 2019, arXiv:1711.05101); the best and the averaged weights are copies. A training needs
this memory for any batch size, and more for activations: a training that passes the check may still run out
of memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from smelt.core.errors import InputError, combined_error
from smelt.core.process_group import processes_on_machine
from smelt.core.system import available_bytes, require_memory
from smelt.models.edits import is_masked
from smelt.models.families.registry import family_of
from smelt.runtimes.device import bf16_speedup
from smelt.training.processes import LaunchSettings
from smelt.training.settings import OPTIMIZERS, fp16_error

_MIN_SPEEDUP = 1.3  # below it bf16 is not worth its lower precision


def pick_precision(requested: str, device: torch.device) -> str:
    """Return fp32, bf16 or fp16; `auto` is bf16 on a GPU with bf16 and on a CPU if it is 1.3 times as fast.

    Raises:
        InputError: bf16 is set and the processor does not support it, or fp16 is set without a GPU.
    """
    if (problem := fp16_error(requested, device.type)) is not None:
        raise combined_error([problem])
    if requested == "fp32" or device.type not in {"cpu", "cuda"}:
        return requested if requested != "auto" else "fp32"
    if device.type == "cuda":
        if requested != "auto":
            return requested
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    # torch has no public API for this; without native bf16 no trial is needed
    has_native_bf16 = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    speedup = bf16_speedup() if has_native_bf16 or requested == "bf16" else 0.0
    if requested == "bf16" and not speedup:
        raise InputError(
            "precision: bf16 matrix multiplications crash on this processor. Set precision: fp32 (or auto).",
            code="no-bf16",
            setting="precision",
        )
    return "bf16" if requested == "bf16" or speedup >= _MIN_SPEEDUP else "fp32"


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return the autocast context for bf16 or fp16, or a disabled one."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=precision != "fp32")


@contextlib.contextmanager
def denormals_as_zero() -> Iterator[None]:
    """Flush denormal numbers (below 1.2e-38 in float32) to zero inside the context.

    Sharp attention produces them, and they make computation many times slower. The setting is per thread and
    inherited from the parent thread, so it must be set before torch's first parallel operation. A run
    sets it even if all training is done already, so that a resumed one computes the same.
    """
    before = sys.float_info.min / 2 == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


# Parameters of glibc's mallopt, and the values that its dynamic thresholds reach in a long-running process.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_MMAP_MAX, _MMAP_THRESHOLD = 65536, 32 * 1024**2


@contextlib.contextmanager
def freed_memory_retained() -> Iterator[None]:
    """Let glibc reuse freed memory inside the context instead of returning it to the system.

    By default every tensor above 32 MB, such as logits, is mapped and unmapped, and the kernel clears its
    pages again in each update: a quarter of the time of a small translator's distillation
    (docs/measurements/speed.md). Other C libraries are unchanged.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield
    finally:
        mallopt(_M_MMAP_MAX, _MMAP_MAX)
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, 2 * _MMAP_THRESHOLD)
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def training_state(model: Any, dropout: float | None, device: torch.device) -> Iterator[None]:
    """Prepare `model` for training, and restore it: float32, CPU, eval mode, its own dropout."""
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
            if name in fixed:  # position tables that are not stored must not be trained
                undo.callback(parameter.requires_grad_, parameter.requires_grad)
                parameter.requires_grad_(False)
        for handle in [*_freeze_pad_rows(model), *_freeze_zeros(model)]:
            undo.callback(handle.remove)
        try:
            yield
        finally:
            model.zero_grad(set_to_none=True)
            model.to("cpu")
            model.eval()


@contextlib.contextmanager
def compiled_forward(model: nn.Module) -> Iterator[None]:
    """Compile the forward pass of `model` at its first call, for any batch size and length (torch.compile).

    The parameters and their names are unchanged. Training and evaluation mode are compiled apart.
    """
    model.compile(dynamic=True)
    try:
        yield
    finally:
        model._compiled_call_impl = None


@contextlib.contextmanager
def gradient_checkpointing(model: Any) -> Iterator[None]:
    """Compute each layer's activations again in the backward pass (Chen et al. 2016, arXiv:1604.06174).

    Raises:
        InputError: the model's class does not support it.
    """
    checkpointed = [m for m in model.modules() if getattr(m, "supports_gradient_checkpointing", False)]
    if not checkpointed:
        raise InputError(
            f"gradient_checkpointing: transformers does not support it for {type(model).__name__}. Lower"
            " batch_size and raise gradient_accumulation_steps instead.",
            code="no-gradient-checkpointing",
            setting="gradient_checkpointing",
        )
    top_module = checkpointed[0]  # a sentence embedder contains the model of transformers
    name = (
        "activation_checkpointing"
        if hasattr(top_module, "activation_checkpointing_enable")
        else "gradient_checkpointing"
    )
    getattr(top_module, f"{name}_enable")({"use_reentrant": False})
    try:
        yield
    finally:
        getattr(top_module, f"{name}_disable")()


def _override_dropout(module: nn.Module, value: float, undo: contextlib.ExitStack) -> None:
    """Set every dropout rate of `module` to `value`.

    Families keep the rate in a layer (BERT, GPT-2) or as a number next to a linear layer
    (`dropout`, `attention_dropout`, `activation_dropout` in Marian and Llama); a few have both.
    """
    names = (
        ["p"] if isinstance(module, nn.Dropout) else [n for n in vars(module) if _is_dropout_rate(module, n)]
    )
    if not value and "layerdrop" in vars(module):  # dropping whole layers is dropout too
        names.append("layerdrop")
    for name in names:
        undo.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, value)


def _is_dropout_rate(module: nn.Module, name: str) -> bool:
    number = isinstance(vars(module)[name], int | float) and not isinstance(vars(module)[name], bool)
    return number and (name == "dropout" or name.endswith("_dropout"))


def _freeze_zeros(model: nn.Module) -> list[Any]:
    """Keep the zeros of masked layers: without a gradient, neither AdamW nor weight decay changes a 0."""

    def within(mask: Tensor, gradient: Tensor) -> Tensor:
        return gradient * mask.to(gradient.device)

    return [w.register_hook(partial(within, w.detach() != 0)) for w in masked_weights(model)]


def masked_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights of sparse layers that train."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and is_masked(m)]
    weights = {id(m.weight): m.weight for m in layers if m.weight.requires_grad}
    return [weight for weight in weights.values() if isinstance(weight, nn.Parameter)]


def frozen_pad_rows(model: Any) -> list[tuple[Tensor, int]]:
    """Return the embedding of padding, as weight and row, in families whose decoder starts from it."""
    family = family_of(model)
    if family is None or not family.freezes_pad_row:
        return []
    embeddings = {
        id(m.weight): (m.weight, m.padding_idx)
        for m in model.modules()
        if isinstance(m, nn.Embedding) and m.padding_idx is not None and m.weight.requires_grad
    }
    return list(embeddings.values())


def _freeze_pad_rows(model: Any) -> list[Any]:
    def without(row: int, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[row] = 0
        return gradient

    return [weight.register_hook(partial(without, row)) for weight, row in frozen_pad_rows(model)]


_GRADIENT_BYTES, _COPY_BYTES = 4, 4  # bytes a weight


def require_training_memory(
    model: nn.Module,
    device: torch.device,
    *,
    optimizer: str,
    keeps_best: bool,
    keeps_average: bool,
    parts: int = 1,
    launch: LaunchSettings | None = None,
) -> None:
    """Require memory for the gradients and the optimizer state of a training.

    Args:
        model: float32, on the CPU, not divided yet.
        device: the training device.
        optimizer: its name.
        keeps_best: whether a copy of the best weights is kept (validation).
        keeps_average: whether a moving average of the weights is kept.
        parts: number of processes that train together.
        launch: their settings; None: one process.

    Raises:
        RunError: not enough memory; the message has the needed and the free amount.
    """
    divides, offloaded = (0, False) if launch is None else (launch.divides, launch.cpu_offload)
    zero = launch is not None and launch.strategy == "deepspeed"
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    weights = trained // parts if divides == 3 else trained
    copies = _COPY_BYTES * weights * (keeps_best + keeps_average)  # on the CPU, wherever the model is trained
    gradients = _GRADIENT_BYTES * (trained // parts if divides >= 2 else trained)
    states = OPTIMIZERS[optimizer] * (trained // parts if divides >= 1 else trained)
    if zero and (divides < 3 or offloaded):
        states += _COPY_BYTES * trained // parts  # DeepSpeed's own float32 weights
    remedy = (
        f"That is for the gradients, the optimizer and the copies of {weights / 1e6:,.1f} million weights,"
        " before any batch. Make the model smaller first, or use a machine with more memory."
    )
    on_cpu = gradients + states
    if device.type == "cuda":
        weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        if divides == 3:
            weight_bytes = 0 if offloaded else weight_bytes // parts
        on_gpu = weight_bytes + (0 if offloaded else on_cpu)
        if zero and divides == 3:  # DeepSpeed moves the model before it divides it
            on_gpu = max(on_gpu, sum(p.numel() * p.element_size() for p in model.parameters()))
        free_bytes = torch.cuda.mem_get_info(device)[0]
        require_memory(on_gpu, "Training on the GPU", remedy, free_bytes=free_bytes)
        on_cpu = on_cpu if offloaded else 0
    require_memory(
        (on_cpu + copies) * processes_on_machine(), "Training", remedy, free_bytes=available_bytes()
    )
