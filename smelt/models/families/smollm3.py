"""SmolLM3: Llama's blocks, some without positions. Source: transformers' modeling_smollm3.py."""

from __future__ import annotations

from smelt.models.families.family import DECODER_TASKS, Family, PublishedLearningRate, TokenizerFiles
from smelt.models.families.llama import unsupported_config
from smelt.models.families.qwen2 import FAMILY as QWEN2

FAMILY = Family(
    name="smollm3",
    tasks=DECODER_TASKS,
    learning_rate=PublishedLearningRate(2e-5, 4096),  # as Llama's
    attention_fields={"rotary_attribute": "use_rope"},
    tokenizer_files=TokenizerFiles(),
    tokenizer_spec=QWEN2.tokenizer_spec,
    window=QWEN2.window,
    unsupported_config=unsupported_config,
)
