"""What shares a head or a neuron in decoder-only language models."""

from __future__ import annotations

from typing import Any

from smelt.compress.prune.groups import AttentionGroup, FeedForwardGroup


def causal_groups(model: Any) -> tuple[list[AttentionGroup], list[FeedForwardGroup]]:
    """Return the attentions and feed-forward blocks of a GPT-2, Llama or Qwen2 model, in order.

    GPT-2: query, key and value are one product; a head owns rows in each third of it. Llama and Qwen2:
    several queries share a key and value head, and the group of them goes as one (so `keep` counts
    key-value heads); a neuron owns a row of gate and up and a column of down.
    """
    attentions, blocks = [], []
    if model.config.model_type == "gpt2":
        for i in range(len(model.transformer.h)):
            at = f"transformer.h.{i}.attn"
            packed = f"{at}.c_attn"
            attentions.append(
                AttentionGroup(at, packed, packed, packed, f"{at}.c_proj", "num_heads", "split_size")
            )
            at = f"transformer.h.{i}.mlp"
            blocks.append(FeedForwardGroup(at, f"{at}.c_fc", f"{at}.c_proj", "n_inner"))
        return attentions, blocks
    for i in range(len(model.model.layers)):
        at = f"model.layers.{i}.self_attn"
        q, k, v, o = (f"{at}.{part}_proj" for part in "qkvo")
        attentions.append(AttentionGroup(at, q, k, v, o, heads=None, size=None))
        at = f"model.layers.{i}.mlp"
        blocks.append(
            FeedForwardGroup(
                at, f"{at}.up_proj", f"{at}.down_proj", "intermediate_size", gate=f"{at}.gate_proj"
            )
        )
    return attentions, blocks
