"""Llama. Source: transformers' modeling_llama.py.

Several queries share a key and value head, and the group of them goes as one when heads are pruned; a neuron
owns a row of gate and up and a column of down.
"""

from __future__ import annotations

from smelt.families.family import (
    Attention,
    Config,
    Family,
    FeedForward,
    Rate,
    Stack,
    TokenizerFiles,
    TokenizerForm,
)
from smelt.families.stream import Stream

# Angles of rotary positions, stored with each layer before transformers 4.32.
INV_FREQ = r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
HEAD = ("lm_head",)
STREAM = Stream(
    ("model.embed_tokens.weight",),
    norms=("input_layernorm", "post_attention_layernorm"),
    norms_first=True,
    closing="model.norm",
)
_ROTARY = ("default", "linear", "llama3")


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the blocks."""
    at = "self_attn"
    attention = Attention(
        at,
        query=f"{at}.q_proj",
        key=f"{at}.k_proj",
        value=f"{at}.v_proj",
        out=f"{at}.o_proj",
        heads=None,
        width="head_dim",
        setting="num_attention_heads",
        key_setting="num_key_value_heads",
        width_setting="head_dim",
        rotary=True,
    )
    block = FeedForward(
        "mlp", "mlp.up_proj", "mlp.down_proj", "intermediate_size", "hidden_act", gate="mlp.gate_proj"
    )
    return (Stack("layers", "num_hidden_layers", "model.layers", (attention,), block, STREAM, causal=True),)


def refuses(config: Config) -> list[str]:
    """Say what of a config smelt cannot follow: how positions are scaled."""
    found = []
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = (rope.get("rope_type") or rope.get("type")) if isinstance(rope, dict) else None
    if kind not in (None, *_ROTARY):
        found.append(
            f"rotary positions of type '{kind}' are not supported by this version;"
            f" supported: {', '.join(_ROTARY)}."
        )
    return found


FAMILY = Family(
    name="llama",
    kind="decoder",
    tasks=("language-modeling",),
    stacks=stacks,
    embedding=("embed_tokens.weight",),
    width="hidden_size",
    rate=Rate(2e-5, 4096),  # Touvron et al. 2023, Llama 2, section 3.1
    head=HEAD,
    tokenizer=TokenizerFiles(("tokenizer.model",)),
    new_tokenizer=TokenizerForm(
        ("<unk>", "<s>", "</s>"),
        {"unk": "<unk>", "bos": "<s>", "eos": "</s>", "pad": "</s>"},
        "<s> $A",
        "<s> $A $B",
    ),
    unread=(INV_FREQ,),
    refuses=refuses,
)
