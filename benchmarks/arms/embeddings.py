"""The word embedding as a thin table and a product, by frequency of tokens and with all of them alike."""

from __future__ import annotations

from typing import Any

ARMS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "whole model": [],
    **{
        f"rank {rank}, {'by frequency' if counted else 'all tokens alike'}": [
            ("factorize", {"targets": "embeddings", "rank": rank, "frequency_weighted": counted})
        ]
        for rank in (192, 128, 64)
        for counted in (True, False)
    },
}
