"""Number of units kept per layer when the units of all layers compete."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def allocate_globally(scores: Mapping[str, Tensor], keep_ratio: float, multiple_of: int) -> dict[str, int]:
    """Return the number of units kept per layer when the lowest scores of all layers are removed.

    Units are removed in steps of `multiple_of`: the units of a layer are ordered by score, and each step has
    the mean score of its units. The first step of each layer is always kept.

    Args:
        scores: float [units] by layer, comparable between layers.
        keep_ratio: the kept fraction of the units of all layers, rounded to the nearest step.
        multiple_of: 1 for heads; the kept neurons are a multiple of it.
    """
    counts = dict.fromkeys(scores, 0)
    pieces: list[tuple[float, str, int]] = []
    for name, found in scores.items():
        ordered = found.sort(descending=True).values.split(multiple_of)
        counts[name] = len(ordered[0])
        pieces += [(float(part.mean()), name, len(part)) for part in ordered[1:]]
    wanted = keep_ratio * sum(map(len, scores.values()))
    # the scores of a layer's pieces descend, so a piece is never taken before a better one of its layer
    for _, name, size in sorted(pieces, key=lambda piece: -piece[0]):
        if sum(counts.values()) + size / 2 > wanted:
            break
        counts[name] += size
    return counts
