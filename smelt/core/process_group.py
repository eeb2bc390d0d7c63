"""This process among several that compute together (torch.distributed), and its share of the batches.

Without others every function returns at once, and torch is not imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

ValueT = TypeVar("ValueT")
ResultT = TypeVar("ResultT")


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

    objects = [make() if process_rank() == 0 else None]
    torch.distributed.broadcast_object_list(objects, src=0)
    return objects[0]  # type: ignore[return-value]


def gather_parts(part: ValueT) -> list[ValueT]:
    """Return the `part` of every process, in the order of their numbers."""
    if not is_distributed():
        return [part]
    import torch

    objects: list[Any] = [None] * process_count()
    torch.distributed.all_gather_object(objects, part)
    return objects


def own_batches(batches: Iterable[ValueT]) -> list[tuple[int, ValueT]]:
    """Return this process's share of `batches`, each with its number."""
    count, rank = process_count(), process_rank()
    return [(number, batch) for number, batch in enumerate(batches) if number % count == rank]


def map_batches(
    compute: Callable[[int, ValueT], ResultT], batches: Iterable[ValueT], workers: int = 1
) -> Iterator[tuple[ValueT, ResultT]]:
    """Yield each batch of this process's share with `compute(number, batch)`, in the order of `batches`.

    workers: number of threads; each computes one batch at a time. After an exception no batch is begun.
    """
    share = own_batches(batches)
    if workers == 1:
        for number, batch in share:
            yield batch, compute(number, batch)
        return
    pool = ThreadPoolExecutor(workers)
    try:
        results = pool.map(lambda item: compute(*item), share)
        for (_, batch), result in zip(share, results, strict=True):
            yield batch, result
    finally:
        pool.shutdown(cancel_futures=True)


def merge_shares(parts_by_index: Mapping[int, ValueT]) -> list[ValueT]:
    """Return the results of all processes in the order of their indices, which are 0 to n - 1."""
    parts = gather_parts(dict(parts_by_index))
    merged = {index: value for results in parts for index, value in results.items()}
    return [merged[index] for index in range(len(merged))]


def wait_for_all() -> None:
    """Return when all processes have called it."""
    gather_parts(None)
