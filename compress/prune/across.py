"""How many units of each layer stay where all layers compete."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def kept_across(scores: Mapping[str, Tensor], share: float, step: int) -> dict[str, int]:
    """Return by layer how many units stay when those with the smallest scores go, wherever they are.

    Units go in steps: of each layer, ordered by their scores, `step` neighbours together, which count by the
    mean of their scores. The first of each layer stay, so that no layer is left without any.

    Args:
        scores: by layer, float [units]; they can be compared between layers.
        share: of all units of all layers that stays, to the nearest step.
        step: 1 for heads; neurons stay in multiples of it.
    """
    counts = dict.fromkeys(scores, 0)
    pieces: list[tuple[float, str, int]] = []
    for name, found in scores.items():
        ordered = found.sort(descending=True).values.split(step)
        counts[name] = len(ordered[0])
        pieces += [(float(part.mean()), name, len(part)) for part in ordered[1:]]
    wanted = share * sum(map(len, scores.values()))
    # a layer's own pieces fall, so that a piece is never taken before a better one of its layer
    for _, name, size in sorted(pieces, key=lambda piece: -piece[0]):
        if sum(counts.values()) + size / 2 > wanted:
            break
        counts[name] += size
    return counts
