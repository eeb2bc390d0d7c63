"""Qwen2: Llama's blocks with biases on queries, keys and values. Source: transformers' modeling_qwen2.py."""

from __future__ import annotations

from dataclasses import replace

from smelt.families.family import Family, TokenizerFiles
from smelt.families.gpt2 import BYTE_LEVEL
from smelt.families.llama import INV_FREQ, refuses, stacks

FAMILY = Family(
    name="qwen2",
    kind="decoder",
    tasks=("language-modeling",),
    stacks=stacks,
    embedding=("embed_tokens.weight",),
    width="hidden_size",
    tokenizer=TokenizerFiles(("vocab.json", "merges.txt")),
    # transformers reads every tokenizer of the family as one of bytes
    new_tokenizer=replace(
        BYTE_LEVEL, kinds=("bpe",), why_kinds="Qwen2's tokenizer is byte-level: train bpe."
    ),
    unread=(INV_FREQ,),
    refuses=refuses,
)
