"""GPT-2. Source: transformers' modeling_gpt2.py.

One linear layer computes queries, keys and values, a third of its rows each; a head has rows in each third.
Linear layers are stored transposed (`Conv1D`), [inputs, outputs].
"""

from __future__ import annotations

from smelt.models.families.family import (
    DECODER_TASKS,
    Attention,
    Config,
    Family,
    FeedForward,
    PositionEncoding,
    PublishedLearningRate,
    ResidualStream,
    Stack,
    TokenizerFiles,
    TokenizerSpec,
)

_END_OF_TEXT = "<|endoftext|>"
GPT2_TOKENIZER = TokenizerSpec(
    (_END_OF_TEXT,),
    {"bos": _END_OF_TEXT, "eos": _END_OF_TEXT, "unk": _END_OF_TEXT, "pad": _END_OF_TEXT},
    "$A",
    "$A $B",
)


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the blocks."""
    packed = "attn.c_attn"
    attention = Attention(
        "attn",
        query=packed,
        key=packed,
        value=packed,
        out="attn.c_proj",
        heads_attribute="num_heads",
        head_dim_attribute="head_dim",
        all_head_size_attribute="split_size",
        heads_key="n_head",
        packed="equal",
    )
    block = FeedForward("mlp", "mlp.c_fc", "mlp.c_proj", "n_inner", "activation_function")
    stream = ResidualStream(
        ("transformer.wte.weight", "transformer.wpe.weight"),
        part_norms=("ln_1", "ln_2"),
        pre_norm=True,
        final_norm="transformer.ln_f",
    )
    return (Stack("layers", "n_layer", "transformer.h", (attention,), block, stream, causal=True),)


def unsupported_config(config: Config) -> list[str]:
    """Return the unsupported settings of a config."""
    found = []
    if config.get("add_cross_attention"):
        found.append("add_cross_attention is not supported; the model must be decoder-only.")
    if config.get("reorder_and_upcast_attn"):
        found.append("reorder_and_upcast_attn is not supported.")
    return found


FAMILY = Family(
    name="gpt2",
    architecture="decoder",
    tasks=DECODER_TASKS,
    stacks=stacks,
    embedding_suffixes=("wte.weight",),
    hidden_size_key="n_embd",
    learning_rate=PublishedLearningRate(5e-5, 768),  # transformers' example of language modeling
    head_modules=("lm_head",),
    position_encoding=PositionEncoding(max_positions_key="n_positions"),
    tokenizer_files=TokenizerFiles(("vocab.json", "merges.txt")),
    tokenizer_spec=GPT2_TOKENIZER,
    # the causal mask of each layer, and the value for minus infinity
    unused_tensors=(r"(transformer\.)?h\.\d+\.(attn|crossattention)\.(bias|masked_bias)",),
    transposed_suffixes=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    unsupported_config=unsupported_config,
)
