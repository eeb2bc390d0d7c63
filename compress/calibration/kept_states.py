"""What a block gave for each batch, kept in memory while there is room and on disk beyond."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from safetensors.torch import load_file, save_file
from torch import Tensor

# What a block gives: hidden states, or those and what it hands on besides (T5's bias; nothing).
Given: TypeAlias = Tensor | tuple[Any, ...]


class KeptStates:
    """Results of blocks by the number of their batch; each can be replaced.

    Args:
        folder: is made when the first result lies on disk.
        limit_bytes: memory for all results together.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder, self._limit = folder, limit_bytes
        self._held: dict[int, list[Tensor | None]] = {}
        self._plain: dict[int, bool] = {}
        self._parts: dict[int, int] = {}

    @property
    def on_disk(self) -> int:
        """How many batches lie on disk."""
        return len(self._plain) - len(self._held)

    def put(self, number: int, value: Given) -> None:
        """Keep `value` for the batch `number`, instead of what was kept for it."""
        self._plain[number] = isinstance(value, Tensor)
        parts = [value] if isinstance(value, Tensor) else list(value)
        parts = [None if part is None else part.detach().cpu() for part in parts]
        self._parts[number] = len(parts)
        self._held.pop(number, None)
        if sum(map(_bytes, self._held.values())) + _bytes(parts) <= self._limit:
            self._held[number] = parts
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        tensors = {str(at): part.contiguous() for at, part in enumerate(parts) if part is not None}
        save_file(tensors, self._file(number))

    def get(self, number: int, device: str) -> Given:
        """Return what was kept for the batch `number`, on `device`."""
        parts = self._held.get(number)
        if parts is None:
            found = load_file(self._file(number))
            parts = [found.get(str(at)) for at in range(self._parts[number])]
        placed = [None if part is None else part.to(device) for part in parts]
        return placed[0] if self._plain[number] and placed[0] is not None else tuple(placed)

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}.safetensors"


def _bytes(parts: list[Tensor | None]) -> int:
    return sum(part.numel() * part.element_size() for part in parts if part is not None)
