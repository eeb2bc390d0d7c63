"""StarCoder2: Llama's attention, with GPT-2's norms, feed-forward part and biases.

Source: transformers' modeling_starcoder2.py (Lozhkov et al. 2024, arXiv:2402.19173).
"""

from __future__ import annotations

from smelt.models.families.family import DECODER_TASKS, Family, PublishedLearningRate, TokenizerFiles
from smelt.models.families.gpt2 import GPT2_TOKENIZER
from smelt.models.families.llama import unsupported_config
from smelt.models.families.mistral import attention_window

FAMILY = Family(
    name="starcoder2",
    tasks=DECODER_TASKS,
    learning_rate=PublishedLearningRate(2e-5, 4096),  # as Llama's; the published one is Adafactor's
    tokenizer_files=TokenizerFiles(("vocab.json", "merges.txt")),
    tokenizer_spec=GPT2_TOKENIZER,
    window=attention_window,
    unsupported_config=unsupported_config,
)
