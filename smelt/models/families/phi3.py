"""Phi-3: Llama's blocks with packed linear layers. Source: transformers' modeling_phi3.py.

One linear layer computes queries, keys and values, with the rows of their heads; another computes gate and
up. Its attention takes the number of heads from the config, the same for all blocks, so none can be removed.
"""

from __future__ import annotations

from smelt.models.families.family import (
    DECODER_TASKS,
    Attention,
    Config,
    Family,
    FeedForward,
    PublishedLearningRate,
    Stack,
    TokenizerFiles,
)
from smelt.models.families.llama import FAMILY as LLAMA
from smelt.models.families.llama import LLAMA_STREAM, LM_HEAD, unsupported_config
from smelt.models.families.mistral import attention_window


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the blocks."""
    packed = "self_attn.qkv_proj"
    attention = Attention(
        "self_attn",
        query=packed,
        key=packed,
        value=packed,
        out="self_attn.o_proj",
        heads_attribute=None,
        head_dim_attribute="head_dim",
        heads_key="num_attention_heads",
        kv_heads_key="num_key_value_heads",
        head_dim_key="head_dim",
        packed="grouped",
        kv_heads_attribute="num_key_value_heads",
        rotary=True,
        fixed_heads_reason="the number of heads is set in the config, the same for all layers",
    )
    gate_up = "mlp.gate_up_proj"
    block = FeedForward("mlp", gate_up, "mlp.down_proj", "intermediate_size", "hidden_act", gate=gate_up)
    return (
        Stack("layers", "num_hidden_layers", "model.layers", (attention,), block, LLAMA_STREAM, causal=True),
    )


def _unsupported_config(config: Config) -> list[str]:
    found = unsupported_config(config)
    rope = config.get("rope_parameters")  # transformers 5 stores it there, 4 in the config itself
    factors = [part.get("partial_rotary_factor") for part in (config, rope) if isinstance(part, dict)]
    if any(factor not in (None, 1) for factor in factors):
        found.append("partial_rotary_factor is not supported; it must be 1.")
    return found


FAMILY = Family(
    name="phi3",
    architecture="decoder",
    tasks=DECODER_TASKS,
    stacks=stacks,
    embedding_suffixes=("embed_tokens.weight",),
    hidden_size_key="hidden_size",
    learning_rate=PublishedLearningRate(2e-5, 4096),  # as Llama's
    head_modules=LM_HEAD,
    tokenizer_files=TokenizerFiles(("tokenizer.model",)),
    tokenizer_spec=LLAMA.tokenizer_spec,
    window=attention_window,
    unsupported_config=_unsupported_config,
)
