"""Outputs of a model's blocks between the runs of two blocks, in memory or on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# Output of a block: hidden states, or a tuple of these and further outputs (T5's bias; None).
BlockOutput: TypeAlias = Tensor | tuple[Any, ...]


class BlockStateCache:
    """Outputs of blocks by the number of their batch; each can be replaced.

    Args:
        folder: created when the first output is stored on disk.
        limit_bytes: memory for all outputs together.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder, self._limit = folder, limit_bytes
        self._held: dict[int, list[Tensor | None]] = {}
        self._plain: dict[int, bool] = {}
        self._parts: dict[int, int] = {}

    def put(self, number: int, value: BlockOutput) -> None:
        """Store `value` for batch `number`; replaces an earlier value."""
        self._plain[number] = isinstance(value, Tensor)
        parts = [value] if isinstance(value, Tensor) else list(value)
        parts = [None if tensor is None else tensor.detach().cpu() for tensor in parts]
        self._parts[number] = len(parts)
        self._held.pop(number, None)
        if sum(map(_size_bytes, self._held.values())) + _size_bytes(parts) <= self._limit:
            self._held[number] = parts
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            str(index): tensor.contiguous() for index, tensor in enumerate(parts) if tensor is not None
        }
        save_file(tensors, self._file(number))

    def get(self, number: int, device: str) -> BlockOutput:
        """Return the value of batch `number`, on `device`."""
        parts = self._held.get(number)
        if parts is None:
            saved = load_file(self._file(number))
            parts = [saved.get(str(index)) for index in range(self._parts[number])]
        moved = [None if tensor is None else tensor.to(device) for tensor in parts]
        return moved[0] if self._plain[number] and moved[0] is not None else tuple(moved)

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}.safetensors"


def repeat_batch(batch: Mapping[str, Tensor], copies: int) -> dict[str, Tensor]:
    """Return the inputs of `batch`, repeated along their first dimension."""
    return {name: torch.cat([value] * copies) for name, value in batch.items()}


def stack_outputs(outputs: Sequence[BlockOutput], samples: int) -> BlockOutput:
    """Return the outputs of a block for several copies of a batch, as if it had run on all at once.

    samples: the size of the batch; a bias of positions has one row for all of them.
    """
    if isinstance(outputs[0], Tensor):
        rows: list[Any] = list(outputs)
        return torch.cat([row.expand(samples, *row.shape[1:]) if len(row) == 1 else row for row in rows])
    columns = list(zip(*outputs, strict=True))
    return tuple(None if column[0] is None else stack_outputs(column, samples) for column in columns)


def _size_bytes(parts: list[Tensor | None]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in parts if tensor is not None)
