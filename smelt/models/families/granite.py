"""Granite: Llama's blocks with factors of embeddings, scores, parts of blocks and logits.

Source: transformers' modeling_granite.py. Granite 4 and the mixtures of experts are other families.
"""

from __future__ import annotations

from smelt.models.families.family import DECODER_TASKS, Family, PublishedLearningRate, TokenizerFiles
from smelt.models.families.llama import unsupported_config
from smelt.models.families.qwen2 import FAMILY as QWEN2

FAMILY = Family(
    name="granite",
    tasks=DECODER_TASKS,
    learning_rate=PublishedLearningRate(2e-5, 4096),  # as Llama's
    embedding_scale=lambda config: float(config.get("embedding_multiplier", 1.0)),
    residual_scale=lambda config: float(config.get("residual_multiplier", 1.0)),
    logits_divisor=lambda config: float(config.get("logits_scaling", 1.0)),
    tokenizer_files=TokenizerFiles(("vocab.json", "merges.txt")),
    tokenizer_spec=QWEN2.tokenizer_spec,
    unsupported_config=unsupported_config,
)
