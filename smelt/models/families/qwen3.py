"""Qwen3: Llama's blocks with the queries and keys of each head normed. Source: modeling_qwen3.py."""

from __future__ import annotations

from dataclasses import replace

from smelt.models.families.family import (
    DECODER_TASKS,
    Config,
    Family,
    PublishedLearningRate,
    Stack,
    TokenizerFiles,
)
from smelt.models.families.llama import LM_HEAD, unsupported_config
from smelt.models.families.qwen2 import FAMILY as QWEN2
from smelt.models.families.qwen2 import stacks as qwen2_stacks


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the blocks."""
    (stack,) = qwen2_stacks(config)
    (attention,) = stack.attentions
    normed = replace(attention, qk_norms=("self_attn.q_norm", "self_attn.k_norm"))
    return (replace(stack, attentions=(normed,)),)


FAMILY = Family(
    name="qwen3",
    architecture="decoder",
    tasks=DECODER_TASKS,
    stacks=stacks,
    embedding_suffixes=("embed_tokens.weight",),
    hidden_size_key="hidden_size",
    learning_rate=PublishedLearningRate(2e-5, 4096),  # as Llama's
    head_modules=LM_HEAD,
    tokenizer_files=TokenizerFiles(("vocab.json", "merges.txt")),
    tokenizer_spec=QWEN2.tokenizer_spec,
    window=QWEN2.window,
    unsupported_config=unsupported_config,
)
