"""DistilBERT. Source: transformers' modeling_distilbert.py."""

from __future__ import annotations

from dataclasses import replace

from smelt.models.families.bert import BERT_TOKENIZER, POSITION_IDS_TENSORS
from smelt.models.families.family import (
    Attention,
    Config,
    Family,
    FeedForward,
    PublishedLearningRate,
    ResidualStream,
    Stack,
)


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the encoder's blocks."""
    at = "attention"
    attention = Attention(
        at,
        query=f"{at}.q_lin",
        key=f"{at}.k_lin",
        value=f"{at}.v_lin",
        out=f"{at}.out_lin",
        heads_attribute="n_heads",
        head_dim_attribute="attention_head_size",
        heads_key="n_heads",
    )
    block = FeedForward("ffn", "ffn.lin1", "ffn.lin2", "hidden_dim", "activation")
    embeddings = "distilbert.embeddings"
    stream = ResidualStream(
        (f"{embeddings}.word_embeddings.weight", f"{embeddings}.position_embeddings.weight"),
        part_norms=("sa_layer_norm", "output_layer_norm"),
        pre_norm=False,
        embedding_norm=f"{embeddings}.LayerNorm",
    )
    return (Stack("layers", "n_layers", "distilbert.transformer.layer", (attention,), block, stream),)


FAMILY = Family(
    name="distilbert",
    architecture="encoder",
    tasks=("text-classification", "sentence-similarity"),
    stacks=stacks,
    embedding_suffixes=("word_embeddings.weight",),
    hidden_size_key="dim",
    learning_rate=PublishedLearningRate(5e-5, 768),  # as BERT's
    head_modules=("pre_classifier", "classifier"),
    tokenizer_spec=replace(BERT_TOKENIZER, uses_token_types=False),
    unused_tensors=(POSITION_IDS_TENSORS,),
    other_head_tensors=(r"vocab_(transform|layer_norm|projector)\..+", r"qa_outputs\..+"),
)
