"""mT5: T5's gated blocks. Source: transformers' modeling_mt5.py (Xue et al. 2021, arXiv:2010.11934).

Published checkpoints have an output layer of their own. transformers sets `tie_word_embeddings` in any case,
and ties only what a file does not have.
"""

from __future__ import annotations

from dataclasses import replace

from smelt.models.families.family import PublishedLearningRate
from smelt.models.families.layout import Config
from smelt.models.families.t5 import FAMILY as T5


def unsupported_config(config: Config) -> list[str]:
    """Return the unsupported settings of a config."""
    kind = str(config.get("feed_forward_proj", "gated-gelu"))
    if kind.startswith("gated-"):
        return []
    return [f"feed_forward_proj is {kind}; only gated ones are supported, as in all published mT5s."]


FAMILY = replace(
    T5,
    name="mt5",
    learning_rate=PublishedLearningRate(3e-4, 768),  # as T5's
    layout_variants=(),
    output_scale=lambda config: 1.0,
    ties_output=lambda config: bool(config.get("tie_word_embeddings", True)),
    unsupported_config=unsupported_config,
)
