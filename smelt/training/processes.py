"""Several processes of one training: their settings, and what they exchange.

Every process computes the stage with a part of each batch; torch averages the gradients (Li et al. 2020,
PyTorch Distributed, arXiv:2006.15704). The settings import no torch, so that recipes load quickly.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from smelt.core.errors import InputError, SettingError
from smelt.core.stage import Settings

ValueT = TypeVar("ValueT")
# Process 0 scores checkpoints while the others wait.
_TIMEOUT = timedelta(days=1)


class LaunchSettings(Settings):
    """Processes that train a stage together on this machine."""

    num_processes: int = Field(
        default=1, ge=1, le=1024, description="processes of each training stage; with CUDA one per GPU"
    )
    strategy: Literal["ddp", "fsdp"] = Field(
        default="ddp",
        description="ddp: every process holds the whole model; fsdp: parameters, gradients and optimizer"
        " states are divided",
    )
    cpu_offload: bool = Field(
        default=False, description="fsdp: parameters and optimizer states are kept in the CPU's memory"
    )

    @model_validator(mode="after")
    def _offload_needs_shards(self) -> Self:
        if self.cpu_offload and self.strategy != "fsdp":
            raise SettingError("cpu_offload requires strategy: fsdp", code="settings-conflict")
        return self


def is_distributed() -> bool:
    """Return whether this process trains together with others."""
    import torch

    return torch.distributed.is_available() and torch.distributed.is_initialized()


def process_rank() -> int:
    """Return the number of this process; 0 without others."""
    import torch

    return torch.distributed.get_rank() if is_distributed() else 0


def process_count() -> int:
    """Return the number of processes that train together; 1 without others."""
    import torch

    return torch.distributed.get_world_size() if is_distributed() else 1


def processes_on_machine() -> int:
    """Return how many of them run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if is_distributed() else 1


def join_processes(device: str) -> None:
    """Join the process group that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Raises:
        InputError: device is cuda, and this process has no GPU of its own (`too-few-gpus`).
    """
    import torch

    if device == "cpu":
        torch.distributed.init_process_group("gloo", timeout=_TIMEOUT)
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise InputError(
            f"launch: process {local} of this machine needs a GPU of its own, but torch finds"
            f" {torch.cuda.device_count()}. Lower num_processes, or set device: cpu.",
            code="too-few-gpus",
            setting="launch.num_processes",
        )
    torch.cuda.set_device(local)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", timeout=_TIMEOUT)


def leave_processes() -> None:
    """Leave the process group."""
    import torch

    torch.distributed.destroy_process_group()


def from_first(make: Callable[[], ValueT]) -> ValueT:
    """Return the result of `make`, which only process 0 calls."""
    if not is_distributed():
        return make()
    import torch

    found = [make() if process_rank() == 0 else None]
    torch.distributed.broadcast_object_list(found, src=0)
    return found[0]  # type: ignore[return-value]


def gather_parts(part: ValueT) -> list[ValueT]:
    """Return the `part` of every process, in the order of their numbers."""
    if not is_distributed():
        return [part]
    import torch

    found: list[Any] = [None] * process_count()
    torch.distributed.all_gather_object(found, part)
    return found


def sharded_map(items: Sequence[ValueT], compute: Callable[[Sequence[ValueT]], Sequence[Any]]) -> list[Any]:
    """Return the results of `compute` for `items` in their order; each process computes its share.

    compute: returns one result per item, independent of the other items.
    """
    count, rank = process_count(), process_rank()
    parts = gather_parts(list(compute(items[rank::count])))
    found: list[Any] = [None] * len(items)
    for number, part in enumerate(parts):
        found[number::count] = part
    return found
