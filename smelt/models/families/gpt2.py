"""GPT-2. Source: transformers' modeling_gpt2.py.

One linear layer computes queries, keys and values, a third of its rows each; a head has rows in each third.
Linear layers are stored transposed (`Conv1D`), [inputs, outputs].
"""

from __future__ import annotations

from smelt.models.families.family import (
    DECODER_TASKS,
    Family,
    PositionEncoding,
    PublishedLearningRate,
    TokenizerFiles,
    TokenizerSpec,
)
from smelt.models.families.layout import Config

_END_OF_TEXT = "<|endoftext|>"
GPT2_TOKENIZER = TokenizerSpec(
    (_END_OF_TEXT,),
    {"bos": _END_OF_TEXT, "eos": _END_OF_TEXT, "unk": _END_OF_TEXT, "pad": _END_OF_TEXT},
    "$A",
    "$A $B",
)


def unsupported_config(config: Config) -> list[str]:
    """Return the unsupported settings of a config."""
    problems = []
    if config.get("add_cross_attention"):
        problems.append("add_cross_attention is not supported; the model must be decoder-only.")
    if config.get("reorder_and_upcast_attn"):
        problems.append("reorder_and_upcast_attn is not supported.")
    return problems


FAMILY = Family(
    name="gpt2",
    tasks=DECODER_TASKS,
    learning_rate=PublishedLearningRate(5e-5, 768),  # transformers' example of language modeling
    position_encoding=PositionEncoding(max_positions_key="n_positions"),
    tokenizer_files=TokenizerFiles(("vocab.json", "merges.txt")),
    tokenizer_spec=GPT2_TOKENIZER,
    # the causal mask of each layer, and the value for minus infinity
    unused_tensors=(r"(transformer\.)?h\.\d+\.(attn|crossattention)\.(bias|masked_bias)",),
    unsupported_config=unsupported_config,
)
