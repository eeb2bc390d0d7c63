"""FSDP: parameters, gradients and optimizer states divided over the processes of a training.

torch's `fully_shard` (FSDP2; Zhao et al. 2023, PyTorch FSDP, arXiv:2304.11277) replaces the parameters of a
model by DTensors, each process holding a slice of the first axis; a layer is gathered when it computes. The
model is divided before its optimizer is created, and is whole again after the training.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from smelt.core.errors import InputError
from smelt.quantization.layers import MasterWeightLayer
from smelt.training.extension import TrainingExtension
from smelt.training.processes import LaunchSettings, fsdp_conflicts
from smelt.training.settings import TrainingSettings
from smelt.training.training_state import frozen_pad_rows


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a divided tensor, sharing memory; another tensor unchanged."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def whole_tensor(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a divided tensor as a whole one; all processes must call it. Another tensor is unchanged.

    like: a divided tensor of which `tensor` is this process's part.
    """
    if like is not None and hasattr(like, "full_tensor"):
        from torch.distributed.tensor import DTensor

        divided: Any = like
        part = tensor.to(local_part(like).device)
        tensor = DTensor.from_local(
            part, divided.device_mesh, divided.placements, shape=like.shape, stride=like.stride()
        )
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def divided_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor divided as `like`; unchanged if `like` is whole."""
    if not hasattr(like, "full_tensor"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    divided: Any = like
    found: Tensor = distribute_tensor(
        tensor.to(local_part(like).device), divided.device_mesh, divided.placements
    )
    return found


def require_shardable(model: nn.Module, settings: TrainingSettings, extension: TrainingExtension) -> None:
    """Require a training whose steps only use gradients and whole layers.

    Raises:
        InputError: techniques that change single weights, or that score checkpoints.
    """
    found = fsdp_conflicts(settings)
    if any(isinstance(m, MasterWeightLayer) for m in model.modules()):
        found.append("quantized weights")
    if extension.modules or extension.groups or not extension.can_resume:
        found.append("a loss or technique with parameters of its own")
    if found:
        raise InputError(
            f"strategy: fsdp cannot train with {', '.join(found)}. Remove it, or set strategy: ddp.",
            code="not-with-fsdp",
            setting="launch.strategy",
        )


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of a model: the members of its outermost module lists."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else _layers(child)
    return found


@contextlib.contextmanager
def sharded(
    module: nn.Module, model: nn.Module, launch: LaunchSettings, device: torch.device
) -> Iterator[None]:
    """Divide the parameters of `module`, which contains `model`, inside the context.

    At the end `model` is an ordinary module again, with the trained weights on the CPU, in each process.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    whole = copy.deepcopy(model)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    offload = CPUOffloadPolicy() if launch.cpu_offload else OffloadPolicy()
    # moves each part to the device when it is divided: the whole model need not fit there
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh, offload_policy=offload)
    # also the outermost part: weights are exchanged between passes (averages, the best ones)
    fully_shard(module, mesh=mesh, offload_policy=offload, reshard_after_forward=True)
    for parameter, row in frozen_pad_rows(model):
        _zero_gradient_row(parameter, row)
    try:
        yield
        _copy_whole(model, whole)
    finally:
        # the caller's object, without the classes and hooks of FSDP
        model.__class__, model.__dict__ = whole.__class__, whole.__dict__


@torch.no_grad()
def _copy_whole(divided: nn.Module, whole: nn.Module) -> None:
    targets: dict[str, Tensor] = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    for name, tensor in [*divided.named_parameters(), *divided.named_buffers()]:
        targets[name].copy_(whole_tensor(tensor))


def _zero_gradient_row(parameter: Tensor, row: int) -> None:
    """Keep the gradient of a row of a divided parameter zero."""
    local = local_part(parameter)
    size = -(-parameter.shape[0] // torch.distributed.get_world_size())  # of every slice but the last ones
    own = row - torch.distributed.get_rank() * size

    def zero(trained: Tensor) -> None:
        if trained.grad is not None and 0 <= own < len(local):
            local_part(trained.grad)[own] = 0

    parameter.register_post_accumulate_grad_hook(zero)
