"""A low-rank pair beside codes, without training, head and embeddings int8: against finer groups, GPTQ."""

from __future__ import annotations

from typing import Any


def _arm(group: int, low_rank: dict[str, Any] | None = None, **more: Any) -> list[tuple[str, dict[str, Any]]]:
    settings: dict[str, Any] = {
        "scheme": "int4",
        "group_size": group,
        "embedding_scheme": "int8-dynamic",
        **more,
    }
    return [("quantize", settings | ({"low_rank_correction": low_rank} if low_rank else {}))]


ARMS: dict[str, list[tuple[str, dict[str, Any]]]] = {"model": []}
for _group in (128, 64, 32, 16):
    ARMS[f"int4, groups of {_group}"] = _arm(_group)
for _group, _rank in ((128, 4), (128, 8), (128, 32), (64, 8)):
    for _error in ("weights", "inputs", "outputs"):
        ARMS[f"groups of {_group}, rank {_rank}, error of {_error}"] = _arm(
            _group, {"rank": _rank, "objective": _error}
        )
for _error in ("weights", "outputs"):
    ARMS[f"groups of 128, rank 8, error of {_error}, 5 rounds"] = _arm(
        128, {"rank": 8, "objective": _error, "iterations": 5}
    )
    ARMS[f"groups of 128, rank 8, error of {_error}, pair first, 5 rounds"] = _arm(
        128, {"rank": 8, "objective": _error, "iterations": 5, "init": "svd"}
    )
ARMS["groups of 128, gptq"] = _arm(128, method="gptq")
ARMS["groups of 128, gptq, rank 8, error of outputs"] = _arm(
    128, {"rank": 8, "objective": "outputs"}, method="gptq"
)
