"""Mistral: Llama's blocks; optionally with windowed attention. Source: transformers' modeling_mistral.py."""

from __future__ import annotations

from smelt.models.families.family import DECODER_TASKS, Family, PublishedLearningRate, TokenizerFiles
from smelt.models.families.layout import Config
from smelt.models.families.llama import FAMILY as LLAMA
from smelt.models.families.llama import unsupported_config


def attention_window(config: Config, layer_index: int) -> int | None:
    """Return the attention window of a block in tokens, None for all."""
    width = config.get("sliding_window")
    return width if isinstance(width, int) else None


FAMILY = Family(
    name="mistral",
    tasks=DECODER_TASKS,
    learning_rate=PublishedLearningRate(2e-5, 4096),  # as Llama's
    tokenizer_files=TokenizerFiles(("tokenizer.model",)),
    tokenizer_spec=LLAMA.tokenizer_spec,
    unused_tensors=LLAMA.unused_tensors,
    window=attention_window,
    unsupported_config=unsupported_config,
)
