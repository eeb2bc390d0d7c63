"""MPNet: BERT's blocks with a relative position bias that the encoder computes for all of them.

Source: transformers' modeling_mpnet.py. Positions count from the pad id, as RoBERTa's.
"""

from __future__ import annotations

from smelt.models.families.family import (
    Attention,
    Config,
    Family,
    FeedForward,
    PositionEncoding,
    PublishedLearningRate,
    ResidualStream,
    Stack,
)
from smelt.models.families.roberta import ROBERTA_TOKENIZER


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the encoder's blocks."""
    at = "attention.attn"
    attention = Attention(
        at,
        query=f"{at}.q",
        key=f"{at}.k",
        value=f"{at}.v",
        out=f"{at}.o",
        heads_attribute="num_attention_heads",
        head_dim_attribute="attention_head_size",
        all_head_size_attribute="all_head_size",
        heads_key="num_attention_heads",
        scale_attribute="width",
        relative_bias="given",
        fixed_heads_reason="all layers share one bias with a column for each head",
        uses_attention_interface=False,
    )
    block = FeedForward("", "intermediate.dense", "output.dense", "intermediate_size", "hidden_act")
    embeddings = "mpnet.embeddings"
    stream = ResidualStream(
        (f"{embeddings}.word_embeddings.weight", f"{embeddings}.position_embeddings.weight"),
        part_norms=("attention.LayerNorm", "output.LayerNorm"),
        pre_norm=False,
        embedding_norm=f"{embeddings}.LayerNorm",
    )
    return (Stack("layers", "num_hidden_layers", "mpnet.encoder.layer", (attention,), block, stream),)


FAMILY = Family(
    name="mpnet",
    architecture="encoder",
    tasks=("text-classification", "sentence-similarity"),
    stacks=stacks,
    embedding_suffixes=("word_embeddings.weight",),
    hidden_size_key="hidden_size",
    learning_rate=PublishedLearningRate(2e-5, 768),  # Song et al. 2020, appendix: 1e-5 to 3e-5
    head_modules=("classifier.dense", "classifier.out_proj"),
    position_encoding=PositionEncoding(offset_by_pad_id=True),
    tokenizer_spec=ROBERTA_TOKENIZER,
    unused_tensors=(r"(.+\.)?embeddings\.position_ids", r"(mpnet\.)?pooler\.dense\.(weight|bias)"),
    other_head_tensors=(r"lm_head\..+", r"qa_outputs\..+"),
)
