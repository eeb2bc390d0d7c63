"""Llama. Source: transformers' modeling_llama.py.

Several queries share a key and value head, and are removed together when heads are pruned; a neuron
has a row of gate and up and a column of down.
"""

from __future__ import annotations

from smelt.models.families.family import (
    DECODER_TASKS,
    Attention,
    Config,
    Family,
    FeedForward,
    PublishedLearningRate,
    ResidualStream,
    Stack,
    TokenizerFiles,
    TokenizerSpec,
)

# Angles of rotary positions, stored with each layer before transformers 4.32.
INV_FREQ_TENSORS = r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
LM_HEAD = ("lm_head",)
LLAMA_STREAM = ResidualStream(
    ("model.embed_tokens.weight",),
    part_norms=("input_layernorm", "post_attention_layernorm"),
    pre_norm=True,
    final_norm="model.norm",
)
_SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the blocks."""
    at = "self_attn"
    attention = Attention(
        at,
        query=f"{at}.q_proj",
        key=f"{at}.k_proj",
        value=f"{at}.v_proj",
        out=f"{at}.o_proj",
        heads_attribute=None,
        head_dim_attribute="head_dim",
        heads_key="num_attention_heads",
        kv_heads_key="num_key_value_heads",
        head_dim_key="head_dim",
        rotary=True,
    )
    block = FeedForward(
        "mlp", "mlp.up_proj", "mlp.down_proj", "intermediate_size", "hidden_act", gate="mlp.gate_proj"
    )
    return (
        Stack("layers", "num_hidden_layers", "model.layers", (attention,), block, LLAMA_STREAM, causal=True),
    )


def unsupported_config(config: Config) -> list[str]:
    """Return the unsupported settings of a config: scaling of positions."""
    found = []
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = (rope.get("rope_type") or rope.get("type")) if isinstance(rope, dict) else None
    if kind not in (None, *_SUPPORTED_ROPE_TYPES):
        found.append(
            f"rotary positions of type '{kind}' are not supported;"
            f" supported: {', '.join(_SUPPORTED_ROPE_TYPES)}."
        )
    return found


FAMILY = Family(
    name="llama",
    architecture="decoder",
    tasks=DECODER_TASKS,
    stacks=stacks,
    embedding_suffixes=("embed_tokens.weight",),
    hidden_size_key="hidden_size",
    learning_rate=PublishedLearningRate(2e-5, 4096),  # Touvron et al. 2023, Llama 2, section 3.1
    head_modules=LM_HEAD,
    tokenizer_files=TokenizerFiles(("tokenizer.model",)),
    tokenizer_spec=TokenizerSpec(
        ("<unk>", "<s>", "</s>"),
        {"unk": "<unk>", "bos": "<s>", "eos": "</s>", "pad": "</s>"},
        "<s> $A",
        "<s> $A $B",
    ),
    unused_tensors=(INV_FREQ_TENSORS,),
    unsupported_config=unsupported_config,
)
