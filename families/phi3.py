"""Phi-3: Llama's blocks with packed products. Source: transformers' modeling_phi3.py.

One product makes queries, keys and values, as many rows as each has heads; another makes gate and up. How
many heads there are its attention reads from the config, the same for all blocks, so none of them can go.
"""

from __future__ import annotations

from smelt.families.family import Attention, Config, Family, FeedForward, Rate, Stack, TokenizerFiles
from smelt.families.llama import FAMILY as LLAMA
from smelt.families.llama import HEAD, STREAM, refuses
from smelt.families.mistral import window


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the blocks."""
    packed = "self_attn.qkv_proj"
    attention = Attention(
        "self_attn",
        query=packed,
        key=packed,
        value=packed,
        out="self_attn.o_proj",
        heads=None,
        width="head_dim",
        setting="num_attention_heads",
        key_setting="num_key_value_heads",
        width_setting="head_dim",
        packed="grouped",
        key_heads="num_key_value_heads",
        rotary=True,
        fixed_heads="its attention reads the number of heads from the config, one for all layers",
    )
    gate_up = "mlp.gate_up_proj"
    block = FeedForward("mlp", gate_up, "mlp.down_proj", "intermediate_size", "hidden_act", gate=gate_up)
    return (Stack("layers", "num_hidden_layers", "model.layers", (attention,), block, STREAM, causal=True),)


def _refuses(config: Config) -> list[str]:
    found = refuses(config)
    rope = config.get("rope_parameters")  # transformers 5 writes it there, 4 beside it
    said = [part.get("partial_rotary_factor") for part in (config, rope) if isinstance(part, dict)]
    if any(factor not in (None, 1) for factor in said):
        found.append("partial_rotary_factor is not supported by this version; all of a head is rotated.")
    return found


FAMILY = Family(
    name="phi3",
    kind="decoder",
    tasks=("language-modeling",),
    stacks=stacks,
    embedding=("embed_tokens.weight",),
    width="hidden_size",
    rate=Rate(2e-5, 4096),  # as Llama's
    head=HEAD,
    tokenizer=TokenizerFiles(("tokenizer.model",)),
    new_tokenizer=LLAMA.new_tokenizer,
    window=window,
    refuses=_refuses,
)
