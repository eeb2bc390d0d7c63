"""This process among several that compute together (torch.distributed).

Without others every function returns at once, and torch is not imported.

Batches can also be divided over tasks that do not communicate, the shards of a scoring: each computes its
batches up to the first exchange (`ShardEnd`), and computes on once it has the parts of all (`in_shard`).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

ValueT = TypeVar("ValueT")


def is_distributed() -> bool:
    """Return whether this process computes together with others."""
    if "torch" not in sys.modules:
        return False
    import torch

    return bool(torch.distributed.is_available() and torch.distributed.is_initialized())


def process_rank() -> int:
    """Return the number of this process; 0 without others."""
    if not is_distributed():
        return 0
    import torch

    return int(torch.distributed.get_rank())


def process_count() -> int:
    """Return the number of processes that compute together; 1 without others."""
    if not is_distributed():
        return 1
    import torch

    return int(torch.distributed.get_world_size())


def processes_on_machine() -> int:
    """Return how many of them run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if is_distributed() else 1


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
    if _shards:
        return _shards[-1].gather(part)
    if not is_distributed():
        return [part]
    import torch

    found: list[Any] = [None] * process_count()
    torch.distributed.all_gather_object(found, part)
    return found


def own_batches(batches: Iterable[ValueT]) -> list[tuple[int, ValueT]]:
    """Return this process's share of `batches`, each with its number."""
    count, rank = process_count(), process_rank()
    if _shards:
        count, rank = _shards[-1].count, _shards[-1].number
        rank = -1 if _shards[-1].known else rank  # also then all batches are read: readers count texts
    return [(number, batch) for number, batch in enumerate(batches) if number % count == rank]


def merge_shares(found: Mapping[int, ValueT]) -> list[ValueT]:
    """Return the results of all processes in the order of their indices, which are 0 to n - 1."""
    parts = gather_parts(dict(found))
    if _shards:
        _shards[-1].require_all()
    merged = {index: value for part in parts for index, value in part.items()}
    return [merged[index] for index in range(len(merged))]


class ShardEnd(Exception):  # noqa: N818 - no error
    """Ends the computation of a shard, which needs the parts of the others.

    parts: what it has computed since the last exchange, in the order of its calls of `gather_parts`.
    """

    def __init__(self, parts: list[Any]) -> None:
        super().__init__(parts)
        self.parts = parts


@dataclass
class _Shard:
    """A shard that computes. known: parts of all shards, for each call of `gather_parts`, not yet used."""

    number: int
    count: int
    known: list[list[Any]]
    own: list[Any] = field(default_factory=list)

    def gather(self, part: Any) -> list[Any]:
        if self.known:
            return self.known.pop(0)
        self.own.append(part)
        return [part]

    def require_all(self) -> None:
        if self.own:
            raise ShardEnd(self.own)


_shards: list[_Shard] = []


@contextlib.contextmanager
def in_shard(number: int, count: int, known: Sequence[list[Any]]) -> Iterator[None]:
    """Compute the share of shard `number` of `count` in this context.

    Args:
        number: from 0; -1 computes no batch.
        count: of all shards.
        known: the parts of all shards for the first calls of `gather_parts`, from `merge_parts`; the batches
            before them are not computed again.

    Raises:
        ShardEnd: other parts are needed.
    """
    _shards.append(_Shard(number, count, list(known)))
    try:
        yield
    finally:
        _shards.pop()


def merge_parts(parts: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return the parts of all shards for each exchange. parts: of each shard, from `ShardEnd`."""
    return [list(exchange) for exchange in zip(*parts, strict=True)]


def wait_for_all() -> None:
    """Return when all processes have called it."""
    gather_parts(None)
