"""Qwen2: Llama's blocks with biases on queries, keys and values. Source: transformers' modeling_qwen2.py."""

from __future__ import annotations

from dataclasses import replace

from smelt.models.families.family import DECODER_TASKS, Family, PublishedLearningRate, TokenizerFiles
from smelt.models.families.gpt2 import GPT2_TOKENIZER
from smelt.models.families.layout import Config
from smelt.models.families.llama import INV_FREQ_TENSORS, unsupported_config


def attention_window(config: Config, layer_index: int) -> int | None:
    """Return the attention window of a block in tokens, None for all."""
    kinds, width = config.get("layer_types"), config.get("sliding_window")
    windowed = isinstance(kinds, list) and kinds[layer_index] == "sliding_attention"
    return width if windowed and isinstance(width, int) else None


FAMILY = Family(
    name="qwen2",
    tasks=DECODER_TASKS,
    learning_rate=PublishedLearningRate(2e-5, 4096),  # as Llama's
    tokenizer_files=TokenizerFiles(("vocab.json", "merges.txt")),
    # transformers loads every tokenizer of the family as byte-level
    tokenizer_spec=replace(
        GPT2_TOKENIZER,
        allowed_models=("bpe",),
        allowed_models_reason="Qwen2's tokenizer is byte-level: use bpe.",
    ),
    unused_tensors=(INV_FREQ_TENSORS,),
    window=attention_window,
    unsupported_config=unsupported_config,
)
