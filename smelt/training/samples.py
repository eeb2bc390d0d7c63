"""Batches of samples of similar length, their order in a training, and packing."""

from __future__ import annotations

import bisect
import random
from collections.abc import Sequence

from smelt.tasks.samples import EncodedSample


def pack_samples(samples: Sequence[EncodedSample], length: int | None) -> list[EncodedSample]:
    """Return windows packed into as few sequences as best-fit decreasing finds.

    Args:
        samples: windows (`target` is None).
        length: inputs of a sequence; None: of the longest window. A longer window is a sequence of its own.

    Source: Ding et al. 2024, Fewer Truncations Improve Language Modeling, arXiv:2404.10830.
    """
    order = sorted(samples, key=lambda window: window.num_inputs, reverse=True)
    most = length or max((window.num_inputs for window in order), default=0)
    packs: list[list[EncodedSample]] = []
    open_packs: list[tuple[int, int]] = []  # of each sequence with room: inputs left, number; rising
    for window in order:
        size = window.num_inputs
        index = bisect.bisect_left(open_packs, (size, 0))
        space, number = open_packs.pop(index) if index < len(open_packs) else (most, len(packs))
        if number == len(packs):
            packs.append([])
        packs[number].append(window)
        if space > size:
            bisect.insort(open_packs, (space - size, number))
    return [EncodedSample([], None, None, packed=tuple(windows)) for windows in packs]


def group_by_length(
    samples: Sequence[EncodedSample], batch_size: int, tokens: int | None, shuffle: random.Random | None
) -> list[list[int]]:
    """Return batches of indices into `samples`; samples of similar length share one.

    With `tokens`, a batch has at most that many padded source plus target tokens (a longer sample is a
    batch of its own). With `shuffle`, samples are sorted only within pools of 50 batches and the
    order of the batches is random, so that batches differ between epochs.
    """
    order = list(range(len(samples)))
    pool = len(order)
    if shuffle is not None:
        shuffle.shuffle(order)
        mean = sum(sum(r.token_counts) for r in samples) / max(1, len(samples))
        pool = 50 * (batch_size if tokens is None else max(1, int(tokens / mean)))
    batches: list[list[int]] = []
    for start in range(0, len(order), max(1, pool)):
        batches += _fill_batches(
            sorted(order[start : start + pool], key=lambda i: samples[i].token_counts),
            samples,
            batch_size,
            tokens,
        )
    if shuffle is not None:
        shuffle.shuffle(batches)
    return batches


def _fill_batches(
    order: list[int], samples: Sequence[EncodedSample], batch_size: int, tokens: int | None
) -> list[list[int]]:
    if tokens is None:
        return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    batches: list[list[int]] = []
    batch: list[int] = []
    longest = (0, 0)
    for i in order:
        source, target = samples[i].token_counts
        widened = (max(longest[0], source), max(longest[1], target))
        if batch and sum(widened) * (len(batch) + 1) > tokens:
            batches.append(batch)
            batch, widened = [], (source, target)
        batch.append(i)
        longest = widened
    return [*batches, batch] if batch else batches


def spread_indices(count: int, num_indices: int, seed: int) -> list[int]:
    """Return `num_indices` of the indices 0 to `count` - 1 (all if there are fewer), rising.

    One is drawn from each of `num_indices` equal parts, so that a sorted file is covered from end to end.
    """
    if num_indices >= count:
        return list(range(count))
    draw = random.Random(seed)
    return [
        draw.randrange(k * count // num_indices, (k + 1) * count // num_indices) for k in range(num_indices)
    ]


def plan_batches(
    samples: Sequence[EncodedSample],
    batch_size: int,
    tokens: int | None,
    *,
    epochs: float,
    steps: int | None,
    seed: int,
) -> list[list[int]]:
    """Return all batches of a training in order: `steps` of them, or `epochs` passes over `samples`."""
    shuffle = random.Random(seed)
    batches = group_by_length(samples, batch_size, tokens, shuffle)
    num_batches = steps if steps is not None else max(1, round(epochs * len(batches)))
    while len(batches) < num_batches:
        batches += group_by_length(samples, batch_size, tokens, shuffle)
    return batches[:num_batches]
