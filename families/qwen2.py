"""Qwen2: Llama's blocks with biases on queries, keys and values. Source: transformers' modeling_qwen2.py."""

from __future__ import annotations

from dataclasses import replace

from smelt.families.family import Config, Family, Rate, Stack, TokenizerFiles
from smelt.families.gpt2 import BYTE_LEVEL
from smelt.families.llama import HEAD, INV_FREQ, refuses
from smelt.families.llama import stacks as llama_stacks


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the blocks."""
    (stack,) = llama_stacks(config)
    return (replace(stack, by_layer=("layer_types",)),)


def window(config: Config, number: int) -> int | None:
    """Return how many of the last tokens a block sees, None for all."""
    kinds, width = config.get("layer_types"), config.get("sliding_window")
    windowed = isinstance(kinds, list) and kinds[number] == "sliding_attention"
    return width if windowed and isinstance(width, int) else None


FAMILY = Family(
    name="qwen2",
    kind="decoder",
    tasks=("language-modeling",),
    stacks=stacks,
    embedding=("embed_tokens.weight",),
    width="hidden_size",
    rate=Rate(2e-5, 4096),  # as Llama's
    head=HEAD,
    tokenizer=TokenizerFiles(("vocab.json", "merges.txt")),
    # transformers reads every tokenizer of the family as one of bytes
    new_tokenizer=replace(
        BYTE_LEVEL, kinds=("bpe",), why_kinds="Qwen2's tokenizer is byte-level: train bpe."
    ),
    unread=(INV_FREQ,),
    window=window,
    refuses=refuses,
)
