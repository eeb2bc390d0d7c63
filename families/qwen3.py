"""Qwen3: Llama's blocks with the queries and keys of each head normed. Source: modeling_qwen3.py."""

from __future__ import annotations

from dataclasses import replace

from smelt.families.family import Config, Family, Rate, Stack, TokenizerFiles
from smelt.families.llama import HEAD, refuses
from smelt.families.qwen2 import FAMILY as QWEN2
from smelt.families.qwen2 import stacks as qwen2_stacks


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the blocks."""
    (stack,) = qwen2_stacks(config)
    (attention,) = stack.attentions
    normed = replace(attention, norms=("self_attn.q_norm", "self_attn.k_norm"))
    return (replace(stack, attentions=(normed,)),)


FAMILY = Family(
    name="qwen3",
    kind="decoder",
    tasks=("language-modeling",),
    stacks=stacks,
    embedding=("embed_tokens.weight",),
    width="hidden_size",
    rate=Rate(2e-5, 4096),  # as Llama's
    head=HEAD,
    tokenizer=TokenizerFiles(("vocab.json", "merges.txt")),
    new_tokenizer=QWEN2.new_tokenizer,
    window=QWEN2.window,
    refuses=refuses,
)
