"""What sharing weights is checked with, on models of three layers of every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smelt.models.families.registry import blocks_of
from tests.support.models import every_family


def three_layer_model(family: str) -> Path:
    """Return a model of three layers: the third is no neighbor of the pair that shares, and stays whole."""
    return every_family.model_with_layers(family, 3)


def share_weights(family: str, out: Path, **settings: Any) -> Path:
    """Share weights in a model of `family`; return the folder of the result."""
    from smelt.compress.share_weights import ShareWeights, ShareWeightsSettings

    return every_family.run_stage(
        ShareWeights(), ShareWeightsSettings(**settings), three_layer_model(family), family, out
    ).out


def linear_names_by_block(model: Any) -> dict[tuple[str, str, int], list[list[str]]]:
    """Return by stack and part the names of the products of each block."""
    names_by_block: dict[tuple[str, str, int], list[list[str]]] = {}
    for block in blocks_of(model):
        for index, a in enumerate(block.attentions):
            names = dict.fromkeys((a.query, a.key, a.value, a.out))
            names_by_block.setdefault((block.stack.name, "attention", index), []).append(list(names))
        names = dict.fromkeys(name for feed in block.feed_forwards for name in feed.linear_layers)
        names_by_block.setdefault((block.stack.name, "ffn", 0), []).append(list(names))
    return names_by_block


def assert_first_two_shared(model: Any) -> None:
    """Check that the first two of three blocks have the same products, and the third others."""
    for blocks in linear_names_by_block(model).values():
        for first, second, third in zip(*blocks, strict=True):
            assert model.get_submodule(first) is model.get_submodule(second)
            assert model.get_submodule(first) is not model.get_submodule(third)
