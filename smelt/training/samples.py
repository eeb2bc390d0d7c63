"""The order of the batches of a training, and packing."""

from __future__ import annotations

import bisect
import random
from collections.abc import Sequence

from smelt.tasks.samples import EncodedSample, group_by_length


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
