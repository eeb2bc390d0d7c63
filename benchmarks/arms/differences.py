"""Layers that share a matrix, with and without a thin difference of each, without training.

In the translator of the other arms pairs of neighbours share (two pairs of encoder layers, one of decoder
layers). With everything shared, a rank of 33 stores as many values as sharing the feed-forward parts alone.
"""

from __future__ import annotations

from typing import Any


def _arm(**settings: Any) -> list[tuple[str, dict[str, Any]]]:
    return [("share-weights", settings)]


ARMS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "model": [],
    "attention and feed-forward shared": _arm(),
    "attention shared": _arm(targets=["attention"]),
    "feed-forward shared": _arm(targets=["ffn"]),
    **{f"all shared, mean, differences of rank {rank}": _arm(init_from="mean", low_rank_delta={"rank": rank})
       for rank in (16, 33, 64, 96)},
    "all shared, first, differences of rank 33": _arm(low_rank_delta={"rank": 33}),
    "all shared, mean, differences of rank 33, 10 rounds": _arm(
        init_from="mean", low_rank_delta={"rank": 33, "iterations": 10}
    ),
    "svd, 0.6 of each layer's"
    " weights": [("factorize", {"method": "svd", "keep_ratio": 0.6, "optimize_for": "size"})],
    "svd, 0.73 of each layer's"
    " weights": [("factorize", {"method": "svd", "keep_ratio": 0.73, "optimize_for": "size"})],
}  # fmt: skip
