"""Mistral: Llama's blocks; attention may see a window only. Source: transformers' modeling_mistral.py."""

from __future__ import annotations

from smelt.families.family import Config, Family, Rate, TokenizerFiles
from smelt.families.llama import FAMILY as LLAMA
from smelt.families.llama import HEAD, refuses, stacks


def window(config: Config, number: int) -> int | None:
    """Return how many of the last tokens a block sees, None for all."""
    width = config.get("sliding_window")
    return width if isinstance(width, int) else None


FAMILY = Family(
    name="mistral",
    kind="decoder",
    tasks=("language-modeling",),
    stacks=stacks,
    embedding=("embed_tokens.weight",),
    width="hidden_size",
    rate=Rate(2e-5, 4096),  # as Llama's
    head=HEAD,
    tokenizer=TokenizerFiles(("tokenizer.model",)),
    new_tokenizer=LLAMA.new_tokenizer,
    unread=LLAMA.unread,
    window=window,
    refuses=refuses,
)
