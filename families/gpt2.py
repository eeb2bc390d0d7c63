"""GPT-2. Source: transformers' modeling_gpt2.py.

One product makes queries, keys and values, a third of its rows each; a head owns rows in each third. Linear
layers are stored turned around (`Conv1D`), [inputs, outputs].
"""

from __future__ import annotations

from smelt.families.family import (
    Attention,
    Config,
    Family,
    FeedForward,
    Positions,
    Rate,
    Stack,
    TokenizerFiles,
    TokenizerForm,
)
from smelt.families.stream import Stream

_END = "<|endoftext|>"
BYTE_LEVEL = TokenizerForm((_END,), {"bos": _END, "eos": _END, "unk": _END, "pad": _END}, "$A", "$A $B")


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the blocks."""
    packed = "attn.c_attn"
    attention = Attention(
        "attn",
        query=packed,
        key=packed,
        value=packed,
        out="attn.c_proj",
        heads="num_heads",
        width="head_dim",
        size="split_size",
        setting="n_head",
        packed="equal",
    )
    block = FeedForward("mlp", "mlp.c_fc", "mlp.c_proj", "n_inner", "activation_function")
    stream = Stream(
        ("transformer.wte.weight", "transformer.wpe.weight"),
        norms=("ln_1", "ln_2"),
        norms_first=True,
        closing="transformer.ln_f",
    )
    return (Stack("layers", "n_layer", "transformer.h", (attention,), block, stream, causal=True),)


def refuses(config: Config) -> list[str]:
    """Say what of a config smelt cannot follow."""
    found = []
    if config.get("add_cross_attention"):
        found.append("add_cross_attention is not supported; the model must be decoder-only.")
    if config.get("reorder_and_upcast_attn"):
        found.append("reorder_and_upcast_attn is not supported by this version.")
    return found


FAMILY = Family(
    name="gpt2",
    kind="decoder",
    tasks=("language-modeling",),
    stacks=stacks,
    embedding=("wte.weight",),
    width="n_embd",
    rate=Rate(5e-5, 768),  # transformers' example of language modeling
    head=("lm_head",),
    positions=Positions(table="n_positions"),
    tokenizer=TokenizerFiles(("vocab.json", "merges.txt")),
    new_tokenizer=BYTE_LEVEL,
    # the causal mask of each layer, and the number that stood for minus infinity
    unread=(r"(transformer\.)?h\.\d+\.(attn|crossattention)\.(bias|masked_bias)",),
    turned=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    refuses=refuses,
)
